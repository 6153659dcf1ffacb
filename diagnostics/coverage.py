"""How often do intervals over prompts hold the truth? A simulation of the intervals of every report, and of others.

    python diagnostics/coverage.py --output runs/coverage

Draws prompts from made-up populations (diagnostics/populations.py) many times over, makes the 95% interval of each
draw, and counts how often it holds the population's own value. Beside the project's interval: percentiles of a
bootstrap over prompts (which earlier results have), its bias-corrected and accelerated form (BCa), and, for speed-ups,
a t interval of the prompts' own log-ratios, which is of their geometric mean. Prints the table and writes metrics.json.
Takes a few minutes; no models, no torch.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit
from tabulate import tabulate

from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry, save_run
from dcd_core.progress import progress
from diagnostics.intervals import spread
from diagnostics.populations import MANY, POPULATIONS, Population, truth

LEVEL = 0.95
Ends = tuple[np.ndarray, np.ndarray]


@dataclass
class Config:
    """Settings of the simulation."""

    output: str = field(metadata={"help": "folder for the result"})
    prompts: list[int] = field(
        default_factory=lambda: [6, 8, 12, 24, 48, 200], metadata={"help": "numbers of prompts, each 2 or more"}
    )
    trials: int = field(default=10_000, metadata={"help": "sets of prompts drawn for each figure"})
    bootstraps: int = field(default=2_000, metadata={"help": "sets for each figure of the slower bootstraps"})
    resamples: int = field(default=1_000, metadata={"help": "resamples of each bootstrap"})
    seed: int = field(default=0, metadata={"help": "seed of the simulation"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        if not self.prompts or min(self.prompts) < 2:
            raise ValueError(f"--prompts must be numbers of 2 or more, got {self.prompts}")
        refuse_below(self, trials=1, bootstraps=1, resamples=1, seed=0)


def main(argv: list[str] | None = None) -> int:
    """Simulate every population at every number of prompts, print and write the coverage."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    folder = save_run(config.output, config, argv, config.overwrite)
    cases = [(population, prompts) for population in POPULATIONS for prompts in config.prompts]
    found = [simulated(*case, config) for case in progress(cases, len(cases), "coverage", "cases")]
    finish_run(folder, {"level": LEVEL, "coverage": found})
    print_table(found)
    return 0


def simulated(population: Population, prompts: int, config: Config) -> dict:
    """Coverage of every kind of interval, as shares, and the width of ours over that of the percentiles."""
    generator = np.random.default_rng([config.seed, prompts])
    value = truth(population, generator)
    ours = coverage(ends, population, prompts, config.trials, generator, value)
    drawn = population.draw((config.bootstraps, prompts), generator)
    percentile, accelerated = bootstrapped(drawn, population, config.resamples, generator)
    geometric = None
    if population.scale == "log":
        geometric = geometric_coverage(population, prompts, config.trials, generator)
    low, high = ends(drawn, population)
    return {
        "population": population.name,
        "limit": population.limit,
        "prompts": prompts,
        "t_interval": ours,
        "percentile": held(percentile, value),
        "bca": held(accelerated, value),
        "geometric_t": geometric,
        "width_over_percentile": float(np.median(high - low) / np.median(percentile[1] - percentile[0])),
    }


def ends(sums: np.ndarray, population: Population) -> Ends:
    """The shipped intervals of sums [trials, prompts, ratios, 2]."""
    return spread(sums, population.statistic).ends(population.scale, LEVEL)


def coverage(
    interval: Callable[[np.ndarray, Population], Ends],
    population: Population,
    prompts: int,
    trials: int,
    generator: np.random.Generator,
    value: float | None = None,
) -> float:
    """Share of `trials` draws of so many prompts whose interval holds the population's value."""
    value = truth(population, generator) if value is None else value
    return held(interval(population.draw((trials, prompts), generator), population), value)


