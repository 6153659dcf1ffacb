"""The size of a fresh head's logits is the one of least cross-entropy, for whatever it imitates."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model
from toy_training import STOP, toy_samples

from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.models import Output
from train.batches import Texts
from train.closed_form import HELD_OUT, start_in_closed_form
from train.eagle3 import Config
from train.head_run import rate_scale
from train.online_expert import HeadStep, copy_module, feature_rms, feature_sizes, scale_features
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


def test_a_narrower_amateur_is_imitated_in_the_heads_own_width():
    """Its states and output rows get further numbers that are zero: its logits stay what they are."""
    torch.manual_seed(0)
    expert, amateur = tiny_model("smol"), tiny_model("smol", 100, 8)
    half = amateur.hidden_size // 2
    amateur.model.lm_head.weight = torch.nn.Parameter(amateur.output.rows().clone())
    amateur.model.lm_head.weight.data[:, half:] = 0
    rows = amateur.output.rows()
    narrow = Narrow(amateur, half)
    head = heads(expert, amateur, "amateur")
    start_in_closed_form([head], Passes([expert, narrow]), TEXTS, STOPS, start(0), norm=1.0)
    assert torch.equal(head.lm_head.weight, rows) and head.fc.weight[half:].abs().max().item() < 1e-6
    wide = heads(expert, amateur, "amateur")
    start_in_closed_form([wide], Passes([expert, amateur]), TEXTS, STOPS, start(0), norm=1.0)
    # half of the numbers of the wide one's regression are the narrow one's, but for the penalty that each chooses
    near = torch.nn.functional.cosine_similarity(head.fc.weight[:half].flatten(), wide.fc.weight[:half].flatten(), 0)
    assert near > 0.9


def test_a_head_for_features_of_size_one_is_the_same_function():
    """Dividing by powers of two rounds nothing, and the head that is kept is one for features as they come. Only the
    steps that an optimiser makes are others: those of the scaled weights."""
    torch.manual_seed(0)
    expert = tiny_model("smol")
    plain = heads(expert, None, "expert")
    sizes = 2.0 ** torch.randint(-3, 8, (plain.config.feature_widths[0],))
    scaled = copy.deepcopy(plain)
    inputs = HeadStep(expert, plain.target_ids, STOPS).inputs(TEXTS.batch([0, 1]))
    modules = Unroll(plain, 3), Unroll(scaled, 3, sizes=sizes)
    losses = [module(*inputs, [1.0] * 3)[0] for module in modules]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(scaled.fc.weight.grad * sizes, plain.fc.weight.grad)
    assert not torch.allclose(scaled.fc.weight, plain.fc.weight)
    kept = copy_module(SimpleNamespace(module=modules[1], zero_optimization_partition_weights=lambda: False))
    assert torch.equal(kept.head.fc.weight, plain.fc.weight) and kept.sizes is None


def trained(kind: str, seed: int, rate: float) -> tuple[float, float]:
    """Loss before and after eight steps from the closed-form start with the trainers' rates."""
    expert = tiny_model(kind)
    config = Config(expert="e", train_tokens=["t"], output="o", lr=rate, train_lm_head=False)
    head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, seed, expert.output.rows())
    passes = Passes([expert])
    scale_features(head, feature_rms(passes, TEXTS))
    start_in_closed_form([head], passes, TEXTS, STOPS, start(0), norm=config.start_norm, count=20)
    before = loss(head, expert, None, range(0, 40, 8), EXPERT)
    sizes = feature_sizes(head, feature_rms(passes, TEXTS)).log2().round().exp2()
    head.lm_head.requires_grad_(config.train_lm_head)
    module, scale, step = Unroll(head, 2, sizes=sizes), rate_scale(config), HeadStep(expert, head.target_ids, STOPS)
    groups = [{"params": [weight], "lr": rate * scale(name)} for name, weight in module.named_parameters()]
    optimiser = torch.optim.Adam(groups, betas=(config.beta1, config.beta2))
    for texts in torch.randperm(40, generator=torch.Generator().manual_seed(seed)).view(20, 2).tolist()[:8]:
        optimiser.zero_grad()
        module(*step.inputs(TEXTS.batch(texts)), [30.0, 25.0])[0].backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimiser.step()
    with torch.no_grad():
        head.fc.weight.div_(sizes)
    return before, loss(head, expert, None, range(0, 40, 8), EXPERT)


@pytest.mark.parametrize("kind", ["smol", "qwen3"])
def test_no_seed_diverges(kind):
    """The texts are random, so little is learnt; what matters is that nothing is lost."""
    for seed in range(10):
        before, after = trained(kind, seed, 1e-3)
        assert after < 1.03 * before, seed
    # negative control: a rate that is too high
    before, after = trained(kind, 0, 0.3)
    assert not after < 1.03 * before


class Narrow:
    """A model whose states are the first so many numbers of another's."""

    def __init__(self, model, width: int):
        self.model, self.hidden_size, self.name, self.device = model, width, "narrow", model.device
        self.output = self

    def rows(self):
        return self.model.output.rows()[:, : self.hidden_size]

    def output_layer(self, hidden):
        return hidden @ self.rows().T

    def forward_full(self, ids, **options):
        output = self.model.forward_full(ids, **options)
        return Output(None, output.features, output.hidden[..., : self.hidden_size])
