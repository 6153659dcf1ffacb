"""The decoder layers of a draft head [Li et al. 2025, arXiv 2503.01840]."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dcd_core.heads.rope import rotate


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
