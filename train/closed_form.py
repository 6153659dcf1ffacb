"""Closed-form start of a draft head: what it can be given by linear regression, before any training.

The expert's final state at ``t+1``, which its output layer reads, is regressed on what row ``t`` of a head reads,
``[normed embedding of x_{t+1}, features g_t]``, over the rows that draft. The features' part of the solution goes into
``fc``. The embedding's part, at limited rank, goes into ``v_proj`` and ``o_proj`` of a few key/value groups whose
queries and keys attend to their own position. Whatever else adds to the state starts at zero, so the head's first
states are the regression's predictions, up to that rank and to what the attention leaks to other positions.

The regression is ridge regression from sums over rows, in fp64: they are streamed, added up over ranks, and do not
depend on the order of the texts but for rounding. The penalty is chosen on held-out texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import LanguageModel
from dcd_core.progress import progress
from train.batches import Texts
from train.passes import Passes
from train.processes import Ranks, add_up
from train.start_scale import calibrate
from train.unroll import align

HELD_OUT = 8
"""Every so many-th text, from the first on, chooses the penalty."""
PENALTIES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0, 100.0)
"""Ridge penalties, in mean squared sizes of a regressor."""
LEAK = 0.1
"""Largest total weight of all other positions, in weights of the own, where the keys are exactly constant."""
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class Sums:
    """Sums over rows of regressors x and targets y, in fp64.

    ``gram`` x x^T, ``cross`` x y^T, ``total`` x, ``counts`` (rows, squared length of y).
    """

    gram: Float[Tensor, "wide wide"]
    cross: Float[Tensor, "wide hidden"]
    total: Float[Tensor, " wide"]
    counts: Float[Tensor, " 2"]

    @classmethod
    def zeros(cls, wide: int, hidden: int, device) -> Sums:
        shapes = (wide, wide), (wide, hidden), (wide,), (2,)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.gram, self.cross, self.total, self.counts

    @property
    def rows(self) -> float:
        return float(self.counts[0])

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(one + two for one, two in zip(self.parts, other.parts, strict=True)))

    def add(self, x: Float[Tensor, "row wide"], y: Float[Tensor, "row hidden"]) -> None:
        x, y = x.to(self.gram), y.to(self.gram)
        self.gram += x.T @ x
        self.cross += x.T @ y
        self.total += x.sum(0)
        self.counts += torch.stack([y.new_tensor(len(y)), y.square().sum()])

    def over_ranks(self, device: torch.device) -> Sums:
        """Added up over all ranks, which must all call it."""
        return Sums(*(add_up(part, device).to(part) for part in self.parts))

    def scaled(self, sizes: Float[Tensor, " wide"]) -> Sums:
        """Those of ``x / sizes``."""
        return Sums(self.gram / sizes / sizes[:, None], self.cross / sizes[:, None], self.total / sizes, self.counts)

    def unexplained(self, weights: Float[Tensor, "wide hidden"]) -> float:
        """Share of the targets' squared length that these weights leave."""
        explained = 2 * (weights * self.cross).sum() - (weights * (self.gram @ weights)).sum()
        return float(1 - explained / self.counts[1])


@dataclass
class Solution:
    """What a head starts from; the features' columns are those of the features as they come."""

    fc: Float[Tensor, "hidden features"]
    left: Float[Tensor, "hidden rank"]
    right: Float[Tensor, "rank hidden"]
    constant: Float[Tensor, " two_hidden"]
    """Of [normed embedding, normed state], near 1 at every row."""
    spread: float
    """Standard deviation of that inner product; a large one weakens the attention to the own position."""
    size: float
    """Root mean square of the targets."""
    penalty: float
    unexplained: float
    """On held-out texts, at full rank."""


def gather(
    head: Eagle3Head,
    passes: Passes,
    target: LanguageModel,
    texts: Texts,
    stop_ids: frozenset[int],
    ranks: Ranks,
    count: int = 0,
) -> tuple[Sums, Sums]:
    """This rank's sums over the texts that are fitted, and over those held out, of which each takes 8 bytes times
    (4 hidden) x (5 hidden): 2.5 GiB at a hidden size of 4096.

    Args:
        passes: of the expert and, if that is the target, the amateur.
        target: whose final states are regressed on the expert's features and embeddings.
        count: texts that are read at most; 0: all.
    Raises:
        UserError: NaN or inf, naming the texts.
    """
    expert = passes.models[0]
    device = torch.device("cpu") if expert.device.type == "mps" else expert.device  # which has no fp64
    wide = expert.hidden_size + head.config.feature_widths[0]
    hidden = head.config.hidden_size
    fitted, held_out = (Sums.zeros(wide, hidden, device) for _ in range(2))
    mine = range(ranks.rank, min(count or len(texts), len(texts)), ranks.world)
    for number in progress(mine, label="closed-form start", unit="texts"):
        batch = texts.batch([number])
        alignment = align(batch.texts, batch.spans, stop_ids)
        rows = alignment.rows[0, alignment.trained(0)].to(expert.device)
        if not len(rows):
            continue
        ids = batch.input_ids.to(expert.device)
        outputs = passes(batch, (True,) if target is expert else (True, False))
        features, states = outputs[0].features, outputs[-1].hidden
        with torch.no_grad():
            embeds = head.midlayer.input_layernorm(expert.embedding(ids[0, rows + 1]).to(head.dtype))
        x = torch.cat([embeds.double(), features[0, rows].double()], dim=1)
        sums = fitted if number % HELD_OUT else held_out
        sums.add(x, widened(states[0, rows + 1], hidden))
    return fitted, held_out


