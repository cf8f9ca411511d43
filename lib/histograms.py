"""The paper's Figures 3 and 4: how sure the teacher is, and how large the local budgets are."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lib import parallel
from lib.checks import IGNORE
from lib.heldout import Model

Objective = Callable[[Tensor, Tensor, Tensor], object]  # of z_s, z_t [N, V] and y [N]; its result may have a `d_u` [N]


@torch.no_grad()
def histograms(
    teacher: Model, budget: Objective, students: dict[str, tuple[Model, Objective]], x: Tensor, y: Tensor, group: int
) -> tuple[dict, dict[str, list[int]]]:
    """Histograms over one update's rows, by forward batches of `group` rows, added up over the processes.

    teacher   (hidden, head)
    budget    ALRA's terms; called with the teacher as its own student
    students  by name ((hidden, head), objective)
    x, y      [B, T] this process's inputs, and labels with IGNORE where there is none

    -> the teacher's record: `n` valid positions, `d_u_hist` (its own top d_max as candidates), means `p_label`, `p_top1`,
       `agree`, `ce`, `entropy`, and `p_label_hist`, `p_top1_hist` (50 equal bins of [0, 1]);
       by name, how many positions have each local budget, for objectives that have one
    """
    sums, counts = {"n": (y != IGNORE).sum()}, {}
    for part in _parts(len(x), group):
        labels = y[part].flatten()
        z_t = _logits(teacher, x[part])  # [N, V]
        for key, value in teacher_sums(z_t, labels).items():
            sums[key] = sums.get(key, 0) + value
        found = {"": budget(z_t, z_t, labels)}
        found |= {name: fn(_logits(model, x[part]), z_t, labels) for name, (model, fn) in students.items()}
        for name, terms in found.items():
            if hasattr(terms, "d_u"):
                d_max = terms.tokens.shape[1]
                counts[name] = counts.get(name, 0) + torch.bincount(terms.d_u[labels != IGNORE], minlength=d_max + 1)
    parallel.sum_in_place([*sums.values(), *counts.values()])
    n = int(sums.pop("n"))
    counts = {name: count.tolist() for name, count in counts.items()}
    means = {key: value.tolist() if value.ndim else float(value) / n for key, value in sums.items()}
    return {"n": n, "d_u_hist": counts.pop(""), **means}, counts


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(first, first + size) for first in range(0, n, size))


def _logits(model: Model, x: Tensor) -> Tensor:
    """-> [B * T, V] in fp32"""
    hidden, head = model
    return hidden(x).flatten(0, 1).float() @ head.float().T


def teacher_sums(z_t: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Sums over the valid positions of a forward batch: how sure the teacher is, of the label and of its own top-1.

    z_t [N, V], y [N] -> `p_label`, `p_top1`, `agree`, `ce`, `entropy` []; `p_label_hist`, `p_top1_hist` [50], counts in
    equal bins of [0, 1].
    """
    valid = y != IGNORE
    logp = z_t[valid].log_softmax(-1)
    of_label, top = logp.gather(1, y[valid][:, None])[:, 0], logp.max(-1)
    p_label, p_top1 = of_label.exp(), top.values.exp()
    sums = {"p_label": p_label, "p_top1": p_top1, "agree": (top.indices == y[valid]).float(), "ce": -of_label}
    sums["entropy"] = -(logp.exp() * logp).sum(-1)
    sums = {key: value.double().sum() for key, value in sums.items()}
    return sums | {
        f"{key}_hist": torch.histc(p.float(), 50, 0, 1).long() for key, p in (("p_label", p_label), ("p_top1", p_top1))
    }
