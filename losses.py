"""Every distillation objective as a plain function, the table of methods, and the fused head-and-loss.

An objective is `name(z_s, z_t, y, *, hyper=...) -> [N]`:

    z_s, z_t  [N, V]  student and teacher logits, any float dtype: bf16 and fp16 are widened to fp32, fp64 is kept
    y         [N]     int64 labels, `IGNORE` where the position is outside T_B (paper, Eq. 1)
    ->        [N]     nats per position, exactly 0 where ignored; sum / n_valid is the loss of the method's paper

One call is one forward batch of the paper: batch statistics run over the valid positions of the call. The gradient
reaches `z_s` alone; the teacher, every choice of tokens and every count is constant. What stands at an ignored
position, even NaN, changes nothing. Equal logits rank by lowest index. A result is the distillation term alone: its
weight and the causal language-modelling term are in `METHODS`.

Bad input is a `ValueError`. Shapes and settings are always checked. Values (labels out of range, logits that are not
finite at a valid position) are checked on the CPU, where looking costs little; on a GPU looking would wait for the
device, so there a bad label trips torch's own assertion, a bad logit makes the loss non-finite, and `check` says which.

Dimensions: N positions, V vocabulary, k tokens of a local set, B batch, T time, D width.
"""

import difflib
import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


# Vocabulary-wide parts that the objectives share.


class Split(NamedTuple):
    """Logits split at k tokens per position: those tokens one by one, all other tokens in three numbers."""

    in_s: Tensor  # [N, k] student logits of the tokens, not tempered; differentiable
    in_t: Tensor  # [N, k] teacher logits of the tokens, not tempered
    rest_s: Tensor  # [N] log sum exp(z_s / tau) over the rest; differentiable
    rest_t: Tensor  # [N] the same of the teacher
    rest_kl: Tensor  # [N] KL(softmax_rest(z_t / tau) || softmax_rest(z_s / tau)); differentiable


class _Split(torch.autograd.Function):
    """The one place where a loss walks the vocabulary in pieces, with the gradient written out.

    The rest is summed in the log domain over the rest itself, never as `1 - p`, which cancels in fp32. Autograd would
    keep four tensors of [N, V] for this; written out, it is the logits themselves and one gradient.
    """

    @staticmethod
    def forward(ctx, z_s, z_t, tokens, inside, below, tau):
        # Of the tokens, those that leave the rest; in the place of another stands the first one again.
        outside = tokens if inside is None else torch.where(inside, tokens, tokens[:, :1])

        def rest(z):  # [N, V], -inf on tokens that are not in the rest
            z = z / tau
            z = z if below is None else z.masked_fill_(z_t >= below, -math.inf)
            return z.scatter_(1, outside, -math.inf)

        rest_s = rest(z_s).logsumexp(-1, keepdim=True)
        p_t = rest(z_t)
        rest_t = p_t.logsumexp(-1, keepdim=True)
        p_t = p_t.sub_(rest_t).exp_()  # 0 outside the rest, so the differences below may be anything finite there
        kl = (p_t * ((z_t / tau - rest_t) - (z_s / tau - rest_s))).sum(-1)
        ctx.save_for_backward(z_s, z_t, tokens, outside, below, rest_s, rest_t)
        ctx.tau = tau
        rest_t_out = rest_t.squeeze(1)
        ctx.mark_non_differentiable(rest_t_out)
        return z_s.gather(1, tokens), rest_s.squeeze(1), rest_t_out, kl

    @staticmethod
    def backward(ctx, g_in, g_rest, _, g_kl):
        z_s, z_t, tokens, outside, below, rest_s, rest_t = ctx.saved_tensors
        g_kl, g_rest = g_kl[:, None], g_rest[:, None]
        grad = ((g_kl + g_rest) * (z_s / ctx.tau - rest_s).exp_() - g_kl * (z_t / ctx.tau - rest_t).exp_()) / ctx.tau
        if below is not None:
            grad = grad.masked_fill_(z_t >= below, 0)
        grad = grad.scatter_(1, outside, 0).scatter_add_(1, tokens, g_in)
        return grad, None, None, None, None, None


