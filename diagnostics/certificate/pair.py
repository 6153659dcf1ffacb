"""A pair so small that the law of its texts can be written down: random models over six ids, made in the process.

What the certificate draws samples from and holds against :func:`exact_law`, which is made of whole passes without a
cache.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Assembled, Prompt, Scorer, Settings, decode
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import LanguageModel, Pair

VOCAB = 6
PADDED = 8  # logits of the models; the last two belong to no id and are cut off
DRAFTED = (0, 1, 3, 4, 5)  # the head's vocabulary: 2 is never drafted
LAYERS, TAPS = 5, (1, 2, 3)
PROMPT = (1, 4, 2, 0, 5, 3, 1)  # every id is followed by something, so n-grams are always found
ONE_ID = (1, 1, 1)
"""A prompt that leaves the other ids unseen, for targets that penalise repetition; n-grams are found in it."""
BATCH = 256


@dataclass(frozen=True)
class Toy:
    """A pair, untrained heads of every kind for its expert, and a small language model (for methods that draft with
    one). ``amateur_head`` claims to imitate the amateur."""

    pair: Pair
    head: Eagle3Head
    lm: LanguageModel
    dual_input: DualInputHead
    amateur_head: Eagle3Head


def toy_pair(seed: int, dtype: torch.dtype = torch.float64) -> Toy:
    """Models that are as near to one another as real ones: the amateur is the expert without its last layer and the
    small language model the whole of it, both with noise on their weights. fp64, so that rounding flips no coin in any
    number of samples that could be drawn."""
    stock = random_llama(seed, dtype)
    amateur, lm = perturbed(stock, LAYERS - 1, seed + 1), perturbed(stock, LAYERS, seed + 2)
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[list(DRAFTED)] = True
    vocabulary = SimpleNamespace(d2t=torch.tensor(DRAFTED) - torch.arange(len(DRAFTED)), t2d=marked)
    fresh = {"vocabulary": vocabulary, "feature_layers": TAPS, "output_rows": stock.lm_head.weight.float()}
    head = Eagle3Head.from_expert(stock.config, seed=seed + 3, **fresh)
    second = Eagle3Head.from_expert(stock.config, seed=seed + 4, aligned_with="amateur", **fresh)
    both = DualInputHead.from_pair(stock.config, amateur.config, amateur_feature_layers=TAPS, seed=seed + 3, **fresh)
    add_noise([both.fc.weight], seed + 5)  # the amateur's columns too, which start at zero
    pair = Pair(LanguageModel(stock, VOCAB, TAPS), amateur, None)
    return Toy(pair, head.to(dtype), lm, both.to(dtype), second.to(dtype))


def random_llama(seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A random stock model; the scale of its weights makes rows that are neither flat nor nearly certain."""
    config = LlamaConfig(
        vocab_size=PADDED,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


@torch.no_grad()
def add_noise(weights: Iterable[torch.Tensor], seed: int) -> None:
    """Normal noise, std .03, on every weight."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.03)


def perturbed(stock: LlamaForCausalLM, layers: int, seed: int) -> LanguageModel:
    """The lower layers of a model, with noise on every weight."""
    model = copy.deepcopy(stock)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    add_noise(model.parameters(), seed)
    return LanguageModel(model, VOCAB, TAPS if layers > max(TAPS) else None)


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
        scorers: the target's models, expert first; each reads its prefix and the text whole, without a cache. The
            expert's prefix and the text are what a repetition penalty counts.
    """
    asked, vocab, law = Prompt("toy", list(prompt)), scorers[0].model.vocab, np.ones(())
    for place in range(length):
        answers, rows = list(itertools.product(range(vocab), repeat=place)), []
        for scorer in scorers:
            ids = torch.tensor([[*scorer.prefix_ids(asked), *answer] for answer in answers])
            rows.append(scorer.model.forward_full(ids).logits[:, -1])
        seen = [[token in scorers[0].prefix_ids(asked) + list(answer) for token in range(vocab)] for answer in answers]
        row = target_log_probs(rows, target, torch.tensor(seen)).exp().numpy()
        law = law[..., None] * row.reshape((vocab,) * (place + 1))
    return law


def counted(samples: np.ndarray, vocab: int = VOCAB) -> np.ndarray:
    """How often each text occurs, ``[vocab] * length``."""
    length = samples.shape[1]
    flat = np.ravel_multi_index(tuple(samples.T), (vocab,) * length)
    return np.bincount(flat, minlength=vocab**length).reshape((vocab,) * length)
