"""train/eagle3.py at toy size through its real door: results, resumption, ZeRO stages."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_training import STOP, head_weights, make_toy, options
from transformers import LlamaForCausalLM

import train.eagle3 as entry
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head
from dcd_core.models import Pair, load_model
from train.batches import Plan, Stream, Texts
from train.eagle3 import main
from train.head_run import sizes_of_features, trained_module
from train.online_expert import HeadStep
from train.processes import Ranks
from train.sizes import head_result
from train.unroll import count_rows

ZERO = "configs/deepspeed/zero{}.json"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """One finished run, never changed."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    assert main(options(toy, output)) == 0
    return output


def metrics(output) -> dict:
    return json.loads((output / "metrics.json").read_text())


def curve(output, name: str) -> list[float]:
    return [entry[name] for entry in metrics(output)["history"] if name in entry]


def assert_same(one, two, tolerance: float = 0.0):
    for name, tensor in head_weights(one).items():
        other = head_weights(two)[name]
        size = max(1.0, float(other.double().abs().max()))
        assert (tensor.double() - other.double()).abs().max() <= tolerance * size, name


def test_a_run_leaves_a_head_metrics_and_logs(toy, finished):
    head = load_head(finished / "head", load_model(str(toy / "expert"), device="cpu"))
    assert head.config.draft_vocab_size == 40
    found = metrics(finished)
    assert found["steps"] == 16 and found["texts"] == 30 and found["answer_tokens"] > 200
    assert 0.5 < found["draft_vocab_coverage"] <= 1
    losses = curve(finished, "loss")
    assert len(losses) == 16 and sum(losses[-4:]) < sum(losses[:4])
    assert found["eval"]["accepted_length"] + 1 == pytest.approx(found["eval"]["tokens_per_round"])
    assert all(0 <= found["train"][f"{name}/{step}"] <= 1 for name in ("accuracy", "acceptance") for step in range(3))
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "latest",
        "step-00000012",
        "step-00000016",
    ]


def test_snapshots_are_the_head_of_a_run_that_stopped_there(toy, finished, tmp_path):
    assert main(options(toy, tmp_path / "run", "--snapshots", "100", "--eval_every=100")) == 0
    assert_same(tmp_path / "run", finished)
    texts = Texts.load(str(toy / "train.parquet"), 2048, 96)
    stream = Stream(texts, Plan(tuple(texts.lengths), 4, 1, 1, 0), 0, lambda sample: [1])
    steps = stream.first_step_with(100)
    sizes = [sum(end - start for start, end in texts.samples[i].answer_spans) for i in range(len(texts))]
    read = [sum(sizes[i] for ranks in stream.plan.step(0, n) for some in ranks for i in some) for n in range(steps)]
    assert sum(read[:-1]) < 100 <= sum(read)
    kept = load_file(tmp_path / "run" / "heads" / "100" / "model.safetensors")
    final = load_file(finished / "head" / "model.safetensors")
    assert kept.keys() == final.keys() and not torch.equal(kept["fc.weight"], final["fc.weight"])


