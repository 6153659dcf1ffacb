"""Progress of long work: a bar on a terminal, a plain line now and then in a log, nothing on ranks above 0."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 10.0
_work = 0


def work_done() -> int:
    """A number that grows whenever any work of this process moves on: a rank that is slow is not one that hangs."""
    return _work


class Bar:
    """Counts `update`s towards `total`; use it as a context manager where the work is not a plain loop over items."""

    def __init__(self, total: int | None, label: str, unit: str = "it", done: int = 0):
        self.total, self.label, self.unit, self.done = total, label, unit, done
        self.first, self.start = done, time.monotonic()
        self.last_line = self.start
        self.note = ""
        self.quiet = int(os.environ.get("RANK", "0") or 0) > 0
        terminal = sys.stderr.isatty() and not self.quiet
        self.bar = tqdm(total=total, desc=label, unit=unit, initial=done, leave=True) if terminal else None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, note: str = "") -> None:
        """Add `count` to what is done; `note` (such as "loss 2.31") is shown beside the count."""
        global _work
        _work += 1
        self.done += count
        self.note = note or self.note
        if self.bar is not None:
            if note:
                self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self._line()

    def close(self) -> None:
        """End the bar; in a log, the last line is left out when the whole took under two seconds."""
        if self.bar is not None:
            self.bar.close()
        elif time.monotonic() - self.start >= 2.0:
            self._line()

    def _line(self) -> None:
        if self.quiet:
            return
        self.last_line = time.monotonic()
        seconds = max(self.last_line - self.start, 1e-9)
        rate = (self.done - self.first) / seconds
        of_total = f"/{self.total}" if self.total is not None else ""
        left = (
            f", {(self.total - self.done) / rate:.0f} s left"
            if self.total and 0 < self.done < self.total and rate
            else ""
        )
        note = f", {self.note}" if self.note else ""
        text = f"{self.label}: {self.done}{of_total} {self.unit}, {seconds:.0f} s, {rate:.3g}/s{left}{note}"
        print(text, file=sys.stderr, flush=True)


def progress(iterable: Iterable[Item], total: int | None = None, label: str = "", unit: str = "it") -> Iterator[Item]:
    """Pass the items on, showing how many of `total` (or len, where there is one) are done."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    with Bar(total, label, unit) as bar:
        for item in iterable:
            yield item
            bar.update()
