"""The four verdicts and their sentences, each from a change that calls for it, the unwelcome ones included."""

from statistics import NormalDist

import numpy as np
import pytest

from diagnostics.intervals import DRAWS, Change, Interval
from diagnostics.position_summary import length_gain
from diagnostics.verdicts import VERDICTS, headroom, headroom_clause, judge, verdict_sentence

QUANTILES = np.array([NormalDist().inv_cdf((place + 0.5) / 4000) for place in range(4000)])


def normal(estimate, deviation):
    """A change whose draws are normal quantiles: exact p-values, no luck."""
    return Change(estimate, estimate + deviation * QUANTILES, None, 1000, 3)


@pytest.mark.parametrize(
    "estimate, deviation, verdict",
    [
        (0.030, 0.008, "helps"),
        (0.012, 0.004, "helps"),
        (-0.008, 0.006, "no gain"),
        (0.000, 0.003, "no gain"),
        (0.004, 0.001, "no gain"),  # surely above zero, and surely too little to matter
        (-0.004, 0.001, "no gain"),
        (-0.030, 0.008, "hurts"),
        (-0.012, 0.004, "hurts"),
        (0.000, 0.010, "undecided"),
        (0.008, 0.006, "undecided"),
        (-0.010, 0.030, "undecided"),
    ],
)
def test_verdicts(estimate, deviation, verdict):
    (found,) = judge([normal(estimate, deviation)])
    assert found.verdict == verdict and found.comparisons == 1


def test_verdicts_agree_with_the_interval_they_are_printed_with():
    generator = np.random.default_rng(0)
    for _ in range(200):
        one = normal(generator.normal(0, 0.01), generator.uniform(0.001, 0.01))
        interval, (found,) = one.interval(), judge([one])
        if found.verdict == "no gain":
            assert interval.high < 0.0101
        elif found.verdict == "helps":
            assert interval.low > -1e-4 and interval.high > 0.0099
        elif found.verdict == "hurts":
            assert interval.high < 1e-4 and interval.low < -0.0099
        else:
            assert interval.low < 1e-4 and interval.high > 0.0099


def test_a_grid_is_corrected_for_its_size():
    """One comparison that is just sure alone is not sure among twelve; a clear one still is."""
    close, clear, vague = normal(0.02, 0.009), normal(0.05, 0.008), normal(0.0, 0.02)
    assert judge([close])[0].verdict == "helps"
    among = judge([close, clear, *[vague] * 10])
    assert [one.verdict for one in among] == ["undecided", "helps", *["undecided"] * 10]
    assert among[0].p_above >= judge([close])[0].p_above * 5


def test_a_grid_of_any_size_in_use_can_be_decided():
    """A change that no draw contradicts is decided among 60 comparisons."""
    grid = [Change(0.05, np.full(DRAWS, 0.05), np.full(DRAWS, 0.05), 100, 1)] * 60
    assert {one.verdict for one in judge(grid)} == {"helps"}


def test_tost_is_the_larger_of_two_tests():
    inside, shifted = judge([normal(0.0, 0.003)])[0], judge([normal(-0.02, 0.003)])[0]
    assert inside.p_equivalent < 0.01 and inside.gain_ruled_out and inside.loss_ruled_out
    assert shifted.p_equivalent > 0.99 and shifted.gain_ruled_out and not shifted.loss_ruled_out


def test_few_prompts_decide_nothing():
    """However sure they look: five prompts drawn with replacement do not know what a sixth would do."""
    nothing = Change(0.5, None, None, 1, 1)
    assert judge([nothing])[0].verdict == "undecided"
    for estimate in (-0.5, 0.0, 0.5):
        draws = estimate + 1e-4 * QUANTILES
        few, enough = (judge([Change(estimate, draws, draws, prompts, 1)])[0] for prompts in (19, 20))
        assert few.verdict == "undecided" != enough.verdict and not few.gain_ruled_out
    found = Interval(0.5, 0.4, 0.6, 19).as_dict()
    assert "19 prompts are too few to tell" in verdict_sentence("undecided", 0.3, found, False)


