"""Throughput by batch size, and time outside model passes: the commands at toy size."""

import json

import pytest
from tiny_world import make_world, model_flags

from dcd_core.errors import UserError
from diagnostics import overhead, throughput


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), "smol")


def flags(world, folder, *more) -> list[str]:
    return [*model_flags(world), f"--output={folder}", "--dtype=float32", "--max_new_tokens=6", "--gamma=2", *more]


def test_every_method_answers_at_every_batch_size(world, tmp_path, capsys):
    asked = ("--methods", "cd", "dcd_eagle3", "dcd_eagle3@2x2:4", "--batches", "1", "3", "--repeats=2")
    assert throughput.main(flags(world, tmp_path / "out", *asked)) == 0
    table = json.loads((tmp_path / "out" / "metrics.json").read_text())["throughput"]
    assert [(entry["method"], entry["batch"]) for entry in table] == [
        (method, batch) for batch in (1, 3) for method in ("cd", "dcd_eagle3", "dcd_eagle3@2x2:4")
    ]
    for entry in table:
        assert 0 < entry["low"] <= entry["tokens_per_second"] <= entry["high"]
        assert entry["over_smallest_batch"] == 1 or entry["batch"] == 3
        assert entry["over_cd"] > 0
    printed = capsys.readouterr().out
    assert "dcd_eagle3@2x2:4" in printed and " prompts (" in printed


def test_rates_are_ratios_of_sums():
    runs = [
        {"method": "cd", "batch": 1, "repeat": 0, "tokens": 10, "seconds": 1.0},
        {"method": "cd", "batch": 1, "repeat": 1, "tokens": 10, "seconds": 3.0},
        {"method": "cd", "batch": 2, "repeat": 0, "tokens": 10, "seconds": 1.0},
        {"method": "dcd_ngram", "batch": 2, "repeat": 0, "tokens": 30, "seconds": 1.0},
    ]
    found = {(entry["method"], entry["batch"]): entry for entry in throughput.summarise(runs)}
    assert found["cd", 1]["tokens_per_second"] == 5 and found["cd", 1]["low"] < 5 < found["cd", 1]["high"]
    assert found["cd", 2]["over_smallest_batch"] == 2 and found["dcd_ngram", 2]["over_cd"] == 3


def test_what_is_left_outside_passes_is_a_share(world, tmp_path):
    asked = ("--limit=2", "--methods", "cd", "dcd_eagle3", "dcd_eagle3@2x2:4", "dcd_deferred")
    assert overhead.main(flags(world, tmp_path / "out", *asked)) == 0
    table = json.loads((tmp_path / "out" / "metrics.json").read_text())["overhead"]
    assert [entry["temperature"] for entry in table] == [0.0, 1.0] * 4
    for entry in table:
        assert 0 < entry["passes_s"] < entry["rounds_s"] and entry["rounds"] > 0
        assert entry["share"] == pytest.approx(1 - entry["passes_s"] / entry["rounds_s"])


def test_passes_are_put_back_as_they_were():
    before = [getattr(owner, name) for owner, name in overhead.PASSES]
    with pytest.raises(RuntimeError), overhead.timed_passes():
        raise RuntimeError
    assert before == [getattr(owner, name) for owner, name in overhead.PASSES]


@pytest.mark.parametrize("entry", [throughput, overhead])
def test_bad_settings_leave_nothing_behind(world, tmp_path, entry):
    for change, message in (
        (["--methods", "cd", "cd"], "--methods must name at least one, and none twice"),
        (["--methods", "cd@x"], "'x' is no form of a method"),
        (["--branch=0"], "branch must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            entry.main(flags(world, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()
