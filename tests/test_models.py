"""Loading a pair and running one pass: the taps, the shared ids, and everything that is refused by name."""

import gc
import json
import weakref

import pytest
import torch
from tiny import KINDS, VOCAB, save_tiny, tiny_causal_lm, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.toy_language import SPECIALS, WORDS
from dcd_core.architecture import AttentionMasks
from dcd_core.errors import UserError
from dcd_core.models import (
    LanguageModel,
    choose_device,
    default_feature_layers,
    load_model,
    load_pair,
    load_scorer,
    load_tokenizer,
    shared_vocabulary,
)

IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An expert and an amateur of every kind, as they lie on disk."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: (save_tiny(root / f"{kind}-expert", kind), save_tiny(root / f"{kind}-amateur", kind, 100, layers=3))
        for kind in KINDS
    }


def stock(model: LanguageModel, ids: torch.Tensor):
    with torch.no_grad():
        return model.model(ids, output_hidden_states=True, use_cache=False)


def tokenizer_of(tokens: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


# ---- one pass --------------------------------------------------------------------------------------------------------


def test_features_are_the_hidden_states_at_the_taps(model):
    assert model.feature_layers == (2, 4, 5)
    hidden = stock(model, IDS).hidden_states
    expected = torch.cat([hidden[2], hidden[4], hidden[5]], dim=-1)
    assert torch.equal(model.forward_full(IDS, features=True).features, expected)
    cached = model.forward(IDS, model.new_cache(2, 9), features=True)
    torch.testing.assert_close(cached.features, expected, atol=1e-5, rtol=1e-5)
    assert model.forward_full(IDS).features is None


def test_taps_can_be_chosen_where_the_default_collides():
    small = tiny_model("smol", layers=3)
    assert small.feature_layers is None
    with pytest.raises(UserError, match="has no feature_layers: give three layer indices"):
        small.forward_full(IDS, features=True)
    chosen = LanguageModel(tiny_causal_lm("smol", layers=5), VOCAB, (1, 2, 4))
    hidden = stock(chosen, IDS).hidden_states
    assert torch.equal(
        chosen.forward_full(IDS, features=True).features, torch.cat([hidden[1], hidden[2], hidden[4]], dim=-1)
    )


@pytest.mark.parametrize("layers, taps", [(32, (2, 16, 29)), (36, (2, 18, 33)), (7, (2, 3, 4)), (30, (2, 15, 27))])
def test_default_taps(layers, taps):
    assert default_feature_layers(layers) == taps


def test_default_taps_collide_below_seven_layers():
    with pytest.raises(UserError, match="6 layers has no distinct EAGLE3 taps"):
        default_feature_layers(6)


@pytest.mark.parametrize("taps", [(0, 2, 3), (1, 2, 8), (1, 2), (2, 2, 3), (3, 2, 4), (1, 2, 3, 4)])
def test_impossible_taps_are_refused(taps):
    with pytest.raises(UserError, match="must be three ascending layers between 1 and 7"):
        LanguageModel(tiny_causal_lm("smol"), VOCAB, taps)


def test_logits_are_cut_to_the_real_ids_and_at_least_fp32():
    wide = tiny_model("qwen3")
    assert wide.config.vocab_size == VOCAB + 8 and wide.vocab == VOCAB
    logits = wide.forward_full(IDS).logits
    assert torch.equal(logits, stock(wide, IDS).logits[..., :VOCAB])
    assert tiny_model("smol", dtype=torch.bfloat16).forward_full(IDS).logits.dtype == torch.float32
    assert tiny_model("smol", dtype=torch.float64).forward_full(IDS).logits.dtype == torch.float64
    assert LanguageModel(tiny_causal_lm("qwen3")).forward_full(IDS).logits.shape[-1] == VOCAB + 8


def test_select_gives_one_column_of_each_row(model):
    whole, columns = model.forward_full(IDS), torch.tensor([3, 8])
    for part in (
        model.forward_full(IDS, select=columns),
        model.forward(IDS, model.new_cache(2, 9), select=columns),
    ):
        assert part.logits.shape == (2, 1, VOCAB) and part.hidden.shape == (2, 1, 32)
        torch.testing.assert_close(part.logits[:, 0], whole.logits[[0, 1], columns], atol=5e-5, rtol=5e-5)
    assert model.forward_full(IDS, logits=False).logits is None


def test_output_layer_on_hidden_gives_the_logits(model):
    output = model.forward_full(IDS)
    assert torch.equal(model.output_layer(output.hidden), output.logits)


def test_right_padding_is_never_seen(model):
    full = model.forward_full(IDS, features=True)
    padded = torch.cat([IDS[:, :6], torch.zeros(2, 3, dtype=torch.int64)], dim=1)
    short = model.forward_full(padded, features=True)
    torch.testing.assert_close(short.logits[:, :6], full.logits[:, :6], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(short.features[:, :6], full.features[:, :6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(short.logits[:, 6:], full.logits[:, 6:])


def test_no_hidden_state_outlives_the_pass():
    model, alive = tiny_model("llama3"), []
    hooks = [
        layer.register_forward_hook(
            lambda module, args, output: alive.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        )
        for layer in model.model.model.layers
    ]
    output = model.forward_full(IDS, features=True)
    gc.collect()
    assert len(alive) == len(hooks) == 8
    assert [reference() for reference in alive] == [None] * 8, "a layer's output is still referenced"
    assert output.features.shape == (2, 9, 96) and model._taps is None


def test_a_pass_needs_no_gradient_and_leaves_the_weights_frozen(model):
    assert not model.forward_full(IDS).logits.requires_grad
    assert not any(weight.requires_grad for weight in model.model.parameters())
    assert not model.model.training


# ---- refusals --------------------------------------------------------------------------------------------------------


def config_of(**fields):
    return type("Config", (), fields)()


def test_flash_attention_is_refused():
    with pytest.raises(UserError, match="some/model: flash_attention_2 attention"):
        AttentionMasks(config_of(_attn_implementation="flash_attention_2"), "some/model")


@pytest.mark.parametrize("fields", [{"layer_types": ["full_attention", "conv"]}, {"attention_chunk_size": 16}])
def test_layers_that_are_neither_full_nor_sliding_are_refused(fields):
    with pytest.raises(UserError, match="some/model has layers of (conv|chunked_attention)"):
        AttentionMasks(config_of(**fields), "some/model")


@pytest.mark.parametrize(
    "fields, window",
    [
        ({}, None),
        ({"sliding_window": 128}, 128),
        ({"sliding_window": 128, "use_sliding_window": True}, 128),
        ({"sliding_window": 128, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, 64),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 64}, None),
    ],
)
def test_the_window_is_that_of_layers_which_have_one(fields, window):
    assert AttentionMasks(config_of(**fields), "some/model").window == window


def test_chunked_attention_in_a_folder_is_refused_before_its_weights_are_read(folders, tmp_path):
    fields = json.loads((folders["qwen3"][0] / "config.json").read_text())
    fields["attention_chunk_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="chunked_attention"):
        load_model(str(tmp_path), device="cpu")


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_unknown_dtype_is_refused(folders):
    with pytest.raises(UserError) as error:
        load_model(str(folders["smol"][0]), dtype="float16", device="cpu")
    assert one_line(error) == "dtype 'float16' is unknown; choose float32 or bfloat16"


@pytest.mark.parametrize("load", [lambda path: load_model(path, device="cpu"), load_tokenizer, load_pair])
def test_a_missing_folder_is_one_line(load, tmp_path):
    with pytest.raises(UserError) as error:
        load(str(tmp_path / "nowhere"))
    assert "nowhere" in one_line(error)


def test_a_folder_without_weights_is_one_line(folders, tmp_path):
    (tmp_path / "config.json").write_text((folders["smol"][0] / "config.json").read_text())
    with pytest.raises(UserError, match="cannot load the weights of") as error:
        load_model(str(tmp_path), device="cpu")
    one_line(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused(folders):
    with pytest.raises(UserError, match="no CUDA device is available here"):
        load_model(str(folders["smol"][0]), device="cuda")


# ---- vocabularies ----------------------------------------------------------------------------------------------------


def test_the_first_different_id_is_named():
    changed = SPECIALS + WORDS
    changed[40], changed[41], changed[60] = changed[41], changed[40], "other"
    with pytest.raises(UserError, match=r"id 40 is 'w32' for the expert and 'w33' for the amateur"):
        shared_vocabulary(tiny_tokenizer(), tokenizer_of(changed))


def test_one_vocabulary_longer_than_the_other_is_refused():
    longer = tokenizer_of([*SPECIALS, *WORDS, "more"])
    with pytest.raises(UserError, match=r"id 96 is None for the expert and 'more' for the amateur"):
        shared_vocabulary(tiny_tokenizer(), longer)
    with pytest.raises(UserError, match=r"id 96 is 'more' for the expert and None for the amateur"):
        shared_vocabulary(longer, tiny_tokenizer())


def test_equal_vocabularies_count_their_real_ids():
    assert shared_vocabulary(tiny_tokenizer(), tiny_tokenizer()) == VOCAB


# ---- from disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_from_folders_equals_the_models_that_were_saved(folders, kind):
    pair = load_pair(*map(str, folders[kind]), device="cpu")
    assert pair.expert.vocab == pair.amateur.vocab == VOCAB
    assert pair.expert.feature_layers == (2, 4, 5) and pair.amateur.feature_layers is None
    for loaded, saved in ((pair.expert, tiny_model(kind)), (pair.amateur, tiny_model(kind, 100, 3))):
        torch.testing.assert_close(loaded.forward_full(IDS).logits, saved.forward_full(IDS).logits)
    assert pair.tokenizer("w0 w5")["input_ids"] == [8, 13]


def test_a_pair_may_lack_its_amateur_and_takes_dtype_and_taps(folders):
    pair = load_pair(str(folders["smol"][0]), dtype="bfloat16", device="cpu", feature_layers=(1, 2, 3))
    assert pair.amateur is None and pair.expert.dtype == torch.bfloat16 and pair.expert.feature_layers == (1, 2, 3)
    assert pair.expert.device.type == "cpu" and pair.expert.hidden_size == 32 and pair.expert.context == 512


def test_a_pair_with_different_vocabularies_is_refused_before_weights_are_read(folders, tmp_path):
    changed = SPECIALS + WORDS
    changed[10] = "other"
    tokenizer_of(changed).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folders["smol"][0] / "config.json").read_text())
    with pytest.raises(UserError, match="id 10 is 'w2' for the expert and 'other' for the amateur"):
        load_pair(str(folders["smol"][0]), str(tmp_path), device="cpu")


def test_fewer_logits_than_ids_is_refused(folders, tmp_path):
    tokenizer = tokenizer_of([*SPECIALS, *WORDS, "more"])
    tiny_causal_lm("smol").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="gives 96 logits, fewer than the 97 ids of its tokenizer"):
        load_pair(str(tmp_path), device="cpu")


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "model.txt").write_text("")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_: pytest.fail("asked the hub"))
    for name in ("runs/nope", "/nope", "./nope", "a/b/c"):
        with pytest.raises(UserError, match="there is no folder"):
            load_model(name, device="cpu")
    with pytest.raises(UserError, match="model.txt is a file"):
        load_model("model.txt", device="cpu")


