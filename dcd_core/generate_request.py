"""What a call of transformers' generate comes down to: prompts, length, stop tokens and sampling of our own loop.

generate hands over the lists of processors and criteria that it prepared. They say what is in force: they hold what the
user gave and what follows from the generation config, which is the model's own with the call's settings on top. What
cannot be honoured is refused with its cure; a setting of the model's own generation_config is named as that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor
from transformers.generation import (
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError

PLAIN_MODES = ("greedy_search", "sample")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
OF_THE_LOOP = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values")
"""What generate prepares for its own loop; the rest of what reaches the model's forward is refused."""
SAMPLING = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
}
"""Processors that are honoured: the field of :class:`dcd_core.contrast.Target` and their own attribute, in the order in
which they act."""
SETTINGS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "TopHLogitsWarper": "top_h",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "MaxTimeCriteria": "max_time",
    "StopStringCriteria": "stop_strings",
}
"""The setting that makes generate prepare each of these. The range of transformers that is supported has not all of
them, so they are written as names."""
MODES = ("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "constraints")
"""Settings that choose a generation mode."""


@dataclass
class Request:
    """What a call of generate comes down to. ``sampling`` holds fields of :class:`dcd_core.contrast.Target`."""

    prompts: list[Prompt]
    max_new_tokens: int
    stops: tuple[int, ...]
    pad: int
    sampling: dict


@dataclass
class Origin:
    """Who asked for a setting: the model's own generation config, or the call.

    Args:
        own: ``model.generation_config``. ``config``: the one that is in force.
    """

    own: GenerationConfig
    config: GenerationConfig

    def refusal(self, what: str, setting: str | None) -> UserError:
        """One line about something that cannot be honoured, with its cure."""
        if setting == "min_length" and self.is_on(self.config, "min_new_tokens"):  # generate makes one of the other
            setting = "min_new_tokens"
        if not setting or not self.is_on(self.config, setting):  # an object that was given
            return UserError(f"{what} cannot be honoured with this custom_generate; leave it out")
        if not self.is_own(setting):
            return UserError(f"{what} cannot be honoured with this custom_generate; leave {setting} out")
        value, off = getattr(self.own, setting), self.own._get_default_generation_params().get(setting)
        return UserError(
            f"{what} cannot be honoured: the model's generation_config sets {setting}={value!r}; "
            f"pass {setting}={off!r} to generate, or set model.generation_config.{setting} = {off!r}"
        )

    def is_own(self, setting: str) -> bool:
        """Whether what is in force is what the model's own config sets."""
        return self.is_on(self.own, setting) and self.own.to_dict()[setting] == self.config.to_dict().get(setting)

    @staticmethod
    def is_on(config: GenerationConfig, setting: str) -> bool:
        """Whether a config sets it to something else than what holds where nothing is set."""
        value = getattr(config, setting, None)
        return value is not None and value != config._get_default_generation_params().get(setting)


def read_request(
    input_ids: Tensor, processors, criteria, config: GenerationConfig, own: GenerationConfig, model_kwargs: dict
) -> Request:
    """Understand, or refuse, everything that generate prepared.

    Args:
        own: the model's own generation config, on which ``config`` rests.
    """
    origin = Origin(own, config)
    mode = config.get_generation_mode()
    if mode not in PLAIN_MODES:
        setting = next(filter(origin.is_own, MODES), None)
        raise origin.refusal(f"generation mode {str(mode.value)!r}", setting)
    asked = [name for name in OUTPUTS if getattr(config, name, None) and config.return_dict_in_generate]
    for name in asked:
        raise origin.refusal(name, name)
    for name, value in model_kwargs.items():
        if value is not None and name not in OF_THE_LOOP:
            raise UserError(f"{name} cannot be honoured with this custom_generate; leave it out")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise UserError("a cache that is filled already cannot be honoured; give the whole text as input_ids")
    longest, stops = None, set()
    for criterion in criteria or []:
        if type(criterion) is MaxLengthCriteria:
            longest = criterion.max_length if longest is None else min(longest, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            stops.update(criterion.eos_token_id.tolist())
        else:
            name = type(criterion).__name__
            raise origin.refusal(f"stopping criterion {name}", SETTINGS.get(name))
    if longest is None:
        raise UserError("max_new_tokens is not given; say how long an answer may become")
    pad = getattr(config, "_pad_token_tensor", None)
    prompts = unpadded(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    return Request(
        prompts=prompts,
        max_new_tokens=longest - input_ids.shape[1],
        stops=tuple(sorted(stops)),
        pad=0 if pad is None else int(pad),  # without a stop token all rows are equally long
        sampling=read_sampling(
            processors or [], mode == "sample", origin, [input_ids.shape[1] - len(prompt.ids) for prompt in prompts]
        ),
    )


def read_sampling(processors: list, sample: bool, origin: Origin, padding: list[int]) -> dict:
    """Repetition penalty, temperature, top_k and top_p from generate's list of processors; greedy is temperature 0.

    Args:
        padding: ids on the left of every row that are no part of its prompt.
    Raises:
        UserError: another processor, or an order in which they would mean something else.
    """
    found: dict = {"temperature": 1.0} if sample else {"temperature": 0.0}
    order = []
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:  # changes no probability
            continue
        if kind not in SAMPLING or not (sample or kind is RepetitionPenaltyLogitsProcessor):
            raise origin.refusal(f"logits processor {kind.__name__}", SETTINGS.get(kind.__name__))
        name, attribute = SAMPLING[kind]
        if name == "repetition_penalty" and not counts_prompt(processor, padding):
            raise UserError("prompt_ignore_length cannot be honoured: a repetition penalty counts the prompt's ids too")
        order.append(name)
        found[name] = getattr(processor, attribute)
    if order != [name for name, _ in SAMPLING.values() if name in order]:
        raise UserError(f"logits processors in the order {', '.join(order)} cannot be honoured; leave some of them out")
    return found


def counts_prompt(processor: RepetitionPenaltyLogitsProcessor, padding: list[int]) -> bool:
    """Whether all ids of a prompt count as seen: nothing is ignored but padding."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        return ignored.tolist() == padding
    return not ignored


def unpadded(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[Prompt]:
    """The rows without their padding on the left.

    Raises:
        UserError: padding elsewhere, or positions that do not count the tokens from 0.
    """
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape or bool(((mask != 0) & (mask != 1)).any()) or bool((mask.diff(dim=1) < 0).any()):
        raise UserError("attention_mask cannot be honoured: it may only hide padding on the left (padding_side='left')")
    counted = mask.cumsum(-1) - 1
    if positions is not None and not bool(((positions.to(mask.device) == counted) | (mask == 0)).all()):
        raise UserError("position_ids cannot be honoured: every row's tokens are counted from 0")
    rows = [row[seen.bool()].tolist() for row, seen in zip(input_ids, mask, strict=True)]
    return [Prompt(str(number), row) for number, row in enumerate(rows, start=1)]
