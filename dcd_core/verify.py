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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.draft import Draft
from dcd_core.sampling import ACCEPT, FINAL, gumbel, inverse_cdf, largest, uniforms


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
        accept, final = uniforms(keys, positions, streams, siblings)
        return cls(accept, final[..., 0])


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
        return _walk_choices(largest(shared_noise_scores(target, draft, noise.gumbel))[1], draft)
    if not draft.linear and noise.accept.shape[2] < draft.nodes:
        raise ValueError(f"a tree of {draft.nodes} nodes needs as many coins a depth, got {noise.accept.shape[2]}")
    if draft.rule == "deterministic":
        return _walk_points(target, draft, noise)
    return _walk_chain(target, draft, noise) if draft.linear else _walk_sampled_tree(target, draft, noise)


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
    if draft.linear:
        accepted = _run(draft.valid & (draft.tokens == choices[:, :-1]))
        return _verdict(draft, accepted, None, choices.gather(1, accepted[:, None])[:, 0])
    _, repeated = _siblings(draft)
    chosen = draft.valid & ~repeated & (draft.tokens == choices.gather(1, draft.parents + 1))
    accepted, path = _path_through(draft, chosen)
    return _verdict(draft, accepted, path, choices.gather(1, path.gather(1, accepted[:, None]))[:, 0])


