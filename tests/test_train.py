"""The loop: data order, the meaning of a batch, resuming, refusing, and the whole path on real input."""

import collections
import dataclasses
import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import configure
import prepare
import train
from configure import Config
from lib import files, metrics, parallel, run
from lib.device import mfu
from lib.files import UserError, read_json
from lib.hf import find_folder, weights_hash
from lib.rows import PAD, row_order
from lib.teacher import Teacher, load_teacher
from losses import IGNORE, METHODS, method_loss
from model import PRESETS, Qwen2, Qwen2Config, flops_per_token, init_student
from tests import world
from tests.world import DEMO, SEQ, SHARED, STUDENT, V, config, read_jsonl

NINE = ",".join(tuple(METHODS)[:9])  # the main table
TIMED = ("tok_per_sec", "eta_sec", "time", "mem_gib", "mfu")  # of a log's record
UNUSED = Path("unused")


def records(out: Path, method: str) -> list[dict]:
    return read_jsonl(out / method / "log.jsonl")


def untimed(out: Path, method: str) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in TIMED} for r in records(out, method)]


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if p.suffix != ".tmp")


def final_bits(out: Path, method: str, step: int = 6) -> tuple[bytes, bytes]:
    folder = out / method / "checkpoints" / f"step_{step:08d}"
    return (folder / "model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


def test_every_run_has_the_threads_of_the_runs_that_it_is_compared_with():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1  # tests/conftest.py


def test_learning_rates_that_stay_and_those_that_stay_and_fall():
    keys = {"warmup_steps": 100, "schedule_steps": 1000, "max_steps": 1000, "lr": 1e-2, "min_lr": 1e-3}
    wsd, constant = (configure.Config(lr_schedule=name, **keys) for name in ("wsd", "constant"))
    rates = [train.learning_rate(step, wsd) for step in (0, 49, 99, 100, 500, 899, 924, 949, 999)]
    assert rates == pytest.approx([1e-4, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 7.75e-3, 5.5e-3, 1e-3])
    rates = [train.learning_rate(step, constant) for step in (49, 99, 500, 999)]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])


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


def test_rows_are_visited_in_stored_order_or_in_one_of_the_seed(tiny):
    for seed in (5, 6):
        cfg = config(tiny, UNUSED, shuffle=True, seed=seed)
        rows = train.open_data(cfg, "train")
        assert train.rows_of_update(rows, 3, cfg).tolist() == row_order(3, 4, 97, seed).tolist()
    cfg = config(tiny, UNUSED)
    assert train.rows_of_update(train.open_data(cfg, "train"), 3, cfg).tolist() == [12, 13, 14, 15]


def test_the_machine_is_what_the_config_says(tiny, monkeypatch):
    for dtype, wanted in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert run.compute_dtype(config(tiny, UNUSED, dtype=dtype)) == wanted
    cfg = config(tiny, UNUSED, seed=5)
    assert train.make_student("alra", cfg).init_sha256 == weights_hash(init_student(STUDENT, 5))
    places, read = [], Qwen2.from_pretrained
    monkeypatch.setattr(
        train.Qwen2, "from_pretrained", lambda name, dtype, device, _: places.append(device) or read(name)
    )
    monkeypatch.setattr(train, "pick_device", torch.device)
    for place in ("none", "cuda:7"):
        cfg = config(tiny, UNUSED, teacher_device=place)
        train.open_teacher(cfg)
    assert places == [torch.device("cpu"), torch.device("cuda:7")]


def test_padding_never_reaches_a_loss(tiny):
    cpu = torch.device("cpu")
    rows = train.open_data(config(tiny, UNUSED), "train")
    x, y, n = rows.batch(np.arange(97), cpu)
    ids = rows.ids.astype(np.int64)
    assert x.shape == y.shape == (97, SEQ) and int((y != IGNORE).sum()) == n == (ids != PAD).sum() - 97
    assert x.max() < V and y.max() < V
    for row, labels in zip(ids, y, strict=True):
        length = (row != PAD).sum()
        assert labels.tolist() == row[1:length].tolist() + [IGNORE] * (SEQ + 1 - length)
    masked = train.open_data(config(tiny, UNUSED, mask_after_eos=True), "train")
    _, y_masked, n_masked = masked.batch(np.arange(97), cpu)
    assert (y_masked[x == 0] == IGNORE).all() and n_masked < n
    assert torch.equal(y_masked[x != 0], y[x != 0])


def test_the_weight_of_the_teacher_follows_pds_schedule(tiny):
    cfg = config(tiny, UNUSED, w_kd_schedule="wsd", methods="pretrain,pd", schedule_steps=1000, **{"pd.w_kd": 0.9})
    pretrain, pd = (train.make_student(name, cfg) for name in cfg.methods)
    weights = [train.objective_at(pd, step, cfg).keywords["moved"]["w_kd"] for step in (0, 50, 100, 989, 995, 999)]
    assert [float(w) for w in weights] == pytest.approx([0.0, 0.45, 0.9, 0.9, 0.45, 0.09])
    assert not train.objective_at(pretrain, 50, cfg).keywords["moved"]  # has no teacher whose weight could change


