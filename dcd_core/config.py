"""Settings of an entry script (dataclass <- YAML <- flags), and the record that each run leaves of them.

One flat dataclass per script is the only place where a setting is written: a field with a type, a default and a help
text. The keys of a YAML file given by `--config` become flags placed before the typed ones, so that one parser checks
types, choices and unknown names for both, and what was typed wins.
"""

from dcd_core.environment import CHECK_MODELS

import argparse
import dataclasses
import difflib
import importlib.metadata
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from dcd_core.errors import UserError
from dcd_core.files import (
    NOT_WRITTEN,
    TEMPORARY,
    check_output_folder,
    file_hash,
    not_written,
    write_json_atomic,
    write_text_atomic,
)
from dcd_core.locks import hold, let_all_go, let_go, refuse_held

ROOT = Path(__file__).resolve().parent.parent
Settings = TypeVar("Settings")
RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "deepspeed",
    "datasets",
    "numpy",
    "pandas",
    "pyarrow",
    "dcd",
)
ARGPARSE_OPTIONS = {"action", "choices", "const", "default", "dest", "help", "metavar", "nargs", "required", "type"}
PAIR = ("expert", "amateur", "head", "amateur_head", "lm", "dtype", "device")
"""What the `pair` block of a YAML file may hold: a script takes of it what it has a setting for."""
FROM_PAIR = "pair"
"""Metadata of a setting that takes another entry of that block than the one of its own name; "" for none."""
NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^-(inf|nan)$")


def parse_config(cls: type[Settings], argv: list[str] | None = None, description: str | None = None) -> Settings:
    """Make a `cls` from its defaults, the YAML files given by `--config` (in order), and the other flags in `argv`.

    A script with an expert also takes `--check_models false`, which loads models without dcd_core.model_check.

    A null in a YAML file means the default. A block `pair` in it describes models for any script, which takes what it
    has settings for. `--local_rank`, which the deepspeed launcher adds, is accepted and dropped
    (the launcher also sets LOCAL_RANK). Raises UserError for an unknown flag or key, a value of the wrong type, a
    number that is not finite, or what the dataclass's own checks refuse (ValueError in __post_init__).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(cls, description)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", action="append", default=[])
    try:
        given, typed = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    from_files = [flag for path in given.config for flag in parser.flags_from_yaml(path)]
    values = vars(parser.parse_args(from_files + typed))
    os.environ[CHECK_MODELS] = str(int(values.get("check_models", True)))
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for name in fields:
        for number in values[name] if isinstance(values[name], list) else [values[name]]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"--{name} must be a finite number, got {number}")
    try:
        return cls(**{name: values[name] for name in fields})
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None


def refuse_below(config: Any, **least: float) -> None:
    """Hold number settings to the least value each may have.

    Raises:
        ValueError: the first that is smaller, by flag, with its value.
    """
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {getattr(config, name)}")


def refuse_above(config: Any, **most: float) -> None:
    """Hold number settings to the greatest value each may have.

    Raises:
        ValueError: the first that is greater, by flag, with its value.
    """
    for name, greatest in most.items():
        if getattr(config, name) > greatest:
            raise ValueError(f"--{name} must be at most {greatest}, got {getattr(config, name)}")


def run_entry(main: Callable[[], int | None]) -> int:
    """Run an entry script's main on the command line; bad input becomes one line, `error: ...`, and exit code 2.

    So does a place that cannot be read or written: a full disk, missing permission.
    """
    try:
        return main() or 0
    except UserError as error:
        return _refuse(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # whoever reads the output has seen enough (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own flush complains
            return 141
        if error.errno in NOT_WRITTEN:  # by a library, which may not say where
            return _refuse(not_written(error.filename or os.getcwd(), os.strerror(error.errno)))
        if isinstance(error, PermissionError):
            return _refuse(UserError(f"{error.filename or 'a file'}: {error.strerror}"))
        raise
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what is finished", file=sys.stderr, flush=True)
        return 130
    finally:
        let_all_go()


def _refuse(error: UserError) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return 2


def is_free(folder: str | Path) -> bool:
    """Whether a folder is new or empty. Raises UserError where nothing can be written or another process works."""
    folder = check_output_folder(folder)
    refuse_held(folder)
    return not folder.exists() or all(path.name.startswith(TEMPORARY) for path in folder.iterdir())


def make_folder(folder: str | Path) -> Path:
    """Make a folder and its parents. Raises UserError if that is not possible."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None
    return Path(folder)


