"""Texts of a micro-batch in one row without padding: equal gradients, few looks at the device, less memory kept."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from toy_training import STOP, flags, head_weights, make_toy, toy_samples

from dcd_core.errors import UserError
from dcd_core.heads import row_attention
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.heads.packed import Packed, Share
from train import compiled, eagle3, unroll
from train.batches import Texts
from train.loop import Member, optimiser_step
from train.meters import Meter
from train.online_expert import HeadStep
from train.processes import Ranks
from train.unroll import EXPERT, Aim, Unroll

STEPS = 3
TEXTS = Texts(toy_samples(6), "", 0, 0)
"""Lengths from 10 to 26; some texts have two answers."""
INPUTS = {"one block": (1, "expert_only"), "two blocks": (2, "expert_only")}
INPUTS |= {"dual-input": (1, "dual"), "two blocks, shuffled": (2, "amateur_shuffled")}
aten = torch.ops.aten


def world(layers: int = 1, reads: str = "expert_only", kind: str = "qwen3", aims=(EXPERT,)):
    """A head with loud weights, and its training step."""
    expert, amateur = tiny_model(kind), tiny_model(kind, seed=100, layers=8)
    if reads == "expert_only":
        head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, seed=1, layers=layers)
    else:
        taps = expert.feature_layers, amateur.feature_layers
        head = DualInputHead.from_pair(expert.config, amateur.config, None, *taps, seed=1, layers=layers)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
    other = amateur if reads != "expert_only" or any(aim.reads_amateur for aim in aims) else None
    return head, HeadStep(expert, head.target_ids, frozenset({STOP}), aims, other, reads, shuffle_seed=3)


def gradients(module, inputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss, sums = module(*inputs, [5.0, 4.0, 3.0])
    return sums, list(torch.autograd.grad(loss, module.head.parameters()))


def added(parts: list[tuple]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sums, found = zip(*parts, strict=True)
    return sum(sums), [sum(each) for each in zip(*found, strict=True)]


def assert_equal(one, two):
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)
    for mine, other in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max().clamp_min(1e-3)))


@pytest.mark.parametrize(
    ("budget", "recompute"), [(2**26, False), (1500, True)], ids=["whole", "in chunks, recomputed"]
)
@pytest.mark.parametrize("name", INPUTS)
def test_packed_texts_give_the_gradients_of_each_text_alone(name, budget, recompute, monkeypatch):
    monkeypatch.setattr(row_attention, "SCORE_BUDGET", budget)
    head, step = world(*INPUTS[name])
    module = Unroll(head, STEPS, recompute=recompute)
    whole = gradients(module, step.inputs(TEXTS.batch(list(range(6)))))
    alone = added([gradients(module, step.inputs(TEXTS.batch([text]))) for text in range(6)])
    assert whole[0][:, 3].tolist() == alone[0][:, 3].tolist() and whole[0][2, 3] > 20
    assert all(float(gradient.abs().max()) > 0 for gradient in whole[1])
    assert_equal(whole, alone)


@pytest.mark.parametrize("fault", ["neighbours are seen", "positions jump"])
def test_the_equality_sees_each_fault(fault):
    """Negative control: what packing must keep apart moves the gradients by far more than a rounding."""
    head, step = world(2)
    module = Unroll(head, STEPS)
    features, embeds, alignment, targets = step.inputs(TEXTS.batch([0, 1, 2]))
    right = gradients(module, (features, embeds, alignment, targets))[1]
    packed = alignment.packed
    if fault == "positions jump":
        # a draft feels relative positions only: a jump within a text is one that it does feel
        jump = 7 * (packed.positions > 8)
        alignment.packed = dataclasses.replace(packed, positions=packed.positions + jump)
    else:
        everything = slice(0, packed.positions.shape[1])
        texts, roots = (
            (Share(slice(0, count), everything, None),) for count in (everything.stop, alignment.rows.shape[1])
        )
        alignment.packed = Packed(torch.arange(everything.stop)[None], texts, roots)
    wrong = gradients(module, (features, embeds, alignment, targets))[1]
    gap = max(float((one - two).abs().max() / one.abs().max()) for one, two in zip(right, wrong, strict=True))
    assert gap > 1e-2


class Looks(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers read, and sizes that depend on values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) else ()
        by_mask = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        waits = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
        self.count += by_mask or func in waits or func is aten.equal.default
        return func(*args, **(kwargs or {}))


class Engine:
    """What the loop asks of a DeepSpeed engine, without one."""

    world_size = 1

    def __init__(self, module):
        self.module, self.optimizer = module, SimpleNamespace(param_groups=[])

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss, scale_wrt_gas):
        loss.backward()

    def step(self):
        pass


@pytest.mark.parametrize("heads", [1, 2])
def test_the_host_waits_for_the_loss_only(heads, monkeypatch):
    """Transformers waits once in each frozen pass, the loop for each head's loss; an optimiser step's gradient norm is
    one more."""
    monkeypatch.setattr(row_attention, "SCORE_BUDGET", 2000)
    monkeypatch.setattr(unroll, "LOGIT_BUDGET", 96 * 40)
    aims = (EXPERT, Aim(0.5))[:heads]
    head, step = world(2, "dual", aims=aims)
    members = [Member("", Engine(Unroll(head, STEPS)), Meter(Ranks(0, 1, torch.device("cpu")))) for _ in aims]
    micro = [TEXTS.batch([0, 1, 2]), TEXTS.batch([3, 4, 5]), TEXTS.batch([])]
    stream = SimpleNamespace(at=lambda number: (micro, [5.0, 4.0, 3.0]))
    with Looks() as looks:
        optimiser_step(members, stream, step, 0, 1e-3)
    assert looks.count == len(micro) * (len(step.models) + heads) + heads


def test_the_count_sees_what_waits():
    """Negative control: one of each kind."""
    rows = torch.arange(6)
    with Looks() as looks:
        _ = rows[rows > 2], rows.nonzero(), int(rows.max()), bool((rows > 0).all()), rows[rows[2:4]]
    assert looks.count == 4


def test_a_recomputed_run_ends_at_the_same_weights(tmp_path):
    make_toy(tmp_path, texts=12)
    for name, more in {"kept": (), "again": ("--recompute=true",)}.items():
        argv = flags(tmp_path, tmp_path / name, "--head_layers=2", "--check_models=false", "--max_steps=3", *more)
        assert eagle3.main(argv) == 0
    kept, again = (head_weights(tmp_path / name) for name in ("kept", "again"))
    assert all(torch.equal(weight, again[name]) for name, weight in kept.items())


@pytest.mark.skipif(os.environ.get("DCD_SHAPES") != "0", reason="checks of shapes cannot be compiled")
def test_compiled_parts_give_the_same_gradients(monkeypatch):
    """With the compiler's own operations run one by one: what it makes of them for a device takes it long."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    head, step = world()
    module = Unroll(head, STEPS, rejection_weight=0.5, recompute=True)
    batches = [step.inputs(TEXTS.batch(texts)) for texts in ([0, 1, 2], [3, 4, 5])]
    plain = [gradients(module, inputs) for inputs in batches]
    counters.clear()
    compiled.compile_parts(module)
    for inputs, wanted in zip(batches, plain, strict=True):
        assert_equal(gradients(module, inputs), wanted)
    assert counters["stats"]["calls_captured"] > 20 and not counters["graph_break"]


@pytest.mark.parametrize(
    ("backend", "more", "match"),
    [
        ("none_such", [], "--compile true does not work here .*none_such"),
        ("eager", ["--deepspeed_config=configs/deepspeed/zero3.json"], "unsupported: --compile true at ZeRO 3"),
    ],
    ids=["no compiler", "ZeRO 3"],
)
def test_what_cannot_be_compiled_is_refused(backend, more, match, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", backend)
    make_toy(tmp_path, texts=4)
    with pytest.raises(UserError, match=match) as caught:
        eagle3.main(flags(tmp_path, tmp_path / "run", "--compile=true", *more))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
