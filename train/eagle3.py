"""Train an EAGLE3 draft head on the expert's own answers, online against the frozen expert.

    deepspeed train/eagle3.py --config configs/train/eagle3_demo.yaml --expert FOLDER --train_tokens tokens.parquet \\
        --eval_tokens held_out.parquet --output runs/head
    deepspeed --num_accelerators 2 train/eagle3.py --config ...     # two CPU ranks
    python train/eagle3.py --config ...                             # one process
    python train/eagle3.py --config ... --dry_run                   # sizes and steps only

The same command after a stop goes on from the newest checkpoint. The head is written to OUTPUT/head, and the
last line printed says where it is and what it came to. Method and recipe: EAGLE-3 [Li et al. 2025, arXiv 2503.01840];
in DCD it is the expert-aligned drafter [DCD, Sec. 3].
"""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from data_prep.vocabulary import build_vocabulary, load_vocabulary
from dcd_core.chat import stop_ids
from dcd_core.config import finish_run, parse_config, refuse_below, run_entry
from dcd_core.errors import UserError
from dcd_core.files import content_hash
from dcd_core.heads.checkpoint import load_head, save_head
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import load_pair
from train.batches import Plan, Stream, Texts
from train.loop import FREE, LoopConfig, fit, refuse_start
from train.online_expert import HeadStep, HeldOut, copy_module, feature_rms, fingerprint, scale_features
from train.processes import Ranks, barrier, start
from train.sizes import coverage, describe_head_run, head_result, summary
from train.unroll import Unroll, count_rows


@dataclass(kw_only=True)
class Config(LoopConfig):
    """Settings of a head's training (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: hub id or folder", **FREE})
    train_tokens: list[str] = field(metadata={"help": "token files to train on", **FREE})
    eval_tokens: list[str] = field(default_factory=list, metadata={"help": "token files held out", **FREE})
    max_answer_tokens: int = field(default=0, metadata={"help": "train on the first texts up to this many; 0: all"})
    eval_texts: int = field(default=0, metadata={"help": "held-out texts to evaluate on; 0: all", **FREE})
    gamma: int = field(default=5, metadata={"help": "drafts per round in evaluation", **FREE})
    snapshots: list[int] = field(
        default_factory=list,
        metadata={"help": "also write OUTPUT/heads/N once N answer tokens were read, for each N given", **FREE},
    )
    draft_vocab_size: int = field(default=32000, metadata={"help": "ids the head can draft"})
    vocabulary: str = field(default="", metadata={"help": "ready draft vocabulary (default: count answers)", **FREE})
    unroll_steps: int = field(default=7, metadata={"help": "drafts unrolled in training"})
    step_decay: float = field(default=0.8, metadata={"help": "weight of step i is this to the i"})
    loss_normalisation: Literal["step", "eagle"] = field(
        default="step",
        metadata={"help": "divide by the loss rows of the optimiser step, or like EAGLE by all positions"},
    )
    feature_scaling: Literal["rms", "none"] = field(
        default="rms", metadata={"help": "start fc from features of equal size, or as they come"}
    )
    head_init: str = field(default="", metadata={"help": "start from this head (folder or hub id)"})
    expert_dtype: Literal["float32", "bfloat16"] = field(default="bfloat16", metadata={"help": "of the frozen expert"})
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "taps, as indices of hidden_states (default: 2, n//2, n-3)"}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.expert or not self.train_tokens:
            raise ValueError("--expert (hub id or folder) and --train_tokens (token files) are both needed")
        refuse_below(self, draft_vocab_size=1, unroll_steps=1, gamma=1)
        if self.snapshots and min(self.snapshots) < 1:
            raise ValueError(f"--snapshots takes numbers of answer tokens, 1 or more, got {self.snapshots}")
        if self.feature_layers and len(set(self.feature_layers)) != 3:
            raise ValueError(f"--feature_layers takes three distinct layers, got {self.feature_layers}")


def main(argv: list[str] | None = None) -> int:
    """Train, evaluate, write OUTPUT/head and OUTPUT/metrics.json."""
    config = parse_config(Config, argv, description=__doc__)
    if config.dry_run:
        print(describe_head_run(config), flush=True)
        return 0
    refuse_start(config)
    ranks = start(config.seed)
    expert, stops = load_expert(config, ranks)
    texts = Texts.load(config.train_tokens, config.max_length, expert.vocab, config.max_answer_tokens)
    head = build_head(config, expert, texts)
    plan = Plan(tuple(texts.lengths), config.batch_size, ranks.world, config.gradient_accumulation, config.seed)
    stream = Stream(
        texts,
        plan,
        ranks.rank,
        lambda sample: count_rows(sample.input_ids, sample.answer_spans, stops, config.unroll_steps),
        config.loss_normalisation,
    )
    step = HeadStep(expert, head.target_ids, stops)
    evaluate = None
    if config.eval_tokens:
        held_out = Texts.load(config.eval_tokens, config.max_length, expert.vocab, first=config.eval_texts)
        evaluate = HeldOut(held_out, step, config.gamma, ranks)
    identity = {
        "training texts": texts.hash,
        "draft vocabulary": content_hash(head.target_ids.tolist()),
        "expert weights": fingerprint(expert.model),
    }
    if ranks.first:
        print(f"training texts: {texts.describe()}", flush=True)
    module = Unroll(head, config.unroll_steps, config.step_decay)
    folder = Path(config.output)
    heads = folder / "heads"
    snapshots = {stream.first_step_with(size): keep_head(heads / str(size), ranks) for size in config.snapshots}
    engine, history = fit(module, stream, step, config, ranks, identity, argv, evaluate, snapshots)
    trained = copy_module(engine).head
    if ranks.first:
        save_head(folder / "head", trained)
        found = {**summary(texts, history), "draft_vocab_coverage": coverage(texts, head.t2d)}
        finish_run(folder, found)
        print(head_result(folder / "head", found), flush=True)
    barrier()
    return 0


def keep_head(path: Path, ranks: Ranks) -> Callable[[object], None]:
    """Writes the head as it is at the moment, for all ranks to call together."""

    def keep(engine) -> None:
        head = copy_module(engine).head
        if ranks.first:
            path.parent.mkdir(exist_ok=True)
            save_head(path, head)

    return keep


def load_expert(config: Config, ranks: Ranks):
    """The frozen expert on this rank's device, and the ids that end its turns."""
    pair = load_pair(
        config.expert,
        dtype=config.expert_dtype,
        device=str(ranks.device),
        feature_layers=tuple(config.feature_layers) or None,
    )
    if pair.expert.feature_layers is None:
        raise UserError(f"{config.expert} has too few layers for the default taps; give --feature_layers")
    return pair.expert, frozenset(stop_ids(pair.tokenizer, config.expert))


def build_head(config: Config, expert, texts: Texts) -> Eagle3Head:
    """A fresh head on the given or counted draft vocabulary, or the head of ``--head_init`` with its own.

    In fp32: DeepSpeed makes it what ``--dtype`` says.
    """
    if config.head_init:
        return load_head(config.head_init, expert, dtype=torch.float32).requires_grad_(True).train()
    if config.vocabulary:
        vocabulary = load_vocabulary(config.vocabulary)
    else:
        vocabulary = build_vocabulary(config.train_tokens, expert.vocab, config.draft_vocab_size)
    rows = expert.model.lm_head.weight.float()
    head = Eagle3Head.from_expert(expert.config, vocabulary, expert.feature_layers, config.seed, rows)
    head = head.to(expert.device)
    if config.feature_scaling == "rms":
        scale_features(head, feature_rms(expert, texts))
    return head


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
