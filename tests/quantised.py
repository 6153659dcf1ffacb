"""Tiny quantised models as folders: what users download, made here by each package that runs on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_causal_lm, tiny_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from dcd_core.files import write_json_atomic

NEEDS = {
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_output": "bitsandbytes",
    "torchao": "torchao",
    "torchao_output": "torchao",
}
"""Ways to quantise, with the package of each; ``..._output`` quantises the output layer too."""
INSTALLED_NOWHERE = {
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq": {"bits": 4, "group_size": 128},
    "bitsandbytes": {"load_in_4bit": True},
    "aqlm": {},
    "auto-round": {"bits": 4},
    "bitnet": {},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}, "ignore": ["lm_head"]},
    "eetq": {"weights": "int8"},
    "fbgemm_fp8": {},
    "fouroversix": {},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp_quant": {},
    "higgs": {"bits": 4},
    "hqq": {"quant_config": {}},
    "mxfp4": {},
    "quanto": {"weights": "int8"},
    "quark": {},
    "sinq": {},
    "spqr": {"bits": 3},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
    "vptq": {},
    "modelopt": {"quant_algo": "NVFP4"},
    "nvfp4": {},
    "a_later_method": {},
}
"""What config.json says of models quantised by each method, and by some that transformers does not read."""


def quantise(how: str):
    """transformers' settings for one of :data:`NEEDS`."""
    whole = how.endswith("_output")
    if NEEDS[how] == "bitsandbytes":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=[] if whole else None,
        )
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), include_input_output_embeddings=whole)


def save_quantised(folder: Path, how: str, kind: str = "llama3", seed: int = 0, layers: int = 8) -> Path:
    """A quantised model with its tokenizer. Skips the test where the package is not installed."""
    pytest.importorskip(NEEDS[how])
    pytest.importorskip("accelerate")
    plain = folder.with_name(folder.name + "-plain")
    tiny_causal_lm(kind, seed, layers).save_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantise(how), dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_marked(folder: Path, settings: dict) -> Path:
    """A plain model whose configuration says that it is quantised."""
    save_tiny(folder, "smol")
    return mark(folder, settings)


def mark(folder: Path, settings: dict) -> Path:
    import json

    fields = json.loads((folder / "config.json").read_text())
    write_json_atomic(folder / "config.json", {**fields, "quantization_config": settings})
    return folder


def save_fp8(folder: Path, kind: str = "llama3") -> Path:
    """A model in fp8 with a scale a block, which is loaded as a plain one where there is no GPU."""
    save_tiny(folder, kind)
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" in name:
            scale = weight.abs().max() / 448
            stored[name], stored[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1)
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return mark(folder, {"quant_method": "fp8", **INSTALLED_NOWHERE["fp8"], "modules_to_not_convert": ["lm_head"]})
