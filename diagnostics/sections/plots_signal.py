"""Figures of the signal study: maps over signal and error, over configurations, and bars beside the paper's figures.

Every function takes counted numbers and returns a figure; colours and printing as in plots.py. No torch.
"""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from diagnostics.intervals import Interval
from diagnostics.paper import ERROR_ABOVE_2, SIGNAL_SHARES
from diagnostics.position_summary import BUCKETS, FEW, KINDS, Cells, Grid, bucket_labels
from diagnostics.position_views import Labelled, Realised
from diagnostics.sections.plots import FONT, error_bars, ink

SIGNAL_LABEL = r"signal $|\log p(x^*)/q(x^*)|$ (nats)"
ERROR_LABEL = r"drafter error KL$(e\,\|\,p)$ (nats)"
AMATEUR_ERROR_LABEL = r"amateur-side error KL$(f\,\|\,q)$ (nats)"
GAIN_LIMIT = 0.3  # the paper cuts its colour scale there
KIND_STYLES = {
    "oracle": ("#0072B2", "o", ""),
    "direct": ("#009E73", "D", "xx"),
    "dual": ("#CC79A7", "^", "++"),
    "stronger": ("#999999", "s", ".."),
}
SETTING_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#000000", "v"),
    ("#E69F00", "P"),
)
PAPER_MARK = {"marker": "D", "color": "#D55E00", "mec": "white", "ls": "none", "ms": 7}
EMPTY = "#e4e4e4"  # cells without any position


def signal_error_map(cells: Cells, signal_shares: np.ndarray, error_shares: np.ndarray) -> Figure:
    """Share of positions by signal and drafter error, with both marginals and the paper's beside them."""
    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 1.5), height_ratios=(1.3, 5))
    main = figure.add_subplot(grid[1, 0])
    share = 100 * cells.counts / cells.counts.sum()
    # light for few: most cells hold few positions, and a dark page prints badly
    colour_map = colormaps["YlGnBu"].with_extremes(bad=EMPTY)
    shown = np.where(cells.counts > 0, share, np.nan)
    image = main.imshow(shown, origin="lower", cmap=colour_map, aspect="auto", vmin=0)
    text = [[_share_text(share[y, x], cells.counts[y, x]) for x in range(BUCKETS)] for y in range(BUCKETS)]
    _write_cells(main, text, ink(image), dots=cells.few)
    _label_buckets(main)
    figure.colorbar(image, ax=main, location="bottom", shrink=0.7, pad=0.02, label="positions (% of all)")
    top = figure.add_subplot(grid[0, 0])
    places = np.arange(BUCKETS)
    top.bar(places, 100 * signal_shares, color="#0072B2", width=0.8, label="here")
    top.plot(places, 100 * np.array(SIGNAL_SHARES), "D", color="#D55E00", mec="white", label="paper (pooled)")
    # a number stands on its bar, or on the paper's mark where that sits on the bar's edge
    close = np.abs(signal_shares - SIGNAL_SHARES) < 0.1
    heights = np.where(close, np.maximum(signal_shares, SIGNAL_SHARES), signal_shares)
    _percent_bars(top, places, 100 * signal_shares, above=100 * heights)
    top.set(xlim=(-0.5, BUCKETS - 0.5), xticks=[], ylabel="% of positions")
    top.legend(frameon=False, fontsize=8)
    side = figure.add_subplot(grid[1, 1], sharey=main)
    side.barh(places, 100 * error_shares, color="#0072B2", height=0.8)
    for place, value in zip(places, 100 * error_shares, strict=True):
        side.text(value, place, f" {value:.1f}", va="center", fontsize=8)
    side.set(xlabel="% of positions", xlim=(0, 130 * max(error_shares)))
    side.tick_params(labelleft=False)
    above = 100 * error_shares[4:].sum()
    note = figure.add_subplot(grid[0, 1])
    note.axis("off")
    note.text(
        0, 0.5, f"error of 2 nats\nor more:\n{above:.1f}% here\n{100 * ERROR_ABOVE_2:.1f}% paper", va="center", **FONT
    )
    for axes in (top, side):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def gain_map(cells: Cells, what: str, draft: str = "oracle") -> Figure:
    """Gain of one kind of contrast-aligned draft per cell, in points; `what` is "top1" or "acceptance"."""
    mean, low, high = (getattr(cells, f"gain_{what}{end}") for end in ("", "_low", "_high"))
    label = {"top1": "gain in top-1 matches with the target", "acceptance": "gain in acceptance rate"}[what]
    figure = Figure(figsize=(5.9, 5.0), layout="constrained")
    axes = figure.add_subplot()
    _draw_gains(figure, axes, Grid(cells.counts, mean, low, high), f"{label},\n{KINDS[draft]} (points", what == "top1")
    _label_buckets(axes)
    return figure


