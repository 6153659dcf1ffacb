"""Is a sample drawn from a law? The G test, what it would have seen, and how large a sample must be.

A total variation distance d moves the statistic least when it is spread over all cells in proportion to the law
(Cauchy-Schwarz); the statistic is then noncentral chi-square with noncentrality 4 d^2 times the sample size. So "seen
with 99% power" below holds for every fault of that size, whichever cells it moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

FAILS_BELOW = 1e-6
"""A p-value below this fails: with a hundred tests a sound loop fails one time in ten thousand."""
POWER = 0.99
SMALLEST = 5.0
"""Cells that expect fewer than this many are pooled: below, the statistic is not chi-square."""


@dataclass(frozen=True)
class Result:
    """What a G test says.

    Attributes:
        samples, cells: size of the sample, and cells after pooling.
        p: probability of a statistic at least this large under the law.
        tv_seen: smallest total variation distance (between the laws of the cells) that would have failed the test with
            99% power: where the test passes, an upper bound of the distance, at that confidence.
    """

    samples: int
    cells: int
    p: float
    tv_seen: float

    @property
    def passed(self) -> bool:
        return self.p >= FAILS_BELOW


def g_test(observed: np.ndarray, law: np.ndarray) -> Result:
    """Hold counts against a law.

    Args:
        observed: counts, any shape.
        law: probabilities of the same shape. A cell of probability 0 that was observed fails at once (p = 0).
    Raises:
        ValueError: no counts, shapes that differ, or a law that is none.
    """
    if observed.shape != law.shape or observed.sum() == 0:
        raise ValueError(f"counts {observed.shape} (sum {observed.sum()}) do not fit a law of {law.shape}")
    if not (np.isfinite(law).all() and law.min() >= 0 and law.sum() > 0):
        raise ValueError("the law holds negative probabilities, or none at all")
    counts, law = observed.ravel(), law.ravel() / law.sum()
    samples = int(counts.sum())
    impossible = law == 0
    found, expected = pooled(counts[~impossible], law[~impossible] * samples)
    seen = smallest_seen(samples, len(found))
    if counts[impossible].any():
        return Result(samples, len(found), 0.0, seen)
    if len(found) == 1:
        return Result(samples, 1, 1.0, seen)
    p = stats.power_divergence(found, expected, lambda_="log-likelihood").pvalue
    return Result(samples, len(found), float(p), seen)


def pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expectations with the smallest cells made one, until every cell expects :data:`SMALLEST` or more."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    few = int((expected < SMALLEST).sum())
    if few == 0:
        return counts, expected
    while few < len(expected) and expected[:few].sum() < SMALLEST:
        few += 1
    first = [counts[:few].sum()], [expected[:few].sum()]
    return np.append(first[0], counts[few:]), np.append(first[1], expected[few:])


def noncentrality(cells: int) -> float:
    """Noncentrality at which the test of so many cells fails with 99% power."""
    freedom = cells - 1
    limit = stats.chi2.isf(FAILS_BELOW, freedom)

    def short(value: float) -> float:
        return stats.ncx2.sf(limit, freedom, value) - POWER

    return float(optimize.brentq(short, 1e-9, 50.0 + 10.0 * limit))


def smallest_seen(samples: int, cells: int) -> float:
    """Smallest total variation distance that a test of this size sees with 99% power; 1 where it sees none."""
    return min(1.0, math.sqrt(noncentrality(cells) / (4 * samples))) if cells > 1 else 1.0


def samples_for(cells: int, distance: float) -> int:
    """Sample size that sees this total variation distance with 99% power."""
    return math.ceil(noncentrality(cells) / (4 * distance**2))
