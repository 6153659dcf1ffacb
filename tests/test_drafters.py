"""Drafters: what they propose, what their caches hold, and that a draft is really from the law it carries."""

from collections import Counter

import pytest
import torch
from followed import Follows, Reduced
from tiny import VOCAB, tiny_model, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.draft import Shape
from dcd_core.drafters.amateur import AmateurDrafter
from dcd_core.drafters.eagle3 import Eagle3Drafter
from dcd_core.drafters.ngram import NgramDrafter, NgramIndex, continuation_tree
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import assemble
from dcd_core.sampling import row_key
from dcd_core.verify import Uniforms, verify


def prompts(count: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    return [
        Prompt(f"p{index}", torch.randint(8, VOCAB, (3 + 2 * index,), generator=generator).tolist())
        for index in range(count)
    ]


def noise(rule: str, batch: int = 3, count: int = 4, temperature: float = 1.0) -> RoundNoise:
    keys = torch.tensor([row_key(0, str(row), 0) for row in range(batch)])
    return RoundNoise(keys, torch.arange(count).expand(batch, -1), temperature, rule)


# ---- n-grams ---------------------------------------------------------------------------------------------------------


def rescan(tokens: list[int], count: int, shortest: int = 1, longest: int = 12) -> list[int]:
    """The definition: longest suffix first, its most recent earlier occurrence, what followed it."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tokens[end : end + count]
    return []


@pytest.mark.parametrize("vocab", [2, 3, 8, 40])
@pytest.mark.parametrize("window", [(1, 12), (2, 4), (3, 3)])
def test_the_rolling_index_equals_a_rescan(vocab, window):
    text = torch.randint(0, vocab, (150,), generator=torch.Generator().manual_seed(vocab)).tolist()
    index = NgramIndex(text[:5], *window)
    found, place = 0, 5
    while place < len(text):
        expected = rescan(index.tokens, 6, *window)
        assert index.continuation(6) == expected
        found += bool(expected)
        step = 1 + place % 4
        index.extend(text[place : place + step])
        place += step
    assert index.tokens == text
    assert found > 0 or vocab == 40


def test_the_longest_match_comes_first_then_the_most_recent():
    assert NgramIndex([1, 2, 3, 9, 2, 3, 5, 1, 2, 3]).continuation(2) == [9, 2], "three tokens match further back"
    assert NgramIndex([2, 3, 7, 0, 2, 3, 8, 0, 2, 3]).continuation(1) == [8], "of equal matches the newer"


def test_a_match_is_at_most_twelve_tokens_long():
    run = list(range(20, 33))  # thirteen tokens
    text = [*run, 1, 99, *run[1:], 2, *run]
    assert NgramIndex(text).continuation(1) == [2], "twelve tokens match both places: the newer one counts"
    assert NgramIndex(text, longest=13).continuation(1) == [1]


def test_the_text_s_own_end_is_no_match():
    assert NgramIndex([1, 2, 3]).continuation(3) == []
    assert NgramIndex([]).continuation(3) == [] and NgramIndex([7]).continuation(3) == []
    assert NgramIndex([7, 7]).continuation(3) == [7], "the token before the end, and what has followed it so far"


def first(rows: list[list[int]]) -> Accepted:
    width = max(map(len, rows))
    return Accepted(
        torch.tensor([row + [-1] * (width - len(row)) for row in rows]), [len(row) for row in rows], rows, None
    )


def test_ngram_rows_draft_as_many_tokens_as_they_find():
    drafter = NgramDrafter()
    drafter.begin([[5, 6, 7, 8, 5], [1, 2, 3], [4, 4, 4]], first([[6, 7, 8, 5, 6], [2, 3, 9], [4, 4, 4]]), 10)
    draft = drafter.propose(torch.tensor([6, 9, 4]), noise("deterministic"), Shape(3))
    assert draft.linear and draft.rule == "deterministic" and draft.probs is None
    assert draft.valid.tolist() == [[True, True, True], [False] * 3, [True, False, False]]
    assert draft.tokens[0].tolist() == [7, 8, 5] and draft.tokens[2, 0] == 4
    drafter.observe(first([[7, 8], [1], [4]]))
    drafter.keep_rows([1, 0])
    draft = drafter.propose(torch.tensor([1, 8]), noise("shared_noise", 2), Shape(3))
    assert draft.rule == "shared_noise" and draft.tokens.tolist() == [[2, 3, 9], [5, 6, 7]]


def test_ngram_rows_that_find_nothing_draft_nothing():
    drafter = NgramDrafter()
    drafter.begin([[1, 2], [3]], first([[2, 5], [4]]), 10)
    assert drafter.propose(torch.tensor([5, 4]), noise("deterministic", 2), Shape(3)).nodes == 0


def test_several_places_of_every_match():
    text = [1, 2, 3, 8, 1, 2, 3, 9, 7, 3, 5, 1, 2, 3]
    assert list(NgramIndex(text).continuations(2)) == [(3, [9, 7]), (3, [8, 1]), (1, [5, 1])]
    assert list(NgramIndex(text).continuations(1, places=1)) == [(3, [9]), (1, [5])]


def reference_continuations(tokens: list[int], count: int, places: int) -> list[tuple[int, list[int]]]:
    """By scanning: every earlier place of every suffix, longest first, then the most recent."""
    found, seen = [], set()
    for size in range(12, 0, -1):
        ends = [end for end in range(len(tokens) - 1, size - 1, -1) if tokens[end - size : end] == tokens[-size:]]
        for end in ends[:places] if size <= len(tokens) else ():
            if end not in seen:
                seen.add(end)
                found.append((size, tokens[end : end + count]))
    return found


@pytest.mark.parametrize("vocab", [2, 4, 12])
def test_continuations_are_those_of_a_scan(vocab):
    text = torch.randint(0, vocab, (120,), generator=torch.Generator().manual_seed(vocab)).tolist()
    for end in range(1, 120, 7):
        for places in (1, 3):
            found = list(NgramIndex(text[:end]).continuations(5, places))
            assert found == reference_continuations(text[:end], 5, places)


@pytest.mark.parametrize("vocab", [2, 5])
def test_an_index_that_goes_back_is_as_if_it_had_never_been_further(vocab):
    generator = torch.Generator().manual_seed(vocab)
    index, text = NgramIndex([]), []
    for _ in range(60):
        new = torch.randint(
            0, vocab, (int(torch.randint(0, 9, (), generator=generator)),), generator=generator
        ).tolist()
        index.extend(new)
        text += new
        back = int(torch.randint(0, min(len(text), 14) + 1, (), generator=generator))
        index.rewind(back)
        text = text[: len(text) - back]
        fresh = NgramIndex(text)
        assert index.tokens == fresh.tokens and index.places == fresh.places
    with pytest.raises(ValueError, match="cannot take"):
        index.rewind(len(text) + 1)


def test_continuations_share_a_tree():
    index = NgramIndex([1, 2, 3, 8, 1, 2, 3, 9, 7, 3, 5, 1, 2, 3, 9, 4, 1, 2, 3])
    paths = {(9, 4, 1): 3, (9, 7, 3): 3, (8, 1, 2): 3, (5, 1, 2): 1}

    def tree(depth, branch, nodes):
        found, nodes = [], continuation_tree(index, Shape(depth, branch, nodes))
        for node in nodes:
            path = (*(found[node.parent][0] if node.parent >= 0 else ()), node.token)
            assert node.depth == len(path)
            found.append((path, node.match))
        return dict(found)

    whole = {path[:size]: match for path, match in reversed(paths.items()) for size in (1, 2, 3)}
    assert tree(3, 5, 40) == whole
    assert list(tree(3, 5, 5)) == [(9,), (9, 4), (9, 4, 1), (9, 7), (9, 7, 3)]
    assert set(tree(3, 2, 40)) == {path for path in whole if path[0] != 5}, "the root has two children already"
    assert list(tree(2, 1, 2)) == [(9,), (9, 4)]


def test_ngram_trees_of_different_sizes():
    drafter = NgramDrafter()
    drafter.begin([[5, 6, 7, 6, 8, 6], [1, 2, 3]], first([[6, 7, 6, 8, 6, 6], [2, 3, 9]]), 10)
    draft = drafter.propose(torch.tensor([6, 9]), noise("shared_noise", 2), Shape(2, 2, 5))
    assert draft.rule == "shared_noise" and not draft.linear
    assert draft.tokens[0].tolist() == [6, 8, 6] and draft.parents[0].tolist() == [-1, -1, 1]
    assert draft.valid.tolist() == [[True] * 3, [False] * 3] and draft.parents[1].tolist() == [-1] * 3


# ---- picking a token -------------------------------------------------------------------------------------------------

LOGITS = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
IDS = torch.tensor([1, 4, 5, 8, 9, 12])


def test_a_deterministic_pick_is_the_argmax():
    token, probs = noise("deterministic").pick(LOGITS, 0, 6)
    assert torch.equal(token, LOGITS.argmax(-1)) and probs is None
    token, _ = noise("deterministic").pick(LOGITS, 0, 13, IDS)
    assert torch.equal(token, IDS[LOGITS.argmax(-1)])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_sampled_pick_carries_the_law_it_came_from(temperature):
    _, probs = noise("sampled", temperature=temperature).pick(LOGITS, 2, 13, IDS)
    expected = torch.zeros(3, 13, dtype=torch.float64)
    expected[:, IDS] = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(probs, expected[:, IDS])
    many = 1000
    draws = RoundNoise(torch.tensor([11]), torch.arange(many)[None], temperature, "sampled")
    tokens = torch.stack([draws.pick(LOGITS[:1], depth, 13, IDS)[0] for depth in range(1000)])
    counts = torch.bincount(tokens[:, 0], minlength=13) / 1000
    assert (counts - expected[0]).abs().max() < 5 * (0.25 / 1000) ** 0.5


@pytest.mark.parametrize("ids", [None, IDS])
def test_children_are_drawn_one_after_the_other_without_replacement(ids):
    vocab = 6 if ids is None else 13
    logits = LOGITS[:2, None].expand(-1, 3, -1) * torch.tensor([1.0, 0.5, 40.0]).double()[:, None]
    tokens, gains, laws = noise("sampled", batch=2, temperature=0.7).pick_children(logits, 1, 6, vocab, ids)
    whole = (logits / 0.7).softmax(-1)
    assert laws.isfinite().all() and laws.sum(-1).allclose(torch.ones(2, 3, 6, dtype=torch.float64))
    columns = tokens if ids is None else torch.searchsorted(ids, tokens)
    torch.testing.assert_close(gains[:, :2].exp(), whole[:, :2].gather(2, columns[:, :2]))
    assert (tokens.sort(-1).values == (torch.arange(6) if ids is None else ids)).all(), "no token twice"
    for child in range(6):
        left = whole[:, :2].scatter(2, columns[:, :2, :child], 0.0)
        torch.testing.assert_close(laws[:, :2, child], left / left.sum(-1, keepdim=True), atol=1e-12, rtol=1e-9)


def test_the_first_two_children_have_the_joint_law_of_two_draws():
    many, law = 2000, (LOGITS[0] / 0.7).softmax(-1)
    draws = RoundNoise(torch.tensor([11]), torch.arange(many)[None], 0.7, "sampled")
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for depth in range(many):
        first, second = draws.pick_children(LOGITS[:1, None], depth, 2, 6)[0][0, 0]
        counts[first, second] += 1 / many
    joint = law[:, None] * law[None, :] / (1 - law[:, None])
    joint.fill_diagonal_(0)
    assert joint.sum() == pytest.approx(1)
    assert ((counts - joint).abs() < (5 * (many * joint * (1 - joint)).sqrt() + 4 * (joint > 0)) / many + 1e-12).all()


def test_a_shared_noise_pick_reads_the_verifier_s_noise():
    shared = noise("shared_noise", temperature=0.5)
    token, probs = shared.pick(LOGITS, 1, 6)
    assert probs is None and torch.equal(token, (LOGITS / 0.5 + shared.gumbel(6)[:, 1]).argmax(-1))
    target = (LOGITS / 0.5).log_softmax(-1)[:, None].expand(-1, 4, -1)
    choice = verify(target[:, :1], Drafter().propose(token, shared, Shape(3)), Uniforms(gumbel=shared.gumbel(6)[:, 1:]))
    assert torch.equal(choice.tokens[:, 0], token), "a drafter that knows the target picks its token"
    reduced, _ = shared.pick(LOGITS, 1, 13, IDS)
    assert torch.equal(reduced, IDS[(LOGITS / 0.5 + shared.gumbel(13)[:, 1, IDS]).argmax(-1)])


# ---- inside the loop -------------------------------------------------------------------------------------------------


class FollowedEagle3(Follows, Eagle3Drafter):
    """Its drafts are recomputed without a cache, from the expert's features of the whole text."""

    expert = None

    def check(self, row, text, draft, noise):
        assert self.cache.lengths[row] == len(text) - 1, "one row per token before the root, drafts forgotten"
        ids = torch.tensor([text])
        features = self.expert.forward_full(ids, features=True).features[:, :-1]
        embeds = self.embedding(ids[:, 1:])
        root, tokens = torch.tensor([[len(text) - 2]]), draft.tokens[row : row + 1]
        states = self.head.unroll(
            features, embeds, root, draft.nodes, lambda step, state: self.embedding(tokens[:, step - 1 : step])
        )
        for depth, state in enumerate(states):
            logits = self.head.logits(state)[0, 0, : len(self.target_ids)]
            if noise.rule == "sampled":
                assert torch.equal(draft.ids, self.target_ids)
                expected = (logits / noise.temperature).softmax(-1)
                torch.testing.assert_close(draft.probs[row, depth], expected, atol=1e-12, rtol=1e-9)
            else:
                assert tokens[0, depth] == self.target_ids[logits.argmax()]


@pytest.mark.parametrize("rule", ["sampled", "deterministic"])
@pytest.mark.parametrize("kind, vocabulary", [("llama3", None), ("qwen3", None), ("qwen3", Reduced)])
def test_eagle3_drafts_from_true_features_of_everything_accepted(kind, vocabulary, rule):
    pair = tiny_pair(kind, dtype=torch.float64)
    rows = pair.expert.model.lm_head.weight.float()
    head = Eagle3Head.from_expert(pair.expert.config, vocabulary, seed=1, output_rows=rows).double()
    method = assemble("dcd_eagle3", pair, head)
    method.drafter = FollowedEagle3(head, pair.expert.embedding, pair.expert.vocab)
    method.drafter.expert, method.drafter.seen = pair.expert, Counter()
    assert method.drafter.target_ids.max() < VOCAB and (head.config.draft_vocab_size == 52) == (vocabulary is Reduced)
    # some ids end a text, so that rows leave one by one and others enter
    settings = Settings(
        Target(alpha=0.3, temperature=1.5),
        max_new_tokens=10,
        stop_ids=tuple(range(0, VOCAB, 9)),
        gamma=3,
        rule=rule,
        seed=1,
    )
    done = decode(method, prompts(6), settings, max_batch=3)
    assert method.drafter.seen["proposals"] > 6 and method.drafter.seen["joined"] > 0
    if rule == "sampled" and vocabulary is None:
        assert method.drafter.seen["ragged"] and sum(r.accepted for g in done for r in g.rounds) > 0


class FollowedAmateur(Follows, AmateurDrafter):
    """Its rows are the amateur's own, recomputed without a cache; the late row exists where everything passed."""

    def check(self, row, text, draft, noise):
        assert self.base[row] == len(text) - 1, "the amateur has read every accepted token once, and not the root"
        ids = torch.tensor([text + draft.tokens[row, :-1].tolist()])
        expected = self.amateur.forward_full(ids).logits[0, len(text) - 1 :]
        torch.testing.assert_close(self.rows[row], expected, atol=1e-10, rtol=1e-10)
        for depth in range(draft.nodes):
            torch.testing.assert_close(draft.probs[row, depth], (expected[depth] / noise.temperature).softmax(-1))

    def finish_late(self, rows, final):
        super().finish_late(rows, final)
        self.seen["late"] += 1
        assert any(rows) and self.cache.lengths == [b + 3 + late for b, late in zip(self.base, rows, strict=True)]

    def observe(self, accepted):
        # a late token reaches the host one round later
        AmateurDrafter.observe(self, accepted)
        assert self.cache.lengths == [base + count for base, count in zip(self.base, accepted.counts, strict=True)]
        self.seen["ragged"] += len(set(accepted.counts)) > 1
        last = accepted.tokens[torch.arange(len(accepted.counts)), torch.tensor(accepted.counts) - 1]
        for text, tokens, count, token in zip(
            self.texts, accepted.host_tokens, accepted.counts, last.tolist(), strict=True
        ):
            text += [*tokens[: count - 1], token]


def test_the_amateur_s_rows_and_its_delayed_row():
    pair = tiny_pair("llama3", dtype=torch.float64)
    pair.amateur = tiny_model("llama3", dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for weight in pair.amateur.model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64), alpha=0.02)
    method = assemble("scd", pair)
    method.drafter = FollowedAmateur(pair.amateur)
    method.drafter.seen = seen = Counter()
    settings = Settings(Target(alpha=0.3, temperature=1.0), max_new_tokens=16, gamma=3, seed=1)
    done = decode(method, prompts(5), settings, max_batch=4)
    rounds = [entry for generation in done for entry in generation.rounds]
    assert seen["ragged"] and seen["joined"] == 1 and 0 < seen["late"] < seen["proposals"]
    assert any(entry.accepted == 3 for entry in rounds) and any(entry.accepted < 3 for entry in rounds)


def test_a_drafter_that_drafts_nothing_offers_every_rule():
    for rule in Drafter.rules:
        draft = Drafter().propose(torch.tensor([1, 2]), noise(rule, 2), Shape(4))
        assert draft.nodes == 0 and draft.tokens.shape == (2, 0)
