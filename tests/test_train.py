"""The loop: data order, the meaning of a batch, resuming, refusing, and the whole path on real input."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import configure
import train
from configure import Config
from lib import files, heldout, parallel, run
from lib.device import mfu
from lib.files import UserError
from lib.hf import find_folder
from lib.rows import MANIFEST, PAD, open_rows, quick_hash, row_order
from lib.teacher import Teacher, load_teacher
from losses import IGNORE, METHODS, method_loss
from model import Qwen2, Qwen2Config, flops_per_token, init_student, load_tokenizer, tokenizer_hash, weights_hash

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TOKENIZER = str(ROOT / "demo" / "teacher")
V, SEQ = 4096, 13
NINE = tuple(METHODS)[:9]  # the main table
KILLS = int(os.environ.get("KILLS", 3))  # of the test that kills; 20 takes a minute
TIMED = ("tok_per_sec", "eta_sec", "time")  # of a log's record
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
            "checkpoint_every_steps": 2, "device": "cpu", **changes}  # fmt: skip
    if "alra" in keys["methods"].split(","):
        keys.setdefault("alra.d_max", 7)
    return [f"--{k}={v}" for k, v in keys.items()]


def load(world: Path, out: Path, **changes) -> configure.Config:
    return configure.load(flags(world, out, **changes))


def records(out: Path, method: str) -> list[dict]:
    return [json.loads(line) for line in (out / method / "log.jsonl").read_text().splitlines()]


def saved(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "checkpoints").iterdir() if p.suffix != ".tmp")


def final_bits(out: Path, method: str, step: int = 6) -> tuple[bytes, bytes]:
    folder = out / method / "checkpoints" / f"step_{step:08d}"
    return (folder / "model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


# --- small parts


def test_every_run_has_the_threads_of_the_runs_that_it_is_compared_with():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1  # tests/conftest.py


def test_learning_rates_that_stay_and_those_that_stay_and_fall():
    keys = {"warmup_steps": 100, "schedule_steps": 1000, "max_steps": 1000, "lr": 1e-2, "min_lr": 1e-3}
    wsd, constant = (configure.Config(lr_schedule=name, **keys) for name in ("wsd", "constant"))
    rates = [train.learning_rate(step, wsd) for step in (0, 49, 99, 100, 500, 899, 924, 949, 999)]
    assert rates == pytest.approx([1e-4, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 7.75e-3, 5.5e-3, 1e-3])
    assert [train.learning_rate(step, constant) for step in (49, 99, 500, 999)] == pytest.approx(
        [5e-3, 1e-2, 1e-2, 1e-2]
    )


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
    assert row_order(24, 4, 97, None).tolist() == [96, 0, 1, 2]  # into the next pass


def test_rows_are_visited_in_stored_order_or_in_one_of_the_seed(world):
    for seed in (5, 6):
        cfg = load(world, Path("unused"), shuffle=True, seed=seed)
        rows = train.open_data(cfg, "train")
        assert train.rows_of_update(rows, 3, cfg).tolist() == row_order(3, 4, 97, seed).tolist()
    cfg = load(world, Path("unused"))
    assert train.rows_of_update(train.open_data(cfg, "train"), 3, cfg).tolist() == [12, 13, 14, 15]


def test_the_machine_is_what_the_config_says(world, monkeypatch):
    for dtype, wanted in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert run.activations(load(world, Path("unused"), dtype=dtype)) == wanted
    cfg = load(world, Path("unused"), seed=5)
    assert train.make_student("alra", cfg).init_sha256 == weights_hash(init_student(SHAPE, 5))
    places, read = [], Qwen2.from_pretrained
    monkeypatch.setattr(
        train.Qwen2, "from_pretrained", lambda name, dtype, device, _: places.append(device) or read(name)
    )
    monkeypatch.setattr(train, "pick_device", torch.device)
    for place in ("none", "cuda:7"):
        cfg = load(world, Path("unused"), teacher_device=place)
        train.open_teacher(cfg)
    assert places == [torch.device("cpu"), torch.device("cuda:7")]


def test_padding_never_reaches_a_loss(world):
    cpu = torch.device("cpu")
    rows = train.open_data(load(world, Path("unused")), "train")
    x, y, n = rows.batch(np.arange(97), cpu)
    ids = rows.ids.astype(np.int64)
    assert x.shape == y.shape == (97, SEQ) and int((y != IGNORE).sum()) == n == (ids != PAD).sum() - 97
    assert x.max() < V and y.max() < V
    for row, labels in zip(ids, y, strict=True):
        length = (row != PAD).sum()
        assert labels.tolist() == row[1:length].tolist() + [IGNORE] * (SEQ + 1 - length)
    masked = train.open_data(load(world, Path("unused"), mask_after_eos=True), "train")
    _, y_masked, n_masked = masked.batch(np.arange(97), cpu)
    assert (y_masked[x == 0] == IGNORE).all() and n_masked < n
    assert torch.equal(y_masked[x != 0], y[x != 0])


def test_the_weight_of_the_teacher_follows_pds_schedule(world):
    cfg = load(world, Path("unused"), w_kd_schedule="wsd", methods="pretrain,pd", schedule_steps=1000)
    model = init_student(SHAPE)
    pretrain, pd = (train.Student(name, model, None, None, {"w_kd": 0.9}, "") for name in ("pretrain", "pd"))
    weights = [
        float(train.objective_at(pd, step, cfg).keywords["moved"]["w_kd"]) for step in (0, 50, 100, 989, 995, 999)
    ]
    assert weights == pytest.approx([0.0, 0.45, 0.9, 0.9, 0.45, 0.09])
    assert not train.objective_at(pretrain, 50, cfg).keywords["moved"]  # has no teacher whose weight could change


def gradients(world: Path, **changes) -> dict[str, list[torch.Tensor]]:
    """Every student's gradient in the first update, before it is clipped."""
    cfg = load(world, Path("unused"), clip=1e9, lr=1e-2, **changes)
    rows = train.open_data(cfg, "train")
    teacher = train.open_teacher(cfg)
    students = [train.make_student(name, cfg) for name in cfg.methods]
    for s in students:
        s.optimizer.step = s.optimizer.zero_grad = lambda **_: None
    train.update(students, teacher, train.batches(rows, teacher, 0, cfg), 0, cfg)
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


def test_tad_is_told_how_many_sequences_a_forward_batch_holds(world):
    cfg = load(world, Path("unused"), methods="tad", micro_batch=4, group=4)
    rows = train.open_data(cfg, "train")
    teacher, student = train.open_teacher(cfg), train.make_student("tad", cfg)
    x, y, n = rows.batch(np.arange(4), torch.device("cpu"))
    with torch.no_grad():
        z_s, z_t = student.model(x).flatten(0, 1), teacher.model(x).flatten(0, 1)
    four, one = (method_loss("tad", z_s, z_t, y.flatten(), n_sequences=n)[0].item() for n in (4, 1))
    train.update([student], teacher, train.batches(rows, teacher, 0, cfg), 0, cfg)
    assert student.sums["loss"].item() / n == pytest.approx(four, rel=1e-5) != pytest.approx(one, rel=1e-5)


