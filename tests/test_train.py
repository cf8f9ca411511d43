"""The loop: data order, the meaning of a batch, resuming, refusing, and the whole path on real input."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import checkpoint
import configure
import train
from configure import Config, ConfigError
from losses import IGNORE, METHODS
from model import CheckpointError, Qwen2Config, init_student, load_tokenizer, tokenizer_hash, weights_hash
from rows import PAD, RowsError, quick_hash, row_order

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TOKENIZER = str(ROOT / "demo" / "teacher")
V, SEQ = 4096, 13
NINE = tuple(METHODS)[:9]  # the main table
KILLS = int(os.environ.get("KILLS", 3))  # of the test that kills; 20 takes a minute
SHAPE = Qwen2Config(16, 23, 1, 2, 1, vocab_size=V, rope_theta=1e4)


def write_rows(folder: Path, name: str, n: int, seed: int, **changes) -> None:
    """Rows of random ids and unequal lengths, as prepare.py would write them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 199, (n, SEQ + 1), dtype=np.uint32)
    rows[rng.random(rows.shape) < 0.1] = 0  # ends of documents
    for row, length in zip(rows, rng.integers(2, SEQ + 2, n), strict=True):
        row[length:] = PAD
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.bin").write_bytes(rows.tobytes())
    facts = {"quick_sha256": quick_hash(folder / f"{name}.bin"), "rows": n, "row_len": SEQ + 1, "eos_id": 0, "vocab_size": V, "sha256": f"{name}{seed}",
             "tokenizer_sha256": tokenizer_hash(load_tokenizer(TOKENIZER))}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps({**facts, **changes}))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, a teacher and a student's shape, all small."""
    root = tmp_path_factory.mktemp("world")
    write_rows(root / "data", "train", 97, seed=1)
    write_rows(root / "data", "val", 7, seed=2)
    teacher = init_student(Qwen2Config(24, 31, 2, 2, 2, vocab_size=V, rope_theta=1e4), seed=7)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(8.0)  # far from uniform
    teacher.save_pretrained(root / "teacher", load_tokenizer(TOKENIZER))
    init_student(SHAPE).save_pretrained(root / "student")
    return root


def flags(world: Path, out: Path, **changes) -> list[str]:
    """The command line of a small run."""
    keys = {"methods": "pretrain,vanilla_kd,alra", "student": world / "student", "teacher": world / "teacher",
            "data_dir": world / "data", "out_dir": out, "seq_len": SEQ, "max_steps": 6, "schedule_steps": 6,
            "warmup_steps": 2, "batch_rows": 4, "micro_batch": 2, "lr": 1e-2, "log_every_steps": 2, "val_every_steps": 3,
            "checkpoint_every_steps": 2, "device": "cpu", "d_max": 7, **changes}  # fmt: skip
    return [f"--{k}={v}" for k, v in keys.items()]


def load(world: Path, out: Path, **changes) -> configure.Loaded:
    return configure.load(flags(world, out, **changes))


def records(out: Path, method: str) -> list[dict]:
    return [json.loads(line) for line in (out / method / "log.jsonl").read_text().splitlines()]


