"""The loop: data order, the meaning of a batch, resuming, refusing, and the whole path."""

import contextlib
import dataclasses
import errno
import math
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import configure
import losses
import train
from configure import Config
from lib import parallel
from lib.device import mfu
from lib.errors import UserError
from lib.files import read_json
from lib.hf import weights_hash
from lib.rows import row_order
from losses import IGNORE
from model import MLP, Qwen2, Qwen2Config, StudentMLP, init_student
from run import checkpoints, exits, log, provenance, startup, students
from run.methods import compute_dtype, method_at
from tests import world
from tests.test_losses import assert_near
from tests.world import (
    SEQ,
    STUDENT,
    TOKENIZER,
    V,
    assert_same,
    config,
    final_bits,
    read_jsonl,
    records,
    refusal,
    saved,
)

UNUSED = Path("unused")
CPU = torch.device("cpu")
METHODS = ("pretrain", "vanilla_kd", "alra")


@pytest.fixture
def run(tiny):
    """run(out, flags, code): a run that ends with this exit code."""

    def run(out, flags="", code=0, **keys):
        assert train.distil(config(tiny, out, flags, **keys)) == code

    return run


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train.distil(config(tiny, out)) == 0
    return out


@pytest.fixture
def hook_update(monkeypatch):
    """hook_update(before, after): call them with (students, step, cfg) around each update."""
    update = train.update

    def hook(before=lambda *_: None, after=lambda *_: None):
        def hooked(students, teacher, stream, step, cfg):
            before(students, step, cfg)
            n_valid = update(students, teacher, stream, step, cfg)
            after(students, step, cfg)
            return n_valid

        monkeypatch.setattr(train, "update", hooked)

    return hook


def break_gradient(student):
    """Make the gradient of the next update NaN."""

    def spoil(gradient):
        handle.remove()
        return gradient * math.nan

    handle = student.model.head.register_hook(spoil)


def break_weights(student):
    student.model.head.data[0, 0] = math.nan


def open_rows(tiny, name="train", **keys):
    return startup.open_data(config(tiny, UNUSED, **keys), name)


def first_rows(rows, n):
    return rows.batch(np.arange(n), CPU)


def steps_of(student):
    return [int(name.removeprefix("step_")) for name in saved(student)]


def with_key(out, method, key):
    return [record for record in records(out, method) if key in record]


def test_learning_rates_by_hand():
    keys = {"warmup_steps": 100, "schedule_steps": 1000, "max_steps": 1000}
    falling = {"wsd": [1e-2, 5.5e-3, 1e-3], "constant": [1e-2, 1e-2, 1e-2]}
    for name, rates in falling.items():
        cfg = Config(lr_schedule=name, lr=1e-2, min_lr=1e-3, **keys)
        by_step = [train.learning_rate(step, cfg) for step in (49, 99, 899, 949, 999)]
        assert by_step == pytest.approx([5e-3, 1e-2, *rates])
    one = Config(max_steps=1, schedule_steps=1, warmup_steps=0)
    assert train.learning_rate(0, one) == one.min_lr


def test_row_order_is_a_function_of_step_and_seed_alone():
    assert row_order(24, 4, 97, None).tolist() == [96, 0, 1, 2]  # into the next pass
    first, second = (row_order(step, 97, 97, 1234).tolist() for step in (0, 1))
    assert first != second
    assert row_order(40, 4, 97, 1234).tolist() == second[63:67]
    # on every platform
    assert row_order(0, 5, 1000, 1234).tolist() == [722, 185, 218, 946, 259]
    for n in (1, 2, 3, 97, 1023, 1024, 1025):
        assert sorted(row_order(2, n, n, 5)) == [*range(n)]


def test_dtype_and_the_teachers_device_are_those_of_the_config(tiny):
    """The meta device stands in for a card."""
    for name, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert compute_dtype(config(tiny, UNUSED, dtype=name)) == dtype
    home = torch.device("meta")
    for name, device in (("none", home), ("cpu", CPU)):
        cfg = config(tiny, UNUSED, device="meta", teacher_device=name)
        teacher = startup.open_teacher(cfg, None, None)
        assert teacher.model.head.device == device
        h = teacher.hidden(torch.zeros(1, 3, dtype=torch.int64))
        assert teacher.head.device == h.device == home


def test_labels_after_the_first_document_may_be_masked(tiny):
    x, y = first_rows(open_rows(tiny), 97)
    _, masked = first_rows(open_rows(tiny, mask_after_eos=True), 97)
    assert (masked != IGNORE).sum() < (y != IGNORE).sum()
    assert torch.equal(masked, y.masked_fill(x == 0, IGNORE))


def test_the_weight_of_the_teacher_follows_pds_schedule(tiny):
    cfg = config(tiny, UNUSED, schedule_steps=1000)
    student = train.make_student("pd_wsd", cfg)

    def weight(step):
        return float(method_at(student, step, cfg).w_kd)

    weights = [weight(step) for step in (0, 50, 100, 989, 995, 999)]
    assert weights == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.1])


def test_the_state_of_an_objective_is_of_updates_and_in_checkpoints(run, tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "METHODS", dict(losses.METHODS))
    world.add_objective_with_state(tmp_path)
    states = {}
    for name, flags in {"whole": "", "stopped": "", "micro": "--micro_batch=1"}.items():
        flags = f"--methods=balanced_kl --log_every_steps=1 {flags}"
        if name == "stopped":
            run(tmp_path / name, f"{flags} --max_steps=3")
        run(tmp_path / name, flags)
        states[name] = world.state_of(tmp_path / name, 6)
    assert states["whole"] == states["stopped"] != 1.0
    assert states["micro"] == pytest.approx(states["whole"], rel=1e-5)
    assert_same(tmp_path / "whole", tmp_path / "stopped", "balanced_kl")
    logged = with_key(tmp_path / "whole", "balanced_kl", "objective.average")
    assert len(logged) == 6 and logged[-1]["objective.average"] == states["whole"]
    average = 1.0
    for record in with_key(tmp_path / "whole", "balanced_kl", "kd"):
        average *= 0.9 + 0.1 * record["kd"]  # the KL of an update is its kd times the average
    assert states["whole"] == pytest.approx(average, rel=1e-5)


