"""Known answers, pairing and coverage of the bootstrap over prompts."""

import numpy as np
import pytest

from dcd_core.errors import UserError
from diagnostics.resampling import (
    cluster_mean,
    group_sums,
    holm,
    paired_ratio,
    ratio_of_sums,
    resampled_sums,
)


def test_sums_are_kept_per_prompt():
    ids, sums = group_sums(["b", "a", "b"], [[1, 10], [2, 20], [3, 30]])
    assert ids.tolist() == ["a", "b"]
    assert sums.tolist() == [[2, 20], [4, 40]]


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios():
    found = ratio_of_sums(["a", "b"], [10, 90], [1, 90], resamples=500)
    assert found.estimate == pytest.approx(100 / 91)
    assert found.low == pytest.approx(1.0)  # both draws are prompt b
    assert found.high == pytest.approx(10.0)


def test_the_mean_interval_agrees_with_the_normal_one():
    generator = np.random.default_rng(1)
    values = generator.normal(3.0, 2.0, size=400)
    found = cluster_mean(np.arange(400), values)
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.02)


def test_rows_of_one_prompt_count_as_one_unit():
    """Ten copies of each row change nothing but would shrink a row-wise interval threefold."""
    generator = np.random.default_rng(2)
    values, prompts = generator.normal(size=60), np.arange(60)
    once = cluster_mean(prompts, values, seed=3)
    copied = cluster_mean(np.repeat(prompts, 10), np.repeat(values, 10), seed=3)
    assert copied.low == pytest.approx(once.low)
    assert copied.high == pytest.approx(once.high)


def test_coverage_is_near_its_level():
    """95% intervals of a cluster mean hold the truth in 95% of data sets (a little less with 40 prompts)."""
    generator, hits = np.random.default_rng(4), 0
    for trial in range(300):
        prompt_effect = generator.normal(size=40)
        values = np.repeat(prompt_effect, 5) + generator.normal(size=200)
        found = cluster_mean(np.repeat(np.arange(40), 5), values, resamples=1000, seed=trial)
        hits += found.low <= 0 <= found.high
    assert 0.90 <= hits / 300 <= 0.98


def test_pairing_removes_what_prompts_share():
    generator = np.random.default_rng(5)
    prompts, difficulty = np.arange(100), generator.lognormal(0, 1, size=100)
    ones = np.ones(100)
    arm, baseline = (prompts, ones, difficulty), (prompts, ones, 2 * difficulty)
    found = paired_ratio(arm, baseline)
    assert (found.estimate, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    alone = ratio_of_sums(prompts, ones, difficulty)
    assert alone.high / alone.low > 1.2


def test_the_same_seed_draws_the_same_prompts():
    sums = np.random.default_rng(6).normal(size=(30, 2))
    assert (resampled_sums(sums, 2500, seed=1) == resampled_sums(sums, 2500, seed=1)).all()
    assert (resampled_sums(sums, 2500, seed=1) != resampled_sums(sums, 2500, seed=2)).any()
    doubled = resampled_sums(np.concatenate([sums, 2 * sums], axis=1), 2500, seed=1)
    assert doubled[:, 2:] == pytest.approx(2 * doubled[:, :2])


def test_one_prompt_has_no_interval():
    found = ratio_of_sums(["a", "a"], [1, 2], [3, 3])
    assert (found.estimate, found.low, found.high, found.prompts) == (0.5, None, None, 1)


def test_holm_known_answer():
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_refusals():
    with pytest.raises(UserError, match="same prompts; 'b'"):
        paired_ratio((["a", "b"], [1, 1], [1, 1]), (["a", "c"], [1, 1], [1, 1]))
    with pytest.raises(UserError, match="denominator is zero"):
        ratio_of_sums(["a"], [1], [0])
    with pytest.raises(UserError, match="not finite"):
        cluster_mean(["a", "b"], [1, float("nan")])
    with pytest.raises(UserError, match="at least one prompt"):
        resampled_sums(np.zeros((0, 2)))