def gradients(tiny: Path, **changes) -> dict[str, list[torch.Tensor]]:
    """Every student's gradient in the first update, before it is clipped."""
    cfg = config(tiny, UNUSED, clip=1e9, lr=1e-2, **changes)
    rows = train.open_data(cfg, "train")
    teacher = train.open_teacher(cfg)
    students = [train.make_student(name, cfg) for name in cfg.methods]
    for s in students:
        s.optimizer.step = s.optimizer.zero_grad = lambda **_: None
    train.update(students, teacher, train.batches(rows, teacher, 0, cfg), 0, cfg)
    return {s.name: [p.grad for p in s.model.parameters()] for s in students}


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_micro_batch_and_accumulation_change_nothing(tiny, micro_batch):
    one, other = (gradients(tiny, batch_rows=16, micro_batch=m) for m in (1, micro_batch))
    for name in one:
        a, b = (torch.cat([g.flatten() for g in grads[name]]).double() for grads in (one, other))
        assert (a - b).norm() / a.norm() < 1e-6, name


def test_group_changes_the_meaning_on_purpose(tiny):
    one, four = (gradients(tiny, batch_rows=16, micro_batch=4, group=g) for g in (1, 4))
    a, b = (torch.cat([g.flatten() for g in grads["pretrain"]]) for grads in (one, four))
    assert (a - b).norm() / a.norm() > 1e-3  # rows are of unequal length


def test_tad_is_told_how_many_sequences_a_forward_batch_holds(tiny):
    cfg = config(tiny, UNUSED, methods="tad", micro_batch=4, group=4)
    rows = train.open_data(cfg, "train")
    teacher, student = train.open_teacher(cfg), train.make_student("tad", cfg)
    x, y, n = rows.batch(np.arange(4), torch.device("cpu"))
    with torch.no_grad():
        z_s, z_t = student.model(x).flatten(0, 1), teacher.model(x).flatten(0, 1)
    four, one = (method_loss("tad", z_s, z_t, y.flatten(), n_sequences=n)[0].item() for n in (4, 1))
    train.update([student], teacher, train.batches(rows, teacher, 0, cfg), 0, cfg)
    assert student.sums["loss"].item() / n == pytest.approx(four, rel=1e-5) != pytest.approx(one, rel=1e-5)


def test_a_teachers_states_and_head_come_to_the_students_device(tiny):
    """The meta device stands in for a second card."""
    cpu, home = torch.device("cpu"), torch.device("meta")
    teacher = load_teacher(str(tiny / "teacher"), torch.float32, cpu, home)
    assert teacher.head.device == teacher.hidden(torch.zeros(1, 3, dtype=torch.int64)).device == home
    assert load_teacher(str(tiny / "teacher"), torch.float32, cpu).head.device == teacher.model.head.device == cpu


def test_the_gradient_is_that_of_the_mean_over_rows_of_each_rows_mean(tiny):
    got = gradients(tiny, methods="pretrain", batch_rows=4, micro_batch=2)["pretrain"]
    x, y, _ = train.open_data(config(tiny, UNUSED), "train").batch(np.arange(4), torch.device("cpu"))
    model = init_student(STUDENT).double()
    rows = []
    for ids, labels in zip(x, y, strict=True):
        logp = model(ids[None])[0].log_softmax(-1)
        rows.append(-logp[labels != IGNORE].gather(1, labels[labels != IGNORE][:, None]).mean())
    wanted = torch.autograd.grad(sum(rows) / 4, list(model.parameters()))
    for g, w in zip(got, wanted, strict=True):
        assert (g - w).norm() <= 1e-5 * w.norm() + 1e-9


def trained(tiny: Path, n: int, prepare=lambda student: None, **changes) -> tuple[train.Student, list, list]:
    """`n` updates of `pretrain` -> the student, its gradients before the clip and its weights, after 0 .. n updates."""
    keys = {"methods": "pretrain", "lr": 1e-2, **changes}
    cfg = config(tiny, UNUSED, **keys)
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
def test_updates_are_those_of_an_adamw_written_by_hand(tiny, decay_1d):
    """In fp64, from the gradients that reached the clip: two updates of warm-up, two of the cosine, some clipped."""
    lr, min_lr, warmup, total, decay, beta1, beta2, eps, clip = 1e-2, 1e-3, 2, 5, 0.1, 0.8, 0.95, 1e-4, 1.5
    _, grads, weights = trained(tiny, 4, lr=lr, min_lr=min_lr, warmup_steps=warmup, schedule_steps=total, max_steps=4, clip=clip,
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


def test_a_group_of_parameters_has_a_rate_of_its_own_also_after_a_resume(tiny, tmp_path, monkeypatch):
    make = train.make_student

    def head_apart(name, cfg):
        s = make(name, cfg)
        (group,) = s.optimizer.param_groups
        head, others = s.model.head, [p for p in s.model.parameters() if p is not s.model.head]
        s.optimizer.param_groups[:] = [{**group, "params": [head], "lr_factor": 0.25}, {**group, "params": others}]
        return s

    monkeypatch.setattr(train, "make_student", head_apart)
    student, _, weights = trained(tiny, 1, weight_decay=0.0, adam_eps=1e-12, clip=1e9)
    ways = {n: (a - b).abs().max() for (n, _), a, b in zip(student.model.named_parameters(), *weights, strict=True)}
    head = ways.pop("model.embed_tokens.weight")
    assert head == pytest.approx(0.25 * 0.5e-2, rel=1e-3)  # Adam's first step is the rate; warm-up is half way
    assert all(way == pytest.approx(0.5e-2, rel=1e-3) for way in ways.values())
    keys = {"methods": "pretrain"}
    assert train.distil(config(tiny, tmp_path / "whole", **keys)) == 0
    assert train.distil(config(tiny, tmp_path / "cut", **keys, max_steps=3)) == 0
    assert train.distil(config(tiny, tmp_path / "cut", **keys)) == 0
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


def test_a_student_goes_on_from_the_bits_that_a_run_saved(tiny, finished, tmp_path, capsys):
    there = finished / "alra" / "model"
    loaded = config(tiny, tmp_path, student=there, student_weights=there, seed=99)
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
    assert {f["init_sha256"] for f in facts.values()} == {start} and start[:12] in said
    assert facts["alra"]["config"]["student_weights"] == str(there)
    first, again = ([r["val_ce"] for r in records(out, "pretrain") if "val_ce" in r] for out in (finished, tmp_path))
    assert again[0] < first[0]  # it had learnt something
    with pytest.raises(UserError, match=r"contains a different run \(student_weights was .*, now None\)"):
        train.distil(config(tiny, tmp_path, student=there, seed=99))


def test_a_students_folder_stands_for_the_model_inside(finished):
    for name in ("alra", "alra/model"):
        assert find_folder(str(finished / name)) == finished / "alra" / "model"


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train.distil(config(tiny, out)) == 0
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
            and facts["init_sha256"] == weights_hash(init_student(STUDENT))
        )
    assert {"mass", "local", "rest", "pair", "d_u"} <= set(records(finished, "alra")[0])
    assert len({records(finished, m)[0]["ce"] for m in ("pretrain", "vanilla_kd", "alra")}) == 3


