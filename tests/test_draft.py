"""Drafts: what a tree is, and what cannot be built."""

import pytest
import torch

from dcd_core.draft import Draft

TOKENS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
PARENTS = torch.tensor([[-1, 0, 1, 2], [-1, -1, 0, 2]])
VALID = torch.ones(2, 4, dtype=torch.bool)


def test_a_chain_is_a_tree_with_one_path():
    chain = Draft.chain(TOKENS)
    assert chain.linear and chain.nodes == 4 and chain.rule == "deterministic" and chain.valid.all()
    assert chain.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert chain.depths().tolist() == [[1, 2, 3, 4]] * 2
    assert torch.equal(chain.ancestor_mask(), torch.ones(5, 5).tril().bool().expand(2, 5, 5))


def test_depths_and_ancestors_of_a_tree():
    tree = Draft(TOKENS, PARENTS, VALID)
    assert not tree.linear
    assert tree.depths().tolist() == [[1, 2, 3, 4], [1, 1, 2, 3]]
    seen = [[column.nonzero()[:, 0].tolist() for column in row] for row in tree.ancestor_mask()]
    assert seen[0] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen[1] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]


@pytest.mark.parametrize("rule, carried", [("deterministic", "deterministic"), ("shared_noise", "shared_noise")])
def test_an_empty_draft(rule, carried):
    empty = Draft.empty(3, "cpu", rule)
    assert empty.nodes == 0 and empty.linear and empty.rule == carried and empty.tokens.shape == (3, 0)
    assert empty.ancestor_mask().tolist() == [[[True]]] * 3 and empty.depths().shape == (3, 0)


def test_an_empty_sampled_draft_has_nothing_that_was_sampled():
    assert Draft.empty(1, "cpu", "sampled").rule == "deterministic"


def test_a_rule_must_fit_what_the_draft_carries():
    probs = torch.ones(2, 4, 9) / 9
    with pytest.raises(ValueError, match="a sampled draft needs probs"):
        Draft.chain(TOKENS, rule="sampled")
    for rule in ("deterministic", "shared_noise"):
        with pytest.raises(ValueError, match=f"a {rule} draft must not carry probs"):
            Draft.chain(TOKENS, rule=rule, probs=probs)
    with pytest.raises(ValueError, match="rule 'greedy' is unknown; choose one of deterministic, sampled, shared"):
        Draft.chain(TOKENS, rule="greedy")
    assert Draft.chain(TOKENS, rule="sampled", probs=probs).probs is probs
