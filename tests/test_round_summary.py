"""Speeds, accepted lengths and acceptance by position on hand-made rounds."""

import pandas as pd
import pytest

from dcd_core.errors import UserError
from diagnostics.forms import unsaved
from diagnostics.round_summary import acceptance_by_position, run_name, summarise_rounds


def table(*rows):
    """(alpha, method, prompt, drafted, accepted, emitted, seconds) per round."""
    names = ("alpha", "method", "prompt_id", "drafted", "accepted", "emitted", "expert_s")
    frame = pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])
    frame["run"] = [run_name(alpha if alpha == alpha else None, 0) for alpha in frame.pop("alpha")]
    return frame.assign(sample=0, round=0, draft_s=0.0, amateur_s=0.0, rest_s=0.0, expert_passes=1, amateur_passes=1)


ROWS = (
    (0.5, "cd", "a", 0, 0, 1, 0.1),
    (0.5, "cd", "a", 0, 0, 1, 0.1),
    (0.5, "cd", "b", 0, 0, 1, 0.2),
    (0.5, "dcd_ngram", "a", 3, 1, 2, 0.1),
    (0.5, "dcd_ngram", "b", 2, 0, 1, 0.2),
    (None, "ar", "a", 0, 0, 1, 0.05),
    (None, "ar", "b", 0, 0, 1, 0.05),
)


def by_method(*rows):
    return {entry["method"]: entry for entry in summarise_rounds(table(*rows))}


def test_speeds_are_ratios_of_sums():
    found = by_method(*ROWS)
    assert list(found) == ["ar", "cd", "dcd_ngram"]
    assert found["cd"]["tokens_per_second"]["estimate"] == pytest.approx(3 / 0.4)
    assert found["dcd_ngram"]["speedup"]["estimate"] == pytest.approx((3 / 0.3) / (3 / 0.4))
    assert found["ar"]["alpha"] == "any"
    assert found["ar"]["speedup"]["estimate"] == pytest.approx((2 / 0.1) / (3 / 0.4))
    assert found["cd"]["speedup"]["low"] == found["cd"]["speedup"]["high"] == 1.0


def test_accepted_length_leaves_the_verifiers_token_out():
    found = by_method(*ROWS)["dcd_ngram"]
    assert found["accepted_length"]["estimate"] == 0.5
    assert found["tokens_per_round"]["estimate"] == 1.5
    assert found["drafted_per_round"] == 2.5
    assert (found["rounds"], found["tokens"], found["answers"]) == (2, 3, 2)


def test_without_cd_there_is_no_speedup():
    assert "speedup" not in by_method(*ROWS[3:5])["dcd_ngram"]


@pytest.mark.parametrize(
    "label, plain",
    [
        ("dcd_deferred", "dcd_eagle3"),
        ("dcd_deferred@5x4:10", "dcd_eagle3@5x4:10"),
        ("dcd_hybrid@5x4:10+deferred", "dcd_hybrid@5x4:10"),
        ("cd@lazy", "cd"),
        ("dcd_eagle3@5x4:10", None),
        ("cd", None),
    ],
)
def test_saved_passes_stand_beside_the_same_drafts_without(label, plain):
    assert unsaved(label) == plain
    found = by_method((0.5, label, "a", 3, 1, 2, 0.1), (0.5, plain or "other", "a", 3, 1, 3, 0.3))
    over = found[label].get("over_unsaved", {}).get("estimate")
    assert over == (pytest.approx(2.0) if plain else None)


def test_a_saving_without_its_counterpart_is_compared_with_cd_alone():
    assert "over_unsaved" not in by_method((0.5, "dcd_deferred", "a", 3, 1, 2, 0.1), *ROWS[:1])["dcd_deferred"]


def test_an_answer_that_ended_with_the_prefill_counts_nothing():
    found = by_method(*ROWS[:2], *ROWS[3:5])  # cd has no round for prompt b
    assert found["dcd_ngram"]["speedup"]["estimate"] == pytest.approx((3 / 0.3) / (2 / 0.2))


def test_acceptance_by_position_is_conditional_on_the_earlier_drafts():
    rows = [(0.5, "x", prompt, 3, accepted, accepted + 1, 0.1) for prompt, accepted in enumerate([0, 1, 1, 3])]
    rows.append((0.5, "x", 9, 1, 1, 2, 0.1))  # drafted one only: says nothing about position 2
    found = [interval.estimate for interval in acceptance_by_position(table(*rows))]
    assert found == pytest.approx([4 / 5, 1 / 3, 1.0])


def test_positions_never_reached_are_left_out():
    rows = [(0.5, "x", prompt, 4, 0, 1, 0.1) for prompt in range(3)]
    assert [interval.estimate for interval in acceptance_by_position(table(*rows))] == [0.0]


def test_a_foreign_run_name_is_refused():
    with pytest.raises(UserError, match="run 'first try' is not named"):
        summarise_rounds(table(*ROWS).assign(run="first try"))


def test_blocks_count_expert_passes_and_what_the_amateur_took_back():
    """Two blocks: 5 tokens of 2 expert passes that all stood, and 3 of 7 tokens (3 passes) and the amateur's own."""
    blocks = table((0.5, "dcd_deferred", "p", 5, 5, 5, 0.5), (0.5, "dcd_deferred", "p", 7, 3, 4, 0.7))
    blocks["expert_passes"] = [2, 3]
    (found,) = summarise_rounds(blocks)
    assert found["blocks"] and found["flips"] == 1
    assert found["expert_passes"] == 5 and found["amateur_passes"] == 2
    assert found["tokens_per_round"]["estimate"] == pytest.approx(9 / 5)
    assert found["accepted_length"]["estimate"] == pytest.approx(4 / 5)
    assert found["acceptance_by_position"] == [] and found["draft_step_ms"] == 0.0


def test_a_tree_has_no_more_draft_positions_than_it_is_deep():
    """Ten tokens are drafted on paths of at most two: a third position does not exist, and is no position refused."""
    rows = ((0.5, "dcd_eagle3@2x4:10", "a", 10, 2, 3, 0.1), (0.5, "dcd_eagle3@2x4:10", "b", 10, 0, 1, 0.1))
    (found,) = summarise_rounds(table(*rows), gamma=5)
    assert [point["estimate"] for point in found["acceptance_by_position"]] == [0.5, 1.0]
    (plain,) = summarise_rounds(table((0.5, "dcd_eagle3", "a", 10, 1, 2, 0.1)), gamma=1)
    assert [point["estimate"] for point in plain["acceptance_by_position"]] == [1.0]


def test_a_method_s_forms_stand_after_it_small_drafts_first():
    labels = ["dcd_hybrid", "dcd_eagle3@5x4:20", "dcd_eagle3@5x4:6", "dcd_eagle3", "cd", "dcd_eagle3@5x4:10"]
    found = [one["method"] for one in summarise_rounds(table(*((0.5, x, "a", 1, 1, 2, 0.1) for x in labels)))]
    assert found == ["cd", *(f"dcd_eagle3{form}" for form in ("", "@5x4:6", "@5x4:10", "@5x4:20")), "dcd_hybrid"]
