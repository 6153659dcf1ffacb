"""The cross-alpha section of the report: verdicts, matrix, intervals, ceilings, the paper's beside ours. No torch."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from dcd_core.files import file_hash
from diagnostics import paper
from diagnostics.cross_alpha_summary import FAMILY, change_between, read_matrix, summarise_replays
from diagnostics.records import Records, read_records
from diagnostics.sections import plots, plots_matrix
from diagnostics.sections.runs import Headline, Picture, Run, Section, Table, link
from diagnostics.verdicts import MARGIN
from diagnostics.wording import count, counted, listed, percent, plain, points

GAMMA = 5  # of records that do not say
MATRIX_CAPTION = (
    "Accepted drafts a round (L) by what a drafter was trained on and what was decoded with, and the change from "
    "train-alpha 0, which colours the cell. Bold: helps or hurts, after correction for the comparisons. The frame is "
    "training on the alpha that is decoded with; below it, its change with the 95% interval and the verdict."
)
PAPER_CAPTION = (
    f"The paper's matrices ({paper.NAME}, Tab. 8), drawn the same way: its own models and data, single training runs, "
    "no intervals."
)
CHANGES_CAPTION = (
    "The same changes with 95% intervals over {over}. Before any correction for their number, an "
    "interval below the upper edge of the grey band rules out a gain of the margin or more, and one inside the band a "
    "loss as well."
)
CEILING_CAPTION = (
    "Teacher-forced on one history that all drafters share: what aiming at the contrast could add to the acceptance "
    "of a sampled first draft at most, at equal approximation error, beside what training on that alpha did add."
)


OTHERS = "Of a pair and prompts that are above, with other heads, precision or fewer prompts: side by side below."


def cross_alpha_section(run: Run, page: Path) -> Section:
    """Summarise and draw one cross-alpha matrix."""
    records, found = _summarise(run)
    section = Section(f"Should the drafter know about the contrast? {_where(records)}")
    section.headlines = headlines(found)
    section.text = [how(records, found, run.metrics.get("decoded", {}))]
    section.pictures = pictures(found, page, run.name)
    section.tables = [summary_table(found), matrix_table(found), cells_table(found)]
    section.records = link(run.folder / "replays.parquet", page)
    section.scalars = scalars(found)
    return section


def across_section(runs: list[Run], page: Path) -> Section:
    """Several matrices beside each other, of heads of several sizes say: does the verdict change?"""
    section = Section(f"Contrast-aware training in {len(runs)} runs, side by side")
    section.text = [
        "Each row is one run's verdict on training a drafter on the contrast strength that is decoded with, against "
        "train-alpha 0 in that run; each run stands alone too, with its method and records. A row of one training "
        "run speaks of its two drafters only. Two verdicts that differ are no proof that the runs do: that is what the "
        f"last column is about, the change of L here minus that in {runs[0].name}, of the seeds that both have, with "
        "its 95% interval over the prompts of both, for just these drafters."
    ]
    section.text += [decoded_sentence(run) for run in runs if run.metrics.get("decoded", {}).get("checked")]
    read = [_summarise(run) for run in runs]
    rows = []
    for run, (records, found) in zip(runs, read, strict=True):
        for entry in found["verdicts"]:
            length = found["lengths"][0][found["infer_alphas"].index(entry["infer_alpha"])]
            change = percent(entry["change"], 2, sign=True) if "change" in entry else ""
            realised = points(entry["acceptance_change"], 2, sign=True)
            ceiling = points(entry["headroom_tv"], 2)
            name = [run.name, f"{entry['infer_alpha']:g}", f"{entry['train_alpha']:g}"]
            name += [str(len(found["seeds"])), count(found["prompts"])]
            against = "" if run is runs[0] else _against(read[0], records, found, entry)
            rows.append([*name, f"{length:.3f}", change, ceiling, realised, entry["verdict"], against])
    headers = ["run", "alpha", "trained on", "training runs", "prompts"]
    headers += ["L of train-alpha 0", "change of L", "ceiling, points", "realised, points", "verdict"]
    headers.append(f"change of L minus that of {runs[0].name}")
    caption = "Change of accepted drafts a round; ceiling and gain in points of a sampled first draft's acceptance"
    section.tables = [Table(caption, headers, rows), *runs_table(runs, read)]
    others = further(runs, read)
    section.speaks_for = tuple(run.name for run, _ in others)
    if others:
        pairs = {_where(records) for records, _ in read}
        said = [short_verdict(run, found) for run, found in others]
        if len(pairs) > 1:
            places = {run.name: _where(records) for run, (records, _) in zip(runs, read, strict=True)}
            said = [f"{words}, of {places[run.name]}" for words, (run, _) in zip(said, others, strict=True)]
        sentence = f"{'; '.join(said)}."
        section.headlines = [Headline("Contrast-aware training, other runs", sentence, OTHERS)]
    return section


def further(runs: list[Run], read: list[tuple[Records, dict]]) -> list[tuple[Run, dict]]:
    """The runs that are not the first of their pair and prompts, with their summaries: the opening says what the first
    found at length, and of these in short."""
    seen, found = set(), []
    for run, (records, summary) in zip(runs, read, strict=True):
        if _where(records) in seen:
            found.append((run, summary))
        seen.add(_where(records))
    return found


def short_verdict(run: Run, found: dict) -> str:
    """ "deep: no gain at alpha 0.3 (L -1.2% [-2.5, +0.1], one training run each)"."""
    once = "" if len(found["seeds"]) > 1 else ", one training run each"
    words = []
    for entry in found["verdicts"]:
        change = f"L {percent(entry['change'], sign=True)}" if "change" in entry else "none of the drafts is accepted"
        words.append(f"{entry['verdict']} at alpha {entry['infer_alpha']:g} ({change}{once})")
    return f"{run.name}: {listed(words) or 'nothing to compare'}"


def runs_table(runs: list[Run], read: list[tuple[Records, dict]]) -> list[Table]:
    """What the runs differ in beside their verdicts, pair and prompts or heads, in a table of its own: there is no room
    for it in a row of figures. None where they differ in neither."""
    lines = [
        ("run", "pair and prompts", "heads"),
        *(
            (run.name, _where(its), heads_of(run.metrics.get("trained", {})))
            for run, (its, _) in zip(runs, read, strict=True)
        ),
    ]
    names, *told = zip(*lines, strict=True)
    kept = [column for column in told if len(set(column[1:])) > 1]
    headers, *rows = (list(line) for line in zip(names, *kept, strict=True))
    return [Table("What was measured in each run", headers, rows)] if kept else []


def heads_of(trained: dict) -> str:
    """Size and training text of a family's heads, from what its manifest says was held fixed."""
    if not trained:
        return ""
    shape = trained["head shape"]
    size = f"{counted(shape['layers'], 'block')}, MLP {shape['intermediate']}"
    tokens = count(trained["token budget"]["answer tokens"])
    return f"{trained['trained parameters'] / 1e6:.3g} M parameters ({size}), {tokens} tokens"


