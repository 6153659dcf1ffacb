"""Settings that every study over vanilla contrastive decoding's own greedy texts has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcd_core.chat import template_arguments
from dcd_core.config import refuse_below
from dcd_core.decode import Prompt
from dcd_core.processes import WaitFlags
from dcd_core.prompts import read_prompts
from diagnostics.loading import short_name
from diagnostics.rollouts import RolloutFlags


@dataclass(kw_only=True)
class StudyFlags(WaitFlags, RolloutFlags):
    """To be inherited by a script's dataclass."""

    prompts: list[str] = field(metadata={"help": "held-out prompts, JSONL {id, messages}; a data set a file"})
    alphas: list[float] = field(
        default_factory=lambda: [0.1, 0.3, 0.5, 1.0], metadata={"help": "contrast strengths; one rollout set for each"}
    )
    batch: int = field(
        default=8, metadata={"help": "prompts at a time; finished batches are kept when a run is stopped"}
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16"})
    dataset: list[str] = field(
        default_factory=list, metadata={"help": "names of the prompt files in the records (default: the files' names)"}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.alphas or min(self.alphas) < 0:
            raise ValueError(f"--alphas must be numbers of 0 or more, got {self.alphas}")
        if len(set(self.alphas)) < len(self.alphas):
            raise ValueError(f"--alphas names a contrast strength twice: {self.alphas}")
        if self.max_new_tokens < 2:
            raise ValueError("--max_new_tokens must be at least 2: an answer's first token is never drafted")
        if not self.prompts or not all(self.prompts):
            raise ValueError("--prompts needs a file of prompts, or several")
        self.dataset = self.dataset or [short_name(path).removesuffix(".jsonl") for path in self.prompts]
        if len(self.dataset) != len(self.prompts) or len(set(self.dataset)) < len(self.dataset):
            raise ValueError(f"--dataset must name each file of --prompts once, got {self.dataset}")
        refuse_below(self, batch=1)

    def unread_sets(self, sets: dict[str, list[Prompt]], heads: Sequence[str]) -> dict[str, list[Prompt]]:
        """Of every data set the prompts that no head was trained on. Raises UserError, see `UnreadFlags.unread`."""
        files = zip(sets.items(), self.prompts, strict=True)
        return {name: self.unread(prompts, heads, path) for (name, prompts), path in files}

    def read_prompts(self) -> tuple[dict[str, list[Prompt]], tuple[int, ...]]:
        """The prompts by data set, and the ids that end an answer. Raises UserError, see `dcd_core.prompts`."""
        arguments = template_arguments(self.template_args)
        found = [read_prompts(path, self.expert, self.read_limit, **arguments) for path in self.prompts]
        return dict(zip(self.dataset, (prompts for prompts, _ in found), strict=True)), found[0][1]
