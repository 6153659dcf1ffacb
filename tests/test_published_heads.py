"""Fields of published heads that change what a head computes: read, or refused with their value."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F
from naive import some_prompts
from safetensors.torch import load_file, save_file
from tiny import VOCAB, save_tiny, tiny_model, tiny_pair
from tiny_world import tiny_head
from transformers.activations import ACT2FN

from dcd_core.config import run_entry
from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.errors import UserError
from dcd_core.generate import main
from dcd_core.heads.checkpoint import config_from_json, load_head, load_head_config, save_head
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.published_fields import FLAGS, NEUTRAL, NEUTRAL_IN_EAGLE_CONFIG
from dcd_core.methods import assemble

READ = {
    "plain": {},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
    **{name: {name: True} for name in FLAGS},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "all": {"hidden_act": "relu", **dict.fromkeys(set(FLAGS) - {"fc_norm"}, True)},
}
REFUSED = {
    "tie_word_embeddings": True,
    "bias": True,
    "qkv_bias": True,
    "use_qk_norm": True,
    "logit_scale": 0.5,
    "logits_scaling": 8.0,
    "final_logit_softcapping": 30.0,
    "partial_rotary_factor": 0.25,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"],
    "num_aux_hidden_states": 1,
    "num_experts": 8,
    "kv_lora_rank": 512,
    "parallel_drafting": True,
    "ptd_token_id": 5,
    "dflash_config": {"block_size": 16},
    "quantization_config": {"quant_method": "fp8"},
    "model_type": "deepseek_v3",
    "hidden_act": "warp",
    "norm_output": "yes",
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    "speculators_model_type": "peagle",
    "eagle_config": [5],
}
REFUSED_IN_EAGLE_CONFIG = {
    "use_aux_hidden_state": False,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": True,
    "parallel_draft_step": 4,
    "has_lm_head": False,
}


def varied_head(fields: dict, seed: int = 3) -> Eagle3Head:
    """A random head with these fields, whose norms and biases are no ones and zeros."""
    head = tiny_head("llama3", seed, **fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.rand(weight.shape, generator=generator) - 0.2)
            elif "lm_head" not in name:
                weight.mul_(8)
    return head.eval().requires_grad_(False)


def norm(weights: dict, name: str, states):
    return F.rms_norm(states, states.shape[-1:], weights[f"{name}.weight"], 1e-6)


def linear(weights: dict, name: str, states):
    return F.linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def formula(head: Eagle3Head, weights: dict, fields: dict, features, embeds):
    """The first draft of every row in the plainest way: recurrent states and logits."""
    if fields.get("norm_before_fc"):
        features = norm(weights, "input_norm", features)
    if fields.get("fc_norm"):
        parts = features.chunk(3, -1)
        features = torch.cat([norm(weights, f"fc_norm.{index}", part) for index, part in enumerate(parts)], -1)
    hidden = linear(weights, "fc", features)
    normed = norm(weights, "midlayer.hidden_norm", hidden)
    residual = normed if fields.get("norm_before_residual") else hidden
    inputs = torch.cat([norm(weights, "midlayer.input_layernorm", embeds), normed], -1)
    cos, sin = head.rotary.tables(torch.arange(inputs.shape[1])[None], inputs.dtype)
    made = {}
    for name in "qkv":
        flat = linear(weights, f"midlayer.self_attn.{name}_proj", inputs)
        split = made[name] = flat.unflatten(-1, (-1, head.config.head_dim)).transpose(1, 2)
        first, second = split.chunk(2, -1)
        if name != "v":
            made[name] = split * cos + torch.cat([-second, first], -1) * sin
    heads = F.scaled_dot_product_attention(made["q"], made["k"], made["v"], is_causal=True, enable_gqa=True)
    states = residual + linear(weights, "midlayer.self_attn.o_proj", heads.transpose(1, 2).flatten(2))
    inner = norm(weights, "midlayer.post_attention_layernorm", states)
    gate = ACT2FN[fields.get("hidden_act", "silu")](linear(weights, "midlayer.mlp.gate_proj", inner))
    up = linear(weights, "midlayer.mlp.up_proj", inner)
    states = states + linear(weights, "midlayer.mlp.down_proj", gate * up)
    normed = norm(weights, "norm", states)
    return (normed if fields.get("norm_output") else states), linear(weights, "lm_head", normed)


@pytest.fixture(scope="module")
def read_text():
    """Features and embedded next tokens of a text of the tiny expert."""
    expert = tiny_model("llama3")
    ids = torch.randint(0, VOCAB, (1, 10), generator=torch.Generator().manual_seed(1))
    features = expert.forward_full(ids[:, :-1], features=True, logits=False).features
    return expert, ids, features, expert.embedding(ids[:, 1:])


# ---- fields that are read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_a_head_computes_what_its_fields_say(name, read_text, tmp_path):
    expert, ids, features, embeds = read_text
    fields = READ[name]
    save_head(tmp_path / "head", varied_head(fields))
    stated = json.loads((tmp_path / "head" / "config.json").read_text())
    assert all(stated[key] == value for key, value in fields.items())
    head = load_head(tmp_path / "head", expert)
    assert head.config == varied_head(fields).config
    states = head.step(embeds, head.fuse(features), head.new_cache(1, 16))
    wanted, logits = formula(head, head.state_dict(), fields, features, embeds)
    torch.testing.assert_close(states, wanted, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(states), logits, atol=2e-4, rtol=2e-4)
    if fields:  # negative control: what the fields say matters
        weights = {name: weight for name, weight in head.state_dict().items() if not name.endswith("bias")}
        assert not torch.allclose(states, formula(head, weights, {}, features, embeds)[0], atol=1e-2)


@pytest.mark.parametrize("name", READ)
def test_training_unrolls_what_decoding_steps_through(name, read_text):
    _, ids, features, embeds = read_text
    head, row = varied_head(READ[name]), 5
    following = [torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(index)) for index in range(3)]
    unrolled = list(head.unroll(features, embeds, torch.tensor([[row]]), 3, lambda index, _: following[index]))
    cache = head.new_cache(1, 16)
    state = head.step(embeds[:, : row + 1], head.fuse(features[:, : row + 1]), cache)[:, -1:]
    cache.commit([row + 1])
    for index, other in enumerate(unrolled):
        if index:
            state = head.step(following[index], state, cache)
            cache.commit([1])
        torch.testing.assert_close(state, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["norm_output", "all", "eagle 3.1"])
def test_such_a_head_drafts_losslessly(name):
    pair = tiny_pair("llama3")
    settings = Settings(Target(alpha=0.5, temperature=0.0), max_new_tokens=6, gamma=3)
    drafted = decode(assemble("dcd_eagle3", pair, head=varied_head(READ[name])), some_prompts(3), settings, max_batch=3)
    plain = decode(assemble("cd", pair), some_prompts(3), settings, max_batch=3)
    assert [one.ids for one in drafted] == [one.ids for one in plain]


def stated(**changes) -> dict:
    """config.json of a head with some fields changed; ``...`` takes one out."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "draft_vocab_size": 45,
        "rope_theta": 500000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def test_nvidia_keeps_norm_before_fc_below_eagle_config():
    assert config_from_json(stated(eagle_config={"norm_before_fc": True})).norm_before_fc
    assert not config_from_json(stated(norm_before_fc=True, eagle_config={"norm_before_fc": False})).norm_before_fc


