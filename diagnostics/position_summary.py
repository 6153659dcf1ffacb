"""From a positions table to buckets, cells and shares with prompt-cluster intervals. No torch.

The contrast-aligned draft is the oracle one: e corrected by the true amateur, so it has no error of its own on the
amateur's side. Its gains bound from above what a drafter could win by knowing the contrast at the expert-aligned
drafter's own error.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dcd_core.errors import UserError
from diagnostics.resampling import RESAMPLES, Interval, cluster_mean, group_sums, resampled_sums

# Buckets of [DCD, Figs. 2 and 7], in nats, for the signal and the drafter's error alike.
EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, np.inf)
BUCKETS = len(EDGES) - 1
FEW = 100  # cells with fewer positions are marked
SIGNAL_LIMIT, ERROR_LIMIT = 1.0, 2.0  # the paper's two headline shares: signal below 1 nat, KL(e||p) of 2 nats or more

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


@dataclass(frozen=True)
class Cells:
    """Positions by drafter error (rows) and signal (columns): counts, and means with 95% intervals, all [7, 7].

    Means and intervals are NaN where a cell has no position, and intervals where it has only one prompt.
    """

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
    return np.searchsorted(EDGES[1:-1], np.asarray(values), side="right")


def bucket_labels() -> list[str]:
    """Short names of the buckets for axes: '0-0.25', ..., '8+'."""
    return [f"{low:g}-{high:g}" for low, high in zip(EDGES[:-2], EDGES[1:-1], strict=True)] + [f"{EDGES[-2]:g}+"]


def clusters(rows: pd.DataFrame) -> np.ndarray:
    """The resampling unit of each row: its prompt, the same one at every alpha."""
    return (rows["dataset"].astype(str) + "\x1f" + rows["prompt_id"].astype(str)).to_numpy()


def gains(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """dTop1 and d acceptance per position: what the contrast-aligned draft adds to the expert-aligned one."""
    top1 = rows["oracle_top1"].to_numpy(dtype=float) - rows["target_top1"].to_numpy(dtype=float)
    return top1, (rows["target_tv"] - rows["oracle_tv"]).to_numpy(dtype=float)


def cells(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> Cells:
    """Bin positions by signal and drafter error; means per cell with cluster-bootstrap intervals over prompts."""
    cell = bucket(rows["error_reverse"]) * BUCKETS + bucket(rows["signal"])
    top1, acceptance = gains(rows)
    inside = np.zeros((len(rows), BUCKETS * BUCKETS))
    inside[np.arange(len(rows)), cell] = 1.0
    columns = np.concatenate([inside, inside * top1[:, None], inside * acceptance[:, None]], axis=1)
    ids, sums = group_sums(clusters(rows), columns)
    count, *totals = np.split(sums.sum(0), 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [total / count for total in totals]
        drawn = resampled_sums(sums, resamples, seed) if len(ids) > 1 else np.full((2, sums.shape[1]), np.nan)
        drawn_count, *drawn_totals = np.split(drawn, 3, axis=1)
        spreads = [_spread(total / drawn_count) for total in drawn_totals]
    prompts = (np.split(sums, 3, axis=1)[0] > 0).sum(0)
    shaped = [count.astype(int)]
    for mean, (low, high) in zip(means, spreads, strict=True):
        low, high = (np.where(prompts > 1, edge, np.nan) for edge in (low, high))
        shaped += [mean, low, high]
    return Cells(*(part.reshape(BUCKETS, BUCKETS) for part in shaped))


def _spread(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval per column, leaving out resamples in which the cell is empty."""
    low, high = np.full(drawn.shape[1], np.nan), np.full(drawn.shape[1], np.nan)
    some = np.isfinite(drawn).any(0)
    if not some.any():
        return low, high
    low[some], high[some] = np.nanquantile(drawn[:, some], [0.025, 0.975], axis=0)
    return low, high


def marginals(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Share of positions per signal bucket and per error bucket, each [7], summing to 1."""
    shares = [np.bincount(bucket(rows[name]), minlength=BUCKETS) / len(rows) for name in ("signal", "error_reverse")]
    return shares[0], shares[1]


def summarise(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> dict:
    """Headline shares, gains of the oracle draft, acceptances and the mean of every quantity, with 95% intervals.

    Returns a JSON-able dict; every entry but the counts is an Interval as a dict.
    """
    prompts = clusters(rows)
    top1, acceptance = gains(rows)
    values = {
        "share_signal_below_1": rows["signal"] < SIGNAL_LIMIT,
        "share_error_above_2": rows["error_reverse"] >= ERROR_LIMIT,
        "gain_top1": top1,
        "gain_acceptance": acceptance,
        "acceptance_expert_aligned": 1 - rows["target_tv"],
        "acceptance_contrast_aligned": 1 - rows["oracle_tv"],
        "top1_expert_aligned": rows["target_top1"],
        "top1_contrast_aligned": rows["oracle_top1"],
    } | {f"mean_{name}": rows[name] for name in MEANS}
    if rows["amateur_error"].notna().all():
        values["mean_amateur_error"] = rows["amateur_error"]
    found = {"positions": len(rows), "prompts": len(np.unique(prompts))}
    table = np.stack([np.asarray(column, dtype=float) for column in values.values()], axis=1)
    for name, interval in zip(values, _means(prompts, table, resamples, seed), strict=True):
        found[name] = interval.as_dict()
    signal, error = marginals(rows)
    return found | {"signal_shares": signal.tolist(), "error_shares": error.tolist()}


def _means(prompts: np.ndarray, table: np.ndarray, resamples: int, seed: int) -> list[Interval]:
    """Cluster means of many columns from one set of resamples."""
    ids, sums = group_sums(prompts, np.concatenate([np.ones((len(table), 1)), table], axis=1))
    if len(ids) < 2:
        return [cluster_mean(prompts, column) for column in table.T]
    drawn = resampled_sums(sums, resamples, seed)
    low, high = np.quantile(drawn[:, 1:] / drawn[:, :1], [0.025, 0.975], axis=0)
    total = sums.sum(0)
    edges = zip(total[1:] / total[0], low, high, strict=True)
    return [Interval(float(mean), float(below), float(above), len(ids)) for mean, below, above in edges]


def summarise_by_alpha(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, dict]:
    """`summarise` for every alpha, keyed by its number as text, and for all of them pooled by count ("pooled")."""
    if rows.empty:
        raise UserError("there are no positions to summarise")
    by_alpha = {f"{alpha:g}": summarise(part, resamples, seed) for alpha, part in rows.groupby("alpha")}
    return by_alpha | {"pooled": summarise(rows, resamples, seed)}


def length_gain(acceptance: float, headroom: float, gamma: int) -> float:
    """What a per-token gain `headroom` adds to the accepted length of a chain at constant per-token `acceptance`.

    sum over i = 1..gamma of (a + h)^i - a^i, the sum capped at certain acceptance.
    """
    raised = min(1.0, acceptance + headroom)
    return sum(raised**i - acceptance**i for i in range(1, gamma + 1))
