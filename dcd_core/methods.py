"""METHODS: every way to decode, as one dict. A new method is one entry (and at most one drafter file)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dcd_core.decode_types import Assembled, Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.cos import CosDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.models import Pair


@dataclass(frozen=True)
class Method:
    """How to assemble one method: does it contrast with the amateur, does it need a head, who drafts."""

    summary: str
    contrast: bool
    drafter: Callable[[Pair, nn.Module | None], Drafter]
    needs_head: bool = False
    saving: str | None = None


def _nobody(pair: Pair, head: nn.Module | None) -> Drafter:
    return Drafter()


def _eagle3(pair: Pair, head: nn.Module | None) -> Drafter:
    return Eagle3Drafter(head, pair.expert.embedding, pair.expert.vocab)


METHODS = {
    "ar": Method("the expert alone, one token a pass", False, _nobody),
    "cd": Method("vanilla contrastive decoding, both models cached", True, _nobody),
    "expert_sd": Method("the expert alone, EAGLE3 drafts", False, _eagle3, needs_head=True),
    "scd": Method("the amateur drafts, delayed drafting", True, lambda pair, head: AmateurDrafter(pair.amateur)),
    "cos": Method("alternating proposals of amateur and expert", True, lambda pair, head: CosDrafter(pair.amateur)),
    "dcd_ngram": Method("n-gram drafts, contrast only in verification", True, lambda pair, head: NgramDrafter()),
    "dcd_eagle3": Method("expert-aligned EAGLE3 drafts, contrast only in verification", True, _eagle3, needs_head=True),
    "dcd_deferred": Method(
        "EAGLE3 drafts, the expert runs ahead, the amateur judges whole blocks", True, _eagle3, True, "deferred"
    ),
}


def assemble(name: str, pair: Pair, head: nn.Module | None = None) -> Assembled:
    """Put a method together from a loaded pair and, where it drafts with one, a head.

    Raises:
        UserError: unknown method, missing amateur or head.
    """
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    if method.contrast and pair.amateur is None:
        raise UserError(f"method {name} contrasts with an amateur; give --amateur")
    if method.needs_head and head is None:
        raise UserError(f"method {name} drafts with an EAGLE3 head; give --head")
    scorers = [Scorer(pair.expert)]
    if method.contrast:
        scorers.append(Scorer(pair.amateur))
    return Assembled(name, scorers, method.drafter(pair, head), method.saving)
