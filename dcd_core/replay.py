"""Accepted length of a greedy EAGLE3 chain from a stored rollout, without a pass of expert or amateur.

At temperature 0 every lossless method emits the target's own tokens, so a drafter's rounds follow exactly from one
rollout with stored expert features: unroll the head at all positions in parallel on its *own* tokens, count how many
drafts agree with the rollout, and walk the rounds. A test holds this equal to the decoding loop, round by round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dcd_core.heads.eagle3 import Eagle3Head


@dataclass
class Rollout:
    """One finished text: prompt and answer ids, and the expert's tapped features at every position."""

    ids: Int[Tensor, " position"]
    prompt_length: int
    features: Float[Tensor, "position features"]


@dataclass
class Drafts:
    """The greedy drafts of every possible root of a round, held against the rollout.

    Entry k belongs to the root at position ``prompt_length + k``, i.e. to the head's row one before it; the last token
    of the text is no root.

    Attributes:
        agreed: how many drafts agree before the first that does not; drafts past the end of the text never agree.
        log_probs: log-probability of every draft under the head.
    """

    agreed: Int[Tensor, " root"]
    log_probs: Float[Tensor, "root gamma"]


@torch.no_grad()
def draft_everywhere(
    head: Eagle3Head, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> Drafts:
    """``gamma`` greedy drafts from every root of a rollout, all roots in parallel.

    Args:
        vocab: number of the expert's real ids; a head that also has its padded ids does not propose those.
    """
    length, first = len(rollout.ids), rollout.prompt_length
    roots = torch.arange(first, length - 1, device=rollout.ids.device)
    if len(roots) == 0:
        nothing = torch.zeros(0, dtype=torch.int64, device=rollout.ids.device)
        return Drafts(nothing, torch.zeros(0, gamma, device=rollout.ids.device))
    target_ids = head.target_ids if vocab is None else head.target_ids[head.target_ids < vocab]
    picked: list[Tensor] = []
    log_probs: list[Tensor] = []

    def next_embeds(step: int, state: Tensor) -> Tensor:
        logits = head.logits(state)[..., : len(target_ids)]
        best, index = logits.max(-1)
        picked.append(target_ids[index])
        log_probs.append(best[0] - logits.logsumexp(-1)[0])
        return embedding(picked[-1])

    shifted = torch.cat([rollout.ids[1:], rollout.ids[-1:]])
    states = head.unroll(rollout.features[None], embedding(shifted)[None], (roots - 1)[None], gamma, next_embeds)
    for state in states:
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


def matching_drafts(
    head: Eagle3Head, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> Int[Tensor, " root"]:
    """:attr:`Drafts.agreed` of every root."""
    return draft_everywhere(head, embedding, rollout, gamma, vocab).agreed


def walk_rounds(agreed: list[int], gamma: int) -> list[tuple[int, int, int]]:
    """The rounds (drafted, accepted, emitted) that decoding would have made, from :func:`matching_drafts`."""
    rounds, root, last = [], 0, len(agreed)
    while root < last:
        emitted = min(agreed[root] + 1, last - root)
        rounds.append((gamma, agreed[root], emitted))
        root += emitted
    return rounds


def replay(
    head: Eagle3Head, embedding: nn.Embedding, rollout: Rollout, gamma: int, vocab: int | None = None
) -> list[tuple[int, int, int]]:
    """The rounds of one rollout: :func:`matching_drafts`, then :func:`walk_rounds`."""
    return walk_rounds(matching_drafts(head, embedding, rollout, gamma, vocab).tolist(), gamma)