def decoded_sentence(run: Run) -> str:
    """How decoding for real compared with the replay."""
    decoded = run.metrics["decoded"]
    equal = decoded["equal"] + decoded["near-tie"]
    words = f"In {run.name}, {decoded['checked']} answers were really decoded too: {equal} equal the replay round by"
    return words + (f" round, {decoded['near-tie']} of them up to a near-tie." if decoded["near-tie"] else " round.")


def _against(first: tuple[Records, dict], records: Records, found: dict, entry: dict) -> str:
    """The change of L in a run minus that in the first; a dash where the first has no such comparison."""
    base, its = first
    if found["gamma"] != its["gamma"] or _where(records) != _where(base):
        return "–"
    tables = read_matrix(base.rows), read_matrix(records.rows)
    difference = change_between(*tables, entry["train_alpha"], entry["infer_alpha"])
    return percent(difference.as_dict(), 2, sign=True) if difference else "–"


def _summarise(run: Run) -> tuple[Records, dict]:
    path = run.folder / "replays.parquet"
    return _summed(path, file_hash(path))


@lru_cache(maxsize=64)
def _summed(path: Path, _digest: str) -> tuple[Records, dict]:
    """Kept, by what the file holds: a matrix stands alone and beside the others, and its intervals take seconds."""
    records = read_records(path, "replays")
    settings = records.provenance.get("settings", {})
    gamma, margin = settings.get("gamma", GAMMA), settings.get("margin", MARGIN)
    return records, summarise_replays(records.rows, gamma, margin)


def scalars(found: dict) -> dict[str, float]:
    """Of every infer-alpha, what training on it changed and what aiming at it could add; L of every cell."""
    values = {}
    for entry in found["verdicts"]:
        for name in ("change", "acceptance_change", "top1_change", "headroom_tv", "headroom_flip"):
            if name in entry:
                values[f"{name}/infer_{entry['infer_alpha']:g}"] = entry[name]["estimate"]
    for train, lengths in zip(found["train_alphas"], found["lengths"], strict=True):
        for infer, length in zip(found["infer_alphas"], lengths, strict=True):
            values[f"length/train_{train:g}/infer_{infer:g}"] = length
    return values


def headlines(found: dict) -> list[Headline]:
    """The verdict of every infer-alpha, with the greedy ceiling and the paper's change in small print."""
    return [
        Headline(
            f"Contrast-aware training, alpha {entry['infer_alpha']:g}", entry["sentence"], small_print(entry, found)
        )
        for entry in found["verdicts"]
    ]