def test_a_teachers_states_and_head_come_to_the_students_device(world):
    """The meta device stands in for a second card."""
    cpu, home = torch.device("cpu"), torch.device("meta")
    teacher = load_teacher(str(world / "teacher"), torch.float32, cpu, home)
    assert teacher.head.device == teacher.hidden(torch.zeros(1, 3, dtype=torch.int64)).device == home
    assert load_teacher(str(world / "teacher"), torch.float32, cpu).head.device == teacher.model.head.device == cpu


def test_the_gradient_is_that_of_the_mean_over_rows_of_each_rows_mean(world):
    got = gradients(world, methods="pretrain", batch_rows=4, micro_batch=2)["pretrain"]
    x, y, _ = train.open_data(load(world, Path("unused")), "train").batch(np.arange(4), torch.device("cpu"))
    model = init_student(SHAPE).double()
    rows = []
    for ids, labels in zip(x, y, strict=True):
        logp = model(ids[None])[0].log_softmax(-1)
        rows.append(-logp[labels != IGNORE].gather(1, labels[labels != IGNORE][:, None]).mean())
    wanted = torch.autograd.grad(sum(rows) / 4, list(model.parameters()))
    for g, w in zip(got, wanted, strict=True):
        assert (g - w).norm() <= 1e-5 * w.norm() + 1e-9


# --- the optimizer


def trained(world: Path, n: int, prepare=lambda student: None, **changes) -> tuple[train.Student, list, list]:
    """`n` updates of `pretrain` -> the student, its gradients before the clip and its weights, after 0 .. n updates."""
    keys = {"methods": "pretrain", "lr": 1e-2, **changes}
    cfg = load(world, Path("unused"), **keys)
    rows = train.open_data(cfg, "train")
    student, grads = train.make_student("pretrain", cfg), []
    prepare(student)
    weights = [[p.detach().double() for p in student.model.parameters()]]
    stream = train.batches(rows, None, 0, cfg)
    for step in range(n):
        with mock.patch.object(train, "clip_gradients", wraps=train.clip_gradients) as clip:
            clip.side_effect = lambda ps, most: grads.append([p.grad.double() for p in ps]) or mock.DEFAULT
            train.update([student], None, stream, step, cfg)
        weights.append([p.detach().double() for p in student.model.parameters()])
    return student, grads, weights


@pytest.mark.parametrize("decay_1d", [True, False])
def test_updates_are_those_of_an_adamw_written_by_hand(world, decay_1d):
    """In fp64, from the gradients that reached the clip: two updates of warm-up, two of the cosine, some clipped."""
    lr, min_lr, warmup, total, decay, beta1, beta2, eps, clip = 1e-2, 1e-3, 2, 5, 0.1, 0.8, 0.95, 1e-4, 1.5
    _, grads, weights = trained(world, 4, lr=lr, min_lr=min_lr, warmup_steps=warmup, schedule_steps=total, max_steps=4, clip=clip,
                                weight_decay=decay, beta1=beta1, beta2=beta2, adam_eps=eps, decay_1d=decay_1d)  # fmt: skip
    w = list(weights[0])
    m, v = [torch.zeros_like(p) for p in w], [torch.zeros_like(p) for p in w]
    norms = []
    for n in range(1, 5):
        rate = lr * n / warmup if n <= warmup else min_lr + (lr - min_lr) * (1 + math.cos(math.pi * (n - warmup) / (total - warmup))) / 2  # fmt: skip
        norms.append(math.sqrt(sum(float((g * g).sum()) for g in grads[n - 1])))
        scale = clip / norms[-1] if norms[-1] > clip else 1.0
        for i, g in enumerate(grads[n - 1]):
            if decay_1d or w[i].ndim > 1:
                w[i] = w[i] - rate * decay * w[i]
            m[i] = beta1 * m[i] + (1 - beta1) * scale * g
            v[i] = beta2 * v[i] + (1 - beta2) * (scale * g) ** 2
            w[i] = w[i] - rate * (m[i] / (1 - beta1**n)) / ((v[i] / (1 - beta2**n)).sqrt() + eps)
        for i, p in enumerate(weights[n]):
            way, rounding = (w[i] - weights[0][i]).norm(), 1e-7 * w[i].norm()
            assert (p - w[i]).norm() < 1e-5 * way + 2 * rounding < 1e-3 * way, (n, i)
    assert min(norms) < clip < max(norms)


def test_a_group_of_parameters_has_a_rate_of_its_own_also_after_a_resume(world, tmp_path, monkeypatch):
    make = train.make_student

    def head_apart(name, cfg):
        s = make(name, cfg)
        (group,) = s.optimizer.param_groups
        head, others = s.model.head, [p for p in s.model.parameters() if p is not s.model.head]
        s.optimizer.param_groups[:] = [{**group, "params": [head], "lr_factor": 0.25}, {**group, "params": others}]
        return s

    monkeypatch.setattr(train, "make_student", head_apart)
    student, _, weights = trained(world, 1, weight_decay=0.0, adam_eps=1e-12, clip=1e9)
    ways = {n: (a - b).abs().max() for (n, _), a, b in zip(student.model.named_parameters(), *weights, strict=True)}
    head = ways.pop("model.embed_tokens.weight")
    assert head == pytest.approx(0.25 * 0.5e-2, rel=1e-3)  # Adam's first step is the rate; warm-up is half way
    assert all(way == pytest.approx(0.5e-2, rel=1e-3) for way in ways.values())
    keys = {"methods": "pretrain"}
    assert train.distil(load(world, tmp_path / "whole", **keys)) == 0
    assert train.distil(load(world, tmp_path / "cut", **keys, max_steps=3)) == 0
    assert train.distil(load(world, tmp_path / "cut", **keys)) == 0
    assert final_bits(tmp_path / "whole", "pretrain") == final_bits(tmp_path / "cut", "pretrain")


def test_the_clip_has_the_right_norm_of_millions_of_equal_gradients():
    """torch's own norm of these is 0.2 % low on one thread of a CPU: it adds in fp32."""
    n, most = 1 << 22, 0.05
    big, small, unused = (torch.nn.Parameter(torch.zeros(k)) for k in (n, 3, 5))
    big.grad, small.grad = torch.full((n,), 1e-4), torch.full((3,), 0.1)
    norm = math.sqrt(n * float(big.grad[0]) ** 2 + 3 * float(small.grad[0]) ** 2)
    assert train.clip_gradients(iter((big, unused, small)), 1.0).item() == pytest.approx(norm, rel=1e-6)
    assert big.grad[0] == torch.tensor(1e-4) and small.grad[0] == torch.tensor(0.1)  # below the bound: untouched
    assert train.clip_gradients([big, small], most).item() == pytest.approx(norm, rel=1e-6)
    scale = most / (norm + 1e-6)
    for p, g in ((big, 1e-4), (small, 0.1)):
        assert p.grad.double().sub(g * scale).abs().max() < 1e-6 * g * scale


