"""The runs that a report is made of, found by what their folders hold, and the parts of a page. No torch."""

import base64
import json
import os
import shlex
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from dcd_core.errors import UserError
from dcd_core.files import file_hash

# the first of these files that a folder holds says what it is
MARKS = {
    "replays.parquet": "cross-alpha",
    "dual_replays.parquet": "dual drafter",
    "positions.parquet": "signal",
    "rounds.parquet": "benchmark",
}
RECORDS_OF = {
    "cross_alpha.py": "replays.parquet",
    "dual_drafter.py": "dual_replays.parquet",
    "signal_error.py": "positions.parquet",
    "benchmark.py": "rounds.parquet",
}
CSS_PIXELS = 0.64  # for one of a figure's 170 pixels an inch: its text of 9 points is shown at 13 CSS pixels
DEPTH = 3  # folders below a given one that are searched
PROVENANCE = ("command.txt", "config.yaml", "versions.json", "git_sha.txt")


@dataclass(frozen=True)
class Run:
    """One finished run: its folder, what kind it is, its metrics.json, and its settings and provenance as text."""

    folder: Path
    kind: str
    metrics: dict
    provenance: dict[str, str]
    label: str = ""

    @property
    def name(self) -> str:
        """What the page and its pictures call the run: no other run of the report has this name."""
        return self.label or self.folder.name

    @property
    def settings(self) -> dict:
        """What its config.yaml says; empty where there is none."""
        try:
            found = yaml.safe_load(self.provenance.get("config.yaml", "")) or {}
        except yaml.YAMLError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.folder / 'config.yaml'} holds no settings; restore it, or leave this run out")
        return found


@dataclass(frozen=True)
class Picture:
    """A figure in the page: PNG on disk, caption, and a description for readers who cannot see it."""

    path: Path
    caption: str
    description: str
    wide: bool = False
    once: bool = False  # the same for every run: the page shows it for the first

    @property
    def data(self) -> str:
        """The PNG as base64, so that the page needs no other file."""
        return base64.b64encode(self.path.read_bytes()).decode()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the header chunk of the PNG."""
        return struct.unpack(">II", self.path.read_bytes()[16:24])

    @property
    def width(self) -> int:
        """How wide the page shows it where there is room, in CSS pixels: text is as large in every figure."""
        return round(self.size[0] * CSS_PIXELS)


@dataclass(frozen=True)
class Table:
    """A table in the page; every cell is text. Columns named in `paper` hold the paper's figures and are set apart."""

    caption: str
    headers: list[str]
    rows: list[list[str]]
    paper: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Headline:
    """One of the few things that the page opens with: a short topic, a sentence in plain words, and lines of small
    print."""

    topic: str
    sentence: str
    small: str = ""


@dataclass
class Section:
    """One part of the page: what it adds to the opening, how it was measured, pictures, tables, link to the records.

    Attributes:
        speaks_for: names of runs whose share in the opening this section's headlines are.
        scalars: the headline numbers, for TensorBoard.
    """

    title: str
    headlines: list[Headline] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    records: str = ""
    positions: str = ""  # more records, where there are two tables
    name: str = ""
    speaks_for: tuple[str, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)


def find_runs(folders: list[str]) -> tuple[list[Run], list[str]]:
    """Finished runs in or below some folders, by path, and notes on what was left out.

    Raises UserError for a folder that is not there, or when there is no finished run at all.
    """
    found: dict[Path, Run] = {}
    notes = []
    for given in folders:
        root = Path(given)
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; --records takes folders of finished runs")
        for folder in _folders(root):
            if folder in found:
                continue
            mark = next((kind for name, kind in MARKS.items() if (folder / name).is_file()), "")
            if not (folder / "metrics.json").is_file():
                if mark or (folder / "command.txt").is_file():
                    notes.append(f"left out {folder}: the run is not finished")
                continue
            missing = _missing_records(folder)
            if missing is not None:
                notes.append(f"left out {folder}: {missing} is missing")
                continue
            run = _read(folder, mark)
            if run is not None:
                found[folder] = run
    if not found:
        more = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(f"no finished run in {', '.join(map(str, folders))}: nothing to report{more}")
    return _named_apart(_once(list(found.values()), notes)), notes


