"""Teacher-forced acceptance of many drafters at many alphas over one shared history, each text's rows computed once.

Position by position, at every answer token that a drafter would draft: the acceptance 1 - TV(e, pi) of a sampled first
draft, whether its best token is the target's, and what aiming at pi instead of the expert could add at equal error:
TV(p, pi) for sampled drafts, argmax p != argmax pi at T = 0. All as sums over the positions of one text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import total_variation
from dcd_core.models import Pair
from dcd_core.replay import teacher_forced
from diagnostics.members import Member
from diagnostics.texts import Text

ROWS = 64  # rows of the whole vocabulary worked on at once


@dataclass(frozen=True)
class FirstDrafts:
    """What one drafter would draft first at every root: its law over `ids`, and its best token."""

    law: Float[Tensor, "row draft_vocab"]
    best: Int[Tensor, " row"]
    ids: Int[Tensor, " draft_vocab"]

    @classmethod
    def of(cls, logits: Float[Tensor, "row draft_vocab"], ids: Int[Tensor, " draft_vocab"]) -> FirstDrafts:
        return cls(logits.softmax(-1), ids[logits.argmax(-1)], ids)

    def sums(
        self, rows: Tensor | slice, kept: Float[Tensor, "some draft_vocab"], best: Int[Tensor, " some"]
    ) -> dict[str, float]:
        """Sums over some rows: `acceptance`, sum over x of min(e, pi), and `top1`; e is 0 outside the draft vocabulary.

        Args:
            kept: the target's probabilities at `ids`.
            best: the target's best tokens.
        """
        accepted = torch.minimum(self.law[rows], kept).sum()
        return {"acceptance": float(accepted), "top1": float((self.best[rows] == best).sum())}


def headroom_sums(log_expert: Float[Tensor, "row vocab"], log_target: Float[Tensor, "row vocab"]) -> dict[str, float]:
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
    groups = _by_vocabulary(drafts)
    for rows in torch.arange(len(roots), device=roots.device).split(ROWS):
        # row r of a model predicts the token after position r, which is what root r drafts first
        log_p, log_q = (
            model.output_layer(hidden[roots[rows]]).log_softmax(-1)
            for model, hidden in ((pair.expert, text.expert), (pair.amateur, text.amateur))
        )
        for sums, alpha in zip(found, alphas, strict=True):
            log_pi = target_log_probs([log_p, log_q], Target(alpha=alpha))
            ceilings, target, best = headroom_sums(log_p, log_pi), log_pi.exp(), log_pi.argmax(-1)
            for group in groups:
                kept = target[:, drafts[group[0]].ids]
                for index in group:
                    for name, value in (ceilings | drafts[index].sums(rows, kept, best)).items():
                        sums[index][name] += value
    return found


def _first_drafts(pair: Pair, member: Member, text: Text) -> FirstDrafts:
    vocab = pair.expert.vocab
    logits = next(teacher_forced(member.head, pair.expert.embedding, member.rollout(text), 1, vocab))
    ids = member.head.target_ids
    return FirstDrafts.of(logits, ids[ids < vocab])


def _by_vocabulary(drafts: list[FirstDrafts]) -> list[list[int]]:
    """Indices of drafters with the same draft vocabulary, for which the target is cut to it once."""
    groups: list[list[int]] = []
    for index, draft in enumerate(drafts):
        own = next((group for group in groups if torch.equal(drafts[group[0]].ids, draft.ids)), None)
        if own is None:
            groups.append([index])
        else:
            own.append(index)
    return groups
