"""What to draft, round by round: nothing, n-grams, or the head's tree with n-grams in it, and how much of it.

A node pays if its chance of being accepted, times what a token costs, is above what it adds to the expert's pass; a
further level of the head's tree pays if the same holds for its best node and one more pass of the head. Chances are the
drafter's own probabilities (of n-grams: rates by the length of their match), corrected by what was accepted so far.

All of it depends on tokens already written and on drafts before they are judged, so the emitted distribution is
untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dcd_core.pass_times import PassTimes

MEMORY = 0.9
"""What a round still counts for after the next one: about the last ten decide."""
BELIEF = 4.0
"""Accepted tokens for which the drafter's own probabilities are believed at the start."""
TRIAL = 3
"""Rounds with the head by which it is judged at least."""
PAUSES = (8, 128)
"""Rounds without the head after it did not pay: at first, and at most; each trial that fails doubles them."""
SHARE = 0.5
"""Passes of the models after the expert that one round is counted with: a pass of theirs judges several rounds."""


@dataclass
class Record:
    """Sums over rounds, the older the less they count."""

    rounds: float = 0.0
    emitted: float = 0.0
    seconds: float = 0.0
    expected: float = BELIEF
    accepted: float = BELIEF

    def add(self, **news: float) -> None:
        for name, value in news.items():
            setattr(self, name, getattr(self, name) * MEMORY + value)

    @property
    def trust(self) -> float:
        """What the drafter's probabilities are to be multiplied by."""
        return self.accepted / self.expected


@dataclass
class Controller:
    """Decides by pass times and by what was accepted so far.

    Args:
        times: of this machine.
        head: whether there is a head.
    """

    times: PassTimes
    head: bool
    all: Record = field(default_factory=Record)
    by_source: dict[str, Record] = field(default_factory=lambda: {"ngram": Record(), "head": Record()})
    failures: int = 0
    rest: int = 0

    # ---- what things cost ----------------------------------------------------------------------------------------

    def theta(self, rows: int) -> float:
        """Chance that a provisional token has fallen at which the other models are to be asked.

        One more round of the expert before they are asked saves a pass of theirs, and is lost if a token has fallen: so
        it pays while chance x (round + its share of their passes) is below their pass.
        """
        asked = self.times.of("others", rows)
        return min(0.9, asked / (self.times.of("expert", rows) + SHARE * asked))

    def seconds(self, rows: int, nodes: int = 0, levels: int = 0, width: int = 1) -> float:
        """Of a round with so many nodes a row and passes of the head over ``width`` nodes a row."""
        head = levels * self.times.of("head", rows * width)
        return head + self.times.of("expert", rows * (1 + nodes)) + SHARE * self.times.of("others", rows)

    def token_s(self, rows: int) -> float:
        """Seconds that a token costs: of late, but no more than without drafts."""
        plain = self.seconds(rows) / rows
        return min(plain, self.all.seconds / self.all.emitted) if self.all.emitted else plain

    def worth(self, rows: int, nodes: int) -> float:
        """Accepted tokens, summed over the rows, above which every row's next node after so many pays."""
        cost = self.times.of("expert", rows * (2 + nodes)) - self.times.of("expert", rows * (1 + nodes))
        return cost / self.token_s(rows)

    def nodes(self, source: str, chances: list[float], rows: int) -> int:
        """How many nodes a row pay.

        Args:
            chances: summed over the rows, of every row's likeliest node, its second, and so on.
        """
        trust, count = self.by_source[source].trust, 0
        while count < len(chances) and trust * chances[count] > self.worth(rows, count):
            count += 1
        return count

    def stop_below(self, rows: int, width: int) -> float:
        """The head's probability of a path below which one more level does not pay."""
        cost = self.times.of("head", rows * width) / self.token_s(rows) + self.worth(rows, 1)
        return min(0.95, cost / rows / max(self.by_source["head"].trust, 0.05))

    # ---- round by round ------------------------------------------------------------------------------------------

    def choose(self, chances: list[float], rows: int) -> str:
        """The source of this round's drafts: ``none``, ``ngram`` or ``head``.

        Args:
            chances: of the n-grams' nodes, as for :meth:`nodes`.
        """
        nodes = self.nodes("ngram", chances, rows)
        otherwise = "ngram" if nodes else "none"
        if not self.head:
            return otherwise
        if self.rest:
            self.rest -= 1
            return otherwise
        head = self.by_source["head"]
        if head.rounds < TRIAL:
            return "head"
        plain, token_s = self.seconds(rows), self.token_s(rows)
        saved = self.by_source["ngram"].trust * sum(chances[:nodes]) * token_s - (self.seconds(rows, nodes) - plain)
        saved_by_head = (head.emitted / head.rounds - rows) * token_s - (head.seconds / head.rounds - plain)
        return otherwise if nodes and saved > saved_by_head else "head"

    def learn(
        self,
        source: str,
        rows: int,
        emitted: int,
        expected: float = 0.0,
        nodes: int = 0,
        levels: int = 0,
        width: int = 1,
    ) -> None:
        """What a round came to.

        Args:
            emitted: tokens of all rows.
            expected: accepted tokens by the drafter's own probabilities, summed over the rows.
            nodes, levels, width: as for :meth:`seconds`.
        """
        spent = {"rounds": 1.0, "emitted": emitted, "seconds": self.seconds(rows, nodes, levels, width)}
        self.all.add(**spent)
        if source == "none":
            return
        record = self.by_source[source]
        record.add(**spent, expected=expected, accepted=emitted - rows)
        if source == "head" and record.rounds + 0.5 > TRIAL:  # a little is forgotten
            self.judge_head(record, rows)

    def judge_head(self, record: Record, rows: int) -> None:
        """Leave the head out for a while if rounds with it are slower than rounds without drafts."""
        if record.emitted / record.seconds >= rows / self.seconds(rows):
            self.failures = 0
            return
        self.rest = min(PAUSES[0] * 2**self.failures, PAUSES[1])
        self.failures += 1
        # the next trial decides anew: what it tells counts as much as all before
        for name in ("rounds", "emitted", "seconds"):
            setattr(record, name, getattr(record, name) / record.rounds * (TRIAL - 1))
