"""Methods take turns on one prompt after another; each answer is kept with its rounds and what it agrees with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Prompt, Settings, decode
from dcd_core.decode_types import SAVINGS
from dcd_core.files import content_hash
from dcd_core.methods import METHODS, nobody
from dcd_core.models import Pair
from dcd_core.progress import progress
from diagnostics.agreement import compare
from diagnostics.forms import read_shape, split_label
from diagnostics.parts import Parts
from diagnostics.round_summary import BASELINE, run_name


@dataclass(frozen=True)
class Entry:
    """A method with further settings, so that several forms of it can meet in one run.

    Written ``method`` or ``method@form+form``, e.g. ``dcd_eagle3@5x4:10+deferred``. Forms: ``DEPTHxBRANCH:NODES`` (a
    tree; ``DEPTH`` alone is a chain), ``lazy``, ``deferred``, and ``setting=value`` for any number in
    :class:`dcd_core.decode_types.Settings`.
    """

    label: str
    method: str
    changes: dict

    @classmethod
    def parse(cls, label: str) -> Entry:
        """
        Raises:
            ValueError: an unknown method or form.
        """
        method, forms = split_label(label)
        if method not in METHODS:
            raise ValueError(f"method '{method}' is unknown; choose from {', '.join(METHODS)}")
        if label.endswith(("@", "+")):
            raise ValueError(f"'{label}' names no form after its last sign; write {method} alone, or a form")
        changes: dict = {}
        for form in forms:
            new = _form(form, label)
            if doubled := sorted(set(new) & set(changes)):
                raise ValueError(f"'{label}' sets {doubled[0]} twice")
            changes |= new
        if "gamma" in changes and METHODS[method].drafter is nobody:
            raise ValueError(f"'{label}': {method} drafts nothing, so it has no shape of drafts")
        if "saving" in changes and not METHODS[method].contrast:
            raise ValueError(f"'{label}': {method} never asks the amateur, so it has no pass to save")
        Settings(**changes)  # refuses values outside their range
        return cls(label, method, changes)


WITHOUT_LM = tuple(name for name, method in METHODS.items() if not method.needs_lm)
"""Methods of scripts that load no language model beside the pair."""
_NUMBERS = {item.name: item.type for item in fields(Settings) if item.type in ("int", "float")}


def _form(form: str, label: str) -> dict:
    shape = read_shape(form)
    if shape:
        return shape
    if form in SAVINGS:
        return {"saving": form}
    name, _, value = form.partition("=")
    if name in _NUMBERS:
        try:
            return {name: int(value) if _NUMBERS[name] == "int" else float(value)}
        except ValueError:
            pass
    raise ValueError(
        f"'{label}': '{form}' is no form of a method; write DEPTHxBRANCH:NODES (such as 5x4:10), DEPTH, lazy, "
        "deferred, or a setting as name=number"
    )


def refuse_lazy(entries: list[Entry], saving: str, cutoff: float) -> None:
    """Refuse lazy judging without a cutoff, and a cutoff that is none.

    Raises:
        ValueError: in words for the command line.
    """
    _ = Target(cutoff=cutoff)
    for entry in entries:
        if entry.changes.get("saving", saving) == "lazy" and cutoff == 0:
            raise ValueError(f"'{entry.label}' with saving lazy needs --cutoff above 0: without one nothing is saved")


def refuse_lm(entries: list[Entry]) -> None:
    """Refuse a method that drafts with a language model of its own, for scripts that load none.

    Raises:
        ValueError: in words for the command line.
    """
    for entry in entries:
        if METHODS[entry.method].needs_lm:
            raise ValueError(f"'{entry.label}' drafts with a language model; diagnostics/benchmark.py has --lm for one")


@dataclass(frozen=True)
class Arm:
    """One entry at one contrast strength (None where the method never looks at the contrast)."""

    entry: Entry
    alpha: float | None

    def target(self, temperature: float, cutoff: float = 0.0) -> Target:
        return Target(alpha=self.alpha or 0.0, temperature=temperature, cutoff=cutoff)


def arms(entries: list[Entry], alphas: list[float]) -> list[Arm]:
    """Every entry at every alpha; methods without contrast once."""
    free = [Arm(entry, None) for entry in entries if not METHODS[entry.method].contrast]
    return free + [Arm(entry, alpha) for alpha in alphas for entry in entries if METHODS[entry.method].contrast]


@dataclass(frozen=True)
class Contest:
    """Who answers and how.

    Args:
        settings: everything but the target; timed.
        judged: compare every answer with the reference method's, token by token.
    """

    methods: dict[str, Assembled]
    arms: list[Arm]
    pair: Pair
    settings: Settings
    temperature: float
    repeats: int
    judged: bool
    cutoff: float = 0.0

    def answer(self, arm: Arm, prompt: Prompt, repeat: int = 0) -> dict:
        """One answer as a JSON-able dict: method, alpha, run, ids, rounds, seconds of prefill."""
        settings = replace(self.settings, target=arm.target(self.temperature, self.cutoff), **arm.entry.changes)
        (made,) = decode(self.methods[arm.entry.method], [replace(prompt, sample=repeat)], settings)
        return {
            "method": arm.entry.label,
            "alpha": arm.alpha,
            "run": run_name(arm.alpha, repeat),
            "prompt_id": prompt.id,
            "sample": repeat,
            "ids": made.ids,
            "finish": made.finish,
            "prefill_s": made.prefill_s,
            "rounds": [asdict(made_round) for made_round in made.rounds],
        }

    def turns(self, prompt: Prompt, offset: int) -> list[dict]:
        """The answers of every arm to one prompt, `repeats` times; the order rotates with `offset`."""
        found = []
        for repeat in range(self.repeats):
            shift = (offset + repeat) % len(self.arms)  # so that no method always follows the same other one
            found += [self.answer(arm, prompt, repeat) for arm in self.arms[shift:] + self.arms[:shift]]
        return [self.compared(made, found, prompt) for made in found] if self.judged else found

    def compared(self, made: dict, others: list[dict], prompt: Prompt) -> dict:
        """The answer with its divergence from the reference: `cd` at its alpha, `ar` for methods without contrast."""
        reference = "ar" if made["alpha"] is None else BASELINE
        expected = next((o for o in others if o["method"] == reference and o["run"] == made["run"]), None)
        if expected is None or expected is made:
            return made
        target = Target(alpha=made["alpha"] or 0.0, temperature=self.temperature, cutoff=self.cutoff)
        models = [self.pair.expert] if made["alpha"] is None else [self.pair.expert, self.pair.amateur]
        seed = None if self.temperature == 0 else self.settings.seed
        keyed = replace(prompt, sample=made["sample"])
        difference = compare(models, target, keyed, expected["ids"], made["ids"], seed)
        return made | {"reference": reference, "divergence": asdict(difference) if difference else None}


def run_contest(contest: Contest, prompts: list[Prompt], warmup: int, parts: Parts) -> Iterator[dict]:
    """All answers, prompt by prompt; prompts answered before a stop are taken as they are."""
    todo = [prompt for prompt in prompts if parts.get(_name(prompt)) is None]
    for prompt in todo[:warmup]:
        contest.turns(prompt, 0)
    for index, prompt in enumerate(progress(prompts, len(prompts), "benchmark", "prompts")):
        found = parts.get(_name(prompt))
        if found is None:
            found = contest.turns(prompt, index)
            parts.put(_name(prompt), found)
        yield from found


def round_columns(answers: list[dict]) -> dict[str, list]:
    """Columns of a rounds table."""
    rows = []
    for made in answers:
        named = {name: made[name] for name in ("run", "method", "prompt_id", "sample")}
        rows += [named | {"round": index} | one for index, one in enumerate(made["rounds"])]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def agreement_counts(answers: list[dict], is_tie: Callable[[dict], bool]) -> list[dict]:
    """Per method and alpha: answers equal to the reference's, those that part at a near-tie, and the others."""
    found: dict[tuple, dict] = {}
    for made in answers:
        if "reference" not in made:
            continue
        key = made["method"], made["alpha"]
        empty = {"method": key[0], "alpha": key[1], "reference": made["reference"]}
        entry = found.setdefault(key, empty | {"equal": 0, "near_ties": 0, "different": 0, "divergences": []})
        difference = made["divergence"]
        if difference is None:
            entry["equal"] += 1
        else:
            entry["near_ties" if is_tie(difference) else "different"] += 1
            entry["divergences"].append(difference)
    return list(found.values())


def _name(prompt: Prompt) -> str:
    return f"prompt-{content_hash([prompt.id, prompt.ids])[:16]}"
