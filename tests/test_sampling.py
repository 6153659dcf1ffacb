"""Keyed randomness: what a number depends on, that it is uniform, and that its layout never changes unnoticed."""

import numpy as np
import pytest
import torch
from scipy import stats

from dcd_core.sampling import ACCEPT, DRAFT, FINAL, GUMBEL, gumbel, inverse_cdf, largest, row_key, uniforms

STREAMS = (ACCEPT, FINAL, DRAFT, GUMBEL)
# row_key(0, "a", 0) and row_key(7, "gsm8k/12", 3)
KEYS = (-5514600408955595284, -3364072595615245952)
# of the second key: output positions 0 and 41, two numbers each
UNIFORMS = {
    ACCEPT: [0.7699066883915259, 0.5275608104592074, 0.2699616290339014, 0.8199700299595832],
    FINAL: [0.9522400657082061, 0.4395445964211485, 0.23585830737839453, 0.7934502459607858],
    DRAFT: [0.8450972797062243, 0.920227293282251, 0.45007415007605955, 0.9993593610727484],
    GUMBEL: [0.6021440492474087, 0.15275359683063894, 0.6814443106509517, 0.5614493959919468],
}
NOISE = [0.527412474155426, -0.7125250101089478, 0.7503674626350403]  # position 5, a vocabulary of three


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([row_key(seed, f"prompt {index}", 0) for index in range(count)])


def positions(rows: int, count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count).expand(rows, -1)


# ---- what a number depends on ----------------------------------------------------------------------------------------


def test_known_answers():
    """Saved runs are resumed with these numbers: a change of layout must be a decision."""
    assert row_key(0, "a", 0) == KEYS[0] and row_key(7, "gsm8k/12", 3) == KEYS[1]
    key = torch.tensor([row_key(7, "gsm8k/12", 3)])
    for stream, expected in UNIFORMS.items():
        found = uniforms(key, torch.tensor([[0, 41]]), stream, 2)
        assert found.flatten().tolist() == expected
    torch.testing.assert_close(gumbel(key, torch.tensor([[5]]), 3).flatten(), torch.tensor(NOISE), atol=1e-6, rtol=1e-6)


