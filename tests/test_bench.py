"""bench.py: its yardsticks compute what the objectives compute, and its numbers are measured."""

import functools
import json
import signal
from pathlib import Path

import bench
import pytest
import torch
from lib.roofline import estimate

import losses
from lib.files import UserError
from model import Qwen2
from tests.plain import method_loss


@pytest.mark.parametrize(("name", "eager"), [("alra", bench.eager_alra), ("vanilla_kd", bench.eager_vanilla_kd)])
def test_the_obvious_implementation_is_the_same_loss(name, eager):
    z_s, z_t, y = (
        z.double() if z.is_floating_point() else z for z in bench.random_logits(29, 211, torch.device("cpu"))
    )
    grads = []
    for loss in (lambda z: eager(z, z_t, y), lambda z: method_loss(name, z, z_t, y)[0]):
        z = z_s.clone().requires_grad_()
        value = loss(z)
        grads.append((value.item(), torch.autograd.grad(value, z)[0]))
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-7)
    assert torch.allclose(grads[0][1], grads[1][1], rtol=1e-5, atol=1e-9)


def test_ratios_are_of_what_was_measured(monkeypatch):
    clock, slow = [0.0], iter([99.0, 6.0, 8.0, 3.0])  # the warm-up and three rounds
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def advance(sec):
        clock[0] += sec

    cases = {"slow": lambda: advance(next(slow)), "fast": lambda: advance(2.0)}
    found = bench.measure(cases, 3, torch.device("cpu"))
    line = bench.row("x", "slow", found, "fast")
    assert found["slow"]["sec"] == [6.0, 8.0, 3.0]
    assert (line["sec"], line["time_ratio"], line["time_ratio_range"]) == (6.0, 3.0, [1.5, 4.0])
    assert bench.row("x", "fast", found, None)["against"] is None


needs_peak = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak memory"
)


@needs_peak
def test_memory_is_the_peak_and_not_what_is_left():
    def case():
        torch.ones(64 * 2**18).sum()  # 64 MiB, gone afterwards

    found = bench.measure({"case": case}, 3, torch.device("cpu"))
    assert 60 < bench.row("x", "case", found, None)["mib"] < 80


@needs_peak
def test_of_a_case_that_is_made_alone_all_that_it_holds_counts():
    def held():
        x = torch.ones(64 * 2**18)  # 64 MiB
        return lambda: x[:9].sum()

    def too_large():
        raise torch.OutOfMemoryError("full")

    found = bench.measure_alone({"held": held, "too large": too_large}, 2, torch.device("cpu"))
    assert list(found) == ["held"] and len(found["held"]["sec"]) == 2
    assert 60 < bench.row("x", "held", found, None)["mib"] < 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_every_section_writes_a_table(tmp_path, monkeypatch):
    """Nothing is compiled, which would take a minute; test_fused.py compiles."""
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    monkeypatch.setattr(Qwen2, "compile_layers", lambda model: None)
    monkeypatch.setattr(losses, "_compiled", functools.lru_cache(losses._compiled.__wrapped__))  # forgotten afterwards
    monkeypatch.setattr(bench, "gpu_tests", lambda: bench.line("gpu tests", "", sec=1.0))
    monkeypatch.setattr(bench.gc, "collect", lambda *_: 0)  # most of the time of a tiny case
    out = tmp_path / "small"
    with torch._dynamo.config.patch(recompile_limit=256):  # losses sets it for good
        bench.run(["loss", "rows", "step", "steps", "gpu", "--tiny", "--device=cpu", f"--out={out}"])
    assert len(compiled) == 2  # one for each method: `compile` reaches the objectives
    lines = json.loads(out.with_suffix(".json").read_text())["lines"]
    parts = {"loss", "rows", "step", "steps", "gpu tests", "fused", "gpu step", "gpu pair", "gpu profile", "gpu nine"}
    assert {line["section"] for line in lines} == parts | {"roofline"}
    assert all(line["sec"] > 0 for line in lines if line["section"] != "gpu profile")
    steps = {line["case"] for line in lines if line["section"] == "gpu step"}
    assert steps == {f"mini, micro_batch {m}, {how}" for m in (1, 2) for how in ("eager", "compiled")}
    assert out.with_suffix(".md").read_text().count("\n| ") == len(lines) + 1


def test_a_card_that_is_not_there_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="gpu: expected a CUDA device, got cpu; run it where one is, or add --tiny"):
        bench.run(["gpu"])


def test_the_roofline_is_that_of_the_study():
    """Its estimates of the code as it was: 30 and 11 % of an H200 with the 500M student, 32 and 13 % with the 200M one."""
    before = {"rows": 16, "n": 512, "loss_gb": 2.99, "loss_launches": 51}
    for student, m, mfu in (("500m", 16, 0.305), ("500m", 1, 0.11), ("200m", 16, 0.32), ("200m", 1, 0.13)):
        sec, used, parts = estimate("H200", student, m, False, **before)
        assert used == pytest.approx(mfu, rel=0.05) and sum(parts.values()) == pytest.approx(sec)
    for card, bar in (("H200", 0.43), ("RTX 4090", 0.62)):
        assert estimate(card, "500m", 16, True, 16, 512, head_passes=0)[1] == pytest.approx(bar, rel=0.05)


def test_what_is_estimated_names_no_machine(tmp_path, capsys):
    """It is the same on every machine: its header must not read as if it had been measured on this one."""
    bench.run(["roofline", "--device=cpu", f"--out={tmp_path / 'out'}"])
    text = (tmp_path / "out.md").read_text()
    assert set(json.loads((tmp_path / "out.json").read_text())["machine"]) == {"commit", "date"}
    assert "Nothing is measured: 16 rows of 512" in text and "medians" not in text and text.count("\n| ") == 17


def test_a_signal_ends_the_benchmark():
    """Making a training step must not leave train.py's own handlers behind, which only take note."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    bench.our_step(("pretrain",), "mini", None, 1, 1, 7, torch.device("cpu"), compile=False)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_slips_are_named():
    with pytest.raises(ValueError, match="speed: expected one of loss, fused"):
        bench.arguments(["speed"])
    with pytest.raises(ValueError, match="compare with vanilla_kd; add it"):
        bench.arguments(["loss", "--methods=alra"])
