"""What a draft is: a tree of proposed tokens for every row of a batch. A chain is a tree with one path."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RULES = ("deterministic", "sampled", "shared_noise")


@dataclass(frozen=True)
class Shape:
    """How large a draft may grow.

    Args:
        depth: longest path, gamma.
        branch: children that one node may have; 1 drafts chains.
        nodes: budget of nodes of a tree; 0 for depth * branch.
        stop_below: a path ends with the first token that brings the product of its draft probabilities below this.
            That token stays: dropping a sampled token because of what it is would bias the output.
    """

    depth: int = 5
    branch: int = 1
    nodes: int = 0
    stop_below: float = 0.0

    @property
    def budget(self) -> int:
        """Most nodes of one draft."""
        return self.depth if self.branch == 1 else self.nodes or self.depth * self.branch


@dataclass
class Draft:
    """Proposed tokens with the rule by which they may be judged.

    Node ``n`` is a token; its parent is an earlier node or -1, the round's root (the last emitted token). Siblings
    stand in the order in which they are to be visited, which for sampled children is the order of sampling.

    Attributes:
        tokens: ids of the nodes.
        parents: index of each node's parent, -1 for the root; parents come before children.
        valid: False marks padding (rows of one batch may draft different numbers of tokens).
        rule: ``deterministic`` (a function of the past: greedy, n-gram), ``sampled`` (node n was drawn from
            ``probs[:, n]``) or ``shared_noise`` (judged against the choice that the position's noise makes).
        probs: for sampled drafts, the distribution each node was really drawn from.
        ids: vocabulary ids of the columns of ``probs``, ascending; None for the whole vocabulary. A drafter with a
            vocabulary of its own keeps its rows that short: a tree of them would fill the device.
        linear: every row is one path in node order (known without looking at device data).
    Raises:
        ValueError: a rule that does not fit what the draft carries.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    valid: Bool[Tensor, "batch nodes"]
    rule: str = "deterministic"
    probs: Float[Tensor, "batch nodes ids"] | None = None
    linear: bool = False
    ids: Int[Tensor, " ids"] | None = None
    _ancestors: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule!r} is unknown; choose one of {', '.join(RULES)}")
        if (self.rule == "sampled") != (self.probs is not None):
            raise ValueError(f"a {self.rule} draft {'needs' if self.rule == 'sampled' else 'must not carry'} probs")

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def chain(
        cls,
        tokens: Int[Tensor, "batch nodes"],
        valid: Bool[Tensor, "batch nodes"] | None = None,
        rule: str = "deterministic",
        probs: Float[Tensor, "batch nodes ids"] | None = None,
        ids: Int[Tensor, " ids"] | None = None,
    ) -> Draft:
        """A tree with one path: node n is the child of node n - 1."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        return cls(tokens, parents, valid, rule, probs, linear=True, ids=ids)

    @classmethod
    def empty(cls, batch: int, device, rule: str = "deterministic") -> Draft:
        """No proposal at all: the verifier then draws one token from the root's target row (with the shared noise if
        that is the rule)."""
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls.chain(nothing, rule="shared_noise" if rule == "shared_noise" else "deterministic")

    def columns(self) -> Int[Tensor, "batch nodes"]:
        """Where each token stands among the columns of ``probs``; anywhere for padding."""
        if self.ids is None:
            return self.tokens
        return torch.searchsorted(self.ids, self.tokens).clamp_max(len(self.ids) - 1)

    def chances(self) -> Float[Tensor, "batch nodes"]:
        """The probability with which each token was drawn."""
        return self.probs.gather(2, self.columns()[..., None])[..., 0]

    def subtracted(
        self, row: Float[Tensor, "batch vocab"], law: Float[Tensor, "batch ids"]
    ) -> Float[Tensor, "batch vocab"]:
        """A row of the vocabulary minus one of ``probs``."""
        return row - law if self.ids is None else row.index_add(1, self.ids, law, alpha=-1)

    def depths(self) -> Int[Tensor, "batch nodes"]:
        """1 for a child of the root, 2 for its children, and so on."""
        return self.ancestor_mask().sum(-1)[:, 1:] - 1

    def ancestor_mask(self) -> Bool[Tensor, "batch width width"]:
        """Tree mask over [root, nodes]: entry (i, j) is True where j is i itself or an ancestor of i.

        By squaring: a path of up to 2^k steps is one of at most 2^(k-1), twice. Made once a draft.
        """
        if self._ancestors is not None:
            return self._ancestors
        batch, width = self.tokens.shape[0], self.nodes + 1
        reach = torch.eye(width, device=self.tokens.device).repeat(batch, 1, 1)
        reach[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        for _ in range((width - 1).bit_length()):
            reach = (reach @ reach).clamp_max_(1.0)
        self._ancestors = reach > 0
        return self._ancestors