def test_a_number_depends_on_its_key_and_place_only():
    rows = keys(4)
    whole = uniforms(rows, positions(4, 10), ACCEPT, 3)
    order = torch.tensor([2, 0, 3])
    assert torch.equal(uniforms(rows[order], positions(3, 10), ACCEPT, 3), whole[order]), "the batch"
    assert torch.equal(uniforms(rows, positions(4, 6, 4), ACCEPT, 3), whole[:, 4:]), "where the round began"
    assert torch.equal(uniforms(rows, positions(4, 10), ACCEPT, 1), whole[..., :1]), "how many are asked for"
    back = uniforms(rows, positions(4, 10).flip(1), ACCEPT, 3)
    assert torch.equal(back.flip(1), whole), "the order"
    noise = gumbel(rows, positions(4, 2), 50)
    assert torch.equal(gumbel(rows[1:2], positions(1, 1, 1), 50)[0, 0], noise[1, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_number_does_not_depend_on_the_device():
    rows, places = keys(3), positions(3, 9)
    assert torch.equal(uniforms(rows.cuda(), places.cuda(), DRAFT, 5).cpu(), uniforms(rows, places, DRAFT, 5))


def test_integer_arithmetic_wraps_as_on_every_device():
    """The same hash in Python's unbounded integers."""
    whole, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % whole
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % whole
        return bits ^ (bits >> 31)

    for key, place, stream, index in [(row_key(1, "x", 0), 0, ACCEPT, 0), (row_key(2, "y", 5), 70_000, GUMBEL, 9)]:
        state = mix((key + (place * 8 + stream + 1) * golden) % whole)
        bits = mix((state + (index + 1) * golden) % whole)
        found = uniforms(torch.tensor([key]), torch.tensor([[place]]), stream, index + 1)[0, 0, index].item()
        assert found == ((bits >> 12) + 0.5) / 2**52


def test_every_part_of_a_key_counts():
    made = {row_key(seed, name, sample) for seed in range(5) for name in ("a", "b", "a1") for sample in range(5)}
    assert len(made) == 75
    assert row_key(1, "1", 11) != row_key(1, "11", 1), "parts do not run into each other"
    assert all(-(2**63) <= key < 2**63 for key in made)


# ---- how the numbers are distributed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_numbers_are_uniform(stream):
    sample = uniforms(keys(100, seed=stream), positions(100, 200), stream, 5)
    assert sample.dtype == torch.float64 and sample.min() > 0 and sample.max() < 1
    assert stats.kstest(sample.flatten().numpy(), "uniform").pvalue > 1e-3
    for axis in ((1, 2), (0, 2), (0, 1)):
        means = sample.mean(axis)
        spread = (12 * sample.numel() / means.numel()) ** -0.5
        assert (means - 0.5).abs().max() < 5 * spread, f"a row, a position or an index is off (axes {axis})"


def test_the_extreme_hashes_stay_inside_the_open_interval():
    from dcd_core import sampling

    smallest, largest = torch.tensor([0]), torch.tensor([-1])
    values = [(sampling._shift_right(bits, 12).double() + 0.5).item() * 2.0**-52 for bits in (smallest, largest)]
    assert 0 < values[0] < values[1] < 1
    assert (2**53 - 1 + 0.5) * 2.0**-53 == 1.0, "one more bit would give exactly 1"


def test_noise_is_gumbel():
    sample = gumbel(keys(40), positions(40, 10), 500).flatten().numpy()
    assert sample.dtype == np.float32 and np.isfinite(sample).all()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    top = np.sort(sample)[-2000:]
    assert stats.kstest(stats.gumbel_r.sf(top) * len(sample) / 2000, "uniform").pvalue > 1e-6, "the deciding tail"


def test_streams_positions_and_indices_are_independent():
    sample = torch.stack([uniforms(keys(2000), positions(2000, 3), stream, 2) for stream in STREAMS], dim=1)
    columns = sample.reshape(2000, -1).numpy()  # 4 streams x 3 positions x 2 indices
    correlation = np.corrcoef(columns, rowvar=False) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)
    assert len(np.unique(columns)) == columns.size
    # next to each other in a row: pairs fill the square evenly
    pairs = np.histogram2d(columns[:, :-1].ravel(), columns[:, 1:].ravel(), bins=8, range=[[0, 1]] * 2)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


# ---- the inverse CDF -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 1000, 2048, 5003])
def test_inverse_cdf_equals_one_running_sum(vocab):
    generator = torch.Generator().manual_seed(vocab)
    cases = 1250
    weights = torch.rand(cases, vocab, generator=generator, dtype=torch.float64) ** 8
    weights[torch.rand(cases, vocab, generator=generator) < 0.3] = 0.0
    weights[:, vocab // 2] += 1e-3
    coins = torch.rand(cases, generator=generator, dtype=torch.float64)
    running = weights.numpy().cumsum(-1)
    expected = [np.searchsorted(row, coin * row[-1], side="right") for row, coin in zip(running, coins.numpy())]  # noqa: B905
    assert inverse_cdf(weights, coins).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_id_of_weight_zero_is_never_drawn(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(400, 777, generator=generator, dtype=dtype)
    weights[torch.rand(400, 777, generator=generator) < 0.7] = 0.0
    weights[:100, 300:] = 0.0  # whole chunks, to the end
    weights[100:200, :600] = 0.0  # whole chunks, from the start
    tiny = 2.0**-53
    for coin in (tiny, 1e-12, 0.25, 0.5, 0.75, 1 - 1e-12, 1 - tiny):
        drawn = inverse_cdf(weights, torch.full((400,), coin, dtype=torch.float64))
        assert (weights.gather(1, drawn[:, None]) > 0).all(), coin


def test_a_coin_on_a_boundary_takes_the_next_id():
    weights = torch.tensor([[0.25, 0.0, 0.25, 0.5]], dtype=torch.float64)
    for coin, token in [(0.0, 0), (0.25 - 1e-12, 0), (0.25, 2), (0.5 - 1e-12, 2), (0.5, 3), (1 - 1e-12, 3), (1.0, 3)]:
        assert inverse_cdf(weights, torch.tensor([coin], dtype=torch.float64)).item() == token


def test_weights_need_not_be_normalised():
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(200, 300, generator=generator, dtype=torch.float64)
    coins = torch.rand(200, generator=generator, dtype=torch.float64)
    assert torch.equal(inverse_cdf(weights * 2.0**-70, coins), inverse_cdf(weights, coins))


def test_fp32_weights_of_a_large_vocabulary_keep_their_rare_ids():
    """A running sum in fp32 over 100k ids would be off by more than the last ids' probability."""
    weights = torch.full((1, 100_000), 1e-5)
    coins = torch.linspace(0.0005, 0.9995, 999, dtype=torch.float64)
    drawn = inverse_cdf(weights.expand(999, -1), coins)
    assert (drawn - (coins * 100_000).long()).abs().max() <= 1


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_the_largest_entry_is_the_plain_one_and_ties_go_to_the_lowest_id(vocab):
    generator = torch.Generator().manual_seed(vocab)
    values = torch.randint(-3, 3, (4, 5, vocab), generator=generator).double()
    values[0, 0] = -torch.inf
    values[1] = 2.0
    peak, index = largest(values)
    assert torch.equal(peak, values.amax(-1)) and torch.equal(index, values.argmax(-1))


def test_a_row_with_nan_has_no_largest_entry():
    values = torch.zeros(2, 600)
    values[1, 300] = torch.nan
    assert largest(values)[0].isnan().tolist() == [False, True]


def test_several_streams_are_the_streams_one_by_one():
    keys, positions = torch.tensor([3, -9]), torch.arange(6).view(2, 3)
    both = uniforms(keys, positions, (ACCEPT, FINAL), 4)
    assert torch.equal(both[0], uniforms(keys, positions, ACCEPT, 4))
    assert torch.equal(both[1], uniforms(keys, positions, FINAL, 4))


@pytest.mark.parametrize("vocab", [7, 40000])
def test_weights_that_are_nan_still_give_an_id(vocab):
    """The loop refuses such a row, but only after the round; an id outside the vocabulary would stop it before."""
    weights = torch.ones(3, vocab)
    weights[1, vocab // 2], weights[2] = torch.nan, torch.nan
    found = inverse_cdf(weights, torch.full((3,), 0.9, dtype=torch.float64))
    assert ((found >= 0) & (found < vocab)).all()
