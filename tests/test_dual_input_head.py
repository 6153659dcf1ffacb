"""The dual-input head and the capacity of heads: where they start, unroll = decoding step, what stands on disk."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from tiny import KINDS, tiny_config, tiny_model
from tiny_world import tiny_head

from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head, load_head_config, save_head
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import assemble
from dcd_core.model_identity import model_identity
from dcd_core.models import LanguageModel, Pair

TAPS = (1, 2, 3)
CAPACITIES = ((1, None), (2, 24))
LENGTH, FIRST, STEPS = 14, 3, 4


def fresh_pair(kind: str, layers: int = 1, width: int | None = None, dtype=torch.float64):
    """An expert-only head and a dual-input head of the same seed."""
    shape = dict(seed=1, layers=layers, intermediate_size=width)
    alone = Eagle3Head.from_expert(tiny_config(kind), **shape)
    both = DualInputHead.from_pair(tiny_config(kind), tiny_config(kind, 5), amateur_feature_layers=TAPS, **shape)
    return alone.to(dtype), both.to(dtype)


def loud(head, amateur: bool = True):
    """Weights so large that an error cannot hide, also in what reads the amateur."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(8)
        own, others = head.config.feature_widths
        if amateur and others:
            head.fc.weight[:, own:] = 0.1 * torch.randn(head.fc.weight[:, own:].shape, generator=generator)
    return head


def read_by(head, kind: str):
    """Tokens, embeddings, and the features that this head reads of two texts."""
    torch.manual_seed(3)
    expert = tiny_model(kind, dtype=torch.float64)
    ids = torch.randint(8, 96, (2, LENGTH))
    features = [expert.forward_full(ids, features=True).features]
    if head.kind == "dual_input":
        amateur = tiny_model(kind, seed=100, layers=5, dtype=torch.float64)
        amateur = type(amateur)(amateur.model, 96, TAPS)
        features.append(amateur.forward_full(ids, features=True).features)
    return expert.embedding, ids, torch.cat(features, dim=-1)


@torch.no_grad()
def unrolled(head, embedding, ids, features) -> torch.Tensor:
    """Logits of all steps and rows, from the unroll that trains."""
    rows = torch.arange(FIRST, LENGTH - STEPS)[None].expand(2, -1)
    shifted = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
    states = head.unroll(
        features, embedding(shifted), rows, STEPS, lambda step, state: embedding(ids.gather(1, rows + 1 + step))
    )
    return torch.stack([head.logits(state) for state in states])


@torch.no_grad()
def decoded(head, embedding, ids, features) -> torch.Tensor:
    """The same by the step that decodes: the text before every root, then token after token."""
    columns = []
    for root in range(FIRST, LENGTH - STEPS):
        cache = head.new_cache(2, LENGTH + STEPS)
        state = head.step(embedding(ids[:, 1 : root + 2]), head.fuse(features[:, : root + 1]), cache)[:, -1:]
        cache.commit([root + 1] * 2)
        steps = [head.logits(state)]
        for step in range(1, STEPS):
            state = head.step(embedding(ids[:, root + 1 + step, None]), state, cache)
            cache.commit([1, 1])
            steps.append(head.logits(state))
        columns.append(torch.stack(steps))
    return torch.cat(columns, dim=2)


@pytest.mark.parametrize("layers, width", CAPACITIES)
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_unroll_equals_decoding_step(kind, dual, layers, width):
    head = loud(fresh_pair(kind, layers, width)[dual])
    world = read_by(head, kind)
    one, two = unrolled(head, *world), decoded(head, *world)
    assert one.shape == two.shape and one.std() > 0.1
    assert (one - two).abs().max() < 1e-12


