"""The exact law of what a verifier emits, with no sampling and no knowledge of how it decides.

A verifier is a deterministic function of its uniforms: one coin per visited child, one last draw. Whether a child is
accepted is monotone in its coin, and the last token is monotone in the last draw, so bisection finds the thresholds
to 2^-46, and sums of their lengths are the probabilities. The verifier is a black box: the same enumeration of a
faulty one gives the faulty law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dcd_core.draft import Draft
from dcd_core.verify import Uniforms, verify

ACCEPT, REJECT = 2.0**-60, float("inf")
"""Coins that decide whatever the probability is; where the decision is impossible its weight is 0."""
STEPS = 46
NOTHING = 1e-13
"""Probabilities below this are rounding of the bisection."""

Prefix = tuple[int, ...]


@dataclass
class Node:
    """One drafted token; ``law`` is the distribution that it was drawn from (None: deterministic)."""

    token: int
    parent: int = -1
    law: np.ndarray | None = None


Tree = list[Node]
DraftLaw = Callable[[Prefix], list[tuple[float, Tree]]]
"""Every draft that may be proposed after a prefix, with its probability."""
RowsLaw = Callable[[Prefix], np.ndarray]
"""Log-probabilities after a prefix: the rows that the verifier is given."""


def batch_drafts(trees: list[Tree], vocab: int, rule: str) -> Draft:
    """All trees as one draft, padded with invalid nodes."""
    nodes = max(map(len, trees))
    tokens = torch.zeros(len(trees), nodes, dtype=torch.int64)
    parents = torch.arange(-1, nodes - 1).repeat(len(trees), 1)
    valid = torch.zeros(len(trees), nodes, dtype=torch.bool)
    probs = torch.full((len(trees), nodes, vocab), 1 / vocab, dtype=torch.float64) if rule == "sampled" else None
    for row, tree in enumerate(trees):
        for index, node in enumerate(tree):
            tokens[row, index], parents[row, index], valid[row, index] = node.token, node.parent, True
            if probs is not None:
                probs[row, index] = torch.from_numpy(node.law)
    linear = bool((parents == torch.arange(-1, nodes - 1)).all())
    return Draft(tokens, parents, valid, rule, probs, linear=linear)


def repeat(draft: Draft, copies: int) -> Draft:
    """All rows again, ``copies`` times."""
    tokens, parents, valid = (table.repeat(copies, 1) for table in (draft.tokens, draft.parents, draft.valid))
    probs = None if draft.probs is None else draft.probs.repeat(copies, 1, 1)
    return Draft(tokens, parents, valid, draft.rule, probs, linear=draft.linear)


def target_rows(prefixes: list[Prefix], trees: list[Tree], rows: RowsLaw) -> torch.Tensor:
    """Row 0 after the prefix, row n + 1 after node n; rows after invalid nodes are never used."""
    nodes, table = max(map(len, trees)), []
    for prefix, tree in zip(prefixes, trees, strict=True):
        lines = [prefix]
        for node in tree:
            lines.append((*lines[node.parent + 1], node.token))
        table.append([rows(line) for line in lines] + [rows(prefix)] * (nodes - len(tree)))
    return torch.from_numpy(np.array(table))


def bisect(passes: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
    """Per row, where a condition that holds for small numbers in (0, 1) ceases to hold."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for _ in range(STEPS):
        middle = (low + high) / 2
        good = passes(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    return (low + high) / 2


def outcomes(target: torch.Tensor, draft: Draft, siblings: int = 1, judge=verify):
    """Every way the walk of each row can go: yields (emitted tokens, probability), both by row.

    Emitted tokens are ``[rows, accepted + 1]``; probabilities ``[rows]``.
    """
    count, vocab, depth = target.shape[0], target.shape[2], draft.nodes
    noise = Uniforms(
        accept=torch.full((count, depth + 1, max(siblings, draft.nodes)), REJECT, dtype=torch.float64),
        final=torch.full((count, depth + 1), 0.5, dtype=torch.float64),
    )

    # the edges between all tokens are found at once, on a copy of the rows for each edge
    copies, tokens = vocab - 1, torch.arange(vocab - 1).repeat_interleave(count)
    tiled = target.repeat(copies, 1, 1), repeat(draft, copies)

    def last_draw(accepted: int, weight: torch.Tensor):
        coins = Uniforms(noise.accept.repeat(copies, 1, 1), noise.final.repeat(copies, 1))

        def passes(coin):
            coins.final[:, accepted] = coin
            return judge(*tiled, coins).tokens[:, accepted] <= tokens

        edges = bisect(passes, copies * count).view(copies, count)
        edges = torch.cat([torch.zeros(1, count), edges, torch.ones(1, count)])
        for token, (below, above) in enumerate(itertools.pairwise(edges)):
            noise.final[:, accepted] = (below + above) / 2
            verdict = judge(target, draft, noise)
            probability = weight * (above - below)
            real = probability > NOTHING
            assert (verdict.accepted[real] == accepted).all()
            assert (verdict.tokens[real, accepted] == token).all()
            yield verdict.tokens[:, : accepted + 1].numpy(), torch.where(real, probability, 0.0).numpy()

    def walk(accepted: int, sibling: int, weight: torch.Tensor):
        if weight.max() < NOTHING:
            return
        if accepted == depth or sibling == siblings:
            yield from last_draw(accepted, weight)
            return

        def passes(coin):
            noise.accept[:, accepted, sibling] = coin
            return judge(target, draft, noise).accepted > accepted

        possible = (passes(torch.tensor(ACCEPT)) & (weight > NOTHING)).any()
        threshold = bisect(passes, count) if possible else torch.zeros(count, dtype=torch.float64)
        noise.accept[:, accepted, sibling] = ACCEPT
        yield from walk(accepted + 1, 0, weight * threshold)
        noise.accept[:, accepted:] = REJECT
        yield from walk(accepted, sibling + 1, weight * (1 - threshold))

    yield from walk(0, 0, torch.ones(count, dtype=torch.float64))


def emitted_law(
    vocab: int,
    length: int,
    drafts: DraftLaw,
    rows: RowsLaw,
    rule: str,
    siblings: int = 1,
    judge=verify,
    table=target_rows,
) -> np.ndarray:
    """The joint law of the first ``length`` emitted tokens, over as many rounds as they take: ``[vocab] * length``.

    Args:
        siblings: most children of one node.
        judge, table: the verifier, and what builds its target rows; both are replaced to inject a fault.
    """
    places = [prefix for size in range(length) for prefix in itertools.product(range(vocab), repeat=size)]
    cases = [(prefix, probability, tree) for prefix in places for probability, tree in drafts(prefix)]
    prefixes, weights, trees = (list(column) for column in zip(*cases, strict=True))
    target = table(prefixes, trees, rows)
    rounds: dict[Prefix, dict[Prefix, float]] = {place: {} for place in places}
    for tokens, probability in outcomes(target, batch_drafts(trees, vocab, rule), siblings, judge):
        for case, prefix in enumerate(prefixes):
            if probability[case] > 0:
                new, mass = tuple(tokens[case].tolist()), weights[case] * probability[case]
                rounds[prefix][new] = rounds[prefix].get(new, 0.0) + mass
    law, reach = np.zeros((vocab,) * length), dict.fromkeys(places, 0.0)
    reach[()] = 1.0
    for prefix in places:  # shorter ones first
        for new, mass in rounds[prefix].items():
            text = prefix + new
            if len(text) >= length:
                law[text[:length]] += reach[prefix] * mass
            else:
                reach[text] += reach[prefix] * mass
    return law


def product_law(vocab: int, length: int, rows: RowsLaw) -> np.ndarray:
    """What a lossless verifier must emit: the product of the target over the tokens."""
    law = np.ones((vocab,) * length)
    for text in itertools.product(range(vocab), repeat=length):
        for place, token in enumerate(text):
            law[text] *= np.exp(rows(text[:place])[token])
    return law