class Width(nn.Module):
    """The mean square of the student's hidden states, over labels."""

    def __init__(self, d_s, d_t, *, scale: float = 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, h_s, h_t, y):
        return self.scale * h_s[y != IGNORE].square().mean()


def test_a_buffer_that_nothing_changes_keeps_its_bits(run, tmp_path, monkeypatch):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 999))

        def forward(self, z_s, z_t, y):
            return losses.reverse_kl(z_s, z_t, y)

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, z_s, z_t, y):
            return losses.reverse_kl(z_s * self.bias.exp(), z_t, y)

    for name, objective in (("constant", Constant), ("learned", Learned)):
        monkeypatch.setitem(losses.METHODS, name, losses.Method(objective))
    run(tmp_path, "--methods=constant,learned")
    extras = world.training(tmp_path / "constant/checkpoints/step_00000006")["extras"]
    assert torch.equal(extras["objective.table"], torch.linspace(0, 1, 999))
    for name in ("constant", "learned"):
        assert not [key for key in records(tmp_path, name)[-2] if key.startswith("state")]


def test_the_log_of_a_term_is_a_mean_over_labels(run, tmp_path, monkeypatch):
    """Rows have unequally many. A row of METHODS may set what the term is made with."""
    method = losses.METHODS["vanilla_kd"]._replace(hyper={"scale": 2.0}, term=Width)
    monkeypatch.setitem(losses.METHODS, "wide", method)
    logged = []
    for n in (1, 4):
        run(tmp_path / f"{n}", f"--methods=wide --log_every_steps=1 --micro_batch={n}")
        logged.append([x["term"] for x in with_key(tmp_path / f"{n}", "wide", "term")])
    assert len(logged[0]) == 6 and logged[0] == pytest.approx(logged[1], rel=1e-5)
    scales = [x["term.scale"] for x in with_key(tmp_path / "1", "wide", "term.scale")]
    assert scales == pytest.approx([2.0] * 6, abs=0.1)


def test_a_model_that_draws_numbers_depends_on_seed_and_update_alone(
    tiny, finished, tmp_path, monkeypatch, run
):
    """Not on stops, validations and other students; none is drawn in validation."""
    mlp = MLP.forward

    def with_dropout(self, x):
        return F.dropout(mlp(self, x), 0.5, self.training)

    monkeypatch.setattr(StudentMLP, "forward", with_dropout, raising=False)
    runs = {"all": "", "cut": "--max_steps=3", "alone": "--methods=alra --val_every_steps=6"}
    for out, flags in [*runs.items(), ("cut", "")]:
        run(tmp_path / out, flags)
    bits, *others = (final_bits(tmp_path / out, "alra") for out in runs)
    assert others == [bits, bits] and bits != final_bits(finished, "alra")
    model = Qwen2.from_pretrained(tmp_path / "all/alra/model")
    ce, _ = mean_ce(model, open_rows(tiny, "val"), 7)
    assert records(tmp_path / "all", "alra")[-1]["val_ce"] == pytest.approx(ce, rel=1e-5)


def test_an_update_has_as_many_rows_as_it_asks_for(tiny, monkeypatch):
    order = train.row_order
    monkeypatch.setattr(train, "row_order", lambda *args: order(*args)[:2])
    with pytest.raises(ValueError, match="cannot reshape array of size 2"):
        next(train.read_rows(open_rows(tiny), [0], config(tiny, UNUSED)))


def test_labels_are_counted_where_they_are_used(tiny):
    cfg = config(tiny, UNUSED, methods="pretrain", chunk_positions=SEQ)
    students = [train.make_student("pretrain", cfg)]
    stream = train.micro_batches(open_rows(tiny), None, [0], cfg)
    half = [(x, y.masked_fill(torch.arange(SEQ) > 5, IGNORE), h) for x, y, h in stream]
    n_valid = sum(int((y != IGNORE).sum()) for _, y, _ in half)
    assert train.update(students, None, iter(half), 0, cfg) == n_valid


def test_a_run_that_the_loop_stops_can_be_resumed(tmp_path, monkeypatch, run):
    def stop(live, validated, val, run):
        run.stop = True

    with monkeypatch.context() as patch:
        patch.setattr(train, "log_validation", stop)
        run(tmp_path, "--methods=pretrain", code=75)
    assert_end(tmp_path, 75, 3, "run.stop was set")
    assert steps_of(tmp_path / "pretrain")[-1] == 3
    run(tmp_path, "--methods=pretrain")


def test_a_parameter_that_no_loss_reaches_has_the_gradient_0(tiny):
    """So that processes which skip different layers add up the same gradients."""
    cfg = config(tiny, UNUSED, methods="pretrain", chunk_positions=SEQ)
    s = train.make_student("pretrain", cfg)
    *_, unused, frozen = s.trained = [*s.trained, *(nn.Parameter(torch.ones(2)) for _ in "ab")]
    frozen.requires_grad_(False)
    seen = []
    clip = train.clip_gradients
    with mock.patch.object(
        train, "clip_gradients", lambda p, n: seen.append(unused.grad) or clip(p, n)
    ):
        train.update([s], None, train.micro_batches(open_rows(tiny), None, [0], cfg), 0, cfg)
    assert seen[0].tolist() == [0, 0] and frozen.grad is None


