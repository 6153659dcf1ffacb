"""Figures drawn from binned records. Every function takes numbers that are already counted and returns a figure.

Colours are Okabe and Ito's for series, YlGnBu for amounts and PuOr for gains: all safe for colour-blind readers.
Nothing is said by colour alone (values are printed, series differ in marker or hatch too), so the figures survive a
grey printer. No global state: figures are made without pyplot, and no torch is needed.
"""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dcd_core.files import atomic_path
from diagnostics.forms import split_label
from diagnostics.paper import ERROR_ABOVE_2, SIGNAL_SHARES
from diagnostics.position_summary import BUCKETS, FEW, Cells, bucket_labels

SIGNAL_LABEL = r"signal $|\log p(x^*)/q(x^*)|$ (nats)"
ERROR_LABEL = r"drafter error KL$(e\,\|\,p)$ (nats)"
GAIN_LIMIT = 0.3  # the paper cuts its colour scale there
METHOD_STYLES = {
    "ar": ("#999999", "s", ""),
    "cd": ("#000000", "X", ""),
    "dcd_lm": ("#F0E442", "*", "oo"),
    "dcd_hybrid": ("#D55E00", "p", "++"),
    "expert_sd": ("#56B4E9", "v", "//"),
    "scd": ("#E69F00", "^", "\\\\"),
    "dcd_ngram": ("#009E73", "D", ".."),
    "dcd_eagle3": ("#0072B2", "o", ""),
    "dcd_deferred": ("#CC79A7", "P", "xx"),
    # beyond Okabe and Ito's eight: Tol's muted ones
    "cos": ("#882255", "<", "||"),
    "cross_alpha": ("#332288", ">", "OO"),
    "dual": ("#117733", "d", "**"),
}
_SPARE_STYLE = ("#666666", "h", "--")
_DASHES = ("-", "--", ":", "-.")
PART_STYLES = {
    "draft_ms": ("drafting", "#0072B2", ""),
    "expert_ms": ("expert pass", "#E69F00", "//"),
    "amateur_ms": ("amateur pass", "#009E73", ".."),
    "rest_ms": ("everything else", "#BBBBBB", ""),
}
_FONT = {"fontsize": 9}
_EMPTY = "#e4e4e4"  # cells without any position


def save_png(figure: Figure, path: Path | str, dpi: int = 170) -> Path:
    """Write one figure atomically as PNG."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png", facecolor="white")
    return Path(path)


def method_style(method: str) -> tuple[str, str, str]:
    """Colour, marker and hatch of a method, the same in every figure and for all its forms."""
    return METHOD_STYLES.get(split_label(method)[0], _SPARE_STYLE)


def signal_error_map(cells: Cells, signal_shares: np.ndarray, error_shares: np.ndarray) -> Figure:
    """Share of positions by signal and drafter error, with both marginals and the paper's beside them."""
    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 1.5), height_ratios=(1.3, 5))
    main = figure.add_subplot(grid[1, 0])
    share = 100 * cells.counts / cells.counts.sum()
    # light for few: most cells hold few positions, and a dark page prints badly
    colour_map = colormaps["YlGnBu"].with_extremes(bad=_EMPTY)
    shown = np.where(cells.counts > 0, share, np.nan)
    colours = main.imshow(shown, origin="lower", cmap=colour_map, aspect="auto", vmin=0)
    text = [[_share_text(share[y, x], cells.counts[y, x]) for x in range(BUCKETS)] for y in range(BUCKETS)]
    _write_cells(main, text, light=share > 0.55 * share.max(), dots=cells.few)
    _label_buckets(main)
    figure.colorbar(colours, ax=main, location="bottom", shrink=0.7, pad=0.02, label="positions (% of all)")
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
        0, 0.5, f"error of 2 nats\nor more:\n{above:.1f}% here\n{100 * ERROR_ABOVE_2:.1f}% paper", va="center", **_FONT
    )
    for axes in (top, side):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def gain_map(cells: Cells, kind: str) -> Figure:
    """Gain of the contrast-aligned oracle draft per cell, in points; `kind` is "top1" or "acceptance"."""
    mean, low, high = (getattr(cells, f"gain_{kind}{end}") for end in ("", "_low", "_high"))
    label = {"top1": "gain in top-1 matches with the target", "acceptance": "gain in acceptance rate"}[kind]
    figure = Figure(figsize=(7.0, 5.6), layout="constrained")
    axes = figure.add_subplot()
    shown = np.where(cells.counts > 0, mean, np.nan)
    largest = float(np.nanmax(np.abs(shown)))
    limit = 100 * (GAIN_LIMIT if kind == "top1" else min(GAIN_LIMIT, max(0.01, largest)))
    colour_map = colormaps["PuOr"].with_extremes(bad=_EMPTY)
    axes.imshow(100 * shown, origin="lower", cmap=colour_map, aspect="auto", vmin=-limit, vmax=limit)
    sure = (low > 0) | (high < 0)
    text = [[_gain_text(mean[y, x], cells.counts[y, x]) for x in range(BUCKETS)] for y in range(BUCKETS)]
    _write_cells(axes, text, light=np.abs(100 * shown) > 0.7 * limit, dots=cells.few, bold=sure)
    _label_buckets(axes)
    scale = ScalarMappable(Normalize(-limit, limit), colour_map)
    cut = ", colours cut there" if 100 * largest > limit + 1e-9 else ""
    figure.colorbar(scale, ax=axes, label=f"{label} (points{cut})", extend="both" if cut else "neither")
    return figure