def configuration_map(found: Labelled, x_label: str, draft: str) -> Figure:
    """dTop1 of one kind of draft by configuration (rows) and bucket (columns), colours cut where the paper cuts them
    [DCD, Figs. 6 and 7]."""
    figure = Figure(figsize=(8.2, 1.7 + 0.36 * len(found.labels)), layout="constrained")
    axes = figure.add_subplot()
    _draw_gains(figure, axes, found.grid, f"gain in top-1 matches,\n{KINDS[draft]} (points", True)
    axes.set_xticks(range(BUCKETS), bucket_labels(), rotation=30, ha="right", **FONT)
    axes.set_yticks(range(len(found.labels)), found.labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=x_label)
    return figure


def _draw_gains(figure: Figure, axes: Axes, grid: Grid, label: str, cut_there: bool) -> None:
    """A grid of gains in points with its colour scale, cut at the paper's limit, or at the largest gain if smaller."""
    shown = np.where(grid.counts > 0, grid.mean, np.nan)
    largest = float(np.nanmax(np.abs(shown)))
    limit = 100 * (GAIN_LIMIT if cut_there else min(GAIN_LIMIT, max(0.01, largest)))
    colour_map = colormaps["PuOr"].with_extremes(bad=EMPTY)
    image = axes.imshow(100 * shown, origin="lower", cmap=colour_map, aspect="auto", vmin=-limit, vmax=limit)
    text = [[_gain_text(*cell) for cell in zip(*row, strict=True)] for row in zip(grid.mean, grid.counts, strict=True)]
    _write_cells(axes, text, ink(image), dots=grid.few, bold=grid.sure)
    scale = ScalarMappable(Normalize(-limit, limit), colour_map)
    cut = ",\ncolours cut there" if 100 * largest > limit + 1e-9 else ""
    figure.colorbar(scale, ax=axes, extend="both" if cut else "neither").set_label(f"{label}{cut})", **FONT)


