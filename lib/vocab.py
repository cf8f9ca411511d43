"""Sums over the vocabulary, and the small distributions that are built from them.

The first half works on the vocabulary: tensors of [N, V]. Compiled, each of its functions reads
the logits once forward (`pointwise` more often) and once backward, and keeps nothing else of that
size. A loss is fast if it reads the vocabulary through them only. The second half works on k
selected tokens per position: tensors of [N, k].

Keep the order of operations: lib/graph.py merges equal ones of different functions in a compiled
graph. Equal logits rank by lowest index.

Dimension key: N positions, V vocabulary, k selected tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# ----------------------------------------------------------------------------------------------
# the vocabulary in two parts: selected tokens, and the rest


class Split(NamedTuple):
    """Logits split into k selected tokens per position and the rest of the vocabulary.

    The selected tokens keep one logit each; three numbers summarize the rest. All logits of a model
    are relative to its largest logit in the rest: rounding errors then scale with ln p, not with
    the logit. That shift has no gradient, so use the logits only in functions that it does not
    change, such as softmax.
    """

    selected_s: Tensor  # [N, k] student logits of the tokens, not tempered; differentiable
    selected_t: Tensor  # [N, k] teacher logits of the tokens, not tempered
    others_s: Tensor  # [N] log sum exp(z_s / tau) over all other tokens; differentiable
    others_t: Tensor  # [N] the same of the teacher
    others_kl: Tensor  # [N] KL(teacher || student) of the softmaxes over them; differentiable


def split(z_s, z_t, tokens, tau, valid) -> Split:
    """Split the logits into selected tokens and all others, the rest.

    tokens  [N, k] int64, distinct: the selected ones
    tau     temperature of the sums over the rest
    valid   [N] bool; other positions get a gradient of exactly 0
    """
    return Split(*_Split.apply(z_s, z_t, tokens, tau, valid))


def forward_kl(z_s, z_t, tau, valid, below=None) -> Tensor:
    """Return KL(softmax(z_t / tau) || softmax(z_s / tau)) over V, [N, V] -> [N].

    valid  as in `split`
    below  [N, 1] take only the tokens with z_t < below; 0 where there are none
    """
    parts = Split(*_Split.apply(z_s, z_t, below, tau, valid))
    if below is None:
        return parts.others_kl
    return parts.others_kl.masked_fill(parts.others_t == -math.inf, 0.0)


class _Split(torch.autograd.Function):
    """All that ALRA's divergences read of the vocabulary: one pass forward, one backward.

    Forward: each block is read once, for its largest logit and for its sums relative to that. A
    block without selected tokens belongs to the rest as a whole. The other blocks, at most k of
    them, are gathered, and their rest is summed separately. So the rest is always a sum over the
    rest, never `1 - p`, which cancels in fp32; and tokens need no mask of [N, V].

    selected  [N, k] int64 tokens; or [N, 1] `below`, a teacher logit that leaves tokens with
              z_t >= below out of the rest (k is 0); or None (k is 0)

    Backward: the gradient of the rest is written everywhere, then the selected tokens get their
    own. Autograd would keep four tensors of [N, V]; this keeps the logits only.
    """

    @staticmethod
    def forward(ctx, z_s, z_t, selected, tau, valid):
        tokens = selected
        below = None
        if selected is None or selected.is_floating_point():
            tokens = z_t.new_empty(z_t.shape[0], 0, dtype=torch.int64)
            below = selected

        def sums(x_s, x_t):
            """Return the largest logits, and the sums of e_s, e_t and e_t (ln e_t - ln e_s).

            [N, blocks, size] -> [N, blocks] each; e is exp((x - largest x of the block) / tau)
            """
            left_out = None if below is None else x_t >= below[..., None]
            block_max_s = _masked(x_s, left_out).amax(-1)
            block_max_t = _masked(x_t, left_out).amax(-1)
            ln_e_s = (x_s - _finite(block_max_s, left_out)[..., None]) / tau
            ln_e_t = (x_t - _finite(block_max_t, left_out)[..., None]) / tau
            e_s = _masked(ln_e_s, left_out).exp()
            # exp2: an exp that is used twice would be stored, [N, V], by Inductor on the CPU
            e_t = (_masked(ln_e_t, left_out) * math.log2(math.e)).exp2()
            cross = (e_t * (ln_e_t - ln_e_s)).sum(-1)
            return block_max_s, block_max_t, e_s.sum(-1), e_t.sum(-1), cross

        block_max_s, block_max_t, sum_s, sum_t, cross = by_block(sums, z_s, z_t)
        # [N, blocks] that have selected tokens, or nothing of the rest
        mixed = torch.zeros_like(block_max_t, dtype=torch.bool)
        mixed = mixed.scatter(1, tokens // block_size(z_t.shape[1]), True)
        if below is not None:
            mixed = mixed | (block_max_t == -math.inf)
        gathered_s, gathered_t = _rest_of_mixed(z_s, z_t, tokens)

        def totals(block_max, block_sum, gathered):
            """Return the rest's largest logit; relative to it, factors of blocks, exps, and sum."""
            maxima = torch.cat([block_max.masked_fill(mixed, -math.inf), gathered], 1)
            row_max = maxima.amax(-1, keepdim=True)
            factor = ((block_max - row_max) / tau).exp().masked_fill(mixed, 0.0)
            e_gathered = ((gathered - row_max) / tau).exp()
            total = (factor * block_sum).sum(-1, keepdim=True, dtype=torch.float64)
            return row_max, factor, e_gathered, total + e_gathered.sum(-1, keepdim=True)

        max_s, _, _, total_s = totals(block_max_s, sum_s, gathered_s)
        max_t, factor, e_gathered, total_t = totals(block_max_t, sum_t, gathered_t)
        # Sum e_t (ln e_t - ln e_s) over the rest. `shift` corrects for the maximum of each block.
        shift = ((block_max_t - max_t) - (block_max_s - max_s)) / tau
        gap = torch.where(mixed, 0.0, factor * (cross + sum_t * shift))
        gap = gap.sum(-1, keepdim=True, dtype=torch.float64)
        shift = ((gathered_t - max_t) - (gathered_s - max_s)) / tau
        gap = gap + torch.where(e_gathered > 0, e_gathered * shift, 0.0).sum(-1, keepdim=True)
        lse_s = total_s.log()
        lse_t = total_t.log()
        others_kl = (gap / total_t + (lse_s - lse_t)).to(z_s.dtype)
        others_s = lse_s.to(z_s.dtype)
        others_t = lse_t.to(z_t.dtype)
        selected_s = z_s.gather(1, tokens) - max_s
        selected_t = z_t.gather(1, tokens) - max_t
        ctx.save_for_backward(z_s, z_t, tokens, below, valid, max_s, max_t, others_s, others_t)
        others_t = others_t.squeeze(1)
        ctx.mark_non_differentiable(selected_t, others_t)
        ctx.tau = tau
        return selected_s, selected_t, others_s.squeeze(1), others_t, others_kl.squeeze(1)

    @staticmethod
    def backward(ctx, g_selected, _, g_others, __, g_kl):
        z_s, z_t, tokens, below, valid, max_s, max_t, others_s, others_t = ctx.saved_tensors
        g_kl = g_kl[:, None]
        g_others = g_others[:, None]
        q_s = ((z_s - max_s) / ctx.tau - others_s).exp()
        q_t = ((z_t - max_t) / ctx.tau - others_t).exp()
        grad = ((g_kl + g_others) * q_s - g_kl * q_t) / ctx.tau  # correct within the rest only
        if below is not None:
            grad = grad.masked_fill(z_t >= below, 0.0)
        return _put(grad, tokens, g_selected, valid), None, None, None, None


