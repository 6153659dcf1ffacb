"""Deferred judging: expert rounds run ahead on provisional tokens, and one amateur pass judges the whole block.

The contrast seldom changes the expert's choice, so most amateur passes only confirm. Here the expert and the drafter go
on by themselves, writing what the target would write if every model agreed (argmax p at T = 0, argmax(log p + g) under
shared noise, x ~ p otherwise). When a token is likely enough to fall (:mod:`dcd_core.flip_risk`), at a stop token and
at the budget, the amateur reads the block in one pass. The block is then a chain whose every row is known, and the one
verifier judges it: at T = 0 and under shared noise tokens stay while they are the target's own; in plain sampling x is
kept with min(1, pi / p) and replaced from (pi - p)+. At the first token that falls, the target's takes its place and
everything after it is taken back, in every cache and in the drafter.

When the amateur is called is free: the output is that of a judgement after every token. Provisional tokens are shown
to nobody. A round, in the records, is a block: drafted = provisional tokens, accepted = those that stood.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dcd_core.batch import Batch
from dcd_core.contrast import scores, target_log_probs
from dcd_core.decode_types import Generation, Round
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import Accepted, RoundNoise
from dcd_core.flip_risk import flip_risk, margin_of, refusal_risk
from dcd_core.rounds import Clock, PassInputs, along_path, commit_draft, target_rows
from dcd_core.sampling import JUDGE_ACCEPT, JUDGE_FINAL
from dcd_core.seen import Seen
from dcd_core.verify import Uniforms, Verdict, shared_noise_scores, verify

MILLION = 1_000_000  # risks come to the host as whole millionths, in the round's one copy


class Block:
    """Provisional tokens of every row since the amateur was last asked."""

    def __init__(self, rows: int):
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.stands = [1.0] * rows  # estimated probability that all of a row's tokens stand
        self.counts: list[list[int]] = []
        self.chunks: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(
        self,
        accepted: Accepted,
        rows: Float[Tensor, "batch width vocab"],
        risks: list[list[float]],
    ) -> None:
        """What one expert round wrote, with the expert's row before every token."""
        width = max(accepted.counts)
        features = None if accepted.features is None else accepted.features[:, :width]
        self.chunks.append((accepted.tokens[:, :width], rows[:, :width], features))
        self.counts.append(accepted.counts)
        for index, (new, risk) in enumerate(zip(accepted.host_tokens, risks, strict=True)):
            self.tokens[index] += new
            for value in risk:
                self.stands[index] *= 1.0 - value

    def gather(self, lengths: list[int]) -> tuple[Int[Tensor, "batch width"], Tensor, Tensor | None]:
        """Tokens, expert rows and features of the first ``lengths[b]`` tokens of every row, padded by repetition."""
        places: list[list[int]] = [[] for _ in lengths]
        start = 0
        for (tokens, _, _), counts in zip(self.chunks, self.counts, strict=True):
            for row, count in zip(places, counts, strict=True):
                row += range(start, start + count)
            start += tokens.shape[1]
        width = max(lengths)
        padded = [(row[:length] + [0] * width)[:width] for row, length in zip(places, lengths, strict=True)]
        parts = [None if column[0] is None else torch.cat(column, dim=1) for column in zip(*self.chunks, strict=True)]
        if all(row == list(range(width)) for row in padded):  # they stand in order, as those of a single row do
            tokens, *others = (None if part is None else part[:, :width] for part in parts)
            return tokens, *others
        index = torch.tensor(padded, device=parts[0].device)
        rows = torch.arange(len(lengths), device=index.device)[:, None]
        tokens, *others = (None if part is None else part[rows, index] for part in parts)
        return tokens, *others


