"""Ranks of a training run: how they start, share the machine's cores, and add up numbers."""

from __future__ import annotations

import logging
import os
import random
from datetime import timedelta

import numpy as np
import torch

from dcd_core.processes import (
    MEETING,
    Ranks,
    WaitFlags,
    barrier,
    free_port,
    hold_for_all,
    local_world,
    meet,
    planned_world,
    refuse_unshared,
    usable_cores,
)

__all__ = [
    "Ranks",
    "WaitFlags",
    "add_up",
    "barrier",
    "free_port",
    "hold_for_all",
    "planned_world",
    "random_state",
    "refuse_unshared",
    "restore_random_state",
    "seed_everything",
    "start",
    "usable_cores",
]


def start(seed: int, timeout_minutes: float = WaitFlags.timeout_minutes) -> Ranks:
    """Join the run: under the ``deepspeed`` launcher as it says, else as its only process.

    CPU ranks share the cores: torch gets at most cores / ranks threads each.

    Args:
        timeout_minutes: see :class:`WaitFlags`.
    Raises:
        UserError: a rank that did not come, by number.
    """
    own = {}
    if "RANK" not in os.environ:
        own = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
        own["MASTER_PORT"] = str(free_port())
        os.environ.update(own)
    logging.getLogger("DeepSpeed").addFilter(worth_reading)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    world = planned_world()
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // local_world())))
    else:
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Without a GPU, DeepSpeed would compile a shared-memory all-reduce at its first start (two minutes), and a rank
    # that is killed meanwhile would leave a lock that later ones wait for. gloo's own does as well for few ranks.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # of one operation; who does not answer is named before that
    timeout = timedelta(minutes=timeout_minutes + max(1.0, timeout_minutes / 10))
    try:
        meet(
            lambda: deepspeed.init_distributed(verbose=False, timeout=timeout, init_method=MEETING),
            timeout_minutes,
            launched=not own,
        )
    except BaseException:
        for name in own:  # of a port that cannot be had, say: the next attempt takes another
            del os.environ[name]
        raise
    rank = torch.distributed.get_rank()
    seed_everything(seed + rank)
    return Ranks(rank, world, torch.device(get_accelerator().current_device_name()))


def worth_reading(record: logging.LogRecord) -> bool:
    """Not DeepSpeed's warning at every start that it found no GPU: training on the CPU is an ordinary thing here."""
    return not record.getMessage().startswith("Setting accelerator to CPU")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict:
    """State of every random generator of this rank."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict) -> None:
    """Put back what :func:`random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def add_up(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sum over all ranks, in fp64 where the device has it; the result is on the CPU."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    values = values.to(device=device, dtype=wide)
    torch.distributed.all_reduce(values)
    return values.cpu()
