"""Deferred judging: the expert runs ahead, the amateur judges blocks, and nobody can tell from the text."""

import math
from collections import Counter

import pytest
import torch
from naive import greedy_cd, near_pair, some_prompts, tiny_head
from test_drafters import FollowedEagle3
from tiny import VOCAB

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode, stream
from dcd_core.errors import UserError
from dcd_core.flip_risk import Deferral, flip_risk, margin_of, refusal_risk
from dcd_core.methods import assemble

PROMPTS = some_prompts(5)
LENGTH = 18
THETAS = [1e-6, 0.2, 2.0]
"""Judge after every expert round; sometimes; only where a text may end."""


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def pair(request):
    return near_pair(request.param, 0.02)


@pytest.fixture(scope="module")
def near():
    return near_pair("llama3", 0.02)


def settings(alpha=1.0, temperature=0.0, theta=0.2, **changes) -> Settings:
    changes = {"max_new_tokens": LENGTH, "gamma": 3, "seed": 2, "saving": "deferred", "defer_theta": theta} | changes
    return Settings(Target(alpha=alpha, temperature=temperature), **changes)


def texts(done) -> list[list[int]]:
    return [generation.ids for generation in done]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("name", ["cd", "dcd_ngram", "dcd_eagle3"])
def test_greedy_text_is_that_of_vanilla_contrastive_decoding(pair, name, theta):
    expected = [greedy_cd(pair, prompt.ids, 1.0, LENGTH) for prompt in PROMPTS]
    plain = [greedy_cd(pair, prompt.ids, 0.0, LENGTH) for prompt in PROMPTS]
    assert expected != plain, "the amateur must have something to say"
    for batch in (1, 3) if theta == THETAS[1] else (3,):
        done = decode(assemble(name, pair, tiny_head(pair)), PROMPTS, settings(theta=theta), max_batch=batch)
        assert texts(done) == expected


@pytest.mark.parametrize("cutoff", [0.0, 0.3])
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("name", ["dcd_ngram", "dcd_eagle3"])
def test_shared_noise_text_is_that_of_vanilla_contrastive_decoding(near, name, theta, cutoff):
    asked = settings(0.7, 1.0, theta, rule="shared_noise", stop_ids=tuple(range(0, VOCAB, 13)))
    asked.target = Target(alpha=0.7, temperature=1.0, cutoff=cutoff)
    plain = Settings(asked.target, LENGTH, asked.stop_ids, seed=2, rule="shared_noise")
    expected = texts(decode(assemble("cd", near), PROMPTS, plain))
    assert texts(decode(assemble(name, near, tiny_head(near)), PROMPTS, asked, max_batch=3)) == expected


@pytest.mark.parametrize("name", ["cd", "dcd_ngram", "dcd_eagle3", "dcd_deferred"])
def test_when_the_amateur_is_asked_changes_no_sampled_text(near, name):
    """Randomness is keyed by position: blocks of any length, batches of any size, the same text."""
    found = []
    for theta, batch in ((1e-6, 1), (0.3, 2), (2.0, 5)):
        asked = settings(0.7, 1.0, theta, stop_ids=tuple(range(0, VOCAB, 13)))
        found.append(texts(decode(assemble(name, near, tiny_head(near)), PROMPTS, asked, max_batch=batch)))
    assert found[0] == found[1] == found[2]


def test_blocks_are_counted_and_save_passes(near):
    same = near_pair("llama3", 0.0)
    done = decode(assemble("dcd_eagle3", same, tiny_head(same)), PROMPTS, settings(theta=2.0))
    for generation in done:
        assert len(generation.ids) == 1 + sum(entry.emitted for entry in generation.rounds)
        assert [entry.accepted == entry.drafted == entry.emitted for entry in generation.rounds] == [True]
        assert generation.rounds[0].expert_passes > 3 and generation.rounds[0].amateur_passes == 1
    every = decode(assemble("dcd_eagle3", near, tiny_head(near)), PROMPTS, settings(theta=1e-6))
    assert all(entry.expert_passes == 1 for generation in every for entry in generation.rounds)
    some = decode(assemble("dcd_eagle3", near, tiny_head(near)), PROMPTS, settings(theta=2.0))
    flips = [entry for generation in some for entry in generation.rounds if entry.accepted < entry.drafted]
    assert flips and all(entry.emitted == entry.accepted + 1 for entry in flips)
    for generation in some:
        assert len(generation.ids) == 1 + sum(entry.emitted for entry in generation.rounds)


def test_a_block_has_a_longest(near):
    capped = settings(theta=2.0, defer_most=2)
    done = decode(assemble("cd", near_pair("llama3", 0.0)), PROMPTS, capped)
    assert {entry.drafted for generation in done for entry in generation.rounds[:-1]} == {2}


