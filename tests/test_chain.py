"""Chains: where they stop, that the token which stops one stays, and that stopping costs no exactness."""

import pytest
import torch
from naive import assembled, near_pair, some_prompts, tiny_head
from test_batch import copies_per_step
from tiny import VOCAB

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.draft import Shape
from dcd_core.drafters.chain import draft_chain
from dcd_core.drafters.protocol import RoundNoise
from dcd_core.methods import assemble
from dcd_core.sampling import row_key

PROMPTS = some_prompts(4)
CHAINS = ["expert_sd", "scd", "cos", "dcd_eagle3", "dcd_lm"]
IDS = torch.tensor([1, 4, 5, 8, 9, 12])


def noise(rule: str, batch: int, temperature: float = 0.7) -> RoundNoise:
    keys = torch.tensor([row_key(0, str(row), 0) for row in range(batch)])
    return RoundNoise(keys, torch.arange(9).expand(batch, -1), temperature, rule)


class Rows:
    """Logits by depth, the same after every token; counts how often it is asked."""

    def __init__(self, batch: int, depth: int, scale: float = 3.0):
        generator = torch.Generator().manual_seed(depth)
        self.rows = torch.randn(depth, batch, len(IDS), generator=generator, dtype=torch.float64) * scale
        self.asked = []

    def __call__(self, token):
        self.asked.append(token)
        return self.rows[len(self.asked) - 1]


@pytest.mark.parametrize("target_ids", [None, IDS])
@pytest.mark.parametrize("rule", ["deterministic", "sampled", "shared_noise"])
def test_a_path_ends_with_the_first_token_below_the_threshold(rule, target_ids):
    vocab = len(IDS) if target_ids is None else 13
    whole = draft_chain(Rows(8, 6), noise(rule, 8), Shape(6), vocab, target_ids)
    assert whole.valid.all() and whole.nodes == 6 and whole.linear
    for threshold in (0.05, 0.2, 0.5, 0.9):
        rows = Rows(8, 6)
        draft = draft_chain(rows, noise(rule, 8), Shape(6, stop_below=threshold), vocab, target_ids)
        longest = 0
        for row in range(8):
            path, count = 1.0, 0
            while count < 6 and path >= threshold:
                token = int(whole.tokens[row, count])
                index = token if target_ids is None else IDS.tolist().index(token)
                law = rows.rows[count, row] / (0.7 if rule == "sampled" else 1.0)
                path *= float(law.softmax(-1)[index])
                count += 1
            assert draft.valid[row].tolist() == [place < count for place in range(draft.nodes)]
            longest = max(longest, count)
        assert draft.nodes == longest == len(rows.asked), "drafting ends when every row has ended"
        assert torch.equal(draft.tokens, whole.tokens[:, :longest]), "no token depends on where others stop"
        if rule == "sampled":
            assert torch.equal(draft.probs, whole.probs[:, :longest])


def test_each_pass_reads_the_token_that_was_drafted_last():
    rows = Rows(2, 3)
    draft = draft_chain(rows, noise("deterministic", 2), Shape(3), len(IDS))
    assert rows.asked[0] is None
    assert torch.equal(torch.stack(rows.asked[1:], dim=1), draft.tokens[:, :2])


@pytest.fixture(scope="module")
def near():
    pair = near_pair("llama3", 0.01)
    return pair, tiny_head(pair)


def settings(temperature: float, rule: str = "auto", stop_below: float = 0.05, **fields) -> Settings:
    target = Target(alpha=0.1, temperature=temperature)
    return Settings(target, max_new_tokens=14, gamma=4, seed=3, rule=rule, stop_below=stop_below, **fields)


def texts(generations) -> list[list[int]]:
    return [generation.ids for generation in generations]


@pytest.mark.parametrize("rule", ["greedy", "shared_noise"])
@pytest.mark.parametrize("name", CHAINS)
def test_an_early_stop_leaves_the_text_alone(near, name, rule):
    chosen = settings(0.0) if rule == "greedy" else settings(1.0, rule)
    plain = decode(assemble("ar" if name == "expert_sd" else "cd", near[0]), PROMPTS, chosen, max_batch=4)
    found = decode(assembled(name, *near), PROMPTS, chosen, max_batch=3)
    assert texts(found) == texts(plain)
    assert len({entry.drafted for generation in found for entry in generation.rounds}) > 1


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_row_stops_for_itself(near, name, rule):
    """The batch drafts on while one row does; a row's text and rounds are those it has alone."""
    chosen = settings(1.0, rule, stop_ids=tuple(range(0, VOCAB, 13)))
    whole = decode(assembled(name, *near), PROMPTS, chosen, max_batch=4)
    assert len({entry.drafted for generation in whole for entry in generation.rounds}) > 1
    for prompt, beside in zip(PROMPTS, whole, strict=True):
        alone = decode(assembled(name, *near), [prompt], chosen)[0]
        assert alone.ids == beside.ids
        counts = [[(r.drafted, r.accepted) for r in generation.rounds] for generation in (alone, beside)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("stop_below, most", [(0.0, 1), (0.05, 4)])
def test_only_an_early_stop_looks_at_the_device(near, stop_below, most):
    """Once a token at most, and not after the last; then the round's own copy."""
    steps = copies_per_step(assembled("dcd_eagle3", *near), settings(0.0, stop_below=stop_below), batch=4)
    assert max(len(found) for found, _ in steps) <= most
    assert all(found[-1] == "tolist" for found, _ in steps)
    assert (max(len(found) for found, _ in steps) > 1) == (stop_below > 0)
