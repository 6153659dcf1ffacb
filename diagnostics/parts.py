"""Finished pieces of long work, one JSON file each, so that a stopped measurement goes on where it was.

Every piece carries the key of the settings and inputs that made it; pieces of other settings are refused, never mixed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.files import content_hash, write_json_atomic
from dcd_core.progress import Bar


class Parts:
    """The pieces in `folder`/parts. `settings` is any JSON-able value that decides the results."""

    def __init__(self, folder: str | Path, settings, overwrite: bool = False):
        self.folder = Path(folder) / "parts"
        self.key = content_hash(settings)
        if overwrite:
            self.remove()
        for path in self.folder.glob("*.json"):
            if self._read(path)["key"] != self.key:
                raise UserError(
                    f"{self.folder} holds unfinished work with other settings or inputs; give --overwrite to start "
                    "again, or another --output"
                )

    def get(self, name: str):
        """What `put` stored under this name, or None."""
        path = self.folder / f"{name}.json"
        return self._read(path)["value"] if path.is_file() else None

    def put(self, name: str, value) -> None:
        """Store one piece atomically. Raises UserError if a number in it is not finite."""
        write_json_atomic(self.folder / f"{name}.json", {"key": self.key, "value": value})

    def remove(self) -> None:
        """Delete all pieces, once the whole is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> dict:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {"key": found["key"], "value": found["value"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged; delete it, and the same command makes it again") from None


def at_every_alpha(
    prompts: list[Prompt],
    alphas: list[float],
    size: int,
    parts: Parts,
    label: str,
    measure: Callable[[list[Prompt], float], object],
) -> list:
    """`measure(batch, alpha)` of every batch of `size` prompts at every alpha, in order; batches measured before a stop
    are taken as they are."""
    pieces = []
    with Bar(len(prompts) * len(alphas), label, unit="prompts") as bar:
        for alpha in alphas:
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                name = f"alpha{alpha:g}-{content_hash([prompt.id for prompt in batch])[:16]}"
                piece = parts.get(name)
                if piece is None:
                    piece = measure(batch, alpha)
                    parts.put(name, piece)
                pieces.append(piece)
                bar.update(len(batch), f"alpha {alpha:g}")
    return pieces
