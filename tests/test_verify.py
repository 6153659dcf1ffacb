"""The verifier as a function: shared noise, temperature 0, trees, batches, and what it refuses.

That it is lossless is test_lossless.py's.
"""

import numpy as np
import pytest
import torch

from dcd_core.draft import Draft
from dcd_core.sampling import gumbel, row_key
from dcd_core.verify import Uniforms, verify
from diagnostics.certificate.enumeration import batch_drafts, target_rows
from diagnostics.certificate.proposals import (
    TARGETS,
    World,
    greedy_chain,
    ngram_like,
    top_tree,
)

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


@pytest.mark.parametrize("linear", [True, False])
def test_laws_on_a_drafter_s_own_ids_are_those_on_the_whole_vocabulary(linear):
    generator = torch.Generator().manual_seed(3)
    batch, nodes, vocab, ids = 200, 4, 9, torch.tensor([1, 2, 5, 8])
    target = random_rows(batch, nodes + 1, vocab, 4)
    few = random_rows(batch, nodes, len(ids), 5).exp()
    tokens = ids[torch.multinomial(few.flatten(0, 1), 1, generator=generator).view(batch, nodes)]
    parents = torch.arange(-1, nodes - 1) if linear else torch.tensor([-1, -1, 0, 1])
    valid = torch.rand(batch, nodes, generator=generator) < 0.9
    whole = torch.zeros(batch, nodes, vocab, dtype=few.dtype)
    whole[..., ids] = few
    coins = Uniforms(
        torch.rand(batch, nodes + 1, nodes, generator=generator).double(),
        torch.rand(batch, nodes + 1, generator=generator).double(),
    )
    drafts = [
        Draft(tokens, parents.expand(batch, -1), valid, "sampled", probs, linear=linear, ids=columns)
        for probs, columns in ((few, ids), (whole, None))
    ]
    short, long = (verify(target, draft, coins) for draft in drafts)
    assert torch.equal(short.tokens, long.tokens) and torch.equal(short.path, long.path)
    assert 0 < int(short.accepted.sum()) < batch * nodes


@pytest.mark.parametrize("linear", [True, False])
def test_nothing_left_of_refused_point_masses_is_drawn_from_the_target(linear):
    """A coin of exactly 1 refuses even a token of probability 1: there is nothing else to write."""
    target = torch.tensor([[[0.0, -torch.inf, -torch.inf]] * 2], dtype=torch.float64)
    draft = Draft(torch.tensor([[0]]), torch.tensor([[-1]]), torch.tensor([[True]]), linear=linear)
    coins = Uniforms(torch.ones(1, 2, 1).double(), torch.full((1, 2), 0.5).double())
    verdict = verify(target, draft, coins)
    assert verdict.accepted.tolist() == [0] and verdict.tokens.tolist() == [[0, -1]]
