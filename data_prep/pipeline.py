"""Run the stages of a pipeline file in order, each one only if what it depends on has changed.

    python data_prep/pipeline.py --pipeline configs/pipelines/demo.yaml            # everything that is not finished
    python data_prep/pipeline.py --pipeline configs/pipelines/demo.yaml --list     # what is finished, what is not
    python data_prep/pipeline.py --pipeline configs/pipelines/demo.yaml --from head
    python data_prep/pipeline.py --pipeline configs/pipelines/demo.yaml --only signal report

A stage is skipped when its command, the contents of its inputs and the contents of its outputs are what they were when
it last finished. It may be stopped at any moment: the same command goes on. A stage that was stopped is started again
over its own half-done work; one whose command or inputs changed since starts from nothing.
"""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from data_prep.pipeline_file import PLACES, ROOT, Pipeline, Stage, fill, free_port, load_pipeline
from dcd_core.config import make_folder, parse_config, refuse_below, run_entry
from dcd_core.errors import UserError
from dcd_core.files import TEMPORARY, check_output_folder, content_hash, file_hash, remove, write_json_atomic
from dcd_core.locks import held

FINISHED, STOPPED = "finished", "stopped half-way"


@dataclass
class Config:
    """What to run, and where."""

    pipeline: str = field(
        default="configs/pipelines/demo.yaml",
        metadata={"help": "YAML file of stages, here or in the source tree"},
    )
    run_dir: str = field(default="", metadata={"help": "folder for everything the run makes (default: as in the file)"})
    cache_dir: str = field(
        default="", metadata={"help": "folder for models and data (default: $DCD_CACHE, ~/.cache/dcd)"}
    )
    only: list[str] = field(default_factory=list, metadata={"help": "run these stages and no others"})
    from_stage: str = field(default="", metadata={"help": "skip the stages before this one", "aliases": ["--from"]})
    list_stages: bool = field(default=False, metadata={"help": "print the state of each stage", "aliases": ["--list"]})
    overwrite: bool = field(default=False, metadata={"help": "redo the chosen stages even if they are finished"})
    started: float = field(default=0.0, metadata={"help": "Unix time from which the total is counted (0: now)"})

    def __post_init__(self):
        refuse_below(self, started=0)
        if self.only and self.from_stage:
            raise ValueError("--only and --from choose stages in two ways; give one of them")


def main(argv: list[str] | None = None) -> int:
    """Run, or list, the chosen stages; returns the exit code of a stage that failed, else 0."""
    config = parse_config(Config, argv, description=__doc__)
    pipeline = load_pipeline(config.pipeline, config.run_dir, config.cache_dir)
    chosen = choose(pipeline, config.only, config.from_stage)
    if pipeline.run.exists() and not pipeline.run.is_dir():
        raise UserError(f"--run_dir {pipeline.run} is a file: give a folder")
    if config.list_stages:
        print_states(pipeline)
        return 0
    with held(make_folder(check_output_folder(pipeline.run))) as lock:
        return run_stages(pipeline, chosen, config.started or time.time(), config.overwrite, lock)


def choose(pipeline: Pipeline, only: list[str], first: str) -> list[Stage]:
    """The stages that the flags select, in the file's order. Raises UserError for a name that no stage has."""
    names = [stage.name for stage in pipeline.stages]
    for name in [*only, *([first] if first else [])]:
        if name not in names:
            raise UserError(f"there is no stage '{name}'; the stages are {', '.join(names)}")
    start = names.index(first) if first else 0
    return [stage for stage in pipeline.stages[start:] if not only or stage.name in only]


