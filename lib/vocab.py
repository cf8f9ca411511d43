"""Sums over the vocabulary, and the small distributions that are built from them.

Sums are taken in two levels, over blocks of the vocabulary and then over the blocks: a block fits
into a GPU's registers, so that torch.compile reads the logits once forward and once backward. Two
levels also keep rounding errors small. Only `TakeBlocks` has a backward pass of its own. Logits
must be finite.

The teacher comes before the student, as in KL(p_t || p_s). Equal logits rank by lowest index.
`LEAST` stands for minus infinity: it gives a probability of 0, but LEAST - LEAST is 0 and not NaN.

Dimension key: N positions, V vocabulary, n_blocks blocks of `size` tokens, k selected tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lib.torch_setup  # noqa: F401  (every module that computes imports it)

LEAST = -1e30
SMALL_BLOCK = 32  # tokens in a block of a small vocabulary
IGNORE = -100  # label of a position that does not count; torch's own `ignore_index`

# ----------------------------------------------------------------------------------------------
# sums over blocks of the vocabulary


class Blocks(NamedTuple):
    """A model's logits in blocks of the vocabulary, and what softmaxes of z / tau need of each."""

    z: Tensor  # [N, n_blocks, size]
    tau: float
    block_max: Tensor  # [N, n_blocks] largest logit of each block, without gradient
    scaled: Tensor  # [N, n_blocks, size] (z - block_max) / tau
    log_sum: Tensor  # [N, n_blocks] log sum exp(scaled)


def in_blocks(z) -> Tensor:
    """Split logits [N, V] into blocks [N, n_blocks, size], the last one filled up with LEAST.

    Logits that are in blocks already are returned unchanged.
    """
    if z.ndim == 3:
        return z
    # Inductor reads a block of 64 once, into registers, and a larger one several times
    size = 64 if z.shape[1] >= 2**15 else SMALL_BLOCK
    missing = -z.shape[1] % size
    if missing:
        z = F.pad(z, (0, missing), value=LEAST)
    return z.unflatten(1, (-1, size))


def block_sums(z, tau=1.0) -> Blocks:
    """Split logits [N, V] into blocks, and take the log sum exp of z / tau over each.

    Logits in blocks [N, n_blocks, size] stay in these.
    """
    z = in_blocks(z)
    block_max = z.detach().amax(-1)
    scaled = (z - block_max[..., None]) / tau
    # unlike exp().sum().log(), this keeps no exp [N, V] for the backward pass
    return Blocks(z, tau, block_max, scaled, scaled.logsumexp(-1))


def block_kl(t: Blocks, s: Blocks) -> Tensor:
    """Return KL(p_t || p_s) of the softmaxes within each block, [N, n_blocks]."""
    p_t = (t.scaled - t.log_sum[..., None]).exp()
    return (p_t * (t.scaled - s.scaled)).sum(-1) + (s.log_sum - t.log_sum)


def block_logits(blocks) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and log sum exp((z - largest) / tau) of each block.

    -> [N, 1]; [N, n_blocks]
    """
    largest = blocks.block_max.amax(-1, keepdim=True)
    return largest, (blocks.block_max - largest) / blocks.tau + blocks.log_sum


def log_softmax(z, tau=1.0) -> Tensor:
    """Return ln softmax(z / tau), [N, V].

    For peaked logits it is nearer to the exact one than torch's own, which adds up 151,936 terms in
    one level on the CPU.
    """
    largest, x = block_logits(block_sums(z, tau))
    return (z - largest) / tau - x.logsumexp(-1, keepdim=True)


def log_p(z, tokens, tau=1.0) -> Tensor:
    """Return ln softmax(z / tau) at `tokens`, [N, V], [N, k] -> [N, k]."""
    blocks = block_sums(z, tau)
    largest, x = block_logits(blocks)
    chosen = choose_blocks(tokens, blocks)
    # not `z.gather`, whose gradient would be a pass over [N, V] of its own
    taken = TakeBlocks.apply(blocks.z, chosen.block, chosen.copy).flatten(1)
    selected = taken.gather(1, chosen.place)
    return (selected - largest) / tau - x.logsumexp(-1, keepdim=True)


def full_kl(z_t, z_s, tau) -> Tensor:
    """Return KL(softmax(z_t / tau) || softmax(z_s / tau)) over V, [N, V] -> [N]."""
    t = block_sums(z_t, tau)
    s = block_sums(z_s, tau)
    _, x_t = block_logits(t)
    _, x_s = block_logits(s)
    return mixture_kl(x_t, x_s, block_kl(t, s))


def mixture_kl(x_t, x_s, within) -> Tensor:
    """Return the KL of two mixtures by the chain rule: over their components, and within them, [N].

    x_t, x_s  [N, m] logits of the components
    within    [N, m] KL within each component
    """
    return kl(x_t, x_s) + (x_t.softmax(-1) * within).sum(-1)


# ----------------------------------------------------------------------------------------------
# the vocabulary as selected tokens, and all others


def split(t: Blocks, s: Blocks, within, tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Split the vocabulary into k + 1 categories: k selected tokens, and all others together.

    t, s    teacher and student
    within  [N, n_blocks] block_kl(t, s), computed before tokens are selected: torch.compile then
            fuses it with the sums
    tokens  [N, k] int64, the selected ones. They must be distinct: a token given twice counts twice
    ->      logits of the categories of teacher and student, [N, k + 1] each, the others last; [N]
            KL(teacher || student) of the softmaxes over the others

    The logits are divided by tau and relative to the model's largest logit among the others:
    rounding errors then scale with ln p, not with the logit. That shift has no gradient, so use
    them only where it cancels, as in softmax.
    """
    chosen = choose_blocks(tokens, t)
    x_t, components_t, copies_t = categories(t, chosen)
    x_s, components_s, copies_s = categories(s, chosen)
    within = torch.cat([within, block_kl(copies_t, copies_s)], 1)
    return x_t, x_s, mixture_kl(components_t, components_s, within)


