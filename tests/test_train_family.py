"""train/cross_alpha.py and train/dual_drafter.py at toy size: a member is what a run of its own trains, bit by bit."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from tiny import tiny_model
from toy_training import STOP, family_flags, flags, head_weights, in_child, make_toy_pair, toy_samples

import train.cross_alpha as cross_alpha
import train.dual_drafter as dual_drafter
import train.eagle3 as eagle3
from dcd_core.contrast import Target, target_log_probs
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head
from dcd_core.heads.family import Family
from dcd_core.heads.training_prompts import hash_prompts, read_training_prompts
from dcd_core.model_identity import model_identity
from dcd_core.models import LanguageModel, load_model
from train.batches import Texts
from train.online_expert import HeadStep
from train.unroll import Aim, align, draft_targets

ZERO = "configs/deepspeed/zero{}.json"
ALPHAS = ["--train_alphas", "0", "0.5", "--seeds", "0", "1"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pair(tmp_path_factory.mktemp("toy"))


def standard(toy) -> list[str]:
    held_out = f"--eval_tokens={toy / 'held_out.parquet'}"
    return [held_out, "--epochs=2", "--save_every=6", "--log_every=1", "--eval_every=10"]


def options(toy, output, *more) -> list[str]:
    return family_flags(toy, output, *standard(toy), *more)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """One finished family of two targets and two seeds, never changed."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    assert cross_alpha.main(options(toy, output, *ALPHAS)) == 0
    return output


def curves(output, member: str = "") -> list[dict]:
    """All that was logged of a member but its speed."""
    found = json.loads((output / "metrics.json").read_text())
    history = (found["members"][member] if member else found)["history"]
    return [{name: value for name, value in entry.items() if name != "tokens_per_s"} for entry in history]


def assert_same(one, two, head: str, other: str = ""):
    weights, others = head_weights(one, f"heads/{head}"), head_weights(two, other or f"heads/{head}")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


# ---- every member as if it were alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha, seed", [("0", 0), ("0.5", 1)])
def test_a_member_equals_a_run_of_its_own(toy, finished, tmp_path, alpha, seed):
    """Losses, gradient norms (all are clipped), evaluation and weights, bit by bit."""
    cross_alpha.main(options(toy, tmp_path / "run", "--train_alphas", alpha, f"--seeds={seed}"))
    name = f"alpha_{alpha}_seed_{seed}"
    assert_same(tmp_path / "run", finished, name)
    assert curves(tmp_path / "run", name) == curves(finished, name)
    assert max(entry.get("grad_norm", 0) for entry in curves(finished, name)) > 0.5


