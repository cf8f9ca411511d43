"""Several processes compute what one computes, and survive or refuse what differs or is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, OlmoeConfig, OlmoeForCausalLM

from lib import parallel
from lib.files import read_json
from lib.hf import load_tokenizer
from model import Qwen2Config, init_student
from tests import several, world
from tests.world import (
    V,
    assert_same,
    distil,
    final_bits,
    flags,
    read_jsonl,
    untimed,
)

# Each part of its weights on 2 processes is a multiple of 16 numbers: AdamW rounds the rest of a
# vector register otherwise.
STUDENT = Qwen2Config(64, 96, 2, 4, 4, vocab_size=V, rope_theta=1e4)
TEACHER = Qwen2Config(24, 32, 2, 2, 2, vocab_size=V, tie_word_embeddings=False, rope_theta=1e4)
METHODS = ("vanilla_kd", "alra")
FLAGS = (
    "--methods=vanilla_kd,alra --max_steps=4 --schedule_steps=4 --batch_rows=8 --micro_batch=1 "
    "--log_every_steps=3 --val_every_steps=2 --histogram_every_steps=2"
)
SHORT = f"{FLAGS} --methods=alra --max_steps=2"
WITH_STATE = f"{FLAGS} --methods=vanilla_kd,alra,balanced_kl"
FOREIGN = f"{FLAGS} --methods=alra --max_steps=1 --checkpoint_every_steps=1"
ENDLESS = (
    f"{FLAGS} --methods=alra --max_steps=50000 --schedule_steps=50000 --val_every_steps=50000 "
    "--repeat_rows=True --checkpoint_every_steps=3 --histogram_every_steps=none"
)


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """Data, two teachers and a student's shape."""
    root = tmp_path_factory.mktemp("wide")
    shutil.copytree(tiny / "data", root / "data")
    tokenizer = load_tokenizer(world.TOKENIZER)
    world.make_model(TEACHER).save_pretrained(root / "teacher", tokenizer)
    init_student(STUDENT).save_pretrained(root / "student", tokenizer)
    (root / "data0").symlink_to(root / "data")
    (root / "teacher0").symlink_to(root / "teacher")
    shutil.copytree(root / "teacher", root / "teacher1")
    with (root / "teacher1/config.json").open("a") as file:
        file.write(" ")
    torch.manual_seed(3)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "vocab_size": V, "max_position_embeddings": 64}
    foreign = GPTNeoXConfig(**shape, bos_token_id=0, eos_token_id=0)
    GPTNeoXForCausalLM(foreign).save_pretrained(root / "foreign")
    # with a tied head, and frequencies of rotary embeddings in buffers
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    OlmoeForCausalLM(OlmoeConfig(**shape, **experts, **ids)).save_pretrained(root / "experts")
    for name in ("foreign", "experts"):
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def together(tiny, wide, tmp_path_factory):
    """The folder of runs of one process, of two and of four, and what they print."""
    root = tmp_path_factory.mktemp("several")
    sharded = "--shard=2 --micro_batch=4 --chunk_positions=7"
    foreign = f"{FOREIGN} --teacher={wide}/experts --student={wide}/foreign"
    one = {"alone": WITH_STATE, "foreign_alone": foreign}
    two = {
        "sums": WITH_STATE,
        "sums/torn/..": WITH_STATE,  # process 1 reads another checkpoint
        "shard": f"{FLAGS} --shard=2 --micro_batch=8 --chunk_positions=7",
        "cut": f"{FLAGS} {sharded}",
        "cut/": f"{FLAGS} {sharded}",  # resumes it
        "stores": f"{FLAGS} --methods=alra --teacher_cache=True --shard=2",
        "reads": f"{FLAGS} --methods=alra --teacher_cache=True",
        "foreign": f"{foreign} {sharded}",
        "bad": f"{FLAGS} --schedule_steps=11 --max_steps=1{{rank}}",
        "bad_teacher": f"{FLAGS} --teacher={wide}/teacher{{rank}}",
        "bad_data": f"{FLAGS} --data_dir={wide}/data{{rank}}",
    }
    four = {
        "uneven": f"{SHORT} --shard=4",  # 4 does not divide the rows of these weights
        "copies": f"{SHORT} --shard=2",  # two copies of halves
    }
    todo = {
        1: [flags(wide, f"{root}/{name}", text) for name, text in one.items()],
        2: [flags(wide, f"{root}/{name}", text) for name, text in two.items()],
        4: [flags(tiny, root / name, text) for name, text in four.items()],
    }
    process = world.start(several.main, root, todo, out=root / "output")
    process.join(600)
    text = (root / "output").read_text()
    assert process.exitcode == 0, text
    return root, text