def _split(z_s, z_t, tokens, tau, inside=None, below=None) -> Split:
    """Splits the logits at `tokens` [N, k], of which only those marked in `inside` [N, k] leave the rest.

    The first token must always be inside. `below` [N, 1] also takes every token with z_t >= below out of the rest.
    """
    in_s, rest_s, rest_t, rest_kl = _Split.apply(z_s, z_t, tokens, inside, below, tau)
    return Split(in_s, z_t.gather(1, tokens), rest_s, rest_t, rest_kl)


def _forward_kl(z_s, z_t, tau, below=None) -> Tensor:
    """KL(softmax(z_t / tau) || softmax(z_s / tau)) over V, or over the tokens with z_t < below  # [N]"""
    nothing = z_t.new_empty(z_t.shape[0], 0, dtype=torch.int64)
    return _split(z_s, z_t, nothing, tau, below=below).rest_kl


@torch.no_grad()
def _top(z, k) -> Tensor:
    """The k tokens of the largest logits, largest first, equal ones by lowest index  # [N, V] -> [N, k]

    torch.topk promises nothing about equal values. The tokens above the k-th value are certain; of those equal to it
    a second selection takes the lowest indices.
    """
    V = z.shape[-1]
    value, token = z.topk(k)
    last = value[:, -1:]
    lowest_first = torch.arange(V, 0, -1, device=z.device, dtype=z.dtype)  # exact in fp32 up to V = 2^24
    tied = z.clone().eq_(last).mul_(lowest_first).topk(k).indices
    above = value > last
    place = torch.arange(k, device=z.device) - above.sum(-1, keepdim=True)
    return _by_logit(z, torch.where(above, token, tied.gather(1, place.clamp(min=0))))


@torch.no_grad()
def _by_logit(z, tokens) -> Tensor:
    """`tokens` [N, k] by falling logit in z [N, V], equal ones by lowest index  # [N, k]"""
    tokens = tokens.sort(-1).values
    return tokens.gather(1, z.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices)


# Parts of size k.


def _kl(x_t, x_s, keep=None) -> Tensor:
    """KL(softmax(x_t) || softmax(x_s)) over the entries to keep, of k-sized logits  # [N, k] -> [N]"""
    lse_t, lse_s = _lse(x_t, keep), _lse(x_s, keep)
    p_t = (x_t - lse_t[:, None]).exp()
    p_t = p_t if keep is None else torch.where(keep, p_t, 0.0)
    return (p_t * ((x_t - lse_t[:, None]) - (x_s - lse_s[:, None]))).sum(-1)


def _lse(x, keep=None) -> Tensor:
    """log sum exp over the entries to keep  # [N, k] -> [N]"""
    return (x if keep is None else x.masked_fill(~keep, -math.inf)).logsumexp(-1)


def _binary_kl(odds_t, odds_s) -> Tensor:
    """KL between two-way distributions given by their log-odds ln(p / (1 - p)); any shape.

    The log-odds of a region is the difference of two logsumexps: exact where p or 1 - p is tiny.
    """
    yes = F.logsigmoid(odds_t).exp() * (F.logsigmoid(odds_t) - F.logsigmoid(odds_s))
    no = F.logsigmoid(-odds_t).exp() * (F.logsigmoid(-odds_t) - F.logsigmoid(-odds_s))
    return yes + no


def _differences(x) -> Tensor:
    """x_i - x_j of all ordered pairs  # [N, k] -> [N, k, k]"""
    return x[:, :, None] - x[:, None, :]


def _upper(k, device) -> Tensor:
    """Marks each unordered pair once: rank i above rank j  # [k, k] bool"""
    rank = torch.arange(k, device=device)
    return rank[:, None] < rank[None, :]


