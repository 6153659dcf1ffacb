"""Every method, drafter, batch size and rule gives the text of the plainest loop."""

import pytest
import torch
from naive import assembled, greedy, greedy_cd, near_pair, some_prompts, tiny_head
from tiny import KINDS, VOCAB, tiny_model, tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Prompt, Scorer, Settings, decode, stream
from dcd_core.draft import Draft
from dcd_core.drafters.ngram import NgramDrafter
from dcd_core.drafters.protocol import Drafter
from dcd_core.methods import METHODS, assemble

TOKENS = 7
PROMPTS = some_prompts(4)
CONTRAST = [name for name in METHODS if name not in ("ar", "expert_sd")]


@pytest.fixture(scope="module")
def pairs():
    """Tiny pairs in fp64, with a head each."""
    made = {kind: tiny_pair(kind, dtype=torch.float64) for kind in KINDS}
    return {kind: (pair, tiny_head(pair)) for kind, pair in made.items()}


@pytest.fixture(scope="module")
def near():
    """Pairs whose amateur's drafts often pass."""
    return near_pair("llama3", 0.01), near_pair("llama3", 0.0)


@pytest.fixture(scope="module")
def plain(pairs):
    """Greedy contrastive texts by the plainest loop."""
    return {
        (kind, alpha): [greedy_cd(pair, prompt.ids, alpha, TOKENS) for prompt in PROMPTS]
        for kind, (pair, _) in pairs.items()
        for alpha in (0.0, 0.1, 0.5)
    }


def greedy_settings(alpha: float = 0.0, **fields) -> Settings:
    return Settings(Target(alpha=alpha, temperature=0.0), **{"max_new_tokens": TOKENS, "gamma": 3, **fields})


def noisy_settings(alpha: float, rule: str, **fields) -> Settings:
    return Settings(Target(alpha=alpha), **{"max_new_tokens": TOKENS, "gamma": 3, "seed": 5, "rule": rule, **fields})


def texts(generations) -> list[list[int]]:
    return [generation.ids for generation in generations]


def accepted(generations) -> int:
    return sum(entry.accepted for generation in generations for entry in generation.rounds)


# ---- temperature 0 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_cache_free_loop_s(pairs, plain, kind, alpha):
    for name in METHODS:
        found = decode(assembled(name, *pairs[kind]), PROMPTS, greedy_settings(alpha), max_batch=4)
        expected = plain[kind, alpha if name in CONTRAST else 0.0]
        assert texts(found) == expected, name
        assert [(g.prompt_id, g.sample, g.finish) for g in found] == [(p.id, 0, "length") for p in PROMPTS]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_of_single_rows_is_the_same(pairs, plain, kind, name):
    found = decode(assembled(name, *pairs[kind]), PROMPTS[1:3], greedy_settings(0.5), max_batch=1)
    assert texts(found) == plain[kind, 0.5 if name in CONTRAST else 0.0][1:3]


