"""Every objective as a plain function, ALRA first, and the table of methods.

An objective is `name(z_s, z_t, y, *, settings) -> [N]`:

    z_s, z_t  [N, V]  student and teacher logits, any float dtype: bf16 and fp16 are widened to fp32, fp64 is kept
    y         [N]     int64 labels, `IGNORE` where the position is outside T_B (paper, Eq. 1)
    ->        [N]     nats per position, exactly 0 where ignored; sum / n_valid is the loss of the method's paper

* One call is one forward batch of the paper. Batch statistics run over the valid positions of the call.
* The gradient reaches `z_s` only. The teacher, every choice of tokens and every count are constant.
* Values at ignored positions change nothing, not even a NaN. Equal logits rank by lowest index.
* No input is changed, and equal calls give equal results: random numbers come from a keyword `generator`, seeded by training.
* The result is the distillation term alone. Its weight and that of the causal language-modelling term are in `METHODS`.
* An objective with parts returns a NamedTuple: `loss` [N] first; its other fields of shape [N] are logged by name, [N, ..] are not.

`vocab` (lib/vocab.py) has the sums over the vocabulary that make these functions fast. To add an objective, append a
function and a row of `METHODS` to this file. To call one in a training loop of your own, see `method_loss`.
Dimensions: N positions, V vocabulary, k tokens of a local set.
"""

import functools
import inspect
import math
import traceback
import typing
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lib import vocab
from lib.checks import IGNORE, enter, leave, valid_mean
from lib.errors import UserError, first_line, nearest, require
from lib.settings import Below1, NonNegative, Positive, PositiveFraction, UnitInterval, checked
from lib.vocab import binary_kl, differences, kl, ln_softmax, lse, upper


class AlraTerms(NamedTuple):
    """What `alra` returns. At ignored positions only `loss` has a meaning."""

    loss: Tensor  # [N] mass + local + rest + lambda_pair * pair (Eq. 22); 0 where ignored
    mass: Tensor  # [N] KL(b_t || b_s), Eq. 14
    local: Tensor  # [N] KL of the local conditionals, Eq. 14
    rest: Tensor  # [N] KL of the rest conditionals, Eq. 14
    pair: Tensor  # [N] SWPRA, PRA-U or PRA, Eq. 17
    d_u: Tensor  # [N] int64 local budget, Eq. 8
    support: Tensor  # [N] fp64 effective support E_u, Eq. 6
    tokens: Tensor  # [N, d_max] candidate set by falling teacher logit (budget="fixed": student logit); the first d_u are the local set


def alra(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, d_min: int = 3, d_max: int = 25, tau: Positive = 1.0, tau_p: Positive = 1.0,
    gamma: NonNegative = 5.0, lambda_pair: NonNegative = 1.0, eps: Positive = 1e-6,
    anchor: Literal["teacher", "none", "label", "both"] = "teacher", pair: Literal["swpra", "pra_u", "pra"] = "swpra",
    budget: Literal["adaptive", "fixed"] = "adaptive", detach_weights: bool = True,
) -> AlraTerms:  # fmt: skip
    """Adaptive Local Relational Alignment, in the order of the paper's Algorithm 1. Divergences: teacher to student.

        loss[u] = KL(b_t || b_s) + KL(p~_t,I || p~_s,I) + KL(p~_t,R || p~_s,R)            ALD, Eq. 14
                  + lambda_pair * sum_{i<j in I} kappa_ij KL(r_t(i,j) || r_s(i,j))        SWPRA, Eq. 17

    I is the position's local set, the first d_u of the candidate set C, and R the rest of the vocabulary:

        C = top-d_max of p_s, whose last token makes room for a = argmax p_t if that is missing; by falling p_t    Eq. 4, 5

    d_min, d_max     smallest and largest local budget, tokens; 2 <= d_min <= d_max < V
    tau, tau_p       temperature of the distributions, also in SWPRA's weights (Eq. 2), and of the pairs (Eq. 16)
    gamma            how fast SWPRA's weight falls with the student's probability gap (Eq. 19)
    eps              added to the denominators of Eq. 8 and Eq. 20
    anchor           what the candidate set must hold: "teacher" top-1 (ALRA), "none" (-N), "label" (-NG), "both" (-G)
    pair             kappa: "swpra" (Eq. 20), "pra_u" 1 / |pairs|, "pra" 1 (Eq. 18)
    budget           "adaptive" (Eq. 8); "fixed": the local set is the student's top d_max, without anchor and without
                     ranking by the teacher; `anchor` and `d_min` are then unused (the paper's Fixed-Budget rows)
    detach_weights   no gradient through SWPRA's weights. The paper leaves this open. A student that could move the
                     weights would lower its loss by driving pairs apart
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    N, V = z_s.shape
    require(2 <= d_max < V, f"d_max={d_max}: expected 2 <= d_max < V={V}")
    require(budget == "fixed" or 2 <= d_min <= d_max, f"d_min={d_min}: expected 2 <= d_min <= d_max={d_max}")

    tokens = vocab.top(z_s, d_max)  # [N, d_max] student proposal set, Eq. 4
    d_u = tokens.new_full((N,), d_max)
    if budget == "adaptive":
        tokens = vocab.by_logit(z_t, _anchored(tokens, z_t, y, anchor))  # candidate set in the teacher's order, Eq. 5
    support = _effective_support(z_t.gather(1, tokens), tau)  # E_u, Eq. 6
    if budget == "adaptive":
        relative = support / (valid_mean(support, valid) + eps)  # Eq. 7 in the denominator
        d_u = (d_min + (d_max - d_min) * relative).round().clamp(d_min, d_max).long()  # Eq. 8
    inside = torch.arange(d_max, device=d_u.device) < d_u[:, None]  # [N, d_max] local set I, Eq. 9

    split = vocab.split(z_s, z_t, tokens, tau, valid)
    # [N, d_max + 1] tempered logits: the candidates, and all other tokens as one category, whose logit is their logsumexp
    # (`split` has divided it by tau). R is that category and the candidates outside I.
    x_s = torch.cat([split.in_s / tau, split.rest_s[:, None]], 1)
    x_t = torch.cat([split.in_t / tau, split.rest_t[:, None]], 1)
    in_local = F.pad(inside, (0, 1))
    odds_s, odds_t = (lse(x, in_local) - lse(x, ~in_local) for x in (x_s, x_t))  # ln(alpha / (1 - alpha)), Eq. 10
    mass = binary_kl(odds_t, odds_s)  # Eq. 14, like the next two
    local = kl(x_t, x_s, in_local)
    share = ln_softmax(x_t, ~in_local)[:, -1].exp()  # [N] of the category in the teacher's R
    rest = kl(x_t, x_s, ~in_local) + share * split.rest_kl  # over the members of R, and within the category: Eq. 13

    pairs = inside[:, :, None] & inside[:, None, :] & upper(d_max, inside.device)  # [N, d_max, d_max], Eq. 15
    pair_kl = binary_kl(differences(split.in_t / tau_p), differences(split.in_s / tau_p))  # Eq. 16
    if pair == "swpra":
        p_s = x_s.log_softmax(-1)[:, :-1].exp()  # [N, d_max] full-vocabulary probabilities at tau
        p_s = p_s.detach() if detach_weights else p_s
        score = (-gamma * differences(p_s).abs()).exp() * (p_s[:, :, None] + p_s[:, None, :])  # Eq. 19
        score = torch.where(pairs, score, 0.0)
        weight = score / (score.sum((1, 2), keepdim=True) + eps)  # Eq. 20
    else:
        weight = pairs.to(z_s.dtype)
        weight = weight / weight.sum((1, 2), keepdim=True) if pair == "pra_u" else weight  # Eq. 18
    aligned = (weight * pair_kl).sum((1, 2))  # Eq. 17

    loss = leave(mass + local + rest + lambda_pair * aligned, valid)
    return AlraTerms(loss, mass, local, rest, aligned, d_u, support, tokens)


@torch.no_grad()
def _anchored(tokens, z_t, y, anchor) -> Tensor:
    """The candidate set (Eq. 5): a missing anchor replaces the lowest-ranked proposal that is not an anchor itself.

    tokens  [N, k]  the student's proposals, best first
    ->      [N, k]  as many distinct tokens
    """
    top_1 = vocab.top(z_t, 1)[:, 0]  # a_u
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

    In fp64, which costs nothing at this size: the budget is then the same integer at any precision of the logits.
    """
    log_rho = (in_t.double() / tau).log_softmax(-1)
    return (-(log_rho.exp() * log_rho).sum(-1)).exp()


