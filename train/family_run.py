"""Training a family of heads that differ in their targets and, across seeds, in their initial weights.

The dear part, the passes of the frozen expert and amateur over a micro-batch, is done once for all members, which are
trained in lockstep, each with its own optimiser. A seed changes the initial weights of a head and nothing else: the
order of the data (and the shuffled input) is that of ``--seed`` for every member. So all targets of one seed start from
the same weights, and all members read the same batches.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from data_prep.vocabulary import DraftVocabulary
from dcd_core.config import finish_run, refuse_below
from dcd_core.files import content_hash, file_hash
from dcd_core.heads.checkpoint import save_head
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.family import MANIFEST, PER_SEED, READS_AMATEUR, FamilyMember, initial_weights, write_manifest
from train.batches import BUCKET, Plan, Stream, Texts
from train.head_run import (
    HeadConfig,
    draft_vocabulary,
    evaluation,
    find_store,
    fresh_head,
    give_start,
    identity,
    load_frozen,
    rate_scale,
    refuse_taps,
    sizes_of_features,
    trained_module,
    training_stream,
)
from train.held_out import held_out_texts
from train.loop import FREE, Member, fit, refuse_start, total_steps
from train.online_expert import HeadStep, copy_module, scale_features
from train.passes import Passes
from train.processes import Ranks, barrier, start
from train.sizes import coverage, curve_summary, data_summary, family_result
from train.unroll import MASK_RULE, Aim


@dataclass(kw_only=True)
class FamilyConfig(HeadConfig):
    """Settings that trainers of families share."""

    seed: int = field(default=0, metadata={"help": "seed of the data order and of a shuffled input"})
    amateur: str = field(metadata={"help": "amateur: hub id or folder", **FREE})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "seeds of the heads' initial weights"})
    members_at_a_time: int = field(
        default=0, metadata={"help": "heads in memory at once, the frozen passes are redone for each group; 0: all"}
    )
    amateur_feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "the amateur's taps (default: 2, n//2, n-3)"}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.amateur:
            raise ValueError("--amateur (hub id or folder) is needed")
        refuse_below(self, members_at_a_time=0)
        refuse_taps(self, "amateur_feature_layers")
        refuse_repeated("seeds", self.seeds)
        if min(self.seeds) < 0 or max(self.seeds) >= 2**63:
            raise ValueError(f"--seeds must be at least 0 and below 2**63, got {self.seeds}")


def refuse_repeated(name: str, values: Sequence) -> None:
    """Raises ValueError for an empty list, or one that names a value twice."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"--{name} takes one or more different values, got {list(values)}")


@dataclass(frozen=True)
class Planned:
    """A member before it is trained: its folder's name, its target, the seed of its weights, and its input."""

    name: str
    aim: Aim
    seed: int
    input: str = "expert_only"


def groups(plans: Sequence[Planned], size: int) -> list[list[Planned]]:
    """The members that are trained together; 0: all of them."""
    size = size or len(plans)
    return [list(plans[start : start + size]) for start in range(0, len(plans), size)]


class FamilyRun:
    """One run: what all members share, loaded once, and the training of one group after the other."""

    def __init__(self, config: FamilyConfig, plans: Sequence[Planned], ranks: Ranks):
        self.config, self.plans, self.ranks = config, list(plans), ranks
        self.pair, self.stops = load_frozen(config, ranks, config.amateur, config.amateur_feature_layers)
        self.texts = Texts.load(
            config.train_tokens, config.max_length, self.pair.expert.vocab, config.max_answer_tokens
        )
        self.held_out = held_out_texts(config, self.pair.expert.vocab, self.texts.prompt_hashes, ranks)
        self.vocabulary: DraftVocabulary = draft_vocabulary(config, self.pair.expert.vocab)
        self.store = find_store(config, self.pair, self.texts)
        self.rms: Tensor | None = sizes_of_features(config, self.pair, self.store, self.texts)
        self.stream: Stream = training_stream(config, self.texts, ranks, self.stops)
        self.identity = identity(self.texts, self.vocabulary.target_ids, self.pair)

    def fresh(self, plan: Planned) -> Eagle3Head:
        """The member as it starts, but for the sizes of features: those follow from the expert and the texts, and a
        last bit of theirs that another machine gives must not make another start of it."""
        aligned = {None: "amateur", 0.0: "expert"}.get(plan.aim.alpha, "contrast")
        declared = {"aligned_with": aligned, "train_alpha": plan.aim.alpha}
        reads = plan.input != "expert_only"
        declared |= {"amateur_input": plan.input} if reads else {}
        if plan.input in READS_AMATEUR or aligned != "expert":
            declared["amateur_identity"] = self.identity["amateur weights"]
        return fresh_head(self.config, self.pair, self.vocabulary, None, plan.seed, reads, **declared)

    def train(self, plans: list[Planned], part: str, argv: list[str] | None) -> tuple[list[FamilyMember], dict]:
        """One group, to the end: its heads in OUTPUT/heads, what the manifest says of them, and their metrics."""
        config, folder = self.config, Path(self.config.output)
        heads = {plan.name: self.fresh(plan) for plan in plans}
        fixed = [held_fixed(self, plan, heads[plan.name]) for plan in plans]
        if self.rms is not None:
            for head in heads.values():
                scale_features(head, self.rms)
        aims, target_ids = [plan.aim for plan in plans], self.vocabulary.target_ids
        [read] = {plan.input for plan in plans}
        models = self.pair.expert, self.pair.amateur
        step = HeadStep(models[0], target_ids, self.stops, aims, models[1], read, config.seed, self.store)
        passes = Passes(models, self.store)
        give_start(config, list(heads.values()), passes, self.texts, self.stops, self.ranks, part)
        evaluate = evaluation(config, step, self.held_out, self.ranks)
        modules = {
            name: trained_module(config, head, self.stream, self.ranks, self.rms) for name, head in heads.items()
        }
        depends_on = {**self.identity, "members": list(heads)}
        scale = rate_scale(config)
        trained = fit(modules, self.stream, step, config, self.ranks, depends_on, argv, evaluate, None, part, scale)
        members = [
            self.keep(plan, member, folder / "heads" / plan.name, its)
            for plan, member, its in zip(plans, trained, fixed, strict=True)
        ]
        for member in trained:
            member.engine.destroy()
        return members, {member.name: curve_summary(member.history) for member in trained}

    def keep(self, plan: Planned, trained: Member, path: Path, fixed: dict) -> FamilyMember:
        """Write a trained head; every rank must call it."""
        head = copy_module(trained.engine).head
        weights = ""
        if self.ranks.first:  # who writes the manifest too
            path.parent.mkdir(parents=True, exist_ok=True)
            save_head(path, head, self.texts.prompt_hashes)
            weights = file_hash(path / "model.safetensors")
        return FamilyMember(plan.aim.alpha, plan.seed, plan.input, path, fixed, weights, self.config.seed)


