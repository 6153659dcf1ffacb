"""Text files as people have them: UTF-8, or UTF-16 and UTF-32 with a byte-order mark, plain or compressed with gzip."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcd_core.errors import UserError

CHUNK = 1 << 20
POINTER = b"version https://git-lfs.github.com/spec/"
GZIP = b"\x1f\x8b"
COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
# the longer marks first: that of UTF-32 begins with that of UTF-16
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def refuse_pointer(head: bytes, name: str) -> None:
    """Raises UserError if a file that begins with `head` is what git keeps in place of a large file."""
    if head.startswith(POINTER):
        raise UserError(f"{name} is a Git LFS pointer, not the data: run git lfs pull where it was cloned")


def text_chunks(stream: io.BufferedIOBase, name: str) -> Iterator[str]:
    """The decoded text of a stream with `peek`, a chunk at a time, without its byte-order mark.

    Bytes of an unfinished character at the very end are left out. Raises UserError for a Git LFS pointer, a compression
    other than gzip, a damaged gzip file, and for text that is not what its mark says (UTF-8 without one).
    """
    stream = _unpacked(stream, name)
    mark, encoding = next(
        ((mark, encoding) for mark, encoding in MARKS.items() if _peek(stream, name).startswith(mark)), (b"", "utf-8")
    )
    size, line = len(_read(stream, len(mark), name)), 1
    decoder = codecs.getincrementaldecoder(encoding)()
    while data := _read(stream, CHUNK, name):
        size += len(data)
        try:
            text = decoder.decode(data)
        except UnicodeDecodeError as error:
            # what the decoder was at: these data, and before them part of a character of the last ones
            place = size - len(error.object) + error.start
            line += error.object[: error.start].decode(encoding, errors="replace").count("\n")
            shown = encoding.upper().removesuffix("-LE").removesuffix("-BE")
            raise UserError(f"{name} is not {shown} text: line {line}, byte {place} ({error.reason})") from None
        line += text.count("\n")
        # a chunk may hold only part of a character; an empty text would look like the end of the file
        if text:
            yield text


def split_lines(chunks: Iterator[str], name: str, longest: int = 1 << 26) -> Iterator[tuple[str, bool]]:
    """(line, whether the file ends in it). Only newlines separate: JSON text may hold other line separators.

    Raises UserError for a line of more than about `longest` characters.
    """
    buffer, number = "", 0
    for chunk in chunks:
        *lines, buffer = (buffer + chunk).split("\n")
        for line in lines:
            yield line, False
        number += len(lines)
        if len(buffer) > longest:
            raise UserError(f"{name}: line {number + 1} is longer than {longest} characters: it is no record")
    if buffer:
        yield buffer, True


def text_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of a file's lines that are not blank. Raises OSError, and UserError as `text_chunks`."""
    with Path(path).open("rb") as stream:
        for number, (line, _) in enumerate(split_lines(text_chunks(stream, str(path)), str(path)), start=1):
            if line.strip():
                yield number, line


def _unpacked(stream: io.BufferedIOBase, name: str) -> io.BufferedIOBase:
    if _peek(stream, name).startswith(GZIP):
        stream = gzip.GzipFile(fileobj=stream)
    head = _peek(stream, name)
    refuse_pointer(head, name)
    kind = next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), "")
    if kind:
        raise UserError(f"{name} is compressed with {kind}: unpack it first, or compress it with gzip")
    return stream


def _peek(stream: io.BufferedIOBase, name: str) -> bytes:
    with _whole(stream, name):
        return stream.peek(64)[:64]


def _read(stream: io.BufferedIOBase, size: int, name: str) -> bytes:
    with _whole(stream, name):
        return stream.read(size)


@contextmanager
def _whole(stream: io.BufferedIOBase, name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        # what an archive raises says more to the one who opened it
        if not isinstance(stream, gzip.GzipFile):
            raise
        raise UserError(f"{name} is no whole gzip file ({error}): fetch it again") from None
