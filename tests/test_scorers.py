"""Targets of every kind through the real loop: third models, the expert on another prefix, truncation.

Every method that may drive them writes the text of a loop without caches, one row and one token at a time.
"""

import pytest
import torch
from naive import by_noise, fitting_heads, greedy, near_pair, some_prompts, tiny_head
from test_batch import HostCopies, exact_law, g_test, sampled_texts
from tiny import tiny_model, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Scorer, Settings, decode, stream
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, assemble
from dcd_core.sampling import row_key
from dcd_core.scorers import negative_prompt, three_models

TOKENS, SEED = 8, 5
PROMPTS = some_prompts(4)
CONTRAST = [name for name, method in METHODS.items() if method.contrast]
NOT_DRAFTING = [name for name in CONTRAST if not (METHODS[name].amateur_drafts or METHODS[name].reads_amateur)]
NEGATIVE = [9, 8, 60, 11, 12, 13, 14]


def other_question(prompt: Prompt) -> list[int]:
    """Another opening and the prompt's last tokens: longer than some prompts, shorter than others."""
    return NEGATIVE + prompt.ids[-2:]


@pytest.fixture(scope="module")
def parts():
    """A tiny pair in fp64, its head, and a third model."""
    pair = tiny_pair("llama3", dtype=torch.float64)
    return pair, tiny_head(pair), tiny_model("llama3", seed=7, layers=2, dtype=torch.float64)


@pytest.fixture(scope="module")
def near():
    """Pairs whose amateur's drafts often pass, so that a third model also sees whole drafts accepted."""
    pair = near_pair("llama3", 0.01)
    return pair, tiny_head(pair), near_pair("llama3", 0.02, seed=0).amateur


def settings(target: Target, **fields) -> Settings:
    return Settings(target, **{"max_new_tokens": TOKENS, "gamma": 3, "seed": SEED, "rule": "shared_noise", **fields})


def texts(generations) -> list[list[int]]:
    return [generation.ids for generation in generations]


def written(name: str, parts, contrast, target: Target, saving: str = "none") -> list[list[int]]:
    """Three rows at a time, so that one prompt enters a running batch."""
    pair, head, third = parts
    method = assemble(name, pair, contrast=contrast, lm=third, **fitting_heads(name, pair, head))
    # two heads cannot be recombined as three models are; what is drafted changes no text
    return texts(decode(method, PROMPTS, settings(target, saving=saving, draft_alpha=0.5), max_batch=3))


def plain(models: list, target: Target, prefixes) -> list[list[int]]:
    return [by_noise(models, target, prefixes(p), TOKENS, row_key(SEED, p.id, p.sample)) for p in PROMPTS]


# ---- three models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("which", ["parts", "near"])
def test_three_models_write_the_plain_loop_s_text(which, temperature, request):
    parts = request.getfixturevalue(which)
    pair, _, third = parts
    models = [pair.expert, pair.amateur, third]
    target = Target.proxy(0.6, temperature=temperature)
    expected = plain(models, target, lambda prompt: [prompt.ids] * 3)
    if temperature == 0:
        assert expected == [greedy(models, [1, 0.6, -0.6], [p.ids] * 3, TOKENS) for p in PROMPTS]
    if which == "parts":
        assert expected != plain([pair.expert], Target(temperature=temperature), lambda prompt: [prompt.ids])
    for name in CONTRAST:
        assert written(name, parts, three_models(pair.amateur, third), target) == expected, name


def test_a_draft_that_passes_whole_ends_in_the_row_of_three_models(near):
    """SCD's late row comes from all three models, not from the first two."""
    pair, head, third = near
    method = assemble("scd", pair, head, contrast=three_models(pair.amateur, third))
    target = Target.proxy(0.6, temperature=0.0)
    found = decode(method, PROMPTS, settings(target, max_new_tokens=24, gamma=2), max_batch=4)
    assert sum(entry.accepted == 2 for generation in found for entry in generation.rounds) > 4
    models = [pair.expert, pair.amateur, third]
    assert texts(found) == [greedy(models, [1, 0.6, -0.6], [p.ids] * 3, 24) for p in PROMPTS]