class DeferredBatch(Batch):
    """A batch whose rounds are blocks: expert rounds ahead, then one amateur pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        target = self.settings.target
        self.ahead = target.provisional()
        self.weight = target.contrast_weight(len(self.scorers))
        self.block = Block(0)
        self.seen_before: Seen | None = None  # the ids of every row's prefix without its block

    def round(self) -> list[tuple[Generation, list[int]]]:
        """Run ahead until the amateur is due, then judge: at least one token for every row."""
        clock = Clock(self.device, self.settings.timing)
        self.block = Block(len(self.active))
        self.seen_before = None if self.seen is None else self.seen.copy()
        start, root, passes = list(self.caches[0].lengths), self.root, 0
        while not self._due():
            self._run_ahead(clock)
            passes += 1
        return self._judge_block(start, root, passes, clock)

    def _written(self) -> list[int]:
        known = super()._written()
        pending = self.block.tokens or [[]] * len(known)
        return [count + len(tokens) for count, tokens in zip(known, pending, strict=True)]

    def _lengths(self) -> list[int]:
        """How much of each row's block counts: what lies past a stop token or the budget does not."""
        lengths = []
        for generation, tokens in zip(self.active, self.block.tokens, strict=True):
            left = self.settings.max_new_tokens - len(generation.ids)
            stop = next((place for place, token in enumerate(tokens) if token in self.settings.stop_ids), len(tokens))
            lengths.append(min(stop + 1, len(tokens), left))
        return lengths

    def _due(self) -> bool:
        tokens, deferral = self.block.tokens, self.settings.deferral
        if not tokens[0]:
            return False
        for generation, pending, length in zip(self.active, tokens, self._lengths(), strict=True):
            ends = pending[length - 1] in self.settings.stop_ids
            if ends or len(generation.ids) + length >= self.settings.max_new_tokens or len(pending) >= deferral.most:
                return True
        falls = sum(1.0 - stands for stands in self.block.stands) / len(tokens)
        theta = self.drafter.asks_at()
        return falls >= (deferral.theta if theta is None else theta)

    # ---- ahead ---------------------------------------------------------------------------------------------------

    def _run_ahead(self, clock: Clock) -> None:
        """One round of expert and drafter alone."""
        noise, draft = self._draft(clock)
        inputs = PassInputs.of(self.root, draft)
        output = inputs.run(self.scorers[0].model, self.caches[0], bool(self.drafter.feature_scorers))
        clock.lap("expert")
        seen = self._seen_after(draft, draft.nodes + 1)
        judged, bad = target_rows([output.logits], self.ahead, seen)
        if self.drafter.suspect is not None:
            bad = bad | self.drafter.suspect
        verdict = verify(judged, draft, self._uniforms(judged, draft, noise))
        risk = self._risk(output.logits, judged, draft, noise, seen)
        risk = along_path(risk[..., None], draft, verdict).squeeze(-1)
        columns = [bad[:, None], verdict.accepted[:, None], verdict.tokens, (risk * MILLION).long()]
        host = torch.cat(columns, dim=1).tolist()  # the expert round's one copy from device to host
        self._refuse_bad([row[0] for row in host])
        counts = [row[1] + 1 for row in host]
        width = verdict.tokens.shape[1]
        self._note(verdict.tokens)
        self.root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        commit_draft(self.caches[0], draft, verdict, counts)
        features = None if output.features is None else along_path(output.features, draft, verdict)
        emitted = [row[2 : 2 + count] for row, count in zip(host, counts, strict=True)]
        accepted = Accepted(verdict.tokens, counts, emitted, features)
        self.drafter.observe(accepted)
        risks = [
            [value / MILLION for value in row[2 + width : 2 + width + count]]
            for row, count in zip(host, counts, strict=True)
        ]
        self.block.add(accepted, along_path(output.logits, draft, verdict), risks)
        clock.lap("rest")

    def _risk(
        self, logits: Tensor, judged: Tensor, draft: Draft, noise: RoundNoise, seen: Tensor | None
    ) -> Float[Tensor, "batch rows"]:
        """Estimated probability, for the row after every node, that the amateur changes what the expert writes."""
        temperature, deferral = self.settings.target.temperature, self.settings.deferral
        if temperature == 0:
            margin = margin_of(scores([logits], self.ahead, seen))
        elif self.rule == "shared_noise":
            margin = margin_of(shared_noise_scores(judged, draft, noise.gumbel(judged.shape[-1])))
        else:
            return refusal_risk(judged.amax(-1), self.weight, temperature, deferral)
        return flip_risk(margin, self.weight, temperature, deferral)

    # ---- judgement -----------------------------------------------------------------------------------------------

    def _judge_block(
        self, start: list[int], root: Int[Tensor, " batch"], passes: int, clock: Clock
    ) -> list[tuple[Generation, list[int]]]:
        """One amateur pass over the block, the verdict, and the way back to what stands.

        Args:
            start: lengths of the expert's rows before the block.
            root: the last token before it.
        """
        lengths = self._lengths()
        tokens, expert_rows, features = self.block.gather(lengths)
        inputs = torch.cat([root[:, None], tokens[:, :-1]], dim=1)
        rows = [expert_rows]
        for scorer, cache in zip(self.scorers[1:], self.caches[1:], strict=True):
            rows.append(scorer.model.forward(inputs, cache).logits)
        clock.lap("amateur")
        self.seen = self.seen_before
        verdict, bad = self._verdict_on_block(tokens, lengths, rows)
        host = torch.cat([bad[:, None], verdict.accepted[:, None], verdict.tokens], dim=1).tolist()
        self._refuse_bad([row[0] for row in host])
        accepted = [row[1] for row in host]
        fell = [count < length for count, length in zip(accepted, lengths, strict=True)]
        emitted = [row[2 : 2 + row[1] + fall] for row, fall in zip(host, fell, strict=True)]
        keep = [min(count + 1, length) for count, length in zip(accepted, lengths, strict=True)]
        self.caches[0].rollback([length + kept for length, kept in zip(start, keep, strict=True)])
        for cache in self.caches[1:]:
            cache.commit(keep)
        last = torch.tensor([len(new) - 1 for new in emitted], device=self.device)[:, None]
        self.root = verdict.tokens.gather(1, last)[:, 0]
        if self.seen is not None:
            columns = torch.arange(verdict.tokens.shape[1], device=self.device)
            self.seen.add(verdict.tokens.where(columns <= last, -1))
        if any(len(new) < len(known) or fall for new, known, fall in zip(emitted, self.block.tokens, fell)):  # noqa: B905
            self._rewind(emitted, accepted, verdict, features)
        self.block = Block(len(self.active))
        clock.lap("rest")
        return self._account_block(emitted, accepted, lengths, passes, clock)

    def _verdict_on_block(self, tokens: Tensor, lengths: list[int], rows: list[Tensor]) -> tuple[Verdict, Tensor]:
        """The block as a chain under the one verifier; its last node has no row after it, and needs none."""
        target, device = self.settings.target, self.device
        width = tokens.shape[1]
        valid = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
        chain = Draft.chain(tokens, valid)
        seen = self._seen_after(chain, width)
        judged, bad = target_rows(rows, target, seen)
        positions = torch.tensor([len(generation.ids) for generation in self.active], device=device)[:, None]
        positions = positions + torch.arange(width, device=device)
        if target.temperature == 0:
            draft, noise = chain, None
        elif self.rule == "shared_noise":
            draft = Draft.chain(tokens, valid, rule="shared_noise")
            noise = Uniforms.keyed(self.keys, positions, vocab=judged.shape[-1])
        else:
            proposed = target_log_probs(rows[:1], self.ahead, seen).exp_()
            draft = Draft.chain(tokens, valid, rule="sampled", probs=proposed)
            noise = Uniforms.keyed(self.keys, positions, streams=(JUDGE_ACCEPT, JUDGE_FINAL))
        return verify(judged, draft, noise), bad

    def _rewind(self, emitted: list[list[int]], accepted: list[int], verdict: Verdict, features: Tensor | None) -> None:
        """Tell the drafter what stands: it forgets its last call to observe, and more where an earlier token fell."""
        told, last = [len(known) for known in self.block.tokens], self.block.counts[-1]
        first = [min(count - newest, stood) for count, newest, stood in zip(told, last, accepted, strict=True)]
        back = [count - place for count, place in zip(told, first, strict=True)]
        fresh = [new[place:] for new, place in zip(emitted, first, strict=True)]
        counts = [len(new) for new in fresh]
        index = torch.tensor(first, device=self.device)[:, None] + torch.arange(max(counts), device=self.device)
        index = index.clamp_max(verdict.tokens.shape[1] - 1)
        tokens = verdict.tokens.gather(1, index)
        if features is not None:
            wide = index.clamp_max(features.shape[1] - 1)[..., None]
            features = features.gather(1, wide.expand(-1, -1, features.shape[2]))
        self.drafter.rewind(back, Accepted(tokens, counts, fresh, features))

    def _account_block(
        self, emitted: list[list[int]], accepted: list[int], lengths: list[int], passes: int, clock: Clock
    ) -> list[tuple[Generation, list[int]]]:
        seconds, news = clock.laps, []
        for index, generation in enumerate(self.active):
            fresh = self._append(generation, emitted[index])
            generation.rounds.append(
                Round(
                    drafted=lengths[index],
                    accepted=min(accepted[index], len(fresh)),
                    emitted=len(fresh),
                    draft_s=seconds["draft"],
                    expert_s=seconds["expert"],
                    amateur_s=seconds["amateur"],
                    rest_s=seconds["rest"],
                    expert_passes=passes,
                )
            )
            news.append((generation, fresh))
        self._drop_finished()
        return news
