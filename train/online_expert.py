"""The frozen expert beside the trained head: one training step, one evaluation, and what identifies the expert."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dcd_core.files import content_hash
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import LanguageModel
from dcd_core.replay import Rollout, replay
from train.batches import Batch, Texts
from train.loop import full_weights, per_step, refuse_non_finite
from train.processes import Ranks, add_up
from train.unroll import Alignment, Targets, Unroll, align, expert_targets


class HeadStep:
    """One micro-batch: the expert's features and targets, then the head's unroll.

    Args:
        expert: frozen, on this rank's device.
        stop_ids: ids that end a turn.
    """

    def __init__(self, expert: LanguageModel, target_ids: Tensor, stop_ids: frozenset[int]):
        self.expert = expert
        self.target_ids = target_ids.to(expert.device)
        self.stop_ids = stop_ids

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Alignment, Targets]:
        """Features, embedded next tokens, alignment and targets of a batch.

        Raises:
            UserError: NaN or inf in the expert's features or final states, naming the texts.
        """
        expert = self.expert
        ids = batch.input_ids.to(expert.device)
        output = expert.forward_full(ids, features=True, logits=False)
        refuse_non_finite("features", output.features, batch)
        refuse_non_finite("final states", output.hidden, batch)
        alignment = align(batch.texts, batch.spans, self.stop_ids).to(expert.device)
        targets = expert_targets(expert.output_layer, output.hidden, alignment, self.target_ids)
        following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
        with torch.no_grad():
            embeds = expert.embedding(following)
        return output.features, embeds, alignment, targets

    def __call__(self, engine, batch: Batch, denominators: list[float]) -> tuple[Tensor, Tensor]:
        return engine(*self.inputs(batch), denominators)


class HeldOut:
    """Evaluation on held-out texts: teacher-forced metrics per step, and accepted length by replay.

    Replay walks the rounds that greedy chain drafting would make on these very answers; it is the decoder's own
    accepted length where the answers are the expert's greedy ones, and close to it where they were sampled.

    Args:
        gamma: drafts per round.
    """

    def __init__(self, texts: Texts, step: HeadStep, gamma: int, ranks: Ranks):
        self.texts, self.step, self.gamma, self.ranks = texts, step, gamma, ranks

    def __call__(self, engine) -> dict[str, float]:
        unroll = copy_module(engine)
        totals = [torch.zeros(unroll.steps, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
        for index in range(self.ranks.rank, len(self.texts), self.ranks.world):
            batch = self.texts.batch([index])
            inputs = self.step.inputs(batch)
            with torch.no_grad():
                totals[0] += unroll(*inputs, [1.0] * unroll.steps)[1].double().cpu()
            totals[1] += self.rounds(unroll.head, batch, inputs[0])
        flat = add_up(torch.cat([part.flatten() for part in totals]), self.ranks.device)
        accepted, emitted, rounds = flat[-3:].tolist()
        found = per_step(flat[:-3].view(-1, 4))
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
    """The trained module with its whole weights, off the engine (whose hooks and shards stay out of evaluation)."""
    trained = engine.module
    with torch.device("meta"):
        head = Eagle3Head(trained.head.config)
    head.load_state_dict(
        {name.removeprefix("head."): tensor for name, tensor in full_weights(engine).items()}, strict=True, assign=True
    )
    return Unroll(head, trained.steps, trained.decay).eval().requires_grad_(False)


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's configuration and of samples of its first and last weights."""
    settings = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    weights = list(model.parameters())
    samples = [
        hashlib.sha256(weight.detach()[:64].float().cpu().numpy().tobytes()).hexdigest()
        for weight in (weights[0], weights[len(weights) // 2], weights[-1])
    ]
    return content_hash([str(sorted(settings.items(), key=str)), samples])


@torch.no_grad()
def feature_rms(expert: LanguageModel, texts: Texts, count: int = 16) -> Float[Tensor, " features"]:
    """Root mean square of every tapped feature over the first texts; their first token, where a few channels of the
    residual stream are far out of proportion, is left out."""
    total, rows = torch.zeros(3 * expert.hidden_size, dtype=torch.float64, device=expert.device), 0
    for index in range(min(count, len(texts))):
        batch = texts.batch([index])
        features = expert.forward_full(batch.input_ids.to(expert.device), features=True, logits=False).features
        refuse_non_finite("features", features, batch)
        total += features[0, 1:].double().pow(2).sum(0)
        rows += features.shape[1] - 1
    return (total / max(rows, 1)).sqrt().float()


@torch.no_grad()
def scale_features(head: Eagle3Head, rms: Float[Tensor, " features"]) -> None:
    """Divide the columns of a fresh ``fc`` by the size of the features they read, so that each starts with the same
    say. Some channels are tens of times larger than others, and a short training does not undo that."""
    smallest = rms.median() / 1000
    head.fc.weight.div_(rms.clamp_min(smallest) if smallest > 0 else torch.ones_like(rms))
