"""The EAGLE3 head: shapes, rotary positions, decoding step, and its parallel unroll."""

import pytest
import torch
from tiny import KINDS, tiny_config, tiny_model
from tiny_world import tiny_head
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dcd_core.errors import UserError
from dcd_core.heads import row_attention
from dcd_core.heads.eagle3 import Eagle3Config, Eagle3Head
from dcd_core.heads.rope import Rotary, read_rope, rotate, write_rope
from dcd_core.heads.row_attention import attend_rows

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3 = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE},
)
# EAGLE-3's published head for Llama-3.1-8B-Instruct
SHAPES = {
    "fc.weight": [4096, 12288],
    "midlayer.self_attn.q_proj.weight": [4096, 8192],
    "midlayer.self_attn.k_proj.weight": [1024, 8192],
    "midlayer.self_attn.v_proj.weight": [1024, 8192],
    "midlayer.self_attn.o_proj.weight": [4096, 4096],
    "midlayer.mlp.gate_proj.weight": [14336, 4096],
    "midlayer.mlp.up_proj.weight": [14336, 4096],
    "midlayer.mlp.down_proj.weight": [4096, 14336],
    "midlayer.input_layernorm.weight": [4096],
    "midlayer.hidden_norm.weight": [4096],
    "midlayer.post_attention_layernorm.weight": [4096],
    "norm.weight": [4096],
    "lm_head.weight": [32000, 4096],
    "d2t": [32000],
    "t2d": [128256],
}


def loud_head(kind: str, dtype=torch.float32, seed: int = 1) -> Eagle3Head:
    """A head whose drafts depend strongly on everything: at std .02 errors would hide in small numbers."""
    head = Eagle3Head.from_expert(tiny_config(kind), seed=seed).to(dtype)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(8)
    return head


def test_shapes_for_llama31_8b_are_the_published_ones():
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config.from_expert(LLAMA3, 32000, (2, 16, 29)))
    assert {name: list(tensor.shape) for name, tensor in head.state_dict().items()} == SHAPES
    assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
    assert sum(parameter.numel() for parameter in head.parameters()) == pytest.approx(425e6, rel=0.003)


def test_head_dim_is_the_experts_own():
    config = Eagle3Config.from_expert(tiny_config("qwen3"), 20, (2, 4, 5))
    assert (config.head_dim, config.hidden_size // config.num_attention_heads) == (16, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_positions_are_the_experts(kind):
    config = tiny_config(kind)
    theirs = LlamaRotaryEmbedding(config)
    head = Eagle3Head.from_expert(config)
    positions = torch.arange(0, 400, 7)[None]
    cos, sin = theirs(torch.zeros(1), positions)
    mine = head.rotary.tables(positions, torch.float32)
    assert torch.equal(mine[0][:, 0], cos) and torch.equal(mine[1][:, 0], sin)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
    ],
)
def test_both_spellings_of_rotary_settings_are_read(fields):
    assert read_rope(fields) == (500000.0, LLAMA3_ROPE)
    assert read_rope(write_rope(*read_rope(fields))) == read_rope(fields)


def test_plain_and_missing_rotary_settings():
    assert read_rope({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}) == (1e6, None)
    assert read_rope({"rope_theta": 1e6, "rope_scaling": None}) == (1e6, None)
    assert read_rope({}) == (None, None)


def test_unknown_rotary_scaling_is_refused():
    with pytest.raises(UserError, match="longrope"):
        Rotary(10000.0, {"rope_type": "longrope"}, 8, 100)


def test_half_precision_does_not_round_the_frequencies():
    head = loud_head("llama3")
    before = head.rotary.inverse.clone()
    head.to(torch.bfloat16)
    assert head.rotary.inverse.dtype == torch.float32 and torch.equal(head.rotary.inverse, before)


def test_output_layer_starts_from_the_experts_rows():
    head = tiny_head("smol")
    rows = torch.randn(96, 32)
    head.initialise(0, rows)
    assert torch.equal(head.lm_head.weight, rows[head.target_ids])


def test_a_padded_expert_pads_the_map_not_the_draft_ids():
    head = tiny_head("qwen3")
    assert head.t2d.shape[0] == 104 and not head.t2d[96:].any()


