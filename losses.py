"""Every objective as a plain function, ALRA first, and the table of methods.

"The paper" is ALRA's; the code names its equations by their numbers. An objective is
`name(z_s, z_t, y, *, settings) -> [N]`:

    z_s, z_t  [N, V]  student and teacher logits; all is computed in fp32, or in fp64 if z_s is fp64
    y         [N]     int64 labels, `IGNORE` at positions that do not count (those outside the
                      paper's T_B, Eq. 1)
    ->        [N]     nats per position, exactly 0 where ignored; sum / n_valid is the paper's loss.
                      An objective with parts returns more, see below

* One call is one forward batch of the paper. Batch statistics run over its valid positions.
* The gradient reaches `z_s` only. The teacher, every choice of tokens and every count are treated
  as constants.
* Values at ignored positions have no effect, not even NaN. An objective begins with `enter`,
  which checks and widens its inputs, and sets ignored logits and labels to 0: no gradient flows
  to them. It ends with `leave`, which sets the loss at ignored positions to 0.
* Ties between equal logits are broken by the lower token index.
* No input is changed, and equal calls give equal results. An objective of your own may also draw
  random numbers, learn parameters or keep a state: docs/editing.md shows how.
* The result is the distillation term alone. `METHODS` has its weight and that of the causal
  language-modelling term.
* An objective with parts returns a NamedTuple: `loss` [N] first. Training logs its other fields of
  shape [N] by name, but not those of shape [N, ..].

lib/vocab.py has the sums over the vocabulary that make these functions fast. To add an objective,
append a function and a row of `METHODS` to this file. To call one in a training loop of your own,
see `method_loss`. Dimensions: N positions, V vocabulary, k selected tokens.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib import vocab
from lib.errors import UserError, did_you_mean
from lib.settings import (
    Below1,
    NonNegative,
    Positive,
    PositiveFraction,
    PositiveInt,
    UnitInterval,
    checked,
)
from lib.vocab import (
    IGNORE,
    LEAST,
    binary_kl,
    differences,
    kl,
    log_softmax,
    over_batch,
    valid_mean,
)

# ----------------------------------------------------------------------------------------------
# ALRA


class AlraTerms(NamedTuple):
    """What `alra` returns. At ignored positions only `loss` is meaningful."""

    loss: Tensor  # [N] ALD + lambda_pair * pair (Eq. 22); 0 where ignored
    mass: Tensor  # [N] KL(b_t || b_s), Eq. 14
    local: Tensor  # [N] KL of the local conditionals, Eq. 14
    rest: Tensor  # [N] KL of the rest conditionals, Eq. 14
    pair: Tensor  # [N] SWPRA, PRA-U or PRA, Eq. 17
    d_u: Tensor  # [N] int64 local budget, Eq. 8
    support: Tensor  # [N] fp64 effective support E_u, Eq. 6
    tokens: Tensor  # [N, d_max] candidate set; the first d_u tokens are the local set


def alra(
    z_s,
    z_t,
    y,
    *,
    d_min: int = 3,
    d_max: int = 25,
    tau: Positive = 1.0,
    tau_p: Positive = 1.0,
    gamma: NonNegative = 5.0,
    lambda_pair: NonNegative = 1.0,
    w_mass: NonNegative = 1.0,
    w_local: NonNegative = 1.0,
    w_rest: NonNegative = 1.0,
    eps: Positive = 1e-6,
    coefficients: Literal["ald", "exact"] = "ald",
    anchor: Literal["teacher", "none", "label", "both"] = "teacher",
    pair: Literal["swpra", "pra_u", "pra"] = "swpra",
    budget: Literal["adaptive", "fixed"] = "adaptive",
    detach_weights: bool = True,
    batch=None,
) -> AlraTerms:
    """Adaptive Local Relational Alignment, in the order of the paper's Algorithm 1.

        loss[u] = KL(b_t || b_s) + KL(p~_t,I || p~_s,I) + KL(p~_t,R || p~_s,R)       ALD, Eq. 14
                  + lambda_pair * sum_{i<j in I} kappa_ij KL(r_t(i,j) || r_s(i,j))   SWPRA, Eq. 21

    b = (alpha, 1 - alpha) are the masses of I and R, p~_I and p~_R the distributions within them,
    and r(i,j) is that of the pair i, j alone, softmax((z_i, z_j) / tau_p).

    The candidate set C starts as the student's top d_max (Eq. 4). If the teacher's top-1 token is
    missing, it replaces the lowest-ranked of them (Eq. 5). Then C is sorted by teacher logit. The
    local set I has the first d_u tokens of C (Eq. 9); R is the rest of the vocabulary. Divergences
    run from teacher to student.

    d_min, d_max     smallest and largest local budget, tokens; 2 <= d_min <= d_max < V
    tau              temperature of the distributions, also in SWPRA's weights (Eq. 2)
    tau_p            temperature of the pairs (Eq. 16)
    gamma            how fast SWPRA's weight falls with the student's probability gap (Eq. 19)
    w_mass, w_local, w_rest
                     factors of ALD's three divergences
    eps              added to the denominators of Eq. 8 and Eq. 20
    coefficients     of the three divergences: "ald" 1 each (Eq. 14); "exact" 1 for mass, alpha_t
                     for local and 1 - alpha_t for rest, where alpha_t is the teacher's mass of I:
                     then, with factors of 1, they sum to the full KL (Eq. 13)
    anchor           the tokens that the candidate set always holds: "teacher" its top-1 (ALRA),
                     "none" (the paper's ALRA-N), "label" the label (ALRA-NG), "both" (ALRA-G)
    pair             the weight kappa: "swpra" Eq. 20; "pra_u" 1 / |pairs| and "pra" 1, Eq. 18
    budget           "adaptive" (Eq. 8); "fixed": the local set is the student's top d_max, in the
                     student's order, and `anchor` and `d_min` are unused. The paper's Fixed-Budget
                     variants also have pair="pra_u". To fix the budget alone, keep "adaptive" and
                     set d_min = d_max
    detach_weights   no gradient through SWPRA's weights. The paper leaves this open. A student that
                     could change the weights would lower its loss by weighting badly matched pairs
                     less
    batch            set by the caller unless these positions are one forward batch (`over_batch`)
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    V = z_s.shape[1]
    if budget == "fixed":
        d_min = d_max  # Eq. 8 is then d_max everywhere
    if not 2 <= d_min <= d_max < V:
        raise UserError(f"d_min={d_min}, d_max={d_max}: expected 2 <= d_min <= d_max < V={V}")

    t = vocab.block_sums(z_t, tau)  # in blocks of the vocabulary, see lib/vocab.py
    s = vocab.block_sums(z_s, tau)
    within = vocab.block_kl(t, s)  # of each block, for the rest
    tokens = vocab.top_in_blocks(s.z, s.block_max, d_max)  # [N, d_max] student proposal set, Eq. 4
    if budget == "adaptive":
        top_1 = vocab.top_in_blocks(t.z, t.block_max, 1)  # a_u, Eq. 4
        tokens = _anchored(tokens, top_1, y[:, None], anchor)
        # candidate set in the teacher's order, for Eq. 9
        tokens = vocab.tokens_of_largest(z_t.gather(1, tokens), tokens, d_max)
    # in fp64, which is cheap at this size: equal logits in fp32 and fp64 then get equal budgets
    log_rho = (z_t.gather(1, tokens).double() / tau).log_softmax(-1)
    support = (-log_rho.exp() * log_rho).sum(-1).exp()  # E_u, Eq. 6
    # E_u over its mean in the forward batch (Eq. 7), [N]
    relative = over_batch(lambda e, v: e / (valid_mean(e, v) + eps), support, valid, batch)
    # Eq. 8: a position of average support or more has d_max
    d_u = (d_min + (d_max - d_min) * relative).round().clamp(d_min, d_max).long()
    # logits / tau of d_max + 1 categories, the candidates and all tokens outside C ("others"), and
    # the KL within the others. The local set I (Eq. 9) is the first d_u categories, and R the rest
    x_t, x_s, others_kl = vocab.split(t, s, within, tokens)
    x = torch.stack([x_t, x_s])  # [2, N, d_max + 1]; kl(*x) is from teacher to student
    in_local = torch.arange(d_max + 1, device=d_u.device) < d_u[:, None]
    x_local = x.masked_fill(~in_local, LEAST)
    x_rest = x.masked_fill(in_local, LEAST)
    # ln(alpha / (1 - alpha)) of teacher and student, [2, N], where alpha is the mass of I (Eq. 10)
    log_odds = x_local.logsumexp(-1) - x_rest.logsumexp(-1)
    mass = binary_kl(*log_odds)  # Eq. 14, like the next two
    local = kl(*x_local)
    # the chain rule, [N]: KL over the candidates in R and one category "others", plus
    # P_t(others | R) times the KL within the others
    rest = kl(*x_rest) + x_rest[0].softmax(-1)[:, -1] * others_kl

    # each pair once, i before j: [N, d_max, d_max], Eq. 15
    inside = in_local[:, :-1]
    is_pair = (inside[:, :, None] & inside[:, None, :]).triu(1)
    gaps = differences(x[..., :-1] * tau / tau_p)  # x is z / tau, and Eq. 16 has z / tau_p
    pair_kl = binary_kl(*gaps)  # Eq. 16
    weight = is_pair.to(z_s.dtype)  # PRA, Eq. 18
    if pair == "pra_u":
        weight = weight / weight.sum((1, 2), keepdim=True)
    elif pair == "swpra":
        p_s = x_s.softmax(-1)[:, :-1]  # [N, d_max] full-vocabulary probabilities at tau
        if detach_weights:
            p_s = p_s.detach()
        closeness = (-gamma * differences(p_s).abs()).exp()
        score = is_pair * closeness * (p_s[:, :, None] + p_s[:, None, :])  # Eq. 19
        weight = score / (score.sum((1, 2), keepdim=True) + eps)  # Eq. 20
    pair_loss = (weight * pair_kl).sum((1, 2))  # Eq. 17

    if coefficients == "exact":
        w_local = w_local * log_odds[0].sigmoid()  # alpha_t
        w_rest = w_rest * (-log_odds[0]).sigmoid()  # 1 - alpha_t
    divergence = w_mass * mass + w_local * local + w_rest * rest
    loss = leave(divergence + lambda_pair * pair_loss, valid)
    return AlraTerms(loss, mass, local, rest, pair_loss, d_u, support, tokens)


def _anchored(tokens, top_1, y, anchor) -> Tensor:
    """Put each anchor first. A missing one replaces the lowest-ranked proposal (Eq. 5).

    tokens    [N, k]  the student's proposals, best first
    top_1, y  [N, 1]  the teacher's best token, the label
    ->        [N, k]  as many distinct tokens, the teacher's best before the label
    """
    anchors = {"none": [], "teacher": [top_1], "label": [y], "both": [y, top_1]}[anchor]
    for token in anchors:
        # the tokens that rank below the anchor keep their places, the others move down by one
        is_below = (tokens == token).cumsum(1)[:, :-1] > 0
        others = torch.where(is_below, tokens[:, 1:], tokens[:, :-1])
        tokens = torch.cat([token, others], 1)
    return tokens


# ----------------------------------------------------------------------------------------------
# how an objective begins and ends


def enter(z_s, z_t, y):
    """Check the inputs, widen logits, and set ignored positions to 0. `z_t` may be None.

    -> z_s and z_t [N, V] in fp32, or in fp64 if z_s is fp64, 0 at ignored positions, z_t constant;
       labels [N], 0 where ignored; valid [N] bool
    """
    if not torch.compiler.is_compiling():
        check_inputs(z_s, z_t, y)
    ignored = y == IGNORE
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    z_s = z_s.to(dtype).masked_fill(ignored[:, None], 0.0)
    if z_t is not None:
        z_t = z_t.detach().to(dtype).masked_fill(ignored[:, None], 0.0)
    return z_s, z_t, y.masked_fill(ignored, 0), ~ignored


def check_inputs(z_s, z_t, y):
    """Check shapes, dtypes and labels, and on the CPU logits. On a GPU this does not synchronize.

    Compiled code does not call it.
    """
    shape = tuple(z_s.shape)
    if len(shape) != 2 or y.shape != shape[:1] or y.dtype != torch.int64:
        got = f"{shape} and {y.dtype} {tuple(y.shape)}"
        raise UserError(f"z_s, y: expected [N, V] and int64 labels [N], got {got}")
    V = shape[1]
    valid = y != IGNORE
    fits = (~valid | (y >= 0) & (y < V)).all()
    message = f"y: expected labels 0 to {V - 1}, or {IGNORE} where ignored"
    if y.is_cuda:
        torch._assert_async(fits, message)
    elif not fits:
        raise UserError(f"{message}; got {y[valid].min()} to {y[valid].max()}")
    for name, z in (("z_s", z_s), ("z_t", z_t)):
        if z is None:
            continue
        if z.shape != shape or not z.is_floating_point():
            raise UserError(f"{name}: expected floats {shape}, got {z.dtype} {tuple(z.shape)}")
        if not z.is_cuda and (z.amin(-1) <= LEAST)[valid].any():
            raise UserError(
                f"{name}: expected logits above {LEAST}; instead of masking tokens, cut them off "
                "the logits of both models"
            )


def leave(loss, valid) -> Tensor:
    """Return the loss with 0 at ignored positions, [N] -> [N]."""
    return loss.masked_fill(~valid, 0.0)


# ----------------------------------------------------------------------------------------------
# the paper's other methods, in the order of its table


def cross_entropy(z_s, z_t, y) -> Tensor:
    """Causal language modelling (second term of Eq. 23): -ln q_s[y], q_s = softmax(z_s).

    It has no teacher.
    """
    z_s, _, y, valid = enter(z_s, None, y)
    largest, x = vocab.block_logits(vocab.block_sums(z_s))
    # `nll_loss` picks -z_s[y] as `gather` would, with a gradient that fuses into other passes
    nll = F.nll_loss(z_s, y, reduction="none") + largest[:, 0] + x.logsumexp(-1)
    return leave(nll, valid)


def vanilla_kd(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 0.5,
    t2_scaling: bool = False,
    standardize: bool = False,
) -> Tensor:
    """KL(P_t || P_s) over the full vocabulary (Eq. 3), P = softmax(z / tau) on both sides (Eq. 2).

    t2_scaling   multiply by tau^2, as NVIDIA Model-Optimizer does. The paper's Eq. 3 has no such
                 factor
    standardize  first replace each row of logits by (z - mean) / (std + 1e-7), where std divides by
                 V - 1 (Sun et al. 2024). The loss is then independent of the scale of the student's
                 logits, so it needs the causal term

    The code of MiniPLM, a related method, trains the cross-entropy form. That differs by the
    teacher's entropy and has the same gradient.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    if standardize:
        z_s = _standardized(z_s)
        z_t = _standardized(z_t)
    loss = vocab.full_kl(z_t, z_s, tau)
    if t2_scaling:
        loss = loss * tau**2
    return leave(loss, valid)


def _standardized(z) -> Tensor:
    """Give each row mean 0 and standard deviation 1; a constant row becomes 0; [N, V]."""
    z = z - z.mean(-1, keepdim=True)
    squares = z.square().sum(-1, keepdim=True)
    variance = squares / (z.shape[1] - 1)
    deviation = torch.where(variance > 0, variance, 1.0).sqrt()
    return z / (deviation + 1e-7)


def pd(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 0.5,
    top_p: PositiveFraction = 0.95,
    top_k: int = 50,
    truncate_on: Literal["tempered", "raw"] = "tempered",
    temper_student: bool = False,
) -> Tensor:
    """Pre-training distillation (Peng et al. 2025): KL(F(P_t) || P_s).

        kept = the fewest most probable tokens of the teacher with mass >= top_p, at most top_k
        F    = softmax over kept of z_t / tau,   loss[u] = sum_{i in kept} F_i (ln F_i - ln p_s,i)

    truncate_on     the probabilities that top_p counts: "tempered" softmax(z_t / tau), as the ALRA
                    paper words it; "raw" softmax(z_t), as in PD's own paper. The sets differ widely
    temper_student  temper the student too. By default the student's temperature is 1, as in PD, so
                    that the optimum is the sharpened teacher

    There is no public code. Choices made here: the token that crosses top_p is kept; the student is
    normalised over the full vocabulary, which pushes down the tokens that are not kept; no tau^2.
    PD's schedule of the weight is the row "pd_wsd".
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    if not 1 <= top_k <= z_s.shape[1]:
        raise UserError(f"top_k={top_k}: expected 1 to V")
    tokens = vocab.top(z_t, top_k)  # [N, top_k] largest first
    tau_cut = tau if truncate_on == "tempered" else 1.0
    p_t = vocab.log_p(z_t, tokens, tau_cut).double().exp()
    mass_before = p_t.cumsum(-1) - p_t
    kept = (mass_before < top_p) | (top_p == 1)  # mass_before may be rounded up to 1
    x_t = z_t.gather(1, tokens) / tau
    log_f = x_t.masked_fill(~kept, LEAST).log_softmax(-1)  # [N, top_k]
    tau_s = tau if temper_student else 1.0
    logp_s = vocab.log_p(z_s, tokens, tau_s)
    loss = (log_f.exp() * (log_f - logp_s)).sum(-1)
    return leave(loss, valid)


def atkd(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 1.0,
    easy_weight: UnitInterval = 0.5,
    batch=None,
) -> Tensor:
    """ATKD (Zhong et al. 2024): easy positions learn the non-targets, hard ones the target too.

        TKD_u = KL of the pair (p_y, 1 - p_y);  DKD_u = KL of the softmaxes over V without y
        loss  = easy_weight mean_easy DKD + (1 - easy_weight) (mean_hard TKD + mean_hard DKD)

    A position is hard if UNC_u = 1 - p_t,y is at least the lower median of the batch, else easy.
    The caller divides the sum by n_valid, so each position is scaled by n_valid / the size of its
    half. An empty half counts 0 (the authors' code stops). UNC is compared as log-odds, which have
    the same order and stay apart where 1 - p rounds to equal values. No tau^2. Divergences run from
    teacher to student.
    Authors: tau = 1, easy_weight = 0.2; the ALRA paper: easy_weight = 0.5.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    log_odds_t, tkd_u, dkd_u = _target_split(z_t, z_s, y, tau)

    def halves(unc, valid):
        """Return the weight of each position, negative where it is easy, [M]."""
        easy = valid & (unc < vocab.lower_median(unc, valid))
        hard = valid & ~easy
        n = valid.sum().double()
        w_easy = easy_weight * n / easy.sum().clamp(min=1)
        w_hard = (1 - easy_weight) * n / hard.sum().clamp(min=1)
        return torch.where(hard, w_hard, -w_easy).to(unc.dtype)

    weight = over_batch(halves, -log_odds_t, valid, batch)
    loss = weight.abs() * torch.where(weight > 0, tkd_u + dkd_u, dkd_u)
    return leave(loss, valid)


def _target_split(z_t, z_s, y, tau) -> tuple[Tensor, Tensor, Tensor]:
    """Split the KL at the token y of each position, its target.

    -> the teacher's log-odds of y; KL of the pair (p_y, 1 - p_y); KL of the softmaxes over all
       tokens but y; [N] each
    """
    t = vocab.block_sums(z_t, tau)
    s = vocab.block_sums(z_s, tau)
    within = vocab.block_kl(t, s)
    x_t, x_s, others_kl = vocab.split(t, s, within, y[:, None])
    log_odds_t = x_t[:, 0] - x_t[:, 1]
    log_odds_s = x_s[:, 0] - x_s[:, 1]
    return log_odds_t, binary_kl(log_odds_t, log_odds_s), others_kl


def _log_odds(blocks, token) -> Tensor:
    """Return ln(p / (1 - p)) of one token per position, [N, 1] -> [N]."""
    x, *_ = vocab.categories(blocks, vocab.choose_blocks(token, blocks))
    return x[:, 0] - x[:, 1]


def rld(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 1.0,
    tau_conf: Positive = 1.0,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
) -> Tensor:
    """RLD (Sun et al. 2025): the teacher's confidence goes to the label, its ranking to the rest.

        SCD_u = KL of the pairs (m, 1 - m) || (s, 1 - s), m = max_i p_t,i and s = p_s,y at tau_conf
        MCD_u = KL(softmax_A(z_t / tau) || softmax_A(z_s / tau)), A = {i : z_t,i < z_t,y}; 0 where A
                is empty
        loss  = alpha tau_conf^2 SCD_u + beta tau^2 MCD_u

    A is strict and uses raw teacher logits: the label, tokens above it and tokens equal to it leave
    both distributions. The paper leaves alpha, beta and tau_conf open: here all three are 1. The
    authors use alpha = 1, beta from 0.5 to 8, tau_conf = 1, and a warm-up, which is left out.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    s = vocab.block_sums(z_s, tau_conf)
    t = vocab.block_sums(z_t, tau_conf)
    z_label = z_t.gather(1, y[:, None])
    z_label = z_label.topk(1).values  # the same: compiled code stores it, and finds it once
    outside = z_t >= z_label
    in_s = z_s.masked_fill(outside, LEAST)
    in_t = z_t.masked_fill(outside, LEAST)
    mcd_u = vocab.full_kl(in_t, in_s, tau)
    top_1 = vocab.top_in_blocks(t.z, t.block_max, 1)
    scd_u = binary_kl(_log_odds(t, top_1), _log_odds(s, y[:, None]))
    loss = alpha * tau_conf**2 * scd_u + beta * tau**2 * mcd_u
    return leave(loss, valid)


def ldrld(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 1.0,
    d: int = 15,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
    pair_reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """LDRLD (Xu et al. 2025): the student's top d in weighted pairs and as one set, and the rest.

        pairs_u = sum_{r<q} ADW(r, q) KL of the two-way softmaxes
        ADW     = 2 / (1.5 + q - r) * exp(-0.05 (r + q)),  ranks r, q = 1 .. d
        LLKI_u  = KL(softmax_I(z_t / tau) || softmax_I(z_s / tau)),  I the student's top d
        rest_u  = KL(softmax_R(z_t / tau) || softmax_R(z_s / tau)),  R the other tokens
        loss    = tau^2 (alpha (pairs_u + LLKI_u) / n + beta rest_u)

    pair_reduction  "mean": n = d (d - 1) / 2 + 1, as the authors' code; "sum": n = 1, as their
                    equation

    It uses no label. The ALRA paper leaves alpha and beta open: both 1 here (authors' example: 10.5
    and 7 at d = 7, tau = 4).
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    if not 2 <= d < z_s.shape[1]:
        raise UserError(f"d={d}: expected 2 <= d < V={z_s.shape[1]}")
    t = vocab.block_sums(z_t, tau)
    s = vocab.block_sums(z_s, tau)
    within = vocab.block_kl(t, s)
    tokens = vocab.top_in_blocks(s.z, s.block_max, d)
    x_t, x_s, rest_u = vocab.split(t, s, within, tokens)
    x = torch.stack([x_t, x_s])[..., :-1]  # [2, N, d] in the student's order
    q = torch.arange(1, d + 1, device=z_s.device, dtype=z_s.dtype)
    r = q[:, None]
    distance = 1.5 + q - r
    decay = (-0.05 * (r + q)).exp()
    adw = (2 / distance * decay).triu(1)
    pair_kl = binary_kl(*differences(x))
    pairs_u = (adw * pair_kl).sum((1, 2))
    llki_u = kl(*x)
    if d == 2:  # the authors' code weights a set of two like a pair
        llki_u = llki_u * adw[0, 1]
    n = d * (d - 1) // 2 + 1 if pair_reduction == "mean" else 1
    loss = tau**2 * (alpha * (pairs_u + llki_u) / n + beta * rest_u)
    return leave(loss, valid)


def tad(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 1.0,
    top_k: int = 10,
    beta: NonNegative = 2.0,
    norm: Literal["sequence", "unit", "none"] = "sequence",
    n_sequences: int = 1,
    batch=None,
) -> Tensor:
    """TAD (Dasgupta et al. 2026): KL over head tokens and tail mass, weighted KL within the tail.

        D1 = KL over K + 1 categories: the teacher's top K = top_k tokens, and all others as one
        D2 = KL(softmax_tail(z_t / tau) || softmax_tail(z_s / tau))
        loss[u] = D1 + beta w_u D2

    With alpha_t the teacher's tail mass, KL(P_t || P_s) = D1 + alpha_t D2.

    norm         "sequence": w_u = alpha_t / the mean of alpha_t over the sequence (TAD's Eq. 3, and
                 the ALRA paper's text); "unit": w_u = 1; "none": w_u = alpha_t, which at
                 beta = 1 gives the plain KL
    n_sequences  sequences of equal length in this forward batch, one after another (set by the
                 caller, not a setting)

    There is no public code. D1 includes the tail as one category, as TAD's gradient implies. Masses
    are kept as logarithms, so no epsilon is needed.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    V = z_s.shape[1]
    if not 1 <= top_k < V:
        raise UserError(f"top_k={top_k}: expected 1 <= top_k < V={V}")
    t = vocab.block_sums(z_t, tau)
    s = vocab.block_sums(z_s, tau)
    within = vocab.block_kl(t, s)
    tokens = vocab.top_in_blocks(t.z, t.block_max, top_k)
    x_t, x_s, others_kl = vocab.split(t, s, within, tokens)  # [N, K + 1] twice, [N]
    tail = x_t.log_softmax(-1)[:, -1]  # ln alpha_t
    log_w = tail

    def relative(tail, valid):
        """Return ln of each tail mass over its mean in the sequence, [M]."""
        M = len(tail)
        if n_sequences < 1 or M % n_sequences:
            raise UserError(f"n_sequences={n_sequences}: expected a divisor of N={M}")
        log_each = tail.view(n_sequences, -1)  # [sequences, positions]
        valid_each = valid.view(n_sequences, -1)
        n_each = valid_each.sum(-1, keepdim=True).to(tail.dtype)
        log_sum = log_each.masked_fill(~valid_each, LEAST).logsumexp(-1, keepdim=True)
        return (log_each - log_sum + n_each.log()).flatten()

    if norm == "sequence":
        log_w = over_batch(relative, tail, valid, batch)
    w = 1.0 if norm == "unit" else log_w.exp()
    loss = kl(x_t, x_s) + beta * w * others_kl
    return leave(loss, valid)


def bild(z_s, z_t, y, *, tau: Positive = 3.0, top_k: int = 8) -> Tensor:
    """BiLD (Li et al. 2025): t-LD + s-LD, on the teacher's and on the student's top k tokens.

        D_ab = (z_a - z_b) / tau for a < b in the leader's order
        LD   = KL(softmax(D^T) || softmax(D^S)) over pairs

    The leader is the model whose top k tokens are used: the teacher in t-LD, the student in s-LD.
    Both are KLs from teacher to student, over one distribution of all k (k - 1) / 2 differences. A
    single pair (k = 2) would have nothing to learn, so k >= 3. Tokens outside both sets have no
    effect. No tau^2. The authors' KL on prompt tokens has no counterpart in pre-training.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    if not 3 <= top_k <= z_s.shape[1]:
        raise UserError(f"top_k={top_k}: expected 3 to V")
    no_pair = torch.ones(top_k, top_k, dtype=torch.bool, device=z_s.device).tril()  # b <= a
    loss = 0.0
    for leader in (z_t, z_s):  # t-LD, s-LD
        tokens = vocab.top(leader, top_k)
        x = torch.stack([z_t.gather(1, tokens), z_s.gather(1, tokens)]) / tau  # [2, N, top_k]
        d = differences(x).masked_fill(no_pair, LEAST)
        loss = loss + kl(*d.flatten(2))
    return leave(loss, valid)


# ----------------------------------------------------------------------------------------------
# further objectives: sums over the vocabulary. q = P_s and p = P_t.


def _log_probabilities(z_s, z_t, y, tau=1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln q and ln p at temperature tau, [N, V] each, and the valid positions [N]."""
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    return log_softmax(z_s, tau), log_softmax(z_t, tau), valid


def reverse_kl(z_s, z_t, y, *, tau: Positive = 1.0) -> Tensor:
    """KL(P_s || P_t), mode-seeking: MiniLLM's term at a single step (Gu et al. 2024). No tau^2.

    Concrete score distillation (CSD), weighted by the student's probabilities, has this gradient at
    temperature 1, so CSD has no row of its own in `METHODS`.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    return leave(vocab.full_kl(z_s, z_t, tau), valid)


def jsd(
    z_s,
    z_t,
    y,
    *,
    beta: UnitInterval = 0.5,
    tau: Positive = 1.0,
) -> Tensor:
    """Generalised Jensen-Shannon divergence in TRL's convention (GKD, Agarwal et al. 2024).

        m = (1 - beta) p_s + beta p_t,    loss[u] = beta KL(P_t || m) + (1 - beta) KL(P_s || m)

    beta = 0 is KL(P_t || P_s) and beta = 1 is KL(P_s || P_t), not the limits of the formula, which
    are 0. No tau^2.
    """
    if beta == 0:
        return vanilla_kd(z_s, z_t, y, tau=tau)
    if beta == 1:
        return reverse_kl(z_s, z_t, y, tau=tau)
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y, tau)
    teacher_part = beta * _skew_kl(log_p, log_q, beta)
    student_part = (1 - beta) * _skew_kl(log_q, log_p, 1 - beta)
    return leave(teacher_part + student_part, valid)


def tvd(z_s, z_t, y) -> Tensor:
    """Total variation distance, 0.5 sum_i |p_s - p_t|, in 0 .. 1 (f-DISTILL, Wen et al. 2023).

    Computed as sum_i max(p_t - p_s, 0), which equals it. Where p_s and p_t hardly overlap, this
    form keeps the precision of the gradient.
    """

    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    return leave((log_p.exp() - log_q.exp()).relu().sum(-1), valid)


def bdl(z_s, z_t, y, *, lam: UnitInterval = 0.9) -> Tensor:
    """DA-KD's bidirectional discrepancy (He et al. 2025, Eq. 4): KL between two mixtures.

        loss[u] = KL((1 - lam) p_t + lam p_s || lam p_t + (1 - lam) p_s)

    The gradient runs through both. lam = 0 is KL(P_t || P_s), 1 is KL(P_s || P_t), 0.5 is 0. No
    public code.
    """
    if lam == 0:
        return vanilla_kd(z_s, z_t, y, tau=1.0)
    if lam == 1:
        return reverse_kl(z_s, z_t, y, tau=1.0)
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    p = log_p.exp()
    q = log_q.exp()
    gap = log_p - log_q
    bias = math.log(lam) - math.log1p(-lam)
    # The loss is sum a ln(a / b) with a = (1 - lam) p + lam q and b = lam p + (1 - lam) q. Let
    # x = bias - ln(a / b): then the loss is bias - sum a x. It holds that ln(a / b) is -bias - rise
    # where p >= q, and bias + rise elsewhere. `rise` tends to 0 for large gaps, and is computed by
    # itself so that it is not lost beside the bias.
    size = torch.where(gap >= 0, gap, -gap)  # unlike `abs` it has a slope at 0
    rise = F.softplus(-size - bias) - F.softplus(-size + bias)
    x = torch.where(gap >= 0, 2 * bias + rise, -rise)
    # As p sums to 1, bias may be added as a multiple of p.
    summand = bias * p - ((1 - lam) * p + lam * q) * x
    return leave(summand.sum(-1), valid)


def skew_fkl(z_s, z_t, y, *, lam: Below1 = 0.1) -> Tensor:
    """Skew forward KL (DistiLLM, Ko et al. 2024): KL(P_t || lam P_t + (1 - lam) P_s).

    It is at most -ln lam. lam = 0 is KL(P_t || P_s). The gradient runs through the mixture. The
    authors' code leaves out the teacher's entropy, which is constant.
    """
    if lam == 0:
        return vanilla_kd(z_s, z_t, y, tau=1.0)
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    return leave(_skew_kl(log_p, log_q, lam), valid)


def _skew_kl(log_a, log_b, lam) -> Tensor:
    """Return KL(a || lam a + (1 - lam) b), [N, V] -> [N]."""
    x = log_b - log_a + math.log1p(-lam) - math.log(lam)
    return -(log_a.exp() * F.softplus(x)).sum(-1) - math.log(lam)  # softplus: ln(mixture / lam a)


def skew_rkl(z_s, z_t, y, *, lam: Below1 = 0.1) -> Tensor:
    """Skew reverse KL (DistiLLM, Ko et al. 2024): KL(P_s || lam P_s + (1 - lam) P_t).

    It is at most -ln lam. lam = 0 is KL(P_s || P_t). The gradient runs through the mixture too;
    some copies of the authors' code detach the mixture.
    """
    if lam == 0:
        return reverse_kl(z_s, z_t, y)
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    return leave(_skew_kl(log_q, log_p, lam), valid)


def abkd(
    z_s,
    z_t,
    y,
    *,
    alpha: float = 0.2,
    beta: float = 0.7,
) -> Tensor:
    """Alpha-beta divergence (ABKD, Wang et al. 2025), p the teacher and q the student:

        loss[u] = -1 / (alpha beta)
                  sum_i [p_i^alpha q_i^beta - (alpha / s) p_i^s - (beta / s) q_i^s]

    with s = alpha + beta. alpha = 1 with beta = 0 is KL(P_t || P_s), and alpha = 0 with beta = 1 is
    KL(P_s || P_t). If alpha, beta or s is 0, the loss is the limit, which the authors' code misses.

    For precision, each summand (>= 0) is computed from the larger of p and q. With d = ln q - ln p
    it is p^s _chord(s, beta, d) where q <= p, else q^s _chord(s, alpha, -d); `_chord` is a
    difference quotient of (e^(k d) - 1) / k by k. The slope is q^beta (q^alpha - p^alpha) / alpha.
    """
    s = alpha + beta
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    d = log_q - log_p
    # Only one of the two is not 0: the clamp makes the other's d 0, and the chord of 0 is 0.
    where_p_is_larger = (s * log_p).exp() * _chord(s, beta, d.clamp(max=0))
    where_q_is_larger = (s * log_q).exp() * _chord(s, alpha, (-d).clamp(max=0))
    return leave((where_p_is_larger + where_q_is_larger).sum(-1), valid)


def _chord(a, b, d) -> Tensor:
    """(E_a(d) - E_b(d)) / (a - b) with E_k(d) = (e^(k d) - 1) / k, or its limit; any shape.

    Where a, b or their difference is small the quotients lose digits, so they are in fp64; below
    1e-9 it counts as 0.
    """
    if abs(a) < 1e-9:
        a = 0.0
    if abs(b) < 1e-9:
        b = 0.0
    if abs(a - b) < 1e-9:
        b = a
    if a == b == 0.0:
        return d.square() / 2
    is_small = any(0 < abs(x) < 0.1 for x in (a, b, a - b))
    x = d.double() if is_small else d
    e_a = torch.expm1(a * x) / a if a else x
    e_b = torch.expm1(b * x) / b if b else x
    if a == b:
        chord = (x * (a * x).exp() - e_a) / a
    else:
        chord = (e_a - e_b) / (a - b)
    return chord.to(d.dtype)


def todi(z_s, z_t, y, *, tau: Positive = 1.0) -> Tensor:
    """ToDi (Jung et al. 2025): forward or reverse KL token by token, by the larger probability.

        w_i     = p_i / (p_i + q_i), a constant
        loss[u] = sum_i [w_i p_i ln(p_i / q_i) + (1 - w_i) q_i ln(q_i / p_i)]

    The value is KL(P_t || P_s) + KL(P_s || P_t); only the gradient differs from that sum's. No
    tau^2.
    """

    log_q, log_p, valid = _log_probabilities(z_s, z_t, y, tau)
    d = log_q - log_p
    w = (-d).sigmoid().detach()
    summand = ((1 - w) * log_q.exp() - w * log_p.exp()) * d
    return leave(summand.sum(-1), valid)


def akl(z_s, z_t, y, *, mu: Below1 = 0.5) -> Tensor:
    """AKL (Wu et al. 2024): forward and reverse KL, by the head's share of the student's error.

        head    = the teacher's top-1, and each token i with sum_{j : p_j >= p_i} p_j <= mu
        h       = sum_head |p - q| / sum_i |p_i - q_i|, a constant
        loss[u] = h KL(P_t || P_s) + (1 - h) KL(P_s || P_t)

    The token that crosses mu is not in the head, and tokens of equal probability enter together. If
    p = q, h is 1/2. The released code does not run: a parameter and the return are missing.
    """
    log_q, log_p, valid = _log_probabilities(z_s, z_t, y)
    q = log_q.exp()
    p = log_p.exp()
    h = _head_share(q.detach(), log_p, mu)
    summand = ((1 - h) * q - h * p) * (log_q - log_p)
    return leave(summand.sum(-1), valid)


@torch.no_grad()
def _head_share(q, log_p, mu) -> Tensor:
    """Return AKL's h, [N, 1].

    The head's border is found by bisection, which is faster than sorting the vocabulary.
    """
    p = log_p.exp()
    top_1 = log_p.amax(-1, keepdim=True)
    # Invariant: mass(log_p >= low) > mu >= mass(log_p >= high). It holds for the first `low`, since
    # the tokens below ln((1 - mu) / V) have less than 1 - mu in all. It fails for `high` = 0 if one
    # token has probability 1, but then that token is the top-1, which is in the head.
    low = torch.full_like(top_1, math.log1p(-mu) - math.log(p.shape[1]))
    high = torch.zeros_like(low)
    # [low, high] is about 2**4 wide, and this many halvings make it as narrow as the last bit of p
    n_halvings = 4 - round(math.log2(torch.finfo(p.dtype).eps))
    # compiled code takes four at once: the masses above 15 borders from one pass over p
    at_once = 4 if torch.compiler.is_compiling() else 1
    for _ in range(0, n_halvings, at_once):
        borders = [low.lerp(high, i / 2**at_once) for i in range(1, 2**at_once)]
        for border in borders:
            over = torch.where(log_p >= border, p, 0.0).sum(-1, keepdim=True) > mu
            low = torch.where(over, border, low)
            high = torch.where(over, high, torch.minimum(border, high))
    in_head = log_p >= torch.minimum(high, top_1)
    error = (p - q).abs()
    head = torch.where(in_head, error, 0.0).sum(-1, keepdim=True)
    total = error.sum(-1, keepdim=True)
    return torch.where(total > 0, head / total, 0.5)


# ----------------------------------------------------------------------------------------------
# further objectives: the others


def dkd(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 4.0,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 8.0,
) -> Tensor:
    """DKD (Zhao et al. 2022): tau^2 (alpha TCKD + beta NCKD).

    TCKD is the KL of the target's pair, NCKD that of the non-targets. At tau = alpha = 1 with NCKD
    weighted by the teacher's 1 - p_y instead of beta, this is the plain KL.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    _, tckd, nckd = _target_split(z_t, z_s, y, tau)
    return leave(tau**2 * (alpha * tckd + beta * nckd), valid)


def mse_logits(z_s, z_t, y) -> Tensor:
    """Mean over V of (z_s - z_t)^2 (Kim et al. 2021), in squared logits, not nats.

    It depends on the logits' common shift, to which softmax is blind.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    return leave((z_s - z_t).square().mean(-1), valid)


def adakd(
    z_s,
    z_t,
    y,
    *,
    keep: PositiveFraction = 0.5,
    c: NonNegative = 0.5,
    rule: Literal["hellinger", "reverse_kl"] = "hellinger",
    base: Literal["reverse", "forward"] = "reverse",
) -> Tensor:
    """AdaKD (code: SassyRong/AdaKD): only the hardest positions, each at its own temperature.

        s_u  = ||sqrt p_s - sqrt p_t|| / sqrt 2
        hardest: the max(1, floor(keep n_valid)) largest s_u
        T_u  = exp(-c tanh(ln(s_u / lower median of s over the hardest)))
        loss = mean over the hardest of T_u^2 base(z_s / T_u, z_t / T_u)

    rule  difficulty s_u: "hellinger", or "reverse_kl" KL(P_s || P_t)
    base  "reverse" KL(P_s || P_t) or "forward" KL(P_t || P_s)

    As in the authors' code, the gradient runs through T_u, and so through the median: the forward
    batch is never divided into chunks.
    Each of the hardest is scaled by n_valid / n_hardest. Where the median is 0, as at equality, s_u
    is divided by 1 (the authors' 0 / 0 is NaN). Their schedule of `keep` over training is left out.
    c = 0 means temperature 1.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    logp_s = log_softmax(z_s)
    logp_t = log_softmax(z_t)
    if rule == "hellinger":
        gap = (logp_s / 2).exp() - (logp_t / 2).exp()
        s = torch.linalg.vector_norm(gap, dim=-1) / math.sqrt(2)
    else:
        s = vocab.full_kl(logp_s, logp_t, tau=1.0)
    n_hardest = (keep * valid.sum().double()).floor().clamp(min=1)
    rank = vocab.falling_rank(s.detach(), valid)
    hardest = valid & (rank < n_hardest)
    median = vocab.lower_median(s, hardest)
    median = torch.where(median > 0, median, 1.0)
    # positions that are not among the hardest must not affect T
    ratio = torch.where(hardest, s / median, 1.0)
    ratio = ratio.clamp(min=1e-8)  # the authors' floor, where tanh(ln) is -1 up to rounding
    T = (-c * torch.tanh(ratio.log())).exp()
    a = logp_s / T[:, None]
    b = logp_t / T[:, None]
    if base == "forward":
        a, b = b, a
    loss = T**2 * vocab.full_kl(a, b, tau=1.0)
    return leave(loss * valid.sum() / n_hardest, hardest)


def sekd(
    z_s,
    z_t,
    y,
    *,
    tau: Positive = 2.0,
    keep: PositiveFraction = 0.2,
    batch=None,
) -> Tensor:
    """SE-KD (code: almogtavor/SE-KD3x): tau^2 KL(P_t || P_s) where the student is least sure.

    It keeps the ceil(keep n_valid) positions of the forward batch with the largest student entropy
    at temperature 1. The mean runs over these, so each is scaled by n_valid / n_kept. As in the
    authors' code it keeps none if n_valid < 3, unless keep = 1.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    uniform = z_s.new_zeros(()).expand_as(z_s)
    certainty = vocab.full_kl(z_s.detach(), uniform, tau=1.0)  # ln V - entropy

    def weights(certainty, valid):
        """Return n_valid / n_kept where a position is kept, else 0, [M]."""
        n_valid = valid.sum()
        has_enough = (n_valid >= 3) | (keep == 1)
        n_kept = (keep * n_valid.double()).ceil() * has_enough
        kept = valid & (vocab.falling_rank(-certainty, valid) < n_kept)
        return (kept * (n_valid / n_kept.clamp(min=1))).to(certainty.dtype)

    weight = over_batch(weights, certainty, valid, batch)
    loss = tau**2 * vocab.full_kl(z_t, z_s, tau) * weight
    return leave(loss, weight > 0)


def taid(z_s, z_t, y, *, t: UnitInterval = 0.4) -> Tensor:
    """TAID (Shing et al. 2025): KL(r || P_s), r = softmax((1 - t) z_s + t z_t) a constant target.

    t  share of the teacher. t = 1 is KL(P_t || P_s); t = 0 has no gradient. By default training
       raises it from 0.4 to 1 (see `METHODS`), and passes it as a tensor [] that is not checked

    The authors' code returns the cross-entropy with r, whose entropy moves with the student.
    `AdaptiveTaid` has their schedule of t.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    between = (1 - t) * z_s.detach() + t * z_t
    return leave(vocab.full_kl(between, z_s, 1.0), valid)


class AdaptiveTaid(nn.Module):
    """TAID whose t grows with the fall of the loss (Shing et al. 2025, Algorithm 1).

        m <- beta m + (1 - beta) (J' - J) / J'
        t <- min(1, max(t_linear, t + alpha sigmoid(m) (1 - t)))

    J and J' are the means over the last update and the one before it of the cross-entropy with r
    (see `taid`). The first two updates have t_linear, which is the keyword t.

    alpha  how fast t grows. With the default, growth exceeds that of t_linear only in runs of more
           than about 4,000 updates
    beta   decay rate of the momentum m
    """

    def __init__(self, *, alpha: NonNegative = 5e-4, beta: Below1 = 0.99):
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        for name in ("t", "momentum", "loss", "previous_loss"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, z_s, z_t, y, *, t: UnitInterval = 0.4) -> Tensor:
        z_s, z_t, y, valid = enter(z_s, z_t, y)
        fall = (self.previous_loss - self.loss) / self.previous_loss
        momentum = self.beta * self.momentum + (1 - self.beta) * fall
        grown = self.t + self.alpha * momentum.sigmoid() * (1 - self.t)
        is_known = self.previous_loss > 0
        self.momentum = torch.where(is_known, momentum, self.momentum)
        self.t = torch.where(is_known, grown, self.t).clamp(min=t).clamp(max=1.0)
        between = (1 - self.t) * z_s.detach() + self.t * z_t
        kl_u = vocab.full_kl(between, z_s, 1.0)
        log_r = log_softmax(between)
        entropy = -(log_r.exp() * log_r).sum(-1)
        self.previous_loss = self.loss
        self.loss = valid_mean(kl_u.detach() + entropy, valid)
        return leave(kl_u, valid)


def rs_kd(
    z_s, z_t, y, *, n_draws: PositiveInt = 50, generator: torch.Generator | None = None
) -> Tensor:
    """Random sampling KD (Anshumann et al. 2025): -sum_i n_i / n_draws ln q_i, q = softmax(z_s).

    n_i counts token i among n_draws tokens drawn from the teacher, with replacement. The expected
    gradient is that of KL(P_t || P_s), and the expected value the cross-entropy with P_t.

    generator  of the draws; training sets it
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    tokens = torch.multinomial(z_t.softmax(-1), n_draws, replacement=True, generator=generator)
    return leave(-vocab.log_p(z_s, tokens).mean(-1), valid)


# ----------------------------------------------------------------------------------------------
# the table of methods


class Method(NamedTuple):
    """A named loss: w_kd times an objective plus w_ce times `cross_entropy`, plus a term."""

    # The objective, or a `functools.partial` of it. Or a class of modules, made with settings as
    # keywords, whose `forward` is the objective: its parameters are trained, its buffers are kept
    # from one update to the next.
    fn: Callable
    # Settings that differ from the defaults, also the term's; in training also keywords of GIVEN.
    hyper: dict = {}  # noqa: RUF012
    w_kd: float = 1.0  # weight of the objective
    w_ce: float = 0.0  # weight of the causal language-modelling term
    # Settings that change in training: function of progress, update / schedule_steps -> value. In
    # training an objective gets the value as an fp64 tensor []. If w_kd moves, w_ce is 1 - w_kd.
    moving: dict[str, Callable[[float], float]] = {}  # noqa: RUF012
    # Class of modules, made with the widths D_s and D_t, and with settings as keywords. What its
    # forward(h_s [B, T, D_s], h_t [B, T, D_t], y [B, T]) returns, [], is added to the loss.
    term: Callable | None = None
    # Whether a call may see a chunk of a forward batch, or several forward batches. An objective
    # whose positions depend on each other then takes `batch` (see `over_batch`). A module always
    # sees one forward batch.
    in_chunks: bool = False

    @property
    def has_teacher(self) -> bool:
        return self.fn is not cross_entropy or self.term is not None


def ramp(start: float, end: float) -> Callable[[float], float]:
    """Return a function of progress that goes in a straight line from `start` to `end`."""
    return lambda progress: start + (end - start) * progress


def wsd(progress: float) -> float:
    """Rise from 0 to 1 over the first 10 % of the schedule, fall to 0 over the last 1 %."""
    return min(1.0, progress / 0.1, (1 - progress) / 0.01)


# A `Method` whose objective may see a chunk of a forward batch, or several forward batches.
in_chunks = functools.partial(Method, in_chunks=True)

METHODS: dict[str, Method] = {
    # the main comparison: the paper's table of baseline configurations. It has no pd_wsd, which is
    # PD with its authors' schedule of the weights; the paper fixes w_kd at 1 instead.
    "pretrain": in_chunks(cross_entropy, w_kd=0.0, w_ce=1.0),
    "vanilla_kd": in_chunks(vanilla_kd, w_kd=0.5, w_ce=0.5),
    "pd": in_chunks(pd),
    "pd_wsd": in_chunks(pd, moving={"w_kd": wsd}),
    "atkd": in_chunks(atkd),
    "rld": in_chunks(rld),
    "ldrld": in_chunks(ldrld, w_ce=0.5),
    "tad": in_chunks(tad, w_kd=0.5, w_ce=0.5),
    "bild": in_chunks(bild),
    "alra": in_chunks(alra),
    # pair weighting
    "alra_r": in_chunks(alra, {"pair": "pra"}),
    "alra_u": in_chunks(alra, {"pair": "pra_u"}),
    # anchoring
    "alra_n": in_chunks(alra, {"anchor": "none"}),
    "alra_ng": in_chunks(alra, {"anchor": "label"}),
    "alra_g": in_chunks(alra, {"anchor": "both"}),
    # fixed budgets: ALD + PRA-U on the student's top d
    **{
        f"fixed_{d}": in_chunks(alra, {"budget": "fixed", "d_max": d, "pair": "pra_u"})
        for d in (3, 7, 9, 15, 19, 25)
    },
    # further objectives
    "reverse_kl": in_chunks(reverse_kl),
    "jsd": in_chunks(jsd),
    "tvd": in_chunks(tvd),
    "dkd": in_chunks(dkd, w_ce=1.0),
    "mse_logits": in_chunks(mse_logits),
    "adakd": Method(adakd),
    "sekd": in_chunks(sekd, w_kd=0.9, w_ce=0.1),
    "bdl": in_chunks(bdl),
    "skew_fkl": in_chunks(skew_fkl),
    "skew_rkl": in_chunks(skew_rkl),
    "abkd": in_chunks(abkd),
    "akl": in_chunks(akl),
    "todi": in_chunks(todi, w_kd=0.5, w_ce=0.5),
    "taid": in_chunks(taid, moving={"t": ramp(0.4, 1.0)}),
    "taid_adaptive": Method(AdaptiveTaid, moving={"t": ramp(0.4, 1.0)}),
    "rs_kd": Method(rs_kd),
    # KL over the teacher's top K and one bucket
    "topk_tail": in_chunks(tad, {"beta": 0.0}),
    "logit_std": in_chunks(
        vanilla_kd,
        {"tau": 2.0, "t2_scaling": True, "standardize": True},
        w_kd=9.0,  # the authors' weights
        w_ce=0.1,
    ),
}


# ----------------------------------------------------------------------------------------------
# calling a method: in a training loop of your own (`method_loss`), and in train.py (`mean_loss`)

GIVEN = ("n_vocab", "n_sequences", "generator", "batch")  # keywords that the caller sets
# what people may mean by a name that is not in `METHODS`
HINTS = {"kd": "vanilla_kd", "kl": "vanilla_kd", "ce": "pretrain"}


def method_loss(
    name, z_s, z_t, y, n_sequences: int = 1, **settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a method in a training loop of your own.

    n_sequences  sequences of equal length in the batch, one after another; read by TAD
    settings     of the objective, and its weights w_kd and w_ce, where they differ from `METHODS`;
                 those in `moving` do not change by themselves here
    ->           mean loss, differentiable in z_s; a dict of detached means of its terms

    An objective that is a module is made anew by each call. To keep one, call it in its place.
    """
    method = with_given(resolve(name, **settings), n_vocab=z_s.shape[-1], n_sequences=n_sequences)
    method = built(method)
    if method.has_teacher and z_t is None:
        raise UserError("z_t: this method needs teacher logits, got None")
    n_valid = (y != IGNORE).sum().clamp(min=1)
    loss, sums = mean_loss(method, z_s, z_t, y, n_valid)
    return loss, {key: value / n_valid for key, value in sums.items()}


def position_weight(z_s, z_t, y) -> Tensor | float:
    """Return the weight of each position in the loss of every method, [N]; here 1.

    Arguments are those of an objective, without a gradient. `z_t` is None where the objective is
    `cross_entropy`. The logged `loss` has the weights, its terms have not.
    """
    return 1.0


def mean_loss(method, z_s, z_t, y, n) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of w_kd * kd + w_ce * ce (Eq. 23), and detached sums of its terms.

    z_s, z_t, y  as for an objective, of one forward batch, of several, or of a chunk of one
    n            [] or [N] number of valid positions in each position's forward batch, at least 1
    ->           loss []: the sum over these positions of each one's loss, divided by its n; and a
                 dict of sums over the valid ones: `loss`, `kd` (with a teacher), `ce`, and the
                 objective's parts

    A cross-entropy of constant weight 0 is logged, and costs no gradient.
    """
    valid = y != IGNORE
    settings = {}
    if method.fn is cross_entropy:
        settings = method.hyper
        z_t = None  # which the run may have for other students
    # a weight that changes in training is a tensor
    ce_has_gradient = isinstance(method.w_ce, Tensor) or method.w_ce > 0
    ce = cross_entropy(z_s if ce_has_gradient else z_s.detach(), None, y, **settings)  # [N]
    loss = method.w_ce * ce
    terms = {"ce": ce}
    if method.fn is not cross_entropy:
        result = method.fn(z_s, z_t, y, **method.hyper)
        parts = {"loss": result} if isinstance(result, Tensor) else result._asdict()
        kd = parts.pop("loss")  # [N]
        loss = loss + method.w_kd * kd
        terms = {"kd": kd, **terms, **parts}
    loss = leave(position_weight(z_s.detach(), z_t, y) * loss, valid)
    sums = {}
    for key, value in {"loss": loss, **terms}.items():
        if value.shape == y.shape:  # others are not logged
            sums[key] = leave(value.detach(), valid).sum()
    return (loss / n).sum(), sums


def with_given(method, **given) -> Method:
    """Set those keywords of `GIVEN` that the objective has."""
    had = {key: value for key, value in given.items() if key in keywords(method.fn)}
    return method._replace(hyper=method.hyper | had)


def built(method) -> Method:
    """Return the method with a module in place of its objective, if that is a class."""
    if not isinstance(method.fn, type):
        return method
    made_with = inspect.signature(method.fn).parameters
    hyper = dict(method.hyper)
    settings = {key: hyper.pop(key) for key in method.hyper if key in made_with}
    return method._replace(fn=method.fn(**settings), hyper=hyper, in_chunks=False)


def resolve(name, /, **overrides) -> Method:
    """Return the row of `METHODS` for METHOD or METHOD@LABEL, with overrides of its settings.

    Raises `UserError` for an unknown method, setting or value, also of the row itself.
    """
    row_name = name.partition("@")[0]
    if row_name not in METHODS:
        hint = did_you_mean(row_name, METHODS, HINTS) or "."
        raise UserError(f"no such method {row_name!r}{hint} Known methods: {', '.join(METHODS)}")
    row = METHODS[row_name]
    kinds = {"w_kd": NonNegative, "w_ce": NonNegative}
    for key, parameter in own_keywords(row.fn, row.term).items():
        if key in (*kinds, "lr"):
            raise UserError(f"{name}: {key} is a setting of every method; choose another name")
        kinds[key] = parameter.annotation
        if kinds[key] is parameter.empty:
            raise UserError(f"{name}: {key} has no annotation; write {key}: float, or its kind")
    for key in (*row.moving, *row.hyper, *overrides):
        if key not in kinds:
            hint = did_you_mean(key, kinds)
            raise UserError(f"{name} takes no {key}; it takes {', '.join(sorted(kinds))}{hint}")
    method = row._replace(hyper={})
    for key, value in (row.hyper | overrides).items():
        changed = {key: checked(f"{name}.{key}", value, kinds[key])}
        if key in ("w_kd", "w_ce"):
            method = method._replace(**changed)
        if key in keywords(row.fn):
            method = method._replace(hyper=method.hyper | changed)
        if key in keywords(row.term):
            method = method._replace(term=functools.partial(method.term, **changed))
    moving = {key: value for key, value in method.moving.items() if key not in overrides}
    if "w_kd" in moving and "w_ce" in overrides:
        raise UserError(f"{name}.w_ce: it is 1 - w_kd, which moves; set w_kd too, to fix both")
    return method._replace(moving=moving)


def default_settings(fn, term=None) -> dict[str, object]:
    """Return the settings of an objective, and of a term if there is one, with their defaults."""
    return {key: parameter.default for key, parameter in own_keywords(fn, term).items()}


def own_keywords(fn, term) -> dict[str, inspect.Parameter]:
    """Return the keywords of an objective, and of a term if there is one, but for `GIVEN`."""
    both = keywords(fn) | keywords(term)
    return {key: parameter for key, parameter in both.items() if key not in GIVEN}


@functools.cache
def keywords(fn) -> dict[str, inspect.Parameter]:
    """Return the keywords of an objective or a term: parameters that have a default. None has none.

    It may be a `functools.partial`. Those of a module are its constructor's and its `forward`'s.
    """
    found = {}
    for part in filter(None, (fn, getattr(fn, "forward", None))):
        for p in inspect.signature(part, eval_str=True).parameters.values():
            if p.kind is p.KEYWORD_ONLY or p.default is not p.empty:
                found[p.name] = p
    return found
