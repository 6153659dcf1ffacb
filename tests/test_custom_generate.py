"""From inside transformers: the same tokens as our own loop, by callable and by folder, and refusals by name."""

import ast
import json
import re
import shutil

import pytest
import torch
from naive import fitting_heads, some_prompts, tiny_head
from tiny import VOCAB, save_tiny, tiny_causal_lm, tiny_pair, tiny_tokenizer
from tiny_world import make_world
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation import LogitNormalization, MaxTimeCriteria, TypicalLogitsWarper

from dcd_core.contrast import Target
from dcd_core.custom_generate import FOLDER, contrastive
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.flip_risk import Deferral
from dcd_core.generate_request import Origin, read_sampling
from dcd_core.loading import head_for, load_models
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel, Pair

PAD, END, NEW = 1, 3, 7
IGNORING_PROMPT = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=4)])
PROMPTS = [Prompt(str(number), prompt.ids) for number, prompt in enumerate(some_prompts(3), start=1)]
FORMS = {"callable": {"custom_generate": contrastive}, "folder": {"custom_generate": FOLDER, "trust_remote_code": True}}


def padded(prompts=PROMPTS):
    """input_ids and attention_mask, padded on the left."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt.ids)) + prompt.ids for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def answers(sequences, width, stops=(END,)):
    """The new ids of every row, up to its stop token; what follows that must be padding."""
    found = []
    for row in sequences[:, width:].tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in stops), len(row))
        assert set(row[end:]) <= {PAD}
        found.append(row[:end])
    return found


@pytest.fixture(scope="module")
def stock():
    """(expert, amateur, head) as a user of transformers has them, by kind; all logits are of real ids."""
    made = {}
    for kind in ("smol", "llama3"):
        pair = tiny_pair(kind)
        head = tiny_head(pair)
        made[kind] = (tiny_causal_lm(kind), tiny_causal_lm(kind, seed=100, layers=4), head)
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), "qwen3")


def ours(model, amateur, heads, method, prompts=PROMPTS, **fields):
    """The same by our own loop."""
    pair = Pair(LanguageModel(model, VOCAB), LanguageModel(amateur, VOCAB, (1, 2, 3)), None)
    how = Settings(**{"max_new_tokens": NEW, "stop_ids": (END,), "gamma": 3, **fields})
    method = assemble(method, pair, lm=pair.amateur, **heads)
    made = [generation.ids for generation in decode(method, prompts, how, 3)]
    pair.expert.release()
    pair.amateur.release()
    return made


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["smol", "llama3"])
def test_greedy_tokens_are_those_of_our_loop(stock, kind, method, form):
    model, amateur, head = stock[kind]
    batch, heads = padded(), fitting_heads(method, tiny_pair(kind), head)
    given = dict(amateur=amateur, lm=amateur, method=method, alpha=0.5, gamma=3, max_new_tokens=NEW, **heads)
    found = model.generate(**batch, **FORMS[form], **given)
    width = batch["input_ids"].shape[1]
    assert torch.equal(found[:, :width], batch["input_ids"])
    assert answers(found, width) == ours(model, amateur, heads, method, target=Target(alpha=0.5, temperature=0.0))


@pytest.mark.parametrize("kind", ["smol", "llama3"])
def test_the_expert_alone_is_stock_generate(stock, kind):
    """Also in shape and padding, for rows that end at different places."""
    model, _, head = stock[kind]
    batch = padded()
    free = model.generate(**batch, max_new_tokens=12, eos_token_id=None)
    stops = [END, int(free[0, batch["input_ids"].shape[1] + 3]), int(free[1, batch["input_ids"].shape[1] + 6])]
    expected = model.generate(**batch, max_new_tokens=12, eos_token_id=stops)
    for method in ("ar", "expert_sd"):
        same = dict(custom_generate=contrastive, method=method, head=head, max_new_tokens=12, eos_token_id=stops)
        assert torch.equal(model.generate(**batch, **same), expected)
    unending = dict(custom_generate=contrastive, method="ar", max_new_tokens=12, eos_token_id=None)
    assert torch.equal(model.generate(**batch, **unending), free)


def test_a_single_row_without_a_mask_and_a_max_length(stock):
    model, amateur, _ = stock["smol"]
    ids = torch.tensor([PROMPTS[1].ids])
    given = dict(custom_generate=contrastive, amateur=amateur, method="cd", alpha=0.5)
    found = model.generate(ids, **given, max_length=ids.shape[1] + NEW)
    assert torch.equal(found, model.generate(input_ids=ids, **given, max_new_tokens=NEW))
    assert answers(found, ids.shape[1]) == ours(
        model, amateur, {}, "cd", PROMPTS[1:2], target=Target(alpha=0.5, temperature=0.0)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["cd", "dcd_eagle3"])
def test_sampled_tokens_are_those_of_our_loop(stock, method, form):
    model, amateur, head = stock["smol"]
    batch = padded()
    given = dict(amateur=amateur, head=head, method=method, alpha=0.5, gamma=3, max_new_tokens=NEW, top_k=0)
    found = model.generate(**batch, **FORMS[form], **given, do_sample=True, temperature=0.7, seed=5)
    heads = {"head": head}
    expected = ours(model, amateur, heads, method, target=Target(alpha=0.5, temperature=0.7), seed=5)
    assert answers(found, batch["input_ids"].shape[1]) == expected


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_k": 0, "top_p": 0.6}, {"top_k": 7, "top_p": 0.8}])
def test_truncated_sampling_is_our_target_s(stock, more):
    """generate keeps the best 50 unless it is told otherwise."""
    model, amateur, head = stock["smol"]
    batch = padded()
    given = dict(amateur=amateur, head=head, method="dcd_eagle3", alpha=0.5, gamma=3, max_new_tokens=NEW)
    found = model.generate(**batch, **FORMS["callable"], **given, do_sample=True, seed=5, **more)
    target = Target(alpha=0.5, **({"top_k": 50} | more))
    expected = ours(model, amateur, {"head": head}, "dcd_eagle3", target=target, seed=5)
    assert answers(found, batch["input_ids"].shape[1]) == expected


def test_savings_and_shapes_reach_the_loop(stock):
    model, amateur, head = stock["smol"]
    given = dict(
        custom_generate=contrastive, amateur=amateur, head=head, method="dcd_eagle3", alpha=0.5, max_new_tokens=NEW
    )
    plain = model.generate(**padded(), **given)
    more = dict(saving="deferred", deferral=Deferral(theta=0.5), gamma=2, branch=2, nodes=4, stop_below=0.01)
    assert torch.equal(model.generate(**padded(), **given, **more), plain)
    for wrong, message in (({"saving": "some"}, "saving 'some' is unknown"), ({"nodes": -1}, "nodes must be 0")):
        with pytest.raises(UserError, match=message):
            model.generate(**padded(), **given, **wrong)


def test_torch_s_seed_repeats_a_sample(stock):
    model, amateur, _ = stock["smol"]
    given = dict(custom_generate=contrastive, amateur=amateur, method="dcd_ngram", do_sample=True, top_k=0)

    def drawn(seed=None, **more):
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(**padded(PROMPTS[:1]), **given, max_new_tokens=12, eos_token_id=None, **more)

    first, second = drawn(1), drawn()
    assert torch.equal(first, drawn(1)) and not torch.equal(first, second)
    rows = drawn(num_return_sequences=3)
    assert len({tuple(row) for row in rows.tolist()}) == 3, "each its own"


def test_a_dict_can_be_returned(stock):
    model, amateur, _ = stock["smol"]
    given = dict(custom_generate=contrastive, amateur=amateur, method="cd", max_new_tokens=NEW)
    found = model.generate(**padded(), **given, return_dict_in_generate=True)
    assert torch.equal(found.sequences, model.generate(**padded(), **given))


def test_tokens_are_streamed(stock, capsys):
    model, amateur, _ = stock["smol"]
    tokenizer = tiny_tokenizer()
    one = padded(PROMPTS[:1])
    given = dict(amateur=amateur, method="cd", alpha=0.5, max_new_tokens=NEW)
    found = model.generate(**one, **given, custom_generate=contrastive)
    text = tokenizer.decode(found[0, one["input_ids"].shape[1] :])
    capsys.readouterr()
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    model.generate(**one, **given, **FORMS["callable"], stream_to=streamer)
    assert capsys.readouterr().out.strip() == text
    model.generate(**one, **given, **FORMS["folder"], streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == text
    with pytest.raises(UserError, match="a streamer shows one row"):
        model.generate(**padded(), **given, **FORMS["callable"], stream_to=streamer)


# ---- models by name --------------------------------------------------------------------------------------------------


def test_names_give_the_tokens_of_the_loaded_pair(world):
    """With logits that are padded beyond the tokenizer, whose padding no row may reach."""
    model = AutoModelForCausalLM.from_pretrained(world / "expert")
    given = {"amateur": world / "amateur", "alpha": 0.5, "gamma": 3, "max_new_tokens": NEW}
    batch, how = padded(), Settings(Target(alpha=0.5, temperature=0.0), NEW, (END,), gamma=3)
    for method, name in (("dcd_eagle3", "head"), ("cross_alpha", "dual_input"), ("dual", "head")):
        pair, head = load_models(*(str(world / one) for one in ("expert", "amateur", name)), "float32", "cpu")
        second = head_for(pair, str(world / "amateur_head"))
        assert pair.expert.vocab == VOCAB < model.config.vocab_size
        assert head.config.feature_layers == pair.expert.feature_layers
        expected = [made.ids for made in decode(assemble(method, pair, head, amateur_head=second), PROMPTS, how, 3)]
        heads = {"head": world / name, "amateur_head": world / "amateur_head", "method": method}
        for form in FORMS.values():
            found = model.generate(**batch, **form, **given, **heads)
            assert answers(found, batch["input_ids"].shape[1]) == expected
    with pytest.raises(
        UserError, match="method dcd_eagle3 drafts with an EAGLE3 head, and --head is a dual-input head"
    ):
        model.generate(**batch, **FORMS["callable"], **given, head=world / "dual_input", method="dcd_eagle3")


def test_a_named_model_is_read_again_when_it_changed(world, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world / "expert")
    given = dict(custom_generate=contrastive, method="cd", alpha=2.0, max_new_tokens=12, eos_token_id=None)
    save_tiny(tmp_path / "amateur", "qwen3", seed=7, layers=2)
    first = model.generate(**padded(), **given, amateur=tmp_path / "amateur")
    assert torch.equal(first, model.generate(**padded(), **given, amateur=tmp_path / "amateur"))
    shutil.rmtree(tmp_path / "amateur")
    save_tiny(tmp_path / "amateur", "qwen3", seed=8, layers=3)
    assert not torch.equal(first, model.generate(**padded(), **given, amateur=tmp_path / "amateur"))


def test_other_vocabularies_are_refused(world, stock, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world / "expert")
    save_tiny(tmp_path / "other", "qwen3", layers=2)
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w5"', '"w-five"'))
    given = dict(**padded(), custom_generate=contrastive, method="cd", max_new_tokens=NEW)
    with pytest.raises(UserError, match="different vocabularies: id 13 is 'w5'"):
        model.generate(**given, amateur=str(tmp_path / "other"))
    with pytest.raises(UserError, match="104 logits and the other model 96, and their tokenizers are not there"):
        tiny_causal_lm("qwen3").generate(**given, amateur=stock["smol"][1])


def test_the_head_of_another_expert_is_refused(world, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world / "expert")
    path = tmp_path / "head" / "config.json"
    given = dict(**padded(), custom_generate=contrastive, amateur=world / "amateur", head=path.parent)
    for change, message in (
        ({"target_hidden_size": 48}, "target_hidden_size 48"),
        ({"vocab_size": 512}, "vocab_size 512"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 40]}}, r"layers \(2, 4, 41\)"),
    ):
        shutil.copytree(world / "head", path.parent, dirs_exist_ok=True)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(UserError, match=f"head of another expert than .*{message}"):
            model.generate(**given, max_new_tokens=NEW)


def test_the_models_are_given_back_as_they_were(stock):
    model, amateur, head = tiny_causal_lm("smol"), tiny_causal_lm("smol", 100, 3), stock["smol"][2]
    model.train()
    model.model.norm.eval()
    amateur.lm_head.weight.requires_grad_(False)

    def state(one):
        hooks = sum(len(module._forward_pre_hooks) for module in one.modules())
        return [p.requires_grad for p in one.parameters()], [module.training for module in one.modules()], hooks

    before = state(model), state(amateur)
    given = dict(**padded(), custom_generate=contrastive, amateur=amateur, head=head, max_new_tokens=NEW)
    model.generate(**given)
    assert (state(model), state(amateur)) == before
    with pytest.raises(UserError):
        model.generate(**given, rule="guess")
    with pytest.raises(UserError):
        model.generate(**given, method="warp")
    assert (state(model), state(amateur)) == before


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_beams": 2}, "generation mode 'beam_search' cannot be honoured"),
        ({"prompt_lookup_num_tokens": 3}, "generation mode 'assisted_generation' cannot be honoured"),
        ({"logits_processor": IGNORING_PROMPT}, "prompt_ignore_length cannot be honoured"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor cannot be honoured"),
        ({"min_new_tokens": 3}, "LengthLogitsProcessor cannot be honoured"),
        ({"bad_words_ids": [[9]]}, "NoBadWordsLogitsProcessor cannot be honoured"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be honoured"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper cannot be honoured"),
        ({"max_time": 5.0}, "MaxTimeCriteria cannot be honoured"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores cannot be honoured"),
        ({"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])}, "NoRepeatNGram"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(5.0)])}, "MaxTimeCriteria"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [9]}, "PrefixConstrainedLogitsProcessor"),
        ({"position_ids": torch.arange(10).expand(3, -1)}, "position_ids cannot be honoured"),
        ({"method": "warp"}, "method 'warp' is unknown"),
        ({"amateur": None}, "contrasts with an amateur, and none is given"),
        ({"method": "dcd_eagle3"}, "drafts with an EAGLE3 head, and none is given"),
        ({"method": "dcd_lm"}, "drafts with a small language model, and none is given"),
        ({"alpha": -1.0}, "alpha must be a finite number >= 0"),
        ({"cutoff": 2.0}, "cutoff must lie in"),
        ({"max_new_tokens": 600}, "passes the context"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(stock, form, more, message):
    model, amateur, _ = stock["smol"]
    batch = padded()
    given = dict(amateur=amateur, method="cd", max_new_tokens=NEW) | more
    with pytest.raises(UserError, match=message):
        model.generate(**batch, **FORMS[form], **given)


def test_masks_that_are_no_left_padding_are_refused(stock):
    model, amateur, _ = stock["smol"]
    ids = torch.tensor([[9, 10, 11, 12], [9, 10, 11, 12]])
    given = dict(custom_generate=contrastive, amateur=amateur, method="cd", max_new_tokens=NEW)
    for hole in ([1, 1, 1, 0], [1, 0, 1, 1]):
        with pytest.raises(UserError, match="attention_mask cannot be honoured"):
            model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], hole]), **given)
    with pytest.raises(UserError, match="prompt '2' is empty"):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), **given)


def test_a_filled_cache_and_other_attention_are_refused(stock):
    model, amateur, _ = stock["smol"]
    ids = torch.tensor([[9, 10, 11, 12]])
    given = dict(custom_generate=contrastive, amateur=amateur, method="cd", max_new_tokens=NEW)
    cache = LanguageModel(tiny_causal_lm("smol"), VOCAB)._cache_keyword
    filled = getattr(model(input_ids=ids[:, :3], use_cache=True), cache)
    with pytest.raises(UserError, match="a cache that is filled already"):
        model.generate(ids, **{cache: filled}, **given)
    other = tiny_causal_lm("smol")
    other.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2 attention"):
        other.generate(ids, **given)


def test_eager_attention_gives_the_same_tokens(stock):
    model, amateur, _ = stock["smol"]
    given = dict(padded(), custom_generate=contrastive, amateur=amateur, method="dcd_ngram", max_new_tokens=NEW)
    eager = tiny_causal_lm("smol")
    eager.set_attn_implementation("eager")
    assert torch.equal(eager.generate(**given), model.generate(**given))


def test_an_assistant_model_is_refused_by_the_folder(stock):
    model, amateur, _ = stock["smol"]
    given = dict(**padded(), **FORMS["folder"], amateur=amateur, method="cd", max_new_tokens=NEW)
    with pytest.raises(UserError, match="assistant_model is not used"):
        model.generate(**given, assistant_model=amateur)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**given | {"trust_remote_code": False})


OWN_REFUSED = {
    "no_repeat_ngram_size": 3,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "min_length": 3,
    "min_new_tokens": 1,
    "bad_words_ids": [[9]],
    "suppress_tokens": [9],
    "begin_suppress_tokens": [9],
    "forced_bos_token_id": 9,
    "forced_eos_token_id": 9,
    "exponential_decay_length_penalty": (5, 1.1),
    "remove_invalid_values": True,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "sequence_bias": [[[9], 1.0]],
    "guidance_scale": 1.5,
    "max_time": 5.0,
    "num_beams": 2,
    "prompt_lookup_num_tokens": 3,
}


@pytest.mark.parametrize("setting", OWN_REFUSED)
def test_a_setting_of_the_model_s_own_is_named_with_its_cure(setting):
    """And the cure works: the call takes it back, or the model's config does."""
    model, value = tiny_causal_lm("smol", layers=4), OWN_REFUSED[setting]
    given = dict(**padded(PROMPTS[:1]), custom_generate=contrastive, method="ar", max_new_tokens=2, do_sample=True)
    model.generation_config.update(**{setting: value})
    with pytest.raises(UserError) as error:
        model.generate(**given)
    off = ast.literal_eval(re.search(rf"pass {setting}=(\S+) to generate", str(error.value))[1])
    assert "the model's generation_config" in str(error.value)
    model.generate(**given, **{setting: off})
    setattr(model.generation_config, setting, off)
    model.generate(**given)
    with pytest.raises(UserError) as error:
        model.generate(**given, **{setting: value})
    assert "the model's generation_config" not in str(error.value), "then it is the call's"


