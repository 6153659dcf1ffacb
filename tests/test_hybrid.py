"""The hybrid: n-gram continuations and a head's candidates, merged and ranked together."""

import itertools
import math

import pytest
import torch
from naive import assembled, some_prompts, tiny_head
from tiny import VOCAB, tiny_pair
from trees import paths_of

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.draft import Shape
from dcd_core.drafters.eagle3_tree import Candidates, rerank
from dcd_core.drafters.hybrid import RATES, HybridDrafter, believed, merge, rate_of
from dcd_core.drafters.ngram import NgramDrafter, NgramNode
from dcd_core.errors import UserError


@pytest.fixture(scope="module")
def parts():
    pair = tiny_pair("smol", dtype=torch.float64)
    return pair, tiny_head(pair)


# ---- merging ---------------------------------------------------------------------------------------------------------


def random_tree(generator, ids: int, depth: int, chance: float) -> dict[tuple[int, ...], float]:
    """Some paths, each with its parent, and scores that fall along a path; in the order of levels."""
    found, level = {}, {(): 0.0}
    for _ in range(depth):
        below = {}
        for path, score in level.items():
            for token in range(ids):
                if torch.rand((), generator=generator) < chance:
                    below[(*path, token)] = score - float(torch.rand((), generator=generator))
        found |= below
        level = below
    return found


def as_candidates(trees: list[dict]) -> Candidates:
    """Trees of different sizes, padded with invalid nodes."""
    width = max(map(len, trees))
    tokens, parents = torch.zeros(len(trees), width, dtype=torch.int64), torch.full((len(trees), width), -1)
    scores = torch.full((len(trees), width), -math.inf, dtype=torch.float64)
    for row, tree in enumerate(trees):
        places = {path: place for place, path in enumerate(tree)}
        for path, place in places.items():
            tokens[row, place], scores[row, place] = path[-1], tree[path]
            parents[row, place] = places.get(path[:-1], -1)
    return Candidates(tokens, parents, scores, scores > -math.inf)


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.9])
def test_a_merged_tree_is_the_union_with_the_larger_scores(chance):
    generator = torch.Generator().manual_seed(3)
    heads = [{(0,): -0.1} | random_tree(generator, 3, 3, 0.5) for _ in range(6)]
    grams = [{(1,): -0.2} | random_tree(generator, 3, 3, chance) for _ in range(6)]
    merged, unions = merge(as_candidates(heads), as_candidates(grams), 3), []
    for row, (head, gram) in enumerate(zip(heads, grams, strict=True)):
        union = {
            path: max(head.get(path, -math.inf), gram.get(path, -math.inf)) for path in itertools.chain(head, gram)
        }
        paths = paths_of(merged.tokens[row], merged.parents[row])
        scores = merged.scores[row].tolist()
        found = [(path, score) for path, score, valid in zip(paths, scores, merged.valid[row], strict=True) if valid]
        unions.append(union)
        assert dict(found) == union and len(found) == len(union), "a node that both propose is one node"
    # at every budget the best are drafted, and with each its parent
    for budget in (1, 4, 9, 100):
        draft = rerank(merged, budget, "deterministic")
        for row in range(6):
            kept = paths_of(draft.tokens[row], draft.parents[row])
            kept = [path for path, valid in zip(kept, draft.valid[row], strict=True) if valid]
            best = sorted(unions[row].values(), reverse=True)[:budget]
            assert [unions[row][path] for path in kept] == best


def test_a_node_that_may_not_be_drafted_is_no_twin():
    head = as_candidates([{(4,): -0.1, (4, 5): -math.inf}])
    gram = as_candidates([{(4,): -0.5, (4, 5): -0.6}])
    merged = merge(head, gram, 2)
    assert merged.valid.tolist() == [[True, False, False, True]]
    assert merged.parents[0, 3] == 0 and merged.scores[0, 0] == pytest.approx(-0.1)


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_scores_follow_the_rate_of_the_match(parts):
    drafter = HybridDrafter(parts[1], parts[0].expert.embedding, VOCAB, rates={2: 0.25, 5: 0.5})
    assert [rate_of(match, drafter.rates) for match in (2, 4, 5, 12)] == [0.25, 0.25, 0.5, 0.5]
    assert drafter.ngram.shortest == 2
    tree = [NgramNode(7, -1, 1, 5), NgramNode(8, 0, 2, 5), NgramNode(9, -1, 1, 2), NgramNode(6, 2, 2, 2)]
    scores = [score for _, score in believed(tree, drafter.rates)]
    assert scores == pytest.approx([math.log(0.5), math.log(0.25), math.log(0.25), math.log(0.0625)])
    stopped = believed([*tree, NgramNode(1, 1, 3, 5)], drafter.rates, 0.3)
    assert [(node.token, node.parent) for node, _ in stopped] == [(7, -1), (8, 0), (9, -1)]