def cross_entropy(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> Tensor:
    """Causal language modelling (second term of Eq. 23): -ln q_s[y], q_s = softmax(z_s). No teacher."""
    z_s, _, y, valid = enter(z_s, None, y)
    return leave(-vocab.log_p(z_s, y[:, None], 1.0, valid)[:, 0], valid)


def vanilla_kd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 0.5, t2_scaling: bool = False, standardize: bool = False
) -> Tensor:
    """KL(P_t || P_s) over the full vocabulary (Eq. 3), P = softmax(z / tau) on both sides (Eq. 2).

    t2_scaling   times tau^2, as in NVIDIA Model-Optimizer. The paper leaves it open; its Eq. 3 has no such factor
    standardize  P is of (z - mean) / (std + 1e-7), each row by its own (Sun et al. 2024; std with V - 1). Blind to the
                 scale of the student's logits: without the causal term its probabilities are undetermined

    MiniPLM's code trains the cross-entropy form. That differs by the teacher's entropy and has the same gradient.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y, guard=standardize)
    z_s, z_t = (_standardized(z_s), _standardized(z_t)) if standardize else (z_s, z_t)
    return leave(vocab.forward_kl(z_s, z_t, tau, valid) * (tau**2 if t2_scaling else 1.0), valid)


def _standardized(z) -> Tensor:
    """Each row with mean 0 and standard deviation 1; a constant row becomes 0, as if its deviation were 1  # [N, V]"""
    z = z - z.mean(-1, keepdim=True)
    variance = z.square().sum(-1, keepdim=True) / (z.shape[1] - 1)
    return z / (torch.where(variance > 0, variance, 1.0).sqrt() + 1e-7)


def pd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 0.5, top_p: PositiveFraction = 0.95, top_k: int = 50,
    truncate_on: Literal["tempered", "raw"] = "tempered", temper_student: bool = False,
) -> Tensor:  # fmt: skip
    """Pre-training distillation (Peng et al. 2025): KL(F(P_t) || P_s), F the truncated, tempered, renormalised teacher.

        kept = the shortest run of largest teacher probabilities with mass >= top_p, then its first top_k
        F    = softmax over kept of z_t / tau,     loss[u] = sum_{i in kept} F_i (ln F_i - ln p_s,i)

    truncate_on     the probabilities that top_p counts: "tempered" softmax(z_t / tau), as the ALRA paper words it;
                    "raw" softmax(z_t), as in PD's own paper. The two sets differ widely
    temper_student  temper the student too. By default it stays at 1, as in PD: the optimum is the sharpened teacher

    There is no public code. Choices made here: the token that crosses top_p is kept; the student is normalised over
    the full vocabulary, which pushes down the tokens that are not kept; no tau^2. PD's schedule of the weight: `w_kd_schedule`.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    require(1 <= top_k <= z_s.shape[1], f"top_k={top_k}: expected 1 to V")
    tokens = vocab.top(z_t, top_k)  # [N, top_k] largest first
    tau_p = tau if truncate_on == "tempered" else 1.0
    p_t = vocab.log_p(z_t, tokens, tau_p, valid).double().exp()
    kept = p_t.cumsum(-1) - p_t < top_p if top_p < 1 else torch.ones_like(tokens, dtype=torch.bool)
    x_t = (z_t.gather(1, tokens) / tau).masked_fill(~kept, -math.inf)
    f = x_t.softmax(-1)  # [N, top_k], 0 where not kept
    ln_f = torch.where(kept, x_t - x_t.logsumexp(-1, keepdim=True), 0.0)
    logp_s = vocab.log_p(z_s, tokens, tau if temper_student else 1.0, valid)
    return leave((f * (ln_f - logp_s)).sum(-1), valid)


def atkd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0, easy_weight: UnitInterval = 0.5) -> Tensor:
    """ATKD (Zhong et al. 2024): hard positions learn target and non-targets, easy ones the non-targets alone.

        TKD_u = KL of the pair (p_y, 1 - p_y);  DKD_u = KL of the softmaxes over V without y; both teacher to student
        loss  = easy_weight mean_easy DKD + (1 - easy_weight) (mean_hard TKD + mean_hard DKD)

    Hard: UNC_u = 1 - p_t,y is at least the lower median of the batch. Easy: it is below. Each mean runs over its own
    half, so a position's number carries the factor n_valid / n_half. An empty half counts 0 (the authors' code stops).
    UNC is compared as log-odds: the order is the same, and values that 1 - p rounds together stay apart. No tau^2.
    Authors: tau = 1, easy_weight = 0.2; the ALRA paper: easy_weight = 0.5.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    odds_s, odds_t, dkd_u = _target_split(z_s, z_t, y, tau, valid)
    tkd_u = binary_kl(odds_t, odds_s)
    unc = -odds_t
    easy = valid & (unc < vocab.lower_median(unc, valid))
    hard = valid & ~easy
    n, n_easy, n_hard = (half.sum().clamp(min=1).to(z_s.dtype) for half in (valid, easy, hard))
    loss = torch.where(easy, easy_weight * n / n_easy * dkd_u, (1 - easy_weight) * n / n_hard * (tkd_u + dkd_u))
    return leave(loss, valid)


