"""Speed-ups by kind of prompt, from a benchmark's table."""

import json

import pytest
from test_round_summary import table

from dcd_core.config import run_entry
from diagnostics.by_kind import ALL, main
from diagnostics.records import write_records

SECONDS = {("q", "cd"): 0.2, ("q", "auto"): 0.1, ("s", "cd"): 0.1, ("s", "auto"): 0.125}
"""Of a token of each kind of prompt by each method."""


def files(folder, methods=("cd", "auto"), without=()):
    """A rounds table of two prompts a kind, one token each, and the prompts."""
    names = {f"{kind}{number}": kind for kind in "qs" for number in range(2)}
    rows = [(0.3, method, name, 0, 0, 1, SECONDS[kind, method]) for name, kind in names.items() for method in methods]
    columns = {name: list(values) for name, values in table(*rows).items()}
    write_records(folder / "rounds.parquet", "rounds", columns, {})
    lines = [json.dumps({"id": name, "source": kind}) for name, kind in names.items() if name not in without]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return [f"--{name}={folder / file}" for name, file in (("rounds", "rounds.parquet"), ("prompts", "prompts.jsonl"))]


def test_every_kind_is_compared_with_cd_on_its_own_prompts(tmp_path, capsys):
    assert main([*files(tmp_path), f"--output={tmp_path / 'out'}"]) == 0
    found = json.loads((tmp_path / "out" / "kinds.json").read_text())["speedups"]
    assert {(one["kind"], one["method"], one["prompts"]) for one in found} == {
        (ALL, "auto", 4),
        ("q", "auto", 2),
        ("s", "auto", 2),
    }
    speeds = {one["kind"]: one["speedup"]["estimate"] for one in found}
    assert speeds == pytest.approx({"q": 2.0, "s": 0.8, ALL: 0.6 / 0.45})
    assert "auto: at worst 0.80 of cd (s, alpha 0.3)" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, capsys):
    for number, options in enumerate(({"methods": ("auto",)}, {"without": ("q1",)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        given = [*files(folder, **options), f"--output={folder / 'out'}"]
        assert run_entry(lambda given=given: main(given)) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1 and not (folder / "out").exists()
    (folder / "prompts.jsonl").write_text('{"id": "q0"}\n')
    assert run_entry(lambda: main(given)) == 2
    assert "line 1: not a record with id and source" in capsys.readouterr().err
