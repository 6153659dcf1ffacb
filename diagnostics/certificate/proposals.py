"""A tabular world (expert, amateur, drafter over a few ids) and every kind of draft that is made in it."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from dcd_core.contrast import Target, target_log_probs
from diagnostics.certificate.enumeration import DraftLaw, Emitted, Node, enumerate_rounds, product_law

EXACT = 1e-10
"""Largest error of the enumeration of a lossless verifier."""
DUAL_ALPHA = 0.5
"""Contrast strength at which the dual drafter of a world recombines, whatever the target."""
SHIFT = 1.5
"""Logits of a world are log-probabilities and this constant, so that scores have both signs under a penalty."""
VISIBLE = 1e-3
"""A fault must move some probability by at least this much."""


class World:
    """Tabular expert p, amateur q and drafter e over a few ids, drawn from a Dirichlet seeded by the prefix.

    Args:
        draft_ids: the drafter's own vocabulary, None for all ids.
        drafter: what e is near to: the ``expert``; the ``contrast`` itself (cross_alpha); or ``dual``, the
            recombination of a drafter near the expert and one near the amateur.
    """

    def __init__(self, vocab: int, target: Target, draft_ids: tuple[int, ...] | None = None, drafter: str = "expert"):
        self.vocab, self.target, self.draft_ids, self.drafter = vocab, target, draft_ids, drafter
        self.rows = functools.cache(self._rows)

    @staticmethod
    @functools.cache
    def table(model: str, prefix: tuple[int, ...], vocab: int) -> np.ndarray:
        seed = [ord(model), vocab, len(prefix), *prefix]
        return np.random.default_rng(seed).dirichlet(np.full(vocab, 0.7))

    def p(self, prefix) -> np.ndarray:
        return self.table("p", prefix, self.vocab)

    def q(self, prefix) -> np.ndarray:
        return self.table("q", prefix, self.vocab)

    def e(self, prefix) -> np.ndarray:
        """Aligned with its model, as a drafter is; 0 outside a reduced draft vocabulary."""
        near = np.exp(self.rows(prefix)) if self.drafter == "contrast" else self.p(prefix)
        law = 0.5 * near + 0.5 * self.table("e", prefix, self.vocab)
        if self.drafter == "dual":
            f = 0.5 * self.q(prefix) + 0.5 * self.table("f", prefix, self.vocab)
            law = law ** (1 + DUAL_ALPHA) * f**-DUAL_ALPHA
        if self.draft_ids is not None:
            law = law * np.isin(np.arange(self.vocab), self.draft_ids)
        return law / law.sum()

    def _rows(self, prefix) -> np.ndarray:
        """The target after a prefix, by the shipped function in fp64."""
        names = "pqr"[: len(self.target.weights or "pq")]
        models = [torch.from_numpy(np.log(self.table(name, prefix, self.vocab)) + SHIFT) for name in names]
        seen = torch.from_numpy(np.isin(np.arange(self.vocab), prefix))
        return target_log_probs(models, self.target, seen).numpy()


TARGETS = {
    "alpha .3": Target(alpha=0.3),
    "alpha .5, cutoff": Target(alpha=0.5, cutoff=0.3),
    "alpha .5, T .7": Target(alpha=0.5, temperature=0.7),
    "O'Brien, top-p": Target.obrien(cutoff=0.05, top_p=0.7),
    "Li": Target.li(0.8, 0.5, cutoff=0.05),
    "CoS, top-k": Target.cos(0.3, 0.8, top_k=2),
    "three models": Target.proxy(0.7),
    "alpha .5, penalty 2": Target(alpha=0.5, repetition_penalty=2.0),
}


# ---- kinds of drafts -------------------------------------------------------------------------------------------------


def sampled_chain(world: World, gamma: int, stop=None, drop: bool = False):
    """Every path of ``gamma`` tokens drawn one after the other from e.

    ``stop(law, token)`` ends the draft early after that token, or before it with ``drop``.
    """

    def drafts(prefix):
        found: dict[tuple[int, ...], tuple[float, list[Node]]] = {}
        for path in itertools.product(range(world.vocab), repeat=gamma):
            probability, tree, text, drawn = 1.0, [], prefix, 0
            for token in path:
                law = world.e(text)
                probability, drawn = probability * law[token], drawn + 1
                ended = stop is not None and stop(law, token)
                if not (ended and drop):
                    tree.append(Node(token, len(tree) - 1, law))
                    text = (*text, token)
                if ended:
                    break
            if probability > 0:
                found[path[:drawn]] = (probability, tree)
        return list(found.values())

    return drafts


def greedy_chain(world: World, gamma: int, with_law: bool = False):
    """The drafter's argmax, ``gamma`` times; ``with_law`` declares it as sampled, which it is not."""

    def drafts(prefix):
        tree, text = [], prefix
        for _ in range(gamma):
            law = world.e(text)
            tree.append(Node(int(law.argmax()), len(tree) - 1, law if with_law else None))
            text = (*text, tree[-1].token)
        return [(1.0, tree)]

    return drafts


