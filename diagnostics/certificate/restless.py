"""A controller of method auto that never settles: every source and many sizes of drafts within a few tokens."""

from __future__ import annotations

from dcd_core.drafters.controller import Controller
from dcd_core.pass_times import PassTimes

TIMES = PassTimes((1, 8), (1.0, 1.07), (0.4, 0.42), (0.05, 0.06))
"""A GPU's: a pass takes about as long for eight tokens as for one."""


class Restless(Controller):
    """Takes the sources in turn, and another number of nodes each time: by the number of rounds before, so by the
    past."""

    turns = 0

    def choose(self, chances, rows):
        self.turns += 1
        sources = ("head", "none", "ngram", "none", "none", "head") if self.head else ("none", "ngram")
        return sources[self.turns % len(sources)]

    def nodes(self, source, chances, rows):
        return min(len(chances), 1 + self.turns % 5)

    def stop_below(self, rows, width):
        return (0.0, 0.02)[self.turns % 2]
