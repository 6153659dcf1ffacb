"""A reader sees the old content or the new, never half of it, and equal content has equal hashes."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from dcd_core.errors import UserError
from dcd_core.files import (
    atomic_path,
    cache_dir,
    check_output_file,
    check_output_folder,
    content_hash,
    file_hash,
    write_json_atomic,
    write_text_atomic,
)
from dcd_core.progress import Bar, progress


def test_a_file_is_replaced_whole(tmp_path):
    target = tmp_path / "deep" / "a.txt"
    write_text_atomic(target, "old")
    with atomic_path(target) as temporary:
        assert temporary.parent == target.parent and temporary.suffix == ".txt"
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new" and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path, kind):
    target = tmp_path / "a"
    write_text_atomic(target, "old")
    with pytest.raises(RuntimeError, match="half-way"), atomic_path(target) as temporary:
        if kind == "folder":
            temporary.mkdir()
            temporary = temporary / "part"
        temporary.write_text("half")
        raise RuntimeError("half-way")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "model"
    for word in ("old", "new"):
        with atomic_path(target) as temporary:
            temporary.mkdir()
            (temporary / word).write_text(word)
    assert [path.name for path in target.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [target]


def test_a_body_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was written"), atomic_path(tmp_path / "a"):
        pass


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    code = (
        "import os, sys; from dcd_core.files import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary: temporary.write_text('half'); os._exit(9)"
    )
    target = tmp_path / "a"
    assert subprocess.run([sys.executable, "-c", code, str(target)]).returncode == 9
    assert [path.read_text() for path in tmp_path.iterdir()] == ["half"] and not target.exists()
    with atomic_path(target) as mine, atomic_path(tmp_path / "b") as other:
        mine.write_text("a"), other.write_text("b")  # a living process keeps its temporary files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_json_takes_what_results_are_made_of(tmp_path):
    @dataclass
    class Row:
        name: str
        place: Path

    write_json_atomic(tmp_path / "a.json", {"row": Row("x", Path("y")), 3: (numpy.float64(0.5), numpy.int64(2), None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"row": {"name": "x", "place": "y"}, "3": [0.5, 2, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), numpy.float32("nan")])
def test_json_has_no_nan(tmp_path, value):
    with pytest.raises(UserError, match=r"a.json: x\[0\] is not a finite number"):
        write_json_atomic(tmp_path / "a.json", {"x": [value]})
    assert not list(tmp_path.iterdir())


def test_hashes_go_by_content(tmp_path):
    assert content_hash({"a": 1, "b": [1, 2]}) == content_hash({"b": (1, 2), "a": 1})
    assert content_hash({"a": 1}) != content_hash({"a": 2}) and content_hash([1, 2]) != content_hash([2, 1])
    with pytest.raises(TypeError, match="object"):
        content_hash({"a": object()})
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        write_text_atomic(folder / "deep" / "a", "same")
    assert file_hash(first) == file_hash(second)
    (second / "deep" / "a").rename(second / "deep" / "b")
    assert file_hash(first) != file_hash(second), "names count"
    sha256_of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    write_text_atomic(first / "abc", "abc")
    assert file_hash(first / "abc") == sha256_of_abc


def test_the_cache_folder_can_be_set(monkeypatch, tmp_path):
    monkeypatch.setenv("DCD_CACHE", str(tmp_path / "variable"))
    assert cache_dir() == tmp_path / "variable" and cache_dir(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("DCD_CACHE")
    assert cache_dir() == (Path.home() / ".cache" / "dcd").resolve()


def test_progress_in_a_log_is_a_line_now_and_then(capsys, monkeypatch):
    times = iter(range(0, 1000, 4))
    monkeypatch.setattr("dcd_core.progress.time.monotonic", lambda: float(next(times)))
    assert list(progress(range(6), label="texts")) == list(range(6))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) < 6 and lines[0].startswith("texts: ") and lines[-1].startswith("texts: 6/6 it")


def test_other_ranks_are_quiet_and_short_work_says_nothing(capsys, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr("dcd_core.progress.time.monotonic", lambda: 1.0)
        list(progress(range(100), label="texts"))
    monkeypatch.setenv("RANK", "1")
    with Bar(10, "steps") as bar:
        bar.start -= 100
        bar.last_line -= 100
        bar.update(3, "loss 1")
    assert capsys.readouterr().err == ""


def test_an_output_is_checked_before_the_work(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert check_output_file(str(tmp_path / "new" / "x")) == tmp_path / "new" / "x"
    assert check_output_file(tmp_path / "a") == tmp_path / "a"
    assert check_output_folder(tmp_path) == tmp_path and check_output_folder(tmp_path / "new") == tmp_path / "new"
    for bad, message in (
        ("", "is empty"),
        (".", "is a folder"),
        (f"{tmp_path}/new/", "is a folder"),
        (tmp_path / "a" / "x", "is not a folder"),
        ("/dev/null", "no ordinary file"),
        ("/proc/x/y", "cannot be written"),
        (tmp_path / ("n" * 300), "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            check_output_file(bad)
    for source in (tmp_path / "a", tmp_path / "link"):
        with pytest.raises(UserError, match="is read from"):
            check_output_file(tmp_path / "a", [tmp_path / "other", source])
    for bad, message in (("", "is empty"), (tmp_path / "a", "is a file"), ("/proc/x", "cannot be written")):
        with pytest.raises(UserError, match=message):
            check_output_folder(bad)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"], "nothing is left of the checks"
