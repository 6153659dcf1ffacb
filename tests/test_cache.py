"""The key/value cache equals transformers' own, row by row, whatever the rows of a batch have been through."""

import pytest
import torch
from tiny import KINDS, VOCAB, tiny_model
from transformers import DynamicCache

from dcd_core.cache import KVCache
from dcd_core.errors import UserError

TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-12}
MODELS = [(kind, dtype) for kind in KINDS for dtype in TOLERANCE]
# parents of the nodes after the root (column 0), as columns of the pass [root, node 0, ...]
TREES = [[0, 0, 1, 1, 2, 3], [0, 1, 2, 0, 4, 4]]
PATHS = [[0, 1, 3, 6], [0, 4, 6, 0]]
PATH_LENGTHS = [4, 3]


@pytest.fixture(scope="module")
def models():
    return {(kind, dtype): tiny_model(kind, dtype=dtype) for kind, dtype in MODELS}


@pytest.fixture(params=MODELS, ids=lambda pair: f"{pair[0]}-{str(pair[1]).split('.')[1]}")
def model(request, models):
    return models[request.param]


def words(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def stock_logits(model, committed: list[int], new: list[int]) -> torch.Tensor:
    """Logits of the stock model at every new token, on transformers' own cache, one row and no padding."""
    cache = DynamicCache()
    extra = {model._cache_keyword: cache, "use_cache": True}
    with torch.no_grad():
        if committed:
            model.model(torch.tensor([committed]), **extra)
        return model.model(torch.tensor([new]), **extra).logits[0, :, :VOCAB]


class Rows:
    """A cache and, beside it, the tokens that each of its rows should hold."""

    def __init__(self, model, prompts: list[list[int]], capacity: int = 40):
        self.model, self.texts = model, [[] for _ in prompts]
        self.cache = model.new_cache(len(prompts), capacity)
        self.append(prompts, [len(prompt) for prompt in prompts])

    def append(self, new: list[list[int]], keep: list[int]) -> None:
        """One pass over (right-padded) new tokens; all logits are compared, then ``keep[b]`` of each row stay."""
        width = max(map(len, new))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in new])
        logits = self.model.forward(ids, self.cache).logits
        for row, tokens in enumerate(new):
            expected = stock_logits(self.model, self.texts[row], tokens)
            torch.testing.assert_close(
                logits[row, : len(tokens)], expected, atol=TOLERANCE[self.model.dtype], rtol=TOLERANCE[self.model.dtype]
            )
        self.cache.commit(keep)
        self.texts = [text + row[:count] for text, row, count in zip(self.texts, new, keep, strict=True)]

    def rollback(self, lengths: list[int]) -> None:
        self.cache.rollback(lengths)
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.texts = [self.texts[row] for row in rows]


def ragged(model) -> Rows:
    return Rows(model, [words(5, 1), words(9, 2), words(2, 3)])


def test_ragged_rows_append_at_their_own_offsets(model):
    rows = ragged(model)
    rows.append([words(4, 4), words(4, 5), words(4, 6)], [4, 1, 0])
    rows.append([words(1, 7), words(1, 8), words(1, 9)], [1, 1, 1])
    rows.append([words(3, 10), words(3, 11), words(3, 12)], [0, 2, 3])
    assert rows.cache.lengths == [10, 13, 6] == [len(text) for text in rows.texts]
    rows.append([words(2, 13), words(2, 14), words(2, 15)], [2, 2, 2])


def test_what_was_rolled_back_leaves_no_trace(model):
    rows = ragged(model)
    rows.append([words(6, 4), words(6, 5), words(6, 6)], [6, 6, 6])
    rows.rollback([7, 3, 0])
    rows.append([words(3, 7), words(3, 8), words(3, 9)], [3, 2, 1])
    assert rows.cache.lengths == [10, 5, 1] == [len(text) for text in rows.texts]
    rows.append([words(2, 10), words(2, 11), words(2, 12)], [2, 2, 2])
    assert rows.cache.lengths == [12, 7, 3]


def test_rows_leave_and_change_places(model):
    rows = ragged(model)
    rows.keep_rows([2, 0])
    rows.append([words(3, 4), words(3, 5)], [3, 1])
    rows.keep_rows([1])
    rows.append([words(3, 6)], [3])
    assert rows.cache.batch == 1 and rows.cache.lengths == [9]


def test_rows_of_another_batch_join(model):
    rows, others = ragged(model), Rows(model, [words(4, 6), words(11, 7)])
    rows.cache.extend(others.cache)
    rows.texts += others.texts
    assert rows.cache.batch == 5 and rows.cache.lengths == [5, 9, 2, 4, 11]
    rows.append([words(3, seed) for seed in range(5)], [3, 0, 1, 2, 3])
    rows.append([words(2, seed) for seed in range(5)], [2] * 5)


def test_batches_of_different_capacity_do_not_join(models):
    model = models["smol", torch.float32]
    with pytest.raises(ValueError, match="cannot join caches of 8 and 9 slots a row"):
        model.new_cache(1, 8).extend(model.new_cache(1, 9))


