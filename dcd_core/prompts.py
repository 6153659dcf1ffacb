"""Prompts as ids: a text or a conversation by the expert's chat template, or a text as it is; single, or from files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise

from jinja2 import TemplateError

from dcd_core.chat import Messages, render_ids, stop_ids
from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError
from dcd_core.message_fields import joined_text, message_texts, unread_field
from dcd_core.models import load_tokenizer
from dcd_core.text_files import text_lines

EXPECTED = (
    "a prompt is {id, messages: [{role, content}]} with a user message, or {prompt}; data_prep/conversations.py makes "
    "files of conversations"
)


def read_prompts(
    path: str, expert: str, limit: int = 0, raw: bool = False, **template_arguments
) -> tuple[list[Prompt], tuple[int, ...]]:
    """Prompts of a file as ids, and the ids that end an answer.

    The file holds JSON lines {id, messages} or {prompt}; the latter may have an id too, else it is the line's number. A
    conversation is taken up to its last user message. `limit` 0 takes all, `raw` leaves the chat template out (see
    `prompt_ids`). Raises UserError for a missing or empty file, a bad line, or an id that occurs twice (answers are
    paired by id).
    """
    tokenizer = load_tokenizer(expert)
    prompts: dict[str, Prompt] = {}
    for number, line in _lines(path):
        if limit and len(prompts) == limit:
            break
        where = f"{path}, line {number}"
        name, content = _record(line, where, number)
        if name in prompts:
            raise UserError(f"{where}: the id '{name}' occurs twice; answers are paired by id, so give each its own")
        prompts[name] = Prompt(name, prompt_ids(tokenizer, content, raw, where, **template_arguments))
    if not prompts:
        raise UserError(f'{path} is empty; it needs lines such as {{"id": "1", "messages": [...]}}')
    return list(prompts.values()), stop_ids(tokenizer, expert)


def prompt_ids(
    tokenizer, content: str | Messages, raw: bool = False, where: str = "the prompt", **template_arguments
) -> list[int]:
    """Ids of one prompt.

    Args:
        content: a user's message, or a conversation [{role, content}] that waits for an answer.
        raw: the text itself, with what the tokenizer puts around every text (its beginning-of-text token, say).
        where: what to call the prompt in a refusal.
        template_arguments: further values for the chat template.
    Raises:
        UserError: nothing in it, no chat template, a template that refuses it, or a raw conversation.
    """
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else _as_text(content, where)
    _refuse_no_text(message_texts(messages), where)
    if not messages or not messages[-1]["content"].strip():
        raise UserError(f"{where} is empty; give at least one word")
    if raw:
        if not isinstance(content, str):
            raise UserError(f"{where} is a conversation, which needs the chat template; raw prompts are texts")
        return tokenizer(content)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so messages cannot be turned into a "
            "prompt: use an instruction-tuned model, or raw texts where they are offered"
        )
    try:
        return render_ids(tokenizer, messages, True, **template_arguments)
    except TemplateError as problem:
        raise UserError(f"{where}: the chat template of {tokenizer.name_or_path} refuses it: {problem}") from None


def _refuse_no_text(texts: Iterable[str], where: str) -> None:
    """Refuse what only looks like text: bytes that are no UTF-8 reach Python as lone surrogates."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            raise UserError(f"{where} is no valid text ({problem.reason} at {problem.start}); give UTF-8") from None


def _as_text(messages: list, where: str) -> Messages:
    """The messages with one text as content each."""
    found = []
    for message in messages:
        try:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError("no role")
            found.append(message | {"content": joined_text(message.get("content"))})
            if not all(isinstance(text, str) for text in message_texts(found[-1:])):
                raise ValueError("reasoning that is not text")
        except ValueError as reason:
            raise UserError(
                f"{where} holds a message without role and content as text ({reason}); {EXPECTED}"
            ) from None
    return found


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        yield from text_lines(path)
    except OSError as problem:
        raise UserError(f"cannot read the prompts in {path}: {problem.strerror or problem}") from None


def _record(line: str, where: str, number: int) -> tuple[str, str | Messages]:
    """Id and content of one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON; {EXPECTED}") from None
    if isinstance(record, dict) and isinstance(record.get("prompt"), str) and "messages" not in record:
        record = {"id": number} | record | {"messages": []}
    for name, kind in (("id", str | int), ("messages", list)):
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise UserError(f"{where} has no '{name}'; {EXPECTED}")
    messages = _as_text(record["messages"], where)
    lost = unread_field(record)
    if lost:
        raise UserError(f"{where} has the field '{lost}', which is not read here; {EXPECTED}")
    if "prompt" in record:
        return str(record["id"]), record["prompt"]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"{where} has no user message; {EXPECTED}")
    gap = next((place for place, after in pairwise(users) if after == place + 1), None)
    if gap is not None:
        raise UserError(
            f"{where}: messages {gap + 1} and {gap + 2} are both the user's, without the answer between them; "
            "data_prep/regenerate.py answers such questions in turn"
        )
    return str(record["id"]), messages[: users[-1] + 1]
