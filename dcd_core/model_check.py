"""Does decoding on the project's cache give the model's own logits? Tested when a model is loaded.

The decoder calls a model's parts: base model, output layer, masks and positions of its own. A family that does more in
its ``forward`` than these parts know would decode another distribution without any error. So a loaded model runs a few
tokens both ways, and is refused where they differ.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.errors import UserError

LONG, SHORT, READ, WRONG = 12, 8, 4, 12
"""Tokens of the two sequences, how many of each the first pass reads, and wrong drafts of the tree."""
WINDOW = 3
"""The window of sliding layers during the check: a real one is longer than the sequences."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Of the relative difference between two rows of logits, where both are right."""
ROUNDED = 0.1
"""The same for narrower and quantised numbers: rounding alone gives 2 to 9%, and more in one text of thirty."""
AGAIN = 4
"""Further pairs of texts that are run where rounded numbers differ by more; then the median counts."""
SAME_STATES = 0.01
"""The same where both rows come from the very same states."""
COMPARED = (
    "the output layer",
    "the output layer at a few ids",
    "the first pass",
    "a row beside a longer one",
    "a tree after rejected drafts",
    "a continuation after a tree",
    "a continuation beside a longer row",
)
SUSPECTS = (
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "rope_parameters",
    "partial_rotary_factor",
    "no_rope_layers",
    "logits_scaling",
    "logit_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "is_decoder",
    "is_causal",
    "alibi",
    "attn_config",
    "num_kv_shared_layers",
    "num_experts",
    "quantization_config",
)
"""Configuration fields that change what a pass computes; those that a refused model sets are listed."""


@torch.no_grad()
def check_model(model) -> None:
    """Compare passes on the cache with the model's own ``forward``.

    Args:
        model: a :class:`~dcd_core.models.LanguageModel`, on its device.
    Raises:
        UserError: what differs first, by how much, and which configuration fields may be why.
    """
    window, config = model.masks.window, model.config
    rounded = model.dtype not in TOLERANCE or _suspects(model, ("quantization_config",))
    usual = ROUNDED if rounded else TOLERANCE[model.dtype]
    limits = {what: SAME_STATES if rounded and "output layer" in what else usual for what in COMPARED}
    try:
        if window:
            config.sliding_window = min(window, WINDOW)
        found = [_compared(model, 0)]
        if rounded and _beyond(found[0], limits):
            found += [_compared(model, pair) for pair in range(1, AGAIN + 1)]
    except UserError:
        raise
    except Exception as error:  # whatever a family that was never tried raises inside its own forward
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"unsupported: {_what(model)} cannot run on this project's cache ({type(error).__name__}: {reason})"
        ) from error
    finally:
        if window:
            config.sliding_window = window
    differences = {what: float(np.median([pair[what] for pair in found])) for what in COMPARED}
    if what := _beyond(differences, limits):
        fields = _suspects(model, SUSPECTS)
        raise UserError(
            f"unsupported: {_what(model)} computes other logits here than by its own forward: {what} differs by "
            f"{differences[what]:.2g} of a row's size (at most {limits[what]:g}). Fields of its config.json that may "
            f"be why: {', '.join(fields) if fields else 'none of the usual ones'}"
        )


def _beyond(differences: dict[str, float], limits: dict[str, float]) -> str:
    """What differs by more than its limit, first of all; NaN does too."""
    return next((what for what in COMPARED if not differences[what] <= limits[what]), "")


def _what(model) -> str:
    return f"{model.name} ({model.model.config.model_type})"


def _suspects(model, names: tuple[str, ...]) -> list[str]:
    fields = {**model.model.config.to_dict(), **model.config.to_dict()}
    return [f"{name} {_short(fields[name])}" for name in names if fields.get(name) not in (None, False, [], {})]


def _short(value) -> str:
    distinct = list(dict.fromkeys(value)) if isinstance(value, list) and all(map(_plain, value)) else value
    text = str(distinct)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value) -> bool:
    return isinstance(value, str | int | float | bool)


