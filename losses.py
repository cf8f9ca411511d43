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


def _block_size(V) -> int:
    """Tokens that a pass over the vocabulary takes at a time: about sqrt(V / k), what is done per block and per token."""
    return 128 if V >= 2**15 else 32  # 151,936 = 1,187 * 128


def _by_block(f, *zs) -> tuple[Tensor, ...]:
    """f on [N, V] cut into blocks: f([N, blocks, size], ..) -> [N, blocks] each; a last, shorter block comes by itself."""
    V = zs[0].shape[1]
    size = _block_size(V)
    whole = V - V % size
    parts = [f(*(z[:, :whole].unflatten(1, (-1, size)) for z in zs))] if whole else []
    parts += [f(*(z[:, None, whole:] for z in zs))] if whole < V else []
    return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


class Split(NamedTuple):
    """Logits split at k tokens per position: those tokens one by one, all the others in three numbers.

    A model's logits are taken relative to its largest one in the rest. No softmax sees that, and rounding then goes
    with ln p instead of with the logit.
    """

    in_s: Tensor  # [N, k] student logits of the tokens, not tempered; differentiable
    in_t: Tensor  # [N, k] teacher logits of the tokens, not tempered
    rest_s: Tensor  # [N] log sum exp(z_s / tau) over the rest; differentiable
    rest_t: Tensor  # [N] the same of the teacher
    rest_kl: Tensor  # [N] KL(softmax_rest(z_t / tau) || softmax_rest(z_s / tau)); differentiable


