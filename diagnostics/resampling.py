"""Bootstrap over prompts.

The unit is the prompt: tokens of one answer are not independent. Every statistic here is a function of sums per prompt,
so one resample is one row of counts and ten thousand of them are a matrix product. The same seed draws the same
prompts, which is what makes two arms paired. Intervals are percentile intervals. Drafters that were trained several
times, from several seeds, are a second level (`changes`). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

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
class Change:
    """How much an arm differs from the baseline, and how sure that is.

    Attributes:
        draws: resampled changes over prompts and, with two training seeds or more, over those; None for one prompt.
        prompt_draws: the same over prompts alone, i.e. for just these trained drafters.
        prompts, seeds: how many of each.
        seed_deviation: standard deviation of the change between training seeds; None with a single seed.
    """

    estimate: float
    draws: np.ndarray | None
    prompt_draws: np.ndarray | None
    prompts: int
    seeds: int
    seed_deviation: float | None = None

    def interval(self, level: float = 0.95, seeds: bool = True) -> Interval:
        """Percentile interval; `seeds` False leaves the training seeds out of it."""
        drawn = self.draws if seeds else self.prompt_draws
        if drawn is None:
            return Interval(self.estimate, None, None, self.prompts, level)
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        return Interval(self.estimate, float(low), float(high), self.prompts, level)

    @property
    def of_these_drafters(self) -> Change:
        """The same change with no more than the prompts left to chance: of just these trained drafters."""
        return replace(self, draws=self.prompt_draws)

    def p_below(self, value: float) -> float:
        """One-sided p-value against "the change is `value` or more": small where it is surely less. 1 without draws."""
        return self._share(lambda drawn: drawn >= value)

    def p_above(self, value: float) -> float:
        """One-sided p-value against "the change is `value` or less"."""
        return self._share(lambda drawn: drawn <= value)

    def _share(self, condition: Callable[[np.ndarray], np.ndarray]) -> float:
        if self.draws is None:
            return 1.0
        # one is added so that no finite bootstrap claims a probability of zero
        return float((1 + condition(self.draws).sum()) / (1 + len(self.draws)))


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
    blocks = [counts.astype(np.float64) @ sums for counts in _draws(len(sums), resamples, seed)]
    return np.concatenate(blocks)


@lru_cache(maxsize=4)
def _draws(prompts: int, resamples: int, seed: int) -> list[np.ndarray]:
    """How often each prompt is drawn in each resample, in blocks [resamples, prompts].

    Kept, as drawing takes longer than summing: a page resamples the same prompts for every figure.
    """
    generator = np.random.default_rng(seed)
    share = np.full(prompts, 1 / prompts)
    kind = np.min_scalar_type(prompts)
    sizes = [min(_BLOCK, resamples - start) for start in range(0, resamples, _BLOCK)]
    return [generator.multinomial(prompts, share, size=size).astype(kind) for size in sizes]


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


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's step-down adjustment: adjusted p-values in the order given."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)
    steps = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted


def changes(sums: np.ndarray, *, relative: bool = True, resamples: int = RESAMPLES, seed: int = 0) -> list[Change]:
    """Change of every arm against arm 0 on the same prompts, with training seeds as a second level.

    Args:
        sums: [prompt, training seed, arm, part, 2], the last axis (numerator, denominator), e.g. (accepted, rounds).
            Seed s of every arm is the same seed. An arm's value is the mean over parts of its ratio of sums, prompts
            and seeds pooled.
        relative: changes as shares of the baseline's value, else in the unit of the ratio.
    Raises:
        UserError: a denominator of zero, or (relative) a baseline of zero.

    Prompts are drawn with replacement, the same for all arms. Training seeds are few: drawing three of three with
    replacement has but two thirds of the variance and no tails, and where seeds dominate a 95% interval so made holds
    the truth less than nine times in ten. So the mean over seeds is drawn from the t distribution of the arm's own
    differences, with seeds - 1 degrees of freedom: arms may differ in how much their seeds matter, and their seeds'
    effects go together, so none lends another its degrees of freedom. What prompts put into these differences is not
    taken off again: where seeds do not differ the interval is about twice as wide as need be; never is it too narrow.
    """
    sums = np.asarray(sums, dtype=np.float64)
    count, seeds, arms = sums.shape[:3]
    values = _arm_values(sums.sum((0, 1)))
    if not np.isfinite(values).all():
        raise UserError("the statistic does not exist for these records: its denominator is zero")
    if relative and not values[0] > 0:
        raise UserError("the baseline's value is zero, so there is no change relative to it")
    scale = values[0] if relative else 1.0
    estimates = [float(change) for change in (values[1:] - values[0]) / scale]
    if count < 2:
        return [Change(estimate, None, None, count, seeds) for estimate in estimates]
    drawn = resampled_sums(sums.reshape(count, -1), resamples, seed).reshape(-1, *sums.shape[1:])
    drawn = drawn[np.isfinite(_arm_values(drawn)).all((1, 2))]  # a resample without any round has no value
    pooled = _arm_values(drawn.sum(1))
    pooled = pooled[pooled[:, 0] > 0] if relative else pooled
    by_prompt = (pooled[:, 1:] - pooled[:, :1]) / (pooled[:, :1] if relative else 1.0)
    if seeds == 1:
        return [Change(estimates[arm], by_prompt[:, arm], by_prompt[:, arm], count, 1) for arm in range(arms - 1)]
    by_seed = _arm_values(sums.sum(0)) / scale
    spread = (by_seed[:, 1:] - by_seed[:, :1]).std(0, ddof=1)
    noise = np.random.default_rng([seed, seeds]).standard_t(seeds - 1, size=by_prompt.shape)
    both = by_prompt + noise * spread / np.sqrt(seeds)
    if (sums[..., 0] >= 0).all():  # nothing can fall by more than all of it
        both = np.maximum(both, -values[0] / scale)
    return [
        Change(estimates[arm], both[:, arm], by_prompt[:, arm], count, seeds, float(spread[arm]))
        for arm in range(arms - 1)
    ]


def _arm_values(totals: np.ndarray) -> np.ndarray:
    """[..., arm, part, 2] -> [..., arm]: the mean over parts of numerator / denominator."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (totals[..., 0] / totals[..., 1]).mean(-1)


def _floats(values) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _ratio_of_ratios(total: np.ndarray) -> np.ndarray:
    return (total[..., 0] / total[..., 1]) / (total[..., 2] / total[..., 3])


def _difference_of_ratios(total: np.ndarray) -> np.ndarray:
    return total[..., 0] / total[..., 1] - total[..., 2] / total[..., 3]
