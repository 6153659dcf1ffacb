"""Drafting with a head that reads the amateur too [DCD, Sec. 4.2]: the contrastive-aware drafter, direct form.

What it reads of the amateur comes from the pass that scores the draft before: there is no further one, and none at all
while drafting, where the head's own state replaces both models' features.
"""

from __future__ import annotations

from dcd_core.drafters.eagle3 import Eagle3Drafter


class CrossAlphaDrafter(Eagle3Drafter):
    """Chains and trees as :class:`Eagle3Drafter` makes them.

    Args:
        head: a :class:`dcd_core.heads.dual_input.DualInputHead` made for the expert and the first model after it.
    """

    feature_scorers = (0, 1)
