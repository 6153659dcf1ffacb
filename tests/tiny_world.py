"""Folders of a tiny pair with a head, and a prompt file: what the diagnostics' entry scripts are given in tests."""

import json
from types import SimpleNamespace

import tiny
import torch

from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.eagle3 import Eagle3Head


def tiny_head(kind: str) -> Eagle3Head:
    """A random head that drafts the first ids and every third real one."""
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[::3] = t2d[:20] = True
    d2t = t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum()))
    return Eagle3Head.from_expert(tiny.tiny_config(kind), SimpleNamespace(d2t=d2t, t2d=t2d), seed=1)


def make_world(folder, kind: str = "smol", prompts: int = 5):
    """`folder` with expert/, amateur/, head/ and prompts.jsonl."""
    tiny.save_tiny(folder / "expert", kind, seed=0)
    tiny.save_tiny(folder / "amateur", kind, seed=100, layers=3)
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