def test_speculators_keeps_the_layer_s_fields_apart():
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {name: stated()[name] for name in shape} | {"model_type": "llama", "hidden_act": "gelu", "mlp_bias": True}
    fields = {"speculators_model_type": "eagle3", "norm_before_residual": True, "transformer_layer_config": layer}
    config = config_from_json({**fields, "norm_output": True})
    assert (config.hidden_act, config.mlp_bias, config.norm_before_residual) == ("gelu", True, True)
    assert config.norm_output and not config.attention_bias
    for name, value in (("logit_scale", 2.0), ("sliding_window", 8)):
        with pytest.raises(UserError, match=name):
            config_from_json({**fields, "transformer_layer_config": {**layer, name: value}})


def test_a_prefix_before_all_names_is_taken(tmp_path):
    save_head(tmp_path / "head", varied_head(READ["eagle 3.1"]))
    weights = load_file(tmp_path / "head" / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "head" / "model.safetensors")
    assert torch.equal(load_head(tmp_path / "head").fc_norm[1].weight, weights["fc_norm.1.weight"])


# ---- fields that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_supported_is_refused_with_its_value(name):
    with pytest.raises(UserError) as error:
        config_from_json(stated(**{name: REFUSED[name]}), "some/head/config.json")
    said = str(error.value)
    part = "partial_rotary_factor" if name == "rope_parameters" else str(REFUSED[name])
    assert "some/head" in said and part in said and "\n" not in said


@pytest.mark.parametrize("name", REFUSED_IN_EAGLE_CONFIG)
def test_a_field_below_eagle_config_is_refused_with_its_value(name):
    value = REFUSED_IN_EAGLE_CONFIG[name]
    with pytest.raises(UserError, match=f"eagle_config.{name} {value}"):
        config_from_json(stated(eagle_config={name: value}))


