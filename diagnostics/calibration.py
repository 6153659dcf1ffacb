"""When should the amateur be asked, and when should drafting stop? Fits and simulated rounds, on numbers alone.

Everything here works on greedy rollouts of the contrastive target. At temperature 0 a lossless method writes exactly
these tokens, so rounds follow from what was noted along the text; only what an expert would write after a token that
falls is not known, and is taken to be like the text there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from dcd_core.flip_risk import Deferral
from diagnostics.prediction import pass_ms

THETAS = (0.01, 0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
STOPS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Trace:
    """What was noted along one greedy rollout; entry i belongs to the place after answer token i (0-based).

    Attributes:
        agreed: drafts of a round rooted at token i that agree with the text.
        confidence: products of draft probabilities along those drafts, ``[roots][gamma]``.
        unit_margin: the expert's margin at the place, over the contrast weight (nats).
        flips: the expert's choice there is not the target's.
        peak: the expert's largest probability. ``tv``: TV(p, pi) at temperature 1.
    """

    agreed: list[int]
    confidence: list[list[float]]
    unit_margin: list[float]
    flips: list[bool]
    peak: list[float]
    tv: list[float]


@dataclass(frozen=True)
class Times:
    """Milliseconds of passes by number of new tokens (:func:`diagnostics.latency.time_passes`)."""

    expert: dict[str, float]
    amateur: dict[str, float]
    head: dict[str, float]

    def draft(self, count: int) -> float:
        return count * pass_ms(self.head, 1)


def fit_flips(unit_margin: np.ndarray, flips: np.ndarray) -> tuple[float, float, float]:
    """Ceiling, scale and power of P(flip) = ceiling / (1 + (u / scale)^power), by maximum likelihood.

    Half a flip and half a non-flip at the mean margin are added, so that the fit exists where nothing flips.
    """
    finite = np.isfinite(unit_margin)
    margin = np.append(np.maximum(unit_margin[finite], 0.0), unit_margin[finite].mean())
    events = np.append(flips[finite], 0.5)

    def loss(parameters: np.ndarray) -> float:
        ceiling, scale, power = law_of(parameters)
        risk = np.clip(ceiling / (1.0 + (margin / scale) ** power), 1e-9, 1 - 1e-9)
        return float(-np.sum(events * np.log(risk) + (1 - events) * np.log1p(-risk)))

    def law_of(parameters: np.ndarray) -> tuple[float, float, float]:
        lean, log_scale, log_power = np.clip(parameters, -8.0, 8.0)
        return 1.0 / (1.0 + np.exp(-lean)), np.exp(log_scale), np.exp(np.clip(log_power, -3.0, 3.0))

    start = np.array([0.5, np.log(max(float(np.median(margin)), 1e-3)) - 1.0, 0.0])
    # steps of one in every direction: the default ones are next to nothing where the start is 0
    simplex = np.vstack([start, start + np.eye(3)])
    options = {"maxiter": 4000, "xatol": 1e-6, "fatol": 1e-6, "initial_simplex": simplex}
    found = minimize(loss, x0=start, method="Nelder-Mead", options=options)
    return tuple(float(value) for value in law_of(found.x))


def fit_spread(peak: np.ndarray, tv: np.ndarray, weight: float) -> float:
    """Spread of P(refused) = spread * weight * (1 - max p): the ratio of the sums, so the mean risk is right."""
    exposed = weight * (1.0 - peak)
    return float(tv.sum() / exposed.sum()) if exposed.sum() > 0 else 0.0


def simulate_deferred(traces: list[Trace], deferral: Deferral, gamma: int, times: Times) -> tuple[float, float, float]:
    """Tokens per second of deferred judging, expert passes per amateur pass, and flips per 100 tokens."""
    tokens = milliseconds = 0.0
    passes = blocks = flips = 0
    ahead = times.draft(gamma) + pass_ms(times.expert, gamma + 1)
    for trace in traces:
        margin = np.maximum(trace.unit_margin, 0.0)
        risk = deferral.ceiling / (1.0 + (margin / deferral.scale) ** deferral.power)
        place, last = 0, len(trace.agreed)
        while place < last:
            current, stands, fallen = place, 1.0, None
            while current < last and 1.0 - stands < deferral.theta and current - place < deferral.most:
                end = min(current + trace.agreed[current] + 1, last)
                for index in range(current, end):
                    stands *= 1.0 - risk[index]
                    if fallen is None and trace.flips[index]:
                        fallen = index
                milliseconds += ahead
                passes += 1
                current = end
            milliseconds += pass_ms(times.amateur, current - place)
            blocks += 1
            flips += fallen is not None
            place = current if fallen is None else fallen + 1
        tokens += last
    return 1000 * tokens / milliseconds, passes / blocks, 100 * flips / tokens


def simulate_rounds(traces: list[Trace], stop_below: float, gamma: int, times: Times) -> tuple[float, float]:
    """Tokens per second of a chain that stops below a path probability, and drafts per round."""
    tokens = milliseconds = 0.0
    drafts = rounds = 0
    for trace in traces:
        place, last = 0, len(trace.agreed)
        while place < last:
            path = trace.confidence[place]
            below = next((index for index, value in enumerate(path) if value < stop_below), gamma - 1)
            count = below + 1
            milliseconds += times.draft(count)
            milliseconds += pass_ms(times.expert, count + 1) + pass_ms(times.amateur, count + 1)
            drafts, rounds = drafts + count, rounds + 1
            place += min(trace.agreed[place], count) + 1
        tokens += last
    return 1000 * tokens / milliseconds, drafts / rounds
