"""The lines of the certificate, as text for a terminal and as one self-contained HTML page. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from diagnostics.pages import fill_page
from diagnostics.wording import count

VERDICTS = {True: "passed", False: "FAILED", None: "skipped"}


@dataclass(frozen=True)
class Part:
    """A part of the certificate: its title, what is shown, and how."""

    title: str
    how: str


PARTS = {
    "exact": Part(
        "Exact enumeration",
        "The shipped verifier on a tabular expert, amateur and drafter over a few ids: every way a round may go "
        "by its coins and draws, or by the picks of the shared noise, is walked over as many rounds as the tokens "
        "take, and the probabilities of the texts are added up. The error is the largest difference from the "
        "product of the target; 1e-10 fails. Nothing is sampled. 'Two-step draws': last draws made first among blocks "
        "of ids and then inside one, as over a real vocabulary (here in blocks of two ids); without any, a line fails.",
    ),
    "laws": Part(
        "Laws of the real loop",
        "Texts of the shipped decoding loop on a random expert, amateur and draft head over six ids, in batches "
        "of 256, against the exact law from whole passes without a cache. Two G tests a line: the first token, "
        "and the joint law of the next three (a round of two drafts and its extra token); p is the smaller one's, "
        "below 1e-6 fails, cells that expect fewer than 5 are pooled. 'TV below': the smallest total variation "
        "distance of the three tokens' law (over its cells as pooled) that would have failed the test with 99% "
        "power, whichever texts it moves: noncentral chi-square with noncentrality 4 d^2 times the samples. 'Rows "
        "alone': texts that were the same, token by token, when their rows were decoded one at a time and three "
        "at a time.",
    ),
    "identity": Part(
        "Identity with vanilla contrastive decoding",
        "On the given pair, in fp32: greedy, and at temperature 1 under shared noise, every method must write the "
        "very tokens of vanilla contrastive decoding (methods without a contrast: those of the expert alone). "
        "Texts may part only where the two best scores lie closer than 1e-3 nats, which is rounding; the first "
        "such place is shown.",
    ),
    "controls": Part(
        "Negative controls",
        "The same loop and the same G tests with one fault injected at temperature 1 and alpha 1. A line passes "
        "when the fault is caught (p below 1e-6) and the same run without the fault is not. Faults of the two-step "
        "draw are injected into the small enumeration instead, which must find them (error of 1e-10 or more).",
    ),
}


@dataclass(frozen=True)
class Line:
    """One line of the certificate.

    Args:
        part: a key of :data:`PARTS`.
        name: what was tested.
        figures: column -> what was found.
        passed: None for a line that was skipped.
        note: why it was skipped or failed, where the figures do not say.
    """

    part: str
    name: str
    figures: dict[str, str | int | float] = field(default_factory=dict)
    passed: bool | None = None
    note: str = ""


def table_of(lines: list[Line]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the lines of one part, every cell as text; the last two columns are verdict and note."""
    columns = list(dict.fromkeys(name for line in lines for name in line.figures))
    rows = [
        [line.name, *(_cell(line.figures.get(name, "")) for name in columns), VERDICTS[line.passed], line.note]
        for line in lines
    ]
    return ["", *columns, "verdict", ""], rows


def _cell(value: str | int | float) -> str:
    if isinstance(value, int):
        return count(value)
    return f"{value:.2g}" if isinstance(value, float) else value


def summary(lines: list[Line]) -> str:
    """How it went, in one sentence."""
    done = [line for line in lines if line.passed is not None]
    failed = [line for line in done if not line.passed]
    skipped = len(lines) - len(done)
    left_out = f" ({skipped} skipped)" if skipped else ""
    if failed:
        return f"NOT certified: {len(failed)} of {len(done)} lines failed{left_out}"
    return f"Certified lossless: all {len(done)} lines passed{left_out}"


def print_lines(lines: list[Line]) -> None:
    """Every part as a plain table, then the summary."""
    for name, part in PARTS.items():
        own = [line for line in lines if line.part == name]
        if own:
            headers, rows = table_of(own)
            print(f"\n{part.title}\n{tabulate(rows, headers=headers, disable_numparse=True)}")
    print(f"\n{summary(lines)}")


def render(lines: list[Line], folder: Path, settings: str, git_sha: str) -> str:
    """The page: the verdict, every line by part, and what it was made with.

    Args:
        folder: the run, whose record of command, settings and versions stands at the end of the page.
    """
    parts = []
    for name, part in PARTS.items():
        own = [line for line in lines if line.part == name]
        if own:
            headers, rows = table_of(own)
            failed = [line.passed is False for line in own]
            parts.append(
                {"title": part.title, "how": part.how, "headers": headers, "rows": list(zip(rows, failed, strict=True))}
            )
    made_with = ("command.txt", "config.yaml", "versions.json")
    provenance = {name: (folder / name).read_text(encoding="utf-8") for name in made_with if (folder / name).is_file()}
    return fill_page(
        "certificate.html.j2",
        summary=summary(lines),
        passed=all(line.passed is not False for line in lines),
        settings=settings,
        parts=parts,
        provenance=provenance,
        git_sha=git_sha,
    )
