"""data_prep/features.py and --features: training from stored passes is training from the models."""

import json
import shutil

import numpy as np
import pytest
import torch
from toy_training import family_flags, flags, head_weights, make_toy_pair, toy_samples

import data_prep.features as features
import train.cross_alpha as cross_alpha
import train.dual_drafter as dual_drafter
import train.eagle3 as eagle3
from data_prep.feature_files import FeatureStore, plan_shards
from data_prep.token_files import read_tokens, write_tokens
from dcd_core.errors import UserError
from dcd_core.models import LanguageModel, load_model

ONE = ("--batch_size=1", "--max_steps=12")
SHORT = ("--batch_size=4", "--max_steps=6")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pair(tmp_path_factory.mktemp("toy"))


def store_flags(toy, out, *more) -> list[str]:
    pair = [f"--expert={toy / 'expert'}", f"--amateur={toy / 'amateur'}", "--amateur_feature_layers", "1", "2", "3"]
    return [f"--tokens={toy / 'train.parquet'}", f"--out={out}", *pair, "--dtype=float32", "--shard_tokens=90", *more]


@pytest.fixture(scope="module")
def store(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("store") / "features"
    assert features.main(store_flags(toy, out)) == 0
    return out


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


WHOLE = LanguageModel.forward_full


def no_pass(self, *arguments, **options):
    """The check at load asks for logits; training does not."""
    assert options.get("logits", True), "a pass of a model"
    return WHOLE(self, *arguments, **options)


def assert_same(one, two, *heads: str):
    for head in heads or ("head",):
        other = head_weights(two, head)
        for name, tensor in head_weights(one, head).items():
            assert torch.equal(tensor, other[name]), (head, name)


def test_the_store_holds_the_models_own_passes(toy, store):
    expert = load_model(str(toy / "expert"), device="cpu")
    amateur = load_model(str(toy / "amateur"), device="cpu", feature_layers=(1, 2, 3))
    read = FeatureStore(store)
    samples = read_tokens(toy / "train.parquet")
    assert not read.missing and len(list(store.glob("shard-*"))) > 3
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        for role, model in (("", expert), ("amateur_", amateur)):
            output = model.forward_full(ids, features=True, logits=False)
            taps, states = read.read(sample.input_ids, role)
            assert torch.equal(taps, output.features[0]) and torch.equal(states, output.hidden[0])
    assert read.read(samples[0].input_ids, features=False)[0] is None
    assert samples[0].input_ids[:-1] not in read


@pytest.mark.parametrize("start", ["random", "closed_form"])
def test_an_offline_run_is_the_online_run(toy, store, tmp_path, start, monkeypatch):
    """Bit for bit: the passes are the same numbers, and nothing else differs."""
    more = (*ONE, f"--start={start}")
    assert eagle3.main(flags(toy, tmp_path / "online", *more)) == 0
    monkeypatch.setattr(LanguageModel, "forward_full", no_pass)
    assert eagle3.main(flags(toy, tmp_path / "offline", *more, f"--features={store}")) == 0
    assert_same(tmp_path / "online", tmp_path / "offline")
    # the store knows its texts
    alone = [flag for flag in flags(toy, tmp_path / "alone", *more) if not flag.startswith("--train_tokens")]
    assert eagle3.main([*alone, f"--features={store}"]) == 0
    assert_same(tmp_path / "online", tmp_path / "alone")


def test_padding_beside_a_text_changes_only_roundings(toy, store, tmp_path):
    assert eagle3.main(flags(toy, tmp_path / "online", *SHORT)) == 0
    assert eagle3.main(flags(toy, tmp_path / "offline", *SHORT, f"--features={store}")) == 0
    one, two = head_weights(tmp_path / "online"), head_weights(tmp_path / "offline")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("script", "more", "heads"),
    [
        (cross_alpha, ("--train_alphas", "0", "0.5"), ("heads/alpha-0-seed-0", "heads/alpha-0.5-seed-0")),
        (dual_drafter, (), ()),
    ],
    ids=["cross_alpha", "dual_drafter"],
)
def test_families_read_both_models_from_it(toy, store, tmp_path, script, more, heads, monkeypatch):
    assert script.main(family_flags(toy, tmp_path / "online", *ONE, *more)) == 0
    monkeypatch.setattr(LanguageModel, "forward_full", no_pass)
    assert script.main(family_flags(toy, tmp_path / "offline", *ONE, *more, f"--features={store}")) == 0
    names = [f"heads/{path.name}" for path in (tmp_path / "online" / "heads").iterdir()]
    assert len(names) == 2
    assert_same(tmp_path / "online", tmp_path / "offline", *names)


