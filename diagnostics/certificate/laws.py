"""Part two of the certificate: the law of texts written by the real loop, for every method, rule, shape and target."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Scorer, Settings, batch_class
from dcd_core.draft import Draft
from dcd_core.drafters.auto import AutoDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.methods import METHODS
from dcd_core.scorers import negative_prompt, three_models
from diagnostics.certificate.g_test import Result, g_test, samples_for
from diagnostics.certificate.page import Line
from diagnostics.certificate.pair import BATCH, ONE_ID, PROMPT, VOCAB, Toy, counted, exact_law, texts
from diagnostics.certificate.restless import TIMES, Restless
from diagnostics.loading import put_together

PLAIN = "chain"
# settings by which no law may change; a method takes part in those that it offers (see `offers`)
VARIANTS = {
    PLAIN: {"gamma": 2},
    "chain, early stop": {"gamma": 3, "stop_below": 0.3},
    "tree": {"gamma": 2, "branch": 2},
    "tree, early stop": {"gamma": 3, "branch": 2, "stop_below": 0.3},
    "lazy": {"gamma": 2, "saving": "lazy"},
    "tree, lazy": {"gamma": 2, "branch": 2, "saving": "lazy"},
    # judged only where a text may end, so that blocks are as long as they can be
    "deferred": {"gamma": 2, "saving": "deferred", "defer_theta": 2.0},
}


@dataclass(frozen=True)
class Aim:
    """A target, the scorers after the expert that it weighs (None: the amateur), and the prompt."""

    target: Target
    contrast: Callable[[Toy], list[Scorer]] | None = None
    prompt: tuple[int, ...] = PROMPT


TARGETS = {
    "alpha .5": Aim(Target.dcd(0.5)),
    "alpha 1, T .8, cutoff .3": Aim(Target.dcd(1.0, temperature=0.8, cutoff=0.3)),
}
# other published targets, for some methods only: the loop does not know which target it serves
OTHER_TARGETS = {
    "Li": Aim(Target.li(0.5, amateur_temperature=0.5)),
    "proxy, three models": Aim(Target.proxy(0.7), lambda toy: three_models(toy.lm, toy.pair.amateur)),
    "negative prompt": Aim(Target.guidance(0.7), lambda toy: negative_prompt(toy.pair.expert, [2, 2, 3])),
    "top-k 4, top-p .9": Aim(Target.dcd(0.5, top_k=4, top_p=0.9)),
}
OTHER_METHODS = ("dcd_eagle3", "dcd_deferred")
# the penalty depends on the prefix, which every drafter and saving handles in its own way: for all methods
PENALISED = {
    "penalty 3": Aim(Target.dcd(0.5, repetition_penalty=3.0), prompt=ONE_ID),
    "penalty 3, cutoff .1": Aim(Target.dcd(0.5, cutoff=0.1, repetition_penalty=3.0), prompt=ONE_ID),
}
LENGTH = 4
"""Tokens of a text: the first, of the prefill, and three more, so that two drafts and their extra token are seen."""
SMALL_BATCHES = (1, 3)
MAIN = (PLAIN, "tree")
"""Variants that are tested at every target and with the larger samples."""


def samples_of(variant: str, quick: bool) -> int:
    """Texts of a test: whole batches, enough to see a total variation distance of .03 (main variants), .05 (others) or
    .22 (quick) if no cell has to be pooled; where a cutoff leaves few cells, two thirds of that."""
    distance = 0.22 if quick else 0.03 if variant in MAIN else 0.05
    return -(-samples_for(VOCAB ** (LENGTH - 1), distance) // BATCH) * BATCH


@dataclass(frozen=True)
class LawCase:
    """One method under one rule, variant and target, by name."""

    method: str
    rule: str
    variant: str
    target: str

    @property
    def title(self) -> str:
        return f"{self.method}, {self.rule}, {self.variant}, {self.target}"

    @property
    def aim(self) -> Aim:
        return (TARGETS | OTHER_TARGETS | PENALISED)[self.target]

    def settings(self, seed: int) -> Settings:
        return toy_settings(self.aim.target, self.rule, seed, **VARIANTS[self.variant])


def toy_settings(target: Target, rule: str, seed: int, **more) -> Settings:
    """Settings for texts of the toy pair."""
    return Settings(target=target, max_new_tokens=LENGTH, seed=seed, rule=rule, **more)


def toy_method(name: str, toy: Toy, aim: Aim | None = None) -> Assembled:
    """A method on the toy pair, by default with the amateur after the expert."""
    contrast = aim.contrast(toy) if aim and aim.contrast else None
    head = toy.dual_input if METHODS[name].reads_amateur else toy.head
    method = put_together(name, toy.pair, head, toy.lm, contrast, toy.amateur_head)
    if isinstance(method.drafter, AutoDrafter):  # which would settle, and by times that it measures
        method.drafter.controllers = [Restless(TIMES, True)]
    return method


def law_cases(toy: Toy, seed: int, quick: bool) -> list[LawCase]:
    """Every method under every rule that it has and in every variant that it offers.

    The quick certificate takes the plain form by every rule, the others by the rules that a drafter has unless told
    otherwise, and leaves out early stops.
    """
    found = []
    for name in METHODS:
        drafter = toy_method(name, toy).drafter
        for rule in rules_of(drafter):
            for variant, more in VARIANTS.items():
                usual = (drafter.default_rule, drafter.usual_rule(Settings(**more).shape))
                if quick and variant != PLAIN and ("stop" in variant or rule not in usual):
                    continue
                cases = [LawCase(name, rule, variant, target) for target in targets_of(variant, quick)]
                # plain chains are not asked for: a rule that a drafter names must work, and an error there is one
                found += [case for case in cases if variant == PLAIN or offers(name, toy, case.settings(seed))]
    for name in OTHER_METHODS[: 1 if quick else None]:
        rule = toy_method(name, toy).drafter.default_rule
        found += [LawCase(name, rule, PLAIN, target) for target in OTHER_TARGETS]
    return found + penalised_cases(toy, seed, quick)


def penalised_cases(toy: Toy, seed: int, quick: bool) -> list[LawCase]:
    """Every method in every variant that it offers but early stops, by its usual rule; the quick certificate takes
    plain chains, and the other variants of one method."""
    found, (plain, cut) = [], PENALISED
    for name in METHODS:
        drafter = toy_method(name, toy).drafter
        for variant, more in VARIANTS.items():
            if "stop" in variant or (quick and variant != PLAIN and name != OTHER_METHODS[0]):
                continue
            case = LawCase(
                name, drafter.usual_rule(Settings(**more).shape), variant, cut if "lazy" in variant else plain
            )
            if variant == PLAIN or offers(name, toy, case.settings(seed)):
                found.append(case)
    return found


def targets_of(variant: str, quick: bool) -> list[str]:
    """The targets at which a variant is tested: every one for the main variants, else the one without a cutoff, or for
    lazy judging, which needs it, the one with."""
    if variant == PLAIN or (variant in MAIN and not quick):
        return list(TARGETS)
    return list(TARGETS)[1:] if "lazy" in variant else list(TARGETS)[:1]


def rules_of(drafter: Drafter) -> tuple[str, ...]:
    """The rules by which a drafter can be judged; without drafts two of the three are the same."""
    return ("deterministic", "shared_noise") if type(drafter) is Drafter else drafter.rules


def offers(name: str, toy: Toy, settings: Settings) -> bool:
    """Whether a method can do what the settings ask for beyond plain chains, and does something else than without."""
    method = toy_method(name, toy)
    try:
        placed = batch_class(method, settings)
        drafts = drafts_of(method, settings)
    except UserError:
        return False
    if settings.saving != "none" and placed is batch_class(method, replace(settings, saving="none")):
        return False
    if settings.branch > 1 and all(draft.linear for draft in drafts):
        return False
    if settings.stop_below:
        longer = drafts_of(toy_method(name, toy), replace(settings, stop_below=0.0))
        return bool(drafts) and bool(drafts[0].valid.sum() < longer[0].valid.sum())
    return True


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

    def __init__(self, toy: Toy, seed: int):
        self.toy, self.seed = toy, seed
        self.law = functools.cache(self._law)

    def _law(self, contrast: bool, aim: Aim) -> np.ndarray:
        scorers = [Scorer(self.toy.pair.expert)]
        if contrast:
            scorers += aim.contrast(self.toy) if aim.contrast else [Scorer(self.toy.pair.amateur)]
        return exact_law(scorers, aim.target, LENGTH, aim.prompt)

    def tested(self, found: np.ndarray, name: str, aim: Aim) -> Result:
        """The test of the next three tokens with the smaller p of that and the first token's."""
        law = self.law(METHODS[name].contrast, aim)
        first = g_test(counted(found[:, :1]), law.sum(axis=(1, 2, 3)))
        others = g_test(counted(found[:, 1:]), law.sum(axis=0))
        return replace(others, p=min(first.p, others.p))

    def line(self, case: LawCase, samples: int, alone: int) -> Line:
        """Samples in batches of 256, their law, and the first ``alone`` rows again in small batches."""
        settings = case.settings(self.seed)

        def written(rows: int, batch: int) -> np.ndarray:
            return texts(toy_method(case.method, self.toy, case.aim), settings, rows, batch, case.aim.prompt)

        found = written(samples, BATCH)
        result = self.tested(found, case.method, case.aim)
        same = [(written(alone, batch) == found[:alone]).all(axis=1) for batch in SMALL_BATCHES]
        equal = int(np.all(same, axis=0).sum())
        figures = {
            "rule": case.rule,
            "drafts": case.variant,
            "target": case.target,
            "samples": result.samples,
            "cells": result.cells,
            "p": result.p,
            "TV below": result.tv_seen,
            "rows alone": f"{equal} of {alone} the same",
        }
        return Line("laws", case.method, figures, result.passed and equal == alone)
