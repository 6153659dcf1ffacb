"""What a round costs and how it is counted, and the law of the text through the real loop."""

import contextlib

import numpy as np
import pytest
import torch
from naive import assembled, greedy_cd, near_pair, some_prompts, tiny_head
from scipy import stats
from tiny import VOCAB, tiny_pair
from torch.utils._python_dispatch import TorchDispatchMode

from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Prompt, Settings, decode, stream
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.methods import METHODS, assemble

PROMPTS = some_prompts(4)


@pytest.fixture(scope="module")
def same():
    """An amateur that is the expert: every draft of SCD passes."""
    return near_pair("llama3", 0.0)


@pytest.fixture(scope="module")
def near():
    return near_pair("llama3", 0.01)


# ---- counting --------------------------------------------------------------------------------------------------------


def counts(generation) -> list[tuple[int, int, int]]:
    return [(entry.drafted, entry.accepted, entry.emitted) for entry in generation.rounds]


def expected_counts(length: int, gamma: int) -> list[tuple[int, int, int]]:
    """Rounds of a text of ``length`` tokens when every draft passes: the first token is the prefill's."""
    rounds, left = [], length - 1
    while left > 0:
        rounds.append((gamma, min(gamma, left), min(gamma + 1, left)))
        left -= gamma + 1
    return rounds


@pytest.mark.parametrize("length", range(1, 11))
def test_the_budget_ends_a_text_anywhere_in_a_round(same, length):
    """gamma 3 and all drafts pass: tokens 0 | 1 2 3 4 | 5 6 7 8 | ..., where 4 and 8 are SCD's late tokens."""
    settings = Settings(Target(alpha=0.5, temperature=0.0), max_new_tokens=length, gamma=3)
    generation = decode(assemble("scd", same), [PROMPTS[2]], settings)[0]
    assert generation.ids == greedy_cd(same, PROMPTS[2].ids, 0.5, length) and generation.finish == "length"
    assert counts(generation) == expected_counts(length, 3)


def text_with_fresh_tokens(pair, length: int) -> tuple[Prompt, list[int]]:
    """A prompt whose greedy text has no token twice in its first ``length``, so that any may be its stop token."""
    for seed in range(60):
        prompt = some_prompts(3, seed)[2]
        text = greedy_cd(pair, prompt.ids, 0.5, length)
        if len(set(text)) == length:
            return prompt, text
    raise AssertionError("no such prompt among these seeds")


@pytest.fixture(scope="module")
def fresh(same):
    return text_with_fresh_tokens(same, 9)


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_ends_a_text_anywhere_in_a_round(same, fresh, place):
    prompt, text = fresh
    settings = Settings(Target(alpha=0.5, temperature=0.0), max_new_tokens=20, gamma=3, stop_ids=(text[place],))
    generation = decode(assemble("scd", same), [prompt], settings)[0]
    assert generation.ids == text[: place + 1] and generation.finish == "stop"
    assert counts(generation) == expected_counts(place + 1, 3)


def test_a_stop_token_at_the_budget_is_a_stop(same, fresh):
    prompt, text = fresh
    settings = Settings(Target(alpha=0.5, temperature=0.0), max_new_tokens=5, gamma=3, stop_ids=(text[4],))
    generation = decode(assemble("scd", same), [prompt], settings)[0]
    assert generation.ids == text[:5] and generation.finish == "stop"


@pytest.mark.parametrize("rule", ["greedy", "auto", "shared_noise"])
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_one_more_than_the_sum_of_emitted(same, near, name, rule):
    settings = Settings(
        Target(alpha=0.1, temperature=0.0 if rule == "greedy" else 1.0),
        max_new_tokens=14,
        gamma=3,
        stop_ids=tuple(range(0, VOCAB, 11)),
        rule="auto" if rule == "greedy" else rule,
    )
    blocks = METHODS[name].saving == "deferred"
    for generation in decode(assembled(name, near, tiny_head(near)), PROMPTS, settings, max_batch=3):
        assert len(generation.ids) == 1 + sum(entry.emitted for entry in generation.rounds)
        for entry in generation.rounds:
            assert 0 <= entry.accepted <= entry.drafted
            assert entry.accepted <= entry.emitted <= entry.accepted + 1
            assert entry.drafted <= 3 or blocks, "a block may be longer than a draft"
        for entry in generation.rounds[:-1]:
            whole = blocks and entry.accepted == entry.drafted  # a block ends where it was judged
            assert entry.emitted == entry.accepted + (not whole)
        if name in ("ar", "cd"):
            assert counts(generation) == [(0, 0, 1)] * (len(generation.ids) - 1)


