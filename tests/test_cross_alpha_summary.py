"""From records to matrix, verdicts and sentences: every verdict from records that call for it, exact sums, refusals."""

import numpy as np
import pandas as pd
import pytest
import synthetic_records

from dcd_core.errors import UserError
from diagnostics import paper
from diagnostics.cross_alpha_summary import change_between, matched, read_matrix, summarise_replays
from diagnostics.matrix_summary import summarise_matrix
from diagnostics.position_summary import length_gain
from diagnostics.records import read_records, write_records


def records(**options) -> pd.DataFrame:
    return pd.DataFrame(synthetic_records.replays(**options))


def summed(rows, **options) -> dict:
    return summarise_replays(rows, 5, **options)


@pytest.mark.parametrize(
    "verdict, options, words",
    [
        ("helps", {"effect": 0.05}, "A gain from contrast-aware training at alpha 0.3: L changes by +"),
        ("no gain", {"effect": 0.0, "noise": 0.002}, "is ruled out, and so is a loss of that size; at equal"),
        (
            "no gain",
            {"effect": -0.004, "noise": 0.002},
            "No gain from contrast-aware training at alpha 0.3: L changes by -",
        ),
        ("hurts", {"effect": -0.05}, "so it hurts; at equal approximation error"),
        ("undecided", {"effect": 0.0, "prompts": 25, "noise": 0.2}, "neither shows a gain nor rules out one"),
        ("undecided", {"effect": 0.0, "seed_deviation": 0.05}, "neither shows a gain nor rules out one"),
        (
            "no gain",
            {"effect": 0.0, "seeds": (0,)},
            "at alpha 0.3, between these two drafters, one training run each: L",
        ),
    ],
)
def test_every_verdict_can_be_told(verdict, options, words):
    found = summed(records(**({"prompts": 120, "noise": 0.02} | options)))
    assert [entry["infer_alpha"] for entry in found["verdicts"]] == [0.1, 0.3, 0.5]
    for entry in found["verdicts"]:
        assert entry["verdict"] == verdict and entry["train_alpha"] == entry["infer_alpha"], entry
        assert "could add at most" in entry["sentence"] and entry["comparisons"] == 3
    assert words in found["verdicts"][1]["sentence"]


def test_the_matrix_is_sums_over_sums():
    rows = records(prompts=9)
    found = summed(rows)
    for row, train in enumerate(found["train_alphas"]):
        for column, infer in enumerate(found["infer_alphas"]):
            mine = (rows["group"] == "family") & (rows["train_alpha"] == train) & (rows["infer_alpha"] == infer)
            part = rows[mine].sum(numeric_only=True)
            assert found["lengths"][row][column] == pytest.approx(part["accepted"] / part["rounds"])
            assert found["acceptances"][row][column] == pytest.approx(part["acceptance"] / part["positions"])
    assert found["summary"] == summarise_matrix(found["lengths"], found["train_alphas"]).as_dict()
    best = [entry for entry in found["train_rows"] if entry["train_alpha"] == found["summary"]["best_train_alpha"]]
    if best:
        assert best[0]["difference"]["estimate"] == pytest.approx(found["summary"]["difference"])
        assert best[0]["gain"]["estimate"] == pytest.approx(found["summary"]["gain"])


def test_table_8_as_records_gives_table_1():
    """One prompt of 1000 rounds with the paper's L: the summary of records is that of the matrix."""
    for setting, lengths in paper.CROSS_ALPHA.items():
        rows = records(prompts=1, seeds=(0,), official=False)
        wanted = {
            (train, infer): lengths[row][column]
            for row, train in enumerate(paper.CROSS_ALPHAS)
            for column, infer in enumerate(paper.CROSS_ALPHAS)
        }
        rows["accepted"] = [
            round(1000 * wanted[key]) for key in zip(rows["train_alpha"], rows["infer_alpha"], strict=True)
        ]
        rows["rounds"] = 1000
        summary, (best, difference, gain, wins) = summed(rows)["summary"], paper.CROSS_ALPHA_SUMMARY[setting]
        assert (summary["best_train_alpha"], summary["control_best"]) == (best, wins)
        assert round(summary["difference"], 3) == difference and 100 * summary["gain"] == pytest.approx(gain, abs=0.02)


def test_headroom_is_turned_into_length_at_the_controls_acceptance():
    rows = records(prompts=40, headroom=0.05)
    entry = summed(rows)["verdicts"][1]
    assert entry["headroom_tv"]["estimate"] == pytest.approx(0.05 * 0.3)
    assert entry["added_length"] == pytest.approx(length_gain(entry["control_acceptance"], 0.015, 5))
    assert "could add at most 1.5 points to the acceptance of a sampled first draft" in entry["sentence"]
    assert entry["acceptance_change"]["low"] < 0 < entry["acceptance_change"]["high"]


