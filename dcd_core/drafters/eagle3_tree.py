"""Trees grown level by level, EAGLE's dynamic draft trees [Li et al. 2024, EAGLE-2] and sampled ones.

A node's *score* is the log-probability of its path under the drafter. Every row of a batch grows its own tree, by the
same plan, so nothing about it has to be known on the host.

* Deterministic (greedy and shared noise too): every expanded node offers its most probable children, of a level's nodes
  the best are expanded, and of all nodes the best ones are drafted (:func:`rerank`). Scores are untempered.
* Sampled: every expanded node draws children without replacement, and all that were drawn are drafted, siblings in the
  order of drawing: to drop or re-sort a drawn token because of what it is would bias the output. Which nodes are
  expanded may depend on what was drawn before, and so may how many children a node draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.draft import Draft, Shape

Plan = list[list[int]]
"""``plan[level][rank]``: how many children the rank-th best node of the level before has; level 0 has the root only."""

Children = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor | None]]
"""(states, level, count) -> ``count`` children of every state: tokens and log-probabilities ``[batch, states, count]``,
and for sampled ones the laws they were drawn from ``[batch, states, count, ids]``."""

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens, states of their parents, mask, level) -> states of these nodes. ``mask[b, i, j]``: node i of this pass sees
node j of all passes so far, itself included."""


@dataclass
class Candidates:
    """Nodes that a draft may be made of; parents stand before their children.

    Attributes:
        parents: index of each node's parent among the candidates, -1 for the root.
        scores: log-probability of the path, never above the parent's; -inf where not valid.
        valid: False marks nodes that may not be drafted; a valid node's parent is valid.
        laws: for sampled nodes, what each was drawn from.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    scores: Float[Tensor, "batch nodes"]
    valid: Bool[Tensor, "batch nodes"]
    laws: Float[Tensor, "batch nodes ids"] | None = None


def ranked_plan(shape: Shape, ids: int) -> Plan:
    """The root and then the best ``branch`` nodes of every level have ``branch`` children each (``ids`` at most)."""
    width, plan, above = min(shape.branch, ids), [], 1
    for _ in range(min(shape.depth, shape.budget)):
        plan.append([width] * min(shape.branch, above))
        above = sum(plan[-1])
    return plan


def sampled_plan(shape: Shape, ids: int) -> Plan:
    """At most ``budget`` nodes in all, ``branch`` (``ids``) children of a node.

    One child of the best node of each level first, so that the tree is as deep as the budget allows; then, level by
    level, one more child of the best node and one of the next best, and so on until the budget is spent.
    """
    plan = [[1] for _ in range(min(shape.depth, shape.budget))]
    width, left, extra = min(shape.branch, ids), shape.budget - len(plan), 1
    while left:
        before = left
        for level, counts in enumerate(plan):
            above = sum(plan[level - 1]) if level else 1
            for rank in range(min(extra + 1, above)):
                if left and extra - rank < width:
                    counts[rank : rank + 1] = [extra - rank + 1]
                    left -= 1
        if left == before:  # every node has all its children
            break
        extra += 1
    return plan


def top_children(
    logits: Float[Tensor, "*batch ids"], count: int
) -> tuple[Int[Tensor, "*batch count"], Float[Tensor, "*batch count"]]:
    """Indices of the most probable ids and their log-probabilities."""
    index = logits.topk(count, dim=-1).indices
    return index, logits.log_softmax(-1).gather(-1, index)


def grow(
    state: Float[Tensor, "batch 1 hidden"], plan: Plan, children: Children, step: Step, stop_below: float = 0.0
) -> Candidates:
    """Grow one tree a row after the root's state.

    Args:
        stop_below: nodes whose path probability is below it have no valid children. Only when this is set does the
            host look at the device, once a level, to stop when no row goes on.
    """
    least = math.log(stop_below) if stop_below else -math.inf
    batch, device = state.shape[0], state.device
    states, mask = state, None
    # the nodes whose children are wanted: their scores, and their places among the candidates
    scores = torch.zeros(batch, 1, dtype=torch.promote_types(state.dtype, torch.float32), device=device)
    places = torch.full((batch, 1), -1, device=device)
    levels, offset, rank_of = [], 0, None
    for level, counts in enumerate(plan):
        if level:
            best = levels[-1].scores.sort(dim=1, descending=True, stable=True).indices[:, : len(counts)]
            scores = levels[-1].scores.gather(1, best)
            if stop_below and not bool((scores >= least).any()):
                break
            above = rank_of[best]
            own = torch.eye(len(counts), dtype=torch.bool, device=device).expand(batch, -1, -1)
            seen = [] if mask is None else [_pick(mask, above)]
            mask = torch.cat([*seen, own], dim=2)
            states = step(levels[-1].tokens.gather(1, best), _pick(states, above), mask, level - 1)
            places = best + offset
            offset += levels[-1].tokens.shape[1]
        found = _level(children(states, level, max(counts)), scores, places, least)
        rank_of, levels = _cut(found, counts, levels)
    return _joined(levels)


def _level(found: tuple[Tensor, Tensor, Tensor | None], scores: Tensor, places: Tensor, least: float) -> Candidates:
    """Children of every expanded node, ``[batch, parents * count]``."""
    tokens, gains, laws = found
    valid = (scores >= least)[..., None].expand_as(tokens)
    # rounding may give a probability above 1; a child must never outscore its parent
    paths = torch.where(valid, scores[..., None] + gains.clamp_max(0), -math.inf)
    parents = places[..., None].expand_as(tokens)
    flat = (table.flatten(1) for table in (tokens, parents, paths, valid))
    return Candidates(*flat, None if laws is None else laws.flatten(1, 2))


def _cut(found: Candidates, counts: list[int], levels: list[Candidates]) -> tuple[Tensor, list[Candidates]]:
    """Leave the first ``counts[rank]`` children of each parent: the rank of every node's parent, and the levels."""
    rank_of, index = _left(tuple(counts), found.tokens.device)
    if len(index) < found.tokens.shape[1]:
        tables = (found.tokens, found.parents, found.scores, found.valid, found.laws)
        found = Candidates(*(None if table is None else table.index_select(1, index) for table in tables))
    return rank_of, [*levels, found]


