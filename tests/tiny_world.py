"""Folders of a tiny pair with a head, and a prompt file: what the diagnostics' entry scripts are given in tests."""

import json
from types import SimpleNamespace

import tiny
import torch

from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head


def tiny_vocabulary(step: int = 3) -> SimpleNamespace:
    """The first ids and every third real one, or every so many."""
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[::step] = t2d[:20] = True
    d2t = t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum()))
    return SimpleNamespace(d2t=d2t, t2d=t2d)


def tiny_head(kind: str, seed: int = 1, **declared) -> Eagle3Head:
    """A random head of that draft vocabulary."""
    return Eagle3Head.from_expert(tiny.tiny_config(kind), tiny_vocabulary(), seed=seed, **declared)


def tiny_dual_input_head(kind: str, **declared) -> DualInputHead:
    """A random head that reads the amateur of the world too."""
    configs = tiny.tiny_config(kind), tiny.tiny_config(kind, 4)
    taps = {"amateur_feature_layers": (1, 2, 3)}
    head = DualInputHead.from_pair(*configs, tiny_vocabulary(), **taps, seed=1, **declared)
    own = head.config.feature_widths[0]
    with torch.no_grad():
        head.fc.weight[:, own:].normal_(0.0, 0.02, generator=torch.Generator().manual_seed(2))
    return head


def make_world(folder, kind: str = "smol", prompts: int = 5):
    """`folder` with expert/, amateur/, prompts.jsonl, and heads: head/, dual_input/ and amateur_head/."""
    tiny.save_tiny(folder / "expert", kind, seed=0)
    tiny.save_tiny(folder / "amateur", kind, seed=100, layers=4)
    save_head(folder / "head", tiny_head(kind))
    save_head(folder / "dual_input", tiny_dual_input_head(kind))
    save_head(folder / "amateur_head", tiny_head(kind, seed=2, aligned_with="amateur"))
    lines = []
    for index in range(prompts):
        words = " ".join(f"w{(7 * index + step) % 80}" for step in range(4 + index))
        lines.append(json.dumps({"id": f"p{index}", "messages": [{"role": "user", "content": words}], "source": "t"}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def add_drafters(world, kind: str = "smol"):
    """To a world: other_amateur_head/, of a draft vocabulary of its own; direct/, a head that reads both models and was
    trained on the contrast; and stronger/, a third model."""
    config = tiny.tiny_config(kind)
    other = Eagle3Head.from_expert(config, tiny_vocabulary(4), seed=3, aligned_with="amateur")
    save_head(world / "other_amateur_head", other)
    save_head(world / "direct", tiny_dual_input_head(kind, aligned_with="contrast", train_alpha=0.5))
    tiny.save_tiny(world / "stronger", kind, seed=7)
    return world


def model_flags(world) -> list[str]:
    """Flags that point an entry script at the world."""
    return [
        *(f"--{name}={world / name}" for name in ("expert", "amateur", "head")),
        f"--prompts={world / 'prompts.jsonl'}",
    ]
