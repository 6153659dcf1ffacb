"""The verifier is lossless: for every kind of draft, what it emits has exactly the target's law.

Exact enumeration (see enumeration.py) of the shipped function over several rounds; every negative control is the same
code with one fault injected, and must be seen to fail.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
from enumeration import Node, batch_drafts, emitted_law, outcomes, product_law, target_rows

from dcd_core import sampling
from dcd_core import verify as module
from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import acceptance
from dcd_core.draft import Draft
from dcd_core.sampling import gumbel, row_key
from dcd_core.verify import Uniforms, verify

EXACT = 1e-10
VISIBLE = 1e-3
"""A fault must move some probability by at least this much."""


class World:
    """Tabular expert p, amateur q and drafter e over a few ids, drawn from a Dirichlet seeded by the prefix."""

    def __init__(self, vocab: int, target: Target, draft_ids: tuple[int, ...] | None = None):
        self.vocab, self.target, self.draft_ids = vocab, target, draft_ids
        self.rows = functools.cache(self._rows)

    @staticmethod
    @functools.cache
    def table(model: str, prefix: tuple[int, ...], vocab: int) -> np.ndarray:
        seed = [ord(model), vocab, len(prefix), *prefix]
        return np.random.default_rng(seed).dirichlet(np.full(vocab, 0.7))

    def p(self, prefix) -> np.ndarray:
        return self.table("p", prefix, self.vocab)

    def q(self, prefix) -> np.ndarray:
        return self.table("q", prefix, self.vocab)

    def e(self, prefix) -> np.ndarray:
        """Aligned with the expert, as a drafter is; 0 outside a reduced draft vocabulary."""
        law = 0.5 * self.p(prefix) + 0.5 * self.table("e", prefix, self.vocab)
        if self.draft_ids is not None:
            law = law * np.isin(np.arange(self.vocab), self.draft_ids)
        return law / law.sum()

    def _rows(self, prefix) -> np.ndarray:
        """The target after a prefix, by the shipped function in fp64."""
        models = [torch.from_numpy(np.log(law)) for law in (self.p(prefix), self.q(prefix))]
        return target_log_probs(models, self.target).numpy()


TARGETS = {
    "alpha .3": Target(alpha=0.3),
    "alpha .5, cutoff": Target(alpha=0.5, cutoff=0.3),
    "alpha .5, T .7": Target(alpha=0.5, temperature=0.7),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The inverse CDF looks first among chunks of ids, then inside one: a few ids must already need both steps."""
    monkeypatch.setattr(sampling, "_CHUNK", 2)


# ---- kinds of drafts -------------------------------------------------------------------------------------------------


def sampled_chain(world: World, gamma: int, stop=None, drop: bool = False):
    """Every path of ``gamma`` tokens drawn one after the other from e.

    ``stop(law, token)`` ends the draft early after that token, or before it with ``drop``.
    """

    def drafts(prefix):
        found: dict[tuple[int, ...], tuple[float, list[Node]]] = {}
        for path in itertools.product(range(world.vocab), repeat=gamma):
            probability, tree, text = 1.0, [], prefix
            for token in path:
                law = world.e(text)
                if stop is None or not tree or not ended:
                    probability *= law[token]
                    ended = stop is not None and stop(law, token)
                    if not (ended and drop):
                        tree.append(Node(token, len(tree) - 1, law))
                        text = (*text, token)
                    if ended:
                        break
            key = (*(node.token for node in tree), -1, *path[len(tree) : len(tree) + drop])
            if probability > 0:
                found[key] = (probability, tree)
        return list(found.values())

    return drafts


def greedy_chain(world: World, gamma: int, with_law: bool = False):
    """The drafter's argmax, ``gamma`` times; ``with_law`` declares it as sampled, which it is not."""

    def drafts(prefix):
        tree, text = [], prefix
        for _ in range(gamma):
            law = world.e(text)
            tree.append(Node(int(law.argmax()), len(tree) - 1, law if with_law else None))
            text = (*text, tree[-1].token)
        return [(1.0, tree)]

    return drafts


def ngram_like(world: World, gamma: int):
    """Any function of the text, of any length from 0 to gamma; also tokens that the drafter would never choose."""

    def drafts(prefix):
        rng = np.random.default_rng([9, len(prefix), *prefix])
        tokens = rng.integers(0, world.vocab, rng.integers(0, gamma + 1)).tolist()
        return [(1.0, [Node(token, place - 1) for place, token in enumerate(tokens)])]

    return drafts


