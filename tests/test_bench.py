"""tools/bench.py: its yardstick computes what the objective computes, and its numbers are measured."""

import functools
import signal
from pathlib import Path

import pytest
import torch

import losses
from lib.errors import UserError
from model import Qwen2
from run import methods
from tests.test_losses import case
from tools import bench

needs_peak = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system reports no peak memory")


def test_the_obvious_implementation_is_the_same_loss():
    z_s, z_t, y = case(n=29, v=211, ignored=())
    gradients = []
    for loss in (bench.eager_alra, lambda *z: losses.method_loss("alra", *z)[0]):
        z = z_s.clone().requires_grad_()
        value = loss(z, z_t, y)
        gradients.append((value.detach(), *torch.autograd.grad(value, z)))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_ratios_are_those_of_the_rounds(monkeypatch):
    clock, slow = [0.0], iter([99.0, 6.0, 8.0, 3.0])  # the warm-up and three rounds
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def advance(sec):
        clock[0] += sec

    cases = {"slow": lambda: advance(next(slow)), "fast": lambda: advance(2.0)}
    results = bench.measure(cases, 3, torch.device("cpu"))
    assert results["slow"]["sec"] == [6.0, 8.0, 3.0]
    results["slow"]["mib"], results["fast"]["mib"] = [9.0] * 3, [6.0] * 3
    line = bench.row("x", "slow", results, "fast", "note")
    assert line == "| x | slow | fast | 3.00 [1.50, 4.00] | 1.50 | 6.000 [3.000, 8.000] | 9 | note |"
    assert bench.row("x", "fast", results, "none") == "| x | fast |  |  |  | 2.000 [2.000, 2.000] | 6 |  |"


@needs_peak
def test_memory_is_the_peak_and_not_what_is_left():
    results = bench.measure({"case": lambda: torch.ones(64 * 2**18).sum() and None}, 3, torch.device("cpu"))  # 64 MiB
    assert all(60 < mib < 80 for mib in results["case"]["mib"])


@needs_peak
def test_a_case_that_is_made_alone_counts_all_that_it_holds():
    def held():
        x = torch.ones(64 * 2**18)  # 64 MiB
        return lambda: x[:9].sum()

    def too_large():
        raise torch.OutOfMemoryError("full")

    args = bench.arguments(["steps", "--repeats=2"])
    results = bench.measure_alone({"held": held, "too large": too_large}, args, torch.device("cpu"))
    assert list(results) == ["held"] and len(results["held"]["sec"]) == 2
    assert 60 < results["held"]["mib"][0] < 80
    args.end = 0.0
    assert not bench.measure_alone({"held": held}, args, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")  # of the profiler
def test_one_command_runs_every_section(tmp_path, monkeypatch):
    """Nothing is compiled, which would take a minute; test_fused.py compiles."""
    compiled, before = [], [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    monkeypatch.setattr(Qwen2, "compile_layers", lambda model: None)
    monkeypatch.setattr(methods, "_compiled", functools.lru_cache(methods._compiled.__wrapped__))  # forgotten afterwards
    monkeypatch.setitem(bench.SECTIONS, "tests", lambda args, device: ["| tests |"])
    monkeypatch.setattr(bench.gc, "collect", lambda *_: 0)  # most of the time of a tiny case
    with torch._dynamo.config.patch(recompile_limit=256):  # losses sets it for good
        bench.main(["gpu", "--tiny", "--device=cpu", f"--out={tmp_path / 'small'}"])
    assert len(compiled) == 2  # one for each method: `compile` reaches the objectives
    lines = [line.split(" | ") for line in (tmp_path / "small.md").read_text().splitlines() if line.startswith("| ")]
    sections = ["| tests |", *["| fused"] * 5, *["| step"] * 2, *["| steps"] * 5, "| profile"]
    assert [line[0] for line in lines[1:]] == sections
    assert {line[1] for line in lines if line[0] == "| steps"} >= {"all 2", "alra, not compiled", "alra, row by row"}
    assert "aten::mm" in (tmp_path / "small.txt").read_text()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_missing_card_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="gpu: expected a CUDA device; run it on such a machine, or add --tiny"):
        bench.main(["gpu"])
