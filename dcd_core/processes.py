"""Processes that work together: how they find each other, share the machine's cores, and wait for each other.

A launcher (``deepspeed``, ``torchrun``) starts the same script several times and tells every process its rank by
environment variables. A trainer joins through DeepSpeed (train/processes.py); what only divides its prompts joins here.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from dcd_core.errors import UserError
from dcd_core.files import check_output_folder, temporary_name
from dcd_core.models import choose_device

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: a rank with the longer texts may be hours behind."""
SIGHT = 30.0
"""Seconds after which a file of another machine should have come into sight: network file systems cache listings."""


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


def refuse_unshared(folder: str | Path, ranks: Ranks, patience: float = SIGHT) -> None:
    """Make sure that all ranks see one folder: what one writes there, checkpoints and pieces of a run, others read.

    Every rank must call it. The first leaves a file for the others to find, and takes it (and a folder that it made for
    it) away again.

    Args:
        patience: seconds to wait for the file to come into sight.
    Raises:
        UserError: on every rank, naming the machines that do not see it, or saying why the first cannot write there.
    """
    if not torch.distributed.is_initialized():
        return
    # those who are really there: who asks a group of one for a word from another reads back its own blank
    world = torch.distributed.get_world_size()
    if world == 1:
        return
    folder, made = Path(folder), []
    told = ["", ""]  # the file's name, and what kept the first rank from writing it
    if ranks.first:
        told[0] = temporary_name("sight")
        try:
            check_output_folder(folder)
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / told[0]).touch()
        except (OSError, UserError) as error:  # told to all: a rank that raised alone would leave the others waiting
            told[1] = f"{folder} cannot be written: {error}"
    blind: list[str | None] = [None] * world
    try:
        torch.distributed.broadcast_object_list(told, src=0)
        seen = bool(told[1]) or _in_sight(folder / told[0], patience)
        torch.distributed.all_gather_object(blind, None if seen else socket.gethostname())
    finally:
        if ranks.first:
            _take_away(folder / told[0], made)
    if told[1]:
        raise UserError(told[1])
    hosts = sorted({host for host in blind if host is not None})
    if hosts:
        raise UserError(
            f"{folder} is not one folder for all processes: what the first one writes there is not seen on "
            f"{', '.join(hosts)}; give --output a folder that all machines share"
        )


def _in_sight(path: Path, patience: float) -> bool:
    end = time.monotonic() + patience
    while True:
        try:
            # a listing, not a look-up: network file systems remember that a name was missing
            if path.name in os.listdir(path.parent):
                return True
        except OSError:  # not there yet, or somebody else's
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _take_away(path: Path, made: list[Path]) -> None:
    try:
        path.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()
    except OSError:
        pass  # it could not be written, or another run has begun there
