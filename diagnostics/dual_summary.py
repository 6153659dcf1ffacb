"""From the records of a dual-drafter study to [DCD, Tab. 6] for this pair, with paired intervals. No torch.

Seeds (pairs of heads) are pooled into the estimates; intervals are over prompts, and differences from the
expert-aligned draft take the spread between seeds too (`intervals.changes`). L is accepted drafts over rounds.
"""

import numpy as np
import pandas as pd

from dcd_core.errors import UserError
from diagnostics.intervals import changes, ratio_of_sums
from diagnostics.position_summary import clusters, means, scale_of
from diagnostics.verdicts import judge
from diagnostics.wording import count, percent, plain

DRAFTS = {
    "target": "expert-aligned: e",
    "dual": "dual: [e, f]",
    "oracle": "oracle: e, true amateur",
    "exact_expert": "oracle: true expert, f",
}
"""Kinds of drafts by the beginning of their columns; the first is what all others are compared with."""
COLUMNS = (
    "data set",
    "alpha",
    "prompts",
    "draft",
    "accepted length L",
    "L minus e's",
    "KL(draft||π), nats",
    "top-1 matches",
)
"""Headers of :func:`table6`."""


def summarise_dual(positions: pd.DataFrame, replays: pd.DataFrame, gamma: int) -> list[dict]:
    """An entry for every data set and contrast strength: JSON-able, intervals as dicts.

    `drafts` holds length (L), tokens_per_round, kl, top1 and acceptance of each kind, and the differences from e as
    `..._change`; `equal_time` L of e at twice the draft length and the dual draft's difference from it;
    `relative_change` and `verdict` the dual draft's L against e's (no change where no draft of e is ever accepted);
    `share_closer`, `variances` and `rule` the variance rule.
    """
    found = []
    groups = replays.groupby(["dataset", "alpha"], sort=True)
    for (dataset, alpha), part in groups:
        own = positions[(positions["dataset"] == dataset) & (positions["alpha"] == alpha)]
        if own["dual_tv"].isna().any():
            raise UserError(f"positions of {dataset} at alpha {alpha:g} hold no dual drafts")
        entry = {"dataset": dataset, "alpha": float(alpha), "gamma": gamma}
        entry |= {"prompts": int(part["prompt_id"].nunique()), "seeds": int(part["pair"].nunique())}
        entry["positions"] = len(own[["prompt_id", "position"]].drop_duplicates())  # of the texts, whatever the seeds
        entry["drafts"] = _drafts(part, own, gamma)
        entry |= _lengths(part, gamma)
        entry |= _closeness(own, alpha)
        found.append(entry)
    made = [entry for entry in found if entry["change"] is not None]
    for entry, judged in zip(made, judge([entry["change"] for entry in made]), strict=True):
        entry["verdict"] = judged.verdict
        entry["relative_change"] = entry["change"].interval().as_dict()
    for entry in found:
        del entry["change"]
    return found


def table6(entry: dict) -> dict[str, list[str]]:
    """The cells of [DCD, Tab. 6] of one entry of :func:`summarise_dual`, by kind of draft."""
    return {
        kind: [
            entry["dataset"],
            f"{entry['alpha']:g}",
            count(entry["prompts"]),
            DRAFTS[kind],
            plain(draft["length"], 3),
            plain(draft["length_change"], 3, sign=True) if draft.get("length_change") else "",
            plain(draft["kl"], 3),
            percent(draft["top1"]),
        ]
        for kind, draft in entry["drafts"].items()
    }


def _arms(rows: pd.DataFrame, columns: list[tuple], prompts: pd.Index, seeds: list[str]) -> np.ndarray:
    """Sums as `intervals.changes` takes them, [prompt, seed, arm, 1, 2]; `columns` are (numerator, denominator) arrays
    of `rows`, one pair an arm. A prompt without a row counts 0."""
    place = prompts.get_indexer(rows["prompt_id"]) * len(seeds) + pd.Index(seeds).get_indexer(rows["pair"])
    size = len(prompts) * len(seeds)
    sums = [
        np.stack([np.bincount(place, np.asarray(part, dtype=float), minlength=size) for part in pair], axis=-1)
        for pair in columns
    ]
    return np.stack(sums, axis=1).reshape(len(prompts), len(seeds), len(columns), 1, 2)


