"""Token files -> micro-batches: which texts every rank sees at every optimiser step, and in which order.

The order is a pure function of (seed, epoch), so a position in the data is two numbers, any rank knows every other
rank's share (the loss is normalised over all of them), and two ranks of b texts see at each step what one rank of 2b
sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped, UInt64
from torch import Tensor

from data_prep.token_files import Sample, read_tokens
from dcd_core.errors import UserError
from dcd_core.files import content_hash, file_hash
from dcd_core.heads.packed import moved
from dcd_core.heads.training_prompts import hash_prompt

BUCKET = 16
"""Global batches whose texts are sorted by length together: less padding, still a shuffled order."""


@dataclass
class Batch:
    """One micro-batch of one rank: right-padded with id 0, which no real row ever sees, and packed."""

    ids: list[str]
    input_ids: Int[Tensor, "batch position"]
    texts: list[np.ndarray]
    spans: list[list[tuple[int, int]]]

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    @property
    def packed_ids(self) -> Int[Tensor, " token"]:
        """All texts, one after the other."""
        return torch.from_numpy(np.concatenate(self.texts).astype(np.int64))

    def pack(self, padded: Shaped[Tensor, "text position *rest"]) -> Shaped[Tensor, "1 token *rest"]:
        """Rows of the padded texts, one text after the other and without padding."""
        width = padded.shape[1]
        if self.tokens == len(self.texts) * width:
            return padded.flatten(0, 1)[None]
        places = np.concatenate([row * width + np.arange(length) for row, length in enumerate(self.lengths)])
        flat = padded.flatten(0, 1)
        return flat.index_select(0, moved(torch.from_numpy(places), flat.device))[None]


@dataclass(frozen=True)
class Texts:
    """The samples of a run, cut to its maximum length, and what that cost."""

    samples: list[Sample]
    hash: str
    shortened: int
    dropped: int

    @classmethod
    def load(
        cls, paths: str | Sequence[str], max_length: int, vocab: int, max_answer_tokens: int = 0, first: int = 0
    ) -> Texts:
        """Read token files.

        A text longer than ``max_length`` is cut there and its answers with it (a cut answer has no end-of-turn token);
        a text that keeps no answer is dropped. Both are counted. Of the rest, ``max_answer_tokens`` keeps the first
        texts up to about that many answer tokens and ``first`` that many texts (0: all), so smaller sets are parts of
        larger ones.

        Raises:
            UserError: nothing left, or ids outside the expert's vocabulary.
        """
        paths = [paths] if isinstance(paths, str) else list(paths)
        samples, shortened, dropped = [], 0, 0
        for sample in read_tokens(paths):
            if int(sample.input_ids.max(initial=0)) >= vocab:
                raise UserError(
                    f"sample '{sample.id}' holds id {int(sample.input_ids.max())}, but the model has {vocab} ids: "
                    "these tokens were made with another tokenizer"
                )
            if len(sample.input_ids) <= max_length:
                samples.append(sample)
                continue
            spans = tuple((start, min(end, max_length)) for start, end in sample.answer_spans if start < max_length)
            if spans:
                samples.append(Sample(sample.id, sample.input_ids[:max_length], spans))
                shortened += 1
            else:
                dropped += 1
        if not samples:
            raise UserError(f"{', '.join(paths)}: no text with an answer within {max_length} tokens; raise max_length")
        if max_answer_tokens:
            ends = np.cumsum([sum(end - start for start, end in sample.answer_spans) for sample in samples])
            samples = samples[: int(np.searchsorted(ends, max_answer_tokens)) + 1]
        samples = samples[: first or None]
        digest = content_hash([max_length, len(samples), [file_hash(path) for path in paths]])
        return cls(samples, digest, shortened, dropped)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> list[int]:
        return [len(sample.input_ids) for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for sample in self.samples for start, end in sample.answer_spans)

    @cached_property
    def prompts(self) -> UInt64[np.ndarray, " text"]:
        """Hashes of what stands before the first answer of each text."""
        return np.array([hash_prompt(sample.input_ids[: sample.answer_spans[0][0]]) for sample in self.samples])

    @property
    def prompt_hashes(self) -> UInt64[np.ndarray, " prompt"]:
        """What a head that is trained on these texts keeps of them."""
        return np.unique(self.prompts)

    def only(self, kept: Bool[np.ndarray, " text"]) -> Texts:
        """Some of the texts."""
        samples = [sample for sample, keep in zip(self.samples, kept, strict=True) if keep]
        digest = content_hash([self.hash, [sample.id for sample in samples]])
        return Texts(samples, digest, self.shortened, self.dropped)

    def describe(self) -> str:
        """One line of counts."""
        lost = (
            f"; {self.shortened} cut, {self.dropped} dropped by the maximum length"
            if self.shortened + self.dropped
            else ""
        )
        return f"{len(self)} texts, {self.tokens} tokens, {self.answer_tokens} of them answers{lost}"

    def batch(self, indices: list[int]) -> Batch:
        """The right-padded batch of these texts; no indices give one text of one token and no answer."""
        chosen = [self.samples[index] for index in indices] or [Sample("(none)", np.zeros(1, np.int32), ())]
        width = max(len(sample.input_ids) for sample in chosen)
        input_ids = np.zeros((len(chosen), width), dtype=np.int64)
        for row, sample in enumerate(chosen):
            input_ids[row, : len(sample.input_ids)] = sample.input_ids
        return Batch(
            ids=[sample.id for sample in chosen],
            input_ids=torch.from_numpy(input_ids),
            texts=[sample.input_ids for sample in chosen],
            spans=[list(sample.answer_spans) for sample in chosen],
        )


@dataclass(frozen=True)
class Plan:
    """Who reads what, when.

    Args:
        lengths: tokens of each text.
        batch_size: texts of one micro-batch of one rank.
        world, accumulation: ranks, and micro-batches per optimiser step.
        seed: of the order.
    """

    lengths: tuple[int, ...]
    batch_size: int
    world: int
    accumulation: int
    seed: int

    @property
    def global_batch(self) -> int:
        """Texts of one optimiser step."""
        return self.batch_size * self.world * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.global_batch)

    def step(self, epoch: int, index: int) -> list[list[list[int]]]:
        """``[micro-batch][rank]`` -> indices of texts, for one optimiser step.

        The epoch's last step may be smaller: then some ranks get fewer texts, or none, but every rank gets every
        micro-batch, so that no rank waits for another at the end of an epoch.
        """
        chosen = _order(self, epoch)[index]
        chosen = sorted(chosen, key=lambda text: (-self.lengths[text], text))
        share = self.batch_size * self.world
        micro = [chosen[start : start + share] for start in range(0, share * self.accumulation, share)]
        return [[texts[rank :: self.world] for rank in range(self.world)] for texts in micro]

    def padded_positions(self, shares: list[list[list[int]]]) -> int:
        """B x T summed over all micro-batches of a step, padding included."""
        return sum(
            len(texts) * max(self.lengths[text] for text in texts) for ranks in shares for texts in ranks if texts
        )


@lru_cache(maxsize=2)
def _order(plan: Plan, epoch: int) -> list[list[int]]:
    """All optimiser steps of an epoch: shuffled, sorted by length within windows, cut, and the pieces shuffled."""
    generator = np.random.default_rng([plan.seed, epoch])
    texts = generator.permutation(len(plan.lengths))
    lengths = np.asarray(plan.lengths)
    window, pieces = BUCKET * plan.global_batch, []
    for start in range(0, len(texts), window):
        some = texts[start : start + window]
        some = some[np.argsort(lengths[some], kind="stable")]
        pieces += [some[cut : cut + plan.global_batch].tolist() for cut in range(0, len(some), plan.global_batch)]
    return [pieces[index] for index in generator.permutation(len(pieces))]


class Stream:
    """What one rank works through: ``stream.at(step)`` for global optimiser steps 0, 1, ...

    Args:
        count: loss rows of one text, per unroll step.
        normalisation: ``step`` divides each unroll step's summed loss by its loss rows in the whole optimiser step (all
            ranks, all micro-batches); ``eagle`` by all B x T positions, padding included, as EAGLE's trainer does.
    """

    def __init__(
        self,
        texts: Texts,
        plan: Plan,
        rank: int,
        count: Callable[[Sample], list[int]],
        normalisation: str = "step",
    ):
        self.texts, self.plan, self.rank, self.normalisation = texts, plan, rank, normalisation
        self.counts = np.array([count(sample) for sample in texts.samples], dtype=np.int64)

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, and step within it."""
        return divmod(step, self.plan.steps_per_epoch)

    def first_step_with(self, answer_tokens: int) -> int:
        """Optimiser steps after which this many answer tokens have been read, by all ranks together."""
        sizes = [sum(end - start for start, end in sample.answer_spans) for sample in self.texts.samples]
        read, step = 0, 0
        while read < answer_tokens:
            shares = self.plan.step(*self.position(step))
            read += sum(sizes[text] for ranks in shares for texts in ranks for text in texts)
            step += 1
        return step

    def at(self, step: int) -> tuple[list[Batch], list[float]]:
        """This rank's micro-batches of one optimiser step, and the loss's denominators per unroll step."""
        shares = self.plan.step(*self.position(step))
        if self.normalisation == "eagle":
            denominators = [float(self.plan.padded_positions(shares))] * self.counts.shape[1]
        else:
            everyone = [text for ranks in shares for texts in ranks for text in texts]
            denominators = self.counts[everyone].sum(axis=0).astype(float).tolist()
        return [self.texts.batch(ranks[self.rank]) for ranks in shares], denominators
