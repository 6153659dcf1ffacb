"""The contrastive target, and the size of its signal, as pure functions of logits.

One parametrisation serves every contrastive target of the literature:

    score(x) = sum_m weight_m * log pi_m(x) / temperature_m        on the allowed set M
    target   = softmax(score / T) on M, 0 elsewhere

with the expert first. DCD [Liu et al., arXiv 2608.12913, Eq. 1] is weights (1 + alpha, -alpha); the cutoff is the
plausibility constraint of Li et al. 2022: M = {x : p(x) >= cutoff * max p}, decided by the un-tempered expert.

Log-probabilities and logits give the same target: their constants cancel in the softmax. The *signal* is no softmax and
needs normalised rows of both models, so the functions below that measure it normalise first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.errors import UserError

LOG_FLOOR = 60.0
"""A negatively weighted model is floored at this many nats below its own maximum. The floor is part of the target
(vanilla CD and the verifier share it): without it one id that the amateur excludes would get an infinite score."""


@dataclass(frozen=True)
class Target:
    """A contrastive target.

    Args:
        alpha: contrast strength of the two-model DCD target, >= 0. Ignored when ``weights`` is given.
        temperature: T >= 0, applied after the combination; 0 is the argmax, ties to the lowest id.
        cutoff: plausibility beta in [0, 1]; 0 keeps every id.
        weights: general form, one per model, expert first (e.g. proxy tuning (1, a, -a)).
        temperatures: one per model, > 0; None for all 1.
    Raises:
        UserError: a value outside its range, by name.
    """

    alpha: float = 0.0
    temperature: float = 1.0
    cutoff: float = 0.0
    weights: tuple[float, ...] | None = None
    temperatures: tuple[float, ...] | None = None

    def __post_init__(self):
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise UserError(f"alpha must be a finite number >= 0, got {self.alpha}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 <= self.cutoff <= 1:
            raise UserError(f"cutoff must lie in [0, 1], got {self.cutoff}")
        weights = self.weights
        if weights is not None and not (weights and all(map(math.isfinite, weights)) and weights[0] > 0):
            raise UserError(f"weights must be finite and the expert's (the first) positive, got {self.weights}")
        if self.temperatures is not None and not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise UserError(f"model temperatures must be finite and > 0, got {self.temperatures}")

    def model_weights(self, models: int) -> tuple[float, ...]:
        """Weight over temperature of each model, expert first.

        Raises:
            UserError: the number of models does not fit.
        """
        if self.weights is not None:
            weights = self.weights
        elif models == 1:
            weights = (1.0,)
        elif models == 2:
            weights = (1.0 + self.alpha, -self.alpha)
        else:
            raise UserError(f"{models} models need explicit weights")
        temperatures = self.temperatures or (1.0,) * models
        if len(weights) != models or len(temperatures) != models:
            raise UserError(f"{models} models, but {len(weights)} weights and {len(temperatures)} temperatures")
        return tuple(weight / temperature for weight, temperature in zip(weights, temperatures, strict=True))


def plausible(expert: Float[Tensor, "*batch vocab"], cutoff: float) -> Bool[Tensor, "*batch vocab"]:
    """The plausible set {p(x) >= cutoff * max p}, decided on the raw expert row (logits or log-probs alike)."""
    if cutoff == 0:
        return expert > -math.inf
    return expert >= expert.amax(-1, keepdim=True) + math.log(cutoff)


def floored(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """A row floored at LOG_FLOOR nats below its maximum; shift-invariant, so logits and log-probs both fit."""
    return torch.maximum(logits, logits.amax(-1, keepdim=True) - LOG_FLOOR)


def floor_hits(
    expert: Float[Tensor, "*batch vocab"], amateur: Float[Tensor, "*batch vocab"], cutoff: float
) -> Int[Tensor, "*batch"]:
    """How many allowed ids of each row the floor changed."""
    below = amateur < amateur.amax(-1, keepdim=True) - LOG_FLOOR
    return (below & plausible(expert, cutoff)).sum(-1)


def scores(logits: list[Float[Tensor, "*batch vocab"]], target: Target) -> Float[Tensor, "*batch vocab"]:
    """Un-normalised combined score before T, -inf outside the allowed set.

    Args:
        logits: one raw row set per model, expert first, fp32 or fp64, all over the same real ids.
    A weight of exactly 0 bypasses its model (0 * inf is NaN), so alpha = 0 is the expert, bit for bit.
    """
    weights = target.model_weights(len(logits))
    expert = logits[0]
    combined = expert if weights[0] == 1.0 else expert * weights[0]
    for row, weight in zip(logits[1:], weights[1:], strict=True):
        if weight:
            combined = torch.add(combined, floored(row) if weight < 0 else row, alpha=weight)
    if target.cutoff:
        combined = combined.masked_fill(~plausible(expert, target.cutoff), -math.inf)
    return combined


def choices(logits: list[Float[Tensor, "*batch vocab"]], target: Target) -> Int[Tensor, "*batch"]:
    """The target at temperature 0: argmax of the score, ties to the lowest id."""
    return scores(logits, target).argmax(-1)


def target_log_probs(logits: list[Float[Tensor, "*batch vocab"]], target: Target) -> Float[Tensor, "*batch vocab"]:
    """log pi_CD at T > 0; at T = 0 the one-hot row (0 at the chosen id, -inf elsewhere)."""
    combined = scores(logits, target)
    if target.temperature == 0:
        return torch.full_like(combined, -math.inf).scatter(-1, combined.argmax(-1, keepdim=True), 0.0)
    if target.temperature != 1:
        combined = combined / target.temperature
    return combined.log_softmax(-1)


def log_z(
    expert: Float[Tensor, "*batch vocab"], amateur: Float[Tensor, "*batch vocab"], alpha: float
) -> Float[Tensor, "*batch"]:
    """log Z = log sum p^(1+alpha) q^(-alpha) = alpha * Renyi_(1+alpha)(p || q) >= 0, from normalised rows, no cutoff.

    With a cutoff, restrict both rows to the allowed set and renormalise first: log Z can be negative otherwise.
    """
    combined = scores([expert.log_softmax(-1), amateur.log_softmax(-1)], Target(alpha=alpha))
    return combined.logsumexp(-1)


def contrast_signal(
    expert: Float[Tensor, "*batch vocab"], amateur: Float[Tensor, "*batch vocab"], target: Target
) -> Float[Tensor, "*batch"]:
    """The paper's signal |log p(x*) - log q(x*)| in nats at x* = argmax pi_CD, not times alpha [DCD, Fig. 2]."""
    best = choices([expert, amateur], target)[..., None]
    log_p, log_q = expert.log_softmax(-1), floored(amateur.log_softmax(-1))
    return (log_p.gather(-1, best) - log_q.gather(-1, best)).squeeze(-1).abs()
