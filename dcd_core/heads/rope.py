"""Rotary positions for draft heads, and the two spellings of their settings.

transformers 5 keeps one dictionary (``rope_parameters``); SafeAILab- and SGLang-style readers expect ``rope_theta`` and
``rope_scaling`` at the top level of config.json. Both are read, both are written.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dcd_core.architecture import LENGTH_DEPENDENT
from dcd_core.errors import UserError

FORMAT_THETA = 10000.0
"""What readers of the SafeAILab layout assume when config.json states no ``rope_theta``."""


def read_rope(fields: dict) -> tuple[float | None, dict | None]:
    """``(theta, scaling)`` of a configuration in either spelling; theta None when it states none.

    ``scaling`` is None for plain rotary positions, else a dictionary with ``rope_type``.

    Raises:
        UserError: layer types with positions of their own, or two spellings that contradict each other.
    """
    both = fields.get("rope_parameters")
    if both:
        if any(isinstance(value, dict) for value in both.values()):
            raise UserError("rope_parameters differ between layer types; draft heads support one kind of layer only")
        theta = both.get("rope_theta", fields.get("rope_theta"))
        if fields.get("rope_theta") not in (None, theta):
            raise UserError(
                f"rope_theta {fields['rope_theta']} contradicts rope_parameters, whose rope_theta is {theta}"
            )
        scaling = {key: value for key, value in both.items() if key != "rope_theta"}
        older = dict(fields.get("rope_scaling") or {})
        kinds = [one.get("rope_type", one.get("type", "default")) for one in (older, scaling)]
        if older and kinds[0] != kinds[1]:
            raise UserError(f"rope_scaling {kinds[0]} contradicts rope_parameters, whose rope_type is {kinds[1]}")
    else:
        theta = fields.get("rope_theta")
        scaling = dict(fields.get("rope_scaling") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    if scaling.get("rope_type", "default") == "default":
        scaling = None
    return (None if theta is None else float(theta)), scaling


def expert_rope(config) -> tuple[float, dict | None]:
    """``(theta, scaling)`` that a head takes over from an expert of this transformers configuration.

    A head has one kind of layer and turns all of its dimensions: of an expert with several kinds it takes those of full
    attention. Where the expert states no theta (learned positions), or its frequencies depend on the length of a pass
    (:data:`dcd_core.architecture.LENGTH_DEPENDENT`), the head's are plain ones.
    """
    fields = config.to_dict()
    stated = fields.get("rope_parameters") or {}
    kinds = {name: value for name, value in stated.items() if isinstance(value, dict)}
    if kinds:
        fields["rope_parameters"] = kinds.get("full_attention") or next(iter(kinds.values()))
    theta, scaling = read_rope(fields)
    scaling = {name: value for name, value in (scaling or {}).items() if name != "partial_rotary_factor"}
    plain = scaling.get("rope_type", "default") in ("default", *LENGTH_DEPENDENT)
    return FORMAT_THETA if theta is None else theta, None if plain else scaling


def write_rope(theta: float, scaling: dict | None) -> dict:
    """The three config.json fields that state the same rotary positions in both spellings."""
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }


def frequencies(
    theta: float, scaling: dict | None, head_dim: int, max_positions: int
) -> tuple[Float[Tensor, " half"], float]:
    """Inverse frequencies in fp32 and the factor on cos and sin.

    Raises:
        UserError: a scaling that is unknown or lacks a setting, or whose frequencies depend on the sequence length.
    """
    if scaling is None:
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        return 1.0 / (theta ** (steps / head_dim)), 1.0
    kind = scaling["rope_type"]
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"rope scaling {kind!r} is not supported by draft heads; use default, linear, llama3 or yarn")
    try:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_theta": theta, **scaling},
        )
        # real numbers also where a caller builds a head without weights on the meta device
        with torch.device("cpu"):
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"rope scaling {scaling} is not complete: {' '.join(str(error).split())}") from error
    return inverse.float(), float(factor)


class Rotary:
    """Rotates queries and keys by position, as transformers' Llama does.

    Not a module, its frequencies no buffer: ``module.to(torch.bfloat16)`` would round them.
    """

    def __init__(self, theta: float, scaling: dict | None, head_dim: int, max_positions: int):
        self.inverse, self.factor = frequencies(theta, scaling, head_dim, max_positions)

    def tables(self, positions: Int[Tensor, "batch position"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, ``[batch, 1, position, head_dim]``."""
        if self.inverse.device != positions.device:
            self.inverse = self.inverse.to(positions.device)
        angles = positions[..., None].float() * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(
    states: Float[Tensor, "batch heads position head_dim"], tables: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads position head_dim"]:
    """Apply :meth:`Rotary.tables` to queries or keys."""
    cos, sin = tables
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
