"""The summary row of a matrix of accepted length over train-alpha and infer-alpha [DCD, Tabs. 1 and 8]. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dcd_core.errors import UserError


@dataclass(frozen=True)
class MatrixSummary:
    """What one matrix says about train-alpha 0, the expert-aligned control.

    Attributes:
        best_train_alpha: highest mean of L over infer-alpha; ties go to the smaller train-alpha.
        difference: its mean L minus the control's, accepted drafts a round.
        gain: that as a share of the control's mean L.
        control_best: infer-alpha columns in which the control has the highest L, ties included.
        columns: how many there are.
    """

    best_train_alpha: float
    difference: float
    gain: float
    control_best: int
    columns: int

    def as_dict(self) -> dict:
        return asdict(self)


def summarise_matrix(matrix, train_alphas: Sequence[float]) -> MatrixSummary:
    """The summary row of `matrix` [train-alpha, infer-alpha].

    Raises:
        UserError: rows that do not belong to `train_alphas`, no control among them, or values that are no lengths.
    """
    lengths = np.asarray(matrix, dtype=np.float64)
    if lengths.ndim != 2 or lengths.shape[0] != len(train_alphas) or lengths.shape[1] == 0:
        raise UserError(f"a matrix of shape {lengths.shape} has no row for each of the train-alphas {train_alphas}")
    if not np.isfinite(lengths).all() or (lengths < 0).any():
        raise UserError("accepted lengths must be finite and not below zero")
    if 0.0 not in train_alphas:
        raise UserError(f"train-alpha 0 is the control, and it is not among {list(train_alphas)}")
    order = np.argsort(train_alphas, kind="stable")  # argmax takes the first of equals
    means = lengths.mean(1)
    control = list(train_alphas).index(0.0)
    best = int(order[np.argmax(means[order])])
    difference = float(means[best] - means[control])
    return MatrixSummary(
        best_train_alpha=float(train_alphas[best]),
        difference=difference,
        gain=difference / float(means[control]) if means[control] > 0 else 0.0,
        control_best=int((lengths[control] >= lengths.max(0)).sum()),
        columns=lengths.shape[1],
    )