def test_members_in_groups_are_the_same_members(toy, finished, tmp_path):
    cross_alpha.main(options(toy, tmp_path / "run", *ALPHAS, "--members_at_a_time=3"))
    for path in (finished / "heads").iterdir():
        assert_same(tmp_path / "run", finished, path.name)
    assert Family.read(tmp_path / "run").held_fixed == Family.read(finished).held_fixed
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["group-1", "group-2"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_members_equal_runs_of_their_own(toy, tmp_path, stage, dtype):
    more = [f"--deepspeed_config={ZERO.format(stage)}", f"--dtype={dtype}", "--max_steps=5"]
    groups = ["--train_alphas", "0", "0.3", "0.5", "--members_at_a_time=2"]
    cross_alpha.main(options(toy, tmp_path / "run", *groups, *more))
    cross_alpha.main(options(toy, tmp_path / "alone", "--train_alphas", "0.3", *more))
    assert_same(tmp_path / "alone", tmp_path / "run", "alpha_0.3_seed_0")
    assert curves(tmp_path / "alone", "alpha_0.3_seed_0") == curves(tmp_path / "run", "alpha_0.3_seed_0")


def test_alpha_0_with_expert_only_input_is_the_eagle3_trainer(toy, tmp_path):
    eagle3.main(flags(toy, tmp_path / "eagle3", *standard(toy)))
    cross_alpha.main(options(toy, tmp_path / "run", "--train_alphas", "0", "0.5", "--input=expert_only"))
    dual_drafter.main(options(toy, tmp_path / "dual"))
    for run, name in (("run", "alpha_0_seed_0"), ("dual", "expert_seed_0")):
        assert curves(tmp_path / run, name) == curves(tmp_path / "eagle3")
        assert_same(tmp_path / run, tmp_path / "eagle3", name, "head")
    # negative control: the other member learns something else
    assert curves(tmp_path / "run", "alpha_0.5_seed_0") != curves(tmp_path / "eagle3")
    assert curves(tmp_path / "dual", "amateur_seed_0") != curves(tmp_path / "eagle3")


# ---- what differs, and what does not ---------------------------------------------------------------------------------


def test_every_input_starts_as_the_same_function(toy, finished, tmp_path):
    """The amateur's columns are zero: first losses agree to rounding, and zeroed columns never move."""
    first = curves(finished, "alpha_0_seed_0")[0]
    last = {}
    for kind in ("expert_only", "amateur_zeroed", "amateur_shuffled"):
        cross_alpha.main(options(toy, tmp_path / kind, "--train_alphas", "0", "0.5", f"--input={kind}"))
        found = curves(tmp_path / kind, "alpha_0_seed_0")
        assert found[0]["loss"] == pytest.approx(first["loss"], rel=1e-5)
        last[kind] = [entry["loss"] for entry in found if "loss" in entry]
    assert last["amateur_zeroed"] == pytest.approx(last["expert_only"], rel=1e-3)
    assert last["amateur_shuffled"] != pytest.approx(last["expert_only"], rel=1e-3)
    columns = {kind: head_weights(tmp_path / kind, "heads/alpha_0.5_seed_0")["fc.weight"][:, 96:] for kind in last}
    assert columns["expert_only"].shape[1] == 0 and not columns["amateur_zeroed"].any()
    assert columns["amateur_shuffled"].any()


def test_what_heads_say_of_themselves(toy, finished, tmp_path):
    expert = load_model(str(toy / "expert"), device="cpu")
    amateur = load_model(str(toy / "amateur"), device="cpu", feature_layers=(1, 2, 3))
    head = load_head(finished / "heads" / "alpha_0.5_seed_1", expert, amateur)
    said = head.config
    assert (head.kind, said.aligned_with, said.train_alpha) == ("dual_input", "contrast", 0.5)
    assert said.amateur_feature_layers == (1, 2, 3)
    assert said.amateur_identity == model_identity(amateur.model)
    other = load_model(str(toy / "expert"), device="cpu", feature_layers=(1, 2, 3))
    with pytest.raises(UserError, match="trained beside another amateur than"):
        load_head(finished / "heads" / "alpha_0.5_seed_1", expert, other)
    read = hash_prompts([sample.input_ids[: sample.answer_spans[0][0]] for sample in toy_samples(30)])
    assert np.array_equal(read_training_prompts(finished / "heads" / "alpha_0.5_seed_1"), read)
    dual_drafter.main(options(toy, tmp_path / "dual", "--max_steps=3"))
    for name, alpha in (("expert", 0.0), ("amateur", None)):
        said = load_head(tmp_path / "dual" / "heads" / f"{name}_seed_0", expert).config
        assert (said.kind, said.aligned_with, said.train_alpha) == ("eagle3", name, alpha)
        assert said.amateur_identity == (model_identity(amateur.model) if name == "amateur" else "")


def test_depth_and_width_are_the_heads(toy, tmp_path):
    more = ["--head_layers=2", "--head_intermediate_size=48", "--train_alphas", "0.3", "--max_steps=3"]
    cross_alpha.main(options(toy, tmp_path / "run", *more))
    [member] = Family.read(tmp_path / "run").members
    shape = member.held_fixed["head shape"]
    assert (shape["layers"], shape["intermediate"]) == (2, 48)
    weights = head_weights(tmp_path / "run", "heads/alpha_0.3_seed_0")
    assert weights["midlayer.mlp.gate_proj.weight"].shape == (48, 32)


def test_the_frozen_passes_are_done_once(toy, tmp_path, monkeypatch):
    """As many for a family of four as for one head; and none of an amateur of which nothing is needed."""
    calls = []
    original = LanguageModel.forward_full

    def counted(self, *arguments, **settings):
        calls.append(self.config.num_hidden_layers)
        return original(self, *arguments, **settings)

    monkeypatch.setattr(LanguageModel, "forward_full", counted)
    counts = []
    for name, more in {
        "one": ["--train_alphas", "0.5"],
        "four": ALPHAS,
        "none": ["--train_alphas", "0", "--seeds", "0", "1", "--input=expert_only"],
    }.items():
        calls.clear()
        cross_alpha.main(options(toy, tmp_path / name, "--check_models=false", *more))
        counts.append((calls.count(8), calls.count(4)))
    # 16 steps and two evaluations of 5 texts; the expert also for the size of its features
    assert counts == [(42, 26), (42, 26), (42, 0)]


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_targets_are_pi_cd_on_the_draft_vocabulary_masked_by_the_expert():
    expert, amateur = tiny_model("smol", dtype=torch.float64), tiny_model("smol", 100, 4, torch.float64)
    texts = Texts(toy_samples(6), "", 0, 0)
    batch = texts.batch(list(range(6)))
    ids = torch.arange(0, 96, 2)
    aims = [Aim(0.0), Aim(0.3), Aim(None)]
    passes = [model.forward_full(batch.input_ids) for model in (expert, amateur)]
    alignment = align(batch.texts, batch.spans, frozenset({STOP}))
    layers, hidden = [expert.output_layer, amateur.output_layer], [batch.pack(out.hidden) for out in passes]
    found = draft_targets(layers, hidden, alignment, ids, aims)
    rows = [
        [batch.pack(out.logits)[0, row + 1] for out in passes]
        for row in alignment.rows[0, alignment.trained(0)].tolist()
    ]
    inside = [bool(p.argmax() % 2 == 0) for p, _ in rows]
    assert 0 < sum(inside) < len(inside)
    assert any((1.3 * p - 0.3 * q).argmax() % 2 != p.argmax() % 2 for p, q in rows), "the rule must matter"
    for aim, targets in zip(aims, found, strict=True):
        assert targets.inside.tolist() == inside
        for index, (p, q) in enumerate(rows):
            whole = q.log_softmax(-1) if aim.alpha is None else target_log_probs([p, q], Target(alpha=aim.alpha))
            assert targets.mass[index].item() == pytest.approx(whole.exp()[ids].sum().item(), abs=1e-12)
            # restricting logits and combining commute
            a, b = (0, 1) if aim.alpha is None else (1 + aim.alpha, -aim.alpha)
            assert torch.allclose(targets.probs[index], (a * p[ids] + b * q[ids]).softmax(-1), atol=1e-12)
            assert torch.allclose(targets.probs[index] * targets.mass[index], whole.exp()[ids], atol=1e-12)


def test_heads_with_one_target_share_it():
    expert, amateur = tiny_model("smol"), tiny_model("smol", 100, 4)
    aims = [Aim(0.3), Aim(0.0), Aim(0.3)]
    step = HeadStep(expert, torch.arange(40), frozenset({STOP}), aims, amateur)
    one, two, three = step.each(Texts(toy_samples(3), "", 0, 0).batch([0, 1, 2]))
    assert one[3] is three[3] and one[3] is not two[3]
    assert all(one[part] is two[part] for part in range(3))


# ---- stopping and going on -------------------------------------------------------------------------------------------


def test_resuming_ends_with_the_same_family(toy, finished, tmp_path, capsys):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "metrics.json").unlink()
    shutil.rmtree(output / "heads")
    shutil.rmtree(output / "checkpoints" / "group-1" / "step-00000016")
    assert cross_alpha.main(options(toy, output, *ALPHAS)) == 0
    printed = capsys.readouterr().out
    assert "resuming after step 12 of 16" in printed
    assert printed.splitlines()[-1].startswith(f"4 heads -> {output / 'manifest.json'}; held-out accepted length ")
    for path in (finished / "heads").iterdir():
        assert_same(output, finished, path.name)
        assert curves(output, path.name) == curves(finished, path.name)
    assert (output / "manifest.json").read_text() == (finished / "manifest.json").read_text()


