"""Trees in plain words: paths, EAGLE's re-ranked tree, and a drafter that is a table."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dcd_core.draft import Shape
from dcd_core.drafters.eagle3_tree import top_children

Path = tuple[int, ...]


def paths_of(tokens: torch.Tensor, parents: torch.Tensor) -> list[Path]:
    """The path of every node of one row."""
    found = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(found), "parents come before their children"
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def grown_paths(log_probs, shape: Shape) -> list[tuple[Path, float]]:
    """All candidates of EAGLE-2's tree with their scores, level by level; ``log_probs(path)`` is a list."""
    level, every = [((), 0.0)], []
    for _ in range(min(shape.depth, shape.budget)):
        below = []
        for path, score in level:
            row = log_probs(path)
            best = sorted(range(len(row)), key=lambda token, row=row: -row[token])[: shape.branch]
            below += [((*path, token), score + row[token]) for token in best]
        every += below
        level = sorted(below, key=lambda node: -node[1])[: shape.branch]
    return every


def reference_tree(log_probs, shape: Shape) -> list[tuple[Path, float]]:
    """The best candidates, best first."""
    return sorted(grown_paths(log_probs, shape), key=lambda node: -node[1])[: shape.budget]


class Table:
    """Grows trees over a few ids after a law of the prefix. A state is the path so far: its length, then its tokens."""

    def __init__(self, law, prefix: Path = (), room: int = 8):
        self.law, self.prefix, self.room = law, prefix, room
        self.masks = []

    def root(self, batch: int = 1) -> torch.Tensor:
        return torch.zeros(batch, 1, self.room, dtype=torch.float64)

    def path(self, state) -> Path:
        return tuple(state[1 : 1 + int(state[0])].long().tolist())

    def log_probs(self, states) -> torch.Tensor:
        laws = [[self.law((*self.prefix, *self.path(state))) for state in row] for row in states]
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.array(laws)))

    def children(self, states, level, count):
        return *top_children(self.log_probs(states), count), None

    def step(self, tokens, states, mask, level):
        self.masks.append((level, mask))
        states = states.clone()
        for row, column in itertools.product(*map(range, tokens.shape)):
            assert states[row, column, 0] == level
            states[row, column, 1 + level] = tokens[row, column]
        states[..., 0] += 1
        return states
