"""Make an amateur for an expert that has no smaller sibling: keep some of its layers, distil on the expert's own text.

    deepspeed train/amateur.py --config configs/train/amateur_demo.yaml --expert FOLDER --train_tokens tokens.parquet \\
        --eval_tokens held_out.parquet --output runs/amateur
    python train/amateur.py --config ... --dry_run

For any Llama- or Qwen3-style expert. The amateur is a plain transformers folder, OUTPUT/model, with the expert's
tokenizer; OUTPUT/metrics.json compares it with the expert. The same command after a stop goes on from the newest
checkpoint.
"""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from dcd_core.config import FROM_PAIR, finish_run, parse_config, run_entry
from dcd_core.files import atomic_path
from dcd_core.model_identity import model_identity
from dcd_core.models import Pair, load_config, load_model, load_pair
from train.batches import Plan, Stream, Texts
from train.distil import Distil, DistilStep, compare, count_answer_rows, latency
from train.engines import full_weights
from train.held_out import SKIP_TRAINED, held_out_texts
from train.loop import FREE, LoopConfig, fit, refuse_start, refuse_texts
from train.processes import barrier, start
from train.pruning import parse_layers, prune, refuse_quantised
from train.sizes import amateur_result, common_pieces, describe_amateur_run, summary


@dataclass(kw_only=True)
class Config(LoopConfig):
    """Settings of an amateur's training (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: hub id or folder", **FREE})
    keep_layers: str = field(metadata={"help": "layers to keep, such as 0-11,24-29"})
    train_embeddings: bool = field(default=False, metadata={"help": "train embeddings and output layer too"})
    train_tokens: list[str] = field(metadata={"help": "token files to train on", **FREE})
    eval_tokens: list[str] = field(default_factory=list, metadata={"help": "token files held out", **FREE})
    max_answer_tokens: int = field(default=0, metadata={"help": "train on the first texts up to this many; 0: all"})
    eval_texts: int = field(default=0, metadata={"help": "held-out texts to compare on; 0: all", **FREE})
    skip_trained: bool = field(default=False, metadata={"help": SKIP_TRAINED, **FREE})
    expert_dtype: Literal["float32", "bfloat16"] = field(
        default="bfloat16", metadata={"help": "of the frozen expert", FROM_PAIR: "dtype"}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.expert or not self.train_tokens or not self.keep_layers:
            raise ValueError(
                "--expert (hub id or folder), --keep_layers (such as 0-11,24-29) and --train_tokens are all needed"
            )
        refuse_texts(self)


def main(argv: list[str] | None = None) -> int:
    """Prune, distil, write OUTPUT/model, compare, write OUTPUT/metrics.json."""
    config = parse_config(Config, argv, description=__doc__)
    if config.dry_run:
        print(describe_amateur_run(config), flush=True)
        return 0
    refuse_start(config)
    refuse_quantised(load_config(config.expert), config.expert)
    ranks = start(config.seed, config.timeout_minutes)
    folder = Path(config.output)
    pair = load_pair(config.expert, dtype=config.expert_dtype, device=str(ranks.device))
    expert = pair.expert
    layers = parse_layers(config.keep_layers, expert.config.num_hidden_layers)
    texts = Texts.load(config.train_tokens, config.max_length, expert.vocab, config.max_answer_tokens)
    held_out = held_out_texts(config, expert.vocab, texts.prompt_hashes, ranks)
    whole = load_model(config.expert, dtype="float32", device=str(ranks.device)).model
    plan = Plan(tuple(texts.lengths), config.batch_size, ranks.world, config.gradient_accumulation, config.seed)
    stream = Stream(texts, plan, ranks.rank, lambda sample: [count_answer_rows(sample.answer_spans)])
    pieces = common_pieces(config, stream, ranks, expert.vocab)
    module = Distil(prune(whole, layers, config.train_embeddings).to(ranks.device), expert.vocab, pieces)
    del whole
    gc.collect()  # its hooks and it hold each other
    if ranks.first:
        print(f"training texts: {texts.describe()}; keeping layers {layers}", flush=True)
    identity = {"training texts": texts.hash, "expert weights": model_identity(expert.model)}
    [trained] = fit({"": module}, stream, DistilStep(expert), config, ranks, identity, argv)
    weights = full_weights(trained.engine)
    if ranks.first:
        save_amateur(folder / "model", trained.engine.module.amateur, weights, pair)
        found = {
            **summary(texts, trained.history),
            **report(config, pair, folder / "model", held_out),
            "layers": layers,
        }
        finish_run(folder, found)
        print(amateur_result(folder / "model", found), flush=True)
    barrier()
    return 0


def save_amateur(folder: Path, amateur, weights: dict[str, torch.Tensor], pair: Pair) -> None:
    """Write a plain transformers folder in the dtype of the expert's own files, with its tokenizer."""
    dtype = getattr(pair.expert.config, "dtype", None) or torch.float32
    named = {name.removeprefix("amateur."): tensor.to(dtype) for name, tensor in weights.items()}
    with atomic_path(folder) as temporary:
        amateur.config.dtype = dtype
        amateur.save_pretrained(temporary, state_dict=named)
        pair.tokenizer.save_pretrained(temporary)


def report(config: Config, pair: Pair, folder: Path, held_out: Texts | None) -> dict:
    """The saved amateur beside the expert: on held-out texts if there are any, and by the time of one pass."""
    loaded = load_pair(config.expert, str(folder), config.expert_dtype, str(pair.expert.device))
    found = {"latency": latency(loaded)}
    if held_out is not None:
        found["held_out"] = compare(loaded, held_out)
    return found


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
