"""Every per-position quantity equals a plain per-row computation, and obeys the identities it must."""

import math

import numpy as np
import pytest
import torch

from dcd_core.divergence import acceptance
from diagnostics.position_quantities import Proposal, on_vocabulary, position_quantities
from diagnostics.records import POSITIONS

VOCAB, ROWS = 24, 40
IDS = torch.tensor([0, 1, 2, 3, 5, 8, 9, 13, 17, 20, 21, 23])
OTHER = torch.tensor([0, 1, 3, 4, 8, 9, 11, 13, 20, 22])
NOT_MEASURED = {"pair", "dataset", "prompt_id", "position", "rollout_alpha", "alpha"}


def rows(seed: int, width: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, width, generator=generator, dtype=torch.float64) * spread


def softmax(row):
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def draft(seed: int, ids: torch.Tensor = IDS) -> Proposal:
    """Random rows of a drafter."""
    return Proposal(rows(seed, len(ids)), ids)


def kl(a, b):
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def tv(a, b):
    return 0.5 * sum(abs(x - y) for x, y in zip(a, b, strict=True))


def contrast(a, b, alpha):
    """[a, b], 0 where a or b is."""
    both = (a > 0) & (b > 0)
    found = np.zeros(len(a))
    found[both] = a[both] ** (1 + alpha) * b[both] ** (-alpha)
    return found / found.sum()


def naive(expert, amateur, draft, ids, alpha):
    """One row, with plain sums over the vocabulary."""
    p, q = softmax(expert), softmax(amateur)
    small = softmax(draft)
    e, o = np.zeros(len(p)), np.zeros(len(p))
    pi = p ** (1 + alpha) * q ** (-alpha)
    pi /= pi.sum()
    oracle = small ** (1 + alpha) * q[ids] ** (-alpha)
    oracle /= oracle.sum()
    e[ids], o[ids] = small, oracle
    best = int(pi.argmax())
    plausible = p >= 0.1 * p.max()
    ratio = np.log(p / q)
    kept = p[ids] / p[ids].sum()
    return {
        "signal": abs(math.log(p[best] / q[best])),
        "signal_applied": alpha * abs(math.log(p[best] / q[best])),
        "signal_max": max(abs(r) for r, inside in zip(ratio, plausible, strict=True) if inside),
        "signal_std": math.sqrt(sum(p * ratio**2) - sum(p * ratio) ** 2),
        "signal_kl": kl(p, pi),
        "headroom_tv": tv(p, pi),
        "headroom_greedy": pi.max() - pi[p.argmax()],
        "headroom_flip": p.argmax() != best,
        "error_reverse": kl(e, p),
        "error_forward": kl(kept, small),
        "lost_mass": 1 - p[ids].sum(),
        "error_tv": tv(e, p),
        "target_kl": kl(e, pi),
        "target_tv": tv(e, pi),
        "target_top1": e.argmax() == best,
        "alignment_gap": sum((e - q) * ratio),
        "tail_mass": pi[~plausible].sum() - p[~plausible].sum(),
        "oracle_kl": kl(o, pi),
        "oracle_tv": tv(o, pi),
        "oracle_top1": o.argmax() == best,
    }


