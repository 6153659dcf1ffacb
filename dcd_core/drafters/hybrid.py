"""N-gram continuations among the candidates of EAGLE3's tree, under one budget of nodes.

Where the text copies, long matches outscore the head and the draft is the n-gram's path; elsewhere it is the head's
tree. A node that both propose is one node. The draft stays a function of the past, whatever the temperature.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.eagle3_tree import Candidates, rerank
from dcd_core.drafters.ngram import NgramDrafter, NgramNode, continuation_tree, padded_trees
from dcd_core.drafters.protocol import Accepted, RoundNoise
from dcd_core.errors import UserError

RATES = {1: 0.25, 2: 0.5, 3: 0.6, 4: 0.7, 6: 0.75, 9: 0.8, 12: 0.93}
"""Rate at which a token of an n-gram continuation is right when those before it were, by the length of the match that
proposes it (of the entries, the one with the largest length that the match reaches counts). Measured at the most recent
place of the longest match, continuations of up to 5 tokens, on the demo expert's own answers to 668 GSM8K training
questions; on 100 held-out ones the rates are .02 to .06 higher."""


class HybridDrafter(Eagle3Drafter):
    """EAGLE3's candidates and the n-gram's, ranked together.

    An n-gram node of depth d scores d log(rate of its match), a head's node its log-probability; a node of both the
    larger. With ``shape.branch`` 1 a head's chain and one continuation share the ``depth`` nodes.

    Args:
        rates: rate by match length, ascending in both; see :data:`RATES`.
        longest: longest match; the shortest is the least length of ``rates``.
    Raises:
        UserError: rates outside (0, 1], or that fall with the length of the match.
    """

    default_rule = "deterministic"
    rules = ("deterministic", "shared_noise")

    def __init__(
        self,
        head: nn.Module,
        embedding: nn.Embedding,
        vocab: int,
        rates: dict[int, float] = RATES,
        longest: int = 12,
    ):
        super().__init__(head, embedding, vocab)
        values = [rates[length] for length in sorted(rates)]
        if not values or min(rates) < 1 or not 0 < min(values) <= max(values) <= 1 or values != sorted(values):
            raise UserError(f"n-gram rates must lie in (0, 1] and not fall with the length of the match, got {rates}")
        self.rates, self.longest = dict(sorted(rates.items())), longest
        self.ngram = NgramDrafter(min(rates), longest)

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        super().begin(prompts, first, capacity)
        # the loop copies a drafter for every batch, and this one's rows are the batch's own
        self.ngram = NgramDrafter(min(self.rates), self.longest)
        self.ngram.begin(prompts, first, capacity)

    @torch.no_grad()
    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        trees = [believed(continuation_tree(row, shape), self.rates, shape.stop_below) for row in self.ngram.rows]
        return rerank(self.found(noise, shape, trees), shape.budget, noise.rule)

    def found(self, noise: RoundNoise, shape: Shape, trees: list[ScoredTree]) -> Candidates:
        """The candidates of the head, and these of the n-grams (one tree for each row)."""
        self._read_accepted()
        found = self.candidates(noise, shape)
        if any(trees):
            ngram = joined_trees(trees, found.tokens.device, found.scores.dtype)
            found = merge(found, ngram, max(shape.depth, 1))
        return found

    def observe(self, accepted: Accepted) -> None:
        super().observe(accepted)
        self.ngram.observe(accepted)

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        super().rewind(back, accepted)
        self.ngram.rewind(back, accepted)

    def keep_rows(self, rows: list[int]) -> None:
        super().keep_rows(rows)
        self.ngram.keep_rows(rows)

    def extend(self, other: HybridDrafter) -> None:
        super().extend(other)
        self.ngram.extend(other.ngram)


ScoredTree = list[tuple[NgramNode, float]]
"""Nodes with the logarithms of their chances, parents first."""


def believed(tree: list[NgramNode], rates: dict[int, float], stop_below: float = 0.0) -> ScoredTree:
    """The nodes with their scores; a path ends with the first node whose probability is below ``stop_below``.

    Args:
        rates: as for :class:`HybridDrafter`, ascending.
    """
    least = math.log(stop_below) if stop_below else -math.inf
    scored = [(node, node.depth * math.log(rate_of(node.match, rates))) for node in tree]
    # scores fall along a path, so what is left has its parents: only the numbering changes
    kept = [node.parent < 0 or scored[node.parent][1] >= least for node in tree]
    number = [sum(kept[:index]) for index in range(len(tree))]
    return [
        (NgramNode(node.token, number[node.parent] if node.parent >= 0 else -1, node.depth, node.match), score)
        for (node, score), stays in zip(scored, kept, strict=True)
        if stays
    ]


def rate_of(match: int, rates: dict[int, float]) -> float:
    """Rate of a match of this length."""
    return next(rate for length, rate in reversed(rates.items()) if length <= match)


def joined_trees(trees: list[ScoredTree], device, dtype: torch.dtype = torch.float32) -> Candidates:
    """Trees of different sizes as the candidates of a batch."""
    tokens, parents, valid = padded_trees([[node for node, _ in tree] for tree in trees], device)
    width = tokens.shape[1]
    scores = [[score for _, score in tree] + [-math.inf] * (width - len(tree)) for tree in trees]
    return Candidates(tokens, parents, torch.tensor(scores, dtype=dtype, device=device), valid.bool())


def merge(head: Candidates, ngram: Candidates, depth: int) -> Candidates:
    """All nodes of both trees; an n-gram node whose path is also a head node's raises that node's score to its own.

    Args:
        depth: of the deeper tree.
    """
    twin = _twins(head, ngram, depth)
    doubled = twin >= 0
    scores = head.scores.scatter_reduce(
        1, twin.clamp_min(0), ngram.scores.masked_fill(~doubled, -math.inf), reduce="amax"
    )
    above = _of_parents(ngram, twin)
    parents = torch.where((ngram.parents >= 0) & (above < 0), ngram.parents + head.tokens.shape[1], above)
    fresh = ngram.valid & ~doubled
    return Candidates(
        torch.cat([head.tokens, ngram.tokens], dim=1),
        torch.cat([head.parents, parents], dim=1),
        torch.cat([scores, ngram.scores.masked_fill(~fresh, -math.inf)], dim=1),
        torch.cat([head.valid, fresh], dim=1),
    )


def _twins(head: Candidates, ngram: Candidates, depth: int) -> Int[Tensor, "batch nodes"]:
    """Index of the head node with the same path as each n-gram node, -2 where there is none."""
    alike = (ngram.tokens[..., None] == head.tokens[:, None]) & head.valid[:, None] & ngram.valid[..., None]
    twin = torch.full_like(ngram.tokens, -2)
    for _ in range(depth):  # a level further each time
        hits = alike & (head.parents[:, None] == _of_parents(ngram, twin)[..., None])
        twin = torch.where(hits.any(-1), hits.to(torch.uint8).argmax(-1), -2)
    return twin


def _of_parents(ngram: Candidates, twin: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch nodes"]:
    """The twin of each n-gram node's parent: -1 for the root, which is its own."""
    return torch.where(ngram.parents < 0, -1, twin.gather(1, ngram.parents.clamp_min(0)))