def test_same_seed_same_weights():
    pairs = zip(loud_head("smol").parameters(), loud_head("smol").parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(loud_head("smol").fc.weight, loud_head("smol", seed=2).fc.weight)


def world(kind: str, dtype=torch.float64, batch: int = 2, length: int = 14):
    """Expert, head, and for random texts the features and embedded next tokens."""
    torch.manual_seed(3)
    expert, head = tiny_model(kind, dtype=dtype), loud_head(kind, dtype)
    ids = torch.randint(8, 96, (batch, length))
    features = expert.forward_full(ids, features=True).features
    following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
    return expert, head, ids, features, expert.embedding(following)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_step_equals_its_paths_as_chains(kind):
    expert, head, ids, features, embeds = world(kind)
    # nodes of the tree: 0 and 1 are children of the root row, 2 and 3 of 0, 4 of 1; paths 0-2, 0-3, 1-4
    parents, depths, tokens = [-1, -1, 0, 0, 1], [0, 0, 1, 1, 1], torch.randint(8, 96, (2, 5))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node, node] = True
        if parent >= 0:
            mask[node, parent] = True
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    cache = head.new_cache(2, 20)
    with torch.no_grad():
        head.step(embeds[:, :9], head.fuse(features[:, :9]), cache)
        cache.commit([9, 7])
        tree = head.step(
            expert.embedding(tokens),
            states,
            cache,
            tree_mask=mask.expand(2, 5, 5),
            depths=torch.tensor(depths).expand(2, 5),
        )
        for path in ([0, 2], [0, 3], [1, 4]):
            cache.rollback([9, 7])
            chain = head.step(expert.embedding(tokens[:, path]), states[:, path], cache)
            assert torch.allclose(chain, tree[:, path], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_does_not_feel_its_padding(kind):
    expert, head, ids, features, embeds = world(kind)
    rows = torch.tensor([[4, 5, 6, 7], [3, 4, 5, 0]])

    def unroll(some, length):
        def following(step, state):
            return embeds[some].gather(1, (rows[some] + step)[..., None].expand(-1, -1, 32))

        return list(head.unroll(features[some, :length], embeds[some, :length], rows[some], 3, following))

    padded = features.clone()
    padded[1, 10:] = 1e4
    features = padded
    both, alone = unroll(slice(0, 2), 14), unroll(slice(1, 2), 10)
    for step in range(3):
        assert torch.allclose(both[step][1, :3], alone[step][0, :3], atol=1e-12)


def dense_attention(query, rows, keys, values, own):
    """The definition: one softmax over keys 0..row and the draft's own keys, a row at a time."""
    output = torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            for index, row in enumerate(rows[batch].tolist()):
                own_keys = [key[batch, head // group, [index]] for key, _ in own]
                own_values = [value[batch, head // group, [index]] for _, value in own]
                seen = torch.cat([keys[batch, head // group, : row + 1], *own_keys])
                told = torch.cat([values[batch, head // group, : row + 1], *own_values])
                weights = torch.softmax(seen @ query[batch, head, index] / query.shape[-1] ** 0.5, dim=0)
                output[batch, head, index] = weights @ told
    return output


@pytest.mark.parametrize("budget", [None, 300, 1])
@pytest.mark.parametrize("own_steps", [0, 2])
def test_row_attention_is_exact_in_chunks_too(budget, own_steps):
    torch.manual_seed(0)
    rows = torch.tensor([[2, 3, 4, 7, 8], [1, 5, 6, 0, 0]])

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    query, keys, values = leaf(2, 4, 5, 6), leaf(2, 2, 9, 6), leaf(2, 2, 9, 6)
    own = [(leaf(2, 2, 5, 6), leaf(2, 2, 5, 6)) for _ in range(own_steps)]
    leaves = [query, keys, values, *(tensor for pair in own for tensor in pair)]
    weight = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    mine, plain = attend_rows(query, rows, keys, values, own, budget), dense_attention(query, rows, keys, values, own)
    assert torch.allclose(mine, plain, atol=1e-12)
    for one, two in zip(
        torch.autograd.grad((mine * weight).sum(), leaves),
        torch.autograd.grad((plain * weight).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(one, two, atol=1e-12)


def test_attention_scores_stay_within_their_budget(monkeypatch):
    """Memory: no chunk holds more scores than asked for, whatever the length of the text."""
    sizes = []
    original = row_attention._attend

    def spy(query, rows, keys, values, *own):
        sizes.append(query.shape[0] * query.shape[1] * query.shape[2] * (keys.shape[2] + len(own) // 2))
        return original(query, rows, keys, values, *own)

    monkeypatch.setattr(row_attention, "_attend", spy)
    rows = torch.arange(200)[None]
    attend_rows(torch.randn(1, 4, 200, 8), rows, torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 8), [], 10_000)
    assert len(sizes) > 10 and max(sizes) <= 10_000


def test_rotation_keeps_lengths():
    rotary = Rotary(10000.0, None, 8, 100)
    states = torch.randn(1, 2, 5, 8)
    turned = rotate(states, rotary.tables(torch.arange(5)[None] * 9, torch.float32))
    assert torch.allclose(states.norm(dim=-1), turned.norm(dim=-1), atol=1e-5)
    assert torch.equal(turned[:, :, 0], states[:, :, 0])
