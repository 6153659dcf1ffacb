"""From a replays table to the matrix, its summary row, verdicts and controls. No torch.

The family's members are trained on several contrast strengths (train-alpha) from several seeds; each is measured at
several targets (infer-alpha) on the same prompts. L is accepted drafts over rounds, prompts and seeds pooled; every
change is against train-alpha 0 at the same infer-alpha, on the same prompts and from the same seeds.
"""

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from dcd_core.errors import UserError
from diagnostics.intervals import Change, Interval, changes, interval, ratio_of_sums
from diagnostics.matrix_summary import summarise_matrix
from diagnostics.verdicts import MARGIN, headroom, headroom_clause, judge, verdict_sentence
from diagnostics.wording import percent

FAMILY = "family"


@dataclass(frozen=True)
class Matrix:
    """The family's sums [prompt, seed, train-alpha, infer-alpha], train-alpha 0 first."""

    train_alphas: tuple[float, ...]
    infer_alphas: tuple[float, ...]
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    accepted: np.ndarray
    rounds: np.ndarray
    acceptance: np.ndarray
    top1: np.ndarray
    positions: np.ndarray

    def arms(self, numerator: str, denominator: str, infer: int | None = None) -> np.ndarray:
        """Sums as `intervals.changes` takes them: [prompt, seed, train-alpha, infer-alpha (one or all), 2]."""
        columns = slice(None) if infer is None else slice(infer, infer + 1)
        return np.stack([getattr(self, name)[..., columns] for name in (numerator, denominator)], axis=-1)

    def lengths(self) -> np.ndarray:
        """L [train-alpha, infer-alpha]."""
        return _ratio(self.accepted.sum((0, 1)), self.rounds.sum((0, 1)))

    def acceptances(self) -> np.ndarray:
        """Mean acceptance of sampled drafts on the shared history [train-alpha, infer-alpha]."""
        return _ratio(self.acceptance.sum((0, 1)), self.positions.sum((0, 1)))


def read_matrix(rows: pd.DataFrame) -> Matrix:
    """The family's part of a replays table.

    Raises:
        UserError: no family, no train-alpha 0, or a prompt, seed and alpha without exactly one row.
    """
    rows = rows[rows["group"] == FAMILY]
    if rows.empty:
        raise UserError("the records hold no matched family of drafters")
    keys = ("prompt_id", "seed", "train_alpha", "infer_alpha")
    levels = [sorted(rows[key].unique().tolist()) for key in keys]
    if levels[2][0] != 0:
        raise UserError(f"the family has no drafter of train-alpha 0, the control; it has {levels[2]}")
    ordered = rows.sort_values(list(keys))
    shape = tuple(len(level) for level in levels)
    if len(rows) != np.prod(shape) or ordered.duplicated(list(keys)).any():
        raise UserError(
            f"{len(rows)} rows do not give each of {shape[0]} prompts, {shape[1]} seeds, {shape[2]} train-alphas and "
            f"{shape[3]} infer-alphas one row"
        )
    names = ("accepted", "rounds", "acceptance", "top1", "positions")
    sums = [ordered[name].to_numpy(dtype=np.float64).reshape(shape) for name in names]
    return Matrix(tuple(levels[2]), tuple(levels[3]), tuple(levels[1]), tuple(levels[0]), *sums)


def summarise_replays(rows: pd.DataFrame, gamma: int, margin: float = MARGIN) -> dict:
    """Everything that the report says of one replays table, JSON-able; intervals are 95%, over prompts and seeds.

    Returns:
        `lengths`, `acceptances`: the matrices [train-alpha, infer-alpha], for sampled drafts on the shared history;
        `summary`: the row of [DCD, Tab. 1]; `train_rows`: per train-alpha the mean over infer-alpha of its change;
        `cells`: every comparison with its verdict, and the verdict over prompts alone, which holds for just these
        drafters; `verdicts`: of these the one per infer-alpha that training on the same alpha is about, with the
        headroom and the sentence (of several seeds also one over prompts alone). These are the question, and are
        corrected for their own number; the others are corrected for theirs; `controls`: other drafters beside the
        control.
    """
    matrix = read_matrix(rows)
    cells = _cells(matrix, margin)
    found = {
        "train_alphas": list(matrix.train_alphas),
        "infer_alphas": list(matrix.infer_alphas),
        "seeds": list(matrix.seeds),
        "prompts": len(matrix.prompts),
        "gamma": gamma,
        "margin": margin,
        "lengths": matrix.lengths().tolist(),
        "acceptances": matrix.acceptances().tolist(),
        "summary": summarise_matrix(matrix.lengths(), matrix.train_alphas).as_dict(),
        "train_rows": _train_rows(matrix),
        "cells": cells,
        "verdicts": [],
        "controls": _controls(rows, matrix),
    }
    for infer in matrix.infer_alphas:
        cell = matched(cells, infer)
        if cell is not None:
            found["verdicts"].append(_verdict(cell, rows, matrix, gamma, margin))
    return found


