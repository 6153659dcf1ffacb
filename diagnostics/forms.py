"""Names of methods in a form of their own: ``method@form+form``, e.g. ``dcd_eagle3@5x4:10+deferred``. No torch."""

import re

_SHAPE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*):(\d+))?")


def split_label(label: str) -> tuple[str, list[str]]:
    """The method, and its forms."""
    method, _, forms = label.partition("@")
    return method, forms.split("+") if forms else []


def unsaved(label: str) -> str | None:
    """The same drafts with an amateur pass in every round; None for a label that saves none."""
    method, forms = split_label(label)
    plain = "dcd_eagle3" if method == "dcd_deferred" else method
    kept = [form for form in forms if form not in ("deferred", "lazy")]
    if plain == method and kept == forms:
        return None
    return "@".join([plain, "+".join(kept)]) if kept else plain


def read_shape(form: str) -> dict[str, int] | None:
    """gamma (and branch and nodes of a tree) of a form ``DEPTH`` or ``DEPTHxBRANCH:NODES``; None for any other form."""
    found = _SHAPE.fullmatch(form)
    if found is None:
        return None
    gamma, branch, nodes = (int(number or 0) for number in found.groups())
    return {"gamma": gamma, "branch": branch, "nodes": nodes} if branch else {"gamma": gamma, "branch": 1, "nodes": 0}


def shape_of(label: str, gamma: int, branch: int = 1, nodes: int = 0) -> tuple[int, int, int]:
    """Depth, branch and node budget of a label's drafts, where the flags say ``gamma``, ``branch`` and ``nodes``."""
    for form in split_label(label)[1]:
        shape = read_shape(form)
        if shape:
            gamma, branch, nodes = shape["gamma"], shape["branch"], shape["nodes"]
    return gamma, branch, gamma if branch == 1 else nodes or gamma * branch