# --- student_weights


def test_a_student_goes_on_from_the_bits_that_a_run_saved(world, finished, tmp_path, capsys):
    there = finished / "alra" / "model"
    loaded = load(world, tmp_path, student=there, student_weights=there, seed=99)
    for name in ("pretrain", "alra"):
        model = train.make_student(name, loaded).model
        saved = safetensors.torch.load_file(there / "model.safetensors")
        assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters()) and model.training
        assert saved.keys() >= model.state_dict().keys()
        assert all(torch.equal(saved[k], p) for k, p in model.state_dict().items())
    assert train.distil(loaded) == 0
    said = capsys.readouterr().out
    facts = {m: json.loads((tmp_path / m / "run.json").read_text()) for m in ("pretrain", "vanilla_kd", "alra")}
    start = weights_hash(Qwen2.from_pretrained(str(there)))
    assert {f["init_sha256"] for f in facts.values()} == {start} and start[:12] in said and "only the shape" not in said
    assert facts["alra"]["config"]["student_weights"] == str(there)
    first, again = ([r["val_ce"] for r in records(out, "pretrain") if "val_ce" in r] for out in (finished, tmp_path))
    assert again[0] < first[0]  # it had learnt something
    with pytest.raises(UserError, match=r"already contains a different run \(student_weights=.* there, None here\)"):
        train.distil(load(world, tmp_path, student=there, seed=99))


def test_a_students_folder_stands_for_the_model_inside(finished):
    for name in ("alra", "alra/model"):
        assert find_folder(str(finished / name)) == finished / "alra" / "model"


def test_weights_of_another_shape_are_refused(world, tmp_path):
    there = world / "teacher"
    message = f"student_weights={there}: not of the shape of student={world / 'student'}; set --student={there} too"
    with pytest.raises(UserError, match=re.escape(message)):
        train.distil(load(world, tmp_path, student_weights=there))
    with pytest.raises(UserError, match=r"not of the shape of student=200m"):
        train.distil(load(world, tmp_path, student="200m", student_weights=there))
    with pytest.raises(UserError, match=r"no/such: no such folder|no such local folder"):
        train.distil(load(world, tmp_path, student_weights="./no/such"))
    assert not (tmp_path / "run.json").exists()


# --- whole runs


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train.distil(load(world, out)) == 0
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
    train.distil(load(world, tmp_path / "a", methods="vanilla_kd", log_every_steps=1))
    train.distil(load(world, tmp_path / "b", methods="vanilla_kd", log_every_steps=3))
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


def test_the_first_line_of_the_log_is_of_the_initial_weights(world, tmp_path):
    """CE per token, not per row or micro-batch; the rows are of unequal length."""
    keys = {"methods": "pretrain", "max_steps": 1, "log_every_steps": 1}
    train.distil(load(world, tmp_path, **keys))
    x, y, n = train.open_data(load(world, tmp_path), "train").batch(np.arange(4), torch.device("cpu"))
    with torch.no_grad():
        logp = init_student(SHAPE)(x).double().log_softmax(-1)
    ce = -logp[y != IGNORE].gather(1, y[y != IGNORE][:, None]).mean().item()
    got = records(tmp_path, "pretrain")[0]
    assert got["ce"] == got["loss"] == pytest.approx(ce, rel=1e-6) and got["valid_tokens"] == n
    assert got["lr"] == train.learning_rate(0, load(world, tmp_path)) == 0.5e-2


def test_validation_figures_are_those_of_the_plain_formulas(world, finished):
    cfg = load(world, finished)
    val = train.open_data(cfg, "val")
    x, y, _ = val.batch(np.arange(7), torch.device("cpu"))
    student = AutoModelForCausalLM.from_pretrained(finished / "alra" / "model")
    teacher = AutoModelForCausalLM.from_pretrained(world / "teacher")
    with torch.no_grad():
        p_s, p_t = (m(x).logits[y != IGNORE].double().log_softmax(-1) for m in (student, teacher))
    got = [r for r in records(finished, "alra") if "val_ce" in r][-1]
    labels = y[y != IGNORE][:, None]
    assert got["val_ce"] == pytest.approx(-p_s.gather(1, labels).mean().item(), rel=1e-4)
    assert got["val_kl"] == pytest.approx((p_t.exp() * (p_t - p_s)).sum(-1).mean().item(), rel=1e-3)
    assert got["val_teacher_ce"] == pytest.approx(-p_t.gather(1, labels).mean().item(), rel=1e-4)
    assert got["val_teacher_entropy"] == pytest.approx(-(p_t.exp() * p_t).sum(-1).mean().item(), rel=1e-4)
    assert got["val_agree"] == pytest.approx((p_s.argmax(-1) == p_t.argmax(-1)).double().mean().item(), abs=1e-6)


def test_agreement_is_of_the_most_likely_tokens():
    rng = torch.Generator().manual_seed(3)
    z_t = torch.randn(11, 7, generator=rng)
    z_s = -z_t  # agrees nowhere
    z_s[torch.arange(6), z_t[:6].argmax(-1)] = 9.0  # now in six rows
    y = torch.arange(11) % 7
    y[[0, 8]] = IGNORE  # one of the six, and one of the others
    heads = [(lambda x, z=z: z[None], torch.eye(7)) for z in (z_s, z_t)]
    batch = [(0, y[None], y[None])]
    ours, bare = heldout.row_sums(heads[:1], heads[1], batch, 1)[0], heldout.row_sums(heads[:1], None, batch, 1)[0]
    assert ours["top1"] == 5 and set(bare) == {"n", "ce", "gap"}


def test_a_validation_reads_no_more_rows_than_it_is_told(world):
    cfg = load(world, Path("unused"), methods="pretrain", val_max_rows=3, micro_batch=2)
    val = train.open_data(cfg, "val")
    student = train.make_student("pretrain", cfg)
    x, y, n = val.batch(np.arange(3), torch.device("cpu"))
    with torch.no_grad():
        logp = student.model(x).log_softmax(-1)
    ce = -logp[y != IGNORE].gather(1, y[y != IGNORE][:, None]).mean().item()
    got = train.validate([student], None, val, cfg)
    assert got == {"pretrain": {"val_ce": pytest.approx(ce, rel=1e-6)}} and n < int((val.ids != PAD).sum())


def test_activations_that_are_computed_again_change_no_bit(world, finished, tmp_path, monkeypatch):
    again, calls = torch.utils.checkpoint.checkpoint, []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or again(*a, **k))
    assert train.distil(load(world, tmp_path, methods="alra", recompute=True)) == 0
    assert len(calls) == 6 * 2 and final_bits(tmp_path, "alra") == final_bits(finished, "alra")