def train_family(kind: str, config: FamilyConfig, plans: Sequence[Planned], argv: list[str] | None) -> None:
    """Train every member; write OUTPUT/heads, OUTPUT/manifest.json and OUTPUT/metrics.json."""
    refuse_start(config)
    ranks = start(config.seed, config.timeout_minutes)
    run = FamilyRun(config, plans, ranks)
    if ranks.first:
        print(f"training texts: {run.texts.describe()}; {len(plans)} heads", flush=True)
    members, metrics = [], {}
    for number, group in enumerate(groups(plans, config.members_at_a_time), start=1):
        found, measured = run.train(group, f"group-{number}", argv)
        members += found
        metrics |= measured
        # engines hold each other in cycles, and their memory is needed by the next group
        gc.collect()
    if ranks.first:
        folder = Path(config.output)
        write_manifest(folder, kind, members)
        found = {**data_summary(run.texts), "draft_vocab_coverage": coverage(run.texts, run.vocabulary.t2d)}
        finish_run(folder, {**found, "members": metrics})
        print(family_result(folder / MANIFEST, metrics), flush=True)
    barrier()


def normalisation(config: FamilyConfig, plan: Plan) -> str:
    """What the summed loss is divided by. EAGLE's way counts padding, which depends on how a step's texts are split."""
    if config.loss_normalisation != "eagle":
        return config.loss_normalisation
    return f"eagle over {plan.world} x {plan.accumulation} micro-batches of {config.batch_size}"


def scaling(config: FamilyConfig) -> str:
    """What was made of the random initial weights before training."""
    if config.start == "random":
        return config.feature_scaling
    norm = config.start_norm or "least cross-entropy"
    return f"{config.start} with a norm of {norm} from {config.start_texts or 'all'} texts"


def held_fixed(run: FamilyRun, plan: Planned, head: Eagle3Head) -> dict:
    """What the manifest says was held fixed for a member, as it is before it is trained."""
    config, texts, step, shape = run.config, run.texts, run.stream.plan, head.config
    return {
        "input": plan.input,
        "head shape": {
            "hidden": shape.hidden_size,
            "intermediate": shape.intermediate_size,
            "heads": shape.num_attention_heads,
            "key-value heads": shape.num_key_value_heads,
            "layers": shape.num_hidden_layers,
        },
        "trained parameters": sum(weight.numel() for weight in head.parameters()),
        PER_SEED: initial_weights(head),
        "training texts": texts.hash,
        "data order": content_hash([texts.hash, list(step.lengths), step.global_batch, step.seed, BUCKET]),
        "token budget": {
            "texts": len(texts),
            "answer tokens": texts.answer_tokens,
            "optimiser steps": total_steps(config, step.steps_per_epoch),
            "texts per step": step.global_batch,
        },
        "position mask rule": {"rule": MASK_RULE, "stop ids": sorted(run.stops)},
        "loss": {
            "step decay": config.step_decay,
            "normalisation": normalisation(config, step),
            "rejection weight": config.rejection_weight,
        },
        "unroll depth": config.unroll_steps,
        "draft vocabulary": run.vocabulary.content_hash,
        "optimiser": {
            "name": "AdamW",
            "betas": [config.beta1, config.beta2],
            "weight decay": config.weight_decay,
            "clipping": config.clip,
            "rates": [config.fc_rate, config.query_key_rate, config.norm_rate, float(config.train_lm_head)],
        },
        "schedule": {
            "peak": config.lr,
            "warm-up steps": config.warmup_steps,
            "decay": config.schedule,
            "final ratio": config.final_lr_ratio,
        },
        "dtype": {"trained": config.dtype, "frozen": config.expert_dtype},
        "feature layers": {
            "expert": list(run.pair.expert.feature_layers),
            "amateur": list(run.pair.amateur.feature_layers or []),
        },
        "feature scaling": scaling(config),
        "expert": run.identity["expert weights"],
        "amateur": run.identity["amateur weights"],
    }
