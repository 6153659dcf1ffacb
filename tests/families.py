"""Tiny models of many transformers families, and what the toolkit does with each: `python tests/families.py` writes
docs/models.md, which tests/test_families.py holds against what it sees."""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from naive import assembled, greedy_cd, some_prompts
from tiny import VOCAB, tiny_tokenizer
from toy_training import flags, toy_samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from data_prep.token_files import write_tokens
from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.errors import UserError
from dcd_core.loading import load_models
from dcd_core.methods import METHODS
from dcd_core.models import Pair, load_model, load_pair

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
NEW = 10
WINDOW = 6
"""Sliding layers forget within the tests' texts."""


@dataclass(frozen=True)
class Family:
    """A family at toy size: settings beside the common ones, whose models it stands for, and whether it is refused."""

    examples: str
    settings: dict = field(default_factory=dict)
    refused: bool = False


def moe(**more) -> dict:
    return {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **more}


SLIDING = {"sliding_window": WINDOW}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"qk_nope_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT |= {"num_experts_per_tok": 2}
IMAGES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)

FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM2, TinyLlama, Vicuna"),
    "qwen2": Family("Qwen2, Qwen2.5"),
    "qwen2_sliding": Family(
        "Qwen2 with use_sliding_window", {"use_sliding_window": True, "max_window_layers": 3, **SLIDING}
    ),
    "qwen3": Family("Qwen3", {"head_dim": 16}),
    "qwen3_moe": Family("Qwen3 mixtures of experts", moe(head_dim=16)),
    "mistral": Family("Mistral 7B v0.1 (sliding window) to v0.3 (none)", SLIDING),
    "mixtral": Family("Mixtral", moe()),
    "gemma": Family("Gemma 1", {"head_dim": 16}),
    "gemma2": Family("Gemma 2", {"head_dim": 16, "final_logit_softcapping": 1.0, **SLIDING}),
    "gemma3_text": Family("Gemma 3 1B", {"head_dim": 16, **SLIDING}),
    "gemma3": Family(
        "Gemma 3 4B to 27B, text only",
        {
            "vision_config": IMAGES | {"patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": 95,
            "boi_token_index": 94,
            "eoi_token_index": 93,
        },
    ),
    "phi": Family("Phi-1.5, Phi-2"),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", SLIDING),
    "olmo": Family("OLMo"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3", SLIDING),
    "granite": Family("Granite 3", {"logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "granitemoe": Family("Granite 3 mixtures of experts", moe(logits_scaling=4.0)),
    "cohere": Family("Command R"),
    "cohere2": Family("Command R7B, Command A", SLIDING),
    "smollm3": Family("SmolLM3"),
    "gpt_neox": Family("Pythia, GPT-NeoX"),
    "gpt2": Family("GPT-2"),
    "opt": Family("OPT"),
    "stablelm": Family("StableLM 2"),
    "starcoder2": Family("StarCoder2", SLIDING),
    "glm4": Family("GLM-4"),
    "exaone4": Family("EXAONE 4", SLIDING),
    "falcon": Family("Falcon with rotary positions"),
    "deepseek_v3": Family("DeepSeek-V3 (latent attention)", LATENT),
    "gpt_oss": Family("gpt-oss", moe(**SLIDING)),
    "llama4_text": Family("Llama 4", moe(attention_chunk_size=16), refused=True),
    "qwen3_next": Family("Qwen3-Next", moe(), refused=True),
    "mamba": Family("Mamba", refused=True),
    "jamba": Family("Jamba", moe(), refused=True),
    "falcon_h1": Family("Falcon-H1", refused=True),
    "bloom": Family("BLOOM", refused=True),
    "mpt": Family("MPT", refused=True),
    "bert": Family("BERT and other models that see both ways", refused=True),
}


def config_of(name: str, layers: int = 8, **more):
    """The configuration of a tiny model of a family."""
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=1,
    )
    settings |= {**FAMILIES[name].settings, **more}
    if name == "gemma3":
        text = {key: value for key, value in settings.items() if key not in FAMILIES[name].settings}
        settings = FAMILIES[name].settings | {"text_config": text | {"head_dim": 16, **SLIDING}}
    return CONFIG_MAPPING[name.removesuffix("_sliding")](**settings)


def save_family(name: str, folder: Path, seed: int = 0, layers: int = 8, **more) -> Path:
    """A folder with a tiny random model and a tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, layers, **more)).eval()
    with torch.no_grad():  # norms are not all ones, and biases not zero
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def save_pair(name: str, folder: Path) -> None:
    """expert/, and an amateur of four layers."""
    save_family(name, folder / "expert")
    save_family(name, folder / "amateur", seed=100, layers=4)


def differing_methods(name: str, folder: Path, alpha: float = 0.3) -> list[str]:
    """Methods whose greedy texts, in fp32, are not those of a plain loop without a cache."""
    paths = str(folder / "expert"), str(folder / "amateur")
    pair = load_pair(*paths, "float32", "cpu", amateur_feature_layers=(1, 2, 3))
    pair = Pair(pair.expert, pair.amateur, pair.tokenizer)
    prompts, wrong = some_prompts(2), []
    expected = {
        strength: [greedy_cd(pair, prompt.ids, strength, NEW) for prompt in prompts] for strength in (0.0, alpha)
    }
    for method, about in METHODS.items():
        shapes = [{"gamma": 3}, {"gamma": 3, "branch": 2, "nodes": 6}] if method == "dcd_eagle3" else [{"gamma": 3}]
        for shape in shapes:
            settings = Settings(Target(alpha=alpha, temperature=0.0), max_new_tokens=NEW, **shape)
            made = decode(assembled(method, pair), prompts, settings, max_batch=2)
            if [answer.ids for answer in made] != expected[alpha if about.contrast else 0.0]:
                wrong.append(method)
    return wrong


def trains(name: str, folder: Path) -> None:
    """Train a head for a few steps by its command, and load it beside its expert.

    Raises:
        UserError: it cannot be trained.
    """
    from train.eagle3 import main

    write_tokens(folder / "train.parquet", toy_samples(12), {})
    assert main(flags(folder, folder / "head", "--max_steps=2", "--warmup_steps=1")) == 0
    load_models(str(folder / "expert"), "", str(folder / "head" / "head"), "float32", "cpu")


def seen(name: str, folder: Path) -> tuple[str, str, str]:
    """What the page says of a family: whether it decodes, whether a head can be trained for it, and why not."""
    try:
        if FAMILIES[name].refused:
            load_model(str(save_family(name, folder / "expert")), device="cpu")
        save_pair(name, folder)
        wrong = differing_methods(name, folder)
    except UserError as error:
        reason = str(error).replace(str(folder / "expert"), "the model").removeprefix("unsupported: ")
        # without numbers and library messages, which depend on machine and version
        return "no", "no", re.sub(r" by [\d.e-]+ of a row's size.*| \(\w+Error: .*", "", reason)
    if wrong:
        return "no", "no", f"other texts by {', '.join(wrong)}"
    try:
        trains(name, folder)
    except UserError as error:
        return "yes", "no", str(error)
    return "yes", "yes", ""


def row(name: str, found: tuple[str, str, str]) -> str:
    """A line of the table."""
    decodes, trained, reason = found
    return (
        f"| {name.replace('_sliding', ' (sliding)')} | {FAMILIES[name].examples} | {decodes} | {trained} | {reason} |"
    )


HEAD = """# Which models work

A model is tested when it is loaded: a few tokens by its own `forward` and by this project's cache, with rejected
drafts, a tree of drafts and a longer row beside it, must give the same logits (`dcd_core/model_check.py`;
`--check_models false` leaves it out). So any decoder-only family works whose attention is full or sliding and whose
parts transformers can name. Another one is refused in one line when it is loaded, with the fields of its config.json
that may be why.

`python tests/families.py` writes the table, and `tests/test_families.py` compares it with what happens. Each family is
built at toy size. *Decodes*: the greedy text of every method, in fp32, is that of a plain loop without a cache.
*Trains*: `train/eagle3.py` trains a head for it, and the head loads.

* Logit scaling, soft-capping and the like are the model's own: its `forward` runs after its base model.
* Sliding windows are kept, for trees of drafts too.
* Rotary frequencies that depend on the length of a pass (`longrope`, `dynamic`) are fixed to those of short rows, and
  longer rows are refused: with `longrope` the context is `original_max_position_embeddings`.
* Models that also read images are used for text only.
* Gemma 2 and gpt-oss run with eager attention, as transformers has no sdpa for them.

| model_type | models | decodes | trains a head | reason |
|---|---|---|---|---|
"""


def page() -> str:
    """docs/models.md, from what happens now."""
    lines = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, seen(name, Path(folder))))
            print(lines[-1], file=sys.stderr, flush=True)
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
