"""The signal-versus-error section of the report: shares, heat map, gains of every kind of draft, headroom. No torch.

One run makes one section; several runs (other pairs, say) make a pooled one too, in which every position weighs the
same. Views over configurations stand in signal_views.py.
"""

from pathlib import Path

import pandas as pd

from diagnostics import paper
from diagnostics.position_summary import (
    KINDS,
    MEANS,
    OPTIONAL_MEANS,
    length_gain,
    summarise_by_alpha,
)
from diagnostics.position_views import each_and_pooled, realised, settings_of
from diagnostics.records import POSITIONS, Records, read_records
from diagnostics.sections.runs import Headline, Run, Section, Table, link
from diagnostics.sections.signal_views import pictures, view_tables
from diagnostics.wording import count, listed, percent, plain, points

GAMMA = 5  # drafts per round at which a gain per token is turned into accepted length


def signal_section(run: Run, page: Path) -> Section:
    """Summarise and draw one signal study."""
    records = read_records(run.folder / "positions.parquet", "positions")
    section = _section(f"Signal and drafter error: {_where(records.rows)}", [records], page, run.name)
    section.records = link(run.folder / "positions.parquet", page)
    return section


def pooled_section(runs: list[Run], page: Path) -> Section | None:
    """Several signal studies together, pooled by count: every position weighs the same. None where they are of one
    pair's same texts: drafters differ, but signal and headroom would be those of the same positions once more."""
    found = [read_records(run.folder / "positions.parquet", "positions") for run in runs]
    if len(set().union(*(_settings(records.rows) for records in found))) < sum(len(_settings(r.rows)) for r in found):
        return None
    title = f"Signal and drafter error, {len(runs)} runs pooled"
    section = _section(title, found, page, "pooled")
    section.text.append(f"Pooled by count from {listed([run.name for run in runs])}; each stands alone below.")
    return section


def _section(title: str, found: list[Records], page: Path, name: str) -> Section:
    rows = pd.concat([records.rows for records in found], ignore_index=True)
    by_alpha = summarise_by_alpha(rows)
    bounds = realised(rows)
    section = Section(title)
    section.headlines = [
        Headline("Signal against error", shares_sentence(by_alpha["pooled"]), paper_shares()),
        Headline("Headroom", headroom_sentence(by_alpha), gains_sentence(by_alpha)),
    ]
    section.text = [how(found, by_alpha)]
    section.name, section.scalars = name, scalars(by_alpha)
    section.pictures = pictures(rows, bounds, page, name)
    section.tables = [shares_table(by_alpha)]
    if len(settings_of(rows)) > 1:
        section.tables.append(settings_table(each_and_pooled(rows)))
    section.tables += view_tables(rows, bounds) + [means_table(by_alpha)]
    return section


def _settings(rows: pd.DataFrame) -> set[tuple[str, str]]:
    """Expert and amateur, without the drafter, and data set."""
    models = rows["pair"].str.split(" / ").str[:2].str.join(" / ")
    return set(zip(models, rows["dataset"], strict=True))


def scalars(by_alpha: dict[str, dict]) -> dict[str, float]:
    """The headline figures, pooled and at every contrast strength."""
    names = ["share_signal_below_1", "share_error_above_2", "mean_headroom_tv", "mean_headroom_flip"]
    names += [f"{what}_{kind}" for kind in KINDS for what in ("gain_acceptance", "gain_top1")]
    return {
        f"{name}/{_alpha_tag(alpha)}": found[name]["estimate"]
        for alpha, found in by_alpha.items()
        for name in names
        if name in found
    }


def shares_sentence(pooled: dict) -> str:
    """The two headline shares, and which of the two is the larger obstacle."""
    below, above = pooled["share_signal_below_1"], pooled["share_error_above_2"]
    if below["estimate"] >= 0.5 and above["estimate"] >= 0.25:
        verdict = "The contrast is mostly weak, the drafter's error is often large"
    elif below["estimate"] >= 0.5:
        verdict = "The contrast is mostly weak, and so is the drafter's error"
    else:
        verdict = "The contrast is often strong"
    return (
        f"{verdict}: the signal is below 1 nat at {percent(below)} of {count(pooled['positions'])} positions, and the "
        f"drafter misses the expert by 2 nats or more at {percent(above)}."
    )


