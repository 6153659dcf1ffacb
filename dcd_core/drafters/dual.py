"""Drafting with two heads [DCD, Sec. 4.3]: e imitates the expert, f the amateur, recombined as the target is.

The draft is softmax((1 + alpha) log e - alpha log f) on the ids that both can draft. Both heads read the expert's
features, so proposing asks neither model. Where e and f are off, so is the recombination, e's part 1 + alpha times
[DCD, Lemma A.1]; the verifier does not mind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dcd_core.cache import KVCache
from dcd_core.contrast import Target
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head


class HeadPair(nn.Module):
    """Two heads that draft as one: their states stand side by side, and one cache holds both.

    It has the interface of a head (``fuse``, ``step``, ``unroll``, ``logits``): drafters and replay take either.

    Args:
        expert, amateur: EAGLE3 heads for one expert; what each imitates is theirs to know.
        alpha: contrast strength of the recombination, >= 0.
    Raises:
        UserError: heads that cannot draft side by side.
    """

    def __init__(self, expert: Eagle3Head, amateur: Eagle3Head, alpha: float = 0.0):
        super().__init__()
        names = ("kind", "hidden_size", "num_key_value_heads", "head_dim", "feature_layers", "vocab_size")
        different = [
            f"{name} {mine} and {its}"
            for name in names
            if (mine := getattr(expert.config, name)) != (its := getattr(amateur.config, name))
        ]
        common = expert.target_ids[torch.isin(expert.target_ids, amateur.target_ids)]
        if different or expert.kind != "eagle3" or not len(common):
            reason = "; ".join(different) or "the heads must be EAGLE3 heads with draft ids in common"
            raise UserError(f"two heads that do not fit one another cannot be recombined: {reason}")
        self.expert, self.amateur = expert, amateur
        self.weights = (1.0 + alpha, -alpha)
        self.register_buffer("common", common, persistent=False)
        for name, head in (("expert_index", expert), ("amateur_index", amateur)):
            self.register_buffer(name, torch.searchsorted(head.target_ids, common), persistent=False)

    def aimed(self, target: Target) -> HeadPair:
        """The same heads, recombined as this target combines its two models (its cutoff is left to the verifier).

        Raises:
            UserError: a target of another number of models.
        """
        if target.weights is not None and len(target.weights) != 2:
            raise UserError(
                f"two heads cannot be recombined as a target of {len(target.weights)} models is; give --draft_alpha"
            )
        pair = copy(self)
        pair.weights = target.model_weights(2)
        return pair

    @property
    def target_ids(self) -> Int[Tensor, " draft"]:
        """The ids that both can draft, ascending."""
        return self.common

    @property
    def dtype(self) -> torch.dtype:
        return self.expert.dtype

    def _sides(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states.chunk(2, dim=-1)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        layers = self.expert.config.num_hidden_layers + self.amateur.config.num_hidden_layers
        return KVCache(layers, batch, capacity, self.expert.fc.weight.device)

    def fuse(self, features: Float[Tensor, "batch position features"]) -> Float[Tensor, "batch position both"]:
        return torch.cat([self.expert.fuse(features), self.amateur.fuse(features)], dim=-1)

    def logits(self, states: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch draft"]:
        """The recombined logits over :attr:`target_ids`; the normalisers of e and f cancel in their softmax."""
        one, two = self._sides(states)
        mine = self.expert.logits(one)[..., self.expert_index]
        return self.weights[0] * mine + self.weights[1] * self.amateur.logits(two)[..., self.amateur_index]

    def step(
        self,
        embeds: Float[Tensor, "batch width hidden"],
        states: Float[Tensor, "batch width both"],
        cache: KVCache,
        **tree,
    ) -> Float[Tensor, "batch width both"]:
        """As :meth:`Eagle3Head.step`, of both."""
        one, two = self._sides(states)
        one = self.expert.step(embeds, one, cache, **tree)
        two = self.amateur.step(embeds, two, cache, first_layer=self.expert.config.num_hidden_layers, **tree)
        return torch.cat([one, two], dim=-1)

    def unroll(
        self,
        features: Float[Tensor, "batch position features"],
        embeds: Float[Tensor, "batch position hidden"],
        rows: Int[Tensor, "batch row"],
        steps: int,
        next_embeds: Callable[[int, Tensor], Tensor],
        survivors: Callable[[int], Tensor] | None = None,
    ) -> Iterator[Float[Tensor, "batch row both"]]:
        """As :meth:`Eagle3Head.unroll`: both heads in step, each following what is chosen from their joint state."""
        state, chosen = None, []
        kept: list[Tensor] = []
        alike = (lambda step: kept[step - 1]) if survivors else None
        sides = [
            head.unroll(features, embeds, rows, steps, lambda step, _: chosen[step - 1], alike)
            for head in (self.expert, self.amateur)
        ]
        for step in range(steps):
            if step and survivors:
                kept.append(survivors(step))
                state = state[:, kept[-1]]
            if step:
                chosen.append(next_embeds(step, state))
            state = torch.cat([next(side) for side in sides], dim=-1)
            yield state


class DualDrafter(Eagle3Drafter):
    """Chains and trees as :class:`Eagle3Drafter` makes them, from a :class:`HeadPair` that follows the target."""

    def __init__(self, head: Eagle3Head, amateur_head: Eagle3Head, embedding: nn.Embedding, vocab: int):
        super().__init__(HeadPair(head, amateur_head), embedding, vocab)

    def aim(self, target: Target) -> None:
        self.head = self.head.aimed(target)
