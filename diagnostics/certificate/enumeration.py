"""The exact law of what a verifier emits, with no sampling and no knowledge of how it decides.

A verifier is a deterministic function of its uniforms: one coin per visited child, one last draw. Whether a child is
accepted is monotone in its coin, and the last token is monotone in the last draw, so bisection finds the thresholds
to 2^-46, and sums of their lengths are the probabilities. Under shared noise it is a function of the token that each
position's noise picks, and argmax(log pi + g) picks x with probability pi(x). The verifier is a black box: the same
enumeration of a faulty one gives the faulty law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from dcd_core import sampling
from dcd_core.draft import Draft
from dcd_core.verify import Uniforms, Verdict, verify

ACCEPT, REJECT = 2.0**-60, float("inf")
"""Coins that decide whatever the probability is; where the decision is impossible its weight is 0."""
STEPS = 46
LOUD = 1e6
"""Noise that makes its token win whatever the target says."""
NOTHING = 1e-13
"""Probabilities below this are rounding of the bisection."""

Prefix = tuple[int, ...]


@contextmanager
def two_step_draws(needed: bool = True) -> Iterator[mock.Mock]:
    """Inside, the last draw of a few ids is made in two steps, in blocks of two ids, as over a real vocabulary.

    Args:
        needed: False where nothing is drawn by inverse CDF (the shared-noise rule).
    Yields:
        A mock that counts the draws (``call_count``).
    Raises:
        ValueError: at the end, if a draw in two steps is needed and none was made.
    """
    counted = mock.Mock(side_effect=sampling._in_two_steps)
    with mock.patch.multiple(sampling, _SHORT=0, _CHUNK=2, _in_two_steps=counted):
        yield counted
    if needed and not counted.called:
        raise ValueError("no last draw was made in two steps, as those over real vocabularies are")


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
Outcome = tuple[np.ndarray, np.ndarray]
"""One way all rows may go: emitted tokens ``[rows, accepted + 1]`` and the probability of that, ``[rows]``."""


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
    return Draft(tokens, parents, valid, draft.rule, probs, linear=draft.linear, ids=draft.ids)


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


def outcomes(target: torch.Tensor, draft: Draft, siblings: int = 1, judge=verify) -> Iterator[Outcome]:
    """Every way the walk of each row can go by coins and last draws.

    Raises:
        ValueError: a verdict that changes with a number that cannot matter to it.
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
            if (verdict.accepted[real] != accepted).any() or (verdict.tokens[real, accepted] != token).any():
                raise ValueError(f"the last draw changed what was accepted, or token {token} has no interval of it")
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


def noise_outcomes(target: torch.Tensor, draft: Draft, judge=verify) -> Iterator[Outcome]:
    """The same under shared noise: every sequence of tokens that the noise of the positions may pick.

    Positions after the last emitted token do not matter; they pick token 0.
    """
    count, vocab = target.shape[0], target.shape[2]
    depth = int(draft.depths().max()) if draft.nodes else 0
    row = torch.arange(count)
    for picks in itertools.product(range(vocab), repeat=depth + 1):
        noise = torch.zeros(count, draft.nodes + 1, vocab, dtype=target.dtype)
        for position, pick in enumerate(picks):
            noise[:, position, pick] = LOUD
        verdict = judge(target, draft, Uniforms(gumbel=noise))
        probability = torch.ones(count, dtype=torch.float64)
        for accepted, pick in enumerate(picks):
            probability = probability * target[row, verdict.path[:, accepted], pick].exp()
            if not any(picks[accepted + 1 :]):
                ended = verdict.accepted == accepted
                yield verdict.tokens[:, : accepted + 1].numpy(), torch.where(ended, probability, 0.0).numpy()


@dataclass
class Emitted:
    """What was enumerated: the joint law of the first tokens, ``[vocab] * length``, and the branches walked for it."""

    law: np.ndarray
    branches: int


def enumerate_rounds(
    vocab: int,
    length: int,
    drafts: DraftLaw,
    rows: RowsLaw,
    rule: str,
    siblings: int = 1,
    judge=verify,
    table=target_rows,
) -> Emitted:
    """The joint law of the first ``length`` emitted tokens, over as many rounds as they take.

    Args:
        siblings: most children of one node.
        judge, table: the verifier, and what builds its target rows; both are replaced to inject a fault.
    Raises:
        ValueError: see :func:`outcomes`.
    """
    places = [prefix for size in range(length) for prefix in itertools.product(range(vocab), repeat=size)]
    cases = [(prefix, probability, tree) for prefix in places for probability, tree in drafts(prefix)]
    prefixes, weights, trees = (list(column) for column in zip(*cases, strict=True))
    target, draft = table(prefixes, trees, rows), batch_drafts(trees, vocab, rule)
    walked = (
        noise_outcomes(target, draft, judge) if rule == "shared_noise" else outcomes(target, draft, siblings, judge)
    )
    rounds: dict[Prefix, dict[Prefix, float]] = {place: {} for place in places}
    branches = 0
    for tokens, probability in walked:
        for case in np.flatnonzero(probability > 0):
            new, mass = tuple(tokens[case].tolist()), weights[case] * probability[case]
            here = rounds[prefixes[case]]
            here[new] = here.get(new, 0.0) + mass
            branches += 1
    law, reach = np.zeros((vocab,) * length), dict.fromkeys(places, 0.0)
    reach[()] = 1.0
    for prefix in places:  # shorter ones first
        for new, mass in rounds[prefix].items():
            text = prefix + new
            if len(text) >= length:
                law[text[:length]] += reach[prefix] * mass
            else:
                reach[text] += reach[prefix] * mass
    return Emitted(law, branches)


def emitted_law(*arguments, **options) -> np.ndarray:
    """The law alone, ``[vocab] * length``; arguments as for :func:`enumerate_rounds`."""
    return enumerate_rounds(*arguments, **options).law


def product_law(vocab: int, length: int, rows: RowsLaw) -> np.ndarray:
    """What a lossless verifier must emit: the product of the target over the tokens."""
    law = np.ones((vocab,) * length)
    for text in itertools.product(range(vocab), repeat=length):
        for place, token in enumerate(text):
            law[text] *= np.exp(rows(text[:place])[token])
    return law


def delayed(target: torch.Tensor, draft: Draft, noise: Uniforms) -> Verdict:
    """The verdict of SCD's delayed drafting: the row after the last draft comes later, for the rows that accepted
    everything.

    Raises:
        ValueError: a final token that is missing where its row was there, or is given where it was not.
    """
    verdict = verify(target[:, :-1], draft, noise)
    whole = verdict.accepted == draft.nodes
    if (verdict.tokens[whole, -1] != -1).any() or (verdict.tokens[~whole].max(1).values < 0).any():
        raise ValueError("the final token must be missing exactly where everything was accepted")
    late = verify(target[:, -1:], Draft.empty(len(target), "cpu"), Uniforms(final=noise.final[:, -1:]))
    verdict.tokens[:, -1] = torch.where(whole, late.tokens[:, 0], verdict.tokens[:, -1])
    return verdict
