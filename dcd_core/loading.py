"""A pair with the head that drafts for it: the head's config says which layers of the expert are tapped."""

from __future__ import annotations

from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head, load_head_config
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import Pair, load_config, load_pair


def load_models(expert: str, amateur: str, head: str, dtype: str, device: str) -> tuple[Pair, Eagle3Head | None]:
    """The pair, and the head if one is named.

    Raises:
        UserError: a model or head that cannot be loaded, or the head of another expert.
    """
    taps = load_head_config(head).feature_layers if head else None
    if taps:  # before gigabytes are read
        check_taps(taps, load_config(expert).num_hidden_layers, head, expert)
    pair = load_pair(expert, amateur or None, dtype, device, feature_layers=taps)
    if not head:
        return pair, None
    loaded = load_head(head, pair.expert)
    check_draft_vocabulary(loaded, pair.expert.vocab, head)
    return pair, loaded


def check_taps(taps: tuple[int, ...], layers: int, head: str, expert: str) -> None:
    """Refuse a head that reads layers which the expert does not have.

    Raises:
        UserError: naming the layers.
    """
    if max(taps) >= layers:
        raise UserError(
            f"{head} is the head of another expert than {expert}: it reads the inputs of layers {taps}, and this "
            f"expert has layers 0 to {layers - 1}"
        )


def check_draft_vocabulary(head: Eagle3Head, vocab: int, where: str) -> None:
    """Refuse a head that drafts ids which no tokenizer of the pair has.

    Raises:
        UserError: naming the largest.
    """
    largest = int(head.target_ids[-1])
    if largest >= vocab:
        raise UserError(
            f"{where} drafts id {largest}, but the pair shares only {vocab} real ids; the head's draft vocabulary "
            "reaches into the padding, so it was made for another pair"
        )
