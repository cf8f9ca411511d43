"""The loop: data order, the meaning of a batch, resuming, refusing, and the whole path on real input."""

import collections
import dataclasses
import errno
import math
import os
import platform
import re
import resource
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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import configure
import train
from configure import Config
from lib import files, parallel
from lib.device import mfu, pick_device
from lib.errors import UserError
from lib.files import read_json
from lib.hf import find_folder, weights_hash
from lib.rows import PAD, row_order
from losses import IGNORE, method_loss
from model import Qwen2, Qwen2Config, flops_per_token, init_student
from run import cache, checkpoints, identity, log, preflight, students
from run.methods import make_objective
from run.teacher import Teacher, load_teacher
from tests import world
from tests.world import (
    DEMO,
    SEQ,
    STUDENT,
    V,
    config,
    final_bits,
    read_jsonl,
    records,
    saved,
    untimed,
    write_rows,
)

UNUSED = Path("unused")


def test_learning_rates_by_hand():
    keys = {"warmup_steps": 100, "schedule_steps": 1000, "max_steps": 1000, "lr": 1e-2, "min_lr": 1e-3}
    steps = (49, 99, 100, 500, 899, 949, 999)
    for name, rates in {"wsd": [5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 5.5e-3, 1e-3], "constant": [5e-3] + 6 * [1e-2]}.items():
        cfg = Config(lr_schedule=name, **keys)
        assert [train.learning_rate(n, cfg) for n in steps] == pytest.approx(rates)
    for n, rate in {0: 6e-4 / 512, 511: 6e-4, 63_455: 3.3e-4, 126_399: 6e-5}.items():  # the paper's cosine
        assert train.learning_rate(n, Config()) == pytest.approx(rate, rel=1e-4)


def test_row_order_is_a_function_of_step_and_seed_alone(tiny):
    assert row_order(3, 4, 97, None).tolist() == [12, 13, 14, 15]
    assert row_order(24, 4, 97, None).tolist() == [96, 0, 1, 2]  # into the next pass
    seen = np.concatenate([row_order(step, 4, 97, 1234) for step in range(97)])  # four passes
    assert all(sorted(seen[i * 97 : (i + 1) * 97]) == list(range(97)) for i in range(4))
    assert seen[:97].tolist() != seen[97:194].tolist() != list(range(97))
    assert row_order(40, 4, 97, 1234).tolist() == seen[160:164].tolist()
    assert row_order(0, 5, 1000, 1234).tolist() == [722, 185, 218, 946, 259]  # on every platform
    for n in (1, 2, 3, 1000, 1023, 1024, 1025):
        assert sorted(row_order(2, n, n, 5)) == [*range(n)]
    for keys, seed in (({}, None), ({"shuffle": True, "seed": 5}, 5), ({"shuffle": True, "seed": 6}, 6)):
        cfg = config(tiny, UNUSED, **keys)
        used = train.rows_of_update(preflight.open_data(cfg, "train"), 3, cfg)
        assert used.tolist() == row_order(3, 4, 97, seed).tolist() != row_order(3, 4, 97, 7).tolist()


