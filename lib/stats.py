"""How figures (CE, KL, ..) are printed, and every interval and test.

scipy takes half a second to import, which only what computes an interval needs.
"""

import math
from typing import NamedTuple

import numpy as np

MIN_PARTS = 5  # documents that an interval needs; of fewer, their spread says next to nothing


class Column(NamedTuple):
    heading: str
    sense: int  # +1 where more is better, -1 where less is
    factor: int = 1  # to the printed unit
    digits: int = 4  # printed


FIGURES = {
    "ce": Column("CE, nats/token", -1),
    "bits_per_byte": Column("bits/byte", -1),
    "kl": Column("KL to teacher, nats", -1),
    "top1": Column("top-1 agreement, %", +1, 100, 2),
    "top5": Column("top-5 agreement, %", +1, 100, 2),
    "ece": Column("ECE, %", -1, 100, 2),
}


def estimate(values):
    """Return n, mean, half of the 95 % t interval, and p of each column of a DataFrame of seeds.

    p is two-sided, of the t test that the mean is 0. A missing number is NaN, and so are interval
    and p of one seed.
    """
    from scipy.special import stdtr, stdtrit

    n = values.count()
    mean = values.mean()
    error = values.sem()
    half = stdtrit(n - 1, 0.975) * error
    p = 2 * stdtr(n - 1, -(mean / error).abs())
    return n.to_frame("n").assign(mean=mean, half=half, p=p)


def holm(p):
    """Return the p-values of one family, a Series, corrected by Holm's steps (1979).

    NaN stays NaN.
    """
    rising = p.dropna().sort_values()
    n_left = np.arange(len(rising), 0, -1)
    return (rising * n_left).clip(upper=1).cummax().reindex(p.index)


def with_half(e, digits: int, sign: str = ""):
    """Return "MEAN ± HALF" of each row of `estimate`, without the part that is NaN."""
    mean = e["mean"].map(f"{{:{sign}.{digits}f}}".format)
    half = e["half"].map(f" ± {{:.{digits}f}}".format)
    return (mean + half).replace({" ± nan": "", r"\+?nan": "–"}, regex=True)


def half_interval(sums: np.ndarray, n: np.ndarray) -> float:
    """Return half of the 95 % interval of the mean per target, sums.sum() / n.sum().

    sums, n  [parts] sum over the targets of each part (a document, or a row), and their number

    Parts are taken as independent, their targets are not. The standard error is the jackknife's:
    each part is left out in turn, which takes account of parts of unequal length. NaN of few parts.
    """
    n_parts = np.count_nonzero(n)
    if n_parts < MIN_PARTS:
        return math.nan
    from scipy.special import stdtrit

    changes = (sums - n * sums.sum() / n.sum()) / (n.sum() - n)  # of the mean without a part
    error = np.linalg.norm(changes) * math.sqrt((n_parts - 1) / n_parts)
    return float(stdtrit(n_parts - 1, 0.975) * error)
