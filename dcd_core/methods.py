"""METHODS: every way to decode, as one dict. A new method is one entry (and at most one drafter file)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dcd_core.decode_types import Assembled, Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.cos import CosDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.hybrid import HybridDrafter
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.models import LanguageModel, Pair


@dataclass(frozen=True)
class Parts:
    """What a drafter can be made of: the scorers after the expert, a head, a small language model."""

    pair: Pair
    contrast: list[Scorer]
    head: nn.Module | None
    lm: LanguageModel | None


@dataclass(frozen=True)
class Method:
    """How to assemble one method.

    Args:
        contrast: it scores with further models than the expert.
        drafter: who drafts.
        needs_head, needs_lm: the drafter is an EAGLE3 head, or a language model of its own.
        amateur_drafts: the first model after the expert drafts, whose rows then serve drafting and scoring alike.
        saving: how the amateur's passes are placed, where that makes the method; None for the settings' own.
    """

    summary: str
    contrast: bool
    drafter: Callable[[Parts], Drafter]
    needs_head: bool = False
    needs_lm: bool = False
    amateur_drafts: bool = False
    saving: str | None = None


def _nobody(parts: Parts) -> Drafter:
    return Drafter()


def _ngram(parts: Parts) -> Drafter:
    return NgramDrafter()


def _eagle3(parts: Parts) -> Drafter:
    return Eagle3Drafter(parts.head, parts.pair.expert.embedding, parts.pair.expert.vocab)


def _amateur(parts: Parts) -> Drafter:
    return AmateurDrafter(parts.contrast[0].model)


def _cos(parts: Parts) -> Drafter:
    return CosDrafter(parts.contrast[0].model)


def _hybrid(parts: Parts) -> Drafter:
    return HybridDrafter(parts.head, parts.pair.expert.embedding, parts.pair.expert.vocab)


def _lm(parts: Parts) -> Drafter:
    return LanguageModelDrafter(parts.lm, parts.pair.expert.vocab)


METHODS = {
    "ar": Method("the expert alone, one token a pass", False, _nobody),
    "cd": Method("vanilla contrastive decoding, both models cached", True, _nobody),
    "expert_sd": Method("the expert alone, EAGLE3 drafts", False, _eagle3, needs_head=True),
    "scd": Method("the amateur drafts, delayed drafting", True, _amateur, amateur_drafts=True),
    "cos": Method("alternating proposals of amateur and expert", True, _cos, amateur_drafts=True),
    "dcd_ngram": Method("n-gram drafts, contrast only in verification", True, _ngram),
    "dcd_eagle3": Method("expert-aligned EAGLE3 drafts, contrast only in verification", True, _eagle3, needs_head=True),
    "dcd_hybrid": Method("n-gram and EAGLE3 drafts in one tree", True, _hybrid, needs_head=True),
    "dcd_lm": Method("a small language model drafts, contrast only in verification", True, _lm, needs_lm=True),
    "dcd_deferred": Method(
        "EAGLE3 drafts, the expert runs ahead, the amateur judges whole blocks",
        True,
        _eagle3,
        needs_head=True,
        saving="deferred",
    ),
}


def assemble(
    name: str,
    pair: Pair,
    head: nn.Module | None = None,
    contrast: list[Scorer] | None = None,
    lm: LanguageModel | None = None,
) -> Assembled:
    """Put a method together from a loaded pair and, where it drafts with one, a head.

    Args:
        contrast: the scorers after the expert, in the order of the target's weights (:mod:`dcd_core.scorers`); None for
            the pair's amateur. Methods of the expert alone leave it aside, as they do the amateur.
        lm: a small language model that drafts.
    Raises:
        UserError: unknown method, missing amateur, head or language model, or one of another vocabulary.
    """
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    scorers = contrast_scorers(name, pair, contrast) if method.contrast else []
    if method.needs_head and head is None:
        raise UserError(f"method {name} drafts with an EAGLE3 head; give --head")
    if method.needs_lm and lm is None:
        raise UserError(f"method {name} drafts with a language model of its own; give --lm")
    drafter = method.drafter(Parts(pair, scorers, head, lm))
    return Assembled(name, [Scorer(pair.expert), *scorers], drafter, method.saving)


def contrast_scorers(name: str, pair: Pair, contrast: list[Scorer] | None) -> list[Scorer]:
    """The scorers after the expert, checked.

    Raises:
        UserError: none, one of another vocabulary, or a drafting one with a prefix of its own.
    """
    if contrast is None and pair.amateur is None:
        raise UserError(f"method {name} contrasts with an amateur; give --amateur")
    scorers = [Scorer(pair.amateur)] if contrast is None else list(contrast)
    if not scorers:
        raise UserError(f"method {name} contrasts with at least one more model; the list of scorers is empty")
    for scorer in scorers:
        if scorer.model.vocab != pair.expert.vocab:
            raise UserError(
                f"{scorer.model.name} scores {scorer.model.vocab} ids and the expert {pair.expert.vocab}; "
                "load it with load_scorer, which checks its vocabulary"
            )
    if METHODS[name].amateur_drafts and scorers[0].prefix is not None:
        raise UserError(
            f"method {name} drafts with {scorers[0].model.name}, which must then read the expert's own prompt; "
            "leave its prefix out, or choose a method in which the amateur does not draft"
        )
    return scorers
