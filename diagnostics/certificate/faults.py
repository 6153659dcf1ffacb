"""Faults that were seen in the wild, each injected into the shipped loop: a patched method of a shipped class, never a
second implementation.

Every fault is a context manager ``fault(method, settings)`` that yields the method and settings to decode with; inside,
the loop has the fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch
from torch import Tensor

from dcd_core import decode as loop
from dcd_core import sampling
from dcd_core.batch import Batch
from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Assembled, Settings
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import RoundNoise
from dcd_core.seen import Seen
from dcd_core.verify import Uniforms, Verdict, verify

Fault = Callable[[Assembled, Settings], AbstractContextManager[tuple[Assembled, Settings]]]


@contextmanager
def no_fault(method: Assembled, settings: Settings) -> Iterator[tuple[Assembled, Settings]]:
    """The shipped loop: the control of a control."""
    yield method, settings


def in_batch(faulty: type[Batch]) -> Fault:
    """The fault of a batch class that stands in for the shipped one."""

    @contextmanager
    def fault(method, settings):
        with mock.patch.object(loop, "Batch", faulty):
            yield method, settings

    return fault


def in_drafts(change: Callable[[Draft, Settings], Draft]) -> Fault:
    """The fault of something that changes a draft after it was proposed."""

    @contextmanager
    def fault(method, settings):
        class Faulty(type(method.drafter)):
            def propose(self, root, noise, shape):
                return change(super().propose(root, noise, shape), settings)

        method.drafter.__class__ = Faulty
        yield method, settings

    return fault


# ---- drafts ----------------------------------------------------------------------------------------------------------


@contextmanager
def argmax_judged_as_sampled(method, settings):
    """Greedy drafts with their distribution beside them, as if they had been drawn from it."""
    shipped = RoundNoise.pick

    def pick(self, logits, depth, vocab, target_ids=None):
        token, law = shipped(self, logits, depth, vocab, target_ids)
        if law is not None:
            token = law.argmax(-1) if target_ids is None else target_ids[law.argmax(-1)]
        return token, law

    with mock.patch.object(RoundNoise, "pick", pick):
        yield method, settings


def without_stopping_token(draft: Draft, settings: Settings) -> Draft:
    """The token that brings its path below the threshold is dropped, with all that follow it (chains)."""
    going_on = draft.chances().cumprod(1) >= settings.stop_below
    return dataclasses.replace(draft, valid=draft.valid & going_on)


def resorted_siblings(draft: Draft, settings: Settings) -> Draft:
    """Siblings stand from the most to the least probable, and are taken for drawn in that order (trees of depth 1)."""
    first, columns = draft.probs[:, 0], draft.columns()
    chance = first.gather(1, columns).masked_fill(~draft.valid, -1.0)
    order = chance.argsort(dim=1, descending=True, stable=True)
    tokens, columns, laws, left = draft.tokens.gather(1, order), columns.gather(1, order), [], first
    for node in range(draft.nodes):
        laws.append(left / left.sum(-1, keepdim=True).clamp_min(1e-300))
        left = left.scatter(1, columns[:, node, None], 0.0)
    return dataclasses.replace(draft, tokens=tokens, valid=draft.valid.gather(1, order), probs=torch.stack(laws, dim=1))


def pruned_siblings(draft: Draft, settings: Settings) -> Draft:
    """The least probable of the siblings that were drawn is dropped (trees of depth 1)."""
    chance = draft.probs[:, 0].gather(1, draft.columns()).masked_fill(~draft.valid, torch.inf)
    worst = torch.zeros_like(draft.valid).scatter(1, chance.argmin(1, keepdim=True), True)
    return dataclasses.replace(draft, valid=draft.valid & ~worst)


def peeking(target: Tensor, draft: Draft, noise: Uniforms | None) -> Verdict:
    """The verifier behind a controller that leaves a draft out where its first token will be refused."""
    refused = verify(target, draft, noise).accepted == 0
    return verify(target, dataclasses.replace(draft, valid=draft.valid & ~refused[:, None]), noise)


# ---- scores and target -----------------------------------------------------------------------------------------------


class BonusFromExpert(Batch):
    """The extra token after a whole draft comes from the expert alone: there the amateur's row is the expert's, and
    p^(1+alpha) p^-alpha = p."""

    def _judge(self, rows, draft, noise):
        if draft.nodes:
            amateur = rows[1].clone()
            amateur[:, -1] = rows[0][:, -1]
            rows = [rows[0], amateur, *rows[2:]]
        return super()._judge(rows, draft, noise)


class ResidualFromExpert(Batch):
    """What replaces a rejected draft is drawn from (p - e)+ instead of (pi - e)+: by the shipped verifier, which is
    given the expert's row and a coin that rejects (sampled chains)."""

    def _judge(self, rows, draft, noise):
        verdict, bad = super()._judge(rows, draft, noise)
        if draft.nodes:
            alone = target_log_probs(rows[:1], self.settings.target)
            row, node = torch.arange(len(alone)), verdict.accepted.clamp_max(draft.nodes - 1)
            token, law = draft.tokens[row, node, None], draft.probs[row, node, None]
            one = Draft.chain(token, rule="sampled", probs=law, ids=draft.ids)
            last = self._uniforms(alone, draft, noise).final[row, node, None]
            reject = Uniforms(torch.full((len(row), 1, 1), torch.inf, dtype=last.dtype), last)
            again = verify(alone[row, node, None], one, reject).tokens[:, 0]
            rejected = verdict.accepted < draft.nodes
            verdict.tokens[row, node] = torch.where(rejected, again, verdict.tokens[row, node])
        return verdict, bad


