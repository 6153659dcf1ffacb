"""One self-contained HTML page from the records of finished runs.

    python diagnostics/report.py --records runs/demo --output runs/demo/report

`--records` takes run folders, or folders that hold them: cross-alpha matrices (replays.parquet), dual-drafter studies
(dual_replays.parquet), signal studies (positions.parquet; several are pooled too), benchmarks (rounds.parquet),
identity checks, and trained heads, amateurs or families (metrics.json with a history). Writes index.html, with every
figure embedded, and the figures as PNG beside it; an earlier report there is replaced. TensorBoard gets every figure
and the headline numbers too, as one more run: in tensorboard/ in the output folder (`tensorboard --logdir runs/demo`
finds them there, beside the training curves) or in the folder that `--tensorboard` names. Needs no torch and no
models; the same records give the same page.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (a backend for plots without a display)

from dataclasses import dataclass, field, replace
from pathlib import Path

from dcd_core.config import git_sha, is_free, make_folder, parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import TEMPORARY, check_output_folder, remove, write_text_atomic
from dcd_core.locks import held
from diagnostics import paper
from diagnostics.pages import fill_page
from diagnostics.sections.board import write_board
from diagnostics.sections.cross_alpha import across_section, cross_alpha_section
from diagnostics.sections.dual_drafter import dual_section
from diagnostics.sections.families import family_section
from diagnostics.sections.runs import Run, Section, find_runs
from diagnostics.sections.signal_error import pooled_section, signal_section
from diagnostics.sections.speed import identity_section, speed_section
from diagnostics.sections.training import training_section

PAGE = "index.html"
MARK = "Fast contrastive decoding with an expert-aligned drafter"  # in every page: an earlier report is known by it
# what several runs of a kind have together; it stands first, or after the runs that speak at length in the opening
TOGETHER = {"cross-alpha": across_section, "signal": pooled_section}
SECTIONS = {
    "cross-alpha": cross_alpha_section,  # first: the page opens with its verdict
    "dual drafter": dual_section,
    "signal": signal_section,
    "benchmark": speed_section,
    "identity": identity_section,
    "training": training_section,
    "family": family_section,
}


@dataclass
class Config:
    """Settings of the report."""

    records: list[str] = field(metadata={"help": "run folders, or folders that hold them", "aliases": ["--runs"]})
    output: str = field(metadata={"help": "folder for index.html and the PNGs"})
    tensorboard: str = field(
        default="",
        metadata={"help": "folder for the figures in TensorBoard (default: tensorboard/ in the output folder)"},
    )
    title: str = field(default="", metadata={"help": "title of the page (default: the pair's names)"})

    def __post_init__(self):
        if not self.records or not all(self.records):
            raise ValueError("--records needs a folder of finished runs, or several")


def main(argv: list[str] | None = None) -> int:
    """Find the runs, draw and describe each, render the page."""
    config = parse_config(Config, argv, description=__doc__)
    folder = Path(config.output)
    refuse_foreign(config.output)
    board = check_output_folder(config.tensorboard or folder / "tensorboard")
    runs, notes = find_runs(config.records)
    for note in notes:
        print(note)
    new = not folder.exists()
    with held(make_folder(folder)):
        try:
            sections = build_sections(runs, config)
            write_text_atomic(folder / PAGE, render(sections, runs, notes, config))
        except UserError:
            if new:  # the pictures of the runs before the bad one
                remove(folder)
            raise
        write_board(board, sections)
    print(f"wrote {folder / PAGE}; the figures in TensorBoard: tensorboard --logdir {board}")
    return 0


def refuse_foreign(folder: str) -> None:
    """Raise UserError unless `folder` is new, empty, or what an earlier report left (pictures alone: a stopped one)."""
    if is_free(folder):
        return
    page = Path(folder) / PAGE
    if page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace"):
        return
    if any(path.suffix != ".png" and not path.name.startswith(TEMPORARY) for path in page.parent.iterdir()):
        raise UserError(f"{folder} holds other files and no earlier report; give a new or empty folder")


def build_sections(runs: list[Run], config: Config) -> list[Section]:
    """Every run drawn and described, kind by kind."""
    page = Path(config.output)
    sections = []
    for kind, build in SECTIONS.items():
        # the run with most prompts first: with its verdict the page opens, and others are held against it
        own = sorted((run for run in runs if run.kind == kind), key=lambda run: -run.metrics.get("prompts", 0))
        alone = [build(run, page) for run in own]
        together = None
        if kind in TOGETHER and len(own) > 1:
            together = TOGETHER[kind](own, page)
        for run, section in zip(own, alone, strict=True):
            section.name = run.name
            if len(own) > 1 and section.title != f"Training: {run.name}":  # else several could have one name
                section.title += f" ({run.name})"
            if together and run.name in together.speaks_for:
                section.headlines = []
        speaking = [section for section in alone if section.headlines]
        if len(speaking) > 1:  # else topics of the opening could have one name
            for section in speaking:
                section.headlines = [replace(one, topic=f"{one.topic}, {section.name}") for one in section.headlines]
        if together:
            spoken = [place for place, section in enumerate(alone) if section.name not in together.speaks_for]
            alone.insert(spoken[-1] + 1 if together.speaks_for else 0, together)
        sections += alone
    shown = set()
    for section in sections:
        for picture in [one for one in section.pictures if one.once]:
            if picture.caption in shown:
                section.pictures.remove(picture)
                picture.path.unlink()
            shown.add(picture.caption)
    return sections


def render(sections: list[Section], runs: list[Run], notes: list[str], config: Config) -> str:
    """The page as text. Raises UserError if the template asks for something that is not there."""
    pairs = list(dict.fromkeys(run.metrics["pair"] for run in runs if "pair" in run.metrics))
    # a run that names a drafter too says no more of the pair than one that does not
    pairs = [pair for pair in pairs if not any(pair.startswith(f"{other} / ") for other in pairs)]
    title = config.title or "; ".join(pairs) or "Training runs"
    return fill_page(
        "report.html.j2",
        title=title,
        mark=MARK,
        sections=sections,
        runs=runs,
        notes=notes,
        git_sha=git_sha(),
        paper_name=paper.NAME,
    )


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
