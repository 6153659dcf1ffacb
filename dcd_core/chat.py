"""Messages -> text -> ids, by the tokenizer's own chat template, and which ids end an answer.

Ids are always made from the rendered text without adding special tokens: templates write their own beginning-of-text
token, and a second one changes what the model says without any error. Where an answer begins is what the template says
with add_generation_prompt; a template on which that has no effect is asked with answers of our own (`before_answer`).
"""

import hashlib
import json
import os
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import GenerationConfig

from dcd_core.errors import UserError
from dcd_core.message_fields import REASONING, message_texts
from dcd_core.models import id_table, load_tokenizer

Messages = list[dict[str, str]]
PROBES = ("Yes, it is.", "no", "42")
"""Answers that a template writes as they are; they share no first character."""


def load_chat_tokenizer(name_or_path: str):
    """The tokenizer of a model folder or hub id. Raises UserError if there is none, or it has no chat template."""
    tokenizer = load_tokenizer(name_or_path)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {name_or_path} has no chat template, so messages cannot be turned into a prompt: "
            "use an instruction-tuned model"
        )
    return tokenizer


def tokenizer_hash(tokenizer) -> str:
    """sha256 of what decides ids: vocabulary, merges, splitting rules and added tokens."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    # set by the last caller, not part of what the tokenizer is
    rules["truncation"] = rules["padding"] = None
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def stop_ids(tokenizer, model: str | Path) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the eos ids of the model's generation config, and the tokenizer's.

    Raises UserError when neither names one (answers would never end), and for a damaged generation config.
    """
    ids = set()
    try:
        given = GenerationConfig.from_pretrained(str(model)).eos_token_id
    except Exception as error:  # a damaged file makes transformers raise anything
        given = None  # older model folders have no generation config
        if Path(model, "generation_config.json").exists() or not isinstance(error, OSError):
            raise UserError(f"{model}/generation_config.json cannot be read ({error}): fetch it again") from None
    if given is not None:
        listed = given if isinstance(given, list) else [given]
        if not all(type(index) is int and index >= 0 for index in listed):
            raise UserError(f"{model}/generation_config.json: eos_token_id must be an id or a list of ids, got {given}")
        ids.update(listed)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError(f"neither the generation config nor the tokenizer of {model} names an end-of-turn token (eos)")
    return tuple(sorted(ids))


class Chat:
    """One model's way to write conversations: tokenizer, template arguments, end-of-turn ids (`stops`), `hash`, the
    number of ids (`vocabulary`), the `control` tokens that no message may spell out, the `filler` between a prompt and
    an answer, and whether it `writes_reasoning`. Raises UserError where the functions it is made of do."""

    def __init__(self, model: str, arguments: dict | None = None):
        self.arguments = arguments or {}
        self.tokenizer = load_chat_tokenizer(model)
        self.stops = stop_ids(self.tokenizer, model)
        self.hash = tokenizer_hash(self.tokenizer)
        self.vocabulary = len(id_table(self.tokenizer))
        self.control = control_tokens(self.tokenizer, self.stops, **self.arguments)
        self.filler = answer_filler(self.tokenizer, **self.arguments)
        self.writes_reasoning = writes_reasoning(self.tokenizer, **self.arguments)

    def text(self, messages: Messages, generation_prompt: bool = False) -> str:
        """See `render`."""
        return render(self.tokenizer, messages, generation_prompt, **self.arguments)

    def ids(self, messages: Messages, generation_prompt: bool = False) -> list[int]:
        """See `render_ids`."""
        return render_ids(self.tokenizer, messages, generation_prompt, **self.arguments)

    def spelled_out(self, messages: Messages) -> str | None:
        """The first control token that a message's text contains."""
        return next((token for text in message_texts(messages) for token in self.control if token in text), None)


def template_arguments(text: str) -> dict:
    """The value of --template_args, a JSON object such as {"enable_thinking": false}; empty text means none."""
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--template_args is not JSON ({error}); write for example '{{\"enable_thinking\": false}}'"
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError("--template_args must be a JSON object, for example '{\"enable_thinking\": false}'")
    return arguments