def top_tree(world: World):
    """The two best tokens of e, and the two best after the better of them."""

    def drafts(prefix):
        best = np.argsort(-world.e(prefix), kind="stable")[:2].tolist()
        below = np.argsort(-world.e((*prefix, best[0])), kind="stable")[:2].tolist()
        return [(1.0, [Node(best[0]), Node(best[1]), Node(below[0], 0), Node(below[1], 0)])]

    return drafts


def without(law: np.ndarray, token: int) -> np.ndarray:
    """What the next sibling is drawn from when this one has been drawn."""
    left = law * (np.arange(len(law)) != token)
    return left / left.sum()


def siblings_without_replacement(world: World, arrange=lambda law, first, second: (first, second)):
    """Two children of the root drawn without replacement from e, and two more below the first.

    ``arrange`` may change their order once they are drawn, as no drafter may.
    """

    def pairs(law):
        for first, second in itertools.permutations(range(world.vocab), 2):
            probability = law[first] * without(law, first)[second]
            if probability > 0:
                yield probability, *arrange(law, first, second)

    def drafts(prefix):
        found = []
        top = world.e(prefix)
        for probability, first, second in pairs(top):
            low = world.e((*prefix, first))
            for below, third, fourth in pairs(low):
                tree = [Node(first, -1, top), Node(second, -1, without(top, first))]
                tree += [Node(third, 0, low), Node(fourth, 0, without(low, third))]
                found.append((probability * below, tree))
        return found

    return drafts


def siblings_with_replacement(world: World, count: int = 2):
    """Children of the root drawn independently from e, so the same token may come twice [SpecInfer]."""

    def drafts(prefix):
        law = world.e(prefix)
        return [
            (float(np.prod(law[list(tokens)])), [Node(token, -1, law) for token in tokens])
            for tokens in itertools.product(range(world.vocab), repeat=count)
        ]

    return drafts


def error(world: World, length: int, drafts, rule: str, siblings: int = 1, rows=None, **fault) -> float:
    """Largest difference between the law of the emitted tokens and the product of the target."""
    law = emitted_law(world.vocab, length, drafts, rows or world.rows, rule, siblings, **fault)
    assert law.sum() == pytest.approx(1, abs=1e-11)
    return float(np.abs(law - product_law(world.vocab, length, world.rows)).max())


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("vocab, gamma", [(3, 3), (4, 2)])
def test_sampled_chains_are_lossless(name, vocab, gamma):
    world = World(vocab, TARGETS[name])
    assert error(world, gamma + 1, sampled_chain(world, gamma), "sampled") < EXACT


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("proposer", [greedy_chain, ngram_like])
def test_deterministic_chains_are_lossless(name, proposer):
    world = World(5, TARGETS[name])
    assert error(world, 4, proposer(world, 3), "deterministic") < EXACT


def test_the_target_that_is_enumerated_is_the_paper_s():
    for alpha, cutoff in ((0.3, 0.0), (0.5, 0.3)):
        world = World(4, Target(alpha=alpha, cutoff=cutoff))
        for prefix in [(), (1,), (3, 0), (2, 2, 1)]:
            p, q = world.p(prefix), world.q(prefix)
            expected = p ** (1 + alpha) * q**-alpha * (p >= cutoff * p.max())
            np.testing.assert_allclose(np.exp(world.rows(prefix)), expected / expected.sum(), atol=1e-14)


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
def test_a_reduced_draft_vocabulary_is_lossless(rule):
    world = World(4, Target(alpha=0.5), draft_ids=(0, 2))
    drafts = sampled_chain(world, 2) if rule == "sampled" else greedy_chain(world, 2)
    assert error(world, 3, drafts, rule) < EXACT


def test_alpha_zero_is_plain_speculative_decoding():
    world = World(4, Target(alpha=0.0))
    assert error(world, 3, sampled_chain(world, 2), "sampled") < EXACT
    law = emitted_law(4, 1, sampled_chain(world, 1), world.rows, "sampled")
    np.testing.assert_allclose(law, world.p(()), atol=EXACT)