def test_a_family_that_is_redone_keeps_nothing_of_the_old_one(toy, finished, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    with pytest.raises(UserError, match="finished run.*--overwrite"):
        cross_alpha.main(options(toy, output, *ALPHAS))
    cross_alpha.main(options(toy, output, "--train_alphas", "0", "--overwrite"))
    assert [path.name for path in (output / "heads").iterdir()] == ["alpha_0_seed_0"]
    assert Family.read(output).alphas == (0.0,)


@pytest.mark.parametrize(
    "change, named",
    [
        (["--train_alphas", "0", "0.3"], "train_alphas was [0.0, 0.5], now [0.0, 0.3]"),
        (["--seeds", "0", "2"], "seeds was [0, 1], now [0, 2]"),
        (["--members_at_a_time=2"], "members_at_a_time was 0, now 2"),
        (["--input=amateur_zeroed"], "input was dual, now amateur_zeroed"),
        (["--amateur={toy}/expert"], "amateur weights was"),
        (["--head_layers=2"], "head_layers was 1, now 2"),
    ],
)
def test_a_changed_setting_is_refused_by_name(toy, finished, tmp_path, change, named):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "metrics.json").unlink()
    with pytest.raises(UserError, match="cannot resume") as caught:
        cross_alpha.main(options(toy, output, *ALPHAS, *[part.format(toy=toy) for part in change]))
    assert named in str(caught.value)


