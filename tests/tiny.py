"""Tiny random models shaped like the real families, with a tiny chat tokenizer: every path runs on them in seconds.

``smol`` ties its embeddings, ``llama3`` has llama3 rope scaling, untied embeddings and grouped heads, ``qwen3`` has q/k
norms, a head_dim that is not hidden / heads, and logits padded beyond its tokenizer.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from data_prep.toy_language import IDS
from data_prep.toy_language import toy_tokenizer as tiny_tokenizer
from dcd_core.models import LanguageModel, Pair

VOCAB = len(IDS)  # 96
KINDS = ("smol", "llama3", "qwen3")


def tiny_config(kind: str, layers: int = 8):
    """The configuration of one tiny model."""
    common = dict(
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
    if kind == "smol":
        return LlamaConfig(**common, vocab_size=VOCAB, tie_word_embeddings=True, rope_theta=100000.0)
    if kind == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return LlamaConfig(**common, vocab_size=VOCAB, tie_word_embeddings=False, rope_parameters=rope)
    if kind == "qwen3":
        return Qwen3Config(**common, vocab_size=VOCAB + 8, head_dim=16, tie_word_embeddings=False)
    raise ValueError(f"unknown kind {kind!r}")


def tiny_causal_lm(kind: str = "smol", seed: int = 0, layers: int = 8, dtype: torch.dtype = torch.float32):
    """A random stock transformers model."""
    torch.manual_seed(seed)
    family = Qwen3ForCausalLM if kind == "qwen3" else LlamaForCausalLM
    model = family(tiny_config(kind, layers)).to(dtype).eval()
    model.generation_config.eos_token_id = 3
    return model


def tiny_model(kind: str = "smol", seed: int = 0, layers: int = 8, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A random model wrapped for the project (taps 2, n//2, n-3, of a shallow one 1, 2, 3; logits cut to the 96 real
    ids)."""
    taps = (1, 2, 3) if 4 <= layers < 7 else None
    return LanguageModel(tiny_causal_lm(kind, seed, layers, dtype), vocab=VOCAB, feature_layers=taps)


def tiny_pair(kind: str = "smol", seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """An expert of 8 layers, an amateur of 4, and their tokenizer."""
    return Pair(tiny_model(kind, seed, 8, dtype), tiny_model(kind, seed + 100, 4, dtype), tiny_tokenizer())


def save_tiny(folder: Path, kind: str = "smol", seed: int = 0, layers: int = 8) -> Path:
    """A model folder with tokenizer, as an entry script expects it for --expert or --amateur."""
    tiny_causal_lm(kind, seed, layers).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
