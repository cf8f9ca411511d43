"""Every objective: against naive loops, in identities, in fp32 and bf16, on bad input, and in memory.

The recorded numbers of the authors' codes are in test_golden.py, the fused head in test_fused.py.
"""

import contextlib
import math
import random
import re
import shutil
import sys
import typing
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch

import losses
from lib import vocab
from losses import IGNORE, METHODS, method_loss
from run import methods
from tests import naive
from tools import bench

# One row per objective; the paper's variants of ALRA differ in settings that the naive comparison goes through.
ROWS = [name for name in METHODS if METHODS[name].fn is not losses.alra or name in ("alra", "alra_g", "fixed_7")]
KD_ROWS = [name for name in ROWS if name != "pretrain"]
FIRST_TIER = ["pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra", "fixed_7"]


def case(seed=0, n=7, v=61, student=1.5, teacher=3.0, ignored=(2,), dtype=torch.float64):
    """Random logits and labels, some positions ignored."""
    g = torch.Generator().manual_seed(seed)
    z_s, z_t = (scale * torch.randn(n, v, generator=g, dtype=torch.float64) for scale in (student, teacher))
    y = torch.randint(v, (n,), generator=g)
    y[list(ignored)] = IGNORE
    return z_s.to(dtype), z_t.to(dtype), y


def value_and_gradient(fn, z_s, z_t, y, **settings):
    """[N] and its gradient, each position weighted differently so that none can stand in for another."""
    z_s = z_s.clone().requires_grad_()
    loss = fn(z_s, z_t, y, **settings)
    loss = getattr(loss, "loss", loss)
    if not loss.requires_grad:  # the naive loops found no position to take
        return loss, torch.zeros_like(z_s)
    return loss.detach(), torch.autograd.grad((loss * torch.arange(1, len(y) + 1)).sum(), z_s)[0]


def kd(name, z_s, z_t, y, **settings):
    """The objective of a row of METHODS alone, per position."""
    row = METHODS[name]
    found = row.fn(z_s, z_t, y, **{**row.hyper, **settings})
    return found.loss if isinstance(found, tuple) else found


def kl(z_s, z_t, tau=1.0):
    logp_s, logp_t = (z_s / tau).log_softmax(-1), (z_t / tau).log_softmax(-1)
    return (logp_t.exp() * (logp_t - logp_s)).sum(-1)


# Against naive loops typed from the papers.

SETTINGS = {
    "cross_entropy": [{}],
    "vanilla_kd": [{}, {"tau": 2.0, "t2_scaling": True}, {"tau": 2.0, "standardize": True}],
    "pd": [{"top_k": 11}, {"top_k": 3, "tau": 2.0}, {"top_k": 37, "top_p": 1.0, "temper_student": True},
        {"top_k": 17, "truncate_on": "raw", "top_p": 0.8}],
    "atkd": [{}, {"tau": 2.0, "easy_weight": 0.2}],
    "rld": [{}, {"tau": 4.0, "tau_conf": 2.0, "alpha": 0.7, "beta": 8.0}],
    "ldrld": [{}, {"d": 2, "tau": 4.0}, {"d": 5, "pair_reduction": "sum", "alpha": 10.5, "beta": 7.0}],
    "tad": [{}, {"norm": "unit", "beta": 0.5, "top_k": 1}, {"norm": "none", "tau": 2.0, "top_k": 36}, {"beta": 0.0}],
    "bild": [{}, {"top_k": 3, "tau": 1.0}],
    "alra": [{"d_max": 13}, {"d_max": 7, "lambda_pair": 0.3, "detach_weights": False},
        {"d_max": 7, "tau": 2.0, "tau_p": 3.0, "gamma": 2.0, "eps": 0.01}, {"d_max": 7, "anchor": "none"},
        {"d_max": 7, "anchor": "label"}, {"d_max": 7, "anchor": "both"}, {"d_min": 2, "d_max": 2, "anchor": "both"},
        {"d_max": 7, "pair": "pra"}, {"d_max": 7, "pair": "pra_u"}, {"d_max": 7, "budget": "fixed", "pair": "pra_u"},
        {"d_max": 17, "gamma": 0.0, "lambda_pair": 0.0}],
    "reverse_kl": [{"tau": 2.0}],
    "jsd": [{}, {"beta": 0.1, "tau": 2.0}, {"beta": 0.0}, {"beta": 1.0}],
    "tvd": [{}],
    "dkd": [{}, {"tau": 1.0, "alpha": 0.3, "beta": 2.0}],
    "mse_logits": [{}, {"center": True}],
    "adakd": [{}, {"rule": "reverse_kl", "base": "forward", "keep": 1.0, "c": 0.6}, {"detach_temperature": True}],
    "sekd": [{}, {"tau": 1.0, "keep": 0.5}, {"keep": 1.0}],
    "bdl": [{}, {"lam": 0.3}, {"lam": 0.0}, {"lam": 1.0}],
    "skew_fkl": [{}, {"lam": 0.0}],
    "skew_rkl": [{}, {"lam": 0.7}, {"lam": 0.0}],
    "abkd": [{}, {"alpha": 0.5, "beta": 0.0}, {"alpha": 0.0, "beta": 0.5}, {"alpha": 0.5, "beta": -0.5},
        {"alpha": 0.0, "beta": 0.0}, {"alpha": 1.0, "beta": 0.0}, {"alpha": 0.0, "beta": 1.0}, {"alpha": -0.3, "beta": 0.9}],
    "akl": [{}, {"mu": 0.9}],
    "todi": [{}, {"tau": 2.0}],
    "taid": [{}, {"t": 1.0}],
}  # fmt: skip
CASES = [(name, settings) for name, each in SETTINGS.items() for settings in each]