def test_controls_are_held_against_train_alpha_0():
    rows = records(prompts=40)
    zeroed = rows[(rows["group"] == "family") & (rows["train_alpha"] == 0)].assign(group="zeroed")
    found = summed(pd.concat([rows, zeroed]))["controls"]
    same = [entry for entry in found if entry["group"] == "zeroed"]
    assert len(same) == 4 and all(entry["change"]["estimate"] == 0 for entry in same)
    assert {tuple(entry["paired_seeds"]) for entry in same} == {(0, 1, 2)}
    first = zeroed[zeroed["seed"] == 0]
    alone = summed(pd.concat([rows, first]))["controls"]
    alone = [entry for entry in alone if entry["group"] == "zeroed"]
    assert [(entry["change"]["estimate"], entry["paired_seeds"]) for entry in alone] == [(0.0, [0])] * 4, "seed by seed"
    official = [entry for entry in found if entry["group"] == "official"]
    assert len(official) == 4 and not official[0]["paired_seeds"]
    control = np.array(summed(rows)["lengths"])[0]
    for entry, length in zip(official, control, strict=True):
        assert entry["change"]["estimate"] == pytest.approx(entry["length"] / length - 1)


def test_the_verdict_is_about_training_on_the_same_alpha_or_the_nearest():
    rows = records(prompts=10, infer_alphas=(0.0, 0.2, 0.5), train_alphas=(0.0, 0.1, 0.4))
    found = summed(rows)
    assert [(entry["infer_alpha"], entry["train_alpha"]) for entry in found["verdicts"]] == [(0.2, 0.1), (0.5, 0.4)]
    assert "at alpha 0.2 (trained on 0.1)" in found["verdicts"][0]["sentence"]
    assert matched(found["cells"], 0.0) is None


def test_the_question_is_corrected_for_its_own_comparisons_and_the_rest_for_theirs():
    cells = summed(records(prompts=40))["cells"]
    for cell in cells:
        assert cell["comparisons"] == (3 if cell["train_alpha"] == cell["infer_alpha"] else 9)


def test_seeds_that_differ_leave_a_verdict_about_just_these_drafters():
    """Over training seeds nothing is sure; over prompts alone, of the heads as they are, it may be."""
    (*_, entry) = summed(records(prompts=200, noise=0.02, effect=0.0, seed_deviation=0.05))["verdicts"]
    assert entry["verdict"] == "undecided" != entry["verdict_over_prompts"]
    assert entry["change_over_prompts"]["high"] < entry["change"]["high"]
    words = f"Of just these drafters, over prompts alone: {entry['verdict_over_prompts']}, "
    assert entry["sentence_over_prompts"].startswith(words)


def test_the_change_of_one_run_against_that_of_another():
    """The difference of two shares; sure where both saw the same prompts, for prompts cancel."""
    one, other = (read_matrix(records(prompts=60, effect=effect, noise=0.01)) for effect in (0.0, 0.05))
    found = change_between(one, other, 0.3, 0.3)
    shares = [
        matrix.lengths()[matrix.train_alphas.index(0.3), matrix.infer_alphas.index(0.3)]
        / matrix.lengths()[0, matrix.infer_alphas.index(0.3)]
        for matrix in (one, other)
    ]
    assert found.estimate == pytest.approx(shares[1] - shares[0]) and 0 < found.low < 0.05 < found.high + 0.02
    same = change_between(one, one, 0.3, 0.3)
    assert (same.estimate, same.low, same.high) == (0, 0, 0)
    alone = records(prompts=60, noise=0.01)
    assert change_between(one, read_matrix(alone[alone["seed"] == 0]), 0.3, 0.3).estimate == 0, "of the seeds of both"
    assert change_between(one, other, 0.2, 0.3) is None and change_between(one, other, 0.3, 0.7) is None
    assert change_between(one, read_matrix(records(prompts=59)), 0.3, 0.3) is None
    never = records(prompts=60)
    never["accepted"] = 0
    assert change_between(one, read_matrix(never), 0.3, 0.3) is None


def test_a_control_that_is_never_accepted_decides_nothing():
    rows = records(prompts=10).assign(accepted=0)
    found = summed(rows)
    assert {cell["verdict"] for cell in found["cells"]} == {"undecided"}
    assert "no draft of the control was accepted" in found["verdicts"][0]["sentence"]
    assert found["summary"]["gain"] == 0.0


def test_records_survive_the_disk(tmp_path):
    columns = synthetic_records.replays(prompts=5)
    write_records(tmp_path / "replays.parquet", "replays", columns, {})
    read = read_records(tmp_path / "replays.parquet", "replays").rows
    assert summed(read) == summed(pd.DataFrame(columns))
    columns["top1"][7] = columns["positions"][7] + 1.0
    with pytest.raises(UserError, match="'top1' is impossibly large in row 7"):
        write_records(tmp_path / "bad.parquet", "replays", columns, {})


def test_refusals():
    rows = records(prompts=4)
    for bad, message in (
        (rows[rows["group"] != "family"], "no matched family"),
        (rows[rows["train_alpha"] > 0], "no drafter of train-alpha 0"),
        (rows.drop(index=3), "one row"),
        (pd.concat([rows, rows.iloc[:1]]), "one row"),
    ):
        with pytest.raises(UserError, match=message):
            read_matrix(bad)


@pytest.mark.parametrize(
    "infer, trains, nearest", [(0.2, (0.1, 0.3), 0.1), (0.3, (0.1, 0.3), 0.3), (0.4, (0.3, 0.5), 0.3)]
)
def test_of_two_equally_near_train_alphas_the_smaller_answers(infer, trains, nearest):
    """0.3 - 0.2 is less than 0.2 - 0.1 in binary."""
    cells = [{"infer_alpha": infer, "train_alpha": train} for train in trains]
    assert matched(cells, infer)["train_alpha"] == nearest
    assert matched(cells[::-1], infer)["train_alpha"] == nearest
