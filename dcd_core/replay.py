"""Accepted length of a greedy chain of drafts from a stored rollout, without a pass of expert or amateur.

At temperature 0 every lossless method emits the target's own tokens, so a drafter's rounds follow exactly from one
rollout with the stored features that the drafter reads: unroll its head at all positions in parallel on its *own*
tokens, count how many drafts agree with the rollout, and walk the rounds. A test holds this equal to the decoding loop,
round by round, for every kind of head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@runtime_checkable
class Drafting(Protocol):
    """What drafts in a replay: a head of any kind, or two that draft as one.

    That is an :class:`~dcd_core.heads.eagle3.Eagle3Head`, a :class:`~dcd_core.heads.dual_input.DualInputHead` or a
    :class:`~dcd_core.drafters.dual.HeadPair` with its alpha.
    """

    @property
    def target_ids(self) -> Tensor:
        """Vocabulary id of every draft id, ascending."""

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits over ``target_ids``."""

    def unroll(
        self,
        features: Tensor,
        embeds: Tensor,
        rows: Tensor,
        steps: int,
        next_embeds: Callable[[int, Tensor], Tensor],
        survivors: Callable[[int], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """The drafts rooted at ``rows``, see :meth:`~dcd_core.heads.eagle3.Eagle3Head.unroll`."""


@dataclass
class Rollout:
    """One finished text: prompt and answer ids, and at every position the tapped features that the drafter reads: the
    expert's, for a dual-input head followed by the amateur's."""

    ids: Int[Tensor, " position"]
    prompt_length: int
    features: Float[Tensor, "position features"]

    @property
    def roots(self) -> Int[Tensor, " root"]:
        """Positions after which a round may begin: every answer token but the last."""
        return torch.arange(self.prompt_length, len(self.ids) - 1, device=self.ids.device)


@dataclass
class Drafts:
    """The greedy drafts of every possible root of a round, held against the rollout.

    Entry k belongs to the root at position ``prompt_length + k``, i.e. to the drafter's row one before it; the last
    token of the text is no root.

    Attributes:
        agreed: how many drafts agree before the first that does not; drafts past the end of the text never agree.
        log_probs: log-probability of every draft under the drafter.
    """

    agreed: Int[Tensor, " root"]
    log_probs: Float[Tensor, "root gamma"]


@torch.no_grad()
def draft_everywhere(
    drafting: Drafting, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> Drafts:
    """``gamma`` greedy drafts from every root of a rollout, all roots in parallel.

    Args:
        vocab: number of the expert's real ids; a drafter that also has its padded ids does not propose those.
    """
    length, roots = len(rollout.ids), rollout.roots
    if len(roots) == 0:
        nothing = torch.zeros(0, dtype=torch.int64, device=rollout.ids.device)
        return Drafts(nothing, torch.zeros(0, gamma, device=rollout.ids.device))
    target_ids = _proposed(drafting, vocab)
    picked: list[Tensor] = []
    log_probs: list[Tensor] = []

    def next_embeds(step: int, state: Tensor) -> Tensor:
        logits = drafting.logits(state)[..., : len(target_ids)]
        best, index = logits.max(-1)
        picked.append(target_ids[index])
        log_probs.append(best[0] - logits.logsumexp(-1)[0])
        return embedding(picked[-1])

    for state in _states(drafting, embedding, rollout, gamma, next_embeds):
        last = state
    next_embeds(gamma, last)
    run = torch.ones_like(roots, dtype=torch.bool)
    agreed = torch.zeros_like(roots)
    for step, tokens in enumerate(picked):
        place = roots + 1 + step
        inside = place < length
        run = run & inside & (tokens[0] == rollout.ids[place.clamp_max(length - 1)])
        agreed = agreed + run
    return Drafts(agreed, torch.stack(log_probs, dim=1))


@torch.no_grad()
def teacher_forced(
    drafting: Drafting, embedding: nn.Embedding, rollout: Rollout, steps: int, vocab: int | None = None
) -> Iterator[Float[Tensor, "root draft"]]:
    """Draft logits where every draft so far was the rollout's own token, all roots in parallel: of steps 0, 1, ...

    Row k of step i belongs to the token at position ``prompt_length + k + 1 + i``; rows past the end of the text are of
    no use. Columns are the drafter's ``target_ids`` (those below ``vocab``).
    """
    length, roots = len(rollout.ids), rollout.roots
    if len(roots) == 0:
        return
    width = len(_proposed(drafting, vocab))

    def truth(step: int, _state: Tensor) -> Tensor:
        return embedding(rollout.ids[(roots + step).clamp_max(length - 1)])[None]

    for state in _states(drafting, embedding, rollout, steps, truth):
        yield drafting.logits(state)[0, :, :width]


def _states(
    drafting: Drafting,
    embedding: nn.Embedding,
    rollout: Rollout,
    steps: int,
    next_embeds: Callable,
    survivors: Callable | None = None,
) -> Iterator[Tensor]:
    """The drafter's states of every step, for the roots of a rollout."""
    shifted = torch.cat([rollout.ids[1:], rollout.ids[-1:]])
    rows = (rollout.roots - 1)[None]
    return drafting.unroll(rollout.features[None], embedding(shifted)[None], rows, steps, next_embeds, survivors)


@torch.no_grad()
def matching_drafts(
    drafting: Drafting, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> Int[Tensor, " root"]:
    """:attr:`Drafts.agreed` of every root, at less cost: a root whose draft does not agree drafts no further."""
    ids, roots = rollout.ids, rollout.roots
    agreed = torch.zeros_like(roots)
    if len(roots) == 0:
        return agreed
    target_ids = _proposed(drafting, vocab)
    going = torch.arange(len(roots), device=ids.device)  # the roots that still draft, and what each drafted last
    drafted = alive = going

    def survivors(_step: int) -> Tensor:
        return alive

    def next_embeds(_step: int, _state: Tensor) -> Tensor:
        return embedding(drafted[alive])[None]

    states = _states(drafting, embedding, rollout, gamma, next_embeds, survivors)
    for step, state in enumerate(states):
        drafted = target_ids[drafting.logits(state)[0, :, : len(target_ids)].argmax(-1)]
        place = roots[going] + 1 + step
        agrees = (place < len(ids)) & (drafted == ids[place.clamp_max(len(ids) - 1)])
        alive = agrees.nonzero()[:, 0]
        going = going[alive]
        agreed[going] += 1
        if len(going) == 0:
            break
    return agreed


def _proposed(drafting: Drafting, vocab: int | None) -> Int[Tensor, " draft"]:
    """The ids that a drafter proposes: those of the expert's real ids, the first of its ascending ``target_ids``."""
    return drafting.target_ids if vocab is None else drafting.target_ids[drafting.target_ids < vocab]


def walk_rounds(agreed: list[int], gamma: int) -> list[tuple[int, int, int]]:
    """The rounds (drafted, accepted, emitted) that decoding would have made, from :func:`matching_drafts`."""
    rounds, root, last = [], 0, len(agreed)
    while root < last:
        emitted = min(agreed[root] + 1, last - root)
        rounds.append((gamma, agreed[root], emitted))
        root += emitted
    return rounds


def replay(
    drafting: Drafting, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> list[tuple[int, int, int]]:
    """The rounds of one rollout: :func:`matching_drafts`, then :func:`walk_rounds`."""
    return walk_rounds(matching_drafts(drafting, embedding, rollout, gamma, vocab).tolist(), gamma)