def test_the_log_is_the_mean_over_all_tokens_since_the_last_line(tiny, tmp_path):
    """Two runs that differ in nothing but how often they speak tell the same average."""
    train.distil(config(tiny, tmp_path / "a", methods="vanilla_kd", log_every_steps=1))
    train.distil(config(tiny, tmp_path / "b", methods="vanilla_kd", log_every_steps=3))
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


def test_the_first_line_of_the_log_is_of_the_initial_weights(tiny, tmp_path):
    """CE per token, not per row or micro-batch; the rows are of unequal length."""
    keys = {"methods": "pretrain", "max_steps": 1, "log_every_steps": 1}
    train.distil(config(tiny, tmp_path, **keys))
    x, y, n = train.open_data(config(tiny, tmp_path), "train").batch(np.arange(4), torch.device("cpu"))
    with torch.no_grad():
        logp = init_student(STUDENT)(x).double().log_softmax(-1)
    ce = -logp[y != IGNORE].gather(1, y[y != IGNORE][:, None]).mean().item()
    got = records(tmp_path, "pretrain")[0]
    assert got["ce"] == got["loss"] == pytest.approx(ce, rel=1e-6) and got["valid_tokens"] == n
    assert got["lr"] == train.learning_rate(0, config(tiny, tmp_path)) == 0.5e-2


def test_validation_figures_are_those_of_the_plain_formulas(tiny, finished):
    cfg = config(tiny, finished)
    val = train.open_data(cfg, "val")
    x, y, _ = val.batch(np.arange(7), torch.device("cpu"))
    student = AutoModelForCausalLM.from_pretrained(finished / "alra" / "model")
    teacher = AutoModelForCausalLM.from_pretrained(tiny / "teacher")
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
    ours, bare = metrics.row_sums(heads[:1], heads[1], batch, 1)[0], metrics.row_sums(heads[:1], None, batch, 1)[0]
    assert ours["top1"] == 5 and set(bare) == {"n", "ce", "gap"}


def test_a_validation_reads_no_more_rows_than_it_is_told(tiny):
    cfg = config(tiny, UNUSED, methods="pretrain", val_max_rows=3, micro_batch=2)
    val = train.open_data(cfg, "val")
    student = train.make_student("pretrain", cfg)
    x, y, n = val.batch(np.arange(3), torch.device("cpu"))
    with torch.no_grad():
        logp = student.model(x).log_softmax(-1)
    ce = -logp[y != IGNORE].gather(1, y[y != IGNORE][:, None]).mean().item()
    got = train.validate([student], None, val, cfg)
    assert got == {"pretrain": {"val_ce": pytest.approx(ce, rel=1e-6)}} and n < int((val.ids != PAD).sum())


SAME_BITS = {
    "recomputed activations": {"recompute": True}, "teacher on its own device": {"teacher_device": "cpu"}, "histograms": {"histogram_every_steps": 3},
    "more lines and checkpoints": {"val_every_steps": 1, "log_every_steps": 1, "checkpoint_every_steps": 1, "keep_checkpoints": 1, "val_max_rows": 2},
    "keys of prepare.py": {"source": "x", "n_documents": 5, "train_rows": 9, "val_rows": 0, "val_share": 0.1}, "beside eight others": {"methods": NINE},
}  # fmt: skip


@pytest.mark.parametrize("keys", SAME_BITS.values(), ids=SAME_BITS)
def test_these_keys_change_no_bit(keys, tiny, finished, tmp_path, monkeypatch):
    """Nor does a cut between two lines of the log."""
    again, calls = torch.utils.checkpoint.checkpoint, []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or again(*a, **k))
    keys = {"methods": "alra"} | keys
    assert train.distil(config(tiny, tmp_path, **keys | {"max_steps": 3})) == 0
    assert train.distil(config(tiny, tmp_path, **keys)) == 0
    for name in {"alra", *keys["methods"].split(",")} & {"pretrain", "vanilla_kd", "alra"}:
        assert final_bits(tmp_path, name) == final_bits(finished, name), name
    assert len(calls) == (6 * 2 if "recompute" in keys else 0)
    if "log_every_steps" not in keys:
        late = [[r for r in untimed(out, "alra") if r["step"] > 4] for out in (finished, tmp_path)]
        assert late[0] == late[1] and late[0]


