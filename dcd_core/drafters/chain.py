"""Drafting token after token: the one loop of every drafter that makes a chain by serial passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.protocol import RoundNoise


def draft_chain(
    following: Callable[[Int[Tensor, " batch"] | None], Float[Tensor, "batch ids"]],
    noise: RoundNoise,
    shape: Shape,
    vocab: int,
    target_ids: Int[Tensor, " ids"] | None = None,
) -> Draft:
    """A chain of at most ``shape.depth`` tokens.

    With ``shape.stop_below`` each row ends after the first token that brings the product of its draft probabilities
    below it, and drafting ends when all rows have: this costs one look at the device a token, the only one that a
    drafter takes. The token that ends a row stays.

    Args:
        following: logits after the token given, which is the one drafted last; None for the root.
        target_ids: vocabulary id of each logit, ascending; None when they are the ids themselves.
    """
    tokens, laws, valid, path = [], [], [], None
    for depth in range(shape.depth):
        logits = following(tokens[-1] if tokens else None)
        token, law = noise.pick(logits, depth, vocab, target_ids)
        tokens.append(token)
        laws.append(law)
        if shape.stop_below:
            # rounding may give a probability above 1, which would wake a row that has ended
            chance = _chance(logits, token, law, target_ids).clamp_max(1)
            valid.append(path >= shape.stop_below if depth else torch.ones_like(token, dtype=torch.bool))
            path = path * chance if depth else chance
            if depth + 1 < shape.depth and not bool((path >= shape.stop_below).any()):
                break
    return Draft.chain(
        torch.stack(tokens, dim=1),
        torch.stack(valid, dim=1) if valid else None,
        rule=noise.rule,
        probs=torch.stack(laws, dim=1) if noise.rule == "sampled" else None,
        ids=target_ids if noise.rule == "sampled" else None,
    )


def _chance(
    logits: Float[Tensor, "batch ids"],
    token: Int[Tensor, " batch"],
    law: Float[Tensor, "batch ids"] | None,
    target_ids: Int[Tensor, " ids"] | None,
) -> Float[Tensor, " batch"]:
    """Draft probability of a token: of the law that it was sampled from, else of the untempered drafter."""
    index = token if target_ids is None else torch.searchsorted(target_ids, token)
    if law is not None:
        return law.gather(1, index[:, None])[:, 0]
    return (logits.gather(1, index[:, None])[:, 0] - logits.logsumexp(-1)).exp()
