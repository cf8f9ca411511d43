"""Every objective: against naive loops, in identities, in fp32 and bf16, on bad input, in memory.

The recorded numbers of the authors' codes are in test_golden.py, the fused head in test_head.py.
"""

import functools
import math
import re
from collections import deque, namedtuple

import pytest
import torch
from torch.testing import assert_close

import losses
from lib import vocab
from losses import IGNORE, METHODS, method_loss
from run import objective_trial
from tests import naive, world

# One row per objective. The naive comparison goes through the settings of the paper's variants.
VARIANTS = {name for name, row in METHODS.items() if row.fn is losses.alra}
APART = {"rs_kd", "taid_adaptive"}  # random, and a module: they have tests of their own
OTHERS = VARIANTS - {"alra", "alra_g", "fixed_7"} | {"pd_wsd", *APART}
ROWS = [name for name in METHODS if name not in OTHERS]
KD_ROWS = [name for name in ROWS if name != "pretrain"]
FIRST_TIER = [
    "pretrain",
    "vanilla_kd",
    "pd",
    "atkd",
    "rld",
    "ldrld",
    "tad",
    "bild",
    "alra",
    "fixed_7",
]


def case(
    seed=0,
    n=7,
    v=61,
    student=1.5,  # scale of its logits
    teacher=3.0,
    ignored=(2,),
    dtype=torch.float64,
):
    """Random logits and labels, some positions ignored."""
    g = torch.Generator().manual_seed(seed)
    z_s = student * torch.randn(n, v, generator=g, dtype=torch.float64)
    z_t = teacher * torch.randn(n, v, generator=g, dtype=torch.float64)
    y = torch.randint(v, (n,), generator=g)
    y[list(ignored)] = IGNORE
    return z_s.to(dtype), z_t.to(dtype), y


def value_and_gradient(fn, z_s, z_t, y, **settings):
    """[N] and its gradient. Each position has a weight of its own, so that none can stand in for
    another."""
    z_s = z_s.clone().requires_grad_()
    loss = fn(z_s, z_t, y, **settings)
    loss = getattr(loss, "loss", loss)
    if not loss.requires_grad:  # the naive loops found no position to take
        return loss, torch.zeros_like(z_s)
    weights = torch.arange(1, len(y) + 1)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), z_s)
    return loss.detach(), gradient


def kd(name, z_s, z_t, y, **settings):
    """The objective of a row of METHODS alone, per position. A random one draws equal numbers."""
    torch.manual_seed(0)
    row = losses.built(METHODS[name])
    result = row.fn(z_s, z_t, y, **row.hyper | settings)
    return getattr(result, "loss", result)


def assert_same_loss(fn, method, z_s, z_t, y, **settings):
    """A mean loss [] and its gradient are those of a method."""
    z_s.requires_grad_()
    loss = fn(z_s, z_t, y)
    expected, _ = method_loss(method, z_s, z_t, y, **settings)
    gradients = [torch.autograd.grad(x, z_s) for x in (loss, expected)]
    assert_close((loss, gradients[0]), (expected, gradients[1]), rtol=0, atol=1e-9)


def assert_near(got, exact, bar, floor=0.0):
    """The norm of the error is within a share of the norm, and a floor.

    Not entry by entry: one near 0 is a sum of larger numbers, and has their rounding error.
    """
    assert (got - exact).norm() <= bar * exact.norm() + floor


# ----------------------------------------------------------------------------------------------
# against naive loops typed from the papers


def read_settings(table):
    """Read lines such as "pd: top_k=3, tau=2.0"."""
    rows = [line.partition(":") for line in table.strip().splitlines()]
    return [(name, eval(f"dict({settings})")) for name, _, settings in rows]