def awkward(kind):
    """Logits on which shortcuts fail."""
    z_s, z_t, y = case(seed=5, v=37)
    if kind == "initial":  # a student at initialisation, and labels that are the teacher's last choice
        z_s, y = 0.02 * z_s, torch.where(y == IGNORE, y, z_t.argmin(-1))
    elif kind == "ties":  # as in bf16 logits: many equal values, within and across the borders of every set
        z_s, z_t = (z_s * 2).round() / 2, (z_t * 2).round() / 2
    elif kind == "shifted":
        z_s, z_t = z_s + 50, z_t - 20
    elif kind == "two":  # valid positions: halves and shares of them are empty or one
        y[[0, 1, 3, 4, 6]] = IGNORE
    elif kind == "top":  # the label is the teacher's first choice
        y = torch.where(y == IGNORE, y, z_t.argmax(-1))
    return z_s, z_t, y


@pytest.mark.parametrize("kind", ["plain", "initial", "ties", "shifted", "two", "top"])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_naive_loops_agree(name, settings, kind):
    z_s, z_t, y = awkward(kind)
    got = value_and_gradient(getattr(losses, name), z_s, z_t, y, **settings)
    expected = value_and_gradient(getattr(naive, name), z_s, z_t, y, **settings)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_every_objective_is_held_against_naive_loops():
    assert {row.fn.__name__ for row in METHODS.values()} == SETTINGS.keys()


# ALRA's sets and pieces.


@pytest.mark.parametrize("anchor", ["none", "teacher", "label", "both"])
@pytest.mark.parametrize("kind", ["plain", "initial", "ties"])
def test_alra_pieces_are_those_of_the_paper(anchor, kind):
    z_s, z_t, y = awkward(kind)
    settings = {"d_max": 7, "tau": 1.5, "eps": 0.9, "anchor": anchor}
    got, expected = losses.alra(z_s, z_t, y, **settings), naive.alra_terms(z_s, z_t, y, **settings)
    for u, piece in expected.items():
        assert set(got.tokens[u].tolist()) == set(piece["tokens"])
        assert got.tokens[u, : piece["d_u"]].tolist() == piece["set"]
        assert int(got.d_u[u]) == piece["d_u"]
        assert float(got.support[u]) == pytest.approx(piece["support"], rel=1e-12)
        for key in ("mass", "local", "rest", "pair"):
            assert float(getattr(got, key)[u]) == pytest.approx(float(piece[key]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("anchor", "label", "expected"),
    [
        ("none", 8, {0, 1, 2, 3}),
        ("teacher", 8, {0, 1, 2, 9}),  # the lowest-ranked proposal goes
        ("label", 8, {0, 1, 2, 8}),
        ("both", 8, {0, 1, 8, 9}),  # the last two go
        ("both", 3, {0, 1, 3, 9}),  # 3 ranks lowest but is an anchor: 2 goes
        ("both", 0, {0, 1, 2, 9}),
        ("both", 9, {0, 1, 2, 9}),  # the anchors are one token
        ("label", IGNORE, {0, 1, 2, 3}),  # an ignored label counts as token 0, which is proposed
    ],
)
def test_a_missing_anchor_replaces_the_lowest_proposal_that_is_none(anchor, label, expected):
    z_s, z_t = -torch.arange(11.0)[None], torch.zeros(1, 11)  # student ranks 0, 1, 2, ...; teacher's top-1 is 9
    z_t[0, 9] = 1.0
    y = torch.tensor([label])
    terms = losses.alra(z_s, z_t, y, d_min=2, d_max=4, anchor=anchor)
    assert set(terms.tokens[0].tolist()) == expected


def test_budgets_are_the_same_integers_in_fp32():
    z_s, z_t, y = case(n=211, v=101, dtype=torch.float32)
    narrow, wide = (losses.alra(z_s.to(d), z_t.to(d), y) for d in (torch.float32, torch.float64))
    assert torch.equal(narrow.d_u, wide.d_u) and torch.equal(narrow.tokens, wide.tokens)


def test_sekd_keeps_the_same_positions_in_fp32():
    """A student at initialisation is all but equally unsure everywhere."""
    z_s, z_t, y = case(n=211, v=101, student=0.02, dtype=torch.float32)
    narrow, wide = (losses.sekd(z_s.to(d), z_t.to(d), y) != 0 for d in (torch.float32, torch.float64))
    assert torch.equal(narrow, wide) and narrow.sum() == 42


@pytest.mark.parametrize("name", ["sekd", "adakd"])
def test_of_equally_hard_positions_the_first_are_kept(name):
    z_s, z_t, y = case(n=11, ignored=(2,))
    z_s[:], z_t[:] = z_s[0], z_t[0]
    kept = kd(name, z_s, z_t, y, keep=0.5).nonzero()[:, 0]
    assert kept.tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 3, 8])  # 199 = 24 * 8 + 7
