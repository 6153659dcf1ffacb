"""Sizes of a run before it starts (``--dry_run``) and the summary it leaves when it has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.dual_input import make_head
from dcd_core.heads.eagle3 import Eagle3Config
from dcd_core.models import default_feature_layers, load_config
from train.batches import Plan, Stream, Texts
from train.loop import read_deepspeed_config, total_steps
from train.processes import Ranks, planned_world
from train.pruning import parse_layers, pruned_config, refuse_quantised
from train.unroll import LOGIT_BUDGET, logit_pieces

BYTES = {"float32": 4, "bfloat16": 2}


def count_parameters(module: nn.Module, trained_only: bool = False) -> int:
    """Parameters of a module, shared ones once."""
    return sum(item.numel() for item in module.parameters() if item.requires_grad or not trained_only)


def on_meta(config) -> nn.Module:
    """A model of this configuration without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def training_bytes(parameters: int, dtype: str, stage: int, world: int) -> int:
    """Weights, gradients and AdamW state of one rank [Rajbhandari et al. 2020, arXiv 1910.02054].

    bf16 keeps fp32 master weights beside the bf16 ones.
    """
    weights, gradients = BYTES[dtype], BYTES[dtype]
    state = 8 if dtype == "float32" else 12
    shares = [weights / (world if stage >= 3 else 1), gradients / (world if stage >= 2 else 1)]
    shares.append(state / (world if stage >= 1 else 1))
    return int(parameters * sum(shares))


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def describe_texts(config, vocab: int) -> tuple[str, Plan | None]:
    """The lines on data and steps; without token files only what is missing."""
    missing = [path for path in config.train_tokens if not Path(path).is_file()]
    world = planned_world()
    if missing:
        lines = f"training texts: not there yet ({', '.join(missing)}), so the number of steps is not known"
        return lines + (f" (at most {config.max_steps})" if config.max_steps else ""), None
    texts = Texts.load(config.train_tokens, config.max_length, vocab, getattr(config, "max_answer_tokens", 0))
    plan = Plan(tuple(texts.lengths), config.batch_size, world, config.gradient_accumulation, config.seed)
    steps = total_steps(config, plan.steps_per_epoch)
    return (
        f"training texts: {texts.describe()}\n"
        f"optimiser steps: {steps} of {plan.global_batch} texts ({world} ranks x {config.batch_size} x "
        f"{config.gradient_accumulation} micro-batches), {config.epochs} epochs"
    ), plan


def describe_head_run(config) -> str:
    """Tokens, parameters, memory and steps of a head's training, from configurations only."""
    expert_config = load_config(config.expert)
    shape = load_head_config(config.head_init) if config.head_init else head_shape(config, expert_config)
    head = head_parameters(shape)
    expert = count_parameters(on_meta(expert_config))
    stage = zero_stage(config)
    data, plan = describe_texts(config, expert_config.vocab_size)
    longest = max(plan.lengths) if plan else config.max_length
    batch = batch_bytes(config, shape, longest)
    trained = training_bytes(head, config.dtype, stage, planned_world())
    frozen = expert * BYTES[config.expert_dtype]
    return "\n".join(
        [
            f"expert {config.expert}: {expert / 1e6:.1f} M parameters, frozen, {config.expert_dtype}",
            describe_shape("head", head, shape, config.dtype),
            data,
            f"memory per rank: expert {gigabytes(frozen)}, head with AdamW at ZeRO {stage} {gigabytes(trained)}, "
            f"at most about {gigabytes(batch)} for a micro-batch of {config.batch_size} x {longest} tokens; "
            f"together {gigabytes(frozen + trained + batch)}",
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


def batch_bytes(config, shape: Eagle3Config, longest: int, targets: int = 1) -> int:
    """About what one head's share of a micro-batch needs, with so many different training targets beside it."""
    wide, hidden = BYTES[config.dtype], shape.hidden_size
    # per position and step: about 14 H-wide and 3 MLP-wide activations of each block are kept for the backward pass
    block = 14 * hidden + 3 * shape.intermediate_size
    kept = config.unroll_steps * shape.num_hidden_layers * block * wide
    features = (sum(shape.feature_widths) + 2 * hidden) * wide
    rows = config.batch_size * longest
    # fp32 logits over the whole vocabulary of a chunk of rows: both models', the target's, and what softmax makes of it
    logits = 4 * 4 * min(rows * shape.vocab_size, LOGIT_BUDGET)
    return rows * (kept + features + 4 * shape.draft_vocab_size * targets) + logits


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
    memory = training_bytes(trained, config.dtype, stage, planned_world()) + (size - trained) * BYTES[config.dtype]
    frozen = expert * BYTES[config.expert_dtype]
    data, _ = describe_texts(config, expert_config.vocab_size)
    return "\n".join(
        [
            f"expert {config.expert}: {expert / 1e6:.1f} M parameters, frozen, {config.expert_dtype}",
            f"amateur: layers {layers}, {size / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained, {config.dtype}",
            data,
            f"memory per rank: expert {gigabytes(frozen)}, amateur with AdamW at ZeRO {stage} {gigabytes(memory)}, "
            "and the activations",
        ]
    )
