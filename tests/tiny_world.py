"""Folders of a tiny pair with a head, and a prompt file: what the diagnostics' entry scripts are given in tests."""

import json
from types import SimpleNamespace

import tiny
import torch

from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head


def tiny_vocabulary(step: int = 3) -> SimpleNamespace:
    """The first ids and every third real one (or every so many)."""
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[::step] = t2d[:20] = True
    return SimpleNamespace(d2t=t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum())), t2d=t2d)


def tiny_head(kind: str) -> Eagle3Head:
    """A random head that drafts the first ids and every third real one."""
    return Eagle3Head.from_expert(tiny.tiny_config(kind), tiny_vocabulary(), seed=1)


def add_drafters(world, kind: str = "smol"):
    """To a world whose amateur has 5 layers: amateur_head/, aligned with the amateur and of a draft vocabulary of its
    own; direct/, which reads both models; and stronger/, a third model."""
    config = tiny.tiny_config(kind)
    other = Eagle3Head.from_expert(config, tiny_vocabulary(4), seed=2, aligned_with="amateur")
    aim = {"aligned_with": "contrast", "train_alpha": 0.5}
    direct = DualInputHead.from_pair(
        config, tiny.tiny_config(kind, 5), tiny_vocabulary(), amateur_feature_layers=(1, 2, 4), seed=3, **aim
    )
    with torch.no_grad():  # the amateur's columns start at zero
        direct.fc.weight.add_(0.02)
    save_head(world / "amateur_head", other)
    save_head(world / "direct", direct)
    tiny.save_tiny(world / "stronger", kind, seed=7)
    return world


def make_world(folder, kind: str = "smol", prompts: int = 5, amateur_layers: int = 3):
    """`folder` with expert/, amateur/, head/ and prompts.jsonl."""
    tiny.save_tiny(folder / "expert", kind, seed=0)
    tiny.save_tiny(folder / "amateur", kind, seed=100, layers=amateur_layers)
    save_head(folder / "head", tiny_head(kind))
    lines = []
    for index in range(prompts):
        words = " ".join(f"w{(7 * index + step) % 80}" for step in range(4 + index))
        lines.append(json.dumps({"id": f"p{index}", "messages": [{"role": "user", "content": words}], "source": "t"}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def model_flags(world) -> list[str]:
    """Flags that point an entry script at the world."""
    return [
        *(f"--{name}={world / name}" for name in ("expert", "amateur", "head")),
        f"--prompts={world / 'prompts.jsonl'}",
    ]
