"""Metrics over held-out rows: how good a student's distribution is, how far it is from its teacher's; and histograms.

train.py reports some of these figures during a run, eval.py all of them, row by row. Temperature 1, fp32 logits from the
products that training makes (lib/head.py). Nothing here knows of runs.

Dimension key: B rows of a batch, T time, N positions, D width, V vocabulary.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from lib import parallel, vocab
from lib.head import mm, operand
from lib.rows import IGNORE

BINS = 15  # of the calibration error
N_LOGITS = {"cpu": 2**20, "cuda": 2**26}  # of one model at a time: in a CPU's cache; as in a training step
LEAST = 128  # positions at a time, whatever the vocabulary: each product reads a whole head
LEVELS = {"uniform_ce": "uniform over the vocabulary (ln V)", "unigram_ce": "unigram over all held-out rows",
          "teacher_ce": "teacher"}  # fmt: skip
TEACHER_KEYS = ("kl", "top1", "top5", "teacher_ce", "teacher_entropy")  # figures that need a teacher

Model = tuple[Callable[[Tensor], Tensor], Tensor]  # last hidden states of inputs [B, T] -> [B, T, D]; head [V, D]
Objective = Callable[[Tensor, Tensor, Tensor], object]  # of z_s, z_t [N, V] and y [N]


def figures(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sums over rows -> the figures: [..] each; `gap` is [.., BINS].

    ce             cross-entropy, nats per target; every target but padding counts
    bits_per_byte  the same over the targets that stand for text, by their bytes: comparable across tokenizers
    kl             KL(teacher || student), nats per target
    top1, top5     share of the student's k most likely tokens that are among the teacher's k
    ece            expected calibration error of the student's most likely token, 15 bins of equal width (Guo et al. 2017)
    """
    n = sums["n"]
    out = {"ce": sums["ce"] / n}
    if "text_ce" in sums:
        out["bits_per_byte"] = sums["text_ce"] / sums["text_bytes"] / math.log(2)
    if "kl" in sums:
        out |= {key: sums[key] / n for key in TEACHER_KEYS}
    return out | {"ece": np.abs(sums["gap"]).sum(-1) / n}


def levels(facts: Mapping) -> str:
    known = (f"{words} {facts[key]:.4f}" for key, words in LEVELS.items() if key in facts)
    return f"CE to compare with: {', '.join(known)}"


