"""EAGLE3 drafting: a one-block head that reads the expert's features and drafts with its own state.

After every verification the head re-reads the accepted tokens with the expert's *true* features, in the same pass that
makes the first draft of the next round, so a chain of gamma drafts, and a tree of that depth, costs gamma passes of the
head and no approximate state is kept (keeping it costs 8 to 15% of the accepted length, vLLM #14649).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dcd_core.draft import Draft, Shape
from dcd_core.drafters.chain import draft_chain
from dcd_core.drafters.eagle3_tree import Candidates, grow, ranked_plan, rerank, sampled_plan, top_children
from dcd_core.drafters.protocol import Accepted, RoundNoise
from dcd_core.drafters.reading import ReadingDrafter


class Eagle3Drafter(ReadingDrafter):
    """Drafts a chain (``shape.branch`` 1) or a tree (see :mod:`dcd_core.drafters.eagle3_tree`).

    At temperature > 0 chains are sampled and trees are not, unless a setting says otherwise.

    Args:
        head: an :class:`dcd_core.heads.eagle3.Eagle3Head` made for the expert (or what has its interface).
        embedding: the expert's input embedding (the head stores none).
        vocab: number of the expert's real ids.
    """

    feature_scorers = (0,)
    default_rule = "sampled"
    passes = 0
    """Of the head for the last tree."""

    def __init__(self, head: nn.Module, embedding: nn.Embedding, vocab: int):
        self.head = head.eval()
        self.embedding = embedding
        self.vocab = vocab
        # a head with the expert's whole, padded vocabulary may not propose ids that no tokenizer has; ids ascend
        self.target_ids = head.target_ids[head.target_ids < vocab]

    def usual_rule(self, shape: Shape) -> str:
        return self.default_rule if shape.branch == 1 else "deterministic"

    def most_nodes(self, shape: Shape) -> int:
        # before it is cut to its budget, a tree has up to `branch` nodes a level in the head's cache
        return max(shape.budget, shape.branch * (shape.depth - 1))

    def begin(self, prompts: list[list[int]], first: Accepted, capacity: int) -> None:
        self.cache = self.head.new_cache(len(prompts), capacity)
        self.unread = first
        self._read_accepted()

    def read(self, new: Accepted) -> Float[Tensor, "batch 1 hidden"]:
        """One pass over new tokens beside their true features; the state at each row's last one."""
        width = max(new.counts)
        hidden = self.head.fuse(new.features[:, :width].to(self.head.dtype))
        # padding is -1
        embeds = self.embedding(new.tokens[:, :width].clamp_min(0)).to(hidden.dtype)
        state = self.head.step(embeds, hidden, self.cache)
        last = torch.tensor(new.counts, device=state.device)[:, None, None] - 1
        return state.gather(1, last.expand(-1, 1, state.shape[-1]))

    def logits(self, states: Float[Tensor, "batch width hidden"]) -> Float[Tensor, "batch width ids"]:
        """Draft logits over ``target_ids``."""
        return self.head.logits(states)[..., : len(self.target_ids)]

    @torch.no_grad()
    def propose(self, root: Int[Tensor, " batch"], noise: RoundNoise, shape: Shape) -> Draft:
        self._read_accepted()
        if shape.branch == 1:
            return self._chain(noise, shape)
        found = self.candidates(noise, shape)
        if noise.rule == "sampled":
            return Draft(found.tokens, found.parents, found.valid, "sampled", found.laws, ids=self.target_ids)
        return rerank(found, shape.budget, noise.rule)

    def _chain(self, noise: RoundNoise, shape: Shape) -> Draft:
        state, lengths, logits = self.state, list(self.cache.lengths), None

        def following(token):
            nonlocal state, logits
            if token is not None:
                state = self.head.step(self.embedding(token)[:, None], state, self.cache)
                self.cache.commit([1] * len(lengths))
            logits = self.logits(state)[:, 0]
            return logits

        draft = draft_chain(following, noise, shape, self.vocab, self.target_ids)
        self.cache.rollback(lengths)
        # what goes wrong at one draft is still wrong in the state of the last
        self.suspect = ~(state.isfinite().flatten(1).all(1) & logits.amax(-1).isfinite())
        return draft

    def candidates(self, noise: RoundNoise, shape: Shape) -> Candidates:
        """The nodes of a tree before it is cut to its budget (a sampled tree is never cut)."""
        lengths, sampled = list(self.cache.lengths), noise.rule == "sampled"
        self.passes = 1

        def children(states, level, count):
            logits = self.logits(states)
            if sampled:
                return noise.pick_children(logits, level, count, self.vocab, self.target_ids)
            index, gains = top_children(logits, count)
            return self.target_ids[index], gains, None

        def step(tokens, states, mask, level):
            self.passes += 1
            # the row of a node of the first level stands where a chain's first draft would, right after the root's
            depths = torch.full_like(tokens, level)
            states = self.head.step(self.embedding(tokens), states, self.cache, tree_mask=mask, depths=depths)
            self.cache.commit([tokens.shape[1]] * len(lengths))
            return states

        plan = (sampled_plan if sampled else ranked_plan)(shape, len(self.target_ids))
        found = grow(self.state, plan, children, step, shape.stop_below)
        self.cache.rollback(lengths)
        self.suspect = found.scores.isnan().any(1)
        return found
