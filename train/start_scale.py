"""The size of a fresh head's logits: the one of least cross-entropy on held-out texts.

A head that starts from a linear regression predicts states of the target's size with an error, so that its logits are
over-confident: output rows are made for states without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dcd_core.heads.eagle3 import Eagle3Head
from train.batches import Texts
from train.passes import Passes
from train.processes import Ranks, add_up
from train.unroll import EXPERT, Aim, align, draft_targets, following

SCALES = tuple(0.05 * 1.1**step for step in range(36))
"""Scales that are tried: .05 to 1.4."""
TEXTS = 16
"""Held-out texts that are read, at most."""


@torch.no_grad()
def calibrate(
    head: Eagle3Head, passes: Passes, texts: Texts, numbers: Sequence[int], stop_ids: frozenset[int], ranks: Ranks
) -> float:
    """Of :data:`SCALES`, that of the final norm at which the first draft's cross-entropy is least; every rank must call
    it.

    Args:
        head: whose final norm has the size of the target's states.
        numbers: the texts that count.
    """
    total = torch.zeros(len(SCALES), dtype=torch.float64)
    for number in list(numbers)[:TEXTS][ranks.rank :: ranks.world]:
        total += cross_entropies(head, passes, texts, number, stop_ids).cpu()
    total = add_up(total, ranks.device)
    return SCALES[int(total.argmin())]


def cross_entropies(
    head: Eagle3Head, passes: Passes, texts: Texts, number: int, stop_ids: frozenset[int]
) -> Float[Tensor, " scale"]:
    """Summed over the drafting rows of a text, at each scale."""
    imitates = head.config.aligned_with == "amateur"
    batch = texts.batch([number])
    outputs = passes(batch, (True, False) if imitates else (True,))
    expert = passes.models[0]
    alignment = align(batch.texts, batch.spans, stop_ids).to(expert.device)
    layers = [model.output_layer for model in passes.models[: len(outputs)]]
    aim = Aim(None) if imitates else EXPERT
    ids = head.target_ids.to(expert.device)
    [targets] = draft_targets(layers, [out.hidden for out in outputs], alignment, ids, [aim])
    embeds = expert.embedding(following(batch.packed_ids).to(expert.device)[None])
    # an amateur's columns of fc are zero at the start
    features = F.pad(outputs[0].features, (0, head.config.feature_widths[1]))
    [state] = head.unroll(features, embeds, alignment.rows, 1, lambda *_: embeds)
    logits = head.logits(state[0, alignment.trained(0)])
    probs = targets.probs.to(logits.dtype)
    return torch.stack([F.cross_entropy(scale * logits, probs, reduction="sum").double() for scale in SCALES])
