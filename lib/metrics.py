"""Figures over held-out rows, and histograms of one update.

The figures say how good a student's distribution is, and how far it is from its teacher's. train.py
reports some of them during a run, eval.py all of them, row by row. The temperature is 1, and logits
are fp32, from the products of training (lib/head.py).

Dimension key: B rows of a batch, T time, N positions, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lib import parallel, vocab
from lib.head import mm, operand
from lib.rows import IGNORE

BINS = 15  # of the calibration error
N_LOGITS = {"cpu": 2**20, "cuda": 2**26}  # of one model at a time: fits in a CPU's cache
LEAST = 128  # positions at a time, whatever the vocabulary: each product reads the whole head
LEVELS = {
    "uniform_ce": "uniform over the vocabulary (ln V)",
    "unigram_ce": "unigram over all held-out rows",
    "teacher_ce": "teacher",
}
TEACHER_KEYS = ("kl", "top1", "top5", "teacher_ce", "teacher_entropy")  # these need a teacher

# last hidden states of inputs [B, T] -> [B, T, D], and the head [V, D]
Model = tuple[Callable[[Tensor], Tensor], Tensor]
Objective = Callable[[Tensor, Tensor, Tensor], object]  # of z_s, z_t [N, V] and y [N]


def figures(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the figures [..] of sums over rows [..], where `gap` is [.., BINS].

    ce             cross-entropy, nats per target; every target but padding counts
    bits_per_byte  the same over the targets that stand for text, by their bytes: comparable across
                   tokenizers
    kl             KL(teacher || student), nats per target
    top1, top5     share of the student's k most likely tokens that are among the teacher's k
    ece            expected calibration error of the student's most likely token, 15 bins of equal
                   width (Guo et al. 2017)
    """
    n = sums["n"]
    values = {"ce": sums["ce"] / n}
    if "text_ce" in sums:
        values["bits_per_byte"] = sums["text_ce"] / sums["text_bytes"] / math.log(2)
    if "kl" in sums:
        for key in TEACHER_KEYS:
            values[key] = sums[key] / n
    values["ece"] = np.abs(sums["gap"]).sum(-1) / n
    return values


def levels(facts: Mapping) -> str:
    """Return the CEs that a student's is read against, as text."""
    known = []
    for key, words in LEVELS.items():
        if key in facts:
            known.append(f"{words} {facts[key]:.4f}")
    return f"CE to compare with: {', '.join(known)}"


