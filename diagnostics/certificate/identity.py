"""Part three of the certificate: on a real pair every method writes the very tokens of vanilla contrastive decoding."""

from __future__ import annotations

from dcd_core.contrast import Target
from dcd_core.decode import Prompt
from dcd_core.methods import METHODS
from diagnostics.certificate.laws import PLAIN, VARIANTS, offers, rules_of, toy_method, toy_settings
from diagnostics.certificate.page import Line
from diagnostics.certificate.pair import Toy
from diagnostics.identity_checks import REFERENCES, Check, Writer, held_against

# names in VARIANTS, each with the cutoff it is tried at (how long drafts may be is the entry script's setting)
REAL_VARIANTS = {PLAIN: 0.0, "tree": 0.0, "lazy": 0.1, "deferred": 0.0}
LOOP_PROMPTS = 2  # the cache-free loop is slow


def planned_checks(toy: Toy, alphas: list[float], prompts: int, methods: list[str]) -> list[Check]:
    """Everything that must be equal: `cd` to the cache-free loop, every method to `cd` or, without a contrast, to `ar`.

    Args:
        toy: what a method offers is tried out on it.
        methods: those that the real pair has all it takes for.
    """
    plan = [Check("cd", "loop", alpha, 0.0, min(LOOP_PROMPTS, prompts)) for alpha in alphas]
    for temperature in (0.0, 1.0):
        for name in methods:
            expected, strengths = ("cd", alphas) if METHODS[name].contrast else ("ar", [0.0])
            for variant in variants_of(name, toy, temperature):
                more = {key: value for key, value in VARIANTS[variant].items() if key != "gamma"}
                cutoff = REAL_VARIANTS[variant]
                plan += [
                    Check(name, expected, alpha, temperature, prompts, more, variant, cutoff) for alpha in strengths
                ]
    return plan


def variants_of(name: str, toy: Toy, temperature: float) -> list[str]:
    """The variants that a method offers at this temperature, greedy or under shared noise; a reference in its plain
    form is held against nothing."""
    rule = "shared_noise" if temperature else "deterministic"
    if temperature and rule not in rules_of(toy_method(name, toy).drafter):
        return []
    found = [] if name in REFERENCES else [PLAIN]
    for variant, cutoff in REAL_VARIANTS.items():
        target = Target(alpha=0.5, temperature=temperature, cutoff=cutoff)
        if variant != PLAIN and offers(name, toy, toy_settings(target, rule, 0, **VARIANTS[variant])):
            found.append(variant)
    return found


def checked(check: Check, prompts: list[Prompt], writer: Writer) -> Line:
    """The line of one check, with the first place where texts part and the gap of the two best scores there."""
    result = held_against(check, prompts[: check.prompts], writer)
    first = "none"
    if result["divergences"]:
        place = result["divergences"][0]
        first = f"{place['prompt_id']}, token {place['position']}, gap {place['gap']:.1e}"
    figures = {
        "alpha": f"{check.alpha:g}" if check.expected != "ar" else "",
        "cutoff": f"{check.cutoff:g}" if check.cutoff else "",
        "decoding": "T = 1, shared noise" if check.temperature else "greedy",
        "prompts": check.prompts,
        "tokens": result["tokens"],
        "equal": result["equal"],
        "part at a near-tie": result["near_ties"],
        "first divergence": first,
    }
    names = {"loop": "the cache-free loop"}
    found = f"{check.found} ({check.variant_name})" if check.variant else check.found
    name = f"{found} = {names.get(check.expected, check.expected)}"
    return Line("identity", name, figures, result["different"] == 0)