def _compared(model, pair: int) -> dict[str, float]:
    """The median relative difference over rows of all that is :data:`COMPARED`, on this pair of texts."""
    texts = [_some_ids(model, LONG, 2 * pair), _some_ids(model, SHORT, 2 * pair + 1)]
    own = [model.model(input_ids=text[None], use_cache=False).logits[0, :, : model.vocab].float() for text in texts]
    if not all(bool(logits.isfinite().all()) for logits in own):
        raise UserError(
            f"{_what(model)} gives NaN or infinite logits by its own forward: check its weights and the dtype"
        )
    full = model.forward_full(texts[0][None])
    cache = model.new_cache(2, LONG + WRONG + 4)

    def read(start: list[int], width: int, **tree) -> Float[Tensor, "batch width vocab"]:
        ids = [text[at : at + width] for text, at in zip(texts, start, strict=True)]
        padded = [torch.nn.functional.pad(row, (0, width - len(row))) for row in ids]
        return model.forward(torch.stack(padded), cache, **tree).logits

    # rows of different lengths beside each other; what the pass read of the padding is forgotten
    first = read([0, 0], READ)
    cache.commit([READ, READ - 1])
    # a chain of wrong drafts, of which only the root is kept
    wrong = torch.stack([text[[at, at + 2, at + 2]] for text, at in zip(texts, [READ, READ - 1], strict=True)])
    model.forward(wrong, cache)
    cache.commit([1, 1])
    # a tree: the root, wrong children, and the right child with its own child behind them, so that a node's place in
    # the pass is far from its position
    start = [READ + 1, READ]
    tree, depths = _tree(model.device)
    order = [[at, *[at + 3] * WRONG, at + 1, at + 2] for at in start]
    nodes = torch.stack([text[places] for text, places in zip(texts, order, strict=True)])
    branched = model.forward(nodes, cache, tree_mask=tree, depths=depths).logits
    right = [0, WRONG + 1, WRONG + 2]
    cache.commit_path(torch.tensor([right] * 2, device=model.device), [3, 1])
    # after the path of one row and the root of the other
    start = [READ + 4, READ + 1]
    last = read(start, SHORT - READ - 1)
    some = torch.arange(0, model.vocab, max(1, model.vocab // 50), device=model.device)
    few = model.output_layer(full.hidden[0], some)
    differences = [
        _difference(full.logits[0], own[0]),
        _difference(few, own[0][:, some]),
        _difference(first[0], own[0][:READ]),
        _difference(first[1, : READ - 1], own[1][: READ - 1]),
        _difference(branched[0, right], own[0][READ + 1 : READ + 4]),
        _difference(last[0], own[0][start[0] : start[0] + last.shape[1]]),
        _difference(last[1], own[1][start[1] : start[1] + last.shape[1]]),
    ]
    return dict(zip(COMPARED, differences, strict=True))


def _some_ids(model, count: int, seed: int) -> Int[Tensor, " position"]:
    """Ids from all over the vocabulary, the same in every run."""
    return ((torch.arange(count) * 7919 + 101 * seed + 17) * 31 % model.vocab).to(model.device)


def _tree(device) -> tuple[Tensor, Tensor]:
    """Mask and depths of [root, wrong children, right child, its child] in two rows."""
    width = WRONG + 3
    sees = torch.eye(width, dtype=torch.bool, device=device)
    sees[:, 0] = sees[-1, -2] = True
    depths = torch.tensor([0, *[1] * (WRONG + 1), 2], device=device)
    return sees.expand(2, width, width), depths.expand(2, width)


def _difference(ours: Float[Tensor, "row vocab"], own: Float[Tensor, "row vocab"]) -> float:
    """Median over rows of the distance between two rows of logits, relative to the size of the model's own; a constant
    that is added to a row changes no distribution, but it does change scores, so it counts."""
    distance = torch.linalg.vector_norm(ours.float() - own, dim=-1)
    size = torch.linalg.vector_norm(own - own.mean(-1, keepdim=True), dim=-1)
    return (distance / size.clamp_min(1e-30)).median().item()
