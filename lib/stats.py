"""How figures are shown, and every interval and test over seeds."""

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
    """A mean over `n` seeds."""

    n: int
    mean: float | None = None  # None for no seed
    half: float | None = None  # half the 95 % interval, by Student's t; None for fewer than two seeds
    p: float | None = None  # two-sided, of the t test that the mean is 0; None for fewer than two seeds
    p_holm: float | None = None  # corrected over the family that `differences` was given

    def text(self, digits: int, sign: str = "") -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:{sign}.{digits}f}" + (f" ± {self.half:.{digits}f}" if self.half is not None else "")


def estimate(by_seed: dict[int, float]) -> Estimate:
    """Mean, interval and p of one number per seed."""
    values, n = list(by_seed.values()), len(by_seed)
    if n < 2:
        return Estimate(n, *values)
    mean, deviation = sum(values) / n, float(np.std(values, ddof=1))
    t = abs(mean) / deviation * math.sqrt(n) if deviation else math.inf if mean else 0.0
    return Estimate(n, mean, float(stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n), 2 * float(stdtr(n - 1, -t)))


def differences(pairs: list[tuple[dict[int, float], dict[int, float]]]) -> list[Estimate]:
    """Per pair (by seed, reference by seed): the mean difference, paired by seed. All pairs are one family of tests."""
    found = [estimate({seed: a[seed] - b[seed] for seed in a if seed in b}) for a, b in pairs]
    return [e._replace(p_holm=p) for e, p in zip(found, holm([e.p for e in found]), strict=True)]


def holm(ps: list[float | None]) -> list[float | None]:
    """p-values of one family -> corrected by Holm's steps (1979), in the same order; None stays out of the family."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    out, least = list(ps), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - place) * ps[i]))
        out[i] = least
    return out


def p_text(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"
