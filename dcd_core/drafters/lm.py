"""A full small language model as the expert-aligned proposer [DCD, section 4.4].

It drafts as an EAGLE3 head does, gamma serial passes for a chain of gamma, but reads tokens alone: it needs no features
of the expert, only the expert's vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.chain import draft_chain
from dcd_core.drafters.protocol import Accepted, RoundNoise
from dcd_core.drafters.reading import ReadingDrafter
from dcd_core.errors import UserError
from dcd_core.models import LanguageModel


class LanguageModelDrafter(ReadingDrafter):
    """Chains only: ``branch`` and ``nodes`` of a shape are not used.

    Args:
        lm: the proposer, on a cache of its own.
        vocab: number of the expert's real ids.
    Raises:
        UserError: another number of ids. That the ids mean the same is checked where tokenizers are at hand
            (:func:`dcd_core.models.load_scorer`).
    """

    default_rule = "sampled"

    def __init__(self, lm: LanguageModel, vocab: int):
        if lm.vocab != vocab:
            raise UserError(
                f"{lm.name} cannot draft for this pair: it has {lm.vocab} ids and the expert {vocab}; "
                "give a language model with the expert's vocabulary"
            )
        self.lm = lm

    def most_nodes(self, shape: Shape) -> int:
        return shape.depth

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        self.cache = self.lm.new_cache(len(prompts), capacity)
        # the prefill hands over all tokens but the first, beside which a head would find no feature
        opening = torch.tensor([[prompt[0]] for prompt in prompts], device=first.tokens.device)
        counts = [count + 1 for count in first.counts]
        self.unread = Accepted(torch.cat([opening, first.tokens], dim=1), counts, first.host_tokens, None)
        self._read_accepted()

    def read(self, new: Accepted) -> Float[Tensor, "batch 1 vocab"]:
        """One pass over new tokens; logits after each row's last one."""
        width = max(new.counts)
        last = torch.tensor(new.counts, device=self.lm.device) - 1
        return self.lm.forward(new.tokens[:, :width].clamp_min(0), self.cache, select=last).logits

    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        self._read_accepted()
        logits, lengths = self.state[:, 0], list(self.cache.lengths)

        def following(token):
            nonlocal logits
            if token is not None:
                logits = self.lm.forward(token[:, None], self.cache).logits[:, 0]
                self.cache.commit([1] * len(lengths))
            return logits

        draft = draft_chain(following, noise, shape, self.lm.vocab)
        self.cache.rollback(lengths)
        # what goes wrong at one draft is still wrong in the logits before the last
        self.suspect = ~logits.amax(-1).isfinite()
        return draft
