"""Sizes of a run before it starts (``--dry_run``) and the summary it leaves when it has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.dual_input import make_head
from dcd_core.heads.eagle3 import Eagle3Config
from dcd_core.models import default_feature_layers, load_config
from train.batches import Batch, Plan, Stream, Texts
from train.engines import read_deepspeed_config
from train.loop import total_steps
from train.processes import Ranks, planned_world
from train.pruning import parse_layers, pruned_config, refuse_quantised
from train.step_memory import amateur_memory, fullest, head_memory, on_meta
from train.unroll import EXPERT, logit_pieces


def count_parameters(module: nn.Module, trained_only: bool = False) -> int:
    """Parameters of a module, shared ones once."""
    return sum(item.numel() for item in module.parameters() if item.requires_grad or not trained_only)


def describe_texts(config, vocab: int) -> tuple[str, list[list[Batch]]]:
    """The lines on data and steps, and the micro-batches of the fullest steps; without token files only what is
    missing."""
    missing = [path for path in config.train_tokens if not Path(path).is_file()]
    world = planned_world()
    if missing:
        lines = f"training texts: not there yet ({', '.join(missing)}), so the number of steps is not known"
        return lines + (f" (at most {config.max_steps})" if config.max_steps else ""), fullest(config, None, None, 0)
    texts = Texts.load(config.train_tokens, config.max_length, vocab, getattr(config, "max_answer_tokens", 0))
    plan = Plan(tuple(texts.lengths), config.batch_size, world, config.gradient_accumulation, config.seed)
    steps = total_steps(config, plan.steps_per_epoch)
    return (
        f"training texts: {texts.describe()}\n"
        f"optimiser steps: {steps} of {plan.global_batch} texts ({world} ranks x {config.batch_size} x "
        f"{config.gradient_accumulation} micro-batches), {config.epochs} epochs"
    ), fullest(config, texts, plan, steps)


def describe_head_run(config) -> str:
    """Tokens, parameters, memory and steps of a head's training, from configurations only."""
    expert_config = load_config(config.expert)
    shape = load_head_config(config.head_init) if config.head_init else head_shape(config, expert_config)
    expert = count_parameters(on_meta(expert_config))
    data, steps = describe_texts(config, expert_config.vocab_size)
    stage = zero_stage(config)
    memory = head_memory(config, [expert_config], shape, [EXPERT], steps, stage, planned_world())
    return "\n".join(
        [
            f"expert {config.expert}: {expert / 1e6:.1f} M parameters, frozen, {config.expert_dtype}",
            describe_shape("head", head_parameters(shape), shape, config.dtype),
            data,
            memory.describe(f"expert {{frozen}}, head with AdamW at ZeRO {stage} {{trained}}"),
        ]
    )


def zero_stage(config) -> int:
    """Of the run's DeepSpeed file."""
    return read_deepspeed_config(config.deepspeed_config).get("zero_optimization", {}).get("stage", 0)


def common_pieces(config, stream: Stream, ranks: Ranks, ids: int) -> int:
    """In how many pieces every rank makes its logits where ranks share the weights (ZeRO 3): as many as the texts with
    most rows need. Elsewhere 0: each rank as it likes."""
    if ranks.world == 1 or zero_stage(config) < 3:
        return 0
    return logit_pieces(config.batch_size * int(stream.counts.max()), ids)


def head_shape(config, expert_config) -> Eagle3Config:
    """The shape of the heads that a trainer's settings ask for, without an amateur."""
    taps = tuple(config.feature_layers) or default_feature_layers(expert_config.num_hidden_layers)
    width = config.head_intermediate_size or None
    return Eagle3Config.from_expert(expert_config, config.draft_vocab_size, taps, config.head_layers, width)


def head_parameters(shape: Eagle3Config) -> int:
    """Trained parameters of a head."""
    with torch.device("meta"):
        return count_parameters(make_head(shape))


def describe_shape(what: str, parameters: int, shape: Eagle3Config, dtype: str) -> str:
    """One line on a head."""
    taps = f"taps {shape.feature_layers}"
    if shape.amateur_feature_layers:
        taps += f" and {shape.amateur_feature_layers} of the amateur"
    return (
        f"{what}: {parameters / 1e6:.1f} M trained parameters, {shape.num_hidden_layers} block(s), "
        f"{shape.draft_vocab_size} draft ids, {taps}, {dtype}"
    )


