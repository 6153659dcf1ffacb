"""Figures of the dual-drafter study; colours and printing as in plots.py. No torch."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diagnostics.sections.plots import FONT, error_bars
from diagnostics.sections.plots_signal import EMPTY, PAPER_MARK

DRAFT_STYLES = {
    "target": ("#0072B2", ""),
    "dual": ("#CC79A7", "++"),
    "oracle": ("#E69F00", "//"),
    "exact_expert": ("#009E73", ".."),
}
BINS = np.linspace(-4.0, 4.0, 33)  # of log10 of a variance in nats squared; what lies outside stands in the end bins


def length_bars(found: list[dict], names: dict[str, str], paper: dict[float, dict[str, tuple[float, ...]]]) -> Figure:
    """L of every kind of draft for each data set and contrast strength; the paper's L as diamonds.

    Args:
        found: entries of `dual_summary.summarise_dual`.
        names: what to call each kind of draft.
        paper: contrast strength -> kind of draft -> the paper's L in its settings.
    """
    figure = Figure(figsize=(2.2 + 2.2 * len(found), 3.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.84 / len(names)
    for index, (kind, name) in enumerate(names.items()):
        places = np.arange(len(found)) + (index - (len(names) - 1) / 2) * width
        lengths = [entry["drafts"][kind]["length"] for entry in found]
        values = [length["estimate"] for length in lengths]
        colour, hatch = DRAFT_STYLES[kind]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": name}
        axes.bar(places, values, width * 0.92, yerr=error_bars(lengths), capsize=2, **style)
        for place, value, length in zip(places, values, lengths, strict=True):
            top = value if length["high"] is None else length["high"]
            axes.text(place, top, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
        for place, entry in zip(places, found, strict=True):
            theirs = paper.get(entry["alpha"], {}).get(kind, ())
            label = None if any(line.get_label() == PAPER for line in axes.lines) or not theirs else PAPER
            # beside the middle of the bar, where its own number stands
            axes.plot([place + 0.36 * width] * len(theirs), theirs, label=label, **PAPER_MARK | {"ms": 5})
    axes.set_xticks(range(len(found)), [f"{entry['dataset']}\nα = {entry['alpha']:g}" for entry in found], **FONT)
    axes.set_ylabel("accepted drafts per round, L")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


PAPER = "paper, its four settings"


def variance_map(counts: dict[str, np.ndarray], shares: dict[str, float]) -> Figure:
    """Measured variances against the threshold, a panel for each contrast strength: positions by what the errors cost
    (to the right) and by what the signal offers (up). Above the line a dual draft with uncorrelated errors wins.

    Args:
        counts: name -> positions by Var(s) (rows) and by cost (columns) in BINS, see `variance_counts`
            of this folder's dual_drafter.
        shares: name -> share of positions above the line.
    """
    figure = Figure(figsize=(0.9 + 3.5 * len(counts), 4.1), layout="constrained")
    panels = figure.subplots(1, len(counts), squeeze=False)[0]
    for axes, (name, table) in zip(panels, counts.items(), strict=True):
        share = 100 * table / table.sum()
        colour_map = colormaps["YlGnBu"].with_extremes(bad=EMPTY)
        drawn = axes.pcolormesh(BINS, BINS, np.where(table > 0, share, np.nan), cmap=colour_map, vmin=0)
        axes.plot(BINS[[0, -1]], BINS[[0, -1]], color="black", lw=1.2)
        _powers(axes)
        axes.set_title(f"{name}: {100 * shares[name]:.1f}% above the line", **FONT)
        axes.set_xlabel(r"$(1+2/\alpha)$ Var$(\log e/p)$ + Var$(\log f/q)$ (nats²)", fontsize=8)
        figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.8, label="positions (% of all)")
    panels[0].set_ylabel(r"Var$(\log p/q)$ (nats²)")
    return figure


def _powers(axes: Axes) -> None:
    """Powers of ten on both axes."""
    ticks = np.arange(-4, 5, 2)
    labels = [rf"$10^{{{tick}}}$" for tick in ticks]
    axes.set_xticks(ticks, labels, **FONT)
    axes.set_yticks(ticks, labels, **FONT)
    axes.set_aspect("equal")
