"""SIGTERM, as schedulers send it before they kill: every rank stops after the same optimiser step."""

from __future__ import annotations

import signal
import threading

import torch

from train.processes import Ranks, add_up

STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was stopped by SIGTERM."""


class Termination:
    """Notes SIGTERM while it is entered; the signal may reach one rank only."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.noted = ranks, False
        self.before = None

    def __enter__(self) -> Termination:
        # only the main thread may set handlers; elsewhere the signal ends the process as it always did
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def _note(self, *_: object) -> None:
        self.noted = True

    def agreed(self) -> bool:
        """Whether any rank got SIGTERM; every rank must ask at the same place, and gets the same answer."""
        if self.ranks.world == 1:
            return self.noted
        return bool(add_up(torch.tensor([float(self.noted)]), self.ranks.device).item())
