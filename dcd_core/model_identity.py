"""Is this the model that was meant? A hash that training and diagnostics both take of a loaded model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dcd_core.architecture import text_config
from dcd_core.files import content_hash
from dcd_core.quantisation import PLAIN, is_quantised

ROWS = 8
"""First and last rows of every weight that are looked at."""
DECIDING = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "logits_scaling",
    "logit_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
)
"""Settings that decide what the weights compute; others, such as the version that wrote them, may change."""


@torch.no_grad()
def model_identity(model: nn.Module) -> str:
    """sha256, in hex, of what decides a transformers model's output.

    Names and shapes of all weights, a few rows of each (so that a model is known from one whose layers were trained
    on), and the settings in :data:`DECIDING`. Rows are rounded to bfloat16 first: the dtype that a model is loaded in
    does not matter. Of a quantised model, all that its layers store is looked at: packed weights, scales, zero points.
    """
    digest = hashlib.sha256()
    settings = text_config(model.config).to_dict()
    digest.update(content_hash({name: str(settings[name]) for name in DECIDING if name in settings}).encode())
    for name, weight in stored_tensors(model) if is_quantised(model) else model.named_parameters():
        rows = weight.detach().reshape(max((1, *weight.shape[:1])), -1)
        some = torch.cat([rows[:ROWS], rows[-ROWS:]])
        if weight.dtype in PLAIN:
            some = some.to(torch.bfloat16).float()
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, and the parts of those that are made of several tensors."""
    for name, value in model.state_dict().items():
        if hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                yield f"{name}.{part}", getattr(value, part)
        elif isinstance(value, Tensor):
            yield name, value