def _target_split(z_s, z_t, y, tau, valid) -> tuple[Tensor, Tensor, Tensor]:
    """-> log-odds of the label, student's and teacher's, and the KL over all other tokens; [N] each."""
    split = vocab.split(z_s, z_t, y[:, None], tau, valid)
    return split.in_s[:, 0] / tau - split.rest_s, split.in_t[:, 0] / tau - split.rest_t, split.rest_kl


def rld(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0, tau_conf: Positive = 1.0, alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
) -> Tensor:  # fmt: skip
    """RLD (Sun et al. 2025): the teacher's confidence goes to the label, its ranking below the label to the rest.

        SCD_u = KL of the pairs (m, 1 - m) || (s, 1 - s), m = max_i p_t,i and s = p_s,y at tau_conf
        MCD_u = KL(softmax_A(z_t / tau) || softmax_A(z_s / tau)), A = {i : z_t,i < z_t,y}; 0 where A is empty
        loss  = alpha tau_conf^2 SCD_u + beta tau^2 MCD_u

    A is strict and uses raw teacher logits: the label, tokens above it and tokens equal to it leave both distributions.
    The ALRA paper leaves alpha, beta and tau_conf open: all 1 here (authors: 1, 0.5 to 8, 1). No warm-up.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    _, odds_m, _ = _target_split(z_s, z_t, vocab.top(z_t, 1)[:, 0], tau_conf, valid)
    odds_s, _, _ = _target_split(z_s, z_t, y, tau_conf, valid)
    scd_u = binary_kl(odds_m, odds_s)
    mcd_u = vocab.forward_kl(z_s, z_t, tau, valid, below=z_t.gather(1, y[:, None]))
    return leave(alpha * tau_conf**2 * scd_u + beta * tau**2 * mcd_u, valid)


def ldrld(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0, d: int = 15, alpha: NonNegative = 1.0, beta: NonNegative = 1.0,
    pair_reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:  # fmt: skip
    """LDRLD (Xu et al. 2025): the student's top d in weighted pairs and as one distribution, and the rest. No label.

        pairs_u = sum_{r<q} ADW(r, q) KL of the two-way softmaxes,  ADW = 2 / (1.5 + q - r) * exp(-0.05 (r + q))
        LLKI_u  = KL(softmax_I(z_t / tau) || softmax_I(z_s / tau)),  I the student's top d, ranks r, q = 1 .. d
        loss    = tau^2 (alpha (pairs_u + LLKI_u) / n + beta KL(softmax_R(z_t / tau) || softmax_R(z_s / tau)))

    pair_reduction  "mean": n = d (d - 1) / 2 + 1, as the authors' code; "sum": n = 1, as their equation

    The ALRA paper leaves alpha and beta open: both 1 here (authors' example: 10.5 and 7 at d = 7, tau = 4).
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    require(2 <= d < z_s.shape[1], f"d={d}: expected 2 <= d < V={z_s.shape[1]}")
    split = vocab.split(z_s, z_t, vocab.top(z_s, d), tau, valid)
    x_s, x_t = split.in_s / tau, split.in_t / tau  # [N, d] in the student's order
    rank = torch.arange(1, d + 1, device=z_s.device, dtype=z_s.dtype)
    adw = 2 / (1.5 + rank[None, :] - rank[:, None]).abs() * (-0.05 * (rank[:, None] + rank[None, :])).exp()
    adw = torch.where(upper(d, z_s.device), adw, 0.0)
    pairs_u = (adw * binary_kl(differences(x_t), differences(x_s))).sum((1, 2))
    llki_u = kl(x_t, x_s) * (adw[0, 1] if d == 2 else 1.0)  # the authors' code treats a set of two as a pair
    n = d * (d - 1) // 2 + 1 if pair_reduction == "mean" else 1
    return leave(tau**2 * (alpha * (pairs_u + llki_u) / n + beta * split.rest_kl), valid)


def tad(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0, top_k: int = 10, beta: NonNegative = 2.0, norm: Literal["sequence", "unit", "none"] = "sequence",
    n_sequences: int = 1,
) -> Tensor:  # fmt: skip
    """TAD (Dasgupta et al. 2026): the KL over head tokens and tail mass, and the weighted KL within the tail.

        D1 = KL over K + 1 categories: the teacher's top K = top_k tokens, and all the others as one
        D2 = KL(softmax_tail(z_t / tau) || softmax_tail(z_s / tau))
        loss[u] = D1 + beta w_u D2,   KL(P_t || P_s) = D1 + alpha_t D2,   alpha_t the teacher's tail mass

    norm         "sequence": w_u = alpha_t / its mean over the sequence, a constant (TAD's Eq. 3, and the ALRA paper's
                 text); "unit": w_u = 1; "none": w_u = alpha_t, which at beta = 1 gives the plain KL
    n_sequences  sequences of equal length in this forward batch, one after another (set by the caller, not a setting)

    There is no public code. The tail bucket in D1 follows from TAD's gradient. Masses stay in the log domain: no floor.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    N, V = z_s.shape
    require(1 <= top_k < V, f"top_k={top_k}: expected 1 <= top_k < V={V}")
    require(n_sequences >= 1 and N % n_sequences == 0, f"n_sequences={n_sequences}: expected a divisor of N={N}")
    split = vocab.split(z_s, z_t, vocab.top(z_t, top_k), tau, valid)
    x_s = torch.cat([split.in_s / tau, split.rest_s[:, None]], 1)  # [N, K + 1]
    x_t = torch.cat([split.in_t / tau, split.rest_t[:, None]], 1)
    ln_w = x_t.log_softmax(-1)[:, -1]  # ln alpha_t
    if norm == "sequence":
        ln_each, of_each = ln_w.view(n_sequences, -1), valid.view(n_sequences, -1)  # [sequences, positions]
        n_each = of_each.sum(-1, keepdim=True).to(ln_w.dtype)
        ln_w = (ln_each - lse(ln_each, of_each)[:, None] + n_each.log()).flatten()
    w = 1.0 if norm == "unit" else ln_w.exp()
    return leave(kl(x_t, x_s) + beta * w * split.rest_kl, valid)


def bild(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 3.0, top_k: int = 8) -> Tensor:
    """BiLD (Li et al. 2025): t-LD + s-LD, on the teacher's and on the student's top k tokens.

        D_ab = (z_a - z_b) / tau for a < b in the leader's order;  LD = KL(softmax(D^T) || softmax(D^S)) over pairs

    One distribution over all k (k - 1) / 2 differences; teacher to student for both leaders. No tau^2. k = 2 gives a
    single pair and nothing to learn, so k >= 3. The loss is blind to tokens outside both sets. The authors' KL on
    prompt tokens has no counterpart in pre-training.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y, guard=True)
    require(3 <= top_k <= z_s.shape[1], f"top_k={top_k}: expected 3 to V")
    once, loss = upper(top_k, z_s.device).flatten(), 0.0
    for leader in (z_t, z_s):  # t-LD, s-LD
        tokens = vocab.top(leader, top_k)
        d_t, d_s = (differences(z.gather(1, tokens) / tau).flatten(1) for z in (z_t, z_s))  # [N, k * k]
        loss = loss + kl(d_t, d_s, once)
    return leave(loss, valid)


