"""Prompts that no drafter was trained on: what it drafts on others may be remembered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import locate
from dcd_core.heads.training_prompts import read_training_prompts, trained_on
from dcd_core.methods import METHODS

NAMED = 5
"""Prompts that a refusal names."""


@dataclass(kw_only=True)
class UnreadFlags:
    """Setting of every measurement of how well heads draft, for its script's dataclass, which has a `limit` too."""

    skip_trained: bool = field(
        default=False, metadata={"help": "leave out prompts that a head was trained on; without it they are refused"}
    )

    @property
    def read_limit(self) -> int:
        """Prompts to read of a file: where some are left out, so many that `limit` can be left."""
        return 0 if self.skip_trained else self.limit

    def unread(self, prompts: Sequence[Prompt], heads: Iterable[str], where: str) -> list[Prompt]:
        """The first `limit` prompts of a file that no head was trained on; to be called before models are loaded.

        Args:
            prompts: the first `read_limit` of the file.
            heads: folders or hub ids; empty names, and heads that do not say what they were trained on, pass.
        Raises:
            UserError: there are others, by number and name, and they are not to be left out; or none is left.
        """
        lists = {head: read_training_prompts(locate(head)) for head in filter(None, heads)}
        silent = [head for head, hashes in lists.items() if hashes is None]
        lists = {head: hashes for head, hashes in lists.items() if hashes is not None}
        first = os.environ.get("RANK", "0") == "0"
        if self.skip_trained and silent and first:
            print(f"it is not known which prompts these heads were trained on: {', '.join(silent)}")
        left = list(prompts)
        for head, known in zip(lists, trained_on(prompts, *lists.values()), strict=True):
            if not known:
                continue
            words = f"{head} was trained on {len(known)} of the {len(prompts)} prompts in {where}"
            if not self.skip_trained:
                named = ", ".join(f"'{one}'" for one in known[:NAMED]) + (", ..." if len(known) > NAMED else "")
                raise UserError(
                    f"{words} ({named}), and may remember what it drafts there; give others "
                    "(data_prep/conversations.py --without leaves out what a file holds), or leave these out with "
                    "--skip_trained"
                )
            gone = set(known)
            left = [prompt for prompt in left if prompt.id not in gone]
        if not left:
            raise UserError(f"no prompt in {where} is left: heads were trained on all of them; give others")
        if len(left) < len(prompts) and first:
            print(f"{where}: {len(prompts) - len(left)} of {len(prompts)} prompts left out: heads were trained on them")
        return left[: self.limit or None]


def heads_used(methods: Iterable[str], head: str, amateur_head: str) -> list[str]:
    """Those of two heads that some of these methods draft with."""
    asked = [METHODS[method] for method in methods]
    used = [head] if any(method.needs_head or method.takes_head for method in asked) else []
    return used + ([amateur_head] if any(method.needs_amateur_head for method in asked) else [])
