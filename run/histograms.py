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
from lib.metrics import logits_of, pick
from lib.vocab import IGNORE
from losses import alra, resolve
from run.log import append
from run.methods import method_at
from run.students import hidden_and_head


@torch.no_grad()
def log_histograms(live, teacher, batches: Iterable, run):
    """Write the teacher's histograms and the students' local budgets over the run's next update.

    batches  (x [B, T], labels y [B, T], number of labels, the teacher's hidden states [B, T, D])

    METHOD/histograms.jsonl gets the number of positions by budget, if the student's objective has
    one; teacher.jsonl gets:

    n                                         valid positions
    d_u_hist                                  positions by budget, with the teacher as the student
    p_label, p_top1, agree, ce, entropy       means; `agree`: the teacher's top-1 is the label
    p_label_hist, p_top1_hist                 positions in 50 equal bins of [0, 1]
    """
    cfg = run.cfg
    hyper = resolve("alra", **cfg.overrides_of("alra")).hyper
    sums = Counter()
    counts = Counter()
    with parallel.gathered_roots(s.scored for s in live):
        students = []
        for s in live:
            result_type = inspect.signature(s.method.fn).return_annotation
            if hasattr(result_type, "d_u") and hasattr(result_type, "tokens"):  # as in AlraTerms
                students.append((s.name, *hidden_and_head(s), method_at(s, run.step, cfg)))
        for x, y, h_t in _forward_batches(batches, cfg.group):
            labels = y.flatten()
            valid = labels != IGNORE
            z_t = logits_of(h_t.flatten(0, 1), teacher.head)  # [N, V]
            sums.update(_teacher_sums(z_t[valid], labels[valid]))  # adds
            terms = {"": alra(z_t, z_t, labels, **hyper)}  # the teacher as its own student
            for name, hidden, head, method in students:
                z_s = logits_of(hidden(x).flatten(0, 1), head)
                terms[name] = method.fn(z_s, z_t, labels, **method.hyper)
            for name, result in terms.items():
                n_bins = result.tokens.shape[1] + 1
                counts[name] += torch.bincount(result.d_u[valid], minlength=n_bins)
    parallel.sum_in_place([*sums.values(), *counts.values()])
    budgets = counts.pop("").tolist()
    n = sum(budgets)
    entry = {"step": run.step, "n": n, "d_u_hist": budgets}
    for key, value in sums.items():
        entry[key] = value.tolist() if value.ndim else float(value) / n
    out = Path(cfg.out_dir)
    append(out / "teacher.jsonl", entry)
    for name, count in counts.items():
        entry = {"step": run.step, "n": n, "d_u_hist": count.tolist()}
        append(out / name / "histograms.jsonl", entry)


def _forward_batches(batches, group) -> Iterable[tuple]:
    """Yield x, y and the teacher's hidden states of `group` rows at a time."""
    for x, y, _, h_t in batches:
        yield from zip(x.split(group), y.split(group), h_t.split(group), strict=True)


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
    for key in ("p_label", "p_top1"):
        sums[f"{key}_hist"] = torch.histc(values[key], 50, 0, 1).long()
    return sums
