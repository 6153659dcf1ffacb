"""The signal-versus-error section of the report: shares, heat map, gains of the oracle draft, headroom. No torch."""

from pathlib import Path

import pandas as pd

from diagnostics import paper, plots
from diagnostics.position_summary import MEANS, cells, length_gain, marginals, summarise_by_alpha
from diagnostics.records import POSITIONS, Records, read_records
from diagnostics.report_runs import Headline, Picture, Run, Section, Table, link
from diagnostics.wording import count, listed, percent, plain, points

GAMMA = 5  # drafts per round at which a gain per token is turned into accepted length
WIDE = ("signal-error", "headroom")
MAP_CAPTION = (
    "Every cell is a share of the positions and their number n. Signal: how far expert and amateur disagree on the "
    "token that the contrastive target prefers. Error: how far the drafter is from the expert. Bars are the marginals, "
    "diamonds the paper's, pooled over its 24 configurations. In the paper, gains from aiming at the contrast sit to "
    "the lower right, where the signal is large and the drafter good."
)
TOP1_CAPTION = (
    "Gain in top-1 matches with the target if the same draft is corrected by the true amateur (the oracle draft). "
    "Bold: the 95% interval over prompts excludes 0."
)
ACCEPTANCE_CAPTION = "The same for the acceptance rate of sampled drafts, 1 - TV(draft, target)."
HEADROOM_CAPTION = (
    "Left bars: at most so much acceptance can be won by aiming at the contrast instead of the expert, at equal error. "
    "Right bars: what the oracle draft really wins. Lines are 95% intervals over prompts."
)


def signal_section(run: Run, page: Path, resamples: int, seed: int) -> Section:
    """Summarise and draw one signal study."""
    records = read_records(run.folder / "positions.parquet", "positions")
    by_alpha = summarise_by_alpha(records.rows, resamples, seed)
    section = Section(f"Signal and drafter error: {_where(records)}")
    section.headlines = [
        Headline("Signal against error", shares_sentence(by_alpha["pooled"]), paper_shares()),
        Headline("Headroom", headroom_sentence(by_alpha), oracle_sentence(by_alpha)),
    ]
    section.text = [how(records, by_alpha)]
    section.pictures = pictures(records.rows, by_alpha, page, run.name, resamples, seed)
    section.tables = [shares_table(by_alpha), means_table(by_alpha)]
    section.records = link(run.folder / "positions.parquet", page)
    return section


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


def oracle_sentence(by_alpha: dict[str, dict]) -> str:
    """What the oracle draft really gains."""
    parts = [
        f"{points(found['gain_acceptance'], 2, sign=True)} points of acceptance and "
        f"{points(found['gain_top1'], 2, sign=True)} of top-1 matches at alpha {alpha}"
        for alpha, found in _alphas(by_alpha).items()
    ]
    return (
        f"Really gained by the oracle draft, which knows the amateur exactly: {listed(parts)}. Drafts per round are "
        f"taken as {GAMMA}, acceptance as constant."
    )


def how(records: Records, by_alpha: dict[str, dict]) -> str:
    """Method in two sentences."""
    pooled, settings = by_alpha["pooled"], records.provenance.get("settings", {})
    dtype = settings.get("dtype", "unknown precision")
    return (
        f"Vanilla contrastive decoding wrote one greedy answer to each of {pooled['prompts']} prompts at alpha "
        f"{listed(list(_alphas(by_alpha)))}; over these texts expert, amateur and drafter ran once more, in {dtype}. "
        "Intervals are 95%, from resampling whole prompts."
    )


def pictures(rows: pd.DataFrame, by_alpha: dict, page: Path, name: str, resamples: int, seed: int) -> list[Picture]:
    """Heat map with marginals, both gain maps, and the headroom."""
    binned, shares = cells(rows, resamples, seed), marginals(rows)
    drawn = {
        "signal-error": (plots.signal_error_map(binned, *shares), MAP_CAPTION, "heat map of signal and drafter error"),
        "gain-top1": (plots.gain_map(binned, "top1"), TOP1_CAPTION, "heat map of the gain in top-1 matches"),
        "gain-acceptance": (
            plots.gain_map(binned, "acceptance"),
            ACCEPTANCE_CAPTION,
            "heat map of the gain in acceptance",
        ),
        "headroom": (plots.headroom_bars(by_alpha), HEADROOM_CAPTION, "bars of headroom and realised gain per alpha"),
    }
    return [
        Picture(plots.save_png(figure, page / f"{name}-{part}.png"), caption, alt, wide=part in WIDE)
        for part, (figure, caption, alt) in drawn.items()
    ]


def shares_table(by_alpha: dict[str, dict]) -> Table:
    """Headline figures per alpha and pooled."""
    columns = {
        "signal < 1 nat": ("share_signal_below_1", percent),
        "error ≥ 2 nats": ("share_error_above_2", percent),
        "headroom TV(p, π), points": ("mean_headroom_tv", lambda found: points(found, 2)),
        "flipped choices, points": ("mean_headroom_flip", lambda found: points(found, 2)),
        "acceptance, expert-aligned": ("acceptance_expert_aligned", percent),
        "acceptance, oracle": ("acceptance_contrast_aligned", percent),
        "top-1, expert-aligned": ("top1_expert_aligned", percent),
        "top-1, oracle": ("top1_contrast_aligned", percent),
    }
    rows = [
        [_alpha_name(alpha), count(found["positions"]), *(write(found[key]) for key, write in columns.values())]
        for alpha, found in by_alpha.items()
    ]
    rows.append(
        ["paper, pooled", "", f"{100 * paper.SIGNAL_BELOW_1:.1f}%", f"{100 * paper.ERROR_ABOVE_2:.1f}%", *[""] * 6]
    )
    return Table("Headline figures, with 95% intervals over prompts", ["alpha", "positions", *columns], rows)


def means_table(by_alpha: dict[str, dict]) -> Table:
    """The mean of every recorded quantity, with its definition."""
    known = {column.name: column for column in POSITIONS}
    names = [name for name in (*MEANS, "amateur_error") if f"mean_{name}" in by_alpha["pooled"]]
    rows = []
    for name in names:
        unit = known[name].unit or "share"
        values = [plain(found[f"mean_{name}"], 3) for found in by_alpha.values()]
        rows.append([name, known[name].meaning, unit, *values])
    headers = ["quantity", "definition", "unit", *(_alpha_name(alpha) for alpha in by_alpha)]
    legend = "p expert, q amateur, e drafter, π target, x* = argmax π, o oracle draft"
    return Table(f"Mean of every recorded quantity ({legend})", headers, rows, folded=True)


def _alphas(by_alpha: dict[str, dict]) -> dict[str, dict]:
    return {alpha: found for alpha, found in by_alpha.items() if alpha != "pooled"}


def _alpha_name(alpha: str) -> str:
    return alpha if alpha == "pooled" else f"α = {alpha}"


def _where(records: Records) -> str:
    pairs, sets = (records.rows[name].unique().tolist() for name in ("pair", "dataset"))
    return f"{listed(pairs)}, on {listed(sets)}"
