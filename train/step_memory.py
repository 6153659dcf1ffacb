"""What a run takes of a device's memory at its fullest moment: its own step, traced without data (train/traced.py).

Beside the step: loading, evaluation and the end of a run, which hold copies of weights. On CUDA the allocator's caching
and cuBLAS come on top (about a GiB), on the CPU what Python and the libraries take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from data_prep.token_files import Sample
from dcd_core.chat import stop_ids
from dcd_core.errors import UserError
from dcd_core.heads.dual_input import make_head
from dcd_core.heads.eagle3 import Eagle3Config
from dcd_core.models import LanguageModel, Pair, id_table, load_tokenizer
from dcd_core.processes import local_world
from train.batches import Batch, Plan, Texts
from train.distil import Distil, DistilStep, compare, latency
from train.online_expert import HeadStep
from train.pruning import pruned_config
from train.traced import tracing
from train.unroll import Aim, Unroll

BYTES = {"float32": 4, "bfloat16": 2}
SCANNED = 20_000
"""Optimiser steps among which the fullest is looked for."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: the frozen models, what is trained with its optimiser, and all at the fullest moment."""

    frozen: int
    trained: int
    peak: int

    def describe(self, what: str) -> str:
        """One line, and a second one if it is more than this machine has."""
        rest = self.peak - self.frozen - self.trained
        line = (
            f"memory per rank: {what.format(frozen=gigabytes(self.frozen), trained=gigabytes(self.trained))}, "
            f"{gigabytes(rest)} more at the fullest moment; together {gigabytes(self.peak)}"
        )
        room, where, ranks = device_memory()
        if self.peak * ranks <= room:
            return line
        shared = f" for {ranks} ranks" if ranks > 1 else ""
        return (
            f"{line}\nwarning: {where} has {gigabytes(room)}, and this takes {gigabytes(self.peak * ranks)}{shared}: "
            "lower --batch_size or --max_length, train fewer heads at a time or with --recompute true, or share the "
            "optimiser (--deepspeed_config configs/deepspeed/zero3.json)"
        )


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def device_memory() -> tuple[int, str, int]:
    """Bytes of a rank's device, its name, and how many ranks share it."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        return found.total_memory, found.name, 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine", local_world()


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


def module_bytes(module: nn.Module) -> int:
    """Of weights and buffers, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def fullest(config, texts: Texts | None, plan: Plan | None, total: int) -> list[list[Batch]]:
    """The micro-batches of those optimiser steps that take most: by padded positions (of the frozen models), and by
    positions, drafts, and their products over each text (of the heads); a step's first two micro-batches, as the
    longest texts come first. Without texts: answers of the full length."""
    if texts is None:
        ids = np.zeros(config.max_length, dtype=np.int32)
        texts = Texts([Sample("any", ids, ((1, config.max_length),))], "", 0, 0)
        return [[texts.batch([0] * config.batch_size)] * min(2, config.gradient_accumulation)]
    answers = [sum(end - start for start, end in sample.answer_spans) for sample in texts.samples]
    found: dict[str, tuple[int, list[list[int]]]] = {}
    for number in range(min(total, SCANNED)):
        shares = plan.step(*divmod(number, plan.steps_per_epoch))
        for rank in range(plan.world):
            chosen = [ranks[rank] for ranks in shares[:2]]
            if not chosen[0]:
                continue
            pairs = [(plan.lengths[text], answers[text]) for text in chosen[0]]
            sizes = {
                "padded": len(pairs) * max(length for length, _ in pairs),
                "positions": sum(length for length, _ in pairs),
                "scores": sum(length * drafts for length, drafts in pairs),
                "drafts": sum(drafts for _, drafts in pairs),
            }
            for name, size in sizes.items():
                if size > found.get(name, (0, []))[0]:
                    found[name] = size, chosen
    different = {str(chosen): chosen for _, chosen in found.values()}
    return [[texts.batch(indices) for indices in chosen] for chosen in different.values()]


def trace_steps(
    modules: Sequence[nn.Module], step: Callable, steps: list[list[Batch]], unroll: int, adam: bool
) -> list[torch.optim.Optimizer]:
    """Trace optimiser steps of every module, in the order of the training loop; returns their optimisers, which live as
    long as the run.

    Args:
        adam: whether AdamW steps are traced too (one rank's plain optimiser), or its state is counted by the caller.
    """
    optimisers = [torch.optim.AdamW(trained(module), foreach=False) for module in modules] if adam else []
    for optimiser in optimisers:  # the state that is there from the second step on
        for parameter in optimiser.param_groups[0]["params"]:
            parameter.grad = torch.empty_like(parameter)
        optimiser.step()
        optimiser.zero_grad()
    for micro in steps:
        for batch in micro:
            for index, (loss, _) in enumerate(step(list(modules), batch, [1.0] * unroll)):
                loss.backward()
                del loss
                if optimisers and batch is micro[-1]:
                    optimisers[index].step()
                    optimisers[index].zero_grad()
        for module in modules:
            module.zero_grad()
    return optimisers


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def frozen_model(config, dtype: str, vocab: int, taps: tuple[int, ...] | None = None) -> LanguageModel:
    """A frozen model without weights, of so many real ids."""
    return LanguageModel(on_meta(config).to(getattr(torch, dtype)), vocab, taps)


