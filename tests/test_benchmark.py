"""The benchmark end to end on tiny models, its interleaving and resuming, and the prediction beside the measurement."""

import json

import pytest
import tiny
from tiny_world import make_world, model_flags

import diagnostics.benchmark as entry
from dcd_core.config import run_entry
from dcd_core.decode import Round
from dcd_core.errors import UserError
from dcd_core.methods import METHODS
from diagnostics import contest
from diagnostics.agreement import Divergence, first_difference, top_two_gap
from diagnostics.prediction import draft_ms, pass_ms, predicted_tokens_per_second, with_predictions
from diagnostics.records import read_records


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def flags(world, output, *more):
    fast = ["--max_new_tokens=10", "--gamma=3", "--limit=3", "--device=cpu", "--warmup=1"]
    return [*model_flags(world), f"--output={output}", *fast, *more]


def test_every_method_is_measured_predicted_and_compared(world, tmp_path, capsys):
    able = {name: method for name, method in METHODS.items() if not method.reads_amateur}
    everyone = [f"--lm={world / 'amateur'}", f"--amateur_head={world / 'amateur_head'}", "--methods", *able]
    assert entry.main(flags(world, tmp_path / "out", "--dtype=float32", "--repeats=2", *everyone)) == 0
    rows = read_records(tmp_path / "out" / "rounds.parquet", "rounds").rows
    assert set(rows["method"]) == set(able)
    assert set(rows["run"][rows["method"] == "ar"]) == {"alpha=any repeat=0", "alpha=any repeat=1"}
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    contrastive = sum(method.contrast for method in able.values())
    assert len(answers) == 3 * 2 * (len(able) - contrastive + 2 * contrastive)
    for made in answers:  # the prefill's token belongs to no round
        mine = rows[(rows["run"] == made["run"]) & (rows["method"] == made["method"])]
        assert mine[mine["prompt_id"] == made["prompt_id"]]["emitted"].sum() == len(made["ids"]) - 1
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for found in metrics["methods"]:
        assert found["tokens_per_second"]["estimate"] > 0
        assert found["predicted_tokens_per_second"] > 0
        if found["method"] == "cd":
            assert found["speedup"]["estimate"] == found["predicted_speedup"] == 1.0
    assert {found["method"] for found in metrics["agreement"]} == set(able) - {"ar", "cd"}
    assert all(found["different"] == 0 and found["equal"] > 0 for found in metrics["agreement"])
    assert set(metrics["latency_ms"]) == {"expert", "amateur", "head", "lm"}
    printed = capsys.readouterr().out
    assert "prompts" in printed and "speed-up over cd" in printed and "texts equal those of cd" in printed


def test_a_head_that_reads_both_models_is_measured_and_predicted(world, tmp_path):
    own = [f"--head={world / 'dual_input'}", "--methods", "cd", "cross_alpha", "--alphas", "0.5", "--dtype=float32"]
    entry.main(flags(world, tmp_path / "out", *own))
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    found = {one["method"]: one for one in metrics["methods"]}["cross_alpha"]
    assert found["predicted_tokens_per_second"] > 0 and metrics["agreement"][0]["different"] == 0


def test_trees_are_measured_at_a_budget_and_predicted(world, tmp_path):
    trees = ["--branch=3", "--nodes=7", "--dtype=float32", "--alphas", "0.5"]
    entry.main(flags(world, tmp_path / "out", *trees, "--methods", "cd", "dcd_ngram", "dcd_eagle3", "dcd_hybrid"))
    rows = read_records(tmp_path / "out" / "rounds.parquet", "rounds").rows
    assert set(rows["drafted"][rows["method"].isin(["dcd_eagle3", "dcd_hybrid"])]) == {7}
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert all(set(times) == {"1", "3", "7", "8"} for times in metrics["latency_ms"].values())
    assert all(found["different"] == 0 and found["equal"] > 0 for found in metrics["agreement"])
    with pytest.raises(UserError, match="give --lm"):
        entry.main(flags(world, tmp_path / "none", *trees, "--methods", "cd", "dcd_lm"))


def test_bf16_is_never_judged_by_identity(world, tmp_path, capsys):
    entry.main(flags(world, tmp_path / "out", "--dtype=bfloat16", "--methods", "cd", "dcd_ngram", "--alphas", "0.5"))
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["agreement"] == []
    assert "texts equal" not in capsys.readouterr().out


