"""Settings that pay on a given pair and machine: when to ask the amateur, and when to stop drafting.

    python diagnostics/calibrate.py --expert EXPERT --amateur AMATEUR --head HEAD --prompts held_out.jsonl \\
        --alphas 0.1 0.5 --output runs/calibration

Passes are timed alone; vanilla contrastive decoding answers the prompts greedily once per alpha; along these texts the
expert's margin, the places where the amateur changes the choice, and the head's drafts with their confidence are
noted. From that: a law of flips against the margin (one for all alphas), and by simulated rounds the threshold theta of
deferred judging and the threshold of `stop_below` that give the most tokens per second. Prints the flags to use with
diagnostics/benchmark.py or `python -m dcd_core.generate`, and writes metrics.json. Decoding itself never measures
anything, so the same seed and settings give the same text.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry
from dcd_core.contrast import Target, scores
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.divergence import acceptance
from dcd_core.draft import Shape
from dcd_core.flip_risk import Deferral, margin_of
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import load_models
from dcd_core.methods import assemble
from dcd_core.models import Pair
from dcd_core.prompts import read_prompts
from dcd_core.replay import Rollout, draft_everywhere
from diagnostics.calibration import (
    STOPS,
    THETAS,
    Times,
    Trace,
    fit_flips,
    fit_spread,
    simulate_deferred,
    simulate_rounds,
)
from diagnostics.latency import time_passes
from diagnostics.loading import inputs_key, refuse_dual_input
from diagnostics.parts import at_every_alpha, begin
from diagnostics.unread import UnreadFlags


@dataclass
class Config(UnreadFlags):
    """Settings of the calibration."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    head: str = field(metadata={"help": "EAGLE3 head: folder or hub id"})
    prompts: str = field(metadata={"help": "prompts that are not measured later, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the result"})
    alphas: list[float] = field(default_factory=lambda: [0.1, 0.5], metadata={"help": "contrast strengths, above 0"})
    gamma: int = field(default=5, metadata={"help": "drafts per round"})
    limit: int = field(default=50, metadata={"help": "use the first so many prompts (0: all)"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens of each answer"})
    batch: int = field(default=8, metadata={"help": "prompts at a time"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        if not self.alphas or min(self.alphas) <= 0 or len(set(self.alphas)) < len(self.alphas):
            raise ValueError(f"--alphas must be different numbers above 0, got {self.alphas}")
        refuse_below(self, gamma=1, batch=1, max_new_tokens=2, limit=0)


def main(argv: list[str] | None = None) -> int:
    """Time, roll out, fit, simulate, propose."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.read_limit, **arguments)
    prompts = config.unread(prompts, [config.head], config.prompts)
    pair, head = load_models(config.expert, config.amateur, config.head, config.dtype, config.device)
    refuse_dual_input(head, config.head)
    parts, folder = begin(config, argv, result_settings(config))
    latency = parts.get("latency")
    if latency is None:
        typical = sorted(prompts, key=lambda prompt: len(prompt.ids))[len(prompts) // 2]
        widths = (2 * config.gamma + 1, 4 * config.gamma + 1)
        latency = time_passes(pair, head, typical, Shape(config.gamma), config.max_new_tokens, more_widths=widths)
        parts.put("latency", latency)
    pieces = at_every_alpha(
        prompts,
        config.alphas,
        config.batch,
        parts,
        "rollouts",
        lambda batch, alpha: note_batch(pair, head, batch, stops, alpha, config),
    )
    traces = [(row["alpha"], Trace(**row["trace"])) for piece in pieces for row in piece]
    found = propose(traces, Times(**latency), config)
    finish_run(folder, {"latency_ms": latency, **found})
    parts.remove()
    print_proposal(found)
    return 0


def result_settings(config: Config) -> dict:
    """What decides a rollout's notes."""
    left_out = ("output", "overwrite", "alphas", "limit", "skip_trained", "device")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, config.head)}


def note_batch(
    pair: Pair, head: Eagle3Head, prompts: list[Prompt], stops: tuple[int, ...], alpha: float, config: Config
) -> list[dict]:
    """Greedy contrastive rollouts of some prompts, and what is noted along each."""
    target = Target(alpha=alpha, temperature=0.0)
    settings = Settings(target=target, max_new_tokens=config.max_new_tokens, stop_ids=stops)
    made = decode(assemble("cd", pair), prompts, settings, max_batch=len(prompts))
    texts = [(prompt, answer) for prompt, answer in zip(prompts, made, strict=True) if len(answer.ids) > 1]
    return [
        {"alpha": alpha, "trace": asdict(note(pair, head, prompt.ids, answer.ids, alpha, config.gamma))}
        for prompt, answer in texts
    ]


@torch.no_grad()
def note(pair: Pair, head: Eagle3Head, prompt: list[int], answer: list[int], alpha: float, gamma: int) -> Trace:
    """Margins, flips and drafts along one rollout."""
    ids = torch.tensor(prompt + answer, device=pair.expert.device)
    expert = pair.expert.forward_full(ids[None], features=True, logits=False)
    amateur = pair.amateur.forward_full(ids[None], logits=False)
    drafts = draft_everywhere(head, pair.expert.embedding, Rollout(ids, len(prompt), expert.features[0]), gamma)
    places = slice(len(prompt), len(ids) - 1)  # rows whose next token is answer token 1, 2, ...
    p = pair.expert.output_layer(expert.hidden[0, places])
    q = pair.amateur.output_layer(amateur.hidden[0, places])
    target = Target(alpha=alpha)
    pi = scores([p, q], target)
    return Trace(
        agreed=drafts.agreed.tolist(),
        confidence=drafts.log_probs.cumsum(-1).exp().tolist(),
        unit_margin=(margin_of(p) / target.contrast_weight(2)).tolist(),
        flips=(p.argmax(-1) != pi.argmax(-1)).tolist(),
        peak=p.softmax(-1).amax(-1).tolist(),
        tv=(1.0 - acceptance(p.log_softmax(-1), pi.log_softmax(-1))).tolist(),
    )


def propose(traces: list[tuple[float, Trace]], times: Times, config: Config) -> dict:
    """The fitted laws, and per alpha the thresholds that are fastest in simulation."""
    margins = np.concatenate([trace.unit_margin for _, trace in traces])
    flips = np.concatenate([trace.flips for _, trace in traces])
    ceiling, scale, power = fit_flips(margins, flips)
    exposed = np.concatenate([alpha * (1.0 - np.array(trace.peak)) for alpha, trace in traces])
    spread = fit_spread(1.0 - exposed, np.concatenate([trace.tv for _, trace in traces]), 1.0)
    law = Deferral(ceiling=ceiling, scale=scale, power=power, spread=spread)
    found = {"ceiling": ceiling, "scale": scale, "power": power, "spread": spread, "by_alpha": []}
    for alpha in config.alphas:
        own = [trace for other, trace in traces if other == alpha]
        places = sum(len(trace.flips) for trace in own)
        deferred = [
            {"theta": theta}
            | dict(
                zip(
                    ("tokens_per_second", "expert_passes_per_amateur_pass", "flips_per_100_tokens"),
                    simulate_deferred(own, replace(law, theta=theta), config.gamma, times),
                    strict=True,
                )
            )
            for theta in THETAS
        ]
        stops = [
            {"stop_below": stop}
            | dict(
                zip(
                    ("tokens_per_second", "drafts_per_round"),
                    simulate_rounds(own, stop, config.gamma, times),
                    strict=True,
                )
            )
            for stop in STOPS
        ]
        found["by_alpha"].append(
            {
                "alpha": alpha,
                "prompts": len(own),
                "places": places,
                "flip_rate": sum(sum(trace.flips) for trace in own) / places,
                "every_round_tokens_per_second": stops[0]["tokens_per_second"],
                "deferred": deferred,
                "best_deferred": max(deferred, key=lambda row: row["tokens_per_second"]),
                "stops": stops,
                "best_stop": max(stops, key=lambda row: row["tokens_per_second"]),
            }
        )
    return found


def print_proposal(found: dict) -> None:
    """The proposals as a table and as flags."""
    rows = []
    for entry in found["by_alpha"]:
        base, best, stop = entry["every_round_tokens_per_second"], entry["best_deferred"], entry["best_stop"]
        rows.append(
            [
                entry["alpha"],
                entry["prompts"],
                f"{100 * entry['flip_rate']:.1f}%",
                best["theta"],
                f"{best['tokens_per_second'] / base:.2f}",
                f"{best['expert_passes_per_amateur_pass']:.1f}",
                stop["stop_below"],
                f"{stop['tokens_per_second'] / base:.2f}",
                f"{stop['drafts_per_round']:.1f}",
            ]
        )
    headers = ["alpha", "prompts", "flips", "theta", "simulated gain", "expert passes per amateur pass", "stop_below"]
    headers += ["simulated gain", "drafts per round"]
    print(tabulate(rows, headers=headers, disable_numparse=True))
    law = " ".join(f"--defer_{name} {found[name]:.3g}" for name in ("ceiling", "scale", "power", "spread"))
    for entry in found["by_alpha"]:
        theta, stop = entry["best_deferred"]["theta"], entry["best_stop"]["stop_below"]
        print(f"alpha {entry['alpha']:g}: --defer_theta {theta:g} {law}; or --stop_below {stop:g}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
