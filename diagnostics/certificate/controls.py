"""Part four of the certificate: negative controls. A fault must be caught by the test that the shipped loop passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from dcd_core.contrast import Target
from dcd_core.methods import METHODS
from dcd_core.verify import verify
from diagnostics.certificate import faults
from diagnostics.certificate.cases import CASES, CONTROLLED, Case, enumerated
from diagnostics.certificate.faults import Fault, in_batch, in_drafts
from diagnostics.certificate.g_test import FAILS_BELOW
from diagnostics.certificate.laws import Aim, Laws, offers, rules_of, toy_method, toy_settings
from diagnostics.certificate.page import Line
from diagnostics.certificate.pair import ONE_ID, Toy, texts

AIM = Aim(Target.dcd(1.0))
REPEATING = Aim(Target.dcd(1.0, repetition_penalty=3.0), prompt=ONE_ID)
SIBLINGS = {"gamma": 1, "branch": 3}


@dataclass(frozen=True)
class Control:
    """One fault and the run that has it.

    Args:
        method: a name in METHODS, or "" for the first that offers the settings.
        aim: the target and the prompt.
    """

    name: str
    fault: Fault
    method: str = "dcd_eagle3"
    rule: str = "sampled"
    settings: dict = field(default_factory=lambda: {"gamma": 2})
    aim: Aim = AIM


CONTROLS = (
    Control("argmax drafts judged as sampled", faults.argmax_judged_as_sampled),
    Control("extra token from the expert", in_batch(faults.BonusFromExpert), settings={"gamma": 1}),
    Control("residual from the expert", in_batch(faults.ResidualFromExpert)),
    Control("sign of alpha flipped", faults.flipped_alpha),
    Control("amateur one token late", in_batch(faults.AmateurLate)),
    Control(
        "stopping token dropped", in_drafts(faults.without_stopping_token), settings={"gamma": 2, "stop_below": 0.3}
    ),
    Control("siblings re-sorted after sampling", in_drafts(faults.resorted_siblings), "", settings=SIBLINGS),
    Control("siblings pruned after sampling", in_drafts(faults.pruned_siblings), "", settings=SIBLINGS),
    Control("roles swapped in CoS", in_batch(faults.RolesSwapped), "cos"),
    Control("penalty of the root's prefix, without the node's path", faults.root_penalised, aim=REPEATING),
    Control("rejected tokens stay in the penalty's prefix", faults.rejected_penalised, "dcd_deferred", aim=REPEATING),
)


def method_of(control: Control, toy: Toy, seed: int) -> str | None:
    """The method that a control runs; None where there is none yet."""
    if control.method:
        return control.method if control.method in METHODS else None
    settings = toy_settings(control.aim.target, control.rule, seed, **control.settings)
    for name, method in METHODS.items():
        fits = method.contrast and control.rule in rules_of(toy_method(name, toy).drafter)
        if fits and offers(name, toy, settings):
            return name
    return None


def controlled(control: Control, laws: Laws, samples: int) -> Line:
    """The run with its fault, which must fail the test, and the same run without, which must pass it."""
    name = method_of(control, laws.toy, laws.seed)
    if name is None:
        wanted = control.method or f"any method with {control.rule} drafts of {control.settings}"
        return Line("controls", control.name, note=f"needs {wanted}, which is not in METHODS")
    aim, prompt = control.aim, control.aim.prompt
    settings = toy_settings(aim.target, control.rule, laws.seed, **control.settings)
    with control.fault(toy_method(name, laws.toy), settings) as (method, wrong):
        faulty = laws.tested(texts(method, wrong, samples, prompt=prompt), name, aim)
    clean = laws.tested(texts(toy_method(name, laws.toy), settings, samples, prompt=prompt), name, aim)
    shape = ", ".join(f"{key} {value}" for key, value in control.settings.items())
    figures = {
        "method": name,
        "rule": control.rule,
        "drafts": shape,
        "samples": faulty.samples,
        "p with the fault": faulty.p,
        "p without": clean.p,
    }
    note = "" if faulty.p < FAILS_BELOW else "the fault was not caught"
    return Line("controls", control.name, figures, faulty.p < FAILS_BELOW and clean.passed, note)


@dataclass(frozen=True)
class ExactControl:
    """One fault of the verifier and the case whose enumeration must find it.

    Args:
        fault: what is patched; or
        judge: what judges in the verifier's place.
    """

    name: str
    case: Case
    fault: Callable[[], AbstractContextManager] = nullcontext
    judge: Callable = verify


EXACT_CONTROLS = tuple(
    ExactControl(f"two-step draw: {name}, {case.name}", case, faults.in_two_steps(fault))
    for name, fault in (("next block", faults.next_block), ("sum before the block kept", faults.sum_before_kept))
    for case in CASES
    if case.name in ("sampled chain of 2", "siblings with replacement") and case.rule == "sampled"
) + tuple(
    ExactControl("a controller that peeks at the target", case, judge=faults.peeking)
    for case in CASES
    if case.name == CONTROLLED and case.rule == "deterministic"
)
"""The loop's laws are of six ids, which are drawn in one step; the draw of real vocabularies is broken here."""


def enumerated_with_fault(control: ExactControl) -> Line:
    """The small enumeration with the fault, which must fail, and without, which must pass."""
    with control.fault():
        faulty = enumerated(replace(control.case, judge=control.judge), quick=True)
    clean = enumerated(control.case, quick=True)
    caught = faulty.passed is False
    figures = {"rule": control.case.rule, "drafts": control.case.name}
    figures |= {"error with the fault": faulty.figures.get("error", faulty.note)}
    figures |= {"error without": clean.figures.get("error", clean.note)}
    note = "" if caught else "the fault was not caught"
    return Line("controls", control.name, figures, bool(caught and clean.passed), note)
