"""What a draft is: a tree of proposed tokens for every row of a batch. A chain is a tree with one path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RULES = ("deterministic", "sampled", "shared_noise")


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
        probs: for sampled drafts, the distribution each node was really drawn from, over the whole vocabulary.
        linear: every row is one path in node order (known without looking at device data).
    Raises:
        ValueError: a rule that does not fit what the draft carries.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    valid: Bool[Tensor, "batch nodes"]
    rule: str = "deterministic"
    probs: Float[Tensor, "batch nodes vocab"] | None = None
    linear: bool = False

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
        probs: Float[Tensor, "batch nodes vocab"] | None = None,
    ) -> Draft:
        """A tree with one path: node n is the child of node n - 1."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        return cls(tokens, parents, valid, rule, probs, linear=True)

    @classmethod
    def empty(cls, batch: int, device, rule: str = "deterministic") -> Draft:
        """No proposal at all: the verifier then draws one token from the root's target row (with the shared noise if
        that is the rule)."""
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls.chain(nothing, rule="shared_noise" if rule == "shared_noise" else "deterministic")

    def depths(self) -> Int[Tensor, "batch nodes"]:
        """1 for a child of the root, 2 for its children, and so on."""
        depth = torch.ones_like(self.tokens)
        for node in range(self.nodes):
            parent = self.parents[:, node]
            above = depth.gather(1, parent.clamp_min(0)[:, None])[:, 0]
            depth[:, node] = torch.where(parent >= 0, above + 1, 1)
        return depth

    def ancestor_mask(self) -> Bool[Tensor, "batch width width"]:
        """Tree mask over [root, nodes]: entry (i, j) is True where j is i itself or an ancestor of i."""
        batch, width = self.tokens.shape[0], self.nodes + 1
        mask = torch.zeros(batch, width, width, dtype=torch.bool, device=self.tokens.device)
        mask[:, 0, 0] = True
        for node in range(self.nodes):
            above = (self.parents[:, node] + 1)[:, None, None].expand(-1, 1, width)
            mask[:, node + 1] = mask.gather(1, above)[:, 0]
            mask[:, node + 1, node + 1] = True
        return mask