def test_a_round_of_an_ngram_drafter_that_finds_nothing_counts_with_zero(same):
    settings = Settings(Target(temperature=0.0), max_new_tokens=2, gamma=3)
    generation = decode(assemble("dcd_ngram", same), [Prompt("a", [9])], settings)[0]
    assert len(set([9, *generation.ids[:1]])) == 2 and counts(generation) == [(0, 0, 1)]


@pytest.mark.parametrize("timing", [False, True])
def test_the_seconds_of_a_round_are_those_of_its_phases(near, timing):
    settings = Settings(Target(alpha=0.1, temperature=0.0), max_new_tokens=6, gamma=3, timing=timing)
    for name, idle in (("cd", ()), ("ar", ("amateur_s",)), ("dcd_ngram", ())):
        generation = decode(assembled(name, near), [PROMPTS[1]], settings)[0]
        assert generation.prefill_s > 0
        for entry in generation.rounds:
            for phase in ("draft_s", "expert_s", "amateur_s", "rest_s"):
                assert (getattr(entry, phase) == 0) == (phase in idle), (name, phase)


# ---- copies from device to host --------------------------------------------------------------------------------------

COPYING = {
    torch.ops.aten._local_scalar_dense,  # item(), bool(), int(), float(), if tensor:
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_dim,
    torch.ops.aten.unique_consecutive,
}


class HostCopies(TorchDispatchMode):
    """Counts everything that would make a host wait for a device: on a CPU these calls are free, so they are counted by
    name. tolist(), numpy() and cpu() of a CPU tensor are no operations and are watched by wrapping them."""

    WATCHED = ("tolist", "numpy", "cpu", "__array__")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        by_mask = packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if packet in COPYING or by_mask:
            self.found.append(str(packet))
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self):
        with pytest.MonkeyPatch.context() as patch, self:
            for name in self.WATCHED:
                patch.setattr(torch.Tensor, name, self.wrap(name, getattr(torch.Tensor, name)))
            yield self

    def wrap(self, name, original):
        def watched(tensor, *args, **kwargs):
            self.found.append(name)
            return original(tensor, *args, **kwargs)

        return watched


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t[0] > 0),
        lambda t: int(t[0]),
        lambda t: [1, 2, 3][t[0].long()],
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: np.asarray(t),
        lambda t: t[t > 1],
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: t.unique(),
    ],
)
def test_the_counter_sees_every_kind_of_copy(call):
    tensor = torch.arange(3.0)
    with HostCopies().counting() as copies:
        call(tensor)
    assert len(copies.found) >= 1
    with HostCopies().counting() as copies:
        tensor.argmax(-1, keepdim=True).gather(0, torch.zeros(1, dtype=torch.int64))
    assert copies.found == []


def copies_per_step(method, settings, batch: int) -> list[tuple[list[str], int]]:
    """What was copied in every prefill and round, and the expert's passes in the round (0: a prefill)."""
    steps, rounds = [], stream(method, PROMPTS, settings, batch)
    while True:
        with HostCopies().counting() as copies:
            news = next(rounds, None)
        if news is None:
            return steps
        passes = [generation.rounds[-1].expert_passes for generation, _ in news if generation.rounds]
        steps.append((copies.found, max(passes, default=0)))


@pytest.mark.parametrize("rule", ["greedy", "auto", "shared_noise"])
@pytest.mark.parametrize("name", METHODS)
def test_a_round_makes_one_copy_to_the_host(near, name, rule):
    settings = Settings(
        Target(alpha=0.1, temperature=0.0 if rule == "greedy" else 1.0),
        max_new_tokens=8,
        gamma=3,
        stop_ids=tuple(range(0, VOCAB, 11)),
        rule="auto" if rule == "greedy" else rule,
    )
    steps = copies_per_step(assembled(name, near, tiny_head(near)), settings, batch=3)
    assert len(steps) > 3
    for found, passes in steps:
        if name == "auto" and passes:  # in rounds with the head, one more for each level of a tree and for its chances
            assert found.count("tolist") <= 2 * passes + 1 and len(found) <= (2 + settings.gamma) * passes + 1
            assert set(found) <= {"tolist", "aten._local_scalar_dense"}
        elif METHODS[name].saving == "deferred":  # one for each expert round ahead, one for the amateur's judgement
            assert found == ["tolist"] * (passes + 1 if passes else 1)
        elif name == "cos":  # where the expert's token was offered, whether it passed
            assert found in (["tolist"], ["tolist"] * 2)
        else:
            assert found == ["tolist"]