def ngram_like(world: World, gamma: int):
    """Any function of the text, of any length from 0 to gamma; also tokens that the drafter would never choose."""

    def drafts(prefix):
        rng = np.random.default_rng([9, len(prefix), *prefix])
        tokens = rng.integers(0, world.vocab, rng.integers(0, gamma + 1)).tolist()
        return [(1.0, [Node(token, place - 1) for place, token in enumerate(tokens)])]

    return drafts


def top_tree(world: World):
    """The two best tokens of e, and the two best after the better of them."""

    def drafts(prefix):
        best = np.argsort(-world.e(prefix), kind="stable")[:2].tolist()
        below = np.argsort(-world.e((*prefix, best[0])), kind="stable")[:2].tolist()
        return [(1.0, [Node(best[0]), Node(best[1]), Node(below[0], 0), Node(below[1], 0)])]

    return drafts


def by_the_text(world: World):
    """No draft, n-grams, a greedy chain of 2 or the tree of :func:`top_tree`, whichever the text so far leads to."""
    sources = (lambda _: [(1.0, [])], ngram_like(world, 2), greedy_chain(world, 2), top_tree(world))

    def drafts(prefix):
        return sources[np.random.default_rng([8, len(prefix), *prefix]).integers(len(sources))](prefix)

    return drafts


def without(law: np.ndarray, token: int) -> np.ndarray:
    """What the next sibling is drawn from when this one has been drawn."""
    left = law * (np.arange(len(law)) != token)
    return left / left.sum()


def siblings_without_replacement(world: World, arrange=lambda law, first, second: (first, second)):
    """Two children of the root drawn without replacement from e, and two more below the first.

    ``arrange`` may change their order once they are drawn, as no drafter may.
    """

    def pairs(law):
        for first, second in itertools.permutations(range(world.vocab), 2):
            probability = law[first] * without(law, first)[second]
            if probability > 0:
                yield probability, *arrange(law, first, second)

    def drafts(prefix):
        found = []
        top = world.e(prefix)
        for probability, first, second in pairs(top):
            low = world.e((*prefix, first))
            for below, third, fourth in pairs(low):
                tree = [Node(first, -1, top), Node(second, -1, without(top, first))]
                tree += [Node(third, 0, low), Node(fourth, 0, without(low, third))]
                found.append((probability * below, tree))
        return found

    return drafts


def siblings_with_replacement(world: World, count: int = 2):
    """Children of the root drawn independently from e, so the same token may come twice [SpecInfer]."""

    def drafts(prefix):
        law = world.e(prefix)
        return [
            (float(np.prod(law[list(tokens)])), [Node(token, -1, law) for token in tokens])
            for tokens in itertools.product(range(world.vocab), repeat=count)
        ]

    return drafts


def held_against_target(
    world: World, length: int, drafts: DraftLaw, rule: str, siblings: int = 1, rows=None, **fault
) -> tuple[float, Emitted]:
    """Largest difference between the law of the emitted tokens and the product of the target, and what was walked.

    Args:
        rows, fault: a wrong target, ``judge`` or ``table``, to see it found (:func:`enumerate_rounds`).
    Raises:
        ValueError: probabilities that do not add up to 1.
    """
    found = enumerate_rounds(world.vocab, length, drafts, rows or world.rows, rule, siblings, **fault)
    if not abs(found.law.sum() - 1) <= 1e-11:  # NaN too
        raise ValueError(f"the probabilities of all branches add up to {found.law.sum()}, not to 1")
    return float(np.abs(found.law - product_law(world.vocab, length, world.rows)).max()), found


def error(*arguments, **options) -> float:
    """The difference alone; arguments as for :func:`held_against_target`."""
    return held_against_target(*arguments, **options)[0]