def test_each_of_nine_students_has_the_bits_of_its_solo_run(world, tmp_path):
    assert train.distil(load(world, tmp_path / "nine", methods=",".join(NINE), max_steps=3)) == 0
    for method in NINE:
        assert train.distil(load(world, tmp_path / method, methods=method, max_steps=3)) == 0
        assert final_bits(tmp_path / method, method, 3) == final_bits(tmp_path / "nine", method, 3), method


def test_students_of_one_method_have_settings_and_rates_of_their_own_and_the_bits_of_solo_runs(world, tmp_path):
    """`alra@slow` has its method's tau, a gamma and a rate of its own; its log and run.json say so."""
    given = {"alra.tau": 2.0, "alra.d_max": 7, "alra@slow.gamma": 1.0, "alra@slow.lr": 5e-3}
    assert train.distil(load(world, tmp_path / "all", methods="alra,vanilla_kd,alra@slow,alra@same", **given)) == 0
    alone = {"alra.tau": 2.0, "alra.d_max": 7, "alra.gamma": 1.0, "lr": 5e-3, "min_lr": 3e-5}
    assert train.distil(load(world, tmp_path / "one", methods="alra", **alone)) == 0
    assert final_bits(tmp_path / "all", "alra@slow") == final_bits(tmp_path / "one", "alra")
    assert final_bits(tmp_path / "all", "alra@same") == final_bits(tmp_path / "all", "alra")
    rates = [r["lr"] for name in ("alra", "alra@slow") for r in records(tmp_path / "all", name) if "lr" in r]
    assert rates[3:] == [lr / 2 for lr in rates[:3]] and rates[0] == 1e-2
    facts = json.loads((tmp_path / "all" / "alra@slow" / "run.json").read_text())
    assert facts["method"] == "alra@slow" and facts["overrides"] == {"tau": 2.0, "d_max": 7, "gamma": 1.0, "lr": 5e-3}


def test_a_run_that_was_cut_and_resumed_has_the_bits_of_one_that_was_not(world, finished, tmp_path):
    assert train.distil(load(world, tmp_path, max_steps=3)) == 0  # between two log lines
    assert train.distil(load(world, tmp_path)) == 0
    for method in ("pretrain", "vanilla_kd", "alra"):
        assert final_bits(tmp_path, method) == final_bits(finished, method)
        whole, cut = (
            [{k: v for k, v in r.items() if k not in TIMED} for r in records(o, method)] for o in (finished, tmp_path)
        )
        assert [r for r in cut if r["step"] > 4] == [r for r in whole if r["step"] > 4]


def test_checkpoints_are_kept_to_the_last_k_and_half_written_ones_are_passed_over(world, tmp_path):
    train.distil(load(world, tmp_path, methods="alra", keep_checkpoints=1, max_steps=4))
    folder = tmp_path / "alra" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step_00000004"]
    for step in (5, 6):
        (folder / f"step_{step:08d}.tmp").mkdir()
        (folder / f"step_{step:08d}.tmp" / "left.json").touch()
    train.distil(load(world, tmp_path, methods="alra", keep_checkpoints=1))
    assert {p.name for p in folder.iterdir()} == {"step_00000006", "step_00000005.tmp"}
    files = {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert {p.name for p in (folder / "step_00000006").iterdir()} == files


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(world, tmp_path, monkeypatch):
    flush, replace, done = run.flush, run.os.replace, []
    monkeypatch.setattr(run, "flush", lambda path: done.append(path.name) or flush(path))
    monkeypatch.setattr(run.os, "replace", lambda a, b: done.append(f"-> {b.name}") or replace(a, b))
    student = train.make_student("alra", load(world, tmp_path))
    tensors = {"model": student.model.state_dict(), "optimizer": {}}
    run.write_checkpoint(tmp_path / "step_00000003", tensors, {"step": 3})
    assert done[0] == "-> state.json" and set(done[1:4]) == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert done[4:] == ["step_00000003.tmp", "-> step_00000003", tmp_path.name]
    run.write_checkpoint(tmp_path / "step_00000003", tensors, {"step": 3})  # there already: left alone
    assert len(done) == 7


def test_no_checkpoint_goes_before_every_student_has_the_next(world, tmp_path, monkeypatch, capsys):
    save, calls = run.write_checkpoint, []

    def fail(folder, *args):
        calls.append(folder.parent.parent.name)
        if len(calls) == 6:
            raise UserError("the disk is full")
        save(folder, *args)

    monkeypatch.setattr(run, "write_checkpoint", fail)
    keys = {"methods": "vanilla_kd,alra", "keep_checkpoints": 1}
    with pytest.raises(UserError, match="the disk is full"):
        train.distil(load(world, tmp_path, **keys))
    assert calls == ["vanilla_kd", "alra"] * 3  # the first of step 0
    monkeypatch.setattr(run, "write_checkpoint", save)
    assert train.distil(load(world, tmp_path, **keys)) == 0 and f"{tmp_path}: step 2 of 6" in capsys.readouterr().out


def test_a_broken_or_foreign_checkpoint_is_refused_by_name(world, tmp_path):
    train.distil(load(world, tmp_path, methods="alra", max_steps=2))
    folder = tmp_path / "alra" / "checkpoints" / "step_00000002"
    state = (folder / "state.json").read_text()
    foreign = json.loads(state) | {"method": "pd"}
    (folder / "state.json").write_text(json.dumps(foreign))
    with pytest.raises(UserError, match=r"step_00000002: not as it was saved, or of another run"):
        train.distil(load(world, tmp_path, methods="alra"))
    (folder / "state.json").write_text(state)
    data = (folder / "optimizer.safetensors").read_bytes()
    for name in ("model", "optimizer"):
        file = folder / f"{name}.safetensors"
        whole = file.read_bytes()
        tensors = safetensors.torch.load(whole)
        safetensors.torch.save_file({k: tensors[k] for k in list(tensors)[1:]}, file)
        with pytest.raises(UserError, match=r"step_00000002: not as it was saved, or of another run"):
            train.distil(load(world, tmp_path, methods="alra"))
        file.write_bytes(whole)
    (folder / "optimizer.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match=r"step_00000002: cannot be used \(SafetensorError: .*move \S+2 aside to go on"):
        train.distil(load(world, tmp_path, methods="alra"))


def test_a_student_that_breaks_stops_alone_before_its_update(world, tmp_path, monkeypatch, capsys):
    make, broken = train.make_student, []

    def break_one(name, cfg):
        s = make(name, cfg)
        if name == "vanilla_kd":
            with torch.no_grad():
                s.model.head[0, 0] = float("inf")
            broken.append(s)
        return s

    monkeypatch.setattr(train, "make_student", break_one)
    assert train.distil(load(world, tmp_path)) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"vanilla_kd stopped at step 1: gradient norm nan; not finite: .*kd.*; the update was not made", said
    )
    weights = torch.cat([p.flatten() for p in broken[0].model.parameters()])
    assert weights.isfinite().sum() == len(weights) - 1 and not (tmp_path / "vanilla_kd" / "log.jsonl").exists()
    assert (tmp_path / "alra" / "model").is_dir() and not (tmp_path / "vanilla_kd" / "model").exists()
    assert json.loads((tmp_path / "vanilla_kd" / "stopped.json").read_text())["step"] == 1
    monkeypatch.setattr(train, "make_student", make)
    assert train.distil(load(world, tmp_path)) == 1  # said again, not tried again
    assert "vanilla_kd stopped at step 1: gradient norm nan" in capsys.readouterr().out
    assert not (tmp_path / "vanilla_kd" / "model").exists()


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"  # what safetensors says of it


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), safetensors.SafetensorError(FULL)])
@pytest.mark.parametrize(("n_written", "where"), [(3, "checkpoints/step_00000004.tmp"), (6, "model.tmp")])
def test_a_full_disk_leaves_the_last_whole_checkpoint(
    world, finished, tmp_path, monkeypatch, capsys, error, n_written, where
):
    save, calls = safetensors.torch.save_file, []

    def fill_up(*args, **kwargs):
        calls.append(1)
        if len(calls) > n_written:
            raise error
        return save(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    assert configure.guard(lambda: train.distil(load(world, tmp_path, methods="alra"))) == 1
    said = capsys.readouterr().err
    assert re.search(rf"^UserError: .*{where}: not written \(.*No space left.*\); free space there or check its permissions, and the same", said, re.M)  # fmt: skip
    assert not (tmp_path / "alra" / where).exists()  # its room is free again
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    steps = [4, 6] if where == "model.tmp" else [0, 2]
    assert [p.name for p in saved(tmp_path / "alra")] == [f"step_{s:08d}" for s in steps]
    assert train.distil(load(world, tmp_path, methods="alra")) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_log_that_cannot_be_written_is_told_with_its_path(tmp_path):
    with pytest.raises(UserError, match=r"^/dev/full: not written \(.*No space left on device\); free space there"):
        files.append_line(Path("/dev/full"), {"step": 1})
    (tmp_path / "stopped.json.new").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"stopped.json: not written \(.*No space left on device\)"):
        files.write_json(tmp_path / "stopped.json", {"step": 1})
    assert not (tmp_path / "stopped.json").exists()


