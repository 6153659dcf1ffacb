"""Vanilla contrastive decoding's own greedy answers: the texts that every study measures drafters on.

They cost more than all that is read from them, and depend on the pair and the prompt only. So studies that are given
one folder (`--rollouts`) write them once: a file per text, named after everything that decides it, the decoder's own
code included. (In half precision a near-tie may also fall by the prompts that were answered beside it; then the text is
that of who came first.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dcd_core.chat import template_arguments
from dcd_core.config import refuse_below
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.files import check_output_folder, content_hash, write_json_atomic
from dcd_core.methods import assemble
from dcd_core.model_identity import model_identity
from dcd_core.models import Pair
from diagnostics.loading import code_key, fingerprint
from diagnostics.unread import UnreadFlags


@dataclass(frozen=True)
class Rollouts:
    """Where answers come from: one pair, its end-of-answer ids, and an answer's length; a folder keeps them.

    Attributes:
        models: the pair's names or folders; with `dtype` what tells one pair's answers from another's in the folder.
        folder: "" keeps nothing.
    """

    pair: Pair
    models: tuple[str, str]
    dtype: str
    stops: tuple[int, ...]
    max_new_tokens: int
    folder: str = ""

    def __post_init__(self):
        if self.folder:
            check_output_folder(self.folder)

    @cached_property
    def key(self) -> list:
        """What decides the answers beside prompts and contrast."""
        loaded = self.pair.expert.model, self.pair.amateur.model
        # a name on a hub may stand for other weights tomorrow
        models = [
            fingerprint(name) if Path(name).is_dir() else [name, model_identity(model)]
            for name, model in zip(self.models, loaded, strict=True)
        ]
        return [*models, self.dtype, sorted(self.stops), self.max_new_tokens, code_key("dcd_core/*.py")]

    def answers(self, prompts: Sequence[Prompt], alpha: float) -> list[list[int]]:
        """The greedy answer to every prompt, in their order, as ids; those that are not in the folder as one batch.

        Raises:
            UserError: a damaged file in the folder.
        """
        if not self.folder:
            return roll_out(self.pair, prompts, self.stops, alpha, self.max_new_tokens)
        places = [Path(self.folder) / f"{content_hash([self.key, alpha, prompt.ids])}.json" for prompt in prompts]
        missing = {path: prompt for path, prompt in zip(places, prompts, strict=True) if not path.is_file()}
        if missing:
            made = roll_out(self.pair, list(missing.values()), self.stops, alpha, self.max_new_tokens)
            for path, answer in zip(missing, made, strict=True):
                write_json_atomic(path, {"alpha": alpha, "answer": answer})
        return [_read(path) for path in places]


@dataclass(kw_only=True)
class RolloutFlags(UnreadFlags):
    """Settings of every study over these texts, to be inherited by a script's dataclass."""

    output: str = field(metadata={"help": "folder for the records"})
    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens of each answer"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    rollouts: str = field(
        default="", metadata={"help": "folder that keeps the greedy texts, for several studies of one pair and prompts"}
    )
    limit: int = field(default=0, metadata={"help": "use the first so many prompts of a file (0: all)"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        refuse_below(self, limit=0)

    def texts(self, pair: Pair, stops: tuple[int, ...]) -> Rollouts:
        """Where the study's greedy texts come from."""
        return Rollouts(pair, (self.expert, self.amateur), self.dtype, stops, self.max_new_tokens, self.rollouts)


def roll_out(
    pair: Pair, prompts: Sequence[Prompt], stops: tuple[int, ...], alpha: float, max_new_tokens: int
) -> list[list[int]]:
    """Vanilla contrastive decoding's greedy answer to every prompt, as one batch.

    Without contrast that is the expert's own answer, and the amateur is not run.
    """
    settings = Settings(target=Target(alpha=alpha, temperature=0.0), max_new_tokens=max_new_tokens, stop_ids=stops)
    method = assemble("cd" if alpha else "ar", pair)
    return [made.ids for made in decode(method, list(prompts), settings, max_batch=len(prompts))]


def _read(path: Path) -> list[int]:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))["answer"]
        if answer and all(isinstance(token, int) for token in answer):
            return answer
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is damaged; delete it, and the same command makes it again")
