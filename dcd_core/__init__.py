"""What a draft is and how it is verified: models, caches, contrastive targets, drafters and the decoding loop.

from dcd_core import load
cd = load("EXPERT", "AMATEUR", "HEAD")
for text in cd.stream("Why is the sky blue?", method="dcd_eagle3", alpha=0.3):
    print(text, end="", flush=True)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcd_core.api import Decoder, Target, load

__all__ = ["Decoder", "Target", "load"]


def __getattr__(name: str):
    """torch is imported with the first of these names, and not before: report and settings do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dcd_core.environment  # noqa: F401  (before torch)

    from dcd_core import api

    return getattr(api, name)
