"""The one training loop, for heads and amateurs: DeepSpeed engine, schedule, accumulation, metrics, save and resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dcd_core.config import refuse_below, refuse_taken, save_run
from dcd_core.errors import UserError
from dcd_core.files import remove
from dcd_core.progress import Bar
from train.batches import Batch, Stream
from train.checkpoints import Checkpoints
from train.processes import Ranks, add_up, barrier
from train.schedule import learning_rate

FREE = {"weights": False}
"""Metadata of a setting that may change between a run and its resumption: the weights do not depend on it."""


@dataclass
class LoopConfig:
    """Settings that every trainer shares; trainers add their own fields."""

    output: str = field(
        default="", metadata={"help": "run folder: checkpoints, logs, result (required, but for --dry_run)", **FREE}
    )
    seed: int = field(default=0, metadata={"help": "seed of initial weights and data order"})
    epochs: int = field(default=1, metadata={"help": "passes over the training texts"})
    max_steps: int = field(default=0, metadata={"help": "stop after this many optimiser steps; 0: when the epochs end"})
    batch_size: int = field(default=1, metadata={"help": "texts per micro-batch and rank"})
    gradient_accumulation: int = field(default=1, metadata={"help": "micro-batches per optimiser step"})
    max_length: int = field(default=2048, metadata={"help": "tokens of a text; longer texts are cut, and counted"})
    lr: float = field(default=5e-5, metadata={"help": "peak learning rate"})
    warmup_steps: int = field(default=0, metadata={"help": "optimiser steps of linear warm-up"})
    schedule: Literal["cosine", "linear"] = field(default="cosine", metadata={"help": "decay after the warm-up"})
    final_lr_ratio: float = field(default=0.0, metadata={"help": "rate at the end, as a fraction of the peak"})
    clip: float = field(default=0.5, metadata={"help": "largest gradient norm; 0: no clipping"})
    beta1: float = field(default=0.9, metadata={"help": "AdamW"})
    beta2: float = field(default=0.95, metadata={"help": "AdamW"})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW"})
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata={"help": "of the trained weights"})
    deepspeed_config: str = field(
        default="", metadata={"help": "JSON with ZeRO stage and other memory settings (default: ZeRO 0)", **FREE}
    )
    save_every: int = field(default=500, metadata={"help": "optimiser steps between checkpoints", **FREE})
    keep: int = field(default=2, metadata={"help": "checkpoints to keep", **FREE})
    log_every: int = field(default=10, metadata={"help": "optimiser steps between logged metrics", **FREE})
    eval_every: int = field(default=0, metadata={"help": "optimiser steps between evaluations; 0: at the end", **FREE})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run", **FREE})
    dry_run: bool = field(default=False, metadata={"help": "print sizes and steps; load no weights", **FREE})

    def __post_init__(self):
        refuse_below(self, epochs=1, batch_size=1, gradient_accumulation=1, max_length=1)
        refuse_below(self, save_every=1, keep=1, log_every=1, eval_every=0, seed=0, max_steps=0)
        refuse_below(self, warmup_steps=0, clip=0, weight_decay=0, final_lr_ratio=0)
        if self.seed >= 2**63:
            raise ValueError(f"--seed must be below 2**63, got {self.seed}")
        if self.lr <= 0:
            raise ValueError(f"--lr must be positive, got {self.lr}")
        if not self.output and not self.dry_run:
            raise ValueError("--output is missing: the folder for checkpoints and the result")


def total_steps(config: LoopConfig, steps_per_epoch: int) -> int:
    """Optimiser steps of the run.

    Raises:
        UserError: all of them would lie inside the warm-up.
    """
    steps = config.epochs * steps_per_epoch
    total = min(steps, config.max_steps) if config.max_steps else steps
    if config.warmup_steps >= total:
        raise UserError(
            f"--warmup_steps {config.warmup_steps} does not end within the {total} optimiser steps of this run; "
            "lower it, or train on more texts or epochs"
        )
    return total


def read_deepspeed_config(path: str) -> dict:
    """A DeepSpeed JSON that holds memory and precision settings only.

    Raises:
        UserError: unreadable, or it sets what a flag sets (the flag could never win).
    """
    if not path:
        return {"zero_optimization": {"stage": 0}}
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"--deepspeed_config {path} cannot be read as JSON: {problem}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization", {}), dict):
        raise UserError(f"--deepspeed_config {path} must hold an object, and one in its zero_optimization")
    flags = {
        "optimizer": "--lr and the AdamW flags",
        "scheduler": "--schedule and --warmup_steps",
        "gradient_clipping": "--clip",
        "gradient_accumulation_steps": "--gradient_accumulation",
        "train_batch_size": "--batch_size",
        "train_micro_batch_size_per_gpu": "--batch_size",
        "bf16": "--dtype",
        "fp16": "--dtype (fp16 overflows on hidden states)",
    }
    for key, flag in flags.items():
        if key in settings:
            raise UserError(f"{path} sets {key}: remove it and use {flag}")
    return settings


def what_weights_depend_on(config: LoopConfig, ranks: Ranks, memory: dict, identity: dict) -> dict:
    """What a checkpoint is compared by when a run is resumed: settings by flag, and `identity` of data and expert."""
    settings = {
        item.name: getattr(config, item.name) for item in fields(config) if item.metadata.get("weights", True) is True
    }
    stage = memory.get("zero_optimization", {}).get("stage", 0)
    return {**settings, **identity, "world size": ranks.world, "ZeRO stage": stage, "deepspeed_config": memory}


def refuse_start(config: LoopConfig) -> None:
    """Raise UserError, before anything is loaded, for a folder that cannot be this run's or a bad DeepSpeed file."""
    refuse_taken(config.output, config.overwrite)
    read_deepspeed_config(config.deepspeed_config)


