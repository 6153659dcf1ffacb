"""A head says which prompts it was trained on, and no measurement of drafts takes these: it may remember them."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
from tiny import save_tiny
from tiny_family import make_family
from tiny_world import add_drafters, make_world, tiny_head
from toy_training import amateur_flags, family_flags, make_toy, options, toy_samples

import train.amateur
import train.cross_alpha
import train.eagle3
from data_prep.token_files import write_tokens
from dcd_core.config import ROOT
from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError
from dcd_core.files import file_hash
from dcd_core.heads.checkpoint import load_head, locate, save_head
from dcd_core.heads.family import CONTROLS, FamilyMember, write_manifest
from dcd_core.heads.training_prompts import PROMPTS, hash_prompts, read_training_prompts, trained_on
from dcd_core.prompts import read_prompts
from diagnostics.unread import heads_used

READ = [[5, 6, 7], [5, 9], [70000, 1], [5, 9]]


def test_what_begins_as_a_training_text_is_known():
    hashes = hash_prompts(READ)
    assert hashes.dtype == np.uint64 and len(hashes) == 3 and (hashes[1:] > hashes[:-1]).all()
    asked = {
        "the same": [5, 6, 7],
        "a later turn": [5, 9, 3, 3, 8],
        "large ids": [70000, 1],
        "shorter": [5, 6],
        "other": [6, 5, 7],
        "joined": [5, 6, 7 + 256],
        "none": [],
    }
    prompts = [Prompt(name, ids) for name, ids in asked.items()]
    known = ["the same", "a later turn", "large ids"]
    assert trained_on(prompts, hashes, hash_prompts([]), hashes, hash_prompts([[6]])) == [known, [], known, ["other"]]
    assert trained_on(prompts) == [] and trained_on([], hashes) == [[]]


def test_a_head_keeps_it_and_is_the_same_head(tmp_path):
    head = tiny_head("smol")
    save_head(tmp_path / "told", head, hash_prompts(READ))
    save_head(tmp_path / "silent", head)
    assert np.array_equal(read_training_prompts(tmp_path / "told"), hash_prompts(READ))
    assert read_training_prompts(tmp_path / "silent") is None
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "silent" / name).read_bytes()
    load_head(tmp_path / "told")


def test_a_damaged_list_is_refused(tmp_path):
    path = tmp_path / PROMPTS
    for broken in (b"", b"nothing", b"\x93NUMPY\x01\x00"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=f"{PROMPTS} is damaged .*train the head again, or delete"):
            read_training_prompts(tmp_path)
    for other in (np.zeros(3), np.array([2, 1], np.uint64), np.array([1, 1], np.uint64), np.zeros((2, 2), np.uint64)):
        np.save(path, other)
        with pytest.raises(UserError, match="no sorted list of hashes"):
            read_training_prompts(tmp_path)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match="is damaged"):
        read_training_prompts(tmp_path)
    np.save(path, np.array([1, 2], np.uint64))
    path.write_bytes(path.read_bytes()[:8] + b"(" + path.read_bytes()[9:])
    with pytest.raises(UserError, match="is damaged"):
        read_training_prompts(tmp_path)
    np.savez(tmp_path / "archive.npz", np.array([1, 2], np.uint64))
    (tmp_path / "archive.npz").replace(path)
    with pytest.raises(UserError, match="is damaged"):
        read_training_prompts(tmp_path)


# ---- who writes it ---------------------------------------------------------------------------------------------------


def first_prompts(samples) -> list[list[int]]:
    return [sample.input_ids[: sample.answer_spans[0][0]].tolist() for sample in samples]


def test_the_trainer_writes_what_it_read_and_what_was_read_before(tmp_path):
    """Of the texts it was told to read, not of the whole file; families are looked at in test_train_family.py."""
    toy, samples = make_toy(tmp_path / "toy"), toy_samples(30)
    short = ["--max_steps=1", "--warmup_steps=0", "--eval_tokens"]
    train.eagle3.main(options(toy, tmp_path / "few", "--max_answer_tokens=40", "--snapshots=1", *short))
    few = read_training_prompts(tmp_path / "few" / "head")
    inside = [prompt for prompt in first_prompts(samples) if np.isin(hash_prompts([prompt]), few).all()]
    assert 0 < len(inside) < 30 and inside == first_prompts(samples)[: len(inside)]
    assert np.array_equal(read_training_prompts(tmp_path / "few" / "heads" / "1"), few)

    before = tmp_path / "before"
    save_head(before, load_head(tmp_path / "few" / "head"), hash_prompts(READ))
    going_on = [f"--head_init={before}", "--max_answer_tokens=40", "--draft_vocab_size=40"]
    train.eagle3.main(options(toy, tmp_path / "more", *going_on, *short))
    assert set(read_training_prompts(tmp_path / "more" / "head")) == {*few.tolist(), *hash_prompts(READ).tolist()}


def test_what_is_trained_on_is_not_evaluated_on(tmp_path, capsys):
    """By the prompts, not by the file's name; the same in the trainers of heads and amateurs."""
    toy = make_toy(tmp_path / "toy")
    mixed = [*toy_samples(3, seed=1), *toy_samples(2), *toy_samples(1, seed=2)]
    write_tokens(tmp_path / "mixed.parquet", mixed, {})
    write_tokens(tmp_path / "copy.parquet", toy_samples(30), {})
    short = ["--max_steps=1", "--warmup_steps=0"]
    head = [train.eagle3, options(toy, tmp_path / "head", *short)]
    amateur = [train.amateur, amateur_flags(toy, tmp_path / "amateur", *short)]
    save_tiny(toy / "amateur", "smol", seed=100, layers=4)
    family = [train.cross_alpha, family_flags(toy, tmp_path / "family", *short, "--train_alphas", "0")]
    for trainer, flags in (head, amateur, family):
        with pytest.raises(UserError, match=r"2 of the 6 texts .*trained on \(the first: 'text0-0'\).*--skip_trained"):
            trainer.main([*flags, f"--eval_tokens={tmp_path / 'mixed.parquet'}"])
        with pytest.raises(UserError, match="30 of the 30 texts .*none is left to evaluate on"):
            trainer.main([*flags, f"--eval_tokens={tmp_path / 'copy.parquet'}", "--skip_trained"])
        capsys.readouterr()
        trainer.main([*flags, f"--eval_tokens={tmp_path / 'mixed.parquet'}", "--skip_trained"])
        assert "2 of the 6 texts in" in capsys.readouterr().out
    clean = tmp_path / "clean"
    write_tokens(tmp_path / "clean.parquet", [*toy_samples(3, seed=1), *toy_samples(1, seed=2)], {})
    train.eagle3.main(options(toy, clean, *short, f"--eval_tokens={tmp_path / 'clean.parquet'}"))
    # the first four of the six are three that may be looked at, and the sixth is the fourth of these
    more = [f"--eval_tokens={tmp_path / 'mixed.parquet'}", "--skip_trained", "--eval_texts=4"]
    train.eagle3.main(options(toy, tmp_path / "four", *short, *more))
    capsys.readouterr()
    few = [f"--eval_tokens={tmp_path / 'clean.parquet'}", "--skip_trained", "--eval_texts=2"]
    train.eagle3.main(options(toy, tmp_path / "two", *short, *few))
    assert "left out" not in capsys.readouterr().out, "a smaller number of texts is not one that was trained on"
    runs = ("head", "clean", "four")
    figures = [json.loads((tmp_path / name / "metrics.json").read_text())["eval"] for name in runs]
    assert figures[0] == figures[1] == figures[2], "what is left is what is evaluated"


