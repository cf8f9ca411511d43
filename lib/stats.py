"""How figures (CE, KL, ..) are printed, and every interval and test."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit


class Column(NamedTuple):
    heading: str
    sense: int  # +1 where more is better, -1 where less is
    factor: int  # to the printed unit
    digits: int  # printed


FIGURES = {
    "ce": Column("CE, nats/token", -1, 1, 4),
    "bits_per_byte": Column("bits/byte", -1, 1, 4),
    "kl": Column("KL to teacher, nats", -1, 1, 4),
    "top1": Column("top-1 agreement, %", +1, 100, 2),
    "top5": Column("top-5 agreement, %", +1, 100, 2),
    "ece": Column("ECE, %", -1, 100, 2),
}


class Estimate(NamedTuple):
    """A mean over `n` seeds. Interval and p need two seeds."""

    n: int
    mean: float | None = None  # None for no seed
    half: float | None = None  # half the 95 % interval, by Student's t
    p: float | None = None  # two-sided, of the t test that the mean is 0
    p_holm: float | None = None  # corrected over the family that `differences` was given

    def text(self, digits: int, sign: str = "") -> str:
        if self.mean is None:
            return "–"
        text = f"{self.mean:{sign}.{digits}f}"
        if self.half is not None:
            text += f" ± {self.half:.{digits}f}"
        return text


def estimate(by_seed: dict[int, float]) -> Estimate:
    """Return mean, interval and p of one number per seed."""
    values = list(by_seed.values())
    n = len(values)
    if n < 2:
        return Estimate(n, *values)
    mean = sum(values) / n
    deviation = float(np.std(values, ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
    if deviation:
        t = abs(mean) / deviation * math.sqrt(n)
    else:
        t = math.inf if mean else 0.0
    return Estimate(n, mean, half, 2 * float(stdtr(n - 1, -t)))


def half_interval(sums: np.ndarray, n: np.ndarray) -> float | None:
    """Return half of the 95 % interval of the mean per target, sums.sum() / n.sum().

    sums, n  [parts] sum over the targets of each part (a document, or a row), and their number

    Parts are taken as independent, their targets are not. The standard error is the jackknife's:
    each part is left out in turn, which takes account of parts of unequal length. A single part has
    no interval.
    """
    n_parts = np.count_nonzero(n)
    if n_parts < 2:
        return None
    changes = (sums - n * sums.sum() / n.sum()) / (n.sum() - n)  # of the mean without a part
    error = np.linalg.norm(changes) * math.sqrt((n_parts - 1) / n_parts)
    return float(stdtrit(n_parts - 1, 0.975) * error)


def differences(pairs: list[tuple[dict, dict]]) -> list[Estimate]:
    """Return the mean difference of each pair (by seed, reference by seed), paired by seed.

    All pairs are one family of tests.
    """
    estimates = []
    for values, reference in pairs:
        paired = {seed: values[seed] - reference[seed] for seed in values if seed in reference}
        estimates.append(estimate(paired))
    corrected = holm([e.p for e in estimates])
    return [e._replace(p_holm=p) for e, p in zip(estimates, corrected, strict=True)]


def holm(ps: list[float | None]) -> list[float | None]:
    """Return the p-values of one family, corrected by Holm's steps (1979); None stays None."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    corrected = list(ps)
    largest = 0.0  # so far: corrected values keep the order of the p-values
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * ps[i]))
        corrected[i] = largest
    return corrected


def p_text(p: float | None) -> str:
    if p is None:
        return ""
    return ", p < 0.0001" if p < 1e-4 else f", p {p:.4f}"
