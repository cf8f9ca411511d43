"""The further objectives: their identities, their constants, what moves and what is random.

What holds for every objective is in test_losses.py, the recorded numbers are in test_golden.py.
"""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import losses
from configure import Config
from losses import METHODS, method_loss
from run import methods
from tests import test_head, world
from tests.test_losses import case, kd, value_and_gradient


@pytest.mark.parametrize("compiling", [False, True])  # several borders at once
@pytest.mark.parametrize("mu", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_akls_head_is_found_to_the_last_token(dtype, mu, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    z_s, z_t, _ = case(seed=3, n=17, v=997, teacher=2.0, dtype=dtype)
    p, order = z_t.softmax(-1).sort(descending=True)
    q = z_s.softmax(-1).gather(1, order)
    error = (p - q).abs()
    head = p.cumsum(-1) <= mu
    head[:, 0] = True
    expected = (error * head).sum(-1) / error.sum(-1)
    (share,) = losses._head_share(z_s.softmax(-1), z_t.log_softmax(-1), mu).T
    assert_close(share, expected)


def test_akl_at_equality_is_zero():
    _, z_t, y = case(dtype=torch.float32)
    loss, gradient = value_and_gradient(losses.akl, z_t, z_t, y)  # its weight is 0 / 0
    assert not loss.any()
    assert gradient.abs().max() < 1e-6


def test_standardized_logits():
    z_s, z_t, y = case(ignored=())
    logit_std = functools.partial(kd, "logit_std")
    loss, gradient = value_and_gradient(logit_std, 0.3 * z_t + 7, z_t, y)
    assert loss.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-6  # whatever the student's scale
    z_s[3] = 5.0  # constant rows
    z_t[4] = -5.0
    loss, gradient = value_and_gradient(logit_std, z_s, z_t, y)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_taids_t_moves_over_the_run():
    def at(name, step, **settings):
        method = losses.resolve(name, **settings)
        return methods.scheduled_settings(method, step, 1000)

    for step, t in ((0, 0.4), (500, 0.7), (1000, 1.0)):
        assert at("taid", step, w_ce=1.0) == {"t": pytest.approx(t)}
    assert at("taid", 500, t=0.2) == {}  # a value that was set stays
    assert at("alra", 500, gamma=3.0) == {}
    z_s, z_t, y = case()
    student = SimpleNamespace(name="taid", method=METHODS["taid"], state={})
    taid = methods.method_at(student, 1000, SimpleNamespace(schedule_steps=1000, device="cpu"))
    plain = losses.resolve("vanilla_kd", tau=1.0, w_kd=1.0, w_ce=0.0)
    moved = methods.evaluate(taid, z_s.dtype, z_s, z_t, y)
    expected = methods.evaluate(plain, z_s.dtype, z_s, z_t, y)
    assert_close(moved, expected)


def test_what_is_random_depends_on_seed_update_student_and_forward_batch_alone(monkeypatch):
    seeds = []

    def mine(z_s, z_t, y, *, generator: torch.Generator | None = None):
        seeds.append(generator.initial_seed())
        return losses.reverse_kl(z_s, z_t, y)

    h, w, _, _, y = test_head.case()
    w.requires_grad_()

    def drawn(name="mine@a", step=3, world=1, seed=1):
        seeds.clear()
        for rank in range(world):
            processes = SimpleNamespace(rank=lambda rank=rank: rank, world=lambda: world)
            monkeypatch.setattr(methods, "parallel", processes)
            cfg = Config(batch_rows=8, group=2, seed=seed, device="cpu", compile=True)
            student = SimpleNamespace(name=name, method=methods.make_method(name, cfg), state={})
            method = methods.method_at(student, step, cfg)
            rows = torch.arange(8 // world) % 4
            inputs = (h[rows], w.detach(), y[rows])
            methods.head_losses([(h[rows], w, method)], *inputs, 2, True)
        return seeds.copy()

    monkeypatch.setitem(METHODS, "mine", losses.Method(mine))
    first = drawn()
    assert first[0] == 6394423578351708644  # in every Python
    assert first == drawn() == drawn(world=2) == drawn(world=4)
    other = drawn("mine@b") + drawn(step=4) + drawn(seed=5)
    assert len({*first, *other}) == 16
    assert losses.settings("mine").keys() == {"w_kd", "w_ce"}  # the generator is none of them
    methods.check_settings("mine", 53)


TRACED = """
    pretrain pd atkd ldrld bild adakd sekd dkd mse_logits jsd
    skew_fkl skew_rkl abkd topk_tail logit_std akl todi taid
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("name", TRACED.split())
def test_value_and_gradient_are_one_graph(name):
    z_s, z_t, y = case(n=5, v=97, dtype=torch.float32)
    torch.compiler.reset()
    evaluate = functools.partial(methods.evaluate, METHODS[name], torch.float32)
    compiled = torch.compile(evaluate, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        loss, _, dz = compiled(z_s, z_t, y)
    z_s.requires_grad_()
    expected, _ = method_loss(name, z_s, z_t, y)
    assert_close(loss, expected.detach())
    (gradient,) = torch.autograd.grad(expected, z_s)
    assert_close(dz, gradient, rtol=1e-4, atol=1e-6)


def test_the_page_shows_an_objective_in_chunks(tmp_path, monkeypatch):
    page = (world.ROOT / "docs/objectives.md").read_text()
    (code,) = re.findall(r"<!-- chunks -->\n```python\n(.*?)```", page, re.S)
    monkeypatch.setitem(METHODS, "unsure_kl", None)
    mine = world.import_objective(code, tmp_path)
    methods.check_settings("unsure_kl", 61)
    z_s, z_t, y = case()
    entropies = [-sum(p * math.log(p) for p in z.softmax(-1).tolist()) for z in z_s.double()]
    valid = y != losses.IGNORE
    mean = sum(e for e, v in zip(entropies, valid, strict=True) if v) / int(valid.sum())
    expected = losses.vanilla_kd(z_s, z_t, y, tau=1.0) * torch.tensor(entropies) / mean
    assert_close(mine.unsure_kl(z_s, z_t, y), expected, check_dtype=False)