def test_dtype_seed_and_the_teachers_device_are_those_of_the_config(tiny, monkeypatch):
    """The meta device stands in for a second card."""
    for dtype, wanted in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert students.compute_dtype(config(tiny, UNUSED, dtype=dtype)) == wanted
    student = train.make_student("alra", config(tiny, UNUSED, seed=5))
    assert student.init_sha256 == weights_hash(init_student(STUDENT, 5))
    cpu, home, places, read = torch.device("cpu"), torch.device("meta"), [], Qwen2.from_pretrained
    teacher = load_teacher(str(tiny / "teacher"), torch.float32, cpu, home)
    assert teacher.head.device == teacher.hidden(torch.zeros(1, 3, dtype=torch.int64)).device == home
    monkeypatch.setattr(Qwen2, "from_pretrained", lambda name, dtype, device, _: places.append(device) or read(name))
    monkeypatch.setattr(cache, "pick_device", torch.device)
    for place in ("none", "cuda:7"):
        train.open_teacher(config(tiny, UNUSED, teacher_device=place))
    assert places == [cpu, torch.device("cuda:7")]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_memory_that_is_freed_on_the_cpu_is_kept_for_the_next_tensor():
    pick_device("cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    n_bytes = sum(torch.ones(12 << 20).nbytes for _ in range(10))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert (after - before) * resource.getpagesize() < n_bytes / 2  # of the first ones alone


def test_padding_never_reaches_a_loss(tiny):
    cpu = torch.device("cpu")
    rows = preflight.open_data(config(tiny, UNUSED), "train")
    x, y, n = rows.batch(np.arange(97), cpu)
    ids = rows.ids.astype(np.int64)
    assert x.shape == y.shape == (97, SEQ) and int((y != IGNORE).sum()) == n == (ids != PAD).sum() - 97
    assert x.max() < V and y.max() < V
    for row, labels in zip(ids, y, strict=True):
        length = (row != PAD).sum()
        assert labels.tolist() == row[1:length].tolist() + [IGNORE] * (SEQ + 1 - length)
    masked = preflight.open_data(config(tiny, UNUSED, mask_after_eos=True), "train")
    _, y_masked, n_masked = masked.batch(np.arange(97), cpu)
    assert (y_masked[x == 0] == IGNORE).all() and n_masked < n
    assert torch.equal(y_masked[x != 0], y[x != 0])


def test_the_weight_of_the_teacher_follows_pds_schedule(tiny):
    cfg = config(tiny, UNUSED, w_kd_schedule="wsd", methods="pretrain,pd", schedule_steps=1000, **{"pd.w_kd": 0.9})
    pretrain, pd = (train.make_student(name, cfg) for name in cfg.methods)
    weights = [pd.objective_at(step).keywords["scheduled"]["w_kd"] for step in (0, 50, 100, 989, 995, 999)]
    assert [float(w) for w in weights] == pytest.approx([0.0, 0.45, 0.9, 0.9, 0.45, 0.09])
    assert not pretrain.objective_at(50).keywords["scheduled"]  # has no teacher whose weight could change


def mean_ce(model, rows, n: int) -> tuple[float, int]:
    """CE per token of the first n rows, and their tokens."""
    x, y, n_valid = rows.batch(np.arange(n), torch.device("cpu"))
    with torch.no_grad():
        logp = model(x)[y != IGNORE].double().log_softmax(-1)
    return -logp.gather(1, y[y != IGNORE][:, None]).mean().item(), n_valid


def gradients(tiny: Path, **changes) -> dict[str, list[torch.Tensor]]:
    """Every student's gradient in the first update, before it is clipped."""
    cfg = config(tiny, UNUSED, clip=1e9, lr=1e-2, **changes)
    rows = preflight.open_data(cfg, "train")
    teacher = train.open_teacher(cfg)
    students = [train.make_student(name, cfg) for name in cfg.methods]
    for s in students:
        s.optimizer.step = s.optimizer.zero_grad = lambda **_: None
    train.update(students, teacher, train.micro_batches(rows, teacher, [0], cfg), 0, cfg)
    return {s.name: [p.grad for p in s.model.parameters()] for s in students}


def test_micro_batches_change_nothing_and_groups_do_on_purpose(tiny):
    """Rows are of unequal length."""
    sizes = {"1": (1, 1), "4": (4, 1), "16": (16, 1), "group": (4, 4)}
    grads = {name: gradients(tiny, batch_rows=16, micro_batch=m, group=g) for name, (m, g) in sizes.items()}
    for name in grads["1"]:
        one, *others = (torch.cat([g.flatten() for g in got[name]]).double() for got in grads.values())
        four, sixteen, group = ((one - other).norm() / one.norm() for other in others)
        assert max(four, sixteen) < 1e-6 and group > 1e-3, name


def test_tad_is_told_how_many_sequences_a_forward_batch_holds(tiny):
    cfg = config(tiny, UNUSED, methods="tad", micro_batch=4, group=4)
    rows = preflight.open_data(cfg, "train")
    teacher, student = train.open_teacher(cfg), train.make_student("tad", cfg)
    x, y, n = rows.batch(np.arange(4), torch.device("cpu"))
    with torch.no_grad():
        z_s, z_t = student.model(x).flatten(0, 1), teacher.model(x).flatten(0, 1)
    four, one = (method_loss("tad", z_s, z_t, y.flatten(), n_sequences=n)[0].item() for n in (4, 1))
    train.update([student], teacher, train.micro_batches(rows, teacher, [0], cfg), 0, cfg)
    assert student.sums["loss"].item() / n == pytest.approx(four, rel=1e-5) != pytest.approx(one, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_over_rows_of_each_rows_mean(tiny):
    got = gradients(tiny, methods="pretrain", batch_rows=4, micro_batch=2)["pretrain"]
    x, y, _ = preflight.open_data(config(tiny, UNUSED), "train").batch(np.arange(4), torch.device("cpu"))
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
    rows = preflight.open_data(cfg, "train")
    student, grads = train.make_student("pretrain", cfg), []
    prepare(student)
    weights = [[p.detach().double() for p in student.model.parameters()]]
    stream = train.micro_batches(rows, None, range(n), cfg)
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

    def head_apart(name, cfg, tokenizer=None):
        s = make(name, cfg, tokenizer)
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
    before = finished / "alra" / "model"
    keys = {"student": before, "student_weights": before, "seed": 99, "methods": "pretrain", "max_steps": 3}
    cfg = config(tiny, tmp_path, **keys)
    model = train.make_student("pretrain", cfg).model
    kept = safetensors.torch.load_file(before / "model.safetensors")
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters()) and model.training
    assert all(torch.equal(kept[k], p) for k, p in model.state_dict().items())
    assert train.distil(cfg) == 0
    facts, start = read_json(tmp_path / "pretrain" / "run.json"), weights_hash(Qwen2.from_pretrained(str(before)))
    assert facts["init_sha256"] == start and start[:12] in capsys.readouterr().out
    assert facts["config"]["student_weights"] == str(before)
    first, again = ([r["val_ce"] for r in records(out, "pretrain") if "val_ce" in r] for out in (finished, tmp_path))
    assert again[0] < first[0]  # it had learnt something
    with pytest.raises(UserError, match=r"contains a different run \(pretrain: student_weights was .*, now None\)"):
        train.distil(config(tiny, tmp_path, **keys | {"student_weights": "none"}))


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train.distil(config(tiny, out)) == 0
    return out


def test_a_run_leaves_logs_and_models_that_transformers_reads(finished):
    for method in ("pretrain", "vanilla_kd", "alra"):
        model, log = finished / method / "model", records(finished, method)
        steps, checks = ([r for r in log if key in r] for key in ("loss", "val_ce"))
        assert [r["step"] for r in steps] == [2, 4, 6] and [r["step"] for r in checks] == [3, 6]
        assert {"ce", "lr", "gnorm", "tok_per_sec", "valid_tokens", "nominal_tokens"} <= set(steps[0])
        assert {"val_agree", "val_teacher_ce", "val_teacher_entropy"} <= set(checks[0])
        assert all(checks[1][key] < checks[0][key] for key in ("val_ce", "val_kl")[: 1 + (method != "pretrain")])
        assert steps[-1]["nominal_tokens"] == 6 * 4 * SEQ > steps[-1]["valid_tokens"] > 0
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        assert AutoModelForCausalLM.from_pretrained(model).config.eos_token_id == tokenizer.eos_token_id == 0
        facts = read_json(finished / method / "run.json")
        first = weights_hash(init_student(STUDENT))
        assert [facts[key] for key in ("method", "step", "init_sha256")] == [method, 6, first]
        assert find_folder(str(model.parent)) == find_folder(str(model)) == model
    assert {"mass", "local", "rest", "pair", "d_u"} <= set(records(finished, "alra")[0])
    assert len({records(finished, m)[0]["ce"] for m in ("pretrain", "vanilla_kd", "alra")}) == 3


def test_the_log_is_the_mean_over_all_tokens_since_the_last_line(tiny, finished, tmp_path):
    """Per token, not per row, and before the update; a line of two updates averages two lines of one."""
    cfg = config(tiny, tmp_path, methods="vanilla_kd", log_every_steps=1)
    train.distil(cfg)
    every, second = ([r for r in records(out, "vanilla_kd") if "loss" in r] for out in (tmp_path, finished))
    ce, n = mean_ce(init_student(STUDENT), preflight.open_data(cfg, "train"), 4)
    assert every[0]["ce"] == pytest.approx(ce, rel=1e-6) and every[0]["valid_tokens"] == n
    assert every[0]["lr"] == train.learning_rate(0, cfg) == 0.5e-2
    counts = np.diff([0] + [r["valid_tokens"] for r in every])
    for i, record in enumerate(second):
        part = slice(2 * i, 2 * i + 2)
        for key in ("loss", "kd", "ce"):
            mean = np.average([r[key] for r in every[part]], weights=counts[part])
            assert record[key] == pytest.approx(mean, rel=1e-5)
        assert record["loss"] == pytest.approx(0.5 * record["kd"] + 0.5 * record["ce"], rel=1e-5)


def test_validation_figures_are_those_of_the_plain_formulas(tiny, finished):
    cfg = config(tiny, finished)
    val = preflight.open_data(cfg, "val")
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
    cfg = config(tiny, UNUSED, methods="pretrain", val_max_rows=3)  # of no more rows than that
    student = train.make_student("pretrain", cfg)
    ce, n = mean_ce(student.model, val, 3)
    got = train.validate([student], None, val, cfg)
    assert got == {"pretrain": {"val_ce": pytest.approx(ce, rel=1e-6)}} and n < int((y != IGNORE).sum())


def test_what_a_run_takes_and_what_its_ces_are_read_against_is_said(tiny, tmp_path, capsys):
    data = shutil.copytree(tiny / "data", tmp_path / "data")
    write_rows(data, "val", 7, seed=2, unigram_ce=5.25, unigram_half=0.5)
    keys = {"methods": "alra", "data_dir": data, "val_max_rows": 5, "val_every_steps": 1, "repeat_rows": True}
    assert train.distil(config(tiny, tmp_path / "run", **keys, max_steps=2, schedule_steps=40)) == 0
    told, ln_v = capsys.readouterr().out, math.log(V)
    for words in ("2 updates of 4 rows are 0.08 passes over 97 rows", "5 held-out rows give a CE to about ± 0.59", "worse than a unigram model, so a low KL",
                  "ends at 1.0e-02 of 1.0e-02; to end at 6.0e-05 set schedule_steps", f"ln V) {ln_v:.4f}, unigram over all held-out rows 5.2500, teacher "):  # fmt: skip
        assert told.count(words) == 1, words
    known = {"val_uniform_ce": ln_v, "val_unigram_ce": 5.25}
    assert known.items() <= records(tmp_path / "run", "alra")[-1].items()
    for ce, n in ((5.2, 0), (5.3, 1), (8.0, 1)):
        log.say_levels(known | {"val_teacher_ce": ce})
        assert capsys.readouterr().out.count("warning") == n


def test_a_run_that_falls_below_a_third_of_its_best_speed_says_once_what_to_do(monkeypatch, capsys):
    speeds = (300, 900, 301, 299, 200, 1200, 90)
    for threads, device, steps in ((2, "cpu", [3]), (1, "cpu", []), (2, "cuda", [])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        slowed = students.Run(types.SimpleNamespace(device=device), {})
        for slowed.step, speed in enumerate(speeds):
            log.say_if_slower(speed, slowed)
        said = capsys.readouterr().out
        assert [int(step) for step in re.findall(r"step (\d+): ", said)] == steps
        assert not said or ("299 tok/s after 900; " in said and "OMP_NUM_THREADS=1" in said)


def test_keys_of_speed_log_and_data_change_no_bit(tiny, finished, tmp_path, monkeypatch):
    """Recomputed activations, a teacher on its own device, more lines and checkpoints, keys of prepare.py; and a cut."""
    again, calls = torch.utils.checkpoint.checkpoint, []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or again(*a, **k))
    keys = {"recompute": True, "teacher_device": "cpu", "histogram_every_steps": 3, "val_every_steps": 1, "log_every_steps": 1,
            "checkpoint_every_steps": 1, "keep_checkpoints": 1, "val_max_rows": 2, "source": "x", "train_rows": 9, "val_share": 0.1,
            "val_rows": 0}  # fmt: skip
    for n in (3, 6):
        assert train.distil(config(tiny, tmp_path, methods="alra", **keys, max_steps=n)) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra") and len(calls) == 6 * 2


def test_each_of_many_students_has_the_bits_of_its_solo_run(tiny, tmp_path):
    """Two have labels: `alra@slow` has its method's tau, and its own gamma and rate."""
    settings = {"alra.tau": 2.0, "alra.d_max": 7}
    many = {"methods": "pretrain,atkd,tad,alra,alra@slow,alra@same", **settings, "alra@slow.gamma": 1.0, "alra@slow.lr": 5e-3}  # fmt: skip
    assert train.distil(config(tiny, tmp_path / "many", max_steps=2, **many)) == 0
    for name in many["methods"].split(","):
        method = name.partition("@")[0]
        own = {"alra.gamma": 1.0, "lr": 5e-3, "min_lr": 3e-5} if name == "alra@slow" else {}
        keys = {"methods": method, **(settings if method == "alra" else {}), **own}
        assert train.distil(config(tiny, tmp_path / name, max_steps=2, **keys)) == 0
        assert final_bits(tmp_path / name, method, 2) == final_bits(tmp_path / "many", name, 2), name
    rates = [[r["lr"] for r in records(tmp_path / "many", name) if "lr" in r] for name in ("alra", "alra@slow")]
    assert rates == [[1e-2], [5e-3]]
    facts = read_json(tmp_path / "many" / "alra@slow" / "run.json")
    assert facts["method"] == "alra@slow" and facts["overrides"] == {"tau": 2.0, "d_max": 7, "gamma": 1.0, "lr": 5e-3}


def test_checkpoints_are_kept_to_the_last_k_of_the_steps_so_far(tiny, tmp_path):
    """And, besides, to the multiples of keep_every_steps."""
    cfg = config(tiny, tmp_path, methods="alra", keep_checkpoints=1, keep_every_steps=4)
    train.distil(dataclasses.replace(cfg, max_steps=2))
    folder = tmp_path / "alra" / "checkpoints"
    assert saved(tmp_path / "alra") == ["step_00000000", "step_00000002"]
    (folder / "step_00000005.tmp").mkdir()  # half-written
    train.distil(cfg)
    kept = {"step_00000000", "step_00000004"}
    assert {p.name for p in folder.iterdir()} == kept | {"step_00000006", "step_00000005.tmp"}
    (folder / "step_00000009").mkdir()  # later than what is saved: as another student's step is the common one
    facts = {"made_by": {"alra": {}}}
    checkpoints.save_checkpoints([train.make_student("alra", cfg)], students.Run(cfg, facts, 7))
    assert {*saved(tmp_path / "alra")} == kept | {"step_00000007", "step_00000009"}


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flush, replace, done = files.flush, os.replace, []
    monkeypatch.setattr(files, "flush", lambda path: done.append(path.name) or flush(path))
    monkeypatch.setattr(files.os, "replace", lambda a, b: done.append(f"-> {b.name}") or replace(a, b))
    with files.atomic_folder(tmp_path / "step_3") as new:
        (new / "a").write_text("1")
        (new / "b").write_text("2")
    assert {*done[:2]} == {"a", "b"} and done[2:] == [".step_3.alra-new", "-> step_3", tmp_path.name]


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
    kept = next(path for path in (tmp_path / "m", tmp_path / ".m.alra-old") if path.exists())
    assert weights_hash(Qwen2.from_pretrained(str(kept))) == weights_hash(model)


def test_no_checkpoint_is_removed_before_every_student_has_the_next(tiny, tmp_path, monkeypatch, capsys):
    save, calls = safetensors.torch.save_file, []

    def fail(group, path, **keys):
        calls.append(next(name for name in ("vanilla_kd", "alra") if f"/{name}/" in str(path)))
        if len(calls) == 7:  # vanilla_kd has that of step 4, alra not yet
            raise OSError(errno.ENOSPC, "No space left on device")
        save(group, path, **keys)

    keys = {"methods": "vanilla_kd,alra", "keep_checkpoints": 1}
    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
        patch.setattr(safetensors.torch, "save_file", fail)
        train.distil(config(tiny, tmp_path, **keys, max_steps=4))
    assert calls == ["vanilla_kd"] * 2 + ["alra"] * 2 + ["vanilla_kd"] * 2 + ["alra"]
    assert saved(tmp_path / "vanilla_kd") == ["step_00000002", "step_00000004"]
    assert train.distil(config(tiny, tmp_path, **keys)) == 0 and f"{tmp_path}: step 2 of 6" in capsys.readouterr().out


@pytest.mark.parametrize(("most", "broken"), [(2, "gradient"), (1, "gradient"), (9, "weights")])
def test_bad_updates_are_skipped_and_a_student_that_makes_no_other_stops_alone(tiny, finished, tmp_path, monkeypatch, capsys, most, broken):  # fmt: skip
    """Two bad gradients in a row: one more than may be, or not; weights that are not finite. It goes on at a lower rate."""
    update, clip, out, lower, weights = train.update, train.clip_gradients, tmp_path / "out", tmp_path / "lower", {}
    at = []  # the step, and the head whose gradient or weight breaks

    def following(students, teacher, stream, step, cfg):
        at[:] = [step, students[0].model.head if students[0].name == "vanilla_kd" else None]
        return update(students, teacher, stream, step, cfg)

    def breaking(parameters, max_norm):
        parameters = list(parameters)
        step, head = at
        if step in (2, 3) and any(p is head for p in parameters):
            (head.data if broken == "weights" else head.grad)[0, 0] = math.nan
            weights[step] = head.data.clone()
        return clip(parameters, max_norm)

    keys = {"methods": "vanilla_kd,alra", "vanilla_kd.lr": 5e-3, "max_skipped_updates": most}
    folder = out / "vanilla_kd"
    with monkeypatch.context() as patch:
        patch.setattr(train, "update", following)
        patch.setattr(train, "clip_gradients", breaking)
        assert train.distil(config(tiny, out, **keys)) == (most < 2 or broken == "weights")
    told, path = capsys.readouterr().out, folder / "checkpoints" / "step_00000004"
    assert final_bits(out, "alra") == final_bits(finished, "alra")
    if broken == "weights":
        assert "vanilla_kd stopped at step 3: its weights are not finite; to go on, --resume_from=" in told
        path = folder / "checkpoints" / "step_00000002"
    else:
        why = r"gradient norm nan, not finite: the gradient alone"
        assert re.search(rf"vanilla_kd, step 4: skipped the update, 2 in a row; {why}", told)
        assert torch.equal(weights[2], weights[3])
    if most == 2:
        assert (folder / "model").exists()
        return
    hint = rf"; to go on, --resume_from={path} with another out_dir and a smaller lr than 0.005"
    assert re.search(rf"vanilla_kd stopped at step \d: .*{hint}", told) and path.is_dir()
    assert train.distil(config(tiny, out, **keys)) == 1  # reported again, not tried again
    assert re.search(hint, capsys.readouterr().out) and not (folder / "model").exists()
    cfg = config(tiny, lower, methods="vanilla_kd@lower", resume_from=path, **{"vanilla_kd@lower.lr": 1e-3})
    assert train.distil(cfg) == 0 and [r["step"] for r in records(lower, "vanilla_kd@lower")][-2:] == [6, 6]
    assert saved(lower / "vanilla_kd@lower")[-1] == "step_00000006"
    started = read_json(lower / "run.json")["starts"][0]["step"]
    assert f"step_{started:08d}" == path.name


def test_a_loss_that_is_not_finite_ends_no_run_and_passes_through_a_checkpoint(tiny, tmp_path, monkeypatch):
    """The update is skipped; a checkpoint before the log's next line, here by a signal, keeps what that line will say."""
    update, clip, at = train.update, train.clip_gradients, []

    def following(students, teacher, stream, step, cfg):
        at[:] = [students[0], step, Path(cfg.out_dir).name]
        return update(students, teacher, stream, step, cfg)

    def breaking(parameters, max_norm):
        s, step, name = at
        if step == 2:
            s.sums["loss"] *= math.nan
            s.model.head.grad[0, 0] = math.nan
            if name == "cut":
                train.STOP.set()
        return clip(parameters, max_norm)

    monkeypatch.setattr(train, "update", following)
    monkeypatch.setattr(train, "clip_gradients", breaking)
    for name, codes in (("whole", [0]), ("cut", [train.TRY_AGAIN, 0]), ("stopped", [1])):
        keys = {"max_skipped_updates": 0, "keep_checkpoints": 1} if name == "stopped" else {}
        for code in codes:
            cfg = config(tiny, tmp_path / name, methods="alra", checkpoint_every_steps=1, log_every_steps=4, **keys)
            assert train.distil(cfg) == code
    whole, cut = (untimed(tmp_path / name, "alra") for name in ("whole", "cut"))
    assert whole == cut and next(r["loss"] for r in whole if r["step"] == 4 and "loss" in r) is None
    assert final_bits(tmp_path / "whole", "alra") == final_bits(tmp_path / "cut", "alra")
    kept = saved(tmp_path / "stopped" / "alra")  # its last weights, and those that it had in common with the others
    assert kept == ["step_00000002", "step_00000003"]


def test_a_stopped_student_whose_last_checkpoint_fails_is_sent_to_the_one_before(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "clip_gradients", lambda parameters, most: torch.tensor(math.nan))
    written = mock.Mock(wraps=checkpoints.write_checkpoint, side_effect=[mock.DEFAULT, UserError("no room")])
    monkeypatch.setattr(checkpoints, "write_checkpoint", written)
    assert train.distil(config(tiny, tmp_path, methods="pretrain", max_skipped_updates=0)) == 1
    says = rf"stopped at step 1: 1 updates .* its last weights are lost: no room; to go on, --resume_from=\S*/{saved(tmp_path / 'pretrain')[0]} with"
    assert re.search(says, capsys.readouterr().out) and len(saved(tmp_path / "pretrain")) == 1
    assert train.distil(config(tiny, tmp_path, methods="pretrain", max_skipped_updates=0)) == 1
    assert f"{tmp_path}: step 1 of 6\n" in capsys.readouterr().out


FULL = (OSError(errno.ENOSPC, "No space left on device"),
        safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))  # fmt: skip