def test_what_the_call_sets_is_not_the_model_s():
    model = tiny_causal_lm("smol", layers=4)
    model.generation_config.no_repeat_ngram_size = 3
    given = dict(**padded(PROMPTS[:1]), custom_generate=contrastive, method="ar", max_new_tokens=2)
    with pytest.raises(UserError, match="leave no_repeat_ngram_size out"):
        model.generate(**given, no_repeat_ngram_size=2)
    model.generation_config.no_repeat_ngram_size = 0
    with pytest.raises(UserError, match="NoRepeatNGramLogitsProcessor cannot be honoured.*; leave it out"):
        model.generate(**given, logits_processor=LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]))


PUBLISHED = {
    "Llama 3": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 5, 7], "bos_token_id": 0},
    "Qwen 2.5": {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "Qwen 3": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 5]},
    "Gemma": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid", "eos_token_id": [3, 5]},
    "Phi": {"eos_token_id": [3, 5, 7], "pad_token_id": 5, "bos_token_id": 0},
    "Llama 2": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 300},
    "Qwen 1": {"do_sample": True, "top_k": 0, "top_p": 0.8, "max_new_tokens": 512, "repetition_penalty": 1.1},
}
"""What published models' generation_config sets, with ids of the tiny vocabulary."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_of_published_models_are_honoured(stock, name):
    _, amateur, head = stock["smol"]
    model, own = tiny_causal_lm("smol"), PUBLISHED[name]
    model.generation_config.update(**own)
    batch = padded()
    given = dict(amateur=amateur, head=head, method="dcd_eagle3", alpha=0.5, gamma=3, seed=5)
    given |= dict(max_new_tokens=NEW, pad_token_id=PAD)
    found = model.generate(**batch, custom_generate=contrastive, **given)
    fields = {key: own[key] for key in ("temperature", "top_k", "top_p", "repetition_penalty") if key in own}
    target = {"top_k": 50} | fields if own.get("do_sample") else {"temperature": 0.0}
    stops = own.get("eos_token_id", [END])
    expected = ours(
        model,
        amateur,
        {"head": head},
        "dcd_eagle3",
        target=Target(alpha=0.5, **target),
        seed=5,
        stop_ids=tuple(stops),
    )
    assert answers(found, batch["input_ids"].shape[1], stops) == expected


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_penalised_expert_alone_is_stock_generate(stock, penalty):
    """Row by row: the oldest transformers that is supported penalises the padding of a batch too."""
    model, _, head = stock["llama3"]
    for prompt in PROMPTS[1:]:
        given = dict(**padded([prompt]), max_new_tokens=9, eos_token_id=None, repetition_penalty=penalty)
        expected = model.generate(**given)
        assert not torch.equal(expected, model.generate(**given | {"repetition_penalty": 1.0}))
        for method in ("ar", "expert_sd"):
            assert torch.equal(model.generate(**given, custom_generate=contrastive, method=method, head=head), expected)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_not_penalised(stock, form):
    model, amateur, head = stock["smol"]
    given = dict(amateur=amateur, head=head, method="dcd_eagle3", alpha=0.5, gamma=3)
    given |= dict(max_new_tokens=NEW, repetition_penalty=1.4)
    found = model.generate(**padded(), **FORMS[form], **given)
    target = Target(alpha=0.5, temperature=0.0, repetition_penalty=1.4)
    expected = ours(model, amateur, {"head": head}, "dcd_eagle3", target=target)
    assert answers(found, padded()["input_ids"].shape[1]) == expected


def test_processors_are_read_in_their_order():
    from_call = Origin(GenerationConfig(), GenerationConfig())

    def read(processors, sample):
        return read_sampling(processors, sample, from_call, [0])

    warm, top, penalty = TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), RepetitionPenaltyLogitsProcessor(1.2)
    assert read([warm, top, LogitNormalization()], True) == {"temperature": 0.5, "top_k": 5}
    assert read([penalty, warm], True) == {"temperature": 0.5, "repetition_penalty": 1.2}
    assert read([], True) == {"temperature": 1.0}
    assert read([], False) == {"temperature": 0.0}
    assert read([penalty], False) == {"temperature": 0.0, "repetition_penalty": 1.2}
    for wrong in ([top, warm], [warm, warm], [warm, penalty]):
        with pytest.raises(UserError, match="in the order"):
            read(wrong, True)
    with pytest.raises(UserError, match="TypicalLogitsWarper"):
        read([TypicalLogitsWarper(0.5)], True)
    with pytest.raises(UserError, match="TemperatureLogitsWarper"):
        read([warm], False)