def refuse_taken(folder: str | Path, overwrite: bool = False) -> None:
    """Raise UserError unless a run of this script may begin, or go on, in `folder`. Changes nothing.

    It may in a new or empty folder, in an unfinished run of the same script and, with `overwrite`, in a finished one;
    not while another process works there.
    """
    if is_free(folder):
        return
    folder = Path(folder)
    try:
        script = shlex.split((folder / "command.txt").read_text(encoding="utf-8"))[0]
    except (OSError, ValueError, IndexError):
        raise UserError(f"{folder} holds other files and no run; give a new or empty folder") from None
    if not _same_script(script, _started_as()):
        raise UserError(f"{folder} holds a run of {script}; choose another folder")
    if (folder / "metrics.json").exists() and not overwrite:
        raise UserError(f"{folder} holds a finished run; choose another folder or give --overwrite")


def _started_as() -> str:
    """The running script: by its place in the project, "train/cross_alpha.py", wherever it was started from."""
    script = Path(sys.argv[0] or "python")
    try:
        return script.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return str(script)


def _same_script(one: str, other: str) -> bool:
    """Two rooms have scripts of one name, so the folder counts too, where both say it."""
    first, second = ([part for part in Path(path).parts if part != ".."][-2:] for path in (one, other))
    shared = min(len(first), len(second))
    return first[-shared:] == second[-shared:]