class _Split(torch.autograd.Function):
    """The one place where a loss walks the vocabulary, with the gradient written out: one pass there, one back.

    Forward, each block is read once, for its largest logits and its sums relative to them. Blocks without a token of
    the split belong to the rest whole; of the others (k at most) the rest is gathered and summed by itself. So the rest
    is summed over the rest, never as `1 - p`, which cancels in fp32, and no mask of [N, V] is made. Back, what is
    written at the tokens is replaced by their own gradient. Autograd would keep four tensors of [N, V]; here it is the
    logits themselves.
    """

    @staticmethod
    def forward(ctx, z_s, z_t, tokens, below, tau, valid):
        def sums(x_s, x_t):
            """[N, blocks, size] -> largest logits; sums of e_s, e_t and e_t * (ln e_t - ln e_s), e relative to them"""
            out = None if below is None else x_t >= below[:, :, None]
            top_s, top_t = (_masked(x, out).amax(-1) for x in (x_s, x_t))
            ln_s, ln_t = ((x - _finite(top, out)[:, :, None]) / tau for x, top in ((x_s, top_s), (x_t, top_t)))
            # exp2, as Inductor on the CPU would write an exp that is used twice to memory, all [N, V] of it
            e_s, e_t = _masked(ln_s, out).exp(), (_masked(ln_t, out) * math.log2(math.e)).exp2()
            return top_s, top_t, e_s.sum(-1), e_t.sum(-1), (e_t * (ln_t - ln_s)).sum(-1)

        max_s, max_t, sum_s, sum_t, cross = _by_block(sums, z_s, z_t)
        mixed = torch.zeros_like(max_t, dtype=torch.bool).scatter(1, tokens // _block_size(z_t.shape[1]), True)
        mixed = mixed if below is None else mixed | (max_t == -math.inf)
        more_s, more_t = _rest_of_mixed(z_s, z_t, tokens, below)

        def rest(z_max, z_sum, more):
            """-> largest logit of the rest [N, 1], factor of each block's sums, e of the gathered, sum of all e [N, 1] fp64"""
            top = torch.cat([z_max.masked_fill(mixed, -math.inf), more], 1).amax(-1, keepdim=True)
            factor = ((z_max - top) / tau).exp().masked_fill(mixed, 0.0)
            e_more = ((more - top) / tau).exp()
            total = (factor * z_sum).sum(-1, keepdim=True, dtype=torch.float64) + e_more.sum(-1, keepdim=True)
            return top, factor, e_more, total

        top_s, _, _, total_s = rest(max_s, sum_s, more_s)
        top_t, factor, e_more, total_t = rest(max_t, sum_t, more_t)
        # sum over the rest of e_t (ln e_t - ln e_s), in what each block's are relative to
        shift = ((max_t - top_t) - (max_s - top_s)) / tau
        gap = torch.where(mixed, 0.0, factor * (cross + sum_t * shift)).sum(-1, keepdim=True, dtype=torch.float64)
        shift = ((more_t - top_t) - (more_s - top_s)) / tau
        gap = gap + torch.where(e_more > 0, e_more * shift, 0.0).sum(-1, keepdim=True)
        exact_s, exact_t = total_s.log(), total_t.log()
        kl = (gap / total_t + (exact_s - exact_t)).to(z_s.dtype)
        rest_s, rest_t = exact_s.to(z_s.dtype), exact_t.to(z_t.dtype)
        in_s, in_t, ln_rest_t = z_s.gather(1, tokens) - top_s, z_t.gather(1, tokens) - top_t, rest_t.squeeze(1)
        ctx.save_for_backward(z_s, z_t, tokens, below, valid, top_s, top_t, rest_s, rest_t)
        ctx.mark_non_differentiable(in_t, ln_rest_t)
        ctx.tau = tau
        return in_s, in_t, rest_s.squeeze(1), ln_rest_t, kl.squeeze(1)

    @staticmethod
    def backward(ctx, g_in, _, g_rest, __, g_kl):
        z_s, z_t, tokens, below, valid, top_s, top_t, rest_s, rest_t = ctx.saved_tensors
        g_kl, g_rest, ignored = g_kl[:, None], g_rest[:, None], ~valid[:, None]
        q_s, q_t = ((z_s - top_s) / ctx.tau - rest_s).exp(), ((z_t - top_t) / ctx.tau - rest_t).exp()
        grad = ((g_kl + g_rest) * q_s - g_kl * q_t) / ctx.tau  # right within the rest
        grad = grad if below is None else grad.masked_fill(z_t >= below, 0.0)
        grad = grad.masked_fill(ignored, 0.0)  # not even 0 times NaN
        grad = grad.scatter(1, tokens, g_in.masked_fill(ignored, 0.0)) if tokens.shape[1] else grad
        return grad, None, None, None, None, None


def _masked(x, out) -> Tensor:
    return x if out is None else x.masked_fill(out, -math.inf)


def _finite(top, out) -> Tensor:
    """Where a whole block is out, 0 does for its largest logit."""
    return top if out is None else top.masked_fill(top == -math.inf, 0.0)


def _rest_of_mixed(z_s, z_t, tokens, below) -> tuple[Tensor, Tensor]:
    """Logits of the blocks that hold a token, -inf at the tokens and where the rest is not; each block once  # [N, k * size]"""
    k, V = tokens.shape[1], z_s.shape[1]
    if not k:
        return z_s[:, :0], z_t[:, :0]
    size = _block_size(V)
    block = tokens // size
    first = (block[:, :, None] == block[:, None, :]).long().argmax(-1)  # [N, k] the first token of the same block
    member = _members(block, size)
    out = (member >= V) | (first != torch.arange(k, device=first.device)).repeat_interleave(size, 1)
    out = out.scatter(1, first * size + tokens % size, True)
    member = member.clamp(max=V - 1)
    more_t = z_t.gather(1, member)
    out = out if below is None else out | (more_t >= below)
    return z_s.gather(1, member).masked_fill(out, -math.inf), more_t.masked_fill(out, -math.inf)


def _members(block, size) -> Tensor:
    """The tokens of blocks, in order; those of a last block may go beyond V  # [N, k] -> [N, k * size]"""
    return (block[:, :, None] * size + torch.arange(size, device=block.device)).flatten(1)


def _split(z_s, z_t, tokens, tau, valid, below=None) -> Split:
    """Splits the logits at `tokens` [N, k], distinct ones. `below` [N, 1] also takes those with z_t >= below out."""
    return Split(*_Split.apply(z_s, z_t, tokens, below, tau, valid))


def _forward_kl(z_s, z_t, tau, valid, below=None) -> Tensor:
    """KL(softmax(z_t / tau) || softmax(z_s / tau)) over V, or over the tokens with z_t < below  # [N]"""
    nothing = z_t.new_empty(z_t.shape[0], 0, dtype=torch.int64)
    return _split(z_s, z_t, nothing, tau, valid, below=below).rest_kl


class _LogP(torch.autograd.Function):
    """ln softmax(z / tau) at k tokens, with the gradient written out; a pass there, a pass back, as in `_Split`."""

    @staticmethod
    def forward(ctx, z, tokens, tau, valid):
        def sums(x):
            top = x.amax(-1)
            return top, ((x - top[:, :, None]) / tau).exp().sum(-1)

        largest, total = _by_block(sums, z)
        top = largest.amax(-1, keepdim=True)
        total = (((largest - top) / tau).exp() * total).sum(-1, keepdim=True, dtype=torch.float64).log().to(z.dtype)
        ctx.save_for_backward(z, tokens, valid, top, total)
        ctx.tau = tau
        return (z.gather(1, tokens) - top) / tau - total

    @staticmethod
    def backward(ctx, g):
        z, tokens, valid, top, total = ctx.saved_tensors
        g, ignored = g / ctx.tau, ~valid[:, None]
        grad = -g.sum(-1, keepdim=True) * ((z - top) / ctx.tau - total).exp()
        if tokens.shape[1] == 1:  # one token fuses into the pass, and the pass into another term's
            grad = grad + torch.where(torch.arange(z.shape[1], device=z.device) == tokens, g, 0.0)
            return grad.masked_fill(ignored, 0.0), None, None, None
        return grad.masked_fill(ignored, 0.0).scatter_add(1, tokens, g.masked_fill(ignored, 0.0)), None, None, None


def _log_p(z, tokens, tau, valid) -> Tensor:
    """ln softmax(z / tau) at `tokens`  # [N, V], [N, k] -> [N, k]"""
    return _LogP.apply(z, tokens, tau, valid)


@torch.no_grad()
def _top(z, k) -> Tensor:
    """The k tokens of the largest logits, largest first, equal ones by lowest index  # [N, V] -> [N, k]

    They lie in the k blocks of the largest maxima, equal ones by lowest index: each of those holds a token that goes
    before any token of another block.
    """
    V = z.shape[1]
    size = _block_size(V)
    if 2 * k * size >= V:
        return _top_of_few(z, k)
    (largest,) = _by_block(lambda x: (x.amax(-1),), z)
    member = _members(_top_of_few(largest, k).sort(-1).values, size)  # [N, k * size], rising
    inside = member.clamp(max=V - 1)
    return inside.gather(1, _top_of_few(z.gather(1, inside).masked_fill(member >= V, -math.inf), k))


@torch.no_grad()
def _top_of_few(z, k) -> Tensor:
    """`_top` in one go. torch.topk promises nothing about equal values.

    The entries above the k-th value are certain; of those equal to it a second selection takes the lowest indices.
    """
    if k == 1:
        return z.argmax(-1, keepdim=True)  # the lowest of equal ones
    value, token = z.topk(k)
    last = value[:, -1:]
    lowest_first = torch.arange(z.shape[1], 0, -1, device=z.device, dtype=z.dtype)  # exact in fp32 up to V = 2^24
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
    ln_t, ln_s = _ln_softmax(x_t, keep), _ln_softmax(x_s, keep)
    p_t = ln_t.exp() if keep is None else torch.where(keep, ln_t.exp(), 0.0)
    return (p_t * (ln_t - ln_s)).sum(-1)


def _ln_softmax(x, keep) -> Tensor:
    """ln softmax over the entries to keep; finite at the others  # [N, k]"""
    if keep is None:
        return x.log_softmax(-1)
    x = x - x.detach().masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
    return x - _lse(x, keep)[:, None]


def _lse(x, keep=None) -> Tensor:
    """log sum exp over the entries to keep  # [N, k] -> [N]"""
    return (x if keep is None else x.masked_fill(~keep, -math.inf)).logsumexp(-1)


def _binary_kl(odds_t, odds_s) -> Tensor:
    """KL between two-way distributions given by their log-odds ln(p / (1 - p)); any shape. The teacher's are constant.

    The log-odds of a region is the difference of two logsumexps: exact where p or 1 - p is tiny.
    """
    return _BinaryKL.apply(odds_t, odds_s)


class _BinaryKL(torch.autograd.Function):
    """Written out: autograd takes three times the exponentials, which over all pairs is what ALRA's own part costs."""

    @staticmethod
    def forward(ctx, odds_t, odds_s):
        (yes_t, ln_yes_t, no_t, ln_no_t), (_, ln_yes_s, _, ln_no_s) = _two_way(odds_t), _two_way(odds_s)
        ctx.save_for_backward(odds_t, odds_s)
        return yes_t * (ln_yes_t - ln_yes_s) + no_t * (ln_no_t - ln_no_s)

    @staticmethod
    def backward(ctx, g):
        (yes_t, _, no_t, _), (yes_s, _, no_s, _) = (_two_way(odds) for odds in ctx.saved_tensors)
        return None, g * (no_t * yes_s - yes_t * no_s)  # p_s - p_t, with nothing cancelled where both are near 1


def _two_way(odds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> p, ln p, 1 - p, ln(1 - p) of ln(p / (1 - p)); from one exponential, which is never above 1."""
    e = (-odds.abs()).exp()
    less, more, ln = e / (1 + e), 1 / (1 + e), e.log1p()
    up = odds >= 0
    return (torch.where(up, more, less), odds.clamp(max=0) - ln, torch.where(up, less, more), (-odds).clamp(max=0) - ln)


def _differences(x) -> Tensor:
    """x_i - x_j of all ordered pairs  # [N, k] -> [N, k, k]"""
    return x[:, :, None] - x[:, None, :]


def _upper(k, device) -> Tensor:
    """Marks each unordered pair once: rank i above rank j  # [k, k] bool"""
    rank = torch.arange(k, device=device)
    return rank[:, None] < rank[None, :]


def _lower_median(x, keep) -> Tensor:
    """The lower median of the entries to keep, without waiting for their number  # [N] -> []"""
    rising = x.masked_fill(~keep, math.inf).sort().values
    return rising.gather(0, ((keep.sum(0, keepdim=True) - 1) // 2).clamp(min=0))[0]


# Entrance and exit of an objective.


def _open(z_s, z_t, y, guard=False) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Checks and widens -> z_s, z_t (constant), labels (0 where ignored), valid [N] bool.

    `guard` keeps NaN at ignored positions out of the gradient. `_split` does so itself, in the pass that it makes
    anyway; where the gradient reaches z_s through it alone, a guard would be a pass more.
    """
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
    z_t = None if z_t is None else z_t.detach().to(dtype)
    z_s = z_s.to(dtype)
    return _Valid.apply(z_s, valid) if guard else z_s, z_t, y.masked_fill(~valid, 0), valid


class _Valid(torch.autograd.Function):
    """The logits as they are, but with no gradient at ignored positions, not even 0 times NaN."""

    @staticmethod
    def forward(ctx, z, valid):
        ctx.save_for_backward(valid)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, g):
        return g.masked_fill(~ctx.saved_tensors[0][:, None], 0.0), None


def _close(loss, valid) -> Tensor:
    """0 at ignored positions  # [N] -> [N]"""
    return loss.masked_fill(~valid, 0.0)


def _mean(x, valid) -> Tensor:
    """Mean over the valid positions, 0 where there is none  # [N] -> []"""
    return x.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)


def check(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> None:
    """Refuses labels out of range and logits that are not finite at a valid position. Waits for the device."""
    _check_labels(y, z_s.shape[-1])
    for name, z in (("z_s", z_s), ("z_t", z_t)):
        if z is None or _all_finite(z):
            continue
        bad = (y != IGNORE) & ~z.detach().isfinite().all(-1)
        if bad.any():
            u = int(bad.nonzero()[0])
            i = int((~z[u].detach().isfinite()).nonzero()[0])
            raise ValueError(f"{name}: expected finite logits at valid positions, got {float(z[u, i])} at [{u}, {i}]")


def _check_labels(y, V) -> None:
    bad = (y != IGNORE) & ((y < 0) | (y >= V))
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise ValueError(f"y: expected labels of 0 to V-1={V - 1}, or IGNORE={IGNORE}, got {int(y[tuple(at)])} at {at}")


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
    return _close(-_log_p(z_s, y[:, None], 1.0, valid)[:, 0], valid)


def vanilla_kd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 0.5, t2_scaling: bool = False) -> Tensor:
    """KL(P_t || P_s) over the full vocabulary (Eq. 3), P = softmax(z / tau) on both sides (Eq. 2).

    Reported as KL; MiniPLM's code trains the cross-entropy form, which differs by the teacher's entropy and has the
    same gradient. Open in the paper: a factor tau^2, as in NVIDIA Model-Optimizer. Eq. 3 has none, so none by default.
    """
    _positive(tau=tau)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    return _close(_forward_kl(z_s, z_t, tau, valid) * (tau**2 if t2_scaling else 1.0), valid)


def pd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 0.5, top_p: float = 0.95, top_k: int = 50,
    truncate_on: str = "tempered", temper_student: bool = False,
) -> Tensor:  # fmt: skip
    """Pre-training distillation (Peng et al. 2025): KL(F(P_t) || P_s), F the truncated, tempered, renormalised teacher.

        kept = the shortest run of largest teacher probabilities with mass >= top_p, then its first top_k
        F    = softmax over kept of z_t / tau,     loss[u] = sum_{i in kept} F_i (ln F_i - ln p_s,i)

    truncate_on     which probabilities top_p counts: "tempered" softmax(z_t / tau), as the ALRA paper words it; "raw"
                    softmax(z_t), as PD's own paper (their sets differ widely)
    temper_student  student at tau too; by default at 1, as in PD, so that the optimum is the sharpened teacher

    No public code. Left open and closed here: the token that crosses top_p is kept; the student is normalised over the
    full vocabulary, which pushes down what is not kept; no tau^2. For the schedule of the weight see `wsd`.
    """
    _positive(tau=tau)
    _require(0 < top_p <= 1, f"top_p={top_p}: expected 0 < top_p <= 1, where 1 keeps all")
    _one_of("tempered", "raw", truncate_on=truncate_on)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    _between(1, z_s.shape[1], top_k=top_k)
    tokens = _top(z_t, top_k)  # [N, top_k] largest first
    tau_p = tau if truncate_on == "tempered" else 1.0
    p_t = _log_p(z_t, tokens, tau_p, valid).double().exp()
    kept = p_t.cumsum(-1) - p_t < top_p if top_p < 1 else torch.ones_like(tokens, dtype=torch.bool)
    x_t = (z_t.gather(1, tokens) / tau).masked_fill(~kept, -math.inf)
    f = x_t.softmax(-1)  # [N, top_k], 0 where not kept
    ln_f = torch.where(kept, x_t - x_t.logsumexp(-1, keepdim=True), 0.0)
    logp_s = _log_p(z_s, tokens, tau if temper_student else 1.0, valid)
    return _close((f * (ln_f - logp_s)).sum(-1), valid)


def atkd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 1.0, easy_weight: float = 0.5) -> Tensor:
    """ATKD (Zhong et al. 2024): hard positions learn target and non-targets, easy ones the non-targets alone.

        TKD_u = KL of the pair (p_y, 1 - p_y);  DKD_u = KL of the softmaxes over V without y; both teacher to student
        loss  = easy_weight mean_easy DKD + (1 - easy_weight) (mean_hard TKD + mean_hard DKD)

    Hard: UNC_u = 1 - p_t,y at or above the lower median of the batch; easy: below. Each mean is over its own half, so a
    position's number carries n_valid / n_half; an empty half counts 0 (the authors' code stops there). UNC is compared
    as log-odds, which order the positions alike and keep apart what 1 - p rounds together. No tau^2 (authors: tau = 1,
    easy_weight 0.2; the ALRA paper: 0.5).
    """
    _positive(tau=tau)
    _between(0, 1, easy_weight=easy_weight)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    odds_s, odds_t, dkd_u = _target_split(z_s, z_t, y, tau, valid)
    tkd_u = _binary_kl(odds_t, odds_s)
    unc = -odds_t
    easy = valid & (unc < _lower_median(unc, valid))
    hard = valid & ~easy
    n, n_easy, n_hard = (half.sum().clamp(min=1).to(z_s.dtype) for half in (valid, easy, hard))
    loss = torch.where(easy, easy_weight * n / n_easy * dkd_u, (1 - easy_weight) * n / n_hard * (tkd_u + dkd_u))
    return _close(loss, valid)


def _target_split(z_s, z_t, y, tau, valid) -> tuple[Tensor, Tensor, Tensor]:
    """-> log-odds of the label, student's and teacher's, and the KL over all other tokens; [N] each."""
    split = _split(z_s, z_t, y[:, None], tau, valid)
    return split.in_s[:, 0] / tau - split.rest_s, split.in_t[:, 0] / tau - split.rest_t, split.rest_kl


def rld(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 1.0, tau_conf: float = 1.0, alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:  # fmt: skip
    """RLD (Sun et al. 2025): the teacher's confidence goes to the label, its ranking below the label to the rest.

        SCD_u = KL of the pairs (m, 1 - m) || (s, 1 - s), m = max_i p_t,i and s = p_s,y at tau_conf
        MCD_u = KL(softmax_A(z_t / tau) || softmax_A(z_s / tau)), A = {i : z_t,i < z_t,y}; 0 where A is empty
        loss  = alpha tau_conf^2 SCD_u + beta tau^2 MCD_u

    A is strict, on raw teacher logits: the label, what ranks above it and what ties with it leave both distributions.
    Open in the ALRA paper: alpha, beta, tau_conf, all 1 here (authors: 1, 0.5 to 8, 1); no warm-up.
    """
    _positive(tau=tau, tau_conf=tau_conf)
    _not_negative(alpha=alpha, beta=beta)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    _, odds_m, _ = _target_split(z_s, z_t, _top(z_t, 1)[:, 0], tau_conf, valid)
    odds_s, _, _ = _target_split(z_s, z_t, y, tau_conf, valid)
    scd_u = _binary_kl(odds_m, odds_s)
    z_y = z_t.gather(1, y[:, None])
    empty = z_y <= z_t.amin(-1, keepdim=True)  # the label is the teacher's last choice
    mcd_u = _forward_kl(z_s, z_t, tau, valid, below=torch.where(empty, math.inf, z_y))
    mcd_u = mcd_u.masked_fill(empty[:, 0], 0.0)
    return _close(alpha * tau_conf**2 * scd_u + beta * tau**2 * mcd_u, valid)


def ldrld(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 1.0, d: int = 15, alpha: float = 1.0, beta: float = 1.0,
    pair_reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """LDRLD (Xu et al. 2025): weighted pairs and the whole of the student's top d, and the KL of the rest. No label.

        pairs_u = sum_{r<q} ADW(r, q) KL of the two-way softmaxes,  ADW = 2 / (1.5 + q - r) * exp(-0.05 (r + q))
        LLKI_u  = KL(softmax_I(z_t / tau) || softmax_I(z_s / tau)),  I the student's top d, ranks r, q = 1 .. d
        loss    = tau^2 (alpha (pairs_u + LLKI_u) / n + beta KL(softmax_R(z_t / tau) || softmax_R(z_s / tau)))

    pair_reduction  "mean": n = d (d - 1) / 2 + 1, as the authors' code; "sum": n = 1, as their equation

    Open in the ALRA paper: alpha, beta, both 1 here (authors' example: 10.5, 7 at d = 7, tau = 4).
    """
    _positive(tau=tau)
    _not_negative(alpha=alpha, beta=beta)
    _one_of("mean", "sum", pair_reduction=pair_reduction)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    _require(2 <= d < z_s.shape[1], f"d={d}: expected 2 <= d < V={z_s.shape[1]}")
    split = _split(z_s, z_t, _top(z_s, d), tau, valid)
    x_s, x_t = split.in_s / tau, split.in_t / tau  # [N, d] in the student's order
    rank = torch.arange(1, d + 1, device=z_s.device, dtype=z_s.dtype)
    adw = 2 / (1.5 + rank[None, :] - rank[:, None]).abs() * (-0.05 * (rank[:, None] + rank[None, :])).exp()
    adw = torch.where(_upper(d, z_s.device), adw, 0.0)
    pairs_u = (adw * _binary_kl(_differences(x_t), _differences(x_s))).sum((1, 2))
    llki_u = _kl(x_t, x_s) * (adw[0, 1] if d == 2 else 1.0)  # the authors' code takes the whole of two for a pair
    n = d * (d - 1) // 2 + 1 if pair_reduction == "mean" else 1
    return _close(tau**2 * (alpha * (pairs_u + llki_u) / n + beta * split.rest_kl), valid)


def tad(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 1.0, top_k: int = 10, beta: float = 2.0, norm: str = "sequence"
) -> Tensor:
    """TAD (Dasgupta et al. 2026): the KL of head tokens and tail mass, and the tail's own KL at a weight.

        D1 = KL over K + 1 categories: the teacher's top K = top_k tokens, and all the others as one
        D2 = KL(softmax_tail(z_t / tau) || softmax_tail(z_s / tau))
        loss[u] = D1 + beta w_u D2,   KL(P_t || P_s) = D1 + alpha_t D2,   alpha_t the teacher's tail mass

    norm  "sequence": w_u = alpha_t / its mean over the forward batch, a constant (TAD's Eq. 3, and the ALRA paper's
          text); "unit": w_u = 1; "none": w_u = alpha_t, which at beta = 1 is the plain KL

    No public code; the bucket in D1 follows from TAD's gradient. Masses stay in the log domain, so no floor is needed.
    """
    _positive(tau=tau)
    _not_negative(beta=beta)
    _one_of("sequence", "unit", "none", norm=norm)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    _require(1 <= top_k < z_s.shape[1], f"top_k={top_k}: expected 1 <= top_k < V={z_s.shape[1]}")
    split = _split(z_s, z_t, _top(z_t, top_k), tau, valid)
    x_s = torch.cat([split.in_s / tau, split.rest_s[:, None]], 1)  # [N, K + 1]
    x_t = torch.cat([split.in_t / tau, split.rest_t[:, None]], 1)
    ln_w = x_t.log_softmax(-1)[:, -1]  # ln alpha_t
    if norm == "sequence":
        ln_w = ln_w - _lse(ln_w[None, :], valid[None, :]) + valid.sum().to(ln_w.dtype).log()
    w = 1.0 if norm == "unit" else ln_w.exp()
    return _close(_kl(x_t, x_s) + beta * w * split.rest_kl, valid)


def bild(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 3.0, top_k: int = 8) -> Tensor:
    """BiLD (Li et al. 2025): t-LD + s-LD, on the teacher's and on the student's top k tokens.

        D_ab = (z_a - z_b) / tau for a < b in the leader's order;  LD = KL(softmax(D^T) || softmax(D^S)) across the pairs

    One distribution over all k (k - 1) / 2 differences, teacher to student for both leaders. No tau^2. At k = 2 there
    is one pair and nothing to learn, so k >= 3. Blind to tokens outside both sets. The authors' KL on prompt tokens has
    no counterpart in pre-training.
    """
    _positive(tau=tau)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    _between(3, z_s.shape[1], top_k=top_k)
    once = _upper(top_k, z_s.device).flatten()
    tokens = torch.cat([_top(z_t, top_k), _top(z_s, top_k)], 1)  # [N, 2 k] the teacher's, and the student's
    loss = 0.0
    both = (z.gather(1, tokens).masked_fill(~valid[:, None], 0.0).chunk(2, 1) for z in (z_t, z_s))
    for in_t, in_s in zip(*both, strict=True):  # t-LD, s-LD
        d_t, d_s = (_differences(x / tau).flatten(1) for x in (in_t, in_s))  # [N, k * k]
        loss = loss + _kl(d_t, d_s, once)
    return _close(loss, valid)


class AlraTerms(NamedTuple):
    """ALRA's pieces, [N] each but for the last two. At ignored positions only `loss` has a meaning."""

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
    z_s: Tensor, z_t: Tensor, y: Tensor, *, d_min: int = 3, d_max: int = 25, tau: float = 1.0, tau_p: float = 1.0,
    gamma: float = 5.0, lambda_pair: float = 1.0, eps: float = 1e-6, anchor: str = "teacher", pair: str = "swpra",
    budget: str = "adaptive", detach_weights: bool = True,
) -> Tensor:  # fmt: skip
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
    return _alra_terms(z_s, z_t, y, d_min, d_max, tau, tau_p, gamma, lambda_pair, eps, anchor, pair, budget, detach_weights).loss  # fmt: skip


def alra_terms(z_s: Tensor, z_t: Tensor, y: Tensor, **settings) -> AlraTerms:
    """ALRA piece by piece. Settings as of `alra`, with its defaults."""
    return _alra_terms(z_s, z_t, y, **{**alra.__kwdefaults__, **settings})


def _alra_terms(
    z_s, z_t, y, d_min, d_max, tau, tau_p, gamma, lambda_pair, eps, anchor, pair, budget, detach_weights
) -> AlraTerms:
    """In the order of the paper's Algorithm 1."""
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

    split = _split(z_s, z_t, tokens, tau, valid)
    # The candidates, and all other tokens as one more: [N, d_max + 1]. The rest R is that one and the candidates outside
    # I; its KL is the KL of these, and that within the one more by its share, as in Eq. 13.
    x_s, x_t = (torch.cat([x / tau, rest[:, None]], 1)
                for x, rest in ((split.in_s, split.rest_s), (split.in_t, split.rest_t)))  # fmt: skip
    in_local, in_rest = F.pad(inside, (0, 1)), ~F.pad(inside, (0, 1))
    odds_s, odds_t = (_lse(x, in_local) - _lse(x, in_rest) for x in (x_s, x_t))  # ln(alpha / (1 - alpha)), Eq. 10
    mass = _binary_kl(odds_t, odds_s)  # Eq. 14, and so the next two
    local = _kl(x_t, x_s, in_local)
    rest = _kl(x_t, x_s, in_rest) + _ln_softmax(x_t, in_rest)[:, -1].exp() * split.rest_kl

    pairs = inside[:, :, None] & inside[:, None, :] & _upper(d_max, inside.device)  # [N, d_max, d_max], Eq. 15
    pair_kl = _binary_kl(_differences(split.in_t / tau_p), _differences(split.in_s / tau_p))  # Eq. 16
    if pair == "swpra":
        p_s = x_s.log_softmax(-1)[:, :-1].exp()  # full-vocabulary probabilities
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
    top_1 = _top(z_t, 1)[:, 0]  # a_u
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


# Further objectives, with their authors' settings.


def reverse_kl(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 1.0) -> Tensor:
    """KL(P_s || P_t), mode-seeking: MiniLLM's term at a single step (Gu et al. 2024). No tau^2."""
    logp_s, logp_t, valid = _log_softmaxes(z_s, z_t, y, tau)
    return _close((logp_s.exp() * (logp_s - logp_t)).sum(-1), valid)


def jsd(z_s: Tensor, z_t: Tensor, y: Tensor, *, beta: float = 0.5, tau: float = 1.0) -> Tensor:
    """Generalised Jensen-Shannon divergence in TRL's convention (GKD, Agarwal et al. 2024). No tau^2.

        m = (1 - beta) p_s + beta p_t,    loss[u] = beta KL(P_t || m) + (1 - beta) KL(P_s || m)

    beta = 0 is KL(P_t || P_s) and beta = 1 is KL(P_s || P_t), not the limits of the formula, which are 0.
    """
    _between(0, 1, beta=beta)
    logp_s, logp_t, valid = _log_softmaxes(z_s, z_t, y, tau)
    if beta in (0, 1):
        a, b = (logp_t, logp_s) if beta == 0 else (logp_s, logp_t)
        return _close((a.exp() * (a - b)).sum(-1), valid)
    x = logp_t - logp_s + math.log(beta) - math.log1p(-beta)  # ln of beta p_t over (1 - beta) p_s
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    loss = (entropy - beta * F.softplus(-x)) * logp_t.exp() - (1 - beta) * F.softplus(x) * logp_s.exp()
    return _close(loss.sum(-1), valid)


def tvd(z_s: Tensor, z_t: Tensor, y: Tensor) -> Tensor:
    """Total variation distance, 0.5 sum_i |p_s - p_t|, in 0 .. 1 (f-DISTILL, Wen et al. 2023).

    Summed where the teacher has more, which is the same and keeps the gradient of a small overlap exact in fp32.
    """
    logp_s, logp_t, valid = _log_softmaxes(z_s, z_t, y, 1.0)
    return _close((logp_t.exp() - logp_s.exp()).relu().sum(-1), valid)


def dkd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 4.0, alpha: float = 1.0, beta: float = 8.0) -> Tensor:
    """DKD (Zhao et al. 2022): tau^2 (alpha TCKD + beta NCKD), KL of the target's pair and of the non-targets.

    At tau = alpha = 1 with NCKD weighted by the teacher's 1 - p_y instead of beta, this is the plain KL.
    """
    _positive(tau=tau)
    _not_negative(alpha=alpha, beta=beta)
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    odds_s, odds_t, nckd = _target_split(z_s, z_t, y, tau, valid)
    return _close(tau**2 * (alpha * _binary_kl(odds_t, odds_s) + beta * nckd), valid)


def mse_logits(z_s: Tensor, z_t: Tensor, y: Tensor, *, center: bool = False) -> Tensor:
    """Mean over V of (z_s - z_t)^2 (Kim et al. 2021), in squared logits, not nats.

    center  takes each row's mean off first. Without it the loss sees the logits' common shift, which no softmax sees.
    """
    z_s, z_t, y, valid = _open(z_s, z_t, y, guard=True)
    gap = z_s - z_t
    gap = gap - gap.mean(-1, keepdim=True) if center else gap
    return _close(gap.square().mean(-1), valid)


def adakd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, keep: float = 0.5, c: float = 0.5, rule: str = "hellinger",
    base: str = "reverse", detach_temperature: bool = False,
) -> Tensor:  # fmt: skip
    """AdaKD (code: SassyRong/AdaKD): the hardest positions alone, each at a temperature of its own.

        s_u = ||sqrt p_s - sqrt p_t|| / sqrt 2,   hardest: the max(1, floor(keep n_valid)) largest s_u
        T_u = exp(-c tanh(ln(s_u / lower median of s over the hardest))): hard is sharper, easy softer
        loss = mean over the hardest of T_u^2 base(z_s / T_u, z_t / T_u), so each carries n_valid / n_hardest

    rule  difficulty s_u: "hellinger", or "reverse_kl" KL(P_s || P_t);  base: "reverse" KL(P_s || P_t) or "forward"
    detach_temperature  False as in the authors' code, whose gradient runs through T_u

    Where the median is 0, as at equality, s_u is taken over 1 (the authors' 0 / 0 is NaN). Their schedule of `keep`
    over training is not here. c = 0 is no temperature.
    """
    _require(0 < keep <= 1, f"keep={keep}: expected 0 < keep <= 1")
    _not_negative(c=c)
    _one_of("hellinger", "reverse_kl", rule=rule)
    _one_of("reverse", "forward", base=base)
    logp_s, logp_t, valid = _log_softmaxes(z_s, z_t, y, 1.0)
    if rule == "hellinger":
        s = torch.linalg.vector_norm((logp_s / 2).exp() - (logp_t / 2).exp(), dim=-1) / math.sqrt(2)
    else:
        s = (logp_s.exp() * (logp_s - logp_t)).sum(-1)
    n_hardest = (keep * valid.sum().double()).floor().clamp(min=1)
    hardest = valid & (_falling_rank(s, valid) < n_hardest)
    median = _lower_median(s, hardest)
    median = torch.where(median > 0, median, 1.0)
    # Twice, on the way in and on the way back: what stands elsewhere reaches neither the value nor the median's gradient.
    ratio = torch.where(hardest, torch.where(hardest, s, 1.0) / median, 1.0)
    T = (-c * torch.tanh(ratio.clamp(min=1e-8).log())).exp()  # the authors' floor: at 1e-8 tanh is -1 in fp64
    T = (T.detach() if detach_temperature else T)[:, None]
    a, b = _log_softmax(logp_s / T), _log_softmax(logp_t / T)
    a, b = (a, b) if base == "reverse" else (b, a)
    loss = T[:, 0] ** 2 * (a.exp() * (a - b)).sum(-1)
    return _close(loss * valid.sum() / n_hardest.to(loss.dtype), hardest)


