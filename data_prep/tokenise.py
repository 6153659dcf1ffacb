"""Conversations -> a token file: input ids and the spans of ids that are answers.

    python data_prep/tokenise.py --conversations answers.jsonl --expert runs/demo/expert --out runs/data/train.parquet

Records written by data_prep/regenerate.py carry the ids that the expert read and wrote; these are taken verbatim,
because decoding and encoding text again changes some of them. For any other record the chat template is rendered turn
by turn: the ids before an answer must be a prefix of the ids with it, else the conversation is skipped. An answer ends
with its end-of-turn token, inclusive.

A sample longer than --max_length is cut at an answer boundary: later answers are dropped whole, and a sample whose
first answer does not fit is skipped. Everything left out is counted by reason, printed, and stored in the file's
metadata. An output that was made from other input or with other settings is only replaced with --overwrite.
"""

import dcd_core.environment  # noqa: F401  isort: skip

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.messages import Skip, placed_conversations
from data_prep.token_files import Sample, read_metadata, span_fault, write_tokens
from dcd_core.chat import Chat, TemplateError, template_arguments
from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import check_output_file, file_hash
from dcd_core.progress import progress

REMAKE = "make the file with data_prep/regenerate.py"


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
    """One sample per usable record, in order; everything else is counted."""
    names = set()
    for path in config.conversations:
        for place, record in progress(placed_conversations(path), label=f"tokenise {path}"):
            try:
                sample = cut(to_sample(record, chat, place), config.max_length, counts)
                if sample.id in names:
                    raise Skip("skipped: id already there from another file")
            except Skip as reason:
                counts[str(reason)] += 1
                continue
            names.add(sample.id)
            yield sample


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


def to_sample(record: dict, chat: Chat, place: str) -> Sample:
    """Ids and answer spans of one record, which stands at `place`. Raises Skip, or UserError as `verbatim` does."""
    if "input_ids" in record:
        return verbatim(record, chat, place)
    token = chat.spelled_out(record["messages"])
    if token:
        raise Skip(f"skipped: {token} spelled out in a message")
    try:
        ids, spans = rendered(record["messages"], chat)
    except TemplateError as error:
        raise Skip(f"skipped: the chat template refuses it ({error})") from None
    if not spans:
        raise Skip("skipped: no answer in it")
    return Sample(record["id"], np.array(ids, dtype=np.int32), tuple(spans))


def verbatim(record: dict, chat: Chat, place: str) -> Sample:
    """The ids that were really used. Samples after the first get a name of their own.

    Raises Skip where there is no answer, and UserError, beginning with `place`, for ids of another tokenizer or ids
    and spans that cannot be.
    """
    if record.get("tokenizer") != chat.hash:
        raise UserError(
            f"{place}: record '{record['id']}' was regenerated with another tokenizer than --expert's: "
            "give the expert that wrote the answers"
        )
    ids, spans = record["input_ids"], record.get("answer_spans")
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise UserError(f"{place}: 'input_ids' is no list of whole numbers: {REMAKE}")
    foreign = next((index for index in ids if not 0 <= index < chat.vocabulary), None)
    if foreign is not None:
        raise UserError(f"{place}: id {foreign} is none of the tokenizer's, which go from 0 to {chat.vocabulary - 1}")
    if not isinstance(spans, list) or not all(_is_pair(span) for span in spans):
        raise UserError(f"{place}: 'answer_spans' is no list of [start, end]: {REMAKE}")
    if not spans:
        raise Skip("skipped: no answer in it")
    name = f"{record['id']}#{record['sample']}" if record.get("sample") else record["id"]
    sample = Sample(name, np.array(ids, dtype=np.int32), tuple((start, end) for start, end in spans))
    fault = span_fault(sample)
    if fault:
        raise UserError(f"{place}: {fault}: {REMAKE}")
    return sample


def _is_pair(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)


def rendered(messages: list[dict], chat: Chat) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids up to the last answer's end, and the spans of the answers."""
    roles = [message["role"] for message in messages]
    if any(pair == ("user", "user") for pair in zip(roles, roles[1:], strict=False)):
        raise Skip("skipped: questions without answers between them")
    ids: list[int] = []
    spans = []
    for place, role in enumerate(roles):
        if role != "assistant":
            continue
        before = chat.ids(messages[:place], generation_prompt=True)
        after = chat.ids(messages[: place + 1])
        # the second half: templates that rewrite earlier answers would move the spans found so far
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise Skip("skipped: its ids with an answer do not begin with those before it")
        end = next((at + 1 for at in range(len(before), len(after)) if after[at] in chat.stops), None)
        if end is None:
            raise Skip("skipped: an answer is rendered without an end-of-turn token")
        ids = after[:end]
        spans.append((len(before), end))
    return ids, spans


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
