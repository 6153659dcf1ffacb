"""Conversations -> a token file: input ids and the spans of ids that are answers.

    python data_prep/tokenise.py --conversations answers.jsonl --expert runs/demo/expert --out runs/data/train.parquet

Records written by data_prep/regenerate.py carry the ids that the expert read and wrote; these are taken verbatim,
because decoding and encoding text again changes some of them. For any other record the chat template is rendered turn
by turn: the ids before an answer must be a prefix of the ids with it, else the conversation is skipped. An answer
begins after all that the template writes before it (with Qwen3's an empty pair of <think> tags; give --template_args
'{"enable_thinking": false}' here and for decoding, and prompts have it too), and ends with its end-of-turn token,
inclusive. One of weight 0 is read by later turns and not trained on.

Each answer follows the prompt that a model sees before it. Where the template rewrites earlier turns (as Qwen3's, which
drops the thinking of earlier answers), a conversation becomes several samples, <id> and <id>/turn-N, each up to the
next rewriting.

A sample longer than --max_length is cut at an answer boundary: later answers are dropped whole, and a sample whose
first answer does not fit is skipped. Everything left out is counted by reason, printed, and stored in the file's
metadata. An output that was made from other input or with other settings is only replaced with --overwrite.
"""

import dcd_core.environment  # noqa: F401  isort: skip

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from data_prep.answers import ELSEWHERE
from data_prep.messages import Skip, placed_conversations
from data_prep.token_files import Sample, read_metadata, span_fault, write_tokens
from dcd_core.chat import Chat, TemplateError, encode, template_arguments
from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import check_output_file, file_hash
from dcd_core.locks import held
from dcd_core.message_fields import REASONING
from dcd_core.progress import progress

REMAKE = "make the file with data_prep/regenerate.py"
Sequence = tuple[int, list[int], list[tuple[int, int]]]
"""The turn of its first answer that is trained on, ids, and spans."""


@dataclass
class Config:
    conversations: list[str] = field(metadata={"help": "JSONL files of conversations.py or regenerate.py"})
    expert: str = field(metadata={"help": "model folder or hub id whose tokenizer and chat template are used"})
    out: str = field(metadata={"help": "parquet file to write"})
    max_length: int = field(default=2048, metadata={"help": "longest sample in tokens"})
    template_args: str = field(default="", metadata={"help": 'JSON for the chat template: {"enable_thinking": false}'})
    limit_tokens: int = field(default=0, metadata={"help": "stop once there are this many answer tokens (0: never)"})
    overwrite: bool = field(default=False, metadata={"help": "replace an output that was made otherwise"})

    def __post_init__(self):
        if not self.conversations:
            raise ValueError("--conversations needs a file")
        if self.max_length < 2:
            raise ValueError("--max_length must be at least 2: a prompt token and an answer token")
        if self.limit_tokens < 0:
            raise ValueError("--limit_tokens must not be negative")
        template_arguments(self.template_args)


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    out = check_output_file(config.out, config.conversations)
    inputs = input_hashes(config.conversations)
    chat = Chat(config.expert, template_arguments(config.template_args))
    made = settings_and_inputs(config, chat, inputs)
    if out.exists() and not config.overwrite:
        refuse_other(out, made)
    counts = Counter()
    with held(out):
        samples = list(limited(all_samples(config, chat, counts), config.limit_tokens))
        if not samples:
            reasons = ", ".join(f"{number} x {reason}" for reason, number in counts.most_common(3))
            raise UserError(f"no conversation gives a sample, so every loss mask would be all zeros ({reasons})")
        metadata = made | {
            "samples": len(samples),
            "tokens": sum(len(sample.input_ids) for sample in samples),
            "answers": sum(len(sample.answer_spans) for sample in samples),
            "answer_tokens": sum(len(sample.answer_ids()) for sample in samples),
            "counts": dict(counts.most_common()),
        }
        write_tokens(out, samples, metadata)
    for reason, number in counts.most_common():
        print(f"{number}: {reason}")
    shown = "{samples} samples, {tokens} tokens, {answers} answers, {answer_tokens} answer tokens"
    print(f"{shown.format(**metadata)} -> {out}")
    return 0