def vector(run, method, kind, step):
    """All weights of a checkpoint, or all moments, in a row."""
    folder = run / method / f"checkpoints/step_{step:08d}"
    if kind == "optimizer":
        tensors = world.moments(folder)
    else:
        tensors = safetensors.torch.load_file(folder / "model/model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


def distance(a, b, method, kind="model", step=4):
    """The distance of two runs' weights, relative, in norm."""
    x = vector(a, method, kind, step)
    return float((x - vector(b, method, kind, step)).norm() / x.norm())


def assert_close(a, b, rel):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key] == b[key] or a[key] == pytest.approx(b[key], rel=rel), key


def assert_same_log(a, b, method, rel):
    for x, y in zip(untimed(a, method), untimed(b, method), strict=True):
        assert_close(x, y, rel)


# Sums over V = 512 tokens in another order differ by eps sqrt(V) = 3e-6. Adam divides two.
ROUNDING = 2e-5


def assert_same_weights(one, many, method, step):
    """After one update Adam's first moment is the gradient times 0.1, clipped.

    Beside the moments are counts of updates, which have nearly all of the norm.
    """
    assert distance(one, many, method, "model", step) < ROUNDING
    assert distance(one, many, method, "optimizer", step) < 1e-6


def assert_same_run(one, many, method, step=4):
    assert_same_weights(one, many, method, step)
    assert_same_log(one, many, method, ROUNDING)


@pytest.mark.slow
def test_two_processes_change_nothing_but_the_order_of_sums(together):
    root, _ = together
    alone = root / "alone"
    for name in ("sums", "shard"):
        for method in METHODS:
            assert_same_run(alone, root / name, method)
        for file in ("teacher.jsonl", "alra/histograms.jsonl"):
            first = [read_jsonl(folder / file)[0] for folder in (alone, root / name)]
            assert_close(*first, 1e-8)
    assert_same_run(alone, root / "sums", "balanced_kl")
    state = world.state_of(alone, 4)
    assert world.state_of(root / "sums", 4) == pytest.approx(state, rel=1e-6)
    assert read_json(root / "shard/run.json")["config"]["micro_batch"] == 4


@pytest.mark.slow
def test_two_processes_share_stored_hidden_states(together):
    """Those of a sharded teacher too, which computes on both even if one has no row left."""
    root, text = together
    assert_same_run(root / "alone", root / "stores", "alra")
    assert_same(root / "reads", root / "sums", "alra", 4)
    assert "process 1: 0 of CachedTeacher in reads" in text


@pytest.mark.slow
def test_four_processes_hold_parts_of_unequal_size_and_copies(together, tiny, tmp_path):
    root, text = together
    distil(tiny, tmp_path, SHORT)
    for name in ("uneven", "copies"):
        assert_same_run(tmp_path, root / name, "alra", step=2)
    (held,) = re.findall(r"process 1: (\d+) of Student in uneven", text)
    assert abs(int(held) - world.n_params(init_student(world.STUDENT)) / 4) < 30


@pytest.mark.slow
def test_a_process_holds_its_part_of_the_weights(together):
    lines = re.findall(r"process 1: (\d+ of \w+ in \w+)", together[1])
    n_student = world.n_params(init_student(STUDENT))
    n_others = 2 * V * 24 + 24  # the teacher's embedding, head, norm
    n_layers = world.n_params(init_student(TEACHER)) - n_others
    for name, n in (("sums", 1), ("cut", 2), ("shard", 2)):
        students = f"{n_student // n} of Student in {name}"
        teacher = f"{n_layers // n + n_others} of Teacher in {name}"
        assert {line for line in lines if line.endswith(f" {name}")} == {students, teacher}
    n_layers = 2 * (4 * 24 * 24 + 4 * 24 + 4 * 24 + 4 * 3 * 24 * 48)  # with norms and routers
    assert f"{n_layers // 2 + V * 24 + 24} of Teacher in foreign" in lines


@pytest.mark.slow
def test_sharded_weights_are_resumed_with_the_same_bits_and_by_one_process(
    together, wide, tmp_path
):
    root, _ = together
    by_one = tmp_path / "shard"
    shutil.copytree(root / "shard", by_one)
    for method in METHODS:
        assert final_bits(root / "cut", method, 4) == final_bits(root / "shard", method, 4)
        shutil.rmtree(by_one / method / "checkpoints/step_00000004")
    distil(wide, by_one, FLAGS)
    for method in METHODS:
        assert distance(root / "shard", by_one, method) < 1e-6
        n_tokens = read_json(root / "alone" / method / "run.json")["valid_tokens"]
        # both were cut between two lines of the log
        for out, rel in ((root / "cut", 1e-12), (by_one, ROUNDING)):
            assert_same_log(root / "shard", out, method, rel)
            assert read_json(out / method / "run.json")["valid_tokens"] == n_tokens > 0


