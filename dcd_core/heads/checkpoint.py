"""Draft heads on disk: one folder with config.json and the weights.

Written in the SafeAILab / SGLang layout (arXiv 2503.01840; also read by SpecForge and vLLM). Read: that layout as
model.safetensors or pytorch_model.bin, with the block under ``midlayer.`` or ``layers.0.``, and the layout of
vllm-project/speculators. The two count tapped layers differently under the same key: SafeAILab names the layer whose
*output* is tapped, speculators the one whose *input* is; in memory (``Eagle3Config.feature_layers``) it is the input.

What the public layouts have no field for (a head's kind, what it reads of an amateur, what it was trained to imitate)
stands under a key of its own, ``dcd``, which is absent where it would say nothing. The blocks after the first, of a
deeper head, are ``further.0.`` and so on.

Reading is strict. Loaders that skip what they do not know run a head with random parts and only lose acceptance.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt64
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcd_core.errors import UserError
from dcd_core.files import atomic_path
from dcd_core.heads.dual_input import HEADS, make_head
from dcd_core.heads.eagle3 import Eagle3Config, Eagle3Head, check_maps
from dcd_core.heads.fitting import check_amateur, check_embedding, check_expert
from dcd_core.heads.published_fields import check_types, read_fields
from dcd_core.heads.rope import FORMAT_THETA, read_rope, write_rope
from dcd_core.heads.training_prompts import PROMPTS, write_training_prompts

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
OWN_KEY = "dcd"
OWN_FIELDS = (
    "kind",
    "amateur_hidden_size",
    "amateur_feature_layers",
    "amateur_input",
    "amateur_identity",
    "aligned_with",
    "train_alpha",
)
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dual_input": "DualInputEagle3"}
ALIGNED = ("expert", "amateur", "contrast")
AMATEUR_INPUTS = ("dual", "amateur_zeroed", "amateur_shuffled")
EMBEDDING = "embed_tokens.weight"
"""A head may carry this one, but the expert's is used: the two must be equal."""
DERIVABLE = ("t2d",)
"""Tensors that may be absent: they follow from others."""


def config_to_json(config: Eagle3Config, dtype: torch.dtype) -> dict:
    """config.json of the SafeAILab / SGLang layout."""
    if config.feature_layers is None:
        raise UserError("a head without feature_layers cannot be saved: its readers would tap the wrong layers")
    plain = {item.name: item.default for item in dataclasses.fields(config)}
    own = {name: getattr(config, name) for name in OWN_FIELDS if getattr(config, name) != plain[name]}
    if own or config.num_hidden_layers > 1:
        own = {"kind": config.kind, **own}
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "model_type": "llama",
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **write_rope(config.rope_theta, config.rope_scaling),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        # true makes loaders tie lm_head to the embedding, which a head does not have
        "tie_word_embeddings": False,
        # readers differ in what they assume when it is absent
        "norm_before_residual": config.norm_before_residual,
        **{name: True for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)},
        "eagle_config": {AUX_KEY: [layer - 1 for layer in config.feature_layers], "use_aux_hidden_state": True},
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({OWN_KEY: own} if own else {}),
    }


def config_from_json(fields: dict, where: str = "config.json") -> Eagle3Config:
    """Read config.json of either layout.

    Raises:
        UserError: a missing field, or an architecture that this head is not (see :func:`read_fields`).
    """
    speculators = "speculators_model_type" in fields
    layer = layer_fields(fields, where) if speculators else fields
    check_types(fields, layer, where)
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UserError(f"{where}: this head has type {kind!r}; only eagle3 heads are supported")
    if speculators and fields.get("norm_before_residual") is None:  # its readers differ in what they then take
        raise UserError(f"{where} does not say norm_before_residual: true or false?")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if layer.get(name) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}: not a complete EAGLE3 head configuration")
    layers = layer.get("num_hidden_layers") or 1
    if OWN_KEY not in fields and layers != 1:
        raise UserError(f"{where}: an EAGLE3 head has one layer, this one has {layers}: is it a model's folder?")
    aux = fields.get(AUX_KEY) or (fields.get("eagle_config") or {}).get(AUX_KEY)
    if aux is not None and not (type(aux) is list and len(aux) == 3 and all(type(id_) is int for id_ in aux)):
        raise UserError(f"{where}: {AUX_KEY} must be three layers, got {aux}")
    if aux is not None and len(set(aux)) != 3:
        raise UserError(f"{where}: {AUX_KEY} must be three distinct layers, got {aux}")
    theta, scaling = read_rope(layer)
    own = own_fields(fields.get(OWN_KEY) or {}, where)
    published = read_fields(fields, layer, where)
    if own.get("kind") == "dual_input" and published.get("fc_norm"):
        raise UserError(f"{where}: fc_norm is not supported in a head that reads an amateur")
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=fields.get("target_hidden_size") or hidden,
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=fields.get("draft_vocab_size") or layer["vocab_size"],
        rms_norm_eps=layer.get("rms_norm_eps") or 1e-6,
        rope_theta=FORMAT_THETA if theta is None else theta,
        rope_scaling=scaling,
        max_position_embeddings=layer.get("max_position_embeddings") or 2048,
        feature_layers=None if aux is None else tuple(id_ if speculators else id_ + 1 for id_ in aux),
        num_hidden_layers=layers,
        **published,
        **own,
    )


