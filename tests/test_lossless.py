"""The verifier is lossless: for every kind of draft, what it emits has exactly the target's law.

Exact enumeration (diagnostics/certificate/enumeration.py) of the shipped function over several rounds; every negative
control is the same code with one fault injected, and must be seen to fail.
"""

import functools

import numpy as np
import pytest
import torch

from dcd_core import sampling
from dcd_core import verify as module
from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import acceptance
from dcd_core.draft import Draft
from dcd_core.verify import Uniforms, verify
from diagnostics.certificate import faults
from diagnostics.certificate.enumeration import (
    Node,
    batch_drafts,
    delayed,
    emitted_law,
    outcomes,
    target_rows,
    two_step_draws,
)
from diagnostics.certificate.proposals import (
    EXACT,
    TARGETS,
    VISIBLE,
    World,
    error,
    greedy_chain,
    held_against_target,
    ngram_like,
    sampled_chain,
    siblings_with_replacement,
    siblings_without_replacement,
    top_tree,
)


@pytest.fixture(autouse=True)
def draws():
    """Every last draw is made in two steps, in blocks of two ids; the number of them is counted."""
    with two_step_draws(needed=False) as counted:
        yield counted


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


@pytest.mark.parametrize("name", TARGETS)
def test_shared_noise_is_lossless_for_every_kind_of_draft(name):
    world = World(3, TARGETS[name])
    for drafts in (sampled_chain(world, 2), greedy_chain(world, 3), ngram_like(world, 3), top_tree(world)):
        assert error(world, 3, drafts, "shared_noise") < EXACT


def test_branches_are_counted():
    """One draft of one token over three ids, first token only: accepted (the bonus is one of three) or not (one of the
    other two), after each of the drafts that may be proposed."""
    world = World(3, TARGETS["alpha .3"])
    found = held_against_target(world, 1, greedy_chain(world, 1), "deterministic")[1]
    assert found.branches == 3 + 2
    found = held_against_target(world, 1, greedy_chain(world, 1), "shared_noise")[1]
    assert found.branches == 3 + 2


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


# ---- the last draw in two steps, as over real vocabularies -----------------------------------------------------------

DRAWN = {
    "sampled chain": (sampled_chain, {"gamma": 1}, "sampled", 1),
    "sampled tree": (siblings_with_replacement, {}, "sampled", 2),
    "greedy chain": (greedy_chain, {"gamma": 1}, "deterministic", 1),
    "greedy tree": (top_tree, {}, "deterministic", 2),
}


def drawn_error(kind: str) -> float:
    proposer, options, rule, siblings = DRAWN[kind]
    world = World(4, TARGETS["alpha .3"])
    return error(world, 2, proposer(world, **options), rule, siblings)


@pytest.mark.parametrize("kind", DRAWN)
def test_every_kind_of_draft_ends_in_a_draw_in_two_steps(kind, draws):
    assert drawn_error(kind) < EXACT
    assert draws.call_count > 50


def test_shared_noise_draws_nothing(draws):
    world = World(3, TARGETS["alpha .3"])
    assert error(world, 3, greedy_chain(world, 2), "shared_noise") < EXACT
    assert not draws.called


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("fault", [faults.next_block, faults.sum_before_kept])
def test_control_a_fault_in_the_draw_in_two_steps(kind, fault):
    with faults.in_two_steps(fault)(), two_step_draws():
        assert drawn_error(kind) > VISIBLE


def test_faults_of_the_two_steps_do_not_touch_the_draw_in_one(monkeypatch):
    """Negative control of the control: where the vocabulary is drawn in one step, the fault is not found."""
    monkeypatch.setattr(sampling, "_SHORT", 2**14)
    with faults.in_two_steps(faults.next_block)():
        assert drawn_error("sampled chain") < EXACT


def test_an_enumeration_that_does_not_reach_the_two_steps_fails(monkeypatch):
    """The patch no longer applies: the threshold is taken from elsewhere, or the name of the branch is another."""
    with pytest.raises(ValueError, match="two steps"), two_step_draws():
        monkeypatch.setattr(sampling, "_SHORT", 2**14)
        drawn_error("sampled chain")
    monkeypatch.delattr(sampling, "_in_two_steps")
    with pytest.raises(AttributeError), two_step_draws():
        pass