def test_the_board_has_every_promised_curve(finished):
    board = EventAccumulator(str(finished / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    steps = {f"train/{name}/{step}" for name in ("loss", "accuracy", "acceptance") for step in range(3)}
    assert steps | {"train/lr", "train/grad_norm", "train/tokens_per_s", "eval/accepted_length"} <= tags


def test_a_finished_run_is_refused_and_redone_only_when_asked(toy, finished, tmp_path):
    copied = shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(UserError, match="finished run.*--overwrite"):
        main(options(toy, copied))
    (copied / "head" / "config.json").unlink()
    assert main(options(toy, copied, "--overwrite")) == 0
    assert_same(copied, finished)


def interrupted(finished, folder):
    """The run as if it had been stopped after step 12."""
    shutil.copytree(finished, folder)
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / "head")
    shutil.rmtree(folder / "checkpoints" / "step-00000016")
    return folder


def test_resuming_ends_with_the_same_weights_and_curve(toy, finished, tmp_path, capsys):
    output = interrupted(finished, tmp_path / "run")
    # settings that the weights do not depend on may change
    assert main(options(toy, output, "--save_every=2", "--keep=1")) == 0
    assert "resuming after step 12 of 16" in (printed := capsys.readouterr().out)
    assert printed.splitlines()[-1].startswith(f"head -> {output / 'head'}; held-out accepted length ")
    assert_same(output, finished)
    for name in ("loss", "grad_norm", "lr"):
        assert curve(output, name) == curve(finished, name)


def test_figures_after_a_stop_between_two_loggings_are_those_of_a_whole_run(toy, tmp_path):
    """Saved after step 3, logged after step 5: a mean over steps 4 and 5 alone would be another figure."""
    run = options(toy, tmp_path / "run", "--save_every=3", "--log_every=5", "--keep=9")
    assert main(run) == 0
    whole = metrics(tmp_path / "run")["history"]
    (tmp_path / "run" / "metrics.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if path.name > "step-00000003":
            shutil.rmtree(path)
    assert main(run) == 0
    again = metrics(tmp_path / "run")["history"]
    for logged in (*whole, *again):
        logged.pop("tokens_per_s", None)
    assert again == whole and len(whole) > 3


@pytest.mark.parametrize(
    "change, named",
    [
        (["--lr=1e-3"], "lr was 0.003, now 0.001"),
        (["--seed=1"], "seed was 0, now 1"),
        (
            ["--batch_size=2", "--gradient_accumulation=2"],
            "batch_size was 4, now 2; gradient_accumulation was 1, now 2",
        ),
        (["--unroll_steps=2"], "unroll_steps was 3, now 2"),
        (["--dtype=bfloat16"], "dtype was float32, now bfloat16"),
        (["--draft_vocab_size=39"], "draft vocabulary was"),
        (["--max_length=9"], "training texts was"),
        (["--schedule=linear"], "schedule was cosine, now linear"),
        ([f"--deepspeed_config={ZERO.format(1)}"], "ZeRO stage was 0, now 1"),
    ],
)
def test_a_changed_setting_is_refused_by_name(toy, finished, tmp_path, change, named):
    output = interrupted(finished, tmp_path / "run")
    before = {name: (output / name).read_bytes() for name in ("config.yaml", "command.txt")}
    # the head's shape is compared before its weights are loaded
    with pytest.raises(UserError, match="cannot resume.*") as caught:
        main(options(toy, output, *change))
    assert named in str(caught.value)
    assert all((output / name).read_bytes() == content for name, content in before.items())
    assert not (output / "metrics.json").exists()


def test_other_data_another_expert_and_another_world_are_refused(toy, finished, tmp_path):
    other = make_toy(tmp_path / "other", texts=29)
    output = interrupted(finished, tmp_path / "run")
    with pytest.raises(UserError, match="training texts was"):
        main(options(other, output))
    model = LlamaForCausalLM.from_pretrained(toy / "expert")
    model.model.embed_tokens.weight.data[5] += 1
    shutil.copytree(toy / "expert", tmp_path / "changed")
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(UserError, match="expert weights was"):
        main(options(toy, output, f"--expert={tmp_path / 'changed'}"))
    path = output / "checkpoints" / "step-00000012" / "trainer.json"
    trainer = json.loads(path.read_text())
    trainer["settings"]["world size"] = 2
    path.write_text(json.dumps(trainer))
    with pytest.raises(UserError, match="world size was 2, now 1"):
        main(options(toy, output))


def test_accumulation_and_batch_size_are_interchangeable(toy, finished, tmp_path):
    """The loss is divided by the rows of the whole optimiser step, however it is cut into micro-batches."""
    main(options(toy, tmp_path / "run", "--batch_size=2", "--gradient_accumulation=2"))
    assert_same(tmp_path / "run", finished, 1e-5)
    assert curve(tmp_path / "run", "loss") == pytest.approx(curve(finished, "loss"), rel=1e-5)


def test_the_logged_gradient_norm_is_the_true_one(toy, finished):
    """Against plain torch: initial weights, first optimiser step, before clipping."""
    config = entry.parse_config(entry.Config, options(toy, finished))
    expert = load_model(str(toy / "expert"), device="cpu")
    texts = Texts.load(str(toy / "train.parquet"), 2048, 96)
    pair = Pair(expert, None, None)
    rms = sizes_of_features(config, pair, None, texts)
    head = entry.build_head(config, pair, rms, texts)
    stream = Stream(
        texts,
        Plan(tuple(texts.lengths), 4, 1, 1, 0),
        0,
        lambda sample: count_rows(sample.input_ids, sample.answer_spans, frozenset({STOP}), 3),
    )
    batches, denominators = stream.at(0)
    unroll = trained_module(config, head, stream, Ranks(0, 1, torch.device("cpu")), rms)
    loss, sums = unroll(*HeadStep(expert, head.target_ids, frozenset({STOP})).inputs(batches[0]), denominators)
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([weight.grad.norm() for weight in head.parameters()])).item()
    assert norm > 0.5
    assert curve(finished, "grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    assert curve(finished, "loss")[0] == pytest.approx((sums[0, 0] / denominators[0]).item(), rel=1e-5)


def test_a_fresh_head_reads_all_features_alike(toy, tmp_path):
    """Each column of fc times the size of its feature is what it would be without scaling."""
    config = entry.parse_config(entry.Config, options(toy, tmp_path))
    plain = entry.parse_config(entry.Config, options(toy, tmp_path, "--feature_scaling=none"))
    expert = load_model(str(toy / "expert"), device="cpu")
    texts = Texts.load(str(toy / "train.parquet"), 2048, 96)
    pair = Pair(expert, None, None)
    made = ((each, sizes_of_features(each, pair, None, texts)) for each in (config, plain))
    scaled, unscaled = (entry.build_head(each, pair, rms, texts).fc.weight for each, rms in made)
    features = [expert.forward_full(texts.batch([i]).input_ids, features=True).features[0, 1:] for i in range(16)]
    rms = torch.cat(features).pow(2).mean(0).sqrt()
    assert torch.allclose(scaled * rms, unscaled, atol=1e-6) and rms.max() / rms.min() > 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 0.05)])
