"""N-gram drafting: continue with what followed the same words before. Costs no model pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise

PLACES = 4
"""How many places of one n-gram, the most recent ones, a tree is made of."""


class NgramIndex:
    """A rolling index of one row's text: for every n-gram, where it ended, oldest place first.

    The n-grams that end at the newest token are held back until a later token arrives, so a lookup never finds the
    context's own end. Appending a token, or taking it back, costs ``longest`` dictionary writes; the text is never
    scanned again.
    """

    def __init__(self, tokens: list[int], shortest: int = 1, longest: int = 12):
        self.tokens: list[int] = []
        self.shortest, self.longest = shortest, longest
        self.places: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def _endings(self) -> Iterator[tuple[int, ...]]:
        """The n-grams that end with the newest token, shortest first."""
        end = len(self.tokens)
        for size in range(self.shortest, min(self.longest, end) + 1):
            yield tuple(self.tokens[end - size :])

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            for ngram in self._endings():
                self.places.setdefault(ngram, []).append(len(self.tokens))
            self.tokens.append(token)

    def rewind(self, count: int) -> None:
        """Forget the newest ``count`` tokens: exactly what the index was before them, however many they are.

        Every place is kept, not only the recent ones that lookups use: an n-gram's list costs less than its key, and
        nothing has to be remembered for the way back.
        """
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"cannot take {count} tokens back from a text of {len(self.tokens)}")
        for _ in range(count):
            self.tokens.pop()
            for ngram in self._endings():
                places = self.places[ngram]
                places.pop()
                if not places:
                    del self.places[ngram]

    def continuations(self, count: int, places: int = PLACES) -> Iterator[tuple[int, list[int]]]:
        """(match length, at most ``count`` tokens that followed) for earlier places of the text's end.

        Longest match first, of equal matches the most recent first; every place once, at most ``places`` a length.
        """
        seen = set()
        for ngram in reversed(list(self._endings())):
            for place in reversed(self.places.get(ngram, [])[-places:]):
                if place not in seen:
                    seen.add(place)
                    yield len(ngram), self.tokens[place : place + count]

    def continuation(self, count: int) -> list[int]:
        """At most ``count`` tokens that followed the longest matching suffix, at its most recent earlier place."""
        return next((tokens for _, tokens in self.continuations(count)), [])


@dataclass
class NgramNode:
    """A token that followed the text's end before. ``match``: length of the longest match that proposes it."""

    token: int
    parent: int
    depth: int
    match: int


def continuation_tree(index: NgramIndex, shape: Shape) -> list[NgramNode]:
    """Continuations of a text as one tree, parents before their children, better matches before worse ones."""
    nodes: list[NgramNode] = []
    known: dict[tuple[int, int], int] = {}
    children = Counter()
    for match, tokens in index.continuations(shape.depth):
        parent = -1
        for depth, token in enumerate(tokens, start=1):
            node = known.get((parent, token))
            if node is None:
                if len(nodes) == shape.budget:
                    return nodes
                if children[parent] == shape.branch:
                    break
                node = known[parent, token] = len(nodes)
                children[parent] += 1
                nodes.append(NgramNode(token, parent, depth, match))
            parent = node
    return nodes


def padded_trees(
    trees: list[list[NgramNode]], device
) -> tuple[Int[Tensor, "batch nodes"], Int[Tensor, "batch nodes"], Int[Tensor, "batch nodes"]]:
    """Tokens, parents and validity (0 or 1) of trees of different sizes, in one copy to the device."""
    width = max(map(len, trees))
    table = [
        [[node.token for node in tree] + [0] * (width - len(tree)) for tree in trees],
        [[node.parent for node in tree] + [-1] * (width - len(tree)) for tree in trees],
        [[1] * len(tree) + [0] * (width - len(tree)) for tree in trees],
    ]
    return tuple(torch.tensor(table, dtype=torch.int64, device=device).view(3, len(trees), width))


class NgramDrafter(Drafter):
    """Match window 1..12, longest match first, most recent occurrence [DCD, section 4: n-gram proposer].

    With ``shape.branch`` above 1, a tree of several continuations. An n-gram has no probability of its own:
    ``shape.stop_below`` is not used.
    """

    rules = ("deterministic", "shared_noise")

    def __init__(self, shortest: int = 1, longest: int = 12):
        self.shortest, self.longest = shortest, longest
        self.rows: list[NgramIndex] = []

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        self.rows = [
            NgramIndex([*prompt, tokens[-1]], self.shortest, self.longest)
            for prompt, tokens in zip(prompts, first.host_tokens, strict=True)
        ]

    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        if shape.branch > 1:
            trees = [continuation_tree(row, shape) for row in self.rows]
        else:
            trees = [_chain(row.continuation(shape.depth)) for row in self.rows]
        if not any(trees):
            return super().propose(root, noise, shape)
        tokens, parents, valid = padded_trees(trees, root.device)
        if shape.branch == 1:
            return Draft.chain(tokens, valid.bool(), rule=noise.rule)
        return Draft(tokens, parents, valid.bool(), noise.rule)

    def observe(self, accepted: Accepted) -> None:
        for row, tokens in zip(self.rows, accepted.host_tokens, strict=True):
            row.extend(tokens)

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        for row, count in zip(self.rows, back, strict=True):
            row.rewind(count)
        self.observe(accepted)

    def keep_rows(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def extend(self, other: NgramDrafter) -> None:
        self.rows = self.rows + other.rows


def _chain(tokens: list[int]) -> list[NgramNode]:
    return [NgramNode(token, place - 1, place + 1, 0) for place, token in enumerate(tokens)]
