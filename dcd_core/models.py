"""Load an expert and its amateur, check that they speak the same vocabulary, and run one pass of either.

Everything that touches transformers' model and cache interfaces sits here and in ``cache.py``.
"""

from __future__ import annotations

from dcd_core.environment import CHECK_MODELS

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dcd_core.architecture import (
    AttentionMasks,
    FixedRotary,
    OutputLayer,
    base_model,
    best_attention,
    cache_keyword,
    decoder_layers,
    learned_positions,
    text_config,
)
from dcd_core.cache import KVCache
from dcd_core.errors import UserError
from dcd_core.load_errors import first_line, one_line_errors, refuse_unfit_weights
from dcd_core.model_check import check_model
from dcd_core.packages import refuse_missing_tokenizer_packages
from dcd_core.quantisation import computing_dtype, is_quantised, loading_arguments

LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Output:
    """What one pass gives. ``logits``: fp32 (fp64 for a fp64 model), cut to the real ids. ``features``: the three
    tapped residual streams, un-normed, low | mid | high, in the model's dtype."""

    logits: Float[Tensor, "batch scored vocab"] | None
    features: Float[Tensor, "batch position features"] | None
    hidden: Float[Tensor, "batch scored hidden"]
    """After the model's final norm: the input of its output layer. One position a row where one was selected."""


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """EAGLE3's taps {2, n//2, n-3} as indices of ``hidden_states`` (0 = embeddings), i.e. inputs of those layers.

    Raises:
        UserError: fewer than 7 layers, where the three ids collide.
    """
    if layers < 7:
        raise UserError(
            f"a model of {layers} layers has no distinct EAGLE3 taps (2, n//2, n-3); give feature_layers explicitly"
        )
    return (2, layers // 2, layers - 3)


class LanguageModel:
    """A frozen transformers causal language model on the project's cache.

    Its parts are found in :mod:`dcd_core.architecture`; whether they give what the model itself gives is tested by
    :func:`dcd_core.model_check.check_model`.

    Args:
        vocab: number of real ids; wider logits are padding and are cut off.
        feature_layers: indices into ``hidden_states`` of the three taps; None for the EAGLE3 default when it exists.
    Raises:
        UserError: an unsupported attention or structure, or taps outside the model.
    """

    def __init__(self, model: nn.Module, vocab: int | None = None, feature_layers: tuple[int, ...] | None = None):
        self.model = model.eval().requires_grad_(False)
        self.config = text_config(model.config)
        self.name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.masks = AttentionMasks(self.config, self.name)
        self.base = base_model(model)
        self.output = OutputLayer(model)
        layers = decoder_layers(model)
        self.layers = len(layers)
        self.vocab = vocab or self.config.vocab_size
        if feature_layers is None and self.layers >= 7:
            feature_layers = default_feature_layers(self.layers)
        self.feature_layers = tuple(feature_layers) if feature_layers else None
        taps = self.feature_layers
        if taps and (len(taps) != 3 or list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] >= self.layers):
            raise UserError(
                f"{self.name}: feature_layers {taps} must be three ascending layers between 1 and {self.layers - 1}"
            )
        self._quantised_dtype = computing_dtype(model) if is_quantised(model) else None
        self._taps: dict[int, Tensor] | None = None
        self._hooks = [
            layers[index].register_forward_pre_hook(self._tap(index), with_kwargs=True)
            for index in self.feature_layers or ()
        ]
        self._rotary = FixedRotary(model)
        self._cache_keyword = cache_keyword(model)
        self._table_of_positions = learned_positions(model)

    def _tap(self, index: int):
        def hook(module, args, kwargs):
            if self._taps is not None:
                self._taps[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def release(self) -> None:
        """Leave the model as it was: without taps and with its own rotary frequencies. This wrapper is of no use any
        more."""
        for hook in self._hooks:
            hook.remove()
        self._rotary.release()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed: a quantised model stores other numbers."""
        return self._quantised_dtype or self.embedding.weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def context(self) -> int:
        """Longest sequence, in tokens, that the model was made for (of length-dependent rotary frequencies: that those
        of short rows serve)."""
        return self._rotary.limit or self.config.max_position_embeddings

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.layers, batch, capacity, self.device, windowed=self.masks.window is not None)

    def output_layer(
        self, hidden: Float[Tensor, "*batch hidden"], ids: Int[Tensor, " ids"] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """The model's own logits over the real ids, or over some of them, in fp32 (fp64 stays fp64)."""
        logits = self.output(hidden, ids)
        if ids is None:
            logits = logits[..., : self.vocab]
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def forward(
        self,
        input_ids: Int[Tensor, "batch width"],
        cache: KVCache,
        *,
        tree_mask: Bool[Tensor, "batch width columns"] | None = None,
        depths: Int[Tensor, "batch width"] | None = None,
        features: bool = False,
        select: Int[Tensor, " batch"] | None = None,
        logits: bool = True,
    ) -> Output:
        """One pass over new tokens; the caller commits the cache afterwards.

        Args:
            select: give logits (and hidden) at this column of each row only, as a width of 1.
            features: also return the tapped features of all columns.
        """
        step = cache.plan(input_ids.shape[1], tree_mask, depths)
        positions = step.positions
        if self._table_of_positions:  # drafts past the budget are never kept, and have no entry in the table
            positions = positions.clamp_max(self.context - 1)
        extra = {self._cache_keyword: cache, "use_cache": True}
        return self._run(input_ids, positions, self.masks.of(cache, step, self.dtype), features, select, logits, extra)

    @torch.no_grad()
    def forward_full(
        self,
        input_ids: Int[Tensor, "batch position"],
        *,
        features: bool = False,
        logits: bool = True,
        select: Int[Tensor, " batch"] | None = None,
    ) -> Output:
        """One causal pass without a cache over RIGHT-padded rows (padding comes after, so no real token sees it)."""
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device)[None].expand(input_ids.shape[0], -1)
        extra = {"use_cache": False}
        return self._run(input_ids, positions, None, features, select, logits, extra)

    def _run(self, input_ids, positions, mask, features: bool, select, logits: bool, extra: dict) -> Output:
        if features and not self.feature_layers:
            raise UserError(f"{self.name} has no feature_layers: give three layer indices")
        self._taps = {} if features else None
        try:
            hidden = self.base(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, **extra
            ).last_hidden_state
            tapped = torch.cat([self._taps[i] for i in self.feature_layers], dim=-1) if features else None
        finally:
            self._taps = None
        if select is not None:
            hidden = hidden.gather(1, select[:, None, None].expand(-1, 1, hidden.shape[-1]))
        return Output(self.output_layer(hidden) if logits else None, tapped, hidden)