@torch.no_grad()
def log_p(model, x, y):
    """Log-probabilities in fp64 [N, V] where there is a label, and labels [N, 1]."""
    valid = y != IGNORE
    return model(x)[valid].double().log_softmax(-1), y[valid][:, None]


def mean_ce(model, rows, n):
    """The CE per token of the first n rows, and their tokens."""
    logp, labels = log_p(model, *first_rows(rows, n))
    return -logp.gather(1, labels).mean().item(), len(labels)


def gradients(tiny, **keys):
    """Every student's gradient in the first update, before it is clipped."""
    cfg = config(tiny, UNUSED, clip=1e9, **keys)
    cfg = dataclasses.replace(cfg, chunk_positions=startup.positions_at_once(cfg))
    rows = startup.open_data(cfg, "train")
    teacher = startup.open_teacher(cfg, rows, None)
    tokenizer = types.SimpleNamespace(eos_token_id=rows.eos)
    students = [train.make_student(name, cfg, tokenizer) for name in cfg.methods]
    for s in students:
        s.optimizers[0].step = s.optimizers[0].zero_grad = lambda **_: None
    train.update(students, teacher, train.micro_batches(rows, teacher, [0], cfg), 0, cfg)
    return {s.name: [p.grad for p in s.model.parameters()] for s in students}


def test_micro_batches_change_nothing_and_groups_do_on_purpose(tiny):
    """Rows are of unequal length. Chunks of positions change rounding alone: eps sqrt(V) = 3e-6."""

    def vectors(micro_batch, **keys):
        grads = gradients(tiny, batch_rows=16, micro_batch=micro_batch, **keys)
        return {name: torch.nn.utils.parameters_to_vector(g) for name, g in grads.items()}

    one = vectors(1)
    four = vectors(4)
    sixteen = vectors(16)
    masked = vectors(16, mask_documents=True)
    masked_one = vectors(1, mask_documents=True)
    grouped = vectors(4, group=4)
    chunks = vectors(4, group=4, chunk_positions=7)
    for name, vector in one.items():
        for other in (four, sixteen):
            assert_near(other[name], vector, 1e-5)
        assert_near(masked_one[name], masked[name], 1e-5)
        assert (vector - masked[name]).norm() > 0.01 * vector.norm(), name
        assert (vector - grouped[name]).norm() > 1e-3 * vector.norm(), name
        assert_near(chunks[name], grouped[name], 1e-5)
        assert not torch.equal(chunks[name], grouped[name])


def test_rows_are_read_while_the_teacher_runs(tiny):
    """By a thread, one micro-batch ahead."""
    is_read = [threading.Event() for _ in range(5)]
    is_read[4].set()

    def batch(index, device):
        n = index[0] // 2  # of this micro-batch
        is_read[n].set()
        return n, None

    def hidden(n, rows, index):
        return [*index], is_read[n + 1].wait(60)

    rows = types.SimpleNamespace(first_row_step=0, n=8, batch=batch)
    teacher = types.SimpleNamespace(hidden=hidden)
    stream = train.micro_batches(rows, teacher, range(2), config(tiny, UNUSED))
    assert [*stream] == [(n, None, ([2 * n, 2 * n + 1], True)) for n in range(4)]


def test_tad_is_told_how_many_sequences_a_forward_batch_holds(tiny):
    """test_head.py has the loss that it then has."""
    student = train.make_student("tad", config(tiny, UNUSED, methods="tad", group=2))
    assert student.method.hyper == {"n_sequences": 2}


def test_positions_at_a_time_are_by_memory_on_a_gpu_and_one_forward_batch_elsewhere(
    tiny, monkeypatch
):
    def positions(device, V=151_936, **keys):
        monkeypatch.setattr(
            startup, "student_shape", lambda _: dataclasses.replace(STUDENT, vocab_size=V)
        )
        return startup.positions_at_once(config(tiny, UNUSED, device=device, **keys))

    assert [positions("cuda", V) for V in (50_304, 151_936, 256_000)] == [4096, 2048, 1024]
    assert positions("cuda:1", chunk_positions=7) == positions("cpu", chunk_positions=7) == 7
    assert positions("cpu", group=2) == 2 * SEQ
    assert positions("cpu", seq_len=300, group=2) == 512


@pytest.mark.parametrize("decay_1d", [True, False])
def test_updates_are_those_of_adamw_at_rates_by_hand(tiny, monkeypatch, decay_1d):
    """In fp64, from the gradients before the clip: two updates of warm-up, two of the cosine."""
    flags = "--schedule_steps=5 --max_steps=4 --lr=0.01 --min_lr=0.001 --clip=1.5"
    flags += f" --chunk_positions={SEQ}"
    adam = "--beta1=0.8 --beta2=0.95 --adam_eps=1e-4 --weight_decay=0.1"
    cfg = config(tiny, UNUSED, f"--methods=pretrain {flags} {adam} --decay_1d={decay_1d}")
    student = train.make_student("pretrain", cfg)
    parameters = list(student.model.parameters())
    first = [p.detach().double() for p in parameters]
    clip = train.clip_gradients
    grads = []

    def keep(ps, max_norm):
        grads.append([p.grad.double() for p in parameters])
        return clip(ps, max_norm)

    monkeypatch.setattr(train, "clip_gradients", keep)
    stream = train.micro_batches(open_rows(tiny), None, range(4), cfg)
    for step in range(4):
        train.update([student], None, stream, step, cfg)
    rates = [0.005, 0.01]
    for n in (1, 2):
        rates.append(0.001 + 0.009 * (1 + math.cos(math.pi * n / 3)) / 2)
    norms = [math.sqrt(sum(float((g * g).sum()) for g in update)) for update in grads]
    assert min(norms) < 1.5 < max(norms)
    for p, start, *gradients in zip(parameters, first, *grads, strict=True):
        w = start.clone()
        decay = 0.1 * (decay_1d or w.ndim > 1)
        adamw = torch.optim.AdamW([w], betas=(0.8, 0.95), eps=1e-4, weight_decay=decay)
        for rate, norm, g in zip(rates, norms, gradients, strict=True):
            w.grad = g * min(1.5 / norm, 1.0)
            adamw.param_groups[0]["lr"] = rate
            adamw.step()
        way = (w - start).norm()
        assert (p - w).norm() < 1e-5 * way + 2e-7 * w.norm() < 1e-3 * way