def test_what_the_head_it_starts_from_was_trained_on_is_not_evaluated_on(tmp_path):
    toy = make_toy(tmp_path / "toy")
    save_head(tmp_path / "before", tiny_head("smol"), hash_prompts(first_prompts(toy_samples(5, seed=1))[:1]))
    flags = options(toy, tmp_path / "run", f"--head_init={tmp_path / 'before'}", "--max_steps=1", "--warmup_steps=0")
    with pytest.raises(UserError, match="1 of the 5 texts .*trained on"):
        train.eagle3.main(flags)
    assert not (tmp_path / "run").exists()


# ---- who refuses -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = add_drafters(make_world(tmp_path_factory.mktemp("world")))
    make_family(world / "family")
    make_family(world / "beside", reads="expert_only")
    make_dual_family(world / "dual")
    save_head(world / "control", tiny_head("smol", seed=5))
    return world


def make_dual_family(folder) -> None:
    """As train/dual_drafter.py leaves it."""
    members = []
    for role, alpha in (("expert", 0.0), ("amateur", None)):
        path = folder / "heads" / f"{role}_seed_0"
        save_head(path, tiny_head("smol", aligned_with=role, train_alpha=alpha))
        fixed = dict.fromkeys(CONTROLS, "the same")
        weights = file_hash(path / "model.safetensors")
        members.append(FamilyMember(alpha, 0, "expert_only", path, fixed, weights))
    write_manifest(folder, "dual_drafter", members)


