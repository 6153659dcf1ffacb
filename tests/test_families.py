"""Every family of docs/models.md does what the page says."""

import pytest
from families import FAMILIES, HEAD, PAGE, row, seen


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_says_what_happens(name, tmp_path):
    assert row(name, seen(name, tmp_path)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_every_family_and_enough_of_them():
    text = PAGE.read_text(encoding="utf-8")
    rows = text.removeprefix(HEAD).splitlines()
    assert text.startswith(HEAD) and len(rows) == len(FAMILIES)
    decodes, trains = (sum(line.split(" | ")[place] == "yes" for line in rows) for place in (2, 3))
    assert decodes >= 12 and trains >= 10
