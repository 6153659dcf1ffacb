"""One batch of rows, from their prefill to the last stop.

A round: the drafter proposes after each row's root (the last emitted token); every scorer runs once over root and
drafts; the verifier emits at least one token a row. The round's result comes to the host in one copy. Accounting: the
token from the prefill belongs to no round, a round with an empty draft counts with 0 drafts, drafts after a stop token
or past max_new_tokens are not accepted, so tokens = 1 + the sum of emitted.
"""

from __future__ import annotations

from copy import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dcd_core.cache import KVCache
from dcd_core.decode_types import Assembled, Generation, Prompt, Round, Settings
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise
from dcd_core.errors import UserError
from dcd_core.rounds import Clock, PassInputs, along_path, commit_draft, joined_features, target_rows
from dcd_core.sampling import ACCEPT, FINAL, row_key
from dcd_core.seen import Seen
from dcd_core.verify import Uniforms, Verdict, verify


class Batch:
    """The rows of one batch from prefill to the last stop. Finished rows leave it; another batch may join it."""

    def __init__(
        self, method: Assembled, prompts: list[Prompt], settings: Settings, capacities: list[int] | None = None
    ):
        self.method, self.settings = method, settings
        # the drafter keeps the state of this batch's rows, so every batch has its own (the head is shared)
        self.scorers, self.drafter = method.scorers, copy(method.drafter)
        self.prompts = list(prompts)
        self.active = [Generation(prompt.id, prompt.sample) for prompt in prompts]
        self.capacities = capacities or batch_capacities(method, prompts, settings)
        self.caches: list[KVCache] = []
        self.device = self.scorers[0].model.device
        settings.target.model_weights(len(self.scorers))  # refuses a wrong number of models before any pass
        self.rule = resolve_rule(self.drafter, settings)
        self.drafter.aim(settings.draft_target)
        self.late = [False] * len(prompts)
        self.late_bad: Bool[Tensor, " batch"] | None = None
        self.seen: Seen | None = None
        if settings.target.repetition_penalty != 1:
            expert = self.scorers[0]
            prefixes = [expert.prefix_ids(prompt) for prompt in prompts]
            self.seen = Seen.of(prefixes, expert.model.vocab, self.device)

    def absorb(self, other: Batch) -> None:
        """Another batch, between its own rounds, becomes part of this one."""
        for cache, entering in zip(self.caches, other.caches, strict=True):
            cache.extend(entering)
        self.drafter.extend(other.drafter)
        if self.late_bad is not None:
            self.late_bad = torch.nn.functional.pad(self.late_bad, (0, len(other.active)))
        if self.seen is not None:
            self.seen.extend(other.seen)
        self.root, self.keys = torch.cat([self.root, other.root]), torch.cat([self.keys, other.keys])
        self.prompts, self.active = self.prompts + other.prompts, self.active + other.active
        self.late = self.late + other.late

    # ---- prefill -------------------------------------------------------------------------------------------------

    def prefill(self) -> list[tuple[Generation, list[int]]]:
        """Read the prompts and emit every row's first token, which belongs to no round."""
        clock = Clock(self.device, self.settings.timing)
        self.keys = torch.tensor(
            [row_key(self.settings.seed, prompt.id, prompt.sample) for prompt in self.prompts], device=self.device
        )
        outputs = []
        for index, scorer in enumerate(self.scorers):
            prefixes = [scorer.prefix_ids(prompt) for prompt in self.prompts]
            lengths = [len(prefix) for prefix in prefixes]
            cache = scorer.model.new_cache(len(prefixes), self.capacities[index])
            self.caches.append(cache)
            ids = torch.tensor([prefix + [0] * (max(lengths) - len(prefix)) for prefix in prefixes], device=self.device)
            last = torch.tensor(lengths, device=self.device) - 1
            wants = index in self.drafter.feature_scorers
            outputs.append(scorer.model.forward(ids, cache, features=wants, select=last))
            cache.commit(lengths)
        rows = [output.logits for output in outputs]
        verdict, bad = self._judge(rows, Draft.empty(len(self.prompts), self.device, self.rule), self._noise(1))
        self.root = verdict.tokens[:, 0]
        self._note(verdict.tokens)
        first = torch.cat([self.root[:, None], bad[:, None]], dim=1).tolist()
        self._refuse_bad([row[1] for row in first])
        tokens = [row[0] for row in first]
        self._begin_drafter(tokens, joined_features(outputs, self.drafter.feature_scorers))
        seconds = clock.total()
        for generation in self.active:
            generation.prefill_s = seconds / len(self.active)
        emitted = [(generation, [token]) for generation, token in zip(self.active, tokens, strict=True)]
        for generation, new in emitted:
            self._append(generation, new)
        self._drop_finished()
        return emitted

    def _begin_drafter(self, first: list[int], features: Tensor | None) -> None:
        prompts = [prompt.ids for prompt in self.prompts]
        width = max(map(len, prompts))
        shifted = [[*prompt[1:], token] for prompt, token in zip(prompts, first, strict=True)]
        padded = [tokens + [0] * (width - len(tokens)) for tokens in shifted]
        if self.drafter.scores_amateur:
            self.drafter.adopt(self.caches[1])
        accepted = Accepted(torch.tensor(padded, device=self.device), list(map(len, prompts)), shifted, features)
        self.drafter.begin(prompts, accepted, self.capacities[0])

    # ---- one round -----------------------------------------------------------------------------------------------

    def _written(self) -> list[int]:
        """Tokens that every row has so far."""
        return [len(generation.ids) + late for generation, late in zip(self.active, self.late, strict=True)]

    def _noise(self, count: int) -> RoundNoise:
        positions = torch.tensor(self._written(), device=self.device)[:, None]
        positions = positions + torch.arange(count, device=self.device)
        return RoundNoise(self.keys, positions, self.settings.target.temperature, self.rule)

    def _judge(
        self, rows: list[Float[Tensor, "batch rows vocab"]], draft: Draft, noise: RoundNoise
    ) -> tuple[Verdict, Bool[Tensor, " batch"]]:
        """The verdict on a draft from the scorers' rows, and which rows of the batch hold NaN or +inf."""
        judged, bad = target_rows(rows, self.settings.target, self._seen_after(draft, rows[0].shape[1]))
        return verify(judged, draft, self._uniforms(judged, draft, noise)), bad

    def _seen_after(self, draft: Draft, rows: int) -> Bool[Tensor, "batch rows vocab"] | None:
        """The ids in the prefix of each of the first ``rows`` of [root, nodes]; None unless repetition is penalised."""
        return None if self.seen is None else self.seen.after(draft, rows)

    def _note(self, tokens: Int[Tensor, "batch count"]) -> None:
        """Tokens that were emitted (-1 is padding) are part of the prefix from now on."""
        if self.seen is not None:
            self.seen.add(tokens)

    def _uniforms(self, judged: Tensor, draft: Draft, noise: RoundNoise) -> Uniforms | None:
        if not judged.is_floating_point():
            return None
        if draft.rule == "shared_noise":
            return Uniforms(gumbel=noise.gumbel(judged.shape[-1]))
        if draft.linear:
            return Uniforms(noise.coins(ACCEPT)[..., None], noise.coins(FINAL))
        # one coin per sibling; how many siblings a tree has at most is known without looking at device data
        return Uniforms.keyed(noise.keys, noise.positions, siblings=draft.nodes)

    def round(self) -> list[tuple[Generation, list[int]]]:
        """Draft, score, verify, keep: at least one token for every row."""
        clock = Clock(self.device, self.settings.timing)
        noise, draft = self._draft(clock)
        rows, outputs = [], []
        inputs = PassInputs.of(self.root, draft)
        for index, scorer in enumerate(self.scorers):
            if index == 1 and self.drafter.scores_amateur:
                rows.append(self.drafter.rows)
                continue
            outputs.append(inputs.run(scorer.model, self.caches[index], index in self.drafter.feature_scorers))
            rows.append(outputs[-1].logits)
            clock.lap("expert" if index == 0 else "amateur")
        width = min(row.shape[1] for row in rows)
        verdict, bad = self._judge([row[:, :width] for row in rows], draft, noise)
        for flagged in (self.late_bad, self.drafter.suspect):
            bad = bad if flagged is None else bad | flagged
        host = self._to_host(bad, draft, verdict)
        self._refuse_bad([row[1] for row in host])
        accepted = [row[3] for row in host]
        self.late_bad, late = None, [False] * len(host)
        clock.lap("rest")
        if width == draft.nodes:
            late = self._finish_late(draft, rows, verdict, accepted, noise)
            clock.lap("amateur")
        self.root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        self._commit(draft, verdict, host, joined_features(outputs, self.drafter.feature_scorers))
        return self._account(host, late, clock, self.drafter.amateur_passes)

    def _to_host(self, bad: Bool[Tensor, " batch"], draft: Draft, verdict: Verdict) -> list[list[int]]:
        """The round's one copy from device to host: per row [root, bad, drafted, accepted, tokens ...]."""
        drafted = draft.valid.sum(1, keepdim=True)
        numbers = [self.root[:, None], bad[:, None], drafted, verdict.accepted[:, None], verdict.tokens]
        return torch.cat(numbers, dim=1).tolist()

    def _draft(self, clock: Clock) -> tuple[RoundNoise, Draft]:
        shape = self.drafter.planned(self.settings.shape)
        noise = self._noise(shape.depth + 1)
        draft = self.drafter.propose(self.root, noise, shape)
        clock.lap("draft")
        return noise, draft

    def _finish_late(
        self, draft: Draft, rows: list[Tensor], verdict: Verdict, accepted: list[int], noise: RoundNoise
    ) -> list[bool]:
        """Delayed drafting: rows that accepted everything still need the target row after their last draft.

        Their final token stays on the device (the round has had its copy); the host learns it with the next round's.
        Returns which rows these are.
        """
        late = [count == draft.nodes for count in accepted]
        if any(late):
            # a draft that ended early is shorter than the positions
            positions = noise.positions[:, draft.nodes : draft.nodes + 1]
            noise = RoundNoise(noise.keys, positions, noise.temperature, noise.rule)
            where = torch.tensor(late, device=self.device)
            if self.seen is not None:
                self.seen.add(draft.tokens.where(where[:, None], -1))
            last = [row[:, -1:] for row in rows]
            last[1], offer = self.drafter.late_row(draft.tokens[:, -1], late, last[0], noise)
            final, bad = self._judge(last, offer, noise)
            self.drafter.finish_late(late, final)
            self.late_bad = bad & where
            verdict.tokens[:, -1] = torch.where(where, final.tokens[:, 0], verdict.tokens[:, -1])
        return late

    def _commit(self, draft: Draft, verdict: Verdict, host: list[list[int]], features: Tensor | None) -> None:
        """Keep root and accepted drafts in every cache, and tell the drafter."""
        counts = [row[3] + 1 for row in host]
        for index, cache in enumerate(self.caches):
            if index == 1 and self.drafter.scores_amateur:
                continue
            commit_draft(cache, draft, verdict, counts)
        self._tell(verdict, host, counts, None if features is None else along_path(features, draft, verdict))

    def _tell(self, verdict: Verdict, host: list[list[int]], counts: list[int], features: Tensor | None) -> None:
        """Note what the round emitted, and tell the drafter."""
        self._note(verdict.tokens)
        emitted = [row[4 : 4 + count] for row, count in zip(host, counts, strict=True)]
        self.drafter.observe(Accepted(verdict.tokens, counts, emitted, features))

    # ---- accounting ----------------------------------------------------------------------------------------------

    def _account(
        self, host: list[list[int]], late: list[bool], clock: Clock, amateur_passes: int
    ) -> list[tuple[Generation, list[int]]]:
        """Turn the round's copy [root, bad, drafted, accepted, tokens ...] into tokens and a record per row."""
        clock.lap("rest")
        seconds = clock.laps
        news = []
        for index, (generation, row) in enumerate(zip(self.active, host, strict=True)):
            known = self._append(generation, [row[0]]) if self.late[index] else []
            if not generation.finish:
                fresh = self._append(generation, row[4 : 4 + row[3] + (not late[index])])
                late[index] = late[index] and not generation.finish
                generation.rounds.append(
                    Round(
                        drafted=row[2],
                        accepted=min(row[3], len(fresh)),
                        emitted=len(fresh) + late[index],
                        draft_s=seconds["draft"],
                        expert_s=seconds["expert"],
                        amateur_s=seconds["amateur"],
                        rest_s=seconds["rest"],
                        amateur_passes=amateur_passes,
                    )
                )
                known = known + fresh
            news.append((generation, known))
        self.late = late
        self._drop_finished()
        return news

    def _append(self, generation: Generation, tokens: list[int]) -> list[int]:
        """Add tokens up to the first stop token or the budget, and return those added."""
        for count, token in enumerate(tokens, start=1):
            generation.ids.append(token)
            if token in self.settings.stop_ids:
                generation.finish = "stop"
            elif len(generation.ids) == self.settings.max_new_tokens:
                generation.finish = "length"
            if generation.finish:
                return tokens[:count]
        return tokens

    def _refuse_bad(self, bad: list[int]) -> None:
        for prompt, flag in zip(self.prompts, bad, strict=True):
            if flag:
                raise UserError(
                    f"the models gave NaN or infinite numbers for prompt {prompt.id!r} (method {self.method.name}); "
                    "check the weights and the dtype"
                )

    def _drop_finished(self) -> None:
        keep = [index for index, generation in enumerate(self.active) if not generation.finish]
        if len(keep) == len(self.active):
            return
        self._keep(keep)

    def _keep(self, keep: list[int]) -> None:
        """These rows stay; the others have left the batch."""
        self.active = [self.active[index] for index in keep]
        self.prompts = [self.prompts[index] for index in keep]
        self.late = [self.late[index] for index in keep]
        if not keep:
            return
        rows = torch.tensor(keep, device=self.device)
        self.root, self.keys = self.root[rows], self.keys[rows]
        if self.seen is not None:
            self.seen.keep_rows(rows)
        if self.late_bad is not None:
            self.late_bad = self.late_bad[rows]
        for cache in self.caches:
            cache.keep_rows(keep)
        self.drafter.keep_rows(keep)


def batch_capacities(method: Assembled, prompts: list[Prompt], settings: Settings) -> list[int]:
    """Slots a row that each scorer's cache needs for any of these prompts."""
    budget = settings.max_new_tokens + method.drafter.most_nodes(settings.shape) + 2
    longest = [max((len(scorer.prefix_ids(prompt)) for prompt in prompts), default=0) for scorer in method.scorers]
    return [length + budget for length in longest]


def resolve_rule(drafter: Drafter, settings: Settings) -> str:
    """The rule by which this drafter's drafts are judged under these settings.

    Raises:
        UserError: a rule that the drafter cannot offer.
    """
    if settings.target.temperature == 0:
        return "deterministic"
    rule = drafter.usual_rule(settings.shape) if settings.rule == "auto" else settings.rule
    if rule not in drafter.rules:
        raise UserError(
            f"{type(drafter).__name__} cannot draft by the rule {rule!r}; it offers {', '.join(drafter.rules)}"
        )
    return rule
