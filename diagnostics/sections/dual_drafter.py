"""The dual-drafter section of the report: [DCD, Tab. 6] for this pair, oracle variants, the variance rule. No torch."""

from pathlib import Path

import numpy as np
import pandas as pd

from diagnostics import paper
from diagnostics.dual_summary import COLUMNS, DRAFTS, summarise_dual, table6
from diagnostics.records import read_records
from diagnostics.sections import plots_dual
from diagnostics.sections.plots import save_png
from diagnostics.sections.runs import Headline, Picture, Run, Section, Table, link
from diagnostics.wording import count, listed, percent, plain

PAPER_NAMES = {"target": "expert-aligned", "dual": "dual"}
HOW = (
    "Over vanilla contrastive decoding's own greedy texts, two light heads drafted: e, aligned with the expert, and f, "
    "aligned with the amateur, recombined as (1+α) log e - α log f. Rounds are replayed from the texts, at {gamma} "
    "drafts; {seeds}. A verdict on L at equal draft length needs a bound of its 95% interval, after Holm's "
    "correction for {comparisons} of them: it helps or hurts where the change is surely not zero, and brings no gain "
    "where one of 1% or more is ruled out."
)
LENGTH_CAPTION = (
    "Accepted drafts per round. Oracle drafts replace one head by the true model: e corrected by the true amateur, and "
    "the true expert corrected by f. Diamonds are the paper's, with heads trained on far more text."
)
RULE_CAPTION = (
    "Positions by what both heads' errors cost (right) and what the contrast offers (up), as variances under the "
    "target. In the limit of small errors that do not correlate, a dual draft is nearer to the target than e only "
    "above the line; the cost counts the expert-side error {factors} times."
)


def dual_section(run: Run, page: Path) -> Section:
    """Summarise and draw one dual-drafter study."""
    positions = read_records(run.folder / "positions.parquet", "positions").rows
    replays = read_records(run.folder / "dual_replays.parquet", "dual_replays")
    gamma = int(replays.provenance.get("settings", {}).get("gamma", replays.rows["gamma"].min()))
    found = summarise_dual(positions, replays.rows, gamma)
    seeds = found[0]["seeds"]
    section = Section(f"Dual drafter: {run.metrics.get('pair', run.name)}")
    section.headlines = [Headline("Dual drafter", verdict_sentence(found), closer_sentence(found))]
    pairs = "one pair of heads; intervals are over prompts and hold for just these two"
    if seeds > 1:
        pairs = f"{seeds} training seeds, pooled; intervals are over prompts, of differences over training seeds too"
    section.text = [HOW.format(gamma=gamma, seeds=pairs, comparisons=len(found))]
    section.pictures = pictures(positions, found, page, run.name)
    section.scalars = scalars(found)
    section.tables = [length_table(found), rule_table(found), variance_table(found)]
    section.records = link(run.folder / "dual_replays.parquet", page)
    section.positions = link(run.folder / "positions.parquet", page)
    return section


def scalars(found: list[dict]) -> dict[str, float]:
    """Accepted length of every kind of draft, and where the reconstruction is nearer to the target."""
    values = {}
    for entry in found:
        where = f"{entry['dataset']}/alpha_{entry['alpha']:g}"
        values |= {f"length_{kind}/{where}": draft["length"]["estimate"] for kind, draft in entry["drafts"].items()}
        values[f"share_closer/{where}"] = entry["share_closer"]["estimate"]
    return values


def verdict_sentence(found: list[dict]) -> str:
    """What recombining two drafters changes, in plain words, for every data set and contrast strength."""
    words = {
        "helps": "gains",
        "hurts": "loses",
        "no gain": "does not gain (1% of L or more is ruled out)",
        "undecided": "is undecided",
    }
    parts = []
    for verdict, phrase in words.items():
        own = [entry for entry in found if entry["verdict"] == verdict]
        if own:
            each = [f"{_change(entry)} {_where(entry, found)}" for entry in own]
            parts.append(f"{phrase}: {listed(each)}")
    return f"Against the expert-aligned drafter at equal draft length, the dual drafter {'; it '.join(parts)}."


def _change(entry: dict) -> str:
    if "relative_change" not in entry:
        return "none of e's drafts is accepted"
    return f"{percent(entry['relative_change'], sign=True)} of L"


def closer_sentence(found: list[dict]) -> str:
    """Where the reconstruction is nearer to the target, what time does to it, and the paper's share."""
    closer = [f"{percent(entry['share_closer'])} {_where(entry, found)}" for entry in found]
    time = [f"{plain(entry['equal_time']['change'], 3, sign=True)} {_where(entry, found)}" for entry in found]
    low, high = (100 * share for share in paper.DUAL_CLOSER)
    return (
        f"Share of positions where the reconstruction is nearer to the target than e: {listed(closer)} (paper: "
        f"{low:.1f} to {high:.1f}%). At equal drafting time (e drafts twice as many tokens) L changes by "
        f"{listed(time)}."
    )


def _where(entry: dict, found: list[dict]) -> str:
    several = len({other["dataset"] for other in found}) > 1
    return f"at alpha {entry['alpha']:g}" + (f" on {entry['dataset']}" if several else "")


def paper_lengths() -> dict[float, dict[str, tuple[float, ...]]]:
    """The paper's L by contrast strength and kind of draft."""
    found: dict[float, dict[str, tuple[float, ...]]] = {}
    for (_, alpha), drafts in paper.DUAL_DRAFTER.items():
        for kind, name in PAPER_NAMES.items():
            own = found.setdefault(alpha, {})
            own[kind] = own.get(kind, ()) + drafts[name][:2]
    return found


