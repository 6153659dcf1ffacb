"""A pair so small that the law of its texts can be written down: random models over six ids, made in the process.

What the certificate draws samples from and holds against :func:`exact_law`, which is made of whole passes without a cache.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Assembled, Prompt, Scorer, Settings, decode
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import LanguageModel, Pair

VOCAB = 6
PADDED = 8  # logits of the models; the last two belong to no id and are cut off
DRAFTED = (0, 1, 3, 4, 5)  # the head's vocabulary: 2 is never drafted
TAPS = (1, 2, 3)
PROMPT = (1, 4, 2, 0, 5, 3, 1, 2, 5, 0)  # every id is followed by something, so n-grams are always found
BATCH = 256


@dataclass(frozen=True)
class Toy:
    """A pair, an untrained head for its expert, and a small language model of its own (for methods that draft with
    one)."""

    pair: Pair
    head: Eagle3Head
    lm: LanguageModel


def toy_pair(seed: int, dtype: torch.dtype = torch.float64) -> Toy:
    """Random models; fp64, so that rounding flips no coin in any number of samples that could be drawn."""
    expert, amateur, lm = (toy_model(seed + place, layers, dtype) for place, layers in ((1, 4), (2, 2), (3, 1)))
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[list(DRAFTED)] = True
    offsets = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    rows = expert.model.lm_head.weight.float()
    vocabulary = SimpleNamespace(d2t=offsets, t2d=marked)
    head = Eagle3Head.from_expert(expert.config, vocabulary, TAPS, seed=seed + 4, output_rows=rows)
    return Toy(Pair(expert, amateur, None), head.to(dtype), lm)


def toy_model(seed: int, layers: int, dtype: torch.dtype) -> LanguageModel:
    """A random Llama of some layers, 16 wide."""
    config = LlamaConfig(
        vocab_size=PADDED,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stock = LlamaForCausalLM(config).to(dtype)
    return LanguageModel(stock, vocab=VOCAB, feature_layers=TAPS if layers > TAPS[-1] else None)


def texts(
    method: Assembled, settings: Settings, samples: int, batch: int = BATCH, prompt: tuple[int, ...] = PROMPT
) -> np.ndarray:
    """Texts of the real loop, ``[samples, max_new_tokens]``; sample i has the same random numbers in every batch."""
    found = []
    for start in range(0, samples, BATCH):
        rows = [Prompt("toy", list(prompt), sample) for sample in range(start, min(start + BATCH, samples))]
        found += [generation.ids for generation in decode(method, rows, settings, max_batch=batch)]
    return np.array(found)


def exact_law(scorers: list[Scorer], target: Target, length: int, prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    """Joint law of the first ``length`` tokens, ``[vocab] * length``: the product of the target over the tokens.

    Args:
        scorers: the target's models, expert first; each reads its prefix and the text whole, without a cache.
    """
    asked, vocab, law = Prompt("toy", list(prompt)), scorers[0].model.vocab, np.ones(())
    for place in range(length):
        answers, rows = list(itertools.product(range(vocab), repeat=place)), []
        for scorer in scorers:
            ids = torch.tensor([[*scorer.prefix_ids(asked), *answer] for answer in answers])
            rows.append(scorer.model.forward_full(ids).logits[:, -1])
        row = target_log_probs(rows, target).exp().numpy()
        law = law[..., None] * row.reshape((vocab,) * (place + 1))
    return law


def counted(samples: np.ndarray, vocab: int = VOCAB) -> np.ndarray:
    """How often each text occurs, ``[vocab] * length``."""
    length = samples.shape[1]
    flat = np.ravel_multi_index(tuple(samples.T), (vocab,) * length)
    return np.bincount(flat, minlength=vocab**length).reshape((vocab,) * length)
