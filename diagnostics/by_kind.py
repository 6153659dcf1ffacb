"""A benchmark's speed-ups by kind of prompt, and the worst of them: is a method slower anywhere?

    python diagnostics/by_kind.py --rounds runs/auto/benchmark/rounds.parquet --prompts held_out.jsonl \\
        --output runs/auto/kinds

The kind of a prompt is the field `source` of its record. Prints tokens per second over vanilla contrastive decoding
(cd) with 95% intervals over prompts, for every method, alpha and kind, and writes kinds.json. A method is compared with
cd on the same prompts of the same run, where both took turns.
"""

import dcd_core.environment  # noqa: F401  isort: skip

import json
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import write_json_atomic
from dcd_core.locks import held
from dcd_core.text_files import text_lines
from diagnostics.records import read_records
from diagnostics.round_summary import BASELINE, summarise_rounds

ALL = "all kinds"


@dataclass
class Config:
    rounds: str = field(metadata={"help": "rounds.parquet of diagnostics/benchmark.py"})
    prompts: str = field(metadata={"help": "its prompts, JSONL {id, messages, source}"})
    output: str = field(metadata={"help": "folder for kinds.json"})


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    with held(Path(config.output)):
        found = speedups(config.rounds, kinds_of(config.prompts), config.prompts)
        write_json_atomic(Path(config.output) / "kinds.json", {"speedups": found})
    print_table(found)
    return 0


def kinds_of(path: str) -> dict[str, str]:
    """Prompt id -> kind. Raises UserError for a record without one."""
    kinds = {}
    try:
        lines = list(text_lines(path))
    except OSError as problem:
        raise UserError(f"cannot read the prompts in {path}: {problem.strerror or problem}") from None
    for number, line in lines:
        try:
            record = json.loads(line)
            kinds[str(record["id"])] = str(record["source"])
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}, line {number}: not a record with id and source, which names its kind") from None
    return kinds


def speedups(rounds: str, kinds: dict[str, str], where: str) -> list[dict]:
    """One entry per method but cd, alpha and kind, ``all kinds`` first. Raises UserError without a run of cd, or for a
    prompt that ``where`` lacks."""
    rows = read_records(Path(rounds), "rounds").rows
    if BASELINE not in set(rows["method"]):
        raise UserError(f"{rounds} holds no run of {BASELINE}, which speed-ups are over; benchmark it too")
    lacking = sorted(set(rows["prompt_id"]) - set(kinds))
    if lacking:
        raise UserError(f"{where} lacks the prompt '{lacking[0]}' of {rounds}; give the benchmark's own prompts")
    kind = rows["prompt_id"].map(kinds)
    parts = [(ALL, rows), *((name, rows[kind == name]) for name in sorted(set(kind)))]
    return [
        {name: entry[name] for name in ("method", "alpha", "prompts", "speedup")} | {"kind": kind}
        for kind, part in parts
        for entry in summarise_rounds(part)
        if entry["method"] != BASELINE
    ]


def print_table(found: list[dict]) -> None:
    """A row per kind and alpha, a column per method; then each method's worst kind."""
    methods = list(dict.fromkeys(entry["method"] for entry in found))
    cells = {(entry["kind"], entry["alpha"], entry["method"]): entry for entry in found}
    rows = []
    for kind, alpha in dict.fromkeys((entry["kind"], entry["alpha"]) for entry in found):
        entries = [cells.get((kind, alpha, method)) for method in methods]
        prompts = max(entry["prompts"] for entry in entries if entry)
        rows.append([kind, alpha, prompts, *(cell(entry["speedup"]) if entry else "-" for entry in entries)])
    print(tabulate(rows, headers=["kind", "alpha", "prompts", *methods], disable_numparse=True))
    for method in methods:
        worst = min((one for one in found if one["method"] == method), key=lambda one: one["speedup"]["estimate"])
        least = f"{worst['speedup']['estimate']:.2f} of {BASELINE}"
        print(f"{method}: at worst {least} ({worst['kind']}, alpha {worst['alpha']})")


def cell(speedup: dict) -> str:
    ends = "" if speedup["low"] is None else f" [{speedup['low']:.2f}, {speedup['high']:.2f}]"
    return f"{speedup['estimate']:.2f}{ends}"


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
