"""Distilling an amateur: KL(p || q) on the expert's answer tokens, one training step and its evaluation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcd_core.architecture import OutputLayer, base_model
from dcd_core.divergence import acceptance, kl
from dcd_core.models import LanguageModel, Pair
from train.batches import Batch, Texts
from train.loop import refuse_non_finite
from train.unroll import logit_pieces


def answer_rows(batch: Batch) -> Bool[Tensor, "batch position"]:
    """Positions whose next token belongs to an answer, its end-of-turn token included."""
    rows = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for row, spans in enumerate(batch.spans):
        for start, end in spans:
            rows[row, max(start, 1) - 1 : end - 1] = True
    return rows


def count_answer_rows(spans: tuple[tuple[int, int], ...]) -> int:
    """How many rows :func:`answer_rows` marks in one text."""
    return sum(end - max(start, 1) for start, end in spans)


def distillation_sums(
    amateur_logits: Float[Tensor, "row vocab"], expert_logits: Float[Tensor, "row vocab"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Summed KL(p || q), top-1 agreement and acceptance sum min(p, q) over rows; only the KL has a gradient.

    The KL is written as cross-entropy minus entropy: the same gradient from fewer vocabulary-wide intermediates.
    """
    with torch.no_grad():
        probs = expert_logits.softmax(-1)
        entropy = expert_logits.logsumexp(-1) - (probs * expert_logits).sum(-1)
    loss = (F.cross_entropy(amateur_logits, probs, reduction="none") - entropy).sum()
    with torch.no_grad():
        correct = (amateur_logits.argmax(-1) == expert_logits.argmax(-1)).sum().to(loss.dtype)
        accepted = torch.minimum(amateur_logits.softmax(-1), probs).sum()
    return loss, correct, accepted


class Distil(nn.Module):
    """The trained module: an amateur and its loss.

    Args:
        amateur: a transformers causal language model.
        vocab: real ids; wider logits are padding.
        pieces: as of :class:`~train.unroll.Unroll`.
    """

    def __init__(self, amateur: nn.Module, vocab: int, pieces: int = 0):
        super().__init__()
        self.amateur = amateur
        self.output = OutputLayer(amateur)
        self.vocab = vocab
        self.pieces = pieces

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"],
        rows: Bool[Tensor, "batch position"],
        expert_logits,
        expert_hidden: Float[Tensor, "row hidden"],
        denominator: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "1 4"]]:
        """This micro-batch's share of the loss, and sums (KL, agreement, acceptance, rows).

        Args:
            expert_logits: the expert's output layer, applied to ``expert_hidden`` a chunk at a time.
            expert_hidden: the expert's final states at the marked rows.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
        base = base_model(self.amateur)
        states = base(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state[rows]

        def chunk(own: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return distillation_sums(self.output(own)[:, : self.vocab].float(), expert_logits(expert))

        count = self.pieces or logit_pieces(len(states), self.vocab)
        pieces = list(zip(states.tensor_split(count), expert_hidden.tensor_split(count), strict=True))
        parts = [
            chunk(*piece)
            if len(pieces) == 1
            else checkpoint(chunk, *piece, use_reentrant=False, determinism_check="none")
            for piece in pieces
        ]
        loss, correct, accepted = (torch.stack(column).sum() for column in zip(*parts, strict=True))
        sums = torch.stack([loss.detach(), correct, accepted, rows.sum().to(loss.dtype)])
        return loss / max(denominator, 1), sums[None]


class DistilStep:
    """One micro-batch: the expert's final states at the answer rows, then the amateur's forward."""

    def __init__(self, expert: LanguageModel):
        self.expert = expert

    def __call__(self, engines: list, batch: Batch, denominators: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
        expert = self.expert
        ids, rows = batch.input_ids.to(expert.device), answer_rows(batch).to(expert.device)
        hidden = expert.forward_full(ids, logits=False).hidden
        refuse_non_finite({"the expert's final states": batch.pack(hidden)}, batch)
        for engine in engines:
            yield engine(ids, rows, expert.output_layer, hidden[rows], denominators[0])


@torch.no_grad()
def compare(pair: Pair, texts: Texts) -> dict[str, float]:
    """Perplexity of both models, KL(p || q), top-1 agreement and acceptance on the answer tokens of held-out texts."""
    names = ("expert_nll", "amateur_nll", "kl", "top1_agreement", "acceptance")
    sums, count = dict.fromkeys(names, 0.0), 0
    for index in range(len(texts)):
        batch = texts.batch([index])
        rows, ids = answer_rows(batch)[0], batch.input_ids
        following = ids[0, 1:][rows[:-1]].to(pair.expert.device)
        log_p, log_q = (
            model.output_layer(model.forward_full(ids.to(model.device), logits=False).hidden[0, rows]).log_softmax(-1)
            for model in (pair.expert, pair.amateur)
        )
        sums["expert_nll"] -= log_p.gather(1, following[:, None]).sum().item()
        sums["amateur_nll"] -= log_q.gather(1, following[:, None]).sum().item()
        sums["kl"] += kl(log_p, log_q).sum().item()
        sums["top1_agreement"] += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
        sums["acceptance"] += acceptance(log_q, log_p).sum().item()
        count += int(rows.sum())
    means = {name: value / count for name, value in sums.items()}
    for role in ("expert", "amateur"):
        means[f"{role}_perplexity"] = math.exp(min(means.pop(f"{role}_nll"), 700.0))
    return {**means, "answer_tokens": count}


@torch.no_grad()
def latency(pair: Pair, context: int = 200, passes: int = 20) -> dict[str, float]:
    """Milliseconds of a one-token pass after ``context`` tokens, the two models in turns; medians and their ratio."""
    prompt = torch.zeros(1, context, dtype=torch.int64, device=pair.expert.device)
    times: dict[str, list[float]] = {"expert": [], "amateur": []}
    models = {"expert": pair.expert, "amateur": pair.amateur}
    caches = {}
    for role, model in models.items():
        caches[role] = model.new_cache(1, context + 1)
        model.forward(prompt, caches[role], logits=False)
        caches[role].commit([context])
    for turn in range(passes + 3):
        for role, model in models.items():
            synchronise(model.device)
            start = time.perf_counter()
            model.forward(prompt[:, :1], caches[role])
            synchronise(model.device)
            # the first turns warm up
            if turn >= 3:
                times[role].append((time.perf_counter() - start) * 1000)
            caches[role].commit([0])
    expert, amateur = statistics.median(times["expert"]), statistics.median(times["amateur"])
    return {"expert_ms": expert, "amateur_ms": amateur, "latency_ratio": amateur / expert}


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
