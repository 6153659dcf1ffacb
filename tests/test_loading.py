"""What partial results are keyed by: what code does, not how it is described."""

import pytest

from diagnostics.loading import code_key

CODE = '''"""What it does."""

class Adder:
    """Adds."""

    def add(self, a, b):
        """The sum."""
        # because
        return a + b
'''


def key(folder, source: str) -> str:
    (folder / "module.py").write_text(source)
    return code_key("*.py", root=folder)


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("# because", "# for another reason", True),
        ('"""The sum."""', '"""The sum of both."""', True),
        ('"""What it does."""\n', "", True),
        ("return a + b", "return (a +\n            b)", True),
        ("a + b", "a - b", False),
        ("def add", "def added", False),
        ("(self, a, b)", "(self, a, b=1)", False),
    ],
)
def test_words_about_code_are_no_part_of_its_key(tmp_path, old, new, same):
    assert old in CODE
    assert (key(tmp_path, CODE) == key(tmp_path, CODE.replace(old, new))) == same


def test_names_of_files_are_part_of_it(tmp_path):
    first = key(tmp_path, CODE)
    (tmp_path / "module.py").rename(tmp_path / "other.py")
    assert code_key("*.py", root=tmp_path) != first


def test_the_project_has_a_key():
    assert code_key("dcd_core/*.py") != code_key("dcd_core/**/*.py") != code_key("nowhere/*.py")
