"""The data of the paper's Figures 3 and 4: local budgets, and how sure the teacher is.

Dimension key: B rows, T time, N positions, D width, V vocabulary.
"""

import inspect
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lib import parallel
from lib.head import Head
from lib.metrics import pick
from lib.vocab import IGNORE
from run.log import append
from run.methods import method_at
from run.students import evaluating


@torch.no_grad()
def log_histograms(live, teacher, batches: Iterable, run):
    """Write the teacher's histograms and the students' local budgets over the run's next update.

    batches  of `micro_batches` (train.py), each of them one forward batch

    If a student's objective has a budget, METHOD/histograms.jsonl gets the number of positions by
    budget: of the student, and with the teacher as the student. teacher.jsonl gets:

    n                                         valid positions
    p_label, p_top1, agree, ce, entropy       means; `agree`: the teacher's top-1 is the label
    p_label_hist, p_top1_hist                 positions in 50 equal bins of [0, 1]
    """
    cfg = run.cfg
    sums = Counter()
    counts = Counter()
    with evaluating(live) as models:
        students = []
        for s, model in zip(live, models, strict=True):
            result_type = inspect.signature(s.method.fn).return_annotation
            if hasattr(result_type, "d_u") and hasattr(result_type, "tokens"):  # as in AlraTerms
                students.append((s.name, *model, method_at(s, run.step, cfg)))
        for x, y, h_t in batches:
            labels = y.flatten()
            valid = labels != IGNORE
            z_t = Head(h_t, teacher.head).logits()  # [N, V]
            sums.update(_teacher_sums(z_t[valid], labels[valid]))  # adds
            for name, hidden, head, method in students:
                z_s = Head(hidden(x), head).logits()
                for key, z in (("d_u_hist", z_s), ("teacher_d_u_hist", z_t)):
                    result = method.fn(z, z_t, labels, **method.hyper)
                    n_bins = result.tokens.shape[1] + 1
                    counts[name, key] += torch.bincount(result.d_u[valid], minlength=n_bins)
    parallel.sum_in_place([*sums.values(), *counts.values()])
    n = int(sums.pop("n"))
    entry = {"step": run.step, "n": n}
    out = Path(cfg.out_dir)
    for name, *_ in students:
        budgets = {key: counts[name, key].tolist() for key in ("d_u_hist", "teacher_d_u_hist")}
        append(out / name / "histograms.jsonl", entry | budgets)
    for key, value in sums.items():
        entry[key] = value.tolist() if value.ndim else float(value) / max(n, 1)
    append(out / "teacher.jsonl", entry)


def _teacher_sums(z, y) -> dict[str, Tensor]:
    """Return sums over valid positions [], and counts of positions in 50 bins by probability."""
    logp = z.log_softmax(-1)
    logp_label = pick(logp, y)
    top = logp.max(-1)
    values = {
        "p_label": logp_label.exp(),
        "p_top1": top.values.exp(),
        "agree": top.indices == y,
        "ce": -logp_label,
        "entropy": -(logp.exp() * logp).sum(-1),
    }
    sums = {key: value.double().sum() for key, value in values.items()}
    sums["n"] = torch.ones_like(y).sum()
    for key in ("p_label", "p_top1"):
        sums[f"{key}_hist"] = torch.histc(values[key], 50, 0, 1).long()
    return sums