@torch.no_grad()
def row_sums(
    students: list[Model],
    head_t: Tensor | None,
    batches: Iterable[tuple[int, Tensor, Tensor, Tensor | None]],
    n_rows: int,
    n_bytes: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """Return for each student the summands of `figures`: [n_rows] fp64, `gap` [n_rows, BINS].

    head_t   [V, D] the teacher's head; None: no figures of a teacher
    batches  (number of the first row, inputs x [B, T], labels y [B, T] with IGNORE where there is
             none, the teacher's hidden states [B, T, D])
    n_bytes  [V] bytes of text that each token stands for; None: no sums over text

    A probability that is not a number makes the figures of its row NaN.
    """
    device = students[0][1].device
    n_vocab = len(students[0][1])
    keys = ["n", "ce"]
    if n_bytes is not None:
        keys.extend(("text_ce", "text_bytes"))
    if head_t is not None:
        keys.extend(TEACHER_KEYS)
    zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
    sums = []
    for _ in students:
        summands = {key: zeros(n_rows) for key in keys}
        summands["gap"] = zeros(n_rows * BINS)
        sums.append(summands)
    step = max(LEAST, N_LOGITS[device.type] // n_vocab)
    cast = functools.cache(operand)  # a head that must be cast is cast once
    for first, x, y, h_t in batches:
        valid = (y != IGNORE).flatten().nonzero()[:, 0]  # a GPU synchronises here
        states = [(hidden(x).flatten(0, 1), head) for hidden, head in students]  # [B * T, D]
        for lo in range(0, len(valid), step):
            part = valid[lo : lo + step]  # [N]
            row = first + part // y.shape[1]  # [N]
            label = y.flatten()[part]  # [N]
            teacher = None
            if head_t is not None:
                z_t = _logits(h_t.flatten(0, 1)[part], head_t, cast)
                teacher = _predict(z_t, label)
            for (h, head), into in zip(states, sums, strict=True):
                z_s = _logits(h[part], head, cast)
                _add_figures(into, row, z_s, label, teacher, n_bytes)
    for into in sums:
        into["gap"] = into["gap"].view(-1, BINS)
    return sums


def _logits(h: Tensor, head: Tensor, cast: Callable = operand) -> Tensor:
    """Return the logits [N, V] in fp32 of h [N, D] and head [V, D], by the product of training."""
    w = cast(head, h.dtype)
    return mm(operand(h, h.dtype), w.t())


class _Prediction(NamedTuple):
    logp: Tensor  # [N, V]
    p: Tensor  # [N, V]
    ce: Tensor  # [N]
    entropy: Tensor  # [N]
    top: Tensor  # [N, 5] the most likely tokens


def _predict(z: Tensor, y: Tensor) -> _Prediction:
    """Describe the softmax of logits [N, V] with labels [N]."""
    logp = z.log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    return _Prediction(logp, p, -_pick(logp, y), entropy, _top(z))


def _pick(logp: Tensor, y: Tensor) -> Tensor:
    """Return logp[n, y[n]] for each position n."""
    return logp.gather(1, y[:, None])[:, 0]


def _top(z: Tensor) -> Tensor:
    k = min(5, z.shape[1])
    return vocab.top(z, k)


def _add_figures(
    sums: dict[str, Tensor],
    row: Tensor,
    z: Tensor,
    y: Tensor,
    teacher: _Prediction | None,
    n_bytes: Tensor | None,
) -> None:
    """Add a student's figures at N positions to the sums of their rows [N]."""
    logp = z.log_softmax(-1)
    ce = -_pick(logp, y)
    top = _top(z)
    best = top[:, 0]
    values = {"n": torch.ones_like(ce), "ce": ce}
    if n_bytes is not None:
        text_bytes = n_bytes[y]
        values["text_ce"] = ce * (text_bytes > 0)
        values["text_bytes"] = text_bytes
    if teacher is not None:
        values["kl"] = (teacher.p * (teacher.logp - logp)).sum(-1)
        values["top1"] = best == teacher.top[:, 0]
        same = top[:, :, None] == teacher.top[:, None, :]  # [N, 5, 5]
        n_same = same.sum((1, 2))
        values["top5"] = n_same / top.shape[1]
        values["teacher_ce"] = teacher.ce
        values["teacher_entropy"] = teacher.entropy
    for key, value in values.items():
        sums[key].index_add_(0, row, value.double())
    p_best = _pick(logp, best).exp()
    gap = p_best - (best == y).float()
    # Bin i holds p in (i / BINS, (i + 1) / BINS]. A NaN, which is no index, goes into the first.
    bin_of = (p_best * BINS).ceil() - 1
    bin_of = torch.where(p_best.isfinite(), bin_of, 0.0).long()
    sums["gap"].index_add_(0, row * BINS + bin_of, gap.double())


@torch.no_grad()
def histograms(
    head_t: Tensor,
    budget: Objective,
    students: dict[str, tuple[Model, Objective]],
    batches: Iterable,
    group: int,
) -> tuple[dict, dict[str, list[int]]]:
    """Return how sure the teacher is, and the local budgets, over one update and all processes.

    head_t    [V, D] the teacher's head
    budget    ALRA's terms; called with the teacher as its own student
    students  by name ((hidden, head), objective), whose result has a `d_u` [N] and `tokens`
              [N, d_max]
    batches   of this process: inputs x [B, T], labels y [B, T] with IGNORE where there is none,
              their number, and the teacher's hidden states [B, T, D]
    group     rows of a forward batch

    -> the teacher's record: `n` valid positions, `d_u_hist` (its own top d_max as candidates),
       means `p_label`, `p_top1`, `agree`, `ce`, `entropy`, and `p_label_hist`, `p_top1_hist` (50
       equal bins of [0, 1]); by name, how many positions have each local budget
    """
    n = 0
    sums = {}
    counts = {}
    for x, y, h_t in _forward_batches(batches, group):
        labels = y.flatten()
        valid = labels != IGNORE
        n = n + valid.sum()
        z_t = _logits(h_t.flatten(0, 1), head_t)  # [N, V]
        for key, value in _teacher_sums(z_t[valid], labels[valid]).items():
            sums[key] = sums.get(key, 0) + value
        terms = {"": budget(z_t, z_t, labels)}
        for name, ((hidden, head), objective) in students.items():
            z_s = _logits(hidden(x).flatten(0, 1), head)
            terms[name] = objective(z_s, z_t, labels)
        for name, result in terms.items():
            n_bins = result.tokens.shape[1] + 1
            budgets = torch.bincount(result.d_u[valid], minlength=n_bins)
            counts[name] = counts.get(name, 0) + budgets
    parallel.sum_in_place([n, *sums.values(), *counts.values()])
    counts = {name: count.tolist() for name, count in counts.items()}
    record = {"n": int(n), "d_u_hist": counts.pop("")}
    for key, value in sums.items():
        record[key] = value.tolist() if value.ndim else float(value) / int(n)
    return record, counts


def _forward_batches(batches: Iterable, group: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Yield x, y and the teacher's hidden states of `group` rows at a time."""
    for x, y, _, h_t in batches:
        parts = (x.split(group), y.split(group), h_t.split(group))
        yield from zip(*parts, strict=True)


def _teacher_sums(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return sums over valid positions [], and counts of positions in 50 bins by probability."""
    logp = z.log_softmax(-1)
    top = logp.max(-1)
    values = {
        "p_label": _pick(logp, y).exp(),
        "p_top1": top.values.exp(),
        "agree": (top.indices == y).float(),
        "ce": -_pick(logp, y),
        "entropy": -(logp.exp() * logp).sum(-1),
    }
    sums = {}
    for key, value in values.items():
        sums[key] = value.double().sum()
    for key in ("p_label", "p_top1"):
        counts = torch.histc(values[key].float(), 50, 0, 1)
        sums[f"{key}_hist"] = counts.long()
    return sums
