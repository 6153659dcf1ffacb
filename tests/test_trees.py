"""Trees in the loop: EAGLE3's are those of chains down every path, and the text is that of the plain loop."""

from collections import Counter
from itertools import product

import pytest
import torch
from followed import Follows, Reduced
from naive import assembled, fitted_head, some_prompts, tiny_head
from test_batch import SAMPLES, copies_per_step, exact_law, g_test
from tiny import KINDS, VOCAB, tiny_pair
from trees import paths_of, reference_tree

from dcd_core.batch import Batch
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.draft import Shape
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.eagle3_tree import rerank
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, assemble

PROMPTS = some_prompts(5)
SHAPES = [Shape(3, 2), Shape(4, 3, 7), Shape(2, 5, 9), Shape(5, 2, 3)]
TREES = ["expert_sd", "dcd_ngram", "dcd_eagle3", "dcd_hybrid", "cross_alpha", "dual"]
SAMPLED = ["dcd_eagle3", "cross_alpha", "dual"]


def tree_settings(shape: Shape, temperature: float = 0.0, **fields) -> Settings:
    target = Target(alpha=0.5, temperature=temperature)
    size = dict(gamma=shape.depth, branch=shape.branch, nodes=shape.nodes)
    return Settings(target, **{"max_new_tokens": 12, "stop_ids": tuple(range(0, VOCAB, 11)), **size, **fields})


def texts(generations) -> list[list[int]]:
    return [generation.ids for generation in generations]


def plain_texts(pair) -> list[list[int]]:
    """Prompts with the answers of vanilla CD: greedy, and with the noise of seed 0."""
    settings = [tree_settings(Shape()), tree_settings(Shape(), 1.0, rule="shared_noise")]
    answers = [decode(assemble("cd", pair), PROMPTS, chosen, max_batch=5) for chosen in settings]
    return [prompt.ids + made.ids for some in answers for prompt, made in zip(PROMPTS, some, strict=True)]


@pytest.fixture(scope="module")
def pairs():
    """Tiny pairs in fp64, each with a head whose trees often pass some levels deep."""
    made = {kind: tiny_pair(kind, dtype=torch.float64) for kind in KINDS}
    return {kind: (pair, fitted_head(pair, plain_texts(pair))) for kind, pair in made.items()}


# ---- EAGLE3's trees in the loop --------------------------------------------------------------------------------------


class FollowedTree(Follows, Eagle3Drafter):
    """Its trees are built again without a cache, from the expert's features of the whole text and a chain run down
    every path."""

    expert = None

    def candidates(self, noise, shape):
        self.found, self.shape = super().candidates(noise, shape), shape
        return self.found

    def logits_after(self, text, path):
        ids = torch.tensor([text])
        features = self.expert.forward_full(ids, features=True).features[:, :-1]
        tokens = torch.tensor([path])
        states = self.head.unroll(
            features,
            self.embedding(ids[:, 1:]),
            torch.tensor([[len(text) - 2]]),
            len(path) + 1,
            lambda step, state: self.embedding(tokens[:, step - 1 : step]),
        )
        *_, state = states
        return self.head.logits(state)[0, 0, : len(self.target_ids)]

    def check(self, row, text, draft, noise):
        assert self.cache.lengths[row] == len(text) - 1, "one row per token before the root, drafts forgotten"
        paths = paths_of(draft.tokens[row], draft.parents[row])
        assert draft.valid[row].all() and draft.nodes <= self.shape.budget
        if noise.rule == "sampled":
            self.check_laws(row, text, draft, noise, paths)
            return
        local = {token: index for index, token in enumerate(self.target_ids.tolist())}

        def log_probs(path):
            return self.logits_after(text, [self.target_ids[index] for index in path]).log_softmax(-1).tolist()

        expected = reference_tree(log_probs, self.shape)
        assert [tuple(local[token] for token in path) for path in paths] == [path for path, _ in expected]
        scores = dict(zip(paths_of(self.found.tokens[row], self.found.parents[row]), self.found.scores[row].tolist()))  # noqa: B905
        for path, score in expected:
            assert scores[tuple(self.target_ids[list(path)].tolist())] == pytest.approx(score, abs=1e-10)

    def check_laws(self, row, text, draft, noise, paths):
        elder = Counter()
        for node, path in enumerate(paths):
            law = (self.logits_after(text, path[:-1]) / noise.temperature).softmax(-1)
            for other in paths[:node]:
                if other[:-1] == path[:-1]:
                    law[draft.ids == other[-1]] = 0
                    elder[len(path)] += 1
            torch.testing.assert_close(draft.probs[row, node], law / law.sum(), atol=1e-11, rtol=1e-8)
        assert elder, "some node has an elder sibling"