def _drafts(replays: pd.DataFrame, positions: pd.DataFrame, gamma: int) -> dict[str, dict]:
    """Every kind of draft alone, and its paired differences from e."""
    names = ["kl", "top1", "acceptance"]
    one = np.ones(len(positions))
    values = {
        (kind, name): (1 - _floats(positions[f"{kind}_tv"]))
        if name == "acceptance"
        else _floats(positions[f"{kind}_{name}"])
        for kind in DRAFTS
        for name in names
    }
    units = clusters(positions)
    scales = [scale_of(f"mean_{kind}_{name}") for kind, name in values]
    intervals = means(units, np.stack(list(values.values()), axis=1), scales)
    found: dict[str, dict] = {kind: {} for kind in DRAFTS}
    for (kind, name), interval in zip(values, intervals, strict=True):
        found[kind][name] = interval.as_dict()
    prompts, seeds = pd.Index(sorted(replays["prompt_id"].unique())), sorted(replays["pair"].unique())
    for name in names:
        arms = _arms(positions, [(values[kind, name], one) for kind in DRAFTS], prompts, seeds)
        for kind, change in zip(list(DRAFTS)[1:], changes(arms, relative=False), strict=True):
            found[kind][f"{name}_change"] = change.interval().as_dict()
    parts = {kind: _rows(replays, kind, gamma) for kind in DRAFTS}
    for kind, rows in parts.items():
        found[kind]["length"] = _length(rows, "accepted")
        found[kind]["tokens_per_round"] = _length(rows, "emitted")
    arms = np.concatenate([_lengths_of(rows, prompts, seeds) for rows in parts.values()], axis=2)
    for kind, change in zip(list(DRAFTS)[1:], changes(arms, relative=False), strict=True):
        found[kind]["length_change"] = change.interval().as_dict()
    return found


def _lengths(replays: pd.DataFrame, gamma: int) -> dict:
    """The dual draft against e at equal draft length, as a share of L, and at equal drafting time."""
    prompts, seeds = pd.Index(sorted(replays["prompt_id"].unique())), sorted(replays["pair"].unique())
    short, long, dual = (
        _rows(replays, kind, drafts) for kind, drafts in (("target", gamma), ("target", 2 * gamma), ("dual", gamma))
    )
    both = _lengths_of(dual, prompts, seeds)
    equal_length = np.concatenate([_lengths_of(short, prompts, seeds), both], axis=2)
    equal_time = np.concatenate([_lengths_of(long, prompts, seeds), both], axis=2)
    (at_time,) = changes(equal_time, relative=False)
    change = None
    if equal_length[:, :, 0, 0, 0].sum() > 0:
        (change,) = changes(equal_length)
    return {
        "equal_time": {"length": _length(long, "accepted"), "change": at_time.interval().as_dict()},
        "change": change,
        "verdict": "undecided",
    }


def _closeness(positions: pd.DataFrame, alpha: float) -> dict:
    """Where the reconstruction is nearer to the target, and what the variances say about it."""
    names = ("var_signal", "var_error", "var_amateur_error", "cov_signal_error", "cov_errors")
    table = {name: _floats(positions[name]) for name in names}
    closer = _floats(positions["dual_closer"])
    shares = {"closer": closer}
    if alpha > 0:
        says = _floats(positions["rule_left"]) > _floats(positions["rule_right"])
        plain = table["var_signal"] > (1 + 2 / alpha) * table["var_error"] + table["var_amateur_error"]
        shares |= {"share": says, "uncorrelated": plain, "right": says == (closer > 0)}
    columns = np.stack([np.asarray(column, dtype=float) for column in (*table.values(), *shares.values())], axis=1)
    scales = [*(scale_of(name) for name in table), *["logit"] * len(shares)]
    intervals = [interval.as_dict() for interval in means(clusters(positions), columns, scales)]
    found = dict(zip((*table, *shares), intervals, strict=True))
    entry = {"share_closer": found["closer"], "variances": {name: found[name] for name in names}}
    if alpha > 0:
        entry["rule"] = {name: found[name] for name in ("share", "uncorrelated", "right")}
        entry["rule"]["factor"] = 1 + 2 / alpha
    return entry


def _rows(replays: pd.DataFrame, kind: str, gamma: int) -> pd.DataFrame:
    rows = replays[(replays["draft"] == kind) & (replays["gamma"] == gamma)]
    if rows.empty:
        raise UserError(f"the replays hold no '{kind}' drafts of {gamma} tokens")
    return rows


def _lengths_of(rows: pd.DataFrame, prompts: pd.Index, seeds: list[str]) -> np.ndarray:
    return _arms(rows, [(rows["accepted"], rows["rounds"])], prompts, seeds)


def _length(rows: pd.DataFrame, name: str) -> dict:
    return ratio_of_sums(rows["prompt_id"], rows[name], rows["rounds"]).as_dict()


def _floats(values: pd.Series) -> np.ndarray:
    return values.astype(float).to_numpy()
