"""Flags that every script which decodes has: the draft's shape, and where the amateur's passes are placed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from dcd_core.decode_types import SAVINGS
from dcd_core.flip_risk import Deferral

_LAW = "of the flip law that diagnostics/calibrate.py fits"


@dataclass(kw_only=True)
class LoopFlags:
    """To be inherited by a script's dataclass; :attr:`loop` are the same fields by name, for Settings."""

    gamma: int = field(default=5, metadata={"help": "longest drafted path"})
    branch: int = field(default=1, metadata={"help": "children of a drafted token; 1 drafts chains"})
    nodes: int = field(default=0, metadata={"help": "drafted tokens of a tree (0: gamma times branch)"})
    stop_below: float = field(default=0.0, metadata={"help": "a path ends when its draft probability falls below this"})
    saving: str = field(default="none", metadata={"help": f"of the amateur's passes: {', '.join(SAVINGS)}"})
    defer_theta: float = field(
        default=Deferral.theta, metadata={"help": "deferred: ask the amateur when a flip is this probable"}
    )
    defer_ceiling: float = field(default=Deferral.ceiling, metadata={"help": f"deferred: ceiling {_LAW}"})
    defer_scale: float = field(default=Deferral.scale, metadata={"help": f"deferred: scale {_LAW}"})
    defer_power: float = field(default=Deferral.power, metadata={"help": f"deferred: power {_LAW}"})
    defer_spread: float = field(default=Deferral.spread, metadata={"help": f"deferred, sampling: spread {_LAW}"})
    draft_alpha: float | None = field(
        default=None,
        metadata={"help": "dual: contrast strength of the two heads' recombination (default: the target's)"},
    )
    defer_most: int = field(default=Deferral.most, metadata={"help": "deferred: most tokens of a block"})

    @property
    def loop(self) -> dict:
        """These fields by name."""
        return {item.name: getattr(self, item.name) for item in fields(LoopFlags)}
