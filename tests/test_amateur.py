"""train/amateur.py: pruning, distillation, and a folder that stock transformers loads as the expert's sibling."""

import json

import pytest
import torch
from tiny import KINDS, tiny_causal_lm, tiny_pair
from toy_training import amateur_flags, make_toy
from transformers import AutoModelForCausalLM

import train.amateur as entry
from dcd_core.divergence import acceptance, kl
from dcd_core.errors import UserError
from dcd_core.models import load_pair
from train import unroll
from train.amateur import main
from train.batches import Texts
from train.distil import Distil, DistilStep, answer_rows, compare, count_answer_rows, distillation_sums
from train.pruning import parse_layers, prune


def options(toy, output, *more):
    return amateur_flags(toy, output, f"--eval_tokens={toy / 'held_out.parquet'}", "--epochs=3", *more)


@pytest.mark.parametrize(
    "text, layers", [("0-3", [0, 1, 2, 3]), ("0,2,7", [0, 2, 7]), ("0-1, 5-6", [0, 1, 5, 6]), ("4", [4])]
)
def test_layer_lists(text, layers):
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize(
    "text, message",
    [
        ("0-8", "layer 8 does not exist"),
        ("3,1", "ascending"),
        ("1,1", "ascending"),
        ("3-1", "backwards"),
        ("", "neither a layer nor a range"),
        ("a-b", "neither a layer nor a range"),
        ("0-7", "would be the expert"),
    ],
)
def test_bad_layer_lists_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_layers(text, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_keeps_the_chosen_layers(kind):
    model = tiny_causal_lm(kind)
    small = prune(model, [0, 2, 7], train_embeddings=False)
    assert small.config.num_hidden_layers == 3 and len(small.model.layers) == 3
    for new, old in enumerate([0, 2, 7]):
        assert torch.equal(small.model.layers[new].mlp.up_proj.weight, model.model.layers[old].mlp.up_proj.weight)
    # the same function as running the expert without the other layers
    keep, model.model.layers = model.model.layers, torch.nn.ModuleList([model.model.layers[i] for i in (0, 2, 7)])
    model.model.config.num_hidden_layers = 3
    ids = torch.randint(8, 96, (1, 9))
    with torch.no_grad():
        assert torch.allclose(small(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-5)
    model.model.layers = keep
    trained = {name for name, parameter in small.named_parameters() if parameter.requires_grad}
    assert "model.norm.weight" in trained and not trained & {"model.embed_tokens.weight", "lm_head.weight"}
    assert prune(tiny_causal_lm(kind), [0], train_embeddings=True).lm_head.weight.requires_grad


def test_answer_rows_predict_answer_tokens_and_the_end_of_turn(tmp_path):
    toy = make_toy(tmp_path)
    texts = Texts.load(str(toy / "train.parquet"), 100, 96)
    batch = texts.batch([0, 1, 5])
    rows = answer_rows(batch)
    for row, index in enumerate([0, 1, 5]):
        spans = texts.samples[index].answer_spans
        expected = [place - 1 for start, end in spans for place in range(start, end)]
        assert rows[row].nonzero()[:, 0].tolist() == expected
        assert count_answer_rows(spans) == len(expected)


def test_the_loss_is_the_divergence_of_the_core():
    torch.manual_seed(0)
    own, expert = torch.randn(6, 20, dtype=torch.float64, requires_grad=True), torch.randn(6, 20, dtype=torch.float64)
    loss, correct, accepted = distillation_sums(own, expert)
    log_p, log_q = expert.log_softmax(-1), own.log_softmax(-1)
    assert torch.allclose(loss, kl(log_p, log_q).sum())
    assert torch.allclose(*(torch.autograd.grad(value.sum(), own)[0] for value in (loss, kl(log_p, log_q))))
    assert torch.allclose(accepted, acceptance(log_q, log_p).sum())
    assert correct == (own.argmax(-1) == expert.argmax(-1)).sum()


def test_chunks_give_the_same_loss(tmp_path, monkeypatch):
    toy, pair = make_toy(tmp_path), tiny_pair("qwen3")
    texts = Texts.load(str(toy / "train.parquet"), 100, 96)
    results = []
    for budget in (2**25, 96 * 5):
        monkeypatch.setattr(unroll, "LOGIT_BUDGET", budget)
        module = Distil(prune(pair.expert.model, [0, 4], False), 96)
        ((loss, sums),) = DistilStep(pair.expert)([module], texts.batch([0, 1, 2]), [10.0])
        loss.backward()
        results.append((loss, sums, module.amateur.model.norm.weight.grad))
    assert all(torch.allclose(one, two, rtol=1e-5) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_model_that_the_pair_loader_takes(kind, tmp_path, capsys):
    toy = make_toy(tmp_path / "toy", kind)
    assert main(options(toy, tmp_path / "run")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"amateur -> {tmp_path / 'run' / 'model'}; held-out KL ") and "top-1 agreement" in last
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_hidden_layers == 4 and model.generation_config.eos_token_id == 3
    pair = load_pair(str(toy / "expert"), str(tmp_path / "run" / "model"), device="cpu")
    assert pair.amateur.vocab == 96
    # frozen parts are the expert's own
    assert torch.equal(model.lm_head.weight, pair.expert.model.lm_head.weight)
    assert torch.equal(model.get_input_embeddings().weight, pair.expert.embedding.weight)
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    losses = [entry["loss"] for entry in found["history"]]
    assert losses[-1] < losses[0]
    held_out = found["held_out"]
    assert held_out["kl"] > 0 and 0 <= held_out["top1_agreement"] <= 1 and held_out["expert_perplexity"] > 1
    assert found["latency"]["latency_ratio"] > 0 and found["layers"] == [0, 1, 2, 6]
    # what was measured is what was saved
    again = compare(pair, Texts.load(str(toy / "held_out.parquet"), 2048, 96))
    assert again == pytest.approx(held_out)


def test_the_expert_compared_with_itself_agrees_fully(tmp_path):
    toy = make_toy(tmp_path / "toy")
    pair = load_pair(str(toy / "expert"), str(toy / "expert"), device="cpu")
    found = compare(pair, Texts.load(str(toy / "held_out.parquet"), 2048, 96))
    assert found["top1_agreement"] == 1 and found["acceptance"] == pytest.approx(1) and found["kl"] < 1e-6
    assert found["expert_perplexity"] == found["amateur_perplexity"]


def test_resuming_gives_the_same_amateur(tmp_path):
    import shutil

    toy = make_toy(tmp_path / "toy", texts=12)
    steps = ["--save_every=4", "--keep=3"]
    main(options(toy, tmp_path / "run", *steps))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again" / "metrics.json").unlink()
    shutil.rmtree(tmp_path / "again" / "model")
    newest = sorted((tmp_path / "again" / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    main(options(toy, tmp_path / "again", *steps))
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "model") for run in ("run", "again"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_dry_run_needs_the_configuration_only(tmp_path, monkeypatch, capsys):
    toy = make_toy(tmp_path / "toy")
    (toy / "expert" / "model.safetensors").unlink()
    monkeypatch.setattr(entry, "start", lambda *_: pytest.fail("a dry run starts nothing"))
    assert main(options(toy, tmp_path / "run", "--dry_run")) == 0
    printed = capsys.readouterr().out
    assert "layers [0, 1, 2, 6]" in printed and "optimiser steps: 24" in printed


@pytest.mark.parametrize(
    "change, message",
    [
        (["--keep_layers="], "all needed"),
        (["--keep_layers=0-9"], "layer 9 does not exist"),
        (["--eval_tokens=no.parquet"], "no.parquet"),
        (["--warmup_steps=3"], "within the 3"),
    ],
)
def test_bad_settings_are_refused(tmp_path, change, message):
    toy = make_toy(tmp_path / "toy", texts=4)
    with pytest.raises(UserError, match=message):
        main(options(toy, tmp_path / "run", *change))
    assert not (tmp_path / "run").exists()