def naive_others(expert, amateur, draft, amateur_draft, direct, stronger, alpha):
    """The quantities of one row's optional drafts; drafts are pairs of logits and ids."""
    p, q, r = softmax(expert), softmax(amateur), softmax(stronger)
    e, f, c = (np.zeros(len(p)) for _ in range(3))
    for row, (logits, ids) in zip((e, f, c), (draft, amateur_draft, direct), strict=True):
        row[ids] = softmax(logits)
    pi = contrast(p, q, alpha)
    both = (e > 0) & (f > 0)
    weight = pi[both] / pi[both].sum()
    s, u, v = (np.log(top[both] / under[both]) for top, under in ((p, q), (e, p), (f, q)))

    def covariance(a, b):
        return (weight * a * b).sum() - (weight * a).sum() * (weight * b).sum()

    found = {"amateur_error": kl(f[f > 0], q[f > 0]), "stronger_error": kl(r, p)}
    drafts = {
        "dual": contrast(e, f, alpha),
        "exact_expert": contrast(p, f, alpha),
        "direct": c,
        "stronger_plain": r,
        "stronger": contrast(r, q, alpha),
    }
    for name, row in drafts.items():
        found |= {f"{name}_kl": kl(row, pi), f"{name}_tv": tv(row, pi), f"{name}_top1": row.argmax() == pi.argmax()}
    found["dual_closer"] = kl(drafts["dual"], pi) < kl(e, pi)
    found |= {"var_signal": covariance(s, s), "var_error": covariance(u, u), "var_amateur_error": covariance(v, v)}
    found |= {"cov_signal_error": covariance(s, u), "cov_errors": covariance(u, v)}
    if alpha:
        found["rule_left"] = covariance(s, s) - 2 / alpha * covariance(s, u)
        found["rule_right"] = (1 + 2 / alpha) * covariance(u, u) + covariance(v, v)
        found["rule_right"] -= 2 * (1 + 1 / alpha) * covariance(u, v)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_every_quantity_equals_the_plain_sum(alpha):
    expert, amateur, stronger = rows(1, VOCAB), rows(2, VOCAB), rows(8, VOCAB)
    own, other, direct = draft(3), draft(4, OTHER), draft(9, IDS[:7])
    found = position_quantities(expert, amateur, own, alpha, other, direct, stronger)
    measured = {c.name for c in POSITIONS} - NOT_MEASURED
    assert set(found) == (measured if alpha else measured - {"rule_left", "rule_right"})
    for row in range(ROWS):
        whole = [t[row].numpy() for t in (expert, amateur)]
        drafts = [(some.logits[row].numpy(), some.ids.numpy()) for some in (own, other, direct)]
        wanted = naive(*whole, *drafts[0], alpha)
        wanted |= naive_others(*whole, *drafts, stronger[row].numpy(), alpha)
        assert set(wanted) == set(found)
        for name, value in wanted.items():
            assert found[name][row].item() == pytest.approx(float(value), abs=1e-9), name


def test_what_was_not_given_is_left_out():
    found = position_quantities(rows(1, VOCAB), rows(2, VOCAB), draft(3), 0.5)
    assert set(found) == {c.name for c in POSITIONS if not c.optional} - NOT_MEASURED


def test_alpha_zero_leaves_nothing_to_gain():
    found = position_quantities(rows(1, VOCAB), rows(2, VOCAB), draft(3), 0.0)
    for name in ("signal_kl", "headroom_tv", "headroom_greedy", "tail_mass"):
        assert found[name].abs().max() < 1e-12, name
    assert not found["headroom_flip"].any()
    torch.testing.assert_close(found["oracle_tv"], found["target_tv"])


def test_a_perfect_drafter_has_no_error_and_its_oracle_hits_the_target():
    everything = torch.arange(VOCAB)
    expert, amateur = rows(1, VOCAB), rows(2, VOCAB)
    found = position_quantities(expert, amateur, Proposal(expert, everything), 0.5)
    for name in ("error_reverse", "error_forward", "error_tv", "lost_mass", "oracle_kl", "oracle_tv"):
        assert found[name].abs().max() < 1e-12, name
    assert found["oracle_top1"].all()
    torch.testing.assert_close(found["target_tv"], found["headroom_tv"])
    gap = found["alignment_gap"]  # e = p: the gap is KL(p||q) + KL(q||p) >= 0 [DCD, Thm B.3]
    assert (gap >= 0).all()


def test_equal_models_give_no_signal():
    same = rows(1, VOCAB)
    found = position_quantities(same, same, draft(3), 1.0)
    for name in ("signal", "signal_max", "signal_std", "signal_kl", "headroom_tv"):
        assert found[name].abs().max() < 1e-6, name


def test_ids_that_both_models_exclude_stay_finite():
    expert, amateur = rows(1, VOCAB), rows(2, VOCAB)
    expert[:, 4] = amateur[:, 4] = -math.inf
    found = position_quantities(expert, amateur, draft(3), 0.5)
    assert all(torch.isfinite(values.double()).all() for values in found.values())


def test_acceptance_of_the_draft_is_one_minus_its_distance():
    expert, amateur, own = rows(1, VOCAB), rows(2, VOCAB), draft(3)
    found = position_quantities(expert, amateur, own, 0.3)
    log_pi = (1.3 * expert.log_softmax(-1) - 0.3 * amateur.log_softmax(-1)).log_softmax(-1)
    wide = on_vocabulary(own.logits.log_softmax(-1), IDS, VOCAB)
    torch.testing.assert_close(1 - found["target_tv"], acceptance(wide, log_pi))