def sekd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: float = 2.0, keep: float = 0.2) -> Tensor:
    """SE-KD (code: almogtavor/SE-KD3x): tau^2 KL(P_t || P_s) on the positions where the student is least sure.

    Kept are the ceil(keep n_valid) positions of the forward batch with the greatest student entropy at temperature 1;
    the mean is over them, so each carries n_valid / n_kept. None where n_valid < 3, unless keep = 1.
    """
    _positive(tau=tau)
    _require(0 < keep <= 1, f"keep={keep}: expected 0 < keep <= 1")
    z_s, z_t, y, valid = _open(z_s, z_t, y)
    logp = z_s.detach().double().log_softmax(-1)  # fp64: early students are all but equally unsure everywhere
    entropy = -(logp.exp() * logp).sum(-1)
    n_valid = valid.sum()
    n_kept = (keep * n_valid.double()).ceil() * ((n_valid >= 3) | (keep == 1))
    kept = valid & (_falling_rank(entropy, valid) < n_kept)
    loss = tau**2 * _forward_kl(z_s, z_t, tau, valid) * (n_valid / n_kept.clamp(min=1)).to(z_s.dtype)
    return _close(loss, kept)


def bdl(z_s: Tensor, z_t: Tensor, y: Tensor, *, lam: float = 0.9) -> Tensor:
    """DA-KD's bidirectional discrepancy (He et al. 2025, Eq. 4): KL between two mixtures of teacher and student.

        loss[u] = KL((1 - lam) p_t + lam p_s || lam p_t + (1 - lam) p_s)

    The gradient runs through both. lam = 0 is KL(P_t || P_s), 1 is KL(P_s || P_t), 0.5 is 0. No public code.
    """
    _between(0, 1, lam=lam)
    logp_s, logp_t, valid = _log_softmaxes(z_s, z_t, y, 1.0)
    if lam in (0, 1):
        a, b = (logp_t, logp_s) if lam == 0 else (logp_s, logp_t)
        return _close((a.exp() * (a - b)).sum(-1), valid)
    gap, bias = logp_t - logp_s, math.log(lam) - math.log1p(-lam)
    a = (1 - lam) * logp_t.exp() + lam * logp_s.exp()
    # ln(a / b) is odd in the gap and tends to +-bias. Taken from the limit of its own side nothing cancels; the limit
    # of the student's side, bias, is left out and comes back as bias * sum_i p_t = bias.
    side = 2 * (gap >= 0).to(gap.dtype) - 1
    rise = F.softplus(-side * gap - bias) - F.softplus(-side * gap + bias)
    return _close((bias * logp_t.exp() - a * (side * rise + (1 + side) * bias)).sum(-1), valid)


