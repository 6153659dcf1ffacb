"""The dual-drafter study on tiny models: it replays what decoding does, and sums what pandas says."""

import itertools
import json
import shutil

import pytest
import tiny
import torch
from tiny_family import identities
from tiny_world import add_drafters, make_world, tiny_head

import diagnostics.dual_drafter as entry
from dcd_core.contrast import Target, choices
from dcd_core.decode import Settings, decode
from dcd_core.drafters.dual import HeadPair
from dcd_core.errors import UserError
from dcd_core.files import file_hash
from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.family import CONTROLS, PER_SEED, FamilyMember, write_manifest
from dcd_core.methods import assemble
from dcd_core.prompts import read_prompts
from dcd_core.replay import replay, walk_rounds
from diagnostics.dual_replay import agreements, replay_all
from diagnostics.histories import History, load_study
from diagnostics.records import read_records
from diagnostics.rollouts import roll_out

GAMMA = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny pair with two seeds of both heads."""
    folder = add_drafters(make_world(tmp_path_factory.mktemp("world")))
    save_head(folder / "head_1", tiny_head("smol", seed=11))
    return folder


def flags(world, output, *more):
    models = [f"--{name}={world / name}" for name in ("expert", "amateur")]
    heads = ["--heads", str(world / "head"), str(world / "head_1")]
    heads += ["--amateur_heads", str(world / "amateur_head"), str(world / "other_amateur_head")]
    fast = ["--max_new_tokens=12", "--batch=2", "--device=cpu", f"--gamma={GAMMA}"]
    return [*models, *heads, f"--prompts={world / 'prompts.jsonl'}", f"--output={output}", *fast, *more]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    assert entry.main(flags(world, folder)) == 0
    return folder


def histories(world, amateur_head: str, alpha: float):
    """Texts of every prompt, with their histories."""
    names = [str(world / name) for name in ("expert", "amateur", "head")]
    study = load_study(*names, "float64", "cpu", str(world / amateur_head))
    prompts, stops = read_prompts(str(world / "prompts.jsonl"), names[0])
    answers = roll_out(study.pair, prompts, stops, alpha, 16)
    return (
        study,
        stops,
        [(prompt, made, History.read(study, prompt, made)) for prompt, made in zip(prompts, answers, strict=True)],
    )


@pytest.mark.parametrize("amateur_head", ["amateur_head", "other_amateur_head"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_rounds_are_those_of_replay_and_of_decoding(world, amateur_head, alpha):
    """Of e alone (also at twice the length) and of the two heads, whose draft vocabularies may differ."""
    study, stops, texts = histories(world, amateur_head, alpha)
    embedding = study.pair.expert.embedding
    both = HeadPair(study.head, study.amateur_head, alpha)
    agreed = set()
    for prompt, made, history in texts:
        found = agreements(history, alpha, GAMMA)
        rollout = history.text.rollout(study.head)
        for kind, drafting, gamma in (("target", study.head, 2 * GAMMA), ("dual", both, GAMMA)):
            assert walk_rounds(found[kind], gamma) == replay(drafting, embedding, rollout, gamma)
        settings = Settings(Target(alpha=alpha, temperature=0.0), 16, stops, gamma=GAMMA)
        for kind, method in (("target", "dcd_eagle3"), ("dual", "dual")):
            assembled = assemble(method, study.pair, study.head, amateur_head=study.amateur_head)
            (decoded,) = decode(assembled, [prompt], settings)
            assert decoded.ids == made
            sums = next(
                row for row in replay_all(history, alpha, GAMMA) if (row["draft"], row["gamma"]) == (kind, GAMMA)
            )
            accepted = sum(entry.accepted for entry in decoded.rounds)
            assert (sums["rounds"], sums["accepted"]) == (len(decoded.rounds), accepted)
        agreed |= set(found["target"]) | set(found["dual"])
    assert len(agreed) > 1, "some drafts agree"


def test_the_oracle_variants_use_the_true_rows(world):
    """By hand: the draft of a place from the true models on the text before it, until the first that differs."""
    study, _, texts = histories(world, "amateur_head", 0.5)
    target, hits = Target(alpha=0.5), 0
    for _, _, history in texts:
        found = agreements(history, 0.5, GAMMA)
        ids = history.text.ids
        for root in range(len(found["oracle"])):
            for kind in ("oracle", "exact_expert"):
                head = study.head if kind == "oracle" else study.amateur_head
                run = 0
                for step, row in enumerate(_drafted(history, head, root)):
                    place = history.text.prompt_length + root + 1 + step
                    if place >= len(ids):
                        break
                    at = torch.tensor([place])
                    if kind == "oracle":
                        pair = [row, history.amateur_rows(at)[0, head.target_ids]]
                    else:
                        pair = [history.expert_rows(at)[0, head.target_ids], row]
                    if head.target_ids[choices(pair, target)] != ids[place]:
                        break
                    run += 1
                assert found[kind][root] == run
                hits += run
    assert hits


def _drafted(history, head, root):
    """Logits of a head's drafts from one root, one decoding step after the other, on the text's own tokens."""
    end = history.text.prompt_length + root
    embed = history.study.pair.expert.embedding
    cache = head.new_cache(1, end + GAMMA + 1)
    ids = history.text.ids[None]
    states = head.step(embed(ids[:, 1 : end + 1]), head.fuse(history.text.features[:, :end]), cache)
    cache.commit([end])
    for step in range(GAMMA):
        yield head.logits(states[0, -1])
        token = ids[:, end + 1 + step : end + 2 + step]
        if token.shape[1] == 0:
            return
        states = head.step(embed(token), states[:, -1:], cache)
        cache.commit([1])


def test_the_records_hold_every_seed_and_draft(run):
    positions = read_records(run / "positions.parquet", "positions").rows
    replays = read_records(run / "dual_replays.parquet", "dual_replays").rows
    seeds = {"expert / amateur / head + amateur_head", "expert / amateur / head_1 + other_amateur_head"}
    assert set(positions["pair"]) == set(replays["pair"]) == seeds
    assert len(replays) == 2 * 5 * 2 * 5, "seeds, prompts, alphas, and four drafts one of which at two lengths"
    counts = positions.groupby(["pair", "alpha", "prompt_id"]).size()
    emitted = replays.groupby(["pair", "alpha", "prompt_id"])["emitted"].agg(["min", "max"])
    assert (emitted["min"] == emitted["max"]).all() and (emitted["max"] == counts).all(), "every draft gives the text"
    assert (positions["dual_closer"].astype(bool) == (positions["dual_kl"] < positions["target_kl"])).all()
    assert positions["direct_kl"].isna().all()


def test_the_table_is_what_pandas_says(run):
    positions = read_records(run / "positions.parquet", "positions").rows
    replays = read_records(run / "dual_replays.parquet", "dual_replays").rows
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["seeds"] == 2
    (low, high) = metrics["dual_drafter"]
    assert (low["alpha"], high["alpha"]) == (0.1, 0.5)
    own, rows = positions[positions["alpha"] == 0.5], replays[replays["alpha"] == 0.5]
    lengths = {}
    for kind, draft in high["drafts"].items():
        part = rows[(rows["draft"] == kind) & (rows["gamma"] == GAMMA)]
        lengths[kind] = part["accepted"].sum() / part["rounds"].sum()
        assert draft["length"]["estimate"] == pytest.approx(lengths[kind])
        assert draft["kl"]["estimate"] == pytest.approx(own[f"{kind}_kl"].mean())
        assert draft["top1"]["estimate"] == pytest.approx(own[f"{kind}_top1"].astype(float).mean())
        if kind != "target":
            assert draft["length_change"]["estimate"] == pytest.approx(lengths[kind] - lengths["target"])
            assert draft["kl_change"]["estimate"] == pytest.approx((own[f"{kind}_kl"] - own["target_kl"]).mean())
    long = rows[(rows["draft"] == "target") & (rows["gamma"] == 2 * GAMMA)]
    in_time = long["accepted"].sum() / long["rounds"].sum()
    assert high["equal_time"]["length"]["estimate"] == pytest.approx(in_time)
    assert high["equal_time"]["change"]["estimate"] == pytest.approx(lengths["dual"] - in_time)
    assert high["share_closer"]["estimate"] == pytest.approx(own["dual_closer"].astype(float).mean())
    assert high["rule"]["share"]["estimate"] == pytest.approx((own["rule_left"] > own["rule_right"]).mean())
    assert high["rule"]["factor"] == 5.0 and low["rule"]["factor"] == 21.0
    assert high["variances"]["var_signal"]["estimate"] == pytest.approx(own["var_signal"].mean())
    texts = own[["prompt_id", "position"]].drop_duplicates()
    assert high["positions"] == len(texts) == len(own) / 2, "a position of the texts counts once, whatever the seeds"
    assert high["verdict"] in ("helps", "no gain", "hurts", "undecided")


def test_a_stopped_run_goes_on_and_gives_the_same(world, run, tmp_path, monkeypatch):
    real, calls = entry.measure_batch, []

    def stops_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(entry, "measure_batch", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "out"))
    with pytest.raises(UserError, match="other settings"):
        entry.main(flags(world, tmp_path / "out", "--gamma=2"))
    entry.main(flags(world, tmp_path / "out"))
    assert len(calls) == 3 + 4
    for kind in ("positions", "dual_replays"):
        hashes = [
            read_records(at / f"{kind}.parquet", kind).provenance["content_hash"] for at in (run, tmp_path / "out")
        ]
        assert hashes[0] == hashes[1]


def test_a_trained_family_is_taken_by_its_seeds(world, tmp_path):
    """As train/dual_drafter.py leaves one; a family that is not matched is refused."""

    def family(folder, **changed):
        members = []
        for seed, (alpha, role) in itertools.product((0, 1), ((0.0, "expert"), (None, "amateur"))):
            path = folder / "heads" / f"{role}_seed_{seed}"
            save_head(path, tiny_head("smol", seed=seed, aligned_with=role, train_alpha=alpha))
            fixed = dict.fromkeys(CONTROLS, "the same") | {PER_SEED: f"of seed {seed}"} | identities()
            fixed |= changed if (role, seed) == ("amateur", 1) else {}
            weights = file_hash(path / "model.safetensors")
            members.append(FamilyMember(alpha, seed, "expert_only", path, fixed, weights))
        write_manifest(folder, "dual_drafter", members)
        return ["--heads", "--amateur_heads", f"--family={folder}", "--limit=2", "--alphas", "0.5"]

    assert entry.main(flags(world, tmp_path / "out", *family(tmp_path / "family"))) == 0
    rows = read_records(tmp_path / "out" / "dual_replays.parquet", "dual_replays").rows
    assert set(rows["pair"]) == {"expert / amateur / seed 0", "expert / amateur / seed 1"}
    with pytest.raises(UserError, match="not matched: schedule"):
        entry.main(flags(world, tmp_path / "no", *family(tmp_path / "other", schedule="another")))
    shutil.copytree(world, tmp_path / "world")
    tiny.save_tiny(tmp_path / "world" / "amateur", "smol", seed=101, layers=4)  # of the same shape
    with pytest.raises(UserError, match="this amateur is not the one that the family in .*family was trained with"):
        entry.main(flags(tmp_path / "world", tmp_path / "no", *family(tmp_path / "family")))
    assert not (tmp_path / "no").exists()


def test_without_contrast_there_is_no_rule(world, tmp_path):
    assert entry.main(flags(world, tmp_path / "out", "--alphas", "0", "--limit=2")) == 0
    (found,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["dual_drafter"]
    assert "rule" not in found
    assert found["drafts"]["oracle"]["length_change"]["estimate"] == 0, "without contrast the oracle draft is e"


def test_refusals(world, tmp_path):
    def refused(message, *more):
        with pytest.raises(UserError, match=message):
            entry.main(flags(world, tmp_path / "out", *more))
        assert not (tmp_path / "out").exists()

    head, other = str(world / "head"), str(world / "amateur_head")
    refused("either --family, or", "--family=runs/x")
    refused("one head for each", "--heads", head)
    refused("name a head twice", "--heads", head, head)
    refused("--amateur_head takes a head aligned with the amateur", "--heads", head, "--amateur_heads", head)
    refused("--head takes a head aligned with the expert", "--heads", other, "--amateur_heads", other)
    refused("recombines two heads of one kind", "--heads", str(world / "dual_input"), "--amateur_heads", other)
    refused("--gamma must be at least 1", "--gamma=0")
    refused("at least 2", "--max_new_tokens=1")
    refused("either --family, or", "--heads", "--amateur_heads")
    refused("holds no family of heads", "--heads", "--amateur_heads", f"--family={world}")