@pytest.mark.parametrize("rule", ["sampled", "deterministic", "shared_noise"])
@pytest.mark.parametrize("kind, vocabulary", [("llama3", None), ("qwen3", Reduced)])
def test_eagle3_trees_are_those_of_chains_down_every_path(kind, vocabulary, rule):
    pair = tiny_pair(kind, dtype=torch.float64)
    head = fitted_head(pair, plain_texts(pair), vocabulary)
    method = assemble("dcd_eagle3", pair, head)
    method.drafter = FollowedTree(head, pair.expert.embedding, pair.expert.vocab)
    method.drafter.expert, method.drafter.seen = pair.expert, Counter()
    greedy = rule == "deterministic"
    settings = tree_settings(Shape(3, 3, 8), 0.0 if greedy else 1.0, rule="auto" if greedy else rule, max_new_tokens=9)
    done = decode(method, PROMPTS, settings, max_batch=3)
    assert method.drafter.seen["proposals"] > 6 and method.drafter.seen["joined"] > 0
    accepted = {entry.accepted for generation in done for entry in generation.rounds}
    assert method.drafter.seen["ragged"] and max(accepted) >= (1 if rule == "sampled" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_one_child_a_node_is_the_chain(kind):
    pair = tiny_pair(kind, dtype=torch.float64)

    class Both(Eagle3Drafter):
        def propose(self, root, noise, shape):
            chain = super().propose(root, noise, shape)
            tree = rerank(self.candidates(noise, shape), shape.budget, noise.rule)
            assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.parents, chain.parents)
            return tree

    method = assemble("dcd_eagle3", pair, tiny_head(pair))
    method.drafter = Both(method.drafter.head, pair.expert.embedding, pair.expert.vocab)
    decode(method, PROMPTS, Settings(Target(alpha=0.3, temperature=0.0), max_new_tokens=6, gamma=4), max_batch=3)


# ---- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind, shape", [*zip(["smol", "llama3", "qwen3", "qwen3"], SHAPES, strict=True)])
def test_every_tree_gives_the_text_of_the_plain_loop(pairs, kind, shape, temperature):
    """At temperature 0, and with shared noise; rows leave and enter a ragged batch."""
    settings = tree_settings(shape, temperature, rule="auto" if temperature == 0 else "shared_noise")
    plain = {name: texts(decode(assemble(name, pairs[kind][0]), PROMPTS, settings, 5)) for name in ("cd", "ar")}
    for name in METHODS:
        found = decode(assembled(name, *pairs[kind]), PROMPTS, settings, max_batch=3)
        assert texts(found) == plain["cd" if METHODS[name].contrast else "ar"], name
        if METHODS[name].saving == "deferred":
            continue  # its rounds are blocks of several drafts
        rounds = [entry for generation in found for entry in generation.rounds]
        most = shape.budget if name in TREES else shape.depth
        assert all(entry.accepted <= shape.depth and entry.drafted <= most for entry in rounds), name
        if name in ("dcd_eagle3", "dcd_hybrid"):
            assert {entry.drafted for entry in rounds} == {shape.budget}
            assert len({entry.accepted for entry in rounds}) > 2, "rows keep paths of different lengths"


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("name, rule", [*product(TREES, ["deterministic"]), *product(SAMPLED, ["sampled"])])
def test_a_row_does_not_depend_on_its_neighbours(pairs, name, rule, shape):
    settings, method = tree_settings(shape, 1.0, rule=rule, stop_below=0.02), assembled(name, *pairs["llama3"])
    whole = decode(method, PROMPTS, settings, max_batch=3)
    assert texts(decode(method, PROMPTS[::-1], settings, max_batch=5))[::-1] == texts(whole)
    for prompt, beside in zip(PROMPTS, whole, strict=True):
        alone = decode(method, [prompt], settings)[0]
        assert alone.ids == beside.ids
        assert [(r.drafted, r.accepted) for r in alone.rounds] == [(r.drafted, r.accepted) for r in beside.rounds]


