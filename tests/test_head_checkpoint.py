"""Heads on disk: what is written is what SafeAILab's and SGLang's readers expect; reading names every fault."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, tiny_model
from tiny_world import tiny_head

from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import config_from_json, load_head, load_head_config, save_head
from dcd_core.heads.rope import read_rope


@pytest.fixture
def folder(tmp_path):
    save_head(tmp_path / "head", tiny_head("llama3"))
    return tmp_path / "head"


def edit_config(folder, **changes):
    fields = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is ...:
            fields.pop(name)
        else:
            fields[name] = value
    (folder / "config.json").write_text(json.dumps(fields))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, tmp_path):
    head, expert = tiny_head(kind), tiny_model(kind)
    save_head(tmp_path / "head", head)
    again = load_head(tmp_path / "head", expert)
    assert again.config == head.config == load_head_config(tmp_path / "head")
    for (name, one), (other, two) in zip(head.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and one.dtype == two.dtype and torch.equal(one, two)
    theta, scaling = read_rope(expert.config.to_dict())
    assert (again.config.rope_theta, again.config.rope_scaling) == (theta, scaling)
    assert torch.equal(again.rotary.inverse, head.rotary.inverse)


def test_config_has_what_other_readers_look_for(folder):
    fields = json.loads((folder / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["model_type"] == "llama" and fields["num_hidden_layers"] == 1
    # hidden_states[2], [4], [5] are the outputs of layers 1, 3, 4
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert fields["tie_word_embeddings"] is False and fields["norm_before_residual"] is False
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == 500000.0
    assert fields["rope_scaling"]["rope_type"] == fields["rope_parameters"]["rope_type"] == "llama3"
    assert fields["draft_vocab_size"] == 45 and fields["vocab_size"] == 96
    names = set(load_file(folder / "model.safetensors"))
    assert {"midlayer.self_attn.q_proj.weight", "d2t", "t2d"} <= names and "embed_tokens.weight" not in names


def test_a_published_pickle_with_the_other_prefix_and_an_embedding_loads(folder):
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    torch.save({**renamed, "embed_tokens.weight": torch.zeros(96, 32)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(load_head(folder).fc.weight, tensors["fc.weight"])


def test_a_pickle_with_code_is_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(folder)


def test_every_fault_is_named_in_one_message(folder):
    def change(tensors):
        tensors.pop("norm.weight")
        tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)
        tensors["fc.weight"] = torch.zeros(32, 64)
        tensors["lm_head.weight"][0, 0] = float("nan")

    edit_tensors(folder, change)
    with pytest.raises(UserError) as caught:
        load_head(folder)
    for part in (
        "missing norm.weight",
        "unexpected midlayer.self_attn.q_norm.weight",
        "fc.weight is [32, 64], should be [32, 96]",
        "lm_head.weight holds NaN",
    ):
        assert part in str(caught.value)


def test_t2d_follows_from_d2t_when_absent(folder):
    before = load_head(folder).t2d
    edit_tensors(folder, lambda tensors: tensors.pop("t2d"))
    assert torch.equal(load_head(folder).t2d, before)


def test_a_lost_d2t_is_not_replaced_by_the_identity(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(UserError, match="missing d2t"):
        load_head(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors: tensors.__setitem__("d2t", tensors["d2t"] + torch.arange(45)),  # ids instead of offsets
        lambda tensors: tensors.__setitem__("d2t", torch.zeros(45, dtype=torch.int64)),
        lambda tensors: tensors["t2d"].__setitem__(1, False),
        lambda tensors: tensors["t2d"].copy_(tensors["t2d"].roll(1)),
        lambda tensors: tensors["d2t"].__setitem__(44, 99),
    ],
)
def test_damaged_vocabulary_maps_are_refused(folder, damage):
    edit_tensors(folder, damage)
    with pytest.raises(UserError, match="d2t|t2d"):
        load_head(folder)


@pytest.mark.parametrize("other", ["smol", "qwen3"])
def test_the_head_of_another_expert_is_refused(folder, other):
    with pytest.raises(UserError, match="head of another expert.*rope_theta 500000.0"):
        load_head(folder, tiny_model(other))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        ({"vocab_size": 100}, "vocab_size 100"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "feature_layers \\(3, 5, 6\\)"),
        ({"rope_theta": 1.0, "rope_parameters": ...}, "rope_theta 1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": ...}, "rope_scaling"),
    ],
)
def test_each_field_of_another_expert_is_named(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=named):
        load_head(folder, tiny_model("llama3"))


def test_absent_fields_of_published_heads(folder):
    """EAGLE's own files state neither rotary positions nor taps: its reader takes 10000 and the default taps."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "eagle_config", "norm_before_residual")
    edit_config(folder, **dict.fromkeys(names, ...))
    head = load_head(folder, tiny_model("llama3"))
    assert (head.config.rope_theta, head.config.rope_scaling) == (10000.0, None)
    assert head.config.feature_layers == (2, 4, 5)
    assert load_head(folder).config.feature_layers is None
    with pytest.raises(UserError, match="feature_layers"):
        save_head(folder.parent / "again", load_head(folder))


def test_speculators_layout_counts_layers_by_their_inputs():
    fields = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 32,
        "norm_before_residual": False,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 96,
            "num_hidden_layers": 1,
            "rope_theta": 500000.0,
        },
    }
    config = config_from_json(fields)
    assert config.feature_layers == (2, 4, 5)
    assert (config.target_hidden_size, config.hidden_size, config.draft_vocab_size) == (64, 32, 32)
    assert config_from_json({**fields, "norm_before_residual": True}).norm_before_residual
    with pytest.raises(UserError, match="norm_before_residual"):  # readers differ in what they take then
        config_from_json({**fields, "norm_before_residual": None})


def test_missing_folders_and_files_are_named(tmp_path, folder):
    with pytest.raises(UserError, match="no head at"):
        load_head(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither"):
        load_head(folder)
    edit_config(folder, hidden_size=...)
    with pytest.raises(UserError, match="lacks hidden_size"):
        load_head_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="JSON"):
        load_head_config(folder)


def test_the_head_takes_its_experts_dtype(folder):
    head = load_head(folder, tiny_model("llama3", dtype=torch.bfloat16))
    assert head.fc.weight.dtype == torch.bfloat16 and head.rotary.inverse.dtype == torch.float32
