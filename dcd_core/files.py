"""Writing files so that a kill at any moment leaves the old content or the new, and naming content by its hash."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcd_core.errors import UserError

TEMPORARY = ".tmp"
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What only writing can meet: a full disk, a quota or a limit on files, a file system that is read only."""
NOT_WRITTEN_WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "Read-only file system",
    "unexpected pos",
    "PytorchStreamWriter failed writing",
    "file write failed",
)
"""How torch and safetensors, which raise no OSError, say the same."""


def cache_dir(given: str | os.PathLike = "") -> Path:
    """The folder for things that are fetched or computed once: `given`, else $DCD_CACHE, else ~/.cache/dcd."""
    return Path(given or os.environ.get("DCD_CACHE", "") or "~/.cache/dcd").expanduser().resolve()


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; what the body wrote there replaces `path` when the body succeeds.

    The body may write a file or make a folder. If it raises, `path` stays as it was and the temporary one is removed.
    The temporary name keeps the suffix, for writers that go by it. A file is replaced in one step. A folder that exists
    is moved aside first, so for an instant there is none: give a new name to each checkpoint instead of replacing one.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path.name))
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            yield temporary
            if not temporary.exists():
                raise FileNotFoundError(f"nothing was written for {path}")
            if path.is_dir() and temporary.is_dir():
                aside = temporary.with_name(temporary.name + "-old")
                os.replace(path, aside)
                os.replace(temporary, path)
                remove(aside)
            else:
                os.replace(temporary, path)
    finally:
        remove(temporary)


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turn the body's failures to write `path` (full disk, quota, read-only file system) into one line that names it.

    Raises UserError for those, also where torch or safetensors report them; everything else passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NOT_WRITTEN:
            raise not_written(path, os.strerror(error.errno)) from error
        raise
    except UserError:
        raise
    except Exception as error:
        if any(word in str(error) for word in NOT_WRITTEN_WORDS):
            raise not_written(path, _why_not(Path(path)) or str(error)) from error
        raise


def not_written(path: str | os.PathLike, why: str) -> UserError:
    """The refusal of a place that cannot be written, with the room that is left there."""
    return UserError(f"{os.fspath(path)} cannot be written ({why}; {_room(Path(path))})")


def _room(path: Path) -> str:
    free = shutil.disk_usage(_existing(path)).free
    return f"{free / 2**20:.1f} MiB free there" if free < 2**30 else f"{free / 2**30:.1f} GiB free there"


def _why_not(path: Path) -> str:
    """What the system says when a megabyte is written beside `path`; empty when it is."""
    try:
        with tempfile.TemporaryFile(dir=_existing(path.parent)) as probe:
            probe.write(bytes(2**20))
    except OSError as error:
        return error.strerror
    return ""


def _existing(path: Path) -> Path:
    """The nearest folder (or file) above that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def remove_leftovers(folder: str | os.PathLike) -> None:
    """Delete what killed processes of this machine left half-written in `folder`."""
    prefix = _temporary_prefix()
    for path in Path(folder).glob(f"{prefix}*"):
        process = path.name[len(prefix) :].split("-")[0]
        if process.isdigit() and not _alive(int(process)):
            remove(path)


def remove(path: Path) -> None:
    """Delete a file or a folder with all it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text_atomic(path: str | os.PathLike, text: str) -> None:
    """Write `text` in UTF-8; readers see the old file or the whole new one."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON. Dataclasses, paths and numpy or torch scalars are converted.

    Raises UserError naming the entry if a number in it is NaN or infinite: JSON has no such numbers.
    """
    plain = _plain(value)
    where = _not_finite(plain)
    if where:
        raise UserError(f"{Path(path).name}: {where} is not a finite number; nothing was written")
    write_text_atomic(path, json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_output_file(path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = ()) -> Path:
    """`path`, once it is sure that a file can be put there: to be called before the work, not after it.

    Raises UserError for an empty name, a folder or a device, a place where nothing can be written, and for one of
    `inputs`, which would be lost.
    """
    name = os.fspath(path)
    if not name:
        raise UserError("the name of the output file is empty")
    path = Path(name)
    try:
        if path.is_dir() or name.endswith(os.sep):
            raise UserError(f"{name} is a folder, and the output is a file: give it a name in there")
        if path.exists() and not path.is_file():
            raise UserError(f"{name} is no ordinary file and cannot be replaced")
        for other in inputs:
            if path.exists() and os.path.exists(other) and path.samefile(other):
                raise UserError(f"{name} is read from and would be replaced: give the output another name")
        _check_writable(path.parent, name)
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror})") from None
    return path


def check_output_folder(path: str | os.PathLike) -> Path:
    """`path`, once it is sure that files can be put into such a folder; it need not be there yet.

    Raises UserError for an empty name, a file, and a place where nothing can be written.
    """
    name = os.fspath(path)
    if not name:
        raise UserError("the name of the output folder is empty")
    path = Path(name)
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"{name} is a file, and the output is a folder: choose another name")
        _check_writable(path, name)
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror})") from None
    return path


def _check_writable(folder: Path, name: str) -> None:
    """Try it, in the nearest folder that is there: permissions alone say too much to root, and of /proc."""
    folder = _existing(folder)
    if not folder.is_dir():
        raise UserError(f"{name} cannot be written: {folder} is not a folder")
    with tempfile.TemporaryDirectory(prefix=f"{_temporary_prefix()}{os.getpid()}-", dir=folder):
        pass


def file_hash(path: str | os.PathLike) -> str:
    """sha256, in hex, of a file's content; for a folder, of the relative names and contents of all its files."""
    path = Path(path)
    if path.is_dir():
        members = sorted(member for member in path.rglob("*") if member.is_file())
        return content_hash([[member.relative_to(path).as_posix(), file_hash(member)] for member in members])
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def content_hash(value: Any) -> str:
    """sha256, in hex, of a value made of dicts, lists, strings, numbers, dataclasses and paths; key order is no matter.

    Raises TypeError for anything else: a hash of an object's address would differ on every run.
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def temporary_name(name: str) -> str:
    """A name that no other process uses, and by which a leftover is known."""
    return f"{_temporary_prefix()}{os.getpid()}-{uuid.uuid4().hex[:8]}-{name}"


def _temporary_prefix() -> str:
    return f"{TEMPORARY}-{socket.gethostname().replace('-', '_')}-"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _plain(value: Any) -> Any:
    """Reduce a value to what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"cannot store a {type(value).__name__} as JSON")


def _not_finite(value: Any, where: str = "") -> str:
    """The place of the first NaN or infinity in a plain value, as `a.b[2]`; empty when there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return where or "the value"
    if isinstance(value, dict):
        found = (_not_finite(item, f"{where}.{key}" if where else key) for key, item in value.items())
        return next(filter(None, found), "")
    if isinstance(value, list):
        return next(filter(None, (_not_finite(item, f"{where}[{index}]") for index, item in enumerate(value))), "")
    return ""
