"""Part three of the certificate: on a real pair every method writes the very tokens of vanilla contrastive decoding."""

from __future__ import annotations

from dcd_core.contrast import Target
from dcd_core.decode import Prompt
from dcd_core.methods import METHODS
from diagnostics.certificate_laws import VARIANTS, offers, rules_of, toy_method, toy_settings
from diagnostics.certificate_page import Line
from diagnostics.identity_checks import REFERENCES, Check, Writer, held_against
from diagnostics.toy_pair import Toy

REAL_VARIANTS = ("chain", "tree")  # names in VARIANTS; how long drafts may be is the entry script's setting
LOOP_PROMPTS = 2  # the cache-free loop is slow


def planned_checks(toy: Toy, alphas: list[float], prompts: int, head: bool) -> list[Check]:
    """Everything that must be equal: `cd` to the cache-free loop, every method to `cd` or, without a contrast, to `ar`.

    Args:
        toy: what a method offers is tried out on it.
        head: whether there is one for the real pair; the methods that need it are left out otherwise.
    """
    plan = [Check("cd", "loop", alpha, 0.0, min(LOOP_PROMPTS, prompts)) for alpha in alphas]
    for temperature in (0.0, 1.0):
        for name, method in METHODS.items():
            if name in REFERENCES or (method.needs_head and not head):
                continue
            expected, strengths = ("cd", alphas) if method.contrast else ("ar", [0.0])
            for variant, more in variants_of(name, toy, temperature):
                plan += [Check(name, expected, alpha, temperature, prompts, more, variant) for alpha in strengths]
    return plan


def variants_of(name: str, toy: Toy, temperature: float) -> list[tuple[str, dict]]:
    """Name and settings of the variants that a method offers at this temperature, greedy or under shared noise."""
    rule, found = "shared_noise" if temperature else "deterministic", []
    if rule in rules_of(toy_method(name, toy).drafter):
        for variant in REAL_VARIANTS:
            if offers(name, toy, toy_settings(Target(temperature=temperature), rule, 0, **VARIANTS[variant])):
                more = {key: value for key, value in VARIANTS[variant].items() if key != "gamma"}
                found.append((variant, more))
    return found


def checked(check: Check, prompts: list[Prompt], writer: Writer) -> Line:
    """The line of one check, with the first place where texts part and the gap of the two best scores there."""
    result = held_against(check, prompts[: check.prompts], writer)
    first = "none"
    if result["divergences"]:
        place = result["divergences"][0]
        first = f"{place['prompt_id']}, token {place['position']}, gap {place['gap']:.1e}"
    figures = {
        "drafts": check.variant_name,
        "alpha": f"{check.alpha:g}" if check.expected != "ar" else "",
        "decoding": "T = 1, shared noise" if check.temperature else "greedy",
        "prompts": check.prompts,
        "tokens": result["tokens"],
        "equal": result["equal"],
        "part at a near-tie": result["near_ties"],
        "first divergence": first,
    }
    names = {"loop": "the cache-free loop"}
    name = f"{check.found} = {names.get(check.expected, check.expected)}"
    return Line("identity", name, figures, result["different"] == 0)
