"""A place with little room: a small tmpfs as root, a limit on the size of files elsewhere, so that no test is skipped.

Run as a script it is the second kind: ``python full_disk.py BYTES SCRIPT ...`` runs a script of the project under it.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Small:
    """A folder that holds so many bytes, and how a script is run there; ``free`` gives it room."""

    folder: Path
    limit: list[str] = field(default_factory=list)
    mounted: bool = False

    def run(self, script: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *self.limit, script, *flags]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, **CAPTURED)

    def free(self) -> None:
        """Make room."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
        self.limit = []


CAPTURED = {"capture_output": True, "text": True}


@contextmanager
def small(folder: Path, room: int, largest: int) -> Iterator[Small]:
    """A folder with `room` bytes or, where none can be mounted, whose files hold `largest` bytes at most."""
    folder.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)], **CAPTURED
    ).returncode
    try:
        yield Small(folder, [] if mounted else [__file__, str(largest)], mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
