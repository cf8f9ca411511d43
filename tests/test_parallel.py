"""Several processes compute what one computes: sums, sharded weights, resuming, and processes that differ or are lost."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import train
from lib import parallel
from lib.files import read_json
from lib.hf import load_tokenizer
from model import Qwen2Config, init_student
from tests import world
from tests.several import main
from tests.test_train import final_bits, records, untimed
from tests.world import DEMO, V, config, flags, make_model, read_jsonl, write_rows

METHODS = ("vanilla_kd", "alra")
# Each part of its weights on 2 processes is a multiple of 16 numbers: AdamW rounds the rest of a vector register otherwise.
STUDENT = Qwen2Config(64, 96, 2, 4, 4, vocab_size=V, rope_theta=1e4)
TEACHER = Qwen2Config(24, 32, 2, 2, 2, vocab_size=V, tie_word_embeddings=False, rope_theta=1e4)
KEYS = {"methods": ",".join(METHODS), "max_steps": 4, "schedule_steps": 4, "batch_rows": 8, "micro_batch": 1, "log_every_steps": 3,
        "val_every_steps": 2, "histogram_every_steps": 2}  # fmt: skip
SHORT = KEYS | {"methods": "alra", "max_steps": 2}
FOREIGN = {"methods": "alra", "max_steps": 1, "checkpoint_every_steps": 1, "val_every_steps": 1}
ENDLESS = {"methods": "alra", "max_steps": 50_000, "schedule_steps": 50_000, "repeat_rows": True, "val_every_steps": 50_000,
           "checkpoint_every_steps": 3, "histogram_every_steps": "none"}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Data, two teachers and a student's shape."""
    root = tmp_path_factory.mktemp("wide")
    write_rows(root / "data", "train", 97, seed=1)
    write_rows(root / "data", "val", 7, seed=2)
    make_model(TEACHER).save_pretrained(root / "teacher", load_tokenizer(DEMO))
    init_student(STUDENT).save_pretrained(root / "student")
    torch.manual_seed(3)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": V,
             "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).save_pretrained(root / "foreign")
    load_tokenizer(DEMO).save_pretrained(root / "foreign")
    return root


@pytest.fixture(scope="module")
def several(tiny, wide, tmp_path_factory):
    """Runs of two processes and of four -> their folder, and what they say."""
    root = tmp_path_factory.mktemp("several")
    sharded = KEYS | {"shard": 2, "micro_batch": 4}
    two = [flags(wide, root / "sums", **KEYS), flags(wide, root / "shard", **sharded | {"micro_batch": 8}),
           flags(wide, root / "cut", **sharded), flags(wide, root / "cut", **sharded),
           *(flags(wide, root / name, teacher_cache=True, **KEYS) for name in ("stores", "reads")),
           flags(wide, root / "foreign", **sharded | FOREIGN | {"teacher": wide / "foreign"}),
           flags(wide, root / "bad", **KEYS | {"lr": "0.0{rank}1"})]  # fmt: skip
    # parts of unequal size, as 4 does not divide the rows of these weights; and two copies of halves
    four = [flags(tiny, root / "uneven", **SHORT | {"shard": 4}), flags(tiny, root / "copies", **SHORT | {"shard": 2})]
    todo = {"nodes": flags(wide, root / "nodes", **KEYS | ENDLESS), "2": two, "4": four}
    process = world.start(main, todo, out=root / "said")
    process.join(600)
    assert process.exitcode == 0, (root / "said").read_text()
    return root, (root / "said").read_text()


@pytest.fixture(scope="module")
def alone(wide, tmp_path_factory):
    """The run of one process."""
    root = tmp_path_factory.mktemp("alone")
    assert train.distil(config(wide, root, **KEYS)) == 0
    return root


def distance(a: Path, b: Path, method: str, kind: str = "model", step: int = 4) -> float:
    """Of two runs' weights, relative, in norm."""
    file = f"{method}/checkpoints/step_{step:08d}/{kind}.safetensors".replace("/model.", "/model/model.")
    a, b = (safetensors.torch.load_file(folder / file) for folder in (a, b))
    assert a.keys() == b.keys()
    a, b = (torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double() for tensors in (a, b))
    return float((a - b).norm() / a.norm())


def close(a: dict, b: dict, rel: float) -> bool:
    return a.keys() == b.keys() and all(a[key] == b[key] or a[key] == pytest.approx(b[key], rel=rel) for key in a)


def same_log(a: Path, b: Path, method: str, rel: float) -> None:
    assert all(close(x, y, rel) for x, y in zip(untimed(a, method), untimed(b, method), strict=True))


def same_run(one: Path, many: Path, method: str, step: int = 4) -> None:
    """After one update Adam's first moment is the gradient times 0.1, clipped."""
    assert all(distance(one, many, method, kind, step) < 1e-6 for kind in ("model", "optimizer"))
    same_log(one, many, method, 1e-6)


@pytest.mark.slow
def test_two_processes_change_nothing_but_the_order_of_sums(several, alone):
    root, text = several
    for method in METHODS:
        for name in ("sums", "shard"):
            same_run(alone, root / name, method)
            for file in ("teacher.jsonl", "alra/histograms.jsonl"):
                first, second = (read_jsonl(folder / file)[0] for folder in (alone, root / name))
                assert close(first, second, 1e-8)
    assert text.count("micro_batch=8: lowered to 4 for 2 processes; the result is the same") == 1
    assert read_json(root / "shard" / "run.json")["config"]["micro_batch"] == 4


