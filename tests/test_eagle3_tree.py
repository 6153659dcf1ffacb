"""How trees grow, what they are cut to, and the exact law of sampled ones, for a drafter that is a table."""

import itertools

import numpy as np
import pytest
import torch
from trees import Table, paths_of, reference_tree

from dcd_core.draft import Shape
from dcd_core.drafters.eagle3_tree import Candidates, grow, ranked_plan, rerank, sampled_plan
from diagnostics.certificate.enumeration import Node
from diagnostics.certificate.proposals import EXACT, TARGETS, VISIBLE, World, error, without

SHAPES = [Shape(3, 2), Shape(4, 3, 7), Shape(2, 5, 9), Shape(5, 2, 3)]


@pytest.mark.parametrize("shape", [*SHAPES, Shape(3, 9, 40)])
def test_a_tree_is_the_reference_s(shape):
    world = World(6, TARGETS["alpha .3"])
    table = Table(world.e)
    found = grow(table.root(), ranked_plan(shape, 6), table.children, table.step)
    draft = rerank(found, shape.budget, "deterministic")
    expected = reference_tree(lambda path: np.log(world.e(path)), shape)
    assert paths_of(draft.tokens[0], draft.parents[0]) == [path for path, _ in expected]
    assert draft.valid.all() and not draft.linear and draft.nodes <= shape.budget


def test_a_node_sees_its_ancestors_and_itself():
    world = World(5, TARGETS["alpha .3"])
    table = Table(world.e)
    shape = Shape(4, 2)
    found = grow(table.root(), ranked_plan(shape, 5), table.children, table.step)
    paths = paths_of(found.tokens[0], found.parents[0])
    passed = []  # the paths of the nodes that went through the head, in the order of the passes
    for level, mask in table.masks:
        best = sorted((p for p in range(len(paths)) if len(paths[p]) == level + 1), key=lambda p: -found.scores[0, p])
        passed += [paths[p] for p in best[:2]]
        for node, seen in zip(passed[-2:], mask[0], strict=True):
            assert [path for path, sees in zip(passed, seen, strict=True) if sees] == [
                node[: length + 1] for length in range(len(node))
            ]
    assert len(table.masks) == 3


@pytest.mark.parametrize("law", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25] * 4, [1.0]])
@pytest.mark.parametrize("shape", [*SHAPES, Shape(4, 4, 6)])
def test_a_tree_stays_whole_at_exact_ties(law, shape):
    table = Table(lambda prefix: np.array(law))
    found = grow(table.root(2), ranked_plan(shape, len(law)), table.children, table.step)
    draft = rerank(found, shape.budget, "deterministic")
    for row in range(2):
        paths = paths_of(draft.tokens[row], draft.parents[row])
        assert len(set(paths)) == len(paths) == min(shape.budget, found.tokens.shape[1])
        assert draft.depths()[row].tolist() == [len(path) for path in paths]
    if law[0] == 1.0:  # a sure token comes first, and its children before its siblings
        sure = min(shape.depth, shape.budget)
        assert paths_of(draft.tokens[0], draft.parents[0])[:sure] == [(0,) * depth for depth in range(1, sure + 1)]


def test_a_probability_rounded_above_one_is_no_gain():
    def children(states, level, count):
        tokens = torch.zeros(1, 1, count, dtype=torch.int64)
        return tokens, torch.full((1, 1, count), 1e-9), None

    found = grow(torch.zeros(1, 1, 4), [[1]] * 3, children, lambda tokens, states, mask, level: states)
    assert (found.scores == 0).all()
    assert rerank(found, 2, "deterministic").parents.tolist() == [[-1, 0]]


def test_a_broken_score_keeps_the_numbering_whole():
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]])
    scores = torch.tensor([[float("nan"), float("nan"), -1.0]])
    draft = rerank(Candidates(tokens, parents, scores, torch.ones(1, 3, dtype=torch.bool)), 2, "deterministic")
    assert draft.parents.max() < draft.nodes


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [1, 2, 50])
def test_plans_keep_to_the_budget(ids):
    for depth, branch, nodes in itertools.product((1, 2, 3, 5), (2, 3, 4), (0, 1, 2, 3, 5, 8, 13, 40)):
        shape = Shape(depth, branch, nodes)
        width = min(branch, ids)
        plan = sampled_plan(shape, ids)
        counts = [sum(level) for level in plan]
        whole = sum(width**level for level in range(1, len(plan) + 1))
        assert sum(counts) == min(shape.budget, whole) and len(plan) == min(depth, shape.budget)
        for above, level in zip([1, *counts], plan, strict=False):
            assert 1 <= len(level) <= above and level == sorted(level, reverse=True)
            assert 1 <= min(level) <= max(level) <= width
        expanded = [min(branch, width**level) for level in range(len(plan))]
        assert ranked_plan(shape, ids) == [[width] * count for count in expanded]


