"""The one training loop, for heads, families of heads and amateurs: DeepSpeed engines, schedule, accumulation, metrics,
save and resume.

A family is trained in lockstep: every member reads the same micro-batch, so that what is frozen runs once for all of
them. Each has an engine of its own, hence its own optimiser, gradient norm and clipping, and its losses are bit by bit
those of a run of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from dcd_core.config import FROM_PAIR, refuse_above, refuse_below, refuse_taken, save_run
from dcd_core.errors import UserError
from dcd_core.files import remove
from dcd_core.progress import Bar
from train.batches import Batch, Stream
from train.checkpoints import Checkpoints
from train.engines import plain_norm, read_deepspeed_config, set_rate, start_engine
from train.meters import Board, Meter
from train.processes import Ranks, WaitFlags, add_up, barrier, hold_for_all, refuse_unshared
from train.schedule import learning_rate
from train.stopping import STOPPED, Termination

FREE = {"weights": False}
"""Metadata of a setting that may change between a run and its resumption: the weights do not depend on it."""


@dataclass
class LoopConfig(WaitFlags):
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
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "of the trained weights", FROM_PAIR: ""}
    )
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
        super().__post_init__()
        refuse_below(self, epochs=1, batch_size=1, gradient_accumulation=1, max_length=1)
        refuse_below(self, save_every=1, keep=1, log_every=1, eval_every=0, seed=0, max_steps=0)
        refuse_below(self, warmup_steps=0, clip=0, weight_decay=0, final_lr_ratio=0, beta1=0, beta2=0)
        refuse_above(self, final_lr_ratio=1)
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"--{name} must be below 1, got {getattr(self, name)}")
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


def what_weights_depend_on(config: LoopConfig, ranks: Ranks, memory: dict, identity: dict) -> dict:
    """What a checkpoint is compared by when a run is resumed: settings by flag, and `identity` of data and expert."""
    settings = {
        item.name: getattr(config, item.name) for item in fields(config) if item.metadata.get("weights", True) is True
    }
    stage = memory.get("zero_optimization", {}).get("stage", 0)
    return {**settings, **identity, "world size": ranks.world, "ZeRO stage": stage, "deepspeed_config": memory}


def refuse_texts(config) -> None:
    """Raises ValueError for a number of texts or tokens below 0, or a file that is both trained on and held out."""
    refuse_below(config, max_answer_tokens=0, eval_texts=0)
    trained = {Path(path).resolve() for path in config.train_tokens}
    for path in config.eval_tokens:
        if Path(path).resolve() in trained:
            raise ValueError(f"--eval_tokens {path} is among --train_tokens; give texts that are not trained on")


def refuse_start(config: LoopConfig) -> None:
    """Raise UserError, before anything is loaded, for a folder that cannot be this run's or a bad DeepSpeed file."""
    refuse_taken(config.output, config.overwrite)
    read_deepspeed_config(config.deepspeed_config)


def has_checkpoint(config: LoopConfig, ranks: Ranks, part: str = "") -> bool:
    """Whether :func:`fit` will load weights and not train the ones it is given; every rank must call it."""
    folder = Path(config.output)
    removed = config.overwrite and (folder / "metrics.json").exists()
    found = ranks.first and not removed and any((folder / "checkpoints" / part).glob("step-*"))
    return bool(add_up(torch.tensor([float(found)]), ranks.device).item())


@dataclass
class Member:
    """One trained module of a run; the only one has no name.

    Attributes:
        history: logged metrics, one entry per logging.
    """

    name: str
    engine: object
    meter: Meter
    history: list[dict] = field(default_factory=list)
    board: Board | None = None

    def log(self, group: str, metrics: dict[str, float], step: int, prefix: str = "") -> None:
        """To the history and to TensorBoard."""
        self.history.append({"step": step, **{f"{prefix}{name}": value for name, value in metrics.items()}})
        self.board.write(group, metrics, step)


