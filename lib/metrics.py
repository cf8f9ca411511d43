"""Figures over held-out rows: cross-entropy, KL, agreement, calibration.

The figures say how good a student's distribution is, and how far it is from its teacher's. train.py
reports some of them during a run, eval.py all of them. The temperature is 1. Logits are in fp32, by
the same matrix product as in training (lib/head.py).

Dimension key: B rows of a batch, T time, N positions, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lib import vocab
from lib.head import Head, OutputHead
from lib.vocab import IGNORE

BINS = 15  # of the calibration error
N_LOGITS = {"cpu": 2**20, "cuda": 2**26}  # of a model at a time; a CPU's cache holds 2**20
MIN_POSITIONS = 128  # at a time, whatever the vocabulary: each product reads the whole head
REFERENCES = {
    "uniform_ce": "uniform over the vocabulary (ln V)",
    "unigram_ce": "unigram over all held-out rows",
    "teacher_ce": "teacher",
}
MEANS = ("ce", "kl", "top1", "top5", "teacher_ce", "teacher_entropy")  # all but ce need a teacher

# (function: inputs [B, T] -> last hidden states [B, T, D], head [V, D])
Model = tuple[Callable[[Tensor], Tensor], Tensor | OutputHead]


def figures(sums):
    """Return means from the sums of `sums_by_part` as numpy arrays, of any shape; `gap` [.., BINS].

    ce             cross-entropy, nats per target; every target but padding counts
    bits_per_byte  the same over the targets that stand for text, by their bytes: comparable across
                   tokenizers
    kl             KL(teacher || student), nats per target
    top1, top5     share of the student's k most likely tokens that are among the teacher's k
    ece            expected calibration error of the student's most likely token, 15 bins of equal
                   width (Guo et al. 2017); `gap` sums in each bin its probability, less 1 where it
                   is the label
    """
    n = sums["n"]
    values = {key: sums[key] / n for key in MEANS if key in sums}
    if "text_ce" in sums:
        values["bits_per_byte"] = sums["text_ce"] / sums["text_bytes"] / math.log(2)
    values["ece"] = np.abs(sums["gap"]).sum(-1) / n
    return values


def reference_text(facts: Mapping) -> str:
    """Return the CEs to compare a student's with, as text."""
    known = [f"{words} {facts[key]:.4f}" for key, words in REFERENCES.items() if key in facts]
    return f"CE to compare with: {', '.join(known)}"


@torch.no_grad()
def sums_by_part(
    students: list[Model],
    head_t: Tensor | OutputHead | None,
    batches,
    n_parts: int,
    n_bytes: Tensor | None = None,
):
    """Return for each student the summands of `figures`: [n_parts] fp64, `gap` [n_parts, BINS].

    `right` counts the labels that are the most likely token.

    The parts are those that the caller divides the text into: rows, or documents.

    head_t   [V, D] the teacher's head; None: no figures of a teacher
    batches  (the part that each label belongs to [B, T], inputs x [B, T], labels y [B, T] with
             IGNORE where there is none, the teacher's hidden states [B, T, D])
    n_bytes  [V] bytes of text that each token stands for; None: no sums over text

    A probability that is not a number makes CE, KL and ECE of its part NaN.
    """
    _, first_head = students[0]
    step = max(MIN_POSITIONS, N_LOGITS[first_head.device.type] // len(first_head))
    sums = [{} for _ in students]
    for part_of, x, y, h_t in batches:
        labelled = (y != IGNORE).flatten().nonzero()[:, 0]  # indices; a GPU synchronises here
        heads = [Head(hidden(x), head) for hidden, head in students]
        teacher_head = None if head_t is None else Head(h_t, head_t)
        for positions in labelled.split(step):  # [N]; one without any if there are none
            part = part_of.flatten()[positions]  # [N]
            label = y.flatten()[positions]  # [N]
            teacher = teacher_head and _predict(teacher_head.logits(positions), label)
            for head, into in zip(heads, sums, strict=True):
                student = _predict(head.logits(positions), label)
                for key, values in _summands(student, label, teacher, n_bytes).items():
                    if key not in into:
                        into[key] = label.new_zeros(n_parts, *values.shape[1:], dtype=torch.float64)
                    into[key].index_add_(0, part, values.double())
    return sums


def _predict(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the softmax of logits [N, V] with labels [N].

    -> ln p [N, V], cross-entropy [N], the five most likely tokens [N, 5]
    """
    logp = z.log_softmax(-1)
    return logp, -pick(logp, y), vocab.top(z, 5)


def pick(logp: Tensor, y: Tensor) -> Tensor:
    """Return logp[n, y[n]] for each position n."""
    return logp.gather(1, y[:, None])[:, 0]


def _summands(student, y, teacher, n_bytes) -> dict[str, Tensor]:
    """Return the summands of `figures` of a student at N positions: [N], `gap` [N, BINS].

    student, teacher  what `_predict` returns of each; the teacher's may be None
    y                 [N] labels
    n_bytes           [V] bytes of text that each token stands for, or None
    """
    logp, ce, top = student
    best = top[:, 0]
    is_right = best == y
    p_best = pick(logp, best).exp()
    bin_of = (p_best * BINS).ceil() - 1  # bin i holds p in (i / BINS, (i + 1) / BINS]
    in_bin = bin_of[:, None] == torch.arange(BINS, device=y.device)  # [N, BINS]
    gap = (p_best - is_right.float())[:, None] * in_bin  # a NaN is one in all bins
    values = {"n": torch.ones_like(ce), "ce": ce, "right": is_right, "gap": gap}
    if n_bytes is not None:
        text_bytes = n_bytes[y]
        values["text_ce"] = ce * (text_bytes > 0)
        values["text_bytes"] = text_bytes
    if teacher is not None:
        logp_t, ce_t, top_t = teacher
        p_t = logp_t.exp()
        values["kl"] = (p_t * (logp_t - logp)).sum(-1)
        values["top1"] = best == top_t[:, 0]
        same = top[:, :, None] == top_t[:, None, :]  # [N, 5, 5]
        values["top5"] = same.sum((1, 2)) / 5
        values["teacher_ce"] = ce_t
        values["teacher_entropy"] = -(p_t * logp_t).sum(-1)
    return values
