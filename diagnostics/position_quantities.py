"""Signal, drafter error and headroom at one position, as a pure function of the models' rows.

Symbols: p expert, q amateur, e drafter (on its draft vocabulary, 0 elsewhere), pi the untruncated contrastive target,
s = log p/q, x* = argmax pi, and [a, b] ~ a^(1+alpha) b^(-alpha) the contrast of two rows. Beside e stand the drafts
that know of the contrast: the oracle [e, q], which has no error of its own on the amateur's side; the dual draft [e, f]
with f a drafter aligned with the amateur; [p, f], its other half exact; c, drafted by a head trained on the contrast;
and [r, q] with a full model r in place of e. What each quantity means stands beside its column in `records.POSITIONS`;
the definitions are those of [DCD, sec. 4 and App. A, B], and TV(p, pi) bounds what aiming at pi can add to the
acceptance of a sampled draft at equal TV error.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.contrast import Target, contrast_signal, floored, plausible, target_log_probs
from dcd_core.divergence import kl, total_variation

PLAUSIBLE = 0.1  # the set {p >= .1 max p} for "worst plausible token" and for what counts as the tail


class Proposal(NamedTuple):
    """Rows of one drafter: logits over its draft vocabulary, and the vocabulary id of every column, ascending."""

    logits: Float[Tensor, "row draft_vocab"]
    ids: Int[Tensor, " draft_vocab"]


def position_quantities(
    expert: Float[Tensor, "row vocab"],
    amateur: Float[Tensor, "row vocab"],
    draft: Proposal,
    alpha: float,
    amateur_draft: Proposal | None = None,
    direct: Proposal | None = None,
    stronger: Float[Tensor, "row vocab"] | None = None,
) -> dict[str, Tensor]:
    """Every quantity at every row: a name of `records.POSITIONS` -> values [row], nats or probabilities.

    Args:
        expert, amateur: logits (or log-probabilities) over the shared vocabulary, fp32 or fp64.
        draft: of the drafter aligned with the expert.
        amateur_draft: of the one aligned with the amateur; the two are recombined on the ids that both draft.
        direct: of a drafter trained on the contrast.
        stronger: logits of a full model that proposes in the drafter's place, over the shared vocabulary.
    Without an optional row its quantities are left out, and at alpha 0 the two sides of the variance rule are.
    """
    log_p, log_q = expert.log_softmax(-1), amateur.log_softmax(-1)
    log_e = draft.logits.log_softmax(-1)
    target = Target(alpha=alpha)
    log_pi = target_log_probs([log_p, log_q], target)
    best = log_pi.argmax(-1)
    found = _signal(log_p, log_q, log_pi, target)
    found |= _headroom(log_p, log_pi, best)
    found |= _draft_error(log_p, log_q, log_e, draft.ids)
    found |= against_target(log_e, log_pi, draft.ids, best, "target")
    oracle = target_log_probs([log_e, log_q[..., draft.ids]], target)
    found |= against_target(oracle, log_pi, draft.ids, best, "oracle")
    if amateur_draft is not None:
        found["amateur_error"] = kl(amateur_draft.logits.log_softmax(-1), log_q[..., amateur_draft.ids])
        found |= _dual(log_p, log_q, log_pi, draft, amateur_draft, best, target)
        found["dual_closer"] = found["dual_kl"] < found["target_kl"]
    if direct is not None:
        found |= against_target(direct.logits.log_softmax(-1), log_pi, direct.ids, best, "direct")
    if stronger is not None:
        found |= _stronger(stronger.log_softmax(-1), log_p, log_q, log_pi, best, target)
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


def common_rows(first: Proposal, second: Proposal) -> tuple[Tensor, Tensor, Tensor]:
    """Both drafters' log-probabilities, each renormalised on the ids that both draft, and those ids."""
    if torch.equal(first.ids, second.ids):
        return first.logits.log_softmax(-1), second.logits.log_softmax(-1), first.ids
    in_first, in_second = torch.isin(first.ids, second.ids), torch.isin(second.ids, first.ids)
    rows = (first.logits[..., in_first].log_softmax(-1), second.logits[..., in_second].log_softmax(-1))
    return *rows, first.ids[in_first]


