"""EAGLE3 chain drafting: a one-block head that reads the expert's features and drafts with its own state.

After every verification the head re-reads the accepted tokens with the expert's *true* features, in the same pass that
makes the first draft of the next round, so gamma drafts cost gamma passes of the head and no approximate state is kept
(keeping it costs 8 to 15% of the accepted length, vLLM #14649).
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dcd_core.cache import KVCache
from dcd_core.draft import Draft, Shape
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise


class Eagle3Drafter(Drafter):
    """
    Args:
        head: an :class:`dcd_core.heads.eagle3.Eagle3Head` made for the expert.
        embedding: the expert's input embedding (the head stores none).
        vocab: number of the expert's real ids.
    """

    needs_features = True
    default_rule = "sampled"

    def __init__(self, head: nn.Module, embedding: nn.Embedding, vocab: int):
        self.head = head.eval()
        self.embedding = embedding
        self.vocab = vocab
        # a head with the expert's whole, padded vocabulary may not propose ids that no tokenizer has; ids ascend
        self.target_ids = head.target_ids[head.target_ids < vocab]
        self.cache: KVCache | None = None
        self.unread: Accepted | None = None
        self.state: Tensor | None = None

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        weight = self.head.fc.weight
        self.cache = KVCache.for_config(self.head.config, len(prompts), capacity, weight.dtype, weight.device, layers=1)
        self.unread = first
        self._read_accepted()

    @torch.no_grad()
    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        self._read_accepted()
        state = self.state
        lengths = list(self.cache.lengths)
        tokens, probs = [], []
        for depth in range(shape.depth):
            if depth:
                embeds = self.embedding(tokens[-1])[:, None].to(state.dtype)
                state = self.head.step(embeds, state, self.cache)
                self.cache.commit([1] * len(lengths))
            logits = self.head.logits(state)[:, 0, : len(self.target_ids)]
            token, distribution = noise.pick(logits, depth, self.vocab, self.target_ids)
            tokens.append(token)
            probs.append(distribution)
        self.cache.rollback(lengths)
        # what goes wrong at one draft is still wrong in the state of the last
        self.suspect = ~state.isfinite().flatten(1).all(1)
        stacked = torch.stack(probs, dim=1) if noise.rule == "sampled" else None
        return Draft.chain(torch.stack(tokens, dim=1), rule=noise.rule, probs=stacked)

    @torch.no_grad()
    def _read_accepted(self) -> None:
        """Run the head over the newly accepted tokens with true features; keep the state at each row's last one."""
        new, self.unread = self.unread, None
        if new is None:
            return
        width = max(new.counts)
        hidden = self.head.fuse(new.features[:, :width].to(self.head.fc.weight.dtype))
        # padding is -1
        embeds = self.embedding(new.tokens[:, :width].clamp_min(0)).to(hidden.dtype)
        state = self.head.step(embeds, hidden, self.cache)
        self.cache.commit(new.counts)
        last = torch.tensor(new.counts, device=state.device)[:, None, None] - 1
        self.state = state.gather(1, last.expand(-1, 1, state.shape[-1]))

    def observe(self, accepted: Accepted) -> None:
        # read when the next draft is wanted: rows that are finished now will have left by then
        self.unread = accepted

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        index = torch.tensor(rows, device=self.cache.device)
        self.state = self.state.index_select(0, index)
        if self.unread is not None:
            self.unread = Accepted(
                self.unread.tokens.index_select(0, index),
                [self.unread.counts[row] for row in rows],
                [self.unread.host_tokens[row] for row in rows],
                self.unread.features.index_select(0, index),
            )

    def extend(self, other: Eagle3Drafter) -> None:
        self._read_accepted()
        other._read_accepted()
        self.cache.extend(other.cache)
        self.state = torch.cat([self.state, other.state])