def coverage(texts: Texts, t2d: Tensor) -> float:
    """Share of the training answers' tokens that the draft vocabulary holds."""
    inside = t2d.cpu().numpy()
    answers = [sample.input_ids[start:end] for sample in texts.samples for start, end in sample.answer_spans]
    return float(inside[np.concatenate(answers)].mean())


def summary(texts: Texts, history: list[dict]) -> dict:
    """metrics.json of a training run: data, the last training and held-out metrics, and the whole curve."""
    return {**data_summary(texts), **curve_summary(history)}


def data_summary(texts: Texts) -> dict:
    """What a run was trained on, in numbers."""
    return {
        "texts": len(texts),
        "tokens": texts.tokens,
        "answer_tokens": texts.answer_tokens,
        "texts_cut": texts.shortened,
        "texts_dropped": texts.dropped,
    }


def curve_summary(history: list[dict]) -> dict:
    """Steps, last training and held-out metrics, and the whole curve of one trained module."""
    train = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if any(name.startswith("eval_") for name in entry)]
    last = held_out[-1] if held_out else {}
    return {
        "steps": history[-1]["step"] if history else 0,
        "train": train[-1] if train else {},
        "eval": {name.removeprefix("eval_"): value for name, value in last.items() if name != "step"},
        "history": history,
    }


def head_result(folder: Path, found: dict) -> str:
    """The line that a head's training ends with; without held-out texts it says so."""
    kind, figures = ("held-out", found["eval"]) if found["eval"] else ("no held-out texts; training", found["train"])
    length = f"accepted length {figures['accepted_length']:.2f}, " if "accepted_length" in figures else ""
    return f"head -> {folder}; {kind} {length}accuracy of the first draft {figures['accuracy/0']:.2f}"


def family_result(manifest: Path, members: dict[str, dict]) -> str:
    """The line that a family's training ends with; without held-out texts it says so."""
    figures = [found["eval"] or found["train"] for found in members.values()]
    kind = "held-out" if next(iter(members.values()))["eval"] else "no held-out texts; training"

    def spread(name: str) -> str:
        values = [found[name] for found in figures]
        return f"{min(values):.2f} to {max(values):.2f}"

    length = f"accepted length {spread('accepted_length')}, " if all("accepted_length" in f for f in figures) else ""
    return f"{len(members)} heads -> {manifest}; {kind} {length}accuracy of the first draft {spread('accuracy/0')}"


def amateur_result(folder: Path, found: dict) -> str:
    """The line that an amateur's training ends with; without held-out texts it says so."""
    if "held_out" in found:
        kind, divergence, top1 = "held-out", found["held_out"]["kl"], found["held_out"]["top1_agreement"]
    else:
        kind, divergence, top1 = "no held-out texts; training", found["train"]["loss"], found["train"]["accuracy/0"]
    cost = f"one pass takes {found['latency']['latency_ratio']:.2f} of the expert's time"
    return f"amateur -> {folder}; {kind} KL {divergence:.3f} nats, top-1 agreement {top1:.2f}; {cost}"


def describe_amateur_run(config) -> str:
    """Tokens, parameters, memory and steps of an amateur's training, from configurations only."""
    expert_config = load_config(config.expert)
    refuse_quantised(expert_config, config.expert)
    layers = parse_layers(config.keep_layers, expert_config.num_hidden_layers)
    expert = count_parameters(on_meta(expert_config))
    amateur = on_meta(pruned_config(expert_config, layers))
    size = count_parameters(amateur)
    if not config.train_embeddings:
        for part in (amateur.get_input_embeddings(), amateur.get_output_embeddings()):
            part.requires_grad_(False)
    trained = count_parameters(amateur, trained_only=True)
    stage = zero_stage(config)
    data, steps = describe_texts(config, expert_config.vocab_size)
    memory = amateur_memory(config, expert_config, layers, steps, stage, planned_world())
    return "\n".join(
        [
            f"expert {config.expert}: {expert / 1e6:.1f} M parameters, frozen, {config.expert_dtype}",
            f"amateur: layers {layers}, {size / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained, {config.dtype}",
            data,
            memory.describe(f"expert {{frozen}}, amateur with AdamW at ZeRO {stage} {{trained}}"),
        ]
    )
