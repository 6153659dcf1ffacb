"""Replay gives the rounds that decoding makes, without a pass of expert or amateur, for every kind of head."""

import pytest
import torch
from naive import amateur_head, dual_input_head, some_prompts, tiny_head
from tiny import KINDS, tiny_causal_lm, tiny_tokenizer

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.drafters.dual import HeadPair
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.replay import Drafting, Rollout, draft_everywhere, matching_drafts, replay, teacher_forced, walk_rounds

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
    def model(kind, seed, layers, taps=None):
        return LanguageModel(tiny_causal_lm(kind, seed, layers, torch.float64), REAL, taps)

    return {kind: Pair(model(kind, 0, 8), model(kind, 100, 4, (1, 2, 3)), tiny_tokenizer()) for kind in KINDS}


def lively_head(pair: Pair, vocabulary=None, make=tiny_head, seed: int = 2):
    """A head with large random weights: its drafts vary with the text."""
    head = make(pair, seed=seed, vocabulary=vocabulary)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith("proj.weight") or name == "fc.weight":
                weight.mul_(12)
    return head


def lively_drafting(kind: str, pair: Pair, vocabulary, alpha: float) -> tuple[Drafting, dict]:
    """What drafts in a replay, and the method with the heads that draft so in the loop."""
    if kind == "dual_input":
        head = lively_head(pair, vocabulary, dual_input_head)
        return head, {"name": "cross_alpha", "head": head}
    head = lively_head(pair, vocabulary)
    if kind == "eagle3":
        return head, {"name": "dcd_eagle3", "head": head}
    second = lively_head(pair, None, amateur_head, seed=9)
    return HeadPair(head, second, alpha), {"name": "dual", "head": head, "amateur_head": second}


def rollout_of(pair: Pair, prompt: Prompt, answer: list[int], drafting: Drafting | None = None) -> Rollout:
    ids = torch.tensor(prompt.ids + answer)
    models = [pair.expert, pair.amateur] if isinstance(drafting, DualInputHead) else [pair.expert]
    features = [model.forward_full(ids[None], features=True).features[0] for model in models]
    return Rollout(ids, len(prompt.ids), torch.cat(features, dim=-1))


def rounds_of(generation) -> list[tuple[int, int, int]]:
    return [(entry.drafted, entry.accepted, entry.emitted) for entry in generation.rounds]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("drafts", ["eagle3", "dual_input", "pair"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_decoding_round_by_round(pairs, kind, drafts, reduced, alpha):
    pair = pairs[kind]
    vocabulary = Without03(pair.expert.config.vocab_size) if reduced else None
    drafting, parts = lively_drafting(drafts, pair, vocabulary, alpha)
    assert isinstance(drafting, Drafting)
    method, accepted = assemble(pair=pair, **parts), set()
    for length, gamma, stop in ((22, 4, ()), (23, 3, (3,)), (17, 1, (1, 2)), (1, 3, ()), (2, 3, ())):
        settings = Settings(Target(alpha=alpha, temperature=0.0), max_new_tokens=length, gamma=gamma, stop_ids=stop)
        for prompt, generation in zip(PROMPTS, decode(method, PROMPTS, settings, max_batch=4), strict=True):
            rollout = rollout_of(pair, prompt, generation.ids, drafting)
            found = replay(drafting, pair.expert.embedding, rollout, gamma, vocab=REAL)
            assert found == rounds_of(generation)
            assert sum(emitted for _, _, emitted in found) == len(generation.ids) - 1
            accepted |= {count for _, count, _ in found}
    assert len(accepted) > 2, "rounds of several lengths"


@pytest.mark.parametrize("drafts", ["eagle3", "dual_input", "pair"])
def test_a_teacher_forced_draft_is_the_decoder_s_after_the_same_text(pairs, drafts):
    """Step i of root k: the decoding step, fed the true features up to the root and true tokens afterwards."""
    pair = pairs["llama3"]
    drafting, _ = lively_drafting(drafts, pair, None, 0.5)
    rollout = rollout_of(pair, PROMPTS[2], [0, 1, 2, 3, 4, 0, 1], drafting)
    found = torch.stack(list(teacher_forced(drafting, pair.expert.embedding, rollout, 3, vocab=REAL)))
    assert found.shape == (3, 6, REAL)
    ids, embedding = rollout.ids, pair.expert.embedding
    with torch.no_grad():
        for root, place in enumerate(rollout.roots.tolist()):
            cache = drafting.new_cache(1, len(ids) + 3)
            hidden = drafting.fuse(rollout.features[None, :place])
            state = drafting.step(embedding(ids[None, 1 : place + 1]), hidden, cache)[:, -1:]
            cache.commit([place])
            for step in range(min(3, len(ids) - 1 - place)):
                if step:
                    state = drafting.step(embedding(ids[None, place + step, None]), state, cache)
                    cache.commit([1])
                logits = drafting.logits(state)[0, 0, :REAL]
                assert torch.allclose(found[step, root], logits, atol=1e-10, rtol=0)


def test_padded_ids_are_left_out_only_when_asked(pairs):
    pair = pairs["qwen3"]
    head = lively_head(pair)
    rollout = rollout_of(pair, PROMPTS[2], [index % REAL for index in range(20)])
    whole = matching_drafts(head, pair.expert.embedding, rollout, 3)
    real = matching_drafts(head, pair.expert.embedding, rollout, 3, vocab=REAL)
    assert whole.shape == real.shape == (19,) and whole.sum() < real.sum()


@pytest.mark.parametrize("kind", ["eagle3", "dual_input", "dual"])
def test_roots_that_drop_out_change_nothing_for_the_others(pairs, kind):
    pair = pairs["qwen3"]
    drafting, _ = lively_drafting(kind, pair, None, 0.5)
    embedding = pair.expert.embedding
    read, seen = [], set()
    for seed in range(6):
        answer = torch.randint(REAL, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
        rollout = rollout_of(pair, PROMPTS[1], answer, drafting)
        whole = draft_everywhere(drafting, embedding, rollout, 4, vocab=REAL).agreed
        states = drafting.unroll

        def counted(features, embeds, rows, *rest, states=states):
            for state in states(features, embeds, rows, *rest):
                read.append(state.shape[1])
                yield state

        drafting.unroll = counted
        assert torch.equal(matching_drafts(drafting, embedding, rollout, 4, vocab=REAL), whole)
        drafting.unroll = states
        seen |= set(whole.tolist())
    assert {0, 1, 2} <= seen, "the texts must hold roots that go on and roots that do not"
    assert 6 * 29 < sum(read) < 6 * 29 * 2, "a root that dropped out was worked on again"


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
