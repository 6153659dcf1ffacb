"""The parts of a transformers causal language model, found by the names that transformers itself gives them.

Nothing here knows a family. What a model computes is taken from the model (:class:`OutputLayer` runs its own
``forward``), and :mod:`dcd_core.model_check` tests at load that the parts together give the model's own logits.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from dcd_core.cache import KVCache, Step
from dcd_core.errors import UserError
from dcd_core.quantisation import hidden_dtype, linear_rows, output_rows

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scalings whose frequencies transformers chooses anew in every pass, by its longest row."""
ATTENTIONS = ("full_attention", "sliding_attention")


def text_config(config):
    """The configuration of the language model in it: its own, or the text part of a model that also reads images."""
    return config.get_text_config(decoder=True)


def base_model(model: nn.Module) -> nn.Module:
    """What gives final hidden states from ids.

    Raises:
        UserError: the model keeps none under its ``base_model_prefix``.
    """
    base = getattr(model, model.base_model_prefix, None)
    if not isinstance(base, nn.Module) or base is model:
        raise UserError(f"unsupported: {type(model).__name__} has no base model of its own to give hidden states")
    return base


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, in order.

    Raises:
        UserError: no list of as many modules as the configuration says.
    """
    count = text_config(model.config).num_hidden_layers
    for module in base_model(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"unsupported: {type(model).__name__} has no list of {count} decoder layers")


class GivenStates(nn.Module):
    """Takes the place of a base model and returns the states that it is given as embeddings."""

    @property
    def decoder(self) -> GivenStates:
        """OPT's output layer asks its base model for this part."""
        return self

    def forward(self, *ignored, inputs_embeds: Tensor, **others):
        return _States(last_hidden_state=inputs_embeds)


class _States(SimpleNamespace):
    """An output of a base model that holds nothing but states, whichever further fields are asked for."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


class SomeRows(nn.Module):
    """Some rows of an output layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.ids = [layer], None  # in a list: its weights are not this module's

    def forward(self, hidden: Tensor) -> Tensor:
        return linear_rows(self.layer[0], hidden, self.ids)