def small_print(entry: dict, found: dict) -> str:
    """What the verdict rests on, and the paper's figure for the same cell."""
    runs = len(found["seeds"])
    seeds = f"{runs} training runs each" if runs > 1 else "one training run each, so other runs may differ"
    first = [entry["sentence_over_prompts"]] if "sentence_over_prompts" in entry else []
    words = (
        "L is of greedy drafts. On the shared history the contrast changes the best token at "
        f"{percent(entry['headroom_flip'])} of places; top-1 matches changed by "
        f"{points(entry['top1_change'], 2, sign=True)} points. {counted(found['prompts'], 'prompt')}, {seeds}."
    )
    span = paper_span(entry["infer_alpha"]) if entry["train_alpha"] == entry["infer_alpha"] else ""
    words += f" Paper: L changes by {span} in its four settings, without intervals." if span else ""
    return "\n".join([*first, words])


def paper_span(alpha: float) -> str:
    """The paper's change of L from train-alpha 0 to this one at the same infer-alpha, "-5.4% to +1.2%", or ""."""
    if alpha not in paper.CROSS_ALPHAS or alpha == 0:
        return ""
    place = paper.CROSS_ALPHAS.index(alpha)
    found = [plots_matrix.relative_changes(np.array(values))[place, place] for values in paper.CROSS_ALPHA.values()]
    return f"{min(found):+.1f}% to {max(found):+.1f}%"


def how(records: Records, found: dict, decoded: dict) -> str:
    """Method in a few sentences."""
    settings = records.provenance.get("settings", {})
    history = records.rows["history_alpha"].iloc[0]
    tokens = settings.get("max_new_tokens")
    longest = f", up to {tokens} tokens" if tokens else ""
    rounded = "bfloat16, in which decoding may part from them at near-ties"
    precision = f" ({rounded})" if settings.get("dtype") == "bfloat16" else ""
    words = (
        f"Vanilla contrastive decoding answered each of {counted(found['prompts'], 'prompt')} greedily at every "
        f"infer-alpha{longest}; every drafter's rounds, of {found['gamma']} drafts, follow from "
        f"these texts by replay{precision}. Drafters of one column differ in their training target only, in matched "
        f"runs (same initial weights, data, order and budget); {reading(records)} Acceptance is teacher-forced over "
        f"the texts of alpha {history:g}. A verdict needs a bound of the 95% interval over {over(found)}, after Holm's "
        f"correction for the {counted(len(found['verdicts']), 'comparison')} of training on the alpha that is decoded "
        f"with (the others are corrected among themselves). It helps or hurts where the change is surely not zero; no "
        f"gain where one of {100 * found['margin']:g}% of L or more is ruled out. A training seed is other initial "
        f"weights; the texts and their order are the same for all."
    )
    if decoded.get("checked"):
        equal = decoded["equal"] + decoded["near-tie"]
        words += f" Really decoded, {equal} of {decoded['checked']} answers are equal to the replay round by round"
        words += f" ({decoded['near-tie']} up to a near-tie)." if decoded["near-tie"] else "."
    return words


def reading(records: Records) -> str:
    """What the family's drafters read."""
    rows = records.rows
    kinds = rows["input"][rows["group"] == FAMILY].unique().tolist()
    words = f"each of them, train-alpha 0 too, {listed([_reads(kind) for kind in kinds])}."
    return words + (" What reading the amateur is worth is said by the controls." if kinds == ["dual"] else "")


def over(found: dict) -> str:
    """What the intervals of changes are over."""
    return "prompts and training seeds" if len(found["seeds"]) > 1 else "prompts, for just these drafters"


def pictures(found: dict, page: Path, name: str) -> list[Picture]:
    """Our matrix, the paper's, the intervals and the ceilings."""
    drawn = {
        "matrix": (plots_matrix.matrix_map(found), MATRIX_CAPTION, "heat map of accepted length"),
        "paper-matrix": (plots_matrix.paper_matrices(), PAPER_CAPTION, "the paper's heat maps of accepted length"),
        "changes": (
            plots_matrix.change_intervals(found),
            CHANGES_CAPTION.format(over=over(found)),
            "changes of accepted length with intervals",
        ),
    }
    if found["verdicts"]:
        drawn["ceiling"] = (plots_matrix.ceiling_bars(found["verdicts"]), CEILING_CAPTION, "bars of ceiling and gain")
    return [
        Picture(
            plots.save_png(figure, page / f"{name}-{part}.png"),
            caption,
            alt,
            wide="matrix" in part,
            once=part.startswith("paper"),
        )
        for part, (figure, caption, alt) in drawn.items()
    ]