def test_groups_and_optimizers_of_ones_own_keep_their_rates_and_bits_over_a_resume(
    tmp_path, monkeypatch, run
):
    """A layer is frozen. Other settings of a group are those of the config, also in a branch."""
    make = train.make_student
    last = []

    def head_apart(name, cfg, *others):
        s = make(name, cfg, *others)
        head, frozen, weight, *others = s.model.parameters()
        frozen.requires_grad_(False)
        groups = [{"params": [head], "lr": 0.25 * cfg.lr}, {"params": [weight]}]
        keys = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        last[:] = [torch.optim.AdamW(groups, **keys), torch.optim.AdamW(others, **keys)]
        return dataclasses.replace(s, optimizers=[*last])

    monkeypatch.setattr(train, "make_student", head_apart)
    for out, end in (("whole", 6), ("cut", 3), ("cut", 6)):
        run(tmp_path / out, "--methods=pretrain", max_steps=end)
    assert final_bits(tmp_path / "whole", "pretrain") == final_bits(tmp_path / "cut", "pretrain")
    branch = f"--resume_from={tmp_path}/cut/pretrain/checkpoints/step_00000004 --lr=0.02"
    run(tmp_path / "branch", f"--methods=pretrain --weight_decay=0.3 {branch}")
    for group, rate in zip(last[0].param_groups, (1.5e-5, 6e-5), strict=True):
        assert group["weight_decay"] == 0.3
        assert group["lr"] == pytest.approx(rate)


def test_moments_are_refused_by_parameters_of_another_name(run, tmp_path, monkeypatch):
    make = train.make_student

    def reordered(*args):
        s = make(*args)
        s.optimizers[0].param_groups[0]["names"].reverse()
        return s

    run(tmp_path, "--methods=pretrain --max_steps=3")
    monkeypatch.setattr(train, "make_student", reordered)
    with refusal("the optimizer had other parameters, or in another order"):
        run(tmp_path, "--methods=pretrain")
    monkeypatch.undo()
    file = tmp_path / "pretrain/checkpoints/step_00000003/training.pt"
    saved = torch.load(file, weights_only=True)
    for group in saved["optimizers"][0]["param_groups"]:  # as of an older version
        del group["names"], group["initial"]["names"]
    torch.save(saved, file)
    monkeypatch.setattr(checkpoints, "check_files", lambda *_: None)
    for n in (4, 6):
        run(tmp_path, f"--methods=pretrain --max_steps={n}")


def test_the_clip_has_the_right_norm_of_millions_of_equal_gradients():
    """torch's own norm of these is 0.2 % low on one thread of a CPU: it adds in fp32."""
    big, unused = (torch.nn.Parameter(torch.zeros(n)) for n in (1 << 22, 5))
    big.grad = torch.full_like(big, 1e-4)
    norm = 2**11 * 1e-4
    for max_norm, scale in ((1.0, 1.0), (0.05, 0.05 / (norm + 1e-6))):  # torch adds 1e-6 too
        clipped = train.clip_gradients(iter((big, unused)), max_norm)
        assert clipped.item() == pytest.approx(norm, rel=1e-6)
        assert (big.grad / (1e-4 * scale) - 1).abs().max() < 1e-5


def test_a_student_goes_on_from_the_bits_that_a_run_saved(tiny, finished):
    first = finished / "alra/model"
    flags = f"--student={first} --student_weights={first} --seed=99 --methods=pretrain"
    student = train.make_student("pretrain", config(tiny, UNUSED, flags))
    assert student.init_sha256 == weights_hash(Qwen2.from_pretrained(f"{first}"))
    assert all(p.requires_grad for p in student.model.parameters())


def test_a_run_learns_and_logs_how_many_tokens_it_has_seen(finished):
    """test_nano.py has the steps of each line."""
    for method in METHODS:
        last = with_key(finished, method, "loss")[-1]
        assert last["nominal_tokens"] == 6 * 4 * SEQ > last["valid_tokens"] > 0
        first, second = with_key(finished, method, "val_ce")
        assert second["val_ce"] < first["val_ce"]


def test_the_log_is_the_mean_over_all_tokens_since_the_last_line(tiny, finished, tmp_path, run):
    """Per token, not per row, and before the update; a line of two updates averages two lines."""
    run(tmp_path, "--methods=vanilla_kd --log_every_steps=1")
    singles = with_key(tmp_path, "vanilla_kd", "loss")
    ce, n = mean_ce(init_student(STUDENT), open_rows(tiny), 4)
    assert singles[0]["ce"] == pytest.approx(ce, rel=1e-6)
    assert singles[0]["valid_tokens"] == n
    assert singles[0]["lr"] == 0.5e-2
    counts = np.diff([0] + [r["valid_tokens"] for r in singles])
    for i, record in enumerate(with_key(finished, "vanilla_kd", "loss")):
        part = slice(2 * i, 2 * i + 2)
        for key in ("loss", "kd", "ce"):
            mean = np.average([r[key] for r in singles[part]], weights=counts[part])
            assert record[key] == pytest.approx(mean, rel=1e-5)
        loss = 0.5 * record["kd"] + 0.5 * record["ce"]
        assert record["loss"] == pytest.approx(loss, rel=1e-5)


