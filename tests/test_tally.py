"""Figures of answers are ratios of sums, with the prefill and its token left out."""

import pytest

from dcd_core.decode import Generation, Round
from dcd_core.tally import Tally


def answer(*rounds: tuple[int, int], prefill_s: float = 0.5) -> Generation:
    """An answer whose rounds accepted and emitted these numbers of tokens."""
    made = [Round(5, accepted, emitted, 0, 0, 0, 0) for accepted, emitted in rounds]
    return Generation("a", 0, [8] * (1 + sum(emitted for _, emitted in rounds)), made, prefill_s, "length")


def test_sums_by_hand():
    tally = Tally()
    tally.add(answer((2, 3), (0, 1)), seconds=1.5)
    tally.add(answer((5, 6), prefill_s=0.25), seconds=2.0)
    assert (tally.answers, tally.tokens, tally.rounds) == (2, 12, 3)
    assert tally.tokens_per_second == pytest.approx(10 / 2.75)
    assert tally.accepted_length == pytest.approx(7 / 3)
    assert tally.tokens_per_round == pytest.approx(10 / 3)
    assert str(tally) == (
        "2 answers, 12 tokens, 0.75 s of prefill, then 3.6 tokens/s; accepted_length 2.33, tokens_per_round 3.33"
    )


def test_an_answer_of_one_token_has_no_speed():
    tally = Tally()
    assert tally.tokens_per_second is tally.accepted_length is tally.tokens_per_round is None
    tally.add(answer(), seconds=0.5)
    assert tally.tokens_per_second is None
    assert str(tally) == "1 answer, 1 token, 0.50 s of prefill"


def test_blocks_of_deferred_judging_count_passes_of_the_expert():
    """As the benchmark counts them: one block of 3 passes that wrote 5 tokens, one of 1 pass that wrote 2."""
    made = answer((5, 5), (1, 2))
    made.rounds[0].expert_passes = 3
    tally = Tally()
    tally.add(made)
    assert tally.rounds == 4
    assert tally.accepted_length == pytest.approx(3 / 4) and tally.tokens_per_round == pytest.approx(7 / 4)