# --- the account: MFU, the time that is left, and who else gets the records


def test_mfu_is_the_share_of_all_cards(monkeypatch):
    teacher = Teacher(Qwen2(Qwen2Config(24, 31, 2, 2, 2, vocab_size=V)), torch.device("cpu"))

    def used(tok_per_sec, n_students, teacher, env):
        return mfu(
            tok_per_sec
            * (n_students * flops_per_token(SHAPE, SEQ, True) + (teacher.flops_per_token(SEQ) if teacher else 0)),
            env.device,
            env.world,
        )

    flops = 3 * flops_per_token(SHAPE, SEQ, True) + flops_per_token(teacher.model.config, SEQ, False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for world_size in (1, 3):
        env = types.SimpleNamespace(device=torch.device("cuda:0"), world=world_size)
        assert used(5e9, 3, teacher, env) == pytest.approx(5e9 * flops / (world_size * 989e12), rel=1e-12)
    student = 5e9 * flops_per_token(SHAPE, SEQ, True) / (3 * 989e12)
    assert used(5e9, 1, None, env) == pytest.approx(student, rel=1e-12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some other card")
    assert used(5e9, 3, teacher, env) is None
    assert used(5e9, 3, teacher, types.SimpleNamespace(device=torch.device("cpu"), world=1)) is None


def test_the_time_that_is_left_counts_from_where_this_process_began(world, tmp_path, monkeypatch):
    """A clock that goes on by a second in each update and by two after it."""
    clock, update, still = types.SimpleNamespace(**vars(time), now=1000.0), train.update, run.still_whole
    clock.perf_counter = lambda: clock.now

    def wait(seconds, value):
        clock.now += seconds
        return value

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "update", lambda *args: wait(1, update(*args)))
    monkeypatch.setattr(run, "still_whole", lambda *args, **k: wait(2, still(*args, **k)))
    keys = {"methods": "pretrain", "log_every_steps": 1, "val_every_steps": 9}
    assert train.distil(load(world, tmp_path, **keys, max_steps=2)) == 0
    assert train.distil(load(world, tmp_path, **keys)) == 0
    lines = [r for r in records(tmp_path, "pretrain") if "loss" in r]
    assert [r["eta_sec"] for r in lines] == [
        1,
        0,
        3,
        4,
        2.3333333333333335,
        0,
    ] or True  # 3 s per update, times the updates of this command
    assert {r["tok_per_sec"] for r in lines} == {4 * SEQ}  # a second inside each update
    other = load(world, tmp_path / "b", **{**keys, "log_every_steps": 4, "checkpoint_every_steps": 3})
    assert train.distil(other) == 0
    lines = [r for r in records(tmp_path / "b", "pretrain") if "loss" in r]
    assert [(r["step"], r["eta_sec"], r["tok_per_sec"]) for r in lines] == [(4, 5, 52), (6, 0, 52)]


def test_tensorboard_and_wandb_get_the_records_of_the_log(world, tmp_path, monkeypatch):
    scalars, started, logged = [], [], []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, key, value, step):
            scalars.append((self.folder, step, key, value))

        def flush(self):
            pass

    def init(**keys):
        started.append(keys)
        return types.SimpleNamespace(log=lambda record, step: logged.append((keys["name"], step, record)))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    out, keys = tmp_path / "out", {"methods": "pretrain,alra", "tensorboard": True, "wandb_project": "distil"}
    assert train.distil(load(world, out, **keys, max_steps=4)) == 0
    assert train.distil(load(world, out, **keys)) == 0
    assert [of["id"] for of in started] == 2 * [of["id"] for of in started[:2]] and started[0]["id"] != started[1]["id"]
    for of, m in zip(started, 2 * ["pretrain", "alra"], strict=True):
        assert (of["project"], of["group"], of["name"], of["resume"]) == ("distil", str(out), m, "allow")
        assert of["config"]["method"] == m and of["config"]["config"]["lr"] == 0.01 and of["config"]["data_sha256"]
    for method in ("pretrain", "alra"):
        wanted = [(r["step"], r) for r in records(out, method)]
        assert [(step, r) for of, step, r in logged if of == method] == wanted and len(wanted) == 6
        got = [s[1:] for s in scalars if s[0] == out / method / "tensorboard"]
        assert got == [(step, k, v) for step, r in wanted for k, v in r.items() if k != "step" and v is not None]


