"""Quantised models: what loading one needs, said before its weights are read, and what can be read of one afterwards.

What a quantised layer stores is no plain matrix: packed integers with scales beside them, in parameters, buffers or
tensor subclasses, as the method likes. So nothing here reads a stored weight: the layer itself is run.
"""

from __future__ import annotations

import copy

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.quantizers.auto import AutoHfQuantizer

from dcd_core.errors import UserError
from dcd_core.packages import installed

PACKAGES = {
    "aqlm": ("aqlm[gpu,cpu]",),
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "bitnet": (),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm-gpu",),
    "fouroversix": ("fouroversix",),
    "fp8": (),
    "fp_quant": ("fp_quant",),
    "gptq": ("gptqmodel", "optimum"),
    "higgs": ("flute-kernel", "fast_hadamard_transform"),
    "hqq": ("hqq",),
    "mxfp4": (),
    "mxfp8": (),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant[gpu]",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
"""What pip installs for each method, beside accelerate, which places all of them on the device."""
CUDA_ONLY = ("eetq", "fbgemm_fp8", "fp_quant", "higgs", "spqr", "vptq")
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of a weight that can be multiplied as it is; fp8 counts as floating point too, and cannot."""
CHUNK = 512
"""Columns of an output layer that are read in one product."""


def quantisation_of(config) -> dict | None:
    """What a configuration says of its model's quantisation; None for a plain model."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return found if found is None or isinstance(found, dict) else found.to_dict()


def method_of(settings: dict) -> str:
    """The quantisation method, in transformers' word; empty where none is named."""
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    method = settings.get("quant_method") or ""
    return str(getattr(method, "value", method))


def loading_arguments(config, name: str, device: torch.device) -> dict:
    """What ``from_pretrained`` must be given for a quantised model beside the dtype; nothing for a plain one.

    Raises:
        UserError: a method that transformers does not read, packages that are not installed, or another device than the
            method runs on.
    """
    settings = quantisation_of(config)
    if settings is None:
        return {}
    method = method_of(settings)
    needs = []
    missing = [package for package in (*PACKAGES.get(method, ()), "accelerate") if not installed(package)]
    if method in PACKAGES and missing:
        needs.append(f"packages that are not installed (pip install {' '.join(map(quoted, missing))})")
    if method in CUDA_ONLY and device.type != "cuda":
        needs.append(f"a CUDA device (this run uses {device})")
    if needs:
        raise UserError(f"{name} is quantised with {method}, which needs {' and '.join(needs)}")
    place = {"device_map": {"": str(device)}}
    try:
        if not AutoHfQuantizer.supports_quant_method(settings):
            raise ValueError(f"transformers {transformers.__version__} does not read it")
        AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True).validate_environment(
            **place, weights_only=True
        )
    except Exception as error:  # each method has checks of its own, and a broken package fails in any way
        raise cannot_use(name, settings, device, error) from error
    return place


def cannot_use(name: str, settings: dict, device: torch.device, error: Exception) -> UserError:
    """One line on a quantised model that cannot be loaded or run."""
    method = method_of(settings) or "an unnamed method"
    reason = " ".join(str(error).split()) or f"{type(error).__name__} (are its weights stored as config.json says?)"
    return UserError(f"{name} is quantised with {method} and cannot be used on {device}: {reason}")


def quoted(package: str) -> str:
    return f"'{package}'" if "[" in package else package


def is_quantised(model: nn.Module) -> bool:
    """Whether transformers loaded this model quantised (one that it dequantised while loading is plain)."""
    return bool(getattr(model, "is_quantized", False))


@torch.no_grad()
def computing_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a quantised model's keys and values. It is measured, with a pass over one token: weights are stored
    in others, and some methods replace the dtype that was asked for.

    Raises:
        UserError: the pass is not possible on the model's device.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        output = model.base_model(input_ids=ids, use_cache=True)
    except Exception as error:  # kernels of many makers
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        raise cannot_use(name, quantisation_of(model.config) or {}, model.device, error) from error
    kept = output.cache if "cache" in output else output.past_key_values  # renamed within the 5.x series
    return kept.layers[0].keys.dtype


def hidden_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the states that a model's output layer reads."""
    weight = plain_weight(model.get_output_embeddings())
    return computing_dtype(model) if weight is None else weight.dtype


def plain_weight(layer: nn.Module) -> Float[Tensor, "out in"] | None:
    """The weight of a linear layer that is nothing more than that; None where the layer has to be run."""
    weight = getattr(layer, "weight", None)
    plain = type(layer) is nn.Linear and type(weight) in (Tensor, nn.Parameter) and weight.dtype in PLAIN
    # compressed-tensors leaves the class alone and wraps the layer's forward
    return weight if plain and not hasattr(layer, "quantization_scheme") else None


def linear_rows(
    layer: nn.Module, hidden: Float[Tensor, "*batch hidden"], ids: Int[Tensor, " ids"]
) -> Float[Tensor, "*batch ids"]:
    """Some outputs of a linear layer; of a quantised one all are computed."""
    weight = plain_weight(layer)
    if weight is None:
        return layer(hidden)[..., ids]
    return nn.functional.linear(hidden, weight[ids], None if layer.bias is None else layer.bias[ids])


@torch.no_grad()
def output_rows(model: nn.Module) -> Float[Tensor, "vocab hidden"]:
    """The weight of a model's output layer in fp32, without its bias; of a quantised layer, what it multiplies by."""
    layer = model.get_output_embeddings()
    weight = plain_weight(layer)
    if weight is not None:
        return weight.float()
    size = getattr(layer, "in_features", None) or model.config.get_text_config(decoder=True).hidden_size
    dtype = hidden_dtype(model)
    nothing = layer(torch.zeros(1, size, dtype=dtype, device=model.device)).float()
    columns = [
        layer(part.to(dtype)).float() - nothing
        for part in torch.eye(size, device=model.device).split(CHUNK)  # a row for each input: one column of the weight
    ]
    return torch.cat(columns).T.contiguous()