def test_each_of_nine_students_has_the_bits_of_its_solo_run(tiny, tmp_path):
    assert train.distil(config(tiny, tmp_path / "nine", methods=NINE, max_steps=3)) == 0
    for method in NINE.split(","):
        assert train.distil(config(tiny, tmp_path / method, methods=method, max_steps=3)) == 0
        assert final_bits(tmp_path / method, method, 3) == final_bits(tmp_path / "nine", method, 3), method


def test_students_of_one_method_have_settings_and_rates_of_their_own_and_the_bits_of_solo_runs(tiny, tmp_path):
    """`alra@slow` has its method's tau, its own gamma and its own rate; its log and run.json say so."""
    given = {"alra.tau": 2.0, "alra.d_max": 7, "alra@slow.gamma": 1.0, "alra@slow.lr": 5e-3}
    assert train.distil(config(tiny, tmp_path / "all", methods="alra,vanilla_kd,alra@slow,alra@same", **given)) == 0
    alone = {"alra.tau": 2.0, "alra.d_max": 7, "alra.gamma": 1.0, "lr": 5e-3, "min_lr": 3e-5}
    assert train.distil(config(tiny, tmp_path / "one", methods="alra", **alone)) == 0
    assert final_bits(tmp_path / "all", "alra@slow") == final_bits(tmp_path / "one", "alra")
    assert final_bits(tmp_path / "all", "alra@same") == final_bits(tmp_path / "all", "alra")
    rates = [r["lr"] for name in ("alra", "alra@slow") for r in records(tmp_path / "all", name) if "lr" in r]
    assert rates[3:] == [lr / 2 for lr in rates[:3]] and rates[0] == 1e-2
    facts = read_json(tmp_path / "all" / "alra@slow" / "run.json")
    assert facts["method"] == "alra@slow" and facts["overrides"] == {"tau": 2.0, "d_max": 7, "gamma": 1.0, "lr": 5e-3}


def test_checkpoints_are_kept_to_the_last_k_of_the_steps_so_far(tiny, tmp_path):
    train.distil(config(tiny, tmp_path, methods="alra", keep_checkpoints=1, max_steps=4))
    folder = tmp_path / "alra" / "checkpoints"
    assert saved(tmp_path / "alra") == ["step_00000004"]
    (folder / "step_00000005.tmp").mkdir()  # half-written
    train.distil(config(tiny, tmp_path, methods="alra", keep_checkpoints=1))
    assert {p.name for p in folder.iterdir()} == {"step_00000006", "step_00000005.tmp"}
    assert {p.stem for p in (folder / "step_00000006").iterdir()} == {"model", "optimizer", "state"}
    cfg = config(tiny, tmp_path, methods="alra", keep_checkpoints=1)
    (folder / "step_00000009").mkdir()  # later than what is saved: as another student's step is the common one
    run.save_checkpoints([train.make_student("alra", cfg)], 7, dict.fromkeys(run.COUNTS, 0), {}, cfg)
    assert saved(tmp_path / "alra") == ["step_00000007", "step_00000009"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flush, replace, done = files.flush, os.replace, []
    monkeypatch.setattr(files, "flush", lambda path: done.append(path.name) or flush(path))
    monkeypatch.setattr(files.os, "replace", lambda a, b: done.append(f"-> {b.name}") or replace(a, b))
    with files.atomic_folder(tmp_path / "step_00000003") as new:
        (new / "a").write_text("1")
        (new / "b").write_text("2")
    assert {*done[:2]} == {"a", "b"} and done[2:] == ["step_00000003.tmp", "-> step_00000003", tmp_path.name]


def test_a_rename_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    model, replace = init_student(STUDENT, 1), os.replace
    model.save_pretrained(tmp_path / "m")

    def fail(a, b):
        if b == tmp_path / "m":
            raise OSError("Input/output error")
        replace(a, b)

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(UserError, match="Input/output error"):
        init_student(STUDENT, 2).save_pretrained(tmp_path / "m")
    kept = next(path for path in (tmp_path / "m", tmp_path / "m.old") if path.exists())
    assert weights_hash(Qwen2.from_pretrained(str(kept))) == weights_hash(model)


def test_a_kill_while_the_last_model_is_written_leaves_no_run_json_and_the_next_start_writes_both(
    tiny, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Qwen2, "save_pretrained", mock.Mock(side_effect=KeyboardInterrupt))
        train.distil(config(tiny, tmp_path, methods="alra"))
    assert saved(tmp_path / "alra")[-1] == "step_00000006" and not (tmp_path / "alra" / "run.json").exists()
    assert train.distil(config(tiny, tmp_path, methods="alra")) == 0
    assert (tmp_path / "alra/model/model.safetensors").is_file() and read_json(tmp_path / "alra/run.json")["step"] == 6


def test_no_checkpoint_is_removed_before_every_student_has_the_next(tiny, tmp_path, monkeypatch, capsys):
    save, calls = safetensors.torch.save_file, []

    def fail(group, path, **keys):
        calls.append(path.parents[2].name)
        if len(calls) == 7:  # vanilla_kd has that of step 4, alra not yet
            raise OSError(errno.ENOSPC, "No space left on device")
        save(group, path, **keys)

    keys = {"methods": "vanilla_kd,alra", "keep_checkpoints": 1}
    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
        patch.setattr(safetensors.torch, "save_file", fail)
        train.distil(config(tiny, tmp_path, **keys))
    assert calls == ["vanilla_kd"] * 2 + ["alra"] * 2 + ["vanilla_kd"] * 2 + ["alra"]
    assert saved(tmp_path / "vanilla_kd") == ["step_00000002", "step_00000004"]
    assert train.distil(config(tiny, tmp_path, **keys)) == 0 and f"{tmp_path}: step 2 of 6" in capsys.readouterr().out


def test_a_student_that_breaks_stops_alone_before_its_update(tiny, tmp_path, monkeypatch, capsys):
    make, broken = train.make_student, []

    def break_one(name, cfg):
        s = make(name, cfg)
        if name == "vanilla_kd":
            with torch.no_grad():
                s.model.head[0, 0] = float("inf")
            broken.append(s)
        return s

    monkeypatch.setattr(train, "make_student", break_one)
    keys = {"vanilla_kd.lr": 5e-3}
    assert train.distil(config(tiny, tmp_path, **keys)) == 1
    said = capsys.readouterr().out
    told = r"vanilla_kd stopped at step 1: gradient norm nan, not finite: .*kd.*; skipped the update; try a smaller lr than 0.005"
    assert re.search(told, said)
    weights = torch.cat([p.flatten() for p in broken[0].model.parameters()])
    assert weights.isfinite().sum() == len(weights) - 1 and not (tmp_path / "vanilla_kd" / "log.jsonl").exists()
    assert (tmp_path / "alra" / "model").is_dir() and not (tmp_path / "vanilla_kd" / "model").exists()
    assert json.loads((tmp_path / "vanilla_kd" / "stopped.json").read_text())["step"] == 1
    monkeypatch.setattr(train, "make_student", make)
    assert train.distil(config(tiny, tmp_path, **keys)) == 1  # said again, not tried again
    assert "vanilla_kd stopped at step 1: gradient norm nan" in capsys.readouterr().out
    assert not (tmp_path / "vanilla_kd" / "model").exists()


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"  # what safetensors says of it


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), safetensors.SafetensorError(FULL)])
@pytest.mark.parametrize(("n_written", "where"), [(3, "checkpoints/step_00000004.tmp"), (6, "model.tmp")])
def test_a_full_disk_leaves_the_last_whole_checkpoint(
    tiny, finished, tmp_path, monkeypatch, capsys, error, n_written, where
):
    save, calls = safetensors.torch.save_file, []

    def fill_up(*args, **kwargs):
        calls.append(1)
        if len(calls) > n_written:
            raise error
        return save(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    assert configure.guard(lambda: train.distil(config(tiny, tmp_path, methods="alra"))) == 1
    said = capsys.readouterr().err
    assert re.search(rf"^UserError: .*{where}: cannot be written \(.*No space left.*\); free some space or check the permissions, then run the same", said, re.M)  # fmt: skip
    assert not (tmp_path / "alra" / where).exists()  # its room is free again
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    steps = [4, 6] if where == "model.tmp" else [0, 2]
    assert saved(tmp_path / "alra") == [f"step_{s:08d}" for s in steps]
    assert train.distil(config(tiny, tmp_path, methods="alra")) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_log_that_cannot_be_written_is_told_with_its_path(tmp_path):
    with pytest.raises(
        UserError, match=r"^/dev/full: cannot be written \(.*No space left on device\); free some space"
    ):
        files.append_line(Path("/dev/full"), {"step": 1})
    (tmp_path / "stopped.json.new").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"stopped.json: cannot be written \(.*No space left on device\)"):
        files.write_json(tmp_path / "stopped.json", {"step": 1})
    assert not (tmp_path / "stopped.json").exists()


