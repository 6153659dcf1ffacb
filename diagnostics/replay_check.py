"""Is a replay what decoding gives? One prompt decoded for real with a drafter, held against its replay.

Text and rounds must be equal. Where they are not, the gap of the two best scores at the first difference (of the target
if the texts part, of the drafter if only the rounds do) tells rounding from a defect.
"""

from __future__ import annotations

import torch

from dcd_core.decode import Prompt, Settings, decode
from dcd_core.methods import assemble
from dcd_core.models import Pair
from diagnostics.agreement import TIE, compare
from diagnostics.members import Member
from diagnostics.texts import Text

Rounds = list[tuple[int, int, int]]


def check_decoding(
    pair: Pair, member: Member, prompt: Prompt, text: Text, replayed: Rounds, settings: Settings
) -> dict:
    """`status` "equal", "near-tie" or "different", the `gap` in nats where they part, and the sums of both ways."""
    made = decode(assemble(member.method, pair, member.head), [prompt], settings)[0]
    rounds = [(entry.drafted, entry.accepted, entry.emitted) for entry in made.rounds]
    expected = text.ids[text.prompt_length :].tolist()
    parted = compare([pair.expert, pair.amateur], settings.target, prompt, expected, made.ids)
    gap = None
    if parted is not None:
        gap = parted.gap
    elif rounds != replayed:
        gap = first_draft_gap(pair, member, text, replayed, rounds, settings.gamma)
    return {
        "prompt": prompt.id,
        "drafter": member.place.name,
        "group": member.place.group,
        "status": "equal" if gap is None else "near-tie" if gap < TIE else "different",
        "gap": gap,
        "decoded": {"rounds": len(rounds), "accepted": sum(entry[1] for entry in rounds)},
        "replayed": {"rounds": len(replayed), "accepted": sum(entry[1] for entry in replayed)},
    }


@torch.no_grad()
def first_draft_gap(pair: Pair, member: Member, text: Text, replayed: Rounds, rounds: Rounds, gamma: int) -> float:
    """Gap of the drafter's two best logits at the first draft that one way accepts and the other does not."""
    root, differing = text.prompt_length, None
    for one, other in zip(replayed, rounds, strict=False):
        if one != other:
            differing = min(one[1], other[1])
            break
        root += one[2]
    if differing is None:
        return float("inf")  # one has more rounds than the other: no rounding does that
    rollout, embedding, head = member.rollout(text), pair.expert.embedding, member.head
    ids = head.target_ids[head.target_ids < pair.expert.vocab]
    gaps = []

    def following(step, state):
        best, index = head.logits(state)[0, 0, : len(ids)].topk(2)
        gaps.append(float(best[0] - best[1]))
        return embedding(ids[index[:1]])[None]

    shifted = torch.cat([text.ids[1:], text.ids[-1:]])
    rows = torch.tensor([[root - 1]], device=text.ids.device)
    *_, last = head.unroll(rollout.features[None], embedding(shifted)[None], rows, gamma, following)
    following(gamma, last)
    return gaps[differing]
