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

import numpy as np
import torch
from jaxtyping import UInt64
from torch import Tensor

from dcd_core.config import finish_run, parse_config, run_entry
from dcd_core.heads.checkpoint import load_head, locate, save_head
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.training_prompts import read_training_prompts
from dcd_core.models import Pair
from train.batches import Texts
from train.head_run import (
    HeadConfig,
    draft_vocabulary,
    evaluation,
    find_store,
    fresh_head,
    give_start,
    identity,
    load_frozen,
    rate_scale,
    sizes_of_features,
    trained_module,
    training_stream,
)
from train.held_out import held_out_texts
from train.loop import FREE, fit, refuse_start
from train.online_expert import HeadStep, copy_module
from train.processes import Ranks, barrier, start
from train.sizes import coverage, describe_head_run, head_result, summary


@dataclass(kw_only=True)
class Config(HeadConfig):
    """Settings of a head's training."""

    snapshots: list[int] = field(
        default_factory=list,
        metadata={"help": "also write OUTPUT/heads/N once N answer tokens were read, for each N given", **FREE},
    )
    head_init: str = field(default="", metadata={"help": "start from this head (folder or hub id)"})

    def __post_init__(self):
        super().__post_init__()
        if self.snapshots and min(self.snapshots) < 1:
            raise ValueError(f"--snapshots takes numbers of answer tokens, 1 or more, got {self.snapshots}")
        if self.head_init and (self.head_layers > 1 or self.head_intermediate_size):
            raise ValueError("--head_init has a shape of its own: leave out --head_layers and --head_intermediate_size")


def main(argv: list[str] | None = None) -> int:
    """Train, evaluate, write OUTPUT/head and OUTPUT/metrics.json."""
    config = parse_config(Config, argv, description=__doc__)
    if config.dry_run:
        print(describe_head_run(config), flush=True)
        return 0
    refuse_start(config)
    ranks = start(config.seed, config.timeout_minutes)
    pair, stops = load_frozen(config, ranks)
    texts = Texts.load(config.train_tokens, config.max_length, pair.expert.vocab, config.max_answer_tokens)
    prompts = trained_prompts(config, texts)
    held_out = held_out_texts(config, pair.expert.vocab, prompts, ranks)
    store = find_store(config, pair, texts)
    rms = sizes_of_features(config, pair, store, texts)
    head = build_head(config, pair, rms, texts)
    stream = training_stream(config, texts, ranks, stops)
    step = HeadStep(pair.expert, head.target_ids, stops, store=store)
    if not config.head_init:
        give_start(config, [head], step.passes, texts, stops, ranks)
    evaluate = evaluation(config, step, held_out, ranks)
    depends_on = identity(texts, head.target_ids, pair)
    if ranks.first:
        print(f"training texts: {texts.describe()}", flush=True)
    modules = {"": trained_module(config, head, stream, ranks, rms)}
    folder = Path(config.output)
    heads = folder / "heads"
    snapshots = {
        stream.first_step_with(size): keep_head(heads / str(size), ranks, prompts) for size in config.snapshots
    }
    [member] = fit(
        modules, stream, step, config, ranks, depends_on, argv, evaluate, snapshots, scale=rate_scale(config)
    )
    trained = copy_module(member.engine).head
    if ranks.first:
        save_head(folder / "head", trained, prompts)
        found = {**summary(texts, member.history), "draft_vocab_coverage": coverage(texts, head.t2d)}
        finish_run(folder, found)
        print(head_result(folder / "head", found), flush=True)
    barrier()
    return 0


def trained_prompts(config: Config, texts: Texts) -> UInt64[np.ndarray, " prompt"]:
    """Hashes of the prompts that the head is given, and of those of the head it starts from, if that says any."""
    before = read_training_prompts(locate(config.head_init)) if config.head_init else None
    return texts.prompt_hashes if before is None else np.union1d(texts.prompt_hashes, before)


def keep_head(path: Path, ranks: Ranks, prompts: UInt64[np.ndarray, " prompt"]) -> Callable[[list], None]:
    """Writes the head as it is at the moment, for all ranks to call together."""

    def keep(engines: list) -> None:
        head = copy_module(engines[0]).head
        if ranks.first:
            path.parent.mkdir(exist_ok=True)
            save_head(path, head, prompts)

    return keep


def build_head(config: Config, pair: Pair, rms: Tensor | None, texts: Texts) -> Eagle3Head:
    """A fresh head on the given or counted draft vocabulary, or the head of ``--head_init`` with its own."""
    if config.head_init:
        return load_head(config.head_init, pair.expert, dtype=torch.float32).requires_grad_(True).train()
    vocabulary = draft_vocabulary(config, pair.expert.vocab)
    return fresh_head(config, pair, vocabulary, rms, config.seed)


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