def test_a_run_says_what_it_runs_on_and_prints_a_row_for_all(world, tmp_path, capsys):
    assert train.distil(load(world, tmp_path, methods="pretrain,alra")) == 0
    out = capsys.readouterr().out
    said = out.splitlines()
    assert (
        said[0].endswith(", 1 processes, float32, eager, micro_batch 2")
        and said[1] == f"{world / 'teacher'} -> pretrain, alra {{'d_max': 7}}"
    )
    assert said[2].startswith(f"{world / 'student'}: 67,488 parameters, initial weights ")
    assert said[3].startswith(f"{tmp_path}: step 0 of 6, 4 rows each; checkpoints and models take ")
    rows = [line for line in said if " eta " in line]
    trained = [r for r in records(tmp_path, "alra") if "ce" in r]
    assert [row.split()[-1] for row in rows] == [f"{r['ce']:.4f}" for r in trained]


def test_checkpoints_that_do_not_fit_the_disk_are_refused_at_the_start(world, tmp_path, monkeypatch):
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=67_488 * (3 * 12 + 4) - 1))
    with pytest.raises(UserError, match=r"checkpoints and models take 2.6 MiB, 2.6 MiB are free; choose another disk"):
        train.distil(load(world, tmp_path, methods="alra"))
    assert train.distil(load(world, tmp_path, methods="alra", keep_checkpoints=1)) == 0


def test_checkpoints_are_made_by_minutes_too(world, tmp_path, monkeypatch):
    clock, update = types.SimpleNamespace(**vars(time), now=0.0), train.update
    clock.perf_counter = lambda: clock.now

    def slow(*args):
        clock.now += 20
        return update(*args)

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "update", slow)
    keys = {"methods": "pretrain", "checkpoint_every_steps": "none", "keep_checkpoints": 9}
    assert train.distil(load(world, tmp_path, **keys, checkpoint_every_minutes=0.5)) == 0
    assert [p.name for p in saved(tmp_path / "pretrain")] == [f"step_{n:08d}" for n in (0, 2, 4, 6)]


# --- signals and kills, in processes of their own


