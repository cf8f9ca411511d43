"""tools/bench.py: its numbers are measured, and one command runs it all."""

import pytest
import torch

from run import methods
from tests.world import refusal
from tools import bench

CPU = torch.device("cpu")
TINY = ["--n=13", "--repeats=1", "--student=mini", "--teacher=demo_teacher"]
needs_peak = pytest.mark.skipif(not bench.PROCESS.exists(), reason="no peak memory is known here")


def test_ratios_are_those_of_the_rounds():
    slow = [(6.0, 9.0), (8.0, 9.0), (3.0, 9.0)]
    fast = [(2.0, 6.0)] * 3
    assert bench.row("fast", fast, slow) == "| fast | 3.00 [1.50, 4.00] | 1.50 | 2.000 | 6 |"


@needs_peak
def test_memory_is_the_peak_and_not_what_is_left():
    _, mib = bench.measure(lambda: torch.ones(64 * 2**18).sum() and None, CPU)  # 64 MiB
    assert 60 < mib < 80


def test_one_command_runs_every_case(monkeypatch, printed):
    """Nothing is compiled, which would take a minute; test_head.py compiles."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, **_: compiled.append(fn) or fn)
    methods._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=256):  # the methods set it for good
        bench.main(["--device=cpu", *TINY])
    methods._compiled.cache_clear()
    assert len(compiled) == 2  # one for each method: `compile` reaches the objectives
    text = printed()
    cases = [line.split(" | ")[0] for line in text.splitlines()[4:]]
    assert cases == ["| products alone", "| plain alra", "| alra", "| vanilla_kd"]
    assert text.startswith("Commit ") and f"'torch': '{torch.__version__}'" in text


def test_a_missing_card_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refusal(r"device=cuda: .*torch finds 1 CUDA devices for 2 processes"):
        bench.main(["--device=cuda"])