def settings_and_inputs(config: Config, chat: Chat, inputs: dict[str, str]) -> dict:
    """The part of the metadata that is known before the work; settings that change nothing are not in it."""
    made = {
        "tokenizer_hash": chat.hash,
        "stop_ids": list(chat.stops),
        "max_length": config.max_length,
        "sources": inputs,
    }
    optional = {"template_args": chat.arguments, "limit_tokens": config.limit_tokens}
    return made | {name: value for name, value in optional.items() if value}


def refuse_other(out: Path, made: dict) -> None:
    """Raise UserError unless `out` is a token file made in this very way: writing that again loses nothing."""
    try:
        metadata = read_metadata(out)
    except UserError:
        metadata = {}
    names = [*made, "template_args", "limit_tokens"]
    if any(metadata.get(name) != made.get(name) for name in names):
        raise UserError(
            f"{out} exists and was made from other input or with other settings: give --overwrite or another --out"
        )


def input_hashes(paths: list[str]) -> dict[str, str]:
    """Name -> content hash of each input. Raises UserError if one is not there."""
    hashes: dict[str, str] = {}
    for number, path in enumerate(paths, start=1):
        if not Path(path).is_file():
            raise UserError(f"there is no file {path or 'without a name'}: make it with data_prep/regenerate.py")
        name = Path(path).name
        hashes[f"{name} ({number})" if name in hashes else name] = file_hash(path)
    return hashes


def all_samples(config: Config, chat: Chat, counts: Counter) -> Iterator[Sample]:
    """The samples of all usable records, in order; everything else is counted."""
    names = set()
    for path in config.conversations:
        for place, record in progress(placed_conversations(path), label=f"tokenise {path}"):
            try:
                samples = to_samples(record, chat, place, counts)
                if samples[0].id in names:
                    raise Skip("skipped: id already there from another file")
            except Skip as reason:
                counts[str(reason)] += 1
                continue
            names.add(samples[0].id)
            if len(samples) > 1:
                counts["conversations in several samples, because the chat template rewrites earlier turns"] += 1
            for sample in samples:
                try:
                    yield cut(sample, config.max_length, counts)
                except Skip as reason:
                    counts[str(reason)] += 1


def limited(samples: Iterator[Sample], limit_tokens: int) -> Iterator[Sample]:
    """The samples up to the one with which the answers reach `limit_tokens`."""
    total = 0
    for sample in samples:
        yield sample
        total += len(sample.answer_ids())
        if limit_tokens and total >= limit_tokens:
            return


def cut(sample: Sample, max_length: int, counts: Counter) -> Sample:
    """The sample up to its last answer that ends within `max_length`. Raises Skip when not even the first one does."""
    spans = tuple(span for span in sample.answer_spans if span[1] <= max_length)
    if not spans:
        raise Skip(f"skipped: the first answer ends beyond {max_length} tokens")
    if len(spans) < len(sample.answer_spans):
        counts[f"cut at an answer boundary to {max_length} tokens"] += 1
    return Sample(sample.id, sample.input_ids[: spans[-1][1]], spans)


def to_samples(record: dict, chat: Chat, place: str, counts: Counter) -> list[Sample]:
    """One record, which stands at `place`, as ids and spans: a sample for each prefix that the template rewrites.

    Raises Skip, or UserError as `verbatim` does.
    """
    name = record["id"]
    if "input_ids" in record:
        name = f"{name}#{record['sample']}" if record.get("sample") else name
        sequences = verbatim(record, chat, place)
    else:
        token = chat.spelled_out(record["messages"])
        if token:
            raise Skip(f"skipped: {token} spelled out in a message")
        try:
            sequences = rendered(record["messages"], chat, counts)
        except TemplateError as error:
            raise Skip(f"skipped: the chat template refuses it ({error})") from None
    if not sequences:
        raise Skip("skipped: no answer in it" + (" that is trained on" if has_answer(record) else ""))
    return [
        Sample(f"{name}/turn-{turn}" if number else name, np.array(ids, dtype=np.int32), tuple(spans))
        for number, (turn, ids, spans) in enumerate(sequences)
    ]


