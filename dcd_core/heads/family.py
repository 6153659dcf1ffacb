"""Families of heads that differ in one thing only: what they read of an amateur, and the manifest that says what was
held fixed [DCD, Sec. 4.2].

A matched family differs in its training targets and, across seeds, in its initial weights. A difference in anything
else (data, their order, recipe, vocabulary map, which positions give a loss) would be taken for an effect of the
target. ``manifest.json`` of a run names every control with its value or a hash of its content, once for the family and
once for each member; :meth:`Family.read` compares them and refuses a family that is not matched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dcd_core.errors import UserError
from dcd_core.files import file_hash, write_json_atomic
from dcd_core.heads.checkpoint import AMATEUR_INPUTS, load_head_config
from dcd_core.heads.packed import moved
from dcd_core.model_identity import model_identity

MANIFEST = "manifest.json"
KINDS = ("cross_alpha", "dual_drafter")
INPUTS = ("expert_only", *AMATEUR_INPUTS)
"""What a head reads at verified positions beside the expert's features: nothing (a plain EAGLE3 head); the amateur's;
zeros in their place; or those of another, earlier position (:func:`shuffled_positions`)."""
READS_AMATEUR = ("dual", "amateur_shuffled")
"""Inputs for which the amateur's features are needed."""
PER_SEED = "initial weights"
"""The one control that is held fixed within a seed and differs between seeds."""
CONTROLS = (
    "input",
    "dtype",
    "expert",
    "amateur",
    "training texts",
    "data order",
    "token budget",
    "draft vocabulary",
    "feature layers",
    "feature scaling",
    "head shape",
    "trained parameters",
    "position mask rule",
    "loss",
    "unroll depth",
    "optimiser",
    "schedule",
    PER_SEED,
)
"""Names of what a manifest holds fixed, all of them required; causes before what follows from them."""


# ---- what is read of an amateur --------------------------------------------------------------------------------------


def shuffled_positions(length: int, seed: int) -> Int[Tensor, " position"]:
    """For every position another one, drawn among the earlier ones, whose amateur features it is given as a control.

    A permutation of a text would hand features of later tokens to earlier positions, which is no loss of information
    but a leak. So positions are drawn from the past, by (seed, position) alone: the same for every text, batch and
    rank. Position 0 and 1 keep their own (that of the first token, where a few channels are far out of proportion, is
    given to no other).
    """
    draws = np.random.default_rng(seed).random(length)
    places = np.arange(length)
    earlier = 1 + (draws * np.maximum(places - 1, 1)).astype(np.int64)
    return torch.from_numpy(np.where(places < 2, places, earlier))


def join_features(
    expert: Float[Tensor, "batch position expert_features"],
    amateur: Float[Tensor, "batch position amateur_features"] | None,
    size: int,
    kind: str,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
) -> Float[Tensor, "batch position features"]:
    """The features that a head with this input reads, of whole texts (position 0 first).

    Args:
        amateur: None where the input needs none of it.
        size: width of the amateur's features.
        kind: one of :data:`INPUTS`.
        seed: of the shuffled positions.
        lengths: of the texts that stand in each row one after the other; None: there is one.
    """
    if kind == "expert_only":
        return expert
    if kind == "amateur_zeroed":
        amateur = expert.new_zeros(*expert.shape[:-1], size)
    elif kind == "amateur_shuffled":
        lengths = lengths or [amateur.shape[1]]
        starts = np.cumsum([0, *lengths[:-1]])
        places = [shuffled_positions(length, seed) + start for length, start in zip(lengths, starts, strict=True)]
        amateur = amateur[:, moved(torch.cat(places), amateur.device)]
    elif kind != "dual":
        raise UserError(f"a head's input is one of {', '.join(INPUTS)}, not {kind!r}")
    return torch.cat([expert, amateur.to(expert.dtype)], dim=-1)


