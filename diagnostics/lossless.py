"""The certificate: is decoding lossless, and would the tests have seen it if it were not?

    python diagnostics/lossless.py --output runs/certificate
    python diagnostics/lossless.py --expert EXPERT --amateur AMATEUR --head HEAD --prompts held_out.jsonl \\
        --output runs/certificate

Four parts, each line of which passes or fails:
  * exact enumeration of every verification rule with every kind of draft;
  * the law of texts of the real loop on a tiny random pair, for every method, rule, draft shape and target (G tests);
  * on the given pair, in fp32: every method writes the tokens of vanilla contrastive decoding, greedy and at
    temperature 1 under shared noise (left out when no pair is given);
  * negative controls: the same loop with one fault injected, which the G test must catch, and the same verifier with a
    fault in the draw that real vocabularies make, which the enumeration must catch.
Prints a table and writes index.html (one self-contained page) and certificate.json, and metrics.json if all is well.
The exit code is 1 if any line fails. A stopped run goes on where it was; --jobs N makes the lines in N processes;
--quick takes smaller samples and vocabularies and about a minute.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, git_sha, parse_config, refuse_below, refuse_taken, run_entry
from dcd_core.files import content_hash, write_json_atomic, write_text_atomic
from dcd_core.loading import head_for, load_models
from dcd_core.methods import METHODS
from dcd_core.models import choose_device
from dcd_core.progress import Bar
from dcd_core.prompts import read_prompts
from diagnostics.certificate.cases import CASES, enumerated, formula
from diagnostics.certificate.controls import CONTROLS, EXACT_CONTROLS, controlled, enumerated_with_fault
from diagnostics.certificate.identity import checked, planned_checks
from diagnostics.certificate.laws import Laws, law_cases, samples_of
from diagnostics.certificate.page import Line, print_lines, render, summary
from diagnostics.certificate.pair import toy_pair
from diagnostics.identity_checks import Writer
from diagnostics.loading import code_key, inputs_key, short_name
from diagnostics.parts import Parts, begin

Task = tuple[str, Callable[[], Line]]
"""What a line is kept under, and how it is made."""
ALONE = {True: 3, False: 32}  # rows that are decoded in small batches too, quick or not
CONTROL_SAMPLES = {True: 2048, False: 16384}  # the faults are large


@dataclass
class Config:
    """Settings of the certificate."""

    output: str = field(metadata={"help": "folder for the certificate"})
    expert: str = field(default="", metadata={"help": "expert: model folder or hub id; empty leaves the real pair out"})
    amateur: str = field(default="", metadata={"help": "amateur: model folder or hub id"})
    head: str = field(default="", metadata={"help": "EAGLE3 or dual-input head: folder or hub id"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    prompts: str = field(default="", metadata={"help": "prompts for the real pair, JSONL {id, messages}"})
    alphas: list[float] = field(default_factory=lambda: [0.1, 0.5], metadata={"help": "contrast of the real pair"})
    limit: int = field(default=8, metadata={"help": "use the first so many prompts (0: all)"})
    max_new_tokens: int = field(default=32, metadata={"help": "tokens of each answer of the real pair"})
    batch: int = field(default=8, metadata={"help": "prompts at a time of the real pair"})
    gamma: int = field(default=3, metadata={"help": "longest draft of the real pair"})
    seed: int = field(default=0, metadata={"help": "seed of the tiny models and of every sample"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda, for the real pair"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    jobs: int = field(default=1, metadata={"help": "processes that make the lines, each with models of its own"})
    quick: bool = field(default=False, metadata={"help": "smaller samples and vocabularies: a look, not a proof"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        given = {name: getattr(self, name) for name in ("expert", "amateur", "prompts")}
        missing = [f"--{name}" for name, value in given.items() if not value]
        if missing and (self.head or self.amateur_head or len(missing) < len(given)):
            raise ValueError(f"for a real pair give {' and '.join(missing)} too")
        if not self.alphas or min(self.alphas) < 0:
            raise ValueError(f"--alphas must be numbers of 0 or more, got {self.alphas}")
        refuse_below(self, limit=0, max_new_tokens=1, batch=1, gamma=1, seed=0, jobs=1)


def main(argv: list[str] | None = None) -> int:
    """Make every line, write the page, print the table; 1 if any line failed."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    choose_device(config.device)
    real = load_real(config)
    parts, folder = begin(config, argv, result_settings(config))
    for old in ("certificate.json", "index.html"):  # of an earlier run, which may have gone better
        (folder / old).unlink(missing_ok=True)
    tasks = planned_tasks(config, real, parts)
    with helpers(config):
        lines = made(tasks, parts)
    write_json_atomic(folder / "certificate.json", {"summary": summary(lines), "lines": lines})
    write_text_atomic(folder / "index.html", render(lines, folder, described(config), git_sha()))
    print_lines(lines)
    print(f"wrote {folder / 'index.html'}")
    if any(line.passed is False for line in lines):
        return 1  # and the run is not finished: the same command makes the lines that failed again
    finish_run(folder, {"certified": True, "passed": sum(line.passed is True for line in lines), "lines": len(lines)})
    parts.remove()
    return 0


