"""Drafts whose source and size are chosen round by round (see :mod:`dcd_core.drafters.controller`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.controller import Controller
from dcd_core.drafters.eagle3_tree import rerank
from dcd_core.drafters.hybrid import RATES, HybridDrafter, believed, joined_trees
from dcd_core.drafters.ngram import NgramDrafter, continuation_tree
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise
from dcd_core.models import LanguageModel
from dcd_core.pass_times import measure

BRANCH = 4
"""Children of a node, and nodes of a level that the head goes on from."""
BUDGET = 16
"""Nodes of a draft at most."""


class AutoDrafter(Drafter):
    """Nothing, n-grams, or the head's tree with n-grams in it, whichever pays in this round.

    By shared noise, its only rule at temperature > 0, texts do not depend on pass times or on other rows: the same seed
    gives the same text on any machine.

    A shape bounds the drafts: ``depth`` always, a tree's ``branch`` and ``nodes`` and ``stop_below`` if they are given.

    Args:
        models: the scorers' models, the expert first: their passes are timed once, when the first batch begins.
        head: an EAGLE3 head of the expert, or None.
        controller: None: one by measured times.
    """

    default_rule = "shared_noise"
    rules = ("shared_noise",)

    def __init__(
        self, models: Sequence[LanguageModel], head: nn.Module | None = None, controller: Controller | None = None
    ):
        expert = models[0]
        self.models, self.head = list(models), head
        self.inner = NgramDrafter() if head is None else HybridDrafter(head, expert.embedding, expert.vocab)
        self.feature_scorers = self.inner.feature_scorers
        # shared by all batches: what one text taught is where the next one starts
        self.controllers = [controller] if controller else []
        self.source, self.made = "none", {}

    @property
    def controller(self) -> Controller:
        if not self.controllers:
            self.controllers.append(Controller(measure(self.models, self.head), self.head is not None))
        return self.controllers[0]

    @property
    def ngrams(self) -> NgramDrafter:
        return self.inner if self.head is None else self.inner.ngram

    @property
    def suspect(self):
        return self.inner.suspect if self.source == "head" else None

    def most_nodes(self, shape: Shape) -> int:
        return self.inner.most_nodes(self._largest(shape))

    def _largest(self, shape: Shape) -> Shape:
        """What is asked for bounds the drafts; the form of a chain, which is asked for by saying nothing, does not."""
        branch = shape.branch if shape.branch > 1 else BRANCH
        nodes = shape.budget if shape.branch > 1 else shape.nodes or BUDGET
        return Shape(shape.depth, branch, min(nodes, shape.depth * branch), shape.stop_below)

    def asks_at(self) -> float:
        return self.controller.theta(len(self.ngrams.rows))

    def planned(self, shape: Shape) -> Shape:
        largest, rows = self._largest(shape), len(self.ngrams.rows)
        rates = RATES if self.head is None else self.inner.rates
        self.trees = [believed(continuation_tree(row, largest), rates, shape.stop_below) for row in self.ngrams.rows]
        self.chances = _summed([sorted((math.exp(score) for _, score in tree), reverse=True) for tree in self.trees])
        self.source = self.controller.choose(self.chances, rows)
        self.made = {}
        if self.source == "none":
            return Shape(0)
        if self.source == "ngram":
            return largest
        stop_below = max(shape.stop_below, self.controller.stop_below(rows, largest.branch))
        return replace(largest, stop_below=stop_below)

    @torch.no_grad()
    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        if self.source == "none":
            return Draft.empty(len(root), root.device, noise.rule)
        if self.source == "ngram":
            found, chances = joined_trees(self.trees, root.device), self.chances
        else:
            found = self.inner.found(noise, shape, self.trees)
            scores = found.scores.masked_fill(~found.valid, -math.inf)
            chances = scores.exp().sort(dim=1, descending=True).values.sum(0).tolist()
            self.made = {"levels": self.inner.passes, "width": shape.branch}
        nodes = min(self.controller.nodes(self.source, chances, len(root)), shape.budget)
        self.made |= {"expected": sum(chances[:nodes]), "nodes": nodes}
        return rerank(found, nodes, noise.rule) if nodes else Draft.empty(len(root), root.device, noise.rule)

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        self.inner = copy(self.inner)  # the loop copies a drafter for every batch, and its rows are the batch's own
        self.inner.begin(prompts, first, capacity)

    def observe(self, accepted: Accepted) -> None:
        self.controller.learn(self.source, len(accepted.counts), sum(accepted.counts), **self.made)
        self.inner.observe(accepted)

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        self.inner.rewind(back, accepted)

    def keep_rows(self, rows: list[int]) -> None:
        self.inner.keep_rows(rows)

    def extend(self, other: AutoDrafter) -> None:
        self.inner.extend(other.inner)


def _summed(rows: list[list[float]]) -> list[float]:
    """Column by column; short rows end early."""
    width = max(map(len, rows), default=0)
    return [sum(row[column] for row in rows if column < len(row)) for column in range(width)]
