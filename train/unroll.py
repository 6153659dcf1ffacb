"""Training-time test of EAGLE3 [Li et al. 2025, arXiv 2503.01840]: which rows are trained at which step, and the loss.

The shift and the mask live in :func:`align` and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dcd_core.contrast import Target, scores
from dcd_core.heads.packed import Packed, moved
from dcd_core.heads.row_attention import recomputed

LOGIT_BUDGET = 2**25
"""Most logits (rows x vocabulary) worked on at once, in elements; longer batches go in chunks."""
METRICS = ("loss", "correct", "acceptance", "rows")
"""Columns of the sums that :func:`unroll_loss` returns for each step."""


@dataclass
class Alignment:
    """Rows to unroll and how far, for a micro-batch whose texts stand in one row, one after the other (see
    :func:`align`)."""

    rows: Int[Tensor, "1 row"]
    """Root rows t of all texts, as places in the packed row, ascending; row 0 if there is none."""
    last_step: Int[np.ndarray, " row"]
    """Last step that is trained at each; -1 for the row that stands for none. On the host, as all that follows from it:
    the device is not asked which rows are trained."""
    packed: Packed

    def trained(self, step: int) -> Int[Tensor, " trained"]:
        """Which of the rows are trained at this step."""
        return torch.from_numpy(np.flatnonzero(self.last_step >= step))

    def trained_at(self, steps: int) -> list[Tensor]:
        """Those of steps 0, 1, ... on the rows' device, moved there at once."""
        found = [self.trained(step) for step in range(steps)]
        return list(moved(torch.cat(found), self.rows.device).split([len(some) for some in found]))

    def to(self, device: torch.device) -> Alignment:
        return Alignment(moved(self.rows, device), self.last_step, self.packed.to(device))


def last_target(ids, span: tuple[int, int], stop_ids: frozenset[int]) -> int:
    """Last position of an answer ``[start, end)`` from which a draft is still wanted.

    That is the token before the end-of-turn token, or the last token of an answer that was cut by length and has none.
    """
    start, end = span
    return end - 2 if end > start and int(ids[end - 1]) in stop_ids else end - 1


def align(texts: list, spans: list[list[tuple[int, int]]], stop_ids: frozenset[int]) -> Alignment:
    """The rows that are trained, and up to which step.

    Tokens ``x_0 .. x_{T-1}``, fused feature ``g_t`` of the position that reads ``x_t``, expert logits ``L_t`` (they
    predict ``x_{t+1}``). Row ``t`` of step ``i``:

    ====  =========================  =======================  ========  ==================
    step  token (embedded)           state                    position  learns
    ====  =========================  =======================  ========  ==================
    0     ``x_{t+1}``                ``fc(g_t)``              ``t``     ``L_{t+1}``
    i     ``x_{t+1+i}``              row t of step ``i - 1``  ``t+i``   ``L_{t+1+i}``
    ====  =========================  =======================  ========  ==================

    It is trained iff ``x_{t+1} .. x_{t+1+i}`` are all tokens of one answer, ``x_{t+1+i}`` is not its end-of-turn token,
    and ``t+1+i <= T-1``. So the first root of an answer ``[s, e)`` is ``t = s-1`` (the first row used in decoding), and
    root ``t`` is trained for steps ``0 .. last - (t+1)``, where ``last`` is the answer's last token that is not its
    end-of-turn (an answer cut by length has none: stop ids decide). Example: T = 6, prompt of 3, ``x_5`` end-of-turn::

        position   0  1  2  3  4  5
        token      p  p  p  a  a  end
        step 0           t  t               t = 2 learns L_3, t = 3 learns L_4
        step 1           t                  t = 2 learns L_4
        step 2                              none

    The looser rule "``x_{t+1+i}`` is assistant text" would also train rows 0 and 1, which never draft, and what
    follows the end of a turn.

    Args:
        texts: the token ids of each text of the batch.
        spans: its answers as ``[start, end)``, end-of-turn token included where there is one.
        stop_ids: ids that end a turn.
    """
    roots, lasts = [], []
    for ids, answers in zip(texts, spans, strict=True):
        own_roots = [np.zeros(0, np.int64)]
        for start, end in sorted(answers):
            last = last_target(ids, (start, end), stop_ids)
            # x_0 has no feature before it, so an answer that starts the text begins to be drafted one token later
            first_tokens = np.arange(max(start, 1), last + 1)
            own_roots.append(first_tokens - 1)
            lasts.append(last - first_tokens)
        roots.append(np.concatenate(own_roots))
    if not sum(map(len, roots)):
        # a rank without rows still takes part in the step, with zero gradients of every weight
        roots[0], lasts = np.zeros(1, np.int64), [np.full(1, -1)]
    lengths = [len(ids) for ids in texts]
    starts = np.cumsum([0, *lengths[:-1]])
    rows = np.concatenate([own + start for own, start in zip(roots, starts, strict=True)])
    return Alignment(torch.from_numpy(rows)[None], np.concatenate(lasts), Packed.of(lengths, roots))