def delayed(target, draft, noise):
    """SCD: the row after the last draft comes later, for the rows that accepted everything."""
    verdict = verify(target[:, :-1], draft, noise)
    whole = verdict.accepted == draft.nodes
    assert (verdict.tokens[whole, -1] == -1).all() and (verdict.tokens[~whole].max(1).values >= 0).all()
    late = verify(target[:, -1:], Draft.empty(len(target), "cpu"), Uniforms(final=noise.final[:, -1:]))
    verdict.tokens[:, -1] = torch.where(whole, late.tokens[:, 0], verdict.tokens[:, -1])
    return verdict


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
def test_delayed_drafting_is_lossless(rule):
    world = World(4, TARGETS["alpha .3"])
    drafts = sampled_chain(world, 2) if rule == "sampled" else greedy_chain(world, 2)
    assert error(world, 3, drafts, rule, judge=delayed) < EXACT


def test_an_early_stop_that_keeps_the_token_or_comes_before_it_is_lossless():
    world = World(3, TARGETS["alpha .3"])
    after = sampled_chain(world, 2, stop=lambda law, token: law[token] < 0.4)
    before = sampled_chain(world, 2, stop=lambda law, token: law.max() < 0.6)
    for drafts in (after, before):
        assert sum(probability for probability, _ in drafts(())) == pytest.approx(1)
        assert error(world, 3, drafts, "sampled") < EXACT


@pytest.mark.parametrize("name", TARGETS)
def test_trees_of_deterministic_siblings_are_lossless(name):
    world = World(5, TARGETS[name])
    assert error(world, 3, top_tree(world), "deterministic", siblings=2) < EXACT


@pytest.mark.parametrize("name", TARGETS)
def test_trees_drawn_without_replacement_are_lossless(name):
    world = World(3, TARGETS[name])
    assert error(world, 3, siblings_without_replacement(world), "sampled", siblings=2) < EXACT


def test_siblings_drawn_with_replacement_are_lossless():
    world = World(3, TARGETS["alpha .3"])
    assert error(world, 2, siblings_with_replacement(world, 3), "sampled", siblings=3) < EXACT


def test_a_deterministic_draft_is_one_sampled_from_a_point_mass():
    world = World(4, TARGETS["alpha .3"])

    def point_masses(prefix):
        (probability, tree), *_ = greedy_chain(world, 2)(prefix)
        return [(probability, [Node(n.token, n.parent, np.eye(4)[n.token]) for n in tree])]

    laws = [
        emitted_law(4, 3, drafts, world.rows, rule)
        for drafts, rule in ((greedy_chain(world, 2), "deterministic"), (point_masses, "sampled"))
    ]
    np.testing.assert_allclose(*laws, atol=1e-12)


def test_the_deterministic_rule_is_lossless_for_sampled_drafts_too():
    world = World(3, TARGETS["alpha .3"])
    assert error(world, 3, sampled_chain(world, 2), "deterministic") < EXACT


# ---- how much is accepted --------------------------------------------------------------------------------------------


def first_acceptance(world: World, drafts, rule: str, siblings: int = 1) -> float:
    """Probability that some child of the root is accepted, by the same enumeration."""
    weights, trees = zip(*drafts(()), strict=True)
    target = target_rows([()] * len(trees), list(trees), world.rows)
    total = 0.0
    for tokens, probability in outcomes(target, batch_drafts(list(trees), world.vocab, rule), siblings):
        if tokens.shape[1] > 1:
            total += float(np.dot(weights, probability))
    return total


@pytest.mark.parametrize("name", TARGETS)
def test_acceptance_is_one_minus_tv_or_the_mass_of_the_siblings(name):
    world = World(5, TARGETS[name])
    pi, e = torch.from_numpy(world.rows(())), torch.from_numpy(world.e(()))
    sampled = first_acceptance(world, sampled_chain(world, 1), "sampled")
    assert sampled == pytest.approx(acceptance(pi, e.log()).item(), abs=1e-12)
    best = e.argsort(descending=True)
    assert first_acceptance(world, greedy_chain(world, 1), "deterministic") == pytest.approx(pi[best[0]].exp().item())
    both = first_acceptance(world, top_tree(world), "deterministic", siblings=2)
    assert both == pytest.approx(pi[best[:2]].exp().sum().item(), abs=1e-12)


