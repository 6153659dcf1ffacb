"""A text read once by both models of a pair, teacher-forced, for every drafter that is measured on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.decode import Prompt
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import join_features
from dcd_core.models import Pair
from dcd_core.replay import Rollout


@dataclass(frozen=True)
class Text:
    """Prompt and answer, and one pass of each model over them: tapped features, and last hidden states, which a model's
    output layer turns into rows.

    `amateur_features` is None where no drafter reads any, `amateur` where nothing of that model was wanted.
    """

    ids: Int[Tensor, " position"]
    prompt_length: int
    features: Float[Tensor, "1 position features"]
    amateur_features: Float[Tensor, "1 position amateur_features"] | None
    expert: Float[Tensor, "position hidden"]
    amateur: Float[Tensor, "position amateur_hidden"] | None

    @classmethod
    @torch.no_grad()
    def read(cls, pair: Pair, prompt: Prompt, answer: list[int], amateur_features: bool, amateur: bool = True) -> Text:
        """Run the expert, and the amateur if anything of it is wanted."""
        ids = torch.tensor([prompt.ids + answer], device=pair.expert.device)
        expert = pair.expert.forward_full(ids, features=True, logits=False)
        features = hidden = None
        if amateur or amateur_features:
            found = pair.amateur.forward_full(ids, features=amateur_features, logits=False)
            features, hidden = found.features, found.hidden[0]
        return cls(ids[0], len(prompt.ids), expert.features, features, expert.hidden[0], hidden)

    def rollout(self, head: Eagle3Head, shuffle_seed: int = 0) -> Rollout:
        """The text with the features that a head was trained to read.

        Args:
            shuffle_seed: of a head whose amateur features are shuffled.
        """
        config = head.config
        width = config.feature_widths[1]
        joined = join_features(self.features, self.amateur_features, width, config.input, shuffle_seed)
        return Rollout(self.ids, self.prompt_length, joined[0])
