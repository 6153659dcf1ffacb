"""Accepted length of every way to use two heads, from one history: replay without drafting.

A draft counts only while all before it agree with the text, and then the drafter stands on the text itself. So one
unroll of each head on the text's own tokens gives the rounds of the head alone, of both recombined, and of the oracle
variants, in which one head is replaced by the true model's rows: no drafter of their own is needed. Tests hold the
first two equal to dcd_core/replay.py and to decoding.
"""

from __future__ import annotations

import torch

from dcd_core.contrast import Target, choices
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.replay import teacher_forced, walk_rounds
from diagnostics.histories import History

KINDS = ("target", "dual", "oracle", "exact_expert")


@torch.no_grad()
def agreements(history: History, alpha: float, gamma: int) -> dict[str, list[int]]:
    """How many greedy drafts agree with the text, of every root of a round and every kind of draft.

    Kinds are those of `records.DUAL_REPLAYS`. The head alone drafts up to 2 gamma tokens (what it can in the time of
    two heads), the others gamma. The study has both heads.
    """
    study, text = history.study, history.text
    ids = text.ids
    roots = torch.arange(text.prompt_length, len(ids) - 1, device=ids.device)
    if len(roots) == 0:
        return {kind: [] for kind in KINDS}
    target = Target(alpha=alpha)
    mine, other = study.head.target_ids, study.amateur_head.target_ids
    expert_rows = history.expert_rows(history.places)[:, other]
    amateur_rows = history.amateur_rows(history.places)[:, mine]
    common = mine[torch.isin(mine, other)]
    one, two = torch.searchsorted(mine, common), torch.searchsorted(other, common)
    unrolled = _unroll(history, study.amateur_head, gamma)
    runs = {kind: torch.ones_like(roots, dtype=torch.bool) for kind in KINDS}
    counts = {kind: torch.zeros_like(roots) for kind in KINDS}
    for step, draft in enumerate(_unroll(history, study.head, 2 * gamma)):
        places = roots + 1 + step
        inside = places < len(ids)
        row = (places - text.prompt_length - 1).clamp_max(len(roots) - 1)
        picked = {"target": mine[draft.argmax(-1)]}
        if step < gamma:
            amateur_draft = next(unrolled)
            # as HeadPair combines them: the normalisers cancel
            recombined = (1 + alpha) * draft[:, one] - alpha * amateur_draft[:, two]
            picked["dual"] = common[recombined.argmax(-1)]
            picked["oracle"] = mine[choices([draft, amateur_rows[row]], target)]
            picked["exact_expert"] = other[choices([expert_rows[row], amateur_draft], target)]
        for kind, tokens in picked.items():
            runs[kind] &= inside & (tokens == ids[places.clamp_max(len(ids) - 1)])
            counts[kind] += runs[kind]
    return {kind: found.tolist() for kind, found in counts.items()}


def replay_all(history: History, alpha: float, gamma: int) -> list[dict]:
    """Rounds, accepted and emitted tokens of every kind of draft on one text: rows of `records.DUAL_REPLAYS`."""
    found = []
    for kind, agreed in agreements(history, alpha, gamma).items():
        for drafts in (gamma, 2 * gamma) if kind == "target" else (gamma,):
            rounds = walk_rounds([min(count, drafts) for count in agreed], drafts)
            sums = {"rounds": len(rounds), "accepted": sum(r[1] for r in rounds), "emitted": sum(r[2] for r in rounds)}
            found.append({"draft": kind, "gamma": drafts} | sums)
    return found


def _unroll(history: History, head: Eagle3Head, steps: int):
    return teacher_forced(head, history.study.pair.expert.embedding, history.text.rollout(head), steps)