def paper_shares() -> str:
    """The paper's two shares."""
    return f"Paper: {100 * paper.SIGNAL_BELOW_1:.1f}% and {100 * paper.ERROR_ABOVE_2:.1f}%, pooled over its settings."


def headroom_sentence(by_alpha: dict[str, dict]) -> str:
    """What aiming at the contrast could add at most, per token and in accepted length."""
    parts = []
    for alpha, found in _alphas(by_alpha).items():
        headroom, base = found["mean_headroom_tv"], found["acceptance_expert_aligned"]["estimate"]
        length = sum(base**i for i in range(1, GAMMA + 1))
        added = length_gain(base, headroom["estimate"], GAMMA)
        share = f", {100 * added / length:.0f}%" if added <= length else ""  # of next to nothing it says nothing
        parts.append(f"{points(headroom, 2)} points at alpha {alpha} (+{added:.2f} accepted drafts a round{share})")
    return (
        "With sampled drafts and at equal error (TV), a drafter that aims at the contrast instead of the expert can "
        f"gain at most {listed(parts)} of acceptance per token."
    )


def gains_sentence(by_alpha: dict[str, dict]) -> str:
    """What each kind of draft that knows of the contrast really gains, a line each."""
    sentences = []
    for kind, meaning in GAINED_BY.items():
        parts = [
            f"{points(found[f'gain_acceptance_{kind}'], 2, sign=True)} points of acceptance and "
            f"{points(found[f'gain_top1_{kind}'], 2, sign=True)} of top-1 matches at alpha {alpha}"
            for alpha, found in _alphas(by_alpha).items()
            if f"gain_top1_{kind}" in found
        ]
        if parts:
            sentences.append(f"Really gained by {meaning}: {listed(parts)}.")
    return "\n".join([*sentences, f"Drafts per round are taken as {GAMMA}, acceptance as constant."])


GAINED_BY = {
    "direct": "the direct draft, whose head was trained on the contrast",
    "dual": "the dual draft, which learned both models apart",
    "oracle": "the oracle draft, which knows the amateur exactly",
}


def how(found: list[Records], by_alpha: dict[str, dict]) -> str:
    """Method in two sentences."""
    pooled = by_alpha["pooled"]
    dtypes = {records.provenance.get("settings", {}).get("dtype", "unknown precision") for records in found}
    return (
        f"Vanilla contrastive decoding wrote one greedy answer to each of {pooled['prompts']} prompts at alpha "
        f"{listed(list(_alphas(by_alpha)))}; over these texts expert, amateur and drafter ran once more, in "
        f"{listed(sorted(dtypes))}. Intervals are 95%, t intervals over prompts."
    )


def shares_table(by_alpha: dict[str, dict]) -> Table:
    """Headline figures, a row each; per alpha, pooled, and the paper's."""
    columns = {
        "signal < 1 nat": ("share_signal_below_1", percent),
        "error ≥ 2 nats": ("share_error_above_2", percent),
        "headroom TV(p, π), points": ("mean_headroom_tv", lambda found: points(found, 2)),
        "flipped choices, points": ("mean_headroom_flip", lambda found: points(found, 2)),
        "acceptance, expert-aligned": ("acceptance_expert_aligned", percent),
        "top-1, expert-aligned": ("top1_expert_aligned", percent),
    }
    for kind, words in KINDS.items():
        if f"acceptance_{kind}" in by_alpha["pooled"]:
            columns[f"acceptance, {words}"] = (f"acceptance_{kind}", percent)
            columns[f"top-1, {words}"] = (f"top1_{kind}", percent)
    papers = {"signal < 1 nat": paper.SIGNAL_BELOW_1, "error ≥ 2 nats": paper.ERROR_ABOVE_2}
    rows = [["prompts", *(count(found["prompts"]) for found in by_alpha.values()), ""]]
    rows += [["positions", *(count(found["positions"]) for found in by_alpha.values()), ""]]
    for title, (key, write) in columns.items():
        theirs = f"{100 * papers[title]:.1f}%" if title in papers else ""
        rows.append([title, *(write(found[key]) if key in found else "" for found in by_alpha.values()), theirs])
    headers = ["", *map(_alpha_name, by_alpha), PAPER_COLUMN]
    return Table("Headline figures, with 95% intervals over prompts", headers, rows, paper=(PAPER_COLUMN,))


