"""Does contrast-aware training help? Verdicts from changes, and the sentence that says them. No torch.

A verdict is a claim about the true change of accepted length, as a share of L, against expert-aligned training:

    helps       the change is above zero
    no gain     a gain of the margin (1% of L) or more is ruled out
    hurts       the change is below zero
    undecided   none of these is sure

"No gain" is claimed by a test against a gain of the margin (one half of an equivalence test, TOST) and never from a
difference that merely fails to be significant [DCD's own tables are single runs]. Each claim needs its bound of the 95%
interval, i.e. a one-sided test at 2.5%, after Holm's correction over the comparisons that are judged together, for each
kind of claim. A change that is surely within the margin on both sides is "no gain" even where it is surely not zero:
too small to matter either way. Fewer than 20 prompts decide nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnostics.intervals import Change, holm
from diagnostics.wording import percent, points

MARGIN = 0.01
SIDE = 0.025  # of each one-sided test: a bound of a 95% interval
FEWEST = 20  # prompts: fewer are too few texts to speak for others, and decide nothing
VERDICTS = ("helps", "no gain", "hurts", "undecided")


@dataclass(frozen=True)
class Judged:
    """One comparison: the verdict, what of it is sure, and p-values after Holm's correction over the grid.

    Attributes:
        gain_ruled_out, loss_ruled_out: of the margin or more.
        p_gain: one-sided, against a gain of the margin or more.
        p_equivalent: of the two one-sided tests (TOST) that the change is within the margin.
        p_above, p_below: one-sided, that it is above or below zero.
        comparisons: in the grid.
    """

    verdict: str
    gain_ruled_out: bool
    loss_ruled_out: bool
    p_gain: float
    p_equivalent: float
    p_above: float
    p_below: float
    comparisons: int


def judge(changes: Sequence[Change], margin: float = MARGIN) -> list[Judged]:
    """The verdict of every comparison of one grid, corrected for their number. `changes` are relative ones."""
    no_gain = holm([change.p_below(margin) for change in changes])
    no_loss = holm([change.p_above(-margin) for change in changes])
    equivalent = holm([max(change.p_below(margin), change.p_above(-margin)) for change in changes])
    above = holm([change.p_above(0.0) for change in changes])
    below = holm([change.p_below(0.0) for change in changes])
    found = []
    for index in range(len(changes)):
        enough = changes[index].prompts >= FEWEST
        gain_out, loss_out = bool(enough and no_gain[index] < SIDE), bool(enough and no_loss[index] < SIDE)
        if not enough:
            verdict = "undecided"
        elif below[index] < SIDE and not loss_out:
            verdict = "hurts"
        elif gain_out:
            verdict = "no gain"
        elif above[index] < SIDE:
            verdict = "helps"
        else:
            verdict = "undecided"
        ps = (float(values[index]) for values in (no_gain, equivalent, above, below))
        found.append(Judged(verdict, gain_out, loss_out, *ps, len(changes)))
    return found


def headroom(acceptance: float, ceiling: float, gamma: int) -> dict[str, float]:
    """What a per-token gain of `ceiling` is in accepted length: drafts a round, and as a share of L.

    At constant per-token acceptance a, L = sum over i = 1..gamma of a^i, and a ceiling h adds the sum of
    (a + h)^i - a^i, capped at certain acceptance.
    """
    steps = np.arange(1, gamma + 1)
    length = float((acceptance**steps).sum())
    added = float((min(1.0, acceptance + ceiling) ** steps).sum()) - length
    return {"added_length": added, "share_of_length": added / length if length > 0 else float("inf")}


def verdict_sentence(
    verdict: str,
    alpha: float,
    change: dict,
    loss_ruled_out: bool,
    margin: float = MARGIN,
    trained_on: float | None = None,
    seeds: int = 2,
) -> str:
    """The verdict in plain words, without its full stop.

    Args:
        change: an `Interval` as a dict, a share of L.
        loss_ruled_out: a loss of the margin or more.
        trained_on: the train-alpha, where it is not `alpha` itself.
        seeds: training runs of each drafter; one says something of these two drafters only, and so does the sentence.
    """
    size, limit = f"L changes by {percent(change, sign=True)}", f"{100 * margin:g}%"
    where = f"contrast-aware training at alpha {alpha:g}"
    if trained_on is not None:
        where += f" (trained on {trained_on:g})"
    if seeds == 1:
        where += ", between these two drafters, one training run each"
    if verdict == "helps":
        return f"A gain from {where}: {size}"
    if verdict == "hurts":
        return f"A loss from {where}: {size}, so it hurts"
    if verdict == "no gain":
        also = ", and so is a loss of that size" if loss_ruled_out else ""
        some = f"No gain of {limit} or more" if change["low"] is not None and change["low"] > 0 else "No gain"
        return f"{some} from {where}: {size}, so a gain of {limit} or more is ruled out{also}"
    if change["prompts"] < FEWEST:
        return f"Undecided for {where}: {size}, and {change['prompts']} prompts are too few to tell ({FEWEST} at least)"
    sure = change["low"] is not None and (change["low"] > 0 or change["high"] < margin)
    corrected = ", once the number of comparisons is allowed for," if sure else ""
    return f"Undecided for {where}: {size}, which{corrected} neither shows a gain nor rules out one of {limit} or more"


def headroom_clause(ceiling: float, share_of_length: float, flips: float, realised: dict | None) -> str:
    """What aiming at the contrast could add, and how much of it was realised.

    Args:
        ceiling: of the acceptance of a sampled draft, a probability.
        share_of_length: what that is as a share of L, at constant acceptance.
        flips: the ceiling of greedy drafts, a probability: where the contrast changes the best token.
        realised: an `Interval` as a dict, in the unit of `ceiling`.
    """
    # a ceiling above L itself (a drafter that hardly ever agrees) is no percentage that says anything
    share = f" (about {_digits(100 * share_of_length, 0)}% of L)" if share_of_length <= 1 else ""
    clause = (
        "at equal approximation error, aiming at the contrast could add at most "
        f"{_digits(100 * ceiling, 1)} points to the acceptance of a sampled first draft{share}"
    )
    if realised is not None:
        clause += f", of which {points(realised, 2, sign=True)} were realised"
    return f"{clause}, and {_digits(100 * flips, 1)} points to that of a greedy one"


def _digits(value: float, places: int) -> str:
    """1.9, 0.03: with so many places, and more for what they would make a zero of."""
    return f"{value:.{places}f}" if value == 0 or round(value, places) > 0 else f"{value:.1g}"