def _once(runs: list[Run], notes: list[str]) -> list[Run]:
    """The runs without copies: the same records in two folders are one measurement. Each copy gets a note.

    Records name the settings that made them, their folder among these; metrics alone may be equal for two runs.
    """
    first: dict[str, Path] = {}
    kept = []
    for run in runs:
        record = next((run.folder / name for name, kind in MARKS.items() if kind == run.kind), None)
        key = file_hash(record) if record else str(run.folder)
        if key in first:
            notes.append(f"left out {run.folder}: a copy of {first[key]}")
            continue
        first[key] = run.folder
        kept.append(run)
    return kept


def _missing_records(folder: Path) -> str | None:
    """A table that is not there, though the folder's metrics name it, or the script named by its command writes it."""
    named = _metrics(folder).get("records")
    for name in named if isinstance(named, dict) else ():
        if not (folder / name).is_file():
            return name
    try:
        script = Path(shlex.split((folder / "command.txt").read_text(encoding="utf-8"))[0])
    except (OSError, ValueError, IndexError):
        return None
    records = None if script.parent.name == "train" else RECORDS_OF.get(script.name)
    return None if records is None or (folder / records).is_file() else records


def _named_apart(runs: list[Run]) -> list[Run]:
    """Runs of one folder name get as much of their path before it as tells them apart: demo-signal, toy-signal."""
    parts = [run.folder.resolve().parts for run in runs]
    sizes = [1] * len(runs)
    while True:
        labels = ["-".join(own[-size:]) for own, size in zip(parts, sizes, strict=True)]
        clash = [
            labels.count(label) > 1 and size < len(own) for label, own, size in zip(labels, parts, sizes, strict=True)
        ]
        if not any(clash):
            return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
        sizes = [size + more for size, more in zip(sizes, clash, strict=True)]


def link(target: Path, page: Path) -> str:
    """Path of a file as the page in folder `page` names it."""
    return Path(os.path.relpath(target, page)).as_posix()


def _folders(root: Path) -> list[Path]:
    found = []
    for folder, inside, _ in os.walk(root):
        path = Path(folder)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if len(path.relative_to(root).parts) >= DEPTH:
            inside[:] = []
        found.append(path)
    return found


def _refuse_other_records(folder: Path, known: dict[str, str] | None) -> None:
    """The tables beside metrics.json must be those that it names (older ones name none)."""
    if known is None:
        return
    if not isinstance(known, dict):
        raise UserError(f"{folder / 'metrics.json'} must name its tables under 'records', got {known!r}")
    for name in dict.fromkeys((*known, *MARKS)):
        path = folder / name
        if path.is_file() and file_hash(path) != known.get(name):
            raise UserError(
                f"{folder}: metrics.json was not made with the {name} beside it, which is another run's or damaged; "
                "restore it (or take it away, if this run has none), or leave this run out"
            )


def _metrics(folder: Path) -> dict:
    path = folder / "metrics.json"
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read: {problem}") from None
    if not isinstance(metrics, dict):
        raise UserError(f"{path} must hold an object")
    return metrics


def _read(folder: Path, mark: str) -> Run | None:
    metrics = _metrics(folder)
    told = {"checks": "identity", "history": "training", "members": "family"}
    kind = mark or next((kind for name, kind in told.items() if name in metrics), "")
    if not kind:
        return None
    _refuse_other_records(folder, metrics.get("records"))
    texts = {
        name: (folder / name).read_text(encoding="utf-8").strip() for name in PROVENANCE if (folder / name).is_file()
    }
    return Run(folder, kind, metrics, texts)