def test_mfu_is_the_share_of_all_cards(monkeypatch):
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert [mfu(989e11, cuda, n) for n in (1, 4)] == pytest.approx([0.1, 0.025])
    assert mfu(1e12, torch.device("cpu"), 1) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some other card")
    assert mfu(1e12, cuda, 1) is None


def test_flops_are_those_of_counting_every_product():
    shape = Qwen2Config(24, 37, 3, 4, 2, vocab_size=101)
    matrices = 3 * (24 * 24 + 24 * 24 + 2 * 24 * 12 + 3 * 24 * 37) + 101 * 24
    attention = 3 * 2 * (2 * 4 * 6 * 29) / 2  # scores and their use, half of them masked
    assert flops_per_token(shape, 29, trained=False) == 2 * matrices + attention
    assert flops_per_token(shape, 29, trained=True) == 3 * (2 * matrices + attention)


def clocked(monkeypatch, update_sec: float) -> None:
    """train.py's clock advances in each update only."""
    clock, update = types.SimpleNamespace(**vars(time), now=1000.0), train.update
    clock.perf_counter = lambda: clock.now

    def advancing(*args):
        clock.now += update_sec
        return update(*args)

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "update", advancing)


def test_the_time_that_is_left_counts_from_where_this_process_began(tiny, tmp_path, monkeypatch):
    clocked(monkeypatch, 3)
    keys = {"methods": "pretrain", "log_every_steps": 1, "val_every_steps": 9}
    assert train.distil(config(tiny, tmp_path, **keys, max_steps=2)) == 0
    assert train.distil(config(tiny, tmp_path, **keys)) == 0
    lines = [r for r in records(tmp_path, "pretrain") if "loss" in r]
    assert [r["eta_sec"] for r in lines] == [3, 0, 9, 6, 3, 0] and {r["tok_per_sec"] for r in lines} == {4 * SEQ / 3}


def test_checkpoints_are_made_by_minutes_too(tiny, tmp_path, monkeypatch):
    clocked(monkeypatch, 20)
    keys = {"methods": "pretrain", "checkpoint_every_steps": "none", "keep_checkpoints": 9}
    assert train.distil(config(tiny, tmp_path, **keys, checkpoint_every_minutes=0.5)) == 0
    assert saved(tmp_path / "pretrain") == [f"step_{n:08d}" for n in (0, 2, 4, 6)]