def has_answer(record: dict) -> bool:
    """Whether an answer is there, trained on or not."""
    return any(message["role"] == "assistant" for message in record["messages"])


def verbatim(record: dict, chat: Chat, place: str) -> list[Sequence]:
    """The ids that were really used: of the sequences that were rewritten later, then of the last one.

    Raises UserError, beginning with `place`, for ids of another tokenizer or ids and spans that cannot be.
    """
    if record.get("tokenizer") != chat.hash:
        raise UserError(
            f"{place}: record '{record['id']}' was regenerated with another tokenizer than --expert's: "
            "give the expert that wrote the answers"
        )
    earlier = record.get("earlier_sequences", [])
    if not isinstance(earlier, list) or not all(isinstance(part, dict) for part in earlier):
        raise UserError(f"{place}: 'earlier_sequences' is no list of objects: {REMAKE}")
    return [found for part in [*earlier, record] if (found := sequence(part, chat, place))]


def sequence(part: dict, chat: Chat, place: str) -> Sequence | None:
    """One checked pair of `input_ids` and `answer_spans`; None without an answer. Raises UserError as `verbatim`."""
    ids, spans = part.get("input_ids"), part.get("answer_spans")
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise UserError(f"{place}: 'input_ids' is no list of whole numbers: {REMAKE}")
    foreign = next((index for index in ids if not 0 <= index < chat.vocabulary), None)
    if foreign is not None:
        raise UserError(f"{place}: id {foreign} is none of the tokenizer's, which go from 0 to {chat.vocabulary - 1}")
    if not isinstance(spans, list) or not all(_is_pair(span) for span in spans):
        raise UserError(f"{place}: 'answer_spans' is no list of [start, end]: {REMAKE}")
    written = [(turn, tuple(span)) for turn, span in enumerate(spans) if tuple(span) != ELSEWHERE]
    fault = span_fault([span for _, span in written], len(ids))
    if fault:
        raise UserError(f"{place}: {fault}: {REMAKE}")
    return (written[0][0], ids, [span for _, span in written]) if written else None


def _is_pair(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)


def rendered(messages: list[dict], chat: Chat, counts: Counter) -> list[Sequence]:
    """Ids up to the last answer's end, and the spans of the answers; a new sequence where earlier ids change."""
    roles = [message["role"] for message in messages]
    if any(pair == ("user", "user") for pair in pairwise(roles)):
        raise Skip("skipped: questions without answers between them")
    sequences: list[Sequence] = []
    answers = [place for place, role in enumerate(roles) if role == "assistant"]
    for turn, place in enumerate(answers):
        if messages[place].get("weight", 1) == 0:
            counts["answers of weight 0, not trained on"] += 1
            continue
        if messages[place].get(REASONING[0]) and not chat.writes_reasoning:
            counts[f"answers without their '{REASONING[0]}', which the chat template does not write"] += 1
        before, after = answered(messages[: place + 1], chat, counts)
        end = next((at + 1 for at in range(len(before), len(after)) if after[at] in chat.stops), None)
        if end is None:
            raise Skip("skipped: an answer is rendered without an end-of-turn token")
        spans = []
        if sequences and before[: len(sequences[-1][1])] == sequences[-1][1]:
            turn, _, spans = sequences.pop()
        sequences.append((turn, after[:end], [*spans, (len(before), end)]))
    return sequences


def answered(messages: list[dict], chat: Chat, counts: Counter) -> tuple[list[int], list[int]]:
    """(ids before the last message, an answer; ids with it). What the template itself writes before any answer belongs
    to the former. Raises Skip if the former do not begin the latter."""
    prompt, after = chat.text(messages[:-1], generation_prompt=True), encode(chat.tokenizer, chat.text(messages))
    for filler in dict.fromkeys((chat.filler, "")):
        before = encode(chat.tokenizer, prompt + filler)
        if after[: len(before)] == before:
            if filler:
                counts["answers after a filler that the chat template writes and a prompt for decoding has not"] += 1
            return before, after
    raise Skip("skipped: its ids with an answer do not begin with those before it")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
