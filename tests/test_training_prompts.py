"""A head says which prompts it was trained on, and no measurement of drafts takes these: it may remember them."""

import importlib
import json

import numpy as np
import pytest
from tiny_family import make_family
from tiny_world import add_drafters, make_world, tiny_head
from toy_training import make_toy, options, toy_samples

import train.eagle3
from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head, save_head
from dcd_core.heads.training_prompts import PROMPTS, hash_prompts, read_training_prompts, trained_on
from dcd_core.prompts import read_prompts

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
    assert trained_on(prompts, hashes) == ["the same", "a later turn", "large ids"]
    assert trained_on(prompts, hash_prompts([])) == []


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


# ---- who refuses -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = add_drafters(make_world(tmp_path_factory.mktemp("world")))
    make_family(world / "family")
    save_head(world / "control", tiny_head("smol", seed=5))
    return world


MEASUREMENTS = {
    "accepted_length": {"heads": ("head", "control")},
    "benchmark": {"head": "head", "amateur_head": "amateur_head"},
    "cross_alpha": {"family": "family", "controls": "control"},
    "dual_drafter": {"heads": "head", "amateur_heads": "amateur_head"},
    "signal_error": {"head": "head", "amateur_head": "amateur_head", "direct_head": "direct"},
    "throughput": {"head": "head", "amateur_head": "amateur_head"},
}


def folders(name: str) -> list[str]:
    """Every head that a measurement is given."""
    given = [one for names in MEASUREMENTS[name].values() for one in ([names] if isinstance(names, str) else names)]
    return ["family/heads/alpha_0.5_seed_1" if one == "family" else one for one in given]


@pytest.mark.parametrize("name, head", [(name, head) for name in MEASUREMENTS for head in folders(name)])
def test_a_measurement_on_trained_prompts_is_refused(world, tmp_path, monkeypatch, name, head):
    """Whichever head it was, before a model is loaded; and prompts that no head has read pass this gate."""
    entry = importlib.import_module(f"diagnostics.{name}")
    prompts = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))[0]
    flags = [f"--expert={world / 'expert'}", f"--amateur={world / 'amateur'}", f"--prompts={world / 'prompts.jsonl'}"]
    for flag, names in MEASUREMENTS[name].items():
        flags += [f"--{flag}", *(str(world / one) for one in ([names] if isinstance(names, str) else names))]
    flags += [f"--output={tmp_path / 'out'}"]

    class Loaded(Exception):
        pass

    def loads(*_, **__):
        raise Loaded

    for loader in ("load_models", "load_members", "load_study", "load_studies", "load_heads"):
        if hasattr(entry, loader):
            monkeypatch.setattr(entry, loader, loads)
    listed = world / head / PROMPTS
    try:
        np.save(listed, hash_prompts([prompts[3].ids, [1, 2, 3], prompts[1].ids]))
        with pytest.raises(
            UserError, match=rf"{head} was trained on 2 of the 5 prompts .*\(the first: 'p1'\).*--without"
        ):
            entry.main(flags)
        assert not (tmp_path / "out").exists()
        np.save(listed, hash_prompts([[1, 2, 3], prompts[1].ids + [9]]))
        with pytest.raises(Loaded):
            entry.main(flags)
    finally:
        listed.unlink()


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
    assert len(trained_on(read_prompts(str(world / "prompts.jsonl"), expert)[0], read)) == 2
    left = read_prompts(str(out), expert)[0]
    assert len(left) == 3 and trained_on(left, read) == []
