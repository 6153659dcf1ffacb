"""A model's identity sees every layer that was trained on, and nothing that does not decide what the model computes."""

import pytest
import torch
from tiny import tiny_causal_lm

from dcd_core.model_identity import model_identity


def test_every_weight_and_the_settings_that_decide_are_seen():
    model = tiny_causal_lm("smol")
    seen = {model_identity(model)}
    for weight in model.parameters():
        with torch.no_grad():
            weight[-1] += 1
        seen.add(model_identity(model))
    for name, value in (("rms_norm_eps", 0.5), ("num_attention_heads", 3)):
        setattr(model.config, name, value)
        seen.add(model_identity(model))
    assert len(seen) == 1 + len(list(model.parameters())) + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_it_is_loaded_in_and_the_version_that_wrote_it_do_not_matter(tmp_path, dtype):
    model = tiny_causal_lm("qwen3", seed=3)
    found = model_identity(model)
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path, dtype=dtype)
    read.config.transformers_version = "0"
    assert model_identity(read) == found != model_identity(tiny_causal_lm("qwen3", seed=4))


def test_weights_of_any_shape_are_seen():
    """Quantisers keep single numbers beside matrices, and empty ones."""
    model = tiny_causal_lm("smol", seed=0)
    seen = {model_identity(model)}
    for shape in ((), (0,), (0, 4), (1,)):
        model.register_parameter("more", torch.nn.Parameter(torch.ones(shape)))
        seen.add(model_identity(model))
    model.more = torch.nn.Parameter(torch.full((1,), 2.0))
    assert len(seen | {model_identity(model)}) == 6