def test_every_field_of_the_tables_is_refused_and_its_neutral_values_are_not():
    for table, nest in ((NEUTRAL, False), (NEUTRAL_IN_EAGLE_CONFIG, True)):
        for name, neutral in table.items():
            for value in (*neutral, None):
                given = {name: value}
                config_from_json(stated(**({"eagle_config": given} if nest else given)))
            given = {name: "other"}
            with pytest.raises(UserError, match=name):
                config_from_json(stated(**({"eagle_config": given} if nest else given)))


MALFORMED = ("text", -3, 0, 1.5, [], [1], {}, {"x": 1}, True)


@pytest.mark.parametrize(
    "name", [*stated(), "head_dim", "rms_norm_eps", "rope_scaling", "rope_parameters", "dcd", *FLAGS]
)
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_no_value_of_a_field_ends_in_a_traceback(tmp_path, name, layout):
    head = varied_head({})
    for value in MALFORMED:
        fields = stated(**{name: value})
        if layout == "speculators":
            fields = {"speculators_model_type": "eagle3", "norm_before_residual": False, **fields}
            fields["transformer_layer_config"] = {name: fields.get(name, value)}
        folder = tmp_path / "head"
        save_head(folder, head)
        (folder / "config.json").write_text(json.dumps(fields))
        try:
            load_head(folder)
        except UserError as error:
            assert "\n" not in str(error)


def test_all_of_a_head_s_unsupported_fields_are_named_at_once():
    with pytest.raises(UserError, match="bias True.*logit_scale 2.*use_aux_hidden_state False"):
        config_from_json(stated(bias=True, logit_scale=2, eagle_config={"use_aux_hidden_state": False}))


def test_two_norms_before_fc_are_refused():
    with pytest.raises(UserError, match="norm_before_fc and fc_norm"):
        config_from_json(stated(norm_before_fc=True, fc_norm=True))


def test_windows_that_are_switched_off_are_not_refused():
    """As in SpecForge's configurations of Qwen heads."""
    fields = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28}
    assert config_from_json(stated(**fields, layer_types=["full_attention"])) == config_from_json(stated())


# ---- unknown fields --------------------------------------------------------------------------------------------------


def test_unknown_fields_are_named_once(caplog, tmp_path):
    save_head(tmp_path / "head", varied_head({}))
    place = tmp_path / "head" / "config.json"
    fields = json.loads(place.read_text())
    fields["eagle_config"]["below"] = 1
    place.write_text(json.dumps({**fields, "novel": 3, "top_k": 50, "transformers_version": "4.0"}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_head_config(tmp_path / "head")
            load_head(tmp_path / "head", tiny_model("llama3"))
    [record] = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert "novel" in record.getMessage() and "eagle_config.below" in record.getMessage()
    assert "top_k" not in record.getMessage() and "transformers_version" not in record.getMessage()


def test_what_we_write_has_no_unknown_field(caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        for name, fields in READ.items():
            save_head(tmp_path / name, varied_head(fields))
            load_head_config(tmp_path / name)
    assert not caplog.records


# ---- a head's own embedding ------------------------------------------------------------------------------------------


def carry(folder, embedding, pickled: bool = False):
    """Put an embedding into a head's folder."""
    weights = load_file(folder / "model.safetensors") | {"embed_tokens.weight": embedding}
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_expert_s_embedding_may_be_carried(tmp_path, dtype, pickled):
    expert = tiny_model("llama3")
    save_head(tmp_path / "head", varied_head({}))
    carry(tmp_path / "head", expert.embedding.weight.detach().to(dtype), pickled)
    assert load_head(tmp_path / "head", expert).config.draft_vocab_size == 45
    # real ids are what counts: a table may be padded further than the expert's
    carry_padded = torch.nn.functional.pad(expert.embedding.weight.detach().to(dtype), (0, 0, 0, 8))
    if not pickled:
        carry(tmp_path / "head", carry_padded.contiguous())
        load_head(tmp_path / "head", expert)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("change", [lambda e: e + 0.02, lambda e: e * 6, lambda e: e.roll(1, 0), lambda e: e[:, :16]])
def test_an_embedding_of_its_own_is_refused(tmp_path, change, pickled):
    expert = tiny_model("llama3")
    save_head(tmp_path / "head", varied_head({}))
    carry(tmp_path / "head", change(expert.embedding.weight.detach()).contiguous(), pickled)
    with pytest.raises(UserError, match="embed_tokens.weight that differs"):
        load_head(tmp_path / "head", expert)


def test_the_terminal_refuses_in_one_line(tmp_path, capsys):
    save_head(tmp_path / "head", varied_head({}))
    place = tmp_path / "head" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "tie_word_embeddings": True}))
    expert = save_tiny(tmp_path / "expert", "llama3")
    flags = [f"--expert={expert}", f"--head={tmp_path / 'head'}", "--method=expert_sd", "--prompt=w1"]
    assert run_entry(lambda: main(flags)) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "tie_word_embeddings True" in said