def test_a_killed_family_goes_on_to_the_same_weights(toy, finished, tmp_path):
    """Killed while a checkpoint of the first group is being written."""
    log = str(tmp_path / "log.txt")

    def run(output, kill: str = "") -> int:
        more = [*ALPHAS, "--members_at_a_time=3", "--save_every=4"]
        return in_child(options(toy, output, *more), log, None, kill, "train.cross_alpha")

    assert run(tmp_path / "killed", "write") == -signal.SIGKILL
    assert not (tmp_path / "killed" / "heads").exists()
    assert run(tmp_path / "killed") == 0, (tmp_path / "log.txt").read_text()
    assert "resuming after step 4 of 16" in (tmp_path / "log.txt").read_text()
    for path in (finished / "heads").iterdir():
        assert_same(tmp_path / "killed", finished, path.name)


# ---- refusals and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (["--train_alphas", "0", "-0.1"], "--train_alphas must be at least 0"),
        (["--train_alphas", "0.1", "0.1"], "--train_alphas takes one or more different values"),
        (["--train_alphas"], "--train_alphas takes one or more different values"),
        (["--train_alphas", "nan"], "--train_alphas must be a finite number"),
        (["--seeds", "0", "0"], "--seeds takes one or more different values"),
        (["--seeds", "-1"], "--seeds must be at least 0"),
        (["--input=both"], "input"),
        (["--members_at_a_time=-1"], "--members_at_a_time must be at least 0"),
        (["--head_layers=0"], "--head_layers must be at least 1"),
        (["--amateur="], "--amateur (hub id or folder) is needed"),
        (["--amateur=/nowhere"], "/nowhere"),
        (["--amateur_feature_layers", "1", "2"], "--amateur_feature_layers takes three distinct layers"),
        (["--amateur_feature_layers"], "taps"),
        (["--amateur_feature_layers", "1", "2", "9"], "feature_layers"),
        (["--train_tokens=nowhere.parquet"], "nowhere.parquet"),
    ],
)
def test_bad_settings_are_one_clear_error(toy, tmp_path, change, message):
    with pytest.raises(UserError) as caught:
        cross_alpha.main(options(toy, tmp_path / "run", *change))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


def test_a_family_that_diverges_is_stopped_with_the_member_named(toy, tmp_path):
    with pytest.raises(UserError, match="of optimiser step .* of alpha_0.*; texts"):
        cross_alpha.main(options(toy, tmp_path / "run", "--lr=1e30", "--clip=0", "--warmup_steps=0"))
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_dry_run_says_what_a_family_takes(toy, capsys):
    more = ["--dry_run", "--train_alphas", "0", "0.1", "0.3", "0.5", "--seeds", "0", "1", "2", "--members_at_a_time=5"]
    assert cross_alpha.main(options(toy, "unused", *more)) == 0
    printed = capsys.readouterr().out
    for part in (
        "12 heads: alpha_0_seed_0, alpha_0.1_seed_0",
        "taps (2, 4, 5) and (1, 2, 3) of the amateur",
        "optimiser steps: 16",
        "frozen passes: 3 of both models over the texts for 12 heads",
        "5 heads at a time",
        "memory per rank",
        "disk: heads ",
    ):
        assert part in printed
    assert dual_drafter.main(options(toy, "unused", "--dry_run", "--seeds", "0", "1")) == 0
    printed = capsys.readouterr().out
    assert "4 heads: expert_seed_0, amateur_seed_0, expert_seed_1" in printed and "of the amateur" not in printed