def test_a_sampled_plan_is_deep_first_and_then_wide():
    assert sampled_plan(Shape(3, 2, 3), 9) == [[1], [1], [1]]
    assert sampled_plan(Shape(3, 2, 4), 9) == [[2], [1], [1]]
    assert sampled_plan(Shape(3, 2), 9) == [[2], [2, 1], [1]]
    assert sampled_plan(Shape(2, 3, 12), 9) == [[3], [3, 3, 3]]


# ---- sampled trees ---------------------------------------------------------------------------------------------------


def drawn_trees(world: World, shape: Shape, stop_below: float = 0.0, tamper=lambda draft: draft):
    """Every tree that :func:`grow` may draw from the drafter of a tabular world, with its probability."""
    plan = sampled_plan(shape, world.vocab)
    counts = [count for level in plan for count in level]

    def one(prefix, script):
        table, told, drawn_so_far = Table(world.e, prefix), iter(script), []

        def children(states, level, count):
            laws = table.log_probs(states).exp()
            tokens = torch.zeros(1, states.shape[1], count, dtype=torch.int64)
            every = torch.zeros(1, states.shape[1], count, world.vocab, dtype=torch.float64)
            for rank in range(states.shape[1]):
                law, drawn = laws[0, rank].numpy(), next(told)
                drawn_so_far.append(drawn)
                for child in range(count):
                    # a child past its parent's count is drawn and not kept: whichever it is
                    free = [token for token in range(world.vocab) if token not in tokens[0, rank, :child].tolist()]
                    tokens[0, rank, child] = drawn[child] if child < len(drawn) else free[0]
                    every[0, rank, child] = torch.from_numpy(law)
                    if len(free) > 1:
                        law = without(law, int(tokens[0, rank, child]))
            return tokens, laws.log().gather(2, tokens), every

        found = grow(table.root(), plan, children, table.step, stop_below)
        probability, tree = 1.0, []
        for node in range(found.tokens.shape[1]):
            law, token = found.laws[0, node].numpy(), int(found.tokens[0, node])
            probability *= law[token]
            if found.valid[0, node]:
                tree.append(Node(token, int(found.parents[0, node]), law))
        return tuple(drawn_so_far), (probability, tamper(tree))

    draws = [list(itertools.permutations(range(world.vocab), count)) for count in counts]
    # where growing ends early, scripts that differ only in what was not drawn are one
    return lambda prefix: list(dict(one(prefix, script) for script in itertools.product(*draws)).values())


@pytest.mark.parametrize("shape, length", [(Shape(2, 2), 3), (Shape(2, 2, 5), 2), (Shape(1, 3), 3)])
def test_trees_that_are_drawn_are_lossless(shape, length):
    world = World(3, TARGETS["alpha .3"])
    drafts = drawn_trees(world, shape)
    assert sum(probability for probability, _ in drafts(())) == pytest.approx(1, abs=1e-12)
    assert error(world, length, drafts, "sampled", siblings=shape.branch) < EXACT


def test_drawn_trees_that_stop_early_are_lossless():
    world = World(3, TARGETS["alpha .3"])
    drafts = drawn_trees(world, Shape(2, 2), stop_below=0.45)
    assert len({len(tree) for _, tree in drafts(())}) > 1
    assert sum(probability for probability, _ in drafts(())) == pytest.approx(1, abs=1e-12)
    assert error(world, 3, drafts, "sampled", siblings=2) < EXACT


def test_control_a_drawn_child_that_is_dropped_for_its_score():
    """The fault of re-ranking a sampled tree: the less likely of the root's children leaves."""
    world = World(3, TARGETS["alpha .3"])

    def pruned(tree):
        first, second, *below = tree
        worse = 0 if first.law[first.token] < first.law[second.token] else 1
        assert all(node.parent == 1 - worse for node in below)
        return [tree[1 - worse]] + [Node(node.token, 0, node.law) for node in below]

    assert error(world, 3, drawn_trees(world, Shape(2, 2), tamper=pruned), "sampled", siblings=2) > VISIBLE
