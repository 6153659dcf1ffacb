"""Time outside model passes: ranking, maps, tree building, verification, cache moves.

    python diagnostics/overhead.py --expert EXPERT --amateur AMATEUR --head HEAD --prompts held_out.jsonl \\
        --methods dcd_eagle3 dcd_eagle3@5x4:10 dcd_hybrid@5x4:10 --output runs/overhead

Every pass of expert, amateur and head (its block, its fusing layer, its output layer) is timed where it happens, and
taken from the time of all rounds; what is left over is the project's own. One prompt at a time, greedy and at
temperature 1. Writes metrics.json and prints the table. No timing counts while another job runs on the machine.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry, save_run
from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Prompt, Settings, stream
from dcd_core.flags import LoopFlags
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import head_for, load_models
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel
from dcd_core.progress import progress
from dcd_core.prompts import read_prompts
from diagnostics.contest import WITHOUT_LM, Entry, refuse_lazy, refuse_lm

ALLOWED = 0.05  # share of a round that may pass outside model passes


@dataclass
class Config(LoopFlags):
    """Settings of the measurement (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    head: str = field(metadata={"help": "EAGLE3 or dual-input head: folder or hub id"})
    prompts: str = field(metadata={"help": "prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the result"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    methods: list[str] = field(
        default_factory=lambda: [name for name, method in METHODS.items() if method.usual],
        metadata={"help": f"any of {', '.join(WITHOUT_LM)}, also in forms such as dcd_eagle3@5x4:10"},
    )
    alpha: float = field(default=0.1, metadata={"help": "contrast strength"})
    cutoff: float = field(
        default=0.0, metadata={"help": "keep ids of at least this part of the expert's best; saving lazy needs one"}
    )
    limit: int = field(default=3, metadata={"help": "use the first so many prompts (0: all)"})
    max_new_tokens: int = field(default=32, metadata={"help": "tokens of each answer"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    seed: int = field(default=0, metadata={"help": "seed of sampling"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods must name at least one, and none twice; got {self.methods}")
        refuse_below(self, alpha=0, limit=0, max_new_tokens=3, seed=0)
        _ = Settings(**self.loop)  # refused here if out of range
        entries = [Entry.parse(label) for label in self.methods]
        refuse_lazy(entries, self.saving, self.cutoff)
        refuse_lm(entries)


def main(argv: list[str] | None = None) -> int:
    """Decode with every pass timed; print the share of the rest."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.limit, **arguments)
    pair, head = load_models(config.expert, config.amateur, config.head, config.dtype, config.device)
    heads = {"head": head, "amateur_head": head_for(pair, config.amateur_head)}
    methods = {label: assemble(Entry.parse(label).method, pair, **heads) for label in config.methods}
    folder = save_run(config.output, config, argv, config.overwrite)
    totals: dict[tuple[str, float], dict[str, float]] = {}
    arms = [(label, temperature) for label in config.methods for temperature in (0.0, 1.0)]
    for index, prompt in enumerate(progress(prompts, len(prompts), "overhead", "prompts")):
        for label, temperature in arms:
            entry = Entry.parse(label)
            target = Target(alpha=config.alpha, temperature=temperature, cutoff=config.cutoff)
            settings = Settings(target, config.max_new_tokens, stops, seed=config.seed, timing=True, **config.loop)
            method, settings = methods[label], replace(settings, **entry.changes)
            if index == 0:
                time_rounds(method, prompt, replace(settings, max_new_tokens=4))  # warm-up
            found = time_rounds(method, prompt, settings)
            total = totals.setdefault((label, temperature), dict.fromkeys(found, 0.0))
            for name, value in found.items():
                total[name] += value
    table = [
        {"method": label, "temperature": temperature, **total, "share": 1 - total["passes_s"] / total["rounds_s"]}
        for (label, temperature), total in totals.items()
    ]
    finish_run(folder, {"alpha": config.alpha, "overhead": table, "allowed": ALLOWED})
    print_table(table, len(prompts))
    return 0


def time_rounds(method: Assembled, prompt: Prompt, settings: Settings) -> dict[str, float]:
    """Seconds of all rounds of one answer, of the model passes in them, and the number of rounds."""
    rounds = stream(method, [prompt], settings)
    next(rounds)  # the prefill
    with timed_passes() as spent:
        start = time.perf_counter()
        count = sum(1 for _ in rounds)
        seconds = time.perf_counter() - start
    return {"rounds": float(count), "rounds_s": seconds, "passes_s": spent[0]}


PASSES = ((LanguageModel, "_run"), (Eagle3Head, "step"), (Eagle3Head, "logits"), (Eagle3Head, "fuse"))


@contextmanager
def timed_passes() -> Iterator[list[float]]:
    """The seconds that models' passes take inside, in a list of one number; passes do not nest."""
    spent, shipped = [0.0], [(owner, name, getattr(owner, name)) for owner, name in PASSES]

    def timed(original):
        def run(*args, **kwargs):
            start = _now()
            result = original(*args, **kwargs)
            spent[0] += _now() - start
            return result

        return run

    try:
        for owner, name, original in shipped:
            setattr(owner, name, timed(original))
        yield spent
    finally:
        for owner, name, original in shipped:
            setattr(owner, name, original)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_table(table: list[dict], prompts: int) -> None:
    """Milliseconds a round, and the share outside model passes."""
    rows = []
    for entry in table:
        each = 1000 / entry["rounds"] if entry["rounds"] else 0.0
        outside = entry["rounds_s"] - entry["passes_s"]
        mark = "" if entry["share"] <= ALLOWED else "above 5%"
        row = [entry["method"], f"{entry['temperature']:g}", f"{entry['rounds_s'] * each:.1f}", f"{outside * each:.2f}"]
        rows.append([*row, f"{100 * entry['share']:.1f}%", mark])
    print(f"{prompts} prompts")
    print(tabulate(rows, headers=["method", "T", "ms a round", "outside passes", "share", ""], disable_numparse=True))


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
