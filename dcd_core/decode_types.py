"""What decoding is asked for and what it returns: prompts, settings, round records, answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from dcd_core.contrast import Target
from dcd_core.draft import Shape
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.flip_risk import Deferral
from dcd_core.models import LanguageModel

SAVINGS = ("none", "lazy", "deferred")


@dataclass
class Prompt:
    """One prompt. ``id`` and ``sample`` key its randomness."""

    id: str
    ids: list[int]
    sample: int = 0


@dataclass
class Settings:
    """How to decode.

    Args:
        max_new_tokens: at least 1.
        stop_ids: a row ends with the first of these, inclusive.
        gamma: longest drafted path (a drafter may propose less).
        branch, nodes, stop_below: the rest of the draft's shape (:class:`dcd_core.draft.Shape`).
        saving: how the amateur's passes are saved, exactly: ``none``, ``lazy`` (:mod:`dcd_core.lazy`, with
            a cutoff) or ``deferred`` (:mod:`dcd_core.deferred`).
        defer_theta and the like: when deferred judging calls the amateur (:class:`dcd_core.flip_risk.Deferral`).
        draft_alpha: contrast strength of drafts that recombine two heads (``dual``); None for the target's own.
        rule: ``auto`` (deterministic at T = 0, else the drafter's own), or one of :data:`dcd_core.draft.RULES`.
        timing: synchronise the device around every phase, so that the seconds of a round are true.
    Raises:
        UserError: a value outside its range.
    """

    target: Target = field(default_factory=Target)
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    gamma: int = 5
    branch: int = 1
    nodes: int = 0
    stop_below: float = 0.0
    saving: str = "none"
    defer_theta: float = Deferral.theta
    defer_ceiling: float = Deferral.ceiling
    defer_scale: float = Deferral.scale
    defer_power: float = Deferral.power
    defer_spread: float = Deferral.spread
    defer_most: int = Deferral.most
    draft_alpha: float | None = None
    rule: str = "auto"
    timing: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.gamma < 1:
            raise UserError(f"gamma must be at least 1, got {self.gamma}")
        if self.branch < 1:
            raise UserError(f"branch must be at least 1, got {self.branch}")
        if self.nodes < 0:
            raise UserError(f"nodes must be 0 (depth times branch) or more, got {self.nodes}")
        if not 0 <= self.stop_below < 1:
            raise UserError(f"stop_below is a probability in [0, 1), got {self.stop_below}")
        if self.draft_alpha is not None and not (math.isfinite(self.draft_alpha) and self.draft_alpha >= 0):
            raise UserError(f"draft_alpha must be 0 or more, got {self.draft_alpha}")
        self.deferral = Deferral(**{item.name: getattr(self, f"defer_{item.name}") for item in fields(Deferral)})
        if self.saving not in SAVINGS:
            raise UserError(f"saving {self.saving!r} is unknown; choose {', '.join(SAVINGS)}")
        if self.rule not in ("auto", "sampled", "deterministic", "shared_noise"):
            raise UserError(f"rule {self.rule!r} is unknown; choose auto, sampled, deterministic or shared_noise")

    @property
    def draft_target(self) -> Target:
        """What drafts are to imitate, where a drafter can choose."""
        return self.target if self.draft_alpha is None else Target.dcd(self.draft_alpha)

    @property
    def shape(self) -> Shape:
        """How large a draft may grow."""
        return Shape(self.gamma, self.branch, self.nodes, self.stop_below)


@dataclass
class Round:
    """One round of one row. Seconds are the batch's; ``emitted`` counts accepted drafts and the extra token.

    Under deferred judging a round is a block: ``drafted`` are its provisional tokens, ``expert_passes`` more than one.
    """

    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    expert_s: float
    amateur_s: float
    rest_s: float
    expert_passes: int = 1
    amateur_passes: int = 1


@dataclass
class Generation:
    """The answer to one prompt: ``ids`` with its stop token, and the rounds that made it. ``index`` is the prompt's
    place in the list that was given."""

    prompt_id: str
    sample: int
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    finish: str = ""
    index: int = 0


@dataclass
class Scorer:
    """A model whose rows enter the target, expert first in the list.

    Args:
        prefix: the ids this model reads before the answer; None for the prompt itself.
    """

    model: LanguageModel
    prefix: Callable[[Prompt], list[int]] | None = None

    def prefix_ids(self, prompt: Prompt) -> list[int]:
        return self.prefix(prompt) if self.prefix else prompt.ids


@dataclass
class Assembled:
    """A method put together: its scorers (expert first), its drafter, and the saving that makes it what it is (None:
    the settings' own)."""

    name: str
    scorers: list[Scorer]
    drafter: Drafter
    saving: str | None = None
