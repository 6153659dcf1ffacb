"""Part two of the certificate: the law of texts written by the real loop, for every method, rule, shape and target."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Scorer, Settings
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.methods import METHODS
from diagnostics.certificate_page import Line
from diagnostics.g_test import Result, g_test, samples_for
from diagnostics.loading import put_together
from diagnostics.toy_pair import BATCH, VOCAB, Toy, counted, exact_law, texts

PLAIN = "chain"
# settings by which no law may change; a method takes part in those that it offers (see `offers`)
VARIANTS = {
    PLAIN: {"gamma": 2},
    "chain, early stop": {"gamma": 3, "stop_below": 0.3},
    "tree": {"gamma": 2, "branch": 2},
    "tree, early stop": {"gamma": 3, "branch": 2, "stop_below": 0.3},
}
TARGETS = {
    "alpha .5": Target(alpha=0.5),
    "alpha 1, T .8, cutoff .3": Target(alpha=1.0, temperature=0.8, cutoff=0.3),
}
LENGTH = 4
"""Tokens of a text: the first, of the prefill, and three more, so that two drafts and their extra token are seen."""
SMALL_BATCHES = (1, 3)
DISTANCE = {True: 0.18, False: 0.03}
"""The total variation distance that a test is large enough for, quick or not."""


def samples_of(quick: bool) -> int:
    """Texts of a test: whole batches, enough to see :data:`DISTANCE` if no cell has to be pooled."""
    return -(-samples_for(VOCAB ** (LENGTH - 1), DISTANCE[quick]) // BATCH) * BATCH


@dataclass(frozen=True)
class LawCase:
    """One method under one rule, shape and target, by name."""

    method: str
    rule: str
    variant: str
    target: str

    @property
    def title(self) -> str:
        return f"{self.method}, {self.rule}, {self.variant}, {self.target}"

    def settings(self, seed: int) -> Settings:
        return toy_settings(TARGETS[self.target], self.rule, seed, **VARIANTS[self.variant])


def toy_settings(target: Target, rule: str, seed: int, **more) -> Settings:
    """Settings for texts of the toy pair."""
    return Settings(target=target, max_new_tokens=LENGTH, seed=seed, rule=rule, **more)


def toy_method(name: str, toy: Toy) -> Assembled:
    """A method on the toy pair."""
    return put_together(name, toy.pair, toy.head, toy.lm)


def law_cases(toy: Toy, seed: int, quick: bool) -> list[LawCase]:
    """Every method under every rule that it has and in every variant that it offers, at every target.

    Where a draft stops does not depend on the target, so one target is enough for early stops; the quick certificate
    leaves them out, and takes one target for everything but chains.
    """
    found = []
    for name in METHODS:
        for rule in rules_of(toy_method(name, toy).drafter):
            for variant, settings in VARIANTS.items():
                stops = "stop_below" in settings
                if stops and quick:
                    continue
                # chains are not asked for: a rule that a drafter names must work, and an error there is one
                if variant != PLAIN and not offers(name, toy, toy_settings(Target(), rule, seed, **settings)):
                    continue
                one = stops or (quick and variant != PLAIN)
                found += [LawCase(name, rule, variant, target) for target in list(TARGETS)[-1 if one else 0 :]]
    return found


def rules_of(drafter: Drafter) -> tuple[str, ...]:
    """The rules by which a drafter can be judged; without drafts two of the three are the same."""
    return ("deterministic", "shared_noise") if type(drafter) is Drafter else drafter.rules


def offers(name: str, toy: Toy, settings: Settings) -> bool:
    """Whether a method can do what the settings ask for: trees with more than one branch, drafts that stop early."""
    try:
        drafts = drafts_of(toy_method(name, toy), settings)
    except UserError:
        return False
    if settings.branch > 1 and all(draft.linear for draft in drafts):
        return False
    if settings.stop_below and drafts:
        longer = drafts_of(toy_method(name, toy), replace(settings, stop_below=0.0))
        return bool(drafts[0].valid.sum() < longer[0].valid.sum())
    return not settings.stop_below


def drafts_of(method: Assembled, settings: Settings, rows: int = 16) -> list[Draft]:
    """The drafts that a method proposes for some rows."""
    seen: list[Draft] = []

    class Watched(type(method.drafter)):
        def propose(self, root, noise, shape):
            seen.append(super().propose(root, noise, shape))
            return seen[-1]

    method.drafter.__class__ = Watched
    texts(method, settings, rows)
    return seen


class Laws:
    """Samples of the toy pair's texts, held against their exact laws."""

    def __init__(self, toy: Toy, seed: int, samples: int, alone: int):
        """
        Args:
            samples: texts of a test.
            alone: how many of them are also written in small batches.
        """
        self.toy, self.seed, self.samples, self.alone = toy, seed, samples, alone
        self.law = functools.cache(self._law)

    def _law(self, contrast: bool, target: Target) -> np.ndarray:
        models = [self.toy.pair.expert, self.toy.pair.amateur][: 1 + contrast]
        return exact_law([Scorer(model) for model in models], target, LENGTH)

    def tested(self, found: np.ndarray, name: str, target: Target) -> Result:
        """The test of the next three tokens with the smaller p of that and the first token's."""
        law = self.law(METHODS[name].contrast, target)
        first = g_test(counted(found[:, :1]), law.sum(axis=(1, 2, 3)))
        others = g_test(counted(found[:, 1:]), law.sum(axis=0))
        return replace(others, p=min(first.p, others.p))

    def line(self, case: LawCase) -> Line:
        """Samples in batches of 256, their law, and the same rows in small batches."""
        settings = case.settings(self.seed)
        found = texts(toy_method(case.method, self.toy), settings, self.samples)
        result = self.tested(found, case.method, TARGETS[case.target])
        same = [
            (texts(toy_method(case.method, self.toy), settings, self.alone, batch) == found[: self.alone]).all(axis=1)
            for batch in SMALL_BATCHES
        ]
        equal = int(np.all(same, axis=0).sum())
        figures = {
            "rule": case.rule,
            "drafts": case.variant,
            "target": case.target,
            "samples": result.samples,
            "cells": result.cells,
            "p": result.p,
            "TV below": result.tv_seen,
            "rows alone": f"{equal} of {self.alone} the same",
        }
        return Line("laws", case.method, figures, result.passed and equal == self.alone)