def held(found: Ends, value: float) -> float:
    """Share of intervals with the value inside; ends that are NaN hold nothing."""
    return float(((found[0] <= value) & (value <= found[1])).mean())


# ---- other intervals -------------------------------------------------------------------------------------------------


def bootstrapped(
    sums: np.ndarray, population: Population, resamples: int, generator: np.random.Generator
) -> tuple[Ends, Ends]:
    """Percentile and BCa intervals [Efron & Tibshirani 1993, ch. 13, 14]; the same resamples for every trial."""
    count = sums.shape[1]
    often = generator.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    found = [_bootstrapped(block, often, population) for block in np.array_split(sums, -(-len(sums) // 250))]
    return tuple(tuple(np.concatenate(part) for part in zip(*kind, strict=True)) for kind in zip(*found, strict=True))


def _bootstrapped(sums: np.ndarray, often: np.ndarray, population: Population) -> tuple[Ends, Ends]:
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.einsum("bn,tnrk->tbrk", often, sums, optimize=True)
        drawn = np.sort(population.statistic(total[..., 0] / total[..., 1]), axis=1)  # NaN last
        left = sums.sum(1, keepdims=True) - sums
        moved = population.statistic(left[..., 0] / left[..., 1])
    estimate = spread(sums, population.statistic).estimate[:, None]
    tails = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    bias = ndtri(np.clip(((drawn < estimate) + 0.5 * (drawn == estimate)).mean(1), 1e-4, 1 - 1e-4))
    turned = moved.mean(1, keepdims=True) - moved
    with np.errstate(divide="ignore", invalid="ignore"):
        acceleration = np.nan_to_num((turned**3).sum(1) / (6 * (turned**2).sum(1) ** 1.5))
    shifted = bias[:, None] + ndtri(tails)
    levels = ndtr(bias[:, None] + shifted / (1 - acceleration[:, None] * shifted))
    last = np.isfinite(drawn).sum(1, keepdims=True) - 1

    def quantile(share: np.ndarray) -> Ends:
        picked = np.take_along_axis(drawn, np.clip(np.round(share * last).astype(int), 0, None), axis=1)
        return picked[:, 0], picked[:, 1]

    return quantile(np.broadcast_to(tails, levels.shape)), quantile(levels)


def percentiles(sums: np.ndarray, population: Population, resamples: int = 1_000) -> Ends:
    """Percentile intervals, as earlier results have them."""
    return bootstrapped(sums, population, resamples, np.random.default_rng(0))[0]


def geometric_coverage(
    population: Population, prompts: int, trials: int, generator: np.random.Generator
) -> float | None:
    """Coverage of a t interval of the prompts' log statistics for their geometric mean; None where one may be zero."""

    def each(shape: tuple[int, ...]) -> np.ndarray:
        sums = population.draw(shape, generator)
        with np.errstate(divide="ignore"):
            return np.log(population.statistic(sums[..., 0] / sums[..., 1]))

    everyone = each((MANY,))
    if not np.isfinite(everyone).all():
        return None
    logs = each((trials, prompts))
    width = stdtrit(prompts - 1, (1 + LEVEL) / 2) * logs.std(1, ddof=1) / np.sqrt(prompts)
    return held((logs.mean(1) - width, logs.mean(1) + width), everyone.mean())


def print_table(found: list[dict]) -> None:
    """Coverage in percent, a row for each population and number of prompts."""
    rows = []
    for entry in found:
        shares = [entry[name] for name in ("t_interval", "percentile", "bca", "geometric_t")]
        cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
        rows.append([entry["population"], entry["prompts"], *cells, f"{entry['width_over_percentile']:.2f}"])
    headers = ["population", "prompts", "t interval", "percentile", "BCa", "t of log-ratios", "width / percentile's"]
    print("95% intervals that hold the truth, percent")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    for name, limit in dict.fromkeys((entry["population"], entry["limit"]) for entry in found if entry["limit"]):
        print(f"{name}: {limit}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
