"""Drafters that know of the contrast: what they read, what they draft from, and what that costs."""

import pytest
import torch
from naive import amateur_head, assembled, dual_input_head, greedy_cd, some_prompts, tiny_head
from tiny import KINDS, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.drafters.dual import HeadPair
from dcd_core.errors import UserError
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel
from dcd_core.scorers import three_models

PROMPTS = some_prompts(4)


class EveryThird:
    """A draft vocabulary of every third id from ``first`` on."""

    def __init__(self, first: int, step: int = 3):
        ids = torch.arange(first, 96, step)
        self.t2d = torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True)
        self.d2t = ids - torch.arange(len(ids))


@pytest.fixture(scope="module")
def pairs():
    return {kind: tiny_pair(kind, dtype=torch.float64) for kind in KINDS}


def settings(**fields) -> Settings:
    return Settings(**{"target": Target(alpha=0.5, temperature=0.0), "max_new_tokens": 12, "gamma": 3, **fields})


# ---- cross_alpha -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_both_models_true_features_stand_beside_every_token(pairs, kind, branch):
    """Expert's, then the amateur's, of the very text, also for rows of a ragged batch, after prefill and rounds."""
    pair, seen = pairs[kind], {}
    method = assembled("cross_alpha", pair)

    class Watched(type(method.drafter)):
        def begin(self, prompts, first, capacity):
            self.lines = [[] for _ in prompts]
            self.keep(first)
            super().begin(prompts, first, capacity)

        def observe(self, accepted):
            self.keep(accepted)
            super().observe(accepted)

        def keep(self, new):
            for line, count, features, tokens in zip(
                self.lines, new.counts, new.features, new.host_tokens, strict=True
            ):
                line.append((tokens, features[:count]))
                text = tuple(token for some, _ in line for token in some)
                seen[text] = torch.cat([features for _, features in line])

        def keep_rows(self, rows):
            self.lines = [self.lines[row] for row in rows]
            super().keep_rows(rows)

    method.drafter.__class__ = Watched
    made = decode(method, PROMPTS, settings(branch=branch), max_batch=4)
    for prompt, generation in zip(PROMPTS, made, strict=True):
        text = prompt.ids + generation.ids
        ids = torch.tensor([text])
        features = [one.forward_full(ids, features=True).features[0] for one in (pair.expert, pair.amateur)]
        expected = torch.cat(features, dim=-1)
        told = {line: rows for line, rows in seen.items() if list(line) == text[1 : len(line) + 1]}
        assert len(told) >= len(generation.rounds)
        for line, rows in told.items():
            torch.testing.assert_close(rows, expected[: len(line)], atol=1e-10, rtol=1e-9)


def test_the_amateur_runs_once_a_round_and_never_while_drafting(pairs, monkeypatch):
    pair = pairs["smol"]
    passes, shipped = [], LanguageModel.forward

    def counted(self, *arguments, **options):
        passes.append((self is pair.amateur, options["features"]))
        return shipped(self, *arguments, **options)

    monkeypatch.setattr(LanguageModel, "forward", counted)
    (made,) = decode(assembled("cross_alpha", pair), PROMPTS[:1], settings())
    assert passes == [(False, True), (True, True)] * (1 + len(made.rounds))
    passes.clear()
    (made,) = decode(assembled("dual", pair), PROMPTS[:1], settings())
    assert passes == [(False, True), (True, False)] * (1 + len(made.rounds)), "both of its heads read the expert"


@pytest.mark.parametrize("kind", KINDS)
def test_deeper_heads_decode_the_same_text(pairs, kind):
    """Depth and width change the drafts, never the text; both heads of a dual drafter may differ in them."""
    from dcd_core.heads.dual_input import DualInputHead
    from dcd_core.heads.eagle3 import Eagle3Head

    pair = pairs[kind]
    configs, taps = (pair.expert.config, pair.amateur.config), pair.amateur.feature_layers
    deep = {"layers": 2, "intermediate_size": 24}
    both = DualInputHead.from_pair(*configs, amateur_feature_layers=taps, **deep).double()
    alone = Eagle3Head.from_expert(configs[0], **deep).double()
    second = amateur_head(pair)
    methods = [
        assemble("cross_alpha", pair, both),
        assemble("dcd_eagle3", pair, alone),
        assemble("dcd_deferred", pair, alone),
        assemble("dual", pair, alone, amateur_head=second),
    ]
    expected = [greedy_cd(pair, prompt.ids, 0.5, 12) for prompt in PROMPTS]
    for method in methods:
        for branch in (1, 3):
            found = decode(method, PROMPTS, settings(branch=branch), max_batch=3)
            assert [generation.ids for generation in found] == expected, method.name


