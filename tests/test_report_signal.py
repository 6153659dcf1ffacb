"""The signal section says what the records say, for one run and for several pooled, with the paper's figures beside."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_records

from diagnostics import paper
from diagnostics.position_summary import cells
from diagnostics.position_views import by_configuration
from diagnostics.records import write_records
from diagnostics.sections import plots_signal
from diagnostics.sections.runs import Run
from diagnostics.sections.signal_error import pooled_section, signal_section
from diagnostics.wording import points


def run_of(folder, pair="big / small / head", drafts=True, dataset="held-out", **shifts) -> Run:
    columns = synthetic_records.positions(prompts=10, length=20)
    columns = synthetic_records.with_drafts(columns, **shifts) if drafts else columns
    columns |= {"pair": [pair] * len(columns["signal"]), "dataset": [dataset] * len(columns["signal"])}
    settings = {"settings": {"dtype": "float32"}}
    write_records(folder / "positions.parquet", "positions", columns, settings)
    (folder / "metrics.json").write_text(json.dumps({"pair": pair}))
    return Run(folder, "signal", {"pair": pair}, {})


def tables_of(section) -> dict:
    return {table.caption.split(",")[0]: table for table in section.tables}


def test_every_view_of_every_draft_is_there(tmp_path):
    section = signal_section(run_of(tmp_path / "one"), tmp_path / "page")
    names = [picture.path.stem.removeprefix("one-") for picture in section.pictures]
    kinds = ("direct", "dual", "oracle", "stronger")
    for kind in kinds:
        assert {f"gain-top1-{kind}", f"gain-acceptance-{kind}", f"signal-{kind}"} <= set(names)
    assert {"signal-error", "headroom", "amateur-error-dual", "trends", "alignment", "stronger"} <= set(names)
    assert "amateur-error-oracle" not in names, "the oracle draft has no error on the amateur's side"
    assert all(picture.path.read_bytes()[:4] == b"\x89PNG" for picture in section.pictures)
    tables = tables_of(section)
    table = tables["Headroom next to each gain"]
    assert [row[0] for row in table.rows] == ["direct draft"] * 3 + ["dual draft"] * 3 + ["oracle draft"] * 3
    assert all(row[-1].endswith(("%", "]", "headroom")) for row in table.rows)
    small = section.headlines[1].small
    assert small.count("Really gained by") == 3 and "the dual draft, which learned both models apart: -" in small


def test_the_papers_figures_are_labelled(tmp_path):
    section = signal_section(run_of(tmp_path / "one"), tmp_path / "page")
    captions = " ".join(picture.caption for picture in section.pictures)
    assert "Paper: Qwen3, GSM8K 0.740" in captions and "Paper, a 3B model: -0.28, -1.23" in captions
    tables = tables_of(section)
    rows = tables["Alignment gap E_e[log p/q] - E_q[log p/q]"].rows
    assert ["paper: Llama-3, MMLU", "", "0.211", ""] in rows
    headline = tables["Headline figures"]
    assert headline.paper == ("paper, pooled",) and [row[-1] for row in headline.rows[1:4]] == ["", "81.1%", "48.7%"]
    assert tables["Gains in points by pair"].rows[-1][0].startswith("paper, 3B proposer")
    assert len(paper.STRONGER_TOP1) == len(paper.ALIGNMENT_GAP) == 4


def test_old_records_without_drafts_still_make_a_section(tmp_path):
    section = signal_section(run_of(tmp_path / "old", drafts=False), tmp_path / "page")
    assert not [picture for picture in section.pictures if "dual" in picture.path.stem]
    assert section.headlines[1].small.count("Really gained by") == 1


def test_several_runs_are_pooled_by_count(tmp_path):
    runs = [run_of(tmp_path / "a", "A", dual=0.1), run_of(tmp_path / "b", "B", drafts=False, dataset="facts")]
    section = pooled_section(runs, tmp_path / "page")
    assert "2 runs pooled" in section.title and "Pooled by count from a and b" in section.text[-1]
    tables = tables_of(section)
    assert [row[3] for row in tables["Headline figures"].rows[:2]] == ["20", "800"]
    each = tables["Each pair and data set alone"]
    assert [row[0] for row in each.rows] == ["A, held-out"] * 3 + ["B, facts"] * 3 + ["pooled"] * 3
    column = each.headers.index("dTop1, dual draft, points")
    assert all((row[column] == "") == row[0].startswith("B") for row in each.rows)


def test_drafters_on_the_same_texts_are_not_pooled(tmp_path):
    """Signal and headroom would be those of the same positions, counted again for every drafter."""
    runs = [run_of(tmp_path / "a", "big / small / one"), run_of(tmp_path / "b", "big / small / other")]
    assert pooled_section(runs, tmp_path / "page") is None
    runs[1] = run_of(tmp_path / "c", "big / tiny / one")
    assert pooled_section(runs, tmp_path / "page") is not None


def test_a_draft_that_gains_is_said_to_gain(tmp_path):
    section = signal_section(run_of(tmp_path / "one", direct=0.05), tmp_path / "page")
    assert "whose head was trained on the contrast: +" in section.headlines[1].small


def test_maps_print_what_was_counted_and_mark_the_few():
    rows = pd.DataFrame(synthetic_records.with_drafts(synthetic_records.positions(prompts=12, length=30)))
    found = by_configuration(rows, "signal", "dual")
    axes = plots_signal.configuration_map(found, "signal", "dual").axes[0]
    assert sum(bool(text.get_text()) for text in axes.texts) == (found.grid.counts > 0).sum()
    assert len(axes.lines) == found.grid.few.sum() > 0
    assert axes.images[0].get_clim() == (-30, 30), "the paper's cut"
    shown = plots_signal.gain_map(cells(rows, "direct"), "top1", "direct")
    assert "direct draft (points" in " ".join(
        text.get_text() for text in shown.findobj(lambda a: hasattr(a, "get_text"))
    )


@pytest.mark.parametrize("module", ["sections.signal_error", "sections.signal_views", "position_views"])
def test_no_torch_is_needed(module):
    code = f"import sys; sys.modules['torch'] = None; import diagnostics.{module}"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_a_gain_of_nothing_has_no_sign():
    assert points({"estimate": -1e-9, "low": None, "high": None}, sign=True) == "0.0"
    assert np.isfinite(paper.ALIGNMENT_GAP["Qwen3", "MMLU"])