def final_bits(out: Path, method: str, step: int = 6) -> tuple[bytes, bytes]:
    folder = out / method / "checkpoints" / f"step_{step:08d}"
    return (folder / "model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


# --- small parts


def test_every_run_has_the_threads_of_the_runs_that_it_is_compared_with():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1  # tests/conftest.py


def test_learning_rate_is_linear_then_cosine_and_ends_where_the_paper_says():
    cfg = Config()
    assert train.learning_rate(0, cfg) == pytest.approx(6e-4 / 512)
    assert train.learning_rate(511, cfg) == pytest.approx(6e-4)
    assert train.learning_rate(126_399, cfg) == pytest.approx(6e-5)
    middle = (126_400 - 512) // 2 + 511
    assert train.learning_rate(middle, cfg) == pytest.approx(3.3e-4, rel=1e-4)
    early = Config(max_steps=67_200)  # ends sooner on the same schedule
    assert train.learning_rate(67_199, early) == train.learning_rate(67_199, cfg)


def test_row_order_is_a_function_of_the_step_alone():
    assert row_order(3, 4, 97, None).tolist() == [12, 13, 14, 15]
    seen = np.concatenate([row_order(step, 4, 97, 1234) for step in range(97)])  # four passes
    assert all(sorted(seen[i * 97 : (i + 1) * 97]) == list(range(97)) for i in range(4))
    assert seen[:97].tolist() != seen[97:194].tolist() != list(range(97))
    assert row_order(40, 4, 97, 1234).tolist() == seen[160:164].tolist()
    assert row_order(0, 4, 97, 5).tolist() != seen[:4].tolist()


def test_padding_never_reaches_a_loss(world):
    cpu = torch.device("cpu")
    rows = train.Rows(load(world, Path("unused")).config, "train")
    x, y, n = rows.batch(np.arange(97), cpu)
    ids = rows.ids.astype(np.int64)
    assert x.shape == y.shape == (97, SEQ) and int((y != IGNORE).sum()) == n == (ids != PAD).sum() - 97
    assert x.max() < V and y.max() < V
    for row, labels in zip(ids, y, strict=True):
        length = (row != PAD).sum()
        assert labels.tolist() == row[1:length].tolist() + [IGNORE] * (SEQ + 1 - length)
    masked = train.Rows(load(world, Path("unused"), mask_after_eos=True).config, "train")
    _, y_masked, n_masked = masked.batch(np.arange(97), cpu)
    assert (y_masked[x == 0] == IGNORE).all() and n_masked < n
    assert torch.equal(y_masked[x != 0], y[x != 0])


def test_the_weight_of_the_teacher_follows_pds_schedule(world):
    cfg = load(
        world, Path("unused"), kd_schedule="wsd", methods="pretrain,pd", d_max="none", schedule_steps=1000, w_kd=0.9
    ).config
    pretrain, pd = (train.Student(name, None, None, None, {"w_kd": 0.9}, "") for name in ("pretrain", "pd"))
    weights = [train.settings(pd, step, cfg) for step in (0, 50, 100, 989, 995, 999)]
    assert [w["w_kd"] for w in weights] == pytest.approx([0.0, 0.45, 0.9, 0.9, 0.45, 0.09])
    assert all(w["w_kd"] + w["w_ce"] == pytest.approx(1.0) for w in weights)
    assert train.settings(pretrain, 50, cfg) == {"w_kd": 0.9}  # has no teacher whose weight could change


def gradients(world: Path, **changes) -> dict[str, list[torch.Tensor]]:
    """Every student's gradient in the first update, before it is clipped."""
    cfg = load(world, Path("unused"), clip=1e9, lr=1e-2, **changes).config
    env, rows = train.Env(cfg), train.Rows(cfg, "train")
    teacher = train.load_teacher(cfg, env)
    students = [train.make_student(name, cfg, env.device) for name in cfg.methods]
    for s in students:
        s.optimizer.step = s.optimizer.zero_grad = lambda **_: None
    train.update(students, teacher, train.batches(rows, teacher, 0, cfg, env), 0, cfg, env)
    return {s.name: [p.grad for p in s.model.parameters()] for s in students}


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_micro_batch_and_accumulation_change_nothing(world, micro_batch):
    one, other = (gradients(world, batch_rows=16, micro_batch=m) for m in (1, micro_batch))
    for name in one:
        a, b = (torch.cat([g.flatten() for g in grads[name]]).double() for grads in (one, other))
        assert (a - b).norm() / a.norm() < 1e-6, name


def test_group_changes_the_meaning_on_purpose(world):
    one, four = (gradients(world, batch_rows=16, micro_batch=4, group=g) for g in (1, 4))
    a, b = (torch.cat([g.flatten() for g in grads["pretrain"]]) for grads in (one, four))
    assert (a - b).norm() / a.norm() > 1e-3  # rows are of unequal length


# --- whole runs


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train.run(load(world, out)) == 0
    return out


def test_a_run_leaves_logs_and_models_that_transformers_reads(finished):
    for method in ("pretrain", "vanilla_kd", "alra"):
        log = records(finished, method)
        steps = [r for r in log if "loss" in r]
        checks = [r for r in log if "val_ce" in r]
        assert [r["step"] for r in steps] == [2, 4, 6] and [r["step"] for r in checks] == [3, 6]
        assert {"ce", "lr", "gnorm", "tok_per_sec", "valid_tokens", "nominal_tokens"} <= set(steps[0])
        assert {"val_kl", "val_agree", "val_teacher_ce", "val_teacher_entropy"} <= set(checks[0])
        assert steps[-1]["nominal_tokens"] == 6 * 4 * SEQ > steps[-1]["valid_tokens"] > 0
        model = AutoModelForCausalLM.from_pretrained(finished / method / "model")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(finished / method / "model")
        assert model.config.eos_token_id == tokenizer.eos_token_id == 0
        facts = json.loads((finished / method / "run.json").read_text())
        assert (
            facts["method"] == method
            and facts["step"] == 6
            and facts["init_sha256"] == weights_hash(init_student(SHAPE))
        )
    assert {"mass", "local", "rest", "pair", "d_u"} <= set(records(finished, "alra")[0])
    assert len({records(finished, m)[0]["ce"] for m in ("pretrain", "vanilla_kd", "alra")}) == 3


def test_the_log_is_the_mean_over_all_tokens_since_the_last_line(world, tmp_path):
    """Two runs that differ in nothing but how often they speak tell the same average."""
    train.run(load(world, tmp_path / "a", methods="vanilla_kd", d_max="none", log_every_steps=1))
    train.run(load(world, tmp_path / "b", methods="vanilla_kd", d_max="none", log_every_steps=3))
    every = [r for r in records(tmp_path / "a", "vanilla_kd") if "loss" in r]
    third = [r for r in records(tmp_path / "b", "vanilla_kd") if "loss" in r]
    counts = np.diff([0] + [r["valid_tokens"] for r in every])
    for i, record in enumerate(third):
        part = slice(3 * i, 3 * i + 3)
        for key in ("loss", "kd", "ce"):
            assert record[key] == pytest.approx(
                np.average([r[key] for r in every[part]], weights=counts[part]), rel=1e-5
            )
        assert record["loss"] == pytest.approx(0.5 * record["kd"] + 0.5 * record["ce"], rel=1e-5)


def test_validation_figures_are_those_of_the_plain_formulas(world, finished):
    cfg = load(world, finished).config
    val = train.Rows(cfg, "val")
    x, y, _ = val.batch(np.arange(7), torch.device("cpu"))
    student = AutoModelForCausalLM.from_pretrained(finished / "alra" / "model")
    teacher = AutoModelForCausalLM.from_pretrained(world / "teacher")
    with torch.no_grad():
        p_s, p_t = (m(x).logits[y != IGNORE].double().log_softmax(-1) for m in (student, teacher))
    got = [r for r in records(finished, "alra") if "val_ce" in r][-1]
    labels = y[y != IGNORE][:, None]
    assert got["val_ce"] == pytest.approx(-p_s.gather(1, labels).mean().item(), rel=1e-4)
    assert got["val_kl"] == pytest.approx((p_t.exp() * (p_t - p_s)).sum(-1).mean().item(), rel=1e-3)
    assert got["val_agree"] == pytest.approx((p_s.argmax(-1) == p_t.argmax(-1)).double().mean().item(), abs=1e-6)


def test_each_of_nine_students_has_the_bits_of_its_solo_run(world, tmp_path):
    assert train.run(load(world, tmp_path / "nine", methods=",".join(NINE), d_max="none", max_steps=3)) == 0
    for method in NINE:
        assert train.run(load(world, tmp_path / method, methods=method, d_max="none", max_steps=3)) == 0
        assert final_bits(tmp_path / method, method, 3) == final_bits(tmp_path / "nine", method, 3), method


def test_a_run_that_was_cut_and_resumed_has_the_bits_of_one_that_was_not(world, finished, tmp_path):
    assert train.run(load(world, tmp_path, max_steps=3)) == 0  # between two log lines
    assert train.run(load(world, tmp_path)) == 0
    timed = ("tok_per_sec", "eta_sec")
    for method in ("pretrain", "vanilla_kd", "alra"):
        assert final_bits(tmp_path, method) == final_bits(finished, method)
        whole, cut = (
            [{k: v for k, v in r.items() if k not in timed} for r in records(o, method)] for o in (finished, tmp_path)
        )
        assert [r for r in cut if r["step"] > 4] == [r for r in whole if r["step"] > 4]


def test_checkpoints_are_kept_to_the_last_k_and_half_written_ones_are_passed_over(world, tmp_path):
    train.run(load(world, tmp_path, methods="alra", keep_checkpoints=1, max_steps=4))
    folder = tmp_path / "alra" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step_00000004"]
    (folder / "step_00000005.tmp").mkdir()
    train.run(load(world, tmp_path, methods="alra", keep_checkpoints=1))
    assert "step_00000006" in [p.name for p in folder.iterdir()]


def test_a_broken_or_foreign_checkpoint_is_refused_by_name(world, tmp_path):
    train.run(load(world, tmp_path, methods="alra", max_steps=2))
    folder = tmp_path / "alra" / "checkpoints" / "step_00000002"
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace('"method": "alra"', '"method": "pd"'))
    with pytest.raises(CheckpointError, match=r"step_00000002: method is pd, expected alra; it belongs to another run"):
        train.run(load(world, tmp_path, methods="alra"))
    (folder / "state.json").write_text(state)
    data = (folder / "optimizer.safetensors").read_bytes()
    (folder / "optimizer.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"step_00000002: not a whole checkpoint"):
        train.run(load(world, tmp_path, methods="alra"))


def test_a_student_that_breaks_stops_alone_before_its_update(world, tmp_path, monkeypatch, capsys):
    make = train.make_student

    def break_one(name, cfg, device):
        s = make(name, cfg, device)
        if name == "vanilla_kd":
            with torch.no_grad():
                s.model.head[0, 0] = float("inf")
        return s

    monkeypatch.setattr(train, "make_student", break_one)
    assert train.run(load(world, tmp_path)) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"vanilla_kd stopped at step 0: gradient norm nan; not finite: .*kd.*; the update was not made", said
    )
    assert (tmp_path / "alra" / "model").is_dir() and not (tmp_path / "vanilla_kd" / "model").exists()
    assert json.loads((tmp_path / "vanilla_kd" / "stopped.json").read_text())["step"] == 0
    assert train.run(load(world, tmp_path)) == 1  # said again, not tried again


