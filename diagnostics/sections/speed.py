"""The speed and identity sections of the report: measured beside predicted, and where the time goes. No torch."""

from pathlib import Path

from diagnostics import paper
from diagnostics.prediction import with_predictions
from diagnostics.records import read_records
from diagnostics.round_summary import ANY, BASELINE, summarise_rounds
from diagnostics.sections import plots
from diagnostics.sections.runs import Headline, Picture, Run, Section, Table, link
from diagnostics.wording import count, listed, plain

SHORTFALL = 0.9
SPEED_CAPTION = (
    "Tokens per second over those of vanilla contrastive decoding on the same prompts, as a ratio of sums. Diamonds: "
    "what the cost model predicts from the accepted length and from single passes timed alone before the run."
)
TIME_CAPTION = "Where the time of one round goes, and what a token costs. With scd it is the amateur that drafts."
ACCEPTANCE_CAPTION = (
    "Share of drafts accepted at each place of the draft, among rounds in which all earlier drafts were. "
    "Lines are 95% intervals over prompts."
)


def speed_section(run: Run, page: Path) -> Section:
    """Summarise and draw one benchmark."""
    records = read_records(run.folder / "rounds.parquet", "rounds")
    settings = records.provenance.get("settings", {})
    entries = summarise_rounds(records.rows, settings.get("gamma"))
    latency = run.metrics.get("latency_ms", {})
    if "amateur" in latency:
        entries = with_predictions(
            entries, latency, settings["gamma"], settings.get("branch", 1), settings.get("nodes", 0)
        )
    section = Section(f"Speed: {run.metrics.get('pair', run.name)}, on {run.metrics.get('dataset', 'unnamed prompts')}")
    section.headlines = speed_headlines(entries)
    if run.metrics.get("agreement"):
        words = agreement_sentence(run.metrics["agreement"])
        section.headlines.append(Headline("Same text? Speed run", words, f"The timed texts of '{run.name}'."))
    section.text = [how(settings, entries)]
    section.scalars = scalars(entries)
    section.pictures = pictures(entries, page, run.name)
    section.tables = [speed_table(entries), *saved_table(entries), split_table(entries)]
    if latency:
        section.tables.append(latency_table(latency))
    section.records = link(run.folder / "rounds.parquet", page)
    return section


def scalars(entries: list[dict]) -> dict[str, float]:
    """Speed, speed-up and accepted length of every method at every contrast strength."""
    names = ("tokens_per_second", "speedup", "accepted_length")
    return {
        f"{name}/{entry['method']}/alpha_{entry['alpha']}": entry[name]["estimate"]
        for entry in entries
        for name in names
        if name in entry
    }


def speed_headlines(entries: list[dict]) -> list[Headline]:
    """One per alpha: every speed-up with its interval, the paper's range in small print. Then the prediction."""
    found = []
    for alpha in dict.fromkeys(entry["alpha"] for entry in entries):
        shown = [e for e in entries if e["alpha"] == alpha and e["method"] != BASELINE and "speedup" in e]
        if alpha == ANY or not shown:
            continue
        shown.sort(key=lambda entry: -entry["speedup"]["estimate"])
        parts = [f"{entry['method']} {plain(entry['speedup'])}" for entry in shown]
        theirs = [(entry["method"], paper.speedup_range(entry["method"], float(alpha))) for entry in shown]
        ranges = listed([f"{method} {span}" for method, span in theirs if span])
        sentence = f"As a multiple of vanilla contrastive decoding: {listed(parts)}."
        small = f"Paper, on its hardware: {ranges}." if ranges else ""
        found.append(Headline(f"Speed at alpha {alpha}", sentence, small))
    prediction = prediction_sentence(entries)
    return [*found, Headline("Against prediction", prediction)] if prediction else found