CASES = read_settings("""
cross_entropy
vanilla_kd
vanilla_kd: tau=2.0, t2_scaling=True
vanilla_kd: tau=2.0, standardize=True
pd: top_k=11
pd: top_k=3, tau=2.0
pd: top_k=37, top_p=1.0, temper_student=True
pd: top_k=17, truncate_on='raw', top_p=0.8
atkd
atkd: tau=2.0, easy_weight=0.2
rld
rld: tau=4.0, tau_conf=2.0, alpha=0.7, beta=8.0
ldrld: d=9
ldrld: d=2, tau=4.0
ldrld: d=5, pair_reduction='sum', alpha=10.5, beta=7.0
tad
tad: norm='unit', beta=0.5, top_k=1
tad: norm='none', tau=2.0, top_k=36
tad: beta=0.0
bild
bild: top_k=3, tau=1.0
alra: d_max=11
alra: d_max=7, lambda_pair=0.3, detach_weights=False
alra: d_max=7, tau=2.0, tau_p=3.0, gamma=2.0, eps=0.01
alra: d_max=7, anchor='none'
alra: d_max=7, anchor='label'
alra: d_max=7, anchor='both'
alra: d_min=2, d_max=2, anchor='both'
alra: d_max=7, pair='pra'
alra: d_max=7, pair='pra_u'
alra: d_max=7, budget='fixed', pair='pra_u'
alra: d_min=7, d_max=7, coefficients='exact', w_mass=0.5, w_local=2.0, w_rest=3.0
alra: d_max=7, tau=1.5, coefficients='exact', lambda_pair=0.0
alra: d_max=9, gamma=0.0, lambda_pair=0.0
reverse_kl: tau=2.0
jsd
jsd: beta=0.1, tau=2.0
tvd
dkd
dkd: tau=1.0, alpha=0.3, beta=2.0
mse_logits
adakd
adakd: rule='reverse_kl', base='forward', keep=1.0, c=0.6
sekd
sekd: tau=1.0, keep=0.5
sekd: keep=1.0
bdl
bdl: lam=0.3
bdl: lam=0.0
bdl: lam=1.0
skew_fkl
skew_fkl: lam=0.0
skew_rkl
skew_rkl: lam=0.7
skew_rkl: lam=0.0
abkd
abkd: alpha=-0.3, beta=0.9
akl
akl: mu=0.01
akl: mu=0.9
akl: mu=0.99
todi
todi: tau=2.0
taid
taid: t=1.0
""")


def awkward(kind):
    """Logits on which shortcuts fail."""
    z_s, z_t, y = case(seed=5, n=5, v=37)
    if kind == "mixed":  # logits far from 0, and a label that is the teacher's first choice
        z_s[3] += 50
        z_t[3] -= 20
        y[4] = z_t[4].argmax()
    elif kind == "initial":  # a student at initialisation, and labels that are the teacher's last
        z_s = 0.02 * z_s
        y = torch.where(y == IGNORE, y, z_t.argmin(-1))
    elif kind == "ties":  # as in bf16 logits: within and across the borders of every set
        z_s = (z_s * 2).round() / 2
        z_t = (z_t * 2).round() / 2
    elif kind == "two":  # valid positions: halves and shares of them are empty or one
        y[[0, 3]] = IGNORE
    return z_s, z_t, y


@pytest.mark.parametrize("kind", ["mixed", "initial", "ties", "two"])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_naive_loops_agree(name, settings, kind, monkeypatch):
    """Whatever the size of the blocks by which the largest of 37 logits are found."""
    size = {"mixed": 1, "ties": 2, "two": 99}.get(kind, 8)
    monkeypatch.setattr(vocab, "SMALL_BLOCK", size)
    inputs = awkward(kind)
    fn = getattr(losses, name)
    settings = losses.default_settings(fn) | settings
    got = value_and_gradient(fn, *inputs, **settings)
    expected = value_and_gradient(getattr(naive, name), *inputs, **settings)
    assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_every_objective_is_held_against_naive_loops():
    objectives = {row.fn.__name__ for name, row in METHODS.items() if name not in APART}
    assert objectives == {name for name, _ in CASES}


def test_random_sampling_is_the_cross_entropy_of_draws_from_the_teacher():
    z_s, z_t, y = case()
    p = z_t.masked_fill((y == IGNORE)[:, None], 0.0).softmax(-1)
    for n in (1, 8):
        draws, used = (torch.Generator().manual_seed(3) for _ in range(2))
        tokens = torch.multinomial(p, n, replacement=True, generator=draws)
        got = value_and_gradient(losses.rs_kd, z_s, z_t, y, n_draws=n, generator=used)
        expected = value_and_gradient(naive.rs_kd, z_s, z_t, y, draws=iter(tokens[y >= 0]))
        assert_close(got, expected)


