"""Answering conversations: the ids that a model reads and writes, turn after turn, are kept as they were.

The next prompt is what the chat template makes of the conversation so far. Where that begins as what was read and
written, it is these ids, verbatim, because decoding text and encoding it again changes some, and the ids of what the
template puts between an answer and the next one. Where the template rewrites earlier turns (it trims answers, or drops
their thinking), the next prompt is a new sequence.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from data_prep.messages import Skip
from dcd_core.chat import Chat, Messages, TemplateError, encode
from dcd_core.decode import Generation, Prompt

ELSEWHERE = (0, 0)
"""The span of an answer in a sequence that it was not written in."""


@dataclass
class Work:
    """One conversation, one sample of it, while it is being answered. `ids` is the next prompt while `open`; `spans`
    has one span for each answer, ELSEWHERE for those of `earlier` sequences, which the template has rewritten since."""

    record: dict
    sample: int
    ids: list[int]
    messages: Messages
    questions: list[dict]
    spans: list[tuple[int, int]] = field(default_factory=list)
    earlier: list[dict] = field(default_factory=list)
    finish: str = ""
    open: bool = True

    def prompt(self) -> Prompt:
        """What the model reads now; id and sample key its randomness, so the order of the work does not matter."""
        turn = f"/turn-{len(self.spans)}" if self.spans else ""
        return Prompt(id=self.record["id"] + turn, ids=self.ids, sample=self.sample)

    def result(self, chat: Chat) -> dict:
        """The record to store."""
        return {
            "id": self.record["id"],
            "messages": self.messages,
            "source": self.record.get("source", ""),
            "sample": self.sample,
            "finish": self.finish,
            **self.sequence(),
            **({"earlier_sequences": self.earlier} if self.earlier else {}),
            "tokenizer": chat.hash,
        }

    def sequence(self) -> dict:
        """What was read and written since the template last rewrote something."""
        return {"input_ids": self.ids, "answer_spans": [list(span) for span in self.spans]}


def sequences(record: dict) -> list[dict]:
    """All pairs of input_ids and answer_spans of a stored record, the last one last."""
    return [*record.get("earlier_sequences", []), record]


def first_prompt(record: dict, chat: Chat, room: int) -> tuple[list[int], Messages, list[dict]]:
    """(ids, messages before the first answer, later questions). `room`: longest prompt in tokens. Raises Skip."""
    asked = [message for message in record["messages"] if message["role"] != "assistant"]
    token = chat.spelled_out(asked)
    if token:
        raise Skip(f"{token} spelled out in a message")
    first = 1 + next(place for place, message in enumerate(asked) if message["role"] == "user")
    try:
        ids = chat.ids(asked[:first], generation_prompt=True)
    except TemplateError as error:
        raise Skip(f"the chat template refuses it ({error})") from None
    if len(ids) > room:
        raise Skip(f"prompt longer than {room} tokens")
    return ids, asked[:first], asked[first:]


def plan(records: list[dict], samples: int, chat: Chat, room: int, batch_size: int, seed: int, skips: Counter):
    """Batches of Work, the same ones on every run: shuffled by a hash, then similar lengths together.

    Shuffled, so that stopping early leaves a fair sample of the prompts; grouped within eight batches, to waste less.
    """
    works = []
    for record in records:
        try:
            ids, messages, questions = first_prompt(record, chat, room)
        except Skip as reason:
            skips[str(reason)] += 1
            continue
        works += [Work(record, sample, ids, list(messages), list(questions)) for sample in range(samples)]
    works.sort(key=lambda work: hashlib.sha256(f"{seed}/{work.record['id']}/{work.sample}".encode()).digest())
    window = 8 * batch_size
    batches = []
    for start in range(0, len(works), window):
        part = sorted(works[start : start + window], key=lambda work: len(work.ids))
        batches += [part[place : place + batch_size] for place in range(0, len(part), batch_size)]
    return batches


def answer_batch(
    works: list[Work], answer: Callable[[list[Prompt]], list[Generation]], chat: Chat, room: int, skips: Counter
) -> list[dict]:
    """Answer every turn of these conversations; one record each. Turns that cannot be asked are counted in `skips`."""
    waiting = works
    while waiting:
        generations = answer([work.prompt() for work in waiting])
        for work, generation in zip(waiting, generations, strict=True):
            try:
                take(work, generation, chat, room)
            except Skip as reason:
                work.open = False
                skips[f"later turns left out: {reason}"] += 1
        waiting = [work for work in waiting if work.open]
    return [work.result(chat) for work in works]


def take(work: Work, generation: Generation, chat: Chat, room: int) -> None:
    """Add an answer, and the next question if there is one. Raises Skip if there is one that cannot be asked."""
    start = len(work.ids)
    text_ids = generation.ids[:-1] if generation.finish == "stop" else generation.ids
    text = chat.tokenizer.decode(text_ids, skip_special_tokens=True)
    # new lists, never extended in place: samples of one conversation start from the same ids
    work.ids = work.ids + generation.ids
    work.spans.append((start, len(work.ids)))
    work.messages = [*work.messages, {"role": "assistant", "content": text}]
    work.finish = generation.finish
    if not work.questions:
        work.open = False
        return
    if generation.finish != "stop":
        raise Skip("the answer before has no end")
    question, *rest = work.questions
    try:
        prompt = chat.ids([*work.messages, question], generation_prompt=True)
        added = appended(work.messages, question, chat)
    except TemplateError as error:
        raise Skip(f"the chat template refuses the next question ({error})") from None
    appends = prompt[: len(work.ids)] == work.ids
    # the answer's own end-of-turn token is among `ids` already, and must be the template's
    if not appends and added[:1] == work.ids[-1:]:
        appends, prompt = True, work.ids + added[1:]
    if len(prompt) > room:
        raise Skip(f"prompt longer than {room} tokens")
    if not appends:
        work.earlier = [*work.earlier, work.sequence()]
        work.spans = [ELSEWHERE] * len(work.spans)
    work.ids, work.messages, work.questions = prompt, [*work.messages, question], rest


def appended(messages: Messages, question: dict, chat: Chat) -> list[int]:
    """Ids of what the template writes after an answer, its end-of-turn token first, up to where the next answer begins.

    `messages` end with that answer. Empty when the next prompt does not begin with the text up to there. Raises
    TemplateError.
    """
    before = chat.text(messages[:-1], generation_prompt=True) + messages[-1]["content"]
    after = chat.text([*messages, question], generation_prompt=True)
    return encode(chat.tokenizer, after[len(before) :]) if after.startswith(before) else []
