"""Depth pruning of a model: a smaller sibling that keeps some layers and the vocabulary."""

from __future__ import annotations

import copy
import re

from torch import nn
from transformers import AutoModelForCausalLM

from dcd_core.architecture import best_attention, decoder_layers, text_config
from dcd_core.errors import UserError
from dcd_core.quantisation import method_of, quantisation_of


def parse_layers(text: str, total: int) -> list[int]:
    """Layer numbers of a list of numbers and ranges, such as ``0-11,24-29`` (ends included).

    Raises:
        UserError: not such a list, not ascending, outside ``0..total-1``, or nothing left out.
    """
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise UserError(f"keep_layers {text!r}: {part!r} is neither a layer nor a range such as 0-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"keep_layers {text!r}: the range {part.strip()} runs backwards")
        layers += range(first, last + 1)
    if any(after <= before for before, after in zip(layers, layers[1:], strict=False)):
        raise UserError(f"keep_layers {text!r} must be ascending and name no layer twice")
    if layers[-1] >= total:
        raise UserError(f"keep_layers {text!r}: layer {layers[-1]} does not exist, the expert has layers 0-{total - 1}")
    if len(layers) == total:
        raise UserError(f"keep_layers {text!r} keeps all {total} layers: that amateur would be the expert")
    return layers


def refuse_quantised(config, name: str) -> None:
    """Refuse an expert whose layers cannot be trained on.

    Raises:
        UserError: it is quantised.
    """
    settings = quantisation_of(config)
    if settings is not None:
        raise UserError(
            f"{name} is quantised with {method_of(settings)}: no amateur can be cut from it, since its layers cannot be"
            " trained; give the unquantised model that it was made from"
        )


def pruned_config(config, layers: list[int]):
    """The configuration of a model that keeps these layers, with what it says of each layer."""
    config, total = copy.deepcopy(config), config.num_hidden_layers
    config.num_hidden_layers = len(layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, [value[layer] for layer in layers])
    return config


def prune(model: nn.Module, layers: list[int], train_embeddings: bool) -> nn.Module:
    """A new model of the kept layers with their weights; embeddings, output layer and final norm come along.

    Trained are the layers and the final norm; embeddings and output layer stay the expert's unless asked for.

    Raises:
        UserError: a model that reads more than text, whose configuration has several parts.
    """
    if text_config(model.config) is not model.config:
        raise UserError(f"{type(model).__name__} reads more than text; prune the language model in it")
    attention = best_attention(model.config)
    small = AutoModelForCausalLM.from_config(pruned_config(model.config, layers), attn_implementation=attention)
    small.to(model.dtype)
    whole, weights = decoder_layers(model), model.state_dict()
    [prefix] = [name for name, module in model.named_modules() if module is whole]
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{prefix}.")}
    for new, old in enumerate(layers):
        weights |= {f"{prefix}.{new}.{name}": tensor for name, tensor in whole[old].state_dict().items()}
    small.load_state_dict(weights, strict=True)
    small.generation_config = copy.deepcopy(model.generation_config)
    for part in (small.get_input_embeddings(), small.get_output_embeddings()):
        part.requires_grad_(train_embeddings)
    return small
