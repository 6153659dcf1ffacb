"""Method auto: what it drafts changes from round to round, and nobody can tell from the text."""

import pytest
import torch
from naive import greedy_cd, near_pair, some_prompts, tiny_head
from tiny import VOCAB

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.drafters.auto import AutoDrafter
from dcd_core.drafters.controller import PAUSES, TRIAL, Controller
from dcd_core.drafters.protocol import Accepted
from dcd_core.errors import UserError
from dcd_core.methods import assemble
from dcd_core.pass_times import PassTimes, measure
from diagnostics.certificate.restless import TIMES as FLAT
from diagnostics.certificate.restless import Restless

PROMPTS = some_prompts(5)
LENGTH = 18
STEEP = PassTimes((1, 8), (1.0, 4.5), (0.4, 1.8), (0.05, 0.2))
"""A CPU's in a batch: half a pass more for every token."""


@pytest.fixture(scope="module")
def pair():
    return near_pair("llama3", 0.02)


def made(pair, head=True, controller=None):
    """The method, with that controller."""
    method = assemble("auto", pair, tiny_head(pair) if head else None)
    method.drafter.controllers = [controller or Controller(FLAT, head)]
    return method


def settings(temperature=0.0, **changes) -> Settings:
    changes = {"max_new_tokens": LENGTH, "seed": 2} | changes
    return Settings(Target(alpha=0.7, temperature=temperature), **changes)


def texts(done) -> list[list[int]]:
    return [generation.ids for generation in done]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("kind", [Restless, Controller])
def test_greedy_text_is_that_of_vanilla_contrastive_decoding(pair, kind, head, batch):
    method = made(pair, head, kind(FLAT, head))
    done = decode(method, PROMPTS, settings(), max_batch=batch)
    assert texts(done) == [greedy_cd(pair, prompt.ids, 0.7, LENGTH) for prompt in PROMPTS]
    if kind is Restless and head:  # drafts of several sizes, and rounds without one
        assert {record.drafted > record.expert_passes for made in done for record in made.rounds} == {True, False}


@pytest.mark.parametrize("kind", [Restless, Controller])
def test_sampled_text_depends_on_the_seed_alone(pair, kind):
    """The usual rule is shared noise: other pass times, other batches, the same text, and that of cd.""" ""
    stops = tuple(range(0, VOCAB, 13))
    plain = settings(1.0, rule="shared_noise", stop_ids=stops)
    expected = texts(decode(assemble("cd", pair), PROMPTS, plain))
    for times, batch in ((FLAT, 1), (STEEP, 3)):
        found = decode(made(pair, True, kind(times, True)), PROMPTS, settings(1.0, stop_ids=stops), max_batch=batch)
        assert texts(found) == expected
    other = decode(made(pair), PROMPTS, settings(1.0, stop_ids=stops, seed=3))
    assert texts(other) != expected


def test_the_same_times_give_the_same_rounds(pair):
    runs = [decode(made(pair), PROMPTS, settings(1.0)) for _ in range(2)]
    first, second = ([[(r.drafted, r.accepted, r.expert_passes) for r in made.rounds] for made in run] for run in runs)
    assert first == second


def test_what_rounds_without_a_draft_left_unread_is_read_later(pair):
    """The head's state after rounds that it slept through is the one of a head that read every round."""
    restless, awake = made(pair, True, Restless(FLAT, True)), made(pair, True, Restless(FLAT, True))
    planned = AutoDrafter.planned

    def reading(self, shape):
        self.inner._read_accepted()
        return planned(self, shape)

    with pytest.MonkeyPatch.context() as patch:
        done = decode(restless, PROMPTS, settings(), max_batch=3)
        patch.setattr(AutoDrafter, "planned", reading)
        same = decode(awake, PROMPTS, settings(), max_batch=3)
    for one, two in zip(done, same, strict=True):
        assert [(r.drafted, r.accepted) for r in one.rounds] == [(r.drafted, r.accepted) for r in two.rounds]


def test_rounds_are_joined_row_by_row():
    tokens = torch.tensor([[1, 2, -1], [3, -1, -1]])
    one = Accepted(tokens, [2, 1], [[1, 2], [3]], tokens[..., None].float())
    two = Accepted(tokens + 10, [1, 3], [[11], [13, 9, 9]], tokens[..., None].float() + 10)
    both = one.followed_by(two)
    assert both.counts == [3, 4] and both.host_tokens == [[1, 2, 11], [3, 13, 9, 9]]
    assert both.tokens[0, :3].tolist() == [1, 2, 11] and both.tokens[1].tolist() == [3, 13, 9, 9]
    assert torch.equal(both.features[..., 0].long(), both.tokens)
    assert one.first([0, 1]).followed_by(two).host_tokens == [[11], [3, 13, 9, 9]]


# ---- what the controller decides ------------------------------------------------------------------------------------


