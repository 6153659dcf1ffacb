"""What --dry_run counts is what a run takes, by the allocator's own reports; more than there is gets a warning."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from toy_training import amateur_flags, family_flags, flags
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_prep.token_files import Sample, write_tokens
from train import amateur, cross_alpha, dual_drafter, eagle3, step_memory
from train.traced import tracing

SHAPES = {
    "activations": {"hidden": 32, "length": 200, "vocab": 96},
    "logits": {"hidden": 16, "length": 48, "vocab": 3000},
    "optimiser": {"hidden": 128, "length": 12, "vocab": 96},
}
"""What takes most of the memory, and a toy world where it does."""
RUNS = {
    "bf16": (eagle3, flags, ["--dtype=bfloat16", "--expert_dtype=bfloat16"]),
    "accumulated": (eagle3, flags, ["--batch_size=2", "--gradient_accumulation=2"]),
    "one member": (cross_alpha, family_flags, ["--train_alphas", "0.3"]),
    "four members": (cross_alpha, family_flags, []),
    "dual": (dual_drafter, family_flags, []),
    "recomputed": (eagle3, flags, ["--head_layers=2", "--recompute=true"]),
    "amateur": (amateur, amateur_flags, []),
}
CASES = [
    ("activations", "one member"),
    ("activations", "recomputed"),
    ("logits", "accumulated"),
    ("logits", "dual"),
    ("logits", "amateur"),
    ("optimiser", "bf16"),
    ("optimiser", "four members"),
    ("optimiser", "amateur"),
]


def make_world(folder: Path, hidden: int, length: int, vocab: int) -> Path:
    """A pair of models and texts of one length."""
    words = ["<unk>", "<pad>", "<x>", "<end>", *(f"w{index}" for index in range(vocab - 4))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<end>")
    for role, layers in (("expert", 8), ("amateur", 4)):
        torch.manual_seed(layers)
        shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": vocab}
        heads = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
        LlamaForCausalLM(LlamaConfig(**shape, **heads, eos_token_id=3)).save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    generator = np.random.default_rng(0)
    for name, count in (("train", 8), ("held_out", 1)):
        ids = generator.integers(8, vocab, (count, length)).astype(np.int32)
        spans = ((length // 4, length),)
        write_tokens(folder / f"{name}.parquet", [Sample(f"{name}{i}", row, spans) for i, row in enumerate(ids)], {})
    return folder


def traced_peak(run, monkeypatch) -> int:
    """Most bytes of CPU tensors alive at once, by every allocation and release."""
    # it would make a tree of all operations, which takes longer than the run
    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", lambda *_args, **_named: [])
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # one thread is traced
    gc.collect()  # else what an earlier run left would be released in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


def counted(main, argv: list[str], monkeypatch) -> step_memory.Memory:
    found = []
    own = step_memory.Memory.describe
    monkeypatch.setattr(step_memory.Memory, "describe", lambda self, what: found.append(self) or own(self, what))
    assert main([*argv, "--dry_run"]) == 0
    return found[0]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    return {name: make_world(folder / name, **shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("shape, run", CASES)
def test_the_count_is_within_a_tenth_of_the_traced_peak(shape, run, worlds, tmp_path, monkeypatch):
    script, all_flags, more = RUNS[run]
    world = worlds[shape]
    draft = [] if script is amateur else [f"--draft_vocab_size={SHAPES[shape]['vocab'] // 2 - 8}"]
    draft = ["--draft_vocab_size=40"] if draft and shape != "logits" else draft
    argv = all_flags(world, tmp_path / "run", "--max_steps=1", "--warmup_steps=0", *draft, *more)
    argv.append(f"--eval_tokens={world / 'held_out.parquet'}")
    memory = counted(script.main, argv, monkeypatch)
    peak = traced_peak(lambda: script.main(argv), monkeypatch)
    print(f"| {shape} | {run} | {memory.peak / 2**20:.2f} | {peak / 2**20:.2f} | {memory.peak / peak - 1:+.1%} |")
    assert memory.peak == pytest.approx(peak, rel=0.1)


def test_recomputation_is_counted(worlds, tmp_path, monkeypatch):
    argv = flags(worlds["activations"], tmp_path / "run", "--draft_vocab_size=40", "--warmup_steps=0")
    kept, again = (counted(eagle3.main, [*argv, f"--recompute={word}"], monkeypatch) for word in ("false", "true"))
    assert again.peak < 0.7 * kept.peak and (again.frozen, again.trained) == (kept.frozen, kept.trained)


def test_more_than_there_is_is_said(worlds, tmp_path, monkeypatch, capsys):
    argv = flags(worlds["activations"], tmp_path / "run", "--draft_vocab_size=40", "--warmup_steps=0", "--dry_run")
    assert eagle3.main(argv) == 0
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(step_memory, "device_memory", lambda: (2**20, "a small GPU", 1))
    assert eagle3.main(argv) == 0
    assert "warning: a small GPU has 0.00 GiB" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_texts_that_are_not_there_yet_count_as_full(worlds, tmp_path, monkeypatch):
    """Nothing known: answers of the full length. Known texts, which are shorter, take less."""
    argv = flags(
        worlds["activations"], tmp_path / "run", "--draft_vocab_size=40", "--warmup_steps=0", "--max_length=400"
    )
    unknown = counted(eagle3.main, [*argv, f"--train_tokens={tmp_path / 'none.parquet'}"], monkeypatch)
    known = counted(eagle3.main, argv, monkeypatch)
    assert unknown.peak > 2 * known.peak and unknown.frozen == known.frozen


def test_the_tracer_sees_what_lives_at_once():
    with tracing() as traced:
        one = torch.empty(100, 10, device="meta")
        assert traced.alive == traced.peak == 4000
        view = one[:50]
        assert traced.alive == 4000
        del one
        assert traced.alive == 4000  # the view holds it
        two = view + 1
        del view, two
        assert traced.alive == 0 and traced.peak == 6000
        picked = torch.empty(4, 10, device="meta")[torch.tensor([True, False, True, False])]
        assert picked.shape == (2, 10)  # masks keep their values
