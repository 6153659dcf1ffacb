"""Lazy judging: with a cutoff, the amateur is asked only where, and about what, it can change something.

Three exact savings, for vanilla contrastive decoding as well as for drafts:

* Where the plausible set of a row is a single id, the target is that id whatever the amateur says. The walk from the
  root follows such rows; only if it reaches a row with a larger set does the amateur run. Rounds that never reach one
  emit their tokens at once, and the amateur reads these tokens with its next pass.
* A node outside its parent's plausible set cannot be accepted, nor can what hangs below it: the amateur skips them.
* The amateur's normaliser cancels under the target's own, so only its logits at plausible ids are computed.

The decision needs the expert's rows on the host, so a round takes a second copy from device to host.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.batch import Batch
from dcd_core.contrast import plausible
from dcd_core.decode_types import Generation
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import RoundNoise
from dcd_core.errors import UserError
from dcd_core.rounds import Clock, PassInputs, along_path, commit_draft, plausible_ids, rows_on_ids, target_rows
from dcd_core.verify import Verdict, verify


class LazyBatch(Batch):
    """A batch whose amateur lags behind until a plausible set has more than one id."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.settings.target.cutoff == 0:
            raise UserError(
                "saving lazy needs a cutoff above 0: without one every id is plausible and nothing is saved"
            )
        self.pending: list[list[int]] = [[] for _ in self.prompts]  # tokens of each row that the amateur has not read

    def round(self) -> list[tuple[Generation, list[int]]]:
        """Draft, expert pass, then the amateur if some row's walk needs it: at least one token for every row."""
        clock = Clock(self.device, self.settings.timing)
        noise, draft = self._draft(clock)
        inputs = PassInputs.of(self.root, draft)
        output = inputs.run(self.scorers[0].model, self.caches[0], bool(self.drafter.feature_scorers))
        clock.lap("expert")
        allowed = plausible(output.logits, self.settings.target.cutoff)
        reach = reachable(allowed, draft)
        plausible_count = allowed.sum(-1)
        open_rows = (reach & (plausible_count > 1)).any(1)
        survey = torch.cat([self.root[:, None], open_rows[:, None], reach], dim=1).tolist()  # this round's first copy
        roots, asked = [row[0] for row in survey], any(row[1] for row in survey)
        clock.lap("rest")
        seen = self._seen_after(draft, draft.nodes + 1)
        if asked:
            feed = Feed(self.pending, [row[2:] for row in survey], inputs, draft)
            judged, bad = self._ask(feed, output.logits, allowed & reach[..., None], seen)
            clock.lap("amateur")
        else:
            judged, bad = target_rows([output.logits], self.settings.target.provisional(), seen)
        # no comparison with NaN holds: a row with one has no plausible id at all, and the few ids asked may not show it
        bad = bad | (plausible_count == 0).any(1)
        host, verdict = self._verdict(judged, bad, draft, noise)
        counts = [row[3] + 1 for row in host]
        if asked:
            for cache in self.caches[1:]:
                feed.commit(cache, draft, verdict, counts)
            self.pending = [[] for _ in counts]
        else:
            for row, root, line, count in zip(self.pending, roots, host, counts, strict=True):
                row += [root, *line[4 : 3 + count]]
        commit_draft(self.caches[0], draft, verdict, counts)
        features = None if output.features is None else along_path(output.features, draft, verdict)
        self._tell(verdict, host, counts, features)
        self.root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        return self._account(host, [False] * len(host), clock, amateur_passes=int(asked))

    def _verdict(
        self, judged: Tensor, bad: Bool[Tensor, " batch"], draft: Draft, noise: RoundNoise
    ) -> tuple[list[list[int]], Verdict]:
        verdict = verify(judged, draft, self._uniforms(judged, draft, noise))
        if self.drafter.suspect is not None:
            bad = bad | self.drafter.suspect
        host = self._to_host(bad, draft, verdict)
        self._refuse_bad([row[1] for row in host])
        return host, verdict

    def _ask(self, feed: Feed, expert: Float[Tensor, "batch width vocab"], relevant: Tensor, seen: Tensor | None):
        """One pass of every other model over what it has not read and what can still be accepted."""
        hidden = [
            feed.run(scorer.model, cache) for scorer, cache in zip(self.scorers[1:], self.caches[1:], strict=True)
        ]
        models = [scorer.model for scorer in self.scorers[1:]]
        return rows_on_ids(expert, hidden, models, plausible_ids(relevant), self.settings.target, seen)

    def absorb(self, other: LazyBatch) -> None:
        super().absorb(other)
        self.pending = self.pending + other.pending

    def _keep(self, keep: list[int]) -> None:
        super()._keep(keep)
        self.pending = [self.pending[index] for index in keep]