def matched(cells: list[dict], infer_alpha: float) -> dict | None:
    """The comparison that answers for this infer-alpha: training on the same alpha, or else on the nearest (of two, the
    smaller); none at 0, where there is no contrast to know about."""
    here = [cell for cell in cells if cell["infer_alpha"] == infer_alpha]
    if infer_alpha == 0 or not here:
        return None
    # rounded: 0.1 and 0.3 are as near to 0.2 as each other, whatever their last bits
    return min(here, key=lambda cell: (round(abs(cell["train_alpha"] - infer_alpha), 9), cell["train_alpha"]))


def _cells(matrix: Matrix, margin: float) -> list[dict]:
    """Every train-alpha above 0 at every infer-alpha: those that `matched` names judged together, and the others."""
    lengths, acceptances = matrix.lengths(), matrix.acceptances()
    known: list[Change | None] = []
    cells = []
    for column, infer in enumerate(matrix.infer_alphas):
        length = changes_of_length(matrix, column)
        acceptance = changes(matrix.arms("acceptance", "positions", column), relative=False)
        for row, train in enumerate(matrix.train_alphas[1:], 1):
            cell = {"train_alpha": train, "infer_alpha": infer, "length": float(lengths[row, column])}
            cell |= {"control_length": float(lengths[0, column]), "control_acceptance": float(acceptances[0, column])}
            cell["acceptance_change"] = acceptance[row - 1].interval().as_dict()
            if length is not None:  # a control that is never accepted has no change relative to it
                cell["change"] = length[row - 1].interval().as_dict()
                cell["change_over_prompts"] = length[row - 1].interval(seeds=False).as_dict()
                cell["seed_deviation"] = length[row - 1].seed_deviation
            known.append(length[row - 1] if length is not None else None)
            cells.append(cell)
    asked = [id(matched(cells, infer)) for infer in matrix.infer_alphas]
    for group in (True, False):
        places = [k for k, cell in enumerate(cells) if known[k] is not None and (id(cell) in asked) == group]
        own = judge([known[k] for k in places], margin)
        alone = judge([known[k].of_these_drafters for k in places], margin)
        for place, over_seeds, over_prompts in zip(places, own, alone, strict=True):
            cells[place] |= asdict(over_seeds) | {"verdict_over_prompts": over_prompts.verdict}
    return [{"verdict": "undecided", "verdict_over_prompts": "undecided"} | cell for cell in cells]


def changes_of_length(matrix: Matrix, infer: int) -> list[Change] | None:
    """Relative changes of L at one infer-alpha; None where the control's L is 0."""
    if matrix.accepted[:, :, 0, infer].sum() == 0:
        return None
    return changes(matrix.arms("accepted", "rounds", infer))


def _train_rows(matrix: Matrix) -> list[dict]:
    """Per train-alpha above 0: mean L over infer-alpha minus the control's, in drafts a round and as a share."""
    arms = matrix.arms("accepted", "rounds")
    differences = changes(arms, relative=False)
    shares = changes(arms) if matrix.accepted[:, :, 0].sum() > 0 else [None] * len(differences)
    return [
        {
            "train_alpha": train,
            "difference": difference.interval().as_dict(),
            "gain": share.interval().as_dict() if share else None,
        }
        for train, difference, share in zip(matrix.train_alphas[1:], differences, shares, strict=True)
    ]


def _verdict(cell: dict, rows: pd.DataFrame, matrix: Matrix, gamma: int, margin: float) -> dict:
    """A comparison with the headroom at its infer-alpha, how much of it was realised, and the sentence."""
    here = rows[(rows["group"] == FAMILY) & (rows["infer_alpha"] == cell["infer_alpha"])]
    once = here[(here["train_alpha"] == 0) & (here["seed"] == matrix.seeds[0])]
    ceilings = {
        name: ratio_of_sums(once["prompt_id"], once[name], once["positions"], scale="logit").as_dict()
        for name in ("headroom_tv", "headroom_flip")
    }
    base = cell["control_acceptance"]
    column = matrix.infer_alphas.index(cell["infer_alpha"])
    top1 = changes(matrix.arms("top1", "positions", column), relative=False)
    greedy = top1[matrix.train_alphas.index(cell["train_alpha"]) - 1].interval().as_dict()
    found = cell | ceilings | headroom(base, ceilings["headroom_tv"]["estimate"], gamma) | {"top1_change": greedy}
    clause = headroom_clause(
        ceilings["headroom_tv"]["estimate"],
        found["share_of_length"],
        ceilings["headroom_flip"]["estimate"],
        found["acceptance_change"],
    )
    if "change" not in cell:
        said = f"Undecided at alpha {cell['infer_alpha']:g}: no draft of the control was accepted"
    else:
        said = verdict_sentence(
            cell["verdict"],
            cell["infer_alpha"],
            cell["change"],
            cell["loss_ruled_out"],
            margin,
            None if cell["train_alpha"] == cell["infer_alpha"] else cell["train_alpha"],
            len(matrix.seeds),
        )
        if len(matrix.seeds) > 1:
            alone = percent(cell["change_over_prompts"], sign=True)
            words = f"Of just these drafters, over prompts alone: {cell['verdict_over_prompts']}, {alone}."
            found |= {"sentence_over_prompts": words}
    return found | {"sentence": f"{said}; {clause}."}


