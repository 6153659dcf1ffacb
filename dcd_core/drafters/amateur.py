"""The amateur as drafter: speculative contrastive decoding, SCD [Yuan et al. 2024], with delayed drafting."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.cache import KVCache
from dcd_core.draft import Draft, Shape
from dcd_core.drafters.chain import draft_chain
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise
from dcd_core.models import LanguageModel
from dcd_core.verify import Verdict


class AmateurDrafter(Drafter):
    """Drafts gamma tokens by gamma serial passes of the amateur, whose rows the verifier then needs anyway.

    The row after the last draft does not exist yet. Only when a row of the batch accepts everything does the loop ask
    for one more pass (:meth:`late_row`), so the serial cost is (gamma + rho^gamma) t_q [DCD, App. D].
    """

    default_rule = "sampled"
    scores_amateur = True

    def __init__(self, amateur: LanguageModel):
        self.amateur = amateur
        self.cache: KVCache | None = None
        self.rows: Float[Tensor, "batch gamma vocab"] | None = None

    def adopt(self, cache: KVCache) -> None:
        """Use the cache that the loop's prefill filled."""
        self.cache = cache

    def most_nodes(self, shape: Shape) -> int:
        # a chain, whatever the budget of trees
        return shape.depth

    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        rows = []

        def following(token):
            rows.append(self._read_root(root) if token is None else self._step(token))
            return rows[-1]

        draft = draft_chain(following, noise, shape, self.amateur.vocab)
        self.rows = torch.stack(rows, dim=1)
        return draft

    def _read_root(self, root: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
        """The amateur's row after the root; notes where every row of the cache stood before it."""
        self.base, self.amateur_passes = list(self.cache.lengths), 0
        return self._step(root)

    def _step(self, token: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
        logits = self.amateur.forward(token[:, None], self.cache).logits[:, 0]
        self.cache.commit([1] * len(self.base))
        self.amateur_passes += 1
        return logits

    def late_row(
        self, token: Int[Tensor, " batch"], rows: list[bool], expert: Float[Tensor, "batch 1 vocab"], noise: RoundNoise
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Draft]:
        """One more pass, on the last drafted token: the row after it, and a draft for the token there (here none).

        Args:
            rows: those that accepted everything; what is returned for the others is not used.
            expert: its row at the same place. ``noise``: that of the one position.
        """
        self.amateur_passes += 1
        return self.amateur.forward(token[:, None], self.cache).logits, Draft.empty(
            len(token), token.device, noise.rule
        )

    def finish_late(self, rows: list[bool], final: Verdict) -> None:
        """The late token was judged; only ``rows`` keep in their cache what :meth:`late_row` read."""
        self.cache.commit([int(row) for row in rows])

    def observe(self, accepted: Accepted) -> None:
        # the root and the accepted drafts stay; what a late row added is already counted
        kept = [base + count for base, count in zip(self.base, accepted.counts, strict=True)]
        self.cache.rollback(kept)

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        raise ValueError("the rows of an amateur that drafts cannot be taken back: the loop must judge every round")

    def keep_rows(self, rows: list[int]) -> None:
        """The loop owns the cache and keeps its rows; nothing else outlives a round."""
