"""The cross-alpha matrix end to end at toy size: equal to decoding, resumable, and clear about what it refuses."""

import json
import shutil
from collections import Counter

import pandas as pd
import pytest
import tiny
import torch
from launched import launch
from tiny_family import AMATEUR_LAYERS, make_family
from tiny_world import make_world

import diagnostics.cross_alpha as entry
from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Settings, decode
from dcd_core.divergence import acceptance, total_variation
from dcd_core.errors import UserError
from dcd_core.files import file_hash
from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.family import join_features
from dcd_core.loading import load_models
from dcd_core.methods import assemble
from dcd_core.models import load_pair
from dcd_core.prompts import read_prompts
from dcd_core.replay import teacher_forced
from diagnostics import accepted_length
from diagnostics.histories import refuse_roles
from diagnostics.members import find_places, load_members
from diagnostics.position_quantities import on_vocabulary
from diagnostics.records import read_records
from diagnostics.replay_check import first_draft_gap
from diagnostics.rollouts import roll_out
from diagnostics.shared_history import FirstDrafts, headroom_sums
from diagnostics.texts import Text

ALPHAS, TOKENS = [0.0, 0.5], 14


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny pair, a matched family of four dual-input heads, three controls of one head and a plain head."""
    folder = make_world(tmp_path_factory.mktemp("world"), prompts=3)
    tiny.save_tiny(folder / "amateur", "smol", seed=100, layers=AMATEUR_LAYERS)  # deep enough to be read
    often = frequent_ids(folder)
    make_family(folder / "family", ids=often)
    for reads in ("expert_only", "amateur_zeroed", "amateur_shuffled"):
        make_family(folder / reads, alphas=(0.0,), seeds=(0,), reads=reads, ids=often)
    return folder


def frequent_ids(folder, count=6):
    """Ids that the pair writes often: heads that know no other draft something right now and then."""
    pair = load_pair(str(folder / "expert"), str(folder / "amateur"))
    prompts, stops = read_prompts(str(folder / "prompts.jsonl"), str(folder / "expert"))
    made = [answer for alpha in ALPHAS for answer in roll_out(pair, prompts, stops, alpha, TOKENS)]
    ranked = Counter(token for ids in made for token in ids).most_common(count)
    return sorted(token for token, _ in ranked)


def flags(world, output, *more, controls=("expert_only", "amateur_zeroed", "amateur_shuffled", "head")):
    named = [f"--{name}={world / name}" for name in ("expert", "amateur", "family")]
    beside = ["--controls", *(str(world / name) for name in controls)] if controls else []
    fast = [
        f"--max_new_tokens={TOKENS}",
        "--batch=2",
        "--device=cpu",
        "--dtype=float32",
        "--gamma=3",
    ]
    alphas = ["--infer_alphas", *map(str, ALPHAS)]
    return [*named, *beside, *alphas, f"--prompts={world / 'prompts.jsonl'}", f"--output={output}", *fast, *more]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """One finished run, with every prompt decoded for real too."""
    output = tmp_path_factory.mktemp("run") / "out"
    assert entry.main(flags(world, output, "--decode=3")) == 0
    return output


def test_rows_are_what_decoding_gives(world, run):
    """Every drafter that decodes, at every alpha: the rounds of the table are the loop's."""
    rows = read_records(run / "replays.parquet", "replays").rows
    assert len(rows) == 3 * len(ALPHAS) * (4 + 3 + 1) and set(rows["group"]) >= {"family", "head", "expert_only"}
    places = find_places([str(world / "family")], [str(world / "expert_only"), str(world / "head")])
    pair, members = load_members(str(world / "expert"), str(world / "amateur"), places, "float32", "cpu")
    prompts, stops = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    lengths = set()
    for member in members:
        for alpha in ALPHAS:
            settings = Settings(Target(alpha=alpha, temperature=0.0), TOKENS, stops, gamma=3)
            made = decode(assemble(member.method, pair, member.head), prompts, settings, max_batch=3)
            own = (rows["group"] == member.place.group) & (rows["drafter"] == member.place.name)
            part = rows[own & (rows["infer_alpha"] == alpha)].set_index("prompt_id")
            for prompt, generation in zip(prompts, made, strict=True):
                found = part.loc[prompt.id]
                assert found["rounds"] == len(generation.rounds)
                assert found["accepted"] == sum(r.accepted for r in generation.rounds)
                assert found["emitted"] == sum(r.emitted for r in generation.rounds)
                lengths.add(int(found["accepted"]))
    assert len(lengths) > 2, "drafters that differ"


