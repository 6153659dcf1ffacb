"""Conversations -> a token file: input ids and the spans of ids that are answers.

    python data_prep/tokenise.py --conversations answers.jsonl --expert runs/demo/expert --out runs/data/train.parquet

Records written by data_prep/regenerate.py carry the ids that the expert read and wrote; these are taken verbatim,
because decoding and encoding text again changes some of them. For any other record the chat template is rendered turn
by turn: the ids before an answer must be a prefix of the ids with it, else the conversation is skipped. An answer ends
with its end-of-turn token, inclusive.

A sample longer than --max_length is cut at an answer boundary: later answers are dropped whole, and a sample whose
first answer does not fit is skipped. Everything left out is counted by reason, printed, and stored in the file's
metadata.
"""

import dcd_core.environment  # noqa: F401  isort: skip

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.chat_template import (
    TemplateError,
    control_tokens,
    load_chat_tokenizer,
    render_ids,
    stop_ids,
    template_arguments,
    tokenizer_hash,
)
from data_prep.messages import Skip, read_conversations
from data_prep.token_files import Sample, write_tokens
from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import file_hash
from dcd_core.progress import progress


@dataclass
class Config:
    conversations: list[str] = field(metadata={"help": "JSONL files of conversations.py or regenerate.py"})
    expert: str = field(metadata={"help": "model folder or hub id whose tokenizer and chat template are used"})
    out: str = field(metadata={"help": "parquet file to write"})
    max_length: int = field(default=2048, metadata={"help": "longest sample in tokens"})
    template_args: str = field(default="", metadata={"help": 'JSON for the chat template: {"enable_thinking": false}'})
    limit_tokens: int = field(default=0, metadata={"help": "stop once there are this many answer tokens (0: never)"})

    def __post_init__(self):
        if self.max_length < 2:
            raise ValueError("--max_length must be at least 2: a prompt token and an answer token")
        if self.limit_tokens < 0:
            raise ValueError("--limit_tokens must not be negative")
        template_arguments(self.template_args)


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    ids_of = IdsOf(config.expert, template_arguments(config.template_args))
    counts = Counter()
    samples = list(limited(all_samples(config, ids_of, counts), config.limit_tokens))
    if not samples:
        reasons = ", ".join(f"{number} x {reason}" for reason, number in counts.most_common(3)) or "no records"
        raise UserError(f"no conversation gives a sample, so every loss mask would be all zeros ({reasons})")
    metadata = {
        "tokenizer_hash": ids_of.hash,
        "stop_ids": list(ids_of.stops),
        "max_length": config.max_length,
        "sources": {Path(path).name: file_hash(path) for path in config.conversations},
        "samples": len(samples),
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "answers": sum(len(sample.answer_spans) for sample in samples),
        "answer_tokens": sum(len(sample.answer_ids()) for sample in samples),
        "counts": dict(counts.most_common()),
    }
    write_tokens(config.out, samples, metadata)
    for reason, number in counts.most_common():
        print(f"{number}: {reason}")
    shown = "{samples} samples, {tokens} tokens, {answers} answers, {answer_tokens} answer tokens"
    print(f"{shown.format(**metadata)} -> {config.out}")
    return 0


def all_samples(config: Config, ids_of: "IdsOf", counts: Counter) -> Iterator[Sample]:
    """One sample per usable record, in order; everything else is counted."""
    names = set()
    for path in config.conversations:
        for record in progress(read_conversations(path), label=f"tokenise {path}"):
            try:
                sample = cut(ids_of(record), config.max_length, counts)
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


class IdsOf:
    """record -> Sample, with the tokenizer of one expert. Raises UserError if that has no chat template."""

    def __init__(self, expert: str, arguments: dict):
        self.tokenizer = load_chat_tokenizer(expert)
        self.arguments = arguments
        self.stops = stop_ids(self.tokenizer, expert)
        self.hash = tokenizer_hash(self.tokenizer)
        self.control = control_tokens(self.tokenizer, self.stops, **arguments)

    def __call__(self, record: dict) -> Sample:
        """Raises Skip, or UserError for regenerated ids of another tokenizer."""
        if "input_ids" in record:
            return self.verbatim(record)
        for message in record["messages"]:
            for token in self.control:
                if token in message["content"]:
                    raise Skip(f"skipped: {token} spelled out in a message")
        try:
            ids, spans = self.rendered(record["messages"])
        except TemplateError as error:
            raise Skip(f"skipped: the chat template refuses it ({error})") from None
        if not spans:
            raise Skip("skipped: no answer in it")
        return Sample(record["id"], np.array(ids, dtype=np.int32), tuple(spans))

    def verbatim(self, record: dict) -> Sample:
        """The ids that were really used. Samples after the first get a name of their own."""
        if record.get("tokenizer") != self.hash:
            raise UserError(
                f"record '{record['id']}' was regenerated with another tokenizer than --expert's: "
                "give the expert that wrote the answers"
            )
        if not record["answer_spans"]:
            raise Skip("skipped: no answer in it")
        name = f"{record['id']}#{record['sample']}" if record.get("sample") else record["id"]
        spans = tuple((start, end) for start, end in record["answer_spans"])
        return Sample(name, np.array(record["input_ids"], dtype=np.int32), spans)

    def rendered(self, messages: list[dict]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids up to the last answer's end, and the spans of the answers."""
        roles = [message["role"] for message in messages]
        if any(pair == ("user", "user") for pair in zip(roles, roles[1:], strict=False)):
            raise Skip("skipped: questions without answers between them")
        ids: list[int] = []
        spans = []
        for place, role in enumerate(roles):
            if role != "assistant":
                continue
            before = render_ids(self.tokenizer, messages[:place], True, **self.arguments)
            after = render_ids(self.tokenizer, messages[: place + 1], **self.arguments)
            # the second half: what earlier answers were found in must still be there
            if after[: len(before)] != before or before[: len(ids)] != ids:
                raise Skip("skipped: its ids with an answer do not begin with those before it")
            end = next((at + 1 for at in range(len(before), len(after)) if after[at] in self.stops), None)
            if end is None:
                raise Skip("skipped: an answer is rendered without an end-of-turn token")
            ids = after[:end]
            spans.append((len(before), end))
        return ids, spans


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
