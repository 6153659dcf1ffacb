"""Divergences between rows of log-probabilities, in nats: used by the training loss and the diagnostics."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def kl(log_a: Float[Tensor, "*batch vocab"], log_b: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """KL(a || b) = sum a (log a - log b). An id with a = 0 adds 0; one with a > 0 and b = 0 makes it +inf."""
    difference = (log_a - log_b).masked_fill(log_a == -float("inf"), 0.0)
    return (log_a.exp() * difference).sum(-1).clamp_min(0.0)


def total_variation(
    log_a: Float[Tensor, "*batch vocab"], log_b: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """TV(a, b) = half the sum of |a - b|, in [0, 1]."""
    return ((log_a.exp() - log_b.exp()).abs().sum(-1) / 2).clamp(0.0, 1.0)


def acceptance(log_a: Float[Tensor, "*batch vocab"], log_b: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Acceptance rate of a draft sampled from a and verified against b: sum min(a, b) = 1 - TV(a, b)."""
    return 1.0 - total_variation(log_a, log_b)