class Method(NamedTuple):
    fn: Callable  # the objective
    hyper: dict  # its settings, where they differ from its defaults
    w_kd: float  # weight of the objective
    w_ce: float  # weight of the causal language-modelling term
    moving: tuple[str, ...] = ()  # settings x that go to x_end over the run, in a straight line

    @property
    def has_teacher(self) -> bool:
        return self.fn is not cross_entropy


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
}  # fmt: skip


def needs_teacher(name: str) -> bool:
    """Whether the method reads teacher logits."""
    return resolve(name).has_teacher


def settings(name: str) -> dict[str, object]:
    """The settings that `resolve(name)` may override, with their kinds: those of the objective, `w_kd` and `w_ce`."""
    fn = resolve(name).fn
    kinds = typing.get_type_hints(getattr(fn, "func", fn), include_extras=True)
    keys = default_settings(fn).keys() - {"n_sequences", "generator"}  # which the caller sets
    return {"w_kd": NonNegative, "w_ce": NonNegative, **{key: kinds[key] for key in keys}}


def default_settings(fn: Callable) -> dict[str, object]:
    """The settings of an objective, its keywords, with their defaults; `fn` may be a `functools.partial`."""
    return {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}


def resolve(name: str, **overrides) -> Method:
    """The row of `METHODS` of METHOD or METHOD@LABEL, with overrides, whose names and values are checked."""
    name = name.partition("@")[0]
    if name not in METHODS:
        near = {"kd": "vanilla_kd", "kl": "vanilla_kd", "ce": "pretrain"}.get(name) or nearest(name, METHODS)
        hint = f", did you mean {near!r}?" if near else "."
        raise UserError(f"no such method {name!r}{hint} Known methods: {', '.join(METHODS)}")
    method, known = METHODS[name], settings(name) if overrides else {}
    for key, value in overrides.items():
        require(key in known, f"{name} takes no {key}; it takes {', '.join(sorted(known))}")
        overrides[key] = checked(f"{name}.{key}", value, known[key])
    weights = {key: overrides.pop(key) for key in ("w_kd", "w_ce") if key in overrides}
    return method._replace(hyper={**method.hyper, **overrides}, **weights)


def method_lines() -> list[str]:
    """For `--help`: each objective with its settings, and the methods that use it."""
    lines = ["methods; --METHOD.SETTING=VALUE sets a setting of its objective, or w_kd, w_ce, lr"]
    for fn in dict.fromkeys(method.fn for method in METHODS.values()):
        defaults = (f"{key}={value}" for key, value in default_settings(fn).items())
        lines.append(f"    {getattr(fn, 'func', fn).__name__}: {', '.join(defaults)}")
        rows = {name: row for name, row in METHODS.items() if row.fn is fn}
        lines += [f"        {name}: w_kd={row.w_kd}, w_ce={row.w_ce} {row.hyper or ''}" for name, row in rows.items()]
    return lines


def scheduled_settings(method: Method, step: int, n_steps: int, w_kd_schedule: str = "constant") -> dict[str, float]:
    """The settings that change during a run, in update `step` of `n_steps`: those that the method's row calls moving.

    With PD's schedule the distillation weight rises over the first 10 % of the steps and falls in the last 1 %.
    """
    x = default_settings(method.fn) | method.hyper
    scheduled = {key: x[key] + (x[f"{key}_end"] - x[key]) * step / n_steps for key in method.moving}
    if w_kd_schedule == "wsd" and method.has_teacher:
        scheduled["w_kd"] = method.w_kd * min(1.0, step / (0.1 * n_steps), (n_steps - step) / (0.01 * n_steps))
    return scheduled


def method_loss(name: str, z_s, z_t, y, n_sequences: int = 1, **settings) -> tuple[Tensor, dict[str, Tensor]]:
    """A method in a training loop of your own -> its mean loss, differentiable in z_s, and detached means of its terms.

    n_sequences  sequences of equal length in the batch, one after another; read by TAD
    settings     of the objective, and its weights w_kd and w_ce, where they differ from `METHODS`
    """
    loss, sums = _mean_loss(_with_sequences(resolve(name, **settings), n_sequences), z_s, z_t, y)
    n_valid = sums.pop("n_valid").clamp(min=1)
    return loss, {key: value / n_valid for key, value in sums.items()}


