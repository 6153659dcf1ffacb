"""A model that computes something else than its parts say is refused when it is loaded."""

import json

import pytest
import torch
from families import FAMILIES, config_of, save_family
from safetensors.torch import load_file, save_file
from tiny import VOCAB, save_tiny, tiny_causal_lm
from transformers import AutoModelForCausalLM

from dcd_core.architecture import decoder_layers
from dcd_core.custom_generate import contrastive
from dcd_core.errors import UserError
from dcd_core.generate import main
from dcd_core.model_check import check_model
from dcd_core.models import LanguageModel, load_model
from train.pruning import prune


def wrapped(model) -> LanguageModel:
    return LanguageModel(model.eval(), VOCAB)


def scaled_output(model):
    """Logits that depend on each other, so that some rows of the output layer are not enough."""
    model.lm_head.register_forward_hook(lambda layer, states, logits: logits - logits.mean(-1, keepdim=True))


def position_blind(model):
    """Takes positions from the width of a pass, not from what it is given."""
    rotary, own = model.model.rotary_emb, type(model.model.rotary_emb).forward
    rotary.forward = lambda x, position_ids: own(
        rotary, x, torch.arange(position_ids.shape[1])[None].expand_as(position_ids)
    )


def mask_blind(model):
    """Ignores the masks that it is given."""
    own = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **more: own(*args, attention_mask=None, **more)


def two_way(model):
    """Sees what comes after a token, as a masked language model does."""
    for layer in model.model.layers:
        attention, own = layer.self_attn, layer.self_attn.forward
        attention.forward = lambda *args, own=own, **more: own(
            *args, **{**more, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}
        )


def cache_blind(model):
    """Forgets what earlier passes read."""
    own = model.model.forward
    model.model.forward = lambda *args, **more: own(
        *args, **{k: v for k, v in more.items() if k not in ("cache", "past_key_values", "attention_mask")}
    )


def length_dependent(model):
    """Scales its states by the number of tokens in a pass."""
    own = model.model.norm.forward
    model.model.norm.forward = lambda states: own(states) * (1 + 0.1 * states.shape[1])


def crashing(model):
    model.model.norm.forward = lambda states: states.no_such_attribute


@pytest.mark.parametrize(
    "fault",
    [scaled_output, position_blind, mask_blind, two_way, cache_blind, length_dependent, crashing],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_something_else_is_refused_in_one_line(fault, dtype):
    model = tiny_causal_lm("smol").to(dtype)
    check_model(wrapped(model))
    fault(model)
    with pytest.raises(UserError, match="unsupported") as error:
        check_model(wrapped(model))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["smol", "llama3", "qwen3"])
def test_sound_models_pass(kind, dtype):
    check_model(wrapped(tiny_causal_lm(kind).to(dtype)))


def test_suspected_fields_are_listed():
    model = tiny_causal_lm("smol")
    model.config.logits_scaling = 8.0  # a field that this family does not read
    position_blind(model)
    with pytest.raises(UserError, match="logits_scaling 8.0"):
        check_model(wrapped(model))


def test_the_check_takes_a_few_short_passes():
    """Of an 8B model on one GPU a pass of a few tokens takes about 30 ms: seven of them stay below a second."""
    model, widths = wrapped(tiny_causal_lm("smol")), []
    model.base.register_forward_pre_hook(
        lambda module, args, more: widths.append(more["input_ids"].numel()), with_kwargs=True
    )
    check_model(model)
    assert len(widths) <= 7 and sum(widths) <= 128


def test_the_check_can_be_left_out(tmp_path, monkeypatch, capsys):
    folder = save_tiny(tmp_path / "model")
    checked = []
    monkeypatch.setattr("dcd_core.models.check_model", checked.append)
    asked = [f"--expert={folder}", "--method=ar", "--raw", "--prompt=w1 w2", "--max_new_tokens=2"]
    assert main([*asked, "--check_models=false"]) == 0 and not checked
    assert main(asked) == 0 and len(checked) == 1


# ---- what the model itself computes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_logits_are_the_model_s_own(family, tmp_path):
    """Scaling and soft-capping come after the output layer."""
    folder = save_family(family, tmp_path / family)
    ids = torch.tensor([[5, 6, 20, 21]])
    own = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    model = load_model(str(folder), device="cpu")
    plain = model.forward_full(ids)
    torch.testing.assert_close(plain.logits, own, atol=1e-5, rtol=1e-5)
    some = torch.tensor([3, 17, 50])
    torch.testing.assert_close(model.output_layer(plain.hidden, some), own[..., some], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain.hidden @ model.model.lm_head.weight.T, own, atol=1e-2)


