"""Top-k and top-p against a full stable sort, ties and edges included, and what they cost."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcd_core import truncation
from dcd_core.contrast import Target, plausible, target_log_probs
from dcd_core.truncation import FEW, truncated

INF = math.inf
KS = (0, 1, 2, 7, 40, 96, 200)
PS = (1e-12, 0.05, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0)


def by_sorting(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The definition: sort all ids by score, equal scores by id; keep the first k; of these the shortest beginning with
    a share p of their probability."""
    flat = scores.reshape(-1, scores.shape[-1])
    kept = torch.full_like(flat, -INF)
    for row, out in zip(flat, kept, strict=True):
        order = row.argsort(descending=True, stable=True)
        if top_k:
            order = order[:top_k]
        if top_p < 1:
            weights = (row[order] - row.max()).exp().double()
            running = weights.cumsum(0)
            mass_before = torch.cat([running.new_zeros(1), running[:-1]])
            order = order[mass_before < top_p * weights.sum()]
        out[order] = row[order]
    return kept.reshape(scores.shape)


def random_scores(*shape: int, scale: float = 2.0, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + 30).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", PS)
@pytest.mark.parametrize("top_k", KS)
def test_it_is_what_a_full_sort_gives(top_k, top_p, dtype):
    if dtype == torch.float32 and top_p == 1 - 1e-9:
        return  # a share that fp32 cannot tell from 1
    for scale in (0.1, 2.0, 20.0):
        scores = random_scores(3, 5, 96, scale=scale, dtype=dtype)
        assert torch.equal(truncated(scores, top_k, top_p), by_sorting(scores, top_k, top_p))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 5, 11])
def test_ties_go_to_the_lowest_id(top_k, top_p):
    """Scores of a few levels: at every edge several ids are level."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 3, (50, 12), generator=generator).double()
    assert torch.equal(truncated(scores, top_k, top_p), by_sorting(scores, top_k, top_p))


def test_ties_by_hand():
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    for top_k, kept in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        assert truncated(row, top_k, 1.0).isfinite().nonzero()[:, 0].tolist() == kept
    level = torch.zeros(8)
    for count in range(1, 9):
        expected = [0.0] * count + [-INF] * (8 - count)
        assert truncated(level, 0, count / 8).tolist() == expected, "a share of exactly p is enough"
        assert truncated(level, count, 1.0).tolist() == expected
    assert truncated(level, 4, 0.5).tolist() == [0.0] * 2 + [-INF] * 6, "p of what the k hold"


def test_one_id_always_stays():
    scores = random_scores(20, 50, scale=0.01)
    for cut in ((0, 1e-300), (1, 1.0), (7, 1e-300)):
        kept = truncated(scores, *cut).isfinite()
        assert (kept.sum(-1) == 1).all() and torch.equal(kept.double().argmax(-1), scores.argmax(-1))


def test_p_of_one_and_k_of_all_keep_everything():
    """Also ids so rare that a running sum does not see them."""
    row = torch.tensor([0.0, -50.0, -300.0], dtype=torch.float64)
    assert truncated(row, 0, 1.0) is row and truncated(row, 3, 1.0) is row and truncated(row, 1000, 1.0) is row
    assert truncated(row, 2, 1.0).tolist() == [0.0, -50.0, -INF]


def test_excluded_ids_stay_out_and_do_not_count():
    scores = random_scores(30, 64)
    scores[:, 3:] = -INF
    for top_k in (0, 1, 2, 3, 5, 64):
        for top_p in (0.3, 0.9, 1.0):
            kept = truncated(scores, top_k, top_p)
            assert torch.equal(kept, by_sorting(scores, top_k, top_p))
            assert not kept.isnan().any() and (kept[:, 3:] == -INF).all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 3.0])
def test_where_the_best_few_hold_too_little_more_are_looked_at(scale):
    """A flat row of 9000 ids reaches 90% only after thousands of them; beside it a peaked row."""
    flat = random_scores(1, 9000, scale=scale)
    peaked = random_scores(1, 9000, scale=10.0, seed=5)
    scores = torch.cat([flat, peaked])
    kept = truncated(scores, 0, 0.9)
    assert torch.equal(kept, by_sorting(scores, 0, 0.9))
    counts = kept.isfinite().sum(-1).tolist()
    assert counts[1] < FEW and (scale > 1 or counts[0] > 16 * FEW)
    for row in range(2):
        assert torch.equal(truncated(scores[row : row + 1], 0, 0.9)[0], kept[row]), "whatever its neighbours need"
        assert torch.equal(truncated(scores[row], 0, 0.9), kept[row]), "a row without a batch"


@pytest.mark.parametrize("few", [1, 2, 5])
def test_how_many_are_looked_at_first_does_not_matter(few, monkeypatch):
    monkeypatch.setattr(truncation, "FEW", few)
    level = torch.randint(0, 3, (50, 12), generator=torch.Generator().manual_seed(1)).double()
    for scores in (*(random_scores(3, 5, 96, scale=scale) for scale in (0.1, 2.0, 20.0)), level):
        for top_p in (0.5, 0.9):
            assert torch.equal(truncated(scores, 0, top_p), by_sorting(scores, 0, top_p))


@pytest.mark.parametrize("cut", [(2, 1.0), (0, 0.5), (3, 0.5), (0, 0.999)])
@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("vocab", [12, 9000])
def test_broken_rows_are_not_hidden(cut, bad, vocab):
    scores = random_scores(2, vocab)
    scores[0, 4] = bad
    peak = truncated(scores, *cut).log_softmax(-1).amax(-1)
    assert peak.isfinite().tolist() == [False, True]
    nothing = torch.full((1, vocab), -INF)
    assert not truncated(nothing, *cut).log_softmax(-1).amax(-1).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [9000, 8192, 1001])
@pytest.mark.parametrize("top_k", [1, 5, 40, 300])
def test_large_vocabularies_are_narrowed_to_groups_first(vocab, top_k, dtype):
    """Also where many ids are level, within groups and across them, and where only few are allowed."""
    scattered = random_scores(3, 2, vocab, scale=5.0, dtype=dtype)
    few = scattered.masked_fill(torch.arange(vocab) % 499 != 0, -INF)
    for scores in (scattered, scattered.round(), (scattered / 8).round(), few):
        for top_p in (0.6, 1.0):
            assert torch.equal(truncated(scores, top_k, top_p), by_sorting(scores, top_k, top_p))
        assert torch.equal(truncated(scores, 0, 0.6), by_sorting(scores, 0, 0.6))


# ---- what it costs ---------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The most numbers of a row that are put in order, and how often the host looks at device data."""

    def __init__(self):
        super().__init__()
        self.most, self.looks = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        if packet is torch.ops.aten.topk:
            self.most = max(self.most, args[1])
        if packet is torch.ops.aten.sort:
            self.most = max(self.most, args[0].shape[-1])
        self.looks += packet in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "cut, most, looks", [((0, 1.0), 0, 0), ((40, 1.0), 40, 0), ((40, 0.9), 40, 0), ((0, 0.9), FEW, 1)]
)
def test_a_few_best_scores_are_enough_and_only_top_p_alone_looks_at_the_device(cut, most, looks):
    scores = random_scores(4, 40_000, scale=8.0)
    with Watch() as watch:
        truncated(scores, *cut)
    assert (watch.most, watch.looks) == (most, looks)