@pytest.mark.parametrize(("written", "where", "steps"), [
    ([1, 1, 1, FULL[0], 1, 1, 1, 1, 1], "", [5, 6]),  # at step 4 there is no room, after it there is
    ([1, 1, 1, FULL[0], FULL[1], FULL[0]], "step_00000006.alra-new/model", [0, 2]), ([1] * 6 + [FULL[1]], "model", [4, 6]),
])  # fmt: skip
def test_a_full_disk_costs_no_checkpoint_that_it_has_room_for(tiny, finished, tmp_path, monkeypatch, capsys, written, where, steps):  # fmt: skip
    """And leaves no run.json without its model: the next start writes both."""
    with monkeypatch.context() as patch:
        written = [mock.DEFAULT if x == 1 else x for x in written]
        patch.setattr(safetensors.torch, "save_file", mock.Mock(wraps=safetensors.torch.save_file, side_effect=written))
        assert configure.guard(lambda: train.distil(config(tiny, tmp_path, methods="alra"))) == bool(where)
    told = capsys.readouterr()
    says = rf"{where}\S*: cannot be written \(.*No space left.*\); free some space or check the permissions, then run the same"
    again = told.out.count("step 4: no checkpoint; trying after each update") == 1
    assert re.search(says, told.err) if where else again
    assert not where or not (tmp_path / "alra" / "run.json").exists()
    assert not [*tmp_path.glob("alra/**/.*")]  # its room is free again
    assert saved(tmp_path / "alra") == [f"step_{s:08d}" for s in steps]
    assert train.distil(config(tiny, tmp_path, methods="alra")) == 0
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    assert (tmp_path / "alra/model/model.safetensors").is_file() and read_json(tmp_path / "alra/run.json")["step"] == 6


