"""A place with little room: a small tmpfs as root, elsewhere a limit on the size of files: no test is skipped."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Small:
    """A folder that can be made full, for this process, and empty again.

    Attributes:
        largest: bytes that a file of a child may have while it is full; 0 where the folder itself has no room.
    """

    def __init__(self, folder: Path):
        self.folder, self.largest = folder, 0
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room: int) -> None:
        """Leave so many bytes, or let no new file have more."""
        if self.mounted:
            self._resize(f"{shutil.disk_usage(self.folder).used + room}")
        else:
            self.largest = room
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, self.before[1]))

    def free(self) -> None:
        """Make room."""
        if self.mounted:
            self._resize("64m")
        self.largest = 0
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)

    def _resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)


@contextmanager
def small(folder: Path) -> Iterator[Small]:
    place = Small(folder)
    try:
        yield place
    finally:
        place.free()
        if place.mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
