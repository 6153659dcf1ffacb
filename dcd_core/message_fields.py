"""Fields of chat records beside role and content: which are read, and which a record cannot be understood without."""

from collections.abc import Iterator
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which a message holds what was thought before its content; in our own files it is the first."""
WEIGHTS = ("weight", "loss", "train")
"""Names under which a message says whether it is trained on: OpenAI's, ms-swift's and Axolotl's."""
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
CALLS = ("tool_calls", "function_call")
ATTACHED = ("image", "images", "video", "videos", "audio", "audios")


def present(value: Any) -> bool:
    """Whether a field holds something: data sets with one schema fill what a record lacks with such as these."""
    return value is not None and value is not False and value not in ("", "[]", "{}", "null", [], {})


def unread_field(record: dict) -> str:
    """The first field of a record {messages: [...]}, or of its messages, that says something which readers of our own
    files do not look for; empty if there is none. Only data_prep/conversations.py reads such records."""
    own = [name for name in (*SYSTEM, *TOOLS, *ATTACHED) if present(record.get(name))]
    calls = [
        f"message.{name}"
        for message in record.get("messages", [])
        for name in (*CALLS, *ATTACHED, *WEIGHTS[1:], *REASONING[1:])
        if present(message.get(name)) or (name in WEIGHTS and message.get(name) is not None)
    ]
    return next(iter([*own, *calls]), "")


def message_texts(messages: list[dict]) -> Iterator[str]:
    """All text of the messages, reasoning included."""
    texts = (message.get(part) for message in messages for part in ("content", REASONING[0]))
    return (text for text in texts if text is not None)


def joined_text(content: Any) -> str:
    """A message's content as one text: parts of text become lines, as inference servers join them.

    Raises ValueError, with the reason alone, for a part of another type and for what is no text.
    """
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"content of type '{kind}'")
        if not isinstance(text, str):
            raise ValueError("content that is not text")
        texts.append(text)
    return "\n".join(texts)
