"""Attention of many parallel drafts: shared causal keys plus each draft's own.

At step ``i`` of a draft rooted at row ``t`` the query sees the step-0 keys of rows ``j <= t`` and the keys that this
very draft made in steps ``1..i``. Written as one mask over all steps this is rows x (steps x rows) scores; here the
shared part is rows x rows and the own part one score per step (a diagonal), under one softmax. Queries go in chunks
whose scores are recomputed in the backward pass, so memory stays bounded for long texts. Of texts that are packed into
one row, each is attended to by itself: nothing is spent on scores between texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dcd_core.heads.packed import Share

SCORE_BUDGET = 2**26
"""Most attention scores held at once, in elements."""


def attend_rows(
    query: Float[Tensor, "batch heads row dim"],
    rows: Int[Tensor, "batch row"],
    keys: Float[Tensor, "batch kv_heads position dim"],
    values: Float[Tensor, "batch kv_heads position dim"],
    own: list[tuple[Tensor, Tensor]],
    budget: int | None = None,
    shares: Sequence[Share] | None = None,
) -> Float[Tensor, "batch heads row dim"]:
    """Exact attention of every root row over keys ``0..rows`` and its own later keys.

    Args:
        query: rotated queries of the current step, one per root row.
        rows: the root rows, each within its text; ascending rows make the chunks cheap, any order is right.
        keys, values: step 0, all positions.
        own: per step 1..i the ``[batch, kv_heads, row, dim]`` keys and values of the same roots.
        budget: most scores held at once; None for ``SCORE_BUDGET``.
        shares: of the texts of a packed row (a batch of 1), all queries among them; None: each row is one text.
    """
    batch, heads, count, _ = query.shape
    budget = SCORE_BUDGET if budget is None else budget
    flat = [tensor for pair in own for tensor in pair]
    shares = shares or [Share(slice(0, count), slice(0, keys.shape[2]), None)]
    per_row = [batch * heads * (share.places.stop - share.places.start + len(own)) for share in shares]
    whole = sum(share.count * scores for share, scores in zip(shares, per_row, strict=True)) <= budget
    parts = []
    for share, scores in zip(shares, per_row, strict=True):
        size = max(1, share.count if whole else budget // scores)
        for start in range(share.queries.start, share.queries.stop, size):
            part = slice(start, min(start + size, share.queries.stop))
            places = slice(share.places.start, share.places.start + _extent(share, part, rows))
            inputs = (query[:, :, part], rows[:, part], keys[:, :, places], values[:, :, places])
            inputs += tuple(tensor[:, :, part] for tensor in flat)
            parts.append((called if whole else recomputed)(_attend, *inputs))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _extent(share: Share, part: slice, rows: Tensor) -> int:
    """How many positions of its text the queries of a part see."""
    if share.rows is not None:
        return int(share.rows[part.start - share.queries.start : part.stop - share.queries.start].max()) + 1
    # rows that only the device knows: it is asked where several chunks make it worth the wait
    return int(rows[:, part].max()) + 1 if part != share.queries else share.places.stop


def called(function: Callable, *arguments):
    return function(*arguments)


def recomputed(function: Callable, *arguments):
    """A call of which only the arguments are kept: it is made again in the backward pass. Partitioned parameters (ZeRO
    3) have another shape outside the pass, which the default check takes for an error."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    options = {"use_reentrant": False, "determinism_check": "none", "preserve_rng_state": False}
    return checkpoint(function, *arguments, **options)


def _attend(query: Tensor, rows: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
    batch, heads, count, dim = query.shape
    kv_heads, extent = keys.shape[1], keys.shape[2]
    # heads that share keys become further queries of one product: [batch, kv_heads, group * row, dim]
    grouped = query.reshape(batch, kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(-1, -2)).view(batch, kv_heads, -1, count, extent)
    hidden = torch.arange(extent, device=rows.device) > rows[..., None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    split = query.view(batch, kv_heads, -1, count, dim)
    diagonal = [(split * key[:, :, None]).sum(-1, keepdim=True) for key in own[::2]]
    scores = torch.cat((scores, *diagonal), dim=-1) if diagonal else scores
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.to(wide) * dim**-0.5, dim=-1).to(query.dtype)
    output = weights[..., :extent].reshape(batch, kv_heads, -1, extent) @ values
    output = output.view(batch, kv_heads, -1, count, dim)
    for index, value in enumerate(own[1::2]):
        output = output + weights[..., extent + index, None] * value[:, :, None]
    return output.view(batch, heads, count, dim)