def test_adaptive_taid_moves_t_by_the_fall_of_its_loss():
    """As its authors' code does, but that a loss moves t one update later."""
    module = losses.AdaptiveTaid(alpha=0.3, beta=0.5)
    t, momentum, js = 0.4, 0.0, []
    for step in range(6):
        z_s, z_t, y = case(seed=step, student=1.5 - 0.2 * step)
        linear = 0.4 + 0.01 * step
        if len(js) > 1:
            momentum = 0.5 * momentum + 0.5 * (js[-2] - js[-1]) / js[-2]
            t += 0.3 / (1 + math.exp(-momentum)) * (1 - t)
        t = max(t, linear)
        got = value_and_gradient(module, z_s, z_t, y, t=torch.tensor(linear, dtype=torch.float64))
        assert_close(got, value_and_gradient(naive.taid, z_s, z_t, y, t=t))
        assert module.t.item() == pytest.approx(t, rel=1e-12)
        r = ((1 - t) * z_s + t * z_t).softmax(-1)
        js.append((-(r * z_s.log_softmax(-1)).sum(-1))[y != IGNORE].mean().item())
    assert 0.6 < t < 1.0


# ----------------------------------------------------------------------------------------------
# sets of tokens and of positions


@pytest.mark.parametrize("anchor", ["none", "teacher", "label", "both"])
@pytest.mark.parametrize("kind", ["mixed", "initial", "ties"])
@pytest.mark.parametrize("d_max", [7, 19])
def test_alra_pieces_are_those_of_the_paper(d_max, anchor, kind):
    """Anchors are missing from the proposals, the lowest of them, above it, or one token."""
    inputs = awkward(kind)
    settings = {"d_max": d_max, "tau": 1.5, "eps": 0.9, "anchor": anchor}
    settings = losses.default_settings(losses.alra) | settings
    terms = losses.alra(*inputs, **settings)
    for u, piece in naive.alra_terms(*inputs, **settings).items():
        tokens = terms.tokens[u].tolist()
        assert set(tokens) == set(piece["tokens"])
        assert tokens[: piece["d_u"]] == piece["set"]
        for key in ("d_u", "support", "mass", "local", "rest", "pair"):
            assert getattr(terms, key)[u].item() == pytest.approx(float(piece[key]), rel=1e-9)


def test_of_equally_hard_positions_the_first_are_kept():
    z_s, z_t, y = case(n=11)
    for name in ("sekd", "adakd"):
        loss = kd(name, z_s[:1].expand(11, -1), z_t[:1].expand(11, -1), y, keep=0.5)
        assert loss.nonzero().flatten().tolist() == [0, 1, 3, 4, 5]


# ----------------------------------------------------------------------------------------------
# identities


@pytest.mark.parametrize("name", sorted({*KD_ROWS} - {"rld", "pd"}))
def test_an_equal_student_has_nothing_to_learn(name):  # RLD's and PD's optimum is another
    _, z_t, y = case()
    shift = 0.0 if name in ("mse_logits", "adakd") else 3.0  # adakd divides rounding by rounding
    for z_s in (z_t, z_t + shift):
        loss, gradient = value_and_gradient(functools.partial(kd, name), z_s, z_t, y)
        assert loss.abs().max() < 1e-12
        assert name == "tvd" or gradient.abs().max() < 1e-12  # at its kink tvd has any slope


# ----------------------------------------------------------------------------------------------
# what holds for all


@pytest.mark.parametrize("name", ROWS)
def test_ignored_positions_change_nothing(name):
    z_s, z_t, y = case(n=11, ignored=(0, 3, 10))
    fn = functools.partial(kd, name)
    valid = y != IGNORE
    clean, clean_gradient = value_and_gradient(fn, z_s, z_t, y)
    for rubbish in (1e4, math.nan, math.inf, -math.inf):
        z_s[~valid] = rubbish
        z_t[~valid] = -rubbish
        z_s[3, 1:] = 0.0
        z_t[3, 5:] = 1.0
        loss, gradient = value_and_gradient(fn, z_s, z_t, y)
        assert torch.equal(loss, clean)
        assert torch.equal(gradient, clean_gradient)
        assert not loss[~valid].any()
        assert not gradient[~valid].any()


