"""Finished pieces of long work, one JSON file each, so that a stopped measurement goes on where it was.

Every piece carries the key of the settings and inputs that made it; pieces of other settings are refused, never mixed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from dcd_core.config import save_run
from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.files import content_hash, write_json_atomic
from dcd_core.processes import ALONE, Ranks, barrier, hold_for_all, refuse_unshared
from dcd_core.progress import Bar


class Parts:
    """The pieces in `folder`/parts. `settings` is any JSON-able value that decides the results."""

    def __init__(self, folder: str | Path, settings, overwrite: bool = False):
        self.folder = Path(folder) / "parts"
        self.key = content_hash(settings)
        if overwrite:
            self.remove()
        # one that another rank is writing has a temporary name, which begins with a dot
        for path in self.folder.glob("[!.]*.json"):
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


def begin(config, argv: list[str] | None, settings, ranks: Ranks = ALONE) -> tuple[Parts, Path]:
    """The pieces of a run and its folder, held and begun by the first rank before any other looks at them.

    `config` has `output` and `overwrite`; `settings` is what decides the results (see `Parts`).
    """
    refuse_unshared(config.output, ranks)
    hold_for_all(config.output, ranks)
    if ranks.first:
        parts = Parts(config.output, settings, config.overwrite)
        save_run(config.output, config, argv, config.overwrite)
    barrier()
    return parts if ranks.first else Parts(config.output, settings), Path(config.output)


def at_every_alpha(
    prompts: list[Prompt],
    alphas: list[float],
    size: int,
    parts: Parts,
    label: str,
    measure: Callable[[list[Prompt], float], object],
    ranks: Ranks | None = None,
    group: str = "",
) -> list:
    """`measure(batch, alpha)` of every batch of `size` prompts at every alpha; batches measured before a stop are taken
    as they are. Prompts of like length are measured together, shortest first: a batch is as dear as its longest.

    Several ranks share the batches out and store what they measure; batches are the same as for one rank, and so are
    the results. The first rank returns all of them once every rank is done, the others return nothing. The ranks must
    see the same folder.

    Args:
        group: name of the data set, where a run has several whose prompts may have equal ids.
    """
    rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
    prompts = sorted(prompts, key=lambda prompt: len(prompt.ids))
    batches = [(alpha, prompts[start : start + size]) for alpha in alphas for start in range(0, len(prompts), size)]
    mine = batches[rank::world]
    pieces = {}
    with Bar(sum(len(batch) for _, batch in mine), label, unit="prompts") as bar:
        for alpha, batch in mine:
            name = _piece(alpha, batch, group)
            pieces[name] = parts.get(name)
            if pieces[name] is None:
                pieces[name] = measure(batch, alpha)
                parts.put(name, pieces[name])
            bar.update(len(batch), f"alpha {alpha:g}")
    barrier()
    if rank:
        return []
    names = [_piece(alpha, batch, group) for alpha, batch in batches]
    return [pieces[name] if name in pieces else parts.get(name) for name in names]


def _piece(alpha: float, batch: list[Prompt], group: str) -> str:
    ids = [prompt.id for prompt in batch]
    return f"alpha{alpha:g}-{content_hash([group, ids] if group else ids)[:16]}"