def solve(fitted: Sums, held_out: Sums, rank: int) -> Solution:
    """Ridge regression, its features' part fitted again beside the embedding's part of this rank.

    Raises:
        UserError: no rows to fit, or none to choose the penalty on.
    """
    if not fitted.rows or not held_out.rows:
        raise UserError(
            f"--start closed_form found {fitted.rows:.0f} drafting rows to fit and {held_out.rows:.0f} held out: give "
            "more training texts, or --start random"
        )
    both, hidden = fitted + held_out, fitted.cross.shape[1]
    sizes = (both.gram.diagonal() / both.rows).sqrt()
    sizes[:hidden] = 1
    sizes[hidden:].clamp_(min=max(float(sizes[hidden:].median()) / 1000, 1e-30))
    fitted, held_out, both = (sums.scaled(sizes) for sums in (fitted, held_out, both))
    left_over = [held_out.unexplained(ridge(penalised(fitted, penalty), fitted.cross)) for penalty in PENALTIES]
    penalty = PENALTIES[left_over.index(min(left_over))]
    gram, own, others = penalised(both, penalty), slice(hidden), slice(hidden, None)
    # the best of this rank: what is left out of the embedding's part costs no more than the features, fitted again
    # beside it, cannot give in its place
    whole = ridge(gram, both.cross)[own].T
    root = torch.linalg.cholesky(gram[own, own] - gram[own, others] @ ridge(gram[others, others], gram[others, own]))
    basis = torch.linalg.svd(whole @ root, full_matrices=False).U[:, :rank]
    cut = basis @ (basis.T @ whole)
    features = ridge(gram[others, others], both.cross[others] - gram[others, own] @ cut.T).T
    u, values, v = torch.linalg.svd(cut, full_matrices=False)
    # the larger sign of each direction is set, else rounding could turn it from one run to the next
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    root = values[:rank].sqrt()
    constant, spread = constant_of(both, features)
    return Solution(
        fc=features / sizes[others],
        left=(u * signs)[:, :rank] * root,
        right=root[:, None] * (v * signs.T)[:rank],
        constant=constant,
        spread=spread,
        size=math.sqrt(float(both.counts[1]) / both.rows / hidden),
        penalty=penalty,
        unexplained=min(left_over),
    )


def penalised(sums: Sums, penalty: float) -> Float[Tensor, "wide wide"]:
    gram = sums.gram.clone()
    gram.diagonal().add_(penalty * gram.diagonal().mean())
    return gram


def ridge(gram: Float[Tensor, "wide wide"], cross: Float[Tensor, "wide out"]) -> Float[Tensor, "wide out"]:
    """Weights of the regressors, from a penalised Gram matrix."""
    return torch.cholesky_solve(cross, torch.linalg.cholesky(gram))


def constant_of(sums: Sums, features: Float[Tensor, "hidden features"]) -> tuple[Float[Tensor, " two_hidden"], float]:
    """The direction of [normed embedding, normed state] whose inner product with every row is nearest to 1, and the
    standard deviation of that product.

    States are taken to be of one size, so that the sums are enough.
    """
    hidden = len(features)
    state_gram = features @ sums.gram[hidden:, hidden:] @ features.T
    features = features / (state_gram.trace() / sums.rows / hidden).sqrt()
    reads = torch.block_diag(torch.eye(hidden).to(features), features)
    seen = Sums(reads @ sums.gram @ reads.T, reads @ sums.total[:, None], reads @ sums.total, sums.counts)
    found = ridge(penalised(seen, 0.01), seen.cross)[:, 0]
    found = found * sums.rows / (found @ seen.total)
    return found, math.sqrt(max(float(found @ seen.gram @ found) / sums.rows - 1, 0.0))


def own_position(head: Eagle3Head, positions: int) -> tuple[int, float]:
    """How a query that equals its key attends to its own position: the number of fastest rotary pairs to use, and the
    logit to give them.

    The weakest logit that keeps the weight of all other positions of a text below :data:`LEAK`: constants are only
    nearly constant, and what they lack is multiplied by it.

    Raises:
        UserError: a head_dim that has too few pairs for it.
    """
    inverse = head.rotary.inverse.double().cpu()
    angles = torch.arange(1, max(positions, 2), dtype=torch.float64)[:, None] * inverse
    similarity = angles.cos().cumsum(1) / torch.arange(1, len(inverse) + 1)
    logit = 1.0
    while (leaks := torch.exp(logit * (similarity - 1)).sum(0)).min() > LEAK:
        logit *= 1.05
        if logit > 1e4:
            raise UserError(
                f"unsupported: --start closed_form with a head_dim of {head.config.head_dim}, whose rotary positions "
                f"cannot be told apart over {positions} tokens; give --start random"
            )
    return int(leaks.argmin()) + 1, logit


