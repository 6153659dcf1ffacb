"""Conversations -> the same questions with answers in the expert's own words, or in vanilla contrastive decoding's.

    python data_prep/regenerate.py --conversations prompts.jsonl --expert runs/demo/expert --out answers.jsonl
    python data_prep/regenerate.py --conversations prompts.jsonl --expert runs/demo/expert --out answers.jsonl \\
        --samples 2 --temperature 0.8 --max_new_tokens 256
    python data_prep/regenerate.py ... --method cd --amateur runs/demo/amateur --alpha 0.5

Answers in the conversations are ignored, with their weights; every question is answered in turn. Each record keeps the
very ids that were read and written (input_ids, and answer_spans, one for each answer). Where the chat template rewrites
earlier turns, as Qwen3's does with thinking, the next prompt is a new sequence: those before are in earlier_sequences,
and an answer has the span [0, 0] in each sequence that it was not written in. An answer that reaches --max_new_tokens
has finish "length" and no end-of-turn token, and its conversation ends there.

It may be stopped at any moment: finished batches are in <out>.partial-..., the same command goes on after them, and the
result is the one of an uninterrupted run.
"""

import dcd_core.environment  # noqa: F401  isort: skip

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_prep.answers import Work, answer_batch, plan, sequences
from data_prep.finished import check_outputs, is_finished, report_path
from data_prep.messages import read_conversations
from data_prep.resumable import PartialFile
from dcd_core.chat import Chat, template_arguments
from dcd_core.config import parse_config, refuse_below, run_entry
from dcd_core.contrast import Target
from dcd_core.decode import Generation, Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, content_hash, file_hash, write_json_atomic
from dcd_core.locks import held
from dcd_core.methods import assemble
from dcd_core.models import load_config, load_pair
from dcd_core.progress import Bar

PORTION = 3
"""Conversations that are answered, and saved, together: this many times the batch size. More keep the batch full for
longer, fewer lose less when the run is stopped."""