def _masked(x, left_out):
    return x if left_out is None else x.masked_fill(left_out, -math.inf)


def _finite(block_max, left_out):
    """Replace -inf, the maximum of a fully masked block, by 0 to avoid inf - inf."""
    return block_max if left_out is None else block_max.masked_fill(block_max == -math.inf, 0.0)


def _rest_of_mixed(z_s, z_t, tokens):
    """Gather the blocks that hold a selected token, each once, -inf outside the rest.

    -> both models' logits [N, k * size]
    """
    k = tokens.shape[1]
    V = z_s.shape[1]
    if not k:
        return z_s[:, :0], z_t[:, :0]
    size = block_size(V)
    block = tokens // size
    first = (block[..., None] == block[:, None, :]).long().argmax(-1)  # the first of its block
    member = _members(block, size)
    left_out = member >= V
    repeated = first != torch.arange(k, device=first.device)
    left_out = left_out | repeated.repeat_interleave(size, 1)
    left_out = left_out.scatter(1, first * size + tokens % size, True)
    member = member.clamp(max=V - 1)
    gathered_t = z_t.gather(1, member)
    gathered_s = z_s.gather(1, member)
    return gathered_s.masked_fill(left_out, -math.inf), gathered_t.masked_fill(left_out, -math.inf)