# ----------------------------------------------------------------------------------------------
# fp32 and bf16 against fp64


@functools.cache
def regimes(n, v):
    """Students and teachers that fp32 has trouble with, rounded to fp32."""
    return [*_regimes(n, v)]


def _regimes(n, v):
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(n, v, generator=g) for _ in range(3))
    y = torch.randint(v, (n,), generator=g)
    y[1] = IGNORE
    confident = b.clone()  # rest mass 1e-13 * v: 1 - p is 0 in fp32
    token = torch.randint(v, (n,), generator=g)
    confident[torch.arange(n), token] += 30
    initial = 0.02 * a  # a student at initialisation
    yield initial, b, y
    yield initial, 6 * b, y  # a peaked teacher
    yield initial, confident, y
    yield 2 * c, confident, y
    yield 6 * b + 0.5 * c, 6 * b, y  # a student near its teacher
    yield b + 0.3 * c, b, y
    yield 3 * a + 50, 4 * b - 20, y  # logits far from 0
    certain = b.clone()  # rest mass 1e-40: no fp32 number
    certain[:, 5] += 90
    yield 2 * a, certain, y
    impossible = torch.zeros(v)  # tokens that underflow in both models, or in the teacher
    impossible[3:9] = -200
    yield 2 * a + impossible, b + impossible.index_fill(0, torch.tensor(11), -130), y
    constant = torch.full((v,), 5.0)
    first = torch.arange(n)[:, None]
    yield a.where(first != 0, constant), b.where(first != 2, -constant), y


# In slope tvd jumps where p_s = p_t, and among 151,936 tokens two pairs are equal to 4 eps.
KINK = {("tvd", 151_936): 1e-2}

BF16 = 3 * 2**-8  # of a gradient: three times what rounding it to bf16 may add

# by which a KL is multiplied: tau^2 beta; tau^2; tau^2 / keep
FACTOR = {"dkd": 128, "logit_std": 4, "sekd": 20}

# whose gradients are differences of terms up to 15 times as large: of two models near each other,
# of almost equal tokens (abkd, topk_tail), or of ln p near -100 (reverse_kl)
CANCEL = {"adakd", "dkd", "logit_std", "taid", "abkd", "topk_tail", "reverse_kl"}


def assert_near_fp64(name, z_s, z_t, y, bar, **settings):
    """Compare with fp64 on the same logits: the gradient within `bar`, the loss within 1e-5.

    In loss also by the rounding of ln p, times the factor of its KL: a KL may be so small that it
    drowns in that. Where terms cancel, the gradient has that rounding of each of them.
    """
    fn = functools.partial(kd, name, **settings)
    loss, gradient = value_and_gradient(fn, z_s, z_t, y)
    exact, exact_gradient = value_and_gradient(fn, z_s.double(), z_t.double(), y)
    assert gradient.dtype == z_s.dtype
    # ln p is some ln V, and in either model it is rounded twice, by 2^-24 at most
    rounding = 2**-22 * math.log(z_s.shape[1])
    assert_near(loss, exact, 1e-5, rounding * len(loss) ** 0.5 * FACTOR.get(name, 1))
    if name in CANCEL:
        bar = max(bar, 15 * rounding)
    assert_near(gradient, exact_gradient, bar)


@pytest.mark.parametrize(("n", "v"), [(13, 1009), (3, 151_936)])
@pytest.mark.parametrize("name", ROWS)
def test_fp32_is_within_1e_5_of_fp64(name, n, v):
    stride = 4 if v > 1e5 else 1  # a first student, a near one, tokens that underflow
    for z_s, z_t, y in regimes(n, v)[::stride]:
        assert_near_fp64(name, z_s, z_t, y, KINK.get((name, v), 1e-5))


