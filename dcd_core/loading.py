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
    shape = load_head_config(head) if head else None
    taps, amateur_taps = (shape.feature_layers, shape.amateur_feature_layers) if shape else (None, None)
    if taps:  # before gigabytes are read
        check_taps(taps, load_config(expert).num_hidden_layers, head, expert)
    if amateur_taps and amateur:
        check_taps(amateur_taps, load_config(amateur).num_hidden_layers, head, amateur, "amateur")
    pair = load_pair(expert, amateur or None, dtype, device, taps, amateur_taps)
    return pair, head_for(pair, head)


def head_for(pair: Pair, name: str) -> Eagle3Head | None:
    """A head for a loaded pair; None where none is named.

    Raises:
        UserError: it cannot be loaded, or is the head of another expert.
    """
    if not name:
        return None
    loaded = load_head(name, pair.expert, pair.amateur)
    check_draft_vocabulary(loaded, pair.expert.vocab, name)
    return loaded


def check_taps(taps: tuple[int, ...], layers: int, head: str, model: str, role: str = "expert") -> None:
    """Refuse a head that reads layers which the expert (or the amateur) does not have.

    Raises:
        UserError: naming the layers.
    """
    if max(taps) >= layers:
        raise UserError(
            f"{head} is the head of another {role} than {model}: it reads the inputs of layers {taps}, and this "
            f"{role} has layers 0 to {layers - 1}"
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