def following(ids: Int[Tensor, " token"]) -> Int[Tensor, " token"]:
    """``x_{t+1}`` at every t; what stands at a text's last token is seen by no earlier row."""
    return torch.cat([ids[1:], ids[-1:]])


def count_rows(ids, spans: list[tuple[int, int]], stop_ids: frozenset[int], steps: int) -> list[int]:
    """Number of trained rows of one text at each step, without building them: the loss needs it before the forward."""
    lengths = [last_target(ids, span, stop_ids) - max(span[0], 1) + 1 for span in spans]
    return [sum(max(0, length - step) for length in lengths) for step in range(steps)]


@dataclass(frozen=True)
class Aim:
    """What a head is to imitate: pi_CD(alpha) [DCD, Eq. 1], which is the expert at alpha 0; with alpha None the amateur
    itself."""

    alpha: float | None = 0.0

    @property
    def reads_amateur(self) -> bool:
        return self.alpha != 0

    def scores(self, rows: list[Float[Tensor, "*batch vocab"]]) -> Float[Tensor, "*batch vocab"]:
        """Un-normalised scores from the rows of the expert and, where it is read, the amateur."""
        return rows[1] if self.alpha is None else scores(rows[: 1 + self.reads_amateur], Target(alpha=self.alpha))


EXPERT = Aim(0.0)
MASK_RULE = "rows whose expert argmax over the whole vocabulary is a draft id, whatever a head imitates"
"""Which of the aligned rows give a loss. By the expert for every target: else the losses of a family that differs in
nothing but its targets would see different positions."""


@dataclass
class Targets:
    """What a head learns at the tokens that root rows pair with: from ``L_{t+1}`` for the M real roots, in their order.

    Step ``i`` of a root learns the entry ``i`` places further (roots of one answer are consecutive).
    """

    probs: Float[Tensor, "entry draft"]
    """softmax(L[t2d]): the target renormalised on the draft vocabulary."""
    inside: Bool[Tensor, " entry"]
    """Is the expert's argmax over its whole vocabulary a draft id? (:data:`MASK_RULE`)"""
    mass: Float[Tensor, " entry"]
    """Probability that the target gives to the draft vocabulary as a whole."""