@torch.no_grad()
def initial_weights(head: nn.Module) -> str:
    """sha256, in hex, of the function that a fresh head is: all its weights but what reads an amateur, which is zero.

    So heads of one seed have one hash whether they read an amateur or not.

    Raises:
        UserError: what reads an amateur is not zero.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(head.named_parameters()):
        if name == "fc.weight":
            own = 3 * head.config.target_hidden_size
            if bool(weight[:, own:].any()):
                raise UserError("a fresh head's columns for the amateur are not zero: its family would not start alike")
            weight = weight[:, :own]
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FamilyMember:
    """One trained head of a family.

    Attributes:
        alpha: the contrast strength of its training target; 0 for one aligned with the expert, None with the amateur.
        seed: of its initial weights.
        input: one of :data:`INPUTS`.
        path: its folder.
        held_fixed: its value of every control.
        weights: sha256 of its weight file.
        shuffle_seed: of a shuffled input (:func:`shuffled_positions`).
    """

    alpha: float | None
    seed: int
    input: str
    path: Path
    held_fixed: dict
    weights: str
    shuffle_seed: int = 0

    @property
    def aligned_with(self) -> str:
        return {None: "amateur", 0.0: "expert"}.get(self.alpha, "contrast")

    def describe(self) -> str:
        aim = "aligned with the amateur" if self.alpha is None else f"train-alpha {self.alpha:g}"
        return f"{aim}, seed {self.seed}"

    def placed(self) -> str:
        """Which head it is, and of which run."""
        return f"{self.describe()} in {self.path.parent.parent}"


@dataclass(frozen=True)
class Family:
    """A matched family of heads, as checked by :meth:`read`.

    Attributes:
        kind: one of :data:`KINDS`.
        held_fixed: every control but :data:`PER_SEED`, common to all members.
    """

    kind: str
    held_fixed: dict
    members: tuple[FamilyMember, ...]

    @classmethod
    def read(cls, folder: str | Path, *more: str | Path, kind: str = "") -> Family:
        """Read the manifest of one run, or those of several runs as one family, and hold it to its word.

        Args:
            kind: the kind that is wanted; any if empty.
        Raises:
            UserError: no manifest; a control that is missing or that differs between members, by name; heads that are
                there twice, not for every seed, or not those that were trained.
        """
        kinds, members = [], []
        for path in (folder, *more):
            found, its = _read_manifest(Path(path))
            kinds.append(found)
            members += its
        if len({kind or kinds[0], *kinds}) > 1:
            raise UserError(f"{folder} holds a family of kind {kinds[-1]}, not {kind or kinds[0]}")
        _refuse_unmatched(members)
        _refuse_gaps(members)
        for member in members:
            _refuse_other_head(member)
        shared = {name: value for name, value in members[0].held_fixed.items() if name != PER_SEED}
        return cls(kinds[0], shared, tuple(members))

    @property
    def alphas(self) -> tuple[float | None, ...]:
        """Training targets, the expert's first; None (the amateur's) last."""
        return tuple(sorted({member.alpha for member in self.members}, key=lambda a: (a is None, a or 0.0)))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({member.seed for member in self.members}))

    def member(self, alpha: float | None, seed: int) -> FamilyMember:
        """The head of one target and seed. Raises UserError if there is none."""
        for member in self.members:
            if member.alpha == alpha and member.seed == seed:
                return member
        raise UserError(f"the family has no head of train-alpha {alpha} and seed {seed}")

    def refuse_other_models(self, expert: nn.Module, amateur: nn.Module) -> None:
        """Hold the pair that is measured to the one whose features and targets the heads learnt from.

        Raises:
            UserError: another expert or amateur, even one of the same shape.
        """
        for role, model in (("expert", expert), ("amateur", amateur)):
            if model_identity(model) != self.held_fixed[role]:
                raise UserError(
                    f"this {role} is not the one that the family in {self.members[0].path.parent.parent} was trained "
                    f"with; measure it with that {role}, or train the family again"
                )

    def refuse_unmatched(self, other: Family, but: tuple[str, ...] = ("input", "trained parameters")) -> None:
        """Hold a control family to this one: all but the named controls must be equal.

        Raises:
            UserError: the first control that differs, by name.
        """
        if not set(self.seeds) & set(other.seeds):
            raise UserError(f"two families without a common seed ({self.seeds}, {other.seeds}) cannot be compared")
        _refuse_unmatched([*self.members, *other.members], but)


def write_manifest(folder: Path, kind: str, members: list[FamilyMember]) -> None:
    """Write ``folder/manifest.json``; heads are named relative to ``folder``."""
    shared = {name: value for name, value in members[0].held_fixed.items() if name != PER_SEED}
    rows = [
        {
            "alpha": member.alpha,
            "seed": member.seed,
            "input": member.input,
            "aligned_with": member.aligned_with,
            "path": member.path.relative_to(folder).as_posix(),
            "held_fixed": member.held_fixed,
            "weights": member.weights,
            "shuffle_seed": member.shuffle_seed,
        }
        for member in members
    ]
    seeds = "what a seed changes: the initial weights of a head; the order of the data is that of --seed for all"
    write_json_atomic(folder / MANIFEST, {"kind": kind, "seeds": seeds, "held_fixed": shared, "members": rows})


def _read_manifest(folder: Path) -> tuple[str, list[FamilyMember]]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder} holds no family of heads ({path.name}: {reason}); make one with train/cross_alpha.py or "
            "train/dual_drafter.py"
        ) from None
    try:
        shared, members = manifest["held_fixed"], []
        for row in manifest["members"]:
            alpha = None if row["alpha"] is None else float(row["alpha"])
            # what the family holds fixed is compared with what each member holds
            missing = [name for name in CONTROLS if name not in row["held_fixed"]]
            if missing:
                raise UserError(f"{path}: a member does not say what its {missing[0]} was")
            place, fixed, shuffle = folder / row["path"], row["held_fixed"], int(row.get("shuffle_seed", 0))
            found = FamilyMember(alpha, int(row["seed"]), row["input"], place, fixed, row["weights"], shuffle)
            for name, value in shared.items():
                _refuse_difference(name, value, found.held_fixed.get(name), f"{path}'s family", found.describe())
            members.append(found)
        kind = manifest["kind"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a manifest of a family: {error!r}") from None
    if kind not in KINDS or not members:
        raise UserError(f"{path}: kind {kind!r} with {len(members)} members is not a family")
    return kind, members


def _refuse_difference(name: str, value, other, one: str, two: str) -> None:
    if value != other:
        raise UserError(
            f"this family is not matched: {name} is {value} for {one}, but {other} for {two}; heads are compared only "
            "if they were trained alike: train them again with equal settings, or measure each run alone"
        )


def _refuse_unmatched(members: list[FamilyMember], but: tuple[str, ...] = ()) -> None:
    first = members[0]
    first_of_seed: dict[int, FamilyMember] = {}
    for member in members:
        for name in CONTROLS:
            like = first_of_seed.setdefault(member.seed, member) if name == PER_SEED else first
            if name not in but:
                _refuse_difference(name, like.held_fixed[name], member.held_fixed[name], like.placed(), member.placed())
    starts = {seed: member.held_fixed[PER_SEED] for seed, member in first_of_seed.items()}
    if len(set(starts.values())) < len(starts):
        raise UserError(f"seeds {sorted(starts)} do not all have {PER_SEED} of their own: they are no repetitions")


def _refuse_gaps(members: list[FamilyMember]) -> None:
    cells = [(member.alpha, member.seed) for member in members]
    for member, cell in zip(members, cells, strict=True):
        if cells.count(cell) > 1:
            raise UserError(f"the family holds two heads of {member.describe()}")
    seeds = {seed for _, seed in cells}
    for alpha in dict.fromkeys(alpha for alpha, _ in cells):
        lacking = seeds - {seed for other, seed in cells if other == alpha}
        if lacking:
            aim = "the amateur" if alpha is None else f"train-alpha {alpha:g}"
            raise UserError(f"the family has no head of {aim} for seed {min(lacking)}: its targets cannot be paired")


def _refuse_other_head(member: FamilyMember) -> None:
    """The head on disk must be the one that was trained, and say of itself what the manifest says."""
    config = load_head_config(member.path)
    said = (config.input, config.aligned_with, config.train_alpha)
    wanted = (member.input, member.aligned_with, member.alpha)
    if said != wanted:
        raise UserError(f"{member.path} says (input, aligned with, train-alpha) {said}, its manifest {wanted}")
    try:
        found = file_hash(member.path / "model.safetensors")
    except OSError as error:
        raise UserError(f"{member.path} has no model.safetensors ({error.strerror})") from None
    if found != member.weights:
        raise UserError(f"the weights in {member.path} are not those that this family was trained to: train it again")
