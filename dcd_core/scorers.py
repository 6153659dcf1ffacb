"""The models of a target after the expert, in the order of its weights: lists to hand to ``assemble(contrast=...)``."""

from __future__ import annotations

from collections.abc import Callable

from dcd_core.decode_types import Prompt, Scorer
from dcd_core.errors import UserError
from dcd_core.models import LanguageModel


def negative_prompt(expert: LanguageModel, negative: list[int] | Callable[[Prompt], list[int]]) -> list[Scorer]:
    """The expert as its own amateur, after another prefix than the prompt: for ``Target.guidance``.

    Args:
        negative: the ids that stand in the prompt's place, the same for every prompt, or a function that makes them
            from it (e.g. the same question under another system prompt). The answer is appended to both alike.
    Raises:
        UserError: no ids.
    """
    if callable(negative):
        return [Scorer(expert, negative)]
    if not negative:
        raise UserError("a negative prompt is empty; give at least one token (a chat's opening is enough)")
    return [Scorer(expert, lambda prompt: negative)]


def three_models(tuned: LanguageModel, base: LanguageModel) -> list[Scorer]:
    """A small tuned model and the base that it was tuned from, for ``Target.proxy``."""
    return [Scorer(tuned), Scorer(base)]
