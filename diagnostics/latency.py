"""Latency of single passes, timed alone before any decoding: the inputs of the cost model.

Times taken inside the decoding loop would make "predicted" a restatement of "measured". Here each pass runs by itself,
through the same forward and the same cache as in decoding, over a real context, and is rolled back afterwards.
"""

import statistics
import time
from collections.abc import Callable

import torch

from dcd_core.cache import KVCache
from dcd_core.decode import Prompt
from dcd_core.draft import Shape
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import LanguageModel, Pair

READ_BY = {"eagle3": ("expert",), "dual_input": ("expert", "amateur")}
"""Whose features a kind of head reads."""


def time_passes(
    pair: Pair,
    head: Eagle3Head | None,
    prompt: Prompt,
    shape: Shape,
    answer: int,
    lm: LanguageModel | None = None,
    repeats: int = 15,
    more_widths: tuple[int, ...] = (),
) -> dict[str, dict[str, float]]:
    """Median milliseconds of each pass by number of new tokens, as {"expert": {"1": ms, "<nodes + 1>": ms}, ...}.

    Models: "expert" (with the taps where there is a head), "amateur" (the same where the head reads it) and "lm" (if
    any), "head" (if any; one pass over true features, its output layer and the argmax). Widths: one token, what a level
    of a tree expands, root and drafts.
    The context is the prompt, cycled to a length of prompt + answer / 2 tokens: the middle of an answer. All passes are
    interleaved, so that drift of the machine hits all alike.
    """
    widths = sorted({1, shape.branch, shape.budget + 1, *more_widths})
    length = max(len(prompt.ids) + answer // 2, *widths)
    context = (prompt.ids * (length // len(prompt.ids) + 1))[:length]
    passes: dict[tuple[str, int], Callable[[], None]] = {}
    for name, model in (("expert", pair.expert), ("amateur", pair.amateur), ("lm", lm)):
        if model is not None:
            taps = head is not None and name in READ_BY[head.kind]
            cache = _filled(model, context, max(widths))
            for width in widths:
                passes[name, width] = _model_pass(model, cache, context[:width], taps)
    if head is not None:
        cache = _filled_head(pair, head, context, max(widths))
        for width in widths:
            passes["head", width] = _head_pass(pair.expert, head, cache, context[:width])
    seconds = {key: [] for key in passes}
    for repeat in range(repeats + 3):
        for key, run in passes.items():
            start = _now(pair.expert.device)
            run()
            if repeat >= 3:  # the first three are warm-up
                seconds[key].append(_now(pair.expert.device) - start)
    found: dict[str, dict[str, float]] = {}
    for (name, width), values in seconds.items():
        found.setdefault(name, {})[str(width)] = 1000 * statistics.median(values)
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _filled(model: LanguageModel, context: list[int], room: int) -> KVCache:
    cache = model.new_cache(1, len(context) + room)
    ids = torch.tensor([context], device=model.device)
    model.forward(ids, cache, logits=False)
    cache.commit([len(context)])
    return cache


def _model_pass(model: LanguageModel, cache: KVCache, new: list[int], taps: bool) -> Callable[[], None]:
    ids = torch.tensor([new], device=model.device)

    def run() -> None:
        model.forward(ids, cache, features=taps)
        cache.commit([0])

    return run


@torch.no_grad()
def _filled_head(pair: Pair, head: Eagle3Head, context: list[int], room: int) -> KVCache:
    expert = pair.expert
    ids = torch.tensor([context], device=expert.device)
    models = [getattr(pair, name) for name in READ_BY[head.kind]]
    features = torch.cat([one.forward_full(ids, features=True, logits=False).features for one in models], dim=-1)
    cache = head.new_cache(1, len(context) + room)
    head.step(expert.embedding(ids[:, 1:]), head.fuse(features[:, :-1]), cache)
    cache.commit([len(context) - 1])
    return cache


def _head_pass(expert: LanguageModel, head: Eagle3Head, cache: KVCache, new: list[int]) -> Callable[[], None]:
    """Embed, fuse, one block, output layer at the last row, argmax: what one draft token costs."""
    ids = torch.tensor([new], device=expert.device)
    width = sum(head.config.feature_widths)
    features = torch.randn(1, len(new), width, generator=torch.Generator().manual_seed(0)).to(expert.device)

    @torch.no_grad()
    def run() -> None:
        state = head.step(expert.embedding(ids), head.fuse(features), cache)
        cache.commit([0])
        head.target_ids[head.logits(state[:, -1:]).argmax(-1)]

    return run
