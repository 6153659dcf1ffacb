"""The steps of a round that hold no state: what a model reads, what the verifier judges by, what stays, the time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.cache import KVCache
from dcd_core.contrast import Target, scores, target_log_probs
from dcd_core.draft import Draft
from dcd_core.models import LanguageModel, Output
from dcd_core.sampling import largest
from dcd_core.verify import Verdict


@dataclass
class PassInputs:
    """What a model reads in one pass over root and draft."""

    tokens: Int[Tensor, "batch width"]
    tree_mask: Bool[Tensor, "batch width width"] | None
    depths: Int[Tensor, "batch width"] | None

    @classmethod
    def of(cls, root: Int[Tensor, " batch"], draft: Draft) -> PassInputs:
        tokens = torch.cat([root[:, None], draft.tokens], dim=1)
        if draft.linear:
            return cls(tokens, None, None)
        mask = draft.ancestor_mask()
        return cls(tokens, mask, mask.sum(-1) - 1)

    def run(self, model: LanguageModel, cache: KVCache, features: bool = False) -> Output:
        return model.forward(self.tokens, cache, tree_mask=self.tree_mask, depths=self.depths, features=features)


def target_rows(
    rows: list[Float[Tensor, "batch rows vocab"]],
    target: Target,
    seen: Bool[Tensor, "batch rows vocab"] | None = None,
) -> tuple[Float[Tensor, "batch rows vocab"] | Int[Tensor, "batch rows"], Bool[Tensor, " batch"]]:
    """What the verifier judges by (choices at T = 0, else log-probabilities), and which rows of the batch hold NaN or
    +inf. ``seen`` as for :func:`dcd_core.contrast.scores`."""
    if target.temperature == 0:
        peak, judged = largest(scores(rows, target, seen))
        return judged, (~peak.isfinite()).any(-1)
    judged = target_log_probs(rows, target, seen)
    # one bad score makes the normaliser NaN, and with it every entry of its row: one entry tells, without a pass
    return judged, judged[..., 0].isnan().any(-1)


def commit_draft(cache: KVCache, draft: Draft, verdict: Verdict, counts: list[int]) -> None:
    """Keep root and accepted drafts, ``counts`` tokens a row."""
    if draft.linear:
        cache.commit(counts)
    else:
        cache.commit_path(verdict.path, counts)


def along_path(
    values: Float[Tensor, "batch width size"], draft: Draft, verdict: Verdict
) -> Float[Tensor, "batch depth size"]:
    """What stands beside root and accepted drafts, in their order."""
    if draft.linear:
        return values
    return values.gather(1, verdict.path[..., None].expand(-1, -1, values.shape[-1]))


def joined_features(outputs: list[Output], scorers: tuple[int, ...]) -> Float[Tensor, "batch width size"] | None:
    """The features that a drafter asked for, of the scorers in its order, from their passes; None if it reads none."""
    return torch.cat([outputs[index].features for index in scorers], dim=-1) if scorers else None


class Clock:
    """Seconds of the phases of a round; with ``synchronise`` the device is waited for at every lap."""

    def __init__(self, device: torch.device, synchronise: bool):
        self.synchronise = synchronise and device.type == "cuda"
        self.laps = {"draft": 0.0, "expert": 0.0, "amateur": 0.0, "rest": 0.0}
        self.start = self.last = self._now()

    def _now(self) -> float:
        if self.synchronise:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.laps[phase] += now - self.last
        self.last = now

    def total(self) -> float:
        return self._now() - self.start


def plausible_ids(relevant: Bool[Tensor, "batch rows vocab"]) -> Int[Tensor, " ids"]:
    """The ids that some row allows, ascending. Their number comes to the host."""
    return relevant.flatten(0, 1).any(0).nonzero()[:, 0]


def rows_on_ids(
    expert: Float[Tensor, "batch rows vocab"],
    hidden: list[Float[Tensor, "batch rows hidden"]],
    models: list[LanguageModel],
    ids: Int[Tensor, " ids"],
    target: Target,
    seen: Bool[Tensor, "batch rows vocab"] | None = None,
) -> tuple[Tensor, Bool[Tensor, " batch"]]:
    """:func:`target_rows` from the other models' logits at a few ids only.

    Exact for every row whose plausible set lies within ``ids``: the others' ids are excluded by the cutoff, and the
    other models' normalisers cancel.

    Args:
        hidden: final states of ``models``, the scorers after the expert.
    """
    few = [expert[..., ids]]
    few += [model.output_layer(states, ids) for model, states in zip(models, hidden, strict=True)]
    judged, bad = target_rows(few, target, None if seen is None else seen[..., ids])
    if not judged.is_floating_point():
        return ids[judged], bad
    return torch.full_like(expert, -math.inf, dtype=judged.dtype).index_copy(-1, ids, judged), bad