def test_a_full_disk_leaves_the_last_whole_checkpoint(world, tmp_path, monkeypatch, capsys):
    save, calls = safetensors.torch.save_file, []

    def fill_up(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))
        return save(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    assert configure.guard(lambda: train.run(load(world, tmp_path, methods="alra"))) == 1
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    assert [p.name for p in checkpoint.whole(tmp_path / "alra" / "checkpoints")] == ["step_00000002"]
    assert train.run(load(world, tmp_path, methods="alra")) == 0


# --- signals and kills, in processes of their own


def start(world: Path, out: Path, **changes) -> subprocess.Popen:
    command = [sys.executable, "train.py", *flags(world, out, **changes)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen, word: str) -> None:
    """Read what the process says up to a line with this word."""
    said = []
    while not said or word not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], f"ended without {word!r}: {''.join(said)}"


# A run that no signal comes too late for, however busy the machine is.
ENDLESS = {"max_steps": 100_000, "schedule_steps": 100_000, "repeat_rows": True, "val_every_steps": 100_000,
           "checkpoint_every_steps": 100_000}  # fmt: skip


def test_sigterm_saves_and_exits_0_and_the_run_goes_on(world, tmp_path):
    process = start(world, tmp_path, methods="alra", **ENDLESS)
    wait_for(process, "step 2/")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=600)  # closes the pipe
    assert process.returncode == 0 and "stopped by a signal after step" in said
    (folder,) = (tmp_path / "alra" / "checkpoints").iterdir()
    step = json.loads((folder / "state.json").read_text())["step"]
    assert step >= 2
    assert train.run(load(world, tmp_path, methods="alra", **{**ENDLESS, "max_steps": step + 1})) == 0