# ---- as part of the target -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cutoff", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.7), (5, 0.7), (0, 1e-9)])
def test_the_order_is_combine_mask_temper_truncate(cutoff, temperature, top_k, top_p):
    p, q = random_scores(40, 30, seed=1), random_scores(40, 30, seed=2)
    target = Target(alpha=0.5, cutoff=cutoff, temperature=temperature, top_k=top_k, top_p=top_p)
    combined = (1.5 * p - 0.5 * q).masked_fill(~plausible(p, cutoff), -INF) / temperature
    expected = by_sorting(combined, top_k, top_p).softmax(-1)
    torch.testing.assert_close(target_log_probs([p, q], target).exp(), expected, atol=1e-12, rtol=1e-10)


def test_top_p_reads_the_tempered_distribution_and_the_cutoff_does_not():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    for fields, counts in (({"top_p": 0.75}, [1, 2, 3]), ({"cutoff": 0.2}, [3, 3, 3])):
        rows = [target_log_probs([p], Target(temperature=t, **fields)) for t in (0.2, 1.0, 10.0)]
        assert [row.isfinite().sum().item() for row in rows] == counts


def test_what_stays_keeps_its_proportions():
    p, q = random_scores(20, 30, seed=1), random_scores(20, 30, seed=2)
    whole = target_log_probs([p, q], Target(alpha=0.3))
    part = target_log_probs([p, q], Target(alpha=0.3, top_k=9, top_p=0.8))
    kept = part > -INF
    torch.testing.assert_close(part[kept], whole.masked_fill(~kept, -INF).log_softmax(-1)[kept], atol=1e-12, rtol=1e-12)


def test_at_temperature_zero_they_do_not_matter():
    p, q = random_scores(20, 30, seed=1), random_scores(20, 30, seed=2)
    plain = target_log_probs([p, q], Target(alpha=0.3, temperature=0.0))
    assert torch.equal(plain, target_log_probs([p, q], Target(alpha=0.3, temperature=0.0, top_k=1, top_p=0.1)))