ROLES = {"head": "head", "amateur_head": "amateur_head"}
MEASUREMENTS = (
    ("accepted_length", {"heads": ("head", "control")}),
    ("benchmark", ROLES),
    ("calibrate", {"head": "head"}),
    ("cross_alpha", {"family": "family", "controls": ("control", "beside")}),
    ("dual_drafter", {"heads": "head", "amateur_heads": "amateur_head"}),
    ("dual_drafter", {"family": "dual"}),
    ("signal_error", ROLES | {"direct_head": "direct"}),
    ("throughput", ROLES),
)
METHODS_OF = {name: ("cd", "dcd_eagle3", "dual") for name in ("benchmark", "throughput")}
INSIDE = {"family": "heads/alpha_0.5_seed_1", "beside": "heads/alpha_0_seed_0", "dual": "heads/amateur_seed_0"}
UNMEASURED = {"identity": "texts, not drafts", "lossless": "laws and texts, not drafts", "overhead": "time, not drafts"}


def given(names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def cases() -> list[tuple]:
    """Every measurement with each head that it is given."""
    return [
        (name, drafters, f"{one}/{INSIDE[one]}" if one in INSIDE else one)
        for name, drafters in MEASUREMENTS
        for names in drafters.values()
        for one in given(names)
    ]


class Loaded(Exception):
    """The models would be loaded now."""


@pytest.mark.parametrize("name, drafters, head", cases(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_measurement_on_trained_prompts_is_refused(world, tmp_path, monkeypatch, capsys, name, drafters, head):
    """Whichever head it was, before a model is loaded; and prompts that no head has read pass this gate."""
    entry = importlib.import_module(f"diagnostics.{name}")
    prompts = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))[0]
    flags = [f"--expert={world / 'expert'}", f"--amateur={world / 'amateur'}", f"--prompts={world / 'prompts.jsonl'}"]
    for flag, names in drafters.items():
        flags += [f"--{flag}", *(str(world / one) for one in given(names))]
    if name in METHODS_OF:
        flags += ["--methods", *METHODS_OF[name]]
    flags += [f"--output={tmp_path / 'out'}"]

    def loads(*_, **__):
        raise Loaded

    for loader in ("load_models", "load_members", "load_study", "load_studies", "load_heads"):
        if hasattr(entry, loader):
            monkeypatch.setattr(entry, loader, loads)
    listed = world / head / PROMPTS
    try:
        np.save(listed, hash_prompts([prompts[3].ids, [1, 2, 3], prompts[1].ids]))
        told = rf"{head} was trained on 2 of the 5 prompts .*\('p1', 'p3'\).*--without.*--skip_trained"
        with pytest.raises(UserError, match=told):
            entry.main(flags)
        assert not (tmp_path / "out").exists()
        with pytest.raises(Loaded):
            entry.main([*flags, "--skip_trained"])
        shown = capsys.readouterr().out
        assert "2 of 5 prompts left out" in shown
        assert ("not known" in shown) == (sum(len(given(one)) for one in drafters.values()) > 1 or "family" in drafters)
        np.save(listed, hash_prompts([prompt.ids for prompt in prompts]))
        with pytest.raises(UserError, match="no prompt in .* is left"):
            entry.main([*flags, "--skip_trained"])
        np.save(listed, hash_prompts([[1, 2, 3], prompts[1].ids + [9]]))
        with pytest.raises(Loaded):
            entry.main(flags)
        assert "left out" not in capsys.readouterr().out
    finally:
        listed.unlink()


def test_a_head_that_no_method_drafts_with_is_not_asked():
    assert heads_used(["cd", "dcd_ngram", "scd"], "e", "f") == []
    assert heads_used(["cd", "expert_sd"], "e", "f") == ["e"]
    assert heads_used(["dual", "cd"], "e", "f") == ["e", "f"]


def test_every_script_that_takes_a_head_looks():
    """Or stands in a list, with its reason."""
    takes = ("head", "heads", "amateur_head", "family")
    found = set()
    for path in (ROOT / "diagnostics").glob("*.py"):
        module = importlib.import_module(f"diagnostics.{path.stem}")
        config = getattr(module, "Config", None)
        if config and hasattr(module, "main") and {field.name for field in dataclasses.fields(config)} & {*takes}:
            found.add(path.stem)
    assert found == {name for name, _ in MEASUREMENTS} | set(UNMEASURED)


def test_what_is_left_out_is_not_measured(world, tmp_path):
    """The rest is measured as if the others had never been in the file."""
    prompts = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))[0]
    lines = (world / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rest.jsonl").write_text("".join(line for place, line in enumerate(lines) if place not in (1, 3)))
    flags = [f"--{name}={world / name}" for name in ("expert", "amateur")] + ["--heads", str(world / "control")]
    flags += ["--max_new_tokens=12", "--dtype=float32"]
    listed = world / "control" / PROMPTS
    try:
        np.save(listed, hash_prompts([prompts[3].ids, prompts[1].ids]))
        for name, file, more in (
            ("all", world / "prompts.jsonl", ["--skip_trained"]),
            ("rest", tmp_path / "rest.jsonl", []),
            ("first", world / "prompts.jsonl", ["--skip_trained", "--limit=2"]),
            ("rest_first", tmp_path / "rest.jsonl", ["--limit=2"]),
        ):
            run = [*flags, f"--prompts={file}", f"--output={tmp_path / name}", *more]
            assert importlib.import_module("diagnostics.accepted_length").main(run) == 0
    finally:
        listed.unlink()
    names = ("all", "rest", "first", "rest_first")
    figures = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in names]
    assert figures[0] == figures[1] != figures[2] == figures[3]


