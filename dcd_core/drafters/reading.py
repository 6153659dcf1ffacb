"""Drafters with a cache of their own, which read what was accepted when the next draft is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dcd_core.cache import KVCache
from dcd_core.drafters.protocol import Accepted, Drafter


class ReadingDrafter(Drafter, ABC):
    """Reads newly accepted tokens in the pass that makes the first draft of a round, all of them again, so that no
    state of a draft outlives its round.

    Between rounds the cache holds every token that was told but the newest, which wait in ``unread``: rows that are
    finished will have left before they are read, and rounds without a draft read nothing. ``state`` is what
    :meth:`read` gave for each row's last token.
    """

    cache: KVCache
    unread: Accepted | None = None
    state: Tensor | None = None

    @abstractmethod
    def read(self, new: Accepted) -> Tensor:
        """One pass over new tokens, which the caller commits; what drafting starts from, ``[batch, 1, size]``."""

    @torch.no_grad()
    def _read_accepted(self) -> None:
        new, self.unread = self.unread, None
        if new is not None:
            self.state = self.read(new)
            self.cache.commit(new.counts)

    def observe(self, accepted: Accepted) -> None:
        self.unread = accepted if self.unread is None else self.unread.followed_by(accepted)

    def rewind(self, back: list[int], accepted: Accepted) -> None:
        waiting = self.unread.counts if self.unread is not None else [0] * len(back)
        lengths = zip(self.cache.lengths, back, waiting, strict=True)
        self.cache.rollback([length - max(count - new, 0) for length, count, new in lengths])
        left = [max(new - count, 0) for count, new in zip(back, waiting, strict=True)]
        self.unread = self.unread.first(left).followed_by(accepted) if any(left) else accepted

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.state = self.state.index_select(0, torch.tensor(rows, device=self.state.device))
        if self.unread is not None:
            self.unread = self.unread.keep_rows(rows)

    def extend(self, other: ReadingDrafter) -> None:
        self._read_accepted()
        other._read_accepted()
        self.cache.extend(other.cache)
        self.state = torch.cat([self.state, other.state])