def layer_fields(fields: dict, where: str) -> dict:
    """config.json with the fields of the decoder layer on top, which vllm-project/speculators keeps apart."""
    own = fields.get("transformer_layer_config") or {}
    if not isinstance(own, dict):
        raise UserError(f"{where}: transformer_layer_config must hold an object, got {own!r}")
    return {**fields, **own}


def own_fields(fields: dict, where: str) -> dict:
    """The fields of :class:`Eagle3Config` that only this project writes.

    Raises:
        UserError: one that is unknown, or values that contradict each other.
    """
    found = dict(fields)
    kind, aligned, taps = found.get("kind", "eagle3"), found.get("aligned_with", "expert"), None
    unknown = [name for name in found if name not in OWN_FIELDS]
    given = found.get("amateur_input", "dual")
    if unknown or kind not in HEADS or aligned not in ALIGNED or given not in AMATEUR_INPUTS:
        raise UserError(
            f"{where}: {OWN_KEY} says {fields}; it holds {', '.join(OWN_FIELDS)}, kind is one of {', '.join(HEADS)}, "
            f"amateur_input one of {', '.join(AMATEUR_INPUTS)} and aligned_with one of {', '.join(ALIGNED)}"
        )
    if found.get("amateur_feature_layers"):
        taps = found["amateur_feature_layers"] = tuple(found["amateur_feature_layers"])
    known = found.get("amateur_identity", "")
    if not isinstance(known, str) or (known and kind == "eagle3" and aligned == "expert"):
        raise UserError(f"{where}: a head of kind {kind}, aligned with the {aligned}, knows no amateur by {known!r}")
    if kind == "eagle3" and given != "dual":
        raise UserError(f"{where}: a head of kind {kind} reads no amateur, and says of one: {given}")
    if (kind == "dual_input") != bool(taps and len(set(taps)) == 3 and found.get("amateur_hidden_size")):
        raise UserError(f"{where}: a head of kind {kind} cannot read an amateur of these shapes: {fields}")
    return found