def open_run(
    members: list[Member],
    config: LoopConfig,
    ranks: Ranks,
    settings: dict,
    position_of: Callable,
    argv: list[str] | None,
    part: str = "",
) -> tuple[Checkpoints, int]:
    """The run's checkpoints, and the step of the newest, which is loaded into the members.

    With ``--overwrite``, what a finished run left is removed; an unfinished one is gone on with. The run's record is
    written last, when nothing can be refused any more: a refused start changes nothing.
    """
    folder = Path(config.output)
    refuse_unshared(folder, ranks)
    hold_for_all(folder, ranks)
    if ranks.first and config.overwrite and (folder / "metrics.json").exists():
        # metrics.json first: without it the run is unfinished
        for left in ("metrics.json", "manifest.json", "heads", "checkpoints", "tensorboard"):
            remove(folder / left)
    barrier()
    checkpoints = Checkpoints(folder / "checkpoints" / part, config.keep, settings, ranks)
    done = checkpoints.resume(members, position_of)
    if ranks.first:
        save_run(folder, config, argv, config.overwrite)
    barrier()
    return checkpoints, done


def fit(
    modules: Mapping[str, nn.Module],
    batches: Stream,
    step: Callable[..., Iterable[tuple[Tensor, Tensor]]],
    config: LoopConfig,
    ranks: Ranks,
    identity: dict,
    argv: list[str] | None = None,
    evaluate: Callable[[list], list[dict[str, float]]] | None = None,
    snapshots: Mapping[int, Callable[[list], None]] | None = None,
    part: str = "",
    scale: Callable[[str], float] = lambda name: 1.0,
) -> list[Member]:
    """Open the run folder and train ``modules`` to the end, from the newest checkpoint if there is one.

    Args:
        modules: what is trained, by name; ``{"": module}`` for a run of one.
        batches: what this rank reads at each optimiser step.
        step: ``step(engines, batch, denominators)`` runs one micro-batch: for each engine in turn, when it is asked
            for, this rank's share of the optimiser step's loss and a ``[unroll step, 4]`` tensor of sums (loss,
            correct, acceptance, rows). One member's graph is gone before the next one's is made. Of a loss that is not
            finite, ``step.explain(batch)``, where there is one, raises UserError if the step knows the reason.
        identity: more of what the weights depend on (hashes of data, vocabulary, expert); compared on resumption.
        argv: the flags, for the run's record.
        evaluate: called by all ranks with the engines; the numbers of each are logged under ``eval/``.
        snapshots: called by all ranks with the engines after these numbers of optimiser steps.
        part: name of the checkpoints' folder where a run trains its members in groups, one after the other.
        scale: what a parameter of this name takes of the learning rate.
    Returns:
        The members, in the order of ``modules``.
    Raises:
        UserError: NaN or inf, with the texts named; a checkpoint of another command; a folder of something else, or one
            that another process works in.
        SystemExit: SIGTERM reached a rank; a checkpoint was written.
    """
    memory = read_deepspeed_config(config.deepspeed_config)
    total = total_steps(config, batches.plan.steps_per_epoch)
    settings = what_weights_depend_on(config, ranks, memory, identity)
    members = [
        Member(name, start_engine(module, config, memory, scale), meter=Meter(ranks))
        for name, module in modules.items()
    ]
    engines = [member.engine for member in members]
    checkpoints, done = open_run(members, config, ranks, settings, batches.position, argv, part)
    if done and ranks.first:
        print(f"resuming after step {done} of {total}", flush=True)
    for member in members:
        member.board = Board(Path(config.output) / "tensorboard" / member.name, ranks, done)
    with Termination(ranks) as termination, Bar(total, f"training {part}".strip(), "steps", done) as bar:
        for number in range(done, total):
            if termination.agreed():
                stop(checkpoints, members, number, batches.position(number), total)
            rate = learning_rate(number, total, config.lr, config.warmup_steps, config.schedule, config.final_lr_ratio)
            norms = optimiser_step(members, batches, step, number, rate)
            last = number + 1 == total
            note = ""
            if last or (number + 1) % config.log_every == 0:
                for member, norm in zip(members, norms, strict=True):
                    member.log("train", {**member.meter.read(), "lr": rate, "grad_norm": norm}, number + 1)
                note = progress_note(members)
            if evaluate and (last or (config.eval_every and (number + 1) % config.eval_every == 0)):
                for member, found in zip(members, evaluate(engines), strict=True):
                    member.log("eval", found, number + 1, prefix="eval_")
                    member.meter.restart()
            if snapshots and number + 1 in snapshots:
                snapshots[number + 1](engines)
            if last or (number + 1) % config.save_every == 0:
                checkpoints.save(members, number + 1, batches.position(number + 1))
            bar.update(1, note)
    for member in members:
        member.board.close()
    return members