def run_stages(pipeline: Pipeline, chosen: list[Stage], started: float, overwrite: bool, lock: int) -> int:
    """Run what is not finished, printing each budget before and each time after."""
    for stage in chosen:
        found, key = state(pipeline, stage)
        if found == FINISHED and not overwrite:
            print(f"--- {stage.name}: finished before, nothing has changed", flush=True)
            continue
        if found == STOPPED and not overwrite and wrote_its_metrics(pipeline, stage):
            record(pipeline, stage, key, None)
            print(f"--- {stage.name}: was finished when it was stopped", flush=True)
            continue
        print(f"--- {stage.name}: {found}; budget {clock(stage.budget_s)}", flush=True)
        if found != STOPPED or overwrite:
            clear(pipeline, stage)
        stamp = stamp_path(pipeline, stage)
        write_json_atomic(stamp, {"key": key, "finished": False})
        began = time.time()
        code = run_command(pipeline, stage, lock)
        seconds = time.time() - began
        if code:
            after = f"stage '{stage.name}' ended with exit code {code} after {clock(seconds)}"
            print(f"error: {after}; the same command goes on from there", file=sys.stderr, flush=True)
            return code
        record(pipeline, stage, key, seconds)
        over = f", {clock(seconds - stage.budget_s)} over its budget" if seconds > stage.budget_s else ""
        total = clock(time.time() - started)
        print(f"--- {stage.name}: took {clock(seconds)} of {clock(stage.budget_s)}{over}; total {total}", flush=True)
    summarise(pipeline, time.time() - started)
    return 0


def record(pipeline: Pipeline, stage: Stage, key: str, seconds: float | None) -> None:
    """Write down that a stage is finished, and what it made."""
    outputs = {text: hash_of(pipeline, text, f"stage '{stage.name}' did not write") for text in stage.outputs}
    stamp = {"key": key, "finished": True, "seconds": seconds, "outputs": outputs}
    write_json_atomic(stamp_path(pipeline, stage), stamp)


def wrote_its_metrics(pipeline: Pipeline, stage: Stage) -> bool:
    """Whether a stage was stopped in the moment between its own end and our record of it.

    A run folder's metrics.json is the last file that its script writes, and the script refuses to do a finished run
    again.
    """
    began = stamp_path(pipeline, stage).stat().st_mtime_ns
    folders = {
        folder for text in stage.outputs for path in matches(pipeline, text)[1] for folder in (path, path.parent)
    }
    marks = [folder / "metrics.json" for folder in folders if folder != pipeline.run]
    return any(mark.is_file() and mark.stat().st_mtime_ns >= began for mark in marks)


def state(pipeline: Pipeline, stage: Stage) -> tuple[str, str]:
    """What to say about a stage (FINISHED, STOPPED, or why it has to run), and the key of its command and inputs.

    The key leaves out where the run, the cache and Python are, and the port: no result depends on them. Raises
    UserError if an input is not there.
    """
    own = pipeline.variables | {name: f"{{{name}}}" for name in PLACES}
    inputs = {text: hash_of(pipeline, text, f"stage '{stage.name}' needs") for text in stage.inputs}
    key = content_hash([[fill(part, own) for part in stage.command], inputs])
    stamp = read_stamp(pipeline, stage)
    if stamp is None:
        return "not run yet", key
    if stamp["key"] != key:
        return "its command or inputs changed", key
    if not stamp["finished"]:
        return STOPPED, key
    same = all(unchanged(pipeline, text, known) for text, known in stamp["outputs"].items())
    return (FINISHED if same else "an output is gone or altered"), key


def print_states(pipeline: Pipeline) -> None:
    """One line per stage; a stage whose inputs are not made yet waits."""
    width = max(len(stage.name) for stage in pipeline.stages)
    for stage in pipeline.stages:
        try:
            found = state(pipeline, stage)[0]
        except UserError:
            found = "waits for its inputs"
        print(f"{stage.name:{width}} {found:32} budget {clock(stage.budget_s)}")


def clear(pipeline: Pipeline, stage: Stage) -> None:
    """Remove what an earlier run of the stage left, so that its command never meets results of other settings.

    Only inside the run folder, or where an output is not what this run's own stamp says the stage made: a cache may be
    shared, and the command knows by content what it can use of it.
    """
    made = (read_stamp(pipeline, stage) or {}).get("outputs", {})
    for text in stage.outputs:
        altered = text in made and not unchanged(pipeline, text, made[text])
        for path in matches(pipeline, text)[1]:
            inside = path.parent.resolve().is_relative_to(
                pipeline.run.resolve()
            )  # a link in there is removed, not followed
            if inside or altered:
                remove(path)