def test_flops_are_those_of_every_product_and_mfu_is_their_share_of_all_cards(monkeypatch):
    shape, cuda = Qwen2Config(24, 37, 3, 4, 2, vocab_size=101), torch.device("cuda:0")
    matrices = 3 * (24 * 24 + 24 * 24 + 2 * 24 * 12 + 3 * 24 * 37) + 101 * 24
    attention = 3 * 2 * (2 * 4 * 6 * 29) / 2  # scores and their use, half of them masked
    assert flops_per_token(shape, 29, trained=False) == 2 * matrices + attention
    assert flops_per_token(shape, 29, trained=True) == 3 * (2 * matrices + attention)
    for name, shares in {"NVIDIA H100 80GB HBM3": [0.1, 0.025], "some other card": [None, None]}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert [mfu(989e11, cuda, n) for n in (1, 4)] == pytest.approx(shares)
    assert mfu(1e12, torch.device("cpu"), 1) is None


def test_time_left_counts_from_the_start_of_this_process_and_checkpoints_by_minutes_too(tiny, tmp_path, monkeypatch):
    """On a clock that advances in updates only, by 20 seconds each."""
    clock, update = types.SimpleNamespace(**vars(time), now=1000.0), train.update
    clock.perf_counter = lambda: clock.now

    def advancing(*args):
        clock.now += 20
        return update(*args)

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "update", advancing)
    keys = {"methods": "pretrain", "log_every_steps": 1, "val_every_steps": 9, "keep_checkpoints": 9, "checkpoint_every_steps": "none"}  # fmt: skip
    for n in (1, 6):
        assert train.distil(config(tiny, tmp_path, **keys, checkpoint_every_minutes=0.5, max_steps=n)) == 0
    lines = [r for r in records(tmp_path, "pretrain") if "loss" in r]
    assert [(r["eta_sec"], r["tok_per_sec"]) for r in lines] == [(left, SEQ / 5) for left in (0, 80, 60, 40, 20, 0)]
    assert saved(tmp_path / "pretrain") == [f"step_{n:08d}" for n in (0, 1, 3, 5, 6)]


