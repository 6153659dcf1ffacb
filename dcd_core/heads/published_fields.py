"""Fields of a published head's config.json beyond its shape: read, refused or named as ignored.

Written by SafeAILab/EAGLE, sgl-project/SpecForge, NVIDIA/Model-Optimizer, NVIDIA-NeMo/Automodel and
vllm-project/speculators; where these differ, a field means what vLLM and SGLang read. SpecForge, for one, reads
``norm_output`` false as "no norm before lm_head", and writes no such heads.
"""

from __future__ import annotations

import functools
import logging
import math

from transformers import GenerationConfig, PretrainedConfig
from transformers.activations import ACT2FN

from dcd_core.errors import UserError

LOG = logging.getLogger(__name__)
OBJECTS = ("dcd", "eagle_config", "rope_parameters", "rope_scaling")
INTEGERS = (
    "draft_vocab_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "target_hidden_size",
    "vocab_size",
)
NUMBERS = ("rms_norm_eps", "rope_theta")
FLAGS = ("attention_bias", "mlp_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Read into :class:`~dcd_core.heads.eagle3.Eagle3Config`: off where they are absent."""
READ = (
    *OBJECTS,
    *INTEGERS,
    *NUMBERS,
    *FLAGS,
    "eagle_aux_hidden_state_layer_ids",
    "hidden_act",
    "layer_types",
    "model_type",
    "sliding_window",
    "speculators_model_type",
    "transformer_layer_config",
    "use_sliding_window",
)
"""All that is read, here or in :mod:`dcd_core.heads.checkpoint`."""
MODEL_TYPES = ("eagle", "eagle3", "llama", "mistral", "phi3", "qwen2", "qwen3", "speculator_model", "speculators")
"""Types whose blocks are Llama's but for biases, q/k norms and joined projections, which show as tensors."""
NEUTRAL = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attention_out_bias": (False,),
    "bias": (False,),
    "block_size": (1,),
    "dflash_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "moe_intermediate_size": (0,),
    "n_routed_experts": (0,),
    "num_aux_hidden_states": (3,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "num_nextn_predict_layers": (0,),
    "parallel_drafting": (False,),
    "partial_rotary_factor": (1,),
    "ptd_token_id": (),
    "q_lora_rank": (),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "tie_word_embeddings": (False,),
    "use_qk_norm": (False,),
}
"""Fields that change what a head computes, with the values under which they do not (absent and null never do)."""
NEUTRAL_IN_EAGLE_CONFIG = {
    "has_lm_head": (True,),
    "parallel_draft_step": (0, 1),
    "parallel_drafting": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
"""The same below ``eagle_config``, where NVIDIA/Model-Optimizer keeps them."""
HARMLESS = (
    "attention_dropout",
    "bos_token_id",
    "decoder_sparse_step",
    "embed_requires_grad",  # what became of the embedding is looked at itself
    "eos_token_id",
    "has_no_defaults_at_init",
    "initializer_range",
    "max_window_layers",
    "next_layer_regular",
    "pad_token_id",
    "parallel_draft_heads_num_layers",
    "pretraining_tp",
    "speculators_config",
    "speculators_version",
    "target_model_type",
    "torch_dtype",
    "use_cache",
)


def check_types(fields: dict, layer: dict, where: str) -> None:
    """Refuse fields of a head's shape that hold something else than a number of the right kind, an object or a list.

    Raises:
        UserError: naming the first.
    """
    for name in OBJECTS:
        if layer.get(name) is not None and not isinstance(layer[name], dict):
            raise UserError(f"{where}: {name} must hold an object, got {layer[name]!r}")
    for given, name in [*((layer, name) for name in INTEGERS), *((fields, name) for name in INTEGERS)]:
        value = given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{where}: {name} must be a whole number of 1 or more, got {value!r}")
    for name in NUMBERS:
        value = layer.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise UserError(f"{where}: {name} must be a positive number, got {value!r}")
    heads, groups = layer.get("num_attention_heads") or 1, layer.get("num_key_value_heads") or 1
    if heads % groups or (layer.get("head_dim") or 2) % 2:
        raise UserError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads and head_dim even, got {heads}, "
            f"{groups} and {layer.get('head_dim')}"
        )


def read_fields(fields: dict, layer: dict, where: str) -> dict:
    """What :class:`~dcd_core.heads.eagle3.Eagle3Config` is given beside a head's shape.

    Args:
        fields: config.json. ``layer``: the same with the fields of its decoder layer on top, where it keeps them apart.
    Raises:
        UserError: a field with a value that would change what the head computes, and is not supported.
    """
    eagle = fields.get("eagle_config") or {}
    refuse_unsupported(layer, eagle, where)
    _name_ignored(where, tuple(unknown_fields(layer, eagle)))
    read = {name: layer[name] for name in FLAGS if layer.get(name) is not None}
    if eagle.get("norm_before_fc") is not None:
        read["norm_before_fc"] = eagle["norm_before_fc"]
    for name, value in read.items():
        if not isinstance(value, bool):
            raise UserError(f"{where}: {name} must be true or false, got {value!r}")
    if read.get("norm_before_fc") and read.get("fc_norm"):
        raise UserError(f"{where}: norm_before_fc and fc_norm are both true; a head has one of them")
    activation = layer.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise UserError(f"{where}: hidden_act {activation!r} is unknown; transformers has {', '.join(sorted(ACT2FN))}")
    return {**read, "hidden_act": activation}


def refuse_unsupported(layer: dict, eagle: dict, where: str) -> None:
    """Refuse fields whose values would change what a head computes.

    Raises:
        UserError: naming every such field, its value and the value that is supported.
    """
    found = [
        (place + name, given[name], allowed)
        for given, table, place in ((layer, NEUTRAL, ""), (eagle, NEUTRAL_IN_EAGLE_CONFIG, "eagle_config."))
        for name, allowed in table.items()
        if given.get(name) is not None and given[name] not in allowed
    ]
    for name in ("rope_parameters", "rope_scaling"):
        factor = (layer.get(name) or {}).get("partial_rotary_factor")
        if factor not in (None, 1):
            found.append((f"{name}.partial_rotary_factor", factor, (1,)))
    window, types = layer.get("sliding_window"), layer.get("layer_types") or []
    if window is not None and layer.get("use_sliding_window", True):
        found.append(("sliding_window", window, ()))
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        found.append(("layer_types", types, ("full_attention",)))
    if layer.get("model_type") is not None and layer["model_type"] not in MODEL_TYPES:
        found.append(("model_type", layer["model_type"], MODEL_TYPES))
    if found:
        named = [f"{name} {value!r} ({supported(allowed)})" for name, value, allowed in found]
        raise UserError(f"{where}: not supported in a head: {'; '.join(named)}")


def supported(allowed: tuple) -> str:
    """What a field may say instead."""
    return f"supported: {' or '.join(map(str, allowed))}" if allowed else "supported: none"


def unknown_fields(layer: dict, eagle: dict) -> list[str]:
    """Fields that nothing here knows, sorted."""
    known = {*READ, *NEUTRAL, *HARMLESS, *transformers_fields()}
    below = {*NEUTRAL_IN_EAGLE_CONFIG, *HARMLESS, "eagle_aux_hidden_state_layer_ids", "norm_before_fc"}
    return sorted([*(set(layer) - known), *(f"eagle_config.{name}" for name in set(eagle) - below)])


@functools.cache
def transformers_fields() -> frozenset[str]:
    """What transformers writes into every configuration."""
    return frozenset(PretrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())


@functools.cache
def _name_ignored(where: str, names: tuple[str, ...]) -> None:
    """Say once for each head what is ignored."""
    if names:
        LOG.warning("%s: unknown fields are ignored: %s", where, ", ".join(names))