def reachable(allowed: Bool[Tensor, "batch width vocab"], draft: Draft) -> Bool[Tensor, "batch width"]:
    """Which of [root, nodes] can still be accepted: every token on the way is in the plausible set before it."""
    index = (draft.parents + 1) * allowed.shape[2] + draft.tokens
    possible = allowed.flatten(1).gather(1, index) & draft.valid
    possible = torch.nn.functional.pad(possible, (1, 0), value=True)
    return ~(draft.ancestor_mask() & ~possible[:, None]).any(-1)


class Feed:
    """What a lagging model reads: a row's unread tokens, its root, and the nodes that can still be accepted.

    Args:
        pending: unread tokens of every row. ``reach``: per row, which of [root, nodes] are read.
    """

    def __init__(self, pending: list[list[int]], reach: list[list[int]], inputs: PassInputs, draft: Draft):
        device = inputs.tokens.device
        columns = [[column for column, read in enumerate(row) if read] for row in reach]
        self.lag = [len(row) for row in pending]
        width = max(lag + len(row) for lag, row in zip(self.lag, columns, strict=True))
        most = max(self.lag)
        source, place, column_of = [], [], []
        for unread, row in zip(pending, columns, strict=True):
            line = [*range(len(unread)), *(most + column for column in row)]
            source.append(line + [most] * (width - len(line)))
            column_of.append([-1] * len(unread) + row + [-1] * (width - len(line)))
            where = {column: len(unread) + index for index, column in enumerate(row)}
            place.append([where.get(column, len(unread)) for column in range(inputs.tokens.shape[1])])
        old = torch.tensor([row + [0] * (most - len(row)) for row in pending], dtype=torch.int64, device=device)
        old = old.view(len(pending), most)
        self.tokens = torch.cat([old, inputs.tokens], dim=1).gather(1, torch.tensor(source, device=device))
        self.place = torch.tensor(place, device=device)
        self.mask, self.depths = self._mask(torch.tensor(column_of, device=device), draft)

    def _mask(self, column: Int[Tensor, "batch width"], draft: Draft) -> tuple[Tensor, Tensor]:
        batch, width = column.shape
        ancestors = draft.ancestor_mask()
        known = column.clamp_min(0)
        among = ancestors.gather(1, known[..., None].expand(-1, -1, ancestors.shape[2]))
        among = among.gather(2, known[:, None].expand(-1, width, -1))
        index = torch.arange(width, device=column.device)
        lag = torch.tensor(self.lag, device=column.device)[:, None]
        old, node = index < lag, column >= 0
        causal = index <= index[:, None]
        mask = torch.where(old[:, None], causal, among & node[:, :, None] & node[:, None])
        depth = (ancestors.sum(-1) - 1).gather(1, known)
        # padding sees itself only
        return mask | torch.eye(width, dtype=torch.bool, device=column.device), torch.where(node, lag + depth, index)

    def run(self, model, cache) -> Float[Tensor, "batch width hidden"]:
        """The final states of [root, nodes]; those of nodes that were not read are some other row's."""
        hidden = model.forward(self.tokens, cache, tree_mask=self.mask, depths=self.depths, logits=False).hidden
        return hidden.gather(1, self.place[..., None].expand(-1, -1, hidden.shape[2]))

    def commit(self, cache, draft: Draft, verdict: Verdict, counts: list[int]) -> None:
        """Keep the unread tokens, the root and the accepted nodes."""
        kept = [lag + count for lag, count in zip(self.lag, counts, strict=True)]
        if draft.linear:  # what can be accepted of a chain is its beginning, which stands in order
            cache.commit(kept)
            return
        lag = torch.tensor(self.lag, device=self.place.device)[:, None]
        index = torch.arange(max(kept), device=self.place.device)[None]
        step = (index - lag).clamp(0, verdict.path.shape[1] - 1)
        cache.commit_path(torch.where(index < lag, index, self.place.gather(1, verdict.path.gather(1, step))), kept)