@pytest.mark.parametrize("k", [1, 5, 12])
def test_the_largest_logits_are_found_by_way_of_their_blocks(k, size, monkeypatch):
    monkeypatch.setattr(vocab, "block_size", lambda V: size)
    g = torch.Generator().manual_seed(k)
    for z in (torch.randint(30, (17, 199), generator=g).float(), torch.zeros(3, 199), torch.randn(5, 199, generator=g)):
        z[1, -3:] = 99.0  # in the last, shorter block
        assert vocab.top(z, k).tolist() == [naive.top(row, k) for row in z]


@pytest.mark.parametrize("kind", ["plain", "ties", "top"])
@pytest.mark.parametrize("name", FIRST_TIER)
def test_the_size_of_blocks_changes_nothing(name, kind, monkeypatch):
    z_s, z_t, y = case(n=11, v=199)
    if kind == "ties":
        z_s, z_t = z_s.round(), z_t.round()
    if kind == "top":  # the teacher is sure of tokens that share a block, and of the last
        z_t[:, 8:13] += 30
        z_t[3, -1] += 90
    found = []
    for size in (1, 8, 199, 1000):
        monkeypatch.setattr(vocab, "block_size", lambda V, size=size: size)
        found.append(value_and_gradient(lambda *z: kd(name, *z), z_s, z_t, y))
    for value, grad in found[1:]:
        assert torch.allclose(value, found[0][0], rtol=1e-11, atol=1e-13)
        assert torch.allclose(grad, found[0][1], rtol=1e-10, atol=1e-13)


# Identities.


@pytest.mark.parametrize("teacher", [3.0, 9.0])
def test_the_exact_coefficients_give_the_full_kl(teacher):
    z_s, z_t, y = case(teacher=teacher, ignored=())
    t = losses.alra(z_s, z_t, y, tau=1.5)
    inside = torch.arange(t.tokens.shape[1]) < t.d_u[:, None]
    alpha_t = ((z_t / 1.5).softmax(-1).gather(1, t.tokens) * inside).sum(-1)  # Eq. 10
    whole = t.mass + alpha_t * t.local + (1 - alpha_t) * t.rest  # Eq. 13
    torch.testing.assert_close(whole, kl(z_s, z_t, 1.5), rtol=1e-11, atol=1e-13)


def test_a_constant_adaptive_budget_without_anchor_is_the_fixed_one():
    z_s, z_t, y = case()
    adaptive = losses.alra(z_s, z_t, y, d_min=7, d_max=7, anchor="none", pair="pra_u").loss
    torch.testing.assert_close(adaptive, losses.alra(z_s, z_t, y, d_max=7, budget="fixed", pair="pra_u").loss)
    torch.testing.assert_close(adaptive, kd("fixed_7", z_s, z_t, y))


def test_rld_is_dkd_where_the_label_is_the_teachers_first_choice():
    z_s, z_t, y = case(ignored=())
    y = z_t.argmax(-1)
    rld = losses.rld(z_s, z_t, y, tau=2.0, tau_conf=2.0, alpha=0.3, beta=1.7)
    torch.testing.assert_close(rld, losses.dkd(z_s, z_t, y, tau=2.0, alpha=0.3, beta=1.7))