def categories(blocks: Blocks, chosen) -> tuple[Tensor, Tensor, Blocks]:
    """Return logits of k + 1 categories, and of the components of the last one, all other tokens.

    The components are the blocks without a selected token, and of each chosen block its copy
    without the selected tokens. So the probability of all others is always a sum, never `1 - p`,
    which loses all digits in fp32 where p is near 1.

    ->  [N, k + 1] of the categories; [N, n_blocks + k] of the components; the k copies as `Blocks`
    """
    taken = TakeBlocks.apply(blocks.z, chosen.block, chosen.copy)
    copies = block_sums(taken.masked_fill(~chosen.is_other, LEAST), blocks.tau)
    # without the chosen blocks, as their copies stand for them
    block_max = blocks.block_max.masked_fill(chosen.has_token, LEAST)
    parts = copies._replace(
        block_max=torch.cat([block_max, copies.block_max], 1),
        log_sum=torch.cat([blocks.log_sum, copies.log_sum], 1),
    )
    largest, components = block_logits(parts)
    selected = (taken.flatten(1).gather(1, chosen.place) - largest) / blocks.tau
    others = components.logsumexp(-1, keepdim=True)
    return torch.cat([selected, others], 1), components, copies


# ----------------------------------------------------------------------------------------------
# blocks that hold selected tokens


class Chosen(NamedTuple):
    """The blocks that hold the k selected tokens.

    A copy of a block is gathered for each token, since shapes must not depend on the tokens. Where
    several tokens share a block, only the first token's copy is used. With 4 blocks of 4 tokens and
    the tokens [5, 9, 6], `block` is [1, 2, 1], the third copy is unused, `copy` is [3, 0, 1, 3],
    and `place` is [1, 5, 2].
    """

    block: Tensor  # [N, k] block of each token
    copy: Tensor  # [N, n_blocks] used copy of each block, 0 to k - 1; k if it holds no token
    has_token: Tensor  # [N, n_blocks] whether a block holds a selected token
    place: Tensor  # [N, k] of the selected tokens among the k * size tokens of the copies
    is_other: Tensor  # [N, k, size] the unselected tokens of used copies


def choose_blocks(tokens, blocks: Blocks) -> Chosen:
    """Choose the blocks of distinct tokens [N, k]."""
    k = tokens.shape[1]
    n_blocks, size = blocks.z.shape[1:]
    block = tokens // size
    # for each token the first one in the same block, whose copy is used
    first = (block[:, :, None] == block[:, None, :]).int().argmax(-1)
    copy = tokens.new_full((len(tokens), n_blocks), k).scatter(1, block, first)
    place = first * size + tokens % size
    is_first = first == torch.arange(k, device=tokens.device)
    is_other = is_first.repeat_interleave(size, 1).scatter(1, place, False)
    return Chosen(block, copy, copy < k, place, is_other.unflatten(1, (k, size)))


class TakeBlocks(torch.autograd.Function):
    """Gather copies of chosen blocks, [N, n_blocks, size] -> [N, k, size].

    Its gradient reads where that of `gather` scatters, so that it fuses into a pass over [N, V]. A
    block gets the gradient of its used copy; the others must have none.
    """

    @staticmethod
    def forward(ctx, z, block, copy):
        ctx.save_for_backward(copy)
        return take(z, block)

    @staticmethod
    def backward(ctx, g):
        (copy,) = ctx.saved_tensors
        g = F.pad(g, (0, 0, 0, 1))  # copy k, which stands for none, has gradient 0
        return take(g, copy), None, None


def take(x, index) -> Tensor:
    """Return x[n, index[n, i]] for all n and i, [N, m, size], [N, k] -> [N, k, size].

    On the CPU this copies whole slices, and so takes a tenth of the time of `gather`.
    """
    first = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    return F.embedding(first + index, x.flatten(0, 1))


# ----------------------------------------------------------------------------------------------
# the largest logits