def make_loss_fn(name: str, n_sequences: int = 1, compile: bool = False, **settings) -> Callable:
    """What `head_losses` calls: f(dtype of the gradient or None, z_s, z_t, y, scheduled=None) -> mean loss, sums of its terms, gradient.

    compile  run it under torch.compile, once per method, settings and shape. z_s is overwritten by its gradient if the dtypes match.
    """
    method = _with_sequences(resolve(name, **settings), n_sequences)
    if compile:
        return _compiled(method.fn, tuple(method.hyper.items()), method.w_kd, method.w_ce)
    return functools.partial(_evaluate, method)


def _with_sequences(method: Method, n_sequences: int) -> Method:
    own = {"n_sequences": n_sequences} if "n_sequences" in default_settings(method.fn) else {}
    return method._replace(hyper=method.hyper | own)


@functools.cache
def _compiled(fn: Callable, hyper: tuple, w_kd: float, w_ce: float) -> Callable:
    from lib.graph import Rewrite  # half a second, and only compiled runs need it

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, 256)  # counted per code object, which all methods share
    one = functools.partial(_evaluate, Method(fn, dict(hyper), w_kd, w_ce))
    passes = {"post_grad_custom_pre_pass": Rewrite()}
    return torch.compile(lambda *z, scheduled=None: one(*z, scheduled), dynamic=False, fullgraph=True, options=passes)


def _evaluate(method: Method, gradient, z_s, z_t, y, scheduled=None) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """`_mean_loss`, and the gradient of its loss in z_s if a dtype for it is given.

    scheduled  settings as tensors [], or a generator, that replace the method's; with w_kd, w_ce is 1 - w_kd
    """
    if scheduled:
        weights = {"w_kd": scheduled["w_kd"], "w_ce": 1.0 - scheduled["w_kd"]} if "w_kd" in scheduled else {}
        moved = {key: value for key, value in scheduled.items() if key != "w_kd"}
        method = method._replace(hyper={**method.hyper, **moved}, **weights)
    if not gradient:
        with torch.no_grad():
            return *_mean_loss(method, z_s, z_t, y), None
    if torch.compiler.is_compiling():  # one graph for both directions: nothing of [N, V] is kept between them
        dz, (loss, sums) = torch.func.grad_and_value(lambda z: _mean_loss(method, z, z_t, y), has_aux=True)(z_s)
        return loss, sums, z_s.copy_(dz) if gradient == z_s.dtype else dz.to(gradient)
    with torch.enable_grad():
        loss, sums = _mean_loss(method, z_s.requires_grad_(), z_t, y)
    dz = torch.autograd.grad(loss, z_s)[0] if loss.requires_grad else torch.zeros_like(z_s)
    return loss.detach(), sums, dz.to(gradient)


def _mean_loss(method: Method, z_s, z_t, y) -> tuple[Tensor, dict[str, Tensor]]:
    """w_kd * kd + w_ce * ce (Eq. 23) -> its mean over one forward batch, and detached sums of its terms with n_valid.

    The terms are `loss`, `kd` (with a teacher), `ce`, and the objective's parts. A term of weight 0 costs no gradient.
    """
    fn, grad, valid = method.fn, torch.is_grad_enabled(), y != IGNORE
    weigh_ce, weigh_kd = (isinstance(w, Tensor) or w > 0 for w in (method.w_ce, method.w_kd))  # a tensor moves
    with torch.set_grad_enabled(grad and weigh_ce):
        ce = cross_entropy(z_s, None, y)  # [N]
    loss, terms = method.w_ce * ce if weigh_ce else torch.zeros_like(ce), {"ce": ce}
    if method.has_teacher:
        require(z_t is not None, f"z_t: {getattr(fn, 'func', fn).__name__} needs teacher logits, got None")
        with torch.set_grad_enabled(grad and weigh_kd):
            kd = fn(z_s, z_t, y, **method.hyper)
        parts = kd._asdict() if isinstance(kd, tuple) else {"loss": kd}
        kd = parts.pop("loss")  # [N]
        loss = loss + method.w_kd * kd if weigh_kd else loss
        terms = {"kd": kd, "ce": ce, **{key: value for key, value in parts.items() if value.shape == y.shape}}
    sums = {key: leave(value.detach(), valid).sum() for key, value in {"loss": loss, **terms}.items()}
    return loss.sum() / valid.sum().clamp(min=1), {**sums, "n_valid": valid.sum()}


def check_settings(name: str, V: int, w_kd_schedule: str = "constant", compile: bool = False, **overrides) -> None:
    """Try the method on three positions, the second one ignored. `UserError` if a setting is wrong at a vocabulary of V,
    or if the objective does not keep the contract at the head of this file.
    """
    method = resolve(name, **overrides)
    fn, hyper, w_kd, w_ce = method[:4]
    is_random = "generator" in default_settings(fn)
    try:
        require(w_ce or (w_kd and method.has_teacher), f"w_kd={w_kd}, w_ce={w_ce}: nothing is learnt; set one of them")
        require(w_kd <= 1 or w_kd_schedule != "wsd", f"w_kd={w_kd}: w_kd_schedule='wsd' takes <= 1: w_ce=1-w_kd")
        require(not (compile and is_random), "it draws from a `generator`, so set --compile=False")
        if method.has_teacher:
            hyper = {**hyper, **scheduled_settings(method, 0, 1)}
            _check_contract(lambda *z, **given: fn(*z, **hyper, **given), is_random, V)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, UserError) else f" ({type(error).__name__} in {at.filename}, line {at.lineno})"
        raise UserError(f"{name}: {first_line(error)}{where}") from error