def open_run(
    engine, config: LoopConfig, ranks: Ranks, settings: dict, position_of: Callable, argv: list[str] | None
) -> tuple[Checkpoints, int, list[dict]]:
    """The run's checkpoints, and step and history of the newest, which is loaded into the engine.

    With ``--overwrite``, what a finished run left is removed; an unfinished one is gone on with. The run's record is
    written last, when nothing can be refused any more: a refused start changes nothing.
    """
    folder = Path(config.output)
    if ranks.first and config.overwrite and (folder / "metrics.json").exists():
        for part in ("metrics.json", "checkpoints", "tensorboard"):
            remove(folder / part)
    barrier()
    checkpoints = Checkpoints(folder / "checkpoints", config.keep, settings, ranks)
    done, history = checkpoints.resume(engine, position_of)
    if ranks.first:
        save_run(folder, config, argv, config.overwrite)
    barrier()
    return checkpoints, done, history


def start_engine(module: nn.Module, config: LoopConfig, settings: dict):
    """DeepSpeed's engine with AdamW over the trainable parameters."""
    import deepspeed
    from pydantic import ValidationError

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    betas = (config.beta1, config.beta2)
    # one parameter at a time: the same arithmetic on every machine and thread count
    optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=betas, weight_decay=config.weight_decay, foreach=False)
    whole = {
        **settings,
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.clip,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=whole, model_parameters=trained)
    except ValidationError as error:
        raise UserError(f"DeepSpeed refuses --deepspeed_config {config.deepspeed_config}: {error}") from None
    return engine


def fit(
    module: nn.Module,
    batches: Stream,
    step: Callable[..., tuple[Tensor, Tensor]],
    config: LoopConfig,
    ranks: Ranks,
    identity: dict,
    argv: list[str] | None = None,
    evaluate: Callable[[object], dict[str, float]] | None = None,
    snapshots: Mapping[int, Callable[[object], None]] | None = None,
) -> tuple[object, list[dict]]:
    """Open the run folder and train ``module`` to the end, from the newest checkpoint if there is one.

    Args:
        batches: what this rank reads at each optimiser step.
        step: ``step(engine, batch, denominators)`` runs one micro-batch: this rank's share of the optimiser step's loss
            and a ``[unroll step, 4]`` tensor of sums (loss, correct, acceptance, rows).
        identity: more of what the weights depend on (hashes of data, vocabulary, expert); compared on resumption.
        argv: the flags, for the run's record.
        evaluate: called by all ranks with the engine; its numbers are logged under ``eval/``.
        snapshots: called by all ranks with the engine after these numbers of optimiser steps.
    Returns:
        The engine, and the history of logged metrics.
    Raises:
        UserError: NaN or inf, with the texts named; a checkpoint of another command; a folder of something else.
    """
    memory = read_deepspeed_config(config.deepspeed_config)
    total = total_steps(config, batches.plan.steps_per_epoch)
    settings = what_weights_depend_on(config, ranks, memory, identity)
    engine = start_engine(module, config, memory)
    checkpoints, done, history = open_run(engine, config, ranks, settings, batches.position, argv)
    if done and ranks.first:
        print(f"resuming after step {done} of {total}", flush=True)
    board = Board(Path(config.output) / "tensorboard", ranks, done)
    meter = Meter(ranks)
    with Bar(total, "training", "steps", done) as bar:
        for number in range(done, total):
            rate = learning_rate(number, total, config.lr, config.warmup_steps, config.schedule, config.final_lr_ratio)
            norm = optimiser_step(engine, batches, step, number, rate, meter)
            last = number + 1 == total
            note = ""
            if last or (number + 1) % config.log_every == 0:
                metrics = {**meter.read(), "lr": rate, "grad_norm": norm}
                note = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy/0']:.3f}"
                history.append({"step": number + 1, **metrics})
                board.write("train", metrics, number + 1)
            if evaluate and (last or (config.eval_every and (number + 1) % config.eval_every == 0)):
                found = evaluate(engine)
                history.append({"step": number + 1, **{f"eval_{name}": value for name, value in found.items()}})
                board.write("eval", found, number + 1)
                meter.restart()
            if snapshots and number + 1 in snapshots:
                snapshots[number + 1](engine)
            if last or (number + 1) % config.save_every == 0:
                checkpoints.save(engine, number + 1, batches.position(number + 1), history)
            bar.update(1, note)
    board.close()
    return engine, history