def rounds(controller, count, emitted, rows=1, chances=(), expected=2.0) -> list[str]:
    """Sources of that many rounds, each of which emits so much when the head drafts, and one token a row otherwise."""
    found = []
    for _ in range(count):
        source = controller.choose(list(chances), rows)
        found.append(source)
        drafted = {"expected": expected, "nodes": 5, "levels": 3, "width": 4} if source == "head" else {}
        controller.learn(source, rows, emitted if source == "head" else rows, **drafted)
    return found


def test_a_head_that_is_never_right_is_soon_left_out_and_seldom_tried():
    found = rounds(Controller(FLAT, True), 200, emitted=1)
    assert found[:TRIAL] == ["head"] * TRIAL and found.count("head") <= TRIAL + 8
    tries = [place for place, source in enumerate(found) if source == "head"]
    assert max(later - one for one, later in zip(tries, tries[1:], strict=False)) > 4 * PAUSES[0]


def test_a_head_that_is_right_stays_and_comes_back():
    controller = Controller(FLAT, True)
    assert set(rounds(controller, 50, emitted=3)) == {"head"}
    assert rounds(controller, 80, emitted=1).count("none") > 40
    assert rounds(controller, 300, emitted=4)[-50:] == ["head"] * 50


def test_a_batch_whose_passes_cost_by_the_token_stops_drafting():
    controller = Controller(STEEP, True)
    assert rounds(controller, 60, emitted=10, rows=8).count("none") > 45
    flat = Controller(FLAT, True)
    assert rounds(flat, 60, emitted=20, rows=8).count("none") == 0


def test_more_nodes_where_they_are_likelier_or_cheaper():
    flat, steep = Controller(FLAT, True), Controller(STEEP, True)
    sure, unsure = [0.9, 0.8, 0.7, 0.6, 0.5], [0.4, 0.1, 0.01, 0.001, 0.0001]
    assert flat.nodes("head", sure, 1) == 5 > flat.nodes("head", unsure, 1) >= 1
    assert flat.nodes("head", unsure, 1) > steep.nodes("head", unsure, 1)
    assert flat.stop_below(1, 4) < steep.stop_below(1, 4)


def test_probabilities_that_do_not_come_true_are_believed_less():
    controller = Controller(FLAT, True)
    before = controller.nodes("head", [0.5, 0.2, 0.05, 0.02], 1)
    for _ in range(30):
        controller.learn("head", 1, 1, expected=2.0, nodes=4, levels=2, width=4)
    assert controller.by_source["head"].trust < 0.1
    assert controller.nodes("head", [0.5, 0.2, 0.05, 0.02], 1) < before


def test_a_text_that_copies_is_drafted_without_the_head():
    controller = Controller(FLAT, True)
    rounds(controller, 10, emitted=2)
    assert controller.choose([0.93, 0.9, 0.87, 0.84, 0.8], 1) == "ngram"
    assert controller.choose([0.25], 1) == "head"
    assert Controller(FLAT, False).choose([], 1) == "none"


def test_a_dear_amateur_is_asked_later():
    dear = PassTimes((1,), (1.0,), (1.0,), (0.05,))
    cheap = PassTimes((1,), (1.0,), (0.1,), (0.05,))
    assert 0 < Controller(cheap, True).theta(1) < Controller(dear, True).theta(1) < 1


def test_times_between_and_beyond_the_measured_sizes_are_linear():
    times = PassTimes((1, 3, 5), (1.0, 2.0, 6.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert [times.of("expert", tokens) for tokens in (1, 2, 4, 7)] == [1.0, 1.5, 4.0, 10.0]
    assert times.of("head", 100) == 1.0


def test_passes_are_measured_on_the_models(pair):
    found = measure([pair.expert, pair.amateur], tiny_head(pair))
    assert min(*found.expert, *found.others, *found.head) > 0
    assert measure([pair.expert]).head == (0.0,) * len(found.sizes)


@pytest.mark.parametrize("shape", [{"branch": 2, "nodes": 3}, {"gamma": 2}, {"branch": 3, "gamma": 2, "nodes": 4}])
def test_a_shape_that_is_given_bounds_the_drafts(pair, shape):
    method, asked = made(pair, True, Restless(FLAT, True)), settings(**shape)
    seen, propose = [], AutoDrafter.propose

    def watched(self, root, noise, shape):
        seen.append(propose(self, root, noise, shape))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoDrafter, "propose", watched)
        found = texts(decode(method, PROMPTS, asked, max_batch=3))
    assert found == [greedy_cd(pair, prompt.ids, 0.7, LENGTH) for prompt in PROMPTS]
    largest = asked.shape.budget if asked.branch > 1 else 8
    assert 1 < max(draft.nodes for draft in seen) <= largest
    assert max(int(draft.depths().max()) for draft in seen if draft.nodes) <= asked.gamma


def test_what_contradicts_the_method_is_refused(pair):
    with pytest.raises(UserError, match="auto"):
        decode(made(pair), PROMPTS[:1], settings(saving="lazy"))
    with pytest.raises(UserError, match="offers shared_noise"):
        decode(made(pair), PROMPTS[:1], settings(1.0, rule="deterministic"))
