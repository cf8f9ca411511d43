"""tools/bench.py: its numbers are measured, and one command runs each section."""

import importlib
import re

import pytest
import torch

from lib.device import pick_device
from run import methods
from tests.world import ROOT, read_table, refusal
from tools import bench

CPU = torch.device("cpu")
TINY = "--models=demo_teacher,mini"
needs_peak = pytest.mark.skipif(not bench.PEAK.exists(), reason="no peak memory is known here")


def test_ratios_are_those_of_the_rounds():
    slow = [(6.0, 9.0), (8.0, 9.0), (3.0, 9.0)]
    fast = [(2.0, 6.0)] * 3
    assert bench.row("fast", fast, slow) == "| fast | 3.00 [1.50, 4.00] | 1.50 | 2.0000 | 6 |"


@needs_peak
def test_memory_is_the_peak_and_not_what_is_left():
    _, mib = bench.measure(lambda: torch.ones(64 * 2**18).sum() and None, CPU, 1)  # 64 MiB
    assert 60 < mib < 80


def test_one_command_runs_every_case(monkeypatch, printed):
    """Nothing is compiled, which would take a minute; test_head.py compiles."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, **_: compiled.append(fn) or fn)
    methods.compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=256):  # the methods set it for good
        bench.main(["fused", "--device=cpu", TINY, "--n=13", "--repeats=1"])
    methods.compiled.cache_clear()
    assert len(compiled) == 1  # `evaluate`, for all methods: `compile` reaches the objectives
    cases = [line.split(" | ")[0] for line in printed().splitlines()[4:]]
    assert cases == ["| products alone", "| alra, not compiled", "| alra", "| vanilla_kd"]


def test_the_first_hour_is_rehearsed(tmp_path, monkeypatch, printed):
    """Scripts run in this process. The tests that need a GPU are only started."""
    scripts = []

    def call(command):
        _, script, *argv = command
        scripts.append(script)
        if script == "-m":
            assert argv == ["pytest", "-q", "-m", "gpu", "tests"]
            return
        flags = [flag for flag in map(str, argv) if not flag.startswith("--n_documents")]
        short = ["--n_documents=40", "--val_max_rows=2"]
        assert not importlib.import_module(script.removesuffix(".py")).main([*flags, *short])

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench.subprocess, "check_call", call)
    bench.main(["gpu", "--device=cpu", TINY, "--n=13", "--rows=2", f"--out={tmp_path}/gpu"])
    assert scripts == ["-m", "prepare.py", "train.py", "train.py"]
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d,]+) \| nan% \| (\d+\.\d) \|$", printed(), re.M)
    assert [row[:2] for row in rows] == [("mini", "alra"), ("mini", "vanilla_kd")]
    assert all(int(rate.replace(",", "")) > 0 and float(gib) > 0 for *_, rate, gib in rows)


# device, cards that torch sees, processes, visible cards => the last process's card, or why none
CARDS = """
cuda 1 2 all => torch finds 1 CUDA devices for 2 processes
cuda 0 1 all => without a card, train.py runs with --device=cpu --compile=False
cuda:1 2 2 all => device=cuda:1: 2 processes would share it; set cuda
cuda:2 2 1 all => torch finds 2 CUDA devices
cuda 2 2 all => cuda:1
auto 2 2 all => cuda:1
cuda 1 2 1 => cuda:0
cuda 2 2 0,1 => cuda:1
cuda:1 2 1 all => cuda:1
"""


@pytest.mark.parametrize(("node", "expected"), read_table(CARDS))
def test_cards_are_those_of_the_process(node, expected, monkeypatch):
    name, n, processes, visible = node.split()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n != "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(n))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_RANK", f"{int(processes) - 1}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible == "all":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if expected.startswith("cuda"):
        assert str(pick_device(name)) == expected
    else:
        with refusal(expected):
            bench.main(["gpu", f"--device={name}"])