@dataclass
class Pair:
    """An expert, its amateur (None where a method needs none) and the tokenizer they share."""

    expert: LanguageModel
    amateur: LanguageModel | None
    tokenizer: object


def choose_device(device: str) -> torch.device:
    """``auto`` is the accelerator if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device {device}: there is no such kind of device; use auto, cpu, cuda or cuda:N") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device is available here; use --device cpu or auto")
    return found


def refuse_missing_folder(name: str) -> None:
    """Refuse what is meant as a local path and is not there, before it is looked for on the hub.

    Raises:
        UserError: a file, or no folder where the name can only be a path (or begins with a folder that exists).
    """
    path = Path(name)
    if path.is_file():
        raise UserError(f"{name} is a file; give the folder of a model, or a hub id")
    local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (local or ("/" in name and path.parent.is_dir())):
        raise UserError(f"there is no folder {name}; give the folder of a model, or a hub id such as owner/model")


def load_tokenizer(name_or_path: str):
    """The tokenizer of a model folder or hub id.

    Raises:
        UserError: there is none, or the packages that read it are not installed.
    """
    refuse_missing_folder(name_or_path)
    refuse_missing_tokenizer_packages(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except Exception as error:  # a damaged file makes transformers and tokenizers raise anything
        load_whole_config(name_or_path)  # which a tokenizer reads too, so a fault of it is said first
        refuse_missing_tokenizer_packages(name_or_path)  # of a hub id, whose files are there now
        reason = first_line(error).rstrip(":").removesuffix(" from one of")
        raise UserError(f"{name_or_path} holds no tokenizer that can be loaded (is it a model's?): {reason}") from error


def load_config(name_or_path: str):
    """The configuration of the language model in a folder or hub id, without its weights.

    Raises:
        UserError: there is none, or its layers are not supported.
    """
    config = text_config(load_whole_config(name_or_path))
    AttentionMasks(config, name_or_path)
    return config


def load_whole_config(name_or_path: str):
    """The same with what a model says of its other parts, if it also reads images."""
    refuse_missing_folder(name_or_path)
    try:
        return AutoConfig.from_pretrained(name_or_path)
    except Exception as error:  # a damaged file makes transformers raise anything
        raise UserError(f"no model at {name_or_path!r} (a local folder or a hub id): {first_line(error)}") from error


def load_model(
    name_or_path: str,
    dtype: str = "float32",
    device: str = "auto",
    feature_layers: tuple[int, ...] | None = None,
    vocab: int | None = None,
    check: bool | None = None,
) -> LanguageModel:
    """Load one frozen model.

    Args:
        check: compare a few passes with the model's own ``forward`` (:mod:`dcd_core.model_check`); None: as the
            environment says (:data:`dcd_core.environment.CHECK_MODELS`), else yes.
    Raises:
        UserError: unknown dtype, missing model, weights that do not fit it, a family that is not supported, a quantised
            model that cannot be used here, or too little memory.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose float32 or bfloat16")
    load_config(name_or_path)  # refuses before weights are read
    config = load_whole_config(name_or_path)
    target = choose_device(device)
    arguments = {"dtype": DTYPES[dtype], **loading_arguments(config, name_or_path, target)}
    with one_line_errors(name_or_path, config, DTYPES[dtype], target):
        model, report = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            attn_implementation=best_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            **arguments,
        )
        model = model if "device_map" in arguments else model.to(target)
    refuse_unfit_weights(report, name_or_path)
    loaded = LanguageModel(model, vocab, feature_layers)
    if loaded.dtype != DTYPES[dtype]:
        LOG.warning("%s is quantised and computes in %s, not in %s", name_or_path, loaded.dtype, DTYPES[dtype])
    if os.environ.get(CHECK_MODELS, "1") != "0" if check is None else check:
        check_model(loaded)
    return loaded