def save_head(
    folder: str | Path, head: Eagle3Head, training_prompts: UInt64[np.ndarray, " prompt"] | None = None
) -> None:
    """Write a head in the SafeAILab / SGLang layout; the folder appears whole or not at all.

    Args:
        training_prompts: hashes of what it was trained on (:mod:`dcd_core.heads.training_prompts`), if that is known.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    fields = config_to_json(head.config, tensors["fc.weight"].dtype)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        if training_prompts is not None:
            write_training_prompts(temporary, training_prompts)


def load_head_config(folder: str | Path) -> Eagle3Config:
    """The shape of a head (its taps say how to load the expert), from a folder or hub id.

    Raises:
        UserError: no such folder, no or broken config.json, an unsupported head.
    """
    return config_from_json(_read_config(locate(folder)), f"{folder}/config.json")


def load_head(
    folder: str | Path, expert=None, amateur=None, dtype: torch.dtype | None = None, device=None
) -> Eagle3Head:
    """Read a head of any kind, strictly.

    Args:
        folder: a local folder or a hub id.
        expert: the LanguageModel it will draft for; a head of another expert is refused, and the head takes its dtype
            and device.
        amateur: the LanguageModel that the head reads beside the expert, or imitates, if it does; as strictly.
        dtype, device: override the expert's; without either fp32 on the CPU.
    Raises:
        UserError: naming every missing, unexpected or wrongly shaped tensor; contradictory vocabulary maps; NaN or inf
            in the weights; another expert's head.
    """
    path = locate(folder)
    config = load_head_config(folder) if expert is None else fitting_config(folder, expert, amateur)
    tensors = canonical_names(_read_tensors(path))
    with torch.device("meta"):
        head = make_head(config)
    check_tensors(tensors, head.state_dict(), config, str(folder))
    try:
        check_maps(tensors["d2t"], tensors["t2d"], config.draft_vocab_size, config.vocab_size)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    if dtype is None:
        dtype = expert.dtype if expert is not None else torch.float32
    if device is None:
        device = expert.device if expert is not None else "cpu"
    head.load_state_dict(tensors, strict=True, assign=True)
    return head.to(dtype=dtype, device=device).eval().requires_grad_(False)


def fitting_config(folder: str | Path, expert, amateur=None) -> Eagle3Config:
    """The shape of a head, once it is sure that it is this expert's, and this amateur's if it was trained beside one;
    where the head does not say which layers it taps, they are the expert's.

    Raises:
        UserError: see :func:`check_expert`, :func:`check_embedding` and :func:`check_amateur`.
    """
    fields = _read_config(locate(folder))
    config = config_from_json(fields, f"{folder}/config.json")
    layer = layer_fields(fields, str(folder))
    check_expert(config, expert, read_rope(layer), str(folder))
    check_embedding(_read_embedding(locate(folder)), expert, str(folder))
    check_amateur(config, expert, amateur, str(folder))
    return config if config.feature_layers else config.replace(feature_layers=expert.feature_layers)


def canonical_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both block prefixes become ``midlayer.``, a leading ``model.`` goes; integer and byte maps get their types.

    Raises:
        UserError: a tensor that is there under two names.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        key = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        if key in renamed:
            raise UserError(f"the head has {key} twice, under two prefixes (midlayer., layers.0., model.)")
        renamed[key] = tensor
    if "d2t" in renamed and not renamed["d2t"].is_floating_point():
        renamed["d2t"] = renamed["d2t"].long()
    if renamed.get("t2d") is not None and renamed["t2d"].dtype == torch.uint8:
        renamed["t2d"] = renamed["t2d"].bool()
    return renamed


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], config: Eagle3Config, where: str) -> None:
    """Compare names, shapes and finiteness with what the config asks for; drop the embedding, fill in what follows.

    Raises:
        UserError: one message that names every difference.
    """
    tensors.pop(EMBEDDING, None)
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    if "t2d" not in tensors and "d2t" in tensors:
        ids = torch.arange(tensors["d2t"].shape[0]) + tensors["d2t"]
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids[(ids >= 0) & (ids < config.vocab_size)]] = True
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            faults.append(f"{name} is {list(tensor.shape)}, should be {list(expected[name].shape)}")
        elif name in expected and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} holds NaN or inf")
    if faults:
        raise UserError(f"{where} does not fit its config.json: {'; '.join(faults)}")


def locate(folder: str | Path) -> Path:
    """A local folder as it is; anything shaped like ``owner/name`` is fetched from the hub.

    Raises:
        UserError: neither.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    if path.is_absolute() or str(folder).count("/") != 1:
        raise UserError(f"no head at {folder}: give a folder with config.json and model.safetensors, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=["config.json", "*.safetensors", "*.bin", PROMPTS]))
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"no head at {folder}: not a local folder, and the hub says: {text}") from error


def _read_config(path: Path) -> dict:
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        inside = sorted(found.parent for found in [*path.glob("head/config.json"), *path.glob("heads/*/config.json")])
        hint = f"; give a head in it, such as {inside[0]}" if inside else ""
        raise UserError(f"{path} has no config.json: not the folder of a head{hint}") from error
    except ValueError as error:
        raise UserError(f"{path}/config.json is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path}/config.json must hold an object")
    return fields


def _read_embedding(path: Path) -> Tensor | None:
    """The embedding that a head carries, if it does, without reading the rest."""
    safe = path / "model.safetensors"
    if not safe.exists():
        found = canonical_names(_read_tensors(path))
        return found.get(EMBEDDING)
    try:
        with safe_open(safe, framework="pt") as tensors:
            names = tensors.keys()
            name = next((name for name in names if name.removeprefix("model.") == EMBEDDING), None)
            return None if name is None else tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights in {path} cannot be read: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    safe, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    try:
        if safe.exists():
            return load_file(safe)
        if pickled.exists():
            return torch.load(pickled, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"the weights in {path} cannot be read: {error}") from error
    raise UserError(f"{path} has neither model.safetensors nor pytorch_model.bin")
