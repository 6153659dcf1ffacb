"""DeepSpeed's engines: their settings, optimiser, gradient norm and whole weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dcd_core.errors import UserError


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


def start_engine(module: nn.Module, config, settings: dict, scale: Callable[[str], float] = lambda name: 1.0):
    """DeepSpeed's engine with AdamW over the trainable parameters.

    Args:
        config: a trainer's settings.
        settings: the DeepSpeed configuration, as read.
        scale: what a parameter of this name takes of the learning rate.
    """
    import deepspeed
    from pydantic import ValidationError

    trained: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained.setdefault(scale(name), []).append(parameter)
    every = [parameter for parameters in trained.values() for parameter in parameters]
    groups = [{"params": parameters, "scale": part} for part, parameters in trained.items()]
    betas = (config.beta1, config.beta2)
    # one parameter at a time: the same arithmetic on every machine and thread count
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay, foreach=False)
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
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=whole, model_parameters=every)
    except ValidationError as error:
        raise UserError(f"DeepSpeed refuses --deepspeed_config {config.deepspeed_config}: {error}") from None
    return engine


def set_rate(engine, rate: float) -> None:
    """The learning rate of the next step, which every group of parameters takes its own share of."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["scale"]


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