def _members(block, size):
    """Return the tokens of each block; in a short last block some are V or more.

    [N, k] -> [N, k * size]
    """
    member = block[..., None] * size + torch.arange(size, device=block.device)
    return member.flatten(1)


def _put(grad, tokens, values, valid):
    """Write `values` [N, k] at distinct `tokens` of a gradient [N, V].

    Ignored positions get exactly 0, even in place of a NaN.
    """
    grad = grad.masked_fill(~valid[:, None], 0.0)
    values = values.masked_fill(~valid[:, None], 0.0)
    k = tokens.shape[1]
    if k == 0:
        return grad
    if k == 1:  # a comparison, unlike a scatter, fuses into any pass over [N, V]
        token = torch.arange(grad.shape[1], device=grad.device)
        return torch.where(token == tokens, values, grad)
    return grad.scatter(1, tokens, values)


def block_size(V) -> int:
    """Return the block length. About sqrt(V / k) balances work per block and work per token."""
    return 128 if V >= 2**15 else 32  # 128 divides Qwen's 151,936


def by_block(f, *zs):
    """Apply f to logits in blocks, and to a short last block separately.

    f  [N, blocks, size] of each of zs [N, V] -> a tuple of [N, blocks]
    """
    V = zs[0].shape[1]
    size = block_size(V)
    n_even = V - V % size
    parts = []
    if n_even:
        parts.append(f(*(z[:, :n_even].unflatten(1, (-1, size)) for z in zs)))
    if n_even < V:
        parts.append(f(*(z[:, None, n_even:] for z in zs)))
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(pair, 1) for pair in zip(*parts, strict=True))


# ----------------------------------------------------------------------------------------------
# other sums over the vocabulary


def log_p(z, tokens, tau, valid) -> Tensor:
    """Return ln softmax(z / tau) at distinct `tokens`, [N, V], [N, k] -> [N, k].

    valid  as in `split`
    """
    return _LogP.apply(z, tokens, tau, valid)


class _LogP(torch.autograd.Function):
    """`log_p`: one pass forward, one pass backward, as in `_Split`."""

    @staticmethod
    def forward(ctx, z, tokens, tau, valid):
        def sums(x):
            block_max = x.amax(-1)
            e = ((x - block_max[..., None]) / tau).exp()
            return block_max, e.sum(-1)

        block_max, total = by_block(sums, z)
        row_max = block_max.amax(-1, keepdim=True)
        total = ((block_max - row_max) / tau).exp() * total
        ln_total = total.sum(-1, keepdim=True, dtype=torch.float64).log().to(z.dtype)
        logp = (z.gather(1, tokens) - row_max) / tau - ln_total
        ctx.save_for_backward(z, tokens, valid, row_max, ln_total, logp)
        ctx.tau = tau
        return logp

    @staticmethod
    def backward(ctx, g):
        z, tokens, valid, row_max, ln_total, logp = ctx.saved_tensors
        g = g / ctx.tau
        every = -g.sum(-1, keepdim=True)
        grad = every * ((z - row_max) / ctx.tau - ln_total).exp()
        return _put(grad, tokens, every * logp.exp() + g, valid), None, None, None


def pointwise(terms, z_s, z_t, tau, valid, *of_row) -> Tensor:
    """Sum a function of q = softmax(z_s / tau) and p = softmax(z_t / tau) over V, -> [N].

    terms   (ln q, ln p, *of_row) -> summands [N, V], and slopes [N, V], the derivative of the sum
            with respect to ln q. Slopes may leave out a multiple of q. The gradient is
            (slope_i - q_i sum_j slope_j) / tau
    of_row  tensors [N, 1] that the terms take, constant
    valid   [N] bool; other positions get a gradient of exactly 0
    """
    return _Pointwise.apply(z_s, z_t, tau, valid, terms, *of_row)