def optimiser_step(engine, batches: Stream, step, number: int, rate: float, meter: Meter) -> float:
    """One optimiser step: all micro-batches of this rank. Returns the gradient norm before clipping."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    micro, denominators = batches.at(number)
    norm = None
    for batch in micro:
        loss, sums = step(engine, batch, denominators)
        if not math.isfinite(loss.item()):
            raise UserError(
                f"the loss of optimiser step {number + 1} is {loss.item()}; texts: {', '.join(batch.ids)}. Lower --lr, "
                "or take these texts out"
            )
        # the loss is already this rank's share of the whole step, but DeepSpeed averages over ranks
        engine.backward(loss * engine.world_size, scale_wrt_gas=False)
        if batch is micro[-1]:
            norm = plain_norm(engine)
        engine.step()
        meter.add(sums, batch.tokens)
    norm = float(engine.get_global_grad_norm() if norm is None else norm)
    if not math.isfinite(norm):
        names = ", ".join(name for batch in micro for name in batch.ids)
        raise UserError(f"the gradient norm of optimiser step {number + 1} is {norm}; texts of this rank: {names}")
    return norm


def plain_norm(engine) -> Tensor | None:
    """Gradient norm where DeepSpeed's wrapper keeps none (ZeRO 0 in fp32); after the all-reduce, before clipping."""
    if hasattr(engine.optimizer, "_global_grad_norm"):
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def full_weights(engine) -> dict[str, Tensor]:
    """The module's weights, whole and on every rank, also where ZeRO 3 shards them; the tensors are copies."""
    import deepspeed

    parameters = list(engine.module.parameters())
    sharded = engine.zero_optimization_partition_weights()
    with deepspeed.zero.GatheredParameters(parameters, enabled=sharded):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


class Meter:
    """Sums over steps and ranks, divided once when they are read."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        self.sums: Tensor | None = None
        self.tokens = 0
        self.start = time.monotonic()

    def add(self, sums: Tensor, tokens: int) -> None:
        self.sums = sums.double() if self.sums is None else self.sums + sums.double()
        self.tokens += tokens

    def read(self) -> dict[str, float]:
        """Metrics per unroll step since the last reading, over all ranks; ``loss`` is step 0's mean."""
        flat = torch.cat([self.sums.flatten().cpu(), torch.tensor([float(self.tokens)], dtype=torch.float64)])
        flat = add_up(flat, self.ranks.device)
        seconds = max(time.monotonic() - self.start, 1e-9)
        metrics = {"loss": 0.0, **per_step(flat[:-1].view(-1, 4)), "tokens_per_s": float(flat[-1]) / seconds}
        metrics["loss"] = metrics["loss/0"]
        self.restart()
        return metrics


def per_step(sums: Tensor) -> dict[str, float]:
    """Means per unroll step from ``[step, (loss, correct, acceptance, rows)]`` sums; steps without rows are left
    out."""
    metrics = {}
    for index, (loss, correct, accepted, rows) in enumerate(sums.tolist()):
        if rows:
            metrics[f"loss/{index}"] = loss / rows
            metrics[f"accuracy/{index}"] = correct / rows
            metrics[f"acceptance/{index}"] = accepted / rows
    metrics.setdefault("loss/0", 0.0)
    metrics.setdefault("accuracy/0", 0.0)
    return metrics


class Board:
    """TensorBoard on rank 0; after a resumption what was logged past the checkpoint is dropped."""

    def __init__(self, folder: Path, ranks: Ranks, done: int):
        self.writer = None
        if ranks.first:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def write(self, group: str, metrics: dict[str, float], step: int) -> None:
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(f"{group}/{name}", value, step)
            self.writer.flush()

    def close(self) -> None:
        if self.writer:
            self.writer.close()


def refuse_non_finite(name: str, values: Tensor, batch: Batch) -> None:
    """Raises UserError naming the texts whose rows of ``values`` hold NaN or inf."""
    finite = torch.isfinite(values).flatten(1).all(dim=1)
    if not bool(finite.all()):
        bad = [text for text, good in zip(batch.ids, finite.tolist(), strict=True) if not good]
        raise UserError(f"the expert's {name} hold NaN or inf for these texts: {', '.join(bad)}")
