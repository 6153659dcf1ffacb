"""Answer prompts on the terminal, by any method.

    python -m dcd_core.generate --expert EXPERT --amateur AMATEUR --head HEAD --method dcd_eagle3 --alpha 0.3 \\
        --prompt "Why is the sky blue?"
    python -m dcd_core.generate --expert EXPERT --amateur AMATEUR --method dcd_ngram < one_prompt_a_line.txt
    python -m dcd_core.generate ... --prompts prompts.jsonl --batch 8 --json > answers.jsonl
    python -m dcd_core.generate ... --prompts prompts.jsonl --compare cd --dtype float32

Prompts come from --prompt, from --prompts (JSON lines {id, messages} or {prompt}), or from the standard input. Text is
shown as soon as it is certain; with --batch above 1, or --json, an answer is shown when it is finished. How fast it
went is said at the end on the standard error: the prefill apart, as the first token of each answer comes out of it.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from dcd_core.api import DEFAULTS, METHOD, OPTIONS, TARGET_OPTIONS, Answer, Decoder, load, make_settings, refuse_missing
from dcd_core.chat import template_arguments
from dcd_core.config import parse_config, refuse_below, run_entry
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Scorer
from dcd_core.errors import UserError
from dcd_core.flags import LoopFlags
from dcd_core.methods import METHODS
from dcd_core.models import load_scorer, load_tokenizer
from dcd_core.prompts import prompt_ids, read_prompts
from dcd_core.scorers import negative_prompt, three_models
from dcd_core.tally import Tally

WARM_UP = 16
"""Tokens that each method writes before a comparison: the first passes of a process are slower."""
TARGETS = {
    "dcd": Target.dcd,
    "obrien": Target.obrien,
    "li": Target.li,
    "cos": Target.cos,
    "proxy": Target.proxy,
    "guidance": Target.guidance,
}
OTHERS = tuple(name for name in TARGETS if name != "dcd")
STRENGTHLESS = ("obrien", "proxy")
"""Targets whose strength has a usual value."""


@dataclass
class Config(LoopFlags):
    """Settings of the terminal. A field named like one of `dcd_core.api.OPTIONS` reaches decoding by its name."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(default="", metadata={"help": "amateur: model folder or hub id (methods with contrast)"})
    head: str = field(default="", metadata={"help": "head: folder or hub id (methods that draft with one)"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    lm: str = field(default="", metadata={"help": "small language model: folder or hub id (dcd_lm drafts with it)"})
    method: str = field(default=METHOD, metadata={"help": f"one of {', '.join(METHODS)}"})
    compare: str = field(
        default="",
        metadata={"help": "answer by this method too, prompt by prompt in turn; show the speed-up over it"},
    )
    # ---- what is asked
    prompt: str | None = field(default=None, metadata={"help": "the prompt"})
    prompts: str = field(default="", metadata={"help": "prompts, JSON lines {id, messages} or {prompt}"})
    whole: bool = field(default=False, metadata={"help": "the standard input is one prompt, not one a line"})
    limit: int = field(default=0, metadata={"help": "answer the first so many prompts (0: all)"})
    raw: bool = field(default=False, metadata={"help": "continue the text as it is, without the chat template"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    # ---- the distribution
    alpha: float | None = field(
        default=None, metadata={"help": f"contrast strength of the target dcd (default: {DEFAULTS['alpha']})"}
    )
    target: str = field(default="dcd", metadata={"help": f"what the scores are combined to: {', '.join(TARGETS)}"})
    strength: float | None = field(
        default=None, metadata={"help": "contrast strength of the other targets: beta of obrien, mu of cos"}
    )
    cutoff: float | None = field(
        default=None,
        metadata={"help": "keep ids of at least this part of the best's probability (default: 0; obrien, li: 0.1)"},
    )
    amateur_temperature: float = field(default=1.0, metadata={"help": "temperature of the amateur in the target li"})
    tuned: str = field(default="", metadata={"help": "target proxy: a small tuned model"})
    base: str = field(default="", metadata={"help": "target proxy: the base it was tuned from"})
    negative_prompt: str = field(default="", metadata={"help": "target guidance: read in the prompt's place"})
    temperature: float = field(default=DEFAULTS["temperature"], metadata={"help": "0 is greedy"})
    top_k: int = field(default=0, metadata={"help": "keep so many ids of the combined distribution (0: all)"})
    top_p: float = field(default=1.0, metadata={"help": "keep this share of the combined distribution"})
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "of ids that prompt and answer hold already, before temperature (1: none)"}
    )
    # ---- the loop
    max_new_tokens: int = field(default=DEFAULTS["max_new_tokens"], metadata={"help": "most tokens of an answer"})
    rule: str = field(default="auto", metadata={"help": "auto, sampled, deterministic or shared_noise"})
    seed: int = field(default=0, metadata={"help": "seed of all sampling"})
    # ---- how
    batch: int = field(default=1, metadata={"help": "prompts at a time"})
    json: bool = field(default=False, metadata={"help": "write answers as JSON lines {id, method, text, ...}"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32 or bfloat16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        refuse_below(self, batch=1, limit=0, seed=0)
        if self.prompt is not None and self.prompts:
            raise ValueError("--prompt and --prompts both say what to answer; give one of them")
        if self.whole and (self.prompt is not None or self.prompts):
            raise ValueError("--whole is about the standard input, which --prompt and --prompts leave aside")
        check_target(self)
        others = bool(self.amateur) or self.target in ("proxy", "guidance")
        for method in self.methods:
            heads = {"head": bool(self.head), "amateur_head": bool(self.amateur_head)}
            refuse_missing(method, amateur=others, lm=bool(self.lm), **heads)
        if self.saving != "none" and not any(METHODS[method].contrast for method in self.methods):
            raise ValueError(f"--saving is about the amateur's passes, and {self.method} makes none; leave it out")
        if self.draft_alpha is not None and not any(METHODS[method].needs_amateur_head for method in self.methods):
            raise ValueError(f"--draft_alpha recombines the two heads of dual; {self.method} does not use it")
        if self.compare == self.method:
            raise ValueError(f"--compare sets --method beside another; both say {self.method}")
        if self.compare and self.batch > 1:
            raise ValueError("--compare sets two methods side by side, one prompt at a time; leave --batch out")
        make_settings(**self.options)

    @property
    def methods(self) -> list[str]:
        """The method, and the one that it is held against."""
        return [self.method, self.compare] if self.compare else [self.method]

    @property
    def options(self) -> dict:
        """The flags that decide how to decode."""
        found = {name: getattr(self, name) for name in OPTIONS if getattr(self, name, None) is not None}
        if self.target == "dcd":
            return found
        parts = {name: found.pop(name) for name in TARGET_OPTIONS if name in found}
        if self.target == "li":
            parts["amateur_temperature"] = self.amateur_temperature
        strength = [] if self.strength is None else [self.strength]
        return found | {"target": TARGETS[self.target](*strength, **parts)}

    @property
    def interactive(self) -> bool:
        """Prompts are typed, and each is answered before the next."""
        given = self.prompt is not None or self.prompts or self.whole or self.compare or self.batch > 1
        return not given and sys.stdin is not None and sys.stdin.isatty()


def main(argv: list[str] | None = None) -> int:
    """Read the prompts, load the models, answer, say how fast."""
    config = parse_config(Config, argv, description=__doc__)
    asked = asked_prompts(config)
    prompts = asked if config.interactive else list(asked)
    if prompts == []:
        raise UserError("there is no prompt: give --prompt, --prompts, or text on the standard input")
    models = (config.expert, config.amateur, config.head, config.dtype, config.device, config.lm, config.amateur_head)
    decoder = load(*models)
    decoder.contrast = contrast_of(config, decoder)
    tallies, ratios = {method: Tally() for method in config.methods}, []
    try:
        if config.compare:
            compare(decoder, prompts, config, tallies, ratios)
        elif config.batch > 1:
            answer_together(decoder, prompts, config, tallies[config.method])
        else:
            titled = not config.interactive and len(prompts) > 1
            for prompt in prompts:
                answer_one(decoder, prompt, config, tallies[config.method], titled=titled)
    except KeyboardInterrupt:
        print(flush=True)
        say("interrupted; what was written until then:")
        report(tallies, config, ratios)
        return 130
    report(tallies, config, ratios)
    return 0


# ---- the target ------------------------------------------------------------------------------------------------------


def check_target(config: Config) -> None:
    """Hold the flags of a target together.

    Raises:
        ValueError: one that is missing, or that belongs to another target.
    """
    if config.target not in TARGETS:
        raise ValueError(f"--target {config.target} is unknown; choose {', '.join(TARGETS)}")
    belongings = {
        "alpha": (config.alpha is not None, ("dcd",), ()),
        "strength": (config.strength is not None, OTHERS, tuple(name for name in OTHERS if name not in STRENGTHLESS)),
        "amateur_temperature": (config.amateur_temperature != 1.0, ("li",), ()),
        "tuned": (bool(config.tuned), ("proxy",), ("proxy",)),
        "base": (bool(config.base), ("proxy",), ("proxy",)),
        "negative_prompt": (bool(config.negative_prompt.strip()), ("guidance",), ("guidance",)),
        "amateur": (bool(config.amateur), ("dcd", "obrien", "li", "cos"), ()),
    }
    for name, (given, allowed, needed) in belongings.items():
        if given and config.target not in allowed:
            raise ValueError(f"--{name} is for --target {' or '.join(allowed)}; {config.target} does not use it")
        if not given and config.target in needed:
            raise ValueError(f"--target {config.target} needs --{name}")


def contrast_of(config: Config, decoder: Decoder) -> list[Scorer] | None:
    """The models after the expert, where they are not just the amateur."""
    pair = decoder.pair
    if config.target == "proxy":
        return three_models(load_scorer(config.tuned, pair), load_scorer(config.base, pair))
    if config.target == "guidance":
        arguments = template_arguments(config.template_args)
        ids = prompt_ids(pair.tokenizer, config.negative_prompt, config.raw, "the negative prompt", **arguments)
        return negative_prompt(pair.expert, ids)
    return None


# ---- prompts ---------------------------------------------------------------------------------------------------------


def asked_prompts(config: Config) -> Iterator[Prompt]:
    """All prompts; those that are typed one by one, as they come."""
    arguments = template_arguments(config.template_args)
    if config.prompts:
        yield from read_prompts(config.prompts, config.expert, config.limit, config.raw, **arguments)[0]
        return
    tokenizer = load_tokenizer(config.expert)
    texts = [config.prompt] if config.prompt is not None else standard_input(config)
    for number, text in enumerate(islice(texts, config.limit or None), start=1):
        where = "the prompt" if config.prompt is not None or config.whole else f"prompt {number}"
        yield Prompt(str(number), prompt_ids(tokenizer, text, config.raw, where, **arguments))


def standard_input(config: Config) -> Iterator[str]:
    """One text a line, empty lines left out, or all of it as one text."""
    if sys.stdin is None:  # closed
        return
    if config.interactive:
        print("type a prompt and press return; ctrl-D ends", file=sys.stderr, flush=True)
    try:
        if config.whole:
            yield sys.stdin.read()
        else:
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
    except UnicodeDecodeError as problem:
        raise UserError(f"the standard input is no text: {problem}") from None


# ---- answers ---------------------------------------------------------------------------------------------------------


def answer_one(
    decoder: Decoder, prompt: Prompt, config: Config, tally: Tally, method: str = "", titled: bool = False
) -> Answer:
    """One answer, shown piece by piece unless it is wanted as JSON, or is that of the method compared with."""
    method = method or config.method
    answer = decoder.stream(prompt, method, **config.options)
    streamed = not config.json and method == config.method
    if streamed and titled:
        print(f"== {prompt.id}", flush=True)
    try:
        for piece in answer:
            if streamed:
                print(piece, end="", flush=True)
    finally:  # an answer that is interrupted counts as far as it came
        if answer.generation.ids:
            tally.add(answer.generation, answer.seconds)
    if streamed:
        print(flush=True)
    whole = decoder.answer(answer.generation)
    if config.json:
        print_json(whole, method)
    return whole


def answer_together(decoder: Decoder, prompts: list[Prompt], config: Config, tally: Tally) -> None:
    """Many answers in batches, each shown when it is finished."""

    def show(answer: Answer) -> None:
        tally.add(answer.generation)
        if config.json:
            print_json(answer, config.method)
        else:
            print(f"== {answer.id}\n{answer.text}", flush=True)

    start = time.perf_counter()
    try:
        decoder.generate(prompts, config.method, max_batch=config.batch, on_finish=show, **config.options)
    finally:
        tally.seconds += time.perf_counter() - start


def compare(
    decoder: Decoder, prompts: list[Prompt], config: Config, tallies: dict[str, Tally], ratios: list[float]
) -> None:
    """Both methods answer every prompt, taking turns at being first; then whether their texts are equal.

    Args:
        ratios: to be filled with that of their speeds on every prompt where both have one.
    """
    warm = replace(config, max_new_tokens=min(WARM_UP, config.max_new_tokens))
    for method in config.methods:
        list(decoder.stream(prompts[0], method, **warm.options))
    differences = []
    for index, prompt in enumerate(prompts):
        made, own = {}, {method: Tally() for method in config.methods}
        for method in config.methods if index % 2 == 0 else config.methods[::-1]:
            try:
                made[method] = answer_one(decoder, prompt, config, own[method], method, titled=len(prompts) > 1)
            finally:  # one that was interrupted counts with what was written
                tallies[method].join(own[method])
        speeds = [own[method].tokens_per_second for method in config.methods]
        if all(speeds):
            ratios.append(speeds[0] / speeds[1])
        left, right = (made[method].generation.ids for method in config.methods)
        if left != right:
            same = (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
            differences.append((prompt.id, 1 + next(same, min(len(left), len(right)))))
    say(f"texts: {agreement(decoder, config, len(prompts), differences)}")


def agreement(decoder: Decoder, config: Config, prompts: int, differences: list[tuple[str, int]]) -> str:
    """Whether two methods wrote the same, where they have to."""
    sides = [decoder.assemble(method).scorers for method in config.methods]
    if [(scorer.model, scorer.prefix) for scorer in sides[0]] != [(scorer.model, scorer.prefix) for scorer in sides[1]]:
        return f"not compared, as {config.method} and {config.compare} have different targets"
    if config.dtype == "bfloat16":
        return "not compared, as rounding decides near-ties in bfloat16 (--dtype float32 compares)"
    if config.temperature > 0 and config.rule != "shared_noise":
        return "not compared, as each method draws its own (--rule shared_noise or --temperature 0 compares)"
    found = f"{prompts - len(differences)} of {prompts} equal"
    for name, place in differences[:3]:
        found += f"; {name} parts at token {place}"
    return found + (" (diagnostics/identity.py tells near-ties from faults)" if differences else "")


def print_json(answer: Answer, method: str) -> None:
    """One answer as a line of JSON."""
    tally, made = Tally(), answer.generation
    tally.add(made)
    fields = {"id": answer.id, "method": method, "text": answer.text, "finish": made.finish, "ids": made.ids}
    fields |= {"accepted_length": tally.accepted_length, "tokens_per_round": tally.tokens_per_round}
    print(json.dumps(fields, ensure_ascii=False), flush=True)


def report(tallies: dict[str, Tally], config: Config, ratios: list[float]) -> None:
    """How fast each method was and, of two, the ratio with its spread over prompts."""
    for method, tally in tallies.items():
        say(f"{method}: {tally}")
    speeds = [tally.tokens_per_second for tally in tallies.values()]
    if config.compare and all(speeds):
        spread = (
            f"prompt by prompt {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "one prompt says little"
        )
        say(f"speed-up of {config.method} over {config.compare}: {speeds[0] / speeds[1]:.2f} ({spread})")


def say(text: str) -> None:
    """Everything that is no answer goes to the standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
