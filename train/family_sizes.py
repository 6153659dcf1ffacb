"""Size, steps, cost and room on disk of a family's training before it starts (``--dry_run``)."""

from __future__ import annotations

from collections.abc import Sequence

from dcd_core.models import default_feature_layers, load_config
from train.family_run import FamilyConfig, Planned, groups
from train.processes import planned_world
from train.sizes import (
    count_parameters,
    describe_shape,
    describe_texts,
    head_parameters,
    head_shape,
    zero_stage,
)
from train.step_memory import BYTES, gigabytes, head_memory, on_meta, training_bytes


def describe_family(config: FamilyConfig, plans: Sequence[Planned]) -> str:
    """Tokens, parameters, memory per rank, steps, disk and relative cost, from configurations only."""
    models = {role: load_config(getattr(config, role)) for role in ("expert", "amateur")}
    shape = head_shape(config, models["expert"])
    if plans[0].input != "expert_only":
        taps = tuple(config.amateur_feature_layers) or default_feature_layers(models["amateur"].num_hidden_layers)
        shape = shape.replace(
            kind="dual_input", amateur_hidden_size=models["amateur"].hidden_size, amateur_feature_layers=taps
        )
    head = head_parameters(shape)
    sizes = {role: count_parameters(on_meta(model)) for role, model in models.items()}
    together = max(groups(plans, config.members_at_a_time), key=len)
    stage, world = zero_stage(config), planned_world()
    data, steps = describe_texts(config, models["expert"].vocab_size)
    aims = [plan.aim for plan in together]
    memory = head_memory(config, list(models.values()), shape, aims, steps, stage, world, plans[0].input)
    # weights and optimiser state, whole over all ranks, without gradients
    checkpoint = training_bytes(head, config.dtype, 0, 1) - head * BYTES[config.dtype]
    return "\n".join(
        [
            *(
                f"{role} {getattr(config, role)}: {size / 1e6:.1f} M parameters, frozen, {config.expert_dtype}"
                for role, size in sizes.items()
            ),
            f"{len(plans)} heads: {', '.join(plan.name for plan in plans)}",
            describe_shape("each head", head, shape, config.dtype),
            data,
            describe_cost(config, plans, sum(sizes.values()), head),
            memory.describe(
                f"expert and amateur {{frozen}}, {len(together)} heads at a time with AdamW at ZeRO {stage} {{trained}}"
            ),
            f"disk: heads {gigabytes(len(plans) * head * BYTES[config.dtype])}, checkpoints at most about "
            f"{gigabytes(checkpoint * (config.keep * len(plans) + len(together)))}",
        ]
    )


def describe_cost(config: FamilyConfig, plans: Sequence[Planned], frozen: int, head: int) -> str:
    """The family against as many single runs, in operations: 2 a parameter and token forwards, 4 more backwards."""
    parts = len(groups(plans, config.members_at_a_time))
    once, member = 2 * frozen, 6 * head * config.unroll_steps
    share = (parts * once + len(plans) * member) / (len(plans) * (once + member))
    return (
        f"frozen passes: {parts} of both models over the texts for {len(plans)} heads, so the family costs about "
        f"{share:.0%} of {len(plans)} single runs (by operations)"
    )
