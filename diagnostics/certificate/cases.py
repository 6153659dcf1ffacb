"""Part one of the certificate: exact enumeration of every rule with every kind of draft."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dcd_core.contrast import Target
from dcd_core.verify import verify
from diagnostics.certificate import proposals
from diagnostics.certificate.enumeration import DraftLaw, delayed, two_step_draws
from diagnostics.certificate.page import Line
from diagnostics.certificate.proposals import EXACT, SHIFT, World

TARGETS = {"alpha 0": Target(alpha=0.0)} | proposals.TARGETS
QUICK_TARGETS = {name: proposals.TARGETS[name] for name in ("alpha .3", "alpha .5, cutoff")}


@dataclass(frozen=True)
class Case:
    """One rule with one kind of draft.

    Args:
        drafts: every draft that may be proposed in a world.
        ids: size of the vocabulary, small and in the full certificate.
        length: tokens of the law; beyond the longest draft, else its extra token is never seen.
        siblings: most children of one node.
        draft_ids: the drafter's own vocabulary, None for all ids.
        drafter: what it is near to, see :class:`diagnostics.certificate.proposals.World`.
    """

    name: str
    rule: str
    drafts: Callable[[World], DraftLaw]
    ids: tuple[int, int]
    length: int
    siblings: int = 1
    draft_ids: tuple[int, ...] | None = None
    drafter: str = "expert"
    judge: Callable = verify

    @property
    def title(self) -> str:
        return f"{self.name}, rule {self.rule}"


def unlikely(law: np.ndarray, token: int) -> bool:
    """A stop that depends on the token that was drawn, which then stays in the draft."""
    return law[token] < 0.4


def unsure(law: np.ndarray, token: int) -> bool:
    """A stop that depends on the drafter's row alone."""
    return law.max() < 0.6


def _chain(gamma: int, **options):
    return functools.partial(proposals.sampled_chain, gamma=gamma, **options)


def _greedy(gamma: int):
    return functools.partial(proposals.greedy_chain, gamma=gamma)


TOP = proposals.top_tree
CONTROLLED = "nothing, a chain or a tree, as a controller chooses by the text (auto)"
NGRAM = functools.partial(proposals.ngram_like, gamma=3)
CASES = (
    Case("sampled chain of 2", "sampled", _chain(2), (4, 8), 3),
    Case("sampled chain of 3", "sampled", _chain(3), (3, 4), 4),
    Case("sampled chain, reduced draft vocabulary", "sampled", _chain(2), (4, 8), 3, draft_ids=(0, 2)),
    Case("sampled chain, contrast-aware drafter (cross_alpha)", "sampled", _chain(2), (4, 8), 3, drafter="contrast"),
    Case(
        "sampled chain of two recombined drafters (dual)",
        "sampled",
        _chain(2),
        (4, 8),
        3,
        draft_ids=(0, 2),
        drafter="dual",
    ),
    Case("sampled chain, last row delayed (SCD)", "sampled", _chain(2), (4, 6), 3, judge=delayed),
    Case("sampled chain that stops after an unlikely token", "sampled", _chain(2, stop=unlikely), (3, 6), 3),
    Case("sampled chain that stops when unsure", "sampled", _chain(2, stop=unsure), (3, 6), 3),
    Case("tree, siblings without replacement", "sampled", proposals.siblings_without_replacement, (3, 4), 3, 2),
    Case("siblings with replacement", "sampled", proposals.siblings_with_replacement, (4, 8), 2, 2),
    Case("greedy chain of 3", "deterministic", _greedy(3), (5, 8), 4),
    Case("greedy chain, reduced draft vocabulary", "deterministic", _greedy(2), (4, 8), 3, draft_ids=(0, 2)),
    Case("tree of a contrast-aware drafter (cross_alpha)", "deterministic", TOP, (4, 8), 3, 2, drafter="contrast"),
    Case("tree of two recombined drafters (dual)", "deterministic", TOP, (4, 8), 3, 2, drafter="dual"),
    Case("greedy chain, last row delayed (SCD)", "deterministic", _greedy(2), (4, 8), 3, judge=delayed),
    Case("n-gram chain of 0 to 3", "deterministic", NGRAM, (5, 8), 4),
    Case("tree of the likeliest siblings", "deterministic", TOP, (5, 8), 3, 2),
    Case(CONTROLLED, "deterministic", proposals.by_the_text, (5, 8), 3, 2),
    Case("sampled chain of 2", "deterministic", _chain(2), (3, 6), 3),
    Case("sampled chain of 2", "shared_noise", _chain(2), (3, 5), 3),
    Case("greedy chain of 3", "shared_noise", _greedy(3), (3, 5), 4),
    Case(
        "greedy chain, contrast-aware drafter (cross_alpha)", "shared_noise", _greedy(2), (3, 5), 3, drafter="contrast"
    ),
    Case("greedy chain of two recombined drafters (dual)", "shared_noise", _greedy(2), (3, 5), 3, drafter="dual"),
    Case("n-gram chain of 0 to 3", "shared_noise", NGRAM, (3, 5), 4),
    Case("tree of the likeliest siblings", "shared_noise", TOP, (3, 6), 3),
    Case(CONTROLLED, "shared_noise", proposals.by_the_text, (3, 6), 3),
)