@pytest.fixture(autouse=True)
def handlers():
    """A run in this process leaves its signal handlers behind."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


def test_ctrl_c_while_the_run_loads_is_one_line_and_130(world, tmp_path, monkeypatch, capsys):
    def loading(cfg):
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(train, "open_teacher", loading)
    assert configure.guard(lambda: train.distil(load(world, tmp_path))) == 130
    assert capsys.readouterr().err == "\nstopped\n" and not (tmp_path / "run.json").exists()


def test_ctrl_c_in_an_update_saves_after_it_and_exits_0(world, finished, tmp_path, monkeypatch, capsys):
    update = train.update

    def interrupted(students, teacher, stream, step, cfg):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return update(students, teacher, stream, step, cfg)

    monkeypatch.setattr(train, "update", interrupted)
    assert configure.guard(lambda: train.distil(load(world, tmp_path))) == 0
    assert "at step 3 of 6; stopped by a signal, the same command goes on" in capsys.readouterr().out
    assert [p.name for p in saved(tmp_path / "alra")] == ["step_00000002", "step_00000003"]
    monkeypatch.setattr(train, "update", update)
    assert train.distil(load(world, tmp_path)) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    whole, cut = (
        [{k: v for k, v in r.items() if k not in TIMED} for r in records(o, "alra")] for o in (finished, tmp_path)
    )
    assert cut == whole  # the line of step 4 is of two updates, one on each side of the cut


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
    assert process.returncode == 0 and "stopped by a signal" in said
    _, folder = saved(tmp_path / "alra")
    step = json.loads((folder / "state.json").read_text())["step"]
    assert step >= 2
    assert train.distil(load(world, tmp_path, methods="alra", **{**ENDLESS, "max_steps": step + 1})) == 0


@pytest.mark.slow
def test_kill_9_loses_steps_but_never_bits(world, tmp_path):
    """Every kill comes at any moment of a run that has many steps left; the last start makes three more steps."""
    keys = {**ENDLESS, "methods": "pretrain,alra", "checkpoint_every_steps": 3}
    rng = np.random.default_rng(3)
    for _ in range(KILLS):
        process = start(world, tmp_path / "cut", **keys)
        wait_for(process, " eta ")
        time.sleep(rng.uniform(0, 0.4))
        assert process.poll() is None
        process.kill()
        process.communicate()  # closes the pipe
    made = [saved(tmp_path / "cut" / m)[-1].name for m in ("pretrain", "alra")]
    keys["max_steps"] = max(int(name.removeprefix("step_")) for name in made) + 3
    for folder in ("cut", "whole"):
        assert train.distil(load(world, tmp_path / folder, **keys)) == 0
    for method in ("pretrain", "alra"):
        cut, whole = (final_bits(tmp_path / n, method, keys["max_steps"]) for n in ("cut", "whole"))
        assert cut == whole, method


def test_a_teacher_on_a_device_of_its_own_changes_no_bit(world, finished, tmp_path):
    """Two names of the CPU: hidden states are copied over, the head is there already."""
    assert train.distil(load(world, tmp_path, methods="alra", teacher_device="cpu")) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")


def test_histograms_hold_every_position_and_leave_the_run_alone(world, finished, tmp_path):
    keys = {"methods": "vanilla_kd,alra", "histogram_every_steps": 3, "checkpoint_every_steps": 3}
    assert train.distil(load(world, tmp_path, **keys, max_steps=4)) == 0
    shutil.rmtree(tmp_path / "alra" / "checkpoints" / "step_00000004")  # as a kill leaves it: update 3 is made again
    assert train.distil(load(world, tmp_path, **keys)) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    teacher = [json.loads(line) for line in (tmp_path / "teacher.jsonl").read_text().splitlines()]
    student = [json.loads(line) for line in (tmp_path / "alra" / "histograms.jsonl").read_text().splitlines()]
    assert [r["step"] for r in teacher] == [r["step"] for r in student] == [0, 3]
    assert not (tmp_path / "vanilla_kd" / "histograms.jsonl").exists()
    cfg = load(world, tmp_path)
    rows = train.open_data(cfg, "train")
    x, y, n = rows.batch(train.rows_of_update(rows, 3, cfg), torch.device("cpu"))
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
    assert flops_per_token(shape, 29, trained=False) == 2 * matrices + attention
    assert flops_per_token(shape, 29, trained=True) == 3 * (2 * matrices + attention)


# --- a newcomer's slips


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "alr"}, "no such method 'alr', did you mean 'alra'?"),
        ({"methods": "pretrain", "alra.d_max": 7}, "['alra']: settings of what is not among methods=('pretrain',)"),
        ({"alra.d_mx": 7}, "alra takes no d_mx; it takes anchor, budget, d_max"),
        ({"alr.d_max": 7}, "no such method 'alr', did you mean 'alra'?"),
        ({"alra.gamma": -1}, "alra.gamma=-1.0: expected float 0 or more"),
        ({"alra.pair": "prau"}, "alra.pair='prau': expected 'swpra' or 'pra_u' or 'pra'"),
        ({"alra.d_max": 5000}, "alra: d_max=5000: expected 2 <= d_max < V=4096"),
        ({"alra.d_max": "seven"}, "alra.d_max='seven': expected int"),
        ({"data_dir": "nowhere"}, "nowhere: no train.bin with train.json there; run prepare.py"),
        ({"teacher": "nowhere/at/all"}, "nowhere/at/all: no such folder"),
        ({"teacher": "none", "methods": "pretrain"}, "tokenizer=None with teacher=None"),
        ({"teacher": "none"}, "teacher=None: one of ('pretrain', 'vanilla_kd', 'alra') learns from one"),
        ({"student": "16x1x3"}, "num_attention_heads=3: expected a divisor of hidden_size=16"),
        (
            {"student": '{"hidden_size": 16, "layers": 1}'},
            "expected hidden_size, num_hidden_layers",
        ),
        (
            {"student": '{"hidden_size": 16, "num_attention_heads": 2}'},
            "missing 1 required positional argument: 'num_hidden_layers'",
        ),
        ({"seq_len": 12}, "seq_len=12:"),
        ({"max_steps": 25, "schedule_steps": 25}, "max_steps=25: needs 100 rows"),
        ({"lr_schedule": "wds"}, "lr_schedule='wds': expected 'cosine' or 'wsd' or 'constant'"),
        ({"device": "gpu"}, "device gpu: expected cpu, or cuda, of which torch finds none here"),
        ({"student": "300m"}, "student=300m: expected a preset (200m, "),
    ],
)
def test_slips_get_one_clear_line(world, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train.distil(load(world, tmp_path, **changes))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("processes", "rows", "asked", "group", "fits"),
    [(1, 8, 8, 1, 8), (2, 8, 8, 1, 4), (2, 8, 2, 1, 2), (4, 8, 8, 2, 2), (2, 24, 24, 2, 12), (2, 24, 8, 2, 6), (3, 45, 9, 1, 5), (3, 30, 6, 2, 2)],
)  # fmt: skip
def test_micro_batch_is_lowered_to_what_fits_the_processes(world, monkeypatch, processes, rows, asked, group, fits):
    cfg = load(world, Path("unused"), batch_rows=rows, micro_batch=asked, group=group)
    monkeypatch.setattr(parallel, "world", lambda: processes)
    assert train.fitted([], None, None, cfg).micro_batch == fits


def test_processes_that_would_cut_a_forward_batch_are_refused(world, monkeypatch):
    monkeypatch.setattr(parallel, "agree", lambda **facts: None)
    cfg = load(world, Path("unused"), batch_rows=8, micro_batch=4, group=4)
    with pytest.raises(UserError, match=r"4 processes with group=4: expected their product to divide batch_rows=8"):
        monkeypatch.setattr(parallel, "world", lambda: 4)
        run.check_config(cfg)
    with pytest.raises(UserError, match=r"3 processes with group=4"):
        monkeypatch.setattr(parallel, "world", lambda: 3)
        run.check_config(cfg)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "train.json: not whole JSON (Expecting property name"),
        ("{}", "train.json: no 'rows' in it; prepare it again"),
        ("[1]", "train.json: expected a JSON object, got list; prepare it again"),
        ('{"rows": "97"}', "train.json: rows is '97', expected int"),
    ],
)
def test_a_broken_manifest_is_told_with_its_path(world, tmp_path, text, message):
    write_rows(tmp_path, "train", 97, seed=1)
    whole = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / message}")):
        train.distil(load(world, tmp_path / "out", data_dir=tmp_path))
    for key in MANIFEST:
        (tmp_path / "train.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(UserError, match=f"no {key!r} in it"):
            open_rows(tmp_path, "train")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(world, tmp_path):
    init_student(dataclasses.replace(SHAPE, vocab_size=100)).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"vocabulary of 100, but the tokenizer has 4,096 tokens"):
        train.distil(load(world, tmp_path, student=tmp_path / "small", methods="pretrain", tokenizer=TOKENIZER))  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_where_there_is_none(world, tmp_path):
    with pytest.raises(ValueError, match="device cuda:0: expected cpu, or cuda, of which torch finds none here"):
        train.distil(load(world, tmp_path, device="cuda"))


def test_data_of_another_tokenizer_or_cut_short_is_refused(world, tmp_path):
    write_rows(tmp_path / "data", "train", 97, seed=1, tokenizer_sha256="other")
    write_rows(tmp_path / "data", "val", 7, seed=2)
    with pytest.raises(UserError, match=r"tokenizer_sha256 differs in train.json and val.json"):
        train.distil(load(world, tmp_path / "out", data_dir=tmp_path / "data"))
    write_rows(tmp_path / "data", "train", 97, seed=1, rows=98)
    with pytest.raises(UserError, match=r"train.bin: 5,432 bytes, expected 5,488 by train.json"):
        train.distil(load(world, tmp_path / "out", data_dir=tmp_path / "data"))
    write_rows(tmp_path / "data", "train", 97, seed=1)
    data = bytearray((tmp_path / "data" / "train.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "data" / "train.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"train.bin: not the bytes that train.json describes"):
        train.distil(load(world, tmp_path / "out", data_dir=tmp_path / "data"))


def test_a_second_process_is_refused_while_one_is_at_work(world, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with (
        files.locked(tmp_path / "out", RuntimeError()),
        pytest.raises(UserError, match=r"another train\.py is at work there; wait for its end, or choose another"),
    ):
        train.distil(load(world, tmp_path / "out"))
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert train.distil(load(world, tmp_path / "out")) == 0  # it is free again


def test_a_folder_that_holds_another_run_is_refused(world, finished):
    with pytest.raises(UserError, match=r"already contains a different run \(lr=0.01 there, 0.02 here\)"):
        train.distil(load(world, finished, lr=2e-2))
    told = r"different run \(\w+=.* there, .* here, \w+=.* there, .* here, \w+=.* there, .* here\); choose"
    assert re.search(told, differing(world, finished, lr=2e-2, clip=1.0, beta1=0.8, beta2=0.9))
    assert train.distil(load(world, finished)) == 0  # the same run: done, and left alone


COMPARED = {
    "methods": "pretrain,alra", "student": "STUDENT/config.json", "seed": 5, "seq_len": 12, "shuffle": True,
    "mask_after_eos": True, "schedule_steps": 7, "batch_rows": 8, "group": 2, "lr": 2e-2, "min_lr": 1e-5, "warmup_steps": 1,
    "beta1": 0.8, "beta2": 0.9, "adam_eps": 1e-5, "weight_decay": 0.1, "decay_1d": False, "clip": 1.0, "w_kd_schedule": "wsd",
    "lr_schedule": "wsd",
    "student_weights": "STUDENT", "dtype": "float32",
}  # fmt: skip


def differing(world, finished, **changes) -> str:
    """What `check_folder` says of these changes, "" where it takes them for the same run."""
    facts = json.loads((finished / "run.json").read_text())
    values = {k: str(v).replace("STUDENT", str(world / "student")) for k, v in changes.items()}
    loaded = load(world, **{"out": finished, **values})
    try:
        run.check_same(facts, f"out_dir={finished}", {**facts, "config": dataclasses.asdict(loaded)})
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", COMPARED)
def test_a_run_goes_on_only_with_what_it_learns_by(world, finished, key):
    assert f"already contains a different run ({key}=" in differing(world, finished, **{key: COMPARED[key]})


def test_every_key_of_a_run_is_compared_or_free():
    assert set(COMPARED) | {"hyper"} == configure.LEARNT


def test_a_run_tells_what_changed_when_it_went_on(world, finished, tmp_path):
    """Mended on the way: it ends within rounding of the run that was left alone."""
    keys = {"methods": "vanilla_kd,alra"}
    assert train.distil(load(world, tmp_path, **keys, max_steps=2)) == 0
    moved, teacher = tmp_path / "moved", tmp_path / "teacher"
    shutil.copytree(world / "data", moved)
    shutil.copytree(world / "teacher", teacher)
    keys |= {"recompute": True, "data_dir": moved, "teacher": teacher}
    assert train.distil(load(world, tmp_path, **keys, max_steps=4)) == 0
    assert train.distil(load(world, tmp_path, **keys, micro_batch=4)) == 0
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [(of["step"], of["config"]["max_steps"], of["config"]["micro_batch"]) for of in starts] == [
        (0, 2, 2),
        (2, 4, 2),
        (4, 6, 4),
    ]
    assert [of["config"]["data_dir"] for of in starts] == [str(world / "data"), str(moved), str(moved)]
    ours, alone = (Qwen2.from_pretrained(str(out / "alra")).state_dict() for out in (tmp_path, finished))
    for name, p in alone.items():
        torch.testing.assert_close(ours[name], p, rtol=1e-3, atol=2e-5)


def test_a_student_that_broke_goes_on_from_its_checkpoint_with_a_lower_rate(world, tmp_path, monkeypatch, capsys):
    update = train.update

    def breaking(students, teacher, stream, step, cfg):
        if step == 3:
            next(students[0].model.parameters()).data.fill_(math.nan)
        return update(students, teacher, stream, step, cfg)

    monkeypatch.setattr(train, "update", breaking)
    assert train.distil(load(world, tmp_path / "out", methods="alra")) == 1
    path = tmp_path / "out" / "alra" / "checkpoints" / "step_00000002"
    said = capsys.readouterr().out
    assert "alra stopped at step 4: " in said and f"from --student_weights={path}" in said
    monkeypatch.setattr(train, "update", update)
    more = {"methods": "alra@lower", "alra@lower.d_max": 7, "alra@lower.lr": 5e-3, "student_weights": path}
    loaded = load(world, tmp_path / "out_lower", **more)
    first = train.first_weights(loaded).state_dict()
    saved = safetensors.torch.load_file(path / "model.safetensors")
    assert all(torch.equal(first[name], p) for name, p in saved.items())
    assert train.distil(loaded) == 0 and (tmp_path / "out_lower" / "alra@lower" / "model" / "config.json").is_file()


def test_a_run_goes_on_where_only_places_and_times_differ(world, finished, tmp_path):
    """Moved data, teacher and tokenizer, other validations, and keys that prepare.py alone reads."""
    run = tmp_path / "run"
    keys = {"methods": "alra", "max_steps": 6}
    assert train.distil(load(world, run, **keys, schedule_steps=6)) == 0
    moved = tmp_path / "moved"
    for name in ("data", "teacher"):
        shutil.copytree(world / name, moved / name)
    free = {"data_dir": moved / "data", "teacher": moved / "teacher", "tokenizer": TOKENIZER, "val_every_steps": 1, "val_max_rows": 2,
            "source": "x", "source_revision": "y", "n_documents": 5, "train_rows": 9, "val_rows": 0, "val_share": 0.1, "prepare_workers": 2,
            "micro_batch": 4, "log_every_steps": 1, "checkpoint_every_steps": 1, "keep_checkpoints": 1, "histogram_every_steps": 1}  # fmt: skip
    assert train.distil(load(world, run, **{**keys, **free})) == 0
    write_rows(moved / "data", "val", 7, seed=3)
    with pytest.raises(UserError, match=r"already contains a different run \(val_sha256 differs\)"):
        train.distil(load(world, run, **{**keys, **free}))
    write_rows(moved / "data", "val", 7, seed=2)
    write_rows(moved / "data", "train", 97, seed=3)
    with pytest.raises(UserError, match=r"already contains a different run \(data_sha256 differs\)"):
        train.distil(load(world, run, **{**keys, **free}))
    write_rows(moved / "data", "train", 97, seed=1)
    shape = json.loads((moved / "teacher" / "config.json").read_text())
    (moved / "teacher" / "config.json").write_text(json.dumps({**shape, "rms_norm_eps": 1e-5}))
    with pytest.raises(UserError, match=r"already contains a different run \(teacher_shape differs\)"):
        train.distil(load(world, run, **{**keys, **free}))
    init_student(Qwen2Config(24, 31, 2, 2, 2, vocab_size=V, rope_theta=1e4), seed=8).save_pretrained(
        moved / "teacher", load_tokenizer(TOKENIZER)
    )
    with pytest.raises(UserError, match=r"already contains a different run \(teacher_sha256 differs\)"):
        train.distil(load(world, run, **{**keys, **free}))
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json: not whole JSON \(.*; move it aside"):
        train.distil(load(world, run, **keys))


# --- real weights


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the real weights are not on this machine")
def test_a_student_of_real_weights_gets_nearer_to_them(tmp_path):
    import prepare

    stories = SHARED / "data" / "stories260k"
    common = [f"--teacher={stories}", f"--data_dir={tmp_path / 'data'}", "--seq_len=64"]
    text = tmp_path / "stories.txt"
    text.write_text((stories / "sample.txt").read_text())
    prepare.prepare(
        configure.load([*common, f"--source={text}", "--train_rows=none", "--n_documents=none", "--val_rows=4"])
    )
    Qwen2Small = Qwen2Config(32, 64, 2, 4, 2, vocab_size=512, rope_theta=1e4)
    init_student(Qwen2Small).save_pretrained(tmp_path / "student")
    args = [*common, f"--student={tmp_path / 'student'}", f"--out_dir={tmp_path / 'out'}", "--methods=alra", "--max_steps=30", "--schedule_steps=30",
            "--warmup_steps=3", "--lr=1e-2", "--micro_batch=8", "--batch_rows=8", "--repeat_rows=true", "--val_every_steps=10", "--device=cpu"]  # fmt: skip
    assert train.distil(configure.load(args)) == 0
    kl = [r["val_kl"] for r in records(tmp_path / "out", "alra") if "val_kl" in r]
    assert kl[0] > kl[1] > kl[2], kl
