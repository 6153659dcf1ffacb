"""A repetition penalty is a function of the prefix: that of transformers for one model, and every method writes the
plain loop's text under it, wherever its rows come from."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from naive import assembled, by_noise, fitted_head, greedy, near_pair, some_prompts
from test_batch import copies_per_step
from test_replay import rollout_of, rounds_of
from tiny import VOCAB
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dcd_core.batch import Batch
from dcd_core.contrast import Target, scores, target_log_probs
from dcd_core.decode import Settings, decode
from dcd_core.draft import Draft
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, assemble
from dcd_core.replay import replay
from dcd_core.sampling import row_key
from dcd_core.scorers import negative_prompt
from dcd_core.seen import Seen
from diagnostics.certificate import cases, proposals
from diagnostics.certificate.enumeration import target_rows

PROMPTS = some_prompts(3)
LENGTH, SEED = 10, 3
PENALTIES = (1.4, 0.3)
"""Above 1 drafts must know their own path; below 1 texts repeat, so that long drafts pass."""
FORMS = {
    "chain": {},
    "tree": {"branch": 3, "nodes": 7},
    "lazy": {"saving": "lazy"},
    "tree, lazy": {"branch": 3, "nodes": 7, "saving": "lazy"},
    "deferred": {"saving": "deferred", "defer_theta": 2.0},
    "tree, deferred": {"branch": 3, "nodes": 7, "saving": "deferred", "defer_theta": 0.2},
}
DRAFTED = ("expert_sd", "dcd_ngram", "dcd_eagle3", "dcd_hybrid", "cross_alpha", "dual")
CASES = [(name, "chain") for name in METHODS] + [(name, "tree") for name in DRAFTED]
CASES += [("dcd_eagle3", form) for form in FORMS if form not in ("chain", "tree")]
CASES += [("cd", "lazy"), ("cd", "deferred"), ("dcd_ngram", "lazy"), ("dcd_hybrid", "tree, deferred")]


def target_of(form: str, penalty: float, **fields) -> Target:
    cutoff = 0.3 if "lazy" in form else 0.0
    return Target(**{"alpha": 0.5, "temperature": 0.0, "cutoff": cutoff, **fields}, repetition_penalty=penalty)


def settings(form: str, target: Target, **more) -> Settings:
    return Settings(target, **{"max_new_tokens": LENGTH, "gamma": 3, "seed": SEED, **FORMS[form], **more})


def texts(done) -> list[list[int]]:
    return [generation.ids for generation in done]


@pytest.fixture(scope="module")
def near():
    """A pair in fp32 whose amateur often agrees, and a head whose drafts often pass."""
    pair, known = near_pair("llama3", 0.01, torch.float32), []
    for penalty in PENALTIES:
        made = decode(assemble("cd", pair), PROMPTS, settings("chain", target_of("chain", penalty)), max_batch=4)
        known += [prompt.ids + generation.ids for prompt, generation in zip(PROMPTS, made, strict=True)]
    return pair, fitted_head(pair, known)


@pytest.fixture(scope="module")
def plain(near):
    """Greedy texts of the plain loop, by (contrast, cutoff, penalty)."""
    pair, found = near[0], {}

    def of(contrast: bool, cutoff: float, penalty: float) -> list[list[int]]:
        case = contrast, cutoff, penalty
        if case not in found:
            models, weights = ([pair.expert, pair.amateur], [1.5, -0.5]) if contrast else ([pair.expert], [1.0])
            found[case] = [
                greedy(models, weights, [prompt.ids] * 2 if contrast else [prompt.ids], LENGTH, cutoff, penalty)
                for prompt in PROMPTS
            ]
        return found[case]

    return of


# ---- the target ------------------------------------------------------------------------------------------------------


def test_of_one_model_it_is_that_of_transformers_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator) * 4
    prefix = torch.randint(40, (6, 9), generator=generator)
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter_(1, prefix, True)
    for penalty in (1.3, 0.6):
        stock = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
        assert torch.equal(scores([logits], Target(repetition_penalty=penalty), seen), stock(prefix, logits.clone()))
        stock += [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)]
        target = Target(temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=penalty)
        expected = stock(prefix, logits.clone()).log_softmax(-1)
        assert torch.equal(target_log_probs([logits], target, seen), expected)


def test_it_acts_on_the_combined_score_after_the_mask():
    p, q = torch.tensor([3.0, 2.5, -4.0]), torch.tensor([1.0, -1.0, -3.0])
    seen = torch.tensor([True, False, True])
    found = scores([p, q], Target(alpha=0.5, repetition_penalty=2.0), seen)
    assert found.tolist() == [(4.5 - 0.5) / 2, 3.75 + 0.5, (-6.0 + 1.5) * 2]
    cut = scores([p, q], Target(alpha=0.5, cutoff=0.1, repetition_penalty=2.0), seen)
    assert cut.tolist() == [2.0, 4.25, -math.inf], "the cutoff is decided by the expert without a penalty"
    shifted = scores([p - 5, q], Target(alpha=0.5, repetition_penalty=2.0), seen)
    assert shifted.log_softmax(0).tolist() != pytest.approx(found.log_softmax(0).tolist()), "raw logits count"


def test_it_is_kept_by_what_stands_in_for_the_target():
    assert Target.li(0.5, repetition_penalty=1.3).provisional().repetition_penalty == 1.3


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_other_penalties_are_refused(penalty):
    with pytest.raises(UserError, match="repetition_penalty must lie between"):
        Target(repetition_penalty=penalty)


def test_a_prefix_that_is_not_given_is_an_error():
    with pytest.raises(ValueError, match="needs the ids"):
        target_log_probs([torch.zeros(1, 4)], Target(repetition_penalty=1.2))


# ---- the prefix ------------------------------------------------------------------------------------------------------


def test_every_node_has_its_own_path():
    generator = torch.Generator().manual_seed(1)
    prefixes = [[1, 2], [3, 3, 3, 4], [0]]
    seen = Seen.of(prefixes, 12, torch.device("cpu"))
    for nodes in (0, 1, 6):
        tokens = torch.randint(12, (3, nodes), generator=generator)
        parents = [[int(torch.randint(-1, n, (), generator=generator)) for n in range(nodes)] for _ in prefixes]
        parents = torch.tensor(parents, dtype=torch.int64)
        draft = Draft(tokens, parents, torch.ones(3, nodes, dtype=torch.bool))
        for rows in (nodes, nodes + 1) if nodes else (1,):
            found = seen.after(draft, rows)
            for row, prefix in enumerate(prefixes):
                paths = [set(prefix)]
                for node in range(nodes):
                    paths.append(paths[parents[row, node] + 1] | {tokens[row, node].item()})
                assert [set(mask.nonzero()[:, 0].tolist()) for mask in found[row]] == paths[:rows]
    seen.add(torch.tensor([[5, -1], [-1, -1], [7, 8]]))
    seen.keep_rows(torch.tensor([2, 0]))
    seen.extend(Seen.of([[9]], 12, torch.device("cpu")))
    after = seen.after(Draft.empty(3, "cpu"), 1)[:, 0]
    assert [mask.nonzero()[:, 0].tolist() for mask in after] == [[0, 7, 8], [1, 2, 5], [9]]


# ---- every method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, form", CASES)
def test_greedy_text_is_that_of_the_plain_loop(near, plain, name, form):
    """Two rows at a time, so that rows leave a running batch and others enter it; at the second penalty they also
    leave early."""
    pair, head = near
    for penalty, stops in zip(PENALTIES, ((), tuple(range(0, VOCAB, 9))), strict=True):
        target = target_of(form, penalty)
        made = decode(assembled(name, pair, head), PROMPTS, settings(form, target, stop_ids=stops), max_batch=2)
        expected = plain(METHODS[name].contrast, target.cutoff, penalty)
        for generation, text in zip(made, expected, strict=True):
            end = next((place + 1 for place, token in enumerate(text) if token in stops), LENGTH)
            assert generation.ids == text[:end]


@pytest.mark.parametrize("name", ["scd", "cos"])
def test_a_draft_that_passes_whole_is_part_of_the_late_row_s_prefix(name):
    """The amateur is the expert, so that only the penalty refuses drafts; a weak one, which refuses few."""
    same, few = near_pair("llama3", 0.0, torch.float32), PROMPTS[:2]
    made = decode(assembled(name, same), few, settings("chain", target_of("chain", 0.8), gamma=2), max_batch=2)
    whole = [entry.accepted == entry.drafted for generation in made for entry in generation.rounds]
    assert sum(whole) > 2 and not all(whole)
    assert texts(made) == [greedy([same.expert], [1.0], [prompt.ids], LENGTH, penalty=0.8) for prompt in few]


@pytest.mark.parametrize("name, form", [("dcd_eagle3", "tree"), ("scd", "chain"), ("dcd_deferred", "chain")])
def test_a_penalty_of_the_root_s_prefix_alone_is_seen(near, plain, name, form):
    """Negative control: the path of a node is left out. So the texts above do depend on it."""
    penalty = PENALTIES[1]
    with mock.patch.object(Seen, "after", lambda self, draft, rows: self.mask[:, None, :-1].repeat(1, rows, 1)):
        found = texts(decode(assembled(name, *near), PROMPTS, settings(form, target_of(form, penalty)), max_batch=2))
    assert found != plain(True, 0.0, penalty) != plain(True, 0.0, 1.0)


@pytest.mark.parametrize(
    "name, form",
    [("scd", "chain"), ("cos", "chain"), ("dcd_hybrid", "tree"), ("dcd_eagle3", "lazy"), ("dcd_eagle3", "deferred")],
)
def test_shared_noise_text_is_that_of_the_plain_loop(near, name, form):
    pair, head = near
    target = target_of(form, 1.4, temperature=0.8, top_p=0.95)
    few, models = PROMPTS[:3], [pair.expert, pair.amateur]
    expected = [by_noise(models, target, [p.ids] * 2, 8, row_key(SEED, p.id, p.sample)) for p in few]
    asked = settings(form, target, rule="shared_noise", max_new_tokens=8)
    assert texts(decode(assembled(name, pair, head), few, asked, max_batch=2)) == expected


def test_under_guidance_the_prefix_is_the_expert_s_own(near):
    pair, negative = near[0], list(range(20, 90))
    contrast, target = negative_prompt(pair.expert, negative), Target.guidance(0.6, temperature=0.0)
    few, target = PROMPTS[:2], replace(target, repetition_penalty=1.4)
    expected = [greedy([pair.expert] * 2, [1.6, -0.6], [p.ids, negative], LENGTH, penalty=1.4) for p in few]
    method = assemble("dcd_eagle3", pair, near[1], contrast=contrast)
    assert texts(decode(method, few, settings("chain", target), max_batch=2)) == expected


def test_replay_gives_the_rounds_of_a_penalised_text(near):
    """A replay reads the text, whatever target wrote it."""
    pair, head = near
    made = decode(assembled("dcd_eagle3", *near), PROMPTS, settings("chain", target_of("chain", 0.3)))
    for prompt, generation in zip(PROMPTS, made, strict=True):
        rollout = rollout_of(pair, prompt, generation.ids)
        assert replay(head, pair.expert.embedding, rollout, 3) == rounds_of(generation)


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scd", "dcd_eagle3", "dcd_deferred"])
def test_no_copy_to_the_host_is_added(near, name):
    asked = settings("tree", target_of("chain", 1.4), max_new_tokens=5)
    for found, passes in copies_per_step(assembled(name, *near), asked, batch=3):
        assert found == ["tolist"] * (passes + 1 if name == "dcd_deferred" and passes else 1)


def test_without_a_penalty_no_prefix_is_kept(near):
    method = assembled("dcd_eagle3", *near)
    assert Batch(method, PROMPTS, settings("chain", target_of("chain", 1.0))).seen is None


# ---- the certificate -------------------------------------------------------------------------------------------------


def test_the_published_formula_is_that_of_the_shipped_target():
    assert cases.formula(quick=False).passed


@pytest.mark.parametrize("kind, rule", [("chain", "sampled"), ("tree", "deterministic")])
def test_emitted_tokens_have_the_penalised_distribution_by_enumeration(kind, rule):
    """And a penalty of the root's prefix alone has another."""
    world = proposals.World(3, proposals.TARGETS["alpha .5, penalty 2"])
    drafts = proposals.sampled_chain(world, 2) if kind == "chain" else proposals.top_tree(world)
    assert proposals.error(world, 3, drafts, rule, 2) < proposals.EXACT

    def rows_of(prefix):
        def rows(line):
            models = [torch.from_numpy(world.table(name, line, 3)).log() + proposals.SHIFT for name in "pq"]
            return target_log_probs(models, world.target, torch.tensor([token in prefix for token in range(3)])).numpy()

        return rows

    def table(prefixes, trees, _):
        return torch.cat([target_rows([prefix], [tree], rows_of(prefix)) for prefix, tree in zip(prefixes, trees)])  # noqa: B905

    assert proposals.error(world, 3, drafts, rule, 2, table=table) > proposals.VISIBLE
