"""Raw record -> {id, messages, source}: role names, order, and a reason for everything that is left out.

Conversations are JSONL {id, messages: [{role, content}], source}, roles system (first, at most once), user, assistant
in turn. A record may hold only questions (several user messages in a row): regeneration answers each of them.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcd_core.errors import UserError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "turns", "text")
ID_COLUMNS = ("id", "prompt_id", "question_id", "task_id", "conversation_id")


class Skip(Exception):
    """This record is left out; the message is the reason under which it is counted."""


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

    def note(self, name: str | None, turns: list[tuple[str, str]]) -> None:
        """Count one conversation: its id (None if it has none) and its (raw role, text) turns."""
        self.conversations += 1
        self.empty += not turns
        if turns:
            self.opened_by[turns[0][0]] += 1
        self.empty_turns += sum(not text.strip() for _, text in turns)
        self.roles.update(role for role, _ in turns)
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


def raw_turns(record: Any, text_column: str = "") -> list[tuple[str, str]]:
    """The (raw role, text) turns of a record in ShareGPT, messages or prompt-only form.

    Raises Skip when the form is unknown or a text is not text.
    """
    if not isinstance(record, dict):
        raise Skip("not a JSON object")
    if text_column:
        return [("user", text) for text in _texts(record.get(text_column))]
    for column in MESSAGE_COLUMNS:
        if isinstance(record.get(column), list):
            return [_turn(message) for message in record[column]]
    for column in PROMPT_COLUMNS:
        if record.get(column):
            extra = record.get("input") if column == "instruction" else None
            texts = _texts(record[column])
            return [("user", f"{text}\n\n{extra}" if extra else text) for text in texts]
    raise Skip("no messages, conversations or prompt column")


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise Skip("a prompt is not text")
    return texts


def _turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise Skip("a turn is not an object")
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise Skip("a turn without a role or text")
    return role, text


def to_messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Checked messages. Raises Skip with the first reason that holds, in the order of the checks below."""
    if not turns:
        raise Skip("empty conversation")
    unknown = next((role for role, _ in turns if role.lower() not in ROLES), None)
    if unknown is not None:
        raise Skip(f"unknown role '{unknown}'")
    messages = [{"role": ROLES[role.lower()], "content": text} for role, text in turns]
    check_order([message["role"] for message in messages])
    if any(not message["content"].strip() for message in messages):
        raise Skip("empty turn")
    return messages


def check_order(roles: list[str]) -> None:
    """Raises Skip unless the roles are [system], then user and assistant in turn, or user alone."""
    rest = roles[1:] if roles[:1] == ["system"] else roles
    if rest[:1] != ["user"]:
        raise Skip("not opened by a human")
    alternate = all(role == ("user", "assistant")[place % 2] for place, role in enumerate(rest))
    if not alternate and set(rest) != {"user"}:
        raise Skip("wrong order of roles")


def is_writable(*texts: str) -> bool:
    """Whether the texts are made of characters: JSON may also spell out half of a pair (a lone surrogate)."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_conversations(path: str | Path) -> Iterator[dict]:
    """The records of a conversations file, see `placed_conversations`."""
    for _, record in placed_conversations(path):
        yield record


def placed_conversations(path: str | Path) -> Iterator[tuple[str, dict]]:
    """(file and line, record) of a file written by data_prep/conversations.py or regenerate.py, checked one by one.

    Raises UserError naming the line for anything else, and for a file without a record.
    """
    seen = set()
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                record = _parsed(line, place)
                fault = _fault(record)
                if fault:
                    raise UserError(f"{place} {fault}: make the file with data_prep/conversations.py")
                key = (record["id"], record.get("sample", 0))
                if key in seen:
                    raise UserError(f"{place}: id '{record['id']}' is there twice")
                seen.add(key)
                yield place, record
    except OSError as error:
        raise UserError(f"{path} cannot be read as conversations ({error.strerror})") from None
    if not seen:
        raise UserError(f"{path} is empty: there is no conversation in it")


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: byte {error.start} of the line is not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}): make the file with data_prep/conversations.py") from None
    except RecursionError:
        raise UserError(f"{place} is no conversation: it is nested too deeply") from None


def _fault(record: Any) -> str:
    """What keeps a JSON value from being a conversation, as the end of a sentence; empty if nothing does."""
    if not isinstance(record, dict):
        return "is no conversation but another JSON value"
    if not isinstance(record.get("id"), str):
        return "has an 'id' that is not text" if "id" in record else "has no 'id'"
    messages = record.get("messages")
    if not isinstance(messages, list):
        return "has no list of 'messages'"
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
            return "has a message without a text as 'role' and one as 'content'"
    try:
        check_order([message["role"] for message in messages])
    except Skip as reason:
        return f"has messages in no usable order ({reason})"
    if not isinstance(record.get("sample", 0), int):
        return "has a 'sample' that is no whole number"
    if not is_writable(record["id"], str(record.get("source")), *(message["content"] for message in messages)):
        return "has half a character (a lone surrogate) in its text"
    return ""