def headroom_bars(by_alpha: dict[str, dict]) -> Figure:
    """What aiming at the contrast could add at most, beside what the oracle draft really adds, per alpha."""
    kinds = {
        "mean_headroom_tv": ("ceiling, sampled drafts: TV(p, π)", "#E69F00", "//"),
        "mean_headroom_flip": ("ceiling, greedy at T = 0: share of flipped choices", "#56B4E9", ".."),
        "gain_acceptance": ("oracle draft's gain, sampled drafts", "#0072B2", ""),
        "gain_top1": ("oracle draft's gain, greedy at T = 0", "#009E73", "xx"),
    }
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    alphas = [alpha for alpha in by_alpha if alpha != "pooled"]
    width = 0.8 / len(kinds)
    for index, (name, (label, colour, hatch)) in enumerate(kinds.items()):
        places = np.arange(len(alphas)) + (index - (len(kinds) - 1) / 2) * width
        found = [by_alpha[alpha][name] for alpha in alphas]
        values = np.array([100 * entry["estimate"] for entry in found])
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": label}
        axes.bar(places, values, width * 0.92, yerr=_error_bars(found, 100), capsize=2, **style)
        tops = [100 * max(0.0, entry["high"] or entry["estimate"]) for entry in found]
        for place, value, top in zip(places, values, tops, strict=True):
            axes.text(place, top, _without_sign(f"{value:.1f}"), ha="center", va="bottom", fontsize=8)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(alphas)), [f"α = {alpha}" for alpha in alphas])
    axes.set_ylabel("points per drafted token")
    axes.legend(frameon=False, fontsize=8)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def speedup_bars(entries: list[dict]) -> Figure:
    """Speed-up over vanilla CD with its interval; a diamond marks the cost model's prediction where there is one."""
    entries = [entry for entry in entries if "speedup" in entry and entry["method"] != "cd"]
    figure = Figure(figsize=(7.2, 0.9 + 0.34 * max(1, len(entries))), layout="constrained")
    axes = figure.add_subplot()
    for place, entry in enumerate(entries):
        colour, _, hatch = method_style(entry["method"])
        found = entry["speedup"]
        bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "height": 0.72, "capsize": 3}
        axes.barh(place, found["estimate"], xerr=_error_bars([found]), **bar)
        axes.text(0.03, place, f"{found['estimate']:.2f}", va="center", **_FONT, bbox=_LABEL_BOX)
        if entry.get("predicted_speedup"):
            label = "predicted from passes timed alone" if not axes.get_legend_handles_labels()[1] else None
            axes.plot(entry["predicted_speedup"], place, "D", color="#D55E00", mec="white", ms=8, label=label)
    axes.axvline(1, color="black", lw=1, ls="--")
    axes.set_yticks(range(len(entries)), [_entry_name(entry) for entry in entries])
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over vanilla CD (bars measured, lines 95% intervals)")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def acceptance_lines(entries: list[dict]) -> Figure:
    """Acceptance by draft position, given that the earlier drafts were accepted; one panel per alpha."""
    entries = [entry for entry in entries if entry["acceptance_by_position"]]
    alphas = list(dict.fromkeys(entry["alpha"] for entry in entries))
    methods = list(dict.fromkeys(entry["method"] for entry in entries))
    figure = Figure(figsize=(1.2 + 3.0 * len(alphas), 3.6 + 0.2 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    bases = [split_label(method)[0] for method in methods]
    dashes = {method: _DASHES[bases[:index].count(bases[index]) % 4] for index, method in enumerate(methods)}
    longest = max(len(entry["acceptance_by_position"]) for entry in entries)
    for axes, alpha in zip(panels, alphas, strict=True):
        shown = [entry for entry in entries if entry["alpha"] == alpha]
        for index, entry in enumerate(shown):
            colour, marker, _ = method_style(entry["method"])
            found = entry["acceptance_by_position"]
            places = np.arange(1, len(found) + 1) + 0.06 * (index - (len(shown) - 1) / 2)
            values = [100 * point["estimate"] for point in found]
            line = {"color": colour, "marker": marker, "ls": dashes[entry["method"]], "label": entry["method"]}
            axes.errorbar(places, values, yerr=_error_bars(found, 100), capsize=2, lw=1.5, ms=6, **line)
        axes.set_title("no contrast" if alpha == "any" else f"α = {alpha}", **_FONT)
        axes.set(ylim=(0, 100), xlim=(0.6, longest + 0.4), xlabel="draft position", xticks=range(1, longest + 1))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accepted (%), given the earlier ones were")
    known = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    place = {"loc": "outside lower center", "ncols": min(3, len(known))}
    figure.legend(known.values(), known, frameon=False, fontsize=8, **place)
    return figure


def round_time_bars(entries: list[dict]) -> Figure:
    """Milliseconds of one round by where they go, with the tokens that the round emits."""
    figure = Figure(figsize=(7.2, 1.0 + 0.34 * len(entries)), layout="constrained")
    axes = figure.add_subplot()
    left = np.zeros(len(entries))
    for name, (label, colour, hatch) in PART_STYLES.items():
        values = np.array([entry[name] for entry in entries])
        axes.barh(range(len(entries)), values, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
        left += values
    for place, entry in enumerate(entries):
        tokens = entry["tokens_per_round"]["estimate"]
        axes.text(left[place], place, f"  {left[place] / tokens:.0f} ms/token", va="center", fontsize=8)
    axes.set_yticks(range(len(entries)), [_entry_name(entry) for entry in entries])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per round", xlim=(0, 1.22 * left.max()))
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curves(series: dict[str, tuple[list[float], list[float]]], x_label: str, y_label: str) -> Figure:
    """Lines of training and held-out figures: name -> (x, y). Lines named "held-out..." are dashed with hollow marks.

    A line and its held-out twin ("training, step 1" and "held-out, step 1") share their colour.
    """
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    styles = list(METHOD_STYLES.values())[::-1]
    twins = list(dict.fromkeys(name.partition(",")[2] for name in series))
    for name, (x, y) in series.items():
        colour, marker, _ = styles[twins.index(name.partition(",")[2]) % len(styles)]
        held_out = name.startswith("held-out")
        style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.4, "markevery": max(1, len(x) // 12)}
        if held_out:
            style |= {"ls": "--", "mfc": "white"}
        axes.plot(x, y, label=name, **style)
    axes.set(xlabel=x_label, ylabel=y_label)
    if min(min(y) for _, y in series.values()) >= 0:
        axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=7, ncols=2 if len(series) > 4 else 1)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}


def _entry_name(entry: dict) -> str:
    return entry["method"] if entry["alpha"] == "any" else f"{entry['method']}, α = {entry['alpha']}"


def _error_bars(found: list[dict], scale: float = 1.0) -> np.ndarray | None:
    """[2, points] distances to the interval's ends; None where there are no intervals."""
    if any(entry["low"] is None for entry in found):
        return None
    ends = [[entry["estimate"] - entry["low"], entry["high"] - entry["estimate"]] for entry in found]
    return scale * np.maximum(0, np.array(ends).T)


def _gain_text(value: float, count: int) -> str:
    """A value in points; nothing where there is no position, "0" where rounding leaves only a sign."""
    text = f"{100 * value:+.1f}" if count else ""
    return "0" if text in ("+0.0", "-0.0") else text


def _without_sign(text: str) -> str:
    """A zero that rounding has left a sign loses it."""
    return "0.0" if text == "-0.0" else text


def _share_text(share: float, count: int) -> str:
    return f"{share:.1f}\nn={count}" if count else ""


def _label_buckets(axes: Axes) -> None:
    axes.set_xticks(range(BUCKETS), bucket_labels(), rotation=30, ha="right", **_FONT)
    axes.set_yticks(range(BUCKETS), bucket_labels(), **_FONT)
    axes.set(xlabel=SIGNAL_LABEL, ylabel=ERROR_LABEL)


def _percent_bars(axes: Axes, places: np.ndarray, values: np.ndarray, above: np.ndarray) -> None:
    """Print each value clear of both its bar and the marker on it."""
    for place, value, height in zip(places, values, above, strict=True):
        axes.annotate(f"{value:.1f}", (place, height), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.3)


def _write_cells(axes: Axes, text: list, light: np.ndarray, dots: np.ndarray, bold: np.ndarray | None = None) -> None:
    """Print a value in every cell, white where `light`, bold where `bold`; a dot marks cells with few positions."""
    for y in range(BUCKETS):
        for x in range(BUCKETS):
            weight = "bold" if bold is not None and bold[y, x] else "normal"
            colour = "white" if light[y, x] else "black"
            axes.text(x, y, text[y][x], ha="center", va="center", color=colour, weight=weight, **_FONT)
            if dots[y, x]:
                axes.plot(x + 0.38, y + 0.34, "o", color=colour, ms=4)
    axes.set_title(f"dot: fewer than {FEW} positions; grey: none", fontsize=8, loc="right")