def _check_contract(fn: Callable, is_random: bool, V: int) -> None:
    z, y = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0)), torch.tensor([0, IGNORE, V - 1])
    state = torch.get_rng_state()

    def call(z: Tensor) -> Tensor:
        """The loss and its gradient, side by side  # [2, N, V] -> [N, 1 + V]"""
        z_s, z_t, labels = *z.clone(), y.clone()
        result = fn(z_s.requires_grad_(), z_t, labels, **({"generator": torch.Generator()} if is_random else {}))
        parts = result._asdict() if isinstance(result, tuple) else {"loss": result}
        masked = getattr(parts["loss"], "shape", None) == y.shape and parts["loss"][1] == 0
        require(masked, "expected one number per position, 0 where ignored: end with `return leave(.., valid)`")
        for part, x in parts.items():
            got = tuple(x.shape) if isinstance(x, Tensor) else [x]
            require(got[:1] == y.shape, f"part {part}: expected a tensor [N], or [N, ..] that is not logged; got {got}")
        for key, x, before in (("z_s", z_s, z[0]), ("z_t", z_t, z[1]), ("y", labels, y)):
            require(torch.equal(x, before), f"{key} is changed in place; other students read it too: make a copy")
        (gradient,) = torch.autograd.grad(parts["loss"].sum(), z_s)
        require(not gradient[1].any(), "ignored positions have a gradient; use `valid_mean`, and `guard=True`")
        require(torch.get_default_dtype() == z.dtype, "torch's default dtype is changed; name a dtype instead")
        return torch.cat([parts["loss"][:, None], gradient], 1).detach()

    first, wild = call(z), call(z * torch.tensor([1.0, 1e3, 1.0])[:, None])
    again = first if torch.equal(first, wild) else call(z)
    require(first.isfinite().all(), "its loss or gradient is not finite at ordinary logits")
    same = torch.equal(first, again) and torch.equal(torch.get_rng_state(), state)
    require(same, "equal calls differ; keep no state, draw from a keyword `generator: torch.Generator | None = None`")
    require(torch.equal(first, wild), "ignored logits change other positions; leave them out of means (`valid_mean`)")


def reverse_kl(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0) -> Tensor:
    """KL(P_s || P_t), mode-seeking: MiniLLM's term at a single step (Gu et al. 2024). No tau^2.

    Concrete score distillation (CSD) with the student's weights has this gradient at temperature 1, so it has no row.
    """

    def terms(ln_q, ln_p):
        x = ln_q.exp() * (ln_q - ln_p)
        return x, x  # the slope but for q, which has no effect

    return _sum_of(terms, z_s, z_t, y, tau)


def jsd(z_s: Tensor, z_t: Tensor, y: Tensor, *, beta: UnitInterval = 0.5, tau: Positive = 1.0) -> Tensor:
    """Generalised Jensen-Shannon divergence in TRL's convention (GKD, Agarwal et al. 2024). No tau^2.

        m = (1 - beta) p_s + beta p_t,    loss[u] = beta KL(P_t || m) + (1 - beta) KL(P_s || m)

    beta = 0 is KL(P_t || P_s) and beta = 1 is KL(P_s || P_t), not the limits of the formula, which are 0.
    """
    if beta in (0, 1):
        return (vanilla_kd if beta == 0 else reverse_kl)(z_s, z_t, y, tau=tau)
    ln_odds = math.log(beta) - math.log1p(-beta)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)

    def terms(ln_q, ln_p):
        x = ln_p - ln_q + ln_odds  # ln of beta p over (1 - beta) q
        of_q = -(1 - beta) * F.softplus(x) * ln_q.exp()
        return (entropy - beta * F.softplus(-x)) * ln_p.exp() + of_q, of_q

    return _sum_of(terms, z_s, z_t, y, tau)


def tvd(z_s: Tensor, z_t: Tensor, y: Tensor) -> Tensor:
    """Total variation distance, 0.5 sum_i |p_s - p_t|, in 0 .. 1 (f-DISTILL, Wen et al. 2023).

    Summed over the tokens where the teacher has more. The value is the same, and the gradient of a small overlap stays
    exact in fp32.
    """

    def terms(ln_q, ln_p):
        p, q = ln_p.exp(), ln_q.exp()
        return (p - q).relu(), torch.where(p > q, -q, 0.0)

    return _sum_of(terms, z_s, z_t, y)


def dkd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 4.0, alpha: NonNegative = 1.0, beta: NonNegative = 8.0
) -> Tensor:
    """DKD (Zhao et al. 2022): tau^2 (alpha TCKD + beta NCKD), KL of the target's pair and of the non-targets.

    At tau = alpha = 1 with NCKD weighted by the teacher's 1 - p_y instead of beta, this is the plain KL.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    odds_s, odds_t, nckd = _target_split(z_s, z_t, y, tau, valid)
    return leave(tau**2 * (alpha * binary_kl(odds_t, odds_s) + beta * nckd), valid)


def mse_logits(z_s: Tensor, z_t: Tensor, y: Tensor, *, center: bool = False) -> Tensor:
    """Mean over V of (z_s - z_t)^2 (Kim et al. 2021), in squared logits, not nats.

    center  subtract each row's mean first. Otherwise the loss depends on the logits' common shift; softmax does not.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y, guard=True)
    gap = z_s - z_t
    gap = gap - gap.mean(-1, keepdim=True) if center else gap
    return leave(gap.square().mean(-1), valid)


