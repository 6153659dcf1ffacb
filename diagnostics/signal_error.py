"""Signal and drafter error at every position of the pair's own text: records, and the headline shares.

    python diagnostics/signal_error.py --expert EXPERT --amateur AMATEUR --head HEAD \\
        --prompts held_out.jsonl --alphas 0.1 0.5 --output runs/signal

For every alpha, vanilla contrastive decoding writes one greedy answer to each prompt. Over that fixed history
expert, amateur and head are run once more, teacher-forced, and every quantity of `diagnostics.records.POSITIONS` is
taken at every position that a drafter would draft (all but the answer's first token, which the prefill gives).
Writes positions.parquet and metrics.json. A stopped run goes on where it was.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import asdict, dataclass, field

import torch
from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, git_sha, parse_config, refuse_below, refuse_taken, run_entry, save_run, versions
from dcd_core.contrast import Target
from dcd_core.decode import Generation, Prompt, Settings, decode
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import load_models
from dcd_core.methods import assemble
from dcd_core.models import Pair
from dcd_core.prompts import read_prompts
from diagnostics.loading import inputs_key, short_name
from diagnostics.parts import Parts, at_every_alpha
from diagnostics.position_quantities import position_quantities
from diagnostics.position_summary import summarise_by_alpha
from diagnostics.records import read_records, write_records
from diagnostics.wording import points

ROWS = 64  # rows of the whole vocabulary worked on at once


@dataclass
class Config:
    """Settings of the signal-versus-error study."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    head: str = field(metadata={"help": "expert-aligned EAGLE3 head: folder or hub id"})
    prompts: str = field(metadata={"help": "held-out prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the records"})
    alphas: list[float] = field(
        default_factory=lambda: [0.1, 0.3, 0.5, 1.0], metadata={"help": "contrast strengths; one rollout set for each"}
    )
    limit: int = field(default=0, metadata={"help": "use the first so many prompts (0: all)"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens of each rollout"})
    batch: int = field(
        default=8, metadata={"help": "prompts at a time; finished batches are kept when a run is stopped"}
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    dataset: str = field(
        default="", metadata={"help": "name of the prompt set in the records (default: the file's name)"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the bootstrap"})
    resamples: int = field(default=10_000, metadata={"help": "bootstrap resamples over prompts"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        if not self.alphas or min(self.alphas) < 0:
            raise ValueError(f"--alphas must be numbers of 0 or more, got {self.alphas}")
        if len(set(self.alphas)) < len(self.alphas):
            raise ValueError(f"--alphas names a contrast strength twice: {self.alphas}")
        if self.max_new_tokens < 2:
            raise ValueError("--max_new_tokens must be at least 2: an answer's first token is never drafted")
        refuse_below(self, batch=1, resamples=1, limit=0, seed=0)


def main(argv: list[str] | None = None) -> int:
    """Roll out, measure, write the records, print the shares."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.limit, **arguments)
    pair, head = load_models(config.expert, config.amateur, config.head, config.dtype, config.device)
    parts = Parts(config.output, result_settings(config), config.overwrite)
    folder = save_run(config.output, config, argv, config.overwrite)
    names = {
        "pair": " / ".join(short_name(name) for name in (config.expert, config.amateur, config.head)),
        "dataset": config.dataset or short_name(config.prompts).removesuffix(".jsonl"),
    }
    pieces = measure(pair, head, prompts, stops, config, parts)
    columns = {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
    columns |= {name: [value] * len(columns["position"]) for name, value in names.items()}
    provenance = {"settings": asdict(config), "versions": versions(), "git_sha": git_sha()}
    write_records(folder / "positions.parquet", "positions", columns, provenance)
    rows = read_records(folder / "positions.parquet", "positions").rows
    by_alpha = summarise_by_alpha(rows, config.resamples, config.seed)
    finish_run(folder, names | {"by_alpha": by_alpha})
    parts.remove()
    print_summary(by_alpha)
    return 0


def result_settings(config: Config) -> dict:
    """What decides a batch's rows: settings and inputs, not where results go or how they are summed."""
    kept = {name: value for name, value in asdict(config).items() if name not in KEY_LEAVES_OUT}
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, config.head)}


KEY_LEAVES_OUT = ("output", "overwrite", "alphas", "limit", "seed", "resamples", "dataset", "device")


def measure(
    pair: Pair, head: Eagle3Head, prompts: list[Prompt], stops: tuple[int, ...], config: Config, parts: Parts
) -> list[dict[str, list]]:
    """Columns of every batch of prompts at every alpha."""
    longest = config.max_new_tokens
    return at_every_alpha(
        prompts,
        config.alphas,
        config.batch,
        parts,
        "signal and error",
        lambda batch, alpha: measure_batch(pair, head, batch, stops, alpha, longest),
    )


def measure_batch(
    pair: Pair, head: Eagle3Head, prompts: list[Prompt], stops: tuple[int, ...], alpha: float, max_new_tokens: int
) -> dict[str, list]:
    """Greedy contrastive rollouts of some prompts, and the quantities at each of their positions, as columns."""
    settings = Settings(target=Target(alpha=alpha, temperature=0.0), max_new_tokens=max_new_tokens, stop_ids=stops)
    rollouts = decode(assemble("cd", pair), prompts, settings, max_batch=len(prompts))
    columns: dict[str, list] = {}
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        found = measure_rollout(pair, head, prompt, rollout, alpha)
        count = len(found["position"])
        found |= {"prompt_id": [prompt.id] * count, "rollout_alpha": [alpha] * count, "alpha": [alpha] * count}
        for name, values in found.items():
            columns.setdefault(name, []).extend(values)
    return columns


@torch.no_grad()
def measure_rollout(pair: Pair, head: Eagle3Head, prompt: Prompt, rollout: Generation, alpha: float) -> dict[str, list]:
    """The quantities at answer positions 1, 2, ... of one rollout.

    Symbols of the text x: the token at place s is predicted by row s - 1 of expert and amateur, and drafted by row
    s - 2 of the head, which pairs x_(s-1) with the expert's features at s - 2.
    """
    ids = torch.tensor([prompt.ids + rollout.ids], device=pair.expert.device)
    places = torch.arange(len(prompt.ids) + 1, ids.shape[1], device=ids.device)
    expert = pair.expert.forward_full(ids, features=True, logits=False)
    amateur = pair.amateur.forward_full(ids, logits=False)
    cache = head.new_cache(1, ids.shape[1])
    states = head.step(pair.expert.embedding(ids[:, 1:]), head.fuse(expert.features[:, :-1]), cache)
    columns = {"position": list(range(1, len(rollout.ids)))}
    for some in places.split(ROWS):
        found = position_quantities(
            pair.expert.output_layer(expert.hidden[0, some - 1]),
            pair.amateur.output_layer(amateur.hidden[0, some - 1]),
            head.logits(states[0, some - 2]),
            head.target_ids,
            alpha,
        )
        for name, values in found.items():
            columns.setdefault(name, []).extend(values.tolist())
    return columns


def print_summary(by_alpha: dict[str, dict]) -> None:
    """The headline shares as a table."""
    shown = {
        "signal < 1 nat": "share_signal_below_1",
        "KL(e||p) >= 2 nats": "share_error_above_2",
        "headroom TV(p, pi)": "mean_headroom_tv",
        "flipped choices": "mean_headroom_flip",
        "oracle gain, acceptance": "gain_acceptance",
        "oracle gain, top-1": "gain_top1",
        "acceptance of e": "acceptance_expert_aligned",
    }
    table = [
        [alpha, found["positions"], *(points(found[name]) for name in shown.values())]
        for alpha, found in by_alpha.items()
    ]
    print("percent of positions, or points; [95% interval over prompts]")
    print(tabulate(table, headers=["alpha", "positions", *shown], disable_numparse=True))


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