def groups_used(head: Eagle3Head) -> int:
    """Key/value groups that carry the embedding: for a rank of about a quarter of the hidden size, and one is left free
    where there are several."""
    config = head.config
    wanted = math.ceil(config.hidden_size / 4 / config.head_dim)
    return min(wanted, max(1, config.num_key_value_heads - 1))


@torch.no_grad()
def put(head: Eagle3Head, solution: Solution, norm: float, positions: int) -> None:
    """Make it the head's start.

    Args:
        norm: scale of the final norm, in sizes of the targets.
        positions: length of the longest text.
    """
    config, attention = head.config, head.midlayer.self_attn
    hidden, dim, kv_heads = config.hidden_size, config.head_dim, config.num_key_value_heads
    head.fc.weight.zero_()[:, : solution.fc.shape[1]] = solution.fc
    head.norm.weight.fill_(norm * solution.size)
    for block in head.blocks:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    pairs, logit = own_position(head, positions)
    same = solution.constant * math.sqrt(logit * math.sqrt(dim) / pairs) / head.rotary.factor
    queries = attention.q_proj.weight.view(kv_heads, -1, dim, 2 * hidden)
    keys = attention.k_proj.weight.view(kv_heads, dim, 2 * hidden)
    values = attention.v_proj.weight.view(kv_heads, dim, 2 * hidden)
    outputs = attention.o_proj.weight.view(hidden, kv_heads, -1, dim)
    parts = zip(solution.right.split(dim), solution.left.split(dim, dim=1), strict=True)
    for group, (right, left) in enumerate(parts):
        # only the queries' further dimensions stay random: the logits are exact, and both sides can learn
        keys[group] = 0
        keys[group, :pairs] = same
        queries[group, :, :pairs] = same
        values[group, : len(right)] = torch.cat([right, torch.zeros_like(right)], dim=1)
        outputs[:, group, :, : len(right)] = left[:, None] / queries.shape[1]


def start_in_closed_form(
    heads: Sequence[Eagle3Head],
    passes: Passes,
    texts: Texts,
    stop_ids: frozenset[int],
    ranks: Ranks,
    norm: float = 0.0,
    count: int = 0,
) -> None:
    """Give fresh heads of one shape this start; every rank must call it.

    A head that is aligned with the amateur predicts the amateur's states, and gets its output rows; all others, those
    aimed at a contrast too, predict the expert's, so that heads of one seed start as one function. For the same reason
    an amateur's columns of ``fc`` stay zero.

    Args:
        norm: of the final norm, in sizes of the final states; 0: that of least cross-entropy.
        count: texts that are read at most; 0: all.
    Raises:
        UserError: a head that is not supported, an amateur of a larger hidden size, or too few texts.
    """
    for model in passes.models:
        expert = model is passes.models[0]
        mine = [head for head in heads if (head.config.aligned_with == "amateur") != expert]
        if not mine:
            continue
        refuse(mine[0], model)
        local = gather(mine[0], passes, model, texts, stop_ids, ranks, count)
        fitted, held_out = (sums.over_ranks(ranks.device) for sums in local)
        solution = solve(fitted, held_out, groups_used(mine[0]) * mine[0].config.head_dim)
        for head in mine:
            put(head, solution, norm or 1.0, max(texts.lengths))
            if not expert:
                rows = model.output.rows()
                chosen = rows[head.target_ids.to(rows.device)]
                head.lm_head.weight.data.copy_(widened(chosen, head.config.hidden_size))
        if not norm:  # once for all: they are one function
            numbers = range(0, min(count or len(texts), len(texts)), HELD_OUT)
            scale = calibrate(mine[0], passes, texts, numbers, stop_ids, ranks)
            for head in mine:
                head.norm.weight.data.mul_(scale)
        if ranks.first:
            print(
                f"closed-form start: {fitted.rows + held_out.rows:.0f} rows, ridge penalty {solution.penalty:g}, "
                f"explains {1 - solution.unexplained:.0%} of held-out states; keys of own position vary by "
                f"{solution.spread:.0%}; final norm {norm or scale:.2f} of the states' size",
                flush=True,
            )


def refuse(head: Eagle3Head, target: LanguageModel) -> None:
    """Raises UserError for a head that cannot be started so."""
    fields = [name for name in UNSUPPORTED if getattr(head.config, name)]
    if fields:
        raise UserError(f"unsupported: --start closed_form for a head with {', '.join(fields)}; give --start random")
    if target.hidden_size > head.config.hidden_size:
        raise UserError(
            f"unsupported: --start closed_form for a head that imitates {target.name}, whose states have "
            f"{target.hidden_size} numbers, more than the head's {head.config.hidden_size}; give --start random"
        )


def widened(states: Float[Tensor, "row target"], hidden: int) -> Float[Tensor, "row hidden"]:
    """A smaller model's states, or output rows, as a head's: further numbers are zero, so that logits are the same."""
    return F.pad(states, (0, hidden - states.shape[-1]))