@pytest.mark.slow
def test_kill_9_loses_steps_but_never_bits(world, tmp_path):
    """Every kill comes at any moment of a run that has many steps left; the last start makes three more steps."""
    keys = {**ENDLESS, "methods": "pretrain,alra", "checkpoint_every_steps": 3}
    rng = np.random.default_rng(3)
    for _ in range(KILLS):
        process = start(world, tmp_path / "cut", **keys)
        wait_for(process, "  loss ")
        time.sleep(rng.uniform(0, 0.4))
        assert process.poll() is None
        process.kill()
        process.communicate()  # closes the pipe
    made = [checkpoint.whole(tmp_path / "cut" / m / "checkpoints")[-1].name for m in ("pretrain", "alra")]
    keys["max_steps"] = max(int(name.removeprefix("step_")) for name in made) + 3
    for folder in ("cut", "whole"):
        assert train.run(load(world, tmp_path / folder, **keys)) == 0
    for method in ("pretrain", "alra"):
        cut, whole = (final_bits(tmp_path / n, method, keys["max_steps"]) for n in ("cut", "whole"))
        assert cut == whole, method


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(world, tmp_path):
    """After one update Adam's first moment is the gradient times 0.1, clipped: equal to 1e-6 of its norm."""
    keys = {"max_steps": 1, "batch_rows": 16, "checkpoint_every_steps": 1}
    assert train.run(load(world, tmp_path / "one", **keys)) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run([*command, *flags(world, tmp_path / "two", **keys)], cwd=ROOT, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for method in ("pretrain", "vanilla_kd", "alra"):
        one, two = (
            safetensors.torch.load_file(
                tmp_path / n / method / "checkpoints" / "step_00000001" / "optimizer.safetensors"
            )
            for n in ("one", "two")
        )
        names = [name for name in one if name.endswith("exp_avg")]
        a, b = (torch.cat([m[name].flatten() for name in names]).double() for m in (one, two))
        assert (a - b).norm() / a.norm() < 1e-6 and a.norm() > 0, method
        a, b = (records(tmp_path / n, method)[0] for n in ("one", "two"))
        assert a["valid_tokens"] == b["valid_tokens"] and a["loss"] == pytest.approx(b["loss"], rel=1e-6)


def test_a_teacher_on_a_device_of_its_own_changes_no_bit(world, finished, tmp_path):
    """Two names of the CPU: hidden states are copied over, the head is there already."""
    assert train.run(load(world, tmp_path, methods="alra", teacher_device="cpu")) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")


def test_histograms_hold_every_position_and_leave_the_run_alone(world, finished, tmp_path):
    keys = {"methods": "vanilla_kd,alra", "histogram_every_steps": 3, "checkpoint_every_steps": 3}
    assert train.run(load(world, tmp_path, **keys, max_steps=4)) == 0
    shutil.rmtree(tmp_path / "alra" / "checkpoints" / "step_00000004")  # as a kill leaves it: update 3 is made again
    assert train.run(load(world, tmp_path, **keys)) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    teacher = [json.loads(line) for line in (tmp_path / "teacher.jsonl").read_text().splitlines()]
    student = [json.loads(line) for line in (tmp_path / "alra" / "histograms.jsonl").read_text().splitlines()]
    assert [r["step"] for r in teacher] == [r["step"] for r in student] == [0, 3]
    assert not (tmp_path / "vanilla_kd" / "histograms.jsonl").exists()
    cfg = load(world, tmp_path).config
    rows = train.Rows(cfg, "train")
    x, y, n = rows.batch(rows.of_update(3), torch.device("cpu"))
    with torch.no_grad():
        p = AutoModelForCausalLM.from_pretrained(world / "teacher")(x).logits[y != IGNORE].double().softmax(-1)
    got, labels = teacher[1], y[y != IGNORE]
    assert (
        got["n"]
        == n
        == sum(got["p_label_hist"])
        == sum(got["p_top1_hist"])
        == sum(got["d_u_hist"])
        == sum(student[1]["d_u_hist"])
    )
    assert got["p_label"] == pytest.approx(p.gather(1, labels[:, None]).mean().item(), rel=1e-4)
    assert got["p_top1"] == pytest.approx(p.max(-1).values.mean().item(), rel=1e-4)
    assert got["agree"] == pytest.approx((p.argmax(-1) == labels).double().mean().item(), abs=1e-6)
    assert got["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
    assert len(got["d_u_hist"]) == len(student[1]["d_u_hist"]) == 8 and sum(got["d_u_hist"][:3]) == 0  # 3 .. d_max = 7


def test_flops_are_those_of_counting_every_product():
    shape = Qwen2Config(24, 37, 3, 4, 2, vocab_size=101)
    matrices = 3 * (24 * 24 + 24 * 24 + 2 * 24 * 12 + 3 * 24 * 37) + 101 * 24
    attention = 3 * 2 * (2 * 4 * 6 * 29) / 2  # scores and their use, half of them masked
    assert train.flops_per_token(shape, 29, trained=False) == 2 * matrices + attention
    assert train.flops_per_token(shape, 29, trained=True) == 3 * (2 * matrices + attention)


# --- a newcomer's slips


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "alr"}, "no such method 'alr', did you mean 'alra'?"),
        ({"methods": "pretrain"}, "d_max=7: none of methods=('pretrain',) takes it"),
        ({"data_dir": "nowhere"}, "nowhere: no train.bin with train.json there; run prepare.py"),
        ({"teacher": "nowhere/at/all"}, "nowhere/at/all: no such folder"),
        ({"teacher": "none"}, "tokenizer=None with teacher=None"),
        ({"teacher": "none", "tokenizer": TOKENIZER}, "teacher=None: vanilla_kd learns from one"),
        ({"student": "200m"}, "vocabulary of 4,096, student=200m has 151,936"),
        ({"seq_len": 12}, "seq_len=12:"),
        ({"max_steps": 25, "schedule_steps": 25}, "max_steps=25: needs 100 rows"),
        ({"kd_schedule": "wsd", "compile": "true"}, "kd_schedule=wsd with compile=True"),
        ({"device": "gpu"}, "device gpu: expected cpu, or cuda"),
        ({"student": "300m"}, "300m: no such folder"),
    ],
)
def test_slips_get_one_clear_line(world, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train.run(load(world, tmp_path, **changes))
    assert not (tmp_path / "run.json").exists()


def test_no_compiler_is_told_before_anything_is_made(world, tmp_path):
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}),
        pytest.raises(ConfigError, match="no C\\+\\+ compiler works here"),
    ):
        train.run(load(world, tmp_path, compile="true", device="cpu"))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_where_there_is_none(world, tmp_path):
    with pytest.raises(
        ValueError, match="device cuda:0: expected cpu, or cuda with one of this machine's 0 CUDA devices"
    ):
        train.run(load(world, tmp_path, device="cuda"))


