"""A small language model as proposer: what it has read, what it drafts, and whose vocabulary it must speak."""

from collections import Counter

import pytest
import torch
from followed import Follows
from naive import near_pair, some_prompts
from tiny import VOCAB, save_tiny, tiny_causal_lm, tiny_pair, tiny_tokenizer

from data_prep.toy_language import SPECIALS, WORDS
from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.draft import Shape
from dcd_core.drafters.lm import LanguageModelDrafter
from dcd_core.errors import UserError
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair, load_scorer

PROMPTS = some_prompts(5)


class Followed(Follows, LanguageModelDrafter):
    """Its drafts are those of whole passes over the text."""

    def check(self, row, text, draft, noise):
        assert self.cache.lengths[row] == len(text), "the text is read up to the root, drafts are forgotten"
        tokens = draft.tokens[row].tolist()
        logits = self.lm.forward_full(torch.tensor([text + tokens[:-1]])).logits[0, len(text) - 1 :]
        for depth, token in enumerate(tokens):
            if noise.rule == "sampled":
                law = (logits[depth] / noise.temperature).softmax(-1)
                torch.testing.assert_close(draft.probs[row, depth], law, atol=1e-11, rtol=1e-8)
            elif noise.rule == "shared_noise":
                assert token == (logits[depth] / noise.temperature + noise.gumbel(VOCAB)[row, depth]).argmax()
            else:
                assert token == logits[depth].argmax()


@pytest.mark.parametrize("rule", ["sampled", "deterministic", "shared_noise"])
def test_it_drafts_from_everything_accepted(rule):
    pair = near_pair("llama3", 0.01)
    method = assemble("dcd_lm", pair, lm=pair.amateur)
    method.drafter = Followed(pair.amateur, VOCAB)
    method.drafter.seen = seen = Counter()
    target = Target(alpha=0.3, temperature=0.8)
    settings = Settings(target, max_new_tokens=12, stop_ids=tuple(range(0, VOCAB, 9)), gamma=3, rule=rule, seed=1)
    done = decode(method, PROMPTS, settings, max_batch=3)
    assert seen["ragged"] and seen["joined"] and seen["proposals"] > 6
    assert sum(entry.accepted for generation in done for entry in generation.rounds) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["smol", "qwen3"])
def test_the_expert_as_proposer_is_always_right(kind, temperature):
    pair = tiny_pair(kind, dtype=torch.float64)
    settings = Settings(Target(temperature=temperature), max_new_tokens=13, gamma=3)
    for generation in decode(assemble("dcd_lm", pair, lm=pair.expert), PROMPTS, settings, max_batch=3):
        assert [(entry.drafted, entry.accepted) for entry in generation.rounds] == [(3, 3)] * 3


def test_it_makes_chains_whatever_the_tree():
    pair = tiny_pair("smol", dtype=torch.float64)
    drafter = LanguageModelDrafter(pair.amateur, VOCAB)
    assert drafter.most_nodes(Shape(5, 3, 2)) == 5 and drafter.usual_rule(Shape(5, 3)) == "sampled"
    chain, tree = (
        decode(assemble("dcd_lm", pair, lm=pair.amateur), PROMPTS, Settings(Target(), 8, gamma=4, **size), max_batch=3)
        for size in ({}, {"branch": 3, "nodes": 2})
    )
    assert [generation.ids for generation in chain] == [generation.ids for generation in tree]


def test_another_vocabulary_is_refused(tmp_path):
    pair = tiny_pair("smol")
    wider = LanguageModel(tiny_causal_lm("qwen3"))
    with pytest.raises(UserError, match="cannot draft for this pair: it has 104 ids and the expert 96"):
        assemble("dcd_lm", pair, lm=wider)
    save_tiny(tmp_path / "lm", "qwen3", layers=2)
    assert load_scorer(str(tmp_path / "lm"), pair).vocab == VOCAB, "padding is cut off"
    tokenizer = tiny_tokenizer()
    changed = Pair(pair.expert, None, tokenizer)
    words = dict(zip(SPECIALS + WORDS, range(VOCAB), strict=True))
    words["w3"], words["w4"] = words["w4"], words["w3"]
    tokenizer.get_vocab = lambda: words
    with pytest.raises(
        UserError, match="the expert and .*lm have different vocabularies: id 11 is 'w4' for the expert"
    ):
        load_scorer(str(tmp_path / "lm"), changed)


def test_a_broken_proposer_is_refused():
    pair, broken = tiny_pair("smol", dtype=torch.float64), tiny_pair("smol", dtype=torch.float64).amateur
    broken.model.lm_head.weight.data[5, 0] = float("nan")
    settings = Settings(Target(alpha=0.1, temperature=0.0), max_new_tokens=4)
    with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p0' .method dcd_lm."):
        decode(assemble("dcd_lm", pair, lm=broken), PROMPTS, settings, max_batch=2)