def headroom_bars(found: list[Realised]) -> Figure:
    """What aiming at the contrast could add at most, beside what each kind of draft really adds, per alpha: acceptance
    of sampled drafts on the left, greedy matches at T = 0 on the right."""
    kinds = list(dict.fromkeys(entry.kind for entry in found))
    alphas = list(dict.fromkeys(entry.alpha for entry in found))
    alphas = [alpha for alpha in alphas if alpha != "pooled"]
    by_place = {(entry.kind, entry.alpha): entry for entry in found}
    panels = {
        "sampled drafts: acceptance": ("ceiling: TV(p, π)", "headroom_tv", "gain_acceptance"),
        "greedy drafts at T = 0: matches": ("ceiling: flipped choices", "headroom_flip", "gain_top1"),
    }
    figure = Figure(figsize=(2.4 + 2.0 * len(alphas) + 0.4 * len(alphas) * len(kinds), 3.8), layout="constrained")
    for axes, (title, (ceiling, bound, gain)) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        bars = {ceiling: ("#E69F00", "//", kinds[-1], bound)}
        bars |= {KINDS[kind]: (KIND_STYLES[kind][0], KIND_STYLES[kind][2], kind, gain) for kind in kinds}
        width = 0.84 / len(bars)
        for index, (label, (colour, hatch, kind, name)) in enumerate(bars.items()):
            places = np.arange(len(alphas)) + (index - (len(bars) - 1) / 2) * width
            shown = [by_place.get((kind, alpha)) for alpha in alphas]
            points = [(place, getattr(one, name)) for place, one in zip(places, shown, strict=True) if one]
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": label}
            _bars(axes, points, width * 0.92, style)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(alphas)), [f"α = {alpha}" for alpha in alphas])
        axes.set_title(title, **FONT)
        axes.legend(frameon=False, fontsize=8)
        axes.margins(y=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("points per drafted token")
    return figure


def _bars(axes: Axes, points: list[tuple[float, Interval]], width: float, style: dict) -> None:
    """Bars in points with their intervals and numbers."""
    found = [interval.as_dict() for _, interval in points]
    places, values = [place for place, _ in points], [100 * entry["estimate"] for entry in found]
    axes.bar(places, values, width, yerr=error_bars(found, 100), capsize=2, **style)
    for place, value, entry in zip(places, values, found, strict=True):
        top = 100 * max(0.0, entry["estimate"] if entry["high"] is None else entry["high"])
        axes.text(place, top, _without_sign(f"{value:.1f}"), ha="center", va="bottom", fontsize=7)


def trend_lines(found: dict[str, Labelled], alphas: list[float], draft: str) -> Figure:
    """dTop1 per setting over the contrast strength and over the signal's buckets [DCD, Fig. 8]; hollow marks stand for
    fewer than 100 positions."""
    axes_of = {
        "alpha": ("contrast strength α", [f"{alpha:g}" for alpha in alphas]),
        "signal": (SIGNAL_LABEL, bucket_labels()),
    }
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    for axes, (name, (x_label, ticks)) in zip(figure.subplots(1, 2, sharey=True), axes_of.items(), strict=True):
        labelled = found[name]
        for index, label in enumerate(labelled.labels):
            colour, marker = SETTING_STYLES[index % len(SETTING_STYLES)]
            _line(axes, labelled.grid, index, 0.06 * (index - (len(labelled.labels) - 1) / 2), colour, marker, label)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(ticks)), ticks, rotation=30, ha="right", **FONT)
        axes.set_xlabel(x_label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"gain in top-1 matches,\n{KINDS[draft]} (points)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _line(axes: Axes, grid: Grid, row: int, shift: float, colour: str, marker: str, label: str) -> None:
    there = np.flatnonzero(grid.counts[row] > 0)
    mean, low, high = (100 * part[row][there] for part in (grid.mean, grid.low, grid.high))
    axes.plot(there + shift, mean, color=colour, lw=1.3, label=label, marker=marker, ms=6, zorder=3)
    known = np.isfinite(low)
    axes.vlines(there[known] + shift, low[known], high[known], color=colour, lw=1)
    few = grid.few[row][there]
    axes.plot(there[few] + shift, mean[few], color=colour, ls="none", marker=marker, ms=6, mfc="white", zorder=4)


def interval_bars(
    found: dict[str, Interval], x_label: str, scale: float, colour: str, paper: tuple[float, ...], paper_label: str
) -> Figure:
    """One bar with its interval for each name, and the paper's figures as diamonds in a row of their own."""
    figure = Figure(figsize=(5.6, 1.6 + 0.36 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    entries = [interval.as_dict() for interval in found.values()]
    values = [scale * entry["estimate"] for entry in entries]
    axes.barh(range(len(found)), values, xerr=error_bars(entries, scale), color=colour, height=0.7, capsize=3)
    for place, (value, entry) in enumerate(zip(values, entries, strict=True)):
        end = max(value, 0.0) if entry["high"] is None else max(0.0, scale * entry["high"])
        axes.annotate(
            _without_sign(f"{value:.2f}"), (end, place), (4, 0), textcoords="offset points", va="center", **FONT
        )
    axes.plot([scale * value for value in paper], [len(found)] * len(paper), label=paper_label, **PAPER_MARK)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(found) + 1), [*found, "paper"], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(x_label)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _gain_text(value: float, count: int) -> str:
    """A value in points; nothing where there is no position, "0" where rounding leaves only a sign."""
    text = f"{100 * value:+.1f}" if count else ""
    return "0" if text in ("+0.0", "-0.0") else text


def _share_text(share: float, count: int) -> str:
    return f"{share:.1f}\nn={count}" if count else ""


def _label_buckets(axes: Axes) -> None:
    axes.set_xticks(range(BUCKETS), bucket_labels(), rotation=30, ha="right", **FONT)
    axes.set_yticks(range(BUCKETS), bucket_labels(), **FONT)
    axes.set(xlabel=SIGNAL_LABEL, ylabel=ERROR_LABEL)


def _percent_bars(axes: Axes, places: np.ndarray, values: np.ndarray, above: np.ndarray) -> None:
    """Print each value clear of both its bar and the marker on it."""
    for place, value, height in zip(places, values, above, strict=True):
        axes.annotate(f"{value:.1f}", (place, height), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.3)


def _write_cells(axes: Axes, text: list, colours: np.ndarray, dots: np.ndarray, bold: np.ndarray | None = None) -> None:
    """Print a value in every cell in its colour, bold where `bold`; a dot marks cells with few positions."""
    for y, x in np.ndindex(dots.shape):
        weight = "bold" if bold is not None and bold[y, x] else "normal"
        colour = colours[y, x]
        axes.text(x, y, text[y][x], ha="center", va="center", color=colour, weight=weight, **FONT)
        if dots[y, x]:
            axes.plot(x + 0.38, y + 0.34, "o", color=colour, ms=4)
    axes.set_title(f"dot: fewer than {FEW} positions; grey: none", fontsize=8, loc="right")


def _without_sign(text: str) -> str:
    """A zero that rounding has left a sign loses it."""
    return "0.0" if text == "-0.0" else text
