"""Every per-position quantity equals a plain per-row computation, and obeys the identities it must."""

import math

import numpy as np
import pytest
import torch

from dcd_core.divergence import acceptance
from diagnostics.position_quantities import on_vocabulary, position_quantities
from diagnostics.records import POSITIONS

VOCAB, ROWS = 24, 40
IDS = torch.tensor([0, 1, 2, 3, 5, 8, 9, 13, 17, 20, 21, 23])


def rows(seed: int, width: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, width, generator=generator, dtype=torch.float64) * spread


def softmax(row):
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def naive(expert, amateur, draft, ids, alpha, amateur_draft):
    """One row, with plain sums over the vocabulary."""
    p, q = softmax(expert), softmax(amateur)
    small, other = softmax(draft), softmax(amateur_draft)
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

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    def tv(a, b):
        return 0.5 * sum(abs(x - y) for x, y in zip(a, b, strict=True))

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
        "amateur_error": kl(other, q[ids]),
        "alignment_gap": sum((e - q) * ratio),
        "tail_mass": pi[~plausible].sum() - p[~plausible].sum(),
        "oracle_kl": kl(o, pi),
        "oracle_tv": tv(o, pi),
        "oracle_top1": o.argmax() == best,
    }


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_every_quantity_equals_the_plain_sum(alpha):
    expert, amateur = rows(1, VOCAB), rows(2, VOCAB)
    draft, other = rows(3, len(IDS)), rows(4, len(IDS))
    found = position_quantities(expert, amateur, draft, IDS, alpha, other)
    measured = {c.name for c in POSITIONS} - {"pair", "dataset", "prompt_id", "position", "rollout_alpha", "alpha"}
    assert set(found) == measured
    for row in range(ROWS):
        wanted = naive(*(t[row].numpy() for t in (expert, amateur, draft)), IDS.numpy(), alpha, other[row].numpy())
        for name, value in wanted.items():
            assert found[name][row].item() == pytest.approx(float(value), abs=1e-10), name


def test_identities_of_lemma_b1_and_the_headroom_bound():
    """[DCD, Lemma B.1]: KL(e||pi) = log Z + (1+a) KL(e||p) - a KL(e||q); and acceptance moves by at most TV(p, pi)."""
    expert, amateur = rows(5, VOCAB), rows(6, VOCAB)
    draft, alpha = rows(7, len(IDS)), 0.5
    found = position_quantities(expert, amateur, draft, IDS, alpha)
    log_p, log_q, log_e = (t.log_softmax(-1) for t in (expert, amateur, draft))
    log_z = ((1 + alpha) * log_p - alpha * log_q).logsumexp(-1)
    divergence_q = (log_e.exp() * (log_e - log_q[:, IDS])).sum(-1)
    expected = log_z + (1 + alpha) * found["error_reverse"] - alpha * divergence_q
    torch.testing.assert_close(found["target_kl"], expected)
    moved = (found["target_tv"] - found["error_tv"]).abs()
    assert (moved <= found["headroom_tv"] + 1e-12).all()


def test_alpha_zero_leaves_nothing_to_gain():
    found = position_quantities(rows(1, VOCAB), rows(2, VOCAB), rows(3, len(IDS)), IDS, 0.0)
    for name in ("signal_kl", "headroom_tv", "headroom_greedy", "tail_mass"):
        assert found[name].abs().max() < 1e-12, name
    assert not found["headroom_flip"].any()
    torch.testing.assert_close(found["oracle_tv"], found["target_tv"])


def test_a_perfect_drafter_has_no_error_and_its_oracle_hits_the_target():
    everything = torch.arange(VOCAB)
    expert, amateur = rows(1, VOCAB), rows(2, VOCAB)
    found = position_quantities(expert, amateur, expert, everything, 0.5)
    for name in ("error_reverse", "error_forward", "error_tv", "lost_mass", "oracle_kl", "oracle_tv"):
        assert found[name].abs().max() < 1e-12, name
    assert found["oracle_top1"].all()
    torch.testing.assert_close(found["target_tv"], found["headroom_tv"])
    gap = found["alignment_gap"]  # e = p: the gap is KL(p||q) + KL(q||p) >= 0 [DCD, Thm B.3]
    assert (gap >= 0).all()


def test_equal_models_give_no_signal():
    same = rows(1, VOCAB)
    found = position_quantities(same, same, rows(3, len(IDS)), IDS, 1.0)
    for name in ("signal", "signal_max", "signal_std", "signal_kl", "headroom_tv"):
        assert found[name].abs().max() < 1e-6, name


def test_ids_that_both_models_exclude_stay_finite():
    expert, amateur = rows(1, VOCAB), rows(2, VOCAB)
    expert[:, 4] = amateur[:, 4] = -math.inf
    found = position_quantities(expert, amateur, rows(3, len(IDS)), IDS, 0.5)
    assert all(torch.isfinite(values.double()).all() for values in found.values())


def test_acceptance_of_the_draft_is_one_minus_its_distance():
    expert, amateur, draft = rows(1, VOCAB), rows(2, VOCAB), rows(3, len(IDS))
    found = position_quantities(expert, amateur, draft, IDS, 0.3)
    log_pi = (1.3 * expert.log_softmax(-1) - 0.3 * amateur.log_softmax(-1)).log_softmax(-1)
    wide = on_vocabulary(draft.log_softmax(-1), IDS, VOCAB)
    torch.testing.assert_close(1 - found["target_tv"], acceptance(wide, log_pi))