class _Pointwise(torch.autograd.Function):
    """`pointwise`: three passes forward, one backward; keeps the logits."""

    @staticmethod
    def forward(ctx, z_s, z_t, tau, valid, terms, *of_row):
        max_s = z_s.amax(-1, keepdim=True)
        max_t = z_t.amax(-1, keepdim=True)
        ln_sum_s = ((z_s - max_s) / tau).exp().sum(-1, keepdim=True).log()
        ln_sum_t = ((z_t - max_t) / tau).exp().sum(-1, keepdim=True).log()
        ln_q = _ln(z_s, max_s, ln_sum_s, tau)
        ln_p = _ln(z_t, max_t, ln_sum_t, tau)
        value, slope = terms(ln_q, ln_p, *of_row)
        slopes = slope.sum(-1, keepdim=True)
        ctx.save_for_backward(z_s, z_t, valid, max_s, max_t, ln_sum_s, ln_sum_t, slopes, *of_row)
        ctx.tau = tau
        ctx.terms = terms
        return value.sum(-1)

    @staticmethod
    def backward(ctx, g):
        z_s, z_t, valid, max_s, max_t, ln_sum_s, ln_sum_t, slopes, *of_row = ctx.saved_tensors
        ln_q = _ln(z_s, max_s, ln_sum_s, ctx.tau)
        ln_p = _ln(z_t, max_t, ln_sum_t, ctx.tau)
        _, slope = ctx.terms(ln_q, ln_p, *of_row)
        grad = (slope - ln_q.exp() * slopes) * (g[:, None] / ctx.tau)
        grad = grad.masked_fill(~valid[:, None], 0.0)
        return grad, None, None, None, None, *(None for _ in of_row)


def _ln(z, row_max, ln_sum, tau):
    return (z - row_max) / tau - ln_sum


@torch.no_grad()
def top(z, k) -> Tensor:
    """Return the tokens of the k largest logits, largest first, [N, V] -> [N, k].

    Only the k blocks with the largest maxima are searched (equal maxima by lowest index). Each of
    them holds a token that ranks before every token of the other blocks.
    """
    V = z.shape[1]
    size = block_size(V)
    if 2 * k * size >= V:  # k blocks are half of the vocabulary or more
        return _top_of_few(z, k)
    (block_max,) = by_block(lambda x: (x.amax(-1),), z)
    block = _top_of_few(block_max, k)
    block = _ranked(block, block[:, None, :] < block[..., None])  # by rising index
    member = _members(block, size)  # [N, k * size], rising
    inside = member.clamp(max=V - 1)
    x = z.gather(1, inside).masked_fill(member >= V, -math.inf)
    return inside.gather(1, _top_of_few(x, k))


def _top_of_few(z, k):
    """`top` without blocks. torch.topk leaves the choice among equal values open.

    Entries above the k-th value are certain. Of those equal to it, a second selection takes the
    lowest indices.
    """
    if k == 1:
        return z.argmax(-1, keepdim=True)  # the lowest of equal ones
    value, token = z.topk(k)
    last = value[:, -1:]
    # exact in fp32 up to V = 2^24
    lowest_first = torch.arange(z.shape[1], 0, -1, device=z.device, dtype=z.dtype)
    # in place: one tensor of [N, V]
    tied = z.clone().eq_(last).mul_(lowest_first).topk(k).indices
    above = value > last
    place = torch.arange(k, device=z.device) - above.sum(-1, keepdim=True)
    lowest = tied.gather(1, place.clamp(min=0))
    return by_logit(z, torch.where(above, token, lowest))


@torch.no_grad()
def by_logit(z, tokens) -> Tensor:
    """Sort `tokens` by falling logit in z, [N, V], [N, k] -> [N, k]."""
    x = z.gather(1, tokens)
    mine = x[..., None]  # [N, k, 1]
    other = x[:, None, :]  # [N, 1, k]
    lower = tokens[:, None, :] < tokens[..., None]
    return _ranked(tokens, (other > mine) | ((other == mine) & lower))


def _ranked(tokens, before):
    """Sort `tokens` [N, k]. before[u, i, j] says whether token j of position u precedes token i.

    Ranks are counted: torch.compile would turn a sort of 25 numbers into a GPU kernel that takes
    minutes to build.
    """
    return torch.zeros_like(tokens).scatter(1, before.sum(-1), tokens)


