"""Several processes: the same updates however weights lie, one agreement, and failures that end well."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import configure
import train
from lib import parallel
from lib.files import UserError
from model import Qwen2Config, init_student, load_tokenizer
from tests.test_train import ROOT, SEQ, TIMED, TOKENIZER, V, final_bits, handlers, records, write_rows  # noqa: F401

METHODS = ("vanilla_kd", "alra")
# Every part of its weights on 4 processes is a multiple of 16 numbers: AdamW rounds the rest of a vector register otherwise.
SHAPE = Qwen2Config(64, 96, 2, 4, 4, vocab_size=V, rope_theta=1e4)
SHAPE_T = Qwen2Config(24, 32, 2, 2, 2, vocab_size=V, tie_word_embeddings=False, rope_theta=1e4)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, other data of the same size, a teacher and a student's shape."""
    root = tmp_path_factory.mktemp("world")
    for folder, seed in (("data", 1), ("data0", 1), ("data1", 3), ("data2", 1), ("data3", 1)):
        write_rows(root / folder, "train", 97, seed=seed)
        write_rows(root / folder, "val", 7, seed=2)
    teacher = init_student(SHAPE_T, seed=7)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(8.0)  # far from uniform
    teacher.save_pretrained(root / "teacher", load_tokenizer(TOKENIZER))
    init_student(SHAPE).save_pretrained(root / "student")
    torch.manual_seed(3)
    keys = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=V, hidden_size=24, intermediate_size=48, **keys)).save_pretrained(
        root / "foreign"
    )
    load_tokenizer(TOKENIZER).save_pretrained(root / "foreign")
    return root


def flags(world: Path, out: Path, **changes) -> list[str]:
    keys = {"methods": ",".join(METHODS), "student": world / "student", "teacher": world / "teacher", "out_dir": out,
            "data_dir": world / "data", "seq_len": SEQ, "max_steps": 4, "schedule_steps": 4, "warmup_steps": 2, "batch_rows": 8,
            "micro_batch": 1, "lr": 1e-2, "log_every_steps": 3, "val_every_steps": 2, "checkpoint_every_steps": 2,
            "histogram_every_steps": 2, "alra.d_max": 7, "device": "cpu", **changes}  # fmt: skip
    return [f"--{k}={v}" for k, v in keys.items()]


def torchrun(n: int, *command: str, options: tuple = ()) -> subprocess.Popen:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={n}",
        *options,
        *command,
    ]
    return subprocess.Popen(launch, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen, n: int | None = 0) -> str:
    """All that it says, once it has ended with exit code `n`."""
    text, _ = process.communicate(timeout=600)
    assert process.returncode == n, text
    return text


def apart(a: Path, b: Path, method: str, kind: str = "model", step: int = 4) -> float:
    """How far two runs' weights are from each other, relative, in norm."""
    a, b = (
        safetensors.torch.load_file(folder / method / "checkpoints" / f"step_{step:08d}" / f"{kind}.safetensors")
        for folder in (a, b)
    )
    assert a.keys() == b.keys()
    a, b = (torch.cat([of[name].flatten() for name in sorted(of)]).double() for of in (a, b))
    return float((a - b).norm() / a.norm())


def same(a: dict, b: dict, rel: float) -> None:
    assert a.keys() == b.keys()
    assert all(a[key] == b[key] or a[key] == pytest.approx(b[key], rel=rel) for key in a if key not in TIMED)


FOREIGN = {"methods": "alra", "max_steps": 1, "checkpoint_every_steps": 1, "val_every_steps": 1}
DIFFERENT = {
    "lr": ("0.0{rank}1", r"lr: 0\.001 on process 0, 0\.011 on process 1; give all processes the same"),
    "data_dir": ("WORLD/data{rank}", r"data: train1 on process 0, train3 on process 1"),
}