# ---- shared noise ----------------------------------------------------------------------------------------------------


def random_rows(batch: int, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, vocab, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


def random_tree(batch: int, nodes: int, vocab: int, seed: int = 0) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    parents = torch.stack([torch.randint(-1, node, (batch,), generator=generator) for node in range(nodes)], dim=1)
    return Draft(tokens, parents, torch.rand(batch, nodes, generator=generator) < 0.9, "shared_noise")


def noise(batch: int, positions: int, vocab: int) -> torch.Tensor:
    keys = torch.tensor([row_key(0, str(row), 0) for row in range(batch)])
    return gumbel(keys, torch.arange(positions).expand(batch, -1), vocab)


@pytest.mark.parametrize("linear", [True, False])
def test_shared_noise_emits_what_the_noise_picks_whatever_the_draft(linear):
    batch, nodes, vocab = 300, 5, 3
    target, g, tree = (
        random_rows(batch, nodes + 1, vocab),
        noise(batch, nodes + 1, vocab),
        random_tree(batch, nodes, vocab),
    )
    if linear:
        tree = Draft.chain(tree.tokens, tree.valid, "shared_noise")
    verdict = verify(target, tree, Uniforms(gumbel=g))
    for row in range(batch):
        place, emitted = -1, []
        while True:
            emitted.append((target[row, place + 1] + g[row, len(emitted)]).argmax().item())
            children = [
                node
                for node in range(nodes)
                if tree.valid[row, node] and tree.parents[row, node] == place and tree.tokens[row, node] == emitted[-1]
            ]
            if not children:
                break
            place = children[0]
        assert verdict.accepted[row] == len(emitted) - 1
        assert verdict.tokens[row].tolist() == emitted + [-1] * (nodes + 1 - len(emitted))
    assert verdict.accepted.unique().numel() > 2, "the case is not trivial"


def test_shared_noise_over_several_rounds_is_one_text_for_every_proposer():
    world, g, length = World(5, TARGETS["alpha .3"]), noise(1, 60, 5), 40

    def text_of(drafts) -> tuple[list[int], int]:
        text, rounds = [], 0
        while len(text) < length:
            tree = drafts(tuple(text[-3:]))[0][1] if drafts else []
            target = target_rows([tuple(text[-3:])], [tree], lambda prefix: world.rows(prefix[-3:]))
            draft = batch_drafts([tree], 5, "shared_noise")
            verdict = verify(target, draft, Uniforms(gumbel=g[:, len(text) :]))
            text += verdict.tokens[0, : verdict.accepted + 1].tolist()
            rounds += 1
        return text[:length], rounds

    plain, rounds = text_of(None)
    assert rounds == length
    for proposer in (greedy_chain(world, 3), ngram_like(world, 3), top_tree(world)):
        text, rounds = text_of(proposer)
        assert text == plain and rounds < length


def test_shared_noise_acceptance_follows_its_formula_and_bounds():
    world, draws = World(5, TARGETS["alpha .3"]), 200_000
    pi, e = np.exp(world.rows(())), world.e(())
    formula = sum(1 / np.maximum(pi / pi[x], e / e[x]).sum() for x in range(5))
    tv = np.abs(pi - e).sum() / 2
    assert (1 - tv) / (1 + tv) <= formula <= 1 - tv
    keys = torch.tensor([row_key(3, "x", 0)])
    g = gumbel(keys, torch.arange(draws)[None], 5)[0]
    tokens = (torch.from_numpy(np.log(e)) + g).argmax(-1)
    target = torch.from_numpy(world.rows(())).expand(draws, 2, -1)
    verdict = verify(
        target, Draft.chain(tokens[:, None], rule="shared_noise"), Uniforms(gumbel=g[:, None].expand(-1, 2, -1))
    )
    taken = (verdict.accepted > 0).double().mean().item()
    assert abs(taken - formula) < 5 * (formula * (1 - formula) / draws) ** 0.5
    # and for a deterministic draft the acceptance of the deterministic rule
    best = torch.full((draws, 1), int(e.argmax()))
    verdict = verify(target, Draft.chain(best, rule="shared_noise"), Uniforms(gumbel=g[:, None].expand(-1, 2, -1)))
    expected = pi[e.argmax()]
    assert (
        abs((verdict.accepted > 0).double().mean().item() - expected) < 5 * (expected * (1 - expected) / draws) ** 0.5
    )


# ---- temperature 0, shapes, batches ----------------------------------------------------------------------------------


def test_choices_accept_a_draft_while_it_equals_them():
    chain = Draft.chain(torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6]]))
    verdict = verify(torch.tensor([[4, 5, 6, 7]] * 3), chain, None)
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.tokens.tolist() == [[4, 5, 6, 7], [4, 5, -1, -1], [4, -1, -1, -1]]
    assert [row[: count + 1] for row, count in zip(verdict.path.tolist(), [3, 1, 0], strict=True)] == [
        [0, 1, 2, 3],
        [0, 1],
        [0],
    ]