def test_dkd_with_the_exact_coefficient_is_the_full_kl():
    z_s, z_t, y = case(ignored=())
    target, others = (losses.dkd(z_s, z_t, y, tau=1.0, alpha=a, beta=1.0 - a) for a in (1.0, 0.0))
    p_y = z_t.softmax(-1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(target + (1 - p_y) * others, kl(z_s, z_t))


def test_full_kl_in_other_words():
    z_s, z_t, y = case(ignored=())
    full, reverse = kl(z_s, z_t), kl(z_t, z_s)
    torch.testing.assert_close(losses.vanilla_kd(z_s, z_t, y, tau=1.0), full)
    torch.testing.assert_close(losses.tad(z_s, z_t, y, norm="none", beta=1.0), full)
    torch.testing.assert_close(losses.pd(z_s, z_t, y, tau=1.0, top_p=1.0, top_k=61), full)
    torch.testing.assert_close(losses.jsd(z_s, z_t, y, beta=0.0), full)
    torch.testing.assert_close(losses.jsd(z_s, z_t, y, beta=1.0), reverse)
    torch.testing.assert_close(losses.bdl(z_s, z_t, y, lam=0.0), full)
    torch.testing.assert_close(losses.bdl(z_s, z_t, y, lam=1.0), reverse)
    torch.testing.assert_close(losses.bdl(z_s, z_t, y, lam=0.5), torch.zeros_like(full), rtol=0, atol=1e-14)
    torch.testing.assert_close(losses.sekd(z_s, z_t, y, tau=1.0, keep=1.0), full)
    torch.testing.assert_close(losses.adakd(z_s, z_t, y, keep=1.0, c=0.0), reverse)


def test_jsd_and_bdl_tend_to_their_ends():
    z_s, z_t, y = case(ignored=(), student=0.5, teacher=0.5)
    torch.testing.assert_close(losses.bdl(z_s, z_t, y, lam=1e-9), kl(z_s, z_t), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.jsd(z_s, z_t, y, beta=1e-9) / 1e-9, kl(z_s, z_t), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", KD_ROWS)
def test_an_equal_student_has_nothing_to_learn(name):
    if name in ("rld", "pd"):
        pytest.skip("its optimum is not the teacher")
    _, z_t, y = case()
    shift = 0.0 if name in ("mse_logits", "adakd") else 3.0  # adakd divides rounding by rounding there
    loss, gradient = value_and_gradient(lambda *a: kd(name, *a), z_t + shift, z_t, y)
    assert loss.abs().max() < 1e-12
    assert name == "tvd" or gradient.abs().max() < 1e-12  # at its kink tvd has any slope


# What holds for all.


@pytest.mark.parametrize("name", ROWS)
def test_ignored_positions_change_nothing(name):
    z_s, z_t, y = case(n=11, ignored=(0, 3, 10))
    kept = y != IGNORE
    clean = value_and_gradient(lambda *a: kd(name, *a), z_s, z_t, y)
    for rubbish in (1e4, math.nan, math.inf, -math.inf):
        z_s[~kept], z_t[~kept] = rubbish, -rubbish
        z_s[3, 1:], z_t[3, 5:] = 0.0, 1.0
        loss, gradient = value_and_gradient(lambda *a: kd(name, *a), z_s, z_t, y)
        assert torch.equal(loss, clean[0]) and torch.equal(gradient, clean[1])
        assert not loss[~kept].any() and not gradient[~kept].any()
    alone = kd(name, z_s[kept], z_t[kept], y[kept])
    torch.testing.assert_close(alone, clean[0][kept], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("n_valid", [0, 1, 2])
def test_few_or_no_valid_positions(name, n_valid):
    z_s, z_t, y = case(n=5, ignored=range(n_valid, 5), dtype=torch.float32)
    z_s.requires_grad_()
    loss, terms = method_loss(name, z_s, z_t, y)
    (gradient,) = torch.autograd.grad(loss, z_s)
    assert loss.isfinite() and gradient.isfinite().all() and all(t.isfinite() for t in terms.values())
    if n_valid == 0:
        assert loss == 0 and not gradient.any() and not any(terms.values())


@pytest.mark.parametrize("name", ROWS)
def test_shifts_of_a_row_order_of_tokens_and_order_of_positions_do_not_matter(name):
    z_s, z_t, y = case(n=11)
    loss, g = kd(name, z_s, z_t, y), torch.Generator().manual_seed(1)
    settings = {"center": True} if name == "mse_logits" else {}
    shifted = kd(name, z_s + 50, z_t - 20, y, **settings)
    torch.testing.assert_close(shifted, kd(name, z_s, z_t, y, **settings), rtol=1e-10, atol=1e-12)
    order = torch.randperm(61, generator=g)
    renamed = torch.where(y == IGNORE, y, order.argsort()[y.clamp(min=0)])
    torch.testing.assert_close(kd(name, z_s[:, order], z_t[:, order], renamed), loss, rtol=1e-10, atol=1e-13)
    order = torch.randperm(11, generator=g)
    torch.testing.assert_close(kd(name, z_s[order], z_t[order], y[order]), loss[order], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", KD_ROWS)
def test_the_teacher_is_constant(name):
    z_s, z_t, y = case()
    z_s.requires_grad_()
    z_t.requires_grad_()
    kd(name, z_s, z_t, y).sum().backward()
    assert z_t.grad is None and z_s.grad.any()
    assert torch.equal(z_s.detach(), case()[0]) and torch.equal(z_t.detach(), case()[1])  # and written to neither


@pytest.mark.parametrize("name", ROWS)
def test_narrow_logits_are_widened_not_computed_with(name):
    z_s, z_t, y = (x.bfloat16() if x.is_floating_point() else x for x in case(v=101))
    assert torch.equal(kd(name, z_s, z_t, y), kd(name, z_s.float(), z_t.float(), y))
    assert kd(name, z_s.double(), z_t, y).dtype == torch.float64


# Sound numbers.


def regimes(n, v):
    """Students and teachers that fp32 has trouble with, rounded to fp32."""
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(n, v, generator=g) for _ in range(3))
    y = torch.randint(v, (n,), generator=g)
    y[1] = IGNORE
    confident = b.clone()
    confident[torch.arange(n), torch.randint(v, (n,), generator=g)] += 30  # rest mass 1e-13 * v: 1 - p is 0 in fp32
    yield "initial student, flat teacher", 0.02 * a, b, y
    yield "initial student, peaked teacher", 0.02 * a, 6 * b, y
    yield "initial student, confident teacher", 0.02 * a, confident, y
    yield "random student, confident teacher", 2 * c, confident, y
    yield "student near a peaked teacher", 6 * b + 0.5 * c, 6 * b, y
    yield "student near a flat teacher", b + 0.3 * c, b, y
    yield "logits far from 0", 3 * a + 50, 4 * b - 20, y


# In slope tvd jumps where p_s = p_t, and among 151,936 tokens some pair is equal to 1e-7. abkd's terms of 151,936 almost
# equal tokens cancel, and logit_std's of two models that are almost equal: ln p near 12 is known to 5e-7 alone.
KINK = {("tvd", 151_936): 1e-2, ("abkd", 151_936): 2e-5, ("logit_std", 151_936): 2e-5}


def assert_near(got, expected, gradient_bar, name, regime):
    """In loss also by 3e-7 nats a position: a KL may be so small that it drowns in the rounding of ln p.

    dkd takes its KL times tau^2 beta = 128.
    """
    (loss, gradient), (loss_64, gradient_64) = got, expected
    nats = 3e-7 * len(loss) ** 0.5 * (128 if name == "dkd" else 1)
    assert (loss - loss_64).norm() <= 1e-5 * loss_64.norm() + nats, regime
    assert (gradient - gradient_64).norm() <= gradient_bar * gradient_64.norm(), regime


@pytest.mark.parametrize(("n", "v"), [(13, 1009), (3, 151_936)])
@pytest.mark.parametrize("name", ROWS)
def test_fp32_is_within_1e_5_of_fp64(name, n, v):
    fn = lambda *a: kd(name, *a)  # noqa: E731
    for regime, z_s, z_t, y in regimes(n, v):
        narrow, wide = (value_and_gradient(fn, z_s.to(d), z_t.to(d), y) for d in (torch.float32, torch.float64))
        assert_near(narrow, wide, KINK.get((name, v), 1e-5), name, regime)


@pytest.mark.parametrize("name", ROWS)
def test_bf16_is_no_worse_than_rounding_the_logits(name):
    fn = lambda *a: kd(name, *a)  # noqa: E731
    for regime, z_s, z_t, y in regimes(13, 1009):
        z_s, z_t = z_s.bfloat16(), z_t.bfloat16()
        narrow, wide = value_and_gradient(fn, z_s, z_t, y), value_and_gradient(fn, z_s.double(), z_t.double(), y)
        assert narrow[1].dtype == torch.bfloat16
        assert_near(narrow, wide, 6e-3, name, regime)


def test_an_extremely_confident_teacher():
    """Rest mass 1e-40: no fp32 number. What is left of every term is still right."""
    z_s, z_t, y = case(v=101, dtype=torch.float32)
    z_t[:, 5] += 90
    for name in KD_ROWS:
        fn = lambda *a: kd(name, *a)  # noqa: B023, E731
        narrow, wide = (value_and_gradient(fn, z_s.to(d), z_t.to(d), y) for d in (torch.float32, torch.float64))
        assert_near(narrow, wide, 1e-5, name, name)


# The table of methods.

# method: weights, temperature, and what else the paper's tables say of it
BASELINES = {
    "pretrain": (0.0, 1.0, {}),
    "vanilla_kd": (0.5, 0.5, {"tau": 0.5, "t2_scaling": False, "standardize": False}),
    "pd": (1.0, 0.0, {"tau": 0.5, "top_p": 0.95, "top_k": 50, "truncate_on": "tempered", "temper_student": False}),
    "atkd": (1.0, 0.0, {"tau": 1.0, "easy_weight": 0.5}),
    "rld": (1.0, 0.0, {"tau": 1.0, "tau_conf": 1.0, "alpha": 1.0, "beta": 1.0}),
    "ldrld": (1.0, 0.5, {"tau": 1.0, "d": 15, "alpha": 1.0, "beta": 1.0, "pair_reduction": "mean"}),
    "tad": (0.5, 0.5, {"tau": 1.0, "top_k": 10, "beta": 2.0, "norm": "sequence"}),
    "bild": (1.0, 0.0, {"tau": 3.0, "top_k": 8}),
}
ALRA = {"d_min": 3, "d_max": 25, "gamma": 5.0, "tau": 1.0, "tau_p": 1.0, "lambda_pair": 1.0, "eps": 1e-6,
        "anchor": "teacher", "pair": "swpra", "budget": "adaptive", "detach_weights": True}  # fmt: skip
ANCHORS = {"alra": "teacher", "alra_n": "none", "alra_ng": "label", "alra_g": "both", "alra_r": "teacher",
           "alra_u": "teacher"}  # fmt: skip
# (w_kd, w_ce) of the other rows
WEIGHTS = {"dkd": (1.0, 1.0), "sekd": (0.9, 0.1), "todi": (0.5, 0.5), "logit_std": (9.0, 0.1)}


def settings_of(name):
    row = losses.resolve(name)
    defaults = {key: value for key, value in (row.fn.__kwdefaults__ or {}).items() if key != "n_sequences"}
    return {**defaults, **row.hyper}


def test_the_table_is_that_of_the_paper():
    for name, (w_kd, w_ce, settings) in BASELINES.items():
        assert (METHODS[name].w_kd, METHODS[name].w_ce, settings_of(name)) == (w_kd, w_ce, settings), name
    for name, anchor in ANCHORS.items():
        pair = {"alra_r": "pra", "alra_u": "pra_u"}.get(name, "swpra")
        assert settings_of(name) == {**ALRA, "anchor": anchor, "pair": pair}, name
    for d in (3, 7, 9, 15, 19, 25):
        assert settings_of(f"fixed_{d}") == {**ALRA, "budget": "fixed", "d_max": d, "pair": "pra_u"}
    for name in METHODS.keys() - BASELINES.keys():
        assert (METHODS[name].w_kd, METHODS[name].w_ce) == WEIGHTS.get(name, (1.0, 0.0)), name


def test_a_methods_loss_is_its_weighted_terms():
    z_s, z_t, y = case()
    n = (y != IGNORE).sum()
    for name, row in METHODS.items():
        loss, terms = method_loss(name, z_s, z_t, y)
        ce = losses.cross_entropy(z_s, None, y).sum() / n
        expected = row.w_ce * ce + (row.w_kd * kd(name, z_s, z_t, y).sum() / n if name != "pretrain" else 0)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(terms["loss"], loss)
        torch.testing.assert_close(terms["ce"], ce)
        assert ("kd" in terms) == methods.needs_teacher(name)
        assert list(terms)[:3] == ["loss", "kd", "ce"] or list(terms) == ["loss", "ce"]
        assert ({"mass", "local", "rest", "pair", "d_u"} <= set(terms)) == (row.fn is losses.alra)
        assert not any(t.requires_grad for t in terms.values())
    parts = method_loss("alra", z_s, z_t, y, lambda_pair=0.5)[1]
    torch.testing.assert_close(parts["kd"], parts["mass"] + parts["local"] + parts["rest"] + 0.5 * parts["pair"])


def test_overrides_reach_the_objective():
    z_s, z_t, y = case()
    z_s.requires_grad_()
    loss, terms = method_loss("tad", z_s, z_t, y, w_kd=0.25, w_ce=0.0, top_k=5)
    torch.testing.assert_close(loss, 0.25 * losses.tad(z_s, z_t, y, top_k=5).sum() / 6)
    assert terms["ce"] > 0  # reported, though of weight 0
    (without,) = torch.autograd.grad(loss, z_s)
    (with_ce,) = torch.autograd.grad(method_loss("tad", z_s, z_t, y, w_kd=0.25, w_ce=1.0, top_k=5)[0], z_s)
    assert not torch.allclose(without, with_ce)
    assert losses.settings("bild").keys() == {"w_kd", "w_ce", "tau", "top_k"}
    assert losses.settings("pretrain").keys() == {"w_kd", "w_ce"}
    assert "d_max" in losses.settings("fixed_7") and losses.METHODS["tad"].hyper == {}


# Bad input.


def refused(message, call):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_bad_shapes_are_refused_by_name():
    z_s, z_t, y = case()
    for fn in {row.fn for row in METHODS.values()} - {losses.cross_entropy}:
        refused("z_t: expected shape (7, 61) as z_s has", lambda fn=fn: fn(z_s, z_t[:, 1:], y))
        refused("z_s, y: expected [N, V] and [N], got (7, 61) and (6,)", lambda fn=fn: fn(z_s, z_t, y[1:]))
    refused("y: expected int64 labels, got torch.int32", lambda: losses.alra(z_s, z_t, y.int()))
    refused("z_t: tad needs teacher logits, got None", lambda: method_loss("tad", z_s, None, y))


REFUSED = [
    ("alra", {"d_max": 61}, "d_max=61: expected 2 <= d_max < V=61"),
    ("alra", {"d_max": 1}, "d_max=1: expected 2 <= d_max < V=61"),
    ("alra", {"d_min": 1}, "d_min=1: expected 2 <= d_min <= d_max=25"),
    ("alra", {"d_min": 9, "d_max": 7}, "d_min=9: expected 2 <= d_min <= d_max=7"),
    ("alra", {"anchor": "top"}, "anchor='top': expected 'teacher' or 'none' or 'label' or 'both'"),
    ("alra", {"eps": 0.0}, "eps=0.0: expected float more than 0"),
    ("alra", {"lambda_pair": math.nan}, "lambda_pair=nan: expected float 0 or more"),
    ("rld", {"tau_conf": math.inf}, "tau_conf=inf: expected float more than 0"),
    ("pd", {"top_k": 62}, "top_k=62: expected 1 to V"),
    ("pd", {"top_p": 1.5}, "top_p=1.5: expected float more than 0, at most 1"),
    ("ldrld", {"d": 61}, "d=61: expected 2 <= d < V=61"),
    ("tad", {"top_k": 61}, "top_k=61: expected 1 <= top_k < V=61"),
    ("bild", {"top_k": 2}, "top_k=2: expected 3 to V"),
    ("jsd", {"beta": 2.0}, "beta=2.0: expected float 0 to 1"),
    ("skew_fkl", {"lam": 1.0}, "lam=1.0: expected float 0 to below 1"),
    ("taid", {"t": torch.tensor(0.5)}, "t=tensor(0.5000): expected float 0 to 1"),
    ("tad", {"w_ce": -1.0}, "w_ce=-1.0: expected float 0 or more"),
    ("tad", {"d_max": 7}, "tad takes no d_max; it takes beta, norm, tau, top_k, w_ce, w_kd"),
    ("aldra", {}, "no such method 'aldra', did you mean 'alra'?"),
    ("kd", {}, "did you mean 'vanilla_kd'? Known"),
    ("perplexity", {}, "no such method 'perplexity'. Known"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_bad_settings_are_refused_by_name_value_and_bound(name, settings, message):
    z_s, z_t, y = case()
    refused(message, lambda: method_loss(name, z_s, z_t, y, **settings))


def test_every_setting_has_a_kind():
    """Its bounds are then checked; the kinds are tested in test_configure.py."""
    for name in METHODS:
        assert all(kind in (int, bool, float) or typing.get_args(kind) for kind in losses.settings(name).values()), name
    bounded = {key for name in METHODS for key, kind in losses.settings(name).items() if kind is float}
    assert bounded == {"alpha", "beta"}  # those of ABKD may be any number


@pytest.mark.parametrize("name", ROWS)
def test_checks_of_shape_and_range_do_not_wait_for_the_device(name):
    """On the meta device any look at a value raises, as it would make a GPU wait."""
    z_s, z_t, y = (x.to("meta") for x in case(dtype=torch.float32))
    loss, _ = method_loss(name, z_s.requires_grad_(), z_t, y)
    assert torch.autograd.grad(loss, z_s)[0].shape == z_s.shape


# Memory.


@pytest.mark.parametrize("name", FIRST_TIER)
def test_little_of_vocabulary_size_is_kept_for_the_backward(name):
    """Besides the logits: nothing for the objective (one tensor for PD), one for the cross-entropy; and never a mask."""
    z_s, z_t, y = case(n=11, v=997, dtype=torch.float32)
    z_s.requires_grad_()
    kept = {}

    def pack(x):
        if x.numel() >= z_s.numel() and x.data_ptr() not in (z_s.data_ptr(), z_t.data_ptr()):
            kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        method_loss(name, z_s, z_t, y)
    assert len(kept) <= (METHODS[name].w_ce > 0) + (name == "pd"), [x.shape for x in kept.values()]
    assert not [x for x in kept.values() if x.dtype == torch.bool or x.numel() > z_s.numel()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's, of what it does itself
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs /proc and a C++ compiler")
def test_compiled_the_gradient_replaces_the_logits():
    """TAD's scatter and its dense gradient take no memory of their own."""
    n, v = 61, 151_936  # 37 MB a tensor: large enough for malloc to return each when it is freed
    z_s, z_t, y = case(n=n, v=v, dtype=torch.float32)
    (expected,) = torch.autograd.grad(method_loss("tad", z := z_s.clone().requires_grad_(), z_t, y)[0], z)
    evaluate, z = torch.no_grad()(methods.make_loss_fn("tad", compile=True)), z_s.clone()
    assert evaluate(torch.float32, z, z_t, y)[2] is z and (z - expected).norm() <= 1e-5 * expected.norm()
    del z, expected
    before = bench.start_memory(torch.device("cpu"))
    evaluate(torch.float32, z_s, z_t, y)
    assert bench.peak_memory(torch.device("cpu"), before) * 2**20 / (4 * n * v) < 0.9


def _squares(z_s, z_t, y, inside=True, guard=False):
    z_s, z_t, _, valid = losses.enter(z_s, z_t, y, guard)
    loss = (z_s - z_t).square().sum(-1)
    return loss / (losses.valid_mean(loss, valid) if inside else loss.mean()), valid


def _random(z_s, z_t, y, *, generator: torch.Generator | None = None):
    return losses.reverse_kl(z_s, z_t + torch.rand(z_t.shape, generator=generator), y)


def _with_part(act):
    return lambda z_s, *z: namedtuple("Terms", "loss extra")(losses.reverse_kl(z_s, *z), act(z_s.data, *z))


def _by_hand(z_s, z_t, y):
    """As good as any: it looks at values, takes rows by a mask, and calls neither `enter` nor `leave`."""
    out = z_s.new_zeros(len(y))
    if (y != IGNORE).any():
        out[y != IGNORE] = (z_s - z_t).square().sum(-1)[y != IGNORE] / z_t[y != IGNORE].std().item()
    return out


@pytest.mark.parametrize(("fn", "message"), [
    (_by_hand, ""),
    (lambda *z: losses.leave(*_squares(*z)), ""),
    (lambda *z: losses.leave(*_squares(*z, inside=False)), r"ignored positions have a gradient; .*`valid_mean`"),
    (lambda *z: losses.leave(*_squares(*z, inside=False, guard=True)), "ignored logits change other positions"),
    (lambda *z: losses.reverse_kl(*z) * (w := z[1].amax(-1)) / w.mean(), "ignored logits change other positions"),
    (_random, ""),
    (_with_part(lambda *z: torch.rand(3)), "equal calls differ; .* keyword `generator: torch.Generator"),  # whatever it does with them
    (lambda *z: losses.reverse_kl(*z) * random.random(), "equal calls differ"),
    (_with_part(lambda z_s, z_t, y: z_s.mul_(2)), "z_s is changed in place"),
    (_with_part(lambda z_s, z_t, y: z_t.mul_(2)), "z_t is changed in place"),
    (_with_part(lambda z_s, z_t, y: y.clamp_(min=0)), "y is changed in place"),
    (_with_part(lambda *z: torch.set_default_dtype(torch.float64) or z[2]), "default dtype is changed"),
    (_with_part(lambda *z: None), r"part extra: expected a tensor \[N\], .* got \[None\]"),
    (_with_part(lambda *z: z[0].mean()), r"part extra: expected a tensor \[N\], .* got \(\)"),
    (lambda z_s, *z: losses.mse_logits(1e30 * z_s, *z), "not finite at ordinary logits"),
    (losses.Method(losses.jsd, {"tua": 2.0}, 1.0, 0.0), r"jsd\(\) got an unexpected keyword argument 'tua'"),
    (losses.Method(losses.jsd, {}, 0.0, 0.0), "both weights are zero; set w_kd or w_ce"),
    (losses.Method(losses.jsd, {}, 9.0, 0.1), "w_kd=9.0: w_kd_schedule='wsd' sets w_ce = 1 - w_kd; set w_kd <= 1"),
    (losses.Method(losses.bild, {}, 1.0, 0.0, ("top_k",)), "'top_k_end' .KeyError in "),
    (lambda *z: _squares(*z)[0], "expected one number per position, 0 where ignored: end with `return leave"),
    (lambda *z: _squares(*z)[0].sum(), "expected one number per position"),
    (lambda *z: losses.leave(*_squares(*z)).detach(), "element 0 of tensors does not require grad"),
    (lambda z_s, z_t, y: z_s.gather(1, y[:, None]), r"index -100 is out of .* \(RuntimeError in \S+test_losses.py, line \d+\)"),
])  # fmt: skip
def test_an_objective_is_tried_before_the_first_step(fn, message, monkeypatch):
    monkeypatch.setitem(losses.METHODS, "mine", fn if isinstance(fn, tuple) else losses.Method(fn, {}, 1.0, 0.0))
    with pytest.raises(ValueError, match=f"^mine: .*{message}") if message else contextlib.nullcontext():
        methods.check_settings("mine", 23, "wsd")
    torch.set_default_dtype(torch.float32)


def test_every_objective_passes_its_trial():
    for name in METHODS:
        for V in (53, 4096):
            methods.check_settings(name, V, compile=True)


def test_the_parts_of_an_objective_of_the_readers_own_are_reported(monkeypatch):
    class Terms(NamedTuple):
        loss: torch.Tensor
        entropy: torch.Tensor  # [N]: reported
        tokens: torch.Tensor  # [N, 2]: not reported

    def mine(z_s, z_t, y, *, scale: float = 1.0):
        loss = losses.reverse_kl(z_s, z_t, y)
        return Terms(scale * loss, -(z_t.softmax(-1) * z_t.log_softmax(-1)).sum(-1), z_t.topk(2).indices)

    monkeypatch.setitem(losses.METHODS, "mine", losses.Method(mine, {"scale": 3.0}, 0.5, 0.0))
    z_s, z_t, y = case()
    loss, terms = method_loss("mine", z_s, z_t, y)
    assert list(terms) == ["loss", "kd", "ce", "entropy"]
    valid = y != IGNORE
    expected = -(z_t.softmax(-1) * z_t.log_softmax(-1)).sum(-1)[valid].mean()
    torch.testing.assert_close(terms["entropy"], expected)
    torch.testing.assert_close(loss, 1.5 * losses.reverse_kl(z_s, z_t, y).sum() / valid.sum())
    assert losses.settings("mine").keys() == {"w_kd", "w_ce", "scale"}
    assert type(losses.resolve("mine", scale=2).hyper["scale"]) is float  # as `--mine.scale=2` gives it
    with pytest.raises(ValueError, match=r"mine\.scale='big': expected float"):
        losses.resolve("mine", scale="big")


def test_tads_mean_tail_mass_is_over_the_sequence_however_many_are_in_a_batch():
    z_s, z_t, y = case(n=12, ignored=(2, 6, 7, 11))
    z_t[6:] *= 0.3  # the second sequence is more diffuse
    both = losses.tad(z_s, z_t, y, top_k=5, n_sequences=2)
    alone = torch.cat([naive.tad(z_s[rows], z_t[rows], y[rows], top_k=5) for rows in (slice(0, 6), slice(6, 12))])
    torch.testing.assert_close(both, alone)
    assert not torch.allclose(losses.tad(z_s, z_t, y, top_k=5), alone)
    y[6:] = IGNORE  # a sequence without valid positions
    z_s.requires_grad_()
    losses.tad(z_s, z_t, y, top_k=5, n_sequences=2).sum().backward()
    assert z_s.grad.isfinite().all() and not z_s.grad[6:].any()
    refused("n_sequences=5: expected a divisor of N=12", lambda: losses.tad(z_s, z_t, y, n_sequences=5))
    assert "n_sequences" not in losses.settings("tad")
