"""The G test has its size under the null, its power is what it says, and cells are pooled as they should be."""

import numpy as np
import pytest
from scipy import stats

from diagnostics.certificate.g_test import FAILS_BELOW, g_test, noncentrality, pooled, samples_for, smallest_seen


def drawn(law: np.ndarray, samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(samples, law.ravel()).reshape(law.shape)


def test_a_sample_of_the_law_fails_as_often_as_p_says():
    """p is uniform under the null: of 2000 samples about 1% lie below .01, also where cells have to be pooled."""
    law = np.random.default_rng(3).dirichlet(np.full(64, 0.4)).reshape(4, 4, 4)
    found = [g_test(drawn(law, 20_000, seed), law) for seed in range(2000)]
    assert found[0].cells < 64
    p = np.array([result.p for result in found])
    for level in (0.01, 0.1, 0.5):
        expected = level * len(p)
        assert abs((p < level).sum() - expected) < 4 * np.sqrt(expected * (1 - level)), level
    assert stats.kstest(p, "uniform").pvalue > 1e-3
    assert all(result.passed for result in found)


@pytest.mark.parametrize("spread", ["over all cells", "two cells"])
def test_a_fault_of_the_size_that_is_reported_is_seen(spread):
    """99% power for the fault that is hardest to see, spread over all cells; others are seen more often."""
    law = np.full(32, 1 / 32)
    samples = samples_for(32, 0.02)
    assert smallest_seen(samples, 32) == pytest.approx(0.02, rel=1e-3)
    wrong = law.copy()
    if spread == "two cells":
        wrong[:2] += 0.02, -0.02
    else:
        wrong *= 1 + 0.04 * np.where(np.arange(32) % 2, 1, -1)
    assert abs(wrong - law).sum() / 2 == pytest.approx(0.02)
    seen = np.mean([not g_test(drawn(wrong, samples, seed), law).passed for seed in range(400)])
    assert seen > (0.995 if spread == "two cells" else 0.97)


@pytest.mark.parametrize("cells, distance, thousands", [(8, 0.02, 43), (32, 0.02, 61), (128, 0.01, 389)])
def test_sample_sizes_are_those_of_the_table(cells, distance, thousands):
    assert samples_for(cells, distance) == pytest.approx(1000 * thousands, rel=0.02)


def test_noncentrality_gives_the_power():
    limit = stats.chi2.isf(FAILS_BELOW, 215)
    assert stats.ncx2.sf(limit, 215, noncentrality(216)) == pytest.approx(0.99, abs=1e-9)


def test_small_cells_are_pooled_until_they_expect_five():
    expected = np.array([40.0, 1.0, 2.0, 30.0, 1.5, 7.0])
    counts = np.array([41, 0, 3, 29, 2, 6])
    found, wanted = pooled(counts, expected)
    # 1 + 1.5 + 2 are not five yet, so the next smallest joins them
    np.testing.assert_allclose(wanted, [11.5, 30, 40])
    np.testing.assert_array_equal(found, [0 + 2 + 3 + 6, 29, 41])
    same = pooled(counts[[0, 3]], expected[[0, 3]])
    np.testing.assert_allclose(same[1], [30, 40])
    alone = pooled(np.array([1, 0]), np.array([0.6, 0.4]))
    assert len(alone[0]) == 1


def test_what_cannot_happen_must_not():
    law = np.array([0.5, 0.5, 0.0])
    assert g_test(np.array([480, 520, 0]), law).passed
    result = g_test(np.array([479, 520, 1]), law)
    assert result.p == 0 and not result.passed


def test_a_law_of_one_text_passes_if_nothing_else_is_seen():
    assert g_test(np.array([100, 0]), np.array([1.0, 0.0])).p == 1.0
    assert smallest_seen(100, 1) == 1.0


@pytest.mark.parametrize("counts, law", [([0, 0], [0.5, 0.5]), ([1, 2], [0.5, 0.2, 0.3])])
def test_counts_that_do_not_fit_are_refused(counts, law):
    with pytest.raises(ValueError, match="do not fit"):
        g_test(np.array(counts), np.array(law))


@pytest.mark.parametrize("law", [[float("nan"), 1.0], [-0.1, 1.1], [0.0, 0.0]])
def test_what_is_no_law_is_refused(law):
    with pytest.raises(ValueError, match="law"):
        g_test(np.array([1, 2]), np.array(law))
