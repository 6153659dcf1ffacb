"""Processes that work together: how they find each other, share the machine's cores, and wait for each other.

A launcher (``deepspeed``, ``torchrun``) starts the same script several times and tells every process its rank by
environment variables. A trainer joins through DeepSpeed (train/processes.py); what only divides its prompts joins here.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch

from dcd_core.models import choose_device

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: a rank with the longer texts may be hours behind."""


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def planned_world() -> int:
    """Ranks that the launcher started (1 without a launcher), before anything is initialised."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or planned_world())


def join(device: str = "auto") -> Ranks:
    """Join the others of a launcher, without DeepSpeed; alone, there is nobody to wait for.

    Args:
        device: as in :func:`dcd_core.models.choose_device`; ``auto`` and ``cuda`` become this rank's own GPU. Ranks on
            the CPU share its cores.
    """
    world = planned_world()
    chosen = choose_device(device)
    if world == 1:
        return Ranks(0, 1, chosen)
    if chosen.type == "cpu":
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // local_world())))
    elif chosen.index is None:
        chosen = torch.device(chosen.type, int(os.environ.get("LOCAL_RANK", "0")))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    return Ranks(torch.distributed.get_rank(), world, chosen)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def barrier() -> None:
    """Wait until every rank is here; a lone process goes on."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
