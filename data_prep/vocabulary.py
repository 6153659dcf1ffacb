"""Draft vocabulary: the target ids that a draft head can propose, chosen by how often answers use them.

d2t [N] holds OFFSETS: draft id i stands for target id i + d2t[i]; t2d [V] is membership. The used ids are sorted, so
that both describe the same map (EAGLE-3 reference code; SpecForge). Ids that answers never use fill up a vocabulary
that would be too small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.token_files import read_tokens
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, content_hash


@dataclass(frozen=True)
class DraftVocabulary:
    """The map from draft ids 0..N-1 to target ids 0..V-1. `coverage`: its share of the answer tokens counted for it."""

    d2t: Int[Tensor, " draft_vocab"]
    t2d: Bool[Tensor, " vocab"]
    coverage: float

    def __post_init__(self):
        check_map(self.d2t, self.t2d)

    @property
    def target_ids(self) -> Int[Tensor, " draft_vocab"]:
        """The target id of each draft id, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    @property
    def content_hash(self) -> str:
        """sha256 of the map: equal exactly when the two vocabularies are interchangeable."""
        return content_hash({"vocab_size": len(self.t2d), "target_ids": self.target_ids.tolist()})

    def coverage_of(self, token_files: str | Path | Sequence[str | Path]) -> float:
        """Share of these files' answer tokens that the head could propose."""
        counts = answer_counts(token_files, len(self.t2d))
        return float(counts[self.t2d.numpy()].sum() / counts.sum())

    def save(self, path: str | Path) -> None:
        """Write one safetensors file (d2t, t2d; coverage and hash as metadata)."""
        metadata = {"content_hash": self.content_hash, "coverage": repr(self.coverage)}
        with atomic_path(path) as temporary:
            save_file({"d2t": self.d2t.contiguous(), "t2d": self.t2d.contiguous()}, temporary, metadata=metadata)


def check_map(d2t: Int[Tensor, " draft_vocab"], t2d: Bool[Tensor, " vocab"]) -> None:
    """Raises UserError unless d2t (int64 offsets) and t2d (bool) are the same strictly increasing map."""
    problem = None
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        problem = f"d2t must be int64 and t2d bool, got {d2t.dtype} and {t2d.dtype}"
    elif len(d2t) == 0 or int(t2d.sum()) != len(d2t):
        problem = f"t2d marks {int(t2d.sum())} target ids, d2t maps {len(d2t)} draft ids"
    elif not torch.equal(torch.arange(len(d2t)) + d2t.cpu(), t2d.cpu().nonzero().flatten()):
        problem = "arange + d2t (offsets!) does not give the ids that t2d marks"
    if problem:
        raise UserError(f"draft vocabulary is inconsistent: {problem}")


def answer_counts(token_files: str | Path | Sequence[str | Path], vocab_size: int) -> np.ndarray:
    """How often each target id occurs in answers, end-of-turn tokens included: int64 [vocab].

    Raises UserError for an id outside the vocabulary, which means that the files belong to another tokenizer.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in read_tokens(token_files):
        ids = sample.answer_ids()
        if ids.max() >= vocab_size:
            raise UserError(
                f"sample '{sample.id}' holds id {ids.max()}, outside a vocabulary of {vocab_size}: "
                "the token files were made with another tokenizer"
            )
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def build_vocabulary(
    token_files: str | Path | Sequence[str | Path], vocab_size: int, draft_vocab_size: int
) -> DraftVocabulary:
    """The `draft_vocab_size` most frequent answer ids (ties to the lower id), padded with the lowest unused ids.

    Equal sizes give the identity map (d2t all zeros). Raises UserError for a draft vocabulary larger than the target's.
    """
    if not 1 <= draft_vocab_size <= vocab_size:
        raise UserError(
            f"a draft vocabulary of {draft_vocab_size} ids does not fit a target vocabulary of {vocab_size}: "
            f"choose between 1 and {vocab_size}"
        )
    counts = answer_counts(token_files, vocab_size)
    # A stable sort keeps equal counts in id order, unused ids (count 0) among them: that is the padding.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size])
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.from_numpy(chosen)] = True
    d2t = torch.from_numpy(chosen - np.arange(draft_vocab_size))
    return DraftVocabulary(d2t, t2d, float(counts[chosen].sum() / counts.sum()))


def load_vocabulary(path: str | Path) -> DraftVocabulary:
    """Read what `DraftVocabulary.save` wrote. Raises UserError if it is missing, damaged or not what its hash says."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            vocabulary = DraftVocabulary(
                file.get_tensor("d2t"), file.get_tensor("t2d"), float(metadata.get("coverage", "nan"))
            )
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a draft vocabulary ({error})") from None
    if vocabulary.content_hash != metadata.get("content_hash"):
        raise UserError(f"{path}: the map is not the one its content hash was made from: build it again")
    return vocabulary
