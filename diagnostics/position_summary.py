"""From a positions table to buckets, cells and shares with prompt-cluster intervals. No torch.

Contrast-aligned drafts come in kinds. The oracle one is e corrected by the true amateur, so it has no error of its own
on the amateur's side; the dual one is e corrected by f, a drafter aligned with the amateur; the direct one comes from a
head trained on the contrast. Their gains are over e. The stronger proposer's is over itself without the correction.
Pooling is by count: every position weighs the same, whatever its pair, data set or contrast strength.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import pyarrow as pa

from dcd_core.errors import UserError
from diagnostics.intervals import Interval, group_sums, intervals, spread
from diagnostics.records import POSITIONS

# Buckets of [DCD, Figs. 2 and 7], in nats, for the signal and the drafter's error alike.
EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, np.inf)
BUCKETS = len(EDGES) - 1
FEW = 100  # cells with fewer positions are marked
SIGNAL_LIMIT, ERROR_LIMIT = 1.0, 2.0  # the paper's two headline shares: signal below 1 nat, KL(e||p) of 2 nats or more

KINDS = {"direct": "direct draft", "dual": "dual draft", "oracle": "oracle draft", "stronger": "stronger proposer"}
"""Contrast-aligned drafts by the beginning of their columns, and what a reader calls them."""
BASE = {"stronger": "stronger_plain"}  # what each is compared with; all others with e ("target")

MEANS = (
    "signal",
    "signal_applied",
    "signal_max",
    "signal_std",
    "signal_kl",
    "headroom_tv",
    "headroom_greedy",
    "headroom_flip",
    "error_reverse",
    "error_forward",
    "lost_mass",
    "error_tv",
    "target_kl",
    "target_tv",
    "target_top1",
    "alignment_gap",
    "tail_mass",
    "oracle_kl",
    "oracle_tv",
    "oracle_top1",
)
OPTIONAL_MEANS = (
    "amateur_error",
    *(f"{kind}_{end}" for kind in ("dual", "exact_expert", "direct", "stronger") for end in ("kl", "tv", "top1")),
    "dual_closer",
    "stronger_error",
    "var_signal",
    "var_error",
    "var_amateur_error",
    "cov_signal_error",
    "cov_errors",
    "rule_left",
    "rule_right",
)


_COLUMNS = {column.name: column for column in POSITIONS}


@dataclass(frozen=True)
class Grid:
    """Positions in the cells of a grid, and the mean of a value in each with its 95% interval; all [rows, columns].

    Means and intervals are NaN where a cell has no position, and intervals where it has only one prompt.
    """

    counts: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def few(self) -> np.ndarray:
        """Cells with positions, but fewer than 100 of them."""
        return (self.counts > 0) & (self.counts < FEW)

    @property
    def sure(self) -> np.ndarray:
        """Cells whose interval excludes 0."""
        return (self.low > 0) | (self.high < 0)


@dataclass(frozen=True)
class Cells:
    """Positions by drafter error (rows) and signal (columns): counts, and gains with 95% intervals, all [7, 7]."""

    counts: np.ndarray
    gain_top1: np.ndarray
    gain_top1_low: np.ndarray
    gain_top1_high: np.ndarray
    gain_acceptance: np.ndarray
    gain_acceptance_low: np.ndarray
    gain_acceptance_high: np.ndarray

    @property
    def few(self) -> np.ndarray:
        """Cells with positions, but fewer than 100 of them."""
        return (self.counts > 0) & (self.counts < FEW)


def bucket(values) -> np.ndarray:
    """Index of each value's bucket in EDGES; a value on an edge belongs to the bucket above it."""
    return np.searchsorted(EDGES[1:-1], np.asarray(values, dtype=float), side="right")


def bucket_labels() -> list[str]:
    """Short names of the buckets for axes: '0-0.25', ..., '8+'."""
    return [f"{low:g}-{high:g}" for low, high in zip(EDGES[:-2], EDGES[1:-1], strict=True)] + [f"{EDGES[-2]:g}+"]


def clusters(rows: pd.DataFrame) -> np.ndarray:
    """Number of the unit of each row: its prompt, the same one at every alpha and for every pair."""
    return rows.groupby(["dataset", "prompt_id"]).ngroup().to_numpy()


def kinds_in(rows: pd.DataFrame) -> list[str]:
    """The contrast-aligned drafts that some of the rows have."""
    return [kind for kind in KINDS if f"{kind}_tv" in rows and rows[f"{kind}_tv"].notna().any()]