def test_every_zero_stage_trains_the_same_head(toy, finished, tmp_path, stage, dtype, tolerance):
    main(options(toy, tmp_path / "run", f"--deepspeed_config={ZERO.format(stage)}", f"--dtype={dtype}"))
    assert_same(tmp_path / "run", finished, tolerance)
    assert curve(tmp_path / "run", "grad_norm") == pytest.approx(
        curve(finished, "grad_norm"), rel=max(6 * tolerance, 1e-4)
    )
    assert head_weights(tmp_path / "run")["fc.weight"].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_bf16_resumes_exactly(toy, tmp_path, stage):
    """Its fp32 master weights come back too, not only the bf16 ones."""
    options_ = options(toy, tmp_path / "run", f"--deepspeed_config={ZERO.format(stage)}", "--dtype=bfloat16")
    main(options_)
    again = interrupted(tmp_path / "run", tmp_path / "again")
    main([*options_, f"--output={again}"])
    assert_same(again, tmp_path / "run")


def test_eagles_normalisation_is_a_switch(toy, finished, tmp_path):
    main(options(toy, tmp_path / "run", "--loss_normalisation=eagle", "--max_steps=2", "--warmup_steps=1"))
    # the first losses are the same rows; the gradient is divided by all positions instead of the trained ones
    assert curve(tmp_path / "run", "loss")[0] == pytest.approx(curve(finished, "loss")[0])
    assert curve(tmp_path / "run", "grad_norm")[0] < 0.8 * curve(finished, "grad_norm")[0]


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_other_families_train(kind, tmp_path):
    toy = make_toy(tmp_path / "toy", kind, texts=12)
    assert main(options(toy, tmp_path / "run", "--max_steps=2", "--warmup_steps=1")) == 0
    load_head(tmp_path / "run" / "head", load_model(str(toy / "expert"), device="cpu"))


def test_training_goes_on_from_a_given_head(toy, finished, tmp_path):
    main(
        options(
            toy, tmp_path / "run", f"--head_init={finished / 'head'}", "--max_steps=1", "--lr=1e-9", "--warmup_steps=0"
        )
    )
    assert curve(tmp_path / "run", "loss")[0] < curve(finished, "loss")[0]
    assert torch.equal(head_weights(tmp_path / "run")["d2t"], head_weights(finished)["d2t"])


def test_dry_run_needs_configurations_only(toy, tmp_path, monkeypatch, capsys):
    for name in ("load_frozen", "start"):
        monkeypatch.setattr(entry, name, lambda *_: pytest.fail("a dry run loads nothing"))
    bare = tmp_path / "expert"
    bare.mkdir()
    shutil.copy(toy / "expert" / "config.json", bare)
    assert (
        main(["--dry_run", f"--expert={bare}", f"--train_tokens={toy / 'train.parquet'}", "--draft_vocab_size=40"]) == 0
    )
    printed = capsys.readouterr().out
    for part in ("30 texts", "M trained parameters", "optimiser steps: 30", "memory per rank"):
        assert part in printed
    assert main(["--dry_run", f"--expert={bare}", "--train_tokens=later.parquet", "--draft_vocab_size=40"]) == 0
    assert "not there yet (later.parquet)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "found, line",
    [
        (
            {"eval": {"accepted_length": 0.611, "accuracy/0": 0.384}},
            "head -> r/head; held-out accepted length 0.61, accuracy of the first draft 0.38",
        ),
        (
            {"eval": {}, "train": {"accuracy/0": 0.5}},
            "head -> r/head; no held-out texts; training accuracy of the first draft 0.50",
        ),
    ],
)
def test_the_line_that_a_training_ends_with(found, line):
    assert head_result(Path("r/head"), found) == line
