"""Every method from inside transformers: `model.generate` with a `custom_generate` of ours gives the same tokens.

    from dcd_core.custom_generate import contrastive
    model.generate(**inputs, custom_generate=contrastive, amateur="AMATEUR", head="HEAD", alpha=0.3, max_new_tokens=64)

or, by the folder that holds the same for those who pass a path (transformers then runs code from it, so it asks):

    from dcd_core.custom_generate import FOLDER
    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, amateur="AMATEUR", head="HEAD", alpha=0.3)

`model` is the expert. Of generate's own settings these are honoured: input_ids with a left-padded attention_mask,
max_new_tokens and max_length, eos_token_id, pad_token_id, repetition_penalty, do_sample with temperature, top_k and
top_p, num_return_sequences, return_dict_in_generate (sequences only), whether the call sets them or the model's own
generation_config. Whatever else would change the text is refused, and where that config asks for it the line says so.

Ours come beside them: `amateur` and `lm` (a model, a folder or a hub id), `head` and `amateur_head` (an Eagle3Head, a
folder or a hub id), `method`, and alpha, cutoff, gamma, branch, nodes, stop_below, saving, deferral, draft_alpha, rule,
seed as in :mod:`dcd_core.api`.
Models given by name are loaded once and kept while they are the last ones used. Without a seed, sampling takes one from
torch's generator, so `torch.manual_seed` makes it repeatable as it does for generate. transformers hands no `streamer`
to a callable: give it as `stream_to`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import lru_cache
from itertools import chain
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from dcd_core.api import METHOD, make_settings, refuse_missing
from dcd_core.architecture import text_config
from dcd_core.decode import Assembled, Generation, Prompt, Settings, check_prompt, decode, stream
from dcd_core.errors import UserError
from dcd_core.generate_request import read_request
from dcd_core.heads.checkpoint import fitting_config, load_head, load_head_config
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.fitting import check_expert
from dcd_core.loading import check_draft_vocabulary, check_taps
from dcd_core.methods import assemble
from dcd_core.model_check import check_model
from dcd_core.models import LanguageModel, Pair, id_table, load_model, load_tokenizer, shared_vocabulary

FOLDER = str(Path(__file__).resolve().parent / "custom_generate_folder")
CHECKED: WeakSet[nn.Module] = WeakSet()
"""Models that were compared with their own forward already."""


def contrastive(
    model,
    input_ids,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    *,
    amateur=None,
    head=None,
    amateur_head=None,
    lm=None,
    method=METHOD,
    alpha=None,
    cutoff=None,
    gamma=None,
    branch=None,
    nodes=None,
    stop_below=None,
    saving=None,
    deferral=None,
    draft_alpha=None,
    rule=None,
    seed=None,
    stream_to=None,
    **model_kwargs,
):
    """The callable for `custom_generate`; see the module for what each argument means.

    Returns:
        ``[row, position]``: the input ids, then the new ones with pad_token_id after a row's end.
    Raises:
        UserError: what cannot be honoured, by name, and all that :meth:`dcd_core.api.Decoder.generate` refuses.
    """
    given = dict(alpha=alpha, cutoff=cutoff, gamma=gamma, branch=branch, nodes=nodes, stop_below=stop_below)
    given |= dict(saving=saving, draft_alpha=draft_alpha, rule=rule)
    if deferral is not None:
        given |= {f"defer_{name}": value for name, value in asdict(deferral).items()}
    own = model.generation_config
    asked = read_request(input_ids, logits_processor, stopping_criteria, generation_config, own, model_kwargs)
    given |= asked.sampling | {"max_new_tokens": asked.max_new_tokens, "seed": seed}
    if seed is None:
        given["seed"] = int(torch.randint(2**62, ())) if given["temperature"] else 0
    how = make_settings(asked.stops, **{name: value for name, value in given.items() if value is not None})
    beside = dict(amateur=amateur, head=head, lm=lm, amateur_head=amateur_head)
    refuse_missing(method, **{name: one is not None for name, one in beside.items()})
    with ExitStack() as stack:
        assembled = put_together(stack, model, method, **beside)
        made = run(assembled, asked.prompts, how, stream_to, input_ids)
    width = max(len(generation.ids) for generation in made)
    fresh = torch.tensor([made_row.ids + [asked.pad] * (width - len(made_row.ids)) for made_row in made])
    sequences = torch.cat([input_ids, fresh.to(input_ids)], dim=1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def generate_from_folder(model, streamer=None, assistant_model=None, **arguments):
    """What the folder's `generate` does: generate's own preparation of inputs, then :func:`contrastive`.

    Raises:
        UserError: an assistant model, and what :func:`contrastive` refuses.
    """
    if assistant_model is not None:
        raise UserError("assistant_model is not used: give the draft head as head=, or choose another method=")
    return GenerationMixin.generate(model, custom_generate=contrastive, stream_to=streamer, **arguments)


# ---- models that belong to others ------------------------------------------------------------------------------------


def put_together(stack: ExitStack, model: nn.Module, method: str, amateur, head, lm, amateur_head) -> Assembled:
    """The method over the caller's expert; what is borrowed is given back when the stack closes."""
    others = [named(one, model) if isinstance(one, str | Path) else one for one in (amateur, lm)]
    vocab = shared_ids(model, *others)
    expert = stack.enter_context(borrowed(model, vocab, taps_of(head, "expert", model)))
    taps = (taps_of(head, "amateur", others[0]), None)
    wrapped = [
        None if one is None else stack.enter_context(borrowed(one, vocab, layers))
        for one, layers in zip(others, taps, strict=True)
    ]
    heads = {"head": head, "amateur_head": amateur_head}
    heads = {name: head_of(one, expert, wrapped[0]) for name, one in heads.items()}
    return assemble(method, Pair(expert, wrapped[0], None), lm=wrapped[1], **heads)


