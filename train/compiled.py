"""torch.compile for the parts of a head's training step that are chains of small operations.

What surrounds a block's attention and the loss are compiled, each alone; the attention, which goes from text to text,
is not. Shapes are symbols, so that micro-batches of other lengths are compiled at most a few times.
"""

from __future__ import annotations

import torch

from dcd_core.errors import UserError
from train.unroll import Unroll, row_sums

BACKEND = "inductor"


def compile_parts(module: Unroll) -> None:
    """Compile the parts of this module, when they are first run."""
    for block in module.head.blocks:
        for name in ("inputs", "finish"):
            setattr(block, name, torch.compile(getattr(block, name), dynamic=True, backend=BACKEND))
    module.row_sums = torch.compile(row_sums, dynamic=True, backend=BACKEND)


def refuse_uncompilable(device: torch.device, stage: int) -> None:
    """Compile and run something small.

    Args:
        stage: of ZeRO.
    Raises:
        UserError: it does not work here, or weights are partitioned, which the compiler takes for changed ones.
    """
    if stage >= 3:
        raise UserError("unsupported: --compile true at ZeRO 3; give --compile false, or ZeRO 2 at most")
    try:
        torch.compile(_probe, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # what goes wrong in a compiler's chain of tools has no common class
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--compile true does not work here ({why[0]}); give --compile false") from error


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.sin().exp()
