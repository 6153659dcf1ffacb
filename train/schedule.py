"""Learning rate as a pure function of the optimiser step, so that nothing of it has to be saved."""

import math

SCHEDULES = ("cosine", "linear")


def learning_rate(step: int, total: int, peak: float, warmup: int, schedule: str, final_ratio: float = 0.0) -> float:
    """Rate of optimiser step ``step`` (0-based): linear warm-up to ``peak``, then cosine or linear decay.

    The decay reaches ``final_ratio * peak`` one step after the last, so that no step is wasted at rate 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return peak * (final_ratio + (1 - final_ratio) * shape)
