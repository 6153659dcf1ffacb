"""What every drafter does, and the randomness it may use."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.draft import Draft, Shape
from dcd_core.sampling import DRAFT, gumbel, inverse_cdf, uniforms


@dataclass
class RoundNoise:
    """The random numbers of one round, made when first asked for.

    Args:
        keys: one per row, see :func:`dcd_core.sampling.row_key`.
        positions: output positions of the tokens that this round may emit, first to last.
        temperature: the target's; sampled drafts use the same unless a drafter says otherwise.
        rule: how the draft will be judged (:data:`dcd_core.draft.RULES`).
    """

    keys: Int[Tensor, " batch"]
    positions: Int[Tensor, "batch count"]
    temperature: float
    rule: str
    _gumbel: dict[int, Tensor] = field(default_factory=dict)

    def gumbel(self, vocab: int) -> Float[Tensor, "batch count vocab"]:
        """Shared noise of all positions; drafter and verifier read the same numbers."""
        if vocab not in self._gumbel:
            self._gumbel[vocab] = gumbel(self.keys, self.positions, vocab)
        return self._gumbel[vocab]

    def pick(
        self,
        logits: Float[Tensor, "batch ids"],
        depth: int,
        vocab: int,
        target_ids: Int[Tensor, " ids"] | None = None,
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, "batch vocab"] | None]:
        """Pick a draft token at ``depth`` (0 = first) from a drafter's logits, by the round's rule.

        Args:
            target_ids: vocabulary id of each logit, None when they are the ids themselves.
        Returns:
            tokens (vocabulary ids), and for the sampled rule the distribution over the vocabulary they came from.
        """
        if self.rule == "deterministic":
            index, probs = logits.argmax(-1), None
        elif self.rule == "shared_noise":
            noise = self.gumbel(vocab)[:, depth]
            noise = noise if target_ids is None else noise[:, target_ids]
            index, probs = (logits / self.temperature + noise).argmax(-1), None
        else:
            probs = (logits / self.temperature).softmax(-1)
            coin = uniforms(self.keys, self.positions[:, depth : depth + 1], DRAFT)[:, 0, 0]
            index = inverse_cdf(probs, coin)
            if target_ids is not None:
                probs = torch.zeros(len(probs), vocab, dtype=probs.dtype, device=probs.device).index_copy(
                    1, target_ids, probs
                )
        return (index if target_ids is None else target_ids[index]), probs


@dataclass
class Accepted:
    """What a round (or the prefill) added to every row, handed to the drafter.

    Attributes:
        tokens: the emitted tokens of each row in order, padded; the last valid one is the next round's root.
        counts: how many of them are valid, per row, on the host.
        host_tokens: the same tokens on the host, without padding.
        features: expert features at the positions *before* each token (feature t stands beside token t + 1), padded
            alike; None unless the drafter asked for them.
    """

    tokens: Int[Tensor, "batch width"]
    counts: list[int]
    host_tokens: list[list[int]]
    features: Float[Tensor, "batch width features"] | None


class Drafter:
    """Proposes drafts. The loop calls ``begin`` once, then ``propose`` and ``observe`` in turn."""

    needs_features = False
    default_rule = "deterministic"
    """The rule used at temperature > 0 unless a setting says otherwise; at 0 it is always deterministic."""
    rules = ("deterministic", "sampled", "shared_noise")
    scores_amateur = False
    """True if proposing computes the amateur's rows as a by-product (SCD), so the loop must not run it again."""

    amateur_passes = 1
    """Passes of the amateur that the last round took (more than one where the amateur drafts)."""

    def most_nodes(self, shape: Shape) -> int:
        """Most nodes that one draft may have: the caches keep room for a pass over all of them."""
        return shape.budget

    suspect: Bool[Tensor, " batch"] | None = None
    """After ``propose``: rows whose draft came out of NaN or infinite states, for the loop to refuse."""

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        """A new batch of rows after the prefill.

        Args:
            first: for every row all prompt tokens but the first, then the first emitted token, with the features of
                the whole prompt beside them.
            capacity: slots a row may need.
        """

    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        """Propose a draft of at most this shape after each row's root."""
        return Draft.empty(root.shape[0], root.device, noise.rule)

    def observe(self, accepted: Accepted) -> None:
        """Learn what the round emitted."""

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        """Forget the newest ``back[b]`` observed tokens of every row, then observe what stands in their place.

        At least what the last call to ``observe`` told is forgotten (and told again where it stands).
        """

    def keep_rows(self, rows: list[int]) -> None:
        """Rows not named here have left the batch."""

    def extend(self, other: Drafter) -> None:
        """The rows of another drafter of this kind join, after the present ones."""
