"""What every trainer of heads is given and builds: settings, frozen models, draft vocabulary, stream, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from data_prep.feature_files import TEXTS, FeatureStore
from data_prep.vocabulary import DraftVocabulary, build_vocabulary, load_vocabulary
from dcd_core.chat import stop_ids
from dcd_core.config import FROM_PAIR, refuse_above, refuse_below
from dcd_core.errors import UserError
from dcd_core.files import content_hash
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.model_identity import model_identity
from dcd_core.models import Pair, load_pair
from train.batches import Plan, Stream, Texts
from train.closed_form import start_in_closed_form
from train.compiled import compile_parts, refuse_uncompilable
from train.held_out import SKIP_TRAINED
from train.loop import FREE, LoopConfig, has_checkpoint, refuse_texts
from train.online_expert import HeadStep, HeldOut, feature_rms, feature_sizes, scale_features
from train.passes import Passes, open_store
from train.processes import Ranks
from train.sizes import common_pieces, zero_stage
from train.unroll import Unroll, count_rows


@dataclass(kw_only=True)
class HeadConfig(LoopConfig):
    """Settings of a head's training (those of the loop come first)."""

    expert: str = field(metadata={"help": "expert: hub id or folder", **FREE})
    train_tokens: list[str] = field(
        default_factory=list, metadata={"help": "token files to train on (default: the texts of --features)", **FREE}
    )
    features: str = field(
        default="", metadata={"help": "store of data_prep/features.py: no passes of the frozen models", **FREE}
    )
    online: bool = field(
        default=False, metadata={"help": "pass texts that --features lacks through the models; else refuse", **FREE}
    )
    eval_tokens: list[str] = field(default_factory=list, metadata={"help": "token files held out", **FREE})
    max_answer_tokens: int = field(default=0, metadata={"help": "train on the first texts up to this many; 0: all"})
    eval_texts: int = field(default=0, metadata={"help": "held-out texts to evaluate on; 0: all", **FREE})
    skip_trained: bool = field(default=False, metadata={"help": SKIP_TRAINED, **FREE})
    gamma: int = field(default=5, metadata={"help": "drafts per round in evaluation", **FREE})
    draft_vocab_size: int = field(default=32000, metadata={"help": "ids the head can draft"})
    vocabulary: str = field(default="", metadata={"help": "ready draft vocabulary (default: count answers)", **FREE})
    unroll_steps: int = field(default=7, metadata={"help": "drafts unrolled in training"})
    step_decay: float = field(default=0.8, metadata={"help": "weight of step i is this to the i"})
    rejection_weight: float = field(
        default=0.0, metadata={"help": "share of the chance of rejection in the loss; the rest is cross-entropy"}
    )
    loss_normalisation: Literal["step", "eagle"] = field(
        default="step",
        metadata={"help": "divide by the loss rows of the optimiser step, or like EAGLE by all positions"},
    )
    feature_scaling: Literal["rms", "none"] = field(
        default="rms", metadata={"help": "start fc from features of equal size, or as they come"}
    )
    start: Literal["random", "closed_form"] = field(
        default="closed_form",
        metadata={"help": "weights of a fresh head: random, or with fc and attention from a linear regression"},
    )
    start_norm: float = field(
        default=0.0, metadata={"help": "closed form: final norm, in sizes of the final states; 0: by cross-entropy"}
    )
    start_texts: int = field(default=5000, metadata={"help": "closed form: read the first so many texts; 0: all"})
    fc_rate: float = field(default=1.0, metadata={"help": "learning rate of fc, in parts of --lr"})
    query_key_rate: float = field(default=0.3, metadata={"help": "learning rate of queries and keys, in parts of --lr"})
    norm_rate: float = field(default=5.0, metadata={"help": "learning rate of the norms, in parts of --lr"})
    train_lm_head: bool = field(default=True, metadata={"help": "train the output rows; false: keep the expert's"})
    recompute: bool = field(
        default=False, metadata={"help": "run blocks again in the backward pass: less memory, more time", **FREE}
    )
    compile: bool = field(default=False, metadata={"help": "torch.compile for parts of the head and for the loss"})
    head_layers: int = field(default=1, metadata={"help": "decoder blocks of the head: its depth"})
    head_intermediate_size: int = field(default=0, metadata={"help": "width of the head's MLPs; 0: the expert's"})
    expert_dtype: Literal["float32", "bfloat16"] = field(
        default="bfloat16", metadata={"help": "of the frozen models", FROM_PAIR: "dtype"}
    )
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "taps, as indices of hidden_states (default: 2, n//2, n-3)"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.features and not self.train_tokens:
            self.train_tokens = [str(Path(self.features) / TEXTS)]
        if not self.expert or not self.train_tokens:
            raise ValueError("--expert (hub id or folder) and --train_tokens or --features are both needed")
        refuse_below(self, draft_vocab_size=1, unroll_steps=1, gamma=1, head_layers=1, head_intermediate_size=0)
        refuse_below(self, step_decay=0, start_texts=0, start_norm=0, rejection_weight=0)
        refuse_above(self, step_decay=1, rejection_weight=1)
        for name in ("fc_rate", "query_key_rate", "norm_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}")
        refuse_texts(self)
        refuse_taps(self, "feature_layers")


