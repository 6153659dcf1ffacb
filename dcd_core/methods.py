"""METHODS: every way to decode, as one dict. A new method is one entry (and at most one drafter file)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcd_core.decode_types import Assembled, Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.auto import AutoDrafter
from dcd_core.drafters.cos import CosDrafter
from dcd_core.drafters.cross_alpha import CrossAlphaDrafter
from dcd_core.drafters.dual import DualDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.hybrid import HybridDrafter
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.fitting import check_amateur, refuse_shuffled
from dcd_core.models import LanguageModel, Pair


@dataclass(frozen=True)
class Parts:
    """What a drafter can be made of: the scorers after the expert, a head and the head that imitates the amateur, a
    small language model."""

    pair: Pair
    contrast: list[Scorer]
    head: Eagle3Head | None
    lm: LanguageModel | None
    amateur_head: Eagle3Head | None = None


@dataclass(frozen=True)
class Method:
    """How to assemble one method.

    Args:
        contrast: it scores with further models than the expert.
        drafter: who drafts.
        needs_head, needs_lm: the drafter is a head, or a language model of its own.
        takes_head: the drafter uses a head if there is one.
        head_kind: the kind of its head, as heads declare it.
        needs_amateur_head: it drafts with a second head, which imitates the amateur.
        amateur_drafts: the first model after the expert drafts, whose rows then serve drafting and scoring alike.
        saving: how the amateur's passes are placed, where that makes the method; None for the settings' own.
    """

    summary: str
    contrast: bool
    drafter: Callable[[Parts], Drafter]
    needs_head: bool = False
    takes_head: bool = False
    needs_lm: bool = False
    head_kind: str = "eagle3"
    needs_amateur_head: bool = False
    amateur_drafts: bool = False
    saving: str | None = None

    @property
    def usual(self) -> bool:
        """A pair and an EAGLE3 head are all that it needs: what scripts try unless told otherwise."""
        return not (self.needs_lm or self.needs_amateur_head or self.reads_amateur)

    def can_draft_with(self, head: Eagle3Head | None, amateur_head: Eagle3Head | None) -> bool:
        """Whether these are the heads that it needs, if it needs any."""
        if not (self.needs_head or (self.takes_head and head is not None)):
            return True
        return head is not None and head.kind == self.head_kind and not (self.needs_amateur_head and not amateur_head)

    @property
    def reads_amateur(self) -> bool:
        """Its head reads the features of the first model after the expert."""
        return self.head_kind == "dual_input"


def nobody(parts: Parts) -> Drafter:
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


def _auto(parts: Parts) -> Drafter:
    return AutoDrafter([parts.pair.expert, *(scorer.model for scorer in parts.contrast)], parts.head)


def _cross_alpha(parts: Parts) -> Drafter:
    return CrossAlphaDrafter(parts.head, parts.pair.expert.embedding, parts.pair.expert.vocab)


def _dual(parts: Parts) -> Drafter:
    return DualDrafter(parts.head, parts.amateur_head, parts.pair.expert.embedding, parts.pair.expert.vocab)


def _lm(parts: Parts) -> Drafter:
    return LanguageModelDrafter(parts.lm, parts.pair.expert.vocab)


METHODS = {
    "ar": Method("the expert alone, one token a pass", False, nobody),
    "cd": Method("vanilla contrastive decoding, both models cached", True, nobody),
    "expert_sd": Method("the expert alone, EAGLE3 drafts", False, _eagle3, needs_head=True),
    "scd": Method("the amateur drafts, delayed drafting", True, _amateur, amateur_drafts=True),
    "cos": Method("alternating proposals of amateur and expert", True, _cos, amateur_drafts=True),
    "dcd_ngram": Method("n-gram drafts, contrast only in verification", True, _ngram),
    "dcd_eagle3": Method("expert-aligned EAGLE3 drafts, contrast only in verification", True, _eagle3, needs_head=True),
    "dcd_hybrid": Method("n-gram and EAGLE3 drafts in one tree", True, _hybrid, needs_head=True),
    "auto": Method(
        "nothing, n-grams or EAGLE3 drafts, and when the amateur is asked: what pays, round by round",
        True,
        _auto,
        takes_head=True,
        saving="deferred",
    ),
    "dcd_lm": Method("a small language model drafts, contrast only in verification", True, _lm, needs_lm=True),
    "dcd_deferred": Method(
        "EAGLE3 drafts, the expert runs ahead, the amateur judges whole blocks",
        True,
        _eagle3,
        needs_head=True,
        saving="deferred",
    ),
    "cross_alpha": Method(
        "a head that reads both models drafts, trained on the expert or on the contrast",
        True,
        _cross_alpha,
        needs_head=True,
        head_kind="dual_input",
    ),
    "dual": Method(
        "two EAGLE3 heads draft, one for each model, recombined as the target is",
        True,
        _dual,
        needs_head=True,
        needs_amateur_head=True,
    ),
}


def assemble(
    name: str,
    pair: Pair,
    head: Eagle3Head | None = None,
    contrast: list[Scorer] | None = None,
    lm: LanguageModel | None = None,
    amateur_head: Eagle3Head | None = None,
) -> Assembled:
    """Put a method together from a loaded pair and, where it drafts with one, a head.

    Args:
        contrast: the scorers after the expert, in the order of the target's weights (:mod:`dcd_core.scorers`); None for
            the pair's amateur. Methods of the expert alone leave it aside, as they do the amateur.
        lm: a small language model that drafts.
        amateur_head: a second head, trained to imitate the amateur.
    Raises:
        UserError: unknown method, missing amateur, head or language model, one of another vocabulary, or a head of
            another kind than the method drafts with.
    """
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    scorers = contrast_scorers(name, pair, contrast) if method.contrast else []
    if method.needs_head or (method.takes_head and head is not None):
        check_heads(name, pair, scorers, head, amateur_head)
    if method.needs_lm and lm is None:
        raise UserError(f"method {name} drafts with a language model of its own; give --lm")
    drafter = method.drafter(Parts(pair, scorers, head, lm, amateur_head))
    return Assembled(name, [Scorer(pair.expert), *scorers], drafter, method.saving)


KINDS = {"eagle3": "an EAGLE3 head", "dual_input": "a dual-input head"}


def check_heads(
    name: str, pair: Pair, scorers: list[Scorer], head: Eagle3Head | None, amateur_head: Eagle3Head | None
) -> None:
    """Refuse heads that a method cannot draft with.

    Raises:
        UserError: a head that is missing, of another kind, or made to imitate (or to read) another model.
    """
    method = METHODS[name]
    if head is None:
        raise UserError(f"method {name} drafts with {KINDS[method.head_kind]}; give --head")
    if head.kind != method.head_kind:
        fitting = ", ".join(other for other, one in METHODS.items() if one.needs_head and one.head_kind == head.kind)
        raise UserError(
            f"method {name} drafts with {KINDS[method.head_kind]}, and --head is {KINDS[head.kind]}, for {fitting}"
        )
    if head.config.aligned_with == "amateur":
        raise UserError("--head was trained to imitate the amateur; method dual takes it as --amateur_head")
    if scorers:
        check_amateur(head.config, pair.expert, scorers[0].model, "the head")
    if method.reads_amateur:
        refuse_shuffled(head.config, "the head")
    if method.needs_amateur_head:
        if amateur_head is None:
            raise UserError(f"method {name} drafts with a second head, for the amateur; give --amateur_head")
        for flag, given, wanted in (("--head", head, "expert"), ("--amateur_head", amateur_head, "amateur")):
            aligned = given.config.aligned_with
            if aligned != wanted:
                raise UserError(f"method {name}: {flag} must be trained to imitate the {wanted}, not the {aligned}")
        check_amateur(amateur_head.config, pair.expert, scorers[0].model, "the second head")


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
    method = METHODS[name]
    if (method.amateur_drafts or method.reads_amateur) and scorers[0].prefix is not None:
        raise UserError(
            f"method {name} drafts with {scorers[0].model.name}, which must then read the expert's own prompt; "
            "leave its prefix out, or choose a method in which the amateur does not draft"
        )
    return scorers