def test_validation_is_over_the_first_held_out_rows(tiny):
    """test_metrics.py has the other figures, test_cache.py compares them with those of eval.py."""
    val = open_rows(tiny, "val")
    cfg = config(tiny, UNUSED, methods="pretrain", val_max_rows=3)
    student = train.make_student("pretrain", cfg)
    figures = train.validate([student], None, val, cfg)["pretrain"]
    assert figures == {"val_ce": pytest.approx(mean_ce(student.model, val, 3)[0], rel=1e-6)}


def test_what_a_run_takes_and_what_its_ces_are_read_against_is_said(tiny, tmp_path, printed, run):
    data = shutil.copytree(tiny / "data", tmp_path / "data")
    world.write_rows(data, "val", 7, seed=2, unigram_ce=5.25, unigram_half=0.5)
    run(tmp_path / "run", f"--data_dir={data} --val_max_rows=5 --max_steps=2 --methods=alra")
    assert "5 held-out rows give a CE to about ± 0.59" in printed()
    references = {"val_uniform_ce": math.log(V), "val_unigram_ce": 5.25}
    assert references.items() <= records(tmp_path / "run", "alra")[-1].items()
    for ce, n in ((5.2, 0), (5.3, 1)):
        log.say_reference_ces(references | {"val_teacher_ce": ce})
        assert printed().count("warning") == n
    world.write_rows(data, "val", 7, seed=3)
    run(tmp_path / "run", f"--data_dir={data} --max_steps=3 --methods=alra")
    assert "edited since the run began: held-out rows\n" in printed()


def test_keys_of_speed_log_and_data_change_no_bit(finished, tmp_path, monkeypatch, run):
    """Recomputed activations, a teacher on its own device, more lines and checkpoints, a cut."""
    checkpoint = mock.Mock(wraps=torch.utils.checkpoint.checkpoint)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    speed = "--recompute=True --teacher_device=cpu"
    logs = "--histogram_every_steps=3 --val_every_steps=1 --log_every_steps=1 --val_max_rows=2"
    kept = "--checkpoint_every_steps=1 --keep_checkpoints=1"
    data = "--source=x --train_rows=9 --val_share=0.1 --val_rows=0"
    for n in (3, 6):
        run(tmp_path, f"--methods=alra {speed} {logs} {kept} {data}", max_steps=n)
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    assert checkpoint.call_count == 6 * 2


def test_each_of_many_students_has_the_bits_of_its_solo_run(tmp_path, printed, run):
    """Two have labels: `alra@slow` has its method's tau, and its own gamma and rate."""
    alra = "--max_steps=2 --alra.tau=2.0 --alra.d_max=7"
    slow = "--alra@slow.gamma=1.0 --alra@slow.lr=5e-3"
    solo = {"tad": "--max_steps=2 --methods=tad", "alra": f"{alra} --methods=alra"}
    solo["alra@slow"] = f"{solo['alra']} --alra.gamma=1.0 --lr=5e-3 --min_lr=3e-5"
    many = tmp_path / "many"
    run(many, f"--methods=tad,alra@same,alra,alra@slow {alra} {slow}")
    output = printed()
    for name, flags in solo.items():
        run(tmp_path / name, flags)
        method = name.partition("@")[0]
        assert final_bits(tmp_path / name, method, 2) == final_bits(many, name, 2), name
        record = records(many, name)[0]
        assert record["lr"] == (5e-3 if "@" in name else 1e-2)
        line = rf" eta .* \|  {re.escape(name)} .* ce {record['ce']:.4f}"
        assert len(re.findall(line, output)) == 1
    assert final_bits(many, "alra@same", 2) == final_bits(many, "alra", 2)
    facts = read_json(many / "alra@slow/run.json")
    assert facts["overrides"] == {"tau": 2.0, "d_max": 7, "gamma": 1.0, "lr": 5e-3}


def test_checkpoints_are_kept_to_the_last_k_of_the_steps_so_far(tmp_path, run):
    """And, besides, to the multiples of keep_every_steps."""
    flags = "--methods=pretrain --keep_checkpoints=1 --keep_every_steps=4"
    run(tmp_path, flags, max_steps=2)
    assert steps_of(tmp_path / "pretrain") == [0, 2]
    run(tmp_path, flags)
    assert steps_of(tmp_path / "pretrain") == [0, 4, 6]


def test_no_checkpoint_is_removed_before_every_student_has_the_next(
    tmp_path, monkeypatch, printed, run
):
    flags = "--methods=vanilla_kd,alra --keep_checkpoints=1"
    save = torch.save
    names = []

    def fail(tensors, file):
        names.append(Path(file.name).parts[len(tmp_path.parts)])
        if len(names) == 6:  # vanilla_kd has that of step 4, alra not yet
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, file)

    with monkeypatch.context() as patch, refusal("No space left"):
        patch.setattr(torch, "save", fail)
        run(tmp_path, flags, max_steps=4)
    assert names[-2:] == ["vanilla_kd", "alra"]
    assert steps_of(tmp_path / "vanilla_kd") == [2, 4]
    run(tmp_path, flags)
    assert f"{tmp_path}: step 2 of 6" in printed()