def test_tensorboard_wandb_and_the_terminal_get_the_records_of_the_log(tiny, tmp_path, monkeypatch, capsys):
    boards, runs = collections.defaultdict(mock.Mock), collections.defaultdict(mock.Mock)
    init = mock.Mock(side_effect=lambda **keys: runs[keys["name"]])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=lambda folder: boards[folder]))
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init))
    out, keys, methods = tmp_path / "out", {"tensorboard": True, "wandb_project": "distil"}, ("pretrain", "alra")
    for n in (4, 6):
        assert train.distil(config(tiny, out, methods=",".join(methods), max_steps=n, **keys)) == 0
    started = [call.kwargs for call in init.call_args_list]
    ids = [start["id"] for start in started]
    assert ids[:2] == ids[2:] and ids[0] != ids[1]
    for start, m in zip(started, 2 * methods, strict=True):
        assert [start[key] for key in ("project", "group", "name", "resume")] == ["distil", str(out), m, "allow"]
        facts = start["config"]
        assert facts["method"] == m and facts["config"]["lr"] == 0.01 and facts["made_by"]["data_sha256"]
    for m in methods:
        log = records(out, m)
        assert runs[m].log.call_args_list == [mock.call(r, step=r["step"]) for r in log] and len(log) == 6
        wanted = [(k, v, r["step"]) for r in log for k, v in r.items() if k != "step" and v is not None]
        assert sorted(call.args for call in boards[out / m / "tensorboard"].add_scalar.call_args_list) == sorted(wanted)
    rows = [
        line.split()[-2:] for line in capsys.readouterr().out.splitlines() if " eta " in line
    ]  # one for all students
    both = zip(*([r["ce"] for r in records(out, m) if "ce" in r] for m in methods), strict=True)
    assert rows == [[f"{a:.4f}", f"{b:.4f}"] for a, b in both] and len(rows) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_records_wait_for_room_on_the_disk(tmp_path, capsys):
    file = tmp_path / "log.jsonl"
    file.symlink_to("/dev/full")
    for step in range(4):
        if step == 2:
            file.unlink()
        log.append(file, {"step": step})
    says = f"{file}: cannot be written ([Errno 28] No space left on device); free some space or check the permissions"
    assert [r["step"] for r in read_jsonl(file)] == [0, 1, 2, 3] and capsys.readouterr().out.count(says) == 1


