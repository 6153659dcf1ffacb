"""How likely the amateur is to change a token that the expert would write: when deferred judging calls the amateur.

A greedy token flips when the contrast moves some other id past the expert's margin. The contrast moves a score by
weight * (log p/q of the one id minus log p/q of the other) / T, so what matters is the margin over weight / T: one law
in that unit serves every alpha, and shared noise as well as T = 0 (where the unit is the weight). Under plain sampling
a provisional token x ~ p is refused with probability TV(p, pi), which to first order is weight / T times the spread of
log p/q under p, and that vanishes as p gathers on one id.

The estimate decides only when the amateur is asked, never what is emitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dcd_core.errors import UserError


@dataclass(frozen=True)
class Deferral:
    """When deferred judging calls the amateur. The defaults were fitted on the demo's pair by diagnostics/calibrate.py.

    Args:
        theta: call it when the estimated probability that a provisional token of a row will not stand reaches this
            (the mean over the rows of a batch).
        ceiling, scale, power: P(flip) = ceiling / (1 + (u / scale)^power) with u = margin over weight / T, in nats.
        spread: P(refused) = spread * weight / T * (1 - max p), for plain sampling.
        most: provisional tokens of a row after which the amateur is called in any case.
    Raises:
        UserError: a value outside its range, by name.
    """

    theta: float = 0.2
    ceiling: float = 0.57
    scale: float = 1.5
    power: float = 2.3
    spread: float = 1.0
    most: int = 48

    def __post_init__(self):
        for name in ("theta", "ceiling", "scale", "power", "spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"defer_{name} must be a finite number of 0 or more, got {value}")
        if self.scale == 0 or self.power == 0:
            raise UserError("defer_scale and defer_power must be above 0")
        if self.ceiling > 1:
            raise UserError(f"defer_ceiling is a probability, got {self.ceiling}")
        if self.most < 1:
            raise UserError(f"defer_most must be at least 1, got {self.most}")


def flip_risk(
    margin: Float[Tensor, "*batch"], weight: float, temperature: float, deferral: Deferral
) -> Float[Tensor, "*batch"]:
    """Estimated probability that the target's choice is not the expert's, from the expert's margin.

    Args:
        margin: best minus second best of what the expert's choice maximises; inf where only one id is allowed.
        weight: how strongly the other models enter the score (:meth:`dcd_core.contrast.Target.contrast_weight`).
    """
    if weight == 0:
        return torch.zeros_like(margin)
    unit = weight / (temperature or 1.0)
    return deferral.ceiling / (1.0 + (margin / (unit * deferral.scale)) ** deferral.power)


def refusal_risk(
    peak: Float[Tensor, "*batch"], weight: float, temperature: float, deferral: Deferral
) -> Float[Tensor, "*batch"]:
    """Estimated probability that a token drawn from the expert is refused, from the largest log-probability."""
    return (deferral.spread * weight / temperature * (1.0 - peak.exp())).clamp(0.0, 1.0)


def margin_of(values: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Best minus second best entry of each row; inf where the second is -inf."""
    best, place = values.max(-1, keepdim=True)
    second = values.scatter(-1, place, -math.inf).amax(-1)
    return best.squeeze(-1) - second
