"""The theory that the diagnostics rest on, as identities and inequalities on random tables.

[DCD, Lemmas A.1 and B.1, Thm B.3], the bound of what aiming at the contrast can add, and the variance rule of the dual
drafter in the limit in which it is exact.
"""

import pytest
import torch

from dcd_core.contrast import Target, log_z, target_log_probs
from dcd_core.divergence import acceptance, kl, total_variation
from diagnostics.position_quantities import Proposal, position_quantities, variance_rule

VOCAB, ROWS = 19, 300
EVERYTHING = torch.arange(VOCAB)
ALPHAS = (0.1, 0.3, 0.5, 1.0)


def table(seed: int, spread: float = 2.0) -> torch.Tensor:
    """Random rows of log-probabilities in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * spread).log_softmax(-1)


def contrast(first: torch.Tensor, second: torch.Tensor, alpha: float) -> torch.Tensor:
    return target_log_probs([first, second], Target(alpha=alpha))


@pytest.fixture(scope="module")
def tables():
    """p, q, e, f."""
    return tuple(table(seed) for seed in range(4))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lemma_a1_the_reconstruction_is_the_target_tilted_by_both_errors(tables, alpha):
    """[e, f] = pi exp(D) / Z_D with D = (1 + alpha) log e/p - alpha log f/q."""
    log_p, log_q, log_e, log_f = tables
    tilt = (1 + alpha) * (log_e - log_p) - alpha * (log_f - log_q)
    tilted = (contrast(log_p, log_q, alpha) + tilt).log_softmax(-1)
    torch.testing.assert_close(contrast(log_e, log_f, alpha), tilted)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lemma_b1_three_divergences_from_the_target(tables, alpha):
    log_p, log_q, log_e, _ = tables
    log_pi = contrast(log_p, log_q, alpha)
    constant = log_z(log_p, log_q, alpha)
    torch.testing.assert_close(kl(log_p, log_pi), constant - alpha * kl(log_p, log_q))
    torch.testing.assert_close(kl(log_q, log_pi), constant + (1 + alpha) * kl(log_q, log_p))
    expected = constant + (1 + alpha) * kl(log_e, log_p) - alpha * kl(log_e, log_q)
    torch.testing.assert_close(kl(log_e, log_pi), expected)
    measured = position_quantities(log_p, log_q, Proposal(log_e, EVERYTHING), alpha)
    torch.testing.assert_close(measured["target_kl"], expected)
    torch.testing.assert_close(measured["signal_kl"], constant - alpha * kl(log_p, log_q))


def test_theorem_b3_the_alignment_gap_is_a_difference_of_slopes(tables):
    """gap = d/d alpha KL(q||pi) - d/d alpha KL(e||pi), at every alpha; with e = p it is never negative."""
    log_p, log_q, log_e, _ = tables
    step = 1e-5
    for alpha in ALPHAS:
        above, below = (contrast(log_p, log_q, alpha + sign * step) for sign in (1, -1))
        slopes = [(kl(row, above) - kl(row, below)) / (2 * step) for row in (log_q, log_e)]
        measured = position_quantities(log_p, log_q, Proposal(log_e, EVERYTHING), alpha)
        torch.testing.assert_close(measured["alignment_gap"], slopes[0] - slopes[1], atol=1e-5, rtol=1e-5)
    own = position_quantities(log_p, log_q, Proposal(log_p, EVERYTHING), 0.5)
    assert (own["alignment_gap"] >= 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_aiming_at_the_contrast_adds_at_most_the_headroom(tables, alpha):
    """|acceptance(e, pi) - acceptance(e, p)| <= TV(p, pi): so a draft c that misses pi by as much as e misses p gains
    at most TV(p, pi) over e."""
    log_p, log_q, log_e, log_c = tables
    log_pi = contrast(log_p, log_q, alpha)
    headroom = total_variation(log_p, log_pi)
    moved = (acceptance(log_e, log_pi) - acceptance(log_e, log_p)).abs()
    assert (moved <= headroom + 1e-12).all() and (moved > 0.5 * headroom).any(), "the bound holds and is not idle"
    excess = total_variation(log_c, log_pi) - total_variation(log_e, log_p)  # c's error over e's: 0 at equal error
    gain = acceptance(log_c, log_pi) - acceptance(log_e, log_pi)
    assert (gain <= headroom - excess + 1e-12).all()


def small(scale: float, seed: int) -> torch.Tensor:
    return scale * table(seed, 1.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_variance_rule_is_exact_in_the_limit(alpha):
    """With s, u, v of size eps, KL(e||pi) - KL([e, f]||pi) is alpha^2 / 2 (left - right) up to eps^3."""
    log_p = table(0)
    gaps = []
    for scale in (1e-2, 1e-3):
        log_q = (log_p - small(scale, 1)).log_softmax(-1)
        # errors small enough for either side to win; u also leans on the signal, so that the covariances count
        log_e = (log_p + 0.25 * alpha * (small(scale, 2) - small(scale, 1))).log_softmax(-1)
        log_f = (log_q + 0.7 * small(scale, 3) + 0.3 * small(scale, 2)).log_softmax(-1)
        log_pi = contrast(log_p, log_q, alpha)
        found = variance_rule(log_p, log_q, log_e, log_f, log_pi.exp(), alpha)
        won = kl(log_e, log_pi) - kl(contrast(log_e, log_f, alpha), log_pi)
        predicted = alpha**2 / 2 * (found["rule_left"] - found["rule_right"])
        gaps.append(((won - predicted).abs() / scale**2).max().item())
        clear = predicted.abs() > 0.05 * predicted.abs().mean()
        if scale == 1e-3:
            assert (torch.sign(won) == torch.sign(predicted))[clear].all()
            assert (won > 0).any() and (won < 0).any(), "both drafts win somewhere"
    assert gaps[1] < 0.2 * gaps[0], "what is left over vanishes a power of eps faster"


@pytest.mark.parametrize(("alpha", "factor"), [(0.1, 21.0), (0.5, 5.0), (1.0, 3.0)])
def test_uncorrelated_errors_need_a_signal_many_times_the_drafters_error(alpha, factor):
    """Without covariances: Var(s) > (1 + 2/alpha) Var(u) + Var(v)."""
    log_p = torch.full((1, 4), 0.25, dtype=torch.float64).log()
    orthogonal = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
    log_q, log_e = log_p - 0.3 * orthogonal[:1], log_p + 0.1 * orthogonal[1:2]
    log_f = log_q + 0.2 * orthogonal[2:]
    found = variance_rule(log_p, log_q, log_e, log_f, log_p.exp(), alpha)
    assert found["rule_left"].item() == pytest.approx(0.09)
    assert found["rule_right"].item() == pytest.approx(factor * 0.01 + 0.04)