def test_a_student_that_diverges_is_told_and_a_number_that_is_not_finite_ends_nothing(
    tiny, tmp_path, monkeypatch, capsys
):
    ce = iter([8.3, 8.4, math.nan])  # ln V is 8.32
    update, validate = train.update, train.validate

    def diverging(students, teacher, stream, step, cfg):
        n = update(students, teacher, stream, step, cfg)
        students[0].sums |= {"kd": torch.tensor(math.inf)}
        return n

    monkeypatch.setattr(train, "update", diverging)
    monkeypatch.setattr(train, "validate", lambda *args: {"alra": validate(*args)["alra"] | {"val_ce": next(ce)}})
    assert train.distil(config(tiny, tmp_path, methods="alra", log_every_steps=1, val_every_steps=2)) == 0
    told = re.findall(r"alra, step (\d): held-out CE (\S+) is past ln V = 8.32", capsys.readouterr().out)
    assert told == [("4", "8.40"), ("6", "nan")]
    assert {r["kd"] for r in records(tmp_path, "alra") if "kd" in r} == {None}


@pytest.mark.parametrize("fails", ["open", "log"])
def test_a_service_that_fails_is_left_out_and_the_run_goes_on(tiny, finished, tmp_path, monkeypatch, capsys, fails):
    log = mock.Mock(side_effect=[None, None, None, RuntimeError("no network\nmore")])
    init = mock.Mock(return_value=mock.Mock(log=log), side_effect=KeyError("key") if fails == "open" else None)
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init))
    assert train.distil(config(tiny, tmp_path, methods="alra", wandb_project="p")) == 0
    told = {
        "open": "alra: left out Weights & Biases from step 2 on: 'key'",
        "log": "alra: left out Weights & Biases from step 6 on: no network",
    }
    assert capsys.readouterr().out.count(told[fails]) == 1 and log.call_count == 4 * (fails == "log")
    assert untimed(tmp_path, "alra") == untimed(finished, "alra")


