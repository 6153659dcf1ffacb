"""Drafters whose every proposal in the loop is checked against the text, and a reduced draft vocabulary."""

import torch
from tiny import VOCAB


class Follows:
    """Mixed into a drafter: keeps the text of every row, and checks each proposal against it.

    ``seen`` is shared with the copies that the loop makes for its batches.
    """

    def begin(self, prompts, first, capacity):
        super().begin(prompts, first, capacity)
        self.texts = [[*prompt, tokens[-1]] for prompt, tokens in zip(prompts, first.host_tokens, strict=True)]

    def propose(self, root, noise, shape):
        draft = super().propose(root, noise, shape)
        for row, text in enumerate(self.texts):
            assert text[-1] == root[row]
            self.check(row, text, draft, noise)
            self.seen["proposals"] += 1
        return draft

    def observe(self, accepted):
        super().observe(accepted)
        self.seen["ragged"] += len(set(accepted.counts)) > 1
        for text, tokens, count in zip(self.texts, accepted.host_tokens, accepted.counts, strict=True):
            text += tokens[:count]

    def keep_rows(self, rows):
        super().keep_rows(rows)
        self.texts = [self.texts[row] for row in rows]

    def extend(self, other):
        super().extend(other)
        self.texts = self.texts + other.texts
        self.seen["joined"] += 1


class Reduced:
    """A draft vocabulary of every second id and four of the padding."""

    t2d = torch.arange(VOCAB + 8) % 2 == 0
    d2t = t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum()))
