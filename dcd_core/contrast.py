"""The contrastive target, and the size of its signal, as pure functions of logits.

One parametrisation serves every contrastive target of the literature:

    score(x) = sum_m weight_m * log pi_m(x) / temperature_m        on the allowed set M
    target   = softmax(score / T) on M, 0 elsewhere, then top-k, then top-p

with the expert first. DCD [Liu et al., arXiv 2608.12913, Eq. 1] is weights (1 + alpha, -alpha); the cutoff is the
plausibility constraint of Li et al. 2022: M = {x : p(x) >= cutoff * max p}, decided by the un-tempered expert. The
other published targets are class methods of :class:`Target`.

Log-probabilities and logits give the same target: their constants cancel in the softmax. The *signal* is no softmax and
needs normalised rows of both models, so the functions below that measure it normalise first.

A repetition penalty [Keskar et al. 2019] acts on the score of every id of the prefix: it is multiplied by the penalty
where negative and divided by it where positive, after the combination and the mask, before T. It depends on the sign of
a score, so here logits and log-probabilities differ: a penalised target is defined by the raw logits. With one model it
is that of transformers' RepetitionPenaltyLogitsProcessor, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.errors import UserError
from dcd_core.truncation import truncated

LOG_FLOOR = 60.0
"""A negatively weighted model is floored at this many nats below its own maximum over the allowed ids. The floor is
part of the target (vanilla CD and the verifier share it): without it one id that the amateur excludes would get an
infinite score. With a cutoff it reads nothing outside the plausible set, and so neither does the target."""

LARGEST = 1e6
"""Of strengths and temperatures: scores of single precision hold no more."""

_CANCELLED = 1e-9
"""A sum of weights below this is 0 but for rounding."""


@dataclass(frozen=True)
class Target:
    """A contrastive target; one object drives vanilla decoding and the verifier.

    Args:
        alpha: contrast strength of the two-model DCD target, >= 0. Ignored when ``weights`` is given.
        temperature: T >= 0, applied after the combination; 0 is the argmax, ties to the lowest id.
        cutoff: plausibility beta in [0, 1]; 0 keeps every id.
        weights: general form, one per model, expert first (e.g. proxy tuning (1, a, -a)).
        temperatures: one per model, > 0; None for all 1.
        top_k, top_p: truncation of the combined, tempered distribution (never of one model's), see
            :mod:`dcd_core.truncation`; 0 and 1 keep every id. They do not matter at T = 0.
        repetition_penalty: of the combined scores of ids that occur in the prefix (the expert's prompt and all that
            follows it), > 0; 1 is none, above 1 repetition becomes rarer.
    The class methods below take every field that they do not set themselves as a keyword.
    Raises:
        UserError: a value outside its range, by name.
    """

    alpha: float = 0.0
    temperature: float = 1.0
    cutoff: float = 0.0
    weights: tuple[float, ...] | None = None
    temperatures: tuple[float, ...] | None = None
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        _refuse_negative(alpha=self.alpha, temperature=self.temperature)
        if not 0 <= self.cutoff <= 1:
            raise UserError(f"cutoff must lie in [0, 1], got {self.cutoff}")
        weights = self.weights
        if weights is not None and not (weights and all(map(math.isfinite, weights)) and weights[0] > 0):
            raise UserError(f"weights must be finite and the expert's (the first) positive, got {self.weights}")
        if self.temperatures is not None and not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise UserError(f"model temperatures must be finite and > 0, got {self.temperatures}")
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise UserError(f"top_k must be a whole number >= 0 (0 keeps every id), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1] (1 keeps every id), got {self.top_p}")
        penalty = self.repetition_penalty
        if not (isinstance(penalty, Real) and 1 / LARGEST <= penalty <= LARGEST):
            raise UserError(
                f"repetition_penalty must lie between {1 / LARGEST:g} and {LARGEST:g} (1 is none), got {penalty!r}"
            )

    # ---- published targets ---------------------------------------------------------------------------------------

    @classmethod
    def dcd(cls, alpha: float, **fields) -> Target:
        """(1 + alpha) log p - alpha log q, no mask [DCD: Liu et al., arXiv 2608.12913, Eq. 1]."""
        return cls(alpha=alpha, **fields)

    @classmethod
    def obrien(cls, beta: float = 0.5, cutoff: float = 0.1, **fields) -> Target:
        """(1 + beta) z_p - beta z_q where z_p >= max z_p + log cutoff [O'Brien & Lewis 2023].

        Their ``beta`` is DCD's alpha, their ``alpha`` is the cutoff: this is DCD with the mask on.
        """
        _refuse_negative(beta=beta)
        return cls(alpha=beta, cutoff=cutoff, **fields)

    @classmethod
    def li(cls, strength: float, amateur_temperature: float = 1.0, cutoff: float = 0.1, **fields) -> Target:
        """log p - strength * log q / amateur_temperature where p >= cutoff * max p [Li et al. 2022].

        Strengths of 0.5 to 1 and amateur temperatures of 0.5 (GPT-2) and 1 are in use. The weights of the two models do
        not sum to 1: where they agree, the target is flatter than either. Their code's greedy path leaves the mask out;
        here it is always on.
        """
        _refuse_negative(strength=strength)
        return cls(weights=(1.0, -strength), temperatures=(1.0, amateur_temperature), cutoff=cutoff, **fields)

    @classmethod
    def cos(cls, mu: float, temperature: float = 1.0, **fields) -> Target:
        """softmax((z_p - mu z_q) / T) [CoS: Fu et al. 2025], which is DCD at alpha = mu / (1 - mu), T / (1 - mu).

        mu 0.1 is alpha 0.111 and mu 0.5 is alpha 1: curves over mu and over alpha have different axes.

        Raises:
            UserError: mu outside [0, 1); at 1 the target is a bare ratio of the models, which has no alpha.
        """
        if not 0 <= mu < 1:
            raise UserError(f"mu must lie in [0, 1) (alpha = mu / (1 - mu)), got {mu}")
        _refuse_negative(temperature=temperature)
        return cls(alpha=mu / (1 - mu), temperature=temperature / (1 - mu), **fields)

    @classmethod
    def proxy(cls, strength: float = 1.0, **fields) -> Target:
        """log p + strength * (log tuned - log base), three models in this order: a small model's tuning carried over to
        a large one [DExperts: Liu et al. 2021; emulated fine-tuning: Mitchell et al. 2023; proxy tuning: Liu et al.
        2024]."""
        _refuse_negative(strength=strength)
        return cls(weights=(1.0, strength, -strength), **fields)

    @classmethod
    def guidance(cls, strength: float, **fields) -> Target:
        """(1 + strength) log p(x | prompt) - strength * log p(x | negative prompt): classifier-free guidance [Sanchez
        et al. 2023, whose gamma is 1 + strength]. Both rows come from the expert, the second from another prefix
        (:func:`dcd_core.scorers.negative_prompt`)."""
        _refuse_negative(strength=strength)
        return cls(alpha=strength, **fields)

    # ---- what it asks of the models ------------------------------------------------------------------------------

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

    def provisional(self) -> Target:
        """The target of the expert alone that equals this one where all models agree.

        There the score is the expert's row times the sum of the weights. Where that sum is not positive (Li et al. at
        strength 1: a constant score) the expert keeps its own weight. Everything else stays as it is.
        """
        given = self.weights or self.temperatures
        weights = self.model_weights(len(given)) if given else (1.0,)
        total = math.fsum(weights)
        return replace(self, alpha=0.0, weights=(total if total > _CANCELLED else weights[0],), temperatures=None)

    def contrast_weight(self, models: int) -> float:
        """How strongly the models after the expert can move a score: the sum of their |weight / temperature|.

        Raises:
            UserError: the number of models does not fit.
        """
        return math.fsum(map(abs, self.model_weights(models)[1:]))


def _refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} must be a finite number >= 0, got {value!r}")
        if value > LARGEST:
            raise UserError(f"{name} must be at most {LARGEST:g}, got {value:g}")


# ---- rows of logits in, rows of the target out -----------------------------------------------------------------------


def plausible(expert: Float[Tensor, "*batch vocab"], cutoff: float) -> Bool[Tensor, "*batch vocab"]:
    """The plausible set {p(x) >= cutoff * max p}, decided on the raw expert row (logits or log-probs alike)."""
    if cutoff == 0:
        return expert > -math.inf
    return expert >= expert.amax(-1, keepdim=True) + math.log(cutoff)


def floored(
    logits: Float[Tensor, "*batch vocab"], allowed: Bool[Tensor, "*batch vocab"] | None = None
) -> Float[Tensor, "*batch vocab"]:
    """A row floored at LOG_FLOOR nats below its maximum; shift-invariant, so logits and log-probs both fit.

    Args:
        allowed: the ids over which the maximum is taken, None for all: entries elsewhere change nothing here.
    """
    return torch.maximum(logits, _floor(logits, allowed))


def _floor(logits: Float[Tensor, "*batch vocab"], allowed: Bool[Tensor, "*batch vocab"] | None) -> Tensor:
    if allowed is None:
        return logits.amax(-1, keepdim=True) - LOG_FLOOR
    peak = logits.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    # a model that excludes every allowed id says nothing about them: any finite floor will do
    return peak.masked_fill(peak == -math.inf, 0.0) - LOG_FLOOR


def floor_hits(
    expert: Float[Tensor, "*batch vocab"], amateur: Float[Tensor, "*batch vocab"], cutoff: float
) -> Int[Tensor, "*batch"]:
    """How many allowed ids of each row the floor changed."""
    allowed = plausible(expert, cutoff)
    below = amateur < _floor(amateur, allowed if cutoff else None)
    return (below & allowed).sum(-1)


def scores(
    logits: list[Float[Tensor, "*batch vocab"]], target: Target, seen: Bool[Tensor, "*batch vocab"] | None = None
) -> Float[Tensor, "*batch vocab"]:
    """Un-normalised combined score before T, -inf outside the allowed set.

    Args:
        logits: one raw row set per model, expert first, fp32 or fp64, all over the same real ids.
        seen: the ids that occur in each row's prefix; needed by a repetition penalty, and only by that.
    Raises:
        ValueError: a repetition penalty without ``seen``.
    With a cutoff, entries of the other models outside the plausible set change nothing, whatever they are.
    A weight of exactly 0 bypasses its model (0 * inf is NaN), so alpha = 0 is the expert, bit for bit.
    """
    weights = target.model_weights(len(logits))
    expert = logits[0]
    allowed = plausible(expert, target.cutoff) if target.cutoff else None
    combined = None  # one new buffer, worked on in place: over a whole vocabulary every further one costs time
    for row, weight in zip(logits[1:], weights[1:], strict=True):
        if weight:
            row = floored(row, allowed).mul_(weight) if weight < 0 else row * weight
            combined = row if combined is None else combined.add_(row)
    if combined is None:
        combined = expert if weights[0] == 1.0 else expert * weights[0]
    else:
        combined.add_(expert, alpha=weights[0])
    if allowed is not None:
        combined = combined.masked_fill(~allowed, -math.inf)
    if target.repetition_penalty == 1:
        return combined
    if seen is None:
        raise ValueError("a target with a repetition penalty needs the ids that each row's prefix holds")
    penalty = target.repetition_penalty
    return torch.where(seen, torch.where(combined < 0, combined * penalty, combined / penalty), combined)


def choices(logits: list[Float[Tensor, "*batch vocab"]], target: Target) -> Int[Tensor, "*batch"]:
    """The target at temperature 0: argmax of the score, ties to the lowest id."""
    return scores(logits, target).argmax(-1)


def target_log_probs(
    logits: list[Float[Tensor, "*batch vocab"]], target: Target, seen: Bool[Tensor, "*batch vocab"] | None = None
) -> Float[Tensor, "*batch vocab"]:
    """log pi_CD at T > 0; at T = 0 the one-hot row (0 at the chosen id, -inf elsewhere).

    The order: combine the raw scores, mask by the un-tempered expert, penalise repetition, divide by T, then top-k,
    then top-p. Arguments as for :func:`scores`.
    """
    combined = scores(logits, target, seen)
    if target.temperature == 0:
        return torch.full_like(combined, -math.inf).scatter(-1, combined.argmax(-1, keepdim=True), 0.0)
    if target.temperature != 1:
        combined = combined / target.temperature
    return truncated(combined, target.top_k, target.top_p).log_softmax(-1)


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
    allowed = plausible(expert, target.cutoff) if target.cutoff else None
    log_p, log_q = expert.log_softmax(-1), floored(amateur.log_softmax(-1), allowed)
    return (log_p.gather(-1, best) - log_q.gather(-1, best)).squeeze(-1).abs()