def adakd(
    z_s: Tensor, z_t: Tensor, y: Tensor, *, keep: PositiveFraction = 0.5, c: NonNegative = 0.5, rule: Literal["hellinger", "reverse_kl"] = "hellinger",
    base: Literal["reverse", "forward"] = "reverse", detach_temperature: bool = False,
) -> Tensor:  # fmt: skip
    """AdaKD (code: SassyRong/AdaKD): only the hardest positions, each at its own temperature.

        s_u = ||sqrt p_s - sqrt p_t|| / sqrt 2,   hardest: the max(1, floor(keep n_valid)) largest s_u
        T_u = exp(-c tanh(ln(s_u / lower median of s over the hardest)))
        loss = mean over the hardest of T_u^2 base(z_s / T_u, z_t / T_u), so each carries n_valid / n_hardest

    rule  difficulty s_u: "hellinger", or "reverse_kl" KL(P_s || P_t);  base: "reverse" KL(P_s || P_t) or "forward"
    detach_temperature  False as in the authors' code, whose gradient runs through T_u

    Where the median is 0, as at equality, s_u is divided by 1 (the authors' 0 / 0 is NaN). Their schedule of `keep`
    over training is left out. c = 0 means temperature 1.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y, guard=True)
    logp_s, logp_t = _log_softmax(z_s), _log_softmax(z_t)
    if rule == "hellinger":
        s = torch.linalg.vector_norm((logp_s / 2).exp() - (logp_t / 2).exp(), dim=-1) / math.sqrt(2)
    else:
        s = (logp_s.exp() * (logp_s - logp_t)).sum(-1)
    n_hardest = (keep * valid.sum().double()).floor().clamp(min=1)
    hardest = valid & (vocab.rising_rank(-s.detach(), valid) < n_hardest)
    median = vocab.lower_median(s, hardest)
    median = torch.where(median > 0, median, 1.0)
    # Masked twice: other positions must reach neither the value nor the gradient of the median.
    ratio = torch.where(hardest, torch.where(hardest, s, 1.0) / median, 1.0)
    T = (-c * torch.tanh(ratio.clamp(min=1e-8).log())).exp()  # the authors' floor: at 1e-8 tanh is -1 in fp64
    T = (T.detach() if detach_temperature else T)[:, None]
    a, b = _log_softmax(logp_s / T), _log_softmax(logp_t / T)
    a, b = (a, b) if base == "reverse" else (b, a)
    loss = T[:, 0] ** 2 * (a.exp() * (a - b)).sum(-1)
    return leave(loss * valid.sum() / n_hardest.to(loss.dtype), hardest)


def sekd(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 2.0, keep: PositiveFraction = 0.2) -> Tensor:
    """SE-KD (code: almogtavor/SE-KD3x): tau^2 KL(P_t || P_s) on the positions where the student is least sure.

    It keeps the ceil(keep n_valid) positions of the forward batch with the largest student entropy at temperature 1.
    The mean runs over these, so each carries n_valid / n_kept. It keeps none where n_valid < 3, unless keep = 1.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    n_valid = valid.sum()
    n_kept = (keep * n_valid.double()).ceil() * ((n_valid >= 3) | (keep == 1))
    uniform = torch.zeros_like(z_s[:1, :1]).expand_as(z_s)
    certainty = vocab.forward_kl(uniform, z_s.detach(), 1.0, valid)  # ln V less the entropy
    kept = valid & (vocab.rising_rank(certainty, valid) < n_kept)
    loss = tau**2 * vocab.forward_kl(z_s, z_t, tau, valid) * (n_valid / n_kept.clamp(min=1)).to(z_s.dtype)
    return leave(loss, kept)


def bdl(z_s: Tensor, z_t: Tensor, y: Tensor, *, lam: UnitInterval = 0.9) -> Tensor:
    """DA-KD's bidirectional discrepancy (He et al. 2025, Eq. 4): KL between two mixtures of teacher and student.

        loss[u] = KL((1 - lam) p_t + lam p_s || lam p_t + (1 - lam) p_s)

    The gradient runs through both. lam = 0 is KL(P_t || P_s), 1 is KL(P_s || P_t), 0.5 is 0. No public code.
    """
    if lam in (0, 1):
        return (vanilla_kd if lam == 0 else reverse_kl)(z_s, z_t, y, tau=1.0)
    bias = math.log(lam) - math.log1p(-lam)

    def terms(ln_q, ln_p):
        gap, p, q = ln_p - ln_q, ln_p.exp(), ln_q.exp()
        # ln(a / b) is odd in the gap and tends to +-bias. Measured from the limit of its own side, nothing cancels. The
        # limit of the student's side, bias, is left out and added back as bias * sum_i p_i = bias.
        side = 2 * (gap >= 0).to(gap.dtype) - 1
        rise = F.softplus(-side * gap - bias) - F.softplus(-side * gap + bias)
        x = side * rise + (1 + side) * bias  # bias - ln(a / b)
        return bias * p - ((1 - lam) * p + lam * q) * x, -lam * q * (x + torch.expm1(-x))

    return _sum_of(terms, z_s, z_t, y)


def skew_fkl(z_s: Tensor, z_t: Tensor, y: Tensor, *, lam: Below1 = 0.1) -> Tensor:
    """Skew forward KL (DistiLLM, Ko et al. 2024): KL(P_t || lam P_t + (1 - lam) P_s), at most -ln lam.

    lam = 0 is KL(P_t || P_s). The gradient runs through the mixture. The authors' code leaves out the teacher's
    entropy, which is constant.
    """
    if lam == 0:
        return vanilla_kd(z_s, z_t, y, tau=1.0)
    ln_odds = math.log1p(-lam) - math.log(lam)

    def terms(ln_q, ln_p):
        x, p = ln_q - ln_p + ln_odds, ln_p.exp()
        return -p * F.softplus(x), -p * x.sigmoid()

    return _sum_of(terms, z_s, z_t, y, plus=-math.log(lam))


def skew_rkl(z_s: Tensor, z_t: Tensor, y: Tensor, *, lam: Below1 = 0.1) -> Tensor:
    """Skew reverse KL (DistiLLM, Ko et al. 2024): KL(P_s || lam P_s + (1 - lam) P_t), at most -ln lam.

    lam = 0 is KL(P_s || P_t). The gradient runs through the mixture too; some copies of the code detach it there.
    """
    if lam == 0:
        return reverse_kl(z_s, z_t, y)
    ln_odds = math.log1p(-lam) - math.log(lam)

    def terms(ln_q, ln_p):
        x, q = ln_p - ln_q + ln_odds, ln_q.exp()
        return -q * F.softplus(x), q * (x.sigmoid() - F.softplus(x))

    return _sum_of(terms, z_s, z_t, y, plus=-math.log(lam))


def abkd(z_s: Tensor, z_t: Tensor, y: Tensor, *, alpha: float = 0.2, beta: float = 0.7) -> Tensor:
    """Alpha-beta divergence (ABKD, Wang et al. 2025), p the teacher and q the student, s = alpha + beta:

        loss[u] = -1 / (alpha beta) sum_i [p_i^alpha q_i^beta - (alpha / s) p_i^s - (beta / s) q_i^s]

    Where alpha, beta or s is 0 it is the limit; the authors' code is off by the other exponent there, unless that is 1.
    (1, 0) is KL(P_t || P_s), (0, 1) is KL(P_s || P_t). The derivative by ln q is q^beta (q^alpha - p^alpha) / alpha.
    Each summand is >= 0 and taken from the larger of p and q: p^s (E_s(d) - E_beta(d)) / alpha with
    E_k(d) = (e^(k d) - 1) / k, d = ln q - ln p <= 0, or with the roles swapped.
    """
    s = alpha + beta

    def terms(ln_q, ln_p):
        d, q_s = ln_q - ln_p, (s * ln_q).exp()
        value = (s * ln_p).exp() * _chord(s, beta, d.clamp(max=0)) + q_s * _chord(s, alpha, -d.clamp(min=0))
        return value, (q_s - (alpha * ln_p + beta * ln_q).exp()) / alpha if alpha else q_s * d

    return _sum_of(terms, z_s, z_t, y)