def tree_inputs() -> tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]:
    """Tree mask, depths, and for every column its ancestors from the root down to itself."""
    mask, depths, lines = torch.zeros(2, 7, 7, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.int64), []
    for row, parents in enumerate(TREES):
        ancestry = [[0]]
        for column, parent in enumerate(parents, start=1):
            ancestry.append([*ancestry[parent], column])
        for column, line in enumerate(ancestry):
            mask[row, column, line] = True
            depths[row, column] = len(line) - 1
        lines.append(ancestry)
    return mask, depths, lines


def test_tree_nodes_see_their_ancestors_only(model):
    rows = Rows(model, [words(4, 1), words(7, 2)])
    tokens, (mask, depths, lines) = [words(7, 3), words(7, 4)], tree_inputs()
    step_logits = model.forward(torch.tensor(tokens), rows.cache, tree_mask=mask, depths=depths).logits
    for row in range(2):
        for column, line in enumerate(lines[row]):
            expected = stock_logits(model, rows.texts[row], [tokens[row][place] for place in line])[-1]
            tolerance = TOLERANCE[model.dtype]
            torch.testing.assert_close(step_logits[row, column], expected, atol=tolerance, rtol=tolerance)


def test_a_kept_path_of_a_tree_is_the_plain_sequence(model):
    prompts, tokens, (mask, depths, _) = [words(4, 1), words(7, 2)], [words(7, 3), words(7, 4)], tree_inputs()
    rows = Rows(model, prompts)
    model.forward(torch.tensor(tokens), rows.cache, tree_mask=mask, depths=depths)
    rows.cache.commit_path(torch.tensor(PATHS), PATH_LENGTHS)
    kept = [[tokens[row][column] for column in PATHS[row][: PATH_LENGTHS[row]]] for row in range(2)]
    plain = Rows(model, prompts)
    plain.append(kept, PATH_LENGTHS)
    assert rows.cache.lengths == plain.cache.lengths == [8, 10]
    for layer, expected in zip(rows.cache.layers, plain.cache.layers, strict=True):
        for row, length in enumerate(rows.cache.lengths):
            for name in ("keys", "values"):
                torch.testing.assert_close(
                    getattr(layer, name)[row, :, :length],
                    getattr(expected, name)[row, :, :length],
                    atol=TOLERANCE[model.dtype],
                    rtol=TOLERANCE[model.dtype],
                )
    rows.texts = plain.texts
    rows.append([words(3, 5), words(3, 6)], [3, 0])


def test_a_path_is_gathered_at_once():
    """Slots that are source and target of one move: a copy in order would read what it has just written."""
    cache = KVCache(layers=1, batch=1, capacity=8, device="cpu")
    cache.plan(4)
    states = torch.arange(4.0).view(1, 1, 4, 1)
    cache.update(states, states + 10, 0)
    cache.commit_path(torch.tensor([[0, 3, 1, 2]]), [4])
    assert cache.layers[0].keys[0, 0, :4, 0].tolist() == [0, 3, 1, 2]
    assert cache.layers[0].values[0, 0, :4, 0].tolist() == [10, 13, 11, 12]


