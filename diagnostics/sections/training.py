"""The training section of the report: the curve and the held-out figures of a head or an amateur. No torch."""

import re
from pathlib import Path

from diagnostics.sections import plots
from diagnostics.sections.runs import Headline, Picture, Run, Section, Table, link
from diagnostics.wording import count

LABELS = {
    "loss": "loss (nats)",
    "accuracy": "top-1 accuracy",
    "acceptance": "acceptance rate",
    "accepted_length": "accepted drafts per round",
    "top1": "top-1 agreement with the expert",
    "kl": "KL divergence (nats)",
    "perplexity": "perplexity",
}
_STEPPED = re.compile(r"^(eval_)?(\w+?)/(\d+)$")


def training_section(run: Run, page: Path) -> Section:
    """Draw the history of one training run and list its last held-out figures."""
    metrics, history = run.metrics, run.metrics["history"]
    section = Section(f"Training: {run.name}")
    sizes = [f"{count(metrics[name])} {name.replace('_', ' ')}" for name in ("texts", "tokens") if name in metrics]
    steps = f"{count(metrics.get('steps', 0))} optimiser steps"
    section.text = [f"{steps} on {', '.join(sizes)}." if sizes else f"{steps}."]
    section.headlines = [Headline("Training", *words) for words in (head_words(run), amateur_words(run)) if words]
    for group, series in curves_of(history).items():
        figure = plots.curves(series, "optimiser step", LABELS.get(group, group.replace("_", " ")))
        path = plots.save_png(figure, page / f"{run.name}-{group}.png")
        section.pictures.append(Picture(path, f"{LABELS.get(group, group)} during training of {run.name}.", group))
    section.tables = held_out_tables(metrics)
    section.scalars = {
        name: value
        for name, value in (metrics.get("eval", {}) | metrics.get("held_out", {})).items()
        if isinstance(value, int | float)
    }
    section.records = link(run.folder / "metrics.json", page)
    return section


def head_words(run: Run) -> tuple[str, str] | None:
    """What a head's training came to, where it was evaluated."""
    length = run.metrics.get("eval", {}).get("accepted_length")
    if length is None:
        return None
    tokens = count(run.metrics.get("answer_tokens", run.metrics.get("tokens", 0)))
    sentence = f"{run.name}: {length:.2f} accepted drafts a round on held-out texts, trained on {tokens} answer tokens."
    return sentence, "By replay of held-out answers."


def amateur_words(run: Run) -> tuple[str, str] | None:
    """How near a distilled amateur is to its expert, and what it costs."""
    held_out, times = run.metrics.get("held_out", {}), run.metrics.get("latency", {})
    if "top1_agreement" not in held_out:
        return None
    sentence = (
        f"{run.name}: agrees with the expert on {100 * held_out['top1_agreement']:.1f}% of held-out tokens, "
        f"KL(expert||amateur) {held_out['kl']:.2f} nats."
    )
    return sentence, f"One pass takes {times['latency_ratio']:.2f} of the expert's time." if times else ""


def curves_of(history: list[dict]) -> dict[str, dict[str, tuple[list, list]]]:
    """Figures of a history: group (loss, accuracy, ...) -> line name -> (steps, values); known groups only."""
    found: dict[str, dict[str, tuple[list, list]]] = {}
    for entry in history:
        for name, value in entry.items():
            place = _place(name)
            if place is None or not isinstance(value, int | float):
                continue
            group, line = place
            steps, values = found.setdefault(group, {}).setdefault(line, ([], []))
            steps.append(entry["step"])
            values.append(value)
    return {group: found[group] for group in LABELS if group in found}


def _place(name: str) -> tuple[str, str] | None:
    """Group and line of a metric's name: "eval_accuracy/2" -> ("accuracy", "held-out, step 2")."""
    stepped = _STEPPED.match(name)
    base, step = (stepped[2], int(stepped[3])) if stepped else (name.removeprefix("eval_"), None)
    group = next((group for group in LABELS if base == group), None)
    if group is None or (group == "loss" and step is not None):
        return None
    kind = "held-out" if name.startswith("eval_") else "training"
    return group, kind if step is None else f"{kind}, step {step}"


def held_out_tables(metrics: dict) -> list[Table]:
    """The last held-out figures: one table by unroll step, one of single numbers."""
    by_step: dict[str, dict[int, float]] = {}
    single = []
    for name, value in metrics.get("eval", {}).items():
        stepped = _STEPPED.match(name)
        if stepped:
            by_step.setdefault(stepped[2], {})[int(stepped[3])] = value
        elif isinstance(value, int | float):
            single.append([name, f"{value:.4g}"])
    for values in (metrics.get("held_out", {}), metrics.get("latency", {}), metrics):
        single += [
            [name, f"{value:.4g}" if isinstance(value, float) else count(value)]
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
    tables = [Table("Figures of the run", ["figure", "value"], single)] if single else []
    if by_step:
        steps = sorted({step for values in by_step.values() for step in values})
        rows = [[name, *(f"{values[s]:.3f}" if s in values else "" for s in steps)] for name, values in by_step.items()]
        tables.append(Table("Held-out figures by unroll step", ["", *(f"step {step}" for step in steps)], rows))
    return tables
