"""The dual-input EAGLE3 head [DCD, Sec. 4.2]: at verified positions it reads the amateur beside the expert.

``fc`` fuses the expert's three tapped features and the amateur's three, joined on the last axis in this order; it is
the sum of a projection of each. At drafted positions the head's own state replaces both, so drafting asks no model.
The amateur's columns start at exactly zero: a fresh head is the same function as the expert-only head of its seed.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from dcd_core.heads.eagle3 import Eagle3Config, Eagle3Head
from dcd_core.models import default_feature_layers


class DualInputHead(Eagle3Head):
    """A head whose features, wherever it takes any, are the expert's followed by the amateur's."""

    kind = "dual_input"

    @classmethod
    def from_pair(
        cls,
        expert_config,
        amateur_config,
        vocabulary=None,
        feature_layers: tuple[int, int, int] | None = None,
        amateur_feature_layers: tuple[int, int, int] | None = None,
        seed: int = 0,
        output_rows: Float[Tensor, "vocab hidden"] | None = None,
        layers: int = 1,
        intermediate_size: int | None = None,
        **declared,
    ) -> DualInputHead:
        """A fresh head for a pair: arguments as of :meth:`Eagle3Head.from_expert`, and the amateur's own.

        Raises:
            UserError: as there, or an amateur of fewer than 7 layers without ``amateur_feature_layers``.
        """
        taps = amateur_feature_layers or default_feature_layers(amateur_config.num_hidden_layers)
        return cls.from_expert(
            expert_config,
            vocabulary,
            feature_layers,
            seed,
            output_rows,
            layers,
            intermediate_size,
            kind=cls.kind,
            amateur_hidden_size=amateur_config.hidden_size,
            amateur_feature_layers=tuple(taps),
            **declared,
        )


HEADS = {"eagle3": Eagle3Head, "dual_input": DualInputHead}
"""By the kind that a head declares."""


def make_head(config: Eagle3Config, *maps) -> Eagle3Head:
    """A head of its declared kind, without weights of its own yet."""
    return HEADS[config.kind](config, *maps)