def summary_table(found: dict) -> Table:
    """The summary row of [DCD, Tab. 1], ours above the paper's."""
    ours = found["summary"]
    wins = f"{ours['control_best']} of {ours['columns']}"
    best = [row for row in found["train_rows"] if row["train_alpha"] == ours["best_train_alpha"]]
    if best and best[0]["gain"]:
        difference, gain = plain(best[0]["difference"], 3), percent(best[0]["gain"], 2, sign=True)
    else:
        difference, gain = f"{ours['difference']:.3f}", f"{100 * ours['gain']:.2f}%"
    rows = [["here", f"{ours['best_train_alpha']:g}", difference, gain, wins]]
    for name, (alpha, change, share, columns) in paper.CROSS_ALPHA_SUMMARY.items():
        wins = f"{columns} of {len(paper.CROSS_ALPHAS)}"
        rows.append([f"paper, {name}", f"{alpha:g}", f"{change:.3f}", f"{share:.2f}%", wins])
    headers = ["", "best train-alpha", "mean change of L", "gain", "infer-alphas at which train-alpha 0 is best"]
    caption = (
        "Best training target by the mean over infer-alpha, against train-alpha 0; "
        f"{counted(found['prompts'], 'prompt')}. The best of several is flattered by chance: its interval does not "
        "allow for the choice"
    )
    return Table(caption, headers, rows)


def matrix_table(found: dict) -> Table:
    """The matrix with its row means, and the controls below it."""
    infers = found["infer_alphas"]
    means = {row["train_alpha"]: row["gain"] for row in found["train_rows"]}
    rows = []
    for train, lengths in zip(found["train_alphas"], found["lengths"], strict=True):
        gain = means.get(train)
        name = f"train-alpha {train:g}" + ("" if train else " (control)")
        rows.append([name, *(f"{length:.3f}" for length in lengths), percent(gain, 2, sign=True) if gain else ""])
    controls: dict[str, list[str]] = {}
    for entry in found["controls"]:
        cells = controls.setdefault(control_name(entry, found), [""] * len(infers))
        change = f" ({percent(entry['change'], sign=True)})" if "change" in entry else ""
        cells[infers.index(entry["infer_alpha"])] = f"{entry['length']:.3f}{change}"
    rows += [[name, *cells, ""] for name, cells in controls.items()]
    headers = ["drafter", *(f"infer-alpha {infer:g}" for infer in infers), "mean change from train-alpha 0"]
    caption = (
        f"Accepted drafts a round (L), {counted(found['prompts'], 'prompt')}; controls with their change from "
        "train-alpha 0 of the same seeds, if it has them"
    )
    return Table(caption, headers, rows)


def control_name(entry: dict, found: dict) -> str:
    """What a control is, what it read, and which of its seeds are held against train-alpha 0."""
    name = f"{entry['group']}, train-alpha {entry['train_alpha']:g} ({_reads(entry['input'])})"
    if not entry["matched"]:
        return f"{name}, not matched: other training"
    if len(entry["seeds"]) < len(found["seeds"]):
        return f"{name}, {'seed' if len(entry['seeds']) == 1 else 'seeds'} {listed([str(s) for s in entry['seeds']])}"
    return name


def cells_table(found: dict) -> Table:
    """Every comparison with what its verdict rests on."""
    rows = [
        [
            f"{cell['train_alpha']:g}",
            f"{cell['infer_alpha']:g}",
            percent(cell["change"], 2, sign=True) if "change" in cell else "",
            percent(cell["change_over_prompts"], 2, sign=True) if "change" in cell else "",
            f"{100 * cell['seed_deviation']:.2f}" if cell.get("seed_deviation") is not None else "",
            f"{cell['p_gain']:.4f}" if "change" in cell else "",
            f"{cell['p_equivalent']:.4f}" if "change" in cell else "",
            points(cell["acceptance_change"], 2, sign=True),
            cell["verdict"],
            cell["verdict_over_prompts"],
        ]
        for cell in found["cells"]
    ]
    headers = [
        "train-alpha",
        "infer-alpha",
        "change of L",
        "the same over prompts alone",
        "deviation between seeds, points",
        "p against a gain of the margin (Holm)",
        "p of equivalence (TOST, Holm)",
        "change of a sampled first draft's acceptance, points",
        "verdict",
        "the same over prompts alone",
    ]
    caption = f"Every comparison with train-alpha 0, {counted(found['prompts'], 'prompt')}"
    return Table(caption, headers, rows, folded=True)


def _reads(kind: str) -> str:
    words = {"expert_only": "reads the expert only", "amateur_zeroed": "amateur zeroed", "dual": "reads both models"}
    return words.get(kind, kind.replace("_", " "))


def _where(records: Records) -> str:
    pairs, sets = (records.rows[name].unique().tolist() for name in ("pair", "dataset"))
    return f"{listed(pairs)}, on {listed(sets)}"
