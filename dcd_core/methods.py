"""METHODS: every way to decode, as one dict. A new method is one entry (and at most one drafter file)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dcd_core.decode_types import Assembled, Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.hybrid import HybridDrafter
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.models import LanguageModel, Pair


@dataclass(frozen=True)
class Method:
    """How to assemble one method: does it contrast with the amateur, what does it need besides, who drafts."""

    summary: str
    contrast: bool
    drafter: Callable[[Pair, nn.Module | None, LanguageModel | None], Drafter]
    needs_head: bool = False
    needs_lm: bool = False


def _nobody(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return Drafter()


def _amateur(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return AmateurDrafter(pair.amateur)


def _ngram(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return NgramDrafter()


def _eagle3(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return Eagle3Drafter(head, pair.expert.embedding, pair.expert.vocab)


def _hybrid(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return HybridDrafter(head, pair.expert.embedding, pair.expert.vocab)


def _lm(pair: Pair, head: nn.Module | None, lm: LanguageModel | None) -> Drafter:
    return LanguageModelDrafter(lm, pair.expert.vocab)


METHODS = {
    "ar": Method("the expert alone, one token a pass", False, _nobody),
    "cd": Method("vanilla contrastive decoding, both models cached", True, _nobody),
    "expert_sd": Method("the expert alone, EAGLE3 drafts", False, _eagle3, needs_head=True),
    "scd": Method("the amateur drafts, delayed drafting", True, _amateur),
    "dcd_ngram": Method("n-gram drafts, contrast only in verification", True, _ngram),
    "dcd_eagle3": Method("expert-aligned EAGLE3 drafts, contrast only in verification", True, _eagle3, needs_head=True),
    "dcd_hybrid": Method("n-gram and EAGLE3 drafts in one tree", True, _hybrid, needs_head=True),
    "dcd_lm": Method("a small language model drafts, contrast only in verification", True, _lm, needs_lm=True),
}


def assemble(name: str, pair: Pair, head: nn.Module | None = None, lm: LanguageModel | None = None) -> Assembled:
    """Put a method together from a loaded pair and, where it drafts with one, a head or another language model.

    Raises:
        UserError: unknown method, missing amateur, head or language model, or one of another vocabulary.
    """
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    if method.contrast and pair.amateur is None:
        raise UserError(f"method {name} contrasts with an amateur; give --amateur")
    if method.needs_head and head is None:
        raise UserError(f"method {name} drafts with an EAGLE3 head; give --head")
    if method.needs_lm and lm is None:
        raise UserError(f"method {name} drafts with a language model of its own; give --lm")
    scorers = [Scorer(pair.expert)]
    if method.contrast:
        scorers.append(Scorer(pair.amateur))
    return Assembled(name, scorers, method.drafter(pair, head, lm))