@pytest.mark.slow
def test_models_that_transformers_computes_are_sharded_too(together):
    """The first process alone reads the teacher, a mixture of experts."""
    root, _ = together
    assert_same_weights(root / "foreign_alone", root / "foreign", "alra", step=1)


@pytest.mark.slow
def test_processes_that_read_another_checkpoint_are_refused(together):
    """Process 0 decides from which one the run resumes."""
    root, text = together
    file = f"{root}/sums/torn/../vanilla_kd/checkpoints/step_00000004: model/model.safetensors"
    assert text.count(f"UserError: {file}: not as it was saved") == 1


@pytest.mark.slow
def test_processes_that_differ_are_refused_before_anything_is_written(together, wide):
    root, text = together
    problem = "max_steps: 10 on process 0, 11 on process 1"
    assert text.count(f"UserError: {problem}; expected the same") == 1
    problem = r"UserError: teacher_sha256: (\w+) on process 0, (?!\1)\w+ on process 1;"
    assert len(re.findall(problem, text)) == 1
    assert text.count("exit codes [1, 1]") == 4
    assert [path.name for path in (root / "bad").glob("[!.]*")] == ["exit.json"]
    # process 1 has no rows, and process 0 says so
    assert text.count("Error: ") == 4
    problem = f"{wide}/data1: no train.bin with train.json; run prepare.py with the config"
    assert f"UserError: {problem}\n" in text
    end = read_json(root / "bad_data/exit.json")
    assert end == {"code": 1, "step": None, "max_steps": 4, "why": f"UserError: {problem}"}


def test_a_start_without_an_address_is_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with world.refusal("WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT: start with torchrun, or"):
        parallel.start(torch.device("cpu"))


STUBS = {
    "srun": 'shift; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi',
}


def write_stubs(folder, stubs):
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def test_a_slurm_job_queues_again_three_times_without_progress_if_it_was_killed(tmp_path):
    """Killed processes leave no exit.json. The first start alone saves a checkpoint."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "1"}
    job |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", world.ROOT / "docs/slurm.sh", "out", "config.py"]

    def ended(srun, count=""):
        write_stubs(tmp_path, STUBS | {"srun": srun})
        ended = subprocess.run(script, cwd=tmp_path, env=job | {"SLURM_RESTART_COUNT": count})
        return ended.returncode, len((tmp_path / "requeued").read_text().splitlines())

    (tmp_path / "requeued").touch()
    saves = 'test "$SLURM_RESTART_COUNT" || mkdir -p out/alra/checkpoints/step_2'
    assert [ended(saves, count) for count in ("", "1", "2", "3")] == [
        (75, 1),
        (75, 2),
        (75, 3),
        (75, 3),
    ]
    assert ended("exit 137", "0") == (75, 4)  # a submission counts anew
    assert (tmp_path / "out/tries").read_text() == "1\n"
    for code in (1, 2):  # the command's own end
        assert ended(f"exit {code}") == (code, 4)
    assert ended("""echo '{"code": 1, "step": 2}' > out/exit.json""") == (1, 4)


@pytest.mark.slow
def test_a_slurm_job_that_is_preempted_queues_again(tiny, tmp_path):
    """A real torchrun under the script of docs/, whose signal comes from Slurm."""
    write_stubs(tmp_path, STUBS)
    places = f"PATH={tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job_id = several.free_port() - 20000
    job = f"SLURM_JOB_ID={job_id} SLURM_JOB_NODELIST=x SLURM_NNODES=1 SLURM_GPUS_ON_NODE=1"
    out = tmp_path / "out"
    (tmp_path / "train.py").symlink_to(world.ROOT / "train.py")
    script = ["bash", world.ROOT / "docs/slurm.sh", out, *flags(tiny, out, ENDLESS)]
    command = ["env", places, f"PYTHON={sys.executable}", *job.split(), *script]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    while not [*out.glob("alra/checkpoints/step_*[1-9]")]:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 75
    assert (tmp_path / "requeued").read_text() == f"requeue {job_id}\n"
    end = read_json(out / "exit.json")
    step = int(world.saved(out / "alra")[-1].removeprefix("step_"))
    assert end == {"code": 75, "step": step, "max_steps": 50000, "why": "SIGTERM"}


@pytest.mark.slow
def test_all_groups_of_sharded_models_wait_as_long_as_they_are_told(together):
    waits = re.findall(r"process 1: its (\d+) groups wait for \{([\d.]+)\} s", together[1])
    assert [seconds for _, seconds in waits] == ["420.0"] * 2
    assert all(int(n) > 1 for n, _ in waits)