def _log_softmaxes(z_s, z_t, y, tau) -> tuple[Tensor, Tensor, Tensor]:
    """-> ln P_s, ln P_t over the vocabulary, valid."""
    _positive(tau=tau)
    z_s, z_t, y, valid = _open(z_s, z_t, y, guard=True)
    return _log_softmax(z_s / tau), _log_softmax(z_t / tau), valid


def _log_softmax(x) -> Tensor:
    """As torch's, which on the CPU sums 151,936 terms one after the other: 1e-6 off in fp32, where this is 1e-7."""
    x = x - x.detach().amax(-1, keepdim=True)
    return x - x.exp().sum(-1, keepdim=True).log()


def _falling_rank(x, valid) -> Tensor:
    """0 for the largest valid entry, 1 for the next; equal ones by position  # [N] -> [N]"""
    order = x.detach().masked_fill(~valid, -math.inf).sort(descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))


# The table.


def wsd(step: int, n_steps: int, peak: float) -> float:
    """PD's warm-up, stable, decay: a weight that rises over the first 10 % of the steps, holds, falls in the last 1 %."""
    _require(n_steps >= 1, f"n_steps={n_steps}: expected at least 1")
    _require(0 <= step <= n_steps, f"step={step}: expected 0 to n_steps={n_steps}")
    return peak * min(1.0, step / (0.1 * n_steps), (n_steps - step) / (0.01 * n_steps))


