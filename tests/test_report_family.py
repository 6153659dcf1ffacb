"""A family's training in the report: every head is there, seeds are averaged, and other targets are not confused."""

import synthetic_runs

from diagnostics.sections.families import by_kind, family_section, mean_curve
from diagnostics.sections.runs import find_runs


def section(folder, **options):
    synthetic_runs.family_run(folder / "family", **options)
    ((run,), _) = find_runs([str(folder / "family")])
    assert run.kind == "family"
    return run, family_section(run, folder)


def test_every_head_has_its_last_figures(tmp_path):
    _, found = section(tmp_path)
    (table,) = found.tables
    assert table.headers == ["head", "top-1 of the first draft", "accepted drafts per round", "loss (nats)"]
    assert table.rows[3] == ["alpha_0.3_seed_1", "0.510", "0.625", "3.100"] and len(table.rows) == 4
    assert "held-out" in table.caption
    assert found.scalars["accepted_length/alpha_0.3_seed_1"] == 0.625
    assert "4 heads, each 20 optimiser steps" in found.text[0] and "5 texts, 50,000 answer tokens" in found.text[0]
    assert [picture.path.name for picture in found.pictures] == ["family-loss.png", "family-accuracy.png"]
    assert all(picture.path.is_file() and "mean over seeds" in picture.caption for picture in found.pictures)


def test_seeds_are_averaged_and_targets_are_not(tmp_path):
    run, _ = section(tmp_path)
    kinds = by_kind(run.metrics["members"])
    assert list(kinds) == ["alpha 0", "alpha 0.3"]
    assert mean_curve(kinds["alpha 0"], "loss") == ([10, 20], [4.5, 3.5])  # seeds 0 and 1: 4 and 5, then 3 and 4
    kinds["alpha 0"][1]["history"].pop()
    assert mean_curve(kinds["alpha 0"], "loss")[0] == [10], "only where every seed was measured"


def test_without_held_out_texts_the_figures_are_training_s(tmp_path):
    _, found = section(tmp_path, evaluated=False, seeds=(0,))
    (table,) = found.tables
    assert "no held-out texts" in table.caption and table.rows[0] == ["alpha_0_seed_0", "0.200", "3.000"]
    assert "one seed" in found.pictures[0].caption