def test_a_contrast_changes_the_text(plain):
    for kind in KINDS:
        assert plain[kind, 0.5] != plain[kind, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_ar_is_stock_generate(pairs, kind):
    pair, _ = pairs[kind]
    found = decode(assemble("ar", pair), PROMPTS, greedy_settings(stop_ids=(3, 40, 41)), max_batch=4)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        ids = pair.expert.model.generate(
            torch.tensor([prompt.ids]),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=[3, 40, 41],
            pad_token_id=1,
            suppress_tokens=list(range(VOCAB, pair.expert.config.vocab_size)) or None,
        )
        assert ids[0, len(prompt.ids) :].tolist() == generation.ids


def test_a_cutoff_is_part_of_every_method(pairs):
    pair, head = pairs["llama3"]
    expected = [greedy_cd(pair, prompt.ids, 0.5, TOKENS, cutoff=0.8) for prompt in PROMPTS]
    assert expected != [greedy_cd(pair, prompt.ids, 0.5, TOKENS) for prompt in PROMPTS], "the cutoff matters here"
    settings = Settings(Target(alpha=0.5, temperature=0.0, cutoff=0.8), max_new_tokens=TOKENS, gamma=3)
    for name in CONTRAST:
        assert texts(decode(assembled(name, pair, head), PROMPTS, settings, max_batch=4)) == expected


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_rows_that_accept_different_numbers_of_drafts(near, alpha):
    pair = near[0]
    found = decode(assemble("scd", pair), PROMPTS, greedy_settings(alpha, max_new_tokens=16), max_batch=4)
    assert texts(found) == [greedy_cd(pair, prompt.ids, alpha, 16) for prompt in PROMPTS]
    counts = {entry.accepted for generation in found for entry in generation.rounds}
    assert 3 in counts and len(counts) > 1 and len({len(generation.rounds) for generation in found}) > 1


class Scripted(Drafter):
    """Proposes the true continuation with errors at chosen places, as a chain or inside a tree, and checks the expert's
    features that it is handed."""

    feature_scorers = (0,)

    def __init__(self, truth: dict[tuple[int, ...], list[int]], tree: bool, expert):
        self.truth, self.tree, self.expert = truth, tree, expert

    def most_nodes(self, shape):
        return 2 * shape.depth + 1 if self.tree else shape.depth

    def begin(self, prompts, first, capacity):
        self.prompts, self.texts = [tuple(prompt) for prompt in prompts], [prompt[:1] for prompt in prompts]
        self.observe(first)

    def propose(self, root, noise, shape):
        lines, gamma = [], shape.depth
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            done = len(text) - len(prompt)
            line = (self.truth[prompt][done : done + gamma] + [7] * gamma)[:gamma]
            # every third place of the text is guessed wrongly
            lines.append([(token + (place % 3 == 2)) % VOCAB for place, token in enumerate(line, start=done)])
        tokens = torch.tensor(lines)
        if not self.tree:
            return Draft.chain(tokens, rule=noise.rule)
        # a wrong sibling before each true token, and children below the wrong ones too
        wrong = (tokens + 1) % VOCAB
        nodes = torch.stack([wrong, tokens], dim=2).flatten(1)
        parents = torch.tensor([[-1, -1] + [node - 1 - node % 2 for node in range(2, 2 * gamma)]]).expand_as(nodes)
        nodes, parents = torch.cat([nodes, tokens[:, 1:2]], dim=1), torch.cat([parents, 0 * parents[:, :1]], dim=1)
        return Draft(nodes, parents.contiguous(), torch.ones_like(nodes, dtype=torch.bool), noise.rule)

    def observe(self, accepted):
        for row, (text, count) in enumerate(zip(self.texts, accepted.counts, strict=True)):
            start = len(text) - 1
            text += accepted.host_tokens[row][:count]
            expected = self.expert.forward_full(torch.tensor([text]), features=True).features[0, start:-1]
            torch.testing.assert_close(accepted.features[row, :count], expected, atol=1e-10, rtol=1e-10)

    def keep_rows(self, rows):
        self.prompts, self.texts = [self.prompts[row] for row in rows], [self.texts[row] for row in rows]

    def extend(self, other):
        self.prompts, self.texts = self.prompts + other.prompts, self.texts + other.texts


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "deterministic", "shared_noise"])
def test_chains_and_trees_of_mixed_quality(pairs, tree, rule):
    pair, _ = pairs["qwen3"]
    settings = greedy_settings(0.5) if rule == "greedy" else noisy_settings(0.5, rule)
    reference = decode(assemble("cd", pair), PROMPTS, settings, max_batch=4)
    truth = {tuple(prompt.ids): generation.ids for prompt, generation in zip(PROMPTS, reference, strict=True)}
    method = Assembled("scripted", [Scorer(pair.expert), Scorer(pair.amateur)], Scripted(truth, tree, pair.expert))
    found = decode(method, PROMPTS, settings, max_batch=3)
    if rule == "deterministic":  # another use of the same uniforms: another text of the same law
        assert texts(found) == texts(decode(method, PROMPTS, settings, max_batch=1))
    else:
        assert texts(found) == texts(reference) and accepted(found) >= 3 * 4


def test_three_scorers_and_their_own_prefixes(pairs):
    """Proxy tuning is a list of three, guidance with another prompt a scorer with its own prefix."""
    pair, _ = pairs["smol"]
    third = tiny_model("smol", seed=7, layers=2, dtype=torch.float64)
    negative = [9, 8, 60, 11, 12, 13, 14, 15, 16, 17]
    scorers = [
        Scorer(pair.expert),
        Scorer(pair.amateur),
        Scorer(third, prefix=lambda prompt: negative + prompt.ids[:2]),
    ]
    settings = Settings(Target(temperature=0.0, weights=(1.0, 0.6, -0.6)), max_new_tokens=TOKENS, gamma=3)
    models, weights = [pair.expert, pair.amateur, third], [1.0, 0.6, -0.6]
    expected = [greedy(models, weights, [p.ids, p.ids, negative + p.ids[:2]], TOKENS) for p in PROMPTS]
    for drafter in (Drafter(), NgramDrafter()):
        assert texts(decode(Assembled("three", scorers, drafter), PROMPTS, settings, max_batch=4)) == expected


# ---- temperature 1 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_shared_noise_gives_vanilla_cd_s_text_whatever_the_drafter(pairs, kind):
    settings = noisy_settings(0.1, "shared_noise")
    reference = {
        name: texts(decode(assembled(name, *pairs[kind]), PROMPTS, settings, max_batch=4)) for name in ("cd", "ar")
    }
    assert reference["cd"] != reference["ar"]
    for name in METHODS:
        found = decode(assembled(name, *pairs[kind]), PROMPTS, settings, max_batch=2)
        assert texts(found) == reference["cd" if name in CONTRAST else "ar"], name