@pytest.mark.parametrize("name", ROWS)
def test_bf16_is_no_worse_than_rounding_the_logits(name):
    for z_s, z_t, y in regimes(13, 1009):
        assert_near_fp64(name, z_s.bfloat16(), z_t.bfloat16(), y, BF16)


# ----------------------------------------------------------------------------------------------
# the table of methods

# Settings, as the paper's tables or a method's authors have them. ALRA's variants have those of
# ALRA but for their own.
PAPER = dict(
    read_settings("""
pretrain
vanilla_kd: tau=0.5, t2_scaling=False, standardize=False
pd: tau=0.5, top_p=0.95, top_k=50, truncate_on='tempered', temper_student=False
atkd: tau=1.0, easy_weight=0.5
rld: tau=1.0, tau_conf=1.0, alpha=1.0, beta=1.0
ldrld: tau=1.0, d=15, alpha=1.0, beta=1.0, pair_reduction='mean'
tad: tau=1.0, top_k=10, beta=2.0, norm='sequence'
bild: tau=3.0, top_k=8
alra: d_min=3, d_max=25, gamma=5.0, tau=1.0, tau_p=1.0, lambda_pair=1.0, eps=1e-6, \
    anchor='teacher', pair='swpra', budget='adaptive', detach_weights=True, \
    coefficients='ald', w_mass=1.0, w_local=1.0, w_rest=1.0
alra_n: anchor='none'
alra_ng: anchor='label'
alra_g: anchor='both'
alra_r: pair='pra'
alra_u: pair='pra_u'
fixed_3: budget='fixed', d_max=3, pair='pra_u'
fixed_7: budget='fixed', d_max=7, pair='pra_u'
fixed_9: budget='fixed', d_max=9, pair='pra_u'
fixed_15: budget='fixed', d_max=15, pair='pra_u'
fixed_19: budget='fixed', d_max=19, pair='pra_u'
fixed_25: budget='fixed', d_max=25, pair='pra_u'
topk_tail: tau=1.0, top_k=10, beta=0.0, norm='sequence'
logit_std: tau=2.0, t2_scaling=True, standardize=True
skew_fkl: lam=0.1
skew_rkl: lam=0.1
pd_wsd: tau=0.5, top_p=0.95, top_k=50, truncate_on='tempered', temper_student=False
reverse_kl: tau=1.0
jsd: beta=0.5, tau=1.0
tvd
dkd: tau=4.0, alpha=1.0, beta=8.0
mse_logits
adakd: keep=0.5, c=0.5, rule='hellinger', base='reverse'
sekd: tau=2.0, keep=0.2
bdl: lam=0.9
abkd: alpha=0.2, beta=0.7
akl: mu=0.5
todi: tau=1.0
taid: t=0.4
taid_adaptive: t=0.4, alpha=0.0005, beta=0.99
rs_kd: n_draws=50
""")
)
# where they are not those of the method's name
FUNCTIONS = {
    "pretrain": "cross_entropy",
    "pd_wsd": "pd",
    "topk_tail": "tad",
    "logit_std": "vanilla_kd",
    "taid_adaptive": "AdaptiveTaid",
}
# where they are not 1 and 0
WEIGHTS = dict(
    read_settings("""
pretrain: w_kd=0.0, w_ce=1.0
vanilla_kd: w_kd=0.5, w_ce=0.5
ldrld: w_kd=1.0, w_ce=0.5
tad: w_kd=0.5, w_ce=0.5
dkd: w_kd=1.0, w_ce=1.0
sekd: w_kd=0.9, w_ce=0.1
todi: w_kd=0.5, w_ce=0.5
logit_std: w_kd=9.0, w_ce=0.1
""")
)


