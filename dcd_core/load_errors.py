"""One line for what goes wrong while a model's weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from dcd_core.errors import UserError
from dcd_core.quantisation import cannot_use, quantisation_of
from dcd_core.text_files import refuse_pointer

NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory")
"""How torch, safetensors and the system say that the host's memory is used up."""


def first_line(error: Exception) -> str:
    """The first line of an error's text, for one-line messages; with the second where the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


@contextmanager
def one_line_errors(name: str, config, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Turn what loading a model raises into a UserError; ``config`` is the model's, ``device`` where it is to go."""
    settings = quantisation_of(config)
    for path in Path(name).glob("*.safetensors"):
        with path.open("rb") as stream:
            refuse_pointer(stream.read(100), str(path))
    loud = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # transformers prints a table of what does not fit; one line says it here
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(name, config, dtype, device) from error
        if isinstance(error, MemoryError) or any(text in str(error).lower() for text in NO_MEMORY):
            raise out_of_memory(name, config, dtype, torch.device("cpu")) from error
        if settings is not None:  # packages of many makers: a broken one fails in any way
            raise cannot_use(name, settings, device, error) from error
        # values of config.json that no weights fit make transformers raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"cannot load the weights of {name!r}: {reason}") from error
    finally:
        logging.set_verbosity(loud)


def refuse_unfit_weights(report: dict, name: str) -> None:
    """Refuse a checkpoint that does not hold just the weights of its model: transformers fills what is missing with
    random numbers. Weights that are tied to others may be missing.

    Args:
        report: the loading info of ``from_pretrained``.
    Raises:
        UserError: how many weights are missing, unexpected or of another shape, and the first of each.
    """
    faults = []
    for kind, keys in (
        ("missing", "missing_keys"),
        ("unexpected", "unexpected_keys"),
        ("misshapen", "mismatched_keys"),
    ):
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in report.get(keys) or ())
        if names:
            faults.append(f"{len(names)} {kind} ({names[0]}{', ...' if len(names) > 1 else ''})")
    if faults:
        raise UserError(
            f"the weights of {name} do not fit its config.json: {'; '.join(faults)}; save the model again with "
            "save_pretrained, or correct the names of its weights"
        )


def out_of_memory(name: str, config, dtype: torch.dtype, device: torch.device) -> UserError:
    """What was to be loaded, and what there is."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        where, cure = str(device), "use a smaller --dtype, another --device or a smaller model"
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        where, cure = "this machine", "use a smaller --dtype or a smaller model"
    return UserError(
        f"out of memory while loading {name}: {weight_size(config, dtype)}, and {where} has {gibibytes(free)} free "
        f"of {gibibytes(total)}; {cure}"
    )


def weight_size(config, dtype: torch.dtype) -> str:
    """The size of a model's weights, from its configuration."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    kind = str(dtype).removeprefix("torch.")
    if quantisation_of(config) is not None:
        return f"it has {count / 1e9:.2f} billion weights, which are quantised ({kind} where they are not)"
    return f"its weights take {gibibytes(count * dtype.itemsize)} in {kind}"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