def test_a_number_of_models_that_does_not_fit_is_refused_before_any_pass(parts, monkeypatch):
    pair, _, third = parts
    monkeypatch.setattr(type(pair.expert), "forward", lambda *_, **__: pytest.fail("a model ran"))
    with pytest.raises(UserError, match="2 models, but 3 weights and 2 temperatures"):
        decode(assemble("cd", pair), PROMPTS, settings(Target.proxy(0.5)))
    with pytest.raises(UserError, match="3 models need explicit weights"):
        decode(assemble("cd", pair, contrast=three_models(pair.amateur, third)), PROMPTS, settings(Target.dcd(0.5)))


# ---- the expert on another prefix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("negative", [NEGATIVE, other_question], ids=["fixed", "made from the prompt"])
def test_guidance_writes_the_plain_loop_s_text(parts, negative, temperature):
    pair, _, _ = parts
    target = Target.guidance(0.8, temperature=temperature)
    make = negative if callable(negative) else lambda prompt: negative
    lengths = [(len(prompt.ids), len(make(prompt))) for prompt in PROMPTS]
    assert any(own < other for own, other in lengths) and any(own > other for own, other in lengths)
    expected = plain([pair.expert] * 2, target, lambda prompt: [prompt.ids, make(prompt)])
    if temperature == 0:
        assert expected == [greedy([pair.expert] * 2, [1.8, -0.8], [p.ids, make(p)], TOKENS) for p in PROMPTS]
    assert expected != plain([pair.expert], Target(temperature=temperature), lambda prompt: [prompt.ids])
    for name in NOT_DRAFTING:
        assert written(name, parts, negative_prompt(pair.expert, negative), target) == expected, name


def test_the_prompt_as_its_own_negative_is_the_expert(parts):
    pair, _, _ = parts
    contrast = negative_prompt(pair.expert, lambda prompt: prompt.ids)
    alone = written("ar", parts, None, Target())
    assert written("cd", parts, contrast, Target.guidance(2.0)) == alone
    assert written("dcd_eagle3", parts, contrast, Target.guidance(2.0)) == alone


def test_an_amateur_may_read_another_prefix_too(parts):
    pair, _, _ = parts
    contrast = [Scorer(pair.amateur, other_question)]
    expected = plain([pair.expert, pair.amateur], Target.dcd(0.5), lambda p: [p.ids, other_question(p)])
    for name in NOT_DRAFTING:
        assert written(name, parts, contrast, Target.dcd(0.5)) == expected, name


@pytest.mark.parametrize("name", [name for name in CONTRAST if METHODS[name].amateur_drafts])
def test_a_drafting_amateur_with_a_prefix_of_its_own_is_refused(parts, name):
    pair, head, third = parts
    with pytest.raises(UserError, match=f"method {name} drafts with .*must then read the expert's own prompt") as error:
        assemble(name, pair, head, contrast=negative_prompt(pair.expert, NEGATIVE))
    assert "\n" not in str(error.value)
    assemble(name, pair, head, contrast=[Scorer(pair.amateur), Scorer(third, other_question)])


def test_an_empty_negative_prompt_is_refused(parts):
    pair, _, _ = parts
    with pytest.raises(UserError, match="a negative prompt is empty"):
        negative_prompt(pair.expert, [])
    nothing = negative_prompt(pair.expert, lambda prompt: [])
    with pytest.raises(UserError, match="is empty; give at least one token"):
        decode(assemble("cd", pair, contrast=nothing), PROMPTS, settings(Target.guidance(0.5)))


# ---- one object drives vanilla decoding and the verifier -------------------------------------------------------------

