"""The frozen models beside the trained heads: one training step, one evaluation, and what identifies the models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from data_prep.feature_files import FeatureStore
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import READS_AMATEUR, join_features
from dcd_core.heads.packed import moved
from dcd_core.models import LanguageModel, Output
from dcd_core.replay import Rollout, replay
from train.batches import Batch, Texts
from train.engines import full_weights
from train.loop import all_finite
from train.meters import per_step
from train.passes import Passes, named_values
from train.processes import Ranks, add_up
from train.unroll import EXPERT, Aim, Alignment, Targets, Unroll, align, draft_targets, following


class HeadStep:
    """One micro-batch of one head, or of a family: the frozen passes once, then each head's unroll.

    Args:
        expert: frozen, on this rank's device.
        target_ids: expert id of each draft id.
        stop_ids: ids that end a turn.
        aims: what each head imitates, in the order of the engines.
        amateur: frozen; None where neither an aim nor the heads' input needs it.
        amateur_input: what the heads read of the amateur (:data:`~dcd_core.heads.family.INPUTS`).
        shuffle_seed: of the shuffled input.
        store: where the frozen passes of some texts are.
    """

    def __init__(
        self,
        expert: LanguageModel,
        target_ids: Tensor,
        stop_ids: frozenset[int],
        aims: Sequence[Aim] = (EXPERT,),
        amateur: LanguageModel | None = None,
        amateur_input: str = "expert_only",
        shuffle_seed: int = 0,
        store: FeatureStore | None = None,
    ):
        self.expert = expert
        self.target_ids = target_ids.to(expert.device)
        self.ids_end = int(target_ids[-1]) + 1
        self.stop_ids = stop_ids
        self.aims, self.amateur_input, self.shuffle_seed = tuple(aims), amateur_input, shuffle_seed
        self.amateur_features = amateur_input in READS_AMATEUR
        # an amateur of which nothing is needed is not run
        needed = self.amateur_features or any(aim.reads_amateur for aim in aims)
        self.models = [expert, amateur] if needed else [expert]
        self.amateur_width = 3 * amateur.hidden_size if amateur else 0
        self.passes, self.wanted = Passes(self.models, store), (True, self.amateur_features)

    def each(self, batch: Batch) -> list[tuple[Tensor, Tensor, Alignment, Targets]]:
        """What each head reads of the packed texts: features, embedded next tokens, alignment and targets; equal parts
        are shared.

        Raises:
            UserError: NaN or inf in the frozen passes, naming the texts.
        """
        return self._prepared(batch, self.passes(batch, self.wanted))

    def _prepared(self, batch: Batch, outputs: list[Output]) -> list[tuple[Tensor, Tensor, Alignment, Targets]]:
        expert = self.expert
        alignment = align(batch.texts, batch.spans, self.stop_ids).to(expert.device)
        layers = [model.output_layer for model in self.models]
        different = list(dict.fromkeys(self.aims))
        hidden = [output.hidden for output in outputs]
        found = draft_targets(layers, hidden, alignment, self.target_ids, different, self.ids_end)
        targets = dict(zip(different, found, strict=True))
        with torch.no_grad():
            embeds = expert.embedding(moved(following(batch.packed_ids), expert.device)[None])
        features = outputs[0].features
        if self.amateur_input != "expert_only":
            other = outputs[1].features if self.amateur_features else None
            kind, seed = self.amateur_input, self.shuffle_seed
            features = join_features(features, other, self.amateur_width, kind, seed, batch.lengths)
        return [(features, embeds, alignment, targets[aim]) for aim in self.aims]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Alignment, Targets]:
        """:meth:`each` of the only head."""
        [only] = self.each(batch)
        return only

    def __call__(self, engines: list, batch: Batch, denominators: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
        outputs = self.passes.unchecked(batch, self.wanted)
        # told with the loss: asking the device here would be one more wait of each micro-batch
        finite, prepared = all_finite(named_values(outputs)), self._prepared(batch, outputs)
        del outputs

        def told(loss: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(finite, loss, float("nan")), sums

        for engine, inputs in zip(engines, prepared, strict=True):
            yield told(*engine(*inputs, denominators))  # nothing of it is kept here: its graph is to go

    def explain(self, batch: Batch) -> None:
        """Raises UserError, naming the texts, if the frozen passes are why a loss is not finite."""
        self.passes(batch, self.wanted)


class HeldOut:
    """Evaluation on held-out texts: teacher-forced metrics per step, and accepted length by replay, of each head; the
    frozen passes are shared.

    Replay walks the rounds that greedy chain drafting would make on these very answers; it is the decoder's own
    accepted length where the answers are the target's greedy ones, and close to it where they were sampled.

    Args:
        gamma: drafts per round.
    """

    def __init__(self, texts: Texts, step: HeadStep, gamma: int, ranks: Ranks):
        self.texts, self.step, self.gamma, self.ranks = texts, step, gamma, ranks

    def __call__(self, engines: list) -> list[dict[str, float]]:
        heads = [copy_module(engine) for engine in engines]
        totals = torch.zeros(len(heads), 4 * heads[0].steps + 3, dtype=torch.float64)
        for index in range(self.ranks.rank, len(self.texts), self.ranks.world):
            batch = self.texts.batch([index])
            for unroll, inputs, total in zip(heads, self.step.each(batch), totals, strict=True):
                with torch.no_grad():
                    total[:-3] += unroll(*inputs, [1.0] * unroll.steps)[1].double().cpu().flatten()
                total[-3:] += self.rounds(unroll.head, batch, inputs[0])
        return [self.means(total) for total in add_up(totals, self.ranks.device)]

    def means(self, total: Tensor) -> dict[str, float]:
        """Metrics of one head from its sums over all ranks."""
        accepted, emitted, rounds = total[-3:].tolist()
        found = per_step(total[:-3].view(-1, 4))
        if rounds:
            found |= {"accepted_length": accepted / rounds, "tokens_per_round": emitted / rounds}
        return found

    def rounds(self, head: Eagle3Head, batch: Batch, features: Tensor) -> Tensor:
        """Accepted drafts, emitted tokens and rounds over all answers of one text."""
        total = torch.zeros(3, dtype=torch.float64)
        for start, end in batch.spans[0]:
            rollout = Rollout(batch.input_ids[0, :end].to(features.device), start, features[0, :end])
            rounds = replay(head, self.step.expert.embedding, rollout, self.gamma, vocab=self.step.expert.vocab)
            for _, accepted, emitted in rounds:
                total += torch.tensor([accepted, emitted, 1.0], dtype=torch.float64)
        return total


def copy_module(engine) -> Unroll:
    """The trained module with its whole weights, for features as they come, off the engine (whose hooks and shards stay
    out of evaluation)."""
    trained, weights = engine.module, full_weights(engine)
    if trained.sizes is not None:
        fc = weights["head.fc.weight"]
        weights["head.fc.weight"] = fc / weights.pop("sizes").to(fc)
    with torch.device("meta"):
        head = type(trained.head)(trained.head.config)
    head.load_state_dict(
        {name.removeprefix("head."): tensor for name, tensor in weights.items()}, strict=True, assign=True
    )
    return Unroll(head, trained.steps, trained.decay).eval().requires_grad_(False)


def feature_rms(passes: Passes, texts: Texts, count: int = 16) -> Float[Tensor, " features"]:
    """Root mean square of every tapped feature over the first texts; their first token, where a few channels of the
    residual stream are far out of proportion, is left out."""
    total, rows = 0.0, 0
    for index in range(min(count, len(texts))):
        features = passes(texts.batch([index]))[0].features
        total += features[0, 1:].double().pow(2).sum(0)
        rows += features.shape[1] - 1
    return (total / max(rows, 1)).sqrt().float()


@torch.no_grad()
def scale_features(head: Eagle3Head, rms: Float[Tensor, " features"]) -> None:
    """Divide the columns of a fresh ``fc`` by the size of the expert's features that they read, so that each starts
    with the same say. Some channels are tens of times larger than others, and a short training does not undo that.
    Columns after them, an amateur's, are zero."""
    head.fc.weight.div_(feature_sizes(head, rms))


def feature_sizes(head: Eagle3Head, rms: Float[Tensor, " expert_features"]) -> Float[Tensor, " features"]:
    """Of all that the head reads, of no channel nearly zero; an amateur's count as one."""
    smallest = rms.median() / 1000
    sizes = rms.clamp_min(smallest) if smallest > 0 else torch.ones_like(rms)
    return F.pad(sizes, (0, head.config.feature_widths[1]), value=1.0).to(head.fc.weight)
