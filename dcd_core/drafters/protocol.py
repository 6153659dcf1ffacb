"""What every drafter does, and the randomness it may use."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.contrast import Target
from dcd_core.draft import Draft, Shape
from dcd_core.sampling import ACCEPT, DRAFT, FINAL, TREE, gumbel, inverse_cdf, uniforms


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
    _coins: dict[int, Tensor] = field(default_factory=dict)

    def gumbel(self, vocab: int) -> Float[Tensor, "batch count vocab"]:
        """Shared noise of all positions; drafter and verifier read the same numbers."""
        if vocab not in self._gumbel:
            self._gumbel[vocab] = gumbel(self.keys, self.positions, vocab)
        return self._gumbel[vocab]

    def coins(self, stream: int) -> Float[Tensor, "batch count"]:
        """One uniform number for every position, of what a chain needs: to draft, to accept, to end the round."""
        if not self._coins:
            streams = (DRAFT, ACCEPT, FINAL)
            self._coins = dict(zip(streams, uniforms(self.keys, self.positions, streams)[..., 0], strict=True))
        return self._coins[stream]

    def pick(
        self,
        logits: Float[Tensor, "batch ids"],
        depth: int,
        vocab: int,
        target_ids: Int[Tensor, " ids"] | None = None,
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, "batch ids"] | None]:
        """Pick a draft token at ``depth`` (0 = first) from a drafter's logits, by the round's rule.

        Args:
            target_ids: vocabulary id of each logit, None when they are the ids themselves.
        Returns:
            tokens (vocabulary ids), and for the sampled rule the distribution that they came from, over the logits.
        """
        if self.rule == "deterministic":
            index, probs = logits.argmax(-1), None
        elif self.rule == "shared_noise":
            noise = self.gumbel(vocab)[:, depth]
            noise = noise if target_ids is None else noise[:, target_ids]
            index, probs = (logits / self.temperature + noise).argmax(-1), None
        else:
            probs = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
            index = inverse_cdf(probs, self.coins(DRAFT)[:, depth])
        return (index if target_ids is None else target_ids[index]), probs

    def pick_children(
        self,
        logits: Float[Tensor, "batch parents ids"],
        depth: int,
        count: int,
        vocab: int,
        target_ids: Int[Tensor, " ids"] | None = None,
    ) -> tuple[
        Int[Tensor, "batch parents count"],
        Float[Tensor, "batch parents count"],
        Float[Tensor, "batch parents count ids"],
    ]:
        """Draw ``count`` children of each of some nodes without replacement, for the sampled rule.

        The largest of logits and Gumbel noise, from the largest down, are draws one after the other [Kool et al. 2019].
        Nodes of one depth share the noise of their position: each node's children still have their law, and a round
        visits the children of only one of them.

        Returns:
            tokens in the order of drawing; the log-probability of each as if it had been drawn first; and for each the
            distribution that it was drawn from, over the logits, in which its earlier siblings have probability 0.
        """
        tempered = logits / self.temperature
        noise = gumbel(self.keys, self.positions[:, depth : depth + 1], vocab, TREE)
        noise = noise if target_ids is None else noise[..., target_ids]
        index = (tempered + noise).topk(count, dim=-1).indices
        gains = tempered.gather(-1, index) - tempered.logsumexp(-1, keepdim=True)
        laws = []
        for child in range(count):
            laws.append(tempered.softmax(-1))
            tempered = tempered.scatter(-1, index[..., child : child + 1], float("-inf"))
        return (index if target_ids is None else target_ids[index]), gains, torch.stack(laws, dim=2)


@dataclass
class Accepted:
    """What a round (or the prefill) added to every row, handed to the drafter.

    Attributes:
        tokens: the emitted tokens of each row in order, padded; the last valid one is the next round's root.
        counts: how many of them are valid, per row, on the host.
        host_tokens: the same tokens on the host, without padding.
        features: what :attr:`Drafter.feature_scorers` saw at the positions *before* each token (feature t stands beside
            token t + 1), padded alike; None unless the drafter asked for it.
    """

    tokens: Int[Tensor, "batch width"]
    counts: list[int]
    host_tokens: list[list[int]]
    features: Float[Tensor, "batch width features"] | None

    def followed_by(self, other: Accepted) -> Accepted:
        """What two rounds added, one after the other, to the same rows."""
        counts = list(map(sum, zip(self.counts, other.counts, strict=True)))
        first, second = max(self.counts), max(other.counts)
        places = [
            [*range(one), *range(first, first + more), *[0] * (max(counts) - one - more)]
            for one, more in zip(self.counts, other.counts, strict=True)
        ]
        index = torch.tensor(places, device=self.tokens.device)
        features = None
        if self.features is not None:
            joined = torch.cat([self.features[:, :first], other.features[:, :second]], dim=1)
            features = joined.gather(1, index[..., None].expand(-1, -1, joined.shape[-1]))
        tokens = torch.cat([self.tokens[:, :first], other.tokens[:, :second]], dim=1).gather(1, index)
        hosts = [[*one, *more] for one, more in zip(self.host_tokens, other.host_tokens, strict=True)]
        return Accepted(tokens, counts, hosts, features)

    def first(self, counts: list[int]) -> Accepted:
        """The first so many tokens of every row."""
        hosts = [tokens[:count] for tokens, count in zip(self.host_tokens, counts, strict=True)]
        return Accepted(self.tokens, counts, hosts, self.features)

    def keep_rows(self, rows: list[int]) -> Accepted:
        """The same for these rows only."""
        index = torch.tensor(rows, device=self.tokens.device)
        return Accepted(
            self.tokens.index_select(0, index),
            [self.counts[row] for row in rows],
            [self.host_tokens[row] for row in rows],
            None if self.features is None else self.features.index_select(0, index),
        )


class Drafter:
    """Proposes drafts. The loop calls ``begin`` once, then ``propose`` and ``observe`` in turn."""

    feature_scorers: tuple[int, ...] = ()
    """Whose tapped features the drafter reads, by their places among the scorers (0 is the expert), joined in this
    order. They come from the passes that score: none is made for them."""
    default_rule = "deterministic"
    """The rule by which chains are judged at temperature > 0 unless a setting says otherwise; at 0 it is always
    deterministic."""
    rules = ("deterministic", "sampled", "shared_noise")
    scores_amateur = False
    """True if proposing computes the amateur's rows as a by-product (SCD), so the loop must not run it again."""

    amateur_passes = 1
    """Passes of the amateur that the last round took (more than one where the amateur drafts)."""

    def planned(self, shape: Shape) -> Shape:
        """The shape of the next draft, asked for before its noise is made."""
        return shape

    def asks_at(self) -> float | None:
        """Chance of a fallen token at which deferred judging asks the amateur; None: as the settings say."""
        return None

    def most_nodes(self, shape: Shape) -> int:
        """Most nodes that one draft may have: the caches keep room for a pass over all of them."""
        return shape.budget

    def usual_rule(self, shape: Shape) -> str:
        """The rule used at temperature > 0 for drafts of this shape unless a setting says otherwise."""
        return self.default_rule

    suspect: Bool[Tensor, " batch"] | None = None
    """After ``propose``: rows whose draft came out of NaN or infinite states, for the loop to refuse."""

    def aim(self, target: Target) -> None:
        """Learn what the drafts will be judged by (or are to imitate in its place), before ``begin``."""

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
        """Take back the newest ``back[row]`` tokens of every row that :meth:`observe` told, then learn ``accepted``.

        For loops that go on with provisional tokens. ``back`` covers no token of the prefill. A drafter that keeps
        nothing between rounds has nothing to take back.
        """

    def keep_rows(self, rows: list[int]) -> None:
        """Rows not named here have left the batch."""

    def extend(self, other: Drafter) -> None:
        """The rows of another drafter of this kind join, after the present ones."""