class AmateurLate(Batch):
    """The amateur is one token behind: each of its rows is the one before (chains)."""

    def _judge(self, rows, draft, noise):
        texts = [[*prompt.ids, *one.ids][:-1] for prompt, one in zip(self.prompts, self.active, strict=True)]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        last = torch.tensor([len(text) - 1 for text in texts])
        before = self.scorers[1].model.forward_full(ids, select=last).logits
        late = torch.cat([before, rows[1][:, :-1]], dim=1)
        return super()._judge([rows[0], late, *rows[2:]], draft, noise)


class RolesSwapped(Batch):
    """Expert and amateur have changed places in every second round, as where roles alternate and the order of the
    models is not restored [seen in public CoS code]."""

    rounds = 0

    def _judge(self, rows, draft, noise):
        if self.rounds % 2:
            rows = [rows[1], rows[0], *rows[2:]]
        return super()._judge(rows, draft, noise)

    def round(self):
        self.rounds += 1
        return super().round()


class Flipped(Target):
    """The sign of alpha is the wrong way round."""

    def model_weights(self, models):
        return (1.0 - self.alpha, self.alpha) if models == 2 else super().model_weights(models)


@contextmanager
def flipped_alpha(method, settings):
    """The target's own fields, with the sign of alpha flipped where the models are weighed."""
    fields = {field.name: getattr(settings.target, field.name) for field in dataclasses.fields(Target)}
    yield method, dataclasses.replace(settings, target=Flipped(**fields))


# ---- the last draw in two steps --------------------------------------------------------------------------------------


def in_two_steps(faulty: Callable[[Callable], Callable]) -> Callable[[], AbstractContextManager]:
    """The fault of the search for an id: ``faulty(shipped)`` replaces it, for one draw after another, in both steps."""

    @contextmanager
    def fault():
        shipped = sampling._in_two_steps, sampling._first_above

        def draw(weights, uniform):
            with mock.patch.object(sampling, "_first_above", faulty(shipped[1])):
                return shipped[0](weights, uniform)

        with mock.patch.object(sampling, "_in_two_steps", draw):
            yield

    return fault


def next_block(shipped):
    """The second step looks into the block after the one that was found, unless that is the last."""
    steps = []

    def search(running, wanted):
        steps.append(shipped(running, wanted))
        return (steps[0] + 1).clamp_max(running.shape[1] - 1) if len(steps) == 1 else steps[-1]

    return search


def sum_before_kept(shipped):
    """The second step does not take off the sum of the blocks before its own."""
    asked = []

    def search(running, wanted):
        asked.append(wanted)
        return shipped(running, asked[0])

    return search


# ---- repetition penalty ----------------------------------------------------------------------------------------------


@contextmanager
def root_penalised(method, settings):
    """Every row of a draft is penalised by the prefix of its root."""

    def after(self, draft, rows):
        return self.mask[:, None, :-1].expand(-1, rows, -1)

    with mock.patch.object(Seen, "after", after):
        yield method, settings


@contextmanager
def rejected_penalised(method, settings):
    """Provisional tokens that were rejected still count as seen (deferred)."""
    with mock.patch.object(Seen, "copy", lambda self: self):
        yield method, settings
