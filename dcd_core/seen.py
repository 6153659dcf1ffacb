"""Which ids occur in the prefix of every batch row: all that a repetition penalty depends on besides the scores.

Only verification penalises. Drafters propose from their own distributions without it: that costs accepted drafts, and
changes no token's distribution.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dcd_core.draft import Draft


class Seen:
    """A mask over the vocabulary for every batch row, on the device: the prompt's ids and those emitted after it.

    Args:
        mask: a last column beyond the vocabulary takes what padding would write.
    """

    def __init__(self, mask: Bool[Tensor, "batch columns"]):
        self.mask = mask

    @classmethod
    def of(cls, prefixes: list[list[int]], vocab: int, device: torch.device) -> Seen:
        """The ids of every row's prefix; no prefix is empty."""
        width = max(map(len, prefixes))
        padded = torch.tensor([prefix + [-1] * (width - len(prefix)) for prefix in prefixes], device=device)
        seen = cls(torch.zeros(len(prefixes), vocab + 1, dtype=torch.bool, device=device))
        seen.add(padded)
        return seen

    def add(self, tokens: Int[Tensor, "batch count"]) -> None:
        """Every row's tokens join its prefix; -1 is padding."""
        self.mask.scatter_(1, tokens.where(tokens >= 0, self.mask.shape[1] - 1), True)

    def after(self, draft: Draft, rows: int) -> Bool[Tensor, "batch rows vocab"]:
        """The ids before each of the first ``rows`` of [root, nodes] and at it. The root is part of the prefix; a node
        adds those of its own path, and no other branch's."""
        padding = self.mask.shape[1] - 1
        before = draft.ancestor_mask()[:, :rows, 1:]
        tokens = torch.where(before, draft.tokens[:, None], padding)
        return self.mask[:, None].repeat(1, rows, 1).scatter_(2, tokens, True)[..., :padding]

    def copy(self) -> Seen:
        return Seen(self.mask.clone())

    def keep_rows(self, rows: Int[Tensor, " rows"]) -> None:
        """These rows stay, in this order."""
        self.mask = self.mask[rows]

    def extend(self, other: Seen) -> None:
        """The rows of another batch join, after the present ones."""
        self.mask = torch.cat([self.mask, other.mask])