@pytest.mark.parametrize("name", METHODS)
def test_shared_noise_of_single_rows(pairs, near, name):
    head = pairs["llama3"][1]
    settings = noisy_settings(0.5, "shared_noise")
    vanilla = assemble("cd" if name in CONTRAST else "ar", near[0])
    found = decode(assembled(name, near[0], head), PROMPTS[:2], settings, max_batch=1)
    assert texts(found) == texts(decode(vanilla, PROMPTS[:2], settings, max_batch=2))


@pytest.mark.parametrize(
    "name, rule",
    [
        (name, rule)
        for name in METHODS
        for rule in ("sampled", "deterministic")
        if not (name in ("dcd_ngram", "dcd_hybrid") and rule == "sampled") and name not in ("ar", "auto")
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(pairs, near, name, rule):
    settings = noisy_settings(0.3, rule)
    pair, head = near[0] if name in ("scd", "dcd_lm") else pairs["llama3"][0], pairs["llama3"][1]
    whole = decode(assembled(name, pair, head), PROMPTS, settings, max_batch=3)
    assert texts(decode(assembled(name, pair, head), PROMPTS[::-1], settings, max_batch=4))[::-1] == texts(whole)
    single = decode(assembled(name, pair, head), PROMPTS[2:3], settings, max_batch=1)[0]
    assert single.ids == whole[2].ids
    for alone, beside in zip(single.rounds, whole[2].rounds, strict=True):
        assert (alone.accepted, alone.emitted) == (beside.accepted, beside.emitted)
    if rule == "sampled" and name in ("scd", "dcd_eagle3", "expert_sd", "dcd_lm"):
        assert accepted(whole) > 0


def test_the_seed_the_prompt_and_the_sample_make_the_text(pairs):
    pair, head = pairs["smol"]
    prompts = [Prompt("a", [9, 10]), Prompt("a", [9, 10], sample=1), Prompt("b", [9, 10])]

    def run(seed):
        return texts(decode(assemble("dcd_eagle3", pair, head), prompts, noisy_settings(0.1, "auto", seed=seed), 3))

    first, again, other = run(1), run(1), run(2)
    assert first == again and all(left != right for left, right in zip(first, other, strict=True))
    assert first[0] != first[1] != first[2] != first[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_zero_makes_dcd_the_expert_s_speculative_decoding(pairs, temperature):
    pair, head = pairs["qwen3"]
    settings = Settings(Target(temperature=temperature), max_new_tokens=TOKENS, gamma=3)
    both, alone = (decode(assembled(name, pair, head), PROMPTS, settings, 4) for name in ("dcd_eagle3", "expert_sd"))
    assert texts(both) == texts(alone)
    for left, right in zip(both, alone, strict=True):
        assert [(r.drafted, r.accepted, r.emitted) for r in left.rounds] == [
            (r.drafted, r.accepted, r.emitted) for r in right.rounds
        ]


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_waiting_prompts_enter_a_running_batch(pairs, near, name):
    """Rows stop at different times, others take their place; results keep the order of the prompts."""
    pair, head = near[0] if name in ("scd", "dcd_lm") else pairs["llama3"][0], pairs["llama3"][1]
    prompts, method = some_prompts(6, seed=3), assembled(name, pair, head)
    settings = greedy_settings(0.3, max_new_tokens=10, stop_ids=tuple(range(0, VOCAB, 9)))
    finished = []
    found = decode(method, prompts, settings, max_batch=3, on_finish=finished.append)
    alone = [decode(method, [prompt], settings)[0] for prompt in prompts]
    assert texts(found) == texts(alone) and len({len(text) for text in texts(found)}) > 2
    assert [generation.prompt_id for generation in found] == [prompt.id for prompt in prompts]
    assert sorted(g.prompt_id for g in finished) == sorted(p.id for p in prompts)
    assert [g.index for g in found] == list(range(6))


@pytest.mark.parametrize("name", ["cd", "scd", "dcd_ngram"])
def test_a_stream_hands_out_every_token_once(near, name):
    settings = greedy_settings(0.1, max_new_tokens=12, stop_ids=tuple(range(0, VOCAB, 9)))
    heard: dict[int, list[int]] = {}
    for news in stream(assembled(name, near[0]), PROMPTS, settings, 2):
        for generation, tokens in news:
            heard.setdefault(generation.index, []).extend(tokens)
            assert heard[generation.index] == generation.ids
    assert [heard[i] for i in range(4)] == texts(decode(assembled(name, near[0]), PROMPTS, settings, 4))


def test_no_prompts_no_results(pairs):
    assert decode(assemble("cd", pairs["smol"][0]), [], greedy_settings()) == []