@pytest.fixture(scope="module")
def four(world, tmp_path_factory):
    """Runs of four processes, and what these say."""
    root = tmp_path_factory.mktemp("four")
    runs = [flags(world, root / "hooks"), flags(world, root / "late"), flags(world, root / "four", shard=4),
            flags(world, root / "two", shard=2, micro_batch=8), *2 * [flags(world, root / "cut", shard=2, micro_batch=2)]]  # fmt: skip
    runs.append(flags(world, root / "foreign", shard=2, **FOREIGN, teacher=world / "foreign"))
    for key, (value, _) in DIFFERENT.items():
        value = value.replace("OUT", str(root / "bad")).replace("WORLD", str(world))
        runs.append(flags(world, **{"out": root / "bad" / key, key: value}))
    (root / "runs.json").write_text(json.dumps(runs))
    return root, said(torchrun(4, "tests/several.py", str(root / "runs.json")))


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """The run of one process."""
    root = tmp_path_factory.mktemp("alone")
    assert train.distil(configure.load(flags(world, root))) == 0
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hooks", "two", "four"])
def test_processes_and_shards_change_nothing_but_the_order_of_sums(four, alone, name):
    """After one update Adam's first moment is the gradient times 0.1, clipped."""
    root, _ = four
    for method in METHODS:
        for kind in ("model", "optimizer"):
            assert apart(alone, root / name, method, kind) < 1e-6, (method, kind)
        one, many = (records(folder, method) for folder in (alone, root / name))
        assert [r["step"] for r in one] == [r["step"] for r in many]
        for a, b in zip(one, many, strict=True):
            same(a, b, 1e-6)


@pytest.mark.slow
def test_sums_that_start_in_the_backward_pass_change_no_bit_and_spread_weights_neither(four):
    root, _ = four
    for method in METHODS:
        assert final_bits(root / "hooks", method, 4) == final_bits(root / "late", method, 4)
        assert final_bits(root / "hooks", method, 4) == final_bits(root / "four", method, 4)


@pytest.mark.slow
def test_a_micro_batch_is_lowered_to_a_processs_share_and_kept_as_it_was_asked_for(four):
    root, text = four
    assert text.count("micro_batch=8: lowered to 2, the most that fits 4 processes; the result is the same") == 1
    assert json.loads((root / "two" / "run.json").read_text())["config"]["micro_batch"] == 2


