"""A thread that ends its process when waiting has no end: the launcher is gone, or another rank does not answer.

Neither can be left to the main thread, which may be inside a collective operation. Every rank writes to the group's
store how many collective operations it has started and how much work it has done since; a rank that has started fewer
than another, and does nothing new, is the one that all wait for. So it works with every backend, and a rank that is
slow but at work is waited for without end.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from dcd_core import progress

TIMED_OUT = 124
"""Exit code of a rank that has waited too long, as of timeout(1)."""
LEFT_BEHIND = 129
"""Exit code of a rank whose launcher is gone, as after a hang-up."""
GRACE_S = 5.0
"""Between the rank that says who does not answer and the others: a launcher kills all ranks once one has ended."""
LAUNCH = "deepspeed.launcher.launch"
"""DeepSpeed's process on each machine, whose own parent is the command that the user started."""


def launchers() -> list[tuple[int, int]]:
    """(process, its parent): this process, and DeepSpeed's inner launcher if that is the parent and was started by the
    outer one."""
    found = [(os.getpid(), parent_of(os.getpid()))]
    above = parent_of(found[0][1])
    if LAUNCH in command_of(found[0][1]) and "deepspeed" in command_of(above):
        found.append((found[0][1], above))
    return found


def parent_of(process: int) -> int:
    """Of a process of this machine; 0 when there is no such process (or no /proc)."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", encoding="utf-8") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def command_of(process: int) -> str:
    """The command line of a process of this machine; empty when there is none."""
    with suppress(OSError), open(f"/proc/{process}/cmdline", encoding="utf-8", errors="replace") as file:
        return file.read().replace("\0", " ")
    return ""


@dataclass
class News:
    """What is known of one rank: collective operations started, work done, and when that last changed (here)."""

    started: int = 0
    work: int = 0
    since: float = field(default_factory=time.monotonic)

    def update(self, started: int, work: int) -> None:
        if (started, work) != (self.started, self.work):
            self.started, self.work, self.since = started, work, time.monotonic()


class Watch(threading.Thread):
    """Watches until the process ends.

    Args:
        store: the group's, through a connection of its own; None watches the launcher alone.
        patience: seconds without news after which a rank that the others wait for counts as not answering.
    """

    def __init__(self, rank: int = 0, world: int = 1, store=None, patience: float = 0.0, launched: bool = True):
        super().__init__(daemon=True, name="watch")
        self.rank, self.store, self.patience = rank, store, patience
        self.parents = launchers() if launched else []
        self.news = [News() for _ in range(world)]
        self.ending = threading.Event()
        atexit.register(self.stop)

    def stop(self) -> None:
        """No rank is waited for any more."""
        self.ending.set()

    def run(self) -> None:
        while not self.ending.wait(min(1.0, self.patience / 10 or 1.0)):
            if any(parent_of(process) != parent for process, parent in self.parents):
                self.end("the launcher of this process is gone: it writes nothing more and ends", LEFT_BEHIND)
            if self.store is not None:
                self.compare()

    def compare(self) -> None:
        """Exchange news with the other ranks; end the process if one of them does not answer."""
        reachable, now = self.exchange(), time.monotonic()
        if any(now - news.since < self.patience for news in self.news):
            return
        most = max(news.started for news in self.news)
        silent = [rank for rank, news in enumerate(self.news) if news.started < most] if reachable else [0]
        if not silent:  # all are at work, or inside one operation, which has a timeout of its own
            return
        others = [rank for rank in range(len(self.news)) if rank not in silent]
        if self.rank != others[0]:
            time.sleep(GRACE_S)
        self.end(
            f"rank {', '.join(map(str, silent))} of {len(self.news)} ({', '.join(self.hosts(silent))}) did not answer "
            f"for {self.patience / 60:g} minutes while the others waited; see what it printed, or raise "
            "--timeout_minutes if it was only slow",
            TIMED_OUT,
        )

    def exchange(self) -> bool:
        """Whether the store, which rank 0 keeps, could be asked."""
        self.news[self.rank].update(collectives_started(), progress.work_done())
        mine = self.news[self.rank]
        try:
            self.store.set(f"news/{self.rank}", f"{mine.started} {mine.work}")
            for news, text in zip(self.news, self.store.multi_get(self.keys("news")), strict=True):
                news.update(*map(int, text.split()))
        except RuntimeError:  # torch.distributed.DistError is one
            return False
        return True

    def keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(len(self.news))]

    def hosts(self, ranks: list[int]) -> list[str]:
        try:
            return sorted({self.store.get(f"host/{rank}").decode() for rank in ranks})
        except RuntimeError:
            return ["its machine cannot be reached"]

    def end(self, why: str, code: int) -> None:
        if not self.ending.is_set():
            with suppress(OSError, ValueError):
                print(f"error: {why}", file=sys.stderr, flush=True)
            os._exit(code)


def announce(store, rank: int) -> None:
    """Say in the store that this rank is there, and where."""
    store.set(f"host/{rank}", socket.gethostname())
    store.set(f"news/{rank}", "0 0")


def collectives_started() -> int:
    """How many this process has started, over all its groups."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in list(groups))