@pytest.mark.parametrize("true, wrong", [(0.01, "no gain"), (0.0, "helps"), (0.0, "hurts")])
def test_a_wrong_verdict_anywhere_in_a_grid_is_rare(true, wrong):
    """Twelve comparisons at the edge of what a verdict denies: in 400 grids, one wrong anywhere in under 5%."""
    generator, wrongly = np.random.default_rng(1), 0
    base = generator.normal(size=2000)
    for _ in range(400):
        errors = generator.normal(0, 0.01, size=12)
        grid = [Change(true + error, true + error + 0.01 * base, None, 100, 1) for error in errors]
        wrongly += any(one.verdict == wrong for one in judge(grid))
    assert wrongly / 400 < 0.05


def test_sentences():
    def said(verdict, low, estimate, high, loss_ruled_out=False):
        return verdict_sentence(verdict, 0.3, Interval(estimate, low, high, 100).as_dict(), loss_ruled_out)

    assert said("no gain", -0.021, -0.008, 0.004) == (
        "No gain from contrast-aware training at alpha 0.3: L changes by -0.8% [-2.1, +0.4], so a gain of 1% or more "
        "is ruled out"
    )
    assert said("no gain", -0.004, 0.0, 0.004, loss_ruled_out=True).endswith("and so is a loss of that size")
    assert said("helps", 0.01, 0.024, 0.038).startswith("A gain from contrast-aware training at alpha 0.3")
    assert "L changes by -2.4% [-3.8, -1.0], so it hurts" in said("hurts", -0.038, -0.024, -0.01)
    undecided = said("undecided", -0.02, 0.0, 0.02)
    assert "neither shows a gain nor rules out one of 1% or more" in undecided and "comparisons" not in undecided
    assert "number of comparisons" in said("undecided", 0.001, 0.01, 0.02), "sure alone, not among many"
    assert said("no gain", 0.002, 0.005, 0.008).startswith("No gain of 1% or more from"), "it surely gains a little"
    alone = verdict_sentence("hurts", 0.3, Interval(-0.02, -0.03, -0.01, 100).as_dict(), False, seeds=1)
    assert "at alpha 0.3, between these two drafters, one training run each: L changes" in alone
    assert {said(verdict, -0.02, 0.0, 0.02).split()[0] for verdict in VERDICTS} == {"No", "A", "Undecided"}


def test_headroom_is_a_gain_per_token_turned_into_length():
    """The issue's own figures, and those of a = .6, h = .01: +3.5% of L at gamma 5."""
    found = headroom(0.6, 0.01, 5)
    assert found["share_of_length"] == pytest.approx(0.035, abs=5e-4)
    assert found["added_length"] == pytest.approx(length_gain(0.6, 0.01, 5))
    assert headroom(0.9, 0.5, 5)["added_length"] == pytest.approx(5 - sum(0.9**i for i in range(1, 6)))
    assert headroom(0.6, 0.0, 5)["added_length"] == 0.0
    realised = Interval(0.0012, -0.001, 0.0034, 100).as_dict()
    assert headroom_clause(0.019, 0.04, 0.025, realised) == (
        "at equal approximation error, aiming at the contrast could add at most 1.9 points to the acceptance of a "
        "sampled first draft (about 4% of L), of which +0.12 [-0.10, +0.34] were realised, and 2.5 points to that of "
        "a greedy one"
    )
    assert "at most 0.03 points" in headroom_clause(0.0003, 0.0006, 0.0, None)
    assert (
        "1.0 points to the acceptance of a sampled first draft (about 0.06% of L), and 0.0 points"
        in headroom_clause(0.01, 0.0006, 0.0, None)
    )
    assert "% of L" not in headroom_clause(0.5, headroom(0.0, 0.5, 5)["share_of_length"], 0.1, None)