def _chord(a, b, d) -> Tensor:
    """(E_a(d) - E_b(d)) / (a - b) with E_k(d) = (e^(k d) - 1) / k, or its limit; any shape."""
    if a == b == 0:
        return d.square() / 2
    e_a, e_b = (torch.expm1(k * d) / k if k else d for k in (a, b))
    return (e_a - e_b) / (a - b) if a != b else (d * (a * d).exp() - e_a) / a


def akl(z_s: Tensor, z_t: Tensor, y: Tensor, *, mu: PositiveFraction = 0.5) -> Tensor:
    """AKL (Wu et al. 2024): forward and reverse KL, weighted by where the student's error stands.

        head    = the teacher's top-1, and each token i with sum_{j : p_j >= p_i} p_j <= mu, so not the crossing token
        loss[u] = h KL(P_t || P_s) + (1 - h) KL(P_s || P_t),   h = sum_head |p - q| / sum_i |p_i - q_i|, a constant

    At equality, where h is 0 / 0, it is 1/2. Equal probabilities enter the head together. The released code lacks a
    parameter and its return.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)

    def terms(ln_q, ln_p, h):
        q, p, d = ln_q.exp(), ln_p.exp(), ln_q - ln_p
        return ((1 - h) * q - h * p) * d, (1 - h) * q * (1 + d) - h * p

    return leave(vocab.pointwise(terms, z_s, z_t, 1.0, valid, _head_share(z_s, z_t, mu)), valid)


@torch.no_grad()
def _head_share(z_s, z_t, mu) -> Tensor:
    """AKL's h. The head's border is found by bisection: a sort of the vocabulary takes longer  # [N, 1]"""
    ln_p = _log_softmax(z_t)
    p = ln_p.exp()
    low = torch.full_like(ln_p[:, :1], math.log1p(-mu) - math.log(p.shape[1]))  # the tokens below it have < 1 - mu
    border = torch.zeros_like(low)
    for _ in range(4 - round(math.log2(torch.finfo(p.dtype).eps))):  # to the last bit of ln p
        middle = (low + border) / 2
        over = torch.where(ln_p >= middle, p, 0.0).sum(-1, keepdim=True) > mu
        low, border = torch.where(over, middle, low), torch.where(over, border, middle)
    error = (p - _log_softmax(z_s).exp()).abs()
    head = torch.where((ln_p >= border) | (z_t == z_t.amax(-1, keepdim=True)), error, 0.0).sum(-1, keepdim=True)
    total = error.sum(-1, keepdim=True)
    return torch.where(total > 0, head / total, 0.5)


def todi(z_s: Tensor, z_t: Tensor, y: Tensor, *, tau: Positive = 1.0) -> Tensor:
    """ToDi (Jung et al. 2025): forward or reverse KL token by token, whichever has the larger probability. No tau^2.

        loss[u] = sum_i [w_i p_i ln(p_i / q_i) + (1 - w_i) q_i ln(q_i / p_i)],   w_i = p_i / (p_i + q_i), a constant

    The value is KL(P_t || P_s) + KL(P_s || P_t); only the gradient differs from that sum's.
    """

    def terms(ln_q, ln_p):
        d = ln_q - ln_p
        forward, reverse = (-d).sigmoid() * ln_p.exp(), d.sigmoid() * ln_q.exp()  # w p, (1 - w) q
        return (reverse - forward) * d, reverse * (1 + d) - forward

    return _sum_of(terms, z_s, z_t, y, tau)


def taid(z_s: Tensor, z_t: Tensor, y: Tensor, *, t: UnitInterval = 0.4, t_end: UnitInterval = 1.0) -> Tensor:
    """TAID (Shing et al. 2025): KL(r || P_s), r = softmax((1 - t) z_s + t z_t) a constant target between both models.

    t      share of the teacher: a number, or a tensor [] that is not checked. 1 is KL(P_t || P_s); at 0 nothing is learnt
    t_end  training takes t there over the run in a straight line (`scheduled_settings`); not used here

    The authors' code returns the cross-entropy with r, whose entropy moves with the student. Left out: its adaptive
    step of t, which is smaller than the straight line's in runs of up to some 4,000 updates.
    """
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    return leave(vocab.forward_kl(z_s, (1 - t) * z_s.detach() + t * z_t, 1.0, valid), valid)


def _sum_of(terms, z_s, z_t, y, tau=1.0, plus=0.0) -> Tensor:
    """The sum over V of `terms` of q = P_s and p = P_t at temperature tau (`vocab.pointwise`), plus a number  # [N]"""
    z_s, z_t, y, valid = enter(z_s, z_t, y)
    return leave(vocab.pointwise(terms, z_s, z_t, tau, valid) + plus, valid)


def _log_softmax(x) -> Tensor:
    """More exact than torch's on the CPU, which sums 151,936 terms in sequence: 1e-7 off in fp32, not 1e-6."""
    x = x - x.detach().amax(-1, keepdim=True)
    return x - x.exp().sum(-1, keepdim=True).log()


METHODS |= {
    "reverse_kl": Method(reverse_kl, {}, 1.0, 0.0),
    "jsd": Method(jsd, {}, 1.0, 0.0),
    "tvd": Method(tvd, {}, 1.0, 0.0),
    "dkd": Method(dkd, {}, 1.0, 1.0),
    "mse_logits": Method(mse_logits, {}, 1.0, 0.0),
    "adakd": Method(adakd, {}, 1.0, 0.0),
    "sekd": Method(sekd, {}, 0.9, 0.1),
    "bdl": Method(bdl, {}, 1.0, 0.0),
    "skew_fkl": Method(skew_fkl, {}, 1.0, 0.0),
    "skew_rkl": Method(skew_rkl, {}, 1.0, 0.0),
    "abkd": Method(abkd, {}, 1.0, 0.0),
    "akl": Method(akl, {}, 1.0, 0.0),
    "todi": Method(todi, {}, 0.5, 0.5),
    "taid": Method(taid, {}, 1.0, 0.0, moving=("t",)),
    "topk_tail": Method(tad, {"beta": 0.0}, 1.0, 0.0),  # KL over the teacher's top K and one bucket for the rest
    "logit_std": Method(vanilla_kd, {"tau": 2.0, "t2_scaling": True, "standardize": True}, 9.0, 0.1),
}