@pytest.mark.parametrize("rule", ["deterministic", "shared_noise", "sampled"])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_costs_no_copy_to_the_host(pairs, name, rule):
    if rule == "sampled" and name in ("dcd_ngram", "dcd_hybrid"):
        with pytest.raises(UserError, match="cannot draft by the rule 'sampled'"):
            decode(assembled(name, *pairs["smol"]), PROMPTS, tree_settings(SHAPES[0], 1.0, rule=rule))
        return
    steps = copies_per_step(assembled(name, *pairs["smol"]), tree_settings(SHAPES[1], 1.0, rule=rule), batch=3)
    assert len(steps) > 3 and all(found == ["tolist"] for found, _ in steps)


def test_caches_after_rounds_of_trees_are_fresh_ones(pairs):
    """Expert, amateur and head hold what a pass over the accepted text alone would have left."""
    pair, head = pairs["llama3"]
    batch = Batch(
        assemble("dcd_eagle3", pair, head), PROMPTS, tree_settings(Shape(3, 4, 10), stop_ids=(), max_new_tokens=40)
    )
    batch.prefill()
    for _ in range(4):
        batch.round()
    batch.drafter._read_accepted()
    assert len(set(batch.caches[0].lengths)) > 1
    for row, (prompt, generation) in enumerate(zip(batch.prompts, batch.active, strict=True)):
        text = torch.tensor([prompt.ids + generation.ids[:-1]])
        last = torch.tensor([generation.ids[-1:]])
        features = None
        for scorer, cache in zip(batch.scorers, batch.caches, strict=True):
            fresh = scorer.model.new_cache(1, text.shape[1])
            output = scorer.model.forward(text, fresh, features=features is None)
            features = output.features if features is None else features
            compare(cache, fresh, row, text.shape[1])
        fresh = head.new_cache(1, text.shape[1])
        embeds = pair.expert.embedding(torch.cat([text, last], dim=1)[:, 1:])
        with torch.no_grad():
            head.step(embeds, head.fuse(features), fresh)
        compare(batch.drafter.cache, fresh, row, text.shape[1])


def compare(cache, fresh, row: int, length: int) -> None:
    assert cache.lengths[row] == length
    for held, alone in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(held.keys[row, :, :length], alone.keys[0, :, :length], atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(held.values[row, :, :length], alone.values[0, :, :length], atol=1e-10, rtol=1e-8)


def test_trees_are_not_sampled_unless_asked(pairs):
    drafter = assemble("dcd_eagle3", *pairs["smol"]).drafter
    assert drafter.usual_rule(Shape(3)) == "sampled" and drafter.usual_rule(Shape(3, 2)) == "deterministic"
    settings = tree_settings(Shape(3, 2), 1.0)
    auto, asked = (
        texts(decode(assemble("dcd_eagle3", *pairs["smol"]), PROMPTS, tree_settings(Shape(3, 2), 1.0, rule=rule), 5))
        for rule in ("deterministic", "sampled")
    )
    assert texts(decode(assemble("dcd_eagle3", *pairs["smol"]), PROMPTS, settings, 5)) == auto != asked


@pytest.mark.parametrize("rule", ["deterministic", "sampled"])
def test_a_broken_head_is_refused(pairs, rule):
    pair = pairs["smol"][0]
    head = tiny_head(pair)
    head.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p0' .method dcd_eagle3."):
        decode(assemble("dcd_eagle3", pair, head), PROMPTS, tree_settings(SHAPES[0], 1.0, rule=rule, stop_ids=()), 2)


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
def test_the_joint_law_of_two_tokens_is_the_target_s(pairs, rule):
    pair, head = pairs["smol"]
    target, prompt = Target(alpha=0.5, temperature=1.0), PROMPTS[2].ids
    prompts = [Prompt("law", prompt, sample) for sample in range(SAMPLES)]
    settings = Settings(target, max_new_tokens=2, gamma=2, branch=4, rule=rule)
    made = decode(assemble("dcd_eagle3", pair, head), prompts, settings, max_batch=256)
    assert sum(entry.accepted for generation in made for entry in generation.rounds) > SAMPLES / 20
    assert g_test([generation.ids for generation in made], exact_law(pair, prompt, target)) > 1e-6
