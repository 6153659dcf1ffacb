"""From a rounds table to speeds, accepted lengths and acceptance by draft position. Pure functions, no torch.

Speeds are ratios of sums (tokens over seconds of all rounds). The token that prefill gives and the seconds of prefill
belong to no round and are left out on both sides of every comparison.
"""

import re

import numpy as np
import pandas as pd

from dcd_core.errors import UserError
from diagnostics.forms import shape_of, split_label, unsaved
from diagnostics.intervals import Interval, paired_ratio, ratio_of_sums

BASELINE = "cd"
# of rows in tables and bars in figures
ORDER = ("ar", "expert_sd", "cd", "auto", "scd", "cos", "dcd_ngram", "dcd_lm", "cross_alpha", "dual")
ORDER += ("dcd_eagle3", "dcd_hybrid", "dcd_deferred")
ANY = "any"
SECONDS = ("draft_s", "expert_s", "amateur_s", "rest_s")
_RUN = re.compile(r"alpha=(\S+) repeat=(\d+)")


def run_name(alpha: float | None, repeat: int) -> str:
    """Name of a run in the table; alpha is None for methods that do not depend on it."""
    return f"alpha={ANY if alpha is None else f'{alpha:g}'} repeat={repeat}"


def alphas_of(rows: pd.DataFrame) -> pd.Series:
    """The alpha of each row as text, "any" for methods without one. Raises UserError for a name that is not ours."""
    found = rows["run"].str.extract(_RUN.pattern)[0]
    if found.isna().any():
        raise UserError(f"run '{rows['run'][found.isna()].iloc[0]}' is not named 'alpha=<number or any> repeat=<n>'")
    return found


def summarise_rounds(rows: pd.DataFrame, gamma: int | None = None) -> list[dict]:
    """One JSON-able entry per alpha and method, with 95% intervals over prompts; methods without an alpha come first.

    `speedup` is tokens/s over `cd` at the same alpha on the same prompts (over `cd` of all alphas pooled for methods
    without an alpha), and absent when there is no such `cd` run; where passes of the amateur are saved, `over_unsaved`
    is the same over the method that saves none (`unsaved`), if it was measured. Times are in milliseconds:
    `draft_step_ms` per drafted token, the others per expert pass. Where the amateur judges whole blocks (`blocks`),
    accepted length and tokens per round count expert passes, after what the amateur took back (`flips` blocks); drafts
    by position are not kept. `gamma` is the depth of drafts whose label names none.
    """
    rows = rows.assign(alpha=alphas_of(rows), seconds=rows[list(SECONDS)].sum(axis=1))
    baseline = rows[rows["method"] == BASELINE]
    found = []
    groups = dict(list(rows.groupby(["alpha", "method"])))
    for alpha, method in sorted(groups, key=_place):
        part = groups[alpha, method]
        entry = {"alpha": alpha, "method": method} | _counts(part, _depth(method, part, gamma))
        against = baseline if alpha == ANY else baseline[baseline["alpha"] == alpha]
        if len(against):
            arms = _same_prompts(part, against)
            entry["speedup"] = paired_ratio(*arms).as_dict()
        if (alpha, unsaved(method)) in groups:
            entry["unsaved"] = unsaved(method)
            arms = _same_prompts(part, groups[alpha, entry["unsaved"]])
            entry["over_unsaved"] = paired_ratio(*arms).as_dict()
        found.append(entry)
    return found


def _place(key: tuple[str, str]) -> tuple:
    """Alphas ascending; a method's forms after the method itself, small drafts first."""
    alpha, label = key
    method, forms = split_label(label)
    known = ORDER.index(method) if method in ORDER else len(ORDER)
    return (-1.0 if alpha == ANY else float(alpha), known, method, len(forms) > 0, shape_of(label, 0), label)


def _depth(label: str, part: pd.DataFrame, gamma: int | None) -> int:
    """Most drafts that one path can have: a tree proposes more tokens than it is deep."""
    most = int(part["drafted"].max())
    return min(most, shape_of(label, most if gamma is None else gamma)[0])


def _same_prompts(*arms: pd.DataFrame) -> list[tuple[list, list, list]]:
    """(prompt ids, tokens, seconds) per arm; an answer that ended with the prefill has no rounds and counts 0."""
    everyone = sorted(set().union(*(arm["prompt_id"] for arm in arms)))
    found = []
    for arm in arms:
        sums = arm.groupby("prompt_id")[["emitted", "seconds"]].sum().reindex(everyone, fill_value=0)
        found.append((everyone, sums["emitted"].tolist(), sums["seconds"].tolist()))
    return found


def _counts(part: pd.DataFrame, depth: int) -> dict:
    prompts, rounds, drafted = part["prompt_id"], len(part), int(part["drafted"].sum())
    passes, blocks = part["expert_passes"], bool((part["expert_passes"] > 1).any())
    speed = ratio_of_sums(prompts, part["emitted"], part["seconds"])
    # a round is one expert pass; where the amateur judges blocks of them, what the drafter got through is the rest
    gained = part["emitted"] - passes if blocks else part["accepted"]
    accepted = ratio_of_sums(prompts, gained, passes)
    emitted = ratio_of_sums(prompts, part["emitted"], passes)
    return {
        "prompts": int(prompts.nunique()),
        "answers": int(part[["run", "prompt_id", "sample"]].drop_duplicates().shape[0]),
        "rounds": rounds,
        "expert_passes": int(passes.sum()),
        "amateur_passes": int(part["amateur_passes"].sum()),
        "blocks": blocks,
        "flips": int((part["accepted"] < part["drafted"]).sum()) if blocks else 0,
        "drafted_per_round": drafted / rounds,
        "tokens": int(part["emitted"].sum()),
        "tokens_per_second": speed.as_dict(),
        "accepted_length": accepted.as_dict(),
        "tokens_per_round": emitted.as_dict(),
        "acceptance_by_position": []
        if blocks
        else [interval.as_dict() for interval in acceptance_by_position(part, depth)],
        "draft_step_ms": 1000 * part["draft_s"].sum() / drafted if drafted and not blocks else 0.0,
    } | {f"{name}_ms": 1000 * part[f"{name}_s"].sum() / passes.sum() for name in ("draft", "expert", "amateur", "rest")}


def acceptance_by_position(part: pd.DataFrame, depth: int | None = None) -> list[Interval]:
    """Share of drafts accepted at draft position 1, 2, ..., among rounds whose earlier drafts were all accepted."""
    found = []
    for position in range(1, (int(part["drafted"].max()) if depth is None else depth) + 1):
        reached = part[(part["drafted"] >= position) & (part["accepted"] >= position - 1)]
        if reached.empty:
            break
        passed = reached["accepted"] >= position
        found.append(ratio_of_sums(reached["prompt_id"], passed, np.ones(len(reached)), scale="logit"))
    return found