class Method(NamedTuple):
    fn: Callable[..., Tensor]  # the objective
    hyper: dict  # its settings, where they differ from its defaults
    w_kd: float  # weight of the objective
    w_ce: float  # weight of the causal language-modelling term


METHODS: dict[str, Method] = {
    # the main comparison: the paper's table of baseline configurations
    "pretrain": Method(cross_entropy, {}, 0.0, 1.0),
    "vanilla_kd": Method(vanilla_kd, {}, 0.5, 0.5),
    "pd": Method(pd, {}, 1.0, 0.0),
    "atkd": Method(atkd, {}, 1.0, 0.0),
    "rld": Method(rld, {}, 1.0, 0.0),
    "ldrld": Method(ldrld, {}, 1.0, 0.5),
    "tad": Method(tad, {}, 0.5, 0.5),
    "bild": Method(bild, {}, 1.0, 0.0),
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
    # not in the paper's tables: their authors' settings and weights
    "reverse_kl": Method(reverse_kl, {}, 1.0, 0.0),
    "jsd": Method(jsd, {}, 1.0, 0.0),
    "tvd": Method(tvd, {}, 1.0, 0.0),
    "dkd": Method(dkd, {}, 1.0, 1.0),
    "mse_logits": Method(mse_logits, {}, 1.0, 0.0),
    "adakd": Method(adakd, {}, 1.0, 0.0),
    "sekd": Method(sekd, {}, 0.9, 0.1),
    "bdl": Method(bdl, {}, 1.0, 0.0),
}  # fmt: skip