def enumerated(case: Case, quick: bool) -> Line:
    """The line of one case: the largest error over all targets, and the branches walked for them."""
    worst, branches, targets = 0.0, 0, QUICK_TARGETS if quick else TARGETS
    ids = case.ids[0 if quick else 1]
    try:
        with two_step_draws(needed=case.rule != "shared_noise") as draws:
            for target in targets.values():
                world = World(ids, target, case.draft_ids, case.drafter)
                difference, found = proposals.held_against_target(
                    world, case.length, case.drafts(world), case.rule, case.siblings, judge=case.judge
                )
                worst, branches = max(worst, difference), branches + found.branches
    except ValueError as problem:
        return Line("exact", case.title, {"ids": ids, "tokens": case.length}, False, str(problem))
    figures = {"ids": ids, "tokens": case.length, "targets": len(targets), "branches": branches}
    figures |= {"two-step draws": draws.call_count, "error": worst}
    return Line("exact", case.title, figures, worst < EXACT)


def formula(quick: bool) -> Line:
    """The line of the target itself: the shipped function against the published formulas written out in numpy, so that
    what everything else is held against is what was published."""
    differences, targets = [], QUICK_TARGETS if quick else TARGETS
    for target in targets.values():
        world = World(5, target)
        for prefix in itertools.chain.from_iterable(itertools.product(range(5), repeat=size) for size in range(3)):
            models = [world.table(name, prefix, 5) for name in "pqr"[: len(target.weights or "pq")]]
            differences.append(np.abs(np.exp(world.rows(prefix)) - written_out(target, models, prefix)).max())
    worst = float(np.max(differences))
    if not np.isfinite(worst):
        return Line("exact", "target", {"ids": 5}, False, "probabilities that are no numbers")
    figures = {"ids": 5, "targets": len(targets), "branches": len(differences), "error": worst}
    return Line("exact", "target: its published formula, on the plausible set, truncated", figures, worst < 1e-12)


def written_out(target: Target, models: list[np.ndarray], prefix: tuple[int, ...]) -> np.ndarray:
    """The law of a target from its models' laws, expert first: p^(1+alpha) q^-alpha [DCD, Eq. 1], or a product of
    tempered models to their weights; scores of ids in the prefix penalised [Keskar et al. 2019]; on ids of at least the
    cutoff's part of the expert's best; tempered; then the best k of it, and of those the fewest that hold the share p.
    A penalty is for models that are not tempered themselves, whose logits are known but for that."""
    weights = target.weights or (1 + target.alpha, -target.alpha)
    law = np.ones_like(models[0])
    for model, weight, temperature in zip(models, weights, target.temperatures or (1,) * len(models), strict=True):
        tempered = model ** (1 / temperature)
        law = law * (tempered / tempered.sum()) ** weight
    score, penalty = np.log(law) + SHIFT * sum(weights), target.repetition_penalty
    score[list(set(prefix))] *= np.where(score > 0, 1 / penalty, penalty)[list(set(prefix))]
    law = np.exp(score)
    law = law ** (1 / target.temperature) * (models[0] >= target.cutoff * models[0].max())
    order = np.argsort(-law, kind="stable")[: target.top_k or None]
    shares = np.cumsum(law[order]) / law[order].sum()
    kept = order[: 1 + np.searchsorted(shares, target.top_p)] if target.top_p < 1 else order
    law = law * np.isin(np.arange(len(law)), kept)
    return law / law.sum()