def top(z, k) -> Tensor:
    """Return the tokens of the k largest logits, largest first, [N, V] -> [N, k]; k <= V."""
    z = in_blocks(z)
    return top_in_blocks(z, z.amax(-1), k)


@torch.no_grad()
def top_in_blocks(z, block_max, k) -> Tensor:
    """Return the tokens of the k largest logits, largest first, [N, n_blocks, size] -> [N, k].

    block_max  [N, n_blocks] largest logit of each block

    Only the k blocks with the largest maxima are searched (equal maxima by lowest index). Each of
    them holds a token that ranks before every token of the other blocks.
    """
    n_blocks, size = z.shape[1:]
    tokens = torch.arange(n_blocks * size, device=z.device)
    if 2 * k < n_blocks:
        block = tokens_of_largest(block_max, tokens[:n_blocks], k)
        z = take(z, block)
        tokens = (block[:, :, None] * size + tokens[:size]).flatten(1)
    return tokens_of_largest(z.flatten(1), tokens, k)


def tokens_of_largest(x, tokens, k) -> Tensor:
    """Return the tokens of the k largest x, largest first, [N, m], [N, m] or [m] -> [N, k].

    torch.topk does not specify the order of ties. So it is given distinct integers: the bits of x,
    as an integer that increases with x, then those of the token, counted down. NaN counts as
    infinity, so that it is not hidden. x is in fp32 or fp64, and tokens are below 2**24.
    """
    if x.dtype == torch.float64:  # 64 bits leave no room for the token
        tokens, order = tokens.expand(x.shape).sort(-1)
        place = x.gather(1, order).argsort(dim=-1, descending=True, stable=True)
        return tokens.gather(1, place[:, :k])
    bits = x.masked_fill(x.isnan(), math.inf).view(torch.int32).long()
    rising_bits = torch.where(bits < 0, -(2**31) - bits, bits)
    key = rising_bits * 2**24 - tokens
    largest = key.amax(-1, keepdim=True) if k == 1 else key.topk(k).values
    return -largest % 2**24


# ----------------------------------------------------------------------------------------------
# small distributions, over k entries per position


def kl(x_t, x_s) -> Tensor:
    """Return KL(softmax(x_t) || softmax(x_s)), [N, k] -> [N].

    Entries that are LEAST in both add 0.
    """
    log_t = x_t.log_softmax(-1)
    log_s = x_s.log_softmax(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1)


def binary_kl(log_odds_t, log_odds_s) -> Tensor:
    """Return the KL of two-way distributions from their log-odds ln(p / (1 - p)); any shape.

    The log-odds of a set of tokens are the difference of two logsumexps, which is accurate where p
    or 1 - p is tiny.
    """
    log_yes = F.logsigmoid(log_odds_t)
    log_no = F.logsigmoid(-log_odds_t)
    kl_yes = log_yes.exp() * (log_yes - F.logsigmoid(log_odds_s))
    kl_no = log_no.exp() * (log_no - F.logsigmoid(-log_odds_s))
    return kl_yes + kl_no


def differences(x) -> Tensor:
    """Return x_i - x_j of all ordered pairs, [.., k] -> [.., k, k]."""
    return x[..., :, None] - x[..., None, :]


# ----------------------------------------------------------------------------------------------
# one number per position


def falling_rank(x, keep) -> Tensor:
    """Return the rank of each entry to keep, 0 for the largest, equal ones by index, [N] -> [N].

    NaN counts as the largest, so that it is not hidden. The other entries have later ranks.
    """
    kept_first = x.masked_fill(~keep, -math.inf)
    return kept_first.argsort(descending=True, stable=True).argsort()


def lower_median(x, keep) -> Tensor:
    """Return the lower median of the entries to keep, 0 if there are none, [N] -> [].

    Does not synchronize with the device.
    """
    rank = falling_rank(x.detach(), keep)
    middle = keep & (rank == keep.sum() // 2)
    return torch.where(middle, x, 0.0).sum()


def valid_mean(x, valid) -> Tensor:
    """Return the mean over the valid positions, 0 where there is none, [N] -> []."""
    return x.masked_fill(~valid, 0.0).sum() / valid.sum().clamp(min=1)


def over_batch(fn, values, valid, batch):
    """Return fn(values, valid), which is computed for each forward batch, at these positions, [N].

    An objective whose positions depend on each other calls this once, with one number per position
    [N], and with its own keyword `batch`. It may see a forward batch, several, or a chunk of one,
    but `fn` always sees a forward batch of M positions.

    fn     values [M] without gradient, valid [M] -> [M]
    batch  None: the N positions are one forward batch. M: they are forward batches of M positions.
           A list: they are a chunk, in the first of two passes; function and values are appended,
           and what the objective returns is not used. A tensor [N]: the result, in the second pass
    """
    if isinstance(batch, Tensor):
        return batch
    values = values.detach()
    if isinstance(batch, list):
        batch += fn, values
        return values
    M = batch or len(values)
    return torch.cat([*map(fn, values.split(M), valid.split(M))])
