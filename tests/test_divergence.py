"""Divergences of rows of log-probabilities."""

import math

import pytest
import torch

from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import acceptance, kl, total_variation

A, B, C = (
    torch.randn(40, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).log_softmax(-1)
    for seed in (1, 2, 3)
)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_kl_by_hand():
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(logs(0.5, 0.5), logs(0.25, 0.75)).item() == pytest.approx(expected, abs=1e-15)
    torch.testing.assert_close(kl(A, B), (A.exp() * (A - B)).sum(-1))


def test_kl_is_zero_only_between_equals_and_never_below():
    assert torch.equal(kl(A, A), torch.zeros(40, dtype=torch.float64))
    assert (kl(A, B) > 0).all()
    single = A.float()
    assert (kl(single, (single + 1e-7).log_softmax(-1)) >= 0).all(), "rounding may not make it negative"


def test_kl_treats_zeros_by_definition():
    assert kl(logs(0.0, 1.0), logs(0.0, 1.0)).item() == 0
    assert kl(logs(0.0, 1.0), logs(0.5, 0.5)).item() == pytest.approx(math.log(2))
    assert kl(logs(0.5, 0.5), logs(0.0, 1.0)).item() == math.inf


def test_nan_is_passed_on_and_not_turned_into_a_number():
    broken = A.clone()
    broken[0, 0] = math.nan
    for measure in (kl, total_variation, acceptance):
        assert measure(broken, B)[0].isnan() and measure(B, broken)[0].isnan()
        assert measure(broken, B)[1:].isfinite().all()


def test_total_variation_by_hand_and_its_bounds():
    assert total_variation(logs(0.5, 0.5, 0.0), logs(0.2, 0.3, 0.5)).item() == pytest.approx(0.5)
    assert total_variation(logs(1.0, 0.0), logs(0.0, 1.0)).item() == 1
    assert torch.equal(total_variation(A, B), total_variation(B, A))
    assert (total_variation(A, C) <= total_variation(A, B) + total_variation(B, C) + 1e-15).all()
    assert (total_variation(A, B) <= (kl(A, B) / 2).sqrt()).all(), "Pinsker"


def test_acceptance_is_the_shared_mass():
    torch.testing.assert_close(acceptance(A, B), torch.minimum(A.exp(), B.exp()).sum(-1))
    torch.testing.assert_close(acceptance(A, A), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_headroom_bounds_what_aiming_at_the_target_can_gain(alpha):
    target = target_log_probs([A, B], Target(alpha=alpha))
    gain = (acceptance(C, target) - acceptance(C, A)).abs()
    assert (gain <= total_variation(A, target) + 1e-15).all()