def load_real(config: Config):
    """Prompts, stop ids, pair, head and second head of the real pair; None where none is given, which is said."""
    if not config.expert:
        print("no pair given (--expert, --amateur, --prompts): identity on a real pair is left out", flush=True)
        return None
    prompts, stops = read_prompts(
        config.prompts, config.expert, config.limit, **template_arguments(config.template_args)
    )
    pair, head = load_models(config.expert, config.amateur, config.head, "float32", config.device)
    return prompts, stops, pair, head, head_for(pair, config.amateur_head)


def planned_tasks(config: Config, real, parts: Parts) -> list[Task]:
    """Every line of the certificate, in order, and how it is made."""
    toy, quick = toy_pair(config.seed), config.quick
    laws = Laws(toy, config.seed)
    tasks: list[Task] = [("exact-formula", functools.partial(formula, quick))]
    tasks += [(key("exact", case.title), functools.partial(enumerated, case, quick)) for case in CASES]
    for case in law_cases(toy, config.seed, quick):
        make = functools.partial(laws.line, case, samples_of(case.variant, quick), ALONE[quick])
        tasks.append((key("laws", case.title), make))
    if real is None:
        note = "no pair given: --expert, --amateur and --prompts"
        tasks.append(("identity-skipped", lambda: Line("identity", "real pair", note=note)))
    else:
        prompts, stops, pair, *heads = real
        writer = Writer(pair, heads[0], stops, config, parts, amateur_head=heads[1])
        able = [name for name, method in METHODS.items() if method.can_draft_with(*heads)]
        others = ", ".join(name for name in METHODS if name not in able)
        if others:
            note = "no such head given: --head (EAGLE3, or dual-input for cross_alpha), --amateur_head (dual)"
            tasks.append(("identity-no-head", lambda: Line("identity", others, note=note)))
        for check in planned_checks(toy, config.alphas, len(prompts), able):
            name = key("identity", f"{check.title} {check.temperature:g}")
            tasks.append((name, functools.partial(checked, check, prompts, writer)))
    for control in CONTROLS:
        make = functools.partial(controlled, control, laws, CONTROL_SAMPLES[quick])
        tasks.append((key("controls", control.name), make))
    for control in EXACT_CONTROLS:
        tasks.append((key("controls", control.name), functools.partial(enumerated_with_fault, control)))
    return tasks


def key(part: str, name: str) -> str:
    """The name of a piece of unfinished work: any text, as a file name."""
    return f"{part}-{content_hash(name)[:16]}"


@contextmanager
def helpers(config: Config) -> Iterator[None]:
    """Further processes that make lines while this one does: it takes them from the front, they from the back."""
    share_cores(config.jobs)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    workers = [context.Process(target=help_out, args=(config, place), daemon=True) for place in range(1, config.jobs)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def help_out(config: Config, place: int) -> None:
    """What a further process does: every (jobs - 1)-th line from the back that nobody has made yet. A line that fails
    is left to the first process, which makes it again and says so."""
    share_cores(config.jobs)
    parts = Parts(config.output, result_settings(config))
    tasks = planned_tasks(config, load_real(config), parts)
    for name, make in tasks[::-1][place - 1 :: max(config.jobs - 1, 1)]:
        if parts.get(name) is None:
            found = asdict(make())
            if found["passed"] is not False:
                parts.put(name, found)


def share_cores(jobs: int) -> None:
    """As many threads for each of ``jobs`` processes as there are cores for it."""
    if jobs > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def made(tasks: list[Task], parts: Parts) -> list[Line]:
    """All lines; those made before a stop, or by another process, are taken as they are."""
    lines = []
    with Bar(len(tasks), "certificate", unit="lines") as bar:
        for name, make in tasks:
            found = parts.get(name)
            if found is None:
                found = asdict(make())
                if found["passed"] is not False:
                    parts.put(name, found)
            lines.append(Line(**found))
            bar.update(1, lines[-1].part)
    return lines


def result_settings(config: Config) -> dict:
    """What decides a line: settings, inputs, the code that is certified. A stopped run goes on only under these."""
    left_out = ("output", "overwrite", "device", "jobs")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    code = code_key("dcd_core/**/*.py", "diagnostics/*.py", "diagnostics/certificate/*.py")
    named = (config.expert, config.amateur, config.head, config.amateur_head)
    models = inputs_key(config.prompts, *named) if config.expert else {}
    return kept | {"code": code, "inputs": models}


def described(config: Config) -> str:
    """The page's line of settings."""
    names = [short_name(model) for model in (config.expert, config.amateur, config.head, config.amateur_head) if model]
    real = f"Real pair: {' / '.join(names)}, up to {config.limit or 'all'} prompts of {config.max_new_tokens} tokens."
    size = "Quick version: small samples, small vocabularies. " if config.quick else ""
    return f"{size}Seed {config.seed}. {real if config.expert else 'No real pair.'}"


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
