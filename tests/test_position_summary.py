"""Buckets, cells and shares on hand-made rows."""

import numpy as np
import pandas as pd
import pytest
import synthetic_records

from dcd_core.errors import UserError
from diagnostics import paper
from diagnostics.position_summary import (
    EDGES,
    bucket,
    bucket_labels,
    cells,
    length_gain,
    marginals,
    scale_of,
    summarise,
    summarise_by_alpha,
)


@pytest.fixture(scope="module")
def rows():
    frame = pd.DataFrame(synthetic_records.positions(prompts=20, length=30))
    frame["amateur_error"] = np.nan
    return frame


def test_an_edge_belongs_to_the_bucket_above_it():
    assert bucket([0, 0.2499, 0.25, 0.5, 1.0, 1.999, 2.0, 4.0, 7.9, 8.0, 1e9]).tolist() == [
        0,
        0,
        1,
        2,
        3,
        3,
        4,
        5,
        5,
        6,
        6,
    ]
    assert bucket_labels() == ["0-0.25", "0.25-0.5", "0.5-1", "1-2", "2-4", "4-8", "8+"]
    assert len(paper.SIGNAL_SHARES) == len(EDGES) - 1


def test_the_papers_shares_are_consistent():
    """[DCD, sec. 4]: the seven buckets sum to one, the first three to 81.1%."""
    assert sum(paper.SIGNAL_SHARES) == pytest.approx(1.0, abs=0.002)
    assert sum(paper.SIGNAL_SHARES[:3]) == pytest.approx(paper.SIGNAL_BELOW_1, abs=0.001)


def test_cells_count_and_average_by_hand(rows):
    few = rows.iloc[:0].copy()
    few = pd.concat([rows.iloc[:4]], ignore_index=True)
    few["signal"], few["error_reverse"] = [0.1, 0.1, 3.0, 9.0], [0.3, 0.3, 0.0, 8.0]
    few["prompt_id"] = ["a", "b", "a", "a"]
    few["target_tv"], few["oracle_tv"] = [0.5, 0.6, 0.5, 0.5], [0.4, 0.3, 0.7, 0.5]
    few["target_top1"], few["oracle_top1"] = [True, False, False, True], [True, True, False, False]
    found = cells(few)
    assert found.counts.sum() == 4
    assert (found.counts[1, 0], found.counts[0, 4], found.counts[6, 6]) == (2, 1, 1)
    assert found.gain_acceptance[1, 0] == pytest.approx((0.1 + 0.3) / 2)
    assert found.gain_top1[1, 0] == pytest.approx(0.5)
    ends = found.gain_acceptance_low[1, 0], found.gain_acceptance_high[1, 0]
    assert ends == pytest.approx((0.2 - 12.706 * 0.1, 0.2 + 12.706 * 0.1), abs=1e-4), (
        "two prompts, one degree of freedom"
    )
    assert np.isnan(found.gain_top1_low[6, 6])  # one prompt: no interval
    assert np.isnan(found.gain_top1[3, 3]) and found.counts[3, 3] == 0
    assert found.few.sum() == 3


def test_marginals_are_the_sums_of_the_cells(rows):
    found, (signal, error) = cells(rows), marginals(rows)
    assert found.counts.sum(0) / len(rows) == pytest.approx(signal)
    assert found.counts.sum(1) / len(rows) == pytest.approx(error)


def test_the_summary_is_what_pandas_says(rows):
    found = summarise_by_alpha(rows)
    assert list(found) == ["0.1", "0.5", "pooled"]
    assert found["pooled"]["positions"] == sum(found[alpha]["positions"] for alpha in ("0.1", "0.5"))
    part = rows[rows["alpha"] == 0.5]
    one = found["0.5"]
    assert one["share_signal_below_1"]["estimate"] == pytest.approx((part["signal"] < 1).mean())
    assert one["share_error_above_2"]["estimate"] == pytest.approx((part["error_reverse"] >= 2).mean())
    assert one["mean_headroom_tv"]["estimate"] == pytest.approx(part["headroom_tv"].mean())
    assert one["gain_acceptance_oracle"]["estimate"] == pytest.approx((part["target_tv"] - part["oracle_tv"]).mean())
    for entry in one.values():
        if isinstance(entry, dict):
            assert entry["low"] <= entry["estimate"] <= entry["high"]
    assert "mean_amateur_error" not in one


def test_the_same_prompt_at_two_alphas_is_one_unit(rows):
    assert summarise(rows)["prompts"] == 20


def test_nothing_to_summarise_is_refused(rows):
    with pytest.raises(UserError, match="no positions"):
        summarise_by_alpha(rows.iloc[:0])


def test_a_gain_per_token_as_accepted_length():
    """The figure of the source: a = .6, h = .01, gamma = 5 gives +3.5% of L."""
    length = sum(0.6**i for i in range(1, 6))
    assert length_gain(0.6, 0.01, 5) / length == pytest.approx(0.035, abs=0.001)
    assert length_gain(0.6, 0.0, 5) == 0
    assert length_gain(0.9, 0.5, 2) == pytest.approx(2 - 0.9 - 0.81)


@pytest.mark.parametrize(
    "name, scale",
    [
        ("mean_signal", "log"),
        ("mean_target_kl", "log"),
        ("mean_headroom_tv", "logit"),
        ("mean_target_top1", "logit"),
        ("share_gap_positive", "logit"),
        ("acceptance_oracle", "logit"),
        ("gain_top1_dual", "plain"),
        ("mean_alignment_gap", "plain"),
        ("mean_tail_mass", "plain"),
        ("mean_cov_errors", "plain"),
    ],
)
def test_what_may_be_negative_has_an_interval_that_may_be(name, scale):
    """On a scale that stops at 0 every gain would look sure."""
    assert scale_of(name) == scale


def test_one_lucky_position_is_no_sure_gain(rows):
    few = rows.iloc[:40].assign(signal=0.1, error_reverse=0.1, prompt_id=[f"p{i % 8}" for i in range(40)])
    few = few.assign(target_top1=False, oracle_top1=[i == 0 for i in range(40)])
    found = cells(few)
    assert found.gain_top1[0, 0] == pytest.approx(1 / 40) and found.gain_top1_low[0, 0] < 0
