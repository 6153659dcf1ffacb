"""The section of a family's training (cross-alpha or dual drafter): did its heads learn, and alike? No torch."""

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from diagnostics.sections import plots
from diagnostics.sections.runs import Picture, Run, Section, Table, link
from diagnostics.sections.training import LABELS
from diagnostics.wording import count

SHOWN = {
    "accuracy/0": "top-1 of the first draft",
    "accepted_length": "accepted drafts per round",
    "loss": "loss (nats)",
}
_MEMBER = re.compile(r"^(.+)_seed_(\d+)$")


def family_section(run: Run, page: Path) -> Section:
    """Training curves of every kind of member, its seeds averaged, and the last figures of each."""
    metrics, members = run.metrics, run.metrics["members"]
    section = Section(f"Training: {run.name}")
    sizes = [
        f"{count(metrics[name])} {name.replace('_', ' ')}" for name in ("texts", "answer_tokens") if name in metrics
    ]
    steps = max(found["steps"] for found in members.values())
    section.text = [
        f"{len(members)} heads, each {count(steps)} optimiser steps on the same {', '.join(sizes) or 'texts'} in the "
        "same order, together on shared passes of expert and amateur.",
        "Accuracy and loss are against each head's own target, so losses of different targets are not to be compared; "
        "accepted drafts are by replay of the held-out answers as they stand.",
    ]
    for name in ("loss", "accuracy/0"):
        group = name.partition("/")[0]
        series = {kind: mean_curve(found, name) for kind, found in by_kind(members).items()}
        series = {kind: curve for kind, curve in series.items() if curve[0]}
        if series:
            figure = plots.curves(series, "optimiser step", LABELS[group])
            path = plots.save_png(figure, page / f"{run.name}-{group}.png")
            seeds = "mean over seeds" if len(members) > len(series) else "one seed"
            section.pictures.append(Picture(path, f"{LABELS[group]} in training, {seeds}.", f"{group} by step"))
    section.tables = [last_figures(members)]
    section.scalars = {
        f"{key}/{name}": figures(found)[key]
        for name, found in members.items()
        for key in SHOWN
        if key in figures(found)
    }
    section.records = link(run.folder / "metrics.json", page)
    return section


def by_kind(members: dict[str, dict]) -> dict[str, list[dict]]:
    """Members that differ in their seed only, together: "alpha 0.3" -> its members."""
    found: dict[str, list[dict]] = {}
    for name, member in members.items():
        parts = _MEMBER.match(name)
        found.setdefault((parts[1] if parts else name).replace("_", " "), []).append(member)
    return found


def mean_curve(members: Iterable[dict], name: str) -> tuple[list[int], list[float]]:
    """(steps, mean over members) of a training metric, where all members have it."""
    curves = [{e["step"]: e[name] for e in member["history"] if name in e} for member in members]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return steps, [fmean(curve[step] for curve in curves) for step in steps]


def figures(member: dict) -> dict[str, float]:
    """A member's last held-out figures; those of training, where there were no held-out texts."""
    return member["eval"] or member["train"]


def last_figures(members: dict[str, dict]) -> Table:
    """One row a head."""
    held_out = all(member["eval"] for member in members.values())
    shown = {key: words for key, words in SHOWN.items() if any(key in figures(found) for found in members.values())}
    rows = [
        [name, *(f"{figures(found)[key]:.3f}" if key in figures(found) else "" for key in shown)]
        for name, found in members.items()
    ]
    caption = "Last figures on held-out texts" if held_out else "Last figures of training; no held-out texts were given"
    return Table(caption, ["head", *shown.values()], rows, folded=len(rows) > 8)