def test_it_checks_itself_against_decoding_and_says_what_it_found(run):
    found = json.loads((run / "metrics.json").read_text())
    assert found["decoded"] == {"checked": 6, "equal": 6, "near-tie": 0, "different": 0}
    assert [entry["infer_alpha"] for entry in found["verdicts"]] == [0.5]
    assert found["train_alphas"] == found["infer_alphas"] == ALPHAS and found["seeds"] == [0, 1]
    assert found["pair"] == "expert / amateur" and found["prompts"] == 3
    controls = {(control["group"], control["input"]) for control in found["controls"]}
    assert controls == {(name, name) for name in ("expert_only", "amateur_zeroed", "amateur_shuffled")} | {
        ("head", "expert_only")
    }


@torch.no_grad()
def test_the_shared_history_is_one_text_for_all(world, run):
    """Acceptance sums, from whole-vocabulary definitions, over the texts of the first infer-alpha only."""
    rows = read_records(run / "replays.parquet", "replays").rows
    assert set(rows["history_alpha"]) == {0.0}
    assert rows.groupby("prompt_id")["positions"].nunique().max() == 1
    places = find_places([str(world / "family")], [])
    pair, members = load_members(str(world / "expert"), str(world / "amateur"), places, "float32", "cpu")
    prompts, stops = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    settings = Settings(Target(alpha=0.0, temperature=0.0), TOKENS, stops)
    answer = decode(assemble("cd", pair), prompts[:1], settings)[0].ids
    text = Text.read(pair, prompts[0], answer, amateur_features=True)
    roots = torch.arange(text.prompt_length, len(text.ids) - 1)
    log_p, log_q = (
        model.output_layer(hidden[roots]).log_softmax(-1)
        for model, hidden in ((pair.expert, text.expert), (pair.amateur, text.amateur))
    )
    for member in members:
        rollout = member.rollout(text)
        fused = member.head.fuse(rollout.features[None, :-1])
        cache = member.head.new_cache(1, len(text.ids))
        states = member.head.step(pair.expert.embedding(text.ids[None, 1:]), fused, cache)[0]
        ids = member.head.target_ids
        wide = on_vocabulary(member.head.logits(states[roots - 1]).log_softmax(-1), ids, pair.expert.vocab)
        for alpha in ALPHAS:
            log_pi = target_log_probs([log_p, log_q], Target(alpha=alpha))
            own = (rows["drafter"] == member.place.name) & (rows["group"] == "family")
            found = rows[own & (rows["infer_alpha"] == alpha) & (rows["prompt_id"] == prompts[0].id)].iloc[0]
            assert found["positions"] == len(roots)
            assert found["acceptance"] == pytest.approx(float(acceptance(wide, log_pi).sum()), abs=1e-4)
            assert found["top1"] == float((wide.argmax(-1) == log_pi.argmax(-1)).sum())
            assert found["headroom_tv"] == pytest.approx(float(total_variation(log_p, log_pi).sum()), abs=1e-4)