def test_tensorboard_and_wandb_get_the_records_of_the_log(tiny, tmp_path, monkeypatch):
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
    assert train.distil(config(tiny, out, **keys, max_steps=4)) == 0
    assert train.distil(config(tiny, out, **keys)) == 0
    assert [of["id"] for of in started] == 2 * [of["id"] for of in started[:2]] and started[0]["id"] != started[1]["id"]
    for of, m in zip(started, 2 * ["pretrain", "alra"], strict=True):
        assert (of["project"], of["group"], of["name"], of["resume"]) == ("distil", str(out), m, "allow")
        assert of["config"]["method"] == m and of["config"]["config"]["lr"] == 0.01 and of["config"]["data_sha256"]
    for method in ("pretrain", "alra"):
        wanted = [(r["step"], r) for r in records(out, method)]
        assert [(step, r) for of, step, r in logged if of == method] == wanted and len(wanted) == 6
        got = [s[1:] for s in scalars if s[0] == out / method / "tensorboard"]
        assert sorted(got) == sorted(
            (n, k, v) for n, r in wanted for k, v in r.items() if k != "step" and v is not None
        )


def test_a_run_says_what_it_runs_on_and_prints_a_row_for_all(tiny, tmp_path, capsys):
    assert train.distil(config(tiny, tmp_path, methods="pretrain,alra")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(", processes: 1, float32, eager, micro_batch 2")
    assert said[1] == f"{tiny / 'teacher'} -> pretrain, alra {{'d_max': 7}}"
    assert said[2].startswith(f"{tiny / 'student'}: 67,488 parameters, initial weights ")
    assert said[3].startswith(f"{tmp_path}: step 0 of 6, 4 rows each; checkpoints and models take up to ")
    rows = [line.split()[-2:] for line in said if " eta " in line]
    logged = zip(*([r["ce"] for r in records(tmp_path, m) if "ce" in r] for m in ("pretrain", "alra")), strict=True)
    assert rows == [[f"{a:.4f}", f"{b:.4f}"] for a, b in logged] and len(rows) == 3
    assert sum("peak memory after the first update" in line for line in said) == 1


def test_checkpoints_that_do_not_fit_the_disk_are_refused_at_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=67_488 * (3 * 12 + 4) - 1))
    with pytest.raises(
        UserError, match=r"checkpoints and models take up to 2.6 MiB of disk, 2.6 MiB are free; choose another disk"
    ):
        train.distil(config(tiny, tmp_path, methods="alra"))
    assert train.distil(config(tiny, tmp_path, methods="alra", keep_checkpoints=1)) == 0


