"""The size of a fresh head's logits is the one of least cross-entropy, for whatever it imitates."""

import pytest
import torch
from tiny import tiny_model
from toy_training import STOP, toy_samples

from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from train.batches import Texts
from train.closed_form import HELD_OUT, start_in_closed_form
from train.online_expert import HeadStep
from train.passes import Passes
from train.processes import Ranks, start
from train.start_scale import SCALES, calibrate, cross_entropies
from train.unroll import EXPERT, Aim, Unroll

STOPS = frozenset({STOP})
TEXTS = Texts(toy_samples(40), "", 0, 0)
HELD = range(0, 40, HELD_OUT)


def pair():
    return tiny_model("smol"), tiny_model("smol", 100, 8)


def heads(expert, amateur, kind: str) -> Eagle3Head:
    if kind == "dual_input":
        taps = expert.feature_layers, amateur.feature_layers
        return DualInputHead.from_pair(expert.config, amateur.config, None, *taps, 0, expert.output.rows())
    return Eagle3Head.from_expert(
        expert.config, None, expert.feature_layers, 0, expert.output.rows(), layers=2, aligned_with=kind
    )


def loss(head, expert, amateur, numbers, aim: Aim) -> float:
    """By the trainer's own step."""
    reads = "dual" if head.kind == "dual_input" else "expert_only"
    step, total = HeadStep(expert, head.target_ids, STOPS, (aim,), amateur, reads), 0.0
    for number in numbers:
        with torch.no_grad():
            total += float(Unroll(head, 1)(*step.inputs(TEXTS.batch([number])), [1.0])[1][0, 0])
    return total


@pytest.mark.parametrize("kind", ["expert", "amateur", "dual_input"])
def test_no_other_scale_has_a_lower_cross_entropy(kind):
    expert, amateur = pair()
    head, aim = heads(expert, amateur, kind), Aim(None) if kind == "amateur" else EXPERT
    start_in_closed_form([head], Passes([expert, amateur]), TEXTS, STOPS, start(0))
    found, norm = loss(head, expert, amateur, HELD, aim), head.norm.weight.clone()
    for factor in (1 / 1.1, 1.1, 3.0):
        head.norm.weight.data = norm * factor
        assert loss(head, expert, amateur, HELD, aim) > found
    head.norm.weight.data = norm / norm.mean() * float(expert.output.rows().norm())
    assert loss(head, expert, amateur, HELD, aim) > found


def test_ranks_agree_on_what_one_rank_finds(monkeypatch):
    (expert, _), alone = pair(), start(0)
    head, passes = heads(expert, None, "expert"), Passes([expert])
    start_in_closed_form([head], passes, TEXTS, STOPS, alone, norm=1.0)
    summed = sum(cross_entropies(head, passes, TEXTS, number, STOPS) for number in HELD)
    assert calibrate(head, passes, TEXTS, HELD, STOPS, alone) == SCALES[int(summed.argmin())]
    parts = []
    monkeypatch.setattr("train.start_scale.add_up", lambda total, _: parts.append(total) or total)
    for rank in (0, 1):
        calibrate(head, passes, TEXTS, HELD, STOPS, Ranks(rank, 2, alone.device))
    torch.testing.assert_close(parts[0] + parts[1], summed)
    assert not torch.allclose(parts[0], summed)
