"""How figures are printed, and every interval and test."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit


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
    """Return half of the 95 % interval of a mean per target, of sums and targets by part [parts].

    It takes the parts (documents, or rows) as independent, not their targets. The standard error is
    the jackknife's: the mean is computed without each part in turn, which does justice to parts of
    unequal length. A single part has no interval.
    """
    n_parts = np.count_nonzero(n)
    if n_parts < 2:
        return None
    changes = (sums - n * sums.sum() / n.sum()) / (n.sum() - n)  # of the mean, without each part
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
    """Return the p-values of one family, corrected by Holm's steps (1979); None is in no family."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    corrected = list(ps)
    least = 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - place) * ps[i]))
        corrected[i] = least
    return corrected


def p_text(p: float | None) -> str:
    if p is None:
        return ""
    return ", p < 0.0001" if p < 1e-4 else f", p {p:.4f}"
