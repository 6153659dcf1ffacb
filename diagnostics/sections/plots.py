"""Figures of speed and training, and what all figures share; those of the signal study stand in plots_signal.py.

Every function takes numbers that are already counted and returns a figure.

Colours are Okabe and Ito's for series, YlGnBu for amounts and PuOr for gains: all safe for colour-blind readers.
Nothing is said by colour alone (values are printed, series differ in marker or hatch too), so the figures survive a
grey printer. No global state: figures are made without pyplot, and no torch is needed.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from dcd_core.files import atomic_path
from diagnostics.forms import split_label

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
FONT = {"fontsize": 9}
LUMA = np.array([0.299, 0.587, 0.114])  # how much red, green and blue add to lightness
DARK = 0.5  # lightness below which black print is hard to read


def save_png(figure: Figure, path: Path | str, dpi: int = 170) -> Path:
    """Write one figure atomically as PNG."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png", facecolor="white")
    return Path(path)


def ink(image: AxesImage) -> np.ndarray:
    """ "white" or "black" for print on each cell of a heat map, whichever is legible on its colour."""
    colours = image.to_rgba(image.get_array())
    return np.where(colours[..., :3] @ LUMA < DARK, "white", "black")


def method_style(method: str) -> tuple[str, str, str]:
    """Colour, marker and hatch of a method, the same in every figure and for all its forms."""
    return METHOD_STYLES.get(split_label(method)[0], _SPARE_STYLE)


def speedup_bars(entries: list[dict]) -> Figure:
    """Speed-up over vanilla CD with its interval; a diamond marks the cost model's prediction where there is one."""
    entries = [entry for entry in entries if "speedup" in entry and entry["method"] != "cd"]
    figure = Figure(figsize=(7.2, 0.9 + 0.34 * max(1, len(entries))), layout="constrained")
    axes = figure.add_subplot()
    for place, entry in enumerate(entries):
        colour, _, hatch = method_style(entry["method"])
        found = entry["speedup"]
        bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "height": 0.72, "capsize": 3}
        axes.barh(place, found["estimate"], xerr=error_bars([found]), **bar)
        axes.text(0.03, place, f"{found['estimate']:.2f}", va="center", **FONT, bbox=_LABEL_BOX)
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
            axes.errorbar(places, values, yerr=error_bars(found, 100), capsize=2, lw=1.5, ms=6, **line)
        axes.set_title("no contrast" if alpha == "any" else f"α = {alpha}", **FONT)
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
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside upper right")  # of the figure: names may be long
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curves(series: dict[str, tuple[list[float], list[float]]], x_label: str, y_label: str) -> Figure:
    """Lines of training and held-out figures: name -> (x, y). Lines named "held-out..." are dashed with hollow marks.

    A line and its held-out twin ("training, step 1" and "held-out, step 1") share their colour.
    """
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    styles = list(METHOD_STYLES.values())[::-1]
    twins = list(dict.fromkeys(map(_twin, series)))
    for name, (x, y) in series.items():
        colour, marker, _ = styles[twins.index(_twin(name)) % len(styles)]
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


def _twin(name: str) -> str:
    """What a line and its held-out twin have in common: "training, step 1" -> "step 1"."""
    kind, _, rest = name.partition(",")
    return rest if kind in ("training", "held-out") else name


_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}


def _entry_name(entry: dict) -> str:
    return entry["method"] if entry["alpha"] == "any" else f"{entry['method']}, α = {entry['alpha']}"


def error_bars(found: list[dict], scale: float = 1.0) -> np.ndarray | None:
    """[2, points] distances to the interval's ends; None where there are no intervals."""
    if any(entry["low"] is None for entry in found):
        return None
    ends = [[entry["estimate"] - entry["low"], entry["high"] - entry["estimate"]] for entry in found]
    return scale * np.maximum(0, np.array(ends).T)
