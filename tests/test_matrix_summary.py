"""The paper's Table 8 gives its Table 1, and the summary row says what it says it does."""

import pytest

from dcd_core.errors import UserError
from diagnostics import paper
from diagnostics.matrix_summary import summarise_matrix


@pytest.mark.parametrize("setting", paper.CROSS_ALPHA)
def test_table_8_gives_table_1(setting):
    """Best train-alpha, mean difference as printed, gain within .02 points, columns won by the control."""
    found = summarise_matrix(paper.CROSS_ALPHA[setting], paper.CROSS_ALPHAS)
    best, difference, gain, wins = paper.CROSS_ALPHA_SUMMARY[setting]
    assert found.best_train_alpha == best
    assert round(found.difference, 3) == pytest.approx(difference)
    assert 100 * found.gain == pytest.approx(gain, abs=0.02)
    assert (found.control_best, found.columns) == (wins, 4)


def test_the_only_gain_of_the_paper_is_of_the_unrounded_difference():
    found = summarise_matrix(paper.CROSS_ALPHA["Llama-3, GSM8K"], paper.CROSS_ALPHAS)
    assert found.difference == pytest.approx(0.01475) and 100 * found.gain == pytest.approx(0.756, abs=5e-4)


def test_rows_may_come_in_any_order_and_ties_go_to_the_smaller_alpha():
    found = summarise_matrix([[2.0, 1.0], [1.0, 2.0], [1.5, 1.0]], (0.3, 0.1, 0.0))
    assert found.best_train_alpha == 0.1 and found.difference == 0.25 and found.control_best == 0
    assert summarise_matrix([[1.0], [1.0]], (0.0, 0.5)).control_best == 1, "a tie is a win"


@pytest.mark.parametrize(
    "matrix, alphas, message",
    [
        ([[1.0]], (0.1,), "train-alpha 0 is the control"),
        ([[1.0], [2.0]], (0.0,), "no row for each"),
        ([[float("nan")]], (0.0,), "finite"),
    ],
)
def test_refusals(matrix, alphas, message):
    with pytest.raises(UserError, match=message):
        summarise_matrix(matrix, alphas)