def pictures(positions: pd.DataFrame, found: list[dict], page: Path, name: str) -> list[Picture]:
    """Accepted lengths, and the variances against the threshold."""
    bars = plots_dual.length_bars(found, DRAFTS, paper_lengths())
    drawn = [("lengths", bars, LENGTH_CAPTION, "bars of accepted length per draft", True)]
    counts = variance_counts(positions)
    if counts:
        shares = {key: share for key, (_, share) in counts.items()}
        tables = {key: table for key, (table, _) in counts.items()}
        factors = sorted({1 + 2 / entry["alpha"] for entry in found if entry["alpha"] > 0}, reverse=True)
        caption = RULE_CAPTION.format(factors=listed([f"{factor:.3g}" for factor in factors]))
        figure = plots_dual.variance_map(tables, shares)
        drawn.append(("variances", figure, caption, "maps of measured variances against the threshold", True))
    return [
        Picture(save_png(figure, page / f"{name}-{part}.png"), caption, alt, wide=wide)
        for part, figure, caption, alt, wide in drawn
    ]


def variance_counts(positions: pd.DataFrame) -> dict[str, tuple[np.ndarray, float]]:
    """Positions in the bins of `plots_dual.BINS` by Var(s) (rows) and cost (columns), and the share above the line, for
    every contrast strength above 0."""
    found = {}
    for alpha, part in positions[positions["alpha"] > 0].groupby("alpha"):
        offered = part["var_signal"].to_numpy(dtype=float)
        cost = (1 + 2 / alpha) * part["var_error"].to_numpy(dtype=float)
        cost = cost + part["var_amateur_error"].to_numpy(dtype=float)
        inner = plots_dual.BINS[1:-1]
        places = [np.searchsorted(inner, np.log10(np.maximum(values, 1e-30))) for values in (offered, cost)]
        size = len(plots_dual.BINS) - 1
        table = np.bincount(places[0] * size + places[1], minlength=size * size).reshape(size, size)
        found[f"α = {alpha:g}"] = (table, float((offered > cost).mean()))
    return found


def length_table(found: list[dict]) -> Table:
    """Table 6 of this pair: L, divergence from the target and top-1 matches, with the paper's beside them."""
    rows = []
    for entry in found:
        for kind, cells in table6(entry).items():
            acceptance = percent(entry["drafts"][kind]["acceptance"])
            rows.append([*cells, acceptance, paper_cell(kind, entry["alpha"])])
        time = entry["equal_time"]
        name = f"{DRAFTS['target']}, {2 * entry['gamma']} drafts (equal time)"
        against = f"dual: {plain(time['change'], 3, sign=True)}"
        rows.append(
            [
                entry["dataset"],
                f"{entry['alpha']:g}",
                count(entry["prompts"]),
                name,
                plain(time["length"], 3),
                against,
                *[""] * 4,
            ]
        )
    headers = [*COLUMNS, "acceptance, sampled", PAPER_COLUMN]
    return Table("Two drafters against one", headers, rows, paper=(PAPER_COLUMN,))


PAPER_COLUMN = "paper: L; KL; top-1"


def paper_cell(kind: str, alpha: float) -> str:
    """The paper's range over its settings for one kind of draft, "1.10 to 1.97; 2.98 to 6.45; 60 to 68%"."""
    own = [
        drafts[PAPER_NAMES[kind]]
        for (_, at), drafts in paper.DUAL_DRAFTER.items()
        if at == alpha and kind in PAPER_NAMES
    ]
    if not own:
        return ""
    lengths = [length for row in own for length in row[:2]]
    divergences, matches = ([row[place] for row in own] for place in (2, 3))
    return (
        f"{min(lengths):.2f} to {max(lengths):.2f}; {min(divergences):.2f} to {max(divergences):.2f}; "
        f"{100 * min(matches):.0f} to {100 * max(matches):.0f}%"
    )


def variance_table(found: list[dict]) -> Table:
    """Measured variances and covariances, and what the rule makes of them."""
    names = ("var_signal", "var_error", "var_amateur_error", "cov_signal_error", "cov_errors")
    rows = [
        [
            entry["dataset"],
            f"{entry['alpha']:g}",
            count(entry["prompts"]),
            count(entry["positions"]),
            *(plain(entry["variances"][name], 2) for name in names),
        ]
        for entry in found
    ]
    headers = ["data set", "alpha", "prompts", "positions", "Var(s)", "Var(u)", "Var(v)", "Cov(s,u)", "Cov(u,v)"]
    caption = "Mean variances under π, in nats² (s = log p/q, u = log e/p, v = log f/q)"
    return Table(caption, headers, rows)


def rule_table(found: list[dict]) -> Table:
    """The variance rule's threshold, and where the reconstruction is closer in truth."""
    low, high = (100 * share for share in paper.DUAL_CLOSER)
    rows = []
    for entry in found:
        rule = entry.get("rule")
        rows.append(
            [
                entry["dataset"],
                f"{entry['alpha']:g}",
                count(entry["prompts"]),
                f"{rule['factor']:.3g}" if rule else "",
                percent(rule["uncorrelated"]) if rule else "",
                percent(rule["share"]) if rule else "",
                percent(entry["share_closer"]),
                percent(rule["right"]) if rule else "",
                f"{low:.1f} to {high:.1f}%",
            ]
        )
    headers = ["data set", "alpha", "prompts", "1 + 2/α", "above the line", "rule with covariances", "truly closer"]
    headers += ["rule is right", "paper: closer"]
    caption = (
        "The variance rule: share of positions where Var(s) exceeds (1 + 2/α) Var(u) + Var(v), where the rule with its "
        "covariances says that the dual draft wins, and where it is closer in truth"
    )
    return Table(caption, headers, rows, paper=("paper: closer",))
