"""The one key/value cache, used by the expert, the amateur and the draft head.

The contract, on which every other file relies:

* Row ``b`` of a batch holds its committed tokens in slots ``0 .. lengths[b] - 1``. There is no left padding, so the
  slot of a token is also its position, and rows of one batch may have different lengths.
* A pass of ``width`` new tokens is announced by :meth:`KVCache.plan`. Row ``b`` writes them to slots
  ``lengths[b] .. lengths[b] + width - 1``; the plan's mask lets them see the row's committed slots and, among the new
  ones, whatever the tree mask allows (plain causality when there is none).
* After the pass :meth:`KVCache.commit` says how many of a row's new tokens stay. The others are forgotten by length:
  their slots are overwritten by the next pass and no mask shows them before.

Buffers are zero-filled: a masked slot still enters the product "weight 0 times value", and 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dcd_core.errors import UserError


@dataclass
class Step:
    """Where the new tokens of one pass go and what they may see."""

    positions: Int[Tensor, "batch width"]
    mask: Bool[Tensor, "batch 1 width extent"]
    slots: Int[Tensor, "batch width"]
    start: int | None
    """The common first slot when all rows have the same length (a plain slice copy), else None."""
    extent: int


class SlotLayer(CacheLayerMixin):
    """One layer of :class:`KVCache`, in the interface that transformers' models call.

    Keys and values stand in one buffer where they have one shape, so that what moves moves at once, else in two.
    """

    def __init__(self, owner: KVCache):
        super().__init__()
        self.owner = owner
        self.stores: tuple[Float[Tensor, "part batch heads capacity _"], ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, whose sizes the first pass shows: models differ in how they state them."""
        one = key_states.shape == value_states.shape
        self.hold(
            tuple(
                states.new_zeros(2 if one else 1, *states.shape[:2], self.owner.capacity, states.shape[3])
                for states in ((key_states,) if one else (key_states, value_states))
            )
        )
        self.device = key_states.device
        self.is_initialized = True

    def hold(self, stores: tuple[Float[Tensor, "part batch heads capacity _"], ...]) -> None:
        self.stores = stores
        self.keys, self.values = stores[0][0], stores[-1][-1]

    def update(
        self,
        key_states: Float[Tensor, "batch heads width dim"],
        value_states: Float[Tensor, "batch heads width value_dim"],
        *args,
        **kwargs,
    ) -> tuple[Tensor, Tensor]:
        step = self.owner.current_step()
        if not self.stores:
            self.lazy_initialization(key_states, value_states)
        width = key_states.shape[2]
        if width != step.slots.shape[1]:
            raise ValueError(f"the pass was planned for {step.slots.shape[1]} new tokens but brings {width}")
        if step.start is not None:
            self.keys[:, :, step.start : step.start + width] = key_states
            self.values[:, :, step.start : step.start + width] = value_states
        else:
            rows = self.owner.row_index
            self.keys[rows, :, step.slots] = key_states.transpose(1, 2)
            self.values[rows, :, step.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : step.extent], self.values[:, :, : step.extent]

    def get_seq_length(self, *args, **kwargs) -> int:
        return max(self.owner.lengths)

    def get_max_length(self) -> int:
        return self.owner.capacity

    # the name of the same question in older transformers 5 releases
    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        return self.owner.current_step().extent, 0


