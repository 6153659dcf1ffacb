"""Heads compared by replay: equal to real decoding, resumable, and clear about what it refuses."""

import json

import pytest
from tiny_world import make_world, tiny_head

import diagnostics.accepted_length as entry
from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import load_models
from dcd_core.methods import assemble
from dcd_core.prompts import read_prompts


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny pair with two heads of different seeds."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    head = tiny_head("smol")
    other = Eagle3Head(head.config, head.d2t, head.t2d)
    other.initialise(seed=5)
    save_head(folder / "other", other)
    return folder


def flags(world, output, *more):
    heads = ["--heads", str(world / "head"), str(world / "other")]
    named = [f"--{name}={world / name}" for name in ("expert", "amateur")]
    fast = ["--max_new_tokens=24", "--batch=2", "--device=cpu", "--dtype=float32", "--gamma=4"]
    return [*named, *heads, f"--prompts={world / 'prompts.jsonl'}", f"--output={output}", *fast, *more]


def test_it_is_what_decoding_gives(world, tmp_path, capsys):
    assert entry.main(flags(world, tmp_path / "out")) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())["accepted_length"]
    assert [(row["alpha"], row["head"].split("/")[-1]) for row in found] == [
        (alpha, head) for alpha in (0.1, 0.5) for head in ("head", "other")
    ]
    prompts, stops = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    for row in found:
        pair, head = load_models(str(world / "expert"), str(world / "amateur"), row["head"], "float32", "cpu")
        target = Target(alpha=row["alpha"], temperature=0.0)
        settings = Settings(target=target, max_new_tokens=24, stop_ids=stops, gamma=4)
        rounds = [r for made in decode(assemble("dcd_eagle3", pair, head), prompts, settings, 5) for r in made.rounds]
        assert row["rounds"] == len(rounds)
        assert row["accepted_length"]["estimate"] == pytest.approx(sum(r.accepted for r in rounds) / len(rounds))
        assert row["tokens_per_round"]["estimate"] == pytest.approx(sum(r.emitted for r in rounds) / len(rounds))
    assert "difference" in found[1] and "difference" not in found[0]
    printed = capsys.readouterr().out
    assert "accepted length L" in printed and "prompts" in printed


def test_a_stopped_run_goes_on(world, tmp_path, monkeypatch):
    entry.main(flags(world, tmp_path / "whole"))
    real, calls = entry.replay_batch, []

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(entry, "replay_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "out"))
    calls.clear()
    calls.extend([0] * 10)
    entry.main(flags(world, tmp_path / "out"))
    assert len(calls) == 14, "two of six batches were kept"
    read = [json.loads((tmp_path / name / "metrics.json").read_text())["accepted_length"] for name in ("whole", "out")]
    assert read[0] == read[1]


def test_refusals(world, tmp_path):
    head = tiny_head("smol")
    far = Eagle3Head(head.config.replace(feature_layers=(1, 3, 6)), head.d2t, head.t2d)
    save_head(tmp_path / "far", far)
    for more, message in (
        (["--heads", str(world / "head"), str(world / "head")], "none twice"),
        (["--heads", str(world / "head"), str(tmp_path / "far")], "other layers"),
        (["--heads", str(tmp_path / "missing")], "missing"),
        (["--gamma=0"], "--gamma must be at least 1"),
        (["--alphas", "-1"], "--alphas must be 0 or more"),
    ):
        with pytest.raises(UserError, match=message):
            entry.main(flags(world, tmp_path / "no", *more))
    assert not (tmp_path / "no").exists()
