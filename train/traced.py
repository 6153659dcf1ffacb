"""Bytes alive while code runs on tensors without data: what a training step takes, before anything is loaded.

Models lie on the meta device; indices and masks are real, so that shapes that depend on them are those of the run. What
runs is the trainer's own code, so there is no formula of activations that could differ from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
META = torch.device("meta")
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""Operations that take real indices beside tensors without data: by a mask they give a row for each true entry."""


class Traced(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, while they are alive.

    Attributes:
        alive, peak: bytes now, and at most.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def restart(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.alive

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else args[0].dtype.is_floating_point * 1.0
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == META and not _has_values(func, args):
            kwargs["device"] = torch.device("cpu")  # positions, indices and masks keep their values
        elif func not in INDEXED and any(_is_meta(leaf) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_without_data, (args, kwargs))
        found = func(*args, **kwargs)
        tree_map(self._count, found)
        return found

    def _count(self, tensor: object) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _has_values(func, args) -> bool:
    """Whether an operation that is asked for a tensor on the meta device makes one whose values do not matter."""
    if func in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return False
    if func is aten._to_copy.default:
        return args[0].is_meta or args[0].dtype.is_floating_point
    return True


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _without_data(leaf: object) -> object:
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return leaf.to(META)


class _Attention(torch.autograd.Function):
    """Memory of a fused attention: scores are never whole, the backward pass reads the inputs, the output and one
    number a row."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, _gradient: Tensor):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@contextmanager
def tracing() -> Iterator[Traced]:
    """Trace the body."""
    own = F.scaled_dot_product_attention

    def attention(query, key, value, *_arguments, **_options):
        return _Attention.apply(query, key, value)

    F.scaled_dot_product_attention = attention
    try:
        with Traced() as traced:
            yield traced
    finally:
        F.scaled_dot_product_attention = own