def _controls(rows: pd.DataFrame, matrix: Matrix) -> list[dict]:
    """Every other drafter (or family of them), by train-alpha and infer-alpha, against the family's train-alpha 0."""
    found = []
    others = rows[rows["group"] != FAMILY]
    for (group, train, infer), part in others.groupby(["group", "train_alpha", "infer_alpha"], sort=False):
        if infer not in matrix.infer_alphas:
            continue
        column = matrix.infer_alphas.index(infer)
        entry = {"group": group, "input": part["input"].iloc[0], "train_alpha": train, "infer_alpha": infer}
        seeds = tuple(sorted(part["seed"].unique().tolist()))
        # a head that was given alone, and not as a family, is held to nothing
        entry["matched"] = bool((part["drafter"] != part["group"]).all())
        entry |= {"seeds": list(seeds), "length": float(_ratio(part["accepted"].sum(), part["rounds"].sum()))}
        entry["acceptance"] = float(_ratio(part["acceptance"].sum(), part["positions"].sum()))
        arms, paired = _against_control(part, matrix, column, seeds)
        if arms is not None and arms[:, :, 0, :, 0].sum() > 0:
            (change,) = changes(arms)
            entry |= {"change": change.interval().as_dict(), "paired_seeds": paired}
        found.append(entry)
    return found


def _against_control(
    part: pd.DataFrame, matrix: Matrix, column: int, seeds: tuple[int, ...]
) -> tuple[np.ndarray | None, list[int]]:
    """[prompt, seed, (control, other), 1, 2] of the seeds that both have, and which these are; where there are none, as
    for a head that is of no family, all seeds are pooled."""
    tables = [
        part.pivot_table(index="prompt_id", columns="seed", values=name, aggfunc="sum")
        for name in ("accepted", "rounds")
    ]
    if tables[0].index.tolist() != list(matrix.prompts) or any(table.isna().any(axis=None) for table in tables):
        return None, []  # measured on other prompts
    other = np.stack([table.to_numpy(dtype=np.float64) for table in tables], axis=-1)
    control = np.stack([matrix.accepted[:, :, 0, column], matrix.rounds[:, :, 0, column]], axis=-1)
    common = [seed for seed in matrix.seeds if seed in seeds] if (part["drafter"] != part["group"]).all() else []
    if common:
        control = control[:, [matrix.seeds.index(seed) for seed in common]]
        other = other[:, [seeds.index(seed) for seed in common]]
    else:
        control, other = control.sum(1, keepdims=True), other.sum(1, keepdims=True)
    return np.stack([control, other], axis=2)[:, :, :, None], common


def change_between(base: Matrix, other: Matrix, train_alpha: float, infer_alpha: float) -> Interval | None:
    """How much more training on `train_alpha` changes L in `other` than in `base`, as a share of each one's own L.

    Prompts are left out of both together. Training seeds, those that both have or else all, are pooled: it is of just
    these drafters. None where one of the two does not have this comparison, was measured on other prompts,
    or has a control of L 0.
    """
    sums, common = [], set(base.seeds) & set(other.seeds)
    for matrix in (base, other):
        if train_alpha not in matrix.train_alphas or infer_alpha not in matrix.infer_alphas:
            return None
        rows, column = [0, matrix.train_alphas.index(train_alpha)], matrix.infer_alphas.index(infer_alpha)
        seeds = [place for place, seed in enumerate(matrix.seeds) if not common or seed in common]
        sums.append(np.stack([matrix.accepted, matrix.rounds], -1)[:, seeds].sum(1)[:, rows, column])
        if not sums[-1][:, 0, 0].sum() > 0:
            return None
    if base.prompts != other.prompts:
        return None

    def difference(ratios: np.ndarray) -> np.ndarray:
        lengths = ratios.reshape(*ratios.shape[:-1], 2, 2)  # of (base, other), (control, trained)
        change = lengths[..., 1] / lengths[..., 0] - 1
        return change[..., 1] - change[..., 0]

    return interval(np.stack(sums, axis=1).reshape(len(base.prompts), -1, 2), difference)


def _ratio(numerator, denominator):
    """A ratio of sums; 0 of 0 is 0, so that a text without any round has a length."""
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=np.asarray(denominator) > 0)