@pytest.mark.parametrize(
    ("spoil", "steps", "reason"),
    [
        (break_gradient, (2, 3), "5: 2 updates in a row skipped"),
        (break_weights, (2,), "3: its weights are not finite"),
    ],
)
def test_a_student_that_makes_only_bad_updates_stops_alone(
    finished, tmp_path, hook_update, printed, run, spoil, steps, reason
):
    """Two bad gradients, of which one in a row may be, or weights that are not finite."""
    out = tmp_path / "out"

    def after(students, step, cfg):
        if step in steps and cfg.out_dir == str(out):
            spoil(students[0])

    hook_update(after=after)
    flags = "--methods=vanilla_kd,alra --vanilla_kd.lr=0.005 --max_skipped_updates=1"
    # that of step 4 has the weights with which every gradient was bad
    checkpoint = out / "vanilla_kd/checkpoints/step_00000002"
    hint = f"run the same command with --methods=vanilla_kd --resume_from={checkpoint}, "
    for _ in range(2):  # reported again, not tried again
        run(out, flags, 1)
        output = printed()
        assert f"vanilla_kd stopped at step {reason}" in output and hint in output
        assert not (out / "vanilla_kd/model").exists()
    assert_same(out, finished, "alra")
    with refusal("vanilla_kd/stopped.json: contains a different run .vanilla_kd: seed was"):
        run(out, f"{flags} --seed=5")
    lower = tmp_path / "lower"
    name = "vanilla_kd@lower"
    run(lower, f"--methods={name} --{name}.lr=1e-3 --resume_from={checkpoint}")
    assert steps_of(lower / name)[-1] == records(lower, name)[-1]["step"] == 6
    assert read_jsonl(lower / "starts.jsonl")[0]["step"] == 2


def test_a_loss_that_is_not_finite_ends_no_run_and_passes_through_a_checkpoint(
    tmp_path, hook_update, run
):
    """A checkpoint between two lines of the log, here by a signal, keeps what the next will say."""

    def before(students, step, cfg):
        if step == 2:
            break_gradient(students[0])

    def after(students, step, cfg):
        if step == 2:
            students[0].sums["loss"] *= math.nan
            if cfg.out_dir.endswith("cut"):
                exits.RECEIVED.append("SIGTERM")

    hook_update(before, after)
    flags = "--methods=vanilla_kd --checkpoint_every_steps=1 --log_every_steps=4"
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    for out, code in ((whole, 0), (cut, exits.TRY_AGAIN), (cut, 0)):
        run(out, flags, code)
    assert_same(whole, cut, "vanilla_kd")
    assert with_key(whole, "vanilla_kd", "loss")[0]["loss"] is None


def test_skips_in_a_row_are_counted_over_a_resume(tmp_path, monkeypatch, printed, run):
    """Two are allowed, and change nothing, nor a state; a good update begins a new count."""
    monkeypatch.setattr(losses, "METHODS", dict(losses.METHODS))
    world.add_objective_with_state(tmp_path)
    bad = torch.tensor(math.nan)
    clip = mock.Mock(side_effect=[bad, bad, torch.tensor(1.0), bad, bad, bad])
    monkeypatch.setattr(train, "clip_gradients", clip)
    for end, code in ((2, 0), (4, 0), (6, 1)):
        run(tmp_path, "--methods=balanced_kl --max_skipped_updates=2", code, max_steps=end)
        if end == 2:
            assert final_bits(tmp_path, "balanced_kl", 0) == final_bits(tmp_path, "balanced_kl", 2)
    assert "balanced_kl stopped at step 6: 3 updates in a row skipped" in printed()


def test_flops_are_those_of_every_product_and_mfu_is_their_share_of_all_cards(monkeypatch):
    shape = Qwen2Config(24, 37, 3, 4, 2, vocab_size=101)
    matrices = 3 * (24 * 24 + 24 * 24 + 2 * 24 * 12 + 3 * 24 * 37) + 101 * 24
    attention = 3 * 2 * (2 * 4 * 6 * 29) / 2  # scores and their use, half of them masked
    forward = 2 * matrices + attention
    assert shape.flops_per_token(29) == forward
    cards = {"H100 80GB HBM3": 0.025, "H100 80GB HBM3 MIG 1g.10gb": None, "RTX A1000": None}
    for card, share in cards.items():
        name = f"NVIDIA {card}"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert mfu(989e11, torch.device("cuda:0"), 4) == share
    assert mfu(1e12, CPU, 1) is None


def test_time_left_counts_from_the_start_of_this_process_and_checkpoints_by_minutes_too(
    tmp_path, monkeypatch, hook_update, run
):
    """On a clock that advances in updates only; the first update of a start may compile."""
    clock = types.SimpleNamespace(**vars(time), now=1000.0)
    clock.perf_counter = lambda: clock.now
    seconds = iter((25, 25, 20, 20, 20, 20))

    def advance(*_):
        clock.now += next(seconds)

    for module in (train, checkpoints, log, students):
        monkeypatch.setattr(module, "time", clock)
    hook_update(advance)
    flags = "--methods=pretrain --log_every_steps=1 --keep_checkpoints=9"
    by_minutes = "--checkpoint_every_steps=none --checkpoint_every_minutes=0.5"
    for n in (1, 6):
        run(tmp_path, f"{flags} {by_minutes}", max_steps=n)
    lines = with_key(tmp_path, "pretrain", "loss")
    assert [r["eta_sec"] for r in lines] == [0, 100, 60, 40, 20, 0]
    assert steps_of(tmp_path / "pretrain") == [0, 1, 3, 5, 6]


