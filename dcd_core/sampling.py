"""Counter-based randomness: every random number is a hash of what it is for.

A number depends on (seed, prompt id, sample, output position, stream, index) and on nothing else: not on the batch, the
device, the order of the rounds or the drafter. So a row's text does not depend on its neighbours, a run can be resumed
anywhere, and "same seed, same text" holds. Streams keep the uses apart: verifying a child, the last inverse-CDF draw,
drawing a draft token, the Gumbel noise of the shared-noise rule, and that which draws the children of a tree.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

JUDGE_FINAL, ACCEPT, FINAL, DRAFT, GUMBEL, TREE, JUDGE_ACCEPT = range(7)  # streams; there is room for seven
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 [Steele et al. 2014]; integer products wrap around modulo 2^64."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX2
    return bits ^ _shift_right(bits, 31)


def row_key(seed: int, prompt_id: str, sample: int) -> int:
    """A signed 64-bit key of one generated sequence."""
    digest = hashlib.blake2b(f"{seed}\x1f{prompt_id}\x1f{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(
    keys: Int[Tensor, " batch"], positions: Int[Tensor, "batch count"], streams: int | tuple[int, ...], width: int = 1
) -> Float[Tensor, "*streams batch count width"]:
    """Uniform numbers in (0, 1), fp64, for output positions of each row.

    Args:
        keys: from :func:`row_key`.
        positions: output position of each number; ``width`` numbers are given per position.
        streams: one stream, or several, whose numbers then stand along a first axis.
    """
    if isinstance(streams, tuple):
        streams = torch.tensor(streams, device=keys.device)[:, None, None]
    index = torch.arange(width, device=keys.device, dtype=torch.int64)
    state = _mix(keys[:, None] + (positions * 8 + streams + 1) * _GOLDEN)
    bits = _mix(state[..., None] + (index + 1) * _GOLDEN)
    # 52 bits and a half are exact in fp64; with 53 the largest would round to 1
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel(
    keys: Int[Tensor, " batch"], positions: Int[Tensor, "batch count"], vocab: int, stream: int = GUMBEL
) -> Float[Tensor, "batch count vocab"]:
    """Gumbel noise, fp32: argmax(log pi + g) is a draw from pi, and the k largest of log e + g, from the largest down,
    are k draws from e without replacement. By default the noise of the shared-noise rule.

    The large values, which decide the argmax, come from uniforms near 0, where floats are dense: the noise is
    -log(-log(1 - u)).
    """
    noise = uniforms(keys, positions, stream, vocab).float().clamp_max(1 - 2.0**-24)
    return noise.neg_().log1p_().neg_().log_().neg_()


_CHUNK, _SHORT = 256, 2**14


def inverse_cdf(weights: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """The id where the running sum of (un-normalised, non-negative) weights passes ``uniform`` of the total.

    Over many ids in two steps (:func:`_in_two_steps`). Running sums are fp64: over 100k ids in fp32 they are off by
    more than a rare id's probability.
    """
    if weights.shape[1] > _SHORT:
        return _in_two_steps(weights, uniform)
    running = weights.cumsum(-1, dtype=torch.float64)
    return _first_above(running, uniform.double()[:, None] * running[:, -1:])[:, 0]


def _in_two_steps(weights: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """First among sums of 256 ids and then inside one of them: a running sum over the whole vocabulary costs more than
    a small model's output layer."""
    batch, vocab = weights.shape
    chunks = -(-vocab // _CHUNK)
    if chunks * _CHUNK != vocab:
        weights = torch.nn.functional.pad(weights, (0, chunks * _CHUNK - vocab))
    weights = weights.reshape(batch, chunks, _CHUNK)
    running = weights.sum(-1).double().cumsum(-1)
    wanted = uniform.to(running.dtype)[:, None] * running[:, -1:]
    chunk = _first_above(running, wanted)
    before = torch.where(chunk > 0, running.gather(1, (chunk - 1).clamp_min(0)), 0.0)
    inside = weights.gather(1, chunk[..., None].expand(-1, 1, _CHUNK))[:, 0].cumsum(-1, dtype=torch.float64)
    return (chunk * _CHUNK + _first_above(inside, wanted - before))[:, 0].clamp_max(vocab - 1)


def largest(values: Float[Tensor, "*batch vocab"]) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
    """The largest entry of each row and the lowest id that has it.

    By chunks of 256 ids, as a plain maximum with its index takes several times as long on a CPU. NaN stays NaN.
    """
    vocab = values.shape[-1]
    if vocab % _CHUNK:
        values = torch.nn.functional.pad(values, (0, -vocab % _CHUNK), value=-torch.inf)
    chunks = values.unflatten(-1, (-1, _CHUNK))
    peaks, chunk = chunks.amax(-1).max(-1)
    inside = chunks.gather(-2, chunk[..., None, None].expand(*chunk.shape, 1, _CHUNK))[..., 0, :].argmax(-1)
    return peaks, chunk * _CHUNK + inside


def _first_above(running: Float[Tensor, "batch count"], wanted: Float[Tensor, "batch 1"]) -> Int[Tensor, "batch 1"]:
    """Index of the first running sum above ``wanted``; rounding may ask for one past the last step of the sum, so the
    index never passes the place where the total is reached."""
    total_reached = torch.searchsorted(running, running[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(running, wanted, right=True), total_reached)
    return found.clamp_max(running.shape[1] - 1)  # NaN has no place: any id will do, as the loop refuses the row
