"""Depth pruning of a Llama- or Qwen3-style model: a smaller sibling that keeps some layers and the vocabulary."""

from __future__ import annotations

import copy
import re

from torch import nn
from transformers import AutoModelForCausalLM

from dcd_core.errors import UserError

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


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


def pruned_config(config, layers: list[int]):
    """The configuration of a model that keeps these layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    return config


def prune(model: nn.Module, layers: list[int], train_embeddings: bool) -> nn.Module:
    """A new model of the kept layers with their weights; embeddings, output layer and final norm come along.

    Trained are the layers and the final norm; embeddings and output layer stay the expert's unless asked for.
    """
    small = AutoModelForCausalLM.from_config(pruned_config(model.config, layers), attn_implementation="sdpa")
    place = {old: new for new, old in enumerate(layers)}
    weights = {}
    for name, tensor in model.state_dict().items():
        match = LAYER.match(name)
        if not match:
            weights[name] = tensor
        elif int(match[1]) in place:
            weights[f"model.layers.{place[int(match[1])]}.{name[match.end() :]}"] = tensor
    small.to(model.lm_head.weight.dtype).load_state_dict(weights, strict=True)
    small.generation_config = copy.deepcopy(model.generation_config)
    for part in (small.get_input_embeddings(), small.get_output_embeddings()):
        part.requires_grad_(train_embeddings)
    return small