class KVCache(Cache):
    """Preallocated key/value cache with a length per row (see the module's contract).

    Args:
        layers: of the model's attention.
        batch, capacity: rows, and slots per row.
        windowed: some layers see a window only (:meth:`windowed`), so the position of every slot is kept.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device, windowed: bool = False):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.capacity = capacity
        self.device = torch.device(device)
        self.lengths = [0] * batch
        self.slot_positions = torch.arange(capacity, device=device).repeat(batch, 1) if windowed else None
        self._index_rows()
        self._step: Step | None = None

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def _stores(self) -> list[Tensor]:
        return [store for layer in self.layers for store in layer.stores]

    def _index_rows(self) -> None:
        self.row_index = torch.arange(len(self.lengths), device=self.device)[:, None]

    def current_step(self) -> Step:
        if self._step is None:
            raise ValueError("the cache was given keys without a plan: call plan(width) before every pass")
        return self._step

    def plan(
        self,
        width: int,
        tree_mask: Bool[Tensor, "batch width columns"] | None = None,
        depths: Int[Tensor, "batch width"] | None = None,
    ) -> Step:
        """Positions and mask for a pass of ``width`` new tokens at every row's own offset.

        Args:
            tree_mask: ``[b, i, j]`` is True where new token ``i`` sees new token ``j`` (itself included);
                None means causal. With more columns than ``width``, the first ``columns - width`` stand for the row's
                newest committed slots: a tree that grows level by level commits its levels and still hides them from
                one another. Every row must hold as many.
            depths: position of each new token relative to the row's length without those slots; None means
                0, 1, 2, ... after them.
        Raises:
            UserError: a row would pass the capacity.
        """
        longest = max(self.lengths)
        if longest + width > self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} tokens a row, but a row of {longest} tokens was given {width} more; "
                "shorten the prompt or lower max_new_tokens"
            )
        columns = torch.arange(width, device=self.device)
        open_slots = 0 if tree_mask is None else tree_mask.shape[2] - width
        if not 0 <= open_slots <= min(self.lengths):
            raise ValueError(f"a tree mask of {open_slots + width} columns does not fit {width} new tokens")
        if min(self.lengths) == longest:
            start, slots = longest, (columns + longest).expand(self.batch, -1)
            mask, base = self._level_mask(slots, longest - open_slots, tree_mask), longest - open_slots
        else:
            offsets = torch.tensor(self.lengths, device=self.device)[:, None]
            start, slots = None, offsets + columns
            mask, base = self._ragged_mask(columns, offsets - open_slots, open_slots, tree_mask), offsets - open_slots
        self._step = Step(slots if depths is None else base + depths, mask[:, None], slots, start, longest + width)
        if self.slot_positions is not None:
            self.slot_positions.scatter_(1, slots, self._step.positions)
        return self._step

    def windowed(self, step: Step, window: int) -> Bool[Tensor, "batch 1 width extent"]:
        """The mask of a layer whose tokens see the newest ``window`` positions only, their own included."""
        if step.extent <= window:
            return step.mask
        behind = step.positions[:, :, None] - self.slot_positions[:, None, : step.extent]
        return step.mask & (behind < window)[:, None]

    def _level_mask(self, slots: Tensor, before: int, tree_mask: Tensor | None) -> Bool[Tensor, "batch width extent"]:
        """Rows of one length: the slots ``before`` what the tree mask decides on, which all may see, then that mask."""
        if tree_mask is None:
            return (torch.arange(before + slots.shape[1], device=self.device) <= slots[0, :, None]).expand(
                self.batch, -1, -1
            )
        return torch.cat([tree_mask.new_ones(*tree_mask.shape[:2], before), tree_mask], dim=2)

    def _ragged_mask(
        self, columns: Tensor, before: Tensor, open_slots: int, tree_mask: Tensor | None
    ) -> Bool[Tensor, "batch width extent"]:
        """The same for rows of different lengths; ``before`` has one for each."""
        width = columns.shape[0]
        # relative[b, k] = index of slot k among the slots that the mask decides on; negative for those all may see
        relative = torch.arange(max(self.lengths) + width, device=self.device)[None, :] - before
        if tree_mask is None:
            return relative[:, None, :] <= columns[None, :, None]
        last = open_slots + width - 1
        among_new = tree_mask.gather(2, relative.clamp(0, last)[:, None, :].expand(-1, width, -1))
        inside = ((relative >= 0) & (relative <= last))[:, None, :]
        return (relative < 0)[:, None, :] | (inside & among_new)

    def commit(self, counts: list[int]) -> None:
        """Keep the first ``counts[b]`` new tokens of row ``b``; the others are rolled back."""
        width = self.current_step().slots.shape[1]
        if len(counts) != self.batch or any(not 0 <= count <= width for count in counts):
            raise ValueError(f"commit({counts}) does not fit a pass of {width} new tokens in {self.batch} rows")
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._step = None

    def commit_path(self, path: Int[Tensor, "batch depth"], counts: list[int]) -> None:
        """Keep one path of a tree: new tokens ``path[b, : counts[b]]`` move to the row's next slots, in that order.

        A path begins with the root, the pass's first token: ``path[b, 0]`` is 0.
        """
        step = self.current_step()
        depth = min(path.shape[1], step.slots.shape[1], max(counts, default=0))
        if depth > 1:  # a path of one token is the root, which stands where it belongs
            source = step.slots.gather(1, path[:, :depth].to(self.device))[:, 1:]
            target = step.slots[:, 1:depth]
            for store in self._stores():
                store[:, self.row_index, :, target] = store[:, self.row_index, :, source]
            if self.slot_positions is not None:
                self.slot_positions.scatter_(1, target, target)
        self.commit(counts)

    def rollback(self, lengths: list[int]) -> None:
        """Forget everything after ``lengths[b]`` in row ``b``."""
        if len(lengths) != self.batch or any(not 0 <= new <= old for new, old in zip(lengths, self.lengths)):  # noqa: B905
            raise ValueError(f"cannot roll back lengths {self.lengths} to {lengths}")
        self.lengths = list(lengths)
        self._step = None

    def keep_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; the others leave the batch."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            if layer.stores:
                layer.hold(tuple(store.index_select(1, index) for store in layer.stores))
        if self.slot_positions is not None:
            self.slot_positions = self.slot_positions[index]
        self.lengths = [self.lengths[row] for row in rows]
        self._index_rows()
        self._step = None

    def extend(self, other: KVCache) -> None:
        """Rows of another cache of the same capacity join the batch, after the present ones."""
        if other.capacity != self.capacity:
            raise ValueError(f"cannot join caches of {self.capacity} and {other.capacity} slots a row")
        for layer, entering in zip(self.layers, other.layers, strict=True):
            if layer.stores:
                layer.hold(tuple(torch.cat(both, dim=1) for both in zip(layer.stores, entering.stores, strict=True)))
        if self.slot_positions is not None:
            self.slot_positions = torch.cat([self.slot_positions, other.slot_positions])
        self.lengths = self.lengths + other.lengths
        self._index_rows()
        self._step = None
