"""Raw record -> turns (role, text, and what else is said of an answer), in ShareGPT, messages or prompt-only form.

Every field of a record is read, or changes nothing that is kept and is counted by its name (`Fields.ignored`), or the
record means something else without it and is left out under its name. A benchmark's record is refused: its prompt is
made of several fields, and a part of them is another question.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data_prep.messages import ROLES, Skip, check_order
from dcd_core.message_fields import ATTACHED, CALLS, REASONING, SYSTEM, WEIGHTS, joined_text, present

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "turns", "text")
INSTRUCTION_INPUTS = ("input", "context")
ID_COLUMNS = ("id", "prompt_id", "question_id", "task_id", "conversation_id")
ROLE_PARTS, TEXT_PARTS = ("role", "from"), ("content", "value")

BENCHMARKS = (
    ("a CNN/DailyMail", ("article", "highlights")),
    ("a HumanEval", ("prompt", "canonical_solution")),
    ("an MBPP", ("code", "test_list")),
    ("a HellaSwag", ("ctx", "endings")),
    ("a Spec-Bench or MT-Bench", ("turns", "category")),
    ("an MMLU or other multiple-choice", ("question", "choices")),
    ("a multiple-choice", ("question", "options")),
    ("a reading-comprehension", ("question", "context")),
    ("a reading-comprehension", ("question", "passage")),
)


class Turn(NamedTuple):
    """One message: its raw role, its text, whether it is trained on, and the reasoning before it."""

    role: str
    text: str
    trained: bool = True
    reasoning: str = ""

    def texts(self) -> list[str]:
        """All that it would write into a file."""
        return [self.role, self.text, self.reasoning]


@dataclass
class Fields:
    """In how many kept records a field was `read` beside role and text, or `ignored`; `message.x` is a message's x."""

    read: Counter = field(default_factory=Counter)
    ignored: Counter = field(default_factory=Counter)

    def add(self, other: "Fields") -> None:
        """Count one more record, which has each field once."""
        self.read.update(set(other.read))
        self.ignored.update(set(other.ignored))

    def as_dict(self) -> dict:
        """Plain numbers, most frequent first."""
        return {"read": dict(self.read.most_common()), "ignored": dict(self.ignored.most_common())}


@dataclass
class Facts:
    """What the raw conversations are like, each counted on its own, before anything is left out."""

    conversations: int = 0
    empty: int = 0
    opened_by: Counter = field(default_factory=Counter)
    empty_turns: int = 0
    repeated_ids: int = 0
    roles: Counter = field(default_factory=Counter)
    seen: set = field(default_factory=set, repr=False)

    def note(self, name: str | None, turns: list[Turn]) -> None:
        """Count one conversation: its id (None if it has none) and its turns."""
        self.conversations += 1
        self.empty += not turns
        if turns:
            self.opened_by[turns[0].role] += 1
        self.empty_turns += sum(not turn.text.strip() for turn in turns)
        self.roles.update(turn.role for turn in turns)
        if name is not None:
            self.repeated_ids += name in self.seen
            self.seen.add(name)

    def as_dict(self) -> dict:
        """Plain numbers, roles most frequent first."""
        return {
            "conversations": self.conversations,
            "empty": self.empty,
            "opened_by": dict(self.opened_by.most_common()),
            "not_opened_by_human": sum(number for role, number in self.opened_by.items() if role != "human"),
            "empty_turns": self.empty_turns,
            "repeated_ids": self.repeated_ids,
            "roles": dict(self.roles.most_common()),
        }


def raw_id(record: Any) -> str | None:
    """The record's own id, if it has one."""
    found = next((record[name] for name in ID_COLUMNS if record.get(name) is not None), None)
    return None if found is None else str(found)


def benchmark_fault(record: Any) -> str:
    """Why a record must not be read as a conversation, as the end of a sentence; empty if it may."""
    if not isinstance(record, dict) or _column(record, MESSAGE_COLUMNS, list):
        return ""
    for kind, parts in BENCHMARKS:
        if all(present(record.get(part)) for part in parts):
            return (
                f"is {kind} record ({' and '.join(map(repr, parts))}), no conversation: its prompt is not one of its "
                'fields. Write lines {"id": ..., "messages": [...]} that hold the whole prompt, or, where one field is '
                "the whole prompt, name it with --text_column"
            )
    return ""