@pytest.mark.parametrize("layers, width", CAPACITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_start_as_the_same_function(kind, layers, width):
    alone, both = fresh_pair(kind, layers, width)
    theirs = dict(alone.named_parameters())
    for name, weight in both.named_parameters():
        own = alone.config.feature_widths[0]
        assert torch.equal(weight[:, :own] if name == "fc.weight" else weight, theirs[name])
    assert set(theirs) == {name for name, _ in both.named_parameters()}
    assert not both.fc.weight[:, own:].any() and both.fc.weight.shape == (32, 2 * own)
    embedding, ids, features = read_by(both, kind)
    assert torch.equal(
        unrolled(loud(both, amateur=False), embedding, ids, features),
        unrolled(loud(alone), embedding, ids, features[..., :own]),
    )


def test_the_amateur_is_read_once_its_columns_are_not_zero():
    head = loud(fresh_pair("llama3")[1])
    embedding, ids, features = read_by(head, "llama3")
    other = features.clone()
    other[:, 5, head.config.feature_widths[0] :] += 1
    changed = (unrolled(head, embedding, ids, features) - unrolled(head, embedding, ids, other)).abs().amax((0, 1, 3))
    assert not changed[:2].any() and (changed[2:] > 1e-3).all(), "rows from position 5 on, the third root"


def test_capacity_does_not_change_what_the_heads_have_in_common():
    shallow, deep = (Eagle3Head.from_expert(tiny_config("llama3"), seed=4, layers=layers) for layers in (1, 3))
    weights = dict(deep.named_parameters())
    assert all(torch.equal(weight, weights.pop(name)) for name, weight in shallow.named_parameters())
    assert len(deep.further) == 2 and all(name.startswith("further.") for name in weights)
    wide = Eagle3Head.from_expert(tiny_config("llama3"), intermediate_size=100)
    assert wide.midlayer.mlp.gate_proj.weight.shape == (100, 32)
    for shape in ({"layers": 0}, {"intermediate_size": 0}):
        with pytest.raises(UserError, match="one layer and a width of 1 or more"):
            Eagle3Head.from_expert(tiny_config("llama3"), **shape)


def test_an_amateur_with_few_layers_needs_its_taps():
    with pytest.raises(UserError, match="5 layers has no distinct EAGLE3 taps"):
        DualInputHead.from_pair(tiny_config("smol"), tiny_config("smol", 5))
    head = DualInputHead.from_pair(tiny_config("smol"), tiny_config("smol", 9))
    assert head.config.amateur_feature_layers == (2, 4, 6)


def test_a_class_makes_only_its_own_kind():
    alone, both = fresh_pair("smol")
    with pytest.raises(UserError, match="of a dual_input head, not of a head of kind eagle3"):
        Eagle3Head(both.config)
    with pytest.raises(UserError, match="of a eagle3 head, not of a head of kind dual_input"):
        DualInputHead(alone.config)


# ---- on disk ---------------------------------------------------------------------------------------------------------


def amateur_of(kind: str, layers: int = 5, taps=TAPS):
    found = tiny_model(kind, seed=100, layers=layers)
    return type(found)(found.model, 96, taps)


@pytest.mark.parametrize("layers, width", CAPACITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, layers, width, tmp_path):
    head = fresh_pair(kind, layers, width, torch.float32)[1]
    head.config = head.config.replace(aligned_with="contrast", train_alpha=0.3)
    save_head(tmp_path / "head", loud(head))
    again = load_head(tmp_path / "head", tiny_model(kind), amateur_of(kind))
    assert type(again) is DualInputHead and again.config == head.config == load_head_config(tmp_path / "head")
    theirs = again.state_dict()
    assert all(torch.equal(tensor, theirs.pop(name)) for name, tensor in head.state_dict().items()) and not theirs
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert fields["architectures"] == ["DualInputEagle3"] and fields["num_hidden_layers"] == layers
    assert fields["dcd"] == {
        "kind": "dual_input",
        "amateur_hidden_size": 32,
        "amateur_feature_layers": [1, 2, 3],
        "aligned_with": "contrast",
        "train_alpha": 0.3,
    }


def test_a_deeper_expert_only_head_comes_back(tmp_path):
    head = Eagle3Head.from_expert(tiny_config("llama3"), layers=2, aligned_with="amateur")
    save_head(tmp_path / "head", head)
    again = load_head(tmp_path / "head", tiny_model("llama3"))
    assert again.config == head.config and torch.equal(
        again.further[0].mlp.up_proj.weight, head.further[0].mlp.up_proj.weight
    )


def test_a_plain_head_says_nothing_that_public_readers_do_not_know(tmp_path):
    save_head(tmp_path / "head", tiny_head("llama3"))
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert "dcd" not in fields and fields["num_hidden_layers"] == 1


def test_the_head_of_another_amateur_is_refused(tmp_path):
    save_head(tmp_path / "head", fresh_pair("llama3")[1])
    folder, expert = tmp_path / "head", tiny_model("llama3")
    with pytest.raises(UserError, match="dual-input head, which reads an amateur.*give --amateur"):
        load_head(folder, expert)
    with pytest.raises(
        UserError, match=r"another amateur than .*amateur_feature_layers \(1, 2, 3\) \(amateur: \(1, 2, 4"
    ):
        load_head(folder, expert, amateur_of("llama3", taps=(1, 2, 4)))
    fewer = amateur_of("llama3")
    fewer.vocab = 90
    with pytest.raises(UserError, match=r"real ids 96 \(amateur: 90\)"):
        load_head(folder, expert, fewer)
    fields = json.loads((folder / "config.json").read_text())
    fields["dcd"]["amateur_hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"amateur_hidden_size 64 \(amateur: 32\)"):
        load_head(folder, expert, amateur_of("llama3"))


def test_an_amateur_of_the_same_shape_with_other_weights_is_refused(tmp_path):
    """A head that names its amateur is held to it, in any dtype; one that does not takes what fits."""
    own, kind = amateur_of("llama3"), "llama3"
    head = fresh_pair(kind)[1]
    head.config = head.config.replace(amateur_identity=model_identity(own.model))
    save_head(tmp_path / "head", head)
    assert load_head(tmp_path / "head", tiny_model(kind), own).config == head.config
    load_head(tmp_path / "head", tiny_model(kind), LanguageModel(copy.deepcopy(own.model).bfloat16(), 96, TAPS))
    load_head(tmp_path / "head", tiny_model(kind), LanguageModel(copy.deepcopy(own.model).half(), 96, TAPS))
    with torch.no_grad():
        own.model.model.layers[-1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(UserError, match="trained beside another amateur than .*other weights or settings; give that"):
        load_head(tmp_path / "head", tiny_model(kind), own)
    head.config = head.config.replace(amateur_identity="")
    save_head(tmp_path / "silent", head)
    load_head(tmp_path / "silent", tiny_model(kind), own)


def test_a_head_that_imitates_another_amateur_is_refused(tmp_path):
    """It reads the expert only, but its targets were made of an amateur. Without one at hand nothing can be said."""
    own, kind = amateur_of("llama3"), "llama3"
    for role in ("amateur", "contrast"):
        head = Eagle3Head.from_expert(tiny_config(kind), aligned_with=role, amateur_identity=model_identity(own.model))
        save_head(tmp_path / role, head)
        load_head(tmp_path / role, tiny_model(kind))
        load_head(tmp_path / role, tiny_model(kind), own)
        with pytest.raises(UserError, match=f"{role} was trained beside another amateur than"):
            load_head(tmp_path / role, tiny_model(kind), tiny_model(kind, seed=5))
    # as objects too, whoever loaded them
    plain, follows = Eagle3Head.from_expert(tiny_config(kind)), head
    imitates = load_head(tmp_path / "amateur", tiny_model(kind))
    for amateur, refused in ((own, False), (tiny_model(kind, seed=5), True)):
        pair = Pair(tiny_model(kind), amateur, None)
        for name, heads in (("dual", (plain, imitates)), ("dcd_eagle3", (follows, None))):
            with pytest.raises(UserError, match="trained beside another") if refused else nullcontext():
                assemble(name, pair, heads[0], amateur_head=heads[1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "triple"}, "kind is one of eagle3, dual_input"),
        ({"aligned_with": "nobody"}, "aligned_with one of expert, amateur, contrast"),
        ({"amateur_input": "mirrored"}, "amateur_input one of dual, amateur_zeroed, amateur_shuffled"),
        ({"alpha": 1}, "it holds kind, amateur_hidden_size"),
        ({"kind": "eagle3", "amateur_input": "amateur_zeroed"}, "reads no amateur, and says of one: amateur_zeroed"),
        ({"amateur_identity": 7}, "knows no amateur by 7"),
        (
            {"kind": "eagle3", "amateur_identity": "a7"},
            "aligned with the expert, knows no amateur by 'a7'",
        ),
        ({"kind": "eagle3"}, "kind eagle3 cannot read an amateur of these shapes"),
        ({"amateur_feature_layers": [1, 1, 2]}, "kind dual_input cannot read an amateur of these shapes"),
        ({"amateur_hidden_size": 0}, "kind dual_input cannot read an amateur of these shapes"),
    ],
)
def test_what_a_head_declares_is_checked(tmp_path, changes, message):
    save_head(tmp_path / "head", fresh_pair("llama3")[1])
    path = tmp_path / "head" / "config.json"
    fields = json.loads(path.read_text())
    fields["dcd"].update(changes)
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message):
        load_head(tmp_path / "head")