@pytest.mark.parametrize("name", METHODS)
def test_the_table_is_that_of_the_paper(name):
    row = METHODS[name]
    assert row.fn.__name__ == ("alra" if name in VARIANTS else FUNCTIONS.get(name, name))
    weights = WEIGHTS.get(name, {"w_kd": 1.0, "w_ce": 0.0})
    assert {"w_kd": row.w_kd, "w_ce": row.w_ce} == weights
    expected = PAPER[name]
    if name in VARIANTS:
        expected = PAPER["alra"] | expected
    assert losses.default_settings(row.fn) | row.hyper == expected


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_loss_is_its_weighted_terms(name):
    """And the teacher is a constant."""
    z_s, z_t, y = case()
    z_s.requires_grad_()
    z_t.requires_grad_()
    row = METHODS[name]
    torch.manual_seed(0)
    loss, terms = method_loss(name, z_s, z_t, y)
    loss.backward()
    assert z_t.grad is None
    assert not any(term.requires_grad for term in terms.values())
    each = {"ce": losses.cross_entropy(z_s, None, y)}
    if row.has_teacher:
        each["kd"] = kd(name, z_s, z_t, y)
    means = {key: losses.valid_mean(x.detach(), y != IGNORE) for key, x in each.items()}
    means["loss"] = row.w_ce * means["ce"] + row.w_kd * means.get("kd", 0.0)
    assert_close({key: terms.pop(key) for key in means}, means)
    assert_close(loss.detach(), means["loss"])
    if row.fn is losses.alra:
        parts = sum(terms.pop(key) for key in ("mass", "local", "rest", "pair"))
        assert_close(parts, means["kd"])
        assert list(terms) == ["d_u", "support"]
    else:
        assert not terms


# ----------------------------------------------------------------------------------------------
# bad input


def refused(message, fn, *inputs, **settings):
    with pytest.raises(ValueError, match=re.escape(message)):
        fn(*inputs, **settings)


def test_bad_shapes_are_refused_by_name():
    z_s, z_t, y = case()
    for fn in {losses.built(row).fn for row in METHODS.values()} - {losses.cross_entropy}:
        refused("z_t: expected floats (7, 61), got torch.float64 (7, 60)", fn, z_s, z_t[:, 1:], y)
        refused("z_s, y: expected [N, V] and int64 labels [N], got (7, 61)", fn, z_s, z_t, y[1:])
    for label in (-1, 61):
        refused("y: expected labels 0 to 60, or -100", losses.tvd, z_s, z_t, y.fill_(label))
    y.fill_(3)
    refused("z_t: expected floats (7, 61), got torch.int64", losses.tvd, z_s, z_t.long(), y)
    z_t[2, 5] = torch.finfo(torch.float32).min
    refused("z_t: expected logits above -1e+30", losses.vanilla_kd, z_s, z_t, y)
    refused("z_s: expected logits above -1e+30", losses.alra, z_t, z_s, y)


REFUSED = """
alra: d_max=61 => d_min=3, d_max=61: expected 2 <= d_min <= d_max < V=61
alra: d_min=1 => d_min=1, d_max=25: expected 2 <= d_min <= d_max < V=61
alra: anchor='top' => anchor='top': expected 'teacher' or 'none' or 'label' or 'both'
alra: lambda_pair=math.nan => lambda_pair=nan: expected float 0 or more
pd: top_k=62 => top_k=62: expected 1 to V
pd: top_p=1.5 => top_p=1.5: expected float more than 0, at most 1
ldrld: d=61 => d=61: expected 2 <= d < V=61
tad: top_k=61 => top_k=61: expected 1 <= top_k < V=61
bild: top_k=2 => top_k=2: expected 3 to V
jsd: beta=2.0 => beta=2.0: expected float 0 to 1
skew_fkl: lam=1.0 => lam=1.0: expected float 0 to below 1
taid: t=torch.tensor(0.5) => t=tensor(0.5000): expected float 0 to 1
tad: w_ce=-1.0 => w_ce=-1.0: expected float 0 or more
pd_wsd: w_ce=0.3 => pd_wsd.w_ce: it is 1 - w_kd, which moves; set w_kd too
tad: d_max=7 => tad takes no d_max; it takes beta, norm, tau, top_k, w_ce, w_kd
aldra => no such method 'aldra', did you mean alra?
perplexity => no such method 'perplexity'. Known
"""


@pytest.mark.parametrize(("setting", "message"), world.read_table(REFUSED))
def test_bad_settings_are_refused_by_name_value_and_bound(setting, message):
    ((name, settings),) = read_settings(setting)
    refused(message, method_loss, name, *case(), **settings)


