"""Texts written two ways that must be the same: by a method, and by what it is held against.

`ar` is held against the generate method of stock transformers, `cd` against a cache-free loop over the two stock
models, every other contrastive method against `cd`, the others against `ar`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from transformers import GenerationConfig

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.models import LanguageModel, Pair
from dcd_core.progress import Bar
from diagnostics.agreement import compare
from diagnostics.loading import put_together
from diagnostics.parts import Parts

REFERENCES = ("ar", "cd")
NAMES = {"generate": "stock generate", "loop": "cache-free loop"}
PORTION = 4
"""Batches whose prompts are answered, and kept, together: in one, waiting prompts take the places of finished ones."""


class TextSettings(Protocol):
    """What decides a text, of an entry script's settings."""

    max_new_tokens: int
    batch: int
    gamma: int
    seed: int


@dataclass(frozen=True)
class Check:
    """Two ways to write the same texts: `found` is held against `expected` for the first `prompts` prompts.

    `variant` are further settings of `found`, by which no text may change, and `variant_name` what they are called.
    """

    found: str
    expected: str
    alpha: float
    temperature: float
    prompts: int
    variant: dict = field(default_factory=dict)
    variant_name: str = ""
    cutoff: float = 0.0

    @property
    def target(self) -> Target:
        return Target(alpha=self.alpha, temperature=self.temperature, cutoff=self.cutoff)

    @property
    def title(self) -> str:
        noise = ", T = 1, shared noise" if self.temperature else ""
        alpha = "" if self.expected in ("generate", "ar") else f", alpha {self.alpha:g}"
        found = f"{self.found} ({self.variant_name})" if self.variant_name else self.found
        cutoff = f", cutoff {self.cutoff:g}" if self.cutoff else ""
        return f"{found} = {NAMES.get(self.expected, self.expected)}{alpha}{cutoff}{noise}"


class Writer:
    """Texts by any method or reference, some batches at a time; each is written once and kept for every check that
    needs it."""

    def __init__(
        self,
        pair: Pair,
        head,
        stops: tuple[int, ...],
        config: TextSettings,
        parts: Parts,
        lm: LanguageModel | None = None,
        amateur_head=None,
    ):
        self.pair, self.head, self.lm, self.amateur_head = pair, head, lm, amateur_head
        self.stops, self.config, self.parts = stops, config, parts

    def texts(self, name: str, check: Check, prompts: list[Prompt]) -> list[list[int]]:
        """Answers to some prompts, by a method or by "generate" or "loop"."""
        if name == "generate":
            expert, longest = self.pair.expert, self.config.max_new_tokens
            pieces = batches(prompts, self.config.batch)
            return [text for _, some in pieces for text in stock_generate(expert, some, self.stops, longest)]
        if name == "loop":
            models = [self.pair.expert, self.pair.amateur]
            return [cache_free(models, check.target, p.ids, self.stops, self.config.max_new_tokens) for p in prompts]
        settings = dict(
            target=check.target,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=self.stops,
            seed=self.config.seed,
            gamma=self.config.gamma,
            rule="shared_noise" if check.temperature else "auto",
        )
        if name == check.found:
            settings |= check.variant
        method = put_together(name, self.pair, self.head, self.lm, amateur_head=self.amateur_head)
        made = decode(method, prompts, Settings(**settings), max_batch=self.config.batch)
        return [generation.ids for generation in made]

    def kept_texts(self, name: str, check: Check, prompts: list[Prompt], index: int) -> list[list[int]]:
        """`texts` of one batch, from what a stopped run or an earlier check has left where it is there."""
        variant = check.variant_name if name == check.found and check.variant else ""
        key = f"{name}{variant and '-'}{variant}-{check.alpha:g}-{check.temperature:g}-{index}-{len(prompts)}"
        key = (key + (f"-{check.cutoff:g}" if check.cutoff else "")).replace(", ", "-").replace(" ", "-")
        found = self.parts.get(key)
        if found is None:
            found = self.texts(name, check, prompts)
            self.parts.put(key, found)
        return found

    def models(self, check: Check) -> list[LanguageModel]:
        """The models whose score decides a check."""
        free = check.expected in ("generate", "ar")
        return [self.pair.expert] if free else [self.pair.expert, self.pair.amateur]


def held_against(check: Check, prompts: list[Prompt], writer: Writer) -> dict:
    """Counts of equal texts, near-ties and differences of one check, as a JSON-able dict."""
    config = writer.config
    result = asdict(check) | {"title": check.title, "tokens": 0, "equal": 0, "near_ties": 0, "different": 0}
    result["divergences"] = []
    with Bar(len(prompts), check.title, unit="prompts") as bar:
        for index, batch in batches(prompts, PORTION * config.batch):
            expected, found = (writer.kept_texts(name, check, batch, index) for name in (check.expected, check.found))
            for prompt, left, right in zip(batch, expected, found, strict=True):
                seed = config.seed if check.temperature else None
                difference = compare(writer.models(check), check.target, prompt, left, right, seed)
                result["tokens"] += len(left)
                if difference is None:
                    result["equal"] += 1
                else:
                    result["near_ties" if difference.is_tie else "different"] += 1
                    result["divergences"].append(asdict(difference))
            bar.update(len(batch))
    return result


def batches(prompts: list[Prompt], size: int) -> Iterator[tuple[int, list[Prompt]]]:
    """(index, prompts) of every batch."""
    for start in range(0, len(prompts), size):
        yield start // size, prompts[start : start + size]


@torch.no_grad()
def cache_free(
    models: list[LanguageModel], target: Target, prompt: list[int], stops: tuple[int, ...], max_new_tokens: int
) -> list[int]:
    """Greedy contrastive decoding as plainly as it can be written: whole passes of the stock models, no cache."""
    ids, alpha = list(prompt), target.alpha
    while len(ids) < len(prompt) + max_new_tokens:
        rows = []
        for one in models:
            inputs = torch.tensor([ids], device=one.device)
            logits = one.model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits
            rows.append(logits[0, -1, : one.vocab].float().log_softmax(-1))
        score = (1 + alpha) * rows[0] - alpha * rows[1]
        ids.append(int(score.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@torch.no_grad()
def stock_generate(
    model: LanguageModel, prompts: list[Prompt], stops: tuple[int, ...], max_new_tokens: int
) -> list[list[int]]:
    """Greedy answers by transformers' own generate, left-padded."""
    width = max(len(prompt.ids) for prompt in prompts)
    padding = stops[0]
    ids = torch.tensor([[padding] * (width - len(p.ids)) + p.ids for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=model.device)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stops), pad_token_id=padding
    )
    padded_ids = list(range(model.vocab, model.config.vocab_size))  # ids without a token are never decoded
    if padded_ids:
        greedy.suppress_tokens = padded_ids
    rows = model.model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)[:, width:].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stops), len(row))] for row in rows]
