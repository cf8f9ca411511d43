"""tools/bench.py: its numbers are measured, and one command runs it all."""

import functools
import signal

import pytest
import torch

from model import Qwen2
from run import methods
from tests.world import refusal
from tools import bench

FLAGS = ["--device=cpu", "--repeats=3"]
FUSED = bench.arguments(["fused", *FLAGS])
TINY = ["--n=13", "--rows=2", "--repeats=1", "--student=mini", "--teacher=demo_teacher"]
needs_peak = pytest.mark.skipif(not bench.PROCESS.exists(), reason="no peak memory is known here")


@pytest.fixture(autouse=True)
def no_gc(monkeypatch):
    """Most of the time of a tiny case."""
    monkeypatch.setattr(bench.gc, "collect", lambda *_: 0)


def test_ratios_are_those_of_the_rounds(monkeypatch):
    clock = [0.0]
    slow = iter([99.0, 6.0, 8.0, 3.0])  # the warm-up and three rounds
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def advance(sec):
        clock[0] += sec

    cases = {"slow": lambda: advance(next(slow)), "fast": lambda: advance(2.0)}
    results = bench.measure(cases, FUSED)
    assert results["slow"]["sec"] == [6.0, 8.0, 3.0]
    results["slow"]["mib"] = [9.0] * 3
    results["fast"]["mib"] = [6.0] * 3
    line = bench.row("x", "slow", results, "fast", "note")
    assert (
        line == "| x | slow | fast | 3.00 [1.50, 4.00] | 1.50 | 6.000 [3.000, 8.000] | 9 | note |"
    )


@needs_peak
def test_memory_is_the_peak_and_not_what_is_left():
    cases = {"case": lambda: torch.ones(64 * 2**18).sum() and None}  # 64 MiB
    results = bench.measure(cases, FUSED)
    assert all(60 < mib < 80 for mib in results["case"]["mib"])


@needs_peak
def test_the_memory_of_a_step_counts_all_that_it_holds(monkeypatch):
    def holding(method, x, y, args):
        held = torch.ones(64 * 2**18)  # 64 MiB
        return lambda: held[:9].sum()

    for name in ("train_step", "transformers_step"):
        monkeypatch.setattr(bench, name, holding)
    lines = bench.bench_step(bench.arguments(["step", *FLAGS, *TINY]))
    assert len(lines) == 4
    assert all(60 < int(line.split(" | ")[6]) < 80 for line in lines)


def test_one_command_runs_every_section(tmp_path, monkeypatch, printed):
    """Nothing is compiled, which would take a minute; test_head.py compiles."""
    compiled = []
    layers = []  # of the models whose layers are compiled
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in signals]
    forgetful = functools.lru_cache(methods._compiled.__wrapped__)
    monkeypatch.setattr(methods, "_compiled", forgetful)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: compiled.append(fn) or fn)
    monkeypatch.setattr(Qwen2, "compile_layers", lambda model: layers.append(model))
    with torch._dynamo.config.patch(recompile_limit=256):  # the methods set it for good
        bench.main(["gpu", "--device=cpu", *TINY, f"--out={tmp_path / 'small.md'}"])
    assert len(compiled) == 2  # one for each method: `compile` reaches the objectives
    assert len(layers) == 4
    text = (tmp_path / "small.md").read_text()
    cells = [line.strip("| ").split(" | ")[:3] for line in text.splitlines()[4:]]
    assert cells == [
        ["fused", "alra", "products alone"],
        ["fused", "alra", "vanilla_kd"],
        ["fused", "alra", "plain alra"],
        ["step", "transformers", "transformers"],
        ["step", "vanilla_kd", "transformers"],
        ["step", "alra", "transformers"],
        ["step", "alra", "vanilla_kd"],
    ]
    assert text.startswith("Commit ") and f"'torch': '{torch.__version__}'" in text
    assert "tokens/s" in text and printed().endswith(f"{text}\n")
    assert [signal.getsignal(number) for number in signals] == handlers


def test_a_missing_card_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refusal(r"device=cuda: .*torch finds 1 CUDA devices for 2 processes"):
        bench.main(["gpu"])
