"""Figures are drawn from binned records without global state; what they print is what was counted."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import synthetic_records
from matplotlib.container import ErrorbarContainer

from diagnostics.position_summary import cells, marginals
from diagnostics.position_views import realised
from diagnostics.round_summary import summarise_rounds
from diagnostics.sections import plots, plots_signal


@pytest.fixture(scope="module")
def rows():
    frame = pd.DataFrame(synthetic_records.positions(prompts=12, length=30))
    return frame.assign(amateur_error=np.nan)


@pytest.fixture(scope="module")
def entries():
    frame = pd.DataFrame(synthetic_records.rounds(prompts=6, repeats=1))
    return [entry | {"predicted_speedup": 1.5} for entry in summarise_rounds(frame)]


def printed(figure):
    """All text in a figure."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_the_heat_map_prints_every_count_and_marks_the_few(rows):
    found = cells(rows)
    figure = plots_signal.signal_error_map(found, *marginals(rows))
    shown = [int(text.split("n=")[1]) for text in printed(figure) if "n=" in text]
    assert sum(shown) == len(rows) and len(shown) == (found.counts > 0).sum()
    main = next(axes for axes in figure.axes if axes.images)
    assert len(main.lines) == found.few.sum()
    labels = " ".join(printed(figure))
    assert "(nats)" in labels and "% of positions" in labels and "paper" in labels


@pytest.mark.parametrize("kind", ["top1", "acceptance"])
def test_gain_maps_leave_empty_cells_empty(rows, kind):
    found = cells(rows[rows["signal"] < 1])
    figure = plots_signal.gain_map(found, kind)
    main = next(axes for axes in figure.axes if axes.images)
    values = [text.get_text() for text in main.texts]
    assert sum(bool(value) for value in values) == (found.counts > 0).sum()
    assert np.isnan(main.images[0].get_array().filled(np.nan)[:, 3:]).all()  # nothing above 1 nat
    assert "points" in " ".join(printed(figure))


def test_speedup_bars_end_where_the_estimate_is(entries):
    figure = plots.speedup_bars(entries)
    shown = [entry for entry in entries if entry["method"] != "cd"]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([entry["speedup"]["estimate"] for entry in shown])
    assert "speed-up over vanilla CD" in figure.axes[0].get_xlabel()


def test_round_times_add_up(entries):
    figure = plots.round_time_bars(entries)
    parts = ("draft_ms", "expert_ms", "amateur_ms", "rest_ms")
    ends = np.array([[bar.get_x() + bar.get_width() for bar in group] for group in figure.axes[0].containers])
    assert ends[-1] == pytest.approx([sum(entry[part] for part in parts) for entry in entries])


def test_every_figure_is_saved_whole(rows, entries, tmp_path):
    figures = {
        "headroom": plots_signal.headroom_bars(realised(rows)),
        "acceptance": plots.acceptance_lines(entries),
        "curve": plots.curves({"training": ([1, 2], [3.0, 2.0]), "held-out": ([2], [2.5])}, "step", "loss (nats)"),
    }
    for name, figure in figures.items():
        path = plots.save_png(figure, tmp_path / f"{name}.png", dpi=60)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["acceptance.png", "curve.png", "headroom.png"]


def test_one_prompt_is_drawn_without_intervals():
    frame = pd.DataFrame(synthetic_records.positions(prompts=1, length=40)).assign(amateur_error=np.nan)
    one = cells(frame)
    assert not [text for text in plots_signal.gain_map(one, "top1").axes[0].texts if text.get_weight() == "bold"]
    rounds = pd.DataFrame(synthetic_records.rounds(prompts=1, repeats=1))
    many = pd.DataFrame(synthetic_records.positions(prompts=6, length=40)).assign(amateur_error=np.nan)
    drawn = {
        "headroom": plots_signal.headroom_bars(realised(frame)),
        "speed": plots.speedup_bars(summarise_rounds(rounds)),
    }
    for name, figure in drawn.items():
        axes = figure.axes[0]
        assert len(axes.patches) > 1, f"{name}: the bars themselves are drawn"
        assert not interval_lines(axes), name
    assert interval_lines(plots_signal.headroom_bars(realised(many)).axes[0]), "several prompts have them"


def interval_lines(axes) -> list:
    """The error bars of an axes."""
    return [one for one in axes.containers if isinstance(one, ErrorbarContainer)]


def test_series_differ_by_more_than_colour():
    colours, markers, hatches = zip(*plots.METHOD_STYLES.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(colours)
    assert plots.method_style("a method of tomorrow")[0] not in colours


def test_lines_of_one_figure_can_be_told_apart():
    """Whatever they are called; only a line and its held-out twin look alike, but for dashes."""
    line = ([1, 2], [3.0, 2.0])
    for names in (["alpha 0", "alpha 0.3"], ["training, step 0", "training, step 1"], ["expert", "amateur"]):
        lines = plots.curves({name: line for name in names}, "step", "loss").axes[0].lines
        assert len({(one.get_color(), one.get_marker()) for one in lines}) == 2, names
    lines = plots.curves({"training, step 1": line, "held-out, step 1": line}, "step", "loss").axes[0].lines
    assert lines[0].get_color() == lines[1].get_color() and lines[0].get_linestyle() != lines[1].get_linestyle()


def test_neither_torch_nor_pyplot_is_imported():
    code = "import sys, diagnostics.report; sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
