"""The decoder layers of a draft head [Li et al. 2025, arXiv 2503.01840]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dcd_core.heads.packed import Share
from dcd_core.heads.rope import rotate
from dcd_core.heads.row_attention import attend_rows


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class Attention(nn.Module):
    """Llama-style grouped attention over inputs of any width."""

    def __init__(self, config, wide: int):
        super().__init__()
        self.dim = config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(wide, heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(wide, kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(wide, kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.dim, config.hidden_size, bias=bias)

    def split(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def query(self, inputs: Tensor, tables) -> Tensor:
        return rotate(self.split(self.q_proj(inputs)), tables)

    def key_value(self, inputs: Tensor, tables) -> tuple[Tensor, Tensor]:
        return rotate(self.split(self.k_proj(inputs)), tables), self.split(self.v_proj(inputs))

    def output(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU, or with another activation."""

    def __init__(self, config):
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))


class Block(nn.Module):
    """A stock Llama decoder layer: what a deeper head has after its first block. No q/k norms, whatever the
    expert has."""

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, self.width(size))
        self.mlp = Mlp(config)

    @staticmethod
    def width(size: int) -> int:
        """Of what the attention reads."""
        return size

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What the attention reads: the normed state (further blocks leave the embedding to the first)."""
        return self.input_layernorm(hidden)

    def finish(self, residual: Tensor, heads: Tensor) -> Tensor:
        """Residual add, MLP, residual add; the residual is the un-normed fused feature or state."""
        states = residual + self.self_attn.output(heads)
        return states + self.mlp(self.post_attention_layernorm(states))

    def read(
        self,
        embeds: Float[Tensor, "batch position hidden"],
        states: Float[Tensor, "batch position hidden"],
        tables: tuple[Tensor, Tensor],
        places: Int[Tensor, "batch row"],
        rows: Int[Tensor, "batch row"] | None,
        shares: Sequence[Share] | None,
    ) -> tuple[Tensor, Tensor, Float[Tensor, "batch row hidden"]]:
        """A text as it is: keys and values of every position, and what the block makes of some rows.

        Args:
            tables: of all positions.
            places: of these rows, each within its text.
            rows: which of the positions they are; None: all.
            shares: see :func:`attend_rows`.
        """
        inputs = self.inputs(embeds, states)
        keys, values = self.self_attn.key_value(inputs, tables)
        if rows is not None:
            states, inputs = _pick(states, rows), _pick(inputs, rows)
            tables = tuple(_pick(table[:, 0].expand(len(rows), -1, -1), rows)[:, None] for table in tables)
        heads = attend_rows(self.self_attn.query(inputs, tables), places, keys, values, [], shares=shares)
        return keys, values, self.finish(states, heads)

    def draft(
        self,
        embeds: Float[Tensor, "batch row hidden"],
        states: Float[Tensor, "batch row hidden"],
        tables: tuple[Tensor, Tensor],
        places: Int[Tensor, "batch row"],
        told: tuple[Tensor, Tensor],
        own: Sequence[tuple[Tensor, Tensor]],
        shares: Sequence[Share] | None,
    ) -> tuple[Tensor, Tensor, Float[Tensor, "batch row hidden"]]:
        """One step of the drafts rooted at some rows: their new keys and values, and their states.

        Args:
            tables: of the step's positions.
            places: of the roots, each within its text.
            told, own: keys and values of the text, and of these drafts' earlier steps.
            shares: see :func:`attend_rows`.
        """
        inputs = self.inputs(embeds, states)
        pair = self.self_attn.key_value(inputs, tables)
        query = self.self_attn.query(inputs, tables)
        return *pair, self.finish(states, attend_rows(query, places, *told, [*own, pair], shares=shares))


def _pick(states: Tensor, rows: Tensor) -> Tensor:
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))


class FirstBlock(Block):
    """The block that every EAGLE3 head has: its attention reads [embedding, state], twice as wide."""

    def __init__(self, config):
        super().__init__(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    @staticmethod
    def width(size: int) -> int:
        return 2 * size

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Embedding first, 2H wide."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def finish(self, residual: Tensor, heads: Tensor) -> Tensor:
        """The residual is un-normed, but for heads that say otherwise."""
        return super().finish(self.hidden_norm(residual) if self.norm_before_residual else residual, heads)