@pytest.mark.parametrize("family, factor", [("llama", 1.0), ("granite", 1 / 8), ("cohere", 0.0625), ("gemma2", 1.0)])
def test_rows_for_a_head_are_scaled_as_the_logits_are(family, factor, tmp_path):
    model = load_model(str(save_family(family, tmp_path / family)), device="cpu")
    weight = model.model.get_output_embeddings().weight
    torch.testing.assert_close(model.output.rows(), weight * factor, rtol=1e-3, atol=1e-6)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def renamed(weights):
    return {name.replace("model.layers.", "model.language_model.layers."): value for name, value in weights.items()}


def without_a_layer(weights):
    return {name: value for name, value in weights.items() if ".layers.3." not in name}


def with_another_layer(weights):
    return weights | {name.replace(".3.", ".8."): value for name, value in weights.items() if ".layers.3." in name}


@pytest.mark.parametrize("change", [renamed, without_a_layer, with_another_layer], ids=lambda change: change.__name__)
def test_weights_that_do_not_fit_are_refused(change, tmp_path, capsys):
    folder = save_tiny(tmp_path / "model", "llama3")
    path = folder / "model.safetensors"
    save_file({k: v.clone() for k, v in change(load_file(path)).items()}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing|unexpected") as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        main([f"--expert={folder}", "--method=ar", "--raw", "--prompt=w1 w2", "--max_new_tokens=6"])
    assert not capsys.readouterr().out


def test_tied_weights_may_be_missing(tmp_path):
    folder = save_tiny(tmp_path / "model", "smol")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_model(str(folder), device="cpu")


# ---- rotary frequencies that depend on the length --------------------------------------------------------------------


ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 4.0},
}


def roped(kind: str, folder, **more):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    length = 256 if kind == "longrope" else 64
    return save_family("llama", folder, rope_parameters=rope, max_position_embeddings=length, **more)


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_do_not_depend_on_the_pass(kind, tmp_path):
    """Rows near the limit, whose drafts lie beyond it, and short rows beside them."""
    from dcd_core.api import load
    from dcd_core.decode import Prompt

    expert, amateur = roped(kind, tmp_path / "e"), roped(kind, tmp_path / "a", seed=100, layers=4)
    cd = load(str(expert), str(amateur), dtype="float32", device="cpu")
    assert cd.pair.expert.context == 64
    ids = [10 + (7 * i) % 12 for i in range(44)]

    def texts(prompts, method):
        made = cd.generate(prompts, method, max_batch=2, max_new_tokens=20, alpha=0.3)
        return [answer.generation.ids for answer in made]

    long, short = Prompt("long", ids), Prompt("short", ids[:8])
    alone = [texts([long], "cd")[0], texts([short], "cd")[0]]
    for method in ("cd", "scd", "dcd_ngram"):
        assert texts([long, short], method) == alone
    with pytest.raises(UserError, match="64"):
        texts([Prompt("longer", ids + ids[:8])], "cd")


def test_a_borrowed_model_gets_its_own_frequencies_back(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(roped("longrope", tmp_path / "e"))
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    LanguageModel(model, VOCAB).release()
    assert [getattr(module, "rope_type", None) for module in model.modules()] == kinds and "longrope" in kinds


# ---- families that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.refused])
def test_other_families_are_refused_in_one_line(family, tmp_path, capsys):
    folder = save_family(family, tmp_path / family)
    with pytest.raises(UserError, match="unsupported") as error:
        main([f"--expert={folder}", "--method=ar", "--raw", "--prompt=w1 w2", "--max_new_tokens=4"])
    assert "\n" not in str(error.value) and not capsys.readouterr().out


def test_a_family_s_configuration_can_be_read_back(tmp_path):
    fields = json.loads((save_family("llama", tmp_path / "llama") / "config.json").read_text())
    assert fields["model_type"] == config_of("llama").model_type == "llama"


# ---- the other doors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["granite", "gemma2", "gpt2"])
def test_from_transformers_the_tokens_are_stock_generate_s(family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_family(family, tmp_path / family))
    batch = {"input_ids": torch.tensor([[1, 1, 5, 6, 20], [9, 10, 11, 12, 13]])}
    batch["attention_mask"] = (batch["input_ids"] != 1).long()
    batch["max_new_tokens"] = 9
    with torch.no_grad():
        expected = model.generate(**batch)
    assert torch.equal(model.generate(**batch, custom_generate=contrastive, method="ar"), expected)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3_text", "smollm3", "opt"])
def test_pruning_keeps_what_is_said_of_each_layer(family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_family(family, tmp_path / family))
    kept = [0, 3, 5, 7]
    small = prune(model, kept, train_embeddings=False)
    for new, old in enumerate(kept):
        one, other = decoder_layers(small)[new].state_dict(), decoder_layers(model)[old].state_dict()
        assert one and all(torch.equal(one[name], other[name]) for name in other)
    for name, value in vars(model.config).items():
        if isinstance(value, list) and len(value) == 8:
            assert getattr(small.config, name) == [value[layer] for layer in kept]
    check_model(LanguageModel(small, VOCAB, (1, 2, 3)))
