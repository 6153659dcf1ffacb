"""Several texts one after the other in one row, without padding: what is known of them on the host.

Positions restart with each text, and no text sees another. Bounds are kept as Python numbers, so that the device is
never asked for them: such a look stops it until all that was queued is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """What belongs to one text: its queries, its positions, and the rows of the queries within the text, ascending
    (None: only the device knows them)."""

    queries: slice
    places: slice
    rows: Int[np.ndarray, " query"] | None

    @property
    def count(self) -> int:
        return self.queries.stop - self.queries.start


@dataclass(frozen=True)
class Packed:
    """The texts of a packed row.

    Attributes:
        positions: of every token within its text.
        texts: a share of each text in which every position asks.
        roots: a share of each text in which only its roots do.
    """

    positions: Int[Tensor, "1 position"]
    texts: tuple[Share, ...]
    roots: tuple[Share, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], roots: Sequence[np.ndarray]) -> Packed:
        """From the length of each text and the rows in it at which drafts start."""
        everywhere = [np.arange(length) for length in lengths]
        positions = torch.from_numpy(np.concatenate(everywhere))[None]
        places = _slices(lengths)
        return cls(
            positions,
            tuple(Share(place, place, rows) for place, rows in zip(places, everywhere, strict=True)),
            tuple(map(Share, _slices([len(rows) for rows in roots]), places, roots)),
        )

    def to(self, device: torch.device) -> Packed:
        return Packed(moved(self.positions, device), self.texts, self.roots)


def _slices(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device, where it can be had without waiting for it."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
