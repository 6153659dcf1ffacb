"""Token files: what is on disk between data preparation and training, written and read in one place.

Parquet, one row per sample: id (string), input_ids (list of int32), answer_spans (list of [start, end) pairs). A span
covers the tokens of one answer up to and including its end-of-turn token; an answer cut off by a length limit has none.
The schema's metadata holds, as JSON under the key `dcd`, where the ids come from (tokenizer hash) and what was counted.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dcd_core.errors import UserError
from dcd_core.files import atomic_path
from dcd_core.text_files import refuse_pointer

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("answer_spans", pa.list_(pa.list_(pa.int32(), 2)), nullable=False),
    ]
)
METADATA_KEY = b"dcd"
ROWS_PER_GROUP = 4096


@dataclass(frozen=True)
class Sample:
    """One conversation as token ids. `input_ids`: int32 [position]; `answer_spans`: ordered, disjoint [start, end)."""

    id: str
    input_ids: np.ndarray
    answer_spans: tuple[tuple[int, int], ...]

    def answer_ids(self) -> np.ndarray:
        """The ids of all answers, one after the other: int32 [answer position]."""
        return np.concatenate([self.input_ids[start:end] for start, end in self.answer_spans])

    def mask(self) -> np.ndarray:
        """bool [position]: True where the token belongs to an answer."""
        mask = np.zeros(len(self.input_ids), dtype=bool)
        for start, end in self.answer_spans:
            mask[start:end] = True
        return mask


def span_fault(spans: Iterable[tuple[int, int]], length: int) -> str:
    """What is wrong with the spans, which must be ordered, disjoint, not empty, and inside; empty if nothing is."""
    last = 0
    for start, end in spans:
        # an answer at position 0 would have no token to be predicted from
        if not max(last, 1) <= start < end <= length:
            return f"answer span [{start}, {end}) is empty, out of order or outside its {length} tokens"
        last = end
    return ""


def check_sample(sample: Sample) -> None:
    """Raises UserError unless there are spans, as in `span_fault`, and no negative ids."""
    fault = span_fault(sample.answer_spans, len(sample.input_ids))
    if fault:
        raise UserError(f"sample '{sample.id}': {fault}: write the token file again")
    if not sample.answer_spans:
        raise UserError(f"sample '{sample.id}' has no answer: its loss mask is all zeros; write the token file again")
    if len(sample.input_ids) and sample.input_ids.min() < 0:
        raise UserError(f"sample '{sample.id}' holds a negative token id")


def write_tokens(path: str | Path, samples: Iterable[Sample], metadata: dict) -> None:
    """Write a token file in one step as seen from outside. Raises UserError for a bad sample or none at all."""
    samples = list(samples)
    if not samples:
        raise UserError(
            f"there is not one sample with an answer to write to {path}: every loss mask would be all zeros"
        )
    for sample in samples:
        check_sample(sample)
    table = pa.Table.from_pydict(
        {
            "id": [sample.id for sample in samples],
            "input_ids": [np.asarray(sample.input_ids, dtype=np.int32) for sample in samples],
            "answer_spans": [[list(span) for span in sample.answer_spans] for sample in samples],
        },
        schema=SCHEMA.with_metadata({METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()}),
    )
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, row_group_size=ROWS_PER_GROUP)


def read_tokens(paths: str | Path | Sequence[str | Path]) -> list[Sample]:
    """All samples of one or several token files, in order, each checked. Raises UserError for anything malformed."""
    samples = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        rows = _open(path).read(columns=SCHEMA.names)
        try:
            rows = rows.select(SCHEMA.names).cast(SCHEMA)
        except (pa.ArrowException, ValueError) as error:  # a null where none may be is a plain ValueError
            raise UserError(f"{path} has columns of other types than a token file ({error})") from None
        ids, spans = rows["id"].to_pylist(), rows["answer_spans"].to_pylist()
        for name, tokens, pairs in zip(ids, rows["input_ids"], spans, strict=True):
            if not tokens.is_valid or tokens.values.null_count:
                raise UserError(f"{path}: sample '{name}' lacks some of its token ids")
            sample = Sample(name, tokens.values.to_numpy(), tuple((a, b) for a, b in pairs))
            check_sample(sample)
            samples.append(sample)
    return samples


def read_metadata(path: str | Path) -> dict:
    """The JSON metadata that `write_tokens` stored; {} for a file written by something else."""
    return json.loads((_open(path).schema_arrow.metadata or {}).get(METADATA_KEY, b"{}"))


def _open(path: str | Path) -> pq.ParquetFile:
    if not Path(path).is_file():
        what = "it is a folder" if Path(path).is_dir() else "there is no such file"
        raise UserError(f"{path} cannot be read as a token file ({what}): make it with data_prep/tokenise.py")
    with Path(path).open("rb") as start:
        refuse_pointer(start.read(64), str(path))
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} cannot be read as a token file ({error}): make it with data_prep/tokenise.py"
        ) from None
    missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
    if missing:
        raise UserError(f"{path} has no column '{missing[0]}': make it with data_prep/tokenise.py")
    return file
