"""What a measurement calls its models, and what its partial results are keyed by."""

import ast
import hashlib
import re
from pathlib import Path

from dcd_core.config import ROOT
from dcd_core.decode import Assembled, Scorer
from dcd_core.errors import UserError
from dcd_core.files import content_hash, file_hash
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair

_HASH = re.compile(r"-[0-9a-f]{12,}$")


def put_together(
    name: str,
    pair: Pair,
    head: Eagle3Head | None,
    lm: LanguageModel | None = None,
    contrast: list[Scorer] | None = None,
    amateur_head: Eagle3Head | None = None,
) -> Assembled:
    """Any method, with the heads and a small language model (by default the amateur, which is one) for those that draft
    with them."""
    return assemble(name, pair, head, contrast, lm or pair.amateur, amateur_head)


def short_name(path: str) -> str:
    """What the report calls a model: the last part of its hub id, or its folder's own name without a cache's hash."""
    if not path:
        return "none"
    folder = Path(path).resolve() if Path(path).is_dir() else Path(path)
    own = folder.parent.name if folder.name == "model" else folder.name  # a trained amateur stands in <run>/model
    return _HASH.sub("", own)


def refuse_dual_input(head: Eagle3Head | None, name: str) -> None:
    """For measurements that give a head the expert's features alone.

    Raises:
        UserError: it reads an amateur too.
    """
    if head is not None and head.kind != "eagle3":
        raise UserError(
            f"{name} is a dual-input head, and this measurement gives a head the expert's features alone; "
            "diagnostics/cross_alpha.py measures heads that read both models"
        )


def code_key(*places: str, root: Path = ROOT) -> str:
    """Hash of what the project's own modules in some places do, patterns such as "dcd_core/*.py": comments, docstrings
    and layout are left out, for hours of work must not be repeated for a word in them."""
    files = [path for place in places for path in sorted(root.glob(place))]
    return content_hash(
        [[path.relative_to(root).as_posix(), _bare(path.read_text(encoding="utf-8"))] for path in files]
    )


def _bare(source: str) -> str:
    """A module without docstrings, comments and layout."""
    tree = ast.parse(source)
    told = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, told) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def inputs_key(prompts: str | list[str], *models: str) -> dict:
    """What a partial result is keyed by: hashes of the prompt files, and fingerprints of models in local folders."""
    folders = [model for model in models if model and Path(model).is_dir()]
    hashes = file_hash(prompts) if isinstance(prompts, str) else [file_hash(path) for path in prompts]
    return {"prompts": hashes} | {folder: fingerprint(folder) for folder in folders}


def fingerprint(folder: str) -> str:
    """Hash of a model folder: its config whole, and 16 samples spread over each of its weight files.

    Training changes weights everywhere, so samples see it, and a large model need not be read whole.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as handle:
                for sample in range(16):
                    handle.seek(size * sample // 16)
                    digest.update(handle.read(65536))
    return digest.hexdigest()
