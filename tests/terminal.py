"""What every test of the terminal needs: quick flags on a tiny world."""

FAST = ["--max_new_tokens=8", "--gamma=3", "--device=cpu", "--dtype=float32", "--alpha=0.5"]


def flags(world, *more):
    """Later ones win."""
    return [
        *(f"--{name}={world / name}" for name in ("expert", "amateur", "head")),
        "--method=dcd_eagle3",
        *FAST,
        *more,
    ]
