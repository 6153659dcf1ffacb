"""A store of frozen models' passes: what training reads of the expert and the amateur, on disk.

A folder of ``texts.parquet`` (a token file), ``store.json`` (what it was made of) and ``shard-00000.safetensors`` and
so on, each with the rows of some texts, one after the other: ``features`` (three taps, low | mid | high) and ``hidden``
(after the final norm; logits are remade from it) of the expert, and ``amateur_features`` and ``amateur_hidden``. A
shard is written whole or not at all; the store is finished when the last one is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.token_files import Sample, read_tokens
from dcd_core.errors import UserError
from dcd_core.files import atomic_path

TEXTS, RECORD = "texts.parquet", "store.json"
ROLES = ("", "amateur_")
"""Prefixes of a model's tensors in a shard."""


def text_key(ids: np.ndarray) -> bytes:
    """What a text is found by: its ids."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype=np.int32).tobytes()).digest()


def plan_shards(lengths: Sequence[int], tokens: int) -> list[range]:
    """The texts of each shard: as many as have at most so many tokens, and at least one."""
    shards, start, held = [], 0, 0
    for number, length in enumerate(lengths):
        if number > start and held + length > tokens:
            shards.append(range(start, number))
            start, held = number, 0
        held += length
    return [*shards, range(start, len(lengths))]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, parts: Sequence[dict[str, Tensor]]) -> None:
    """The texts' tensors, joined, in one step as seen from outside."""
    joined = {name: torch.cat([part[name].cpu() for part in parts]).contiguous() for name in parts[0]}
    with atomic_path(path) as temporary:
        save_file(joined, temporary)


class FeatureStore:
    """A finished store, or as much of one as there is.

    Attributes:
        record: what store.json says.
        missing: shards that are not there yet.
    Raises:
        UserError: no store, or a damaged one.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.record = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
            self.texts: list[Sample] = read_tokens(self.folder / TEXTS)
            shards = plan_shards([len(text.input_ids) for text in self.texts], self.record["made"]["shard_tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is no store of features ({error}); make one with data_prep/features.py"
            ) from None
        self.missing = [number for number in range(len(shards)) if not shard_path(self.folder, number).exists()]
        self._places: dict[bytes, tuple[int, slice]] = {}
        for number, texts in enumerate(shards):
            row = 0
            for text in texts:
                ids = self.texts[text].input_ids
                if number not in self.missing:
                    self._places[text_key(ids)] = number, slice(row, row + len(ids))
                row += len(ids)
        self._open: dict[int, safe_open] = {}

    def __contains__(self, ids: np.ndarray) -> bool:
        return text_key(ids) in self._places

    def read(self, ids: np.ndarray, role: str = "", features: bool = True) -> tuple[Tensor | None, Tensor]:
        """Features ``[position, 3 hidden]`` (None if not wanted) and final states ``[position, hidden]`` of a text.

        Args:
            role: of :data:`ROLES`.
        Raises:
            UserError: a shard that cannot be read.
            KeyError: the text is not here.
        """
        number, rows = self._places[text_key(ids)]
        path = shard_path(self.folder, number)
        try:
            if number not in self._open:
                self._open[number] = safe_open(path, framework="pt")
            names = (f"{role}features" if features else None, f"{role}hidden")
            found = [self._open[number].get_slice(name)[rows] if name else None for name in names]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}): remove it and write the store again") from None
        if len(found[1]) != len(ids):
            raise UserError(f"{path} is of another store than {self.folder / TEXTS}: write the store again")
        return found[0], found[1]
