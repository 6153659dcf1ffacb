"""Toy token files and flags for the trainers' tests, and child processes that can be killed."""

import functools
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from tiny import save_tiny

from data_prep.token_files import Sample, write_tokens

STOP = 3
"""End-of-turn id of the tiny models."""
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE")
"""Variables that say which process group this process belongs to: its children must not inherit them."""


def toy_samples(count: int, seed: int = 0) -> list[Sample]:
    """Random texts: short prompts, answers of which every third is cut by length, some texts with two turns."""
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        ids, spans = [], []
        for _ in range(1 + (index % 5 == 0)):
            prompt, answer = generator.integers(2, 7), generator.integers(2, 12)
            start = len(ids) + int(prompt)
            ids += generator.integers(8, 96, prompt + answer).tolist()
            spans.append((start, len(ids)))
            if index % 3:
                ids[-1] = STOP
        samples.append(Sample(f"text{seed}-{index}", np.array(ids, dtype=np.int32), tuple(spans)))
    return samples


def make_toy(folder: Path, kind: str = "smol", texts: int = 30) -> Path:
    """``folder`` with expert/, train.parquet and held_out.parquet."""
    save_tiny(folder / "expert", kind)
    write_tokens(folder / "train.parquet", toy_samples(texts), {})
    write_tokens(folder / "held_out.parquet", toy_samples(5, seed=1), {})
    return folder


def make_toy_pair(folder: Path, kind: str = "smol", texts: int = 30) -> Path:
    """A toy with an amateur of four layers, which has no default taps."""
    save_tiny(folder / "amateur", kind, seed=100, layers=4)
    return make_toy(folder, kind, texts)


def family_flags(toy: Path, output: Path, *more: str) -> list[str]:
    """Flags of the trainers of families at toy size; later ones win."""
    return flags(toy, output, f"--amateur={toy / 'amateur'}", "--amateur_feature_layers", "1", "2", "3", *more)


def options(toy: Path, output: Path, *more: str) -> list[str]:
    """Flags of train/eagle3.py for a run of 16 steps, evaluated on held-out texts."""
    standard = [
        f"--eval_tokens={toy / 'held_out.parquet'}",
        "--epochs=2",
        "--save_every=6",
        "--keep=2",
        "--log_every=1",
    ]
    return flags(toy, output, *standard, *more)


def flags(toy: Path, output: Path, *more: str) -> list[str]:
    """Flags of train/eagle3.py at toy size; later ones win."""
    return [
        f"--expert={toy / 'expert'}",
        f"--train_tokens={toy / 'train.parquet'}",
        f"--output={output}",
        "--draft_vocab_size=40",
        "--start=random",
        "--query_key_rate=1",
        "--norm_rate=1",
        "--unroll_steps=3",
        "--batch_size=4",
        "--lr=3e-3",
        "--warmup_steps=2",
        "--expert_dtype=float32",
        "--log_every=2",
        *more,
    ]


def amateur_flags(toy: Path, output: Path, *more: str) -> list[str]:
    """Flags of train/amateur.py at toy size; later ones win."""
    drop = ("--draft_vocab_size", "--unroll_steps", "--start", "--query_key_rate", "--norm_rate")
    return [flag for flag in flags(toy, output, "--keep_layers=0-2,6", *more) if not flag.startswith(drop)]


def head_weights(output: Path, head: str = "head") -> dict:
    """The trained head of a run folder, or the one of this name."""
    return load_file(output / head / "model.safetensors")


# one process imports deepspeed once; every child is a fork of it
SERVER = multiprocessing.get_context("forkserver")


def start_child(target, *arguments):
    """A fresh process in which DeepSpeed and the trainers are imported already."""
    SERVER.set_forkserver_preload(["toy_training", "train.eagle3", "train.cross_alpha", "train.amateur", "deepspeed"])
    process = SERVER.Process(target=target, args=arguments)
    process.start()
    return process


def end_of(process, timeout: float = 120) -> int:
    """Its exit code (negative: the signal that killed it)."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"the child did not end within {timeout} s")
    return process.exitcode


def in_child(*arguments, timeout: float = 120, **options) -> int:
    """Run :func:`child_main` in a fresh process; its exit code (negative: the signal that killed it)."""
    return end_of(start_child(functools.partial(child_main, **options), *arguments), timeout)


def child_main(
    argv: list[str],
    log: str,
    kill_at: tuple[int, float] | None = None,
    kill_in: str = "",
    script: str = "train.eagle3",
    by: int = signal.SIGKILL,
    group: dict[str, str] | None = None,
    largest: int = 0,
) -> None:
    """The script in this process, as its command line runs it.

    Args:
        kill_at: killed so many ``(steps, seconds)`` after its start.
        kill_in: killed at a place of its second save: ``write`` (half is written), ``rename`` (nothing is renamed).
        by: the signal that it is killed by.
        group: the variables of :data:`GROUP`, for one of several ranks.
        largest: bytes that a file may have; 0: no limit.
    """
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115
    for name in GROUP:
        os.environ.pop(name, None)
    os.environ |= group or {}
    import torch

    import train.checkpoints
    import train.loop
    from dcd_core.config import run_entry

    main = importlib.import_module(script).main
    torch.set_num_threads(1)

    def die(*_arguments, **_options):
        os.kill(os.getpid(), by)

    if kill_at is not None:
        original, calls = train.loop.optimiser_step, []

        def counted(*arguments):
            calls.append(1)
            if len(calls) == kill_at[0]:
                timer = threading.Timer(kill_at[1], die)
                timer.daemon = True
                timer.start()
            return original(*arguments)

        train.loop.optimiser_step = counted
    if kill_in == "rename":
        train.checkpoints.os = _Patched(os, replace=_second(os.replace, die))
    if kill_in == "write":
        train.checkpoints.torch = _Patched(torch, save=_second(torch.save, die))
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    raise SystemExit(run_entry(functools.partial(main, argv)))


def _second(function, instead):
    """``function``, but its second call is ``instead``."""
    calls = []

    def wrapped(*arguments, **options):
        calls.append(1)
        return (instead if len(calls) == 2 else function)(*arguments, **options)

    return wrapped


class _Patched:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)
