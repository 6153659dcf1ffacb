"""Do two methods write the same text, and if not, was the first difference a near-tie of the score?

In fp32 a score differs by about 3e-5 between passes of different widths, so an argmax may flip where the two best
scores are that close, and the texts part from there on. Anything else is a defect.
"""

from dataclasses import dataclass

import torch

from dcd_core.contrast import Target, scores, target_log_probs
from dcd_core.decode import Prompt
from dcd_core.models import LanguageModel
from dcd_core.sampling import gumbel, row_key

TIE = 1e-3  # largest gap between the two best scores, in nats, at which a difference is put down to rounding


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers: where, which tokens, and the gap of the two best scores there (nats)."""

    prompt_id: str
    position: int
    expected: int | None
    found: int | None
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap < TIE


def first_difference(expected: list[int], found: list[int]) -> int | None:
    """Index of the first token that differs (an answer that ends early differs where it ends); None if equal."""
    for index, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def compare(
    scorers: list[LanguageModel],
    target: Target,
    prompt: Prompt,
    expected: list[int],
    found: list[int],
    seed: int | None = None,
) -> Divergence | None:
    """The first difference between two answers to one prompt, judged by the models; None if they are equal.

    Args:
        scorers: models of the target, expert first.
        seed: of the shared Gumbel noise at T > 0; None at T = 0.
    """
    place = first_difference(expected, found)
    if place is None:
        return None
    gap = top_two_gap(scorers, target, prompt, expected[:place], seed)
    left, right = (answer[place] if place < len(answer) else None for answer in (expected, found))
    return Divergence(prompt.id, place, left, right, gap)


@torch.no_grad()
def top_two_gap(
    scorers: list[LanguageModel], target: Target, prompt: Prompt, answer: list[int], seed: int | None = None
) -> float:
    """Gap in nats between the best and the second-best score (with the noise, if any) after prompt and answer."""
    device = scorers[0].device
    ids = torch.tensor([prompt.ids + answer], device=device)
    last = torch.tensor([ids.shape[1] - 1], device=device)
    rows = [model.forward_full(ids, select=last).logits[:, 0] for model in scorers]
    if seed is None:
        judged = scores(rows, target)
    else:
        keys = torch.tensor([row_key(seed, prompt.id, prompt.sample)], device=device)
        positions = torch.tensor([[len(answer)]], device=device)
        judged = target_log_probs(rows, target) + gumbel(keys, positions, rows[0].shape[-1])[:, 0]
    best, second = judged[0].topk(2).values.tolist()
    return best - second