def id_table(tokenizer) -> list[str | None]:
    """``table[id]`` is the token's string; None where the tokenizer leaves a hole."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    return [by_id.get(index) for index in range(max(by_id) + 1)]


def shared_vocabulary(expert_tokenizer, other_tokenizer, other: str = "the amateur") -> int:
    """Number of real ids that both tokenizers share, compared id by id.

    Args:
        other: what messages call the second model.
    Raises:
        UserError: the first id whose string differs, or that only one of them has.
    """
    expert, second = id_table(expert_tokenizer), id_table(other_tokenizer)
    for index in range(max(len(expert), len(second))):
        left = expert[index] if index < len(expert) else None
        right = second[index] if index < len(second) else None
        if left != right:
            raise UserError(
                f"the expert and {other} have different vocabularies: id {index} is {left!r} for the expert and "
                f"{right!r} for {other}; a contrast needs one shared vocabulary"
            )
    return len(expert)


def cut_to_vocabulary(model: LanguageModel, vocab: int, role: str) -> None:
    """Cut a model's logits to the shared real ids.

    Raises:
        UserError: it gives fewer.
    """
    width = model.output.width
    if width < vocab:
        raise UserError(f"{role} {model.name} gives {width} logits, fewer than the {vocab} ids of its tokenizer")
    model.vocab = vocab


def load_pair(
    expert: str,
    amateur: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    feature_layers: tuple[int, ...] | None = None,
    amateur_feature_layers: tuple[int, ...] | None = None,
) -> Pair:
    """Load expert, amateur (optional) and tokenizer; logits of both are cut to the shared real ids.

    Args:
        feature_layers, amateur_feature_layers: taps of either; None for the EAGLE3 default where it exists.
    Raises:
        UserError: see :func:`load_model` and :func:`shared_vocabulary`.
    """
    tokenizer = load_tokenizer(expert)
    vocab = len(id_table(tokenizer))
    for name in filter(None, (expert, amateur)):  # before gigabytes of either are read
        loading_arguments(load_whole_config(name), name, choose_device(device))
    if amateur:
        vocab = shared_vocabulary(tokenizer, load_tokenizer(amateur))
    models = [load_model(expert, dtype, device, feature_layers)]
    if amateur:
        models.append(load_model(amateur, dtype, device, amateur_feature_layers))
    for role, model in zip(("the expert", "the amateur"), models, strict=False):
        cut_to_vocabulary(model, vocab, role)
    return Pair(models[0], models[1] if amateur else None, tokenizer)


def load_scorer(name_or_path: str, pair: Pair) -> LanguageModel:
    """Load a further model that is to work with a pair: a second small model of a three-model target, or a small model
    that drafts. It gets the expert's dtype and device, and its logits are cut to the same real ids.

    Raises:
        UserError: see :func:`load_model` and :func:`shared_vocabulary`; vocabularies are compared before weights are
            read.
    """
    vocab = shared_vocabulary(pair.tokenizer, load_tokenizer(name_or_path), name_or_path)
    # some quantised experts compute in float16, which is offered for no other model
    dtype = next((name for name, dtype in DTYPES.items() if dtype == pair.expert.dtype), "bfloat16")
    model = load_model(name_or_path, dtype, str(pair.expert.device))
    cut_to_vocabulary(model, vocab, "the model")
    return model
