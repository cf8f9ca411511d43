"""Validation: figures of all students over held-out rows."""

import numpy as np
import torch

from lib import metrics, parallel
from lib.vocab import IGNORE
from run.students import evaluating, n_validated

# the name in the log -> the key in what metrics.figures returns
VALIDATION_FIGURES = {
    "val_ce": "ce",
    "val_kl": "kl",
    "val_agree": "top1",
    "val_teacher_ce": "teacher_ce",
    "val_teacher_entropy": "teacher_entropy",
}


def validate(live, teacher, val, cfg) -> dict[str, dict]:
    """Return the figures of each student by name: those of VALIDATION_FIGURES, at temperature 1.

    They are means per token over the first `val_max_rows` held-out rows: CE, KL(teacher || student)
    and top-1 agreement of the student, CE and entropy of the teacher.
    """
    n_rows = n_validated(val, cfg)
    head_t = teacher.head if teacher else None
    with evaluating(live) as models:
        batches = validation_batches(val, teacher, n_rows, cfg)
        sums = metrics.sums_by_part(models, head_t, batches, n_rows)  # a part is a row here
    validated = {}
    for s, by_row in zip(live, sums, strict=True):
        parallel.sum_in_place(by_row.values())  # on each process, 0 for the others' rows
        totals = {key: value.sum(0).cpu().numpy() for key, value in by_row.items()}
        figures = metrics.figures(totals)
        validated[s.name] = {
            name: float(figures[key]) for name, key in VALIDATION_FIGURES.items() if key in figures
        }
    return validated


def validation_batches(val, teacher, n_rows: int, cfg):
    """Yield this process's batches of held-out rows.

    A batch is a tuple: each label's row number [B, T], inputs x [B, T], labels y [B, T], and the
    teacher's last hidden states [B, T, D_t] (None without a teacher).
    """
    size = cfg.micro_batch
    begin = parallel.rank() * size
    # Sharded layers compute on all processes together, so every process makes as many batches as
    # process 0, all of one shape. Beyond the last row they repeat it without labels.
    for first in range(begin, begin + n_rows, parallel.world() * size):
        wanted = np.arange(first, first + size)
        index = wanted.clip(max=n_rows - 1)
        x, y = val.batch(index, torch.device(cfg.device))
        y[torch.from_numpy(wanted >= n_rows)] = IGNORE
        h_t = teacher.hidden(x, val, index) if teacher else None
        row = torch.from_numpy(index).to(y.device)[:, None]
        yield row.expand_as(y), x, y, h_t
