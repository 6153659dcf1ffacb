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
        streams: tuple[int, int] = (ACCEPT, FINAL),
    ) -> Uniforms:
        """Numbers keyed by (row key, output position); with ``vocab`` the shared noise instead of uniforms.

        Args:
            streams: those of the coins and of the last draw; a text that is judged twice needs others the second time.
        """
        if vocab is not None:
            return cls(gumbel=gumbel(keys, positions, vocab))
        accept, final = streams
        return cls(
            accept=uniforms(keys, positions, accept, siblings), final=uniforms(keys, positions, final).squeeze(-1)
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
        return _walk_choices(shared_noise_scores(target, draft, noise.gumbel).argmax(-1), draft)
    if not draft.linear and noise.accept.shape[2] < draft.nodes:
        raise ValueError(f"a tree of {draft.nodes} nodes needs as many coins a depth, got {noise.accept.shape[2]}")
    if draft.rule == "deterministic":
        return _walk_points(target, draft, noise)
    walk = _walk_sampled_chain if draft.linear else _walk_sampled_tree
    return walk(target, draft, noise)


def shared_noise_scores(
    target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Float[Tensor, "batch positions vocab"]
) -> Float[Tensor, "batch rows vocab"]:
    """log pi + g after the root and after every node, with the noise of the position there; its argmax is the token
    that is written."""
    if draft.linear:
        return target + noise[:, : target.shape[1]]
    zero = torch.zeros_like(draft.tokens[:, :1])
    depth = torch.cat([zero, draft.depths()], dim=1)[:, : target.shape[1]]
    return target + noise.gather(1, depth[..., None].expand(-1, -1, target.shape[-1]))


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


def _walk_points(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """Deterministic drafts: a rejected child is a point mass taken out of the target, so numbers are enough on the way
    and one row of the vocabulary at the end."""
    path = _Path(draft)
    probability = _at_nodes(target, draft).exp()
    # a second child with the same token finds nothing left of it
    same = (draft.parents[:, :, None] == draft.parents[:, None]) & (draft.tokens[:, :, None] == draft.tokens[:, None])
    repeated = (same & draft.valid[:, None]).tril(-1).any(-1)
    probability = probability.masked_fill(repeated, 0.0)
    left = torch.ones_like(target[:, 0, 0])
    refused = torch.zeros_like(draft.valid)
    for node in range(draft.nodes):
        visited = draft.valid[:, node] & (draft.parents[:, node] == path.node)
        took = visited & (_coin(noise, path) * left < probability[:, node])
        left = torch.where(visited, left - probability[:, node], left).clamp_min(0).masked_fill(took, 1.0)
        refused[:, node] = visited & ~took
        path.advance(took, node, draft.tokens[:, node])
        path.sibling = path.sibling + refused[:, node]
    row = _row_of(target, path)
    # ids that were refused at the end of the path leave the row; the others' writes go to a column beyond it
    outside = torch.where(refused & (draft.parents == path.node[:, None]), draft.tokens, row.shape[1])
    remaining = torch.nn.functional.pad(row, (0, 1)).scatter(1, outside, 0.0)[:, :-1]
    return _draw(path, target, row, remaining, draft, noise)


def _walk_sampled_chain(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """A sampled chain: no node has a sibling, so the residual is only needed at the end. The result is that of
    :func:`_walk_sampled_tree`, from one row of the vocabulary instead of one a node."""
    path = _Path(draft)
    probability = _at_nodes(target, draft).exp()
    proposal = draft.probs.gather(2, draft.tokens[..., None]).squeeze(-1)
    refused = torch.zeros_like(draft.valid)
    for node in range(draft.nodes):
        visited = draft.valid[:, node] & (path.node == node - 1)
        took = visited & (_coin(noise, path) * proposal[:, node] < probability[:, node])
        refused[:, node] = visited & ~took
        path.advance(took, node, draft.tokens[:, node])
        path.sibling = path.sibling + refused[:, node]
    row = _row_of(target, path)
    index = path.accepted.clamp_max(max(draft.nodes - 1, 0))[:, None, None].expand(-1, 1, row.shape[1])
    remaining = row
    if draft.nodes:
        proposed = draft.probs.gather(1, index)[:, 0]
        remaining = torch.where(refused.any(1, keepdim=True), (row - proposed).clamp_min(0), row)
    return _draw(path, target, row, remaining, draft, noise)


def _walk_sampled_tree(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """Children sampled without replacement, in sampling order; ``current`` is what remains of the target at the row's
    place in the tree."""
    missing_last = target.shape[1] == draft.nodes
    path, current = _Path(draft), target[:, 0].exp()
    for node in range(draft.nodes):
        token, proposal = draft.tokens[:, node], draft.probs[:, node]
        visited = draft.valid[:, node] & (draft.parents[:, node] == path.node)
        probability, proposed = (row.gather(1, token[:, None])[:, 0] for row in (current, proposal))
        took = visited & (_coin(noise, path) * proposed < probability)
        refused = visited & ~took
        left = (current - proposal).clamp_min_(0)
        mass = left.sum(-1, keepdim=True)
        # nothing left by rounding: target and proposal agree, and a rejection has probability 0; draw from the target
        left = torch.where(mass > 0, left / mass, current)
        after = current if missing_last and node == draft.nodes - 1 else target[:, node + 1].exp()
        current = torch.where(took[:, None], after, torch.where(refused[:, None], left, current))
        path.advance(took, node, token)
        path.sibling = path.sibling + refused
    return _draw(path, target, current, current, draft, noise)


def _at_nodes(target: Float[Tensor, "batch rows vocab"], draft: Draft) -> Float[Tensor, "batch nodes"]:
    """The target's entry for every node's token, in the row after its parent."""
    index = (draft.parents + 1) * target.shape[2] + draft.tokens
    return target.flatten(1).gather(1, index)


def _coin(noise: Uniforms, path: _Path) -> Float[Tensor, " batch"]:
    """The coin of the child that is visited next. Rows that visit none read some coin too, so the index is clamped;
    their result is not used."""
    depths, siblings = noise.accept.shape[1:]
    index = path.accepted.clamp_max(depths - 1) * siblings + path.sibling.clamp_max(siblings - 1)
    return noise.accept.flatten(1).gather(1, index[:, None])[:, 0]


def _row_of(target: Float[Tensor, "batch rows vocab"], path: _Path) -> Float[Tensor, "batch vocab"]:
    """Probabilities after the last accepted node; where that row is missing, any (the final token is then -1)."""
    index = (path.node + 1).clamp_max(target.shape[1] - 1)[:, None, None]
    return target.gather(1, index.expand(-1, 1, target.shape[2]))[:, 0].exp()


def _draw(path: _Path, target: Tensor, row: Tensor, remaining: Tensor, draft: Draft, noise: Uniforms) -> Verdict:
    """End the round with a draw from what remains of a row, or from the row itself where rounding leaves nothing."""
    remaining = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, row)
    place = path.accepted.clamp_max(noise.final.shape[1] - 1)[:, None]
    final = inverse_cdf(remaining, noise.final.gather(1, place)[:, 0])
    if target.shape[1] == draft.nodes:
        final = torch.where(path.node == draft.nodes - 1, -1, final)
    return path.finish(final)