def test_checkpoints_that_do_not_fit_the_disk_are_refused_at_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=67_488 * (3 * 12 + 4) - 1))
    with pytest.raises(UserError, match=r"take up to 2.6 MiB of disk, 2.6 MiB are free; choose another disk"):
        train.distil(config(tiny, tmp_path, methods="pretrain"))
    assert train.distil(config(tiny, tmp_path, methods="pretrain", keep_checkpoints=1, max_steps=1)) == 0


def test_a_signal_in_an_update_saves_after_it_and_exits_75(tiny, finished, tmp_path, monkeypatch, capsys):
    update, keys = train.update, {"methods": "alra"}

    def interrupted(students, teacher, stream, step, cfg):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(students, teacher, stream, step, cfg)

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", interrupted)
        assert configure.guard(lambda: train.distil(config(tiny, tmp_path, **keys))) == 75
    assert ": step 3 of 6; the same command resumes" in capsys.readouterr().out
    assert saved(tmp_path / "alra") == ["step_00000002", "step_00000003"]
    assert train.distil(config(tiny, tmp_path, **keys)) == 0
    assert [start["step"] for start in read_json(tmp_path / "run.json")["starts"]] == [0, 3]
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    assert untimed(tmp_path, "alra") == untimed(finished, "alra")  # the line of step 4 is of updates on both sides


