"""Predicted speed of a method from its accepted length and from passes timed alone [DCD, App. D]. No torch."""

import numpy as np

from dcd_core import cost
from diagnostics.forms import shape_of, split_label


def pass_ms(times: dict[str, float], width: float) -> float:
    """Milliseconds of a pass of `width` new tokens, linear between the widths that were timed."""
    known = sorted((int(key), value) for key, value in times.items())
    return float(np.interp(width, *zip(*known, strict=True)))


def predicted_tokens_per_second(
    method: str,
    latency: dict[str, dict[str, float]],
    accepted_length: float,
    gamma: int,
    drafted: float,
    branch: int = 1,
) -> float:
    """Tokens per second by the cost model.

    Args:
        latency: {"expert" | "amateur" | "head" | "lm": {width: ms}}, as from `latency.time_passes`.
        accepted_length: mean accepted drafts per round. `drafted`: mean drafts per round, which sets the width of the
            verifying passes (n-gram drafting often proposes fewer than gamma).
        branch: nodes that a level of a tree expands; 1 for chains.
    """
    t_p1, t_p = (pass_ms(latency["expert"], width) for width in (1, drafted + 1))
    t_q1, t_q = (pass_ms(latency["amateur"], width) if "amateur" in latency else 0.0 for width in (1, drafted + 1))
    length = min(max(accepted_length, 0.0), float(gamma))
    if method == "ar":
        return 1000 * cost.vanilla(t_p1, 0.0)
    if method == "cd":
        return 1000 * cost.vanilla(t_p1, t_q1)
    if method == "scd":
        return 1000 * cost.scd(length, gamma, t_p, t_q1)
    if method == "cos":
        return 1000 * cost.cos(length, gamma, t_p, t_q1)
    if method == "dcd_ngram":
        return 1000 * cost.dcd(length, gamma, 0.0, t_p, t_q)
    t_e = draft_ms(method, latency, accepted_length, gamma, branch)
    return 1000 * cost.dcd(length, gamma, t_e, t_p, 0.0 if method == "expert_sd" else t_q)


def draft_ms(
    method: str, latency: dict[str, dict[str, float]], accepted_length: float, gamma: int, branch: int
) -> float:
    """Mean milliseconds of one of the gamma passes of a drafter.

    The first re-reads what was accepted, the others are one token or one level of a tree wide; n-grams cost none, and
    two heads twice as much as one.
    """
    if method == "dcd_ngram":
        return 0.0
    drafter, wide = ("lm", 1) if method == "dcd_lm" else ("head", branch)
    first, other = (pass_ms(latency[drafter], width) for width in (max(accepted_length, 0.0) + 1, wide))
    return (2 if method == "dual" else 1) * (first + (gamma - 1) * other) / gamma


def predicted_blocks(
    entry: dict, latency: dict[str, dict[str, float]], method: str, shape: tuple[int, int, int]
) -> float:
    """Tokens per second where the amateur judges blocks of several expert passes: the cost model with t_q once a block.

    Args:
        entry: of `summarise_rounds`; its accepted length, after what the amateur took back, and the mean block.
        shape: depth, branch and node budget of the drafts.
    """
    gamma, branch, budget = shape
    length = entry["accepted_length"]["estimate"]
    share, block = entry["amateur_passes"] / entry["expert_passes"], entry["drafted_per_round"]
    t_p, t_q = pass_ms(latency["expert"], budget + 1), pass_ms(latency["amateur"], block)
    return 1000 * cost.dcd(length, gamma, draft_ms(method, latency, length, gamma, branch), t_p, share * t_q)


def with_predictions(
    entries: list[dict], latency: dict[str, dict[str, float]], gamma: int, branch: int = 1, nodes: int = 0
) -> list[dict]:
    """Entries of `summarise_rounds` with predicted tokens/s and speed-up over `cd`, and measured / predicted."""
    baseline = predicted_tokens_per_second("cd", latency, 0.0, gamma, 0.0)
    found = []
    for entry in entries:
        length, drafted = entry["accepted_length"]["estimate"], entry["drafted_per_round"]
        method, shape = split_label(entry["method"])[0], shape_of(entry["method"], gamma, branch, nodes)
        if entry.get("blocks"):
            speed = predicted_blocks(entry, latency, method, shape)
        else:
            speed = predicted_tokens_per_second(method, latency, length, shape[0], drafted, shape[1])
        extra = {"predicted_tokens_per_second": speed}
        extra["measured_over_predicted_tokens"] = entry["tokens_per_second"]["estimate"] / speed
        if "speedup" in entry:
            extra["predicted_speedup"] = speed / baseline
            extra["measured_over_predicted"] = entry["speedup"]["estimate"] * baseline / speed
        found.append(entry | extra)
    return found
