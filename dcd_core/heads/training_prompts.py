"""Which prompts a head was trained on: what it drafts there may be remembered, and says little of other prompts.

A head's folder holds ``training_prompts.npy`` beside its weights: a sorted array of 64-bit hashes, one for the first
prompt of every text that its trainer was given, that is, all ids before its first answer. A prompt counts as trained on
if it begins with one of them; so a conversation is known by its first turn. Of heads without this file, made elsewhere
or earlier, nothing is known. Nor is a prompt known again that became other ids: by another chat template or other
values for it (a date of today, say), another system message, or more user messages before the first answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt64

from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError

PROMPTS = "training_prompts.npy"
Ids = Sequence[int] | Int[np.ndarray, " _"]
CURE = "train the head again, or delete the file: then it is not known what the head was trained on"


def hash_prompt(ids: Ids) -> np.uint64:
    """What a prompt, given as ids, is known by."""
    return np.uint64(_number(hashlib.sha256(_bytes(ids))))


def hash_prompts(prompts: Iterable[Ids]) -> UInt64[np.ndarray, " prompt"]:
    """Hashes of some prompts: sorted, each once."""
    return np.unique(np.array([hash_prompt(ids) for ids in prompts], dtype=np.uint64))


def write_training_prompts(folder: Path, hashes: UInt64[np.ndarray, " prompt"]) -> None:
    """Into the folder of a head that is being written."""
    np.save(folder / PROMPTS, hashes, allow_pickle=False)


def read_training_prompts(folder: Path) -> UInt64[np.ndarray, " prompt"] | None:
    """What a head's folder says; None if it says nothing.

    Raises:
        UserError: a file that is no such array.
    """
    path = folder / PROMPTS
    if not path.is_file():
        return None
    try:
        with path.open("rb") as handle:
            hashes = np.lib.format.read_array(handle, allow_pickle=False)
    except Exception as error:  # numpy lets out what its parsers of a broken header say
        raise UserError(f"{path} is damaged ({error}); {CURE}") from None
    if hashes.dtype != np.uint64 or hashes.ndim != 1 or (hashes[1:] <= hashes[:-1]).any():
        raise UserError(f"{path} is no sorted list of hashes; {CURE}")
    return hashes


def trained_on(prompts: Sequence[Prompt], *lists: UInt64[np.ndarray, " _"]) -> list[list[str]]:
    """For each list, the ids of those prompts that begin as one of its texts does, in their order."""
    beginnings = [_beginnings(prompt.ids) for prompt in prompts]
    found: dict[bytes, list[str]] = {}  # the heads of a family have equal lists
    for hashes in lists:
        if hashes.tobytes() not in found:
            known = [prompt.id for prompt, own in zip(prompts, beginnings, strict=True) if _any_in(own, hashes)]
            found[hashes.tobytes()] = known
    return [found[hashes.tobytes()] for hashes in lists]


def _any_in(some: UInt64[np.ndarray, " some"], hashes: UInt64[np.ndarray, " prompt"]) -> bool:
    """By search, for the hashes are sorted and may be millions."""
    places = np.searchsorted(hashes, some)
    there = places < len(hashes)
    return bool((hashes[places[there]] == some[there]).any())


def _beginnings(ids: Sequence[int]) -> UInt64[np.ndarray, " length"]:
    """The hash of the first id, of the first two, and so on."""
    digest, found = hashlib.sha256(), []
    for token in ids:
        digest.update(_bytes([token]))
        found.append(_number(digest))
    return np.array(found, dtype=np.uint64)


def _bytes(ids: Ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _number(digest) -> int:
    return int.from_bytes(digest.digest()[:8], "little")
