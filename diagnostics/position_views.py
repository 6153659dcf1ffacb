"""Views of a positions table over pairs, data sets and contrast strengths, as counted numbers. No torch.

A *configuration* is one pair on one data set at one contrast strength; the paper has 24 of them [DCD, sec. 4.1]. A
*setting* is a pair on a data set. Intervals are 95% intervals over prompts throughout.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from diagnostics.intervals import Interval, ratio_of_sums
from diagnostics.position_summary import (
    BUCKETS,
    KINDS,
    Grid,
    binned,
    bucket,
    clusters,
    gains,
    having,
    kinds_in,
    means,
    summarise_by_alpha,
)

LITTLE = 1e-6  # a headroom below this is none: no share of it can be named


@dataclass(frozen=True)
class Labelled:
    """A grid of gains with a name for each of its rows; columns are buckets."""

    labels: list[str]
    grid: Grid


@dataclass(frozen=True)
class Realised:
    """What a kind of draft gains, beside what aiming at the contrast could add at most at equal error.

    `acceptance` over `headroom_tv` concerns sampled drafts, `top1` over `headroom_flip` greedy ones at T = 0; the two
    shares are None where there is no headroom to speak of.
    """

    kind: str
    alpha: str
    positions: int
    headroom_tv: Interval
    gain_acceptance: Interval
    share_acceptance: Interval | None
    headroom_flip: Interval
    gain_top1: Interval
    share_top1: Interval | None


def settings_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of every pair on every data set, by a name that leaves out what all have in common."""
    pairs = rows["pair"].nunique() > 1
    groups = rows.groupby(["pair", "dataset"], sort=True)
    return {f"{pair}, {dataset}" if pairs else dataset: part for (pair, dataset), part in groups}


def configurations(rows: pd.DataFrame) -> tuple[list[str], np.ndarray]:
    """Names of the configurations, and the number of each row's."""
    keys = ["pair", "dataset", "alpha"]
    groups = rows.groupby(keys, sort=True)
    pairs = rows["pair"].nunique() > 1
    labels = [
        f"{pair}, {dataset}, α {alpha:g}" if pairs else f"{dataset}, α {alpha:g}"
        for pair, dataset, alpha in groups.groups
    ]
    return labels, groups.ngroup().to_numpy()


def by_configuration(rows: pd.DataFrame, column: str, kind: str) -> Labelled:
    """dTop1 of one kind of draft by configuration (rows) and by the buckets of a column: "signal" [DCD, Fig. 7] or
    "amateur_error", KL(f||q) [DCD, Fig. 6]."""
    rows = having(rows, kind)
    rows = rows[rows[column].notna()]
    labels, number = configurations(rows)
    (grid,) = binned(rows, number, bucket(rows[column]), (len(labels), BUCKETS), [gains(rows, kind)[0]])
    return Labelled(labels, grid)


def trends(rows: pd.DataFrame, kind: str) -> dict[str, Labelled]:
    """dTop1 of one kind of draft per setting: over the contrast strength ("alpha") and over the signal's buckets
    ("signal") [DCD, Fig. 8]. The columns of the first are the strengths in ascending order, named in its labels' place
    by `alphas_of`."""
    rows = having(rows, kind)
    names = list(settings_of(rows))
    setting = rows.groupby(["pair", "dataset"], sort=True).ngroup().to_numpy()
    alphas = alphas_of(rows)
    gain = [gains(rows, kind)[0]]
    places = {
        "alpha": (np.searchsorted(alphas, rows["alpha"]), len(alphas)),
        "signal": (bucket(rows["signal"]), BUCKETS),
    }
    return {
        name: Labelled(names, binned(rows, setting, place, (len(names), size), gain)[0])
        for name, (place, size) in places.items()
    }


def alphas_of(rows: pd.DataFrame) -> list[float]:
    """The contrast strengths of a table, ascending."""
    return sorted(rows["alpha"].unique().tolist())


def per_configuration(rows: pd.DataFrame) -> dict[str, dict]:
    """Mean dTop1 and d acceptance of every kind of draft in every configuration, and pooled: name -> {"positions",
    "top1": {kind: Interval}, "acceptance": {kind: Interval}}."""
    labels, number = configurations(rows)
    parts = {label: rows[number == index] for index, label in enumerate(labels)}
    if len(parts) > 1:
        parts["pooled by count"] = rows
    found = {}
    for label, part in parts.items():
        kinds = kinds_in(part)
        columns = [column for kind in kinds for column in gains(part, kind)]
        intervals = means(clusters(part), np.stack(columns, axis=1), ["plain"] * len(columns))
        found[label] = {
            "positions": len(part),
            "top1": dict(zip(kinds, intervals[::2], strict=True)),
            "acceptance": dict(zip(kinds, intervals[1::2], strict=True)),
        }
    return found


def alignment(rows: pd.DataFrame) -> dict[str, tuple[Interval, Interval]]:
    """Mean alignment gap in nats and the share of positions where it is above 0, per setting and pooled [DCD, Def. B.2,
    Tab. 9]."""
    parts = settings_of(rows)
    if len(parts) > 1:
        parts["pooled by count"] = rows
    found = {}
    for name, part in parts.items():
        gap = part["alignment_gap"].to_numpy(dtype=float)
        mean, share = means(clusters(part), np.stack([gap, gap > 0], axis=1), ["plain", "logit"])
        found[name] = (mean, share)
    return found


def realised(rows: pd.DataFrame) -> list[Realised]:
    """Headroom, gain and their ratio for every kind of draft at every contrast strength, and pooled."""
    parts = {f"{alpha:g}": part for alpha, part in rows.groupby("alpha")}
    if len(parts) > 1:
        parts["pooled"] = rows
    found = []
    for kind in KINDS:
        if kind == "stronger":  # its error is another one: the bound is about e
            continue
        for alpha, whole in parts.items():
            part = having(whole, kind)
            if len(part):
                found.append(_realised(part, kind, alpha))
    return found


def _realised(part: pd.DataFrame, kind: str, alpha: str) -> Realised:
    top1, acceptance = gains(part, kind)
    ceilings = part["headroom_tv"].to_numpy(dtype=float), part["headroom_flip"].to_numpy(dtype=float)
    units = clusters(part)
    table = np.stack([ceilings[0], acceptance, ceilings[1], top1], axis=1)
    headroom_tv, gain_acceptance, headroom_flip, gain_top1 = means(units, table, ["logit", "plain"] * 2)
    shares = []
    for ceiling, gain in zip(ceilings, (acceptance, top1), strict=True):
        share = ratio_of_sums(units, gain, ceiling, scale="plain") if ceiling.mean() > LITTLE else None
        shares.append(share)
    return Realised(
        kind, alpha, len(part), headroom_tv, gain_acceptance, shares[0], headroom_flip, gain_top1, shares[1]
    )


def each_and_pooled(rows: pd.DataFrame) -> dict[str, dict[str, dict]]:
    """`summarise_by_alpha` of every setting alone and of all pooled by count ("pooled")."""
    parts = settings_of(rows)
    found = {name: summarise_by_alpha(part) for name, part in parts.items()}
    return found if len(parts) == 1 else found | {"pooled": summarise_by_alpha(rows)}