class OutputLayer:
    """A model's own way from final hidden states to logits: scaling, soft-capping and whatever else its ``forward``
    does after the base model, because it is that ``forward`` on a model whose base model only returns states.

    Args:
        model: a transformers causal language model; its modules are shared, nothing is copied.
    Raises:
        UserError: it has no output layer of its own.
    """

    def __init__(self, model: nn.Module):
        layer = model.get_output_embeddings()
        names = [name for name, module in model.named_children() if module is layer]
        if layer is None or not names:
            raise UserError(f"unsupported: {type(model).__name__} has no output layer of its own")
        self._model, self._layer = model, layer
        self._whole = _with_children(model, {model.base_model_prefix: GivenStates()})
        self._some = _with_children(self._whole, {names[0]: SomeRows(layer)})
        self._rows = getattr(self._some, names[0])

    @property
    def width(self) -> int:
        """Number of logits."""
        return getattr(self._layer, "out_features", None) or self._layer.weight.shape[0]

    @torch.no_grad()
    def rows(self) -> Float[Tensor, "vocab hidden"]:
        """The rows, in fp32, of the plain linear layer that is nearest to this one around zero: its own, times the
        factor by which the model scales its logits. What a draft head's output layer may start from."""
        weight = output_rows(self._model)
        states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0))
        states = states.to(weight.device, hidden_dtype(self._model))
        plain = self._layer(states).float()
        if torch.equal(self(states).float(), plain):
            return weight
        small = states * 1e-3
        moved = self(small).float() - self(torch.zeros_like(small)).float()
        return weight * (moved.norm() / (weight @ small.float().T).norm())

    def __call__(
        self, hidden: Float[Tensor, "*batch hidden"], ids: Int[Tensor, " ids"] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Logits in the model's dtype, over all ids or over some."""
        model = self._whole
        if ids is not None:
            model, self._rows.ids = self._some, ids
        # forward itself: a trainer's hooks on the whole model are not those of its output layer
        logits = model.forward(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return logits.view(*hidden.shape[:-1], logits.shape[-1])


def _with_children(model: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """The model with other modules in some places; everything else is shared with it."""
    changed = copy.copy(model)
    changed._modules = {**model._modules, **children}
    return changed


class AttentionMasks:
    """The masks that a model's layers need in one pass over the cache.

    Args:
        config: of the language model.
        name: of the model, for messages.
    Raises:
        UserError: another attention than sdpa or eager, or layers that are neither full nor sliding.
    """

    def __init__(self, config, name: str):
        self.config = config
        attention = getattr(config, "_attn_implementation", None) or "sdpa"
        if attention not in ("sdpa", "eager"):  # flash attention ignores masks of single tokens
            raise UserError(f"{name}: {attention} attention takes no 4D masks; load it with attn_implementation=sdpa")
        self.added = attention == "eager"  # it adds its masks to the scores
        self.kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        other = [kind for kind in self.kinds if kind not in ATTENTIONS]
        if other or getattr(config, "attention_chunk_size", None):
            kind = other[0] if other else "chunked_attention"
            raise UserError(f"unsupported: {name} has layers of {kind}; full and sliding attention are supported")

    @property
    def window(self) -> int | None:
        """How many newest positions a layer with a sliding window sees, its own included; None where none has one."""
        window = getattr(self.config, "sliding_window", None)
        if not getattr(self.config, "use_sliding_window", True) or (
            self.kinds and "sliding_attention" not in self.kinds
        ):
            return None
        return window

    def of(self, cache: KVCache, step: Step, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """One mask ``[batch, 1, width, extent]``, or one for each kind of layer where a model has several."""
        window = self.window
        narrow = step.mask if window is None else cache.windowed(step, window)
        if "sliding_attention" in self.kinds:
            return {"full_attention": self._form(step.mask, dtype), "sliding_attention": self._form(narrow, dtype)}
        return self._form(narrow, dtype)

    def _form(self, mask: Bool[Tensor, "batch 1 width extent"], dtype: torch.dtype) -> Tensor:
        if not self.added:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


class FixedRotary:
    """Keeps rotary frequencies as they are for short rows while a model is in use, so that no row's text depends on
    the longest row of a pass or on rejected drafts.

    Frequencies of the kinds :data:`LENGTH_DEPENDENT` are those of short rows up to ``limit`` positions; longer rows
    would need other ones, and transformers' own switch in the middle of a text mixes both.
    """

    def __init__(self, model: nn.Module):
        self.limit: int | None = None
        self._changed: list[tuple[nn.Module, object]] = []
        for module in base_model(model).modules():
            kinds = getattr(module, "rope_type", None)
            named = kinds if isinstance(kinds, dict) else {"": kinds}
            if any(kind in LENGTH_DEPENDENT for kind in named.values()):
                fixed = {key: "default" if kind in LENGTH_DEPENDENT else kind for key, kind in named.items()}
                self._changed.append((module, kinds))
                module.rope_type = fixed if isinstance(kinds, dict) else fixed[""]
        if self._changed:
            self.limit = short_positions(text_config(model.config))

    def release(self) -> None:
        for module, kinds in self._changed:
            module.rope_type = kinds


def short_positions(config) -> int:
    """Up to which position the frequencies of short rows serve."""
    stated = getattr(config, "rope_parameters", None) or {}
    several = [value for value in stated.values() if isinstance(value, dict)] or [stated]
    limits = [value.get("original_max_position_embeddings") for value in several]
    return min([config.max_position_embeddings, *(limit for limit in limits if limit)])


def learned_positions(model: nn.Module) -> bool:
    """Whether positions are looked up in a table, which ends."""
    tokens = model.get_input_embeddings()
    return any(isinstance(module, nn.Embedding) and module is not tokens for module in base_model(model).modules())


def best_attention(config) -> str:
    """The attention to load a model with: sdpa where its family has it (soft-capped scores and sinks have none)."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "eager" if family is not None and not family._supports_sdpa else "sdpa"


def cache_keyword(model: nn.Module) -> str:
    """transformers renamed the keyword of the cache within the 5.x series."""
    parameters = inspect.signature(type(base_model(model)).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
