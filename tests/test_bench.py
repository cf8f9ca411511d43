"""tools/bench.py: its numbers are measured. tools/gpu.py: its parts run, and do not cost others."""

import re

import pytest
import torch

import train
from lib.device import pick_device
from run import methods
from tests.world import read_table, refusal
from tools import bench, gpu

CPU = torch.device("cpu")
TINY = ["--teacher=demo_teacher", "--student=mini"]
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
        monkeypatch.setattr(bench, "ROUNDS", 1)
        bench.main(["--device=cpu", *TINY, "--seq_len=13"])
    methods.compiled.cache_clear()
    assert len(compiled) == 1  # `evaluate`, for all methods: `compile` reaches the objectives
    cases = [line.split(" | ")[0] for line in printed().splitlines()[4:]]
    assert cases == ["| products alone", "| alra, not compiled", "| alra", "| vanilla_kd"]


def test_a_part_that_hangs_or_fails_leaves_the_others(monkeypatch, capfd):
    parts = "hangs 1 -m http.server 0\nfails 60 -c print('{device}');1/0\nlast 60 -c 0"
    monkeypatch.setattr(gpu, "PARTS", parts)
    gpu.main(["--device=cpu"])
    printed = capfd.readouterr().out
    assert re.findall(r"(\w+): exit code (\d+)", printed) == [
        ("hangs", "124"),
        ("fails", "1"),
        ("last", "0"),
    ]
    assert "\ncpu\n" in printed


def test_cases_of_a_method_make_the_same_updates(monkeypatch, printed):
    monkeypatch.setattr(gpu, "CASES", "part 200m alra 2048 -\npart 500m alra 512 graph\n")
    monkeypatch.setattr(train, "clip_gradients", train.clip_gradients)  # which the cases replace
    gpu.main(["--tiny", "--device=cpu", "part"])
    text = printed()
    rows = re.findall(r"^\| ([25]00m .*?) \| .* \| (\S+ \| \S+) \|$", text, re.M)
    assert [name for name, _ in rows] == 3 * ["200m alra 2048 -", "500m alra 512 graph"]
    numbers = torch.tensor([[float(x) for x in figures.split(" | ")] for _, figures in rows])
    torch.testing.assert_close(numbers, numbers[:1].expand_as(numbers), rtol=1e-5, atol=1e-5)
    assert "Self CPU time total" in text  # of the profile


# device, cards that torch sees, processes, visible cards => the last process's card, or why none
CARDS = """
cuda 1 2 all => torch finds 1 CUDA devices for 2 processes
cuda 0 1 all => without a card, train.py runs with --device=cpu --compile=False
cuda:1 2 2 all => device=cuda:1: expected cpu, or cuda with a card for each process
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
            bench.main([f"--device={name}"])
