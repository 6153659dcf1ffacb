"""The cost model gives the theoretical speed-ups that the paper prints."""

import math

import pytest

from dcd_core import cost
from dcd_core.errors import UserError

GAMMA = 5
# [DCD, Tab. 5]: MMLU, T = 0, alpha = .1; t_p, t_q of vanilla CD, then L, t_e, t_p, t_q (ms), theoretical speed-up
TABLE_5 = {
    "Llama-3": (
        (6.95, 3.83),
        {
            "scd": (2.45, None, 6.84, 3.47, 1.48),
            "cos": (2.45, None, 7.08, 3.59, 1.48),
            "dcd_ngram": (0.48, 0.0, 7.04, 4.06, 1.43),
            "dcd_eagle3": (1.44, 0.63, 7.98, 4.38, 1.70),
        },
    ),
    "Qwen3": (
        (8.47, 6.52),
        {
            "scd": (2.49, None, 9.06, 6.53, 1.20),
            "cos": (2.49, None, 9.15, 6.63, 1.23),
            "dcd_ngram": (0.41, 0.0, 9.07, 7.23, 1.30),
            "dcd_eagle3": (1.48, 0.61, 10.15, 7.93, 1.76),
        },
    ),
    "Llama-EFT": (
        (7.19, 7.25),
        {
            "scd": (2.64, None, 6.77, 6.47, 1.28),
            "cos": (2.64, None, 7.67, 7.38, 1.17),
            "dcd_ngram": (0.49, 0.0, 6.98, 7.12, 1.52),
            "dcd_eagle3": (1.46, 0.60, 7.42, 7.50, 1.98),
        },
    ),
}


def speed(method: str, length: float, t_e: float | None, t_p: float, t_q: float) -> float:
    if method == "scd":
        return cost.scd(length, GAMMA, t_p, t_q)
    if method == "cos":
        return cost.cos(length, GAMMA, t_p, t_q)
    return cost.dcd(length, GAMMA, t_e, t_p, t_q)


@pytest.mark.parametrize("method", ["scd", "cos", "dcd_ngram", "dcd_eagle3"])
@pytest.mark.parametrize("pair", TABLE_5)
def test_the_theoretical_column_of_table_5(pair, method):
    (t_p, t_q), rows = TABLE_5[pair]
    *inputs, theoretical = rows[method]
    # half a unit of the printed digit on top of the .02
    assert abs(speed(method, *inputs) / cost.vanilla(t_p, t_q) - theoretical) <= 0.02


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
@pytest.mark.parametrize("rho", [0.0, 0.1, 0.5, 0.73, 0.99, 1.0])
def test_the_acceptance_rate_inverts_the_accepted_length(gamma, rho):
    length = sum(rho**i for i in range(1, gamma + 1))
    assert cost.acceptance_rate(length, gamma) == pytest.approx(rho, abs=1e-9)


@pytest.mark.parametrize("length", [-0.1, 5.1, math.nan])
def test_an_accepted_length_outside_its_range_is_refused(length):
    with pytest.raises(UserError, match="lies outside .0, gamma = 5."):
        cost.acceptance_rate(length, 5)


def test_the_split_multiplies_to_the_speed_ratio():
    """[DCD, Tab. 10]: (L_m + 1)/(L_b + 1) times T_b/T_m."""
    base, method = (2.45, 24.3), (1.44, 15.5)
    length_factor, time_factor = cost.split(base, method)
    assert length_factor == pytest.approx(2.44 / 3.45) and time_factor == pytest.approx(24.3 / 15.5)
    assert length_factor * time_factor == pytest.approx((2.44 / 15.5) / (3.45 / 24.3))
    assert cost.split(base, base) == (1, 1)


def test_limits_of_the_model():
    t_p, t_q = 7.0, 4.0
    assert cost.dcd(0.0, 5, 0.0, t_p, t_q) == pytest.approx(cost.vanilla(t_p, t_q)), "nothing drafted, nothing gained"
    assert cost.dcd(2.0, 5, 0.6, t_p, 0.0) == pytest.approx(3 / (5 * 0.6 + t_p)), "expert-only speculation"
    assert cost.scd(0.0, 5, t_p, t_q) == pytest.approx(1 / (5 * t_q + t_p)), "no delayed pass when nothing passes"
    assert cost.scd(5.0, 5, t_p, t_q) == pytest.approx(6 / (6 * t_q + t_p)), "always one when everything does"
    for length in (0.5, 2.0, 4.5, 5.0):
        bound = (t_p + t_q) / t_q
        assert cost.scd(length, 5, t_p, t_q) / cost.vanilla(t_p, t_q) < bound
        assert cost.cos(length, 5, t_p, t_q) > cost.scd(length, 5, t_p, t_q), "CoS saves part of the delayed pass"
