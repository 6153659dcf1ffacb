"""Names break where their parts do, and only a number has an interval."""

import pytest

from diagnostics.pages import breakable, split_interval


def test_names_break_between_their_parts_and_stay_escaped():
    assert breakable("dcd_eagle3@5x4:10+lazy") == "dcd_eagle3@<wbr>5x4:10+<wbr>lazy"
    assert breakable("paper: accepted_length", "_") == "paper: accepted_<wbr>length"
    assert breakable("+0.2%") == "+0.2%" and breakable("a<b & c") == "a&lt;b &amp; c"


@pytest.mark.parametrize(
    "text, parts",
    [
        ("1.95 [1.86, 2.03]", ("1.95", "[1.86, 2.03]")),
        ("dual: -0.3% [-0.4, +0.1]", ("dual: -0.3%", "[-0.4, +0.1]")),
        ("dual: [e, f]", ("dual: [e, f]", "")),
        ("", ("", "")),
    ],
)
def test_only_numbers_have_intervals(text, parts):
    assert split_interval(text) == parts