PAPER_COLUMN = "paper, pooled"


def _written(found: dict, columns: dict) -> list[str]:
    """The columns of one row; empty where a quantity was not measured."""
    return [write(found[key]) if key in found else "" for key, write in columns.values()]


def settings_table(found: dict[str, dict[str, dict]]) -> Table:
    """The headline figures of every pair and data set alone, at every contrast strength, and pooled by count."""
    columns = {
        "signal < 1 nat": ("share_signal_below_1", percent),
        "error ≥ 2 nats": ("share_error_above_2", percent),
        "headroom TV(p, π), points": ("mean_headroom_tv", lambda entry: points(entry, 2)),
        "acceptance, expert-aligned": ("acceptance_expert_aligned", percent),
    }
    for kind, words in KINDS.items():
        columns[f"dTop1, {words}, points"] = (f"gain_top1_{kind}", lambda entry: points(entry, 2, sign=True))
    used = [entry for by_alpha in found.values() for entry in by_alpha.values()]
    columns = {title: column for title, column in columns.items() if any(column[0] in entry for entry in used)}
    rows = [
        [
            name,
            _alpha_name(alpha),
            f"{count(entry['prompts'])} / {count(entry['positions'])}",
            *_written(entry, columns),
        ]
        for name, by_alpha in found.items()
        for alpha, entry in by_alpha.items()
    ]
    return Table(
        "Each pair and data set alone, and pooled", ["", "alpha", "prompts / positions", *columns], rows, folded=True
    )


def means_table(by_alpha: dict[str, dict]) -> Table:
    """The mean of every recorded quantity, with its definition."""
    known = {column.name: column for column in POSITIONS}
    names = [name for name in (*MEANS, *OPTIONAL_MEANS) if f"mean_{name}" in by_alpha["pooled"]]
    rows = [["prompts", "", "", *(count(found["prompts"]) for found in by_alpha.values())]]
    for name in names:
        unit = known[name].unit or "share"
        values = [plain(found[f"mean_{name}"], 3) if f"mean_{name}" in found else "" for found in by_alpha.values()]
        rows.append([name, known[name].meaning, unit, *values])
    headers = ["quantity", "definition", "unit", *(_alpha_name(alpha) for alpha in by_alpha)]
    legend = (
        "p expert, q amateur, e drafter, π target, x* = argmax π, o oracle draft, f drafter aligned with the amateur, "
        "c direct draft, r stronger proposer, [a, b] ~ a^(1+α) b^(-α), s = log p/q, u = log e/p, v = log f/q"
    )
    return Table(f"Mean of every recorded quantity ({legend})", headers, rows, folded=True)


def _alphas(by_alpha: dict[str, dict]) -> dict[str, dict]:
    return {alpha: found for alpha, found in by_alpha.items() if alpha != "pooled"}


def _alpha_name(alpha: str) -> str:
    return alpha if alpha == "pooled" else f"α = {alpha}"


def _alpha_tag(alpha: str) -> str:
    return alpha if alpha == "pooled" else f"alpha_{alpha}"


def _where(rows: pd.DataFrame) -> str:
    pairs, sets = (rows[name].unique().tolist() for name in ("pair", "dataset"))
    return f"{listed(pairs)}, on {listed(sets)}"