def test_data_of_another_tokenizer_or_cut_short_is_refused(world, tmp_path):
    write_rows(tmp_path / "data", "train", 97, seed=1, tokenizer_sha256="other")
    write_rows(tmp_path / "data", "val", 7, seed=2)
    with pytest.raises(ConfigError, match=r"not the one that .* was prepared with"):
        train.run(load(world, tmp_path / "out", data_dir=tmp_path / "data"))
    write_rows(tmp_path / "data", "train", 97, seed=1, rows=98)
    with pytest.raises(RowsError, match=r"train.bin: 5,432 bytes, expected 5,488 by train.json"):
        train.run(load(world, tmp_path / "out", data_dir=tmp_path / "data"))
    write_rows(tmp_path / "data", "train", 97, seed=1)
    data = bytearray((tmp_path / "data" / "train.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "data" / "train.bin").write_bytes(data)
    with pytest.raises(RowsError, match=r"train.bin: not the bytes that train.json describes"):
        train.run(load(world, tmp_path / "out", data_dir=tmp_path / "data"))


def test_a_folder_that_holds_another_run_is_refused(world, finished):
    with pytest.raises(ConfigError, match=r"holds another run \(lr=0.01 there, 0.02 here\)"):
        train.run(load(world, finished, lr=2e-2))
    assert train.run(load(world, finished)) == 0  # the same run: done, and left alone


# --- real weights


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the real weights are not on this machine")
def test_a_student_of_real_weights_gets_nearer_to_them(tmp_path):
    import prepare

    stories = SHARED / "data" / "stories260k"
    common = [f"--teacher={stories}", f"--data_dir={tmp_path / 'data'}", "--seq_len=64"]
    text = tmp_path / "stories.txt"
    text.write_text((stories / "sample.txt").read_text())
    prepare.prepare(
        configure.load([*common, f"--source={text}", "--train_rows=none", "--n_documents=none", "--val_rows=4"]).config
    )
    Qwen2Small = Qwen2Config(32, 64, 2, 4, 2, vocab_size=512, rope_theta=1e4)
    init_student(Qwen2Small).save_pretrained(tmp_path / "student")
    args = [*common, f"--student={tmp_path / 'student'}", f"--out_dir={tmp_path / 'out'}", "--methods=alra", "--max_steps=30", "--schedule_steps=30",
            "--warmup_steps=3", "--lr=1e-2", "--micro_batch=8", "--batch_rows=8", "--repeat_rows=true", "--val_every_steps=10", "--device=cpu"]  # fmt: skip
    assert train.run(configure.load(args)) == 0
    kl = [r["val_kl"] for r in records(tmp_path / "out", "alra") if "val_kl" in r]
    assert kl[0] > kl[1] > kl[2], kl
