"""Optional packages: which are installed, and which a model folder's tokenizer needs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from dcd_core.errors import UserError

MODULES = {
    "amd-quark": "quark",
    "flute-kernel": "flute",
    "optimum-quanto": "optimum.quanto",
    "protobuf": "google.protobuf",
}
"""Packages whose module is not called as they are."""
TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")
"""Files that transformers converts where there is no tokenizer.json."""
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""A line of a tiktoken file: a token in base64, and its rank."""


def installed(package: str) -> bool:
    """Whether Python finds a package, named as pip names it."""
    name = package.split("[")[0]
    try:
        return importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def refuse_missing_tokenizer_packages(name: str) -> None:
    """Say which packages read the tokenizer of a folder (or of what is cached of a hub id), where they are missing.

    Raises:
        UserError: it has no tokenizer.json, but a file that packages which are not installed would read.
    """
    if _place(name, "tokenizer.json"):
        return
    for path in filter(None, (_place(name, file) for file in TOKENIZERS)):
        with path.open("rb") as handle:
            ranks = RANKS.match(handle.readline(1000))
        kind, packages = ("tiktoken", ("tiktoken",)) if ranks else ("sentencepiece", ("sentencepiece", "protobuf"))
        missing = [package for package in packages if not installed(package)]
        if missing:
            raise UserError(
                f"{name} has only a {kind} tokenizer ({path.name}, no tokenizer.json), which needs packages that are "
                f"not installed (pip install {' '.join(missing)})"
            )


def _place(name: str, file: str) -> Path | None:
    """A file of a local folder, or of a hub id where it is in the cache."""
    if Path(name).is_dir():
        found = Path(name) / file
        return found if found.is_file() else None
    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