@lru_cache(maxsize=256)
def _left(counts: tuple[int, ...], device: torch.device) -> tuple[Int[Tensor, " nodes"], Int[Tensor, " nodes"]]:
    """Of ``max(counts)`` children of each parent the first ``counts[rank]``: ranks of their parents, and columns."""
    most = max(counts)
    columns = torch.tensor([rank * most + child for rank, count in enumerate(counts) for child in range(count)])
    return (columns // most).to(device), columns.to(device)


def _joined(levels: list[Candidates]) -> Candidates:
    names = ("tokens", "parents", "scores", "valid")
    tables = [torch.cat([getattr(level, name) for level in levels], dim=1) for name in names]
    sampled = levels[0].laws is not None
    return Candidates(*tables, torch.cat([level.laws for level in levels], dim=1) if sampled else None)


def _pick(table: Tensor, index: Int[Tensor, "batch count"]) -> Tensor:
    """Rows of ``table[b]`` by ``index[b]``."""
    return table.gather(1, index[..., None].expand(-1, -1, table.shape[2]))


def rerank(candidates: Candidates, budget: int, rule: str) -> Draft:
    """The best ``budget`` candidates as a draft, best first.

    A child never outscores its parent, and equal scores go to the earlier candidate, which is the parent: so the
    parent of a node is always kept, and stands before it, also at exact ties.
    """
    scores = candidates.scores.masked_fill(~candidates.valid, -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    counting = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, counting)
    kept = order[:, :budget]
    parents = candidates.parents.gather(1, kept)
    parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp_min(0)))
    # changes nothing unless scores are NaN, which the loop refuses, but only after a pass over this tree
    parents = torch.minimum(parents, counting[:, :budget] - 1)
    return Draft(candidates.tokens.gather(1, kept), parents, candidates.valid.gather(1, kept), rule)
