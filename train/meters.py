"""What a training run measures: sums over steps and ranks, divided once, and TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from dcd_core.files import writing
from train.processes import Ranks, add_up


class Meter:
    """Sums over steps and ranks, divided once when they are read."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        self.sums: Tensor | None = None
        self.tokens = 0
        self.start = time.monotonic()

    def add(self, sums: Tensor, tokens: int) -> None:
        self.sums = sums.double() if self.sums is None else self.sums + sums.double()
        self.tokens += tokens

    def read(self) -> dict[str, float]:
        """Metrics per unroll step since the last reading, over all ranks; ``loss`` is step 0's mean."""
        flat = torch.cat([self.sums.flatten().cpu(), torch.tensor([float(self.tokens)], dtype=torch.float64)])
        flat = add_up(flat, self.ranks.device)
        seconds = max(time.monotonic() - self.start, 1e-9)
        metrics = {"loss": 0.0, **per_step(flat[:-1].view(-1, 4)), "tokens_per_s": float(flat[-1]) / seconds}
        metrics["loss"] = metrics["loss/0"]
        self.restart()
        return metrics


def per_step(sums: Tensor) -> dict[str, float]:
    """Means per unroll step from ``[step, (loss, correct, acceptance, rows)]`` sums; steps without rows are left
    out."""
    metrics = {}
    for index, (loss, correct, accepted, rows) in enumerate(sums.tolist()):
        if rows:
            metrics[f"loss/{index}"] = loss / rows
            metrics[f"accuracy/{index}"] = correct / rows
            metrics[f"acceptance/{index}"] = accepted / rows
    metrics.setdefault("loss/0", 0.0)
    metrics.setdefault("accuracy/0", 0.0)
    return metrics


class Board:
    """TensorBoard on rank 0; after a resumption what was logged past the checkpoint is dropped."""

    def __init__(self, folder: Path, ranks: Ranks, done: int):
        self.folder, self.writer = folder, None
        if ranks.first:
            from torch.utils.tensorboard import SummaryWriter

            with writing(folder):
                self.writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def write(self, group: str, metrics: dict[str, float], step: int) -> None:
        if self.writer:
            with writing(self.folder):
                for name, value in metrics.items():
                    self.writer.add_scalar(f"{group}/{name}", value, step)
                self.writer.flush()

    def close(self) -> None:
        if self.writer:
            self.writer.close()