# ----------------------------------------------------------------------------------------------
# objectives of the reader's own, tried before the first step


def _with_part(name, value):
    return lambda *z: namedtuple("Terms", ["loss", name])(losses.reverse_kl(*z), value)


def _remembers():
    """A running mean outside the objective, as a module's global would be."""
    kept = []

    def objective(z_s, z_t, y):
        loss = losses.reverse_kl(z_s, z_t, y)
        kept.append(losses.valid_mean(loss.detach(), y != IGNORE))
        return loss / torch.stack(kept).mean()

    return objective


TAU = torch.nn.Parameter(torch.ones(()))


class Keeps(torch.nn.Module):
    """A running loss that is no buffer, so that checkpoints lack it."""

    kept = 1.0

    def forward(self, z_s, z_t, y):
        loss = self.kept * losses.reverse_kl(z_s, z_t, y)
        self.kept = 0.5 * self.kept
        return loss


class Window(torch.nn.Module):
    """A memory that is read once it is full, which it is after the trial."""

    def __init__(self):
        super().__init__()
        self.memory = deque(maxlen=99)

    def forward(self, z_s, z_t, y):
        self.memory.append(z_t.mean())
        return losses.reverse_kl(z_s, z_t, y)


LEAVE = r"expected \[N\], 0 where ignored; begin with `enter`, end with `leave`"
TRIED = [
    (
        lambda z_s, z_t, y: losses.jsd(z_s, z_t, y) * z_t.std(),
        "an ignored position changes others; use `enter`",
    ),
    (lambda z_s, *z: losses.jsd(z_s / TAU, *z), "a parameter would not be trained"),
    (lambda *z: losses.jsd(*z) * torch.rand(len(z[2])), "equal calls differ; .* random numbers"),
    (_remembers(), "equal calls differ; .* a state"),
    (Keeps, "equal calls differ; .* a state"),
    (Window, "an attribute has changed; .* a buffer"),
    (lambda z_s, *z: losses.jsd(z_s.div_(2), *z), "an input is changed in place; write x = x / 2"),
    (lambda *z: (losses.jsd(*z), 1.0), r"expected a loss \[N\], or a NamedTuple of one"),
    (_with_part("lr", torch.ones(3)), "the log has its own 'lr'"),
    (lambda z_s, *z: losses.mse_logits(1e25 * z_s, *z), "not finite at ordinary logits"),
    (losses.Method(losses.jsd, w_kd=0.0), "both weights are zero; set w_kd or w_ce"),
    (losses.Method(losses.jsd, {"beta": -1.0}), "beta=-1.0: expected float 0 to 1"),
    (losses.Method(losses.jsd, moving={"bet": float}), "takes no bet; .*, did you mean beta"),
    (lambda z_s, z_t, y, *, tau=1.0: y, "tau has no annotation; write tau: float"),
    (lambda z_s, z_t, y, *, lr=1.0: y, "lr is a setting of every method; choose another name"),
    (lambda *z: losses.jsd(*z) + 1, LEAVE),
    (lambda *z: losses.jsd(*z).detach(), "with a gradient from z_s"),
]


def test_cross_entropy_has_the_settings_of_its_method(monkeypatch):
    z_s, _, y = case()

    def scaled(z_s, z_t, y, *, by: float = 1.0):
        return by * ce(z_s, z_t, y)

    ce = losses.cross_entropy
    monkeypatch.setattr(losses, "cross_entropy", scaled)
    monkeypatch.setitem(METHODS, "pretrain", METHODS["pretrain"]._replace(fn=scaled))
    once, twice = (method_loss("pretrain", z_s, None, y, by=by)[0] for by in (1.0, 2.0))
    assert twice == 2 * once > 0