def _walk_points(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """Deterministic drafts: a rejected child is a point mass taken out of the target, so numbers are enough on the way
    and one row of the vocabulary at the end. Each child's coin is thrown whether it is visited or not; only those on
    the way count."""
    if draft.linear:
        return _walk_chain(target, draft, noise)
    probability = _at_nodes(target, draft).exp()
    earlier, repeated = _siblings(draft)
    # a second child with the same token finds nothing left of it
    probability = probability.masked_fill(repeated, 0.0)
    left = (1.0 - (earlier * probability[:, None]).sum(-1)).clamp_min(0)
    depths, coins = noise.accept.shape[1:]
    place = (draft.depths() - 1).clamp_max(depths - 1) * coins + earlier.sum(-1).clamp_max(coins - 1)
    passed = draft.valid & (noise.accept.flatten(1).gather(1, place) * left < probability)
    took = passed & ~(earlier & passed[:, None]).any(-1)
    accepted, path = _path_through(draft, took)
    last = path.gather(1, accepted[:, None])
    batch = torch.arange(target.shape[0], device=target.device)
    row = target[batch, last[:, 0].clamp_max(target.shape[1] - 1)].exp_()
    # ids that were refused at the end of the path leave the row
    refused = draft.valid & (draft.parents + 1 == last)
    final = _draw(accepted, _emptied(row, draft.tokens, refused), noise)
    if target.shape[1] == draft.nodes:
        final = torch.where(last[:, 0] == draft.nodes, -1, final)
    return _verdict(draft, accepted, path, final)


def _walk_chain(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """A chain, sampled or deterministic: no node has a sibling, so every node's coin can be thrown at once, and the
    residual is only needed where the path ends."""
    nodes, batch = draft.nodes, torch.arange(target.shape[0], device=target.device)
    accepted = torch.zeros_like(draft.tokens[:, :0]).sum(1)
    if nodes:
        tokens = draft.tokens[..., None]
        coins = noise.accept[:, :nodes, 0]
        if draft.probs is not None:
            coins = coins * draft.chances()
        accepted = _run(draft.valid & (coins < target[:, :nodes].gather(2, tokens)[..., 0].exp()))
    row = target[batch, accepted.clamp_max(target.shape[1] - 1)].exp_()
    if nodes:
        place = batch, accepted.clamp_max(nodes - 1)
        refused = ((accepted < nodes) & draft.valid[place])[:, None]
        if draft.probs is None:
            row = _emptied(row, draft.tokens[place][:, None], refused)
        else:
            row = _residual(row, draft.probs[place].masked_fill(~refused, 0.0), draft.ids)
    final = _draw(accepted, row, noise)
    if target.shape[1] == nodes:
        final = torch.where(accepted == nodes, -1, final)
    return _verdict(draft, accepted, None, final)


def _walk_sampled_tree(target: Float[Tensor, "batch rows vocab"], draft: Draft, noise: Uniforms) -> Verdict:
    """Children sampled without replacement, in sampling order; ``current`` is what remains of the target at the row's
    place in the tree."""
    missing_last = target.shape[1] == draft.nodes
    path, current, chances = _Path(draft), target[:, 0].exp(), draft.chances()
    for node in range(draft.nodes):
        token = draft.tokens[:, node]
        visited = draft.valid[:, node] & (draft.parents[:, node] == path.node)
        took = visited & (_coin(noise, path) * chances[:, node] < current.gather(1, token[:, None])[:, 0])
        refused = visited & ~took
        left = draft.subtracted(current, draft.probs[:, node]).clamp_min_(0)
        mass = left.sum(-1, keepdim=True)
        # nothing left by rounding: target and proposal agree, and a rejection has probability 0; draw from the target
        left = torch.where(mass > 0, left / mass, current)
        after = current if missing_last and node == draft.nodes - 1 else target[:, node + 1].exp()
        current = torch.where(took[:, None], after, torch.where(refused[:, None], left, current))
        path.advance(took, node, token)
        path.sibling = path.sibling + refused
    final = _draw(path.accepted, current, noise)
    if missing_last:
        final = torch.where(path.node == draft.nodes - 1, -1, final)
    return path.finish(final)


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


def _residual(
    row: Float[Tensor, "batch vocab"], law: Float[Tensor, "batch columns"], ids: Int[Tensor, " columns"] | None
) -> Float[Tensor, "batch vocab"]:
    """What the last token is drawn from: what the law of a refused token (0 where none was refused) leaves of the row,
    and the row itself where rounding leaves nothing (target and proposal agree, and a refusal has probability 0).
    Changes ``row``."""
    if ids is None:
        left = (row - law).clamp_min_(0)
        return torch.where(left.sum(-1, keepdim=True) > 0, left, row)
    ids = ids.expand_as(law)
    return _lowered(row, ids, (row.gather(1, ids) - law).clamp_min_(0))


def _emptied(
    row: Float[Tensor, "batch vocab"], tokens: Int[Tensor, "batch nodes"], refused: Bool[Tensor, "batch nodes"]
) -> Float[Tensor, "batch vocab"]:
    """:func:`_residual` of point masses: the row without the tokens that were refused. Changes ``row``."""
    return _lowered(row, tokens, row.gather(1, tokens).masked_fill(refused, 0.0))


def _lowered(
    row: Float[Tensor, "batch vocab"], ids: Int[Tensor, "batch few"], values: Float[Tensor, "batch few"]
) -> Float[Tensor, "batch vocab"]:
    """The row with smaller numbers at a few ids, in place; as it was where nothing would be left of it. Only these
    entries are touched, as a pass over the vocabulary costs more than all of them. An id may stand there twice."""
    before = row.gather(1, ids)
    row.scatter_reduce_(1, ids, values, "amin")
    something = row.sum(-1, keepdim=True) > 0
    return row.scatter_reduce_(1, ids, before.masked_fill(something, 0.0), "amax")


def _draw(
    accepted: Int[Tensor, " batch"], remaining: Float[Tensor, "batch vocab"], noise: Uniforms
) -> Int[Tensor, " batch"]:
    """The round's last token."""
    return inverse_cdf(remaining, noise.final.gather(1, accepted.clamp_max(noise.final.shape[1] - 1)[:, None])[:, 0])


# ---- what was accepted -----------------------------------------------------------------------------------------------


def _run(passed: Bool[Tensor, "batch nodes"]) -> Int[Tensor, " batch"]:
    """How many nodes of a chain pass before the first that does not."""
    return passed.long().cumprod(1).sum(1)


def _verdict(draft: Draft, accepted: Tensor, path: Tensor | None, final: Tensor) -> Verdict:
    """The tokens along the path after the root, then the final one, then -1; a chain's path needs no telling."""
    if path is None:
        path = torch.arange(draft.nodes + 1, device=accepted.device)[None]
        path = torch.where(path <= accepted[:, None], path, 0)
    following = torch.nn.functional.pad(path[:, 1:], (0, 1))
    tokens = torch.nn.functional.pad(draft.tokens, (1, 0)).gather(1, following)
    columns = torch.arange(path.shape[1], device=path.device)[None]
    tokens = torch.where(columns < accepted[:, None], tokens, -1)
    return Verdict(accepted, tokens.scatter(1, accepted[:, None], final[:, None]), path)


def _siblings(draft: Draft) -> tuple[Bool[Tensor, "batch nodes nodes"], Bool[Tensor, "batch nodes"]]:
    """For every node its earlier valid siblings, and whether one of them is the same token."""
    same_parent = draft.parents[:, :, None] == draft.parents[:, None]
    earlier = (same_parent & draft.valid[:, None]).tril(-1)
    return earlier, (earlier & (draft.tokens[:, :, None] == draft.tokens[:, None])).any(-1)


def _path_through(
    draft: Draft, passed: Bool[Tensor, "batch nodes"]
) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch width"]]:
    """Length and columns of the path of which every node passed; at most one child of a node passes."""
    failed = torch.nn.functional.pad(~passed, (1, 0))
    reached = ~(draft.ancestor_mask() & failed[:, None]).any(-1)
    columns = torch.arange(reached.shape[1], device=reached.device)
    # parents stand before their children, so the path is its columns in ascending order
    ordered = torch.where(reached, columns, reached.shape[1]).sort(dim=1).values
    return reached.sum(1) - 1, torch.where(ordered < reached.shape[1], ordered, 0)
