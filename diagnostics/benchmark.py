"""Speed of every method on the same prompts, beside what the cost model predicts from passes timed alone.

    python diagnostics/benchmark.py --expert EXPERT --amateur AMATEUR --head HEAD \\
        --prompts held_out.jsonl --alphas 0.1 0.5 --dtype bfloat16 --output runs/benchmark

Single passes are timed first. Then the methods answer prompt by prompt in turn, after a warm-up that is not
counted, so that drift of the machine hits all alike. Writes rounds.parquet, answers.jsonl and metrics.json, and
prints the table. Methods that never look at the contrast (ar, expert_sd) run once and are compared with `cd` over
all alphas. At temperature 0 in fp32 (or under --rule shared_noise) every answer is also compared, token by token,
with that of `cd` (of `ar` for methods without contrast). A stopped run goes on where it was. No timing counts while
another job runs on the machine.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, git_sha, parse_config, refuse_below, refuse_taken, run_entry, versions
from dcd_core.decode import Settings
from dcd_core.files import write_text_atomic
from dcd_core.flags import LoopFlags
from dcd_core.loading import head_for, load_models
from dcd_core.methods import METHODS, assemble
from dcd_core.models import load_scorer
from dcd_core.prompts import read_prompts
from diagnostics.agreement import TIE
from diagnostics.contest import Contest, Entry, agreement_counts, arms, refuse_lazy, round_columns, run_contest
from diagnostics.latency import time_passes
from diagnostics.loading import inputs_key, short_name
from diagnostics.parts import begin
from diagnostics.prediction import with_predictions
from diagnostics.records import read_records, write_records
from diagnostics.round_summary import summarise_rounds
from diagnostics.unread import UnreadFlags, heads_used

SHORTFALL = 0.9  # a method that measures below this part of its prediction is pointed out


@dataclass
class Config(UnreadFlags, LoopFlags):
    """Settings of the benchmark (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    prompts: str = field(metadata={"help": "prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the records"})
    amateur: str = field(default="", metadata={"help": "amateur: model folder or hub id (methods with contrast)"})
    head: str = field(default="", metadata={"help": "head: folder or hub id (methods that draft with one)"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    lm: str = field(default="", metadata={"help": "small language model that dcd_lm drafts with: folder or hub id"})
    methods: list[str] = field(
        default_factory=lambda: [name for name, method in METHODS.items() if method.usual],
        metadata={
            "help": f"any of {', '.join(METHODS)}, also in other forms than the flags say, such as dcd_eagle3@5x4:10 "
            "(depth, branch and nodes of a tree) or dcd_eagle3@deferred; cd is the baseline "
            "(default: all that need no more than an EAGLE3 head)"
        },
    )
    alphas: list[float] = field(default_factory=lambda: [0.1, 0.5], metadata={"help": "contrast strengths"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    cutoff: float = field(
        default=0.0, metadata={"help": "keep ids of at least this part of the expert's best; saving lazy needs one"}
    )
    rule: str = field(default="auto", metadata={"help": "auto, sampled, deterministic or shared_noise"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens of each answer"})
    limit: int = field(default=0, metadata={"help": "use the first so many prompts (0: all)"})
    repeats: int = field(default=1, metadata={"help": "answers of each method to each prompt"})
    warmup: int = field(default=1, metadata={"help": "prompts answered by every method before anything is counted"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    dataset: str = field(default="", metadata={"help": "name of the prompt set (default: the file's name)"})
    seed: int = field(default=0, metadata={"help": "seed of sampling"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        for name, items in (("--methods", self.methods), ("--alphas", self.alphas)):
            if not items or len(set(items)) < len(items):
                raise ValueError(f"{name} must name at least one, and none twice; got {items}")
        refuse_below(self, **LEAST)
        _ = Settings(**self.loop)  # refused here if a value, a method or a form is none
        refuse_lazy(self.entries, self.saving, self.cutoff)
        if min(self.alphas) < 0:
            raise ValueError(f"--alphas must be 0 or more, got {self.alphas}")

    @property
    def entries(self) -> list[Entry]:
        """The methods with the forms in which they are asked for."""
        return [Entry.parse(label) for label in self.methods]

    @property
    def judged(self) -> bool:
        """Whether equal texts can be asked for: never in bf16, where a pass's width moves a score by half a nat."""
        return self.dtype == "float32" and (self.temperature == 0 or self.rule == "shared_noise")


# an answer's first token belongs to the prefill, so one token makes no round
LEAST = {
    "gamma": 1,
    "branch": 1,
    "nodes": 0,
    "max_new_tokens": 2,
    "repeats": 1,
    "limit": 0,
    "warmup": 0,
    "temperature": 0,
    "seed": 0,
}


def main(argv: list[str] | None = None) -> int:
    """Time passes alone, let the methods answer, write the records, print measured beside predicted."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.read_limit, **arguments)
    used = heads_used([entry.method for entry in config.entries], config.head, config.amateur_head)
    prompts = config.unread(prompts, used, config.prompts)
    pair, head = load_models(config.expert, config.amateur, config.head, config.dtype, config.device)
    lm = load_scorer(config.lm, pair) if config.lm else None
    heads = {"head": head, "amateur_head": head_for(pair, config.amateur_head)}
    methods = {entry.method: assemble(entry.method, pair, lm=lm, **heads) for entry in config.entries}
    settings = Settings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=stops,
        seed=config.seed,
        rule=config.rule,
        timing=True,
        **config.loop,
    )
    lineup = arms(config.entries, config.alphas)
    contest = Contest(methods, lineup, pair, settings, config.temperature, config.repeats, config.judged, config.cutoff)
    parts, folder = begin(config, argv, result_settings(config))
    latency = parts.get("latency")
    if latency is None:
        typical = sorted(prompts, key=lambda prompt: len(prompt.ids))[len(prompts) // 2]
        shapes = [replace(settings, **entry.changes).shape for entry in config.entries]
        widths = {width for shape in shapes for width in (shape.branch, shape.budget + 1, 2 * shape.depth + 1)}
        latency = time_passes(
            pair, head, typical, settings.shape, config.max_new_tokens, lm, more_widths=tuple(sorted(widths))
        )
        parts.put("latency", latency)
    print_latency(latency)
    answers = list(run_contest(contest, prompts, config.warmup, parts))
    entries = write_tables(folder, answers, pair.tokenizer, latency, config)
    counts = agreement_counts(answers, lambda difference: difference["gap"] < TIE)
    finish_run(folder, metrics(entries, latency, counts, answers, config))
    parts.remove()
    print_table(entries)
    print_agreement(counts)
    return 0


def result_settings(config: Config) -> dict:
    """What decides an answer and its rounds: settings and inputs, not where results go."""
    left_out = ("output", "overwrite", "limit", "skip_trained", "dataset")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    models = (config.expert, config.amateur, config.head, config.lm, config.amateur_head)
    return kept | {"inputs": inputs_key(config.prompts, *models)}


def write_tables(folder: Path, answers: list[dict], tokenizer, latency: dict, config: Config) -> list[dict]:
    """Write rounds.parquet and answers.jsonl; the summary entries, with predictions where both models were timed."""
    provenance = {"settings": asdict(config), "versions": versions(), "git_sha": git_sha()}
    write_records(folder / "rounds.parquet", "rounds", round_columns(answers), provenance)
    lines = []
    for made in answers:
        kept = {name: made[name] for name in ("prompt_id", "method", "alpha", "run", "finish", "ids")}
        lines.append(json.dumps(kept | {"text": tokenizer.decode(made["ids"])}, ensure_ascii=False))
    write_text_atomic(folder / "answers.jsonl", "\n".join(lines) + "\n")
    rows = read_records(folder / "rounds.parquet", "rounds").rows
    entries = summarise_rounds(rows, config.gamma)
    return (
        with_predictions(entries, latency, config.gamma, config.branch, config.nodes)
        if "amateur" in latency
        else entries
    )


def metrics(entries: list[dict], latency: dict, counts: list[dict], answers: list[dict], config: Config) -> dict:
    """What metrics.json holds."""
    return {
        "pair": " / ".join(short_name(name) for name in (config.expert, config.amateur, config.head)),
        "dataset": config.dataset or short_name(config.prompts).removesuffix(".jsonl"),
        "methods": entries,
        "latency_ms": latency,
        "prefill_ms": 1000 * sum(made["prefill_s"] for made in answers) / len(answers),
        "agreement": counts,
    }


def print_latency(latency: dict[str, dict[str, float]]) -> None:
    """Milliseconds of single passes."""
    print("passes timed alone, median ms by number of new tokens")
    widths = list(latency["expert"])
    rows = [[name, *(times[width] for width in widths)] for name, times in latency.items()]
    print(tabulate(rows, headers=["", *widths], floatfmt=".2f"), flush=True)


def print_table(entries: list[dict]) -> None:
    """The speed table; methods that fall short of their prediction are named below it."""
    rows = []
    for entry in entries:
        times = [entry[name] for name in ("draft_step_ms", "expert_ms", "amateur_ms", "rest_ms")]
        speed = entry["tokens_per_second"]["estimate"]
        row = [entry["method"], entry["alpha"], entry["prompts"], speed, _interval(entry.get("speedup"))]
        row.append(entry.get("predicted_speedup"))
        rows.append([*row, entry["accepted_length"]["estimate"], entry["tokens_per_round"]["estimate"], *times])
    headers = ["method", "alpha", "prompts", "tokens/s", "speed-up over cd", "predicted", "accepted_length"]
    headers += ["tokens_per_round", "draft ms/step", "expert ms", "amateur ms", "rest ms"]
    print(tabulate(rows, headers=headers, floatfmt=".2f", disable_numparse=[4]))
    for entry in entries:
        if entry.get("measured_over_predicted", 1.0) < SHORTFALL:
            short = 100 * (1 - entry["measured_over_predicted"])
            print(f"{entry['method']}, alpha {entry['alpha']}: {short:.0f}% short of the predicted speed-up")
    for entry in entries:
        if "over_unsaved" in entry:
            over = f"{_interval(entry['over_unsaved'])} over {entry['unsaved']}, {entry['prompts']} prompts"
            passes = f"{entry['expert_passes']} expert and {entry['amateur_passes']} amateur passes"
            print(f"{entry['method']}, alpha {entry['alpha']}: {over}, {passes}, {entry['flips']} flips")


def print_agreement(counts: list[dict]) -> None:
    """Which texts are the reference's, and where others part from it."""
    for entry in counts:
        total = entry["equal"] + entry["near_ties"] + entry["different"]
        alpha = "" if entry["alpha"] is None else f", alpha {entry['alpha']:g}"
        print(
            f"{entry['method']}{alpha}: {entry['equal']} of {total} texts equal those of {entry['reference']}, "
            f"{entry['near_ties']} part at a near-tie, {entry['different']} differ"
        )
        for one in entry["divergences"]:
            print(f"  {one['prompt_id']} from token {one['position']} on, gap of the two best scores {one['gap']:.1e}")


def _interval(found: dict | None) -> str:
    if found is None:
        return "-"
    ends = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['estimate']:.2f}{ends}"


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