def run_command(pipeline: Pipeline, stage: Stage, lock: int) -> int:
    """Run one command with this terminal as its own; returns its exit code, 128 + n after signal n.

    The child inherits the lock: if this process is killed outright, the lock lasts until the child has ended.
    """
    command = [fill(part, pipeline.variables | {"port": free_port()}) for part in stage.command]
    environment = os.environ | {
        "DCD_CACHE": pipeline.variables["cache"],
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    children, stops = [], []

    def stop(*_: object) -> None:
        stops.append(True)
        for child in children:
            child.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[lock]))
        if stops:  # the signal came while the child was being started
            children[0].terminate()
        code = children[0].wait()
    except OSError as error:
        raise UserError(f"stage '{stage.name}' cannot start {command[0]}: {error.strerror}") from None
    except KeyboardInterrupt:
        for child in children:  # the terminal has sent it to the child as well
            child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def summarise(pipeline: Pipeline, seconds: float) -> None:
    """Write what each stage took to stages.json in the run folder, and print the last line."""
    rows = {}
    for stage in pipeline.stages:
        stamp = read_stamp(pipeline, stage)
        rows[stage.name] = {"budget_s": stage.budget_s, "seconds": stamp.get("seconds") if stamp else None}
    write_json_atomic(pipeline.run / "stages.json", rows)
    made = pipeline.result and (ROOT / pipeline.result).exists()
    result = f"{pipeline.result}: " if made else ""
    print(f"{result}done in {clock(seconds)}, budget {clock(pipeline.budget_s)}", flush=True)


def matches(pipeline: Pipeline, text: str) -> tuple[Path, list[Path]]:
    """The folder that a path or a glob starts from, and the files and folders that it stands for now."""
    path = ROOT / fill(text, pipeline.variables)
    parts = path.parts
    magic = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), None)
    if magic is None:
        return path.parent, [path] if path.exists() else []
    base = Path(*parts[:magic])
    return base, sorted(base.glob("/".join(parts[magic:])))


def hash_of(pipeline: Pipeline, text: str, complaint: str) -> str:
    """Hash of the names and contents of the files that a path, a folder or a glob stands for.

    Raises UserError, beginning with `complaint`, if there is none.
    """
    base, found = matches(pipeline, text)
    files = []
    for path in found:
        members = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [member for member in members if member.is_file() and not passing(member.relative_to(base))]
    if not files:
        raise UserError(f"{complaint} {fill(text, pipeline.variables)}, which is not there")
    return content_hash([[file.relative_to(base).as_posix(), known_hash(file)] for file in files])


def unchanged(pipeline: Pipeline, text: str, known: str) -> bool:
    """Whether an output still has the hash that was recorded when its stage finished."""
    try:
        return hash_of(pipeline, text, "") == known
    except UserError:
        return False


def passing(path: Path) -> bool:
    """Whether a file is no content: compiled Python, or half-written under a temporary name."""
    return any(part == "__pycache__" or part.startswith(f"{TEMPORARY}-") for part in path.parts)


def known_hash(file: Path) -> str:
    """Hash of a file, computed once per process while its size and time stay the same."""
    status = file.stat()
    return _hash_at(str(file), status.st_size, status.st_mtime_ns)


@cache
def _hash_at(file: str, _size: int, _time: int) -> str:
    return file_hash(file)


def stamp_path(pipeline: Pipeline, stage: Stage) -> Path:
    """Where the run folder keeps what is known of a stage."""
    return pipeline.run / ".stages" / f"{stage.name}.json"


def read_stamp(pipeline: Pipeline, stage: Stage) -> dict | None:
    """What is known of a stage: key, finished, seconds, outputs; None before its first run."""
    path = stamp_path(pipeline, stage)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def clock(seconds: float) -> str:
    """Seconds in words: `4.2 s`, `3 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
