"""Checkpoints of a training run: whole or absent, rotating, and refused when the command has changed.

``checkpoints/step-00000120/`` holds DeepSpeed's files (weights, optimiser; one set per rank where ZeRO shards them),
the random state and unread sums of each rank and ``trainer.json`` (position in the data, settings, histories). Each
member of a family has its files in a folder of its name, and all of them are of one step. It is written under another
name and renamed when every rank is done, so a folder of that name is always complete; ``latest`` is only a signpost.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from dcd_core.errors import UserError
from dcd_core.files import remove, write_text_atomic, writing
from train.processes import Ranks, barrier, random_state, restore_random_state

UNFINISHED = ".unfinished-"


class Checkpoints:
    """The checkpoint folder of one run.

    Args:
        folder: where they go.
        keep: newest ones that stay.
        settings: everything that the weights depend on, by the name of its flag; compared when a run is resumed.
    """

    def __init__(self, folder: Path, keep: int, settings: dict, ranks: Ranks):
        self.folder, self.keep, self.ranks = Path(folder), keep, ranks
        self.settings = json.loads(json.dumps(settings))
        if ranks.first:
            for left in self.folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left)
        barrier()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def clear(self) -> None:
        """Forget all of them."""
        if self.ranks.first:
            for step in self.steps():
                self._remove(step)
        barrier()

    def save(self, members: list, step: int, position: tuple[int, int]) -> None:
        """Write the checkpoint after ``step`` optimiser steps; every rank must call it.

        Args:
            members: what is trained: each has a name (the only one of a run has none), an engine, a meter and a
                history.
        Raises:
            UserError: no room for it; the checkpoints before it stay as they are.
        """
        name, temporary = self._name(step), self.folder / f"{UNFINISHED}{self._name(step)}"
        try:
            with writing(self.folder / name):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._write(temporary, members, step, position)
        except UserError:
            remove(temporary)  # it may be what the disk is full of
            raise
        barrier()
        if self.ranks.first:
            os.replace(temporary, self.folder / name)
            write_text_atomic(self.folder / "latest", name)
            for old in self.steps()[: -self.keep]:
                self._remove(old)
        barrier()

    def _write(self, folder: Path, members: list, step: int, position: tuple[int, int]) -> None:
        """This rank's part of a checkpoint."""
        for member in members:
            place = folder / member.name
            member.engine.save_checkpoint(
                str(place.parent), tag=place.name, save_latest=False, exclude_frozen_parameters=True
            )
        # what was summed since the last logging too: the next figures are those of a run that was never stopped
        sums = {member.name: member.meter.sums for member in members}
        torch.save({**random_state(), "sums": sums}, folder / f"random-{self.ranks.rank}.pt")
        if self.ranks.first:
            trainer = {
                "step": step,
                "epoch": position[0],
                "index": position[1],
                "settings": self.settings,
                "history": {member.name: member.history for member in members},
            }
            (folder / "trainer.json").write_text(json.dumps(trainer, indent=1), encoding="utf-8")

    def resume(self, members: list, position_of) -> int:
        """Load the newest checkpoint into the members, with their histories: its step, or 0 when there is none.

        Args:
            position_of: step -> (epoch, index) under the present data.
        Raises:
            UserError: naming each setting that differs from the checkpoint's.
        """
        steps = self.steps()
        if not steps:
            return 0
        path = self.folder / self._name(steps[-1])
        trainer = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        self._compare(trainer["settings"], path)
        if [trainer["epoch"], trainer["index"]] != list(position_of(trainer["step"])):
            raise UserError(f"{path}: its position in the data does not fit this data; start in another folder")
        for member in members:
            place, engine = path / member.name, member.engine
            # frozen parameters are not in the checkpoint
            strict = all(parameter.requires_grad for parameter in engine.module.parameters())
            loaded, _ = engine.load_checkpoint(
                str(place.parent), tag=place.name, load_module_strict=strict, load_lr_scheduler_states=False
            )
            if loaded is None:
                raise UserError(f"{path} cannot be loaded: delete it to go on from the one before")
            member.history = trainer["history"][member.name]
        state = torch.load(path / f"random-{self.ranks.rank}.pt", weights_only=False)
        for member in members:
            member.meter.sums = state.get("sums", {}).get(member.name)  # earlier versions saved none
        restore_random_state(state)
        return trainer["step"]

    def _compare(self, before: dict, path: Path) -> None:
        names = [name for name in {**before, **self.settings} if before.get(name) != self.settings.get(name)]
        if names:
            changes = "; ".join(f"{name} was {before.get(name)}, now {self.settings.get(name)}" for name in names)
            raise UserError(
                f"cannot resume from {path}: {changes}. Give the old settings, or another --output to start anew"
            )

    def _name(self, step: int) -> str:
        return f"step-{step:08d}"

    def _remove(self, step: int) -> None:
        # renamed first: a kill while it is being deleted must not leave half a folder under a complete one's name
        aside = self.folder / f"{UNFINISHED}old-{self._name(step)}"
        os.replace(self.folder / self._name(step), aside)
        shutil.rmtree(aside)
