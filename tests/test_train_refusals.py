"""What train/eagle3.py refuses, or stops for: one clear line that names what is wrong, and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy_training import GROUP, make_toy, options
from transformers import LlamaForCausalLM

import train.eagle3 as entry
from dcd_core.errors import UserError
from train.batches import Texts
from train.eagle3 import main
from train.engines import read_deepspeed_config


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_non_finite_features_stop_with_the_texts_named(toy, tmp_path):
    shutil.copytree(toy / "expert", tmp_path / "expert")
    model = LlamaForCausalLM.from_pretrained(toy / "expert")
    model.model.embed_tokens.weight.data[50] = float("nan")
    model.save_pretrained(tmp_path / "expert")
    texts = Texts.load(str(toy / "train.parquet"), 100, 96)
    guilty = {sample.id for sample in texts.samples if 50 in sample.input_ids}
    assert 0 < len(guilty) < 30
    with pytest.raises(UserError, match="features hold NaN or inf for these texts: ") as caught:
        main(options(toy, tmp_path / "run", f"--expert={tmp_path / 'expert'}", "--check_models=false"))
    named = str(caught.value).split("texts: ")[1].split(", ")
    assert set(named) <= guilty
    assert not (tmp_path / "run" / "head").exists()


def test_a_diverging_loss_stops_with_the_texts_named(toy, tmp_path):
    with pytest.raises(UserError, match="(loss|gradient norm) of optimiser step .* texts.*text0-"):
        main(options(toy, tmp_path / "run", "--lr=1e30", "--clip=0", "--warmup_steps=0"))
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "change, message",
    [
        (["--lr=nan"], "lr must be a finite number"),
        (["--lr=0"], "--lr must be positive"),
        (["--schedule=step"], "schedule"),
        (["--unroll=3"], "unroll"),
        (["--batch_size=0"], "--batch_size must be at least 1"),
        (["--feature_layers", "2", "2", "5"], "three distinct layers"),
        (["--feature_layers", "2", "4", "50"], "feature_layers"),
        (["--train_tokens=nowhere.parquet"], "nowhere.parquet"),
        (["--draft_vocab_size=1000"], "draft vocabulary of 1000"),
        (["--expert=/nowhere"], "/nowhere"),
        (["--max_length=2"], "raise max_length"),
        (["--seed=-1"], "--seed must be at least 0"),
        ([f"--seed={2**70}"], "--seed must be below"),
        (["--warmup_steps=99"], "--warmup_steps 99 does not end within the 16 optimiser steps"),
        (["--warmup_steps=16"], "within the 16"),
        (["--eval_tokens=nowhere.parquet"], "nowhere.parquet"),
        (["--eval_tokens=tests"], "tests"),
        (["--head_init=/nowhere"], "/nowhere"),
        (["--head_init=/nowhere", "--head_layers=2"], "--head_init has a shape of its own"),
        (["--deepspeed_config=/nowhere"], "/nowhere cannot be read as JSON: No such file"),
        (["--deepspeed_config=tests/tiny.py"], "cannot be read as JSON"),
    ],
)
def test_bad_settings_are_one_clear_error(toy, tmp_path, change, message):
    with pytest.raises(UserError) as caught:
        main(options(toy, tmp_path / "run", *change))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


@pytest.mark.parametrize("text", ["[]", '{"zero_optimization": 2}', '{"zero_optimization": {"stage": 9}}'])
def test_a_senseless_deepspeed_file_is_refused(toy, tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError, match="--deepspeed_config .*ds.json"):
        main(options(toy, tmp_path / "run", f"--deepspeed_config={tmp_path / 'ds.json'}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"PAR1"])
def test_a_broken_token_file_leaves_nothing_behind(toy, tmp_path, content):
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(UserError, match="bad.parquet"):
        main(options(toy, tmp_path / "run", f"--train_tokens={tmp_path / 'bad.parquet'}"))
    assert not (tmp_path / "run").exists()


def test_an_output_that_cannot_be_is_refused_before_anything_is_loaded(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "start", lambda *_: pytest.fail("nothing is started yet"))
    (tmp_path / "file").touch()
    for output, message in ((tmp_path / "file", "is a file"), (toy / "expert", "other files and no run")):
        with pytest.raises(UserError, match=message):
            main(options(toy, output, "--overwrite"))


def test_the_one_thing_printed_by_a_refusal_is_its_reason(toy, tmp_path):
    """Through the real door: no warning of DeepSpeed's stands before it."""
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    environment["GLOO_SOCKET_IFNAME"] = "lo"  # else it warns where the machine's own name has no address
    command = [sys.executable, str(Path(entry.__file__)), *options(toy, tmp_path / "run", "--expert=/nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("key", ["optimizer", "gradient_accumulation_steps", "bf16"])
def test_a_deepspeed_file_may_not_set_what_a_flag_sets(tmp_path, key):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({key: {}}))
    with pytest.raises(UserError, match=f"sets {key}: remove it and use --"):
        read_deepspeed_config(str(path))
