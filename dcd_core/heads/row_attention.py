"""Attention of many parallel drafts: shared causal keys plus each draft's own.

At step ``i`` of a draft rooted at row ``t`` the query sees the step-0 keys of rows ``j <= t`` and the keys that this
very draft made in steps ``1..i``. Written as one mask over all steps this is rows x (steps x rows) scores; here the
shared part is rows x rows and the own part one score per step (a diagonal), under one softmax. Queries go in chunks
whose scores are recomputed in the backward pass, so memory stays bounded for long texts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORE_BUDGET = 2**26
"""Most attention scores held at once, in elements."""


def attend_rows(
    query: Float[Tensor, "batch heads row dim"],
    rows: Int[Tensor, "batch row"],
    keys: Float[Tensor, "batch kv_heads position dim"],
    values: Float[Tensor, "batch kv_heads position dim"],
    own: list[tuple[Tensor, Tensor]],
    budget: int | None = None,
) -> Float[Tensor, "batch heads row dim"]:
    """Exact attention of every root row over keys ``0..rows`` and its own later keys.

    Args:
        query: rotated queries of the current step, one per root row.
        rows: the root rows; ascending rows make the chunks cheap, any order is right.
        keys, values: step 0, all positions.
        own: per step 1..i the ``[batch, kv_heads, row, dim]`` keys and values of the same roots.
        budget: most scores held at once; None for ``SCORE_BUDGET``.
    """
    batch, heads, count, _ = query.shape
    per_row = batch * heads * (keys.shape[2] + len(own))
    size = max(1, (SCORE_BUDGET if budget is None else budget) // per_row)
    flat = [tensor for pair in own for tensor in pair]
    if size >= count:
        return _attend(query, rows, keys, values, *flat)
    parts = []
    for start in range(0, count, size):
        part = slice(start, start + size)
        extent = int(rows[:, part].max()) + 1
        inputs = (query[:, :, part], rows[:, part], keys[:, :, :extent], values[:, :, :extent])
        inputs += tuple(tensor[:, :, part] for tensor in flat)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_attend, *inputs, use_reentrant=False))
        else:
            parts.append(_attend(*inputs))
    return torch.cat(parts, dim=2)


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