# ---- dual ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_two_heads_are_recombined_on_the_ids_that_both_draft(pairs, alpha):
    pair = pairs["smol"]
    one, two = tiny_head(pair, vocabulary=EveryThird(0, 2)), amateur_head(pair, vocabulary=EveryThird(0))
    both = HeadPair(one, two, alpha)
    assert both.target_ids.tolist() == list(range(0, 96, 6))
    states = torch.randn(2, 5, 64, dtype=torch.float64)
    with torch.no_grad():
        e, f = torch.full((2, 5, 96), -torch.inf).double(), torch.zeros(2, 5, 96).double()
        e[..., one.target_ids] = one.logits(states[..., :32]).log_softmax(-1)
        f[..., two.target_ids] = two.logits(states[..., 32:]).log_softmax(-1)
        expected = ((1 + alpha) * e - alpha * f)[..., both.target_ids].log_softmax(-1)
        assert torch.allclose(both.logits(states).log_softmax(-1), expected, atol=1e-12)


@pytest.mark.parametrize("branch", [1, 2])
def test_drafts_follow_the_target_s_alpha_or_their_own(pairs, branch):
    pair = pairs["llama3"]
    heads = {"head": tiny_head(pair), "amateur_head": amateur_head(pair)}
    method = assemble("dual", pair, **heads)

    def drafts(**fields):
        seen = []

        class Watched(type(method.drafter)):
            def propose(self, root, noise, shape):
                draft = super().propose(root, noise, shape)
                seen.append((self.head.weights, draft.tokens.tolist()))
                return draft

        method.drafter.__class__ = Watched
        decode(method, PROMPTS, settings(branch=branch, **fields), max_batch=4)
        method.drafter.__class__ = Watched.__bases__[0]
        return seen

    assert {weights for weights, _ in drafts()} == {(1.5, -0.5)}
    assert {weights for weights, _ in drafts(draft_alpha=2.0)} == {(3.0, -2.0)}
    assert {weights for weights, _ in drafts(target=Target.li(0.8, 0.5, temperature=0.0))} == {(1.0, -1.6)}
    assert method.drafter.head.weights == (1.0, 0.0), "a batch aims its own copy"
    alone = assemble("dcd_eagle3", pair, heads["head"])
    first = drafts(draft_alpha=0.0)[0][1]
    alone.drafter.__class__ = type("Alone", (type(alone.drafter),), {"propose": lambda *given: kept(*given)})
    found = []

    def kept(drafter, root, noise, shape):
        found.append(super(type(drafter), drafter).propose(root, noise, shape))
        return found[-1]

    decode(alone, PROMPTS, settings(branch=branch), max_batch=4)
    assert found[0].tokens.tolist() == first, "at draft_alpha 0 it drafts as its first head does"


def test_a_target_of_three_models_needs_a_draft_alpha(pairs):
    pair = pairs["smol"]
    heads = {"head": tiny_head(pair), "amateur_head": amateur_head(pair)}
    method = assemble("dual", pair, contrast=three_models(pair.amateur, pair.amateur), **heads)
    three = Target.proxy(0.5, temperature=0.0)
    with pytest.raises(UserError, match="cannot be recombined as a target of 3 models is; give --draft_alpha"):
        decode(method, PROMPTS[:1], settings(target=three))
    assert decode(method, PROMPTS[:1], settings(target=three, draft_alpha=0.5))[0].finish == "length"
    with pytest.raises(UserError, match="draft_alpha must be 0 or more, got -1"):
        settings(draft_alpha=-1.0)


def test_a_target_of_other_models_than_the_head_s_still_loses_nothing(pairs):
    """A dual-input head in a target of three models reads the first after the expert."""
    pair = pairs["smol"]
    scorers, target = three_models(pair.amateur, pair.expert), Target.proxy(0.5, temperature=0.0)
    method = assemble("cross_alpha", pair, dual_input_head(pair), contrast=scorers)
    plain = assemble("cd", pair, contrast=scorers)
    made = [
        [generation.ids for generation in decode(one, PROMPTS, settings(target=target), max_batch=3)]
        for one in (method, plain)
    ]
    assert made[0] == made[1]