def prediction_sentence(entries: list[dict]) -> str:
    """Does what was measured come up to what the cost model predicts?"""
    known = [entry for entry in entries if "measured_over_predicted" in entry and entry["method"] != BASELINE]
    if not known:
        return ""
    short = [entry for entry in known if entry["measured_over_predicted"] < SHORTFALL]
    if not short:
        worst = min(known, key=lambda entry: entry["measured_over_predicted"])
        return (
            "No method falls more than 10% short of the speed-up that the cost model predicts from passes timed alone "
            f"(lowest: {_name(worst)} at {100 * worst['measured_over_predicted']:.0f}%)."
        )
    parts = [f"{_name(entry)} ({100 * entry['measured_over_predicted']:.0f}%)" for entry in short]
    return f"More than 10% short of the speed-up that the cost model predicts: {listed(parts)}."


def agreement_sentence(counts: list[dict]) -> str:
    """Are the texts those of vanilla contrastive decoding?"""
    equal, ties, different = (sum(entry[name] for entry in counts) for name in ("equal", "near_ties", "different"))
    total = equal + ties + different
    if different:
        return f"NOT lossless: {different} of {total} texts differ from vanilla contrastive decoding's beyond rounding."
    tied = f", the other {ties} part from it at a near-tie of the two best scores" if ties else ""
    return f"Lossless: {equal} of {total} texts equal those of vanilla contrastive decoding{tied}."


def how(settings: dict, entries: list[dict]) -> str:
    """Method in a few sentences."""
    prompts = max(entry["prompts"] for entry in entries)
    drafts = "greedy" if settings.get("temperature") == 0 else f"at temperature {settings.get('temperature')}"
    return (
        f"{prompts} prompts, up to {settings.get('max_new_tokens')} new tokens, {drafts}, at most "
        f"{settings.get('gamma')} drafts a round, one prompt at a time, {settings.get('dtype')}, "
        f"{settings.get('repeats')} answer(s) per method and prompt. The methods took turns prompt by prompt; prefill "
        "is left out. accepted_length does not count the token that the verifier adds, tokens_per_round does. "
        "ar and expert_sd never look at the amateur: they stand "
        "beside cd as what decoding without a contrast costs."
    )


def pictures(entries: list[dict], page: Path, name: str) -> list[Picture]:
    """Speed-up bars, acceptance by draft position, time per round."""
    drawn = {"round-time": (plots.round_time_bars(entries), TIME_CAPTION, "stacked bars of milliseconds per round")}
    if any("speedup" in entry and entry["method"] != BASELINE for entry in entries):
        speed = (plots.speedup_bars(entries), SPEED_CAPTION, "bars of speed-up over vanilla contrastive decoding")
        drawn = {"speedup": speed} | drawn
    if any(entry["acceptance_by_position"] for entry in entries):
        lines = plots.acceptance_lines(entries)
        drawn["acceptance"] = (lines, ACCEPTANCE_CAPTION, "lines of acceptance by draft position")
    return [
        Picture(plots.save_png(figure, page / f"{name}-{part}.png"), caption, alt, wide=True)
        for part, (figure, caption, alt) in drawn.items()
    ]


def speed_table(entries: list[dict]) -> Table:
    """Speeds and accepted lengths, the paper's beside them."""
    headers = ["method", "alpha", "prompts", "tokens/s", "speed-up", "predicted", "measured / predicted"]
    headers += ["paper: speed-up", "accepted_length", "tokens_per_round", "paper: accepted_length"]
    rows = []
    for entry in entries:
        alpha = None if entry["alpha"] == ANY else float(entry["alpha"])
        rows.append(
            [
                entry["method"],
                "-" if alpha is None else entry["alpha"],
                count(entry["prompts"]),
                plain(entry["tokens_per_second"], 1),
                plain(entry["speedup"]) if "speedup" in entry else "-",
                f"{entry['predicted_speedup']:.2f}" if "predicted_speedup" in entry else "-",
                f"{100 * entry['measured_over_predicted']:.0f}%" if "measured_over_predicted" in entry else "-",
                "" if alpha is None else paper.speedup_range(entry["method"], alpha),
                plain(entry["accepted_length"]) if entry["drafted_per_round"] else "-",
                plain(entry["tokens_per_round"]),
                "" if alpha is None else paper.accepted_length_range(entry["method"], alpha),
            ]
        )
    caption = (
        "Speeds with 95% intervals over prompts. The paper's: range over its three pairs, greedy, its own hardware"
    )
    return Table(caption, headers, rows, ("paper: speed-up", "paper: accepted_length"))


