"""Decoding from Python: load a pair once, then stream or collect answers by any method.

    from dcd_core import load
    cd = load("EXPERT", "AMATEUR", "HEAD")
    for text in cd.stream("Why is the sky blue?", method="dcd_eagle3", alpha=0.3):
        print(text, end="", flush=True)

A prompt is a text (what a user says, put into the expert's chat template), a conversation [{role, content}] that waits
for an answer, or a :class:`dcd_core.decode.Prompt` of ids. Options are the fields of :class:`dcd_core.decode.Settings`
and :class:`dcd_core.contrast.Target` by their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from dcd_core.chat import Messages, stop_ids
from dcd_core.contrast import Target
from dcd_core.decode import Assembled, Generation, Prompt, Scorer, Settings, check_prompt, decode, stream
from dcd_core.detokenise import TextPieces, answer_ids, text_of
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.loading import head_for, load_models
from dcd_core.methods import KINDS, METHODS, assemble
from dcd_core.models import LanguageModel, Pair, load_scorer
from dcd_core.prompts import prompt_ids

METHOD = "auto"
DEFAULTS = {"alpha": 0.1, "temperature": 0.0, "max_new_tokens": 256}
"""Where an answer for a reader differs from the defaults of the loop."""
TARGET_OPTIONS = tuple(field.name for field in fields(Target))
OPTIONS = (*TARGET_OPTIONS, *(field.name for field in fields(Settings) if field.name not in ("target", "stop_ids")))


def load(
    expert: str,
    amateur: str = "",
    head: str = "",
    dtype: str = "bfloat16",
    device: str = "auto",
    lm: str = "",
    amateur_head: str = "",
) -> Decoder:
    """Load an expert with what its methods need: folders or hub ids.

    Args:
        amateur: for methods with contrast.
        head: an EAGLE3 head of this expert, for methods that draft with one; a dual-input head for ``cross_alpha``.
        lm: a small language model, for ``dcd_lm``, which drafts with it.
        amateur_head: a second head of this expert, which imitates the amateur, for ``dual``.
        dtype: ``float32`` where two methods shall give the same text to the last token; rounding moves near-ties in
            ``bfloat16``.
        device: ``auto`` is the accelerator if there is one.
    Raises:
        UserError: a model or head that cannot be loaded, vocabularies that differ, the head of another expert.
    """
    pair, loaded = load_models(expert, amateur, head, dtype, device)
    decoder = Decoder(pair, loaded, stop_ids(pair.tokenizer, expert), load_scorer(lm, pair) if lm else None)
    decoder.amateur_head = head_for(pair, amateur_head)
    return decoder


@dataclass
class Answer:
    """An answer as text, with the generation behind it (ids, rounds, why it ended)."""

    id: str
    text: str
    generation: Generation


class Decoder:
    """A loaded pair, with its head where there is one, that answers by any method.

    Args:
        stops: ids that end an answer.
        lm: a small language model, for the method that drafts with one.
        contrast: the scorers after the expert for targets of other models than the pair's
            (:mod:`dcd_core.scorers`, with ``target=Target.proxy(...)`` or ``Target.guidance(...)``).
        amateur_head: a second head, which imitates the amateur.
    """

    def __init__(
        self,
        pair: Pair,
        head: Eagle3Head | None = None,
        stops: tuple[int, ...] = (),
        lm: LanguageModel | None = None,
        contrast: list[Scorer] | None = None,
        amateur_head: Eagle3Head | None = None,
    ):
        self.pair, self.head, self.stops, self.lm, self.contrast = pair, head, stops, lm, contrast
        self.amateur_head = amateur_head

    def stream(self, prompt: str | Messages | Prompt, method: str = METHOD, *, raw: bool = False, **options) -> Stream:
        """Answer one prompt, piece by piece: iterate over it for the text.

        Args:
            raw: the prompt is a text to be continued as it is, without the chat template.
            options: see the module.
        Raises:
            UserError: unknown method or option, a value outside its range, what the method needs is not loaded, an
                empty prompt or one that does not fit the context.
        """
        return Stream(self, self.prompt(prompt, raw), method, make_settings(self.stops, **options))

    def generate(
        self,
        prompts: Sequence[str | Messages | Prompt],
        method: str = METHOD,
        *,
        raw: bool = False,
        max_batch: int = 1,
        on_finish: Callable[[Answer], None] | None = None,
        **options,
    ) -> list[Answer]:
        """Answer many prompts, ``max_batch`` at a time; results in their order, each also to ``on_finish`` as it ends.

        Prompts that are not :class:`dcd_core.decode.Prompt` are named "1", "2", ... Raises as :meth:`stream` does, all
        prompts looked at before the first is answered.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is a list; write [prompt] for a single one")
        given = [self.prompt(prompt, raw, str(number)) for number, prompt in enumerate(prompts, start=1)]
        callback = None if on_finish is None else lambda generation: on_finish(self.answer(generation))
        made = decode(self.assemble(method), given, make_settings(self.stops, **options), max_batch, callback)
        return [self.answer(generation) for generation in made]

    def prompt(self, prompt: str | Messages | Prompt, raw: bool = False, name: str = "1") -> Prompt:
        """Any prompt as ids; ``name`` keys its randomness."""
        if isinstance(prompt, Prompt):
            return prompt
        return Prompt(name, prompt_ids(self.pair.tokenizer, prompt, raw, f"prompt {name!r}"))

    def answer(self, generation: Generation) -> Answer:
        """A generation with its text."""
        return Answer(generation.prompt_id, text_of(self.pair.tokenizer, answer_ids(generation)), generation)

    def assemble(self, method: str) -> Assembled:
        """A method over this pair.

        Raises:
            UserError: it is unknown, or what it needs is not loaded.
        """
        others = self.contrast is not None or self.pair.amateur is not None
        heads = {"head": self.head is not None, "amateur_head": self.amateur_head is not None}
        refuse_missing(method, amateur=others, lm=self.lm is not None, **heads)
        return assemble(method, self.pair, self.head, self.contrast, self.lm, self.amateur_head)


