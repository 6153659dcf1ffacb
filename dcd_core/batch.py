"""One batch of rows, from their prefill to the last stop.

A round: the drafter proposes after each row's root (the last emitted token); every scorer runs once over root and
drafts; the verifier emits at least one token a row. The round's result comes to the host in one copy. Accounting: the
token from the prefill belongs to no round, a round with an empty draft counts with 0 drafts, drafts after a stop token
or past max_new_tokens are not accepted, so tokens = 1 + the sum of emitted.
"""

from __future__ import annotations

import time
from copy import copy

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dcd_core.cache import KVCache
from dcd_core.contrast import scores, target_log_probs
from dcd_core.decode_types import Assembled, Generation, Prompt, Round, Settings
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import Accepted, Drafter, RoundNoise
from dcd_core.errors import UserError
from dcd_core.sampling import row_key
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
        self.rule = resolve_rule(self.drafter, settings)
        self.late = [False] * len(prompts)
        self.late_bad: Bool[Tensor, " batch"] | None = None

    def absorb(self, other: Batch) -> None:
        """Another batch, between its own rounds, becomes part of this one."""
        for cache, entering in zip(self.caches, other.caches, strict=True):
            cache.extend(entering)
        self.drafter.extend(other.drafter)
        if self.late_bad is not None:
            self.late_bad = torch.nn.functional.pad(self.late_bad, (0, len(other.active)))
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
        rows, features = [], None
        for index, scorer in enumerate(self.scorers):
            prefixes = [scorer.prefix_ids(prompt) for prompt in self.prompts]
            lengths = [len(prefix) for prefix in prefixes]
            cache = scorer.model.new_cache(len(prefixes), self.capacities[index])
            self.caches.append(cache)
            ids = torch.tensor([prefix + [0] * (max(lengths) - len(prefix)) for prefix in prefixes], device=self.device)
            last = torch.tensor(lengths, device=self.device) - 1
            wants = index == 0 and self.drafter.needs_features
            output = scorer.model.forward(ids, cache, features=wants, select=last)
            cache.commit(lengths)
            rows.append(output.logits)
            if wants:
                features = output.features
        verdict, bad = self._judge(rows, Draft.empty(len(self.prompts), self.device, self.rule), self._noise(1))
        self.root = verdict.tokens[:, 0]
        first = torch.cat([self.root[:, None], bad[:, None]], dim=1).tolist()
        self._refuse_bad([row[1] for row in first])
        tokens = [row[0] for row in first]
        self._begin_drafter(tokens, features)
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

    def _noise(self, count: int) -> RoundNoise:
        start = [len(generation.ids) + late for generation, late in zip(self.active, self.late, strict=True)]
        positions = torch.tensor(start, device=self.device)[:, None] + torch.arange(count, device=self.device)
        return RoundNoise(self.keys, positions, self.settings.target.temperature, self.rule)

    def _judge(
        self, rows: list[Float[Tensor, "batch rows vocab"]], draft: Draft, noise: RoundNoise
    ) -> tuple[Verdict, Bool[Tensor, " batch"]]:
        """The verdict on a draft from the scorers' rows, and which rows of the batch hold NaN or +inf."""
        target = self.settings.target
        if target.temperature == 0:
            peak, judged = scores(rows, target).max(-1)
        else:
            judged = target_log_probs(rows, target)
            peak = judged.amax(-1)
        return verify(judged, draft, self._uniforms(judged, draft, noise)), (~peak.isfinite()).any(-1)

    def _uniforms(self, judged: Tensor, draft: Draft, noise: RoundNoise) -> Uniforms | None:
        if not judged.is_floating_point():
            return None
        if draft.rule == "shared_noise":
            return Uniforms(gumbel=noise.gumbel(judged.shape[-1]))
        # one coin per sibling; how many siblings a tree has at most is known without looking at device data
        return Uniforms.keyed(noise.keys, noise.positions, siblings=1 if draft.linear else draft.nodes)

    def round(self) -> list[tuple[Generation, list[int]]]:
        """Draft, score, verify, keep: at least one token for every row."""
        clock = Clock(self.device, self.settings.timing)
        noise = self._noise(self.settings.shape.depth + 1)
        draft = self.drafter.propose(self.root, noise, self.settings.shape)
        clock.lap("draft")
        tokens = torch.cat([self.root[:, None], draft.tokens], dim=1)
        tree_mask = None if draft.linear else draft.ancestor_mask()
        depths = None if draft.linear else torch.nn.functional.pad(draft.depths(), (1, 0))
        rows, features = [], None
        for index, scorer in enumerate(self.scorers):
            if index == 1 and self.drafter.scores_amateur:
                rows.append(self.drafter.rows)
                continue
            wants = index == 0 and self.drafter.needs_features
            output = scorer.model.forward(
                tokens, self.caches[index], tree_mask=tree_mask, depths=depths, features=wants
            )
            features = output.features if wants else features
            rows.append(output.logits)
            clock.lap("expert" if index == 0 else "amateur")
        width = min(row.shape[1] for row in rows)
        verdict, bad = self._judge([row[:, :width] for row in rows], draft, noise)
        for flagged in (self.late_bad, self.drafter.suspect):
            bad = bad if flagged is None else bad | flagged
        host = torch.cat(
            [self.root[:, None], bad[:, None], draft.valid.sum(1, keepdim=True), verdict.accepted[:, None]]
            + [verdict.tokens],
            dim=1,
        ).tolist()  # the round's one copy from device to host
        self._refuse_bad([row[1] for row in host])
        accepted = [row[3] for row in host]
        self.late_bad, late = None, [False] * len(host)
        clock.lap("rest")
        if width == draft.nodes:
            late = self._finish_late(draft, rows[0], verdict, accepted, noise)
            clock.lap("amateur")
        self.root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        self._commit(draft, verdict, host, features)
        return self._account(host, late, clock)

    def _finish_late(
        self, draft: Draft, expert: Tensor, verdict: Verdict, accepted: list[int], noise: RoundNoise
    ) -> list[bool]:
        """Delayed drafting: rows that accepted everything still need the target row after their last draft.

        Their final token stays on the device (the round has had its copy); the host learns it with the next round's.
        Returns which rows these are.
        """
        late = [count == draft.nodes for count in accepted]
        if any(late):
            row = self.drafter.late_row(draft.tokens[:, -1], late)
            # a draft that ended early is shorter than the positions
            positions = noise.positions[:, draft.nodes : draft.nodes + 1]
            noise = RoundNoise(noise.keys, positions, noise.temperature, noise.rule)
            empty = Draft.empty(len(late), self.device, self.rule)
            final, bad = self._judge([expert[:, -1:], row], empty, noise)
            where = torch.tensor(late, device=self.device)
            self.late_bad = bad & where
            verdict.tokens[:, -1] = torch.where(where, final.tokens[:, 0], verdict.tokens[:, -1])
        return late

    def _commit(self, draft: Draft, verdict: Verdict, host: list[list[int]], features: Tensor | None) -> None:
        """Keep root and accepted drafts in every cache, and tell the drafter."""
        counts = [row[3] + 1 for row in host]
        for index, cache in enumerate(self.caches):
            if index == 1 and self.drafter.scores_amateur:
                continue
            if draft.linear:
                cache.commit(counts)
            else:
                cache.commit_path(verdict.path, counts)
        if features is not None and not draft.linear:
            features = features.gather(1, verdict.path[..., None].expand(-1, -1, features.shape[-1]))
        emitted = [row[4 : 4 + count] for row, count in zip(host, counts, strict=True)]
        self.drafter.observe(Accepted(verdict.tokens, counts, emitted, features))

    # ---- accounting ----------------------------------------------------------------------------------------------

    def _account(self, host: list[list[int]], late: list[bool], clock: Clock) -> list[tuple[Generation, list[int]]]:
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
        self.active = [self.active[index] for index in keep]
        self.prompts = [self.prompts[index] for index in keep]
        self.late = [self.late[index] for index in keep]
        if not keep:
            return
        rows = torch.tensor(keep, device=self.device)
        self.root, self.keys = self.root[rows], self.keys[rows]
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


class Clock:
    """Seconds of the phases of a round; with ``synchronise`` the device is waited for at every lap."""

    def __init__(self, device: torch.device, synchronise: bool):
        self.synchronise = synchronise and device.type == "cuda"
        self.laps = {"draft": 0.0, "expert": 0.0, "amateur": 0.0, "rest": 0.0}
        self.start = self.last = self._now()

    def _now(self) -> float:
        if self.synchronise:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.laps[phase] += now - self.last
        self.last = now

    def total(self) -> float:
        return self._now() - self.start


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