def named(name: str | Path, model: nn.Module) -> nn.Module:
    """A model beside the expert, in its dtype and on its device."""
    return kept_model(str(name), stamp(name), str(model.dtype).removeprefix("torch."), str(model.device))


def taps_of(head, role: str, model: nn.Module | None) -> tuple[int, ...] | None:
    """The layers of the expert or the amateur that a head reads; None without one, or where it does not say."""
    if head is None or model is None:
        return None
    config = load_head_config(head) if isinstance(head, str | Path) else head.config
    taps = config.feature_layers if role == "expert" else config.amateur_feature_layers
    if taps:
        check_taps(taps, text_config(model.config).num_hidden_layers, call(head), model.config._name_or_path, role)
    return taps


def head_of(head, expert: LanguageModel, amateur: LanguageModel | None) -> Eagle3Head | None:
    """A head, once it is sure that it is this expert's. (The amateur is looked at when a method is put together.)"""
    if head is None:
        return None
    if isinstance(head, str | Path):
        fitting_config(head, expert, amateur)
        loaded = kept_head(str(head), stamp(head), expert.dtype, str(expert.device))
    else:
        check_expert(head.config, expert, (None, None), call(head))
        loaded = head
    check_draft_vocabulary(loaded, expert.vocab, call(head))
    return loaded


def call(head) -> str:
    """What a refusal calls a head."""
    return str(head) if isinstance(head, str | Path) else "the head"


@contextmanager
def borrowed(model: nn.Module, vocab: int, taps: tuple[int, ...] | None = None) -> Iterator[LanguageModel]:
    """Someone's model as a LanguageModel, which freezes it; afterwards it trains as it did and has no taps. A model is
    checked when it is first met (:mod:`dcd_core.model_check`).

    Raises:
        UserError: its family or its attention is not supported.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    wrapped = None
    try:
        wrapped = LanguageModel(model, vocab, taps)
        if model not in CHECKED:
            check_model(wrapped)
            CHECKED.add(model)
        yield wrapped
    finally:
        if wrapped is not None:
            wrapped.release()
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def shared_ids(model: nn.Module, *others: nn.Module | None) -> int:
    """Number of real ids that the expert shares with the other models, by their tokenizers where those can be found.

    Raises:
        UserError: vocabularies that differ; without tokenizers, outputs of different widths.
    """
    width, name = text_config(model.config).vocab_size, str(model.config._name_or_path or "")
    tokenizer = kept_tokenizer(name, stamp(name)) if name else None
    vocab = len(id_table(tokenizer)) if tokenizer else width
    widths = [width]
    for other in others:
        if other is None:
            continue
        widths.append(text_config(other.config).vocab_size)
        second = str(other.config._name_or_path or "")
        if tokenizer and second and kept_tokenizer(second, stamp(second)):
            same_ids(name, second, stamp(name), stamp(second))
        elif widths[-1] != width:
            raise UserError(
                f"the expert gives {width} logits and the other model {widths[-1]}, and their tokenizers are not there "
                "to be compared; load both with from_pretrained from folders that hold a tokenizer"
            )
    if min(widths) < vocab:
        raise UserError(f"a model gives {min(widths)} logits, fewer than the {vocab} ids of its tokenizer")
    return vocab


def stamp(name: str | Path) -> tuple:
    """What tells one content of a local folder from another without reading it; empty for a hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return ()
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()]
    return tuple(sorted(files))


@lru_cache(maxsize=2)
def kept_model(name: str, content: tuple, dtype: str, device: str) -> nn.Module:
    """The models that were named last: an amateur, and a small model that drafts."""
    return load_model(name, dtype, device).model


@lru_cache(maxsize=2)
def kept_head(name: str, content: tuple, dtype: torch.dtype, device: str) -> Eagle3Head:
    """The heads that were named last: a drafter's, and the amateur's."""
    return load_head(name, dtype=dtype, device=device)


@lru_cache(maxsize=4)
def kept_tokenizer(name: str, content: tuple):
    """The tokenizer beside a model; None where there is none."""
    try:
        return load_tokenizer(name)
    except UserError:
        return None


@lru_cache(maxsize=4)
def same_ids(expert: str, other: str, *contents: tuple) -> int:
    """See :func:`dcd_core.models.shared_vocabulary`."""
    return shared_vocabulary(*(kept_tokenizer(name, stamp(name)) for name in (expert, other)), other)


# ---- decoding --------------------------------------------------------------------------------------------------------


def run(assembled: Assembled, prompts: list[Prompt], how: Settings, stream_to, input_ids: Tensor) -> list[Generation]:
    """All rows as one batch, or one row with its tokens handed to a streamer as they become known."""
    if stream_to is None:
        return decode(assembled, prompts, how, max_batch=len(prompts))
    if len(prompts) > 1:
        raise UserError("a streamer shows one row; generate one at a time")
    check_prompt(assembled.scorers, prompts[0], how.max_new_tokens)
    stream_to.put(input_ids.cpu())
    made = {}
    for generation, tokens in chain.from_iterable(stream(assembled, prompts, how)):
        made[generation.index] = generation
        if tokens:
            stream_to.put(torch.tensor(tokens))
    stream_to.end()
    return list(made.values())
