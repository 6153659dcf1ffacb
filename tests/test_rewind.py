"""Taking tokens back: afterwards a drafter proposes exactly what a fresh one with that text would."""

import pytest
import torch
from naive import assembled, near_pair, tiny_head, told
from tiny import VOCAB

from dcd_core.draft import Shape
from dcd_core.drafters.protocol import Drafter, RoundNoise
from dcd_core.methods import METHODS
from dcd_core.sampling import row_key

# those that a loop with provisional tokens takes
DRAFTING = [name for name, one in METHODS.items() if name not in ("ar", "cd", "scd", "cos") and not one.reads_amateur]
STARTS = [4, 7, 3]


@pytest.fixture(scope="module")
def parts():
    pair = near_pair("llama3", 0.01)
    return pair, tiny_head(pair)


def some_texts(seed: int) -> list[list[int]]:
    """Three rows over few ids, so that n-grams repeat."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 16, (40,), generator=generator).tolist() for _ in STARTS]


def begun(parts, name: str, texts: list[list[int]]) -> Drafter:
    """After the prefill of each row's first STARTS tokens; the next token is the first root."""
    drafter = assembled(name, *parts).drafter
    prompts = [text[:start] for text, start in zip(texts, STARTS, strict=True)]
    ends = [start + 1 for start in STARTS]
    drafter.begin(prompts, told(parts[0].expert, texts, [1] * 3, ends), capacity=80)
    return drafter


def proposal(drafter: Drafter, texts: list[list[int]], ends: list[int], shape: Shape, rule: str):
    keys = torch.tensor([row_key(0, str(row), 0) for row in range(3)])
    root = torch.tensor([text[end - 1] for text, end in zip(texts, ends, strict=True)])
    return drafter.propose(root, RoundNoise(keys, torch.arange(6).expand(3, -1), 0.8, rule), shape)


def assert_same(left, right) -> None:
    assert torch.equal(left.valid, right.valid) and torch.equal(left.parents, right.parents)
    assert torch.equal(left.tokens, right.tokens) and (left.probs is None) == (right.probs is None)
    if left.probs is not None:
        torch.testing.assert_close(left.probs, right.probs, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("shape", [Shape(4), Shape(4, 3, 9)])
@pytest.mark.parametrize("name", DRAFTING)
def test_a_drafter_that_goes_back_is_as_if_it_had_never_been_further(parts, name, shape, read):
    """Two rounds of provisional tokens, then back by ragged counts, over the last round and into the one before."""
    expert = parts[0].expert
    wrong, right = some_texts(1), some_texts(2)
    # both texts agree up to the fork
    fork = [start + 1 + extra for start, extra in zip(STARTS, (2, 1, 3), strict=True)]
    texts = [one[:place] + other[place:] for one, other, place in zip(wrong, right, fork, strict=True)]
    rule = "shared_noise" if name in ("dcd_ngram", "dcd_hybrid") else "sampled"
    drafter = begun(parts, name, wrong)
    ends = [start + 1 for start in STARTS]
    for counts in ((3, 1, 4), (2, 4, 1)):
        proposal(drafter, wrong, ends, shape, rule)
        further = [end + count for end, count in zip(ends, counts, strict=True)]
        drafter.observe(told(expert, wrong, ends, further))
        ends = further
    if read:  # the newest tokens have been read already
        proposal(drafter, wrong, ends, shape, rule)
    back = [end - place for end, place in zip(ends, fork, strict=True)]
    new = [place + count for place, count in zip(fork, (1, 3, 2), strict=True)]
    drafter.rewind(back, told(expert, texts, fork, new))
    fresh = begun(parts, name, texts)
    fresh.observe(told(expert, texts, [start + 1 for start in STARTS], new))
    for _ in range(2):
        assert_same(proposal(drafter, texts, new, shape, rule), proposal(fresh, texts, new, shape, rule))
        further = [end + count for end, count in zip(new, (2, 1, 1), strict=True)]
        for one in (drafter, fresh):
            one.observe(told(expert, texts, new, further))
        new = further


def test_a_drafter_without_state_has_nothing_to_take_back(parts):
    texts = some_texts(1)
    drafter = Drafter()
    before = dict(vars(drafter))
    drafter.rewind([1, 1, 1], told(parts[0].expert, texts, [3] * 3, [4] * 3))
    assert vars(drafter) == before and proposal(drafter, texts, [4] * 3, Shape(3), "deterministic").nodes == 0


def test_the_amateur_as_drafter_cannot_go_back(parts):
    texts = some_texts(1)
    with pytest.raises(ValueError, match="cannot be taken back"):
        assembled("scd", *parts).drafter.rewind([1] * 3, told(parts[0].expert, texts, [3] * 3, [4] * 3))


@pytest.mark.parametrize("name", ["dcd_eagle3", "dcd_lm"])
def test_part_of_what_was_told_last_is_taken_back(parts, name):
    """Also of what two rounds told without a draft between them."""
    expert, texts = parts[0].expert, some_texts(1)
    drafter, fresh = begun(parts, name, texts), begun(parts, name, texts)
    starts, middles, ends, news = ([start + more for start in STARTS] for more in (1, 3, 4, 5))
    drafter.observe(told(expert, texts, starts, middles))
    drafter.observe(told(expert, texts, middles, ends))
    back = [1, 2, 3]
    places = [end - count for end, count in zip(ends, back, strict=True)]
    drafter.rewind(back, told(expert, texts, places, news))
    fresh.observe(told(expert, texts, starts, news))
    made = (proposal(one, texts, news, Shape(3), "sampled") for one in (drafter, fresh))
    assert_same(*made)
    assert max(map(max, texts)) < VOCAB
