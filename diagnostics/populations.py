"""Made-up populations of prompts with the shape of real records: what intervals over prompts are tried on. No torch.

A draw is sums per prompt, [..., ratios, 2], as `diagnostics.intervals` takes them. Answers end at the token limit or
before; a prompt's accepted length depends on its content, its rounds scatter around that, and its seconds carry the
noise of a machine, with a slow answer now and then. Per-prompt speed-ups so made have a log standard deviation of .15
to .44. That of `ngrams` is fitted to what the shipped n-gram drafter accepts on reference answers of GSM8K, HumanEval
and CNN/DM (476 answers, up to 64 tokens, mixed): L of .22, .57, 1.06 and 3.35 at 5, 50, 90 and 99% of answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from diagnostics.intervals import only

GAMMA = 5  # drafts a round at most
LIMIT = 48  # tokens of an answer
MANY = 300_000  # prompts that stand for all


@dataclass(frozen=True)
class Population:
    """What is measured on which prompts.

    Args:
        draw: (shape, generator) -> sums [*shape, ratios, 2].
        statistic, scale: of the interval, see `intervals.interval`.
        limit: where no interval from so few prompts can be right, and why.
    """

    name: str
    draw: Callable[[tuple[int, ...], np.random.Generator], np.ndarray]
    statistic: Callable[[np.ndarray], np.ndarray]
    scale: str
    limit: str = ""


def tokens(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Lengths of answers: six in ten reach the limit."""
    ended = generator.integers(8, LIMIT, shape)
    return np.where(generator.random(shape) < 0.6, LIMIT, ended).astype(float)


def any_tokens(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Lengths without a limit that would even them out: a factor of five between the quartiles' outer neighbours."""
    return np.clip(np.round(generator.lognormal(np.log(150), 0.8, shape)), 8, 1024)


def chain(shape, generator):
    """Accepted lengths of a head's chain."""
    return generator.gamma(5, 0.45 / 5, shape)


def tree(shape, generator):
    """Accepted lengths of a head's tree."""
    return generator.gamma(7, 0.85 / 7, shape)


def ngrams(shape, generator):
    """Accepted lengths of n-grams on mixed tasks: a few answers copy their prompt."""
    copied = np.where(generator.random(shape) < 0.04, generator.uniform(1.5, 3.5, shape), 0.0)
    return np.minimum(generator.lognormal(np.log(0.55), 0.5, shape) + copied, GAMMA)


def copying(shape, generator):
    """Accepted lengths of n-grams on summaries and edits."""
    return np.minimum(generator.lognormal(np.log(1.7), 0.75, shape), GAMMA)


def rarely_copying(shape, generator):
    """Accepted lengths of n-grams where one answer in eight copies and the others hardly do."""
    copied = np.where(generator.random(shape) < 0.125, generator.gamma(3, 0.5, shape), 0.0)
    return np.minimum(generator.gamma(2, 0.25 / 2, shape) + copied, GAMMA)


def rounds(length: np.ndarray, accepted: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Rounds of answers of `length` tokens whose drafts are accepted at the rate of their content."""
    scatter = 0.5 * np.sqrt(accepted / (1 + accepted) / length)
    mean = length / (1 + accepted)
    return np.clip(np.round(mean * np.exp(scatter * generator.normal(size=length.shape))), 1, length)


def machine(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Noise of an answer's seconds: 2%, and one answer in fifty is slow by a third."""
    slow = np.where(generator.random(shape) < 0.02, generator.gamma(1, 0.33, shape), 0.0)
    return np.exp(0.02 * generator.normal(size=shape)) * (1 + slow)


def speed_up(accepted: Callable, cost: float, length: Callable = tokens) -> Callable:
    """(tokens, seconds) of a method whose round costs `cost` of a step of `cd`, and of `cd` on the same prompts."""

    def draw(shape, generator):
        size = length(shape, generator)
        steps = rounds(size, accepted(shape, generator), generator)
        seconds = steps * cost * machine(shape, generator) * np.exp(0.03 * generator.normal(size=shape))
        base = size * machine(shape, generator)
        return np.stack([np.stack([size, seconds], -1), np.stack([size, base], -1)], -2)

    return draw


def accepted_lengths(accepted: Callable, heads: int = 1) -> Callable:
    """(accepted, rounds) of one head, or of two on the same prompts, the second a tenth better."""

    def draw(shape, generator):
        size, content = tokens(shape, generator), accepted(shape, generator)
        found = []
        for head in range(heads):
            own = content * (1 + 0.1 * head) * np.exp(0.15 * generator.normal(size=shape) * (heads > 1))
            steps = rounds(size, np.minimum(own, GAMMA), generator)
            found.append(np.stack([size - steps, steps], -1))
        return np.stack(found, -2)

    return draw


def shares(mean: float, reached: float) -> Callable:
    """(accepted, reached) at one place of the draft: a share that depends on content, of few rounds."""

    def draw(shape, generator):
        own = generator.beta(8 * mean, 8 * (1 - mean), shape)
        count = generator.poisson(reached, shape)
        return np.stack([generator.binomial(count, own), count], -1)[..., None, :].astype(float)

    return draw


def gains(shape, generator):
    """(top-1 matches gained minus lost, positions) of a contrast-aligned draft."""
    size = tokens(shape, generator).astype(int)
    won, lost = (generator.beta(40 * mean, 40 * (1 - mean), shape) for mean in (0.06, 0.03))
    return np.stack([generator.binomial(size, won) - generator.binomial(size, lost), size], -1)[..., None, :] * 1.0


def quotient(ratios: np.ndarray) -> np.ndarray:
    return ratios[..., 0] / ratios[..., 1]


def difference(ratios: np.ndarray) -> np.ndarray:
    return ratios[..., 1] - ratios[..., 0]


def relative_change(ratios: np.ndarray) -> np.ndarray:
    return ratios[..., 1] / ratios[..., 0] - 1


FEW_COPY = "six prompts often hold no copying answer, and then nothing in them says that there are any"
POPULATIONS = (
    Population("speed-up: chain of a head", speed_up(chain, 1.33), quotient, "log"),
    Population("speed-up: tree of a head", speed_up(tree, 1.5), quotient, "log"),
    Population("speed-up: chain, lengths of 8 to 1,024", speed_up(chain, 1.33, any_tokens), quotient, "log"),
    Population("speed-up: n-grams, mixed tasks", speed_up(ngrams, 1.1), quotient, "log"),
    Population("speed-up: n-grams, copying tasks", speed_up(copying, 1.15), quotient, "log"),
    Population("L: chain of a head", accepted_lengths(chain), only, "log"),
    Population("L: n-grams, mixed tasks", accepted_lengths(ngrams), only, "log"),
    Population("difference of L: two heads", accepted_lengths(chain, 2), difference, "plain"),
    Population("relative change of L: two heads", accepted_lengths(tree, 2), relative_change, "plain"),
    Population("share accepted at the first place", shares(0.3, 20), only, "logit"),
    Population("share accepted at the third place", shares(0.5, 4), only, "logit"),
    Population("gain in top-1 matches", gains, only, "plain"),
    Population("speed-up: n-grams, one in eight copies", speed_up(rarely_copying, 1.1), quotient, "log", FEW_COPY),
)


def truth(population: Population, generator: np.random.Generator, prompts: int = MANY) -> float:
    """The statistic of so many prompts that no interval would matter."""
    total = population.draw((prompts,), generator).sum(0)
    return float(population.statistic(total[..., 0] / total[..., 1]))