def render(tokenizer, messages: Messages, generation_prompt: bool = False, **arguments) -> str:
    """The conversation as text; with `generation_prompt` it ends where the assistant's next answer begins.

    Raises jinja2.TemplateError when the template refuses the messages (roles out of order, no system prompts, ...), and
    when it does not show where an answer begins.
    """
    text = _applied(tokenizer, messages, generation_prompt, **arguments)
    if generation_prompt and text == _applied(tokenizer, messages, False, **arguments):
        return before_answer(tokenizer, messages, **arguments)
    return text


def before_answer(tokenizer, messages: Messages, **arguments) -> str:
    """What the template writes before an answer to `messages`, whatever the answer is: what its renderings with several
    answers share.

    Spaces at the end that the tokenizer joins with the answer's first word are not part of it. Raises TemplateError if
    the template refuses the messages, or what the renderings share does not end right before the answer.
    """
    texts = [_applied(tokenizer, [*messages, _answer(probe)], False, **arguments) for probe in PROBES]
    shared = os.path.commonprefix(texts)
    # another question must come before the answer too, and so change what is shared
    changed = [*messages[:-1], messages[-1] | {"content": "and " + messages[-1]["content"]}]
    other = _applied(tokenizer, [*changed, _answer(PROBES[0])], False, **arguments)
    begins = all(text[len(shared) :].startswith(probe) for text, probe in zip(texts, PROBES, strict=True))
    if not begins or other.startswith(shared):
        raise TemplateError(
            "it does not show where an answer begins, neither by add_generation_prompt nor by an answer"
        )
    while not all(_starts(encode(tokenizer, text), encode(tokenizer, shared)) for text in texts):
        if not shared[-1:].isspace():
            raise TemplateError("the tokenizer joins the assistant's header with the answer")
        shared = shared[:-1]
    return shared


def answer_filler(tokenizer, **arguments) -> str:
    """What the template writes between the generation prompt and an answer that is given to it, as Qwen3 does with an
    empty pair of <think> tags: no part of the answer. Empty if there is none, or no answer begins with that prompt."""
    question = [{"role": "user", "content": "a"}]
    prompt = render(tokenizer, question, True, **arguments)
    try:
        written = before_answer(tokenizer, question, **arguments)
    except TemplateError:
        return ""
    return written[len(prompt) :] if written.startswith(prompt) else ""


def writes_reasoning(tokenizer, **arguments) -> bool:
    """Whether the template writes what was thought before an answer."""
    question, answer = {"role": "user", "content": "a"}, _answer("b")
    with_it = _applied(tokenizer, [question, answer | {REASONING[0]: "c"}], False, **arguments)
    return with_it != _applied(tokenizer, [question, answer], False, **arguments)


def _applied(tokenizer, messages: Messages, generation_prompt: bool, **arguments) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt, **arguments)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _starts(ids: list[int], first: list[int]) -> bool:
    return ids[: len(first)] == first


def encode(tokenizer, text: str) -> list[int]:
    """Ids of rendered text, nothing added."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_ids(tokenizer, messages: Messages, generation_prompt: bool = False, **arguments) -> list[int]:
    """`render`, then `encode`."""
    return encode(tokenizer, render(tokenizer, messages, generation_prompt, **arguments))


def control_tokens(tokenizer, stops: tuple[int, ...], **arguments) -> list[str]:
    """The special tokens that give a conversation its form: those in a rendered one, and those that end an answer.

    Spelled out in a message they would become the same ids, and text would pose as form. Raises UserError when the
    template refuses even one plain question and answer.
    """
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        used = set(render_ids(tokenizer, plain, **arguments)) | set(render_ids(tokenizer, plain[:1], True, **arguments))
    except TemplateError as error:
        raise UserError(f"the chat template cannot render a question and its answer: {error}") from None
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [text for index, text in sorted(special.items()) if index in used or index in stops]
