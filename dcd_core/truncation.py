"""Top-k and top-p of rows of scores, exactly, without sorting the vocabulary.

Order the ids by score, equal scores by id. Top-k keeps the first k of them; top-p (nucleus sampling, Holtzman et al.
2020) keeps the shortest beginning of the list that holds a share p of the probability, which is at least one id. Both
together: first k, then p of what the k hold. What stays is known by the score at the edge and by how many ids of just
that score stay, lowest ids first; neither needs more than the best few scores in order, while a full sort of 49 k
scores takes longer than all else that is done with a row.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FEW = 256
"""So many of the best scores does top-p look at first. Where they hold less than p of the probability it looks at 16
times as many, and so on to all of them: the result is the same, only slower."""

_GROUP = 32


def truncated(scores: Float[Tensor, "*batch vocab"], top_k: int, top_p: float) -> Float[Tensor, "*batch vocab"]:
    """The same rows with -inf outside top-k and top-p.

    Args:
        scores: tempered and not normalised; -inf marks ids that are excluded already.
        top_k: how many ids may stay; 0 for all.
        top_p: share of the probability that stays, in (0, 1]; 1 for all.
    Running sums are fp64. Top-p without top-k asks the device whether the best few hold enough: a look of the host at
    device data, besides the one that a decoding round makes. With top_k, or with top_p = 1, there is none.
    A row that holds NaN or +inf comes back as NaN, so that what is wrong with it is not hidden.
    """
    vocab = scores.shape[-1]
    by_count = 0 < top_k < vocab
    if not by_count and top_p == 1:
        return scores
    peak = scores.amax(-1, keepdim=True)
    if by_count:
        ids, some = _narrowed(scores, top_k)
        best = some.topk(top_k).values
        count = torch.full_like(best[..., :1], top_k, dtype=torch.int64)
        if top_p < 1:
            running = _running_mass(best, peak)
            count = _nucleus(running, top_p * running[..., -1:])
    else:
        wanted = top_p * (scores - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        looked = min(FEW, vocab)
        while True:
            ids, some = _narrowed(scores, looked)
            best = some.topk(looked).values
            running = _running_mass(best, peak)
            if looked == vocab or bool((running[..., -1:] >= wanted).all()):
                break
            looked = min(16 * looked, vocab)
        count = _nucleus(running, wanted)
    kept = some.masked_fill(~_first(some, best, count), -math.inf) + (peak - peak)
    if ids is None:
        return kept
    whole = scores.new_full((*scores.shape[:-1], vocab + -vocab % _GROUP), -math.inf)
    return whole.scatter_(-1, ids, kept)[..., :vocab]


def _narrowed(
    scores: Float[Tensor, "*batch vocab"], count: int
) -> tuple[Int[Tensor, "*batch some"] | None, Float[Tensor, "*batch some"]]:
    """Some ids in rising order, with their scores; the first ``count`` by score are among them. None stands for all.

    Of groups of neighbouring ids, those ``count`` are taken whose own best come first: each of them holds an id that
    comes before every id of the other groups. Ids past the last real one fill the last group.
    """
    vocab = scores.shape[-1]
    if 4 * count * _GROUP > vocab:
        return None, scores
    scores = torch.nn.functional.pad(scores, (0, -vocab % _GROUP), value=-math.inf) if vocab % _GROUP else scores
    best = scores.unflatten(-1, (-1, _GROUP)).amax(-1)
    full = torch.full_like(best[..., :1], count, dtype=torch.int64)
    first = _first(best, best.topk(count).values, full)
    group = first.int().topk(count, sorted=False).indices.sort(-1).values
    ids = (group[..., None] * _GROUP + torch.arange(_GROUP, device=scores.device)).flatten(-2)
    return ids, scores.gather(-1, ids)


def _running_mass(
    best: Float[Tensor, "*batch looked"], peak: Float[Tensor, "*batch 1"]
) -> Float[Tensor, "*batch looked"]:
    """Running sum of probabilities, best first, in units of the best one's."""
    return (best - peak).exp_().cumsum(-1, dtype=torch.float64)


def _nucleus(running: Float[Tensor, "*batch looked"], wanted: Float[Tensor, "*batch 1"]) -> Int[Tensor, "*batch 1"]:
    """How many of the best hold the wanted mass. Rounding may ask for more than all of them hold."""
    return ((running < wanted).sum(-1, keepdim=True) + 1).clamp_max(running.shape[-1])


def _first(
    scores: Float[Tensor, "*batch some"], best: Float[Tensor, "*batch looked"], count: Int[Tensor, "*batch 1"]
) -> Bool[Tensor, "*batch some"]:
    """Which are the first ``count`` by score, equal scores the earlier first, given at least so many best scores."""
    edge = best.gather(-1, count - 1)
    spare = count - (best > edge).sum(-1, keepdim=True)
    level = scores == edge
    return (scores > edge) | (level & (level.cumsum(-1, dtype=torch.int32) <= spare))
