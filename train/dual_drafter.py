"""Train the two drafters of a reconstruction: e aligned with the expert and f aligned with the amateur.

    deepspeed train/dual_drafter.py --config configs/train/dual_drafter_demo.yaml --expert FOLDER --amateur FOLDER \\
        --train_tokens tokens.parquet --eval_tokens held_out.parquet --output runs/dual_drafter
    python train/dual_drafter.py --config ... --dry_run                              # sizes, steps and cost only

Both are EAGLE3 heads [Li et al. 2025, arXiv 2503.01840] of one shape that read the expert's features; e learns the
expert's distribution and f the amateur's, on one draft vocabulary, with one recipe, from the same initial weights, data
and positions. Recombined at decoding, (1 + alpha) log e - alpha log f stands for pi_CD [DCD, Sec. 4.3, Lemma A.1]; the
control is the same e alone, which is what train/eagle3.py trains, bit by bit.

A seed (--seeds) changes the initial weights of a head and nothing else; the data order is that of --seed for all. The
passes of the frozen models are done once for all heads, or once for each group of --members_at_a_time.
OUTPUT/heads/expert_seed_S and amateur_seed_S hold the heads, OUTPUT/manifest.json what was held fixed, with hashes. The
same command after a stop goes on from the newest checkpoint.
"""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

from dataclasses import dataclass

from dcd_core.config import parse_config, run_entry
from train.family_run import FamilyConfig, Planned, train_family
from train.family_sizes import describe_family
from train.unroll import EXPERT, Aim

AMATEUR = Aim(None)


@dataclass(kw_only=True)
class Config(FamilyConfig):
    """Settings of a dual drafter's training."""


def main(argv: list[str] | None = None) -> int:
    """Train both heads of every seed and write OUTPUT/heads, OUTPUT/manifest.json and OUTPUT/metrics.json."""
    config = parse_config(Config, argv, description=__doc__)
    plans = members(config)
    if config.dry_run:
        print(describe_family(config, plans), flush=True)
    else:
        train_family("dual_drafter", config, plans, argv)
    return 0


def members(config: Config) -> list[Planned]:
    """e and f of every seed."""
    aims = {"expert": EXPERT, "amateur": AMATEUR}
    return [Planned(f"{name}_seed_{seed}", aim, seed) for seed in config.seeds for name, aim in aims.items()]


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
