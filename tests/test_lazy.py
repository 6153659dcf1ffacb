"""Lazy judging: with a cutoff the amateur is asked less and about less, and the text is the same to the last token."""

import pytest
import torch
from naive import greedy_cd, near_pair, some_prompts, tiny_head
from tiny import VOCAB

from dcd_core.contrast import Target, plausible
from dcd_core.decode import Settings, decode
from dcd_core.draft import Draft
from dcd_core.errors import UserError
from dcd_core.lazy import reachable
from dcd_core.methods import assemble
from dcd_core.rounds import PassInputs, plausible_ids, rows_on_ids, target_rows

PROMPTS = some_prompts(5)
LENGTH = 16


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def pair(request):
    return near_pair(request.param, 0.02)


def texts(done) -> list[list[int]]:
    return [generation.ids for generation in done]


def asked(saving: str, temperature: float, rule: str, cutoff: float) -> Settings:
    target = Target(alpha=1.0, temperature=temperature, cutoff=cutoff)
    return Settings(target, LENGTH, tuple(range(0, VOCAB, 19)), seed=4, gamma=3, rule=rule, saving=saving)


@pytest.mark.parametrize("cutoff", [0.6, 1.0])
@pytest.mark.parametrize("temperature, rule", [(0.0, "auto"), (1.0, "auto"), (1.0, "shared_noise")])
@pytest.mark.parametrize("name", ["cd", "dcd_ngram", "dcd_eagle3"])
def test_the_text_is_the_same_and_the_amateur_is_asked_less(pair, name, temperature, rule, cutoff):
    method, eager = assemble(name, pair, tiny_head(pair)), asked("none", temperature, rule, cutoff)
    expected = texts(decode(method, PROMPTS, eager))
    for batch in (1, 3):
        done = decode(method, PROMPTS, asked("lazy", temperature, rule, cutoff), max_batch=batch)
        assert texts(done) == expected
        passes = [entry.amateur_passes for generation in done for entry in generation.rounds]
        if cutoff == 1.0:
            assert not any(passes), "every plausible set is one id"
        elif batch == 1:
            assert 0 in passes and 1 in passes


def test_greedy_text_is_that_of_the_plain_loop(pair):
    for cutoff in (0.6, 0.9):
        expected = [greedy_cd(pair, prompt.ids, 1.0, LENGTH, cutoff) for prompt in PROMPTS]
        settings = Settings(Target(alpha=1.0, temperature=0.0, cutoff=cutoff), LENGTH, gamma=3, saving="lazy")
        for name in ("cd", "dcd_eagle3"):
            done = decode(assemble(name, pair, tiny_head(pair)), PROMPTS, settings, max_batch=4)
            assert texts(done) == expected


def test_what_can_be_reached():
    """Two children of the root, one of them implausible, each with children of its own."""
    allowed = torch.zeros(1, 6, 9, dtype=torch.bool)
    allowed[0, 0, [1, 2]] = True  # after the root
    allowed[0, 1, [4]] = True  # after node 0 (token 1)
    allowed[0, 2, [5]] = True  # after node 1 (token 3, implausible)
    tokens, parents = torch.tensor([[1, 3, 4, 7, 5]]), torch.tensor([[-1, -1, 0, 0, 1]])
    tree = Draft(tokens, parents, torch.tensor([[True] * 5]))
    assert reachable(allowed, tree).tolist() == [[True, True, False, True, False, False]]
    tree = Draft(tokens, parents, torch.tensor([[True, True, False, True, True]]))
    assert reachable(allowed, tree).tolist() == [[True, True, False, False, False, False]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_on_plausible_ids_are_the_whole_rows(pair, temperature):
    """Though a wider row's other ids, and so the amateur's maximum and normaliser, are never computed."""
    target = Target(alpha=2.0, temperature=temperature, cutoff=0.5)
    ids = torch.tensor([PROMPTS[4].ids])
    expert, amateur = pair.expert.forward_full(ids), pair.amateur.forward_full(ids)
    few = plausible_ids(plausible(expert.logits, target.cutoff))
    assert 1 < len(few) < VOCAB
    expected, bad = target_rows([expert.logits, amateur.logits], target)
    found, also_bad = rows_on_ids(expert.logits, [amateur.hidden], [pair.amateur], few, target)
    assert not bad.any() and not also_bad.any()
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_refused_beside_rows_that_ask(pair, monkeypatch, temperature):
    """The amateur is asked about a few ids of the others, and none of them shows the NaN."""
    shipped = PassInputs.run

    def breaks_first_row(self, model, cache, features=False):
        output = shipped(self, model, cache, features)
        if model is pair.expert and len(output.logits) > 1:
            output.logits[0, :, 7] = float("nan")
        return output

    monkeypatch.setattr(PassInputs, "run", breaks_first_row)
    with pytest.raises(UserError, match="NaN or infinite numbers for prompt 'p0'"):
        decode(
            assemble("dcd_eagle3", pair, tiny_head(pair)), PROMPTS, asked("lazy", temperature, "auto", 0.6), max_batch=5
        )


def test_lazy_needs_a_cutoff(pair):
    with pytest.raises(UserError, match="saving lazy needs a cutoff above 0"):
        decode(assemble("cd", pair), PROMPTS, asked("lazy", 0.0, "auto", 0.0))
    with pytest.raises(UserError, match="method scd drafts with the amateur"):
        decode(assemble("scd", pair), PROMPTS, asked("lazy", 0.0, "auto", 0.5))
