"""Signal, drafter error and headroom at one position, as a pure function of the three models' rows.

Symbols: p expert, q amateur, e drafter (on its draft vocabulary, 0 elsewhere), pi the untruncated contrastive target,
s = log p/q, x* = argmax pi, o(x) ~ e(x)^(1+alpha) q(x)^(-alpha) the oracle draft: aligned with the contrast without an
error of its own on the amateur's side. What each quantity means stands beside its column in `records.POSITIONS`; the
definitions are those of [DCD, sec. 4 and App. B], and TV(p, pi) bounds what aiming at pi can add to the acceptance of
a sampled draft at equal TV error.
"""

import math

from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.contrast import Target, contrast_signal, floored, plausible, target_log_probs
from dcd_core.divergence import kl, total_variation

PLAUSIBLE = 0.1  # the set {p >= .1 max p} for "worst plausible token" and for what counts as the tail


def position_quantities(
    expert: Float[Tensor, "row vocab"],
    amateur: Float[Tensor, "row vocab"],
    draft: Float[Tensor, "row draft_vocab"],
    target_ids: Int[Tensor, " draft_vocab"],
    alpha: float,
    amateur_draft: Float[Tensor, "row draft_vocab"] | None = None,
) -> dict[str, Tensor]:
    """Every quantity at every row: a name of `records.POSITIONS` -> values [row], nats or probabilities.

    Args:
        expert, amateur: logits (or log-probabilities) over the shared vocabulary, fp32 or fp64.
        draft: logits of the drafter over its draft vocabulary; `target_ids` are the vocabulary ids of its columns.
        amateur_draft: the same of a drafter aligned with the amateur, if there is one.
    """
    log_p, log_q = expert.log_softmax(-1), amateur.log_softmax(-1)
    log_e = draft.log_softmax(-1)
    target = Target(alpha=alpha)
    log_pi = target_log_probs([log_p, log_q], target)
    best = log_pi.argmax(-1)
    found = _signal(log_p, log_q, log_pi, target)
    found |= _headroom(log_p, log_pi, best)
    found |= _draft_error(log_p, log_q, log_e, target_ids)
    found |= _against_target(log_e, log_pi, target_ids, best, "target")
    oracle = target_log_probs([log_e, log_q[..., target_ids]], target)
    found |= _against_target(oracle, log_pi, target_ids, best, "oracle")
    if amateur_draft is not None:
        found["amateur_error"] = kl(amateur_draft.log_softmax(-1), log_q[..., target_ids])
    return found


def on_vocabulary(
    log_rows: Float[Tensor, "row draft_vocab"], target_ids: Int[Tensor, " draft_vocab"], vocab: int
) -> Float[Tensor, "row vocab"]:
    """Rows over the draft vocabulary as rows over the whole one: log 0 = -inf outside."""
    wide = log_rows.new_full((*log_rows.shape[:-1], vocab), -math.inf)
    wide[..., target_ids] = log_rows
    return wide


def log_ratio(log_p: Float[Tensor, "row vocab"], log_q: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
    """s = log p/q in nats with the target's floor on q; 0 where p excludes an id, which then weighs nothing."""
    return (log_p - floored(log_q)).masked_fill(log_p == -math.inf, 0.0)


def _signal(log_p: Tensor, log_q: Tensor, log_pi: Tensor, target: Target) -> dict[str, Tensor]:
    ratio = log_ratio(log_p, log_q)
    weight = log_p.exp()
    mean = (weight * ratio).sum(-1, keepdim=True)
    likely = plausible(log_p, PLAUSIBLE)
    signal = contrast_signal(log_p, log_q, target)
    outside = (log_pi.exp() - weight).masked_fill(likely, 0.0).sum(-1)
    return {
        "signal": signal,
        "signal_applied": target.alpha * signal,
        "signal_max": ratio.abs().masked_fill(~likely, 0.0).amax(-1),
        "signal_std": (weight * (ratio - mean).square()).sum(-1).sqrt(),
        "signal_kl": kl(log_p, log_pi),
        "tail_mass": outside,
    }


def _headroom(log_p: Tensor, log_pi: Tensor, best: Tensor) -> dict[str, Tensor]:
    expert_best = log_p.argmax(-1)
    at_best, at_expert_best = (log_pi.gather(-1, ids[..., None]).squeeze(-1).exp() for ids in (best, expert_best))
    return {
        "headroom_tv": total_variation(log_p, log_pi),
        "headroom_greedy": at_best - at_expert_best,
        "headroom_flip": expert_best != best,
    }


def _draft_error(log_p: Tensor, log_q: Tensor, log_e: Tensor, target_ids: Tensor) -> dict[str, Tensor]:
    """How far the drafter is from the expert, and the alignment gap, for which it must be on the whole vocabulary."""
    kept = log_p[..., target_ids]
    wide = on_vocabulary(log_e, target_ids, log_p.shape[-1])
    gap = ((wide.exp() - log_q.exp()) * log_ratio(log_p, log_q)).sum(-1)
    return {
        "error_reverse": kl(log_e, kept),
        "error_forward": kl(kept.log_softmax(-1), log_e),
        "lost_mass": (1 - kept.exp().sum(-1)).clamp_min(0.0),
        "error_tv": total_variation(wide, log_p),
        "alignment_gap": gap,
    }


def _against_target(
    log_draft: Tensor, log_pi: Tensor, target_ids: Tensor, best: Tensor, name: str
) -> dict[str, Tensor]:
    wide = on_vocabulary(log_draft, target_ids, log_pi.shape[-1])
    return {
        f"{name}_kl": kl(log_draft, log_pi[..., target_ids]),
        f"{name}_tv": total_variation(wide, log_pi),
        f"{name}_top1": target_ids[log_draft.argmax(-1)] == best,
    }