def _lower_median(x, keep) -> Tensor:
    """The lower median of the entries to keep, without waiting for their number  # [N] -> []"""
    rising = x.detach().masked_fill(~keep, math.inf).sort().values
    return rising[((keep.sum() - 1) // 2).clamp(min=0)]


# Entrance and exit of an objective.


def _open(z_s, z_t, y) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Checks, widens, and blanks ignored positions -> z_s, z_t (constant), labels (0 where ignored), valid [N] bool."""
    _require(z_s.ndim == 2, f"z_s: expected [N, V], got shape {tuple(z_s.shape)}")
    _require(z_s.is_floating_point(), f"z_s: expected a float dtype, got {z_s.dtype}")
    _require(y.shape == z_s.shape[:1], f"y: expected shape [N={z_s.shape[0]}] as z_s has, got {tuple(y.shape)}")
    _require(y.dtype == torch.int64, f"y: expected int64 labels, got {y.dtype}")
    _require(y.device == z_s.device, f"y: expected on {z_s.device} where z_s is, got {y.device}")
    if z_t is not None:
        _require(z_t.shape == z_s.shape, f"z_t: expected shape {tuple(z_s.shape)} as z_s has, got {tuple(z_t.shape)}")
        _require(z_t.is_floating_point(), f"z_t: expected a float dtype as z_s has, got {z_t.dtype}")
        _require(z_t.device == z_s.device, f"z_t: expected on {z_s.device} where z_s is, got {z_t.device}")
    if z_s.device.type == "cpu" and not torch.compiler.is_compiling():
        check(z_s, z_t, y)
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    valid = y != IGNORE
    ignored = ~valid[:, None]
    z_s = z_s.to(dtype).masked_fill(ignored, 0.0)
    z_t = None if z_t is None else z_t.detach().to(dtype).masked_fill(ignored, 0.0)
    return z_s, z_t, y.masked_fill(~valid, 0), valid


def _close(loss, valid) -> Tensor:
    """0 at ignored positions  # [N] -> [N]"""
    return loss.masked_fill(~valid, 0.0)


def _mean(x, valid) -> Tensor:
    """Mean over the valid positions, 0 where there is none  # [N] -> []"""
    return x.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)


def check(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> None:
    """Refuses labels out of range and logits that are not finite at a valid position. Waits for the device."""
    V = z_s.shape[-1]
    bad = (y != IGNORE) & ((y < 0) | (y >= V))
    if bad.any():
        u = int(bad.nonzero()[0])
        raise ValueError(f"y: expected labels of 0 to V-1={V - 1}, or IGNORE={IGNORE}, got {int(y[u])} at position {u}")
    for name, z in (("z_s", z_s), ("z_t", z_t)):
        if z is None or _all_finite(z):
            continue
        bad = (y != IGNORE) & ~z.detach().isfinite().all(-1)
        if bad.any():
            u = int(bad.nonzero()[0])
            i = int((~z[u].detach().isfinite()).nonzero()[0])
            raise ValueError(f"{name}: expected finite logits at valid positions, got {float(z[u, i])} at [{u}, {i}]")


def _all_finite(z) -> bool:
    """One pass, no mask of [N, V]. Waits for the device."""
    return not z.numel() or all(bool(end.isfinite()) for end in z.detach().aminmax())


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _positive(**settings) -> None:
    for name, value in settings.items():
        _require(0 < value < math.inf, f"{name}={value}: expected more than 0")


def _not_negative(**settings) -> None:
    for name, value in settings.items():
        _require(0 <= value < math.inf, f"{name}={value}: expected 0 or more")


def _between(low, high, **settings) -> None:
    for name, value in settings.items():
        _require(low <= value <= high, f"{name}={value}: expected {low} to {high}")


def _one_of(*choices, **settings) -> None:
    for name, value in settings.items():
        _require(value in choices, f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


# The objectives of the paper's tables.


def cross_entropy(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> Tensor:
    """Causal language modelling (second term of Eq. 23): -ln q_s[y], q_s = softmax(z_s) at temperature 1. No teacher."""
    z_s, _, y, valid = _open(z_s, None, y)
    return _close(F.cross_entropy(z_s, y, reduction="none"), valid)


def vanilla_kd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 0.5, t2_scaling: bool = False) -> Tensor:
    """KL(P_t || P_s) over the full vocabulary (Eq. 3), P = softmax(z / tau) on both sides (Eq. 2).

    Reported as KL; MiniPLM's code trains the cross-entropy form, which differs by the teacher's entropy and has the
    same gradient. Open in the paper: a factor tau^2, as in NVIDIA Model-Optimizer. Eq. 3 has none, so none by default.
    """
    _positive(tau=tau)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    return _close(_forward_kl(z_s, z_t, tau) * (tau**2 if t2_scaling else 1.0), valid)


class AlraTerms(NamedTuple):
    """ALRA's pieces, [N] each but for the last two; what stands at ignored positions has no meaning, but in `loss`."""

    loss: Tensor  # mass + local + rest + lambda_pair * pair; 0 where ignored
    mass: Tensor  # KL(b_t || b_s), Eq. 14
    local: Tensor  # KL of the local conditionals, Eq. 14
    rest: Tensor  # KL of the rest conditionals, Eq. 14
    pair: Tensor  # SWPRA, PRA-U or PRA, Eq. 17
    d_u: Tensor  # local budget, int64, Eq. 8
    support: Tensor  # effective support E_u, fp64, Eq. 6
    log_alpha_t: Tensor  # ln of the teacher's local mass, Eq. 10
    log_rest_t: Tensor  # ln of its rest mass
    tokens: Tensor  # [N, d_max] the candidate set, ranked; the first d_u are the local set
    weight: Tensor  # [N, d_max, d_max] pair weights kappa, upper triangle, Eq. 17


def alra(
    z_s: Tensor,
    z_t: Tensor,
    y: Tensor,
    *,
    d_min: int = 3,
    d_max: int = 25,
    tau: float = 1.0,
    tau_p: float = 1.0,
    gamma: float = 5.0,
    lambda_pair: float = 1.0,
    eps: float = 1e-6,
    anchor: str = "teacher",
    pair: str = "swpra",
    budget: str = "adaptive",
    detach_weights: bool = True,
) -> Tensor:
    """Adaptive Local Relational Alignment (Eq. 22): ALD + lambda_pair * SWPRA, all divergences teacher to student.

        loss[u] = KL(b_t || b_s) + KL(p~_t,I || p~_s,I) + KL(p~_t,R || p~_s,R)            (Eq. 14)
                  + lambda_pair * sum_{i<j in I} kappa_ij KL(r_t(i,j) || r_s(i,j))        (Eq. 17)

    I is the position's local set and R the rest of the vocabulary; see `alra_terms` for each piece.

    d_min, d_max     smallest and greatest local budget, tokens; 2 <= d_min <= d_max < V
    tau, tau_p       temperature of the distributions (Eq. 2) and of the pairs (Eq. 16)
    gamma            how fast SWPRA's weight falls with the student's probability gap (Eq. 19)
    eps              added to the denominators of Eq. 8 and Eq. 20
    anchor           what the candidate set must hold: "teacher" top-1 (ALRA), "none" (-N), "label" (-NG), "both" (-G)
    pair             kappa: "swpra" (Eq. 20), "pra_u" 1/|pairs|, "pra" 1 (Eq. 18)
    budget           "adaptive" (Eq. 8); "fixed": the local set is the student's top d_max, with no anchor and no
                     ranking by the teacher; `anchor` and `d_min` then have no meaning (the paper's Fixed-Budget rows)
    detach_weights   no gradient through SWPRA's weights. Open in the paper, which calls them contributions: a student
                     that could move the weights would lower its loss by driving pairs apart
    """
    return alra_terms(
        z_s, z_t, y, d_min=d_min, d_max=d_max, tau=tau, tau_p=tau_p, gamma=gamma, lambda_pair=lambda_pair, eps=eps,
        anchor=anchor, pair=pair, budget=budget, detach_weights=detach_weights,
    ).loss  # fmt: skip


def alra_terms(
    z_s, z_t, y, *, d_min=3, d_max=25, tau=1.0, tau_p=1.0, gamma=5.0, lambda_pair=1.0, eps=1e-6, anchor="teacher",
    pair="swpra", budget="adaptive", detach_weights=True,
) -> AlraTerms:  # fmt: skip
    """ALRA piece by piece, in the order of the paper's Algorithm 1. Arguments as of `alra`."""
    _positive(tau=tau, tau_p=tau_p, eps=eps)
    _not_negative(gamma=gamma, lambda_pair=lambda_pair)
    _one_of("none", "teacher", "label", "both", anchor=anchor)
    _one_of("swpra", "pra_u", "pra", pair=pair)
    _one_of("adaptive", "fixed", budget=budget)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    N, V = z_s.shape
    _require(2 <= d_max < V, f"d_max={d_max}: expected 2 <= d_max < V={V}")
    _require(budget == "fixed" or 2 <= d_min <= d_max, f"d_min={d_min}: expected 2 <= d_min <= d_max={d_max}")

    tokens = _top(z_s, d_max)  # [N, d_max] student proposal set, Eq. 4
    d_u = tokens.new_full((N,), d_max)
    if budget == "adaptive":
        tokens = _by_logit(z_t, _anchored(tokens, z_t, y, anchor))  # candidate set, Eq. 5, in the teacher's order
    support = _effective_support(z_t.gather(1, tokens), tau)
    if budget == "adaptive":
        share = support / (_mean(support, valid) + eps)
        d_u = (d_min + (d_max - d_min) * share).round().clamp(d_min, d_max).long()  # Eq. 8
    inside = torch.arange(d_max, device=d_u.device) < d_u[:, None]  # [N, d_max] the local set I, Eq. 9

    split = _split(z_s, z_t, tokens, tau, inside)
    x_s, x_t = split.in_s / tau, split.in_t / tau
    local_s, local_t = _lse(x_s, inside), _lse(x_t, inside)
    odds_s, odds_t = local_s - split.rest_s, local_t - split.rest_t  # ln(alpha / (1 - alpha)), Eq. 10
    mass, local, rest = _binary_kl(odds_t, odds_s), _kl(x_t, x_s, inside), split.rest_kl  # Eq. 14

    pairs = inside[:, :, None] & inside[:, None, :] & _upper(d_max, inside.device)  # [N, d_max, d_max], Eq. 15
    pair_kl = _binary_kl(_differences(split.in_t / tau_p), _differences(split.in_s / tau_p))  # Eq. 16
    if pair == "swpra":
        p_s = (x_s - torch.logaddexp(local_s, split.rest_s)[:, None]).exp()  # full-vocabulary probabilities
        p_s = p_s.detach() if detach_weights else p_s
        score = (-gamma * _differences(p_s).abs()).exp() * (p_s[:, :, None] + p_s[:, None, :])  # Eq. 19
        score = torch.where(pairs, score, 0.0)
        weight = score / (score.sum((1, 2), keepdim=True) + eps)  # Eq. 20
    else:
        weight = pairs.to(z_s.dtype)
        weight = weight / weight.sum((1, 2), keepdim=True) if pair == "pra_u" else weight  # Eq. 18
    aligned = (weight * pair_kl).sum((1, 2))  # Eq. 17

    loss = _close(mass + local + rest + lambda_pair * aligned, valid)
    log_alpha_t, log_rest_t = F.logsigmoid(odds_t), F.logsigmoid(-odds_t)
    return AlraTerms(loss, mass, local, rest, aligned, d_u, support, log_alpha_t, log_rest_t, tokens, weight)


@torch.no_grad()
def _anchored(tokens, z_t, y, anchor) -> Tensor:
    """The candidate set (Eq. 5): an anchor that is missing replaces the lowest-ranked proposal that is no anchor itself.

    tokens  [N, k]  student's proposals, best first
    ->      [N, k]  the same number of distinct tokens
    """
    top_1 = z_t.argmax(-1)  # a_u; torch gives the lowest index of equal ones
    anchors = {"none": [], "teacher": [top_1], "label": [y], "both": [top_1, y]}[anchor]
    rank = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    for a in anchors:
        missing = (tokens != a[:, None]).all(-1, keepdim=True)
        free = torch.stack([tokens != other[:, None] for other in anchors]).all(0)
        lowest = (free * rank).argmax(-1, keepdim=True) + 1
        tokens = torch.where(missing & (rank == lowest), a[:, None], tokens)
    return tokens


@torch.no_grad()
def _effective_support(in_t, tau) -> Tensor:
    """exp of the teacher's entropy within the candidate set (Eq. 6)  # [N, k] -> [N]

    In fp64, which is nothing at this size: a budget is then the same integer whatever the precision of the rest.
    """
    log_rho = (in_t.double() / tau).log_softmax(-1)
    return (-(log_rho.exp() * log_rho).sum(-1)).exp()


# The table.


class Method(NamedTuple):
    fn: Callable[..., Tensor]  # the objective
    hyper: dict  # its settings, where they differ from its defaults
    w_kd: float  # weight of the objective
    w_ce: float  # weight of the causal language-modelling term


METHODS: dict[str, Method] = {
    # Table D.5: what the main comparison ran
    "pretrain": Method(cross_entropy, {}, 0.0, 1.0),
    "vanilla_kd": Method(vanilla_kd, {}, 0.5, 0.5),
    "alra": Method(alra, {}, 1.0, 0.0),
    # pair weighting
    "alra_r": Method(alra, {"pair": "pra"}, 1.0, 0.0),
    "alra_u": Method(alra, {"pair": "pra_u"}, 1.0, 0.0),
    # anchoring
    "alra_n": Method(alra, {"anchor": "none"}, 1.0, 0.0),
    "alra_ng": Method(alra, {"anchor": "label"}, 1.0, 0.0),
    "alra_g": Method(alra, {"anchor": "both"}, 1.0, 0.0),
    # fixed budgets: ALD + PRA-U on the student's top d
    **{f"fixed_{d}": Method(alra, {"budget": "fixed", "d_max": d, "pair": "pra_u"}, 1.0, 0.0)
       for d in (3, 7, 9, 15, 19, 25)},
}  # fmt: skip


TERMS = ("loss", "kd", "ce", "mass", "local", "rest", "pair", "d_u")  # what `method_loss` reports, in this order


def needs_teacher(name: str) -> bool:
    """Whether the method reads teacher logits."""
    return resolve(name).fn is not cross_entropy


def keywords(name: str) -> frozenset[str]:
    """What may override the method's row: its objective's settings, `w_kd` and `w_ce`."""
    settings = inspect.signature(resolve(name).fn).parameters.values()
    return frozenset({"w_kd", "w_ce"} | {p.name for p in settings if p.kind is p.KEYWORD_ONLY})


def resolve(name: str, **overrides) -> Method:
    """The row of `METHODS` with overrides in place. ValueError for an unknown name or keyword."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        raise ValueError(
            f"no such method {name!r}" + (f", did you mean {near[0]!r}?" if near else f": {', '.join(METHODS)}")
        )
    method = METHODS[name]
    if overrides:
        unknown = sorted(set(overrides) - keywords(name))
        _require(not unknown, f"{name} takes no {', '.join(unknown)}; it takes {', '.join(sorted(keywords(name)))}")
    weights = {key: overrides.pop(key) for key in ("w_kd", "w_ce") if key in overrides}
    _not_negative(**weights)
    return method._replace(hyper={**method.hyper, **overrides}, **weights)


def method_loss(name: str, z_s: Tensor, z_t: Tensor | None, y: Tensor, **overrides) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward batch's loss, w_kd * kd + w_ce * ce (Eq. 23), and its unweighted means.

    z_s, z_t [N, V] and y [N] as of every objective; z_t may be None where the method has no teacher. `overrides` are
    `w_kd`, `w_ce` and settings of the objective; one that the method does not take is a ValueError.

    -> loss   [] differentiable in z_s; 0 if no position is valid
       terms  detached means over the valid positions: `loss`, `ce`, `kd` (with a teacher), and of ALRA `mass`, `local`,
              `rest`, `pair`, `d_u`. A term of weight 0 is reported, and costs no gradient.
    """
    loss, sums = _objective(resolve(name, **overrides), z_s, z_t, y)
    n_valid = sums.pop("n_valid").clamp(min=1)
    return loss, {key: value / n_valid for key, value in sums.items()}


def _objective(method, z_s, z_t, y) -> tuple[Tensor, dict[str, Tensor]]:
    """-> the mean loss of one forward batch, and detached sums of its terms over the valid positions, with n_valid."""
    _require(z_t is not None or method.fn is cross_entropy, f"z_t: {method.fn.__name__} needs teacher logits, got None")
    valid = y != IGNORE
    grad = torch.is_grad_enabled()
    each, weight = {}, {"kd": method.w_kd, "ce": method.w_ce}
    with torch.set_grad_enabled(grad and method.w_ce > 0):
        each["ce"] = cross_entropy(z_s, None, y)
    if method.fn is not cross_entropy:
        with torch.set_grad_enabled(grad and method.w_kd > 0):
            if method.fn is alra:
                parts = alra_terms(z_s, z_t, y, **method.hyper)
                each["kd"] = parts.loss
                each |= {key: getattr(parts, key) for key in ("mass", "local", "rest", "pair", "d_u")}
            else:
                each["kd"] = method.fn(z_s, z_t, y, **method.hyper)
    weighted = [weight[key] * value for key, value in each.items() if weight.get(key)]
    each["loss"] = sum(weighted, torch.zeros_like(each["ce"]))
    sums = {key: _close(each[key].detach(), valid).sum() for key in sorted(each, key=TERMS.index)}
    return each["loss"].sum() / valid.sum().clamp(min=1), {**sums, "n_valid": valid.sum()}


# The head and the loss in one, a forward batch at a time.


def fused_head_loss(
    h_s: Tensor, w_s: Tensor, h_t: Tensor | None, w_t: Tensor | None, y: Tensor, method: str, group: int = 1,
    compile: bool = False, **overrides,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`method_loss` from last hidden states and head weights, holding the logits of one forward batch at a time.

    h_s, h_t  [B, T, D_s], [B, T, D_t]  last hidden states; h_t and w_t are None where the method has no teacher
    w_s, w_t  [V, D_s], [V, D_t]        head weights
    y         [B, T]                    labels, IGNORE where not in T_B
    group     sequences per forward batch, a divisor of B: what batch statistics run over
    compile   run the objective under torch.compile, once per method, settings and shape

    -> loss   [] the mean over the B / group forward batches of each one's `method_loss`; one with no valid position
              counts as 0. Differentiable in h_s and w_s, once
       terms  detached means over all valid positions of the call, to be weighted by their number when summed up
    """
    return fused_head_losses([(h_s, w_s, method, overrides)], h_t, w_t, y, group, compile)[0]


def fused_head_losses(
    students: list[tuple[Tensor, Tensor, str, dict]], h_t: Tensor | None, w_t: Tensor | None, y: Tensor, group: int = 1,
    compile: bool = False,
) -> list[tuple[Tensor, dict[str, Tensor]]]:  # fmt: skip
    """`fused_head_loss` for several students (h_s, w_s, method, overrides) of one teacher, whose logits are shared.

    Each result has the bits that the student would get alone. A student whose logits are not finite gets a loss that
    is not finite, and leaves the others as they are.
    """
    _fused_shapes(students, h_t, w_t, y, group)
    n_groups = y.shape[0] // group
    teacher = None if h_t is None else _operands(h_t, w_t, y)
    heads = [_Head(*student, y, compile) for student in students]
    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        for rows in (slice(g * group, (g + 1) * group) for g in range(n_groups)):
            z_t = None if teacher is None else _logits(*teacher, rows)  # [N, V] fp32, N = group * T
            for head in heads:
                head.add(rows, z_t, y[rows].flatten(), n_groups)
    return [head.result() for head in heads]


class _Head:
    """One student's sums over the forward batches of a call: loss, terms, and gradients where they are wanted."""

    def __init__(self, h_s, w_s, method, overrides, y, compile):
        row = resolve(method, **overrides)
        self.inputs = h_s, w_s
        self.objective = functools.partial(_objective, row)
        if compile:
            self.objective = _compiled(method, tuple(sorted(overrides.items())), w_s.shape[0])
        self.h, self.w = _operands(h_s, w_s, y)
        wanted = torch.is_grad_enabled()
        self.dh = torch.zeros_like(h_s) if wanted and h_s.requires_grad else None
        self.dw = torch.zeros_like(self.w, dtype=_wide(w_s)) if wanted and w_s.requires_grad else None
        self.loss, self.sums = 0.0, {}

    def add(self, rows, z_t, y, n_groups):
        """One forward batch: value, gradient of the logits, and from that the gradients of hidden states and head."""
        z_s = _logits(self.h, self.w, rows)  # [N, V] fp32
        broken = z_s.device.type == "cpu" and not _all_finite(z_s)
        if broken:  # no objective takes such logits; the results below become NaN, as they do by themselves on a GPU
            z_s.zero_()
        gradient = self.dh is not None or self.dw is not None
        with torch.set_grad_enabled(gradient):
            loss, sums = self.objective(z_s.requires_grad_(gradient), z_t, y)
        dz = torch.autograd.grad(loss, z_s)[0] if loss.requires_grad else None
        del z_s
        self.loss = self.loss + loss.detach() * (math.nan if broken else 1 / n_groups)
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0) + (value * math.nan if broken and key != "n_valid" else value)
        if dz is not None:
            dz = dz.mul_(1 / n_groups).to(self.w.dtype)  # on a GPU in the operands' dtype, as plain autocast does
            if self.dh is not None:
                self.dh[rows] = _mm(dz, self.w).view_as(self.dh[rows]).to(self.dh.dtype)
            if self.dw is not None:
                self.dw += _mm(dz.t(), self.h[rows].flatten(0, 1))

    def result(self):
        n_valid = self.sums.pop("n_valid").clamp(min=1)
        return _Attach.apply(*self.inputs, self.loss, self.dh, self.dw), {k: v / n_valid for k, v in self.sums.items()}


class _Attach(torch.autograd.Function):
    """Hands over gradients that are already there, times the incoming one. They are given away: backward runs once."""

    @staticmethod
    def forward(ctx, h_s, w_s, loss, dh, dw):
        ctx.gradients, ctx.dtype = (dh, dw), w_s.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.gradients is None:
            raise RuntimeError("fused_head_loss: backward a second time; its gradients were given away the first time")
        (dh, dw), ctx.gradients = ctx.gradients, None
        return dh if dh is None else dh.mul_(g), dw if dw is None else dw.mul_(g).to(ctx.dtype), None, None, None


def _operands(h, w, y) -> tuple[Tensor, Tensor]:
    """h [B, T, D] and w [V, D] as they are multiplied: in h's dtype; on the CPU widened from it. Ignored rows are 0."""
    h, w = h.detach().masked_fill((y == IGNORE)[..., None], 0.0), w.detach().to(h.dtype)
    return (h, w) if h.is_cuda else (h.to(_wide(h)), w.to(_wide(h)))


def _logits(h, w, rows) -> Tensor:
    return _mm(h[rows].flatten(0, 1), w.t())


def _mm(a, b) -> Tensor:
    """a @ b, accumulated and written in fp32 (fp64 stays fp64)."""
    narrow = a.dtype in (torch.bfloat16, torch.float16)
    return torch.mm(a, b, out_dtype=torch.float32) if narrow else torch.mm(a, b)


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@functools.cache
def _compiled(method: str, overrides: tuple, V: int) -> Callable:
    """`_objective` of one method and its settings under torch.compile."""
    row = resolve(method, **dict(overrides))

    def objective(z_s, z_t, y):
        return _objective(row, z_s, z_t, y)

    nothing = torch.zeros(1, V, device="meta")
    objective(
        nothing, nothing, torch.zeros(1, dtype=torch.int64, device="meta")
    )  # a refusal here is a plain ValueError
    code = objective.__code__.replace(co_name=f"objective_{method}")  # its own: dynamo counts recompilations by code
    objective = types.FunctionType(code, globals(), code.co_name, None, objective.__closure__)
    return torch.compile(objective, dynamic=False, fullgraph=True)


def _fused_shapes(students, h_t, w_t, y, group) -> None:
    _require(y.ndim == 2, f"y: expected [B, T], got shape {tuple(y.shape)}")
    B, V = y.shape[0], students[0][1].shape[0]
    _require(group >= 1 and B % group == 0, f"group={group}: expected a divisor of the B={B} sequences")
    pairs = [("h_s", h_s, "w_s", w_s) for h_s, w_s, _, _ in students]
    _require((h_t is None) == (w_t is None), "h_t, w_t: expected both or neither")
    for h_name, h, w_name, w in pairs + ([] if h_t is None else [("h_t", h_t, "w_t", w_t)]):
        _require(h.shape[:2] == y.shape and h.ndim == 3,
                 f"{h_name}: expected [B={B}, T={y.shape[1]}, D] as y has, got {tuple(h.shape)}")  # fmt: skip
        _require(w.shape == (V, h.shape[2]),
                 f"{w_name}: expected [V={V}, D={h.shape[2]}], got {tuple(w.shape)}")  # fmt: skip
