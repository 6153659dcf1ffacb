"""Thresholds proposed from a pair: the fit, the simulated rounds, and the command at toy size."""

import json

import numpy as np
import pytest
from tiny_world import make_world, model_flags

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.draft import Shape
from dcd_core.flip_risk import Deferral
from dcd_core.loading import load_models
from dcd_core.methods import assemble
from dcd_core.prompts import read_prompts
from diagnostics import calibrate, latency
from diagnostics.calibration import Times, Trace, fit_flips, fit_spread, simulate_deferred, simulate_rounds

TIMES = Times(expert={"1": 10.0, "4": 10.0}, amateur={"1": 6.0, "4": 6.0}, head={"1": 1.0})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), "llama3")


def trace(agreed, flips=None, margin=None, confidence=None) -> Trace:
    count = len(agreed)
    return Trace(
        agreed=agreed,
        confidence=confidence or [[0.5, 0.25, 0.125]] * count,
        unit_margin=margin or [1e9] * count,
        flips=flips or [False] * count,
        peak=[0.5] * count,
        tv=[0.1] * count,
    )


def test_the_law_of_flips_is_recovered():
    generator = np.random.default_rng(0)
    margin = generator.lognormal(0.5, 1.0, 20_000)
    flips = generator.random(20_000) < 0.6 / (1 + (margin / 0.7) ** 2.0)
    ceiling, scale, power = fit_flips(margin, flips)
    assert ceiling == pytest.approx(0.6, abs=0.05)
    assert scale == pytest.approx(0.7, rel=0.1) and power == pytest.approx(2.0, rel=0.1)
    ceiling, scale, power = fit_flips(margin, np.zeros_like(flips))
    risk = ceiling / (1 + (margin / scale) ** power)
    assert np.isfinite(risk).all() and risk.max() < 0.02, "nothing flips: a law all the same"


def test_the_spread_makes_the_mean_risk_right():
    peak, tv = np.array([0.5, 0.9, 1.0]), np.array([0.1, 0.02, 0.0])
    assert fit_spread(peak, tv, 0.5) * 0.5 * (1 - peak).sum() == pytest.approx(tv.sum())
    assert fit_spread(np.ones(3), np.zeros(3), 0.5) == 0.0


def test_blocks_without_flips_ask_the_amateur_once():
    """8 places, two tokens a round: four expert passes, and the amateur after each, or only at the end."""
    every, passes, flips = simulate_deferred(
        [trace([1] * 8, margin=[0.0] * 8)], Deferral(theta=0.1, ceiling=1.0), 3, TIMES
    )
    assert every == pytest.approx(1000 * 8 / (4 * (3 + 10 + 6))) and passes == 1 and flips == 0
    never, passes, _ = simulate_deferred([trace([1] * 8)], Deferral(theta=0.1), 3, TIMES)
    assert never == pytest.approx(1000 * 8 / (4 * 13 + 6)) and passes == 4


def test_a_flip_costs_what_was_written_after_it():
    """The second of four places falls, unexpected: the block's two rounds stand only up to it."""
    flips = [False, True, False, False]
    speed, passes, per_100 = simulate_deferred([trace([1] * 4, flips)], Deferral(theta=0.5), 3, TIMES)
    assert speed == pytest.approx(1000 * 4 / (2 * 13 + 6 + 13 + 6)) and passes == pytest.approx(1.5)
    assert per_100 == 25


def test_drafts_stop_below_a_probability():
    speed, drafts = simulate_rounds([trace([3, 2, 1, 0])], 0.0, 3, TIMES)
    assert drafts == 3 and speed == pytest.approx(1000 * 4 / (3 + 10 + 6))
    speed, drafts = simulate_rounds([trace([3, 2, 1, 0])], 0.3, 3, TIMES)
    assert drafts == 2 and speed == pytest.approx(1000 * 4 / (2 * (2 + 10 + 6))), "the token that crosses stays"


def test_simulated_rounds_are_those_of_the_decoding_loop(world):
    """Accepted drafts and drafted tokens follow from one rollout, stopped drafts included."""
    head_folder = str(world / "head")
    pair, head = load_models(str(world / "expert"), str(world / "amateur"), head_folder, "float32", "cpu")
    prompts, stops = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    for stop in (0.0, 0.02, 0.2):
        how = Settings(Target(alpha=0.5, temperature=0.0), 12, stops, gamma=3, stop_below=stop)
        for made, prompt in zip(decode(assemble("dcd_eagle3", pair, head), prompts, how), prompts, strict=True):
            if len(made.ids) < 3:
                continue
            noted = calibrate.note(pair, head, prompt.ids, made.ids, 0.5, 3)
            rounds, expected = made.rounds, len(made.ids) - 1
            _, drafts = simulate_rounds([noted], stop, 3, TIMES)
            assert drafts == pytest.approx(sum(entry.drafted for entry in rounds) / len(rounds))
            assert sum(entry.emitted for entry in rounds) == expected == len(noted.agreed)


def test_the_command_proposes_and_leaves_its_figures(world, tmp_path, capsys):
    flags = [*model_flags(world), f"--output={tmp_path / 'out'}", "--dtype=float32", "--limit=4", "--max_new_tokens=8"]
    assert calibrate.main([*flags, "--gamma=3", "--alphas", "0.5", "1"]) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [entry["alpha"] for entry in found["by_alpha"]] == [0.5, 1.0]
    for entry in found["by_alpha"]:
        best = max(row["tokens_per_second"] for row in entry["deferred"])
        assert entry["best_deferred"]["tokens_per_second"] == best
        assert entry["stops"][0]["stop_below"] == 0 and 0 <= entry["flip_rate"] <= 1
    printed = capsys.readouterr().out
    assert "--defer_theta" in printed and "prompts" in printed
    Settings(**{f"defer_{name}": found[name] for name in ("ceiling", "scale", "power", "spread")})


def test_alphas_without_contrast_are_refused(world, tmp_path):
    with pytest.raises(Exception, match="--alphas must be different numbers above 0"):
        calibrate.main([*model_flags(world), f"--output={tmp_path / 'out'}", "--alphas", "0"])
    assert not (tmp_path / "out").exists()


def test_passes_of_more_widths_are_timed(world):
    pair, head = load_models(str(world / "expert"), str(world / "amateur"), str(world / "head"), "float32", "cpu")
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    found = latency.time_passes(pair, head, prompts[0], Shape(3), 8, repeats=1, more_widths=(7,))
    assert all(set(times) == {"1", "4", "7"} for times in found.values())