TWO_MODELS = {
    "dcd, top-k": lambda **at: Target.dcd(0.5, top_k=5, **at),
    "dcd, top-p": lambda **at: Target.dcd(0.3, top_p=0.7, **at),
    "obrien": lambda **at: Target.obrien(**at),
    "li": lambda **at: Target.li(0.7, 0.5, **at),
    "cos, all cuts": lambda temperature: Target.cos(0.3, temperature, cutoff=0.05, top_k=9, top_p=0.8),
}


@pytest.mark.parametrize("which, temperature", [("near", 0.0), ("parts", 1.0)])
@pytest.mark.parametrize("name", TWO_MODELS)
def test_every_preset_gives_every_method_one_text(request, name, which, temperature):
    target, world = TWO_MODELS[name](temperature=temperature), request.getfixturevalue(which)
    pair = world[0]
    expected = plain([pair.expert, pair.amateur], target, lambda prompt: [prompt.ids] * 2)
    for method in CONTRAST:
        assert written(method, world, None, target) == expected, method


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["li", "proxy", "guidance"])
@pytest.mark.parametrize("saving", ["lazy", "deferred"])
def test_saved_amateur_passes_give_the_same_text_for_every_kind_of_target(parts, kind, saving, temperature):
    """Weights that do not sum to 1, three models, and a model after another prefix."""
    pair, _, third = parts
    at = {"temperature": temperature, "cutoff": 0.1, "top_p": 0.9}
    target, contrast, models, prefixes = {
        "li": (Target.li(0.5, 0.8, **at), None, [pair.expert, pair.amateur], lambda p: [p.ids] * 2),
        "proxy": (
            Target.proxy(0.7, **at),
            three_models(pair.amateur, third),
            [pair.expert, pair.amateur, third],
            lambda p: [p.ids] * 3,
        ),
        "guidance": (
            Target.guidance(0.8, **at),
            negative_prompt(pair.expert, other_question),
            [pair.expert] * 2,
            lambda p: [p.ids, other_question(p)],
        ),
    }[kind]
    expected = plain(models, target, prefixes)
    for name in ("cd", "dcd_ngram", "dcd_eagle3"):
        assert written(name, parts, contrast, target, saving) == expected, name


@pytest.mark.parametrize("name, looks", [("dcd, top-k", 0), ("dcd, top-p", 1), ("cos, all cuts", 0)])
def test_only_top_p_alone_looks_at_the_device_more_than_once_a_round(parts, name, looks):
    pair, head, _ = parts
    rounds = stream(assemble("dcd_eagle3", pair, head), PROMPTS, settings(TWO_MODELS[name](temperature=1.0)), 4)
    next(rounds)
    for _ in range(2):
        with HostCopies().counting() as copies:
            next(rounds)
        # 96 ids are fewer than top-p looks at first, so here it knows without looking
        assert copies.found == ["tolist"]
    if looks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dcd_core.truncation.FEW", 64)
            with HostCopies().counting() as copies:
                next(rounds)
        assert copies.found[-1] == "tolist" and len(copies.found) >= 2


@pytest.mark.parametrize(
    "name, rule, target",
    [
        ("dcd_eagle3", "sampled", Target.dcd(0.5, temperature=2.0, top_k=24, top_p=0.9)),
        ("dcd_eagle3", "deterministic", Target.li(0.5, cutoff=0.05, temperature=2.0, top_p=0.5)),
        ("scd", "sampled", Target.cos(0.3, 1.5, top_p=0.5)),
    ],
)
def test_sampled_text_has_the_law_of_the_truncated_target(name, rule, target):
    pair = tiny_pair("smol", dtype=torch.float64)
    prompt = [9, 20, 31]
    samples = sampled_texts(assemble(name, pair, tiny_head(pair)), prompt, target, rule)
    assert g_test(samples, exact_law(pair, prompt, target)) > 1e-6
    untruncated = Target(target.alpha, target.temperature, target.cutoff, target.weights, target.temperatures)
    assert g_test(samples, exact_law(pair, prompt, untruncated)) < 1e-6, "the truncation is to be seen"