def test_tensorboard_and_wandb_get_the_entries_of_the_log(
    finished, tmp_path, monkeypatch, printed, run
):
    """Over a resume, in one run of W&B, which is left out once it fails; the run goes on."""
    tensorboard = mock.Mock()
    send = mock.Mock(side_effect=[None] * 4 + [RuntimeError("no network\nmore")])
    wandb = mock.Mock(**{"init.return_value.log": send})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for n in (4, 6):
        run(tmp_path, "--methods=alra --tensorboard=True --wandb_project=p", max_steps=n)
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"] and first["project"] == "p"
    lines = records(tmp_path, "alra")
    assert len(lines) == 6 and send.mock_calls == [mock.call(r) for r in lines[:5]]
    assert printed().count("left out Weights & Biases from step 6 on: no network") == 1
    assert final_bits(tmp_path, "alra") == final_bits(finished, "alra")
    scalars = []
    for r in lines:
        step = r.pop("step")
        del r["time"]  # TensorBoard gets numbers alone
        scalars += [mock.call(key, x, step) for key, x in r.items() if x is not None]
    assert tensorboard.SummaryWriter.return_value.add_scalar.call_args_list == scalars


def test_a_student_that_diverges_is_told(tmp_path, monkeypatch, printed, run):
    ces = iter([6.2, 6.3, math.nan])  # ln V is 6.24
    monkeypatch.setattr(train, "validate", lambda *_: {"pretrain": {"val_ce": next(ces)}})
    run(tmp_path, "--methods=pretrain --val_every_steps=2")
    pattern = r"pretrain, step (\d): held-out CE (\S+) exceeds ln V = 6.24"
    assert re.findall(pattern, printed()) == [("4", "6.30"), ("6", "nan")]


def assert_end(out, code, step, why):
    end = read_json(out / "exit.json")
    assert end == {"code": code, "step": step, "max_steps": 6, "why": why}


def test_moving_settings_are_in_the_log_and_one_that_was_set_stays(tmp_path, run):
    """TAID's t goes from 0.4 to 1 over the schedule; a record has that of its last update."""
    run(tmp_path, "--methods=taid,taid@set --log_every_steps=3 --taid.w_ce=0.1 --taid@set.t=0.2")
    values = [record["t"] for record in with_key(tmp_path, "taid", "t")]
    assert values == pytest.approx([0.4 + 0.6 * 2 / 6, 0.4 + 0.6 * 5 / 6])
    assert not with_key(tmp_path, "taid@set", "t")


def of_a_card(number):
    error = torch.AcceleratorError("CUDA error")
    error.error_code = number  # as torch sets it
    return error


@pytest.mark.parametrize(
    ("signals", "error", "code"),
    [
        (["SIGTERM"], RuntimeError("a compiler was killed"), 75),
        (["SIGTERM"], UserError("no room"), 75),
        ([], of_a_card(214), 75),  # an uncorrectable memory error
        ([], of_a_card(710), 1),  # an assertion of a kernel
    ],
)
def test_an_error_after_a_signal_and_a_card_that_fails_are_to_be_tried_again(
    tiny, tmp_path, hook_update, signals, error, code
):
    """A scheduler may signal all processes of a job, compilers too."""

    def before(students, step, cfg):
        if step == 2:
            exits.RECEIVED.extend(signals)
            raise error

    hook_update(before)
    cfg = config(tiny, tmp_path, methods="pretrain")
    assert configure.guard(lambda: train.distil(cfg)) == code
    assert_end(tmp_path, code, 2, f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError):
        place = rf"\n[\w.]+: {error}\n\S+, {platform.node()}, process 0, step 2\n$"
        assert re.search(place, (tmp_path / "traceback_0.txt").read_text())


# as it loads; in the first update: at once; in a later one: after it
@pytest.mark.parametrize(("at", "end"), [(None, None), (0, 0), (2, 3), (5, 6)])
def test_a_signal_ends_a_run_and_loses_nothing(
    finished, tmp_path, monkeypatch, printed, hook_update, run, at, end
):
    """A line of the log is of updates on both sides."""

    def load(*args):
        if at is None:
            signal.raise_signal(signal.SIGUSR2)
        return startup.open_teacher(*args)

    def before(students, step, cfg):
        if at == step:
            signal.raise_signal(signal.SIGUSR2)

    flags = "--methods=alra --checkpoint_every_steps=none"
    with monkeypatch.context() as patch:
        patch.setattr(train, "open_teacher", load)
        hook_update(before)
        if end:
            run(tmp_path, flags, 75)
            assert f": step {end} of 6; the same command resumes" in printed()
            assert steps_of(tmp_path / "alra")[-1] == end
        else:
            with pytest.raises(SystemExit, match="75"):
                run(tmp_path, flags)
        assert_end(tmp_path, 75, end, "SIGUSR2")
        assert not (tmp_path / "alra/model").exists()
    at = 99
    run(tmp_path, "--methods=alra")
    assert_end(tmp_path, 0, 6, "finished")
    assert_same(tmp_path, finished, "alra")


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_wait_for_the_end_of_an_update_unless_the_parent_ignores_them(
    sign, is_ignored, tmp_path
):
    """And they are as before once the run has ended."""
    number = signal.Signals[sign]
    handler = signal.SIG_IGN if is_ignored else mock.Mock()
    before = signal.signal(number, handler)
    with exits.reported(mock.Mock(out_dir=tmp_path)):
        exits.TRAINING.append(mock.Mock(step=2, first_step=1))
        signal.raise_signal(number)
        received = [] if is_ignored else [sign]
        assert received == exits.RECEIVED
    assert signal.signal(number, before) == handler


@pytest.mark.slow
def test_kill_9_loses_steps_but_never_bits(tiny, tmp_path, run):
    """Killed in whatever it does after a certain checkpoint, with many steps left."""
    methods = ("pretrain", "vanilla_kd")
    flags = f"--methods={','.join(methods)} --repeat_rows=True --checkpoint_every_steps=3"
    long = f"{flags} --max_steps=100000 --schedule_steps=100000 --val_every_steps=100000"
    cut = tmp_path / "cut"
    whole = tmp_path / "whole"

    process = world.start(train.main, world.flags(tiny, cut, long))
    while all(int(p.name[5:13]) < 9 for p in cut.glob("vanilla_kd/checkpoints/step_*")):
        assert process.is_alive()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # and its children
    process.join()
    end = max(steps_of(cut / method)[-1] for method in methods) + 3
    for out in (cut, whole):
        run(out, long, max_steps=end)
    for method in methods:
        assert_same(cut, whole, method, end)


