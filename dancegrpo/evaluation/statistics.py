"""Intervals for proportions, and for differences of proportions and of means on the same images.

Sources: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927);
R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired
data", Statistics in Medicine 17 (1998), 2635-2650, method 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import t as student_t

Z_95 = 1.959963984540054
OVERALL = "overall"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence interval from n images."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int]:
        """`{"value", "low", "high", "n"}`."""
        return asdict(self)


def wilson(successes: int, n: int, z: float = Z_95) -> Interval:
    """Wilson's score interval of a proportion p = successes / n.

    (p + z^2/2n -+ z sqrt(p (1-p)/n + z^2/4n^2)) / (1 + z^2/n). It stays within [0, 1] and is sound for small
    n and for p near 0 or 1, where the textbook interval p -+ z sqrt(p(1-p)/n) has no width.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"a proportion needs 0 <= successes <= n and n > 0, got {successes} of {n}")
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At p = 0 and p = 1 the limit is exact on paper; rounding must not move it past the estimate.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return Interval(p, low, high, n)


def paired_difference(first: Sequence[bool], second: Sequence[bool], z: float = Z_95) -> Interval:
    """Interval of p_first - p_second where both judge the same n prompts with the same noise.

    Newcombe's method 10: square-and-add of the two Wilson intervals [l, u] with the correlation phi between
    the pairs. With d1 = p1 - l1, e1 = u1 - p1, d2 = p2 - l2, e2 = u2 - p2:
    low = D - sqrt(d1^2 - 2 phi d1 e2 + e2^2), high = D + sqrt(e1^2 - 2 phi e1 d2 + d2^2).
    Pairing narrows the interval: what both get right or both get wrong cancels.

    Args:
        first, second: n verdicts each, in the same order.
    """
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(
            f"paired verdicts need two equal, non-empty lists, got shapes {a.shape} and {b.shape}"
        )
    both, only_first = int((a & b).sum()), int((a & ~b).sum())
    only_second, neither = int((~a & b).sum()), int((~a & ~b).sum())
    n = a.size
    one, two = wilson(both + only_first, n, z), wilson(both + only_second, n, z)
    difference = (only_first - only_second) / n
    phi = _phi(both, only_first, only_second, neither)
    down, up = one.value - one.low, one.high - one.value
    down_two, up_two = two.value - two.low, two.high - two.value
    below = max(down**2 - 2 * phi * down * up_two + up_two**2, 0.0)
    above = max(up**2 - 2 * phi * up * down_two + down_two**2, 0.0)
    return Interval(difference, difference - math.sqrt(below), difference + math.sqrt(above), n)


def paired_mean_difference(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Student's t interval of the mean of first - second, over pairs of numbers on the same images or prompts.

    Pairs with a value that is not finite are left out; None if fewer than two are left.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired values need two lists of one length, got shapes {a.shape} and {b.shape}")
    differences = a - b
    differences = differences[np.isfinite(differences)]
    n = differences.size
    if n < 2:
        return None
    mean = float(differences.mean())
    half = float(student_t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def _phi(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Correlation of the pairs, continuity-corrected as in Newcombe's method 10."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    cross = both * neither - only_first * only_second
    if cross > 0:
        cross = max(cross - (both + only_first + only_second + neither) / 2, 0.0)
    return cross / math.sqrt(margins)


def accuracy_table(correct: Sequence[bool], categories: Sequence[str]) -> dict[str, Interval]:
    """Wilson intervals over all images (`overall`, each image counts once) and per category."""
    verdicts = np.asarray(correct, bool)
    return {name: wilson(int(verdicts[mask].sum()), int(mask.sum())) for name, mask in _masks(categories)}


def difference_table(
    first: Sequence[bool], second: Sequence[bool], categories: Sequence[str]
) -> dict[str, Interval]:
    """Paired intervals of first - second, overall and per category."""
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    return {name: paired_difference(a[mask], b[mask]) for name, mask in _masks(categories)}


def _masks(categories: Sequence[str]) -> list[tuple[str, np.ndarray]]:
    names = np.asarray(categories)
    order = list(dict.fromkeys(categories))
    return [(OVERALL, np.ones(names.shape, bool))] + [(name, names == name) for name in order]
