"""Processes that work together: how they find each other, share the machine's cores, and wait for each other.

A launcher (``deepspeed``, ``torchrun``) starts the same script several times and tells every process its rank by
environment variables. A trainer joins through DeepSpeed (train/processes.py); what only divides its prompts joins here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from dcd_core.errors import UserError
from dcd_core.files import check_output_folder, temporary_name
from dcd_core.locks import hold
from dcd_core.models import choose_device
from dcd_core.watch import Watch, announce

PATIENCE = timedelta(days=7)
"""How long one operation of ranks that share prompts may take: a rank with the longer texts may be hours behind. That a
rank does nothing at all is seen earlier (dcd_core/watch.py)."""
MEETING = "dcd://"
"""Where ranks meet, for `init_process_group`: as with env://, but who is missing is named."""
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


ALONE = Ranks(0, 1, torch.device("cpu"))


LONGEST_WAIT = 30 * 24 * 60
"""Minutes: a month. torch's timers overflow far above that."""


@dataclass(kw_only=True)
class WaitFlags:
    """Settings of scripts whose ranks wait for each other, to be inherited."""

    timeout_minutes: float = field(
        default=30.0,
        metadata={"help": "end if a rank that the others wait for does nothing for so long", "weights": False},
    )

    def __post_init__(self):
        getattr(super(), "__post_init__", lambda: None)()  # of the class that it is inherited beside
        if not 0 < self.timeout_minutes <= LONGEST_WAIT:
            raise ValueError(f"--timeout_minutes must lie in (0, {LONGEST_WAIT}], got {self.timeout_minutes:g}")


def planned_world() -> int:
    """Ranks that the launcher started (1 without a launcher), before anything is initialised."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or planned_world())


def join(device: str = "auto", timeout_minutes: float = WaitFlags.timeout_minutes) -> Ranks:
    """Join the others of a launcher, without DeepSpeed; alone, there is nobody to wait for.

    Args:
        device: as in :func:`dcd_core.models.choose_device`; ``auto`` and ``cuda`` become this rank's own GPU. Ranks on
            the CPU share its cores.
        timeout_minutes: see :class:`WaitFlags`.
    Raises:
        UserError: a rank that did not come, by number.
    """
    world = planned_world()
    chosen = choose_device(device)
    if world == 1:
        return Ranks(0, 1, chosen)
    if chosen.type == "cpu":
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // local_world())))
    elif chosen.index is None:
        chosen = torch.device(chosen.type, int(os.environ.get("LOCAL_RANK", "0")))

    meet(lambda: torch.distributed.init_process_group("gloo", init_method=MEETING, timeout=PATIENCE), timeout_minutes)
    return Ranks(torch.distributed.get_rank(), world, chosen)


def meet(start: Callable[[], None], timeout_minutes: float, launched: bool = True) -> None:
    """Begin the process group by ``start()``, which meets the other ranks at :data:`MEETING`; from then on the launcher
    and the other ranks are watched. Does nothing where there is a group.

    Args:
        launched: whether a launcher started this process.
    """
    if torch.distributed.is_initialized():
        return
    global _waiting
    _waiting = timedelta(minutes=timeout_minutes)
    start()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if launched:
        Watch(rank, world, _store(_waiting, False) if world > 1 else None, _waiting.total_seconds()).start()


_waiting = timedelta()


def _meet(_url: str, **_options) -> Iterator[tuple[PrefixStore, int, int]]:
    """What torch asks for a store, this rank and the number of ranks (a rendezvous handler)."""
    rank, world = int(os.environ["RANK"]), planned_world()
    # torchrun keeps a store of its own at that address
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    missing, minutes = [0], _waiting.total_seconds() / 60
    try:
        store = _store(_waiting, keeps)
        announce(store, rank)
        end = time.monotonic() + _waiting.total_seconds()
        missing = [other for other in range(world) if not _came(store, other, end)]
    except torch.distributed.DistError as error:
        if keeps:
            raise UserError(f"port {os.environ['MASTER_PORT']} cannot be used ({error}); choose another") from None
    if missing:
        raise UserError(
            f"rank {', '.join(map(str, missing))} of {world} did not come within {minutes:g} minutes; see what it "
            "printed, or raise --timeout_minutes if it was only slow"
        )
    yield store, rank, world
    raise RuntimeError("the ranks of a run meet once")


def _came(store: PrefixStore, rank: int, end: float) -> bool:
    try:
        store.wait([f"host/{rank}"], timedelta(seconds=max(0.1, end - time.monotonic())))
    except torch.distributed.DistError:
        return False
    return True


def _store(timeout: timedelta, keeps: bool) -> PrefixStore:
    """A connection of its own to the store of all ranks, which one of them keeps."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=keeps, timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"dcd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


register_rendezvous_handler(MEETING.removesuffix("://"), _meet)


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


def hold_for_all(folder: str | Path, ranks: Ranks) -> None:
    """Hold a run folder by the first rank, for all of them; every rank must call it.

    Raises:
        UserError: on every rank, if another process holds it; the message names it.
    """
    why = [""]
    if ranks.first:
        try:
            hold(folder)
        except (OSError, UserError) as error:
            why = [str(error)]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(why, src=0)
    if why[0]:
        raise UserError(why[0])


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