@torch.no_grad()
def row_sums(
    students: list[Model], head_t: Tensor | None, batches: Iterable[tuple[int, Tensor, Tensor, Tensor | None]],
    n_rows: int, n_bytes: Tensor | None = None,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Per student the summands of `figures`, for each row: [n_rows] fp64, `gap` [n_rows, BINS].

    students  (hidden, head) each
    head_t    [V, D] the teacher's; None: no figures of a teacher
    batches   (number of the first row, inputs x [B, T], labels y [B, T] with IGNORE where there is none, the teacher's
              hidden states [B, T, D])
    n_bytes   [V] bytes of text that each token stands for; None: no sums over text

    A probability that is not a number makes the figures of its row NaN.
    """
    device, n_vocab = students[0][1].device, len(students[0][1])
    of_text, of_teacher = () if n_bytes is None else ("text_ce", "text_bytes"), () if head_t is None else TEACHER_KEYS
    keys = ["n", "ce", *of_text, *of_teacher]
    sums = [{key: torch.zeros(n_rows, dtype=torch.float64, device=device) for key in keys} for _ in students]
    gaps = [torch.zeros(n_rows * BINS, dtype=torch.float64, device=device) for _ in students]
    step = max(LEAST, N_LOGITS[device.type] // n_vocab)
    cast = functools.cache(operand)  # a head that must be cast is cast once
    for first, x, y, h_t in batches:
        at = (y != IGNORE).flatten().nonzero()[:, 0]  # [N]; a GPU is waited for here
        row, label = first + at // y.shape[1], y.flatten()[at]  # [N]
        states = [(hidden(x), head) for hidden, head in students] + ([] if head_t is None else [(h_t, head_t)])
        # h [N, D] and head [V, D] of each student, and of the teacher
        models = [(operand(h.flatten(0, 1)[at], h.dtype), cast(head, h.dtype)) for h, head in states]
        teacher = None if head_t is None else models.pop()
        for part in (slice(lo, lo + step) for lo in range(0, len(row), step)):
            of_teacher = None
            if teacher:
                z_t = mm(teacher[0][part], teacher[1].t())
                of_teacher = (*_confidence(z_t, label[part]), vocab.top(z_t, min(5, n_vocab)))
            for (h, head), into, gap in zip(models, sums, gaps, strict=True):
                values, p_top, right = _compare(mm(h[part], head.t()), label[part], of_teacher, n_bytes)
                for key in keys:
                    into[key].index_add_(0, row[part], values[key].double())
                bin_of = torch.where(p_top.isfinite(), (p_top * BINS).ceil() - 1, 0.0).long()
                gap.index_add_(0, row[part] * BINS + bin_of, (p_top - right.float()).double())
    for into, gap in zip(sums, gaps, strict=True):
        into["gap"] = gap.view(-1, BINS)
    return sums


def _confidence(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [N, V], labels [N] -> ln p [N, V], p [N, V], cross-entropy [N], entropy [N]"""
    logp = z.log_softmax(-1)
    p = logp.exp()
    return logp, p, -logp.gather(1, y[:, None])[:, 0], -(p * logp).sum(-1)


def _compare(z: Tensor, y: Tensor, of_teacher, n_bytes) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """-> a student's figures [N] by name; the probability of its most likely token [N]; whether that is the label [N]"""
    logp, top = z.log_softmax(-1), vocab.top(z, min(5, z.shape[1]))
    ce = -logp.gather(1, y[:, None])[:, 0]
    values = {"n": torch.ones_like(ce), "ce": ce}
    if n_bytes is not None:
        values |= {"text_ce": ce * (n_bytes[y] > 0), "text_bytes": n_bytes[y]}
    if of_teacher is not None:
        logp_t, p_t, ce_t, entropy_t, top_t = of_teacher
        values |= {"kl": (p_t * (logp_t - logp)).sum(-1), "top1": top[:, 0] == top_t[:, 0]}
        values |= {"top5": (top[:, :, None] == top_t[:, None, :]).sum((1, 2)) / top.shape[1]}
        values |= {"teacher_ce": ce_t, "teacher_entropy": entropy_t}
    return values, logp.gather(1, top[:, :1])[:, 0].exp(), top[:, 0] == y


@torch.no_grad()
def histograms(
    head_t: Tensor, budget: Objective, students: dict[str, tuple[Model, Objective]], batches: Iterable, group: int
) -> tuple[dict, dict[str, list[int]]]:
    """How sure the teacher is and how large the local budgets are, over one update's rows and all processes.

    head_t    [V, D] the teacher's
    budget    ALRA's terms; called with the teacher as its own student
    students  by name ((hidden, head), objective), whose result has a `d_u` [N] and `tokens` [N, d_max]
    batches   this process's inputs x [B, T], labels y [B, T] with IGNORE where there is none, their number, and the
              teacher's hidden states [B, T, D]
    group     rows of a forward batch

    -> the teacher's record: `n` valid positions, `d_u_hist` (its own top d_max as candidates), means `p_label`, `p_top1`,
       `agree`, `ce`, `entropy`, and `p_label_hist`, `p_top1_hist` (50 equal bins of [0, 1]);
       by name, how many positions have each local budget
    """
    sums, counts = {}, {}
    groups = (zip(x.split(group), y.split(group), h_t.split(group), strict=True) for x, y, _, h_t in batches)
    for x, y, h_t in itertools.chain.from_iterable(groups):
        labels = y.flatten()
        sums["n"] = sums.get("n", 0) + (labels != IGNORE).sum()
        z_t = _logits(h_t, head_t)  # [N, V]
        for key, value in _teacher_sums(z_t[labels != IGNORE], labels[labels != IGNORE]).items():
            sums[key] = sums.get(key, 0) + value
        terms = {"": budget(z_t, z_t, labels)}
        terms |= {name: fn(_logits(hidden(x), head), z_t, labels) for name, ((hidden, head), fn) in students.items()}
        for name, of_student in terms.items():
            n_bins = of_student.tokens.shape[1] + 1
            budgets = torch.bincount(of_student.d_u[labels != IGNORE], minlength=n_bins)
            counts[name] = counts.get(name, 0) + budgets
    parallel.sum_in_place([*sums.values(), *counts.values()])
    n = int(sums.pop("n"))
    counts = {name: count.tolist() for name, count in counts.items()}
    means = {key: value.tolist() if value.ndim else float(value) / n for key, value in sums.items()}
    return {"n": n, "d_u_hist": counts.pop(""), **means}, counts


def _logits(h: Tensor, head: Tensor) -> Tensor:
    """[B, T, D], [V, D] -> [B * T, V] in fp32, by the training path's product"""
    h = h.flatten(0, 1)
    return mm(operand(h, h.dtype), operand(head, h.dtype).t())


def _teacher_sums(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Sums over valid positions, z [N, V] and y [N]: [] each; `p_label_hist`, `p_top1_hist` [50] count positions."""
    logp, _, ce, entropy = _confidence(z, y)
    top = logp.max(-1)
    p_label, p_top1, agree = (-ce).exp(), top.values.exp(), (top.indices == y).float()
    sums = {"p_label": p_label, "p_top1": p_top1, "agree": agree, "ce": ce, "entropy": entropy}
    bins = {f"{key}_hist": torch.histc(sums[key].float(), 50, 0, 1).long() for key in ("p_label", "p_top1")}
    return {key: value.double().sum() for key, value in sums.items()} | bins