@pytest.mark.parametrize("rates", [{}, {0: 0.5}, {1: 0.0}, {1: 1.5}, {1: 0.5, 2: 0.4}])
def test_rates_that_are_none_are_refused(parts, rates):
    with pytest.raises(UserError, match="n-gram rates must lie in .0, 1. and not fall"):
        HybridDrafter(parts[1], parts[0].expert.embedding, VOCAB, rates=rates)
    assert list(RATES) == sorted(RATES)


# ---- in the loop -----------------------------------------------------------------------------------------------------


def proposals(name: str, parts, prompt: list[int], shape: Shape):
    """The paths of the first draft after a prompt."""
    seen = []
    method = assembled(name, *parts)
    kind = type(method.drafter)

    class Seen(kind):
        def propose(self, root, noise, shape):
            draft = super().propose(root, noise, shape)
            paths = paths_of(draft.tokens[0], draft.parents[0])
            seen.append([path for path, valid in zip(paths, draft.valid[0], strict=True) if valid])
            return draft

    method.drafter.__class__ = Seen
    settings = Settings(
        Target(alpha=0.1, temperature=0.0), 2, gamma=shape.depth, branch=shape.branch, nodes=shape.nodes
    )
    decode(method, [Prompt("a", prompt)], settings)
    return seen[0]


@pytest.mark.parametrize("shape", [Shape(4), Shape(4, 3, 8)])
def test_text_that_copies_takes_the_ngram_s_path_and_other_text_the_head_s(parts, shape):
    pair = parts[0]
    run = [20, 31, 42, 53, 64, 75, 86, 27, 38, 49]
    (first,) = decode(assembled("cd", pair), [Prompt("a", run)], Settings(Target(alpha=0.1, temperature=0.0), 1))
    # the run, then its first emitted token and something after it, then the run again: a match of eleven tokens
    copied = [*run, first.ids[0], 9, 8, 7, 6, *run]
    (again,) = decode(assembled("cd", pair), [Prompt("a", copied)], Settings(Target(alpha=0.1, temperature=0.0), 1))
    copied[10] = again.ids[0]
    settings = Settings(Target(alpha=0.1, temperature=0.0), 1)
    if decode(assembled("cd", pair), [Prompt("a", copied)], settings)[0].ids != again.ids:
        pytest.skip("the planted token changed the one it is to equal")
    assert (9, 8, 7, 6) in proposals("dcd_hybrid", parts, copied, shape)
    fresh = [20, 31, 42]
    head_alone = proposals("dcd_eagle3", parts, fresh, shape)
    assert proposals("dcd_hybrid", parts, fresh, shape) == head_alone


def test_it_finds_what_either_finds(parts):
    """Nodes of the budget go to both: its draft is within the union of their candidates."""
    prompt = some_prompts(4, seed=9)[3].ids
    shape = Shape(3, 2, 5)
    hybrid = proposals("dcd_hybrid", parts, prompt, shape)
    assert len(hybrid) == 5
    wide = set(proposals("dcd_eagle3", parts, prompt, Shape(3, 2, 40)))
    wide |= set(proposals("dcd_ngram", parts, prompt, Shape(3, 2, 5)))
    assert set(hybrid) <= wide


def test_batches_have_their_own_rows(parts):
    """The loop copies a drafter; the n-grams of one batch are no other's."""
    method = assembled("dcd_hybrid", *parts)
    assert isinstance(method.drafter.ngram, NgramDrafter)
    settings = Settings(Target(alpha=0.1, temperature=0.0), max_new_tokens=6, gamma=3, branch=2)
    prompts = some_prompts(5)
    found = decode(method, prompts, settings, max_batch=2)
    assert method.drafter.ngram.rows == []
    assert [g.ids for g in found] == [g.ids for g in decode(assembled("cd", parts[0]), prompts, settings, max_batch=5)]
