"""Methods are put together from a pair and a head, or refused by name."""

import copy

import pytest
from naive import amateur_head, assembled, dual_input_head, fitting_heads, tiny_head
from tiny import tiny_causal_lm, tiny_model, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Settings, batch_class
from dcd_core.decode_types import Scorer
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.cos import CosDrafter
from dcd_core.drafters.cross_alpha import CrossAlphaDrafter
from dcd_core.drafters.dual import DualDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.hybrid import HybridDrafter
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.scorers import negative_prompt, three_models


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
        ("cos", CosDrafter, 2),
        ("dcd_deferred", Eagle3Drafter, 2),
        ("cross_alpha", CrossAlphaDrafter, 2),
        ("dual", DualDrafter, 2),
    ],
)
def test_who_drafts_and_who_scores(parts, name, drafter, scorers):
    method = assembled(name, *parts)
    assert method.name == name and type(method.drafter) is drafter
    assert [scorer.model for scorer in method.scorers] == [parts[0].expert, parts[0].amateur][:scorers]


def test_every_method_says_what_it_is():
    single = {"ar", "cd", "expert_sd", "scd", "cos", "cross_alpha", "dual", "auto"}
    assert set(METHODS) == single | {f"dcd_{name}" for name in ("ngram", "eagle3", "hybrid", "lm", "deferred")}
    assert all(method.summary for method in METHODS.values())


def test_an_unknown_method_is_refused(parts):
    with pytest.raises(
        UserError, match="method 'dcd' is unknown; choose one of ar, cd, expert_sd, scd, cos, dcd_ngram, dcd"
    ):
        assemble("dcd", *parts)


@pytest.mark.parametrize("name", METHODS)
def test_other_scorers_take_the_amateur_s_place(parts, name):
    pair, head = parts
    contrast = three_models(tiny_model("smol", 3), tiny_model("smol", 4))
    heads = fitting_heads(name, Pair(pair.expert, contrast[0].model, pair.tokenizer), head)
    alone = Pair(pair.expert, None, pair.tokenizer)
    method = assemble(name, alone, contrast=contrast, lm=contrast[0].model, **heads)
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
    alone, heads = Pair(pair.expert, None, pair.tokenizer), fitting_heads(name, *parts)
    if METHODS[name].contrast:
        with pytest.raises(UserError, match=f"method {name} contrasts with an amateur; give --amateur"):
            assemble(name, alone, lm=pair.amateur, **heads)
    else:
        assemble(name, alone, lm=pair.amateur, **heads)
    if METHODS[name].needs_head:
        kind = "a dual-input" if name == "cross_alpha" else "an EAGLE3"
        with pytest.raises(UserError, match=f"method {name} drafts with {kind} head; give --head"):
            assemble(name, pair, lm=pair.amateur)
    else:
        assemble(name, pair, lm=pair.amateur)
    if METHODS[name].needs_lm:
        with pytest.raises(UserError, match=f"method {name} drafts with a language model of its own; give --lm"):
            assemble(name, pair, head)


def declaring(head: Eagle3Head, **fields) -> Eagle3Head:
    """The same head, saying something else about itself."""
    other = copy.copy(head)
    other.config = head.config.replace(**fields)
    return other


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs_head])
def test_a_head_of_the_wrong_kind_is_one_clear_line(parts, name):
    pair, head = parts
    both, second = dual_input_head(pair), amateur_head(pair)
    if name == "cross_alpha":
        wrong, message = (
            head,
            "drafts with a dual-input head, and --head is an EAGLE3 head, for expert_sd, dcd_eagle3, ",
        )
    else:
        wrong, message = both, "drafts with an EAGLE3 head, and --head is a dual-input head, for cross_alpha$"
    with pytest.raises(UserError, match=f"^method {name} {message}"):
        assemble(name, pair, wrong, amateur_head=second)
    own = fitting_heads(name, pair, head)["head"]
    with pytest.raises(
        UserError, match="--head was trained to imitate the amateur; method dual takes it as --amateur_h"
    ):
        assemble(name, pair, declaring(own, aligned_with="amateur"), amateur_head=second)
    assert not METHODS[name].can_draft_with(None, second) and not METHODS[name].can_draft_with(wrong, second)
    assert METHODS[name].can_draft_with(own, second)


def test_two_heads_that_are_no_dual_drafter_are_refused(parts):
    pair, head = parts
    second = amateur_head(pair)
    with pytest.raises(UserError, match="method dual drafts with a second head, for the amateur; give --amateur_head"):
        assemble("dual", pair, head)
    with pytest.raises(UserError, match="--amateur_head must be trained to imitate the amateur, not the expert"):
        assemble("dual", pair, head, amateur_head=head)
    with pytest.raises(UserError, match="--head must be trained to imitate the expert, not the contrast"):
        assemble("dual", pair, declaring(head, aligned_with="contrast"), amateur_head=second)
    with pytest.raises(UserError, match=r"cannot be recombined: feature_layers \(2, 4, 5\) and \(1, 2, 3\)"):
        assemble("dual", pair, head, amateur_head=declaring(second, feature_layers=(1, 2, 3)))
    with pytest.raises(UserError, match="cannot be recombined: kind eagle3 and dual_input"):
        assemble("dual", pair, head, amateur_head=declaring(dual_input_head(pair), aligned_with="amateur"))


def test_a_head_that_reads_another_amateur_is_refused(parts):
    pair, _ = parts
    other = Pair(pair.expert, tiny_model("smol", 3, layers=8), pair.tokenizer)
    with pytest.raises(
        UserError, match=r"the head reads another amateur than .*feature_layers \(1, 2, 3\) \(amateur: "
    ):
        assemble("cross_alpha", other, dual_input_head(pair))
    with pytest.raises(UserError, match="must then read the expert's own prompt"):
        assemble("cross_alpha", pair, dual_input_head(pair), negative_prompt(pair.expert, [9, 9]))


@pytest.mark.parametrize("saving", ["lazy", "deferred"])
def test_what_reads_the_amateur_cannot_save_its_passes(parts, saving):
    settings = Settings(Target(alpha=0.5, cutoff=0.1), saving=saving)
    with pytest.raises(
        UserError, match="method cross_alpha drafts from what the amateur's passes see, .* use saving none"
    ):
        batch_class(assembled("cross_alpha", *parts), settings)
    assert batch_class(assembled("dual", *parts), settings).__name__ == f"{saving.title()}Batch"
