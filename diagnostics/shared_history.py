"""Teacher-forced acceptance of many drafters at many alphas over one shared history, each text's rows computed once.

Position by position, at every answer token that a drafter would draft: the acceptance 1 - TV(e, pi) of a sampled first
draft, whether its best token is the target's, and what aiming at pi instead of the expert could add at equal error:
TV(p, pi) for sampled drafts, argmax p != argmax pi at T = 0. All as sums over the positions of one text.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import total_variation
from dcd_core.models import Pair
from dcd_core.replay import teacher_forced
from diagnostics.members import Member, Text

ROWS = 64  # rows of the whole vocabulary worked on at once


def draft_sums(
    log_draft: Float[Tensor, "row draft_vocab"],
    log_target: Float[Tensor, "row vocab"],
    target_ids: Int[Tensor, " draft_vocab"],
) -> dict[str, float]:
    """Sums over rows: `acceptance`, sum over x of min(e, pi), and `top1`; the drafter gives 0 outside its vocabulary."""
    kept = log_target[:, target_ids]
    accepted = torch.minimum(log_draft.exp(), kept.exp()).sum()
    agreed = target_ids[log_draft.argmax(-1)] == log_target.argmax(-1)
    return {"acceptance": float(accepted), "top1": float(agreed.sum())}


def headroom_sums(
    log_expert: Float[Tensor, "row vocab"], log_target: Float[Tensor, "row vocab"]
) -> dict[str, float]:
    """Sums over rows of both ceilings."""
    flipped = log_expert.argmax(-1) != log_target.argmax(-1)
    return {
        "headroom_tv": float(total_variation(log_expert, log_target).sum()),
        "headroom_flip": float(flipped.sum()),
    }


@torch.no_grad()
def measure_text(pair: Pair, members: list[Member], text: Text, alphas: list[float]) -> list[list[dict[str, float]]]:
    """The sums of every alpha (outer) and drafter (inner), with the number of `positions`."""
    roots = torch.arange(text.prompt_length, len(text.ids) - 1, device=text.ids.device)
    names = ("acceptance", "top1", "headroom_tv", "headroom_flip")
    found = [[dict.fromkeys(names, 0.0) | {"positions": len(roots)} for _ in members] for _ in alphas]
    if len(roots) == 0:
        return found
    drafts = [_first_drafts(pair, member, text) for member in members]
    for rows in torch.arange(len(roots), device=roots.device).split(ROWS):
        # row r of a model predicts the token after position r, which is what root r drafts first
        log_p, log_q = (
            model.output_layer(hidden[roots[rows]]).log_softmax(-1)
            for model, hidden in ((pair.expert, text.expert), (pair.amateur, text.amateur))
        )
        for sums, alpha in zip(found, alphas, strict=True):
            log_pi = target_log_probs([log_p, log_q], Target(alpha=alpha))
            ceilings = headroom_sums(log_p, log_pi)
            for entry, (log_e, ids) in zip(sums, drafts, strict=True):
                for name, value in (ceilings | draft_sums(log_e[rows], log_pi, ids)).items():
                    entry[name] += value
    return found


def _first_drafts(pair: Pair, member: Member, text: Text) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the first draft at every root, and the vocabulary ids of their columns."""
    vocab = pair.expert.vocab
    logits = next(teacher_forced(member.head, pair.expert.embedding, member.rollout(text), 1, vocab))
    ids = member.head.target_ids
    return logits.log_softmax(-1), ids[ids < vocab]
