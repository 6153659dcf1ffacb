"""A file of finished batches that outlives a kill: what was written whole is kept, what was cut off is done again."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dcd_core.files import writing


class PartialFile:
    """JSON lines, a batch at a time: its records, then a line {"batch": number, ...} that makes the batch count.

    Opening it drops whatever follows the last whole batch. `summaries` are the closing lines of the whole ones. The
    caller makes sure that no other process has it open.
    """

    def __init__(self, path: Path):
        self.path = path
        self.summaries: list[dict] = []
        self.offsets: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a+b")
        self.file.truncate(self._read())
        self.file.seek(0, os.SEEK_END)

    def _read(self) -> int:
        """Note the whole batches; returns where they end."""
        self.file.seek(0)
        end, place, offsets = 0, 0, []
        for line in self.file:
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if value is None:
                break
            if "batch" in value:
                if value["batch"] != len(self.summaries) or value["records"] != len(offsets):
                    break
                self.summaries.append(value)
                self.offsets += offsets
                end, offsets = place + len(line), []
            else:
                offsets.append(place)
            place += len(line)
        return end

    def append(self, records: list[dict], **summary) -> None:
        """Add one batch; on return it is on the disk. Raises UserError where there is no room."""
        place = self.file.tell()
        summary = {"batch": len(self.summaries), "records": len(records), **summary}
        lines = [json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in [*records, summary]]
        with writing(self.path):
            self.file.write(b"".join(lines))
            self.file.flush()
            os.fsync(self.file.fileno())
        for line in lines[:-1]:
            self.offsets.append(place)
            place += len(line)
        self.summaries.append(summary)

    def lines(self) -> Iterator[tuple[int, dict]]:
        """(offset, record) of every record, in the order of writing."""
        for offset in self.offsets:
            yield offset, json.loads(self.line_at(offset))

    def line_at(self, offset: int) -> bytes:
        """The stored line that begins there."""
        self.file.seek(offset)
        return self.file.readline()

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self.summaries:
            self.close()
        else:
            self.remove()  # not one whole batch: nothing to go on from

    def close(self) -> None:
        with suppress(OSError):  # of a batch that had no room, and does not count
            self.file.close()

    def remove(self) -> None:
        """Delete and close. Does nothing when closed."""
        if not self.file.closed:
            self.path.unlink(missing_ok=True)
            self.close()
