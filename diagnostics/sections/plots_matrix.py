"""Figures of the cross-alpha matrix: heat maps, intervals against the margin, ceilings. Rules as in `plots`."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from diagnostics import paper
from diagnostics.sections.plots import ink

LEAST_LIMIT = 2.0  # percent at which colours are full, if no change is larger
_FONT = {"fontsize": 9}
_STYLES = (("#E69F00", "^", "\\\\"), ("#0072B2", "o", ""), ("#009E73", "D", ".."), ("#CC79A7", "P", "xx"))
_COLOURS = colormaps["PuOr"]


def matrix_map(found: dict) -> Figure:
    """L over train-alpha and infer-alpha, coloured by the change from train-alpha 0; below, what training on the same
    alpha changes, with the verdict. `found` is what `cross_alpha_summary.summarise_replays` returns."""
    lengths = np.array(found["lengths"])
    trains, infers = found["train_alphas"], found["infer_alphas"]
    figure = Figure(figsize=(2.4 + 1.25 * len(infers), 1.9 + 0.62 * (len(trains) + 1)), layout="constrained")
    main, below = figure.subplots(2, 1, height_ratios=(len(trains), 1.25))
    limit = _limit([lengths])
    bold = np.zeros(lengths.shape, dtype=bool)
    for cell in found["cells"]:
        place = trains.index(cell["train_alpha"]), infers.index(cell["infer_alpha"])
        bold[place] = cell["verdict"] in ("helps", "hurts")
    _heat(main, lengths, trains, infers, limit, bold)
    _outline_matched(main, found)
    main.set(xlabel="", ylabel="train-alpha")
    main.tick_params(labelbottom=False)
    _verdict_row(below, found)
    below.set_xticks(range(len(infers)), [f"{infer:g}" for infer in infers], **_FONT)
    below.set_xlabel("infer-alpha (contrast strength decoded with)")
    _scale(figure, [main, below], limit)
    return figure


def paper_matrices() -> Figure:
    """The paper's four matrices, drawn the same way."""
    matrices = {name: np.array(values) for name, values in paper.CROSS_ALPHA.items()}
    limit = _limit(list(matrices.values()))
    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    nobody = np.zeros((len(paper.CROSS_ALPHAS),) * 2, dtype=bool)
    for axes, (name, lengths) in zip(panels.flat, matrices.items(), strict=True):
        _heat(axes, lengths, paper.CROSS_ALPHAS, paper.CROSS_ALPHAS, limit, nobody)
        axes.set_title(f"paper: {name}", **_FONT)
    for axes in panels[:, 0]:
        axes.set_ylabel("train-alpha")
    for axes in panels[1]:
        axes.set_xlabel("infer-alpha")
    _scale(figure, panels, limit)
    return figure


def change_intervals(found: dict) -> Figure:
    """Every change of L with its 95% interval, against zero and the margin."""
    infers, trains = found["infer_alphas"], found["train_alphas"][1:]
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    margin = 100 * found["margin"]
    axes.axhspan(-margin, margin, color="#eeeeee", zorder=0, label=f"within ±{margin:g}% of L")
    axes.axhline(0, color="black", lw=0.8)
    for index, train in enumerate(trains):
        cells = [cell for cell in found["cells"] if cell["train_alpha"] == train and "change" in cell]
        if not cells:
            continue
        places = [infers.index(cell["infer_alpha"]) + 0.2 * (index - (len(trains) - 1) / 2) for cell in cells]
        colour, marker, _ = _STYLES[index % len(_STYLES)]
        style = {"color": colour, "marker": marker, "ls": "", "ms": 7, "capsize": 3, "mec": "black", "mew": 0.5}
        changes = [cell["change"] for cell in cells]
        values = [100 * change["estimate"] for change in changes]
        axes.errorbar(places, values, yerr=_bars(changes), label=f"train-alpha {train:g}", **style)
    axes.set_xticks(range(len(infers)), [f"{infer:g}" for infer in infers])
    axes.set(xlabel="infer-alpha", ylabel="change of L from train-alpha 0 (%)", xlim=(-0.6, len(infers) - 0.4))
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside upper center")
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def ceiling_bars(verdicts: list[dict]) -> Figure:
    """Points per drafted token: what aiming at the contrast could add at most, beside what training on it did."""
    kinds = {
        "headroom_tv": ("ceiling, sampled drafts: TV(p, π)", "#E69F00", "//"),
        "acceptance_change": ("realised, sampled drafts", "#0072B2", ""),
        "headroom_flip": ("ceiling, greedy at T = 0: flipped choices", "#56B4E9", ".."),
        "top1_change": ("realised, greedy at T = 0", "#009E73", "xx"),
    }
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(kinds)
    for index, (name, (label, colour, hatch)) in enumerate(kinds.items()):
        places = np.arange(len(verdicts)) + (index - (len(kinds) - 1) / 2) * width
        found = [entry[name] for entry in verdicts]
        values = [100 * entry["estimate"] for entry in found]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": label, "capsize": 2}
        axes.bar(places, values, width * 0.92, yerr=_bars(found), **style)
        tops = [100 * max(0.0, entry["estimate"] if entry["high"] is None else entry["high"]) for entry in found]
        for place, value, top in zip(places, values, tops, strict=True):
            text = f"{value:.2f}"
            axes.text(place, top, "0.00" if text == "-0.00" else text, ha="center", va="bottom", fontsize=8)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(verdicts)), [f"infer-alpha {entry['infer_alpha']:g}" for entry in verdicts])
    axes.set_ylabel("points per drafted token")
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside upper center")
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def relative_changes(lengths: np.ndarray) -> np.ndarray:
    """Change of each row from the first, in percent of it; 0 where that is 0."""
    base = np.broadcast_to(lengths[:1], lengths.shape)
    return 100 * np.divide(lengths - base, base, out=np.zeros(lengths.shape), where=base > 0)