def test_only_judged_tokens_are_shown(near):
    asked = settings(theta=2.0, stop_ids=tuple(range(0, VOCAB, 13)))
    method, shown, final = assemble("dcd_eagle3", near, tiny_head(near)), {}, {}
    for news in stream(method, PROMPTS, asked, max_batch=3):
        for generation, tokens in news:
            shown[generation.index] = shown.get(generation.index, []) + tokens
            final[generation.index] = generation.ids
            assert shown[generation.index] == generation.ids
    expected = texts(decode(assemble("cd", near), PROMPTS, Settings(asked.target, LENGTH, asked.stop_ids, seed=2)))
    assert [final[index] for index in range(len(PROMPTS))] == expected


class FollowedAhead(FollowedEagle3):
    """Follows provisional text too, and what is taken back of it."""

    def rewind(self, back, accepted):
        super().rewind(back, accepted)
        self.seen["rewinds"] += 1
        self.seen["deep"] += any(count > 4 for count in back)
        for text, count, tokens in zip(self.texts, back, accepted.host_tokens, strict=True):
            del text[len(text) - count :]
            text += tokens


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
def test_the_head_forgets_what_fell_and_reads_what_stands_with_true_features(near, rule):
    head = tiny_head(near)
    method = assemble("dcd_eagle3", near, head)
    method.drafter = FollowedAhead(head, near.expert.embedding, near.expert.vocab)
    method.drafter.expert, method.drafter.seen = near.expert, Counter()
    asked = settings(1.0, 1.5, 1.5, rule=rule, stop_ids=tuple(range(0, VOCAB, 17)))
    decode(method, some_prompts(6), asked, max_batch=3)
    seen = method.drafter.seen
    assert seen["rewinds"] > 3 and seen["deep"] and seen["ragged"] and seen["joined"], seen


def test_methods_that_draft_with_the_amateur_cannot_defer(near):
    for name in ("scd", "cos"):
        with pytest.raises(UserError, match=f"method {name} drafts with the amateur, so its passes cannot be saved"):
            decode(assemble(name, near), PROMPTS, settings())


def test_another_saving_than_the_method_s_own_is_refused(near):
    with pytest.raises(UserError, match="method dcd_deferred is deferred judging itself; saving lazy contradicts it"):
        decode(assemble("dcd_deferred", near, tiny_head(near)), PROMPTS, settings(saving="lazy"))


def test_methods_without_an_amateur_have_nothing_to_save(near):
    plain = Settings(Target(temperature=0.0), LENGTH, seed=2)
    assert texts(decode(assemble("ar", near), PROMPTS, settings(0.0))) == texts(
        decode(assemble("ar", near), PROMPTS, plain)
    )


# ---- the estimate ----------------------------------------------------------------------------------------------------


def test_the_margin_is_best_minus_second_best():
    rows = torch.tensor([[1.0, 3.0, 2.5], [0.0, -math.inf, -math.inf], [2.0, 2.0, 1.0]])
    assert margin_of(rows).tolist() == [0.5, math.inf, 0.0]


def test_flip_risk_falls_with_the_margin_in_units_of_the_contrast():
    law, margins = Deferral(ceiling=0.8, scale=2.0, power=1.5), torch.tensor([0.0, 0.2, 1.0, math.inf])
    risk = flip_risk(margins, 0.1, 0.0, law)
    assert risk[0] == pytest.approx(0.8) and risk[-1] == 0 and (risk.diff() < 0).all()
    assert flip_risk(torch.tensor(0.2), 0.1, 0.0, law).item() == pytest.approx(0.4)
    torch.testing.assert_close(flip_risk(5 * margins, 0.5, 1.0, law), risk)
    torch.testing.assert_close(flip_risk(2 * margins, 0.1, 0.5, law), risk)
    assert (flip_risk(margins, 0.0, 0.0, law) == 0).all(), "without contrast nothing flips"


def test_refusal_risk_vanishes_where_the_expert_is_certain():
    risk = refusal_risk(torch.tensor([0.5, 0.9, 1.0]).log(), 0.5, 1.0, Deferral(spread=0.8))
    torch.testing.assert_close(risk, torch.tensor([0.2, 0.04, 0.0]))
    assert refusal_risk(torch.tensor(0.1).log(), 9.0, 1.0, Deferral(spread=5.0)).item() == 1.0


@pytest.mark.parametrize(
    "values, message",
    [
        ({"theta": -0.1}, "defer_theta must be a finite number of 0 or more, got -0.1"),
        ({"theta": math.nan}, "defer_theta must be"),
        ({"scale": 0.0}, "defer_scale and defer_power must be above 0"),
        ({"most": 0}, "defer_most must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused_by_name(values, message):
    with pytest.raises(UserError, match=message):
        Deferral(**values)
    with pytest.raises(UserError, match="saving 'half' is unknown; choose none, lazy, deferred"):
        Settings(saving="half")
