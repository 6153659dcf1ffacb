"""Order, shares and counts of the training texts."""

import numpy as np
import pytest
from toy_training import STOP, toy_samples

from data_prep.token_files import write_tokens
from dcd_core.errors import UserError
from train.batches import Plan, Stream, Texts
from train.schedule import learning_rate
from train.unroll import count_rows


@pytest.fixture
def tokens(tmp_path):
    write_tokens(tmp_path / "tokens.parquet", toy_samples(30), {})
    return str(tmp_path / "tokens.parquet")


def plan(texts: int = 37, batch_size: int = 2, world: int = 1, accumulation: int = 2, seed: int = 0) -> Plan:
    lengths = np.random.default_rng(1).integers(3, 50, texts).tolist()
    return Plan(tuple(lengths), batch_size, world, accumulation, seed)


def test_an_epoch_reads_every_text_once():
    one = plan()
    read = [t for step in range(one.steps_per_epoch) for ranks in one.step(0, step) for texts in ranks for t in texts]
    assert sorted(read) == list(range(37))


def test_order_depends_on_seed_and_epoch_only():
    assert plan().step(0, 3) == plan().step(0, 3)
    assert plan().step(0, 3) != plan().step(1, 3)
    assert plan().step(0, 3) != plan(seed=1).step(0, 3)


@pytest.mark.parametrize("batch_size, world", [(4, 1), (2, 2), (1, 4)])
def test_ranks_share_what_one_rank_would_read(batch_size, world):
    alone, shared = plan(batch_size=4), plan(batch_size=batch_size, world=world)
    assert alone.steps_per_epoch == shared.steps_per_epoch
    for step in range(alone.steps_per_epoch):
        for whole, parts in zip(alone.step(1, step), shared.step(1, step), strict=True):
            assert len(parts) == world
            assert sorted(whole[0]) == sorted(text for part in parts for text in part)


def test_no_rank_is_left_without_a_micro_batch():
    """37 texts in steps of 16 leave 5: three ranks of eight read nothing in the last one, but all of them step."""
    shared = plan(batch_size=1, world=8)
    sizes = [[len(texts) for texts in ranks] for step in range(3) for ranks in shared.step(0, step)]
    assert len(sizes) == 6 and all(len(ranks) == 8 for ranks in sizes) and 0 in sizes[-1] + sizes[-2] + sizes[1]


def test_texts_of_a_step_have_similar_lengths():
    one = plan(texts=600)
    lengths = np.array(one.lengths)
    spread = np.mean(
        [np.ptp(lengths[[t for ranks in one.step(0, s) for texts in ranks for t in texts]]) for s in range(100)]
    )
    assert spread < 10 < np.ptp(lengths)


def test_a_long_text_is_cut_with_its_answers_and_counted(tokens):
    whole = Texts.load(tokens, 1000, 96)
    short = Texts.load(tokens, 8, 96)
    assert (whole.shortened, whole.dropped) == (0, 0)
    assert short.shortened > 0 and max(short.lengths) == 8 and len(short) + short.dropped == 30
    assert all(end <= 8 for sample in short.samples for _, end in sample.answer_spans)
    assert f"{short.shortened} cut" in short.describe()
    assert whole.hash != short.hash
    # a cut answer keeps its last token as a target: there is no end-of-turn token after it
    sample = next(s for s in short.samples if len(s.input_ids) == 8 and s.input_ids[7] != STOP)
    start, end = sample.answer_spans[-1]
    assert end == 8 and count_rows(sample.input_ids, [(start, end)], frozenset({STOP}), 1) == [8 - start]


def test_nothing_left_and_foreign_ids_are_refused(tokens):
    with pytest.raises(UserError, match="within 2 tokens"):
        Texts.load(tokens, 2, 96)
    with pytest.raises(UserError, match="another tokenizer"):
        Texts.load(tokens, 100, 50)


def test_a_smaller_set_is_part_of_a_larger_one(tokens):
    small, large = Texts.load(tokens, 100, 96, max_answer_tokens=60), Texts.load(tokens, 100, 96, max_answer_tokens=120)
    assert [s.id for s in small.samples] == [s.id for s in large.samples[: len(small)]]
    assert len(small) < len(large) < 30
    assert 60 <= small.answer_tokens < 80
    assert len(Texts.load(tokens, 100, 96, first=4)) == 4


@pytest.mark.parametrize("world", [1, 2])
def test_denominators_count_the_whole_optimiser_step(tokens, world):
    texts = Texts.load(tokens, 100, 96)
    order = Plan(tuple(texts.lengths), 4 // world, world, 2, 0)

    def count(sample):
        return count_rows(sample.input_ids, list(sample.answer_spans), frozenset({STOP}), 3)

    for step in range(order.steps_per_epoch):
        found = [Stream(texts, order, rank, count).at(step) for rank in range(world)]
        assert all(denominators == found[0][1] for _, denominators in found)
        read = {name for batches, _ in found for batch in batches for name in batch.ids}
        expected = np.sum([count(sample) for sample in texts.samples if sample.id in read], axis=0)
        assert found[0][1] == expected.tolist()
        eagle = [Stream(texts, order, rank, count, "eagle").at(step) for rank in range(world)]
        positions = sum(b.input_ids.numel() for batches, _ in eagle for b in batches if b.ids != ["(none)"])
        assert eagle[0][1] == [positions] * 3


def test_batches_are_right_padded(tokens):
    texts = Texts.load(tokens, 100, 96)
    batch = texts.batch([0, 7, 3])
    for row, index in enumerate([0, 7, 3]):
        ids = texts.samples[index].input_ids
        assert batch.input_ids[row, : len(ids)].tolist() == ids.tolist() and not batch.input_ids[row, len(ids) :].any()
    assert batch.tokens == sum(texts.lengths[index] for index in (0, 7, 3))
    assert texts.batch([]).tokens == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate(schedule):
    rates = [learning_rate(step, 100, 1.0, 10, schedule) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert all(after < before for before, after in zip(rates[10:], rates[11:], strict=False)) and 0 < rates[-1] < 0.02
    middle = learning_rate(55, 100, 1.0, 10, schedule)
    assert middle == pytest.approx(0.5)
    assert learning_rate(100, 100, 1.0, 10, schedule, final_ratio=0.1) == pytest.approx(0.1)
