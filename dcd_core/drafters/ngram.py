"""N-gram drafting: continue with what followed the same words before. Costs no model pass."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise


class NgramIndex:
    """A rolling index of one row's text: for every n-gram, where it last ended.

    The n-grams that end at the newest token are held back until a later token arrives, so a lookup never finds the
    context's own end. Appending costs ``longest`` dictionary writes; the text is never scanned again.
    """

    def __init__(self, tokens: list[int], shortest: int = 1, longest: int = 12):
        self.tokens: list[int] = []
        self.shortest, self.longest = shortest, longest
        self.last: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for size in range(self.shortest, min(self.longest, end) + 1):
                self.last[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """At most ``count`` tokens that followed the longest matching suffix, at its most recent earlier place."""
        for size in range(min(self.longest, len(self.tokens)), self.shortest - 1, -1):
            place = self.last.get(tuple(self.tokens[-size:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class NgramDrafter(Drafter):
    """Match window 1..12, longest match first, most recent occurrence [DCD, section 4: n-gram proposer]."""

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
        found = [row.continuation(shape.depth) for row in self.rows]
        width = max(map(len, found))
        if width == 0:
            return super().propose(root, noise, shape)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        valid = [[index < len(tokens) for index in range(width)] for tokens in found]
        device = root.device
        return Draft.chain(
            torch.tensor(padded, dtype=torch.int64, device=device).view(len(found), width),
            torch.tensor(valid, dtype=torch.bool, device=device).view(len(found), width),
            rule=noise.rule,
        )

    def observe(self, accepted: Accepted) -> None:
        for row, tokens in zip(self.rows, accepted.host_tokens, strict=True):
            row.extend(tokens)

    def keep_rows(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def extend(self, other: NgramDrafter) -> None:
        self.rows = self.rows + other.rows
