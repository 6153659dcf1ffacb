"""What decoding refuses: bad settings, bad prompts, broken models. Nothing that is NaN is passed on."""

import pytest
import torch
from naive import greedy_cd, near_pair, some_prompts, tiny_head
from tiny import VOCAB, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.methods import assemble

TOKENS = 7
PROMPTS = some_prompts(4)


@pytest.fixture(scope="module")
def pairs():
    """A tiny pair per kind, with a head each."""
    made = {kind: tiny_pair(kind, dtype=torch.float64) for kind in ("smol", "qwen3")}
    return {kind: (pair, tiny_head(pair)) for kind, pair in made.items()}


@pytest.fixture(scope="module")
def near():
    """Pairs whose amateur's drafts often pass, and always."""
    return near_pair("llama3", 0.01), near_pair("llama3", 0.0)


def greedy_settings(alpha: float = 0.0, **fields) -> Settings:
    return Settings(Target(alpha=alpha, temperature=0.0), **{"max_new_tokens": TOKENS, "gamma": 3, **fields})


def texts(generations) -> list[list[int]]:
    return [generation.ids for generation in generations]


def broken(pair, which: str, token: int):
    """The pair with a NaN in the embedding of one token of one model."""
    fresh = near_pair("llama3", 0.0)
    model = getattr(fresh, which).model
    model.model.embed_tokens.weight[token, 0] = float("nan")
    return fresh


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("which", ["expert", "amateur"])
@pytest.mark.parametrize("name", ["cd", "scd", "dcd_ngram"])
def test_nan_logits_are_refused_and_the_prompt_named(near, name, which, temperature):
    prompts = [Prompt("fine", [9, 10, 11]), Prompt("broken one", [9, 50, 11, 12])]
    settings = Settings(Target(alpha=0.1, temperature=temperature), max_new_tokens=4)
    with pytest.raises(UserError, match=f"NaN or infinite numbers for prompt 'broken one' .method {name}."):
        decode(assemble(name, broken(near, which, 50)), prompts, settings, max_batch=2)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_nan_in_a_later_round_or_a_late_row_is_refused(near, place):
    """gamma 2: token 0 is the prefill's, 1 and 2 are drafts, 3 is the late one; the text's own token breaks a model."""
    text = greedy_cd(near[1], PROMPTS[2].ids, 0.1, 6)
    assert text[place] not in PROMPTS[2].ids and text.index(text[place]) == place
    for which in ("expert", "amateur"):
        pair = broken(near, which, text[place])
        with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p2' .method scd."):
            decode(assemble("scd", pair), [PROMPTS[2]], greedy_settings(0.1, gamma=2))


@pytest.mark.parametrize("broken_rows", ["late", "others"])
def test_only_rows_that_need_a_late_row_are_judged_by_it(near, monkeypatch, broken_rows):
    """SCD runs the late pass for the whole batch; what it gives for rows that end in a mismatch is not used."""
    settings, shipped = greedy_settings(0.5, max_new_tokens=12), AmateurDrafter.late_row
    expected, mixed = texts(decode(assemble("scd", near[0]), PROMPTS, settings, max_batch=4)), []

    def late_row(self, token, rows, expert, noise):
        logits, offer = shipped(self, token, rows, expert, noise)
        mixed.append(len(set(rows)) > 1)
        return logits.masked_fill(torch.tensor(rows)[:, None, None] == (broken_rows == "late"), float("nan")), offer

    monkeypatch.setattr(AmateurDrafter, "late_row", late_row)
    if broken_rows == "others":
        assert texts(decode(assemble("scd", near[0]), PROMPTS, settings, max_batch=4)) == expected and any(mixed)
    else:
        with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p"):
            decode(assemble("scd", near[0]), PROMPTS, settings, max_batch=4)


def test_a_model_of_weight_zero_may_be_broken(near):
    pair, prompt = broken(near, "amateur", 50), [Prompt("a", [9, 50, 11])]
    assert texts(decode(assemble("cd", pair), prompt, greedy_settings(0.0))) == texts(
        decode(assemble("ar", pair), prompt, greedy_settings(0.0))
    )


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "prompt 'bad' is empty"),
        ([9] * 506, "prompt 'bad' has 506 tokens; with 7 new ones it passes the context of .* .512."),
        ([9, VOCAB], "prompt 'bad' holds an id outside the vocabulary of 96 ids"),
        ([-1, 9], "prompt 'bad' holds an id outside"),
    ],
)
def test_bad_prompts_are_refused_before_the_first_is_answered(pairs, ids, message):
    finished = []
    with pytest.raises(UserError, match=message):
        decode(
            assemble("cd", pairs["qwen3"][0]),
            [Prompt("good", [9]), Prompt("bad", ids)],
            greedy_settings(),
            on_finish=finished.append,
        )
    assert not finished


def test_the_longest_prompt_that_fits_is_answered(pairs):
    pair, head = pairs["smol"]
    prompts = [Prompt("long", [9 + index % 7 for index in range(509)]), Prompt("short", [9])]
    for name in ("scd", "dcd_eagle3"):
        found = decode(assemble(name, pair, head), prompts, greedy_settings(max_new_tokens=3, gamma=8), max_batch=2)
        assert [len(generation.ids) for generation in found] == [3, 3]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"gamma": 0}, "gamma must be at least 1, got 0"),
        ({"rule": "greedy"}, "rule 'greedy' is unknown; choose auto, sampled, deterministic or shared_noise"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Settings(**fields)


def test_a_batch_of_nothing_is_refused(pairs):
    with pytest.raises(UserError, match="max_batch must be at least 1, got 0"):
        decode(assemble("ar", pairs["smol"][0]), PROMPTS, greedy_settings(), max_batch=0)


def test_a_rule_that_the_drafter_cannot_offer_is_refused(pairs):
    with pytest.raises(UserError, match="NgramDrafter cannot draft by the rule 'sampled'; it offers deterministic, sh"):
        decode(assemble("dcd_ngram", pairs["smol"][0]), PROMPTS, Settings(rule="sampled"))
    assert AmateurDrafter.default_rule == Eagle3Drafter.default_rule == "sampled"
    assert NgramDrafter.default_rule == Drafter.default_rule == "deterministic"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("branch", [1, 2])
@pytest.mark.parametrize("part", ["fc", "lm_head"])
def test_a_head_that_overflows_is_refused(near, part, branch, temperature):
    """The output would stay lossless and only the speed would be lost, in silence."""
    head = tiny_head(near[0])
    getattr(head, part).weight.data[0, 0] = float("nan")
    settings = Settings(Target(alpha=0.1, temperature=temperature), max_new_tokens=4, branch=branch)
    with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p.' .method dcd_eagle3."):
        decode(assemble("dcd_eagle3", near[0], head), PROMPTS, settings, max_batch=2)