@pytest.mark.slow
def test_two_processes_share_stored_hidden_states(several):
    root, text = several
    for name in ("stores", "reads"):
        assert all(final_bits(root / name, method, 4) == final_bits(root / "sums", method, 4) for method in METHODS)
    assert "process 1: 0 of CachedTeacher in reads" in text and "process 1: 0 of CachedTeacher in stores" not in text


@pytest.mark.slow
def test_four_processes_hold_parts_of_unequal_size_and_copies(several, tiny, tmp_path):
    root, text = several
    assert train.distil(config(tiny, tmp_path, **SHORT)) == 0
    for name in ("uneven", "copies"):
        same_run(tmp_path, root / name, "alra", step=2)
    held = {int(n) for n in re.findall(r"process 1: (\d+) of Student in uneven", text)}
    n = init_student(world.STUDENT).n_params
    assert len(held) == 1 and n / 4 - 30 < held.pop() < n / 4 + 30


@pytest.mark.slow
def test_a_process_holds_its_part_of_the_weights(several):
    held = re.findall(r"process 1: (\d+) of (\w+) in (\w+)", several[1])
    layers, others = 2 * (4 * 24 * 24 + 3 * 24 * 32 + 5 * 24), 2 * V * 24 + 24  # the teacher's: embedding, head, norm
    for name, n in (("sums", 1), ("cut", 2), ("shard", 2)):
        wanted = {(init_student(STUDENT).n_params // n, "Student"), (layers // n + others, "Teacher")}
        assert {(int(m), kind) for m, kind, run in held if run == name} == wanted
    layers, others = 2 * (4 * 24 * 24 + 2 * 24 * 48 + 48 + 9 * 24), 2 * V * 24 + 2 * 24
    assert (str(layers // 2 + others), "Teacher", "foreign") in held


@pytest.mark.slow
def test_sharded_weights_are_resumed_with_the_same_bits_and_by_one_process(several, alone, wide, tmp_path):
    root, _ = several
    shutil.copytree(root / "shard", tmp_path / "shard")
    for method in METHODS:
        assert final_bits(root / "cut", method, 4) == final_bits(root / "shard", method, 4)
        shutil.rmtree(tmp_path / "shard" / method / "checkpoints" / "step_00000004")
    assert train.distil(config(wide, tmp_path / "shard", **KEYS)) == 0
    for method in METHODS:
        assert distance(root / "shard", tmp_path / "shard", method) < 1e-6
        for out, rel in ((root / "cut", 1e-12), (tmp_path / "shard", 1e-6)):  # both were cut between two log lines
            same_log(root / "shard", out, method, rel)
            n = [read_json(folder / method / "run.json")["valid_tokens"] for folder in (alone, out)]
            assert n[0] == n[1] > 0


@pytest.mark.slow
def test_a_teacher_that_transformers_computes_is_sharded_too(several, wide, tmp_path):
    assert train.distil(config(wide, tmp_path, **KEYS | FOREIGN | {"teacher": wide / "foreign"})) == 0
    for kind in ("model", "optimizer"):
        assert distance(tmp_path, several[0] / "foreign", "alra", kind, step=1) < 1e-6


@pytest.mark.slow
def test_processes_that_differ_are_refused_before_anything_is_written(several):
    root, text = several
    assert text.count("UserError: vanilla_kd, lr: 0.001 on process 0, 0.011 on process 1; expected the same") == 2, text
    assert text.count("exit codes [1, 1]") == 1 and text.count("Error: ") == 2 and not (root / "bad").exists()


def test_each_start_waits_as_long_as_it_is_told(monkeypatch):
    made = {}
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **keys: made.update(keys))
    monkeypatch.setattr(parallel, "name_start", lambda *args: "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    parallel.start(torch.device("cpu"), 2.5)
    assert (made["timeout"], made["rank"], made["world_size"]) == (timedelta(minutes=2.5), 1, 2)


def test_each_start_has_a_name_of_its_own_whatever_the_dead_have_left():
    """torchrun keeps its store over a restart."""
    store, names = dist.HashStore(), set()
    for n in range(3):
        store.queue_push("words", f"of one that was killed in start {n}")
        with ThreadPoolExecutor() as pool:
            its = {*pool.map(lambda rank: parallel.name_start(store, rank, 3), (2, 1, 0))}
        assert len(its) == 1 and not its & names
        names |= its
        store.queue_push("words", min(its))


@pytest.mark.slow
def test_two_nodes_of_which_one_loses_its_process_twice_go_on_from_a_checkpoint(several, wide, tmp_path):
    """Each node's torchrun counts its own restarts. SIGTERM ends the last start with another checkpoint."""
    root, text = several
    assert "nodes end with [1, 1]" in text
    step = max(int(path.name[5:]) for path in (root / "nodes/alra/checkpoints").glob("step_????????"))
    assert f"step {step} of {ENDLESS['max_steps']}; the same command resumes" in (root / "nodes.log").read_text()
    keys = KEYS | ENDLESS | {"max_steps": step, "checkpoint_every_steps": step}
    assert train.distil(config(wide, tmp_path, **keys)) == 0
    assert records(root / "nodes", "alra")[-1]["step"] <= step
    assert distance(root / "nodes", tmp_path, "alra", step=step) < 1e-4  # an update that is lost or made twice: 1e-2
