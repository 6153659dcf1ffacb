"""Tokens per second by batch size, for vanilla contrastive decoding and any other method.

    python diagnostics/throughput.py --expert EXPERT --amateur AMATEUR --head HEAD --prompts held_out.jsonl \\
        --methods cd dcd_eagle3 dcd_ngram --batches 1 2 4 8 16 --output runs/throughput

Every method answers the same prompts at every batch size; finished rows leave and waiting prompts enter. All of that is
done `repeats` times in turns, so that drift of the machine hits all alike. A figure is tokens over seconds, prefill
included, of all repeats; its spread is the smallest and largest of the repeats. Writes metrics.json, prints the table.
A stopped run goes on where it was. No timing counts while another job runs on the machine.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import time
from dataclasses import asdict, dataclass, field, replace

from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry
from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Prompt, Settings, decode
from dcd_core.flags import LoopFlags
from dcd_core.loading import head_for, load_models
from dcd_core.methods import assemble
from dcd_core.progress import Bar
from dcd_core.prompts import read_prompts
from diagnostics.contest import WITHOUT_LM, Entry, refuse_lazy, refuse_lm
from diagnostics.loading import inputs_key
from diagnostics.parts import begin
from diagnostics.unread import UnreadFlags, heads_used

BASELINE = "cd"


@dataclass
class Config(UnreadFlags, LoopFlags):
    """Settings of the measurement (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    prompts: str = field(metadata={"help": "prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the result"})
    head: str = field(default="", metadata={"help": "head: folder or hub id (methods that draft with one)"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    methods: list[str] = field(
        default_factory=lambda: ["cd", "dcd_ngram", "dcd_eagle3", "dcd_deferred"],
        metadata={"help": f"any of {', '.join(WITHOUT_LM)}, also in forms such as dcd_eagle3@5x4:10"},
    )
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "rows at a time"})
    alpha: float = field(default=0.1, metadata={"help": "contrast strength"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    cutoff: float = field(
        default=0.0, metadata={"help": "keep ids of at least this part of the expert's best; saving lazy needs one"}
    )
    limit: int = field(default=32, metadata={"help": "use the first so many prompts (0: all)"})
    max_new_tokens: int = field(default=48, metadata={"help": "tokens of each answer"})
    repeats: int = field(default=2, metadata={"help": "times that everything is answered"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    seed: int = field(default=0, metadata={"help": "seed of sampling"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        for name, items in (("--methods", self.methods), ("--batches", self.batches)):
            if not items or len(set(items)) < len(items):
                raise ValueError(f"{name} must name at least one, and none twice; got {items}")
        if min(self.batches) < 1:
            raise ValueError(f"--batches must be 1 or more, got {self.batches}")
        refuse_below(self, limit=0, max_new_tokens=2, repeats=1, seed=0)
        _ = self.settings((), "cd")  # refused here if out of range
        entries = [Entry.parse(label) for label in self.methods]
        refuse_lazy(entries, self.saving, self.cutoff)
        refuse_lm(entries)

    def settings(self, stops: tuple[int, ...], label: str) -> Settings:
        """How one entry decodes."""
        target = Target(alpha=self.alpha, temperature=self.temperature, cutoff=self.cutoff)
        plain = Settings(target, self.max_new_tokens, stops, seed=self.seed, **self.loop)
        return replace(plain, **Entry.parse(label).changes)


def main(argv: list[str] | None = None) -> int:
    """Answer everything by every method at every batch size, in turns; print the table."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.read_limit, **arguments)
    used = heads_used([Entry.parse(label).method for label in config.methods], config.head, config.amateur_head)
    prompts = config.unread(prompts, used, config.prompts)
    pair, head = load_models(config.expert, config.amateur, config.head, config.dtype, config.device)
    heads = {"head": head, "amateur_head": head_for(pair, config.amateur_head)}
    methods = {label: assemble(Entry.parse(label).method, pair, **heads) for label in config.methods}
    settings = result_settings(config) | {"asked": [prompt.id for prompt in prompts]}
    parts, folder = begin(config, argv, settings)
    runs = []
    turns = [
        (repeat, batch, label) for repeat in range(config.repeats) for batch in config.batches for label in methods
    ]
    with Bar(len(turns), "throughput", unit="runs") as bar:
        for repeat, batch, label in turns:
            name = f"{label}-{batch}-{repeat}"
            found = parts.get(name)
            if found is None:
                found = answer_all(methods[label], prompts, config.settings(stops, label), batch)
                parts.put(name, found)
            runs.append({"method": label, "batch": batch, "repeat": repeat} | found)
            bar.update(1, f"{label} at {batch}")
    table = summarise(runs)
    finish_run(folder, {"alpha": config.alpha, "prompts": len(prompts), "throughput": table})
    parts.remove()
    print_table(table, config, len(prompts))
    return 0


def result_settings(config: Config) -> dict:
    """What decides a run's tokens and seconds."""
    left_out = ("output", "overwrite", "limit", "skip_trained", "methods", "batches", "repeats", "device")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    return kept | {
        "inputs": inputs_key(config.prompts, config.expert, config.amateur, config.head, config.amateur_head)
    }


def answer_all(method: Assembled, prompts: list[Prompt], settings: Settings, batch: int) -> dict:
    """Tokens and seconds of all answers, after a short warm-up."""
    decode(method, prompts[: min(batch, 2)], replace(settings, max_new_tokens=4), max_batch=batch)
    start = time.perf_counter()
    made = decode(
        method, prompts, settings, max_batch=batch
    )  # ends with tokens on the host: nothing is left to wait for
    return {"tokens": sum(len(answer.ids) for answer in made), "seconds": time.perf_counter() - start}


def summarise(runs: list[dict]) -> list[dict]:
    """Per method and batch: tokens/s of all repeats, the spread over them, and the ratio to batch 1 and to `cd`."""
    groups: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["batch"]), []).append(run)
    rates = {
        key: sum(run["tokens"] for run in some) / sum(run["seconds"] for run in some) for key, some in groups.items()
    }
    found = []
    for (method, batch), some in groups.items():
        each = [run["tokens"] / run["seconds"] for run in some]
        first = rates.get((method, min(other for name, other in groups if name == method)))
        baseline = rates.get((BASELINE, batch))
        entry = {"method": method, "batch": batch, "tokens_per_second": rates[method, batch]}
        entry |= {"low": min(each), "high": max(each), "over_smallest_batch": rates[method, batch] / first}
        found.append(entry | ({"over_cd": rates[method, batch] / baseline} if baseline else {}))
    return found


def print_table(table: list[dict], config: Config, prompts: int) -> None:
    """One row a method, one column a batch size."""
    cells = {(entry["method"], entry["batch"]): entry for entry in table}
    rows = []
    for method in config.methods:
        row = [method]
        for batch in config.batches:
            entry = cells[method, batch]
            over = f", {entry['over_cd']:.2f} of cd" if "over_cd" in entry and method != BASELINE else ""
            row.append(f"{entry['tokens_per_second']:.1f} ({entry['over_smallest_batch']:.2f}x{over})")
        rows.append(row)
    print(f"tokens per second on {prompts} prompts (over the smallest batch; over cd at the same batch)")
    print(tabulate(rows, headers=["method", *(f"batch {batch}" for batch in config.batches)], disable_numparse=True))


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