def stop(checkpoints: Checkpoints, members: list[Member], step: int, position: tuple[int, int], total: int) -> None:
    """Write a checkpoint unless there is one of this step, say so, and end the process; every rank must call it."""
    if step and step not in checkpoints.steps():
        checkpoints.save(members, step, position)
    if checkpoints.ranks.first:
        print(f"stopped by SIGTERM after step {step} of {total}; the same command resumes", file=sys.stderr, flush=True)
    raise SystemExit(STOPPED)


def progress_note(members: list[Member]) -> str:
    """The last logged loss and accuracy; of a family their means."""
    last = [member.history[-1] for member in members]
    loss, accuracy = (sum(entry[name] for entry in last) / len(last) for name in ("loss", "accuracy/0"))
    return f"loss {loss:.3f}, accuracy {accuracy:.3f}"


def optimiser_step(members: list[Member], batches: Stream, step, number: int, rate: float) -> list[float]:
    """One optimiser step of every member: all micro-batches of this rank. Returns gradient norms before clipping."""
    engines = [member.engine for member in members]
    for engine in engines:
        set_rate(engine, rate)
    micro, denominators = batches.at(number)
    norms: dict[str, Tensor | None] = {}
    for batch in micro:
        for member, (loss, sums) in zip(members, step(engines, batch, denominators), strict=True):
            who = f" of {member.name}" if member.name else ""
            if not math.isfinite(loss.item()):
                if hasattr(step, "explain"):
                    step.explain(batch)
                raise UserError(
                    f"the loss of optimiser step {number + 1}{who} is {loss.item()}; texts: {', '.join(batch.ids)}. "
                    "Lower --lr, or take these texts out"
                )
            # the loss is already this rank's share of the whole step, but DeepSpeed averages over ranks
            member.engine.backward(loss * member.engine.world_size, scale_wrt_gas=False)
            if batch is micro[-1]:
                norms[member.name] = plain_norm(member.engine)
            member.engine.step()
            member.meter.add(sums, batch.tokens)
    found = []
    for member in members:
        norm = norms[member.name]
        found.append(float(member.engine.get_global_grad_norm() if norm is None else norm))
        if not math.isfinite(found[-1]):
            who = f" of {member.name}" if member.name else ""
            names = ", ".join(name for batch in micro for name in batch.ids)
            raise UserError(
                f"the gradient norm of optimiser step {number + 1}{who} is {found[-1]}; texts of this rank: {names}"
            )
    return found


def all_finite(values: Mapping[str, Tensor]) -> Bool[Tensor, ""]:
    return torch.stack([torch.isfinite(some).all() for some in values.values()]).all()


def refuse_non_finite(values: Mapping[str, Tensor], batch: Batch) -> None:
    """Raises UserError naming the texts whose rows hold NaN or inf. The device is asked once for all.

    Args:
        values: by whose they are and what, such as "the expert's features": ``[1, token, ...]`` of the packed texts.
    """
    if bool(all_finite(values)):
        return
    for name, some in values.items():
        each = some[0].split(batch.lengths)
        bad = [text for text, rows in zip(batch.ids, each, strict=True) if not bool(torch.isfinite(rows).all())]
        if bad:
            raise UserError(f"{name} hold NaN or inf for these texts: {', '.join(bad)}")
