"""Bootstrap over prompts, and equivalence tests.

The unit is the prompt: tokens of one answer are not independent. Every statistic here is a function of sums per prompt,
so one resample is one row of counts and ten thousand of them are a matrix product. The same seed draws the same
prompts, which is what makes two arms paired. Intervals are percentile intervals. No torch here.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dcd_core.errors import UserError

RESAMPLES = 10_000
_BLOCK = 1_000  # resamples drawn at a time: keeps the count matrix small for thousands of prompts


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. With fewer than two prompts there is no interval: low and high are None."""

    estimate: float
    low: float | None
    high: float | None
    prompts: int
    level: float = 0.95

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Equivalence:
    """Result of two one-sided tests (TOST).

    `p_value` is the larger of the two one-sided ones. `verdict` is "equivalent", "higher", "lower" (the interval lies
    wholly beyond the margin) or "undecided".
    """

    interval: Interval
    margin: float
    p_value: float | None
    verdict: str


def group_sums(prompts: Sequence, values) -> tuple[np.ndarray, np.ndarray]:
    """Sums per prompt: (prompt ids [prompts], sums [prompts, columns]) of `values` [rows] or [rows, columns]."""
    values = np.asarray(values, dtype=np.float64)
    values = values.reshape(len(values), -1)
    if len(prompts) != len(values):
        raise UserError(f"{len(prompts)} prompt ids for {len(values)} rows; every row needs its prompt")
    if not np.isfinite(values).all():
        raise UserError("a value to be resampled is not finite; clean the records first")
    ids, index = np.unique(np.asarray(prompts), return_inverse=True)
    sums = np.zeros((len(ids), values.shape[1]))
    np.add.at(sums, index.reshape(-1), values)
    return ids, sums


def resampled_sums(sums: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Column sums of `sums` [prompts, columns] over prompts drawn with replacement: [resamples, columns]."""
    sums = np.asarray(sums, dtype=np.float64)
    if sums.ndim != 2 or len(sums) == 0:
        raise UserError("a bootstrap over prompts needs at least one prompt")
    generator = np.random.default_rng(seed)
    share = np.full(len(sums), 1 / len(sums))
    blocks = []
    for start in range(0, resamples, _BLOCK):
        counts = generator.multinomial(len(sums), share, size=min(_BLOCK, resamples - start))
        blocks.append(counts @ sums)
    return np.concatenate(blocks)


def interval(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Interval of `statistic`, a function of column sums [..., columns] -> [...], over resampled prompts.

    Resamples where the statistic does not exist (a zero denominator) are left out.
    Raises UserError when it does not exist for the data themselves.
    """
    sums = np.asarray(sums, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(statistic(sums.sum(0)))
        if not np.isfinite(estimate):
            raise UserError("the statistic does not exist for these records: its denominator is zero")
        if len(sums) < 2:
            return Interval(estimate, None, None, len(sums), level)
        drawn = statistic(resampled_sums(sums, resamples, seed))
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), len(sums), level)


def ratio_of_sums(prompts, numerator, denominator, **options) -> Interval:
    """Sum(numerator) / sum(denominator), e.g. tokens / seconds or accepted / rounds, never a mean of ratios."""
    _, sums = group_sums(prompts, np.stack([_floats(numerator), _floats(denominator)], axis=1))
    return interval(sums, lambda total: total[..., 0] / total[..., 1], **options)


def cluster_mean(prompts, values, **options) -> Interval:
    """Mean over rows, with the interval of resampling whole prompts."""
    return ratio_of_sums(prompts, values, np.ones(len(values)), **options)


def paired_ratio(arm: tuple, baseline: tuple, **options) -> Interval:
    """Ratio of two ratios of sums over the same prompts, e.g. tokens/s of a method over tokens/s of `cd`.

    `arm` and `baseline` are each (prompt ids [rows], numerator [rows], denominator [rows]).
    Raises UserError when the two arms do not cover the same prompts.
    """
    sums = paired_sums(arm, baseline)
    return interval(sums, _ratio_of_ratios, **options)


def paired_difference(arm: tuple, baseline: tuple, **options) -> Interval:
    """Difference of two ratios of sums over the same prompts; arguments as for `paired_ratio`."""
    sums = paired_sums(arm, baseline)
    return interval(sums, _difference_of_ratios, **options)


def paired_sums(arm: tuple, baseline: tuple) -> np.ndarray:
    """[prompts, 4]: numerator and denominator of the arm, then of the baseline, prompts in one order."""
    tables = []
    for prompts, numerator, denominator in (arm, baseline):
        tables.append(group_sums(prompts, np.stack([_floats(numerator), _floats(denominator)], axis=1)))
    (ids, left), (other, right) = tables
    if len(ids) != len(other) or (ids != other).any():
        lone = sorted(set(ids.tolist()) ^ set(other.tolist()))
        raise UserError(f"paired arms must cover the same prompts; '{lone[0]}' is in one of them only")
    return np.concatenate([left, right], axis=1)


def equivalence(arm: tuple, baseline: tuple, margin: float, *, resamples=RESAMPLES, seed=0) -> Equivalence:
    """Two one-sided tests that two ratios of sums differ by less than `margin` (same unit as the ratio), at 5% each.

    Equivalent exactly when the 90% interval of the difference lies inside (-margin, +margin). A claim of "no gain" is
    made this way and never from a difference that merely fails to be significant.
    """
    if not margin > 0:
        raise UserError(f"the equivalence margin must be above 0, not {margin}")
    sums = paired_sums(arm, baseline)
    found = interval(sums, _difference_of_ratios, resamples=resamples, seed=seed, level=0.90)
    if found.low is None:
        return Equivalence(found, margin, None, "undecided")
    drawn = _difference_of_ratios(resampled_sums(sums, resamples, seed))
    drawn = drawn[np.isfinite(drawn)]
    # One is added so that no finite bootstrap claims a probability of zero.
    below = (1 + (drawn <= -margin).sum()) / (1 + len(drawn))
    above = (1 + (drawn >= margin).sum()) / (1 + len(drawn))
    if found.low > -margin and found.high < margin:
        verdict = "equivalent"
    elif found.low >= margin:
        verdict = "higher"
    elif found.high <= -margin:
        verdict = "lower"
    else:
        verdict = "undecided"
    return Equivalence(found, margin, float(max(below, above)), verdict)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's step-down adjustment: adjusted p-values in the order given."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)
    steps = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted


def _floats(values) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _ratio_of_ratios(total: np.ndarray) -> np.ndarray:
    return (total[..., 0] / total[..., 1]) / (total[..., 2] / total[..., 3])


def _difference_of_ratios(total: np.ndarray) -> np.ndarray:
    return total[..., 0] / total[..., 1] - total[..., 2] / total[..., 3]
