"""The one scorer of held-out rows: how good a student's distribution is, and how far it is from its teacher's.

train.py reports some of these figures during a run, eval.py all of them, row by row. Temperature 1, fp32 logits from the
products that training makes (lib/fused.py).

Dimension key: B rows of a batch, T time, N positions, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lib import fused, vocab
from lib.checks import IGNORE
from lib.figures import BINS, TEACHER_KEYS

N_LOGITS = {"cpu": 2**24, "cuda": 2**26}  # of one model at a time; on a GPU about as many as a training step has

Model = tuple[Callable[[Tensor], Tensor], Tensor]  # last hidden states of inputs [B, T] -> [B, T, D]; head [V, D]


@torch.no_grad()
def row_sums(
    students: list[Model],
    teacher: Model | None,
    batches: Iterable[tuple[int, Tensor, Tensor]],
    n_rows: int,
    n_bytes: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """Per student the summands of `figures.figures`, for each row: [n_rows] fp64, `gap` [n_rows, BINS].

    students, teacher  (hidden, head) each; the teacher runs once for all students
    batches            (number of the first row, inputs x [B, T], labels y [B, T] with IGNORE where there is none)
    n_bytes            [V] bytes of text that each token stands for; None: no sums over text
    A probability that is not a number makes the figures of its row NaN.
    """
    device, n_vocab = students[0][1].device, len(students[0][1])
    keys = ["n", "ce", *(["text_ce", "text_bytes"] if n_bytes is not None else []), *(TEACHER_KEYS if teacher else [])]
    sums = [{key: torch.zeros(n_rows, dtype=torch.float64, device=device) for key in keys} for _ in students]
    gaps = [torch.zeros(n_rows * BINS, dtype=torch.float64, device=device) for _ in students]
    step = max(1, N_LOGITS[device.type] // n_vocab)
    operand = functools.cache(fused.operand)  # a head that must be cast is cast once
    for first, x, y in batches:
        at = (y != IGNORE).flatten().nonzero()[:, 0]  # [N]; here a GPU is waited for
        row, label = first + at // y.shape[1], y.flatten()[at][:, None]  # [N], [N, 1]
        models = []  # h [N, D] and head [V, D] of each student, and of the teacher
        for hidden, head in [*students, *([teacher] if teacher else [])]:
            h = hidden(x).flatten(0, 1)[at]
            models.append((fused.operand(h, h.dtype), operand(head, h.dtype)))
        h_t, head_t = models.pop() if teacher else (None, None)
        for part in (slice(lo, lo + step) for lo in range(0, len(row), step)):
            of_teacher = _of_teacher(fused.mm(h_t[part], head_t.t()), label[part]) if teacher else None
            for (h, head), into, gap in zip(models, sums, gaps, strict=True):
                found, sure, right = _of_student(fused.mm(h[part], head.t()), label[part], of_teacher, n_bytes)
                for key in keys:
                    into[key].index_add_(0, row[part], found[key].double())
                bin_of = torch.where(sure.isfinite(), (sure * BINS).ceil() - 1, 0.0).long()
                gap.index_add_(0, row[part] * BINS + bin_of, (sure - right.float()).double())
    for into, gap in zip(sums, gaps, strict=True):
        into["gap"] = gap.view(-1, BINS)
    return sums


def _of_teacher(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """-> ln p [N, V], p [N, V], its five most likely tokens [N, 5], and the teacher's own figures [N]"""
    logp = z.log_softmax(-1)
    p = logp.exp()
    own = {"teacher_ce": -logp.gather(1, label)[:, 0], "teacher_entropy": -(p * logp).sum(-1)}
    return logp, p, vocab.top(z, 5), own


def _of_student(
    z: Tensor, label: Tensor, of_teacher, n_bytes: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """-> figures [N] by name; the probability of the most likely token [N]; whether that is the label [N]"""
    logp, top = z.log_softmax(-1), vocab.top(z, 5)
    ce = -logp.gather(1, label)[:, 0]
    found = {"n": torch.ones_like(ce), "ce": ce}
    if n_bytes is not None:
        length = n_bytes[label[:, 0]]
        found |= {"text_ce": ce * (length > 0), "text_bytes": length}
    if of_teacher is not None:
        logp_t, p_t, top_t, own = of_teacher
        kl = (p_t * (logp_t - logp)).sum(-1)
        both = (top[:, :, None] == top_t[:, None, :]).sum((1, 2)) / 5
        found |= {"kl": kl, "top1": (top[:, 0] == top_t[:, 0]), "top5": both, **own}
    return found, logp.gather(1, top[:, :1])[:, 0].exp(), top[:, 0] == label[:, 0]
