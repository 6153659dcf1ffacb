"""The identity check passes on real methods, sees a fault in any of them, and is resumable."""

import json

import pytest
import tiny
import torch
from tiny_world import make_world, model_flags, tiny_head

import diagnostics.identity as entry
import diagnostics.identity_checks as module
from dcd_core.contrast import Target
from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.methods import METHODS


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), "qwen3", prompts=3)


def flags(world, output, *more):
    fast = ["--max_new_tokens=8", "--batch=2", "--gamma=3", "--device=cpu", "--loop_prompts=2", "--noise_prompts=2"]
    return [*model_flags(world), f"--output={output}", *fast, *more]


@pytest.mark.parametrize("shape", [[], ["--branch=2", "--nodes=5"]])
def test_all_methods_are_lossless(world, tmp_path, capsys, shape):
    able = {name: method for name, method in METHODS.items() if not method.reads_amateur}
    more = [f"--lm={world / 'amateur'}", f"--amateur_head={world / 'amateur_head'}"]
    everyone = [*more, "--methods", *(name for name in able if name not in ("ar", "cd"))]
    assert entry.main(flags(world, tmp_path / "out", *shape, *everyone)) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["passed"]
    seen = {(check["found"], check["expected"], check["alpha"], check["temperature"]) for check in found["checks"]}
    contrastive = [name for name, method in able.items() if method.contrast and name != "cd"]
    for alpha in (0.0, 0.1, 0.5):
        assert ("cd", "loop", alpha, 0.0) in seen
        for temperature in (0.0, 1.0):
            assert {(name, "cd", alpha, temperature) for name in contrastive} <= seen
    assert {("ar", "generate", 0.0, 0.0), ("expert_sd", "ar", 0.0, 0.0), ("expert_sd", "ar", 0.0, 1.0)} <= seen
    for check in found["checks"]:
        assert check["equal"] + check["near_ties"] == check["prompts"] > 0
    assert "every text is the same" in capsys.readouterr().out
    with pytest.raises(UserError, match="finished run"):
        entry.main(flags(world, tmp_path / "out"))
    with pytest.raises(UserError, match="give --lm"):
        entry.main(flags(world, tmp_path / "none", "--methods", "dcd_lm"))
    assert not (tmp_path / "none").exists()


def test_a_head_that_reads_both_models_is_lossless(world, tmp_path):
    own = [f"--head={world / 'dual_input'}", "--methods", "cross_alpha", "--alphas", "0.5"]
    assert entry.main(flags(world, tmp_path / "out", *own)) == 0
    checks = json.loads((tmp_path / "out" / "metrics.json").read_text())["checks"]
    assert {check["temperature"] for check in checks if check["found"] == "cross_alpha"} == {0.0, 1.0}
    with pytest.raises(UserError, match="method dual drafts with an EAGLE3 head, and --head is a dual-input head"):
        entry.main(flags(world, tmp_path / "none", own[0], "--methods", "dual"))


def test_a_fault_is_seen_and_the_exit_code_is_1(world, tmp_path, monkeypatch, capsys):
    """Negative control: the shipped loop, with the sign of alpha flipped in one method."""
    real = module.decode

    def flipped(method, prompts, settings, max_batch):
        if method.name == "dcd_ngram" and settings.target.alpha:
            weights = (1 - settings.target.alpha, settings.target.alpha)
            settings.target = Target(weights=weights, temperature=settings.target.temperature)
        return real(method, prompts, settings, max_batch=max_batch)

    monkeypatch.setattr(module, "decode", flipped)
    assert entry.main(flags(world, tmp_path / "out", "--methods", "dcd_ngram", "--alphas", "0.5")) == 1
    assert not (tmp_path / "out" / "metrics.json").exists(), "a failed check is no finished run"
    found = json.loads((tmp_path / "out" / "differences.json").read_text())
    assert not found["passed"]
    wrong = [check for check in found["checks"] if check["different"]]
    assert {check["found"] for check in wrong} == {"dcd_ngram"}
    assert all(one["gap"] >= 1e-3 for check in wrong for one in check["divergences"] if one["gap"] > 1e-3)
    printed = capsys.readouterr().out
    assert "differ by more than rounding" in printed and "gap of the two best scores" in printed


def test_a_near_tie_passes_but_is_counted(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("diagnostics.agreement.TIE", 100.0)
    real = module.stock_generate

    def altered(*arguments):
        texts = real(*arguments)
        return [[*text[:-1], (text[-1] + 1) % tiny.VOCAB] for text in texts]

    monkeypatch.setattr(module, "stock_generate", altered)
    only = ["--methods", "expert_sd", "--alphas", "0.1", "--loop_prompts=0", "--noise_prompts=0"]
    assert entry.main(flags(world, tmp_path / "out", *only)) == 0
    check = json.loads((tmp_path / "out" / "metrics.json").read_text())["checks"][0]
    assert (check["expected"], check["near_ties"], check["different"]) == ("generate", 3, 0)
    assert "ar = stock generate: p0 parts at token" in capsys.readouterr().out


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_plain_loop_is_the_argmax_of_whole_passes(kind):
    """Token by token, from logits of one pass over the finished text."""
    pair, target = tiny.tiny_pair(kind), Target(alpha=0.5, temperature=0.0)
    prompt = [2, 9, 33, 4]
    answer = module.cache_free([pair.expert, pair.amateur], target, prompt, (3,), 6)
    ids = torch.tensor([prompt + answer])
    rows = [one.forward_full(ids).logits[0].log_softmax(-1) for one in (pair.expert, pair.amateur)]
    best = (1.5 * rows[0] - 0.5 * rows[1]).argmax(-1)
    assert best[len(prompt) - 1 : -1].tolist() == answer
    assert len(answer) == 6 or answer[-1] == 3


def test_stock_generate_is_cut_after_the_stop_token():
    model = tiny.tiny_model("qwen3")
    prompts = [Prompt("a", [2, 9, 11]), Prompt("b", [2, 9, 11, 40, 41])]
    free = module.stock_generate(model, prompts, (3,), 6)
    stop = free[0][2]
    cut = module.stock_generate(model, prompts, (stop,), 6)
    assert cut[0] == free[0][: free[0].index(stop) + 1]


def test_a_stopped_check_goes_on(world, tmp_path, monkeypatch):
    calls, real = [], module.decode

    def stops(method, prompts, settings, max_batch):
        calls.append(method.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(method, prompts, settings, max_batch=max_batch)

    monkeypatch.setattr(module, "decode", stops)
    monkeypatch.setattr(module, "PORTION", 1)
    only = ["--methods", "dcd_ngram", "--alphas", "0.5", "--loop_prompts=0", "--noise_prompts=0"]
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "out", *only))
    assert entry.main(flags(world, tmp_path / "out", *only)) == 0
    # two batches of ar, cd and dcd_ngram; the first three are not written again
    assert calls == ["ar", "ar", "cd", "dcd_ngram"] + ["dcd_ngram", "cd", "dcd_ngram"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--methods", "cd"], "choose from expert_sd"),
        (["--alphas", "-1"], "0 or more"),
        (["--batch=0"], "--batch must be at least 1"),
        (["--branch=0"], "--branch must be at least 1"),
        (["--seed=-1"], "--seed must be at least 0"),
        (["--loop_prompts=-1"], "--loop_prompts must be at least 0"),
        (["--head=nowhere"], "nowhere"),
    ],
)
def test_refusals_leave_nothing_behind(world, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        entry.main(flags(world, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()


def test_the_tiny_head_can_draft_for_the_world(world):
    assert int(tiny_head("qwen3").target_ids[-1]) < tiny.VOCAB