def test_sampling_under_shared_noise_is_compared_too(world, tmp_path):
    sampled = ["--dtype=float32", "--temperature=1", "--rule=shared_noise", "--methods", "cd", "scd", "dcd_eagle3"]
    entry.main(flags(world, tmp_path / "out", *sampled, "--alphas", "0.5", "--repeats=2"))
    counts = json.loads((tmp_path / "out" / "metrics.json").read_text())["agreement"]
    assert [(c["method"], c["equal"] + c["near_ties"], c["different"]) for c in counts] == [
        ("scd", 6, 0),
        ("dcd_eagle3", 6, 0),
    ]


def test_a_wrong_text_is_seen(world, tmp_path, monkeypatch):
    """Negative control: one method's second token is changed after the fact."""
    real = contest.decode

    def tampered(method, prompts, settings):
        made = real(method, prompts, settings)
        if method.name == "dcd_ngram":
            made[0].ids[1] = (made[0].ids[1] + 1) % tiny.VOCAB
        return made

    monkeypatch.setattr(contest, "decode", tampered)
    only = ["--methods", "cd", "dcd_ngram", "--alphas", "0.5", "--dtype=float32"]
    entry.main(flags(world, tmp_path / "out", *only))
    (found,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["agreement"]
    assert (found["equal"], found["different"]) == (0, 3)
    assert {one["position"] for one in found["divergences"]} == {1}


def test_methods_take_turns_prompt_by_prompt(world, tmp_path, monkeypatch):
    order, real = [], contest.decode
    monkeypatch.setattr(contest, "decode", lambda m, p, s: order.append((p[0].id, m.name)) or real(m, p, s))
    only = ["--methods", "ar", "cd", "dcd_ngram", "--alphas", "0.5", "--warmup=0"]
    entry.main(flags(world, tmp_path / "out", *only))
    assert order == [
        *(("p0", name) for name in ("ar", "cd", "dcd_ngram")),
        *(("p1", name) for name in ("cd", "dcd_ngram", "ar")),
        *(("p2", name) for name in ("dcd_ngram", "ar", "cd")),
    ]


def test_a_stopped_run_goes_on(world, tmp_path, monkeypatch):
    asked, real = [], contest.decode

    def stops(method, prompts, settings):
        asked.append(prompts[0].id)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return real(method, prompts, settings)

    monkeypatch.setattr(contest, "decode", stops)
    only = ["--methods", "cd", "dcd_ngram", "--alphas", "0.5", "--warmup=1"]
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "out", *only))
    with pytest.raises(UserError, match="other settings"):
        entry.main(flags(world, tmp_path / "out", *only, "--gamma=2"))
    assert "gamma: 3" in (tmp_path / "out" / "config.yaml").read_text(), "a refused start changes nothing"
    entry.main(flags(world, tmp_path / "out", *only))
    assert asked == ["p0"] * 4 + ["p1"] * 2 + ["p1"] * 4 + ["p2"] * 2  # warm-up again, p0 not again
    rows = read_records(tmp_path / "out" / "rounds.parquet", "rounds").rows
    assert set(rows["prompt_id"]) == {"p0", "p1", "p2"}
    with pytest.raises(UserError, match="finished run"):
        entry.main(flags(world, tmp_path / "out", *only))
    entry.main(flags(world, tmp_path / "out", *only, "--overwrite"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--methods", "cd", "warp"], "method 'warp' is unknown"),
        (["--methods", "cd", "cd"], "none twice"),
        (["--alphas", "-1"], "--alphas must be 0 or more"),
        (["--gamma=0"], "--gamma must be at least 1"),
        (["--branch=0"], "--branch must be at least 1"),
        (["--nodes=-1"], "--nodes must be at least 0"),
        (["--stop_below=1"], "stop_below is a probability"),
        (["--max_new_tokens=1"], "--max_new_tokens must be at least 2"),
        (["--dtype=int8"], "dtype 'int8' is unknown"),
        (["--head="], "drafts with an EAGLE3 head; give --head"),
        (["--amateur="], "contrasts with an amateur; give --amateur"),
        (["--rule=guess"], "rule 'guess' is unknown"),
        (["--temperature=nan"], "finite"),
        (["--seed=-1"], "--seed must be at least 0"),
        (["--template_args={"], "not JSON"),
    ],
)
def test_refusals_leave_nothing_behind(world, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        entry.main(flags(world, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_is_refused_before_anything_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "read_prompts", lambda *_, **__: pytest.fail("nothing is read yet"))
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for name, message in (
        ("file", "file is a file"),
        ("model", "other files and no run"),
        ("file/a", "file is not a folder"),
    ):
        with pytest.raises(UserError, match=message):
            entry.main(flags(world, tmp_path / name, "--overwrite"))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_refusal_is_one_line_and_exit_code_2(world, tmp_path, capsys):
    assert run_entry(lambda: entry.main(flags(world, tmp_path / "out", "--gamma=0"))) == 2
    assert capsys.readouterr().err == "error: --gamma must be at least 1, got 0\n"


LATENCY = {"expert": {"1": 40.0, "6": 45.0}, "amateur": {"1": 20.0, "6": 25.0}, "head": {"1": 2.0, "6": 3.0}}


def test_predictions_follow_the_cost_model_by_hand():
    def speed(method, length, drafted):
        return predicted_tokens_per_second(method, LATENCY, length, 5, drafted)

    assert pass_ms(LATENCY["expert"], 3.5) == 42.5
    assert speed("ar", 0, 0) == pytest.approx(1000 / 40)
    assert speed("cd", 0, 0) == pytest.approx(1000 / 60)
    assert speed("dcd_ngram", 0.5, 5) == pytest.approx(1500 / 70)
    assert speed("dcd_ngram", 0.0, 0) == pytest.approx(1000 / 60)  # nothing drafted: passes one token wide
    # L = 1.5: the first head pass is 2.5 wide (2.3 ms), four are one wide (2 ms)
    assert speed("dcd_eagle3", 1.5, 5) == pytest.approx(2500 / (2.3 + 8 + 70))
    assert speed("expert_sd", 1.5, 5) == pytest.approx(2500 / (2.3 + 8 + 45))
    # a level of a tree is as wide as its expanded nodes, and the passes as wide as its nodes
    tree = predicted_tokens_per_second("dcd_hybrid", LATENCY, 1.5, 5, 5, branch=2)
    assert tree == pytest.approx(2500 / (2.3 + 4 * 2.2 + 70))
    two = predicted_tokens_per_second("dual", LATENCY, 1.5, 5, 5)
    one = predicted_tokens_per_second("cross_alpha", LATENCY, 1.5, 5, 5)
    assert 1 / two - 1 / one == pytest.approx(draft_ms("cross_alpha", LATENCY, 1.5, 5, 1) * 5 / 2500), (
        "a round of 2.5 tokens takes its five drafting passes once more"
    )
    lm = predicted_tokens_per_second("dcd_lm", LATENCY | {"lm": {"1": 4.0, "6": 9.0}}, 1.5, 5, 5)
    assert lm == pytest.approx(2500 / (5.5 + 16 + 70))
    assert speed("scd", 5.0, 5) == pytest.approx(6000 / (6 * 20 + 45))


def test_measured_over_predicted_compares_speedups():
    found = {"method": "dcd_ngram", "accepted_length": {"estimate": 0.5}, "drafted_per_round": 5.0}
    found |= {"tokens_per_second": {"estimate": 20.0}, "speedup": {"estimate": 1.2}}
    (entry_with,) = with_predictions([found], LATENCY, 5)
    assert entry_with["predicted_speedup"] == pytest.approx(1500 / 70 / (1000 / 60))
    assert entry_with["measured_over_predicted"] == pytest.approx(1.2 / entry_with["predicted_speedup"])


def test_first_difference_counts_an_early_end():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_the_gap_at_a_difference_is_that_of_the_score():
    pair = tiny.tiny_pair()
    target, prompt = contest.Arm(contest.Entry.parse("cd"), 0.5).target(0.0), contest.Prompt("p", [2, 9, 11])
    ids = contest.decode(entry.assemble("cd", pair), [prompt], entry.Settings(target=target, max_new_tokens=4))[0].ids
    gap = top_two_gap([pair.expert, pair.amateur], target, prompt, ids[:2])
    assert gap > 0
    assert Divergence("p", 2, 1, 2, 1e-4).is_tie and not Divergence("p", 2, 1, 2, 0.1).is_tie
    assert Round(5, 0, 1, 0, 0, 0, 0).emitted == 1