def test_truncated_weights_and_unknown_devices_are_one_line(tmp_path):
    folder = save_tiny(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match="cannot load the weights") as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="--device tpu: there is no such kind of device"):
        choose_device("tpu")


# ---- further models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_further_model_takes_the_pair_s_vocabulary_dtype_and_device(folders, tmp_path, dtype):
    pair = load_pair(str(folders["qwen3"][0]), dtype=dtype, device="cpu")
    third = load_scorer(str(save_tiny(tmp_path / "third", "qwen3", seed=9, layers=2)), pair)
    assert third.config.vocab_size == VOCAB + 8 and third.vocab == VOCAB
    assert third.dtype == pair.expert.dtype and third.device == pair.expert.device
    if dtype == "float32":
        expected = tiny_model("qwen3", seed=9, layers=2).forward_full(IDS).logits
        torch.testing.assert_close(third.forward_full(IDS).logits, expected)


def test_a_further_model_with_another_vocabulary_is_refused_before_its_weights_are_read(folders, tmp_path):
    pair = load_pair(str(folders["smol"][0]), device="cpu")
    changed = SPECIALS + WORDS
    changed[10] = "other"
    tokenizer_of(changed).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folders["smol"][0] / "config.json").read_text())
    with pytest.raises(UserError) as error:
        load_scorer(str(tmp_path), pair)
    assert f"id 10 is 'w2' for the expert and 'other' for {tmp_path}; a contrast needs" in one_line(error)


def test_a_further_model_with_fewer_logits_than_ids_is_refused(folders, tmp_path):
    longer = tokenizer_of([*SPECIALS, *WORDS, "more"])
    tiny_causal_lm("smol").save_pretrained(tmp_path)
    longer.save_pretrained(tmp_path)
    pair = load_pair(str(folders["qwen3"][0]), device="cpu")
    pair.tokenizer = longer
    with pytest.raises(UserError, match="the model .* gives 96 logits, fewer than the 97 ids of its tokenizer"):
        load_scorer(str(tmp_path), pair)
