"""How fast a method answered, and how many of its drafts passed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dcd_core.decode_types import Generation


@dataclass
class Tally:
    """Sums over answers, so that every figure is a ratio of sums.

    The prefill, and the one token of each answer that comes out of it, belong to no round: speeds leave both out.

    Attributes:
        rounds: passes of the expert, of which deferred judging has several a round.
        accepted: drafts that passed; of a block of such passes, what it wrote beyond a token a pass.
        seconds: wall clock of everything counted, prefill included.
        prefill_s: seconds of the prefill.
    """

    answers: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0

    def add(self, generation: Generation, seconds: float = 0.0) -> None:
        """Count one answer. ``seconds``: its own; rows of one batch share theirs, add them up yourself."""
        self.answers += 1
        self.tokens += len(generation.ids)
        passes = sum(entry.expert_passes for entry in generation.rounds)
        blocks = passes > len(generation.rounds)
        self.rounds += passes
        self.accepted += sum(
            entry.emitted - entry.expert_passes if blocks else entry.accepted for entry in generation.rounds
        )
        self.prefill_s += generation.prefill_s
        self.seconds += seconds

    def join(self, other: Tally) -> None:
        """Count the answers of another tally too."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def tokens_per_second(self) -> float | None:
        """None where no answer is longer than its first token."""
        seconds = self.seconds - self.prefill_s
        return (self.tokens - self.answers) / seconds if self.tokens > self.answers and seconds > 0 else None

    @property
    def accepted_length(self) -> float | None:
        """Accepted drafts per pass of the expert, the extra token not counted [DCD, L]."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def tokens_per_round(self) -> float | None:
        return (self.tokens - self.answers) / self.rounds if self.rounds else None

    def __str__(self) -> str:
        answers, tokens = _count(self.answers, "answer"), _count(self.tokens, "token")
        found = f"{answers}, {tokens}, {self.prefill_s:.2f} s of prefill"
        if self.tokens_per_second is not None:
            found += f", then {self.tokens_per_second:.1f} tokens/s"
        if self.rounds:
            found += f"; accepted_length {self.accepted_length:.2f}, tokens_per_round {self.tokens_per_round:.2f}"
        return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