def against_target(
    log_draft: Float[Tensor, "row draft_vocab"],
    log_pi: Float[Tensor, "row vocab"],
    target_ids: Int[Tensor, " draft_vocab"],
    best: Int[Tensor, " row"],
    name: str,
) -> dict[str, Tensor]:
    """How near one draft is to the target: `name`_kl, `name`_tv and `name`_top1."""
    wide = on_vocabulary(log_draft, target_ids, log_pi.shape[-1])
    return {
        f"{name}_kl": kl(log_draft, log_pi[..., target_ids]),
        f"{name}_tv": total_variation(wide, log_pi),
        f"{name}_top1": target_ids[log_draft.argmax(-1)] == best,
    }


def variance_rule(
    log_p: Float[Tensor, "row vocab"],
    log_q: Float[Tensor, "row vocab"],
    log_e: Float[Tensor, "row vocab"],
    log_f: Float[Tensor, "row vocab"],
    weight: Float[Tensor, "row vocab"],
    alpha: float,
) -> dict[str, Tensor]:
    """Variances of s = log p/q, u = log e/p and v = log f/q under `weight`, in nats squared, and the rule's two sides.

    In the limit of small errors and a small contrast KL(a||b) is half the variance of log a/b. With [e, f] = pi exp(D),
    D = (1 + alpha) u - alpha v up to a constant [DCD, Lemma A.1], and log e/pi = u - alpha s, the reconstruction is
    nearer to pi than e is exactly where

        Var(s) - 2/alpha Cov(s, u) > (1 + 2/alpha) Var(u) + Var(v) - 2 (1 + 1/alpha) Cov(u, v).

    All rows are over the same ids; `weight` holds probabilities, and constants in the rows do not matter.
    """
    drop = weight == 0
    signal, error, other = (
        row.masked_fill(drop, 0.0) for row in (log_ratio(log_p, log_q), log_e - log_p, log_f - floored(log_q))
    )
    signal, error, other = (row - (weight * row).sum(-1, keepdim=True) for row in (signal, error, other))
    found = {
        "var_signal": (weight * signal.square()).sum(-1),
        "var_error": (weight * error.square()).sum(-1),
        "var_amateur_error": (weight * other.square()).sum(-1),
        "cov_signal_error": (weight * signal * error).sum(-1),
        "cov_errors": (weight * error * other).sum(-1),
    }
    if alpha > 0:
        found["rule_left"] = found["var_signal"] - 2 / alpha * found["cov_signal_error"]
        found["rule_right"] = (
            (1 + 2 / alpha) * found["var_error"]
            + found["var_amateur_error"]
            - 2 * (1 + 1 / alpha) * found["cov_errors"]
        )
    return found


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


def _dual(
    log_p: Tensor,
    log_q: Tensor,
    log_pi: Tensor,
    draft: Proposal,
    amateur_draft: Proposal,
    best: Tensor,
    target: Target,
) -> dict[str, Tensor]:
    """The reconstructions from a drafter aligned with the amateur, and the variances that decide which draft wins."""
    log_e, log_f, ids = common_rows(draft, amateur_draft)
    found = against_target(target_log_probs([log_e, log_f], target), log_pi, ids, best, "dual")
    own = amateur_draft.ids
    exact = target_log_probs([log_p[..., own], amateur_draft.logits.log_softmax(-1)], target)
    found |= against_target(exact, log_pi, own, best, "exact_expert")
    weight = log_pi[..., ids].softmax(-1)
    return found | variance_rule(log_p[..., ids], log_q[..., ids], log_e, log_f, weight, target.alpha)


def _stronger(
    log_r: Tensor, log_p: Tensor, log_q: Tensor, log_pi: Tensor, best: Tensor, target: Target
) -> dict[str, Tensor]:
    """A full model in the drafter's place, alone and corrected by the true amateur [DCD, sec. 4.4]."""
    everything = torch.arange(log_p.shape[-1], device=log_p.device)
    found = against_target(log_r, log_pi, everything, best, "stronger_plain")
    found |= against_target(target_log_probs([log_r, log_q], target), log_pi, everything, best, "stronger")
    return found | {"stronger_error": kl(log_r, log_p)}