@pytest.fixture(autouse=True)
def handlers():
    """A run in this process leaves its signal handlers behind."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


def test_ctrl_c_while_the_run_loads_is_one_line_and_130(tiny, tmp_path, monkeypatch, capsys):
    def loading(cfg):
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(train, "open_teacher", loading)
    assert configure.guard(lambda: train.distil(config(tiny, tmp_path))) == 130
    assert capsys.readouterr().err == "\nstopped\n" and not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_an_update_saves_after_it_and_exits_0(sign, tiny, finished, tmp_path, monkeypatch, capsys):
    update = train.update

    def interrupted(students, teacher, stream, step, cfg):
        if step == 2:
            signal.raise_signal(sign)
        return update(students, teacher, stream, step, cfg)

    keys = {"methods": "alra"}
    with monkeypatch.context() as patch:
        patch.setattr(train, "update", interrupted)
        assert configure.guard(lambda: train.distil(config(tiny, tmp_path, **keys))) == 0
    assert "at step 3 of 6" in capsys.readouterr().out and saved(tmp_path / "alra") == [
        "step_00000002",
        "step_00000003",
    ]
    assert train.distil(config(tiny, tmp_path, **keys)) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    assert untimed(tmp_path, "alra") == untimed(finished, "alra")  # the line of step 4 is of updates on both sides


def test_nohup_stays_nohup(tiny, tmp_path, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    update = train.update
    monkeypatch.setattr(train, "update", lambda *args: signal.raise_signal(signal.SIGHUP) or update(*args))
    assert train.distil(config(tiny, tmp_path, methods="pretrain")) == 0
    assert saved(tmp_path / "pretrain")[-1] == "step_00000006"


@pytest.mark.slow
def test_kill_9_loses_steps_but_never_bits(tiny, tmp_path):
    """Killed in whatever it does after a certain checkpoint, with many steps left."""
    keys = {"max_steps": 100_000, "schedule_steps": 100_000, "repeat_rows": True, "val_every_steps": 100_000,
            "checkpoint_every_steps": 3, "methods": "pretrain,alra"}  # fmt: skip
    made = tmp_path / "cut" / "alra" / "checkpoints"
    for step in (3, 9):
        ready = lambda step=step: any(int(p.name[5:13]) >= step for p in made.glob("step_*"))  # noqa: E731
        world.kill_when(ready, "train.py", *world.flags(tiny, tmp_path / "cut", **keys))
    newest = [int(saved(tmp_path / "cut" / m)[-1].removeprefix("step_")) for m in ("pretrain", "alra")]
    keys["max_steps"] = max(newest) + 3
    for folder in ("cut", "whole"):
        assert train.distil(config(tiny, tmp_path / folder, **keys)) == 0
    for method in ("pretrain", "alra"):
        cut, whole = (final_bits(tmp_path / n, method, keys["max_steps"]) for n in ("cut", "whole"))
        assert cut == whole, method


def test_histograms_hold_every_position(tiny, tmp_path):
    keys = {"methods": "vanilla_kd,alra", "histogram_every_steps": 3, "checkpoint_every_steps": 3}
    assert train.distil(config(tiny, tmp_path, **keys, max_steps=4)) == 0
    shutil.rmtree(tmp_path / "alra" / "checkpoints" / "step_00000004")  # as a kill leaves it: update 3 is made again
    assert train.distil(config(tiny, tmp_path, **keys)) == 0
    teacher = read_jsonl(tmp_path / "teacher.jsonl")
    student = read_jsonl(tmp_path / "alra" / "histograms.jsonl")
    assert [r["step"] for r in teacher] == [r["step"] for r in student] == [0, 3]
    assert not (tmp_path / "vanilla_kd" / "histograms.jsonl").exists()
    cfg = config(tiny, tmp_path)
    rows = train.open_data(cfg, "train")
    x, y, n = rows.batch(train.rows_of_update(rows, 3, cfg), torch.device("cpu"))
    with torch.no_grad():
        p = AutoModelForCausalLM.from_pretrained(tiny / "teacher")(x).logits[y != IGNORE].double().softmax(-1)
    got, labels = teacher[1], y[y != IGNORE]
    counts = (got[key] for key in ("p_label_hist", "p_top1_hist", "d_u_hist"))
    assert got["n"] == n and all(sum(count) == n for count in (*counts, student[1]["d_u_hist"]))
    assert got["p_label"] == pytest.approx(p.gather(1, labels[:, None]).mean().item(), rel=1e-4)
    assert got["p_top1"] == pytest.approx(p.max(-1).values.mean().item(), rel=1e-4)
    assert got["agree"] == pytest.approx((p.argmax(-1) == labels).double().mean().item(), abs=1e-6)
    assert got["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
    assert len(got["d_u_hist"]) == len(student[1]["d_u_hist"]) == 8 and sum(got["d_u_hist"][:3]) == 0  # 3 .. d_max = 7


@pytest.mark.parametrize(
    ("processes", "rows", "asked", "group", "fits"),
    [(1, 8, 8, 1, 8), (2, 8, 8, 1, 4), (2, 8, 2, 1, 2), (4, 8, 8, 2, 2), (2, 24, 24, 2, 12), (2, 24, 8, 2, 6), (3, 45, 9, 1, 5), (3, 30, 6, 2, 2)],
)  # fmt: skip
def test_micro_batch_is_lowered_to_what_fits_the_processes(tiny, monkeypatch, processes, rows, asked, group, fits):
    cfg = config(tiny, UNUSED, batch_rows=rows, micro_batch=asked, group=group)
    monkeypatch.setattr(parallel, "world", lambda: processes)
    assert train.choose_micro_batch([], None, None, cfg).micro_batch == fits


def test_a_card_gets_the_largest_micro_batch_that_fits_and_a_run_keeps_it(tiny, finished, tmp_path, monkeypatch):
    tried = []

    def accumulate(students, teacher, stream, step, cfg):
        tried.append(cfg.micro_batch)
        if cfg.micro_batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "accumulate", accumulate)
    monkeypatch.setattr(train, "batches", lambda *args: iter(()))
    cfg = config(tiny, tmp_path, batch_rows=48, micro_batch="none", group=2, methods="alra")
    students = [train.make_student("alra", cfg)]
    on_card = dataclasses.replace(cfg, device="cuda:0")
    assert train.choose_micro_batch(students, None, None, on_card).micro_batch == 4 and tried == [
        48,
        24,
        16,
        12,
        8,
        6,
        4,
    ]
    assert train.choose_micro_batch(students, None, None, cfg).micro_batch == 2  # on the CPU: one forward batch
    resumed = dataclasses.replace(on_card, out_dir=str(finished), group=1)
    assert train.choose_micro_batch(students, None, None, resumed).micro_batch == 2 and len(tried) == 7


def test_out_of_memory_is_one_line_that_says_what_to_set(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_teacher", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(UserError, match=r"out of memory on cpu: set a micro_batch below 2, --recompute=True, or fewer"):
        train.distil(config(tiny, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_processes_that_would_cut_a_forward_batch_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(parallel, "check_agreement", lambda **facts: None)
    cfg = config(tiny, UNUSED, batch_rows=8, micro_batch=4, group=4)
    for n in (3, 4):
        monkeypatch.setattr(parallel, "world", lambda n=n: n)
        with pytest.raises(UserError, match=rf"{n} processes with group=4: expected their product to divide"):
            run.check_config(cfg)


COMPARED = {
    "methods": "pretrain,alra", "student": "STUDENT/config.json", "seed": 5, "seq_len": 12, "shuffle": True, "mask_after_eos": True,
    "schedule_steps": 7, "batch_rows": 8, "group": 2, "lr": 2e-2, "min_lr": 1e-5, "warmup_steps": 1, "beta1": 0.8, "beta2": 0.9, "adam_eps": 1e-5,
    "weight_decay": 0.1, "decay_1d": False, "clip": 1.0, "w_kd_schedule": "wsd", "lr_schedule": "wsd", "student_weights": "STUDENT", "dtype": "float32",
    "hyper": "{'alra': {'gamma': 1.0}}",
}  # fmt: skip


@pytest.mark.parametrize("key", COMPARED)
def test_a_run_goes_on_only_with_what_it_learns_by(tiny, finished, key):
    facts = read_json(finished / "run.json")
    cfg = config(tiny, finished, **{key: str(COMPARED[key]).replace("STUDENT", str(tiny / "student"))})
    with pytest.raises(UserError, match=rf"contains a different run \({key} was .*, now "):
        run.check_same_run(facts, "here", facts | {"config": dataclasses.asdict(cfg)})


def test_every_key_is_compared_or_free_and_so_is_all_content(finished):
    assert {*COMPARED} == {*configure.LEARNT}
    facts = read_json(finished / "run.json")
    for key in ("data_sha256", "val_sha256", "tokenizer_sha256", "teacher_sha256", "teacher_shape"):
        with pytest.raises(UserError, match=rf"contains a different run \({key} differs\); choose another out_dir"):
            run.check_same_run(facts, "here", facts | {key: "other"})


def test_a_run_goes_on_with_moved_files_and_tells_where_each_start_was(tiny, finished, tmp_path):
    """With another micro_batch it ends within rounding of the run that was left alone."""
    keys, moved = {"methods": "vanilla_kd,alra"}, tmp_path / "moved"
    assert train.distil(config(tiny, tmp_path, **keys, max_steps=2)) == 0
    for name in ("data", "teacher"):
        shutil.copytree(tiny / name, moved / name)
    keys |= {"data_dir": moved / "data", "teacher": moved / "teacher", "tokenizer": DEMO}
    assert train.distil(config(tiny, tmp_path, **keys, max_steps=4)) == 0
    assert train.distil(config(tiny, tmp_path, **keys, micro_batch=4)) == 0
    starts = [(start["step"], start["config"]) for start in read_json(tmp_path / "run.json")["starts"]]
    found = [(step, of["max_steps"], of["micro_batch"]) for step, of in starts]
    assert found == [(0, 2, 2), (2, 4, 2), (4, 6, 4)]
    assert [of["data_dir"] for _, of in starts] == [str(tiny / "data"), str(moved / "data"), str(moved / "data")]
    ours, alone = (Qwen2.from_pretrained(str(out / "alra")).state_dict() for out in (tmp_path, finished))
    for name, p in alone.items():
        torch.testing.assert_close(ours[name], p, rtol=1e-3, atol=2e-5)
    world.write_rows(moved / "data", "val", 7, seed=3)
    with pytest.raises(UserError, match=r"contains a different run \(val_sha256 differs\)"):
        train.distil(config(tiny, tmp_path, **keys))


def test_a_student_that_broke_goes_on_from_its_checkpoint_with_a_lower_rate(tiny, tmp_path, monkeypatch, capsys):
    update = train.update

    def breaking(students, teacher, stream, step, cfg):
        if step == 3:
            next(students[0].model.parameters()).data.fill_(math.nan)
        return update(students, teacher, stream, step, cfg)

    path = tmp_path / "out" / "alra" / "checkpoints" / "step_00000002"
    with monkeypatch.context() as patch:
        patch.setattr(train, "update", breaking)
        assert train.distil(config(tiny, tmp_path / "out", methods="alra")) == 1
    said = capsys.readouterr().out
    assert "alra stopped at step 4: " in said and f"from --student_weights={path}" in said
    more = {"methods": "alra@lower", "alra@lower.d_max": 7, "alra@lower.lr": 5e-3, "student_weights": path}
    cfg = config(tiny, tmp_path / "out_lower", **more)
    first = train.first_weights(cfg).state_dict()
    kept = safetensors.torch.load_file(path / "model.safetensors")
    assert all(torch.equal(first[name], p) for name, p in kept.items())
    assert train.distil(cfg) == 0 and (tmp_path / "out_lower" / "alra@lower" / "model" / "config.json").is_file()


def two_updates(into) -> None:
    """Two updates of three students on a device that computes nothing; what the host asked it for, by name."""
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    backend_registration._setup_privateuseone_for_python_backend("standin", module)
    FakeTensor.is_cuda = property(lambda self: self.device.type == "standin")
    asked = collections.Counter()

    def count(name, value):
        def counted(self, *args, **kwargs):
            asked[name] += 1
            return value(self)

        setattr(FakeTensor, name, counted)

    count("tolist", lambda t: [1.0] * t.numel())
    for name in ("item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"):
        count(name, lambda t: 1.0)
    shape, device = PRESETS["mini"], torch.device("standin:0")
    cfg = Config(methods=("alra", "vanilla_kd", "pretrain"), student="mini", batch_rows=4, micro_batch=2, seq_len=16)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        students = []
        for name in cfg.methods:
            model = Qwen2(shape)
            students.append(train.Student(name, model, torch.optim.AdamW(model.parameters(), fused=True), None, ""))
        teacher = Qwen2(shape).requires_grad_(False)
        for p in teacher.parameters():
            p.data = p.data.bfloat16()
        teacher, x = Teacher(teacher, device), torch.zeros(2, 16, dtype=torch.long)
        stream = ((x, x.clone(), 30, teacher.hidden(x)) for _ in itertools.count())
        for step in range(2):
            train.update(students, teacher, stream, step, cfg)
    into.put(dict(asked))


def test_the_host_waits_once_in_an_update():
    spawn = multiprocessing.get_context("spawn")  # the stand-in is for a whole process
    found = spawn.SimpleQueue()
    child = spawn.Process(target=two_updates, args=(found,))
    child.start()
    child.join(120)
    assert child.exitcode == 0 and found.get() == {"tolist": 2}


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the real weights are not on this machine")
def test_a_student_of_real_weights_gets_nearer_to_them(tmp_path):
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
