"""Known answers, pairing and edges of intervals over prompts; their coverage is in test_coverage.py."""

import numpy as np
import pytest
from scipy import stats

from dcd_core.errors import UserError
from diagnostics.intervals import (
    Spread,
    group_sums,
    holm,
    interval,
    intervals,
    paired_difference,
    paired_ratio,
    ratio_of_sums,
    spread,
)


def mean(prompts, values, **options):
    return ratio_of_sums(prompts, values, np.ones(len(values)), **options)


def test_sums_are_kept_per_prompt():
    ids, sums = group_sums(["b", "a", "b"], [[1, 10], [2, 20], [3, 30]])
    assert ids.tolist() == ["a", "b"]
    assert sums.tolist() == [[2, 20], [4, 40]]


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios():
    found = ratio_of_sums(["a", "b"], [10, 90], [1, 90])
    assert found.estimate == pytest.approx(100 / 91)


def test_the_interval_of_a_mean_is_student_s():
    """Of equally long prompts the jackknife's error is the usual one, with n - 1 degrees of freedom."""
    values = np.random.default_rng(1).normal(3.0, 2.0, size=7)
    found = mean(np.arange(7), values, scale="plain")
    assert (found.low, found.high) == pytest.approx(
        stats.t.interval(0.95, 6, loc=values.mean(), scale=values.std(ddof=1) / np.sqrt(7))
    )
    assert found.prompts == 7


def test_scales_agree_where_the_interval_is_narrow():
    generator = np.random.default_rng(2)
    values = generator.uniform(0.4, 0.6, size=5000)
    ends = [(one.low, one.high) for one in (mean(np.arange(5000), values, scale=s) for s in ("plain", "log", "logit"))]
    assert ends[0] == pytest.approx(ends[1], abs=1e-5) and ends[0] == pytest.approx(ends[2], abs=1e-5)


def test_scales_keep_to_what_is_possible():
    wild = [0.01, 0.02, 0.9]
    assert mean(list("abc"), wild, scale="plain").low < 0 < mean(list("abc"), wild).low
    found = mean(list("abc"), wild, scale="logit")
    assert 0 < found.low < found.high < 1 < mean(list("abc"), wild).high
    with pytest.raises(ValueError, match="plain, log, logit"):
        mean(list("abc"), wild, scale="cubic")


def test_the_error_of_a_ratio_is_the_jackknife_s():
    """By hand: the statistic without each prompt in turn."""
    sums = np.random.default_rng(3).uniform(1, 3, size=(5, 2, 2))
    left = [np.delete(sums, place, axis=0).sum(0) for place in range(5)]
    values = np.array([(a[0, 0] / a[0, 1]) / (a[1, 0] / a[1, 1]) for a in left])
    found = spread(sums, lambda ratios: ratios[..., 0] / ratios[..., 1])
    assert found.error == pytest.approx(np.sqrt(4 / 5 * ((values - values.mean()) ** 2).sum()))


def test_degrees_of_freedom_count_effective_prompts():
    equal = spread(np.ones((9, 1, 2)))
    assert equal.freedom == pytest.approx(8)
    sums = np.ones((9, 1, 2))
    sums[0] *= 1000
    assert spread(sums).freedom == 1.0, "one prompt has nearly all rounds: as few degrees as there can be"


def test_many_statistics_at_once_are_each_alone():
    sums = np.random.default_rng(4).uniform(1, 3, size=(3, 6, 1, 2))
    together = intervals(spread(sums), "log")
    assert together == [interval(one, scale="log") for one in sums]


def test_rows_of_one_prompt_count_as_one_unit():
    """Ten copies of each row change nothing but would shrink a row-wise interval threefold."""
    generator = np.random.default_rng(2)
    values, prompts = generator.normal(5, size=60), np.arange(60)
    once, copied = mean(prompts, values), mean(np.repeat(prompts, 10), np.repeat(values, 10))
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))


def test_prompts_without_a_part_in_it_change_nothing():
    sums = np.random.default_rng(5).uniform(1, 3, size=(6, 1, 2))
    padded = np.concatenate([sums, np.zeros((20, 1, 2))])
    one, other = interval(padded, scale="log"), interval(sums, scale="log")
    assert (one.low, one.high, one.prompts) == (pytest.approx(other.low), pytest.approx(other.high), 6)


def test_pairing_removes_what_prompts_share():
    generator = np.random.default_rng(5)
    prompts, difficulty = np.arange(100), generator.lognormal(0, 1, size=100)
    ones = np.ones(100)
    arm, baseline = (prompts, ones, difficulty), (prompts, ones, 2 * difficulty)
    found = paired_ratio(arm, baseline)
    assert (found.estimate, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    none = paired_difference(baseline, baseline)
    assert (none.estimate, none.low, none.high) == (0, 0, 0)
    alone = ratio_of_sums(prompts, ones, difficulty)
    assert alone.high / alone.low > 1.2


def test_one_prompt_has_no_interval():
    found = ratio_of_sums(["a", "a"], [1, 2], [3, 3])
    assert (found.estimate, found.low, found.high, found.prompts) == (0.5, None, None, 1)


def test_prompts_that_do_not_differ_leave_nothing_open():
    for value, scale in ((0.0, "log"), (0.0, "logit"), (1.0, "logit"), (2.5, "log"), (-1.0, "plain")):
        found = mean(list("abcd"), [value] * 4, scale=scale)
        assert (found.low, found.high) == (value, value)


def test_there_is_no_interval_where_leaving_out_a_prompt_leaves_nothing():
    sums = np.array([[[1.0, 2.0], [0.0, 0.0]], [[1.0, 3.0], [1.0, 1.0]]])  # the second ratio has one prompt
    found = interval(sums, lambda ratios: ratios[..., 0] - ratios[..., 1])
    assert found.estimate == pytest.approx(2 / 5 - 1) and found.low is None and found.high is None


@pytest.mark.parametrize("scale", ["plain", "log", "logit"])
def test_no_end_is_infinite(scale):
    """An end that overflows says nothing, and JSON has no infinity."""
    low, high = Spread(np.float64(0.5), np.float64(1e6), np.float64(1.0), np.int64(2)).ends(scale)
    assert np.isfinite([low, high]).all() or np.isnan([low, high]).all()


def test_holm_known_answer():
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_refusals():
    with pytest.raises(UserError, match="same prompts; 'b'"):
        paired_ratio((["a", "b"], [1, 1], [1, 1]), (["a", "c"], [1, 1], [1, 1]))
    with pytest.raises(UserError, match="denominator is zero"):
        ratio_of_sums(["a"], [1], [0])
    with pytest.raises(UserError, match="not finite"):
        mean(["a", "b"], [1, float("nan")])
    with pytest.raises(UserError, match="denominator is zero"):
        interval(np.zeros((0, 1, 2)))
