"""A matched family of tiny dual-input heads on disk, as train/cross_alpha.py leaves it, without training."""

from pathlib import Path
from types import SimpleNamespace

import tiny
import torch

from dcd_core.files import file_hash
from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import CONTROLS, PER_SEED, FamilyMember, write_manifest
from dcd_core.model_identity import model_identity

AMATEUR_LAYERS, AMATEUR_TAPS = 4, (1, 2, 3)


def vocabulary(ids=range(0, tiny.VOCAB, 2)) -> SimpleNamespace:
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[list(ids)] = True
    return SimpleNamespace(d2t=t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum())), t2d=t2d)


def head(kind: str, alpha: float, seed: int, reads: str, known: SimpleNamespace) -> Eagle3Head:
    """A head whose drafts vary with the text and, where it reads one, with the amateur."""
    declared = {"aligned_with": "contrast" if alpha else "expert", "train_alpha": alpha}
    expert = tiny.tiny_config(kind)
    if reads == "expert_only":
        made = Eagle3Head.from_expert(expert, known, seed=seed, **declared)
    else:
        amateur = tiny.tiny_config(kind, layers=AMATEUR_LAYERS)
        taps = {"amateur_feature_layers": AMATEUR_TAPS, "amateur_input": reads}
        made = DualInputHead.from_pair(expert, amateur, known, seed=seed, **taps, **declared)
    generator = torch.Generator().manual_seed(100 * seed + int(10 * alpha))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("proj.weight") or name == "fc.weight":
                weight.mul_(8).add_(0.1 * torch.randn(weight.shape, generator=generator))
    return made


def identities(kind: str = "smol", amateur_layers: int = AMATEUR_LAYERS) -> dict[str, str]:
    """The models of a tiny world, as a manifest names them."""
    return {
        "expert": model_identity(tiny.tiny_causal_lm(kind, 0)),
        "amateur": model_identity(tiny.tiny_causal_lm(kind, 100, amateur_layers)),
    }


def make_family(
    folder: Path,
    kind: str = "smol",
    alphas=(0.0, 0.5),
    seeds=(0, 1),
    reads: str = "dual",
    ids=range(40),
    shuffle_seed: int = 0,
    **changed,
) -> Path:
    """The folder of a run whose heads draft `ids`; `changed` are controls of the last member that differ from the
    others' ("_" for " ")."""
    members, models = [], identities(kind)
    for seed in seeds:
        for alpha in alphas:
            path = folder / "heads" / f"alpha_{alpha:g}_seed_{seed}"
            save_head(path, head(kind, alpha, seed, reads, vocabulary(ids)))
            fixed = dict.fromkeys(CONTROLS, "the same") | {PER_SEED: f"of seed {seed}", "input": reads} | models
            if (alpha, seed) == (alphas[-1], seeds[-1]):
                fixed |= {name.replace("_", " "): value for name, value in changed.items()}
            weights = file_hash(path / "model.safetensors")
            members.append(FamilyMember(alpha, seed, reads, path, fixed, weights, shuffle_seed))
    write_manifest(folder, "cross_alpha", members)
    return folder