def saved_table(entries: list[dict]) -> list[Table]:
    """What saving the amateur's passes gained over the same drafts without; no table where none were saved."""
    rows = []
    for entry in entries:
        if "over_unsaved" not in entry:
            continue
        per_pass = f"{entry['expert_passes'] / entry['amateur_passes']:.2f}" if entry["amateur_passes"] else "-"
        flips = f"{100 * entry['flips'] / entry['tokens']:.1f}" if entry["blocks"] else "-"
        over = plain(entry["over_unsaved"])
        prompts = count(entry["prompts"])
        rows.append([entry["method"], entry["alpha"], prompts, entry["unsaved"], over, per_pass, flips])
    headers = ["method", "alpha", "prompts", "over", "tokens/s over it", "expert passes / amateur pass"]
    headers.append("flips / 100 tokens")
    caption = "Saved passes of the amateur, with 95% intervals over prompts; a flip is a token that the amateur changed"
    return [Table(caption, headers, rows)] if rows else []


def split_table(entries: list[dict]) -> Table:
    """Where the time of a round goes."""
    headers = ["method", "alpha", "prompts", "rounds", "tokens", "drafts / round", "draft ms / drafted token"]
    headers += ["draft ms", "expert ms", "amateur ms", "rest ms"]
    rows = []
    for entry in entries:
        times = [entry[name] for name in ("draft_step_ms", "draft_ms", "expert_ms", "amateur_ms", "rest_ms")]
        alpha = "-" if entry["alpha"] == ANY else entry["alpha"]
        numbers = [
            count(entry["prompts"]),
            count(entry["rounds"]),
            count(entry["tokens"]),
            f"{entry['drafted_per_round']:.2f}",
        ]
        rows.append([entry["method"], alpha, *numbers, *(f"{value:.2f}" if value else "-" for value in times)])
    return Table("Milliseconds per round, as they were inside the loop", headers, rows)


def latency_table(latency: dict[str, dict[str, float]]) -> Table:
    """Passes timed alone."""
    widths = list(latency["expert"])
    rows = [[name, *(f"{times[width]:.2f}" for width in widths)] for name, times in latency.items()]
    headers = ["pass of", *(f"{width} new token{'s' if width != '1' else ''}" for width in widths)]
    return Table("Median milliseconds of single passes timed alone: the cost model's inputs", headers, rows)


def identity_section(run: Run, page: Path) -> Section:
    """The identity check as a table."""
    checks = run.metrics["checks"]
    section = Section("Is it lossless?")
    small = f"{count(len(checks))} check{'s' if len(checks) > 1 else ''} of '{run.name}', in fp32."
    section.headlines = [Headline("Same text? Identity check", agreement_sentence(checks), small)]
    section.text = [
        "Every text was written two ways and compared token by token, in fp32. Texts may part only where the two best "
        "scores lie closer than 1e-3 nats, which is rounding."
    ]
    rows = [
        [check["title"], *(count(check[name]) for name in ("prompts", "equal", "near_ties", "different"))]
        for check in checks
    ]
    section.tables = [Table("Texts compared", ["check", "texts", "equal", "part at a near-tie", "differ"], rows)]
    section.records = link(run.folder / "metrics.json", page)
    section.scalars = {name: sum(check[name] for check in checks) for name in ("equal", "near_ties", "different")}
    return section


def _name(entry: dict) -> str:
    return entry["method"] if entry["alpha"] == ANY else f"{entry['method']} at alpha {entry['alpha']}"
