"""How long a pass over so many tokens takes on this machine: what decides how much of a draft pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dcd_core.models import LanguageModel

SIZES = (1, 8, 24)
"""Tokens of the passes that are timed; between and beyond them, time is taken to be linear."""
CONTEXT = 16
REPEATS = 2


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass, by the tokens of all rows together (only ratios matter).

    Args:
        sizes: tokens, ascending.
        expert, others, head: seconds at these sizes; ``others`` of all models after the expert together.
    """

    sizes: tuple[int, ...]
    expert: tuple[float, ...]
    others: tuple[float, ...]
    head: tuple[float, ...]

    def of(self, part: str, tokens: int) -> float:
        """Seconds of one pass of ``expert``, ``others`` or ``head``."""
        seconds = getattr(self, part)
        if tokens <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(tokens, self.sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return seconds[-1] + max(0.0, slope) * (tokens - self.sizes[-1])


@torch.no_grad()
def measure(models: Sequence[LanguageModel], head: nn.Module | None = None) -> PassTimes:
    """Time passes of the expert, of the models after it, and of the head (0 without one): below a second for models of
    8B parameters on a GPU."""
    expert, *others = models
    seconds = {"expert": _model(expert), "others": [0.0] * len(SIZES), "head": [0.0] * len(SIZES)}
    for model in others:
        seconds["others"] = [one + more for one, more in zip(seconds["others"], _model(model), strict=True)]
    if head is not None:
        seconds["head"] = _head(head, expert)
    # a pass over more tokens that was timed as faster was not
    return PassTimes(SIZES, **{name: tuple(np.maximum.accumulate(values)) for name, values in seconds.items()})


def _model(model: LanguageModel) -> list[float]:
    cache = model.new_cache(1, CONTEXT + SIZES[-1])
    prompt = torch.zeros(1, CONTEXT, dtype=torch.int64, device=model.device)
    model.forward(prompt, cache)
    cache.commit([CONTEXT])
    return [_timed(lambda size=size: model.forward(prompt.new_zeros(1, size), cache), model.device) for size in SIZES]


def _head(head: nn.Module, expert: LanguageModel) -> list[float]:
    cache = head.new_cache(1, CONTEXT + SIZES[-1])
    states = torch.zeros(1, SIZES[-1], head.config.hidden_size, dtype=head.dtype, device=expert.device)
    return [
        _timed(lambda some=states[:, :size]: head.logits(head.step(some, some, cache)), expert.device) for size in SIZES
    ]


def _timed(run: Callable, device: torch.device) -> float:
    """Seconds of the fastest of a few runs after one that warms up."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(REPEATS))
