"""Train a family of draft heads, each on another contrast strength, under matched controls: is a drafter that knows
about the contrast better than one that does not?

    deepspeed train/cross_alpha.py --config configs/train/cross_alpha_demo.yaml --expert FOLDER --amateur FOLDER \\
        --train_tokens tokens.parquet --eval_tokens held_out.parquet --output runs/cross_alpha
    deepspeed train/cross_alpha.py --config ... --train_alphas 0 --input expert_only     # a control
    python train/cross_alpha.py --config ... --dry_run                                    # sizes, steps and cost only

Each member is a dual-input EAGLE3 head [DCD, Sec. 4.2; Li et al. 2025, arXiv 2503.01840]: at verified positions it
reads the expert's features joined with the amateur's, at drafted positions its own state. Its target is
pi_CD(train-alpha) on the draft vocabulary, (1 + alpha) z_p - alpha z_q; which positions give a loss is decided by the
expert's argmax for every alpha. The amateur's columns start at zero, so all alphas of a seed start as one and the same
function. At train-alpha 0 with --input expert_only a member is what train/eagle3.py trains, bit by bit.

A seed (--seeds) changes the initial weights of a head and nothing else: data order and the shuffled input are those of
--seed for all members. Controls: --input, --seeds, --head_layers and --head_intermediate_size.

The passes of the frozen expert and amateur are done once for all members, or once for each group of
--members_at_a_time where the heads do not fit the memory together. OUTPUT/heads/alpha_A_seed_S holds the heads,
OUTPUT/manifest.json what was held fixed, with hashes. The same command after a stop goes on from the newest checkpoint.
"""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

from dataclasses import dataclass, field
from typing import Literal

from dcd_core.config import parse_config, run_entry
from train.family_run import FamilyConfig, Planned, refuse_repeated, train_family
from train.family_sizes import describe_family
from train.unroll import Aim


@dataclass(kw_only=True)
class Config(FamilyConfig):
    """Settings of a cross-alpha family's training."""

    train_alphas: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.3, 0.5], metadata={"help": "contrast strengths of the targets, one a head"}
    )
    input: Literal["dual", "expert_only", "amateur_zeroed", "amateur_shuffled"] = field(
        default="dual", metadata={"help": "what the heads read beside the expert's features; all but dual are controls"}
    )

    def __post_init__(self):
        super().__post_init__()
        # heads are named by alpha to six digits
        refuse_repeated("train_alphas", [f"{alpha:g}" for alpha in self.train_alphas])
        if min(self.train_alphas) < 0:
            raise ValueError(f"--train_alphas must be at least 0, got {self.train_alphas}")


def main(argv: list[str] | None = None) -> int:
    """Train the family and write OUTPUT/heads, OUTPUT/manifest.json and OUTPUT/metrics.json."""
    config = parse_config(Config, argv, description=__doc__)
    plans = members(config)
    if config.dry_run:
        print(describe_family(config, plans), flush=True)
    else:
        train_family("cross_alpha", config, plans, argv)
    return 0


def members(config: Config) -> list[Planned]:
    """Every train-alpha with every seed; the targets of one seed stand together."""
    return [
        Planned(f"alpha_{alpha:g}_seed_{seed}", Aim(alpha), seed, config.input)
        for seed in config.seeds
        for alpha in config.train_alphas
    ]


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
