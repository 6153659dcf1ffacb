"""Fixed histories, and every model of a study run once over them, teacher-forced.

Vanilla contrastive decoding writes a greedy answer per prompt and contrast strength; expert, amateur, heads and a
stronger proposer then read the same text. Symbols of a text x: the token at place s is predicted by row s - 1 of a
model, and drafted by row s - 2 of a head, which pairs x_(s-1) with the features at s - 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.eagle3 import Eagle3Config, Eagle3Head
from dcd_core.heads.fitting import refuse_shuffled
from dcd_core.loading import check_taps, head_for
from dcd_core.models import LanguageModel, Pair, load_config, load_pair, load_scorer
from diagnostics.position_quantities import Proposal, position_quantities
from diagnostics.texts import Text

ROWS = 64  # rows of the whole vocabulary worked on at once


@dataclass(frozen=True)
class Study:
    """The models measured over the same histories.

    Attributes:
        head: e, aligned with the expert.
        amateur_head: f, aligned with the amateur; it reads the expert's features too.
        direct: heads trained on the contrast: one for every alpha, or one of each alpha in their order.
        stronger: a full model that proposes in the drafter's place.
    """

    pair: Pair
    head: Eagle3Head
    amateur_head: Eagle3Head | None = None
    direct: tuple[Eagle3Head, ...] = ()
    stronger: LanguageModel | None = None

    @property
    def heads(self) -> tuple[Eagle3Head, ...]:
        """All heads of the study."""
        return tuple(head for head in (self.head, self.amateur_head, *self.direct) if head is not None)

    def at(self, index: int) -> Study:
        """The study at the alpha of this place in the list of alphas: one direct head, if there are any."""
        return replace(self, direct=self.direct[index : index + 1]) if len(self.direct) > 1 else self


def load_study(
    expert: str,
    amateur: str,
    head: str,
    dtype: str,
    device: str,
    amateur_head: str = "",
    direct: list[str] | tuple[str, ...] = (),
    stronger: str = "",
) -> Study:
    """Load a pair and all that is measured with it.

    Raises:
        UserError: what cannot be loaded, heads that tap different layers (one pass of a model serves all), a head
            trained for another role, or a stronger model with another vocabulary.
    """
    names = list(filter(None, (head, amateur_head, *direct)))
    configs = {name: load_head_config(name) for name in names}
    refuse_roles(configs, head, amateur_head, direct)
    pair = load_tapped(expert, amateur, configs, dtype, device)
    heads = {name: head_for(pair, name) for name in names}
    return Study(
        pair,
        heads[head],
        heads.get(amateur_head),
        tuple(heads[name] for name in direct),
        load_scorer(stronger, pair) if stronger else None,
    )


def refuse_roles(
    configs: dict[str, Eagle3Config], head: str, amateur_head: str, direct: list[str] | tuple[str, ...]
) -> None:
    """Refuse heads in the wrong place, and two of different kinds. Raises UserError naming the head and what it is
    aligned with."""
    places = [(head, "--head", ("expert",)), (amateur_head, "--amateur_head", ("amateur",))]
    # the family's control at train-alpha 0 reads both models, and is aligned with the expert
    wanted = {name: ("contrast", "expert") if configs[name].kind == "dual_input" else ("contrast",) for name in direct}
    places += [(name, "--direct_head", wanted[name]) for name in direct]
    for name, flag, wanted in places:
        if name:
            refuse_shuffled(configs[name], name)
        if name and configs[name].aligned_with not in wanted:
            raise UserError(
                f"{name} is aligned with the {configs[name].aligned_with}; {flag} takes a head aligned with the "
                f"{wanted[0]}"
            )
    if amateur_head and configs[head].kind != configs[amateur_head].kind:
        raise UserError(
            f"{head} is of the kind {configs[head].kind} and {amateur_head} {configs[amateur_head].kind}; a dual draft "
            "recombines two heads of one kind: give both heads of train/dual_drafter.py"
        )


def load_tapped(expert: str, amateur: str, configs: dict[str, Eagle3Config], dtype: str, device: str) -> Pair:
    """A pair that gives the features which all of some heads read.

    Raises:
        UserError: heads that read different layers of a model, or more layers than it has.
    """
    taps = {}
    for role, model, field in (
        ("expert", expert, "feature_layers"),
        ("amateur", amateur, "amateur_feature_layers"),
    ):
        wanted = {name: getattr(config, field) for name, config in configs.items() if getattr(config, field)}
        first, layers = next(iter(wanted.items()), ("", None))
        for name, other in wanted.items():
            if other != layers:
                raise UserError(
                    f"{name} taps other layers of {model} than {first}: {other} and {layers}; measure them in two runs"
                )
        if layers:  # before gigabytes are read
            check_taps(layers, load_config(model).num_hidden_layers, first, model, role)
        taps[field] = layers
    return load_pair(expert, amateur, dtype, device, **taps)


@dataclass
class History:
    """One text, and what every model of a study makes of it.

    Attributes:
        stronger: last hidden states of the stronger model, if there is one.
    """

    study: Study
    text: Text
    stronger: Float[Tensor, "position hidden"] | None = None

    @classmethod
    @torch.no_grad()
    def read(cls, study: Study, prompt: Prompt, answer: list[int]) -> History:
        """One pass of every model over prompt and answer."""
        text = Text.read(study.pair, prompt, answer, any(head.kind == "dual_input" for head in study.heads))
        stronger = study.stronger.forward_full(text.ids[None], logits=False).hidden[0] if study.stronger else None
        return cls(study, text, stronger)

    @property
    def places(self) -> Int[Tensor, " place"]:
        """Places of the answer's tokens that a drafter would draft: all but the first, which the prefill gives."""
        return torch.arange(self.text.prompt_length + 1, len(self.text.ids), device=self.text.ids.device)

    def expert_rows(self, places: Int[Tensor, " place"]) -> Float[Tensor, "place vocab"]:
        """The expert's logits for the tokens at these places."""
        return self.study.pair.expert.output_layer(self.text.expert[places - 1])

    def amateur_rows(self, places: Int[Tensor, " place"]) -> Float[Tensor, "place vocab"]:
        """The amateur's logits for the tokens at these places."""
        return self.study.pair.amateur.output_layer(self.text.amateur[places - 1])

    def stronger_rows(self, places: Int[Tensor, " place"]) -> Float[Tensor, "place vocab"] | None:
        """The stronger model's logits, if there is one."""
        return None if self.stronger is None else self.study.stronger.output_layer(self.stronger[places - 1])

    def first_states(self, head: Eagle3Head) -> Float[Tensor, "row hidden"]:
        """A head's states as of the first draft of a round, at every row."""
        rollout = self.text.rollout(head)
        cache = head.new_cache(1, len(rollout.ids))
        embeds = self.study.pair.expert.embedding(rollout.ids[None, 1:])
        return head.step(embeds, head.fuse(rollout.features[None, :-1]), cache)[0]

    @torch.no_grad()
    def quantities(self, alpha: float) -> dict[str, list]:
        """The columns of `records.POSITIONS` at answer positions 1, 2, ..."""
        study = self.study
        heads = {"draft": study.head, "amateur_draft": study.amateur_head, "direct": next(iter(study.direct), None)}
        states = {name: (head, self.first_states(head)) for name, head in heads.items() if head is not None}
        columns: dict[str, list] = {"position": (self.places - self.text.prompt_length).tolist()}
        for some in self.places.split(ROWS):
            drafts = {
                name: Proposal(head.logits(rows[some - 2]), head.target_ids) for name, (head, rows) in states.items()
            }
            found = position_quantities(
                self.expert_rows(some),
                self.amateur_rows(some),
                alpha=alpha,
                stronger=self.stronger_rows(some),
                **drafts,
            )
            for name, values in found.items():
                columns.setdefault(name, []).extend(values.tolist())
        return columns


def merged(pieces: list[dict[str, list]]) -> dict[str, list]:
    """Columns of several pieces one after the other; a column that one of them lacks is null there."""
    names = dict.fromkeys(name for piece in pieces for name in piece)
    found: dict[str, list] = {name: [] for name in names}
    for piece in pieces:
        count = len(next(iter(piece.values()), []))
        for name in names:
            found[name] += piece.get(name, [None] * count)
    return found