def having(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows that have a draft of this kind."""
    return rows[rows[f"{kind}_tv"].notna()] if f"{kind}_tv" in rows else rows.iloc[:0]


def gains(rows: pd.DataFrame, kind: str = "oracle") -> tuple[np.ndarray, np.ndarray]:
    """dTop1 and d acceptance per position, NaN where there is no such draft: what a contrast-aligned draft adds to the
    one that it is compared with."""
    base = BASE.get(kind, "target")
    top1 = _floats(rows[f"{kind}_top1"]) - _floats(rows[f"{base}_top1"])
    return top1, _floats(rows[f"{base}_tv"]) - _floats(rows[f"{kind}_tv"])


def binned(
    rows: pd.DataFrame,
    row: np.ndarray,
    column: np.ndarray,
    shape: tuple[int, int],
    values: list[np.ndarray],
) -> list[Grid]:
    """Positions binned by two indices, and the mean of each of some values per cell, with intervals over the prompts
    that have a position there."""
    size = shape[0] * shape[1]
    unit = clusters(rows)
    prompts = int(unit.max(initial=-1)) + 1
    place = unit * size + np.asarray(row) * shape[1] + np.asarray(column)

    def sums(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(place, weights, minlength=prompts * size).reshape(prompts, size).T.astype(float)

    counts, found = sums(), []
    for value in values:
        spreads = spread(np.stack([sums(value), counts], axis=-1)[:, :, None])
        parts = (counts.sum(1).astype(int), spreads.estimate, *spreads.ends("plain"))
        found.append(Grid(*(part.reshape(shape) for part in parts)))
    return found


def cells(rows: pd.DataFrame, kind: str = "oracle") -> Cells:
    """Bin positions by drafter error and signal; gains of one kind of draft per cell, with their intervals.

    The stronger proposer's own error stands in the place of the drafter's.
    """
    rows = having(rows, kind)
    error = rows["stronger_error" if kind == "stronger" else "error_reverse"]
    shape = (BUCKETS, BUCKETS)
    top1, acceptance = binned(rows, bucket(error), bucket(rows["signal"]), shape, list(gains(rows, kind)))
    return Cells(top1.counts, *(getattr(grid, name.name) for grid in (top1, acceptance) for name in fields(Grid)[1:]))


def marginals(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Share of positions per signal bucket and per error bucket, each [7], summing to 1."""
    shares = [np.bincount(bucket(rows[name]), minlength=BUCKETS) / len(rows) for name in ("signal", "error_reverse")]
    return shares[0], shares[1]


def scale_of(name: str) -> str:
    """The scale of the interval of a mean (`intervals.Spread.ends`): plain where a value may be below zero, log for
    amounts, logit for probabilities and for shares of positions."""
    if name.startswith("gain_"):
        return "plain"
    column = _COLUMNS.get(name.removeprefix("mean_"))
    if column is None or column.type == pa.bool_():
        return "logit"
    if column.low is None or column.low <= -1:
        return "plain"
    return "log" if column.high is None else "logit"


def summarise(rows: pd.DataFrame) -> dict:
    """Headline shares, gains of every kind of draft, acceptances and the mean of every quantity, with 95% intervals.

    Returns a JSON-able dict; every entry but the counts is an Interval as a dict. A quantity that only some of the
    positions have is averaged over those.
    """
    values = {
        "share_signal_below_1": rows["signal"] < SIGNAL_LIMIT,
        "share_error_above_2": rows["error_reverse"] >= ERROR_LIMIT,
        "share_gap_positive": rows["alignment_gap"] > 0,
        "acceptance_expert_aligned": 1 - rows["target_tv"],
        "top1_expert_aligned": rows["target_top1"],
    }
    for kind in kinds_in(rows):
        values[f"gain_top1_{kind}"], values[f"gain_acceptance_{kind}"] = gains(rows, kind)
        values |= {f"acceptance_{kind}": 1 - _floats(rows[f"{kind}_tv"]), f"top1_{kind}": rows[f"{kind}_top1"]}
    optional = [name for name in OPTIONAL_MEANS if name in rows and rows[name].notna().any()]
    values |= {f"mean_{name}": rows[name] for name in (*MEANS, *optional)}
    if "rule_left" in optional:
        left, right = _floats(rows["rule_left"]), _floats(rows["rule_right"])
        values["share_rule_says_dual"] = np.where(np.isnan(left), np.nan, left > right)
    prompts = clusters(rows)
    found = {"positions": len(rows), "prompts": len(np.unique(prompts))}
    table = np.stack([_floats(column) for column in values.values()], axis=1)
    scales = [scale_of(name) for name in values]
    for name, interval in zip(values, means(prompts, table, scales), strict=True):
        found[name] = interval.as_dict()
    signal, error = marginals(rows)
    return found | {"signal_shares": signal.tolist(), "error_shares": error.tolist()}


def means(prompts: np.ndarray, table: np.ndarray, scales: Sequence[str]) -> list[Interval]:
    """Mean of every column of a table over the rows where it is not NaN, with its interval over prompts on the scale of
    the column (`intervals.Spread.ends`). Raises UserError for a column without any value."""
    there = ~np.isnan(table)
    if not there.any(0).all():
        raise UserError("a quantity has no value at any position")
    _, sums = group_sums(prompts, np.concatenate([np.where(there, table, 0.0), there], axis=1))
    totals, counts = np.split(sums, 2, axis=1)
    columns = np.stack([totals, counts], axis=-1).swapaxes(0, 1)[:, :, None]
    return [intervals(spread(column), scale)[0] for column, scale in zip(columns, scales, strict=True)]


def summarise_by_alpha(rows: pd.DataFrame) -> dict[str, dict]:
    """`summarise` for every alpha, keyed by its number as text, and for all of them pooled by count ("pooled")."""
    if rows.empty:
        raise UserError("there are no positions to summarise")
    by_alpha = {f"{alpha:g}": summarise(part) for alpha, part in rows.groupby("alpha")}
    return by_alpha | {"pooled": summarise(rows)}


def length_gain(acceptance: float, headroom: float, gamma: int) -> float:
    """What a per-token gain `headroom` adds to the accepted length of a chain at constant per-token `acceptance`.

    sum over i = 1..gamma of (a + h)^i - a^i, the sum capped at certain acceptance.
    """
    raised = min(1.0, acceptance + headroom)
    return sum(raised**i - acceptance**i for i in range(1, gamma + 1))


def _floats(values) -> np.ndarray:
    """Numbers or flags, perhaps with nulls, as floats."""
    return np.asarray(pd.Series(values).astype(float), dtype=float)
