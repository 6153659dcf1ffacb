"""The cross-alpha section says the verdict that the records call for, and shows every number in text."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import synthetic_records
from matplotlib import colormaps
from matplotlib.figure import Figure
from synthetic_runs import matrix_run, trained

import diagnostics.report as report
from diagnostics import paper
from diagnostics.cross_alpha_summary import summarise_replays
from diagnostics.records import read_records, write_records
from diagnostics.sections import plots_matrix
from diagnostics.sections.cross_alpha import across_section, cross_alpha_section, headlines, matrix_table, paper_span
from diagnostics.sections.runs import Run, find_runs


def section_of(tmp_path, decoded=None, **options):
    folder = tmp_path / "runs" / "matrix"
    matrix_run(folder, decoded, **options)
    run = Run(folder, "cross_alpha", json.loads((folder / "metrics.json").read_text()), {})
    (tmp_path / "page").mkdir(exist_ok=True)
    return cross_alpha_section(run, tmp_path / "page")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"effect": 0.06}, "A gain from contrast-aware training at alpha 0.3: L changes by +"),
        ({"effect": 0.0, "prompts": 200, "noise": 0.002}, "No gain from contrast-aware training at alpha 0.3"),
        ({"effect": -0.06}, "so it hurts"),
        ({"effect": -0.06, "seeds": (0,)}, "so it hurts"),
        ({"effect": 0.0, "prompts": 30, "noise": 0.2}, "Undecided for contrast-aware training at alpha 0.3"),
    ],
    ids=["helps", "no gain", "hurts", "one run", "undecided"],
)
def test_the_page_opens_with_the_verdict(options, words):
    rows = pd.DataFrame(synthetic_records.replays(**({"prompts": 60} | options)))
    told = headlines(summarise_replays(rows, 5))
    assert [headline.topic[-3:] for headline in told] == ["0.1", "0.3", "0.5"]
    assert words in told[1].sentence
    assert "at equal approximation error, aiming at the contrast could add at most" in told[1].sentence
    assert "Paper: L changes by " in told[1].small
    assert ("one training run each, so other runs may differ" in told[1].small) == (options.get("seeds") == (0,))


def test_the_section_is_whole(tmp_path):
    decoded = {"checked": 40, "equal": 39, "near-tie": 1, "different": 0}
    section = section_of(tmp_path, decoded)
    assert section.title == "Should the drafter know about the contrast? big / small, on held-out"
    assert "40 of 40 answers are equal to the replay round by round (1 up to a near-tie)" in section.text[0]
    assert "correction for the 3 comparisons of training on the alpha that is decoded with" in section.text[0]
    assert "over prompts and training seeds" in section.text[0]
    assert "each of them, train-alpha 0 too, reads both models. What reading the amateur" in section.text[0]
    assert len(section.pictures) == 4 and all(picture.path.stat().st_size > 5000 for picture in section.pictures)
    assert section.records == "../runs/matrix/replays.parquet"
    summary, matrix, cells = section.tables
    assert [row[0] for row in summary.rows] == ["here", *(f"paper, {name}" for name in paper.CROSS_ALPHA_SUMMARY)]
    assert summary.rows[1][1:] == ["0.1", "0.015", "0.77%", "0 of 4"]
    assert len(matrix.rows) == 5 and matrix.rows[-1][0].startswith("official, train-alpha 0")
    assert all(re.fullmatch(r"\d\.\d{3}( \(.+\))?", cell) for row in matrix.rows for cell in row[1:5])
    assert len(cells.rows) == 12 and {w for row in cells.rows for w in row[-2:]} <= {
        "helps",
        "no gain",
        "hurts",
        "undecided",
    }


def test_the_papers_change_is_that_of_its_matrices():
    """Qwen3/GSM8K's 1.664 against 1.691, and Llama-3/GSM8K's 1.988 against 1.968."""
    assert paper_span(0.1) == "-1.6% to +1.0%"
    assert paper_span(0.2) == paper_span(0.0) == ""


def printed(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def found_of(tmp_path, **options):
    columns = synthetic_records.replays(**({"prompts": 40} | options))
    write_records(tmp_path / "replays.parquet", "replays", columns, {})
    return summarise_replays(read_records(tmp_path / "replays.parquet", "replays").rows, 5)


def test_the_heat_map_prints_every_length_and_frames_what_is_judged(tmp_path):
    found = found_of(tmp_path, effect=-0.05)
    figure = plots_matrix.matrix_map(found)
    texts = printed(figure)
    for row, lengths in enumerate(found["lengths"]):
        for column, length in enumerate(lengths):
            share = 100 * (length / found["lengths"][0][column] - 1)
            wanted = f"{length:.3f}" + (f"\n{share:+.1f}%" if row else "")
            assert wanted in texts
    assert sum("hurts" in text for text in texts) == 3
    main = next(axes for axes in figure.axes if axes.images)
    assert len(main.lines) == 3, "one frame for every verdict"
    weights = [text.get_weight() for text in main.texts]
    assert weights.count("bold") == sum(cell["verdict"] == "hurts" for cell in found["cells"]) == 12


def test_every_control_has_one_row_that_says_what_it_is():
    rows = pd.DataFrame(synthetic_records.replays(prompts=9))
    first = rows[(rows["group"] == "family") & (rows["train_alpha"] == 0) & (rows["seed"] == 0)]
    rows = pd.concat([rows, first.assign(group="plain", input="expert_only")]).sort_values("infer_alpha", kind="stable")
    table = matrix_table(summarise_replays(rows, 5))
    assert [row[0] for row in table.rows[4:]] == [
        "official, train-alpha 0 (reads the expert only), not matched: other training",
        "plain, train-alpha 0 (reads the expert only), seed 0",
    ]
    assert all(all(row[1:5]) for row in table.rows), "a number at every infer-alpha"


def test_the_papers_numbers_are_labelled_as_the_papers():
    texts = printed(plots_matrix.paper_matrices())
    for name, lengths in paper.CROSS_ALPHA.items():
        assert f"paper: {name}" in texts
        assert all(any(text.startswith(f"{length:.3f}") for text in texts) for row in lengths for length in row)


def test_intervals_stand_where_they_were_found(tmp_path):
    found = found_of(tmp_path)
    axes = plots_matrix.change_intervals(found).axes[0]
    shown = np.concatenate([bar.lines[0].get_ydata() for bar in axes.containers])
    wanted = sorted(100 * cell["change"]["estimate"] for cell in found["cells"])
    assert sorted(shown) == pytest.approx(wanted)
    markers = {bar.lines[0].get_marker() for bar in axes.containers}
    assert len(markers) == len(axes.containers), "series differ by more than colour"


def test_one_prompt_and_a_control_never_accepted_are_drawn_too(tmp_path):
    assert not plots_matrix.change_intervals(found_of(tmp_path, prompts=1)).axes[0].collections
    columns = synthetic_records.replays(prompts=3)
    columns["accepted"] = [0] * len(columns["accepted"])
    write_records(tmp_path / "replays.parquet", "replays", columns, {})
    found = summarise_replays(read_records(tmp_path / "replays.parquet", "replays").rows, 5)
    for draw in (plots_matrix.matrix_map, plots_matrix.change_intervals):
        assert draw(found).axes
    assert plots_matrix.ceiling_bars(found["verdicts"]).axes


def test_several_matrices_stand_side_by_side(tmp_path):
    """Heads of two sizes: the small one gains, the large one loses, and one table says so after the first of them. The
    page opens with the first one's verdict at length, and the other's in a line."""
    for name, effect in (("small", 0.06), ("large", -0.06)):
        matrix_run(tmp_path / "runs" / name, effect=effect, prompts=30, seeds=(0,), infer_alphas=(0.0, 0.3))
    assert report.main([f"--records={tmp_path / 'runs'}", f"--output={tmp_path / 'page'}"]) == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles[1] == "Contrast-aware training in 2 runs, side by side" and len(titles) == 3
    assert titles[0].endswith("(large)") and titles[2].endswith("(small)")
    topics, said = (re.findall(f"<{tag}>(.*?)(?:<br>.*?)?</{tag}>", page) for tag in ("dt", "dd"))
    assert topics == ["Contrast-aware training, alpha 0.3", "Contrast-aware training, other runs"]
    assert said[0].startswith("A loss from") and re.match(
        r"small: helps at alpha 0.3 \(L \+.*one training run", said[1]
    )
    table = re.search("side by side</h2>.*?<tbody>(.*?)</tbody>", page, flags=re.S)[1]
    cells = [re.findall("<td>(.*?)</td>", row) for row in table.split("</tr>")[:2]]
    assert [(row[0], row[1], row[-2]) for row in cells] == [("large", "0.3", "hurts"), ("small", "0.3", "helps")]
    low, high = re.search(r"\[\+(\S+), \+(\S+)\]", cells[1][-1]).groups()
    assert cells[0][-1] == "" and float(low) < 12 < float(high), "they differ, by what was put in"
    assert page.count("The paper&#39;s matrices") == 1, "the paper's numbers are the same for both"
    assert len(list((tmp_path / "page").glob("*.png"))) == page.count("data:image/png") == 7


def test_every_pair_has_a_verdict_at_length(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name
        matrix_run(folder, prompts=30, seeds=(0,), infer_alphas=(0.0, 0.3))
        rows = read_records(folder / "replays.parquet", "replays").rows.assign(pair=name)
        write_records(folder / "replays.parquet", "replays", rows.to_dict("list"), {})
    assert report.main([f"--records={tmp_path / 'runs'}", f"--output={tmp_path / 'page'}"]) == 0
    topics = re.findall("<dt>(.*?)</dt>", (tmp_path / "page" / "index.html").read_text(encoding="utf-8"))
    assert topics == [f"Contrast-aware training, alpha 0.3, {name}" for name in ("one", "two")]
    # a further run of the second pair: after both, and with its pair
    matrix_run(tmp_path / "runs" / "zwei", prompts=25, seeds=(0,), infer_alphas=(0.0, 0.3), effect=-0.06)
    rows = read_records(tmp_path / "runs" / "zwei" / "replays.parquet", "replays").rows.assign(pair="two")
    write_records(tmp_path / "runs" / "zwei" / "replays.parquet", "replays", rows.to_dict("list"), {})
    assert report.main([f"--records={tmp_path / 'runs'}", f"--output={tmp_path / 'page'}"]) == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert re.findall("<dt>(.*?)</dt>", page)[-1].startswith("Contrast-aware training, other runs")
    assert re.search(r"<dd>zwei: hurts at alpha 0.3 .*, of two, on held-out", page)


def test_print_is_legible_on_every_colour():
    """Of numbers on cells from the greatest loss to the greatest gain: a contrast of 3, as WCAG asks of large print."""
    losses = np.linspace(-0.1, 0.1, 21)
    lengths = np.vstack([np.ones(21), 1 + losses])
    axes = Figure().add_subplot()
    plots_matrix._heat(axes, lengths, (0, 0.3), range(21), 10.0, np.zeros(lengths.shape, dtype=bool))
    for text, share in zip(axes.texts[21:], losses, strict=True):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colormaps["PuOr"](0.5 + 5 * share)
        ]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05
        contrast = light / 0.05 if text.get_color() == "black" else 1.05 / light
        assert contrast > 3, f"{share:+.0%} in {text.get_color()}: {contrast:.1f}"


@pytest.mark.parametrize(
    "other, told", [({"tokens": 300_024}, "300,024 tokens"), ({"blocks": 2}, "2 blocks"), ({}, "")]
)
def test_what_runs_differ_in_has_a_table_of_its_own(tmp_path, other, told):
    for index, more in enumerate(({}, other)):
        heads = trained(**more)
        matrix_run(tmp_path / str(index), heads=heads, prompts=20 + index, seeds=(0,), infer_alphas=(0.0, 0.3))
    runs, _ = find_runs([str(tmp_path)])
    tables = across_section(runs, tmp_path / "page").tables
    assert len(tables) == (2 if told else 1)
    assert not told or [row[0] for row in tables[1].rows] == ["0", "1"] and told in tables[1].rows[1][1]