def head_memory(
    config,
    models: Sequence,
    shape: Eagle3Config,
    aims: Sequence[Aim],
    steps: list[list[Batch]],
    stage: int,
    world: int,
    amateur_input: str = "expert_only",
) -> Memory:
    """Of training one head for each aim together.

    Args:
        models: configurations of the expert and, for a family, the amateur.
        steps: micro-batches of the fullest optimiser steps (:func:`fullest`).
    """
    adam = config.dtype == "float32" and stage == 0
    vocab, stops = real_ids(config.expert, models[0])
    with tracing() as traced:
        taps = shape.feature_layers, shape.amateur_feature_layers or None
        frozen = [
            frozen_model(model, config.expert_dtype, vocab, tap) for model, tap in zip(models, taps, strict=False)
        ]
        ids = torch.arange(shape.draft_vocab_size) + max(0, vocab - shape.draft_vocab_size)
        step = HeadStep(frozen[0], ids, stops, aims, *frozen[1:] or [None], amateur_input)

        def heads() -> list[Unroll]:
            bare = [bare_head(shape, config.dtype) for _ in aims]
            for head in bare:
                head.lm_head.requires_grad_(config.train_lm_head)
            widths = sum(shape.feature_widths) if config.feature_scaling == "rms" else 0
            sizes = torch.ones(widths) if widths else None
            return [
                Unroll(head, config.unroll_steps, config.step_decay, sizes=sizes, recompute=config.recompute)
                for head in bare
            ]

        modules = heads()
        states, hidden = optimiser_bytes(modules, config.dtype, stage, world)
        _kept = trace_steps(modules, step, steps, config.unroll_steps, adam)
        peak = traced.peak
        if config.eval_tokens:
            traced.restart()
            with torch.no_grad():
                for inputs, copy in zip(step.each(steps[0][0]), heads(), strict=True):
                    copy(*inputs, [1.0] * config.unroll_steps)
            peak = max(peak, traced.peak)
    return Memory(sum(module_bytes(model.model) for model in frozen), states, peak + hidden)


def amateur_memory(config, model, layers: list[int], steps: list[list[Batch]], stage: int, world: int) -> Memory:
    """Of distilling an amateur: loading it from the whole expert, its steps, and the comparison at the end.

    Args:
        model: configuration of the expert.
        steps: micro-batches of the fullest optimiser steps (:func:`fullest`).
    """
    small, (vocab, _) = pruned_config(model, layers), real_ids(config.expert, model)
    with tracing() as traced:
        expert = frozen_model(model, config.expert_dtype, vocab)
        whole = on_meta(model)
        amateur = on_meta(small)
        for part in (amateur.get_input_embeddings(), amateur.get_output_embeddings()):
            part.requires_grad_(config.train_embeddings)
        loaded = traced.peak
        del whole
        module = Distil(amateur.to(getattr(torch, config.dtype)), expert.vocab)
        states, hidden = optimiser_bytes([module], config.dtype, stage, world)
        traced.restart()
        _kept = trace_steps([module], DistilStep(expert), steps, 1, config.dtype == "float32" and stage == 0)
        peak = traced.peak
        traced.restart()
        weights = on_meta(small).to(getattr(torch, config.dtype))  # a copy on its way to the disk
        again = Pair(*(frozen_model(each, config.expert_dtype, vocab) for each in (model, small)), None)
        latency(again, passes=1)
        if config.eval_tokens:
            compare(again, longest(steps))
        peak = max(peak, traced.peak)
        del weights
    return Memory(module_bytes(expert.model), states, max(loaded, peak + hidden))


def real_ids(name: str, config) -> tuple[int, frozenset[int]]:
    """How many ids a model's tokenizer has, and which end a turn; without a tokenizer its rows, and none."""
    try:
        tokenizer = load_tokenizer(name)
        return len(id_table(tokenizer)), frozenset(stop_ids(tokenizer, name))
    except UserError:
        return config.vocab_size, frozenset()


def longest(steps: list[list[Batch]]) -> Texts:
    """The longest text among some micro-batches."""
    texts = [each for micro in steps for batch in micro for each in zip(batch.texts, batch.spans, strict=True)]
    ids, spans = max(texts, key=lambda text: len(text[0]))
    return Texts([Sample("longest", ids, tuple(spans))], "", 0, 0)


def optimiser_bytes(modules: Sequence[nn.Module], dtype: str, stage: int, world: int) -> tuple[int, int]:
    """Bytes of trained modules with gradients and AdamW, and how many of them :func:`trace_steps` does not see."""
    count = sum(parameter.numel() for module in modules for parameter in trained(module))
    still = sum(module_bytes(module) for module in modules) - count * BYTES[dtype]
    states = training_bytes(count, dtype, stage, world)
    plain = dtype == "float32" and stage == 0
    return states + still, 0 if plain else states - 2 * count * BYTES[dtype]


def bare_head(shape: Eagle3Config, dtype: str) -> nn.Module:
    """A head without weights."""
    with torch.device("meta"):
        return make_head(shape).to(getattr(torch, dtype))
