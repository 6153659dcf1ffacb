"""Alternating proposals, CoS [Fu et al. 2025, collaborative decoding via speculation]: the amateur drafts, and when all
of its drafts pass, the expert's own next token is offered for verification.

Only a draft of full length is followed by an offer. One that stopped early is not: beside a row that drafts on, the
amateur has a row at that place already, and whether a text meets an offer must not depend on the texts beside it.

The expert's pass ends with a row for the place after the last draft, so its next token y ~ p is known before the
amateur has a row there. It is offered: one amateur pass reads the last draft and y together, the first of the two rows
judges y by min(1, pi / p) with residual (pi - p)+, and where y passes, the second already gives the first draft of the
next proposal. The extra pass is saved again exactly when the offer passes [DCD, App. D, gamma_p = 1].

The roles never change places: rows are named expert and amateur wherever they are combined.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.protocol import Accepted, RoundNoise
from dcd_core.models import LanguageModel
from dcd_core.verify import Verdict


class CosDrafter(AmateurDrafter):
    """The amateur as drafter, and the expert's next token as a draft of its own after a round in which all passed.

    Whether an offer passed decides if the amateur must run once more, so such a round takes a second copy from device
    to host.
    """

    def __init__(self, amateur: LanguageModel):
        super().__init__(amateur)
        self.full = True  # some row of this round's draft has its full length
        self.ahead: list[bool] = []  # rows whose root the amateur has already read
        self.ahead_rows: Float[Tensor, "batch vocab"] | None = None

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        self.ahead = [False] * len(prompts)

    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        draft = super().propose(root, noise, shape)
        self.full = draft.nodes == shape.depth
        return draft

    def _read_root(self, root: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
        ahead, self.ahead = self.ahead, [False] * len(self.ahead)
        self.base = [length - done for length, done in zip(self.cache.lengths, ahead, strict=True)]
        self.amateur_passes = 0
        if all(ahead):
            return self.ahead_rows
        logits = self.amateur.forward(root[:, None], self.cache).logits[:, 0]
        self.cache.commit([int(not done) for done in ahead])
        self.amateur_passes = 1
        if not any(ahead):
            return logits
        return torch.where(torch.tensor(ahead, device=root.device)[:, None], self.ahead_rows, logits)

    def late_row(
        self, token: Int[Tensor, " batch"], rows: list[bool], expert: Float[Tensor, "batch 1 vocab"], noise: RoundNoise
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Draft]:
        """The amateur's row after the last draft, and the expert's next token as the draft to be judged by it."""
        if not self.full:
            return super().late_row(token, rows, expert, noise)
        offer, distribution = noise.pick(expert[:, 0], 0, self.amateur.vocab)
        logits = self.amateur.forward(torch.stack([token, offer], dim=1), self.cache).logits
        self.ahead_rows = logits[:, 1]
        self.amateur_passes += 1
        probs = distribution[:, None] if noise.rule == "sampled" else None
        return logits[:, :1], Draft.chain(offer[:, None], rule=noise.rule, probs=probs)

    def finish_late(self, rows: list[bool], final: Verdict) -> None:
        """Rows whose offer passed keep it in the cache, and the row after it for their next proposal."""
        passed: Bool[Tensor, " batch"] = final.accepted > 0
        self.ahead = [row and bool(offer) for row, offer in zip(rows, passed.tolist(), strict=True)]
        self.cache.commit([row + done for row, done in zip(rows, self.ahead, strict=True)])

    def observe(self, accepted: Accepted) -> None:
        kept = [base + count + done for base, count, done in zip(self.base, accepted.counts, self.ahead, strict=True)]
        self.cache.rollback(kept)

    def keep_rows(self, rows: list[int]) -> None:
        self.ahead = [self.ahead[row] for row in rows]
        if self.ahead_rows is not None:
            self.ahead_rows = self.ahead_rows[torch.tensor(rows, device=self.ahead_rows.device)]

    def extend(self, other: CosDrafter) -> None:
        if self.ahead_rows is not None or other.ahead_rows is not None:
            parts = [self._rows_or_zeros(self), self._rows_or_zeros(other)]
            self.ahead_rows = torch.cat(parts)
        self.ahead = self.ahead + other.ahead

    @staticmethod
    def _rows_or_zeros(drafter: CosDrafter) -> Float[Tensor, "batch vocab"]:
        if drafter.ahead_rows is not None:
            return drafter.ahead_rows
        amateur = drafter.amateur
        dtype = torch.promote_types(amateur.dtype, torch.float32)
        return torch.zeros(len(drafter.ahead), amateur.vocab, dtype=dtype, device=amateur.device)
