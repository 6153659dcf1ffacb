"""Pipeline files: stages with their commands, inputs and outputs, and the variables in them.

A word in braces stands for a variable of the file or for a place: {python}, {run} (the folder for results), {cache},
and, in commands, {port} (a TCP port that is free when the stage starts). {dtype} is what this machine computes fast in,
unless the file's own variables set it.
"""

import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from dcd_core.config import ROOT, read_yaml
from dcd_core.errors import UserError
from dcd_core.files import cache_dir

PLACES = ("python", "run", "cache", "port")


@dataclass(frozen=True)
class Stage:
    """One command. Words in braces in its parts are variables; paths are relative to the root of the source tree."""

    name: str
    budget_s: float
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """The stages of a file in order, and the values of its variables."""

    stages: tuple[Stage, ...]
    variables: dict[str, str]
    budget_s: float
    result: str

    @property
    def run(self) -> Path:
        return ROOT / self.variables["run"]


def load_pipeline(path: str, run_dir: str = "", cache_folder: str = "") -> Pipeline:
    """Read a pipeline file. Raises UserError for a missing or unknown key, a repeated name or an unknown variable.

    `path` is looked for here, and then in the source tree, so that the files in there are found from any folder.
    """
    if not Path(path).exists() and (ROOT / path).exists():
        path = str(ROOT / path)
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `run` and `stages`")
    _check_keys(content, {"run", "stages"}, {"variables", "budget_s", "result"}, path)
    own = {name: str(value) for name, value in (content.get("variables") or {}).items()}
    taken = [name for name in own if name in PLACES]
    if taken:
        raise UserError(f"{path}: the variable '{taken[0]}' is set by the pipeline; choose another name")
    variables = own | {
        "python": sys.executable,
        "run": run_dir or content["run"],
        "cache": str(cache_dir(cache_folder)),
        "port": "0",  # see free_port
    }
    variables.setdefault("dtype", fast_dtype())
    stages = [_stage(entry, variables, path) for entry in content["stages"]]
    names = [stage.name for stage in stages]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UserError(f"{path}: two stages are named '{repeated[0]}'")
    budget = float(content.get("budget_s", sum(stage.budget_s for stage in stages)))
    result = fill(content.get("result", ""), variables, path)
    return Pipeline(tuple(stages), variables, budget, result)


def fill(text: str, variables: dict[str, str], where: str = "") -> str:
    """Put the variables in. Raises UserError for a name that is none of them."""
    try:
        return text.format_map(variables)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{where}: '{text}' has no variable {error}; there are {', '.join(variables)}") from None


def fast_dtype() -> str:
    """bfloat16 where the device has instructions for it, else float32: a CPU without them takes eight times as long."""
    import torch

    cpu = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    fast = torch.cuda.is_available() or any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if fast else "float32"


def free_port() -> str:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return str(listener.getsockname()[1])


def _stage(entry: dict, variables: dict[str, str], path: str) -> Stage:
    if not isinstance(entry, dict):
        raise UserError(f"{path}: each stage is a block of `key: value` lines, got {entry!r}")
    where = f"{path}: stage {entry.get('name')}"
    _check_keys(entry, {"name", "budget_s", "command", "outputs"}, {"inputs"}, where)
    command = shlex.split(entry["command"]) if isinstance(entry["command"], str) else map(str, entry["command"])
    inputs, outputs = tuple(entry.get("inputs") or ()), tuple(entry["outputs"])
    stage = Stage(str(entry["name"]), float(entry["budget_s"]), tuple(command), inputs, outputs)
    for text in (*stage.command, *stage.inputs, *stage.outputs):
        fill(text, variables, where)  # refuses an unknown variable before anything runs
    return stage


def _check_keys(entry: dict, required: set[str], optional: set[str], where: str) -> None:
    for name in required - set(entry):
        raise UserError(f"{where} lacks '{name}'")
    for name in set(entry) - required - optional:
        raise UserError(f"{where} has an unknown key '{name}'; known are {', '.join(sorted(required | optional))}")
