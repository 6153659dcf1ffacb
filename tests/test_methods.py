"""Methods are put together from a pair and a head, or refused by name."""

import pytest
from naive import assembled, tiny_head
from tiny import tiny_causal_lm, tiny_model, tiny_pair

from dcd_core.decode_types import Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.hybrid import HybridDrafter
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.scorers import three_models


@pytest.fixture(scope="module")
def parts():
    pair = tiny_pair("smol")
    return pair, tiny_head(pair)


@pytest.mark.parametrize(
    "name, drafter, scorers",
    [
        ("ar", Drafter, 1),
        ("cd", Drafter, 2),
        ("expert_sd", Eagle3Drafter, 1),
        ("scd", AmateurDrafter, 2),
        ("dcd_ngram", NgramDrafter, 2),
        ("dcd_eagle3", Eagle3Drafter, 2),
        ("dcd_hybrid", HybridDrafter, 2),
        ("dcd_lm", LanguageModelDrafter, 2),
    ],
)
def test_who_drafts_and_who_scores(parts, name, drafter, scorers):
    method = assembled(name, *parts)
    assert method.name == name and type(method.drafter) is drafter
    assert [scorer.model for scorer in method.scorers] == [parts[0].expert, parts[0].amateur][:scorers]


def test_every_method_says_what_it_is():
    assert set(METHODS) == {"ar", "cd", "expert_sd", "scd", "dcd_ngram", "dcd_eagle3", "dcd_hybrid", "dcd_lm"}
    assert all(method.summary for method in METHODS.values())


def test_an_unknown_method_is_refused(parts):
    with pytest.raises(
        UserError, match="method 'dcd' is unknown; choose one of ar, cd, expert_sd, scd, dcd_ngram, dcd"
    ):
        assemble("dcd", *parts)


@pytest.mark.parametrize("name", METHODS)
def test_other_scorers_take_the_amateur_s_place(parts, name):
    pair, head = parts
    contrast = three_models(tiny_model("smol", 3), tiny_model("smol", 4))
    method = assemble(name, Pair(pair.expert, None, pair.tokenizer), head, contrast=contrast, lm=contrast[0])
    assert method.scorers[0].model is pair.expert and method.scorers[0].prefix is None
    assert method.scorers[1:] == (contrast if METHODS[name].contrast else [])
    if METHODS[name].amateur_drafts:
        assert method.drafter.amateur is contrast[0].model


def test_scorers_that_do_not_fit_are_refused(parts):
    pair, _ = parts
    with pytest.raises(UserError, match="method cd contrasts with at least one more model; the list of scorers is e"):
        assemble("cd", pair, contrast=[])
    other = LanguageModel(tiny_causal_lm("qwen3"))
    with pytest.raises(UserError, match="scores 104 ids and the expert 96; load it with load_scorer"):
        assemble("cd", pair, contrast=[Scorer(pair.amateur), Scorer(other)])


@pytest.mark.parametrize("name", METHODS)
def test_a_missing_amateur_head_or_proposer_is_refused(parts, name):
    pair, head = parts
    alone = Pair(pair.expert, None, pair.tokenizer)
    if METHODS[name].contrast:
        with pytest.raises(UserError, match=f"method {name} contrasts with an amateur; give --amateur"):
            assemble(name, alone, head, lm=pair.amateur)
    else:
        assemble(name, alone, head, lm=pair.amateur)
    if METHODS[name].needs_head:
        with pytest.raises(UserError, match=f"method {name} drafts with an EAGLE3 head; give --head"):
            assemble(name, pair, lm=pair.amateur)
    else:
        assemble(name, pair, lm=pair.amateur)
    if METHODS[name].needs_lm:
        with pytest.raises(UserError, match=f"method {name} drafts with a language model of its own; give --lm"):
            assemble(name, pair, head)
