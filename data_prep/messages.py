"""Conversations as they are between the scripts: the order of roles, and reading a file of them, checked line by line.

A file is JSONL {id, messages: [{role, content}], source}, roles system (first, at most once), user, assistant in turn.
A record may hold only questions (several user messages in a row): regeneration answers each of them. An answer may hold
"weight": 0 (later turns read it, it is not trained on) and its reasoning (names: dcd_core.message_fields).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcd_core.errors import UserError
from dcd_core.message_fields import message_texts, unread_field
from dcd_core.text_files import text_lines

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


class Skip(Exception):
    """This record is left out; the message is the reason under which it is counted."""


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
        for number, line in text_lines(path):
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


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
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
        if message.get("weight", 1) not in (0, 1):
            return "has a message with a 'weight' other than 0 and 1"
        if not all(isinstance(text, str) for text in message_texts([message])):
            return "has a message whose reasoning is not text"
    try:
        check_order([message["role"] for message in messages])
    except Skip as reason:
        return f"has messages in no usable order ({reason})"
    if not isinstance(record.get("sample", 0), int):
        return "has a 'sample' that is no whole number"
    lost = unread_field(record)
    if lost:
        return f"has the field '{lost}', which is not read here"
    if not is_writable(record["id"], str(record.get("source")), *message_texts(messages)):
        return "has half a character (a lone surrogate) in its text"
    return ""
