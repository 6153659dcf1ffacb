"""The decoding loop: one loop for every method, from a list of prompts to answers with their round records.

A *scorer* is a model whose rows enter the target, with its own prefix (and its own cache in a batch). The loop holds a
list of them, expert first; :class:`dcd_core.contrast.Target` holds their weights and temperatures in that order. One
scorer and no drafter is the plain expert, two and no drafter is vanilla contrastive decoding; a drafter makes either
speculative.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from dcd_core.batch import Batch, batch_capacities
from dcd_core.decode_types import Assembled, Generation, Prompt, Round, Scorer, Settings
from dcd_core.deferred import DeferredBatch
from dcd_core.errors import UserError
from dcd_core.lazy import LazyBatch

__all__ = ["Assembled", "Generation", "Prompt", "Round", "Scorer", "Settings", "check_prompt", "decode", "stream"]


def decode(
    method: Assembled,
    prompts: list[Prompt],
    settings: Settings,
    max_batch: int = 1,
    on_finish: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """Answer every prompt, ``max_batch`` rows at a time; results in the order of the prompts.

    Raises:
        UserError: a prompt that :func:`check_prompt` refuses, or NaN/inf in a model's logits (the prompt named).
    """
    if max_batch < 1:
        raise UserError(f"max_batch must be at least 1, got {max_batch}")
    for prompt in prompts:  # all of them before the first is answered
        check_prompt(method.scorers, prompt, settings.max_new_tokens)
    results: dict[int, Generation] = {}
    for news in stream(method, prompts, settings, max_batch):
        for generation, _ in news:
            if generation.finish:
                results[generation.index] = generation
                if on_finish:
                    on_finish(generation)
    return [results[index] for index in range(len(prompts))]


def stream(
    method: Assembled, prompts: list[Prompt], settings: Settings, max_batch: int = 1
) -> Iterator[list[tuple[Generation, list[int]]]]:
    """The same, round by round: each row that got tokens, with these tokens.

    Finished rows leave the batch and waiting prompts enter it, an eighth of the batch at a time.
    """
    capacities = batch_capacities(method, prompts, settings)
    make = batch_class(method, settings)
    waiting = deque(enumerate(prompts))
    batch = None
    while waiting or (batch and batch.active):
        free = max_batch - (len(batch.active) if batch else 0)
        if waiting and (free >= max(1, max_batch // 8)):
            entering = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            fresh = make(method, [prompt for _, prompt in entering], settings, capacities)
            for generation, (index, _) in zip(fresh.active, entering, strict=True):
                generation.index = index
            yield fresh.prefill()
            if not (batch and batch.active):
                batch = fresh
            elif fresh.active:  # a row may be finished by its first token
                batch.absorb(fresh)
        else:
            yield batch.round()


def batch_class(method: Assembled, settings: Settings) -> type[Batch]:
    """How the amateur's passes are placed: in every round, or saved (:attr:`Settings.saving`).

    A method that never asks the amateur has nothing to save.

    Raises:
        UserError: a saving for a method whose drafts are the amateur's own or need its features, or one that
            contradicts the method.
    """
    if method.saving and settings.saving not in ("none", method.saving):
        raise UserError(
            f"method {method.name} is {method.saving} judging itself; saving {settings.saving} contradicts it"
        )
    saving = method.saving or settings.saving
    if saving == "none" or len(method.scorers) == 1:
        return Batch
    if method.drafter.scores_amateur:
        raise UserError(f"method {method.name} drafts with the amateur, so its passes cannot be saved; use saving none")
    if any(method.drafter.feature_scorers):
        raise UserError(
            f"method {method.name} drafts from what the amateur's passes see, so they cannot be saved; use saving none"
        )
    return {"lazy": LazyBatch, "deferred": DeferredBatch}[saving]


def check_prompt(scorers: list[Scorer], prompt: Prompt, max_new_tokens: int) -> None:
    """Refuse a prompt that cannot be answered.

    Raises:
        UserError: an empty prompt, one that does not fit a model's context, or an id that is none of the vocabulary.
    """
    for scorer in scorers:
        ids = scorer.prefix_ids(prompt)
        if not ids:
            raise UserError(f"prompt {prompt.id!r} is empty; give at least one token")
        if len(ids) + max_new_tokens > scorer.model.context:
            raise UserError(
                f"prompt {prompt.id!r} has {len(ids)} tokens; with {max_new_tokens} new ones it passes the context of "
                f"{scorer.model.name} ({scorer.model.context})"
            )
        if not 0 <= min(ids) <= max(ids) < scorer.model.vocab:
            raise UserError(f"prompt {prompt.id!r} holds an id outside the vocabulary of {scorer.model.vocab} ids")
