"""One self-contained HTML page from the records of finished runs.

    python diagnostics/report.py --runs runs/demo --output runs/demo/report

`--runs` takes run folders, or folders that hold them: signal studies (positions.parquet), benchmarks (rounds.parquet),
identity checks, and trained heads or amateurs (metrics.json with a history). Writes index.html, with every figure
embedded, and the figures as PNG beside it. Needs no torch and no models; the same records give the same page.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (a backend for plots without a display)

from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from dcd_core.config import git_sha, parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import write_text_atomic
from diagnostics import paper
from diagnostics.report_runs import Run, find_runs
from diagnostics.report_signal import signal_section
from diagnostics.report_speed import identity_section, speed_section
from diagnostics.report_training import training_section

SECTIONS = {
    "signal": signal_section,
    "benchmark": speed_section,
    "identity": identity_section,
    "training": training_section,
}


@dataclass
class Config:
    """Settings of the report."""

    runs: list[str] = field(metadata={"help": "run folders, or folders that hold them"})
    output: str = field(metadata={"help": "folder for index.html and the PNGs"})
    title: str = field(default="", metadata={"help": "title of the page (default: the pair's names)"})
    resamples: int = field(default=10_000, metadata={"help": "bootstrap resamples over prompts"})
    seed: int = field(default=0, metadata={"help": "seed of the bootstrap"})

    def __post_init__(self):
        if self.resamples < 1:
            raise ValueError(f"--resamples must be at least 1, got {self.resamples}")


def main(argv: list[str] | None = None) -> int:
    """Find the runs, draw and describe each, render the page."""
    config = parse_config(Config, argv, description=__doc__)
    runs, notes = find_runs(config.runs)
    for note in notes:
        print(note)
    sections = []
    for kind, build in SECTIONS.items():
        for run in (run for run in runs if run.kind == kind):
            sections.append(build(run, Path(config.output), config.resamples, config.seed))
    page = render(sections, runs, notes, config)
    write_text_atomic(Path(config.output) / "index.html", page)
    print(f"wrote {Path(config.output) / 'index.html'}")
    return 0


def render(sections: list, runs: list[Run], notes: list[str], config: Config) -> str:
    """The page as text. Raises UserError if the template asks for something that is not there."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pairs = list(dict.fromkeys(run.metrics["pair"] for run in runs if "pair" in run.metrics))
    title = config.title or "; ".join(pairs) or "Training runs"
    try:
        return environment.get_template("report.html.j2").render(
            title=title, sections=sections, runs=runs, notes=notes, git_sha=git_sha(), paper_name=paper.NAME
        )
    except jinja2.TemplateError as problem:
        raise UserError(f"the report's template cannot be filled: {problem}") from problem


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