def test_no_drafter_gains_more_than_the_headroom():
    """|acceptance(e, pi) - acceptance(e, p)| <= TV(p, pi), summed over random rows."""
    generator = torch.Generator().manual_seed(0)
    log_p, log_q, log_e = (
        (3 * torch.randn(200, 30, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(3)
    )
    drafts = FirstDrafts.of(log_e, torch.arange(30))
    for alpha in (0.1, 0.5, 2.0):
        log_pi = target_log_probs([log_p, log_q], Target(alpha=alpha))
        here, there = (drafts.sums(slice(None), log.exp(), log.argmax(-1))["acceptance"] for log in (log_pi, log_p))
        assert abs(here - there) <= headroom_sums(log_p, log_pi)["headroom_tv"] + 1e-9
    assert headroom_sums(log_p, log_p) == {"headroom_tv": 0.0, "headroom_flip": 0.0}


def test_a_stopped_run_goes_on(world, run, tmp_path, monkeypatch):
    real, calls = entry.measure_batch, []

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(entry, "measure_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "out", "--decode=3"))
    calls.clear()
    calls.extend([0] * 10)
    entry.main(flags(world, tmp_path / "out", "--decode=3"))
    assert len(calls) == 12, "two of four batches were kept"
    whole, resumed = (read_records(folder / "replays.parquet", "replays").rows for folder in (run, tmp_path / "out"))
    pd.testing.assert_frame_equal(whole, resumed)


def test_two_ranks_find_what_one_finds(world, run, tmp_path):
    """Behind the real launcher: the same records and summary, told once, and nothing left of the pieces."""
    printed = launch("diagnostics/cross_alpha.py", *flags(world, tmp_path / "two", "--decode=3"))
    assert printed.count("decoded for real: 6 answers, 6 equal") == 1
    one, two = (read_records(folder / "replays.parquet", "replays") for folder in (run, tmp_path / "two"))
    pd.testing.assert_frame_equal(one.rows, two.rows)
    summaries = [json.loads((folder / "metrics.json").read_text()) for folder in (run, tmp_path / "two")]
    # the files differ in their provenance, which names the folder
    files = [found.pop("records")["replays.parquet"] for found in summaries]
    assert summaries[0] == summaries[1]
    assert files == [file_hash(folder / "replays.parquet") for folder in (run, tmp_path / "two")]
    assert not (tmp_path / "two" / "parts").exists()


def test_a_replay_that_is_not_decoding_is_no_finished_run(world, tmp_path, monkeypatch, capsys):
    """The negative control: rounds that decoding would not have made are found and told."""
    real = entry.replay

    def wrong(*arguments, **options):
        (drafted, accepted, emitted), *rest = real(*arguments, **options)
        return [(drafted, accepted + 1 if accepted < drafted else accepted - 1, emitted), *rest]

    monkeypatch.setattr(entry, "replay", wrong)
    output = tmp_path / "out"
    assert entry.main(flags(world, output, "--decode=2", "--limit=2", controls=())) == 1
    assert not (output / "metrics.json").exists() and not (output / "replays.parquet").exists()
    assert json.loads((output / "differences.json").read_text())["decoded"]
    assert "4 differ" in capsys.readouterr().out


@torch.no_grad()
def test_the_gap_of_a_draft_is_the_drafters_own(world):
    """Rounds that differ in their first draft, in the first and in the second round: the head's two best logits."""
    places = find_places([str(world / "family")], [])
    pair, members = load_members(str(world / "expert"), str(world / "amateur"), places, "float32", "cpu")
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    text = Text.read(pair, prompts[0], [5, 9, 20, 30, 31, 40, 41], amateur_features=True)
    for member in members[:2]:
        logits = next(teacher_forced(member.head, pair.expert.embedding, member.rollout(text), 1, pair.expert.vocab))
        best = logits.topk(2).values
        for root, before in ((0, []), (3, [(3, 2, 3)])):
            one, other = [*before, (3, 0, 1)], [*before, (3, 2, 3)]
            gap = first_draft_gap(pair, member, text, one, other, 3)
            assert gap == pytest.approx(float(best[root, 0] - best[root, 1]), abs=1e-4)
        assert first_draft_gap(pair, member, text, before, one, 3) == float("inf")


@pytest.mark.parametrize("control", ["training texts", "data order", "token budget"])
def test_a_family_that_is_not_matched_is_refused(world, tmp_path, control):
    make_family(tmp_path / "family", **{control.replace(" ", "_"): "another"})
    more = [f"--family={tmp_path / 'family'}"]
    with pytest.raises(UserError, match=f"not matched: {control} is "):
        entry.main([*flags(world, tmp_path / "no", controls=()), *more])
    assert not (tmp_path / "no").exists()


def test_a_control_may_differ_in_its_input_only(world, tmp_path):
    make_family(tmp_path / "other", alphas=(0.0,), seeds=(0,), reads="amateur_zeroed", token_budget="less")
    with pytest.raises(UserError, match="not matched: token budget"):
        entry.main(flags(world, tmp_path / "no", "--controls", str(tmp_path / "other")))


@pytest.mark.parametrize(
    "more, message",
    [
        (["--history_alpha=0.3"], "--history_alpha 0.3 is none of"),
        (["--infer_alphas", "0.1", "0.1"], "--infer_alphas names one twice"),
        (["--infer_alphas", "-1"], "must be numbers of 0 or more"),
        (["--family="], "--family needs a run"),
        (["--family=nowhere"], "nowhere holds no family"),
        (["--margin=0"], "--margin must be above 0"),
        (["--decode=-1"], "--decode must be at least 0"),
        (["--decode=4"], "--decode 4 asks for more prompts than the 3 there are"),
        (["--family={world}/expert_only", "--controls"], "compares train-alpha 0 with others, so train both"),
        (["--controls", "{world}/family"], "is the family itself"),
    ],
)
def test_refusals(world, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        entry.main(flags(world, tmp_path / "no", *(flag.replace("{world}", str(world)) for flag in more)))
    assert not (tmp_path / "no").exists()


def test_a_head_of_shuffled_features_is_given_true_ones_nowhere(world, tmp_path):
    head, models = str(world / "amateur_shuffled/heads/alpha_0_seed_0"), (str(world / "expert"), str(world / "amateur"))
    with pytest.raises(UserError, match="of other positions"):
        find_places([str(world / "family")], [head])
    with pytest.raises(UserError, match="of other positions"):
        refuse_roles({head: load_head_config(head)}, "", "", [head])
    with pytest.raises(UserError, match="of other positions"):
        assemble("cross_alpha", *load_models(*models, head, "float32", "cpu"))
    with pytest.raises(UserError, match="gives a head the expert's features alone"):
        accepted_length.main(
            [f"--expert={models[0]}", f"--amateur={models[1]}", "--heads", head, f"--prompts={world / 'prompts.jsonl'}"]
            + [f"--output={tmp_path / 'out'}"]
        )
    assert not (tmp_path / "out").exists()


def test_a_shuffled_control_is_shuffled_as_in_its_training(world, tmp_path):
    """By the seed that its manifest names, not by one that the user must remember."""
    make_family(tmp_path / "other", alphas=(0.0,), seeds=(0,), reads="amateur_shuffled", shuffle_seed=7)
    places = find_places([str(world / "family")], [str(world / "amateur_shuffled"), str(tmp_path / "other")])
    shuffled = [place for place in places if place.input == "amateur_shuffled"]
    assert [place.shuffle_seed for place in shuffled] == [0, 7]
    pair, members = load_members(str(world / "expert"), str(world / "amateur"), shuffled, "float64", "cpu")
    (prompt, *_), _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    text = Text.read(pair, prompt, list(range(8)), amateur_features=True)
    width = members[0].head.config.feature_widths[1]
    for member, seed in zip(members, (0, 7), strict=True):
        wanted = join_features(text.features, text.amateur_features, width, "amateur_shuffled", seed)[0]
        assert torch.equal(member.rollout(text).features, wanted)
    assert not torch.equal(*(member.rollout(text).features for member in members))


@pytest.mark.parametrize("role, layers", [("expert", 8), ("amateur", AMATEUR_LAYERS)])
def test_another_pair_of_the_same_shape_is_refused(world, tmp_path, role, layers):
    """Its targets would be others than those that the heads learnt."""
    shutil.copytree(world, tmp_path / "world")
    tiny.save_tiny(tmp_path / "world" / role, "smol", seed=50, layers=layers)
    with pytest.raises(UserError, match=f"this {role} is not the one that the family in .*family was trained with"):
        entry.main(flags(tmp_path / "world", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