def save_run(folder: str | Path, config: Any, argv: list[str] | None = None, overwrite: bool = False) -> Path:
    """Begin a run: write config.yaml, command.txt, versions.json and git_sha.txt into `folder`, and return it.

    The folder is held by this process until `finish_run`, or its own end. Raises UserError where `refuse_taken` does,
    and for a folder that cannot be made. With `overwrite`, the old metrics.json is removed first, so that a half redone
    run never looks finished.
    """
    refuse_taken(folder, overwrite)
    folder = make_folder(folder)
    hold(folder)
    (folder / "metrics.json").unlink(missing_ok=True)
    settings = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    command = [_started_as(), *(sys.argv[1:] if argv is None else argv)]
    # first: it is what tells an unfinished run from a folder of something else
    write_text_atomic(folder / "command.txt", shlex.join(map(str, command)) + "\n")
    write_text_atomic(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    write_json_atomic(folder / "versions.json", versions())
    write_text_atomic(folder / "git_sha.txt", git_sha() + "\n")
    return folder


def finish_run(folder: str | Path, metrics: dict) -> None:
    """End a run: write metrics.json, which marks it as finished. Raises UserError if a number in it is not finite.

    Under `records` it also names the hash of every table that the folder holds now: a reader knows them again.
    """
    records = {path.name: file_hash(path) for path in sorted(Path(folder).glob("*.parquet"))}
    write_json_atomic(Path(folder) / "metrics.json", metrics | ({"records": records} if records else {}))
    let_go(folder)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_sha() -> str:
    """Commit of this source tree, with `-dirty` when tracked files differ from it; `unknown` outside a git checkout."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something, which settings are required, and the description (a module's docstring) as it
    was written.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required:
            return f"{action.help} (required)"
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)


class _Parser(HfArgumentParser):
    """The flags of one dataclass, plus `--config`; every refusal is a UserError."""

    def __init__(self, cls: type, description: str | None):
        self.source = ""
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        super().__init__(cls, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)
        for field in dataclasses.fields(cls):  # it takes the None out of their types, in the class itself and its bases
            field.type = types[field.name]
        # argparse takes -1e-3 for an option; there is no public setting for what a negative number looks like
        self._negative_number_matcher = NEGATIVE_NUMBER
        self.fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        # shown in the help only: parse_config has taken it out of the arguments
        self.add_argument("--config", metavar="FILE", help="YAML file with any of these settings, or a pair; flags win")
        if "expert" in self.fields:
            text = "compare a few tokens with the model's own forward when a model is loaded"
            self.add_argument("--check_models", type=string_to_bool, default=True, help=text)
        if "local_rank" not in self.fields:
            self.add_argument("--local_rank", "--local-rank", type=int, default=-1, help=argparse.SUPPRESS)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As in argparse, but a list may be empty, a % in a help text is only a percent sign, and metadata of a field
        that is for others than argparse is left out.
        """
        options = {name: value for name, value in options.items() if name in ARGPARSE_OPTIONS}
        if options.get("nargs") == "+":
            options["nargs"] = "*"
        text = options.get("help")
        if text and text is not argparse.SUPPRESS:
            options["help"] = text.replace("%", "%%")
        return super().add_argument(*names, **options)

    def error(self, message: str) -> None:
        """Raise instead of printing usage and exiting."""
        raise UserError(f"{self.source}{message}")

    def flags_from_yaml(self, path: str) -> list[str]:
        """The settings in a YAML file as flags, checked on their own so that an error names the file."""
        flags = []
        for name, value in self._with_pair(_read_yaml(path), path).items():
            if name not in self.fields:
                close = difflib.get_close_matches(str(name), self.fields, n=1)
                hint = f"; did you mean '{close[0]}'?" if close else "; --help lists the settings"
                raise UserError(f"unknown setting '{name}' in {path}{hint}")
            flags += self._flag(name, value, path)
        required = [action for action in self._actions if action.required]
        self.source = f"{path}: "
        for action in required:
            action.required = False
        self.parse_args(flags)
        for action in required:
            action.required = True
        self.source = ""
        return flags

    def _with_pair(self, settings: dict, path: str) -> dict:
        """Settings in which a `pair` block, if there is one, is replaced by what this script takes of it."""
        settings = dict(settings)
        pair = settings.pop("pair", {})
        if not isinstance(pair, dict):
            raise UserError(f"{path}: 'pair' must hold `name: value` lines of {', '.join(PAIR)}")
        unknown = [str(name) for name in pair if name not in PAIR]
        if unknown:
            raise UserError(f"{path}: a pair has no '{unknown[0]}'; it has {', '.join(PAIR)}")
        for name, value in pair.items():
            if value is not None and not isinstance(value, str):
                raise UserError(f"{path}: a pair's '{name}' is a folder or hub id, got {value!r}; put it in quotes")
        for name, field in self.fields.items():
            source = field.metadata.get(FROM_PAIR, name)
            if pair.get(source) is not None and name not in settings:
                one_of_several = self._option_string_actions[f"--{name}"].nargs == "*"
                settings[name] = [pair[source]] if one_of_several else pair[source]
        return settings

    def _flag(self, name: str, value: Any, path: str) -> list[str]:
        action = self._option_string_actions[f"--{name}"]
        items = value if isinstance(value, list) else [value]
        if value is None:
            return []
        if isinstance(value, list) and action.nargs != "*":
            raise UserError(f"{path}: '{name}' takes one value, not a list")
        for item in items:
            if item is None or isinstance(item, (dict, list)):
                raise UserError(f"{path}: '{name}' must be a plain value or a list of them, got {value}")
            if isinstance(item, bool) and action.nargs != "?" and action.type is str:
                raise UserError(f"{path}: '{name}' is text, but YAML reads its value as {item}; put it in quotes")
        if action.nargs == "*":
            return [f"--{name}", *map(str, items)]
        return [f"--{name}={value}"]


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(None, None, f"'{repeated}' is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file. Raises UserError if it cannot be read or parsed, or gives one key twice."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None


def _read_yaml(path: str) -> dict:
    settings = read_yaml(path)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold `name: value` lines, got a {type(settings).__name__}")
    return settings