def raw_turns(record: Any, text_column: str, fields: Fields) -> list[Turn]:
    """The turns of a record, a system prompt of its own first; what else it holds is counted in `fields`.

    Raises Skip when the form is unknown, a text is not text, or it holds what it cannot be understood without.
    """
    if not isinstance(record, dict):
        raise Skip("not a JSON object")
    if text_column:
        return [Turn("user", text) for text in _texts(record.get(text_column))]
    needed = next((name for name in ATTACHED if present(record.get(name))), None)
    if needed:
        raise Skip(f"field '{needed}'")
    column = _column(record, MESSAGE_COLUMNS, list)
    known = {column, *ID_COLUMNS}
    if column:
        turns = [_turn(message, fields) for message in record[column]]
    else:
        column = _column(record, PROMPT_COLUMNS)
        if not present(record.get(column)):
            raise Skip("no messages, conversations or prompt column")
        extra = _column(record, INSTRUCTION_INPUTS, str) if column == "instruction" else ""
        known |= {column, extra}
        more = f"\n\n{record[extra]}" if extra and record[extra] else ""
        turns = [Turn("user", text + more) for text in _texts(record[column])]
    system = _system(record, turns, fields)
    known |= set(fields.read)
    fields.ignored.update(name for name in record if name not in known and present(record[name]))
    return [*system, *turns]


def _column(record: dict, names: tuple[str, ...], kind: type = object) -> str:
    """The first of some fields that holds something, else the first that is there; empty if none is."""
    there = [name for name in names if record.get(name) is not None and isinstance(record[name], kind)]
    return next((name for name in there if present(record[name])), next(iter(there), ""))


def _system(record: dict, turns: list[Turn], fields: Fields) -> list[Turn]:
    """The record's own system prompt as a turn, unless a turn says the same already."""
    column = _column(record, SYSTEM)
    if not present(record.get(column)):
        return []
    text = _text(record[column])
    fields.read[column] += 1
    if turns and turns[0].role.lower() in ("system", "developer"):
        if turns[0].text.strip() != text.strip():
            raise Skip(f"field '{column}' and another system message")
        return []
    return [Turn("system", text)]


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise Skip("a prompt is not text")
    return texts


def _turn(message: Any, fields: Fields) -> Turn:
    if not isinstance(message, dict):
        raise Skip("a turn is not an object")
    needed = next((name for name in (*CALLS, *ATTACHED) if present(message.get(name))), None)
    if needed:
        raise Skip(f"field 'message.{needed}'")
    role = next((message[name] for name in ROLE_PARTS if message.get(name) is not None), None)
    content = next((message[name] for name in TEXT_PARTS if message.get(name) is not None), None)
    if not isinstance(role, str) or content is None:
        raise Skip("a turn without a role or text")
    name = next((name for name in REASONING if present(message.get(name))), "")
    reasoning = message[name] if name else ""
    if not isinstance(reasoning, str):
        raise Skip("a turn whose reasoning is not text")
    weights = {name: _weight(name, message[name]) for name in WEIGHTS if message.get(name) is not None}
    if ROLES.get(role.lower()) == "assistant":
        fields.read.update([f"message.{name}"] if name else [])
        fields.read.update(f"message.{name} 0" for name, weight in weights.items() if not weight)
    else:
        fields.ignored.update(f"message.{name} of '{role}'" for name in filter(weights.get, weights))
    known = {*ROLE_PARTS, *TEXT_PARTS, *WEIGHTS, *REASONING}
    fields.ignored.update(f"message.{name}" for name in message if name not in known and present(message[name]))
    return Turn(role, _text(content), all(weights.values()), reasoning)


def _weight(name: str, weight: Any) -> bool:
    """A head's loss has a row or has none: weights between are not rounded."""
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise Skip(f"field 'message.{name}' is neither 0 nor 1")
    return bool(weight)


def _text(content: Any) -> str:
    try:
        return joined_text(content)
    except ValueError as reason:
        raise Skip(str(reason)) from None


def to_messages(turns: list[Turn]) -> list[dict[str, str]]:
    """Checked messages. Raises Skip with the first reason that holds, in the order of the checks below."""
    if not turns:
        raise Skip("empty conversation")
    unknown = next((turn.role for turn in turns if turn.role.lower() not in ROLES), None)
    if unknown is not None:
        raise Skip(f"unknown role '{unknown}'")
    messages = []
    for turn in turns:
        messages.append({"role": ROLES[turn.role.lower()], "content": turn.text})
        if messages[-1]["role"] == "assistant":
            messages[-1] |= {REASONING[0]: turn.reasoning} if turn.reasoning else {}
            messages[-1] |= {} if turn.trained else {"weight": 0}
    check_order([message["role"] for message in messages])
    if any(not message["content"].strip() for message in messages):
        raise Skip("empty turn")
    return messages