def test_padding_in_a_draft_is_never_accepted():
    valid = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    verdict = verify(torch.tensor([[0, 0, 0, 0]] * 3), Draft.chain(torch.zeros(3, 3, dtype=torch.int64), valid), None)
    assert verdict.accepted.tolist() == [1, 0, 3]


def test_choices_walk_a_tree():
    #        root -> 3 (node 0) -> 5 (node 2);  root -> 4 (node 1) -> 6 (node 3) -> 7 (node 4)
    tree = Draft(torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[-1, -1, 0, 1, 3]]), torch.ones(1, 5, dtype=torch.bool))
    verdict = verify(torch.tensor([[4, 5, 6, 0, 7, 2]]), tree, None)
    assert verdict.accepted.item() == 3 and verdict.tokens[0, :4].tolist() == [4, 6, 7, 2]
    assert verdict.path[0, :4].tolist() == [0, 2, 4, 5]


def test_a_missing_last_row_is_asked_for_only_where_everything_passed():
    chain = Draft.chain(torch.tensor([[4, 5], [4, 9]]))
    verdict = verify(torch.tensor([[4, 5], [4, 5]]), chain, None)
    assert verdict.accepted.tolist() == [2, 1] and verdict.tokens.tolist() == [[4, 5, -1], [4, 5, -1]]


def sampled_round(batch: int, seed: int) -> tuple[torch.Tensor, Draft, Uniforms]:
    generator = torch.Generator().manual_seed(seed)
    target, probs = random_rows(batch, 5, 6, seed), random_rows(batch, 4, 6, seed + 1).exp()
    tokens = torch.stack([torch.multinomial(probs[:, node], 1, generator=generator)[:, 0] for node in range(4)], dim=1)
    coins = Uniforms(
        accept=torch.rand(batch, 5, 4, generator=generator, dtype=torch.float64),
        final=torch.rand(batch, 5, generator=generator, dtype=torch.float64),
    )
    return target, Draft.chain(tokens, rule="sampled", probs=probs), coins


@pytest.mark.parametrize("rule", ["sampled", "deterministic", "shared_noise", "choices"])
def test_batched_rows_equal_single_rows(rule):
    target, draft, coins = sampled_round(64, 0)
    if rule == "choices":
        target = target.argmax(-1)
    if rule == "shared_noise":
        coins = Uniforms(gumbel=noise(64, 5, 6))
    if rule != "sampled":
        draft = Draft.chain(draft.tokens, draft.valid, "shared_noise" if rule == "shared_noise" else "deterministic")
    whole = verify(target, draft, coins)
    assert whole.accepted.unique().numel() > 1
    for row in range(64):
        one = slice(row, row + 1)
        probs = None if draft.probs is None else draft.probs[one]
        part = Draft.chain(draft.tokens[one], draft.valid[one], draft.rule, probs)
        mine = Uniforms(*(None if table is None else table[one] for table in (coins.accept, coins.final, coins.gumbel)))
        single = verify(target[one], part, mine)
        assert single.accepted == whole.accepted[row]
        assert torch.equal(single.tokens[0], whole.tokens[row]) and torch.equal(single.path[0], whole.path[row])


def test_uniforms_of_children_that_are_not_visited_do_not_matter():
    target, draft, coins = sampled_round(200, 1)
    before = verify(target, draft, coins)
    others = Uniforms(accept=torch.rand_like(coins.accept), final=torch.rand_like(coins.final))
    for row, accepted in enumerate(before.accepted.tolist()):
        others.accept[row, : accepted + 1, 0] = coins.accept[row, : accepted + 1, 0]
        others.final[row, accepted] = coins.final[row, accepted]
    after = verify(target, draft, others)
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.accepted, after.accepted)


