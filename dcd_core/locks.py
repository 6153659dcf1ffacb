"""One process at a time in a run folder, or at an output file.

The lock is the kernel's (flock on a small file): it ends with the process that holds it, however that ends, so a lock
that was left behind never blocks. On NFS (Linux, v3 with lockd or v4) it holds between machines too; on a file system
without locks the run goes on, and says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from dcd_core.errors import UserError
from dcd_core.files import TEMPORARY, writing

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PATIENCE_S = 1.0
"""How long to try: another process that only looks holds the lock for an instant."""
_held: dict[Path, tuple[int, ExitStack]] = {}
"""What this process holds until it lets go: by lock file the process (a fork is another one) and how to let go."""


def lock_path(output: str | Path) -> Path:
    """The lock file of a run folder, or of an output file that may not be there yet."""
    output = Path(output)
    return output / f"{TEMPORARY}-lock" if output.is_dir() else output.with_name(f"{TEMPORARY}-lock-{output.name}")


@contextmanager
def held(output: str | Path) -> Iterator[int]:
    """Hold a folder that exists, or an output file, for the body; yields the lock's file descriptor.

    A child that inherits the descriptor keeps the lock until it ends too.

    Raises:
        UserError: another process holds it; the message names it.
    """
    path = lock_path(output)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(path, output)
    try:
        yield handle.fileno()
    finally:
        with handle, suppress(OSError):
            path.unlink()  # while it is held: who opened it meanwhile sees that it is not this file any more


def hold(folder: str | Path) -> None:
    """Hold a run folder, which is made if need be, until :func:`let_go` or the end of this process.

    Raises:
        UserError: another process holds it; the message names it.
    """
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    path = lock_path(folder).resolve()
    if _mine(path):
        return
    stack = ExitStack()
    stack.enter_context(held(folder))
    _held[path] = os.getpid(), stack


def let_go(folder: str | Path) -> None:
    """Let a folder go that this process holds."""
    path = lock_path(folder).resolve()
    if _mine(path):
        _held.pop(path)[1].close()


def let_all_go() -> None:
    """Let everything go that this process holds."""
    for path in [path for path in _held if _mine(path)]:
        _held.pop(path)[1].close()


def refuse_held(folder: str | Path) -> None:
    """Raise UserError, naming the holder, if another process holds a run folder. Changes nothing."""
    path = lock_path(folder).resolve()
    if _mine(path):
        return
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), path.open(encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look at the same time
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise _refusal(folder, path) from None


def _mine(path: Path) -> bool:
    return path in _held and _held[path][0] == os.getpid()


def _locked(path: Path, output: str | Path) -> TextIO:
    end = time.monotonic() + PATIENCE_S
    while True:
        handle = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(handle, path):
                handle.truncate(0)
                handle.write(json.dumps(_this_process()))
                handle.flush()
                return handle
            handle.close()  # its holder removed it between our two steps
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                print(
                    f"warning: the file system of {path.parent} has no locks ({error.strerror}): make sure that no "
                    "other process writes there",
                    file=sys.stderr,
                )
                return handle
            handle.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if time.monotonic() > end:
                raise _refusal(output, path) from None
            time.sleep(0.05)


def _same_file(handle: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _this_process() -> dict:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _refusal(output: str | Path, path: Path) -> UserError:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        holder = "process {pid} (or one that it started) on {host} since {since}: {command}".format(**found)
    except (OSError, ValueError, KeyError, TypeError):  # it has only just taken the lock
        holder = "another process"
    return UserError(f"{output} is in use by {holder}. Wait for it, end it, or choose another output")