@torch.no_grad()
def draft_targets(
    output_layers: Sequence[Callable[[Tensor], Tensor]],
    hidden: Sequence[Float[Tensor, "1 position hidden"]],
    alignment: Alignment,
    target_ids: Int[Tensor, " draft"],
    aims: Sequence[Aim] = (EXPERT,),
    width: int = 0,
) -> list[Targets]:
    """Target rows at the drafted tokens for several aims from one pass of each model's output layer, a chunk of
    positions at a time: T x V logits never exist at once.

    Args:
        output_layers: of the expert and, if an aim reads it, the amateur: hidden states to logits over the real ids.
        hidden: their last hidden states (after the final norm).
        target_ids: expert id of each draft id.
        width: one more than the largest of them; 0: the device is asked.
    """
    [real] = alignment.trained_at(1)
    places = alignment.rows[0, real] + 1
    width = width or int(target_ids[-1]) + 1
    chunk = max(1, LOGIT_BUDGET // width)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in aims]
    inside = []
    for states in zip(*(some[0, places].split(chunk) for some in hidden), strict=True):
        rows = [layer(some) for layer, some in zip(output_layers, states, strict=True)]
        inside.append(_on_draft(rows[0], target_ids, width).max(dim=-1).values == rows[0].max(dim=-1).values)
        for aim, found in zip(aims, parts, strict=True):
            logits = aim.scores(rows)
            draft = _on_draft(logits, target_ids, width)
            found.append((torch.softmax(draft, dim=-1), (draft.logsumexp(-1) - logits.logsumexp(-1)).exp()))
    return [
        Targets(torch.cat([p for p, _ in found]), torch.cat(inside), torch.cat([m for _, m in found]))
        for found in parts
    ]


def _on_draft(logits: Tensor, target_ids: Tensor, width: int) -> Tensor:
    """Rows over the draft ids. A head on a padded vocabulary may hold ids that no tokenizer has: nobody says them."""
    return F.pad(logits, (0, max(0, width - logits.shape[1])), value=-float("inf"))[:, target_ids]


def row_sums(
    logits: Float[Tensor, "entry draft"],
    probs: Float[Tensor, "entry draft"],
    inside: Bool[Tensor, " entry"],
    mass: Float[Tensor, " entry"],
    rejection_weight: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Summed loss, correct rows and acceptance over some rows of one step.

    Rows whose expert argmax lies outside the draft vocabulary give no loss and count as wrong; acceptance is
    sum min(p, e) with the expert's p over its whole vocabulary.

    Args:
        rejection_weight: of the chance of rejection, 1 - sum min(p, e) = TV(p, e), in the loss; the rest is
            cross-entropy's.
    """
    probs = probs.to(logits.dtype)
    loss = F.cross_entropy(logits, probs, reduction="none")
    with nullcontext() if rejection_weight else torch.no_grad():
        accepted = torch.minimum(probs * mass[:, None].to(logits.dtype), logits.softmax(-1)).sum(-1)
    if rejection_weight:
        loss = (1 - rejection_weight) * loss + rejection_weight * (1 - accepted)
    correct = (inside & (logits.argmax(-1) == probs.argmax(-1))).sum().to(logits.dtype)
    return torch.where(inside, loss, 0.0).sum(), correct, accepted.detach().sum()


def logit_pieces(rows: int, ids: int) -> int:
    """In how many pieces so many rows of logits are made."""
    return max(1, math.ceil(rows / max(1, LOGIT_BUDGET // ids)))


class Unroll(nn.Module):
    """The trained module: a head and its training-time test, as one forward.

    Args:
        head: the Eagle3Head.
        steps: unroll depth.
        decay: weight of step i is decay ** i (EAGLE3: .8).
        pieces: in how many pieces the logits of every step are made; 0: as few as :data:`LOGIT_BUDGET` allows. Where
            ranks share the weights of the output layer (ZeRO 3), each piece is a collective call, and a rank that made
            another number of them than its neighbours would wait for them for ever.
        rejection_weight: see :func:`row_sums`.
        sizes: of the features. The head reads features of size one, and its ``fc`` is that of such: some channels are a
            hundred times larger than others, and Adam steps are equal in all. None: as they come.
        recompute: keep less for the backward pass: blocks are run again there.
    """

    def __init__(
        self,
        head: nn.Module,
        steps: int,
        decay: float = 0.8,
        pieces: int = 0,
        rejection_weight: float = 0.0,
        sizes: Float[Tensor, " features"] | None = None,
        recompute: bool = False,
    ):
        super().__init__()
        self.head = head
        self.register_buffer("sizes", sizes)
        if sizes is not None:
            with torch.no_grad():
                head.fc.weight.mul_(sizes)
        self.steps = steps
        self.decay = decay
        self.pieces = pieces
        self.rejection_weight = rejection_weight
        self.recompute = recompute
        self.row_sums = row_sums

    def forward(
        self,
        features: Float[Tensor, "1 position features"],
        embeds: Float[Tensor, "1 position hidden"],
        alignment: Alignment,
        targets: Targets,
        denominators: list[float],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "step 4"]]:
        """One micro-batch's share of the optimiser step's loss, and the sums behind the metrics.

        Args:
            embeds: embedded ``x_{t+1}`` at every ``t``.
            denominators: per step, what the summed loss of the *whole* optimiser step is divided by.
        Returns:
            ``sum_i decay**i * sum of losses of step i / denominators[i]``, and :data:`METRICS` per step as sums.
        """
        rows = alignment.rows

        def truth(step: int, _state: Tensor) -> Tensor:
            # a root that is not trained any more may read the next text's tokens: nothing depends on it
            return embeds.index_select(1, (rows[0] + step).clamp_max(embeds.shape[1] - 1))

        if self.sizes is not None:
            features = features / self.sizes.to(features.dtype)
        states = self.head.unroll(
            features, embeds, rows, self.steps, truth, packed=alignment.packed, recompute=self.recompute
        )
        total, sums = 0.0, []
        for step, (state, trained) in enumerate(zip(states, alignment.trained_at(self.steps), strict=True)):
            loss, correct, accepted = self._step(state[0].index_select(0, trained), trained + step, targets)
            total = total + self.decay**step * loss / max(denominators[step], 1)
            count = loss.new_full((), len(trained))
            sums.append(torch.stack([loss.detach(), correct, accepted, count]))
        return total, torch.stack(sums)

    def _step(self, states: Tensor, entries: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`row_sums` in chunks; the logits of a chunk are made again in the backward pass."""
        pieces = self.pieces or logit_pieces(states.shape[0], targets.probs.shape[1])
        if pieces == 1:
            return self._chunk(states, entries, targets)
        parts = []
        for some, where in zip(states.tensor_split(pieces), entries.tensor_split(pieces), strict=True):
            parts.append(recomputed(self._chunk, some, where, targets))
        return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))

    def _chunk(self, states: Tensor, entries: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
        chosen = targets.probs[entries], targets.inside[entries], targets.mass[entries]
        return self.row_sums(self.head.logits(states), *chosen, self.rejection_weight)