def test_every_child_of_a_tree_has_its_own_coin():
    """``accept[:, d, s]`` decides the s-th visited child at depth d + 1, however many were visited above."""
    #  root -> 0 (node 0), 1 (node 1), 2 (node 2);  node 1 -> 0 (node 3), 1 (node 4)
    tree = Draft(
        torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[-1, -1, -1, 1, 1]]), torch.ones(1, 5, dtype=torch.bool)
    )
    target = torch.full((1, 6, 4), 0.25, dtype=torch.float64).log()
    for yes, emitted in [([(0, 0)], [0]), ([(0, 2)], [2]), ([(0, 1), (1, 0)], [1, 0]), ([(0, 1), (1, 1)], [1, 1])]:
        coins = Uniforms(torch.full((1, 3, 5), torch.inf).double(), torch.full((1, 6), 0.9).double())
        for depth, sibling in yes:
            coins.accept[0, depth, sibling] = 0.0
        verdict = verify(target, tree, coins)
        assert verdict.tokens[0, : verdict.accepted].tolist() == emitted


def test_drafts_equal_to_the_target_always_pass():
    target, draft, coins = sampled_round(200, 2)
    draft = Draft.chain(draft.tokens, rule="sampled", probs=target[:, :4].exp())
    coins.accept.fill_(1 - 2.0**-53)
    assert (verify(target, draft, coins).accepted == 4).all()


def test_nothing_left_by_rounding_is_drawn_from_the_target():
    """Target and proposal agree, but a hair of rounding rejects: the residual has no mass."""
    target = torch.tensor([[[0.5, 0.5, 0.0]] * 2], dtype=torch.float64).log()
    chain = Draft.chain(
        torch.tensor([[0]]), rule="sampled", probs=torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64)
    )
    for final, token in ((0.2, 0), (0.8, 1)):
        coins = Uniforms(
            accept=torch.full((1, 2, 1), 1.0, dtype=torch.float64), final=torch.full((1, 2), final, dtype=torch.float64)
        )
        verdict = verify(target, chain, coins)
        assert verdict.accepted.item() == 0 and verdict.tokens[0, 0].item() == token


# ---- combinations that do not fit ------------------------------------------------------------------------------------


def test_sampled_drafts_at_temperature_zero_raise():
    _, draft, coins = sampled_round(2, 0)
    with pytest.raises(ValueError, match="at temperature 0 drafts must be deterministic"):
        verify(torch.zeros(2, 5, dtype=torch.int64), draft, coins)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_number_of_target_rows_that_does_not_fit_raises(rows):
    _, draft, coins = sampled_round(2, 0)
    with pytest.raises(ValueError, match=f"4 drafted nodes need 5 target rows, got {rows}"):
        verify(random_rows(2, rows, 6), draft, coins)


def test_an_empty_draft_needs_the_root_s_row():
    with pytest.raises(ValueError, match="0 drafted nodes need 1 target rows, got 0"):
        verify(random_rows(2, 0, 6), Draft.empty(2, "cpu"), Uniforms(final=torch.rand(2, 1, dtype=torch.float64)))


def test_a_tree_without_a_coin_for_every_sibling_raises():
    tree = random_tree(2, 4, 6)
    tree.rule = "deterministic"
    _, _, coins = sampled_round(2, 0)
    verify(random_rows(2, 5, 6), tree, coins)
    coins.accept = coins.accept[:, :, :1]
    with pytest.raises(ValueError, match="a tree of 4 nodes needs as many coins a depth, got 1"):
        verify(random_rows(2, 5, 6), tree, coins)


# ---- negative controls: one fault each, and the enumeration must see it ----------------------------------------------

STRONG = World(4, Target(alpha=0.5))


def test_the_controls_are_lossless_without_their_fault():
    assert error(STRONG, 3, sampled_chain(STRONG, 2), "sampled") < EXACT


def test_control_argmax_drafts_declared_sampled():
    assert error(STRONG, 3, greedy_chain(STRONG, 2, with_law=True), "sampled") > VISIBLE