def test_a_module_may_ask_for_the_size_of_the_vocabulary(monkeypatch):
    class PerToken(torch.nn.Module):
        def __init__(self, *, n_vocab):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(n_vocab))

        def forward(self, z_s, z_t, y):
            return losses.reverse_kl(z_s + self.bias, z_t, y)

    monkeypatch.setitem(METHODS, "mine", losses.Method(PerToken))
    objective_trial.check_settings("mine", 23)
    loss, _ = method_loss("mine", *case())
    assert loss.detach() == method_loss("reverse_kl", *case())[0]
    with pytest.raises(ValueError, match=r"^mine@x.w_ce=-1.0: expected"):
        losses.resolve("mine@x", w_ce=-1.0)


def test_a_setting_of_an_objective_and_of_its_term_goes_to_both(monkeypatch):
    def term(d_s, d_t, *, tau: float = 1.0):
        pass

    monkeypatch.setitem(METHODS, "both", losses.Method(losses.jsd, {"tau": 3.0}, term=term))
    method = losses.resolve("both")
    assert method.hyper == method.term.keywords == {"tau": 3.0}


@pytest.mark.parametrize(("fn", "message"), TRIED)
def test_an_objective_that_breaks_a_rule_is_refused_before_the_first_step(fn, message, monkeypatch):
    method = fn if isinstance(fn, losses.Method) else losses.Method(fn)
    monkeypatch.setitem(METHODS, "mine", method)
    with pytest.raises(ValueError, match=f"^mine.*{message}"):
        objective_trial.check_settings("mine", 23)


TEACHES_NOTHING = read_settings("""
bdl: lam=0.5
taid: t=0.0
rld: alpha=0.0, beta=0.0
ldrld: alpha=0.0, beta=0.0
alra: w_mass=0.0, w_local=0.0, w_rest=0.0, lambda_pair=0.0
jsd: beta=1e-8
jsd: beta=0.99999999
""")


@pytest.mark.parametrize(("name", "settings"), TEACHES_NOTHING)
def test_settings_that_teach_nothing_are_refused(name, settings):
    with pytest.raises(ValueError, match="its gradient is zero at ordinary logits"):
        objective_trial.check_settings(name, 101, **settings)


def test_a_logit_that_is_no_number_is_not_hidden_outside_of_the_sets():
    z_s, z_t, y = case()
    z_s[0, 7] = math.nan
    for name in KD_ROWS:
        assert kd(name, z_s, z_t, y)[0].isnan(), name


def test_a_statistic_of_a_chunk_in_place_of_the_batch_is_refused(monkeypatch):
    """At a real vocabulary too, of which the trial takes few positions."""
    method = losses.Method(lambda *z: losses.alra(*z), in_chunks=True)
    monkeypatch.setitem(METHODS, "mine", method)
    refused("half a forward batch", objective_trial.check_settings, "mine", 151_936)


@pytest.mark.parametrize("name", METHODS)
def test_every_objective_passes_its_trial(name):
    objective_trial.check_settings(name, 53)


def test_tads_mean_tail_mass_is_over_the_sequence_however_many_are_in_a_batch():
    z_s, z_t, y = case(n=12, ignored=(2, 6, 7, 11))
    z_t[6:] *= 0.3  # the second sequence is more diffuse
    both = losses.tad(z_s, z_t, y, n_sequences=2)
    each = zip(z_s.split(6), z_t.split(6), y.split(6), strict=True)
    assert_close(both, torch.cat([losses.tad(*sequence) for sequence in each]))


# --- the further objectives: limits, constants


@pytest.mark.parametrize("small", [1e-12, 1e-7, 1e-4, 0.03])
def test_abkds_limits_are_approached_in_fp32(small):
    z_s, z_t, y = case(dtype=torch.float32)
    for alpha, beta in ((small, 0.7), (0.2, small), (small, small), (small, -small), (0.2, -0.2)):
        assert_near_fp64("abkd", z_s, z_t, y, 1e-5, alpha=alpha, beta=beta)


def test_the_page_shows_an_objective_in_chunks(tmp_path, monkeypatch):
    page = (world.ROOT / "docs/editing.md").read_text()
    (code,) = re.findall(r"<!-- chunks -->\n```python\n(.*?)```", page, re.S)
    monkeypatch.setitem(METHODS, "unsure_kl", None)
    world.import_objective(code, tmp_path)
    objective_trial.check_settings("unsure_kl", 61)