TERMS = ("loss", "kd", "ce", "mass", "local", "rest", "pair", "d_u")  # what `method_loss` reports, in this order


def needs_teacher(name: str) -> bool:
    """Whether the method reads teacher logits."""
    return resolve(name).fn is not cross_entropy


def keywords(name: str) -> frozenset[str]:
    """What may override the method's row: its objective's settings, `w_kd` and `w_ce`."""
    method = resolve(name)
    settings = {p.name for p in inspect.signature(method.fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
    astray = sorted(set(method.hyper) - settings)
    _require(not astray, f"METHODS[{name!r}]: {method.fn.__name__} takes no {', '.join(astray)}")
    return frozenset({"w_kd", "w_ce"} | settings)


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
        got = tuple(each["kd"].shape)
        _require(
            got == tuple(y.shape),
            f"{method.fn.__name__}: expected one number per position, {tuple(y.shape)}, got {got}",
        )
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
    _check_fused(students, h_t, w_t, y, group)
    n_groups = y.shape[0] // group
    teacher = _operands(h_t, w_t, y) if h_t is not None and any(needs_teacher(s[2]) for s in students) else None
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
        wanted = torch.is_grad_enabled()
        self.inputs = h_s, w_s
        self.h, self.w = _operands(h_s, w_s, y)
        self.dh = torch.zeros_like(h_s) if wanted and h_s.requires_grad else None
        self.dw = torch.zeros_like(self.w, dtype=_wide(w_s)) if wanted and w_s.requires_grad else None
        self.loss, self.sums, self.compile = 0.0, {}, compile
        gradient = self.dh is not None or self.dw is not None
        if compile:
            self.evaluate = _compiled(method, tuple(sorted(overrides.items())), gradient, w_s.shape[0])
        else:
            self.evaluate = functools.partial(_evaluate, resolve(method, **overrides), gradient)

    def add(self, rows, z_t, y, n_groups):
        """One forward batch: value, gradient of the logits, and from that the gradients of hidden states and head."""
        z_s = _logits(self.h, self.w, rows)  # [N, V] fp32
        broken = z_s.device.type == "cpu" and not self.compile and not _all_finite(z_s)
        if broken:  # refused as they are; the results below become NaN, as they do by themselves compiled or on a GPU
            z_s.zero_()
        loss, sums, dz = self.evaluate(z_s, z_t, y)
        self.loss = self.loss + loss * (math.nan if broken else 1 / n_groups)
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0) + (value * math.nan if broken and key != "n_valid" else value)
        if dz is not None:
            del z_s
            dz = dz.to(self.w.dtype)  # on a GPU in the operands' dtype, as plain autocast does
            if self.dh is not None:
                self.dh[rows] = _mm(dz, self.w).div_(n_groups).view_as(self.dh[rows]).to(self.dh.dtype)
            if self.dw is not None:
                _mm(dz.t(), self.h[rows].flatten(0, 1), onto=self.dw, alpha=1 / n_groups)

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


def _mm(a, b, onto=None, alpha=1.0) -> Tensor:
    """a @ b, accumulated and written in fp32 (fp64 stays fp64), or alpha times that added onto a tensor."""
    if a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32)
        return product if onto is None else onto.add_(product, alpha=alpha)
    return torch.mm(a, b) if onto is None else onto.addmm_(a, b, alpha=alpha)


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _evaluate(method, gradient, z_s, z_t, y) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """`_objective`, and the gradient of its loss in z_s where that is wanted."""
    if not gradient:
        with torch.no_grad():
            return *_objective(method, z_s, z_t, y), None
    if torch.compiler.is_compiling():  # one graph for both directions: nothing of [N, V] is kept from one to the other
        dz, (loss, sums) = torch.func.grad_and_value(lambda z: _objective(method, z, z_t, y), has_aux=True)(z_s)
        return loss, sums, dz
    with torch.enable_grad():
        loss, sums = _objective(method, z_s.requires_grad_(), z_t, y)
    dz = torch.autograd.grad(loss, z_s)[0] if loss.requires_grad else torch.zeros_like(z_s)
    return loss.detach(), sums, dz


@functools.cache
def _compiled(method: str, overrides: tuple, gradient: bool, V: int) -> Callable:
    """`_evaluate` of one method and its settings under torch.compile, once per shape."""
    row = resolve(method, **dict(overrides))
    nothing = torch.zeros(1, V, device="meta")
    _objective(row, nothing, nothing, nothing.long()[:, 0])  # refuses what it must as a plain ValueError, not dynamo's

    def evaluate(z_s, z_t, y):
        return _evaluate(row, gradient, z_s, z_t, y)

    code = evaluate.__code__.replace(co_name=f"evaluate_{method}")  # its own: dynamo counts recompilations by code
    evaluate = types.FunctionType(code, globals(), code.co_name, None, evaluate.__closure__)
    return torch.compile(evaluate, dynamic=False, fullgraph=True)


def _check_fused(students, h_t, w_t, y, group) -> None:
    """Shapes, the group, and on the CPU the labels."""
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
    if y.device.type == "cpu":
        _check_labels(y, V)