def test_control_bonus_token_from_the_expert():
    def bonus_from_p(prefixes, trees, rows):
        table = target_rows(prefixes, trees, rows)
        for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
            table[row, -1] = torch.from_numpy(np.log(STRONG.p((*prefix, *(node.token for node in tree)))))
        return table

    assert error(STRONG, 3, sampled_chain(STRONG, 2), "sampled", table=bonus_from_p) > VISIBLE
    short = emitted_law(4, 1, sampled_chain(STRONG, 2), STRONG.rows, "sampled", table=bonus_from_p)
    np.testing.assert_allclose(short, np.exp(STRONG.rows(())), atol=EXACT, err_msg="seen only past gamma tokens")


def test_control_residual_from_the_expert():
    kept = {}

    def remember_expert(prefixes, trees, rows):
        kept["p"] = target_rows(prefixes, trees, lambda prefix: np.log(STRONG.p(prefix)))
        return target_rows(prefixes, trees, rows)

    def residual_from_p(target, draft, coins):
        """Rejected rows draw again: the shipped verifier rejects the same node, given the expert's row for pi's."""
        verdict = verify(target, draft, coins)
        row, node = torch.arange(len(target)), verdict.accepted.clamp_max(draft.nodes - 1)
        chain = Draft.chain(draft.tokens[row, node, None], rule="sampled", probs=draft.probs[row, node, None])
        reject = Uniforms(torch.full((len(row), 1, 1), torch.inf).double(), coins.final[row, node, None])
        again = verify(kept["p"][row % len(kept["p"]), node, None], chain, reject).tokens[:, 0]
        rejected = verdict.accepted < draft.nodes
        verdict.tokens[row, node] = torch.where(rejected, again, verdict.tokens[row, node])
        return verdict

    drafts = sampled_chain(STRONG, 2)
    assert error(STRONG, 3, drafts, "sampled", judge=residual_from_p, table=remember_expert) > VISIBLE


@pytest.mark.parametrize("fault", ["sign of alpha", "models swapped", "amateur one token late"])
def test_control_wrong_target_rows(fault):
    def rows(prefix):
        p, q = STRONG.p(prefix), STRONG.q(prefix)
        target = STRONG.target
        if fault == "sign of alpha":
            target = Target(weights=(1 - target.alpha, target.alpha))
        elif fault == "models swapped":
            p, q = q, p
        else:
            q = STRONG.q(prefix[:-1])
        return target_log_probs([torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q))], target).numpy()

    assert error(STRONG, 3, sampled_chain(STRONG, 2), "sampled", rows=functools.cache(rows)) > VISIBLE


def test_control_a_sampled_token_dropped_because_of_what_it_is():
    world = World(3, TARGETS["alpha .3"])
    drafts = sampled_chain(world, 2, stop=lambda law, token: law[token] < 0.4, drop=True)
    assert sum(probability for probability, _ in drafts(())) == pytest.approx(1)
    assert error(world, 3, drafts, "sampled") > VISIBLE


def test_control_siblings_sorted_after_they_were_drawn():
    world = World(3, TARGETS["alpha .3"])

    def by_probability(law, first, second):
        return (first, second) if law[first] >= law[second] else (second, first)

    assert error(world, 3, siblings_without_replacement(world, by_probability), "sampled", siblings=2) > VISIBLE


def test_control_siblings_that_share_a_coin(monkeypatch):
    """The fault that a loop with one coin a depth would have had."""
    world = World(5, TARGETS["alpha .3"])

    def one_coin(target, draft, coins):
        shared = coins.accept[:, :, :1].expand(-1, -1, draft.nodes)
        return verify(target, draft, Uniforms(accept=shared, final=coins.final))

    assert error(world, 3, top_tree(world), "deterministic", siblings=2, judge=one_coin) > VISIBLE


def test_control_a_residual_that_is_not_taken(monkeypatch):
    """After a rejection the draw comes from the target itself."""
    shipped = module.inverse_cdf
    rows = {}

    def remember(prefixes, trees, law):
        rows["first"] = target_rows(prefixes, trees, law)[:, 0].exp()
        return target_rows(prefixes, trees, law)

    monkeypatch.setattr(
        module,
        "inverse_cdf",
        lambda weights, coin: shipped(rows["first"].repeat(len(coin) // len(rows["first"]), 1), coin),
    )
    assert error(STRONG, 1, sampled_chain(STRONG, 1), "sampled", table=remember) > VISIBLE