def test_histograms_hold_every_position(tiny, tmp_path, run):
    flags = "--methods=vanilla_kd,alra,alra@d5 --alra@d5.d_min=5 "
    flags += "--histogram_every_steps=3 --checkpoint_every_steps=3"
    run(tmp_path, flags, max_steps=4)
    # as a kill leaves it: update 3 is made again
    shutil.rmtree(tmp_path / "alra/checkpoints/step_00000004")
    run(tmp_path, flags, max_steps=4)
    teacher = read_jsonl(tmp_path / "teacher.jsonl")
    assert [r["step"] for r in teacher] == [0, 3]
    assert not (tmp_path / "vanilla_kd/histograms.jsonl").exists()
    x, y = open_rows(tiny).batch(np.arange(12, 16), CPU)
    n = int((y != IGNORE).sum())
    logp, labels = log_p(Qwen2.from_pretrained(f"{tiny}/teacher"), x, y)
    p = logp.exp()
    expected = {
        "p_label": p.gather(1, labels),
        "p_top1": p.max(-1).values,
        "agree": (p.argmax(-1) == labels[:, 0]).double(),
        "entropy": -(p * logp).sum(-1),
    }
    record = teacher[1]
    for key, values in expected.items():
        assert record[key] == pytest.approx(values.mean().item(), rel=1e-4), key
    assert sum(record["p_label_hist"]) == record["n"] == n
    for name, d_min in (("alra", 3), ("alra@d5", 5)):
        first, last = read_jsonl(tmp_path / name / "histograms.jsonl")
        assert (first["step"], last["step"]) == (0, 3)
        for budgets in (last["d_u_hist"], last["teacher_d_u_hist"]):  # d_min .. d_max = 7
            assert len(budgets) == 8 and sum(budgets[d_min:]) == sum(budgets) == n


FITTING = """
2 => --batch_rows=8 --micro_batch=8 => 4
2 => --batch_rows=8 --micro_batch=2 => 2
2 => --batch_rows=24 --micro_batch=8 --group=2 => 4
3 => --batch_rows=45 --micro_batch=9 => 3
4 => --batch_rows=48 --micro_batch=none --group=2 => 12
"""


def test_micro_batch_is_lowered_to_what_fits_the_processes(tiny, tmp_path, monkeypatch):
    """A forward batch that they would cut is refused."""
    monkeypatch.setattr(parallel, "check_agreement", lambda **facts: None)
    monkeypatch.setattr(parallel, "all_gather", lambda value: [value])
    monkeypatch.setattr(train, "train_students", lambda cfg: cfg.micro_batch)
    for processes, flags, fitting in world.read_table(FITTING):
        monkeypatch.setattr(parallel, "world", lambda n=processes: int(n))
        cfg = config(tiny, tmp_path, flags)
        assert train.distil(cfg) == int(fitting)
    with refusal("4 processes with group=4: expected their product to divide"):
        startup.check_config(config(tiny, UNUSED, "--batch_rows=8 --micro_batch=4 --group=4"))


CHANGES = """
    --seed=5 --seq_len=12 --shuffle=True --mask_after_eos=True --schedule_steps=7 --batch_rows=8
    --mask_documents=True
    --group=2 --lr=2e-2 --min_lr=1e-5 --warmup_steps=1 --beta1=0.8 --beta2=0.9 --adam_eps=1e-5
    --weight_decay=0.1 --decay_1d=False --clip=1 --lr_schedule=wsd --decay_share=0.2
    --dtype=float32
"""
FREE = "--compile=True --micro_batch=4 --source=x --val_max_rows=3 --keep_checkpoints=5"


def test_a_run_goes_on_only_with_what_it_learns_by(tiny, finished, tmp_path):
    """Every key is compared or free, and all content is compared, wherever it has moved."""

    def made_by(flags=""):
        return provenance.made_by(config(tiny, finished, flags), "alra")

    record = made_by()
    assert record == read_json(finished / "alra/run.json")["made_by"]
    names = {"--student=32x1x2": "shape", f"--student_weights={tiny}/student": "student_weights"}
    names |= dict.fromkeys(("--alra.gamma=1", "--alra.w_ce=0.5", "--alra.lr=1e-3"), "hyper")
    changed_keys = {flag: re.match(r"--(\w+)", flag)[1] for flag in CHANGES.split()}
    free = {*provenance.FREE.split()}
    assert {*changed_keys.values()} == {*configure.KINDS} - free
    assert free < {*configure.KINDS}
    for flag, name in (names | changed_keys).items():
        changed = {*provenance.record_changes(record, made_by(flag))} - {"order_sha256"}
        assert changed == {name}
    assert made_by(FREE) == record
    for key in ("data", "teacher"):
        shutil.copytree(tiny / key, tmp_path / key)
    moved = f"--data_dir={tmp_path}/data --teacher={tmp_path}/teacher --tokenizer={TOKENIZER}"
    assert made_by(moved) == record


def test_the_host_waits_once_in_an_update(tiny, monkeypatch):
    """Two students and two micro-batches, on the path of a CUDA device.

    On the meta device, which stands in for it, the host cannot ask anything else.
    """
    asked = mock.Mock(return_value=[1.0, 1.0, 9.0])
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.is_meta))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: asked() if t.is_meta else tolist(t))
    gradients(tiny, device="meta", methods="pretrain,alra")
    assert asked.call_count == 1
