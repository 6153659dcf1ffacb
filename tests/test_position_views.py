"""Views over configurations on hand-made and synthetic rows: what pandas says, pooled by count and each alone."""

import numpy as np
import pandas as pd
import pytest
import synthetic_records

from diagnostics.position_summary import bucket, cells, kinds_in, summarise
from diagnostics.position_views import (
    alignment,
    by_configuration,
    configurations,
    each_and_pooled,
    per_configuration,
    realised,
    settings_of,
    trends,
)


@pytest.fixture(scope="module")
def rows():
    """Two pairs on two data sets, of different sizes."""
    parts = []
    for index, (pair, dataset) in enumerate([("A", "maths"), ("A", "facts"), ("B", "maths"), ("B", "facts")]):
        made = synthetic_records.positions(prompts=8 + 6 * index, length=15, alphas=(0.1, 0.5), seed=index)
        frame = pd.DataFrame(synthetic_records.with_drafts(made, seed=index))
        parts.append(frame.assign(pair=pair, dataset=dataset))
    return pd.concat(parts, ignore_index=True)


def test_the_drafts_that_are_there_are_known(rows):
    assert kinds_in(rows) == ["direct", "dual", "oracle", "stronger"]
    assert kinds_in(rows.assign(dual_tv=np.nan, direct_tv=None)) == ["oracle", "stronger"]
    assert kinds_in(pd.DataFrame(synthetic_records.positions(prompts=2))) == ["oracle"]


@pytest.mark.parametrize("kind", ["direct", "dual", "oracle", "stronger"])
def test_a_cell_is_the_mean_of_its_positions(rows, kind):
    base, error = ("stronger_plain", "stronger_error") if kind == "stronger" else ("target", "error_reverse")
    found = cells(rows, kind=kind)
    assert found.counts.sum() == len(rows)
    gain = rows[f"{kind}_top1"].astype(float) - rows[f"{base}_top1"].astype(float)
    inside = (bucket(rows["signal"]) == 0) & (bucket(rows[error]) == 2)
    assert found.counts[2, 0] == inside.sum() > 0
    assert found.gain_top1[2, 0] == pytest.approx(gain[inside].mean())
    assert found.gain_acceptance[2, 0] == pytest.approx((rows[f"{base}_tv"] - rows[f"{kind}_tv"])[inside].mean())


def test_a_kind_that_only_one_pair_has_is_averaged_over_that_pair(rows):
    some = rows.copy()
    some.loc[some["pair"] == "B", ["dual_tv", "dual_kl"]] = np.nan
    some["dual_top1"] = some["dual_top1"].astype(object)
    some.loc[some["pair"] == "B", "dual_top1"] = None
    part = some[some["pair"] == "A"]
    assert cells(some, kind="dual").counts.sum() == len(part)
    assert summarise(some)["gain_acceptance_dual"]["estimate"] == pytest.approx(
        (part["target_tv"] - part["dual_tv"].astype(float)).mean()
    )


def test_maps_have_a_row_for_each_configuration(rows):
    labels, number = configurations(rows)
    assert len(labels) == 8 and labels[0] == "A, facts, α 0.1" and set(number) == set(range(8))
    for column in ("signal", "amateur_error"):
        found = by_configuration(rows, column, "dual")
        assert found.labels == labels and found.grid.counts.shape == (8, 7)
        part = rows[(rows["pair"] == "A") & (rows["dataset"] == "maths") & (rows["alpha"] == 0.5)]
        at = labels.index("A, maths, α 0.5")
        assert found.grid.counts[at].sum() == len(part)
        inside = bucket(part[column]) == 1
        gain = (part["dual_top1"].astype(float) - part["target_top1"].astype(float))[inside].mean()
        assert found.grid.mean[at, 1] == pytest.approx(gain)
    assert (found.grid.few == ((found.grid.counts > 0) & (found.grid.counts < 100))).all()


def test_trends_are_per_pair_and_data_set(rows):
    found = trends(rows, "oracle")
    assert found["alpha"].labels == ["A, facts", "A, maths", "B, facts", "B, maths"] == list(settings_of(rows))
    part = rows[(rows["pair"] == "B") & (rows["dataset"] == "maths") & (rows["alpha"] == 0.5)]
    gain = (part["oracle_top1"].astype(float) - part["target_top1"].astype(float)).mean()
    assert found["alpha"].grid.mean[3, 1] == pytest.approx(gain)
    assert found["signal"].grid.counts.sum() == found["alpha"].grid.counts.sum() == len(rows)


def test_pooling_is_by_count(rows):
    """The pooled mean is the mean over positions, not the mean of the settings' means."""
    found = per_configuration(rows)
    pooled = found.pop("pooled by count")
    counts = np.array([entry["positions"] for entry in found.values()])
    each = np.array([entry["top1"]["dual"].estimate for entry in found.values()])
    assert pooled["positions"] == counts.sum() == len(rows)
    assert pooled["top1"]["dual"].estimate == pytest.approx((counts * each).sum() / counts.sum())
    assert abs(pooled["top1"]["dual"].estimate - each.mean()) > 1e-6
    both = each_and_pooled(rows)
    assert list(both) == ["A, facts", "A, maths", "B, facts", "B, maths", "pooled"]
    assert both["pooled"]["pooled"]["positions"] == sum(
        entry["pooled"]["positions"] for entry in list(both.values())[:4]
    )
    assert list(each_and_pooled(rows[rows["pair"] == "A"].assign(dataset="x"))) == ["x"]


def test_the_alignment_gap_comes_with_its_share_above_zero(rows):
    found = alignment(rows)
    gap, share = found["A, maths"]
    part = rows[(rows["pair"] == "A") & (rows["dataset"] == "maths")]
    assert gap.estimate == pytest.approx(part["alignment_gap"].mean())
    assert share.estimate == pytest.approx((part["alignment_gap"] > 0).mean())
    assert gap.low < gap.estimate < gap.high


def test_what_is_realised_is_the_gain_over_the_ceiling(rows):
    found = {(entry.kind, entry.alpha): entry for entry in realised(rows)}
    assert {kind for kind, _ in found} == {"direct", "dual", "oracle"} and {a for _, a in found} == {
        "0.1",
        "0.5",
        "pooled",
    }
    one = found["oracle", "0.5"]
    part = rows[rows["alpha"] == 0.5]
    gain, ceiling = (part["target_tv"] - part["oracle_tv"]).mean(), part["headroom_tv"].mean()
    assert one.share_acceptance.estimate == pytest.approx(gain / ceiling)
    assert one.share_acceptance.low < gain / ceiling < one.share_acceptance.high
    assert found["dual", "0.1"].gain_acceptance.estimate < 0 > found["dual", "0.1"].share_acceptance.estimate
    flat = rows.assign(headroom_tv=0.0, headroom_flip=False)
    assert all(entry.share_acceptance is None and entry.share_top1 is None for entry in realised(flat))
