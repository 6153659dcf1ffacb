"""Views of the signal study for the report: gain maps per kind of draft, maps over configurations, trends, the stronger
proposer, the alignment gap, and headroom beside what was realised. No torch."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from diagnostics import paper
from diagnostics.position_summary import KINDS, cells, having, kinds_in, marginals
from diagnostics.position_views import (
    Realised,
    alignment,
    alphas_of,
    by_configuration,
    configurations,
    per_configuration,
    trends,
)
from diagnostics.sections import plots_signal
from diagnostics.sections.plots import save_png
from diagnostics.sections.runs import Picture, Table
from diagnostics.wording import count, percent, plain, points

MAP_CAPTION = (
    "Every cell is a share of the positions and their number n. Signal: how far expert and amateur disagree on the "
    "token that the contrastive target prefers. Error: how far the drafter is from the expert. Bars are the marginals, "
    "diamonds the paper's, pooled over its 24 configurations. In the paper, gains from aiming at the contrast sit to "
    "the lower right, where the signal is large and the drafter good."
)
DRAFTS = {
    "direct": "the draft comes from a head trained on the contrast",
    "dual": "the same draft is corrected by a drafter aligned with the amateur",
    "oracle": "the same draft is corrected by the true amateur",
    "stronger": "a full model drafts in the head's place and is corrected by the true amateur, against itself without",
}
HEADROOM_CAPTION = (
    "Leftmost bars: at most so much can be won by aiming at the contrast instead of the expert, at equal error. "
    "Others: what each kind of draft really wins over the expert-aligned one. Lines are 95% intervals over prompts."
)
PAPER_GAPS = "; ".join(f"{pair}, {data} {gap:.3f}" for (pair, data), gap in paper.ALIGNMENT_GAP.items())
PAPER_STRONGER = ", ".join(f"{100 * value:+.2f}" for value in paper.STRONGER_TOP1)


def pictures(rows: pd.DataFrame, bounds: list[Realised], page: Path, name: str) -> list[Picture]:
    """Every figure of one study, saved beside the page."""
    found = [("signal-error", *_error_map(rows))]
    for kind in kinds_in(rows):
        found += _gain_maps(rows, kind)
    found.append(
        ("headroom", plots_signal.headroom_bars(bounds), HEADROOM_CAPTION, "bars of headroom and realised gain", True)
    )
    best = next(kind for kind in KINDS if kind in kinds_in(rows))
    if len(configurations(rows)[0]) > 1:
        found += _configuration_maps(rows)
        lines = trends(rows, best)
        caption = (
            f"Gain in top-1 matches of the {KINDS[best]} by contrast strength and by signal, a line for each pair and "
            "data set. Lines are 95% intervals over prompts; hollow marks stand for fewer than 100 positions."
        )
        figure = plots_signal.trend_lines(lines, alphas_of(having(rows, best)), best)
        found.append(("trends", figure, caption, "lines of the gain by alpha and by signal", True))
    found.append(("alignment", *_alignment_bars(rows)))
    if "stronger" in kinds_in(rows):
        found.append(("stronger", *_stronger_bars(rows)))
    return [
        Picture(save_png(figure, page / f"{name}-{part}.png"), caption, alt, wide=wide)
        for part, figure, caption, alt, wide in found
    ]


def _error_map(rows: pd.DataFrame) -> tuple[Figure, str, str, bool]:
    figure = plots_signal.signal_error_map(cells(rows), *marginals(rows))
    return figure, MAP_CAPTION, "heat map of signal and drafter error", True


def _gain_maps(rows: pd.DataFrame, kind: str) -> list[tuple]:
    """Both gains of one kind of draft over signal and error."""
    binned = cells(rows, kind)
    top1 = (
        f"{KINDS[kind].capitalize()}: gain in top-1 matches with the target if {DRAFTS[kind]}. Bold: the 95% interval "
        "over prompts excludes 0, cell by cell: one cell in twenty would by chance."
    )
    acceptance = (
        f"{KINDS[kind].capitalize()}: the same for the acceptance rate of sampled drafts, 1 - TV(draft, target)."
    )
    alt = f"heat map of the {KINDS[kind]}'s gain in"
    return [
        (f"gain-top1-{kind}", plots_signal.gain_map(binned, "top1", kind), top1, f"{alt} top-1 matches", False),
        (
            f"gain-acceptance-{kind}",
            plots_signal.gain_map(binned, "acceptance", kind),
            acceptance,
            f"{alt} acceptance",
            False,
        ),
    ]


def _configuration_maps(rows: pd.DataFrame) -> list[tuple]:
    """dTop1 by signal and, where there is a drafter aligned with the amateur, by its error; a row a configuration."""
    found = []
    for column, label, words in (
        ("signal", plots_signal.SIGNAL_LABEL, "signal"),
        ("amateur_error", plots_signal.AMATEUR_ERROR_LABEL, "the amateur-side drafter's error"),
    ):
        for kind in kinds_in(rows) if column == "signal" else [kind for kind in kinds_in(rows) if kind == "dual"]:
            labelled = by_configuration(rows, column, kind)
            caption = (
                f"Gain in top-1 matches of the {KINDS[kind]} by {words}, a row for each pair, data set and contrast "
                "strength. Colours are cut at ±30 points, as in the paper; bold: the interval excludes 0, "
                "cell by cell: one in twenty would by chance."
            )
            figure = plots_signal.configuration_map(labelled, label, kind)
            found.append((f"{column.replace('_', '-')}-{kind}", figure, caption, f"map of the gain by {words}", True))
    return found


def _alignment_bars(rows: pd.DataFrame) -> tuple[Figure, str, str, bool]:
    gaps = {name: gap for name, (gap, _) in alignment(rows).items()}
    caption = (
        "Alignment gap E_e[log p/q] - E_q[log p/q]: above 0 the drafter moves away from the amateur as the contrast "
        f"grows, like the target [DCD, Def. B.2]. Paper: {PAPER_GAPS}."
    )
    values = tuple(paper.ALIGNMENT_GAP.values())
    figure = plots_signal.interval_bars(
        gaps, "mean alignment gap (nats)", 1.0, "#56B4E9", values, "paper, four settings"
    )
    return figure, caption, "bars of the alignment gap", False


def _stronger_bars(rows: pd.DataFrame) -> tuple[Figure, str, str, bool]:
    found = per_configuration(rows)
    gains = {name: entry["top1"]["stronger"] for name, entry in found.items() if "stronger" in entry["top1"]}
    caption = (
        "A full model in the head's place, corrected by the true amateur: gain in top-1 matches with the target over "
        f"the same model without the correction. Paper, a 3B model: {PAPER_STRONGER} points."
    )
    figure = plots_signal.interval_bars(
        gains, "gain in top-1 matches (points)", 100.0, "#999999", paper.STRONGER_TOP1, "paper, four settings"
    )
    return figure, caption, "bars of the stronger proposer's gain", False


def view_tables(rows: pd.DataFrame, bounds: list[Realised]) -> list[Table]:
    """Headroom and what was realised, gains per configuration, and the alignment gap."""
    return [
        realised_table(bounds),
        configuration_table(per_configuration(rows)),
        alignment_table(alignment(rows)),
    ]


def realised_table(bounds: list[Realised]) -> Table:
    """The ceiling next to each gain, and the share of it that the draft realises."""
    table = [
        [
            KINDS[entry.kind],
            entry.alpha,
            count(entry.headroom_tv.prompts),
            count(entry.positions),
            points(entry.headroom_tv.as_dict(), 2),
            points(entry.gain_acceptance.as_dict(), 2, sign=True),
            percent(entry.share_acceptance.as_dict(), 0) if entry.share_acceptance else "no headroom",
            points(entry.headroom_flip.as_dict(), 2),
            points(entry.gain_top1.as_dict(), 2, sign=True),
            percent(entry.share_top1.as_dict(), 0) if entry.share_top1 else "no headroom",
        ]
        for entry in bounds
    ]
    headers = ["draft", "alpha", "prompts", "positions", "headroom TV(p, π)", "gain in acceptance", "realised"]
    headers += ["flipped choices", "dTop1", "realised (greedy)"]
    return Table("Headroom next to each gain, in points, and how much of it was realised", headers, table)


def configuration_table(found: dict[str, dict]) -> Table:
    """dTop1 and d acceptance, a row for each configuration and kind of draft."""
    table = []
    for name, entry in found.items():
        for kind in entry["top1"]:
            gains = [points(entry[what][kind].as_dict(), 2, sign=True) for what in ("top1", "acceptance")]
            prompts = count(entry["top1"][kind].prompts)
            table.append([name, prompts, count(entry["positions"]), KINDS[kind], *gains])
    if any("stronger" in entry["top1"] for entry in found.values()):
        table.append(["paper, 3B proposer, four settings", "", "", KINDS["stronger"], PAPER_STRONGER, ""])
    headers = ["configuration", "prompts", "positions", "draft", "dTop1", "dAcc"]
    return Table("Gains in points by pair, data set and contrast strength", headers, table, folded=True)


def alignment_table(found: dict) -> Table:
    """The mean alignment gap, and where it is positive."""
    table = [
        [name, count(gap.prompts), plain(gap.as_dict(), 3), percent(share.as_dict())]
        for name, (gap, share) in found.items()
    ]
    table += [[f"paper: {pair}, {data}", "", f"{gap:.3f}", ""] for (pair, data), gap in paper.ALIGNMENT_GAP.items()]
    return Table(
        "Alignment gap E_e[log p/q] - E_q[log p/q]", ["", "prompts", "mean gap (nats)", "positions above 0"], table
    )