# ----------------------------------------------------------------------------------------------
# small distributions, over k entries per position; the teacher comes first, as in KL(p_t || p_s)


def kl(x_t, x_s, keep=None) -> Tensor:
    """Return KL(softmax(x_t) || softmax(x_s)) over the entries to keep, [N, k] -> [N]."""
    ln_t = ln_softmax(x_t, keep)
    ln_s = ln_softmax(x_s, keep)
    p_t = ln_t.exp()
    if keep is not None:
        p_t = torch.where(keep, p_t, 0.0)
    return (p_t * (ln_t - ln_s)).sum(-1)


def ln_softmax(x, keep) -> Tensor:
    """Return ln softmax over the entries to keep, at least one; finite at the others, [N, k]."""
    if keep is None:
        return x.log_softmax(-1)
    # relative to the largest, so that rounding errors scale with ln p, not with the logit
    kept = x.detach().masked_fill(~keep, -math.inf)
    x = x - kept.amax(-1, keepdim=True)
    return x - lse(x, keep)[:, None]


def lse(x, keep) -> Tensor:
    """Return log sum exp over the entries to keep, [N, k] -> [N]."""
    return x.masked_fill(~keep, -math.inf).logsumexp(-1)


def binary_kl(odds_t, odds_s) -> Tensor:
    """Return the KL of two-way distributions from their log-odds ln(p / (1 - p)); any shape.

    The log-odds of a set of tokens are the difference of two logsumexps, which is exact where p or
    1 - p is tiny. `odds_t` gets no gradient.
    """
    return _BinaryKL.apply(odds_t, odds_s)


class _BinaryKL(torch.autograd.Function):
    """`binary_kl` with a hand-written gradient.

    Autograd would compute three times the exponentials, and ALRA takes them over all pairs.
    """

    @staticmethod
    def forward(ctx, odds_t, odds_s):
        yes_t, ln_yes_t, no_t, ln_no_t = _two_way(odds_t)
        _, ln_yes_s, _, ln_no_s = _two_way(odds_s)
        ctx.save_for_backward(odds_t, odds_s)
        return yes_t * (ln_yes_t - ln_yes_s) + no_t * (ln_no_t - ln_no_s)

    @staticmethod
    def backward(ctx, g):
        odds_t, odds_s = ctx.saved_tensors
        yes_t, _, no_t, _ = _two_way(odds_t)
        yes_s, _, no_s, _ = _two_way(odds_s)
        # p_s - p_t, without cancellation where both are near 1
        return None, g * (no_t * yes_s - yes_t * no_s)


def _two_way(odds):
    """Return p, ln p, 1 - p, ln(1 - p) for log-odds, from one exponential that is at most 1."""
    e = (-odds.abs()).exp()
    less = e / (1 + e)
    more = 1 / (1 + e)
    ln = e.log1p()
    up = odds >= 0
    yes = torch.where(up, more, less)
    ln_yes = odds.clamp(max=0) - ln
    no = torch.where(up, less, more)
    ln_no = (-odds).clamp(max=0) - ln
    return yes, ln_yes, no, ln_no


def differences(x) -> Tensor:
    """Return x_i - x_j of all ordered pairs, [N, k] -> [N, k, k]."""
    return x[..., None] - x[:, None, :]


def upper(k, device) -> Tensor:
    """Mark each unordered pair once, i before j: [k, k] bool."""
    rank = torch.arange(k, device=device)
    return rank[:, None] < rank[None, :]


# ----------------------------------------------------------------------------------------------
# one number per position


def rising_rank(x, keep) -> Tensor:
    """Count the entries to keep that are smaller, or equal and earlier, [N] -> [N]."""
    place = torch.arange(len(x), device=x.device)
    before = (x < x[:, None]) | ((x == x[:, None]) & (place < place[:, None]))
    return (before & keep).sum(-1)


def lower_median(x, keep) -> Tensor:
    """Return the lower median of the entries to keep, 0 if there are none, [N] -> [].

    Does not wait for the device.
    """
    rank = rising_rank(x.detach(), keep)
    middle = keep & (rank == (keep.sum() - 1) // 2)
    return torch.where(middle, x, 0.0).sum()