def _limit(matrices: list[np.ndarray]) -> float:
    return max(LEAST_LIMIT, *(float(np.abs(relative_changes(lengths)).max()) for lengths in matrices))


def _heat(axes: Axes, lengths: np.ndarray, trains, infers, limit: float, bold: np.ndarray) -> None:
    """One matrix; the first row is the control. Values and changes are printed, so colour only repeats them."""
    shares = relative_changes(lengths)
    colours = ink(axes.imshow(shares, cmap=_COLOURS, vmin=-limit, vmax=limit, aspect="auto"))
    for row in range(lengths.shape[0]):
        for column in range(lengths.shape[1]):
            weight = "bold" if bold[row, column] else "normal"
            change = f"\n{shares[row, column]:+.1f}%".replace("-0.0", "0.0").replace("+0.0", "0.0") if row else ""
            text = f"{lengths[row, column]:.3f}{change}"
            axes.text(column, row, text, ha="center", va="center", color=colours[row, column], weight=weight, **_FONT)
    axes.set_xticks(range(len(infers)), [f"{infer:g}" for infer in infers], **_FONT)
    labels = [f"{train:g}" if row else f"{train:g} (control)" for row, train in enumerate(trains)]
    axes.set_yticks(range(len(trains)), labels, **_FONT)


def _outline_matched(axes: Axes, found: dict) -> None:
    """A frame around the cells that the verdicts are about, black on white so that it shows on any colour."""
    around = np.array([[-0.47, 0.47, 0.47, -0.47, -0.47], [-0.46, -0.46, 0.46, 0.46, -0.46]])
    for entry in found["verdicts"]:
        x, y = (found[f"{kind}_alphas"].index(entry[f"{kind}_alpha"]) for kind in ("infer", "train"))
        white = [withStroke(linewidth=4, foreground="white")]
        axes.plot(x + around[0], y + around[1], color="black", lw=1.6, path_effects=white)


def _verdict_row(axes: Axes, found: dict) -> None:
    """The difference row: per infer-alpha the change in the framed cell, its interval and the verdict."""
    axes.set(xlim=(-0.5, len(found["infer_alphas"]) - 0.5), ylim=(0, 1), yticks=[0.5])
    axes.set_yticklabels(["framed cell\nagainst control"], **_FONT)
    for entry in found["verdicts"]:
        change = entry.get("change")
        words = ""
        if change is not None:
            words = f"{100 * change['estimate']:+.1f}%".replace("-0.0", "0.0").replace("+0.0", "0.0")
            if change["low"] is not None:
                words += f"\n[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
        place = found["infer_alphas"].index(entry["infer_alpha"])
        axes.text(place, 0.5, f"{words}\n{entry['verdict']}", ha="center", va="center", fontsize=8.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _scale(figure: Figure, axes, limit: float) -> None:
    scale = ScalarMappable(Normalize(-limit, limit), _COLOURS)
    figure.colorbar(scale, ax=axes, label="change of L from train-alpha 0 (%)", shrink=0.8)


def _bars(found: list[dict]) -> np.ndarray | None:
    """[2, points] distances to the ends of intervals, in percent; None where there are none."""
    if any(entry["low"] is None for entry in found):
        return None
    ends = [[entry["estimate"] - entry["low"], entry["high"] - entry["estimate"]] for entry in found]
    return 100 * np.maximum(0, np.array(ends).T)
