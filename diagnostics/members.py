"""The drafters of a cross-alpha matrix: a matched family of heads, and controls beside it, over one pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import MANIFEST, READS_AMATEUR, Family
from dcd_core.heads.fitting import refuse_shuffled
from dcd_core.loading import head_for, load_models
from dcd_core.models import Pair
from dcd_core.replay import Rollout
from diagnostics.cross_alpha_summary import FAMILY
from diagnostics.loading import short_name
from diagnostics.texts import Text

METHODS = {"dual": "cross_alpha", "expert_only": "dcd_eagle3"}
"""The decoding method of a drafter by its input; the other inputs are controls that no method decodes with."""


@dataclass(frozen=True)
class Place:
    """Where a drafter stands among those that are compared, before it is loaded.

    Attributes:
        shuffle_seed: of a shuffled input.
        family: that it is of, if it is no head alone.
    """

    group: str
    name: str
    path: str
    input: str
    train_alpha: float
    seed: int
    shuffle_seed: int = 0
    family: Family | None = None


@dataclass(frozen=True)
class Member:
    """One drafter and its place."""

    place: Place
    head: Eagle3Head

    @property
    def method(self) -> str | None:
        """What decodes with it, if anything does."""
        return METHODS.get(self.place.input)

    def rollout(self, text: Text) -> Rollout:
        """A text with the features that this drafter reads."""
        return text.rollout(self.head, self.place.shuffle_seed)


def find_places(family: list[str], controls: list[str]) -> list[Place]:
    """Every drafter of a matched family (one run, or several that together are one) and of the controls: run folders of
    other families, or heads.

    Raises:
        UserError: a family whose manifest does not match, or that leaves nothing to compare; a control that is the
            family itself, or a family that differs in more than its input.
    """
    main = Family.read(*family, kind="cross_alpha")
    if 0.0 not in main.alphas or len(main.alphas) < 2:
        alphas = ", ".join(f"{alpha:g}" for alpha in main.alphas)
        raise UserError(
            f"{', '.join(family)}: train-alphas {alphas}; the matrix compares train-alpha 0 with others, so train both "
            "(--train_alphas 0 0.3)"
        )
    for control in controls:
        if Path(control).resolve() in {Path(own).resolve() for own in family}:
            raise UserError(f"--controls {control} is the family itself; leave it out, or give another family or head")
    places = _members(FAMILY, main)
    for control in controls:
        if (Path(control) / MANIFEST).is_file():
            other = Family.read(control, kind="cross_alpha")
            main.refuse_unmatched(other)
            places += _members(short_name(control), other)
            continue
        shape = load_head_config(control)
        if shape.aligned_with == "amateur":
            raise UserError(
                f"{control} imitates the amateur and drafts only beside another head; it is no control here"
            )
        refuse_shuffled(shape, control)
        name = short_name(control)
        places.append(Place(name, name, control, shape.input, shape.train_alpha or 0.0, 0))
    names = [(place.group, place.name) for place in places]
    for group, name in names:
        if names.count((group, name)) > 1:
            raise UserError(f"two controls are called '{group}' and have a drafter '{name}'; rename one folder")
    return places


def _members(group: str, family: Family) -> list[Place]:
    return [
        Place(group, f"alpha_{m.alpha:g}_seed_{m.seed}", str(m.path), m.input, m.alpha, m.seed, m.shuffle_seed, family)
        for m in family.members
    ]


def load_members(expert: str, amateur: str, places: list[Place], dtype: str, device: str) -> tuple[Pair, list[Member]]:
    """The pair, and every drafter.

    Raises:
        UserError: what cannot be loaded, drafters that tap different layers, which one pass of a model cannot serve, or
            a pair that a family was not trained with.
    """
    shapes = [load_head_config(place.path) for place in places]
    first = next((i for i, shape in enumerate(shapes) if shape.kind == "dual_input"), 0)
    for place, shape in zip(places, shapes, strict=True):
        taps = [(shape.feature_layers, shapes[first].feature_layers)]
        if shape.kind == "dual_input":
            taps.append((shape.amateur_feature_layers, shapes[first].amateur_feature_layers))
        if any(own != common for own, common in taps):
            raise UserError(f"{place.path} taps other layers than {places[first].path}; compare them in two runs")
    pair, head = load_models(expert, amateur, places[first].path, dtype, device)
    for family in {id(place.family): place.family for place in places if place.family}.values():
        family.refuse_other_models(pair.expert.model, pair.amateur.model)
    heads = [head if index == first else head_for(pair, place.path) for index, place in enumerate(places)]
    return pair, [Member(place, own) for place, own in zip(places, heads, strict=True)]


def read_amateur(members: list[Member]) -> bool:
    """Does any of these drafters need the amateur's features?"""
    return any(member.place.input in READS_AMATEUR for member in members)