@dataclass
class Config:
    conversations: str = field(metadata={"help": "JSONL file of conversations.py"})
    expert: str = field(metadata={"help": "model folder or hub id that answers"})
    out: str = field(metadata={"help": "JSONL file to write"})
    method: str = field(default="ar", metadata={"help": "ar (the expert alone) or cd (contrastive decoding)"})
    amateur: str = field(default="", metadata={"help": "model folder or hub id, for --method cd"})
    alpha: float | None = field(default=None, metadata={"help": "contrast strength of --method cd; 0.5 if not given"})
    cutoff: float | None = field(default=None, metadata={"help": "plausibility cutoff of --method cd; 0 if not given"})
    samples: int = field(default=1, metadata={"help": "answers per conversation"})
    temperature: float = field(default=0.0, metadata={"help": "sampling temperature; 0 is greedy"})
    max_new_tokens: int = field(default=256, metadata={"help": "longest answer in tokens"})
    max_context: int = field(
        default=0, metadata={"help": "longest prompt and answer together (0: the model's context)"}
    )
    limit_tokens: int = field(default=0, metadata={"help": "stop once there are this many answer tokens (0: never)"})
    batch_size: int = field(default=32, metadata={"help": "conversations answered at once"})
    template_args: str = field(default="", metadata={"help": 'JSON for the chat template: {"enable_thinking": false}'})
    dtype: str = field(default="bfloat16", metadata={"help": "bfloat16 or float32"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    seed: int = field(default=0, metadata={"help": "for sampling, and for the order of the work"})
    overwrite: bool = field(default=False, metadata={"help": "replace an output that other settings made"})

    def __post_init__(self):
        refuse_below(self, samples=1, max_new_tokens=1, batch_size=1, seed=0)
        for name in ("temperature", "alpha", "cutoff", "max_context", "limit_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"--{name} must not be negative")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("--samples above 1 needs --temperature above 0: greedy answers are all the same")
        if self.method not in ("ar", "cd"):
            raise ValueError(f"--method {self.method} is not ar or cd")
        if (self.method == "cd") != bool(self.amateur):
            raise ValueError("--amateur and --method cd go together")
        given = [f"--{name}" for name in ("alpha", "cutoff") if getattr(self, name) is not None]
        if self.method != "cd" and given:
            raise ValueError(f"{given[0]} is for --method cd and would do nothing here")
        self.alpha = 0.5 if self.alpha is None else self.alpha
        self.cutoff = 0.0 if self.cutoff is None else self.cutoff
        template_arguments(self.template_args)


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    out, key = check_outputs(config.out, [config.conversations]), run_key(config)
    made = {"key": key, "limit_tokens": config.limit_tokens}
    if is_finished(out, made, config.overwrite):
        print(f"{out} is finished: nothing to do")
        return 0
    records, skips = list(read_conversations(config.conversations)), Counter()
    batches, answer = prepare(config, records, skips)
    # opened only now: a refused start leaves nothing behind
    with held(out), PartialFile(out.with_name(f"{out.name}.partial-{key[:12]}")) as partial:
        run(config, batches, answer, partial, skips)
        with atomic_path(out) as temporary:
            counts = write_answers(temporary, partial, {record["id"]: place for place, record in enumerate(records)})
            report = {**summary(config, partial, counts), "skipped": dict(skips.most_common())}
            # before the output itself, which nobody could tell from others without it
            write_json_atomic(report_path(out), {**made, "sha256": file_hash(temporary), **report})
        partial.remove()
    print_report(report, out)
    return 0


def run_key(config: Config) -> str:
    """Hash of what decides the answers: input, models, settings; not when to stop, nor the names of files."""
    settings = asdict(config)
    for name in ("conversations", "out", "expert", "amateur", "limit_tokens", "overwrite"):
        del settings[name]
    models = [model_key(name) for name in (config.expert, config.amateur) if name]
    return content_hash({"settings": settings, "conversations": conversations_hash(config), "models": models})


def conversations_hash(config: Config) -> str:
    if not Path(config.conversations).is_file():
        raise UserError(f"there is no file {config.conversations}: make it with data_prep/conversations.py")
    return file_hash(config.conversations)


def model_key(name: str) -> str:
    """Content hash of a model folder; for a hub id, its name and commit."""
    if Path(name).is_dir():
        return file_hash(name)
    return f"{name}@{getattr(load_config(name), '_commit_hash', None)}"


def prepare(config: Config, records: list[dict], skips: Counter) -> tuple[list[list[Work]], Callable]:
    """(batches of conversations, the function that answers one batch). Raises UserError if nothing can be answered."""
    chat = Chat(config.expert, template_arguments(config.template_args))
    pair = load_pair(config.expert, config.amateur or None, config.dtype, config.device)
    contexts = [model.context for model in (pair.expert, pair.amateur) if model]
    context = min([*contexts, config.max_context] if config.max_context else contexts)
    room = context - config.max_new_tokens
    if room < 1:
        raise UserError(f"--max_new_tokens {config.max_new_tokens} leaves no room for a prompt in {context} tokens")
    target = Target(
        alpha=config.alpha if config.method == "cd" else 0.0,
        temperature=config.temperature,
        cutoff=config.cutoff if config.method == "cd" else 0.0,
    )
    settings = Settings(target=target, max_new_tokens=config.max_new_tokens, stop_ids=chat.stops, seed=config.seed)
    method = assemble(config.method, pair)
    batches = plan(records, config.samples, chat, room, config.batch_size * PORTION, config.seed, skips)
    if not batches:
        reasons = ", ".join(f"{number} x {reason}" for reason, number in skips.most_common(3))
        raise UserError(f"none of the {len(records)} conversations can be answered ({reasons})")

    def generate(prompts: list[Prompt]) -> list[Generation]:
        return decode(method, prompts, settings, max_batch=config.batch_size)

    def answer(batch: list[Work], left_out: Counter) -> list[dict]:
        return answer_batch(batch, generate, chat, room, left_out)

    return batches, answer


def run(config: Config, batches: list[list[Work]], answer: Callable, partial: PartialFile, skips: Counter) -> None:
    """Answer every batch that is not in `partial` yet, until all are done or there are enough tokens.

    Portions are the same on every run, so one that is done again after a kill gives the same answers; inside one,
    waiting conversations take the places of finished ones.
    """
    done, tokens = len(partial.summaries), sum(entry["tokens"] for entry in partial.summaries)
    for entry in partial.summaries:
        skips.update(entry["skipped"])
    with Bar(sum(map(len, batches)), "answers", "conversations", done=len(partial.offsets)) as bar:
        for batch in batches[done:]:
            if config.limit_tokens and tokens >= config.limit_tokens:
                break
            start, left_out = time.perf_counter(), Counter()
            results = answer(batch, left_out)
            seconds = time.perf_counter() - start
            new = sum(
                end - first for record in results for part in sequences(record) for first, end in part["answer_spans"]
            )
            partial.append(results, tokens=new, seconds=seconds, skipped=dict(left_out))
            tokens += new
            skips.update(left_out)
            bar.update(len(batch), f"{tokens} tokens, {new / seconds:.0f} tokens/s")


def write_answers(path: Path, partial: PartialFile, order: dict[str, int]) -> Counter:
    """Write all answers in the order of the input, and count what they are like."""
    places, counts = [], Counter()
    for offset, record in partial.lines():
        places.append((order[record["id"]], record["sample"], offset))
        counts["conversations"] += 1
        counts["answers"] += len(record["answer_spans"])
        counts[f"finish_{record['finish']}"] += 1
        counts["sequences"] += len(sequences(record))
        counts["rewritten"] += len(sequences(record)) > 1
        counts["tokens"] += sum(len(part["input_ids"]) for part in sequences(record))
    with path.open("wb") as file:
        for _, _, offset in sorted(places):
            file.write(partial.line_at(offset))
    return counts


def summary(config: Config, partial: PartialFile, counts: Counter) -> dict:
    """What is reported; seconds are of answering alone, all runs together."""
    tokens = sum(entry["tokens"] for entry in partial.summaries)
    seconds = sum(entry["seconds"] for entry in partial.summaries)
    speed = {"answer_tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
    return {**counts, **speed, "limit_tokens": config.limit_tokens}


def print_report(report: dict, out: Path) -> None:
    for reason, number in report["skipped"].items():
        print(f"{number}: {reason}")
    print(
        f"{report.get('finish_length', 0)} of {report['conversations']} conversations end in an answer cut at its limit"
    )
    if report["rewritten"]:
        print(
            f"{report['rewritten']} conversations in several sequences ({report['sequences']} in all): "
            "the chat template rewrites earlier turns"
        )
    speed = "{conversations} conversations, {answers} answers, {answer_tokens} answer tokens in {seconds:.0f} s"
    print(f"{speed.format(**report)}, {report['tokens_per_s']:.0f} tokens/s -> {out}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
