"""Was this head made for these models? Looked at before it drafts for them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Config
from dcd_core.heads.rope import expert_rope
from dcd_core.model_identity import model_identity
from dcd_core.quantisation import is_quantised

ROUNDING, QUANTISED = 2**-7, 0.1
"""How far a head's copy of the expert's embedding may be from it, relative to its size."""


def check_expert(config: Eagle3Config, expert, stated_rope: tuple[float | None, dict | None], where: str) -> None:
    """Refuse the head of another expert.

    Raises:
        UserError: naming every field that differs (hidden size, vocabulary, tapped layers, rotary positions). Fields
            that a published head leaves out are not held against it.
    """
    theta, scaling = expert_rope(expert.config)
    pairs = [
        ("target_hidden_size", config.target_hidden_size, expert.hidden_size),
        ("hidden_size", config.hidden_size, expert.hidden_size),
    ]
    if config.vocab_size != expert.vocab:
        pairs.append(("vocab_size", config.vocab_size, expert.config.vocab_size))
    if config.feature_layers is not None:
        pairs.append(("feature_layers", config.feature_layers, expert.feature_layers))
    if stated_rope[0] is not None:
        pairs.append(("rope_theta", stated_rope[0], theta))
    if stated_rope[1] is not None:
        pairs.append(("rope_scaling", stated_rope[1], scaling))
    different = [f"{name} {mine} (expert: {its})" for name, mine, its in pairs if mine != its]
    if different:
        raise UserError(f"{where} is the head of another expert than {expert.name}: {'; '.join(different)}")


def check_embedding(carried: Float[Tensor, "vocab hidden"] | None, expert, where: str) -> None:
    """Refuse a head that was trained with another token embedding than the expert's, which is used in its place.

    Args:
        carried: the embedding in the head's folder, if there is one.
    Raises:
        UserError: it differs by more than the rounding of 16-bit floats (or of the expert's quantisation).
    """
    if carried is None:
        return
    rows, allowed = min(len(carried), expert.vocab), QUANTISED if is_quantised(expert.model) else ROUNDING
    for ids in torch.arange(rows).split(4096):
        with torch.no_grad():
            own = expert.embedding(ids.to(expert.device)).float().cpu()
        its = carried[ids]
        if own.shape != its.shape or (its.float() - own).norm() > allowed * own.norm() + 1e-6:
            raise UserError(
                f"{where} holds an embed_tokens.weight that differs from the embedding of {expert.name}: it was trained"
                " with an embedding of its own, or for another expert, and only heads that share the expert's are"
                " supported"
            )


def check_amateur(config: Eagle3Config, expert, amateur, where: str) -> None:
    """Refuse a head that reads another amateur, or that says it was trained beside another one (of which it read the
    features, or which its target was made of); other heads fit any. An amateur in fp16 is known by its shape alone: its
    weights were rounded twice.

    Raises:
        UserError: no amateur where one is read; naming every field that differs; or another amateur of those shapes.
    """
    if config.kind == "dual_input":
        _check_amateur_shapes(config, expert, amateur, where)
    if amateur is None or not config.amateur_identity or amateur.dtype == torch.float16:
        return
    if config.amateur_identity != model_identity(amateur.model):
        raise UserError(
            f"{where} was trained beside another amateur than {amateur.name}, with other weights or settings; give that"
            " one (or, to draft with this one all the same, take amateur_identity out of the head's config.json)"
        )


def _check_amateur_shapes(config: Eagle3Config, expert, amateur, where: str) -> None:
    if amateur is None:
        raise UserError(f"{where} is a dual-input head, which reads an amateur beside the expert; give --amateur")
    pairs = [
        ("amateur_hidden_size", config.amateur_hidden_size, amateur.hidden_size),
        ("amateur_feature_layers", config.amateur_feature_layers, amateur.feature_layers),
        ("real ids", expert.vocab, amateur.vocab),
    ]
    different = [f"{name} {mine} (amateur: {its})" for name, mine, its in pairs if mine != its]
    if different:
        raise UserError(f"{where} reads another amateur than {amateur.name}: {'; '.join(different)}")


def refuse_shuffled(config: Eagle3Config, where: str) -> None:
    """Refuse a head that is not to be given the amateur's true features (zeroed ones have no weight in theirs).

    Raises:
        UserError: a control that was trained on those of other positions.
    """
    if config.amateur_input == "amateur_shuffled":
        raise UserError(
            f"{where} was trained on the amateur's features of other positions, as a control; only "
            "diagnostics/cross_alpha.py gives it these, as one of --controls, by its family's folder"
        )