class Stream:
    """The answer to one prompt while it is made: an iterator over pieces of text, each known for good.

    Attributes:
        generation: ids and rounds so far; ``generation.finish`` is set at the end.
        seconds: spent on making them, without the time that the reader takes between pieces.
    """

    def __init__(self, decoder: Decoder, prompt: Prompt, method: str, how: Settings):
        assembled = decoder.assemble(method)
        check_prompt(assembled.scorers, prompt, how.max_new_tokens)
        self.method = method
        self.generation = Generation(prompt.id, prompt.sample)
        self.seconds = 0.0
        self._rounds = stream(assembled, [prompt], how)
        self._known = TextPieces(decoder.pair.tokenizer)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self) -> Iterator[str]:
        while not self.generation.finish:
            start = time.perf_counter()
            news = next(self._rounds)
            self.seconds += time.perf_counter() - start
            for self.generation, tokens in news:
                shown = tokens[:-1] if self.generation.finish == "stop" else tokens
                piece = self._known.add(shown)
                piece += self._known.end() if self.generation.finish else ""
                if piece:
                    yield piece


def make_settings(stops: tuple[int, ...] = (), **options) -> Settings:
    """Settings of the loop from options given by name; ``target`` may be given whole instead of by its parts.

    Raises:
        UserError: an unknown option, or a value outside its range.
    """
    for name in options:
        if name != "target" and name not in OPTIONS:
            raise UserError(f"option {name!r} is unknown; the options are target, {', '.join(OPTIONS)}")
    given = DEFAULTS | options
    target = given.pop("target", None)
    parts = {name: given.pop(name) for name in TARGET_OPTIONS if name in given}
    if target is None:
        target = Target(**parts)
    elif doubled := [name for name in TARGET_OPTIONS if name in options]:
        raise UserError(f"option {doubled[0]!r} is part of the target that is given; set it there")
    return Settings(target=target, stop_ids=stops, **given)


def refuse_missing(method: str, *, amateur: bool, head: bool, lm: bool, amateur_head: bool) -> None:
    """Refuse a method that lacks something, before anything is loaded for it.

    Raises:
        UserError: it is unknown, or needs what is not there.
    """
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    for is_there, needed, what, flag in (
        (amateur, METHODS[method].contrast, "contrasts with an amateur", "amateur"),
        (head, METHODS[method].needs_head, f"drafts with {KINDS[METHODS[method].head_kind]}", "head"),
        (amateur_head, METHODS[method].needs_amateur_head, "drafts with a second head", "amateur_head"),
        (lm, METHODS[method].needs_lm, "drafts with a small language model", "lm"),
    ):
        if needed and not is_there:
            raise UserError(f"method {method} {what}, and none is given: name one (--{flag})")