def test_leaving_the_training_text_out_is_the_cure(world, tmp_path):
    """What the refusal advises gives prompts that pass."""
    import data_prep.conversations

    lines = [json.loads(line) for line in (world / "prompts.jsonl").read_text().splitlines()]
    answered = [line | {"messages": [*line["messages"], {"role": "assistant", "content": "w1"}]} for line in lines]
    (tmp_path / "read.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answered[:2]))
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answered))
    out = tmp_path / "others.jsonl"
    given = [f"--source={tmp_path / 'all.jsonl'}", f"--without={tmp_path / 'read.jsonl'}", f"--out={out}"]
    data_prep.conversations.main(given)
    expert = str(world / "expert")
    read = hash_prompts([prompt.ids for prompt in read_prompts(str(tmp_path / "read.jsonl"), expert)[0]])
    assert len(trained_on(read_prompts(str(world / "prompts.jsonl"), expert)[0], read)[0]) == 2
    left = read_prompts(str(out), expert)[0]
    assert len(left) == 3 and trained_on(left, read) == [[]]


def test_the_list_comes_with_a_head_from_the_hub(world, tmp_path, monkeypatch):
    fetched = {}

    def snapshot(name, allow_patterns):
        fetched[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate("owner/head") == tmp_path and PROMPTS in fetched["owner/head"]
