"""Replay gives the rounds that decoding makes, without a pass of expert or amateur."""

import pytest
import torch
from naive import some_prompts, tiny_head
from tiny import KINDS, tiny_causal_lm, tiny_tokenizer

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.replay import Rollout, matching_drafts, replay, walk_rounds

REAL = 5
"""So few real ids that an untrained head often guesses the next one; all others are padding."""
PROMPTS = [Prompt(prompt.id, [token % REAL for token in prompt.ids]) for prompt in some_prompts(4)]


class Without03:
    """A draft vocabulary that lacks ids 0 and 3."""

    def __init__(self, width: int):
        self.t2d = torch.arange(width) % 3 > 0
        self.d2t = self.t2d.nonzero()[:, 0] - torch.arange(int(self.t2d.sum()))


@pytest.fixture(scope="module")
def pairs():
    def model(kind, seed, layers):
        return LanguageModel(tiny_causal_lm(kind, seed, layers, torch.float64), vocab=REAL)

    return {kind: Pair(model(kind, 0, 8), model(kind, 100, 3), tiny_tokenizer()) for kind in KINDS}


def lively_head(pair: Pair, vocabulary=None):
    """A head with large random weights: its drafts vary with the text."""
    head = tiny_head(pair, seed=2, vocabulary=vocabulary)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith("proj.weight") or name == "fc.weight":
                weight.mul_(12)
    return head


def rollout_of(pair: Pair, prompt: Prompt, answer: list[int]) -> Rollout:
    ids = torch.tensor(prompt.ids + answer)
    return Rollout(ids, len(prompt.ids), pair.expert.forward_full(ids[None], features=True).features[0])


def rounds_of(generation) -> list[tuple[int, int, int]]:
    return [(entry.drafted, entry.accepted, entry.emitted) for entry in generation.rounds]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_decoding_round_by_round(pairs, kind, reduced, alpha):
    pair = pairs[kind]
    head = lively_head(pair, vocabulary=Without03(pair.expert.config.vocab_size) if reduced else None)
    accepted = set()
    for length, gamma, stop in ((22, 4, ()), (23, 3, (3,)), (17, 1, (1, 2)), (1, 3, ()), (2, 3, ())):
        settings = Settings(Target(alpha=alpha, temperature=0.0), max_new_tokens=length, gamma=gamma, stop_ids=stop)
        for prompt, generation in zip(
            PROMPTS, decode(assemble("dcd_eagle3", pair, head), PROMPTS, settings, max_batch=4), strict=True
        ):
            rollout = rollout_of(pair, prompt, generation.ids)
            found = replay(head, pair.expert.embedding, rollout, gamma, vocab=REAL)
            assert found == rounds_of(generation)
            assert sum(emitted for _, _, emitted in found) == len(generation.ids) - 1
            accepted |= {count for _, count, _ in found}
    assert len(accepted) > 2, "rounds of several lengths"


def test_padded_ids_are_left_out_only_when_asked(pairs):
    pair = pairs["qwen3"]
    head = lively_head(pair)
    rollout = rollout_of(pair, PROMPTS[2], [index % REAL for index in range(20)])
    whole = matching_drafts(head, pair.expert.embedding, rollout, 3)
    real = matching_drafts(head, pair.expert.embedding, rollout, 3, vocab=REAL)
    assert whole.shape == real.shape == (19,) and whole.sum() < real.sum()


def test_drafts_past_the_end_of_the_text_never_agree(pairs):
    pair = pairs["smol"]
    rollout = rollout_of(pair, PROMPTS[1], [0, 1, 2, 3, 4, 0, 1])
    agreed = matching_drafts(lively_head(pair), pair.expert.embedding, rollout, 5, vocab=REAL)
    assert (agreed <= torch.arange(6, 0, -1)).all() and len(agreed) == 6


@pytest.mark.parametrize("answer, rounds", [([2], 0), ([2, 3], 1)])
def test_the_shortest_texts(pairs, answer, rounds):
    pair = pairs["smol"]
    assert len(replay(lively_head(pair), pair.expert.embedding, rollout_of(pair, PROMPTS[1], answer), 3)) == rounds


@pytest.mark.parametrize(
    "agreed, gamma, rounds",
    [
        ([], 3, []),
        ([0], 3, [(3, 0, 1)]),
        ([1], 3, [(3, 1, 1)]),
        ([0, 0, 0], 3, [(3, 0, 1)] * 3),
        ([3, 9, 9, 9, 2, 9, 0], 3, [(3, 3, 4), (3, 2, 3)]),
        ([3, 9, 9, 9, 1, 9, 0], 3, [(3, 3, 4), (3, 1, 2), (3, 0, 1)]),
        ([2, 9, 9, 2, 1], 5, [(5, 2, 3), (5, 2, 2)]),
    ],
)
def test_walking_the_rounds(agreed, gamma, rounds):
    """A round at root k emits its agreeing drafts and one more token, or what is left of the text."""
    assert walk_rounds(agreed, gamma) == rounds