def refuse_taps(config, name: str) -> None:
    """Raises ValueError unless the setting is empty or three distinct layers."""
    taps = getattr(config, name)
    if taps and (len(taps) != 3 or len(set(taps)) != 3):
        raise ValueError(f"--{name} takes three distinct layers, got {taps}")


def load_frozen(
    config: HeadConfig, ranks: Ranks, amateur: str = "", amateur_taps: list[int] | None = None
) -> tuple[Pair, frozenset[int]]:
    """The frozen models on this rank's device, and the ids that end the expert's turns."""
    if config.compile:
        refuse_uncompilable(ranks.device, zero_stage(config))
    pair = load_pair(
        config.expert,
        amateur or None,
        dtype=config.expert_dtype,
        device=str(ranks.device),
        feature_layers=tuple(config.feature_layers) or None,
        amateur_feature_layers=tuple(amateur_taps or ()) or None,
    )
    if pair.expert.feature_layers is None:
        raise UserError(f"{config.expert} has too few layers for the default taps; give --feature_layers")
    return pair, frozenset(stop_ids(pair.tokenizer, config.expert))


def draft_vocabulary(config: HeadConfig, vocab: int) -> DraftVocabulary:
    """The given draft vocabulary, or the training answers' most frequent ids."""
    if config.vocabulary:
        return load_vocabulary(config.vocabulary)
    return build_vocabulary(config.train_tokens, vocab, config.draft_vocab_size)


def fresh_head(
    config: HeadConfig,
    pair: Pair,
    vocabulary: DraftVocabulary,
    rms: Tensor | None,
    seed: int,
    reads_amateur: bool = False,
    **declared,
) -> Eagle3Head:
    """A head with initial weights, in fp32: DeepSpeed makes it what ``--dtype`` says.

    Args:
        rms: size of the expert's features, to start from features of equal size; None takes them as they come.
        reads_amateur: whether its features are those of both models.
        declared: further fields of the head's configuration, such as ``aligned_with``.
    """
    expert = pair.expert
    shape = {"layers": config.head_layers, "intermediate_size": config.head_intermediate_size or None, **declared}
    if (width := expert.embedding.weight.shape[1]) != expert.hidden_size:
        raise UserError(
            f"unsupported: {expert.name} embeds tokens in {width} numbers, not in its {expert.hidden_size}, which is "
            "what a head reads"
        )
    rows = expert.output.rows()
    if reads_amateur:
        taps = expert.feature_layers, pair.amateur.feature_layers
        models = expert.config, pair.amateur.config
        head = DualInputHead.from_pair(*models, vocabulary, *taps, seed, rows, **shape)
    else:
        head = Eagle3Head.from_expert(expert.config, vocabulary, expert.feature_layers, seed, rows, **shape)
    head = head.to(expert.device)
    if rms is not None:
        scale_features(head, rms)
    return head


