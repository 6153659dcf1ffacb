"""Accept or resample one draft against any target rows. The only verification in the project.

:func:`verify` is a pure, batched function (target rows, draft, uniforms) -> tokens, with a fixed layout of randomness:
one uniform per visited child, one inverse-CDF draw at the end. One statement covers every rule: a child x drawn from
e_x (a point mass for a deterministic draft) is accepted with probability min(1, current(x) / e_x(x)); otherwise
current becomes normalise((current - e_x)+) and the next sibling is visited; when none is left, the round ends with a
draw from current [Leviathan et al. 2023; Chen et al. 2023]. Every emitted token is then distributed as the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.draft import Draft
from dcd_core.sampling import ACCEPT, FINAL, gumbel, inverse_cdf, uniforms


@dataclass
class Uniforms:
    """The random numbers of one round, by output position (index 0 is the first token after the root).

    ``accept[:, d, s]`` decides the s-th visited child at depth d + 1; ``final[:, a]`` is the last draw after a accepted
    drafts. ``gumbel[:, d]`` is the noise of the shared-noise rule at that position.
    """

    accept: Float[Tensor, "batch depth siblings"] | None = None
    final: Float[Tensor, "batch positions"] | None = None
    gumbel: Float[Tensor, "batch positions vocab"] | None = None

    @classmethod
    def keyed(
        cls,
        keys: Int[Tensor, " batch"],
        positions: Int[Tensor, "batch positions"],
        siblings: int = 1,
        vocab: int | None = None,
    ) -> Uniforms:
        """Numbers keyed by (row key, output position); with ``vocab`` the shared noise instead of uniforms."""
        if vocab is not None:
            return cls(gumbel=gumbel(keys, positions, vocab))
        return cls(
            accept=uniforms(keys, positions, ACCEPT, siblings), final=uniforms(keys, positions, FINAL).squeeze(-1)
        )


@dataclass
class Verdict:
    """What one round emits.

    Attributes:
        accepted: number of accepted drafts.
        tokens: the accepted drafts, then the final token, then -1. The final token itself is -1 where it needs a
            target row that was not given (see :func:`verify`).
        path: columns of the pass [root, node 0, node 1, ...] along the accepted path: 0, then node + 1 each.
    """

    accepted: Int[Tensor, " batch"]
    tokens: Int[Tensor, "batch depth"]
    path: Int[Tensor, "batch depth"]


def verify(
    target: Float[Tensor, "batch rows vocab"] | Int[Tensor, "batch rows"], draft: Draft, noise: Uniforms | None
) -> Verdict:
    """Judge a draft.

    Args:
        target: row 0 is the target after the root, row n + 1 the target after node n. Floats are normalised
            log-probabilities; integers are choices already made (temperature 0: the argmax). With one row fewer than
            nodes + 1 the last node's row is missing: a row that accepts everything then ends in -1, to be finished by
            a second call with an empty draft (SCD's delayed drafting).
        noise: not needed for integer targets.
    Raises:
        ValueError: a draft whose rule does not fit the target (a sampled draft at temperature 0), wrong shapes, or a
            tree with fewer coins at a depth than it might have siblings (a coin used twice would bias the output).
    """
    rows = target.shape[1]
    if rows not in (draft.nodes, draft.nodes + 1) or rows == 0:
        raise ValueError(f"{draft.nodes} drafted nodes need {draft.nodes + 1} target rows, got {rows}")
    if not target.is_floating_point():
        if draft.rule == "sampled":
            raise ValueError("at temperature 0 drafts must be deterministic, not sampled")
        return _walk_choices(target, draft)
    if draft.rule == "shared_noise":
        return _walk_choices(shared_noise_choices(target, draft, noise.gumbel), draft)
    if not draft.linear and noise.accept.shape[2] < draft.nodes:
        raise ValueError(f"a tree of {draft.nodes} nodes needs as many coins a depth, got {noise.accept.shape[2]}")
    return _walk_probabilities(target, draft, noise)


def shared_noise_choices(
    target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Float[Tensor, "batch positions vocab"]
) -> Int[Tensor, "batch rows"]:
    """The token that the noise of its position picks after the root and after every node: argmax(log pi + g)."""
    if draft.linear:
        return (target + noise[:, : target.shape[1]]).argmax(-1)
    zero = torch.zeros_like(draft.tokens[:, :1])
    depth = torch.cat([zero, draft.depths()], dim=1)[:, : target.shape[1]]
    return (target + noise.gather(1, depth[..., None].expand(-1, -1, target.shape[-1]))).argmax(-1)


class _Path:
    """The path accepted so far, one per row."""

    def __init__(self, draft: Draft):
        batch, nodes = draft.tokens.shape
        device = draft.tokens.device
        self.node = torch.full((batch,), -1, device=device)
        self.accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        self.sibling = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=device)
        self.path = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=device)

    def advance(self, took: Tensor, node: int, token: Tensor) -> None:
        """Rows in ``took`` accept ``node``."""
        self._write(self.tokens, self.accepted, token, took)
        self.accepted = self.accepted + took
        self._write(self.path, self.accepted, torch.full_like(token, node + 1), took)
        self.node = torch.where(took, node, self.node)
        self.sibling = self.sibling.masked_fill(took, 0)

    @staticmethod
    def _write(table: Tensor, column: Tensor, value: Tensor, where: Tensor) -> None:
        old = table.gather(1, column[:, None])[:, 0]
        table.scatter_(1, column[:, None], torch.where(where, value, old)[:, None])

    def finish(self, final: Tensor) -> Verdict:
        self.tokens.scatter_(1, self.accepted[:, None], final[:, None])
        return Verdict(self.accepted, self.tokens, self.path)


def _walk_choices(choices: Int[Tensor, "batch rows"], draft: Draft) -> Verdict:
    """A child is accepted while it equals the choice made after its parent; the round ends with the first choice that
    no child equals."""
    if choices.shape[1] == draft.nodes:
        choices = torch.nn.functional.pad(choices, (0, 1), value=-1)
    path, choice = _Path(draft), choices[:, 0]
    for node in range(draft.nodes):
        token = draft.tokens[:, node]
        took = draft.valid[:, node] & (draft.parents[:, node] == path.node) & (token == choice)
        path.advance(took, node, token)
        choice = torch.where(took, choices[:, node + 1], choice)
    return path.finish(choice)


def _walk_probabilities(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """Visit the nodes in order; ``current`` is what remains of the target at the row's place in the tree."""
    missing_last = target.shape[1] == draft.nodes
    path, current = _Path(draft), target[:, 0].exp()
    batch = torch.arange(current.shape[0], device=current.device)
    coins = noise.accept.shape[1:] if draft.nodes else (1, 1)
    for node in range(draft.nodes):
        token = draft.tokens[:, node]
        visited = draft.valid[:, node] & (draft.parents[:, node] == path.node)
        # unvisited nodes read some coin too, so the index is clamped; their result is not used
        depth, sibling = path.accepted.clamp_max(coins[0] - 1), path.sibling.clamp_max(coins[1] - 1)
        coin = noise.accept[batch, depth, sibling]
        probability = current.gather(1, token[:, None])[:, 0]
        if draft.rule == "sampled":
            proposal = draft.probs[:, node]
            took = visited & (coin * proposal.gather(1, token[:, None])[:, 0] < probability)
            left = (current - proposal).clamp_min_(0)
        else:
            took = visited & (coin < probability)
            left = current.scatter(1, token[:, None], 0.0)
        mass = left.sum(-1, keepdim=True)
        # nothing left by rounding: target and proposal agree, and a rejection has probability 0; draw from the target
        left = torch.where(mass > 0, left / mass, current)
        after = current if missing_last and node == draft.nodes - 1 else target[:, node + 1].exp()
        current = torch.where(took[:, None], after, torch.where((visited & ~took)[:, None], left, current))
        path.advance(took, node, token)
        path.sibling = path.sibling + (visited & ~took)
    final = inverse_cdf(current, noise.final.gather(1, path.accepted[:, None])[:, 0])
    if missing_last:
        final = torch.where(path.accepted == draft.nodes, -1, final)
    return path.finish(final)
