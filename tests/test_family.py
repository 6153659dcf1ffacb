"""A family of heads is what its manifest says, and matched in every control; each difference is refused by name."""

import json
import shutil

import pytest
import torch
from tiny import save_tiny, tiny_config
from toy_training import family_flags, make_toy_pair, toy_samples

import train.cross_alpha as cross_alpha
import train.dual_drafter as dual_drafter
from data_prep.token_files import write_tokens
from dcd_core.errors import UserError
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import (
    CONTROLS,
    INPUTS,
    MANIFEST,
    PER_SEED,
    Family,
    initial_weights,
    join_features,
    shuffled_positions,
)

SHORT = ["--max_steps=2", "--warmup_steps=1"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pair(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    """A family of two targets and two seeds, never changed."""
    output = tmp_path_factory.mktemp("runs") / "family"
    cross_alpha.main(family_flags(toy, output, *SHORT, "--train_alphas", "0", "0.5", "--seeds", "0", "1"))
    return output


def tampered(run, folder, change):
    """A copy of the run whose manifest went through ``change``."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_a_family_is_read_as_it_was_trained(run):
    family = Family.read(run, kind="cross_alpha")
    assert (family.alphas, family.seeds) == ((0.0, 0.5), (0, 1))
    assert set(family.held_fixed) == set(CONTROLS) - {PER_SEED}
    member = family.member(0.5, 1)
    assert member.path == run / "heads" / "alpha_0.5_seed_1" and member.input == "dual" and member.shuffle_seed == 0
    # one start for a seed, another for the next
    starts = {(m.alpha, m.seed): m.held_fixed[PER_SEED] for m in family.members}
    assert starts[0.0, 0] == starts[0.5, 0] != starts[0.0, 1] == starts[0.5, 1]
    with pytest.raises(UserError, match="no head of train-alpha 0.3 and seed 1"):
        family.member(0.3, 1)


# what the trainer is given differently, and the control that must be named; "" if nothing is changed by it
FLIPS = {
    "--expert={other}/expert": "expert",
    "--amateur={toy}/expert": "amateur",
    "--train_tokens={other}/train.parquet": "training texts",
    "--head_layers=2": "head shape",
    "--head_intermediate_size=48": "head shape",
    "--max_length=9": "training texts",
    "--seed=1": "data order",
    "--batch_size=2": "data order",
    "--max_answer_tokens=100": "training texts",
    "--max_steps=3": "token budget",
    "--epochs=2 --max_steps=0": "token budget",
    "--step_decay=0.7": "loss",
    "--loss_normalisation=eagle": "loss",
    "--unroll_steps=2": "unroll depth",
    "--draft_vocab_size=39": "draft vocabulary",
    "--lr=1e-3": "schedule",
    "--warmup_steps=0": "schedule",
    "--schedule=linear": "schedule",
    "--clip=1": "optimiser",
    "--weight_decay=0.1": "optimiser",
    "--dtype=bfloat16": "dtype",
    "--expert_dtype=bfloat16": "dtype",
    "--feature_layers 1 4 5": "feature layers",
    "--amateur_feature_layers 1 2 3": "",
    "--members_at_a_time=1": "",
    "--log_every=1": "",
    "--feature_scaling=none": "feature scaling",
    "--start=closed_form": "feature scaling",
    "--input=amateur_zeroed": "input",
}


WITHOUT_A_FLAG = ("trained parameters", "position mask rule", PER_SEED)


def test_every_control_is_flipped_below():
    assert set(FLIPS.values()) - {""} | set(WITHOUT_A_FLAG) == set(CONTROLS)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another expert, and other texts."""
    folder = tmp_path_factory.mktemp("other")
    save_tiny(folder / "expert", seed=5)
    write_tokens(folder / "train.parquet", toy_samples(30, seed=5), {})
    return folder


@pytest.mark.parametrize("flip", FLIPS)
def test_a_run_with_any_control_flipped_does_not_join_the_family(toy, other, run, tmp_path, flip):
    """The trainer itself: one more train-alpha, from another run with one setting changed."""
    changed = [part.format(toy=toy, other=other) for part in flip.split()]
    seeds = ["--seeds", "0"] if FLIPS[flip] else ["--seeds", "0", "1"]
    cross_alpha.main(family_flags(toy, tmp_path / "run", *SHORT, "--train_alphas", "0.3", *seeds, *changed))
    if FLIPS[flip]:
        with pytest.raises(UserError, match=f"not matched: {FLIPS[flip]} is "):
            Family.read(run, tmp_path / "run")
    else:  # it joins
        assert Family.read(run, tmp_path / "run").alphas == (0.0, 0.3, 0.5)


@pytest.mark.parametrize("control", WITHOUT_A_FLAG)
def test_a_member_that_differs_in_what_no_flag_sets_is_refused_by_its_name(run, tmp_path, control):
    def change(manifest):
        manifest["members"][-1]["held_fixed"][control] = "something else"

    with pytest.raises(UserError, match=f"not matched: {control} is .* but something else for train-alpha 0.5, seed 1"):
        Family.read(tampered(run, tmp_path / "run", change))


def test_a_manifest_that_is_silent_on_a_control_is_refused(run, tmp_path):
    path = tampered(run, tmp_path / "run", lambda manifest: None) / MANIFEST
    whole = path.read_text()
    for control in CONTROLS:
        manifest = json.loads(whole)
        del manifest["members"][0]["held_fixed"][control]
        path.write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=f"does not say what its {control} was"):
            Family.read(path.parent)


def test_what_is_no_family_is_one_clear_line(toy, run, tmp_path):
    def message(change=lambda manifest: None, *more, **options) -> str:
        folder = tampered(run, tmp_path / f"run{len(list(tmp_path.iterdir()))}", change)
        with pytest.raises(UserError) as caught:
            Family.read(folder, *more, **options)
        return str(caught.value)

    def lone(manifest):
        manifest["members"].pop()

    def twice(manifest):
        manifest["members"].append(manifest["members"][0])

    def alike(manifest):
        for member in manifest["members"]:
            member["held_fixed"][PER_SEED] = "one"

    def lying(manifest):
        for member in manifest["members"][::2]:
            member["alpha"] = 0.1

    def nameless(manifest):
        del manifest["kind"]

    assert "no head of train-alpha 0.5 for seed 1" in message(lone)
    assert "two heads of train-alpha 0, seed 0" in message(twice)
    assert "do not all have initial weights of their own" in message(alike)
    assert "says (input, aligned with, train-alpha)" in message(lying)
    assert "is not a manifest of a family: KeyError('kind')" in message(nameless)
    assert "holds a family of kind cross_alpha, not dual_drafter" in message(kind="dual_drafter")
    assert "two heads of train-alpha 0, seed 0" in message(lambda manifest: None, run)
    with pytest.raises(UserError, match="holds no family of heads"):
        Family.read(tmp_path / "nowhere")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("[")
    with pytest.raises(UserError, match="holds no family of heads"):
        Family.read(tmp_path / "broken")


def test_a_head_that_was_trained_on_is_not_the_familys(run, tmp_path):
    folder = tampered(run, tmp_path / "run", lambda manifest: None)
    heads = folder / "heads"
    # same shape and target, another seed's weights
    shutil.copy(heads / "alpha_0.5_seed_1" / "model.safetensors", heads / "alpha_0.5_seed_0")
    with pytest.raises(UserError, match="alpha_0.5_seed_0 are not those that this family was trained to"):
        Family.read(folder)
    (heads / "alpha_0.5_seed_0" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="alpha_0.5_seed_0 has no model.safetensors"):
        Family.read(folder)


def test_a_control_family_is_held_to_the_family_in_all_but_its_input(toy, run, tmp_path):
    family = Family.read(run)
    for name, flags in {
        "expert_only": ["--input=expert_only"],
        "another rate": ["--input=expert_only", "--lr=1e-3"],
        "zeroed": ["--input=amateur_zeroed"],
    }.items():
        cross_alpha.main(family_flags(toy, tmp_path / name, *SHORT, "--train_alphas", "0", "--seeds", "0", *flags))
    for name in ("expert_only", "zeroed"):
        family.refuse_unmatched(Family.read(tmp_path / name))
    with pytest.raises(UserError, match="not matched: schedule is "):
        family.refuse_unmatched(Family.read(tmp_path / "another rate"))
    with pytest.raises(UserError, match="not matched: input is dual .* but expert_only for"):
        family.refuse_unmatched(Family.read(tmp_path / "expert_only"), but=())


def test_the_two_drafters_of_a_reconstruction_are_a_family(toy, tmp_path):
    dual_drafter.main(family_flags(toy, tmp_path / "run", *SHORT, "--seeds", "0", "1"))
    family = Family.read(tmp_path / "run", kind="dual_drafter")
    assert (family.alphas, family.seeds) == ((0.0, None), (0, 1))
    for seed in family.seeds:
        first, second = family.member(0.0, seed), family.member(None, seed)
        assert first.path.name == f"expert_seed_{seed}" and second.path.name == f"amateur_seed_{seed}"
        assert first.held_fixed == second.held_fixed and first.weights != second.weights
        assert (first.aligned_with, second.aligned_with) == ("expert", "amateur")


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_shuffled_positions_come_from_the_past_and_depend_on_nothing_else():
    places = shuffled_positions(300, 7)
    assert places[:2].tolist() == [0, 1] and bool((places[2:] < torch.arange(2, 300)).all()) and places[2:].min() >= 1
    assert torch.equal(places[:120], shuffled_positions(120, 7))
    assert not torch.equal(places, shuffled_positions(300, 8))
    assert len(set(places.tolist())) > 100


def test_each_input_joins_what_it_says():
    expert, amateur = torch.randn(2, 9, 6), torch.randn(2, 9, 12)
    joined = {kind: join_features(expert, amateur, 12, kind, seed=3) for kind in INPUTS}
    assert joined["expert_only"] is expert
    assert all(torch.equal(found[..., :6], expert) for found in joined.values())
    assert torch.equal(joined["dual"][..., 6:], amateur)
    assert joined["amateur_zeroed"].shape == (2, 9, 18) and not joined["amateur_zeroed"][..., 6:].any()
    assert torch.equal(joined["amateur_shuffled"][..., 6:], amateur[:, shuffled_positions(9, 3)])
    assert torch.equal(join_features(expert, None, 12, "amateur_zeroed"), joined["amateur_zeroed"])
    with pytest.raises(UserError, match="input is one of expert_only, dual"):
        join_features(expert, amateur, 12, "both")


def test_the_start_has_one_hash_with_and_without_an_amateur():
    expert, amateur = tiny_config("smol"), tiny_config("smol")
    plain = Eagle3Head.from_expert(expert, seed=4)
    dual = DualInputHead.from_pair(expert, amateur, seed=4)
    assert initial_weights(plain) == initial_weights(dual)
    assert initial_weights(plain) != initial_weights(Eagle3Head.from_expert(expert, seed=5))
    with torch.no_grad():
        dual.fc.weight[0, -1] = 1e-30
    with pytest.raises(UserError, match="columns for the amateur are not zero"):
        initial_weights(dual)
    with torch.no_grad():
        plain.norm.weight[3] += 1e-7
    assert initial_weights(plain) != initial_weights(Eagle3Head.from_expert(expert, seed=4))