def test_memory_that_was_dirty_gives_no_nan():
    """With deterministic algorithms on, torch fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        model = tiny_model("llama3")
        rows = ragged(model)
        rows.append([words(4, 4), words(4, 5), words(4, 6)], [4, 1, 0])
    finally:
        torch.use_deterministic_algorithms(False)


def free_slots_filled(model, value: float) -> torch.Tensor:
    """Logits of a ragged batch whose free slots all hold ``value``."""
    rows = ragged(model)
    for layer in rows.cache.layers:
        for row, length in enumerate(rows.cache.lengths):
            layer.keys[row, :, length:] = value
            layer.values[row, :, length:] = value
    return model.forward(torch.tensor([words(2, 4), words(2, 5), words(2, 6)]), rows.cache).logits


def test_masked_slots_may_hold_any_number_but_no_nan(models):
    model = models["llama3", torch.float32]
    clean = free_slots_filled(model, 0.0)
    assert torch.equal(free_slots_filled(model, 1e4), clean)
    assert free_slots_filled(model, float("nan")).isnan().any(), "0 * NaN is NaN: this is why buffers start as zeros"


def test_a_new_cache_is_zero_and_takes_the_shape_of_the_model(models):
    model = models["qwen3", torch.float64]
    cache = model.new_cache(3, 17)
    assert len(cache.layers) == 8 and cache.lengths == [0, 0, 0] and cache.batch == 3
    model.forward(torch.zeros(3, 5, dtype=torch.int64), cache)
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            assert buffer.shape == (3, 2, 17, 16) and buffer.dtype == torch.float64 and not buffer[:, :, 5:].any()


def test_keys_and_values_may_differ_in_size():
    """As those of multi-head latent attention do."""
    cache = KVCache(layers=1, batch=2, capacity=8, device="cpu")
    cache.plan(4)
    keys, values = torch.arange(16.0).view(2, 1, 4, 2), torch.arange(24.0).view(2, 1, 4, 3)
    cache.update(keys, values, 0)
    cache.commit_path(torch.tensor([[0, 3], [0, 2]]), [2, 2])
    cache.keep_rows([1])
    layer = cache.layers[0]
    assert torch.equal(layer.keys[0, 0, :2], keys[1, 0, [0, 2]])
    assert torch.equal(layer.values[0, 0, :2], values[1, 0, [0, 2]])


def test_a_window_counts_positions_and_not_slots():
    """A window of 2: each token sees itself and the one before it on its own path, wherever that stands."""
    cache = KVCache(layers=1, batch=2, capacity=12, device="cpu", windowed=True)
    cache.plan(5)
    cache.commit([5, 2])
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool).expand(2, 4, 4)
    step = cache.plan(4, sees, torch.tensor([[0, 1, 1, 2]] * 2))
    mask = cache.windowed(step, 2)
    for row, length in enumerate([5, 2]):
        seen = [[slot - length for slot in line.nonzero()[:, 0].tolist()] for line in mask[row, 0]]
        assert seen == [[-1, 0], [0, 1], [0, 2], [2, 3]]
    cache.commit_path(torch.tensor([[0, 2, 3]] * 2), [3, 3])
    mask = cache.windowed(cache.plan(1), 3)
    assert [line.nonzero()[:, 0].tolist() for line in mask[:, 0, 0]] == [[6, 7, 8], [3, 4, 5]]


def test_a_pass_beyond_the_capacity_is_refused_and_changes_nothing(models):
    model = models["smol", torch.float32]
    rows = Rows(model, [words(3, 1), words(6, 2)], capacity=8)
    with pytest.raises(UserError, match=r"holds 8 tokens a row, but a row of 6 tokens was given 3 more"):
        model.forward(torch.zeros(2, 3, dtype=torch.int64), rows.cache)
    assert rows.cache.lengths == [3, 6]
    rows.append([words(2, 3), words(2, 4)], [2, 2])


def states(batch: int, width: int) -> torch.Tensor:
    return torch.zeros(batch, 2, width, 8)


def test_every_pass_needs_its_own_plan(models):
    cache = models["smol", torch.float32].new_cache(2, 8)
    with pytest.raises(ValueError, match="without a plan"):
        cache.update(states(2, 1), states(2, 1), 0)
    with pytest.raises(ValueError, match="without a plan"):
        cache.commit([0, 0])
    cache.plan(1)
    cache.update(states(2, 1), states(2, 1), 0)
    cache.commit([1, 0])
    for end in (lambda: cache.rollback([1, 0]), lambda: cache.keep_rows([0, 1])):
        cache.plan(1)
        end()
        with pytest.raises(ValueError, match="without a plan"):
            cache.update(states(2, 1), states(2, 1), 0)


def test_a_pass_of_another_width_than_planned_is_refused(models):
    cache = models["smol", torch.float32].new_cache(2, 8)
    cache.plan(3)
    with pytest.raises(ValueError, match="planned for 3 new tokens but brings 2"):
        cache.update(states(2, 2), states(2, 2), 0)


@pytest.mark.parametrize("counts", [[1], [1, 3], [-1, 0], [1, 1, 1]])
def test_a_commit_that_does_not_fit_the_pass_is_refused(models, counts):
    cache = models["smol", torch.float32].new_cache(2, 8)
    cache.plan(2)
    with pytest.raises(ValueError, match="does not fit a pass of 2 new tokens in 2 rows"):
        cache.commit(counts)
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize("lengths", [[3], [3, 5], [-1, 4], [2, 2, 2]])
def test_a_rollback_cannot_add_tokens(models, lengths):
    rows = Rows(models["smol", torch.float32], [words(3, 1), words(4, 2)])
    with pytest.raises(ValueError, match="cannot roll back"):
        rows.cache.rollback(lengths)
    assert rows.cache.lengths == [3, 4]


def test_positions_are_slots_unless_depths_say_otherwise():
    cache = KVCache(1, batch=2, capacity=12, device="cpu")
    cache.plan(5)
    cache.commit([5, 2])
    step = cache.plan(3)
    assert step.positions.tolist() == step.slots.tolist() == [[5, 6, 7], [2, 3, 4]] and step.extent == 8
    assert step.mask[1, 0].tolist() == [[True] * 3 + [False] * 5, [True] * 4 + [False] * 4, [True] * 5 + [False] * 3]
    step = cache.plan(3, torch.eye(3, dtype=torch.bool).expand(2, 3, 3), torch.tensor([[0, 1, 1]] * 2))
    assert step.positions.tolist() == [[5, 6, 6], [2, 3, 3]] and step.slots.tolist() == [[5, 6, 7], [2, 3, 4]]
    assert step.mask[1, 0].tolist() == [
        [True, True, True, False, False, False, False, False],
        [True, True, False, True, False, False, False, False],
        [True, True, False, False, True, False, False, False],
    ]


def test_transformers_reads_lengths_and_sizes(models):
    rows = ragged(models["smol", torch.float32])
    layer = rows.cache.layers[0]
    assert layer.get_seq_length() == 9 and layer.get_max_length() == layer.get_max_cache_shape() == 40
    rows.cache.plan(2)
    assert layer.get_mask_sizes() == (11, 0)