@pytest.mark.slow
def test_a_process_holds_its_part_of_the_weights(four):
    _, text = four
    held = re.findall(r"process 1: (\d+) of (\w+) in (\w+)", text)
    n, layers, others = (
        init_student(SHAPE).n_params,
        2 * (4 * 24 * 24 + 3 * 24 * 32 + 5 * 24),
        2 * V * 24 + 24,
    )  # the teacher's embedding, head, norm
    for name, shard in (("hooks", 1), ("cut", 2), ("two", 2), ("four", 4)):
        assert {(int(m), kind) for m, kind, run in held if run == name} == {
            (n // shard, "Student"),
            (layers // shard + others, "Teacher"),
        }


@pytest.mark.slow
def test_spread_weights_are_resumed_with_the_same_bits_and_anywhere(four, alone, world, tmp_path):
    root, _ = four
    shutil.copytree(root / "two", tmp_path / "two")
    for method in METHODS:
        assert final_bits(root / "cut", method, 4) == final_bits(root / "two", method, 4)
        shutil.rmtree(tmp_path / "two" / method / "checkpoints" / "step_00000004")
        (tmp_path / "two" / method / "run.json").unlink()  # with it the run has ended
    assert train.distil(configure.load(flags(world, tmp_path / "two"))) == 0  # one process goes on
    for method in METHODS:
        assert apart(root / "two", tmp_path / "two", method) < 1e-6
        for out, rel in ((root / "cut", 1e-12), (tmp_path / "two", 1e-6)):  # both were cut between two lines of the log
            for a, b in zip(records(root / "two", method), records(out, method), strict=True):
                same(a, b, rel)
            n = [json.loads((of / method / "run.json").read_text())["valid_tokens"] for of in (alone, out)]
            assert n[0] == n[1] > 0


@pytest.mark.slow
def test_a_teacher_that_transformers_computes_is_spread_too(four, world, tmp_path):
    root, text = four
    assert train.distil(configure.load(flags(world, tmp_path, **FOREIGN, teacher=world / "foreign"))) == 0
    for kind in ("model", "optimizer"):
        assert apart(tmp_path, root / "foreign", "alra", kind, step=1) < 1e-6
    layers, others = 2 * (4 * 24 * 24 + 2 * 24 * 48 + 48 + 9 * 24), 2 * V * 24 + 2 * 24
    assert f"process 1: {layers // 2 + others} of Teacher in foreign" in text


@pytest.mark.slow
def test_histograms_and_held_out_figures_are_those_of_one_process(four, alone):
    root, _ = four
    for name in ("hooks", "two"):
        for file in ("teacher.jsonl", "alra/histograms.jsonl"):
            first, second = ((folder / file).read_text().splitlines()[0] for folder in (alone, root / name))
            same(json.loads(first), json.loads(second), 1e-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": 2}, r"^shard=2: expected a divisor of the 1 processes; start more of them, or set it$"),
        ({"shard": 2, "teacher_device": "cpu"}, r"^teacher_device=cpu: not with shard=2"),
        ({"timeout_minutes": 0}, r"^timeout_minutes=0\.0: expected more than 0$"),
    ],
)
def test_what_cannot_be_spread_is_refused(world, tmp_path, changes, message):
    with pytest.raises(configure.UserError, match=message):
        train.distil(configure.load(flags(world, tmp_path, **changes)))
    assert not list(tmp_path.iterdir())


# --- what all processes must hold


def test_a_fact_that_differs_is_one_line_with_both_values(monkeypatch):
    monkeypatch.setattr(parallel, "everyones", lambda mine: [mine, mine, {**(mine or {}), "step": 0}])
    parallel.agree(data="abc")
    with pytest.raises(UserError, match=r"^step: 40 on process 0, 0 on process 2; give all processes the same$"):
        parallel.agree(data="abc", step=40)
    monkeypatch.setattr(parallel, "rank", lambda: 1)
    with pytest.raises(SystemExit) as end:
        parallel.agree(data="abc", step=40)
    assert end.value.code == 1


@pytest.mark.slow
@pytest.mark.parametrize("key", DIFFERENT)
def test_processes_that_differ_are_refused_before_anything_is_written(four, key):
    root, text = four
    assert len(re.findall(rf"^\w*Error: {DIFFERENT[key][1]}", text, re.M)) == 1
    assert len(re.findall(r"^\w*Error: ", text, re.M)) == len(DIFFERENT), text
    assert text.count("exit codes [1, 1, 1, 1]") == len(DIFFERENT)
    assert [path for path in (root / "bad").rglob("*") if path.is_file()] == []


# --- ends


def test_each_start_waits_as_long_as_it_is_told_and_has_keys_of_its_own(monkeypatch):
    """torchrun keeps its store over a restart: addresses of processes that have ended stand there."""
    store, made = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(store, 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **keys: made.append(keys))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for n in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(n))
        parallel.start(torch.device("cpu"), 2.5)
        made[n]["store"].set("address", str(n))
    assert [keys["store"].get("address") for keys in made] == [b"0", b"1"]
    assert [(keys["timeout"], keys["rank"], keys["world_size"]) for keys in made] == [
        (timedelta(minutes=2.5), 1, 2)
    ] * 2


@pytest.mark.slow
def test_torchrun_starts_all_again_after_a_kill_and_ends_with_a_checkpoint(world, tmp_path):
    """The second start goes on from a checkpoint, and SIGTERM to torchrun ends it with another one."""
    keys = {"methods": "alra", "max_steps": 50_000, "schedule_steps": 50_000, "repeat_rows": True, "val_every_steps": 50_000,
            "checkpoint_every_steps": 3, "histogram_every_steps": "none"}  # fmt: skip
    options = ["--max_restarts=1", "--monitor_interval=0.1"]
    process = torchrun(2, "train.py", *flags(world, tmp_path / "cut", **keys), options=options)
    lines = []

    def until(word: str) -> None:
        while not lines or word not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)

    until("step 6/")
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(found.stdout.split()[1]), signal.SIGKILL)
    until(": step ")
    until("/50000")
    process.send_signal(signal.SIGTERM)
    lines.append(said(process, 1))
    text = "".join(lines)
    assert "step 6/" in text
    step = int(re.search(r"at step (\d+) of", text)[1])
    keys = {**keys, "max_steps": step, "checkpoint_every_steps": step}
    assert train.distil(configure.load(flags(world, tmp_path / "whole", **keys))) == 0
    assert (
        apart(tmp_path / "cut", tmp_path / "whole", "alra", step=step) < 1e-4
    )  # an update that is lost or made twice: 1e-2