def trained_module(
    config: HeadConfig, head: Eagle3Head, stream: Stream, ranks: Ranks, rms: Tensor | None = None
) -> Unroll:
    """What an engine trains.

    Args:
        rms: sizes of the expert's features; None: they are read as they come.
    """
    # powers of two, so that nothing is rounded; norms before fc have sizes of their own
    normed = head.config.norm_before_fc or head.config.fc_norm
    sizes = None if rms is None or normed else feature_sizes(head, rms).log2().round().exp2()
    pieces = common_pieces(config, stream, ranks, len(head.target_ids))
    head.lm_head.requires_grad_(config.train_lm_head)
    module = Unroll(
        head, config.unroll_steps, config.step_decay, pieces, config.rejection_weight, sizes, config.recompute
    )
    if config.compile:
        compile_parts(module)
    return module


def rate_scale(config: HeadConfig) -> Callable[[str], float]:
    """What a head's parameter takes of the learning rate, by its name."""

    def scale(name: str) -> float:
        part = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        if "norm" in name:
            return config.norm_rate
        return {"fc": config.fc_rate, "q_proj": config.query_key_rate, "k_proj": config.query_key_rate}.get(part, 1.0)

    return scale


def find_store(config: HeadConfig, pair: Pair, texts: Texts) -> FeatureStore | None:
    """The store of ``--features``, if one is given."""
    models = [pair.expert, *filter(None, [pair.amateur])]
    return open_store(config.features, models, texts, config.online) if config.features else None


def sizes_of_features(config: HeadConfig, pair: Pair, store: FeatureStore | None, texts: Texts) -> Tensor | None:
    """What :func:`fresh_head` scales by."""
    return feature_rms(Passes([pair.expert], store), texts) if config.feature_scaling == "rms" else None


def give_start(
    config: HeadConfig,
    heads: Sequence[Eagle3Head],
    passes: Passes,
    texts: Texts,
    stops: frozenset[int],
    ranks: Ranks,
    part: str = "",
) -> None:
    """Give fresh heads of one shape the start that ``--start`` asks for; every rank must call it. A run that will load
    a checkpoint (of ``part``) needs none."""
    if config.start == "closed_form" and not has_checkpoint(config, ranks, part):
        start_in_closed_form(heads, passes, texts, stops, ranks, config.start_norm, config.start_texts)


def training_stream(config: HeadConfig, texts: Texts, ranks: Ranks, stops: frozenset[int]) -> Stream:
    """The order in which this rank reads the texts, and how many rows of each give a loss."""
    plan = Plan(tuple(texts.lengths), config.batch_size, ranks.world, config.gradient_accumulation, config.seed)

    def count(sample) -> list[int]:
        return count_rows(sample.input_ids, sample.answer_spans, stops, config.unroll_steps)

    return Stream(texts, plan, ranks.rank, count, config.loss_normalisation)


def evaluation(
    config: HeadConfig, step: HeadStep, held_out: Texts | None, ranks: Ranks
) -> Callable[[list], list[dict]] | None:
    """Evaluation on the held-out texts, if there are any."""
    return None if held_out is None else HeldOut(held_out, step, config.gamma, ranks)


def identity(texts: Texts, target_ids: Tensor, pair: Pair) -> dict[str, str]:
    """Hashes of what a head's weights depend on beside the flags."""
    found = {
        "training texts": texts.hash,
        "draft vocabulary": content_hash(target_ids.tolist()),
        "expert weights": model_identity(pair.expert.model),
    }
    return found | ({"amateur weights": model_identity(pair.amateur.model)} if pair.amateur else {})
