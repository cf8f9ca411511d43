"""Figures over held-out rows: their names, their computation from sums, and intervals of their differences."""

import math
from typing import NamedTuple

import numpy as np

BINS = 15  # of the calibration error
DRAWS = 2_000  # of the paired bootstrap
# What a record of log.jsonl has beside an objective's terms; a term needs another name. Those of validation begin with val_.
LOGGED = ("step", "nominal_tokens", "valid_tokens", "lr", "gnorm", "tok_per_sec", "mfu", "mem_gib", "eta_sec", "time")
TEACHER_KEYS = ("kl", "top1", "top5", "teacher_ce", "teacher_entropy")  # figures that need a teacher


class Figure(NamedTuple):
    heading: str
    sense: int  # +1 where more is better, -1 where less is
    factor: int  # to the printed unit
    digits: int  # printed


FIGURES = {
    "ce": Figure("CE, nats/token", -1, 1, 4),
    "bits_per_byte": Figure("bits/byte", -1, 1, 4),
    "kl": Figure("KL to teacher, nats", -1, 1, 4),
    "top1": Figure("top-1 agreement, %", +1, 100, 2),
    "top5": Figure("top-5 agreement, %", +1, 100, 2),
    "ece": Figure("ECE, %", -1, 100, 2),
}


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


def bootstrap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """95 % interval of each figure's difference a - b, by a paired bootstrap over rows with `DRAWS` draws."""
    n = len(a["n"])
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=DRAWS)  # [DRAWS, rows]
    drawn = [figures({key: counts @ per_row for key, per_row in sums.items()}) for sums in (a, b)]
    shared = [key for key in FIGURES if key in drawn[0] and key in drawn[1]]
    return {key: tuple(np.quantile(drawn[0][key] - drawn[1][key], (0.025, 0.975)).tolist()) for key in shared}