def test_a_killed_store_is_finished_as_if_nothing_had_been(toy, store, tmp_path, monkeypatch):
    out, written = tmp_path / "store", []

    def stop_after_two(path, parts):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        whole(path, parts)

    whole = features.write_shard
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(features, "write_shard", stop_after_two)
        features.main(store_flags(toy, out))
    assert len(list(out.glob("shard-*"))) == 2 and FeatureStore(out).missing
    with pytest.raises(UserError, match="lacks .* of the 30 training texts"):
        eagle3.main(flags(toy, tmp_path / "run", *ONE, f"--features={out}"))
    assert not (tmp_path / "run").exists()
    kept = written[0].stat().st_mtime_ns
    assert features.main(store_flags(toy, out)) == 0
    assert written[0].stat().st_mtime_ns == kept
    assert files(out) == files(store)


def test_parts_make_one_store(toy, store, tmp_path):
    for part in ("1/2", "0/2"):
        assert features.main(store_flags(toy, tmp_path / "store", f"--part={part}")) == 0
    assert files(tmp_path / "store") == files(store)


def test_texts_that_are_not_in_it_go_through_the_models(toy, store, tmp_path):
    write_tokens(tmp_path / "more.parquet", toy_samples(4, seed=9), {})
    both = ("--train_tokens", str(toy / "train.parquet"), str(tmp_path / "more.parquet"))
    more = (*ONE, *both, f"--features={store}")
    with pytest.raises(UserError, match="lacks 4 of the 34 training texts"):
        eagle3.main(flags(toy, tmp_path / "refused", *more))
    assert eagle3.main(flags(toy, tmp_path / "mixed", *more, "--online=true")) == 0
    assert eagle3.main(flags(toy, tmp_path / "online", *ONE, *both)) == 0
    assert_same(tmp_path / "mixed", tmp_path / "online")


def test_a_store_of_something_else_is_refused(toy, store, tmp_path):
    def refused(match: str, folder=store, *more: str):
        with pytest.raises(UserError, match=match):
            eagle3.main(flags(toy, tmp_path / "run", *ONE, f"--features={folder}", *more))
        assert not (tmp_path / "run").exists()

    refused("no store of features", tmp_path / "nothing")
    refused("bfloat16", store, "--expert_dtype=bfloat16")
    refused("another expert .*taps", store, "--feature_layers", "1", "2", "3")
    refused("another expert .*weights", store, f"--expert={toy / 'amateur'}", "--feature_layers", "1", "2", "3")
    with pytest.raises(UserError, match="made otherwise .dtype"):
        features.main(store_flags(toy, store, "--dtype=bfloat16"))
    alone = tmp_path / "alone"
    assert features.main([flag for flag in store_flags(toy, alone) if "amateur" not in flag and flag not in "123"]) == 0
    with pytest.raises(UserError, match="nothing of amateur"):
        cross_alpha.main(family_flags(toy, tmp_path / "run", *ONE, f"--features={alone}"))
    broken = tmp_path / "broken"
    shutil.copytree(store, broken)
    shard = broken / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refused("cannot be read", broken)


@pytest.mark.parametrize("flag", ["--part=2/2", "--part=1", "--dtype=float16", "--shard_tokens=0"])
def test_bad_flags(toy, tmp_path, flag):
    with pytest.raises(UserError, match=flag.partition("=")[0]):
        features.main(store_flags(toy, tmp_path / "store", flag))
    assert not (tmp_path / "store").exists()


def test_broken_numbers_are_refused_by_name(toy, tmp_path, monkeypatch):
    def broken(self, *arguments, **options):
        output = WHOLE(self, *arguments, **options)
        output.hidden[0, -1, 0] = float("nan")
        return output

    monkeypatch.setattr(LanguageModel, "forward_full", broken)
    with pytest.raises(UserError, match="text 'text0-0' hold NaN"):
        features.main(store_flags(toy, tmp_path / "store", "--check_models=false"))
    assert not list((tmp_path / "store").glob("shard-*"))


def test_the_dry_run_says_the_size_that_it_takes(toy, store, capsys):
    assert features.main(store_flags(toy, "", "--dry_run=true")) == 0
    said = capsys.readouterr().out
    tensors = sum(path.stat().st_size for path in store.glob("shard-*.safetensors"))
    tokens = sum(len(sample.input_ids) for sample in read_tokens(toy / "train.parquet"))
    header = 1000 * len(list(store.glob("shard-*")))
    each = float(said.split(" tokens of ")[1].split(" KiB")[0])
    assert tokens * each * 1024 == pytest.approx(tensors, rel=0.05, abs=header)
    assert json.loads((store / "store.json").read_text())["made"]["dtype"] == "float32"


def test_shards_are_full_and_in_order():
    assert plan_shards([3, 3, 5, 9, 1, 1], 6) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