def test_control_a_drafter_that_looks_at_its_drafts_is_seen(near):
    class Looking(Drafter):
        def propose(self, root, noise, shape):
            assert root.min().item() >= 0
            return super().propose(root, noise, shape)

    method = assemble("cd", near)
    method.drafter = Looking()
    steps = copies_per_step(method, Settings(Target(temperature=0.0), max_new_tokens=3), batch=4)
    assert [len(found) for found, _ in steps] == [1, 2, 2]


# ---- the law of the text, through the real loop ----------------------------------------------------------------------

CELLS, SAMPLES = 6, 1536


def exact_law(pair, prompt: list[int], target: Target) -> np.ndarray:
    """Joint law of the first two tokens' cells (id modulo CELLS), from a pass over every possible first token."""

    def rows(texts):
        ids = torch.tensor(texts)
        return target_log_probs(
            [model.forward_full(ids).logits[:, -1] for model in (pair.expert, pair.amateur)], target
        ).exp()

    cell = torch.nn.functional.one_hot(torch.arange(VOCAB) % CELLS).double()
    first = rows([prompt])[0].double()
    likely = [token for token in range(VOCAB) if first[token] > 1e-9]
    law = torch.zeros(CELLS, CELLS, dtype=torch.float64)
    for token, row in zip(likely, rows([[*prompt, token] for token in likely]), strict=True):
        law[token % CELLS] += first[token] * (row.double() @ cell)
    return law.numpy()


def g_test(samples: list[list[int]], law: np.ndarray) -> float:
    """p-value of the observed cells under the law; cells with an expectation below 5 are pooled."""
    observed = np.zeros_like(law)
    for ids in samples:
        observed[ids[0] % CELLS, ids[1] % CELLS] += 1
    observed, expected = observed.ravel(), law.ravel() / law.sum() * len(samples)
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], max(expected[small].sum(), 1e-9))
    return stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue


@pytest.fixture(scope="module")
def law():
    """A pair, a head and a prompt; only two tokens of each sample are looked at."""
    pair = tiny_pair("smol", dtype=torch.float64)
    target, prompt = Target(alpha=0.5, temperature=2.0), [9, 20, 31]
    return pair, tiny_head(pair), prompt, target, exact_law(pair, prompt, target)


def sampled_texts(method, prompt, target, rule) -> list[list[int]]:
    prompts = [Prompt("law", prompt, sample) for sample in range(SAMPLES)]
    settings = Settings(target, max_new_tokens=2, gamma=2, rule=rule)
    return [generation.ids for generation in decode(method, prompts, settings, max_batch=256)]


@pytest.mark.parametrize(
    "name, rule",
    [
        ("cd", "auto"),
        ("scd", "sampled"),
        ("dcd_eagle3", "sampled"),
        ("dcd_eagle3", "shared_noise"),
        ("dcd_ngram", "auto"),
    ],
)
def test_the_joint_law_of_two_tokens_is_the_target_s(law, name, rule):
    pair, head, prompt, target, expected = law
    samples = sampled_texts(assembled(name, pair, head), prompt, target, rule)
    assert g_test(samples, expected) > 1e-6


@pytest.mark.parametrize("fault", ["models swapped", "argmax drafts declared sampled"])
def test_control_the_law_of_a_faulty_loop_is_seen(law, fault, monkeypatch):
    pair, head, prompt, target, expected = law
    method = assemble("dcd_eagle3", pair, head)
    if fault == "models swapped":
        method.scorers.reverse()
        method.drafter = Drafter()
    else:
        shipped = Eagle3Drafter.propose

        def greedy(self, root, noise, gamma):
            draft = shipped(self, root, noise, gamma)
            best = draft.probs.argmax(-1)
            draft.tokens = best if draft.ids is None else draft.ids[best]
            return draft

        monkeypatch.setattr(Eagle3Drafter, "propose", greedy)
    assert g_test(sampled_texts(method, prompt, target, "auto"), expected) < 1e-6