def test_four_signals_stop_a_run_but_nohup_stays_nohup():
    def stops(sign) -> bool:
        train.catch_signals()
        signal.raise_signal(sign)
        return train.STOP.is_set()

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    assert all(map(stops, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not stops(signal.SIGHUP)


@pytest.mark.slow
def test_kill_9_loses_steps_but_never_bits(tiny, tmp_path):
    """Killed in whatever it does after a certain checkpoint, with many steps left."""
    keys = {"max_steps": 100_000, "schedule_steps": 100_000, "repeat_rows": True, "val_every_steps": 100_000,
            "checkpoint_every_steps": 3, "methods": "pretrain,alra"}  # fmt: skip
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    ready = lambda: any(int(p.name[5:13]) >= 9 for p in cut.glob("alra/checkpoints/step_*"))  # noqa: E731
    world.kill_when(ready, world.run_main, "train.py", *world.flags(tiny, cut, **keys))
    keys["max_steps"] = max(int(saved(cut / m)[-1].removeprefix("step_")) for m in ("pretrain", "alra")) + 3
    for out in (cut, whole):
        assert train.distil(config(tiny, out, **keys)) == 0
    for method in ("pretrain", "alra"):
        assert final_bits(cut, method, keys["max_steps"]) == final_bits(whole, method, keys["max_steps"]), method


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
    rows = preflight.open_data(cfg, "train")
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
    [(1, 8, 8, 1, 8), (2, 8, 8, 1, 4), (2, 8, 2, 1, 2), (4, 8, 8, 2, 2), (2, 24, 24, 2, 12), (2, 24, 8, 2, 6), (3, 45, 9, 1, 5), (3, 30, 6, 2, 2),
     (3, 8, 4, 4, None), (4, 8, 4, 4, None)],
)  # fmt: skip
def test_micro_batch_is_lowered_to_what_fits_the_processes(tiny, monkeypatch, processes, rows, asked, group, fits):
    """A forward batch that they would cut is refused."""
    cfg = config(tiny, UNUSED, batch_rows=rows, micro_batch=asked, group=group)
    monkeypatch.setattr(parallel, "world", lambda: processes)
    monkeypatch.setattr(parallel, "check_agreement", lambda **facts: None)
    if fits:
        preflight.check_config(cfg)
        assert train.fit_micro_batch(cfg).micro_batch == fits
    else:
        with pytest.raises(UserError, match=rf"{processes} processes with group=4: expected their product to divide"):
            preflight.check_config(cfg)


def test_without_a_micro_batch_a_process_computes_all_its_rows_at_once(tiny, monkeypatch):
    cfg = config(tiny, UNUSED, batch_rows=48, micro_batch="none", group=2)
    assert train.fit_micro_batch(cfg).micro_batch == 48
    monkeypatch.setattr(parallel, "world", lambda: 4)
    assert train.fit_micro_batch(cfg).micro_batch == 12


CHANGES = {
    "student": "32x1x2", "seed": 5, "seq_len": 12, "shuffle": True, "mask_after_eos": True, "schedule_steps": 7, "batch_rows": 8, "group": 2,
    "lr": 2e-2, "min_lr": 1e-5, "warmup_steps": 1, "beta1": 0.8, "beta2": 0.9, "adam_eps": 1e-5, "weight_decay": 0.1, "decay_1d": False, "clip": 1.0,
    "w_kd_schedule": "wsd", "lr_schedule": "wsd", "student_weights": "ROOT/student", "dtype": "float32", "decay_share": 0.2,
    "alra.gamma": 1.0, "alra.w_ce": 0.5, "alra.lr": 1e-3,
}  # fmt: skip
FREE = {"compile": True, "micro_batch": 4, "source": "other", "val_max_rows": 3, "keep_checkpoints": 5, "out_dir": "other"}  # fmt: skip


def test_a_run_goes_on_only_with_what_it_learns_by(tiny, finished, tmp_path):
    """Every key is compared or free, and all content is compared, wherever it has moved."""
    learnt = {key for key, role in configure.AFFECTS.items() if role == "weights"} - {"methods", "hyper", "max_steps"}
    assert {*CHANGES} == learnt | {"student", "student_weights", "alra.gamma", "alra.w_ce", "alra.lr"}
    before, first = config(tiny, finished), identity.made_by(config(tiny, finished), "alra")
    assert first == read_json(finished / "alra" / "run.json")["made_by"]
    for key, value in CHANGES.items():
        cfg = config(tiny, finished, **{key: str(value).replace("ROOT", str(tiny))})
        record = identity.made_by(cfg, "alra")
        assert record != first and [text.split()[0] for text in identity.differences(first, record)][:1] == [
            {"student": "shape"}.get(key, "hyper" if "." in key else key)
        ], key
    free = {key: value for key, value in FREE.items() if configure.AFFECTS[key] in ("speed", "log", "data")}
    assert identity.made_by(dataclasses.replace(before, **free), "alra") == first
    moved = {
        key: str(shutil.copytree(tiny / key.removesuffix("_dir"), tmp_path / key)) for key in ("data_dir", "teacher")
    }
    assert identity.made_by(dataclasses.replace(before, **moved, tokenizer=DEMO), "alra") == first


def test_the_host_waits_once_in_an_update(monkeypatch):
    """Two students and two micro-batches, on fake tensors that count what the host asks of them, on the path of a CUDA device."""
    asked = collections.Counter()

    def count(name, value):
        def counted(self, *args, **kwargs):
            asked[name] += 1
            return value(self)

        monkeypatch.setattr(FakeTensor, name, counted, raising=False)

    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    count("tolist", lambda t: [1.0] * t.numel())
    for name in ("item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"):
        count(name, lambda t: 1.0)
    keys = {"student": "mini", "batch_rows": 2, "micro_batch": 1, "seq_len": 16, "dtype": "bfloat16"}
    cfg = Config(methods=("alra", "pretrain"), **keys)
    with FakeTensorMode(allow_non_fake_inputs=True):
        models = [Qwen2(STUDENT) for _ in range(3)]
        students = [train.Student(name, model, torch.nn.ModuleDict(), torch.optim.AdamW(model.parameters(), fused=True), None, "",
                                  objective_at=make_objective(name, cfg))
                    for name, model in zip(cfg.methods, models, strict=False)]  # fmt: skip
        for p in models[2].requires_grad_(False).parameters():
            p.data = p.data.bfloat16()
        teacher = Teacher(models[2], torch.device("cpu"))
        x = torch.zeros(1, 16, dtype=torch.long)
        train.update(students, teacher, iter([(x, x.clone(), 15, teacher.hidden(x))] * 2), 0, cfg)
    assert asked == {"tolist": 1}
