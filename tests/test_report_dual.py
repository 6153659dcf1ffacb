"""The dual-drafter section says what the records say, whichever way that is, with the paper's figures beside."""

import pandas as pd
import pytest
from synthetic_runs import dual_run, dual_tables

import diagnostics.report as report
from diagnostics import paper
from diagnostics.dual_summary import summarise_dual
from diagnostics.records import write_records
from diagnostics.sections import plots_dual
from diagnostics.sections.dual_drafter import dual_section, paper_cell, variance_counts
from diagnostics.sections.runs import Run, find_runs


def run_of(folder, dual: float, **more) -> Run:
    dual_run(folder, dual, **more)
    return Run(folder, "dual drafter", {"pair": "big / small"}, {})


@pytest.mark.parametrize(
    ("dual", "verdict", "words"),
    [(-0.08, "hurts", "the dual drafter loses: -"), (0.08, "helps", "the dual drafter gains: +")],
)
def test_a_clear_difference_is_said_either_way(tmp_path, dual, verdict, words):
    run = run_of(tmp_path / "run", dual)
    section = dual_section(run, tmp_path / "page")
    assert words in section.headlines[0].sentence
    positions, replays = (pd.DataFrame(table) for table in dual_tables(dual))
    assert {entry["verdict"] for entry in summarise_dual(positions, replays, 5)} == {verdict}


def test_too_little_data_is_undecided():
    positions, replays = (pd.DataFrame(table) for table in dual_tables(0.005, prompts=12))
    assert {entry["verdict"] for entry in summarise_dual(positions, replays, 5)} == {"undecided"}


def test_a_difference_within_the_margin_is_no_gain():
    """The very same rounds in both arms, but for a drop in the dual one: surely no gain of 1%."""
    positions, replays = (pd.DataFrame(table) for table in dual_tables(0.0))
    base = replays[(replays["draft"] == "target") & (replays["gamma"] == 5)]
    replays.loc[replays["draft"] == "dual", "accepted"] = base["accepted"].to_numpy()
    assert {entry["verdict"] for entry in summarise_dual(positions, replays, 5)} == {"no gain"}


def test_a_drafter_that_never_hits_has_no_share(tmp_path):
    run = run_of(tmp_path / "run", 0.0, prompts=6)
    positions, replays = dual_tables(0.0, prompts=6)
    replays["accepted"] = [0] * len(replays["accepted"])
    write_records(run.folder / "dual_replays.parquet", "dual_replays", replays, {"settings": {"gamma": 5}})
    sentence = dual_section(run, tmp_path / "page").headlines[0].sentence
    assert "is undecided: none of e's drafts is accepted at alpha 0.1" in sentence


def test_seeds_are_pooled_and_named(tmp_path):
    section = dual_section(run_of(tmp_path / "run", 0.02, prompts=20, seeds=3), tmp_path / "page")
    assert "3 training seeds, pooled" in section.text[0]
    assert section.tables[2].rows[0][2:4] == ["20", "120"], "20 prompts, 6 positions, whatever the seeds"


def test_tables_and_figures_name_the_papers_numbers(tmp_path):
    section = dual_section(run_of(tmp_path / "run", 0.0, prompts=20), tmp_path / "page")
    lengths, rule, variances = section.tables
    assert [row[3] for row in lengths.rows[:5]] == [
        "expert-aligned: e",
        "dual: [e, f]",
        "oracle: e, true amateur",
        "oracle: true expert, f",
        "expert-aligned: e, 10 drafts (equal time)",
    ]
    assert lengths.paper == ("paper: L; KL; top-1",) and lengths.rows[0][-1] == paper_cell("target", 0.1)
    assert paper_cell("dual", 0.5) == "0.82 to 1.71; 4.74 to 8.31; 49 to 59%" and paper_cell("oracle", 0.5) == ""
    assert rule.rows[0][-1] == "31.9 to 39.7%" and rule.rows[0][3] == "21" and rule.paper == ("paper: closer",)
    assert len(variances.rows) == len(rule.rows) == 2 and variances.headers[4] == "Var(s)"
    assert [picture.path.name for picture in section.pictures] == ["run-lengths.png", "run-variances.png"]
    assert "21 and 5 times" in section.pictures[1].caption
    assert "(paper: 31.9 to 39.7%)" in section.headlines[0].small
    for drafts in paper.DUAL_DRAFTER.values():
        assert drafts["dual"][:2] < drafts["expert-aligned"][:2], "in the paper the dual drafter is the shorter one"


def test_the_map_counts_every_position_and_shares_those_above_the_line():
    positions = pd.DataFrame(dual_tables(0.0, prompts=20)[0])
    found = variance_counts(positions)
    assert list(found) == ["α = 0.1", "α = 0.5"]
    for alpha, (table, share) in zip((0.1, 0.5), found.values(), strict=True):
        part = positions[positions["alpha"] == alpha]
        cost = (1 + 2 / alpha) * part["var_error"] + part["var_amateur_error"]
        assert table.sum() == len(part) and share == pytest.approx((part["var_signal"] > cost).mean())
    figure = plots_dual.variance_map({"a": table}, {"a": share})
    assert "above the line" in figure.axes[0].get_title()


def test_the_report_knows_a_dual_run(tmp_path):
    """Its folder holds positions too, and is no signal study."""
    run_of(tmp_path / "runs" / "dual", -0.08, prompts=40)
    runs, _ = find_runs([str(tmp_path / "runs")])
    assert [run.kind for run in runs] == ["dual drafter"]
    assert report.main([f"--records={tmp_path / 'runs'}", f"--output={tmp_path / 'page'}"]) == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "the dual drafter loses" in page and page.count("data:image/png") == 2
