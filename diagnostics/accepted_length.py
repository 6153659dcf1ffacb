"""Accepted length of one or more EAGLE3 heads on the same rollouts, by replay.

    python diagnostics/accepted_length.py --expert EXPERT --amateur AMATEUR --heads runs/a/head runs/b/head \\
        --prompts held_out.jsonl --alphas 0.1 0.5 --output runs/accepted_length

Vanilla contrastive decoding answers every prompt once per alpha, greedily. Every lossless method would emit the same
tokens, so the rounds of `dcd_eagle3` follow from that rollout alone (dcd_core/replay.py): each head is unrolled on its
own drafts over the stored text, and no further pass of expert or amateur is needed. Writes metrics.json and prints
accepted length (L, the extra token not counted) with its 95% interval over prompts. A stopped run goes on where it was.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import asdict, dataclass, field

import torch
from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import FROM_PAIR, finish_run, parse_config, refuse_below, refuse_taken, run_entry
from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import load_models
from dcd_core.models import Pair
from dcd_core.prompts import read_prompts
from dcd_core.replay import Rollout, replay
from diagnostics.intervals import paired_difference, ratio_of_sums
from diagnostics.loading import inputs_key, refuse_dual_input
from diagnostics.parts import at_every_alpha, begin
from diagnostics.rollouts import RolloutFlags, Rollouts
from diagnostics.wording import plain


@dataclass(kw_only=True)
class Config(RolloutFlags):
    """Settings of the comparison."""

    heads: list[str] = field(
        metadata={"help": "EAGLE3 heads (folders or hub ids); the first is the base", FROM_PAIR: "head"}
    )
    prompts: str = field(metadata={"help": "held-out prompts, JSONL {id, messages}"})
    alphas: list[float] = field(default_factory=lambda: [0.1, 0.5], metadata={"help": "contrast strengths"})
    gamma: int = field(default=5, metadata={"help": "drafts per round"})
    batch: int = field(default=16, metadata={"help": "prompts at a time"})

    def __post_init__(self):
        super().__post_init__()
        for name, items in (("--heads", self.heads), ("--alphas", self.alphas)):
            if not items or len(set(items)) < len(items):
                raise ValueError(f"{name} must name at least one, and none twice; got {items}")
        refuse_below(self, gamma=1, batch=1, max_new_tokens=2)
        if min(self.alphas) < 0:
            raise ValueError(f"--alphas must be 0 or more, got {self.alphas}")


def main(argv: list[str] | None = None) -> int:
    """Roll out once per alpha, replay every head, compare."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    prompts, stops = read_prompts(
        config.prompts, config.expert, config.read_limit, **template_arguments(config.template_args)
    )
    prompts = config.unread(prompts, config.heads, config.prompts)
    pair, heads = load_heads(config)
    texts = config.texts(pair, stops)
    parts, folder = begin(config, argv, result_settings(config))
    pieces = at_every_alpha(
        prompts,
        config.alphas,
        config.batch,
        parts,
        "rollouts and replay",
        lambda batch, alpha: replay_batch(texts, heads, batch, alpha, config),
    )
    rounds = [row for piece in pieces for row in piece]
    found = compare(rounds, config)
    finish_run(folder, {"accepted_length": found})
    parts.remove()
    print_table(found)
    return 0


def load_heads(config: Config) -> tuple[Pair, dict[str, Eagle3Head]]:
    """The pair, and every head by the name it was given.

    Raises:
        UserError: heads that tap different layers, which one pass of the expert cannot serve, or that read an
            amateur.
    """
    heads = {}
    for name in config.heads:
        pair, head = load_models(config.expert, config.amateur, name, config.dtype, config.device)
        refuse_dual_input(head, name)
        heads[name] = head
        if head.config.feature_layers != heads[config.heads[0]].config.feature_layers:
            raise UserError(f"{name} taps other layers than {config.heads[0]}; compare them in two runs")
    return pair, heads


def result_settings(config: Config) -> dict:
    """What decides a batch's rounds."""
    left_out = ("output", "overwrite", "rollouts", "alphas", "limit", "skip_trained", "device")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, *config.heads)}


def replay_batch(
    texts: Rollouts,
    heads: dict[str, Eagle3Head],
    prompts: list[Prompt],
    alpha: float,
    config: Config,
) -> list[dict]:
    """Per prompt and head the sums over its rounds."""
    found, pair = [], texts.pair
    for prompt, answer in zip(prompts, texts.answers(prompts, alpha), strict=True):
        ids = torch.tensor(prompt.ids + answer, device=pair.expert.device)
        features = pair.expert.forward_full(ids[None], features=True, logits=False).features[0]
        rollout = Rollout(ids, len(prompt.ids), features)
        for name, head in heads.items():
            rounds = replay(head, pair.expert.embedding, rollout, config.gamma, vocab=pair.expert.vocab)
            row = {"alpha": alpha, "head": name, "prompt": prompt.id, "rounds": len(rounds)}
            found.append(row | {"accepted": sum(r[1] for r in rounds), "emitted": sum(r[2] for r in rounds)})
    return found


def compare(rounds: list[dict], config: Config) -> list[dict]:
    """L and tokens per round of every head at every alpha, and its difference from the first head, with intervals."""
    found = []
    for alpha in config.alphas:
        arms = {}
        for head in config.heads:
            rows = [row for row in rounds if row["alpha"] == alpha and row["head"] == head and row["rounds"]]
            columns = {key: [row[key] for row in rows] for key in ("prompt", "rounds", "accepted", "emitted")}
            arms[head] = (columns["prompt"], columns["accepted"], columns["rounds"])
            entry = {"alpha": alpha, "head": head, "prompts": len(rows), "rounds": sum(columns["rounds"])}
            entry["accepted_length"] = ratio_of_sums(*arms[head]).as_dict()
            per_round = ratio_of_sums(columns["prompt"], columns["emitted"], columns["rounds"])
            entry["tokens_per_round"] = per_round.as_dict()
            if head != config.heads[0]:
                entry["difference"] = paired_difference(arms[head], arms[config.heads[0]]).as_dict()
            found.append(entry)
    return found


def print_table(found: list[dict]) -> None:
    """The comparison as a table."""
    table = [
        [
            f"{entry['alpha']:g}",
            entry["head"],
            entry["prompts"],
            entry["rounds"],
            plain(entry["accepted_length"], 3),
            plain(entry["tokens_per_round"], 3),
            plain(entry["difference"], 3) if "difference" in entry else "",
        ]
        for entry in found
    ]
    headers = ["alpha", "head", "prompts", "rounds", "accepted length L", "tokens per round"]
    headers.append("L minus the first head's")
    print(tabulate(table, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
