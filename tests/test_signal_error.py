"""The study end to end on tiny models: what it records, that it goes on after a stop, and what it refuses."""

import json
import shutil

import pytest
import tiny
import torch
from tiny_world import make_world, model_flags, tiny_head

import diagnostics.signal_error as entry
from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import save_head
from dcd_core.methods import assemble
from diagnostics.histories import History, Study
from diagnostics.loading import inputs_key, short_name
from diagnostics.records import read_records


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a tiny pair and head, and a prompt file."""
    return make_world(tmp_path_factory.mktemp("world"))


def flags(world, output, *more):
    fast = ["--alphas", "0.1", "0.5", "--max_new_tokens=8", "--batch=2", "--device=cpu"]
    return [*model_flags(world), f"--output={output}", *fast, *more]


def test_records_cover_every_drafted_position(world, tmp_path, capsys):
    assert entry.main(flags(world, tmp_path / "out")) == 0
    found = read_records(tmp_path / "out" / "positions.parquet", "positions")
    rows = found.rows
    assert set(rows["alpha"]) == {0.1, 0.5} and (rows["alpha"] == rows["rollout_alpha"]).all()
    assert set(rows["prompt_id"]) == {f"p{index}" for index in range(5)}
    assert set(rows["pair"]) == {"expert / amateur / head"} and set(rows["dataset"]) == {"prompts"}
    for _, part in rows.groupby(["alpha", "prompt_id"]):
        assert part["position"].tolist() == list(range(1, len(part) + 1))
    assert found.provenance["settings"]["max_new_tokens"] == 8
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    shares = metrics["by_alpha"]["pooled"]
    assert shares["positions"] == len(rows)
    assert shares["share_signal_below_1"]["estimate"] == pytest.approx((rows["signal"] < 1).mean())
    assert shares["share_error_above_2"]["estimate"] == pytest.approx((rows["error_reverse"] >= 2).mean())
    assert not (tmp_path / "out" / "parts").exists()
    printed = capsys.readouterr().out
    assert "signal < 1 nat" in printed and "\nprompts " in printed


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_drafter_row_is_the_one_that_decoding_drafts_with(kind, monkeypatch):
    """KL(e||p) of every position from the decode loop's own first drafts: shift, mask or rope errors would show."""
    pair = tiny.tiny_pair(kind, dtype=torch.float64)
    head = tiny_head(kind).double()
    prompt, alpha = Prompt("p", [2, 5, 11, 30, 3, 41, 9]), 0.5
    settings = Settings(target=Target(alpha=alpha, temperature=0.0), max_new_tokens=10)
    (rollout,) = decode(assemble("cd", pair), [prompt], settings)
    found = History.read(Study(pair, head), prompt, rollout.ids).quantities(alpha)

    record, real = [], head.logits

    def recorded(states):
        record.append(real(states))
        return record[-1]

    monkeypatch.setattr(head, "logits", recorded)
    settings = Settings(target=Target(alpha=alpha, temperature=0.0), max_new_tokens=10, gamma=1)
    (again,) = decode(assemble("dcd_eagle3", pair, head), [prompt], settings)
    assert again.ids == rollout.ids
    place = 1
    for first, made in zip(record, again.rounds, strict=True):
        ids = torch.tensor([prompt.ids + rollout.ids[:place]])
        log_p = pair.expert.forward_full(ids).logits[0, -1].log_softmax(-1)
        log_q = pair.amateur.forward_full(ids).logits[0, -1].log_softmax(-1)
        log_e = first[0, 0].log_softmax(-1)
        error = (log_e.exp() * (log_e - log_p[head.target_ids])).sum().item()
        assert found["error_reverse"][place - 1] == pytest.approx(error, abs=1e-9)
        log_pi = target_log_probs([log_p, log_q], Target(alpha=alpha))
        assert log_pi.argmax().item() == rollout.ids[place]
        assert found["signal"][place - 1] == pytest.approx(abs(log_p - log_q)[rollout.ids[place]].item(), abs=1e-9)
        place += made.emitted


def test_a_stopped_run_goes_on_and_gives_the_same_records(world, tmp_path, monkeypatch):
    entry.main(flags(world, tmp_path / "whole"))
    calls, real = [], entry.measure_batch

    def stops_at_the_third(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(entry, "measure_batch", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags(world, tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / "positions.parquet").exists()
    with pytest.raises(UserError, match="unfinished work with other settings"):
        entry.main(flags(world, tmp_path / "stopped", "--max_new_tokens=9"))
    entry.main(flags(world, tmp_path / "stopped"))
    assert len(calls) == 3 + 4  # two of the six batches were not done again
    whole, stopped = (
        read_records(tmp_path / name / "positions.parquet", "positions").provenance["content_hash"]
        for name in ("whole", "stopped")
    )
    assert whole == stopped
    with pytest.raises(UserError, match="finished run"):
        entry.main(flags(world, tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--alphas", "-0.1"], "0 or more"),
        (["--alphas", "0.1", "0.1"], "twice"),
        (["--max_new_tokens=1"], "at least 2"),
        (["--batch=0"], "--batch must be at least 1"),
        (["--prompts=nowhere.jsonl"], "nowhere.jsonl"),
        (["--head=nowhere"], "nowhere"),
        (["--template_args={"], "not JSON"),
    ],
)
def test_refusals_leave_nothing_behind(world, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        entry.main(flags(world, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "bad.jsonl is empty"),
        ("{not json", "line 1 is not JSON"),
        ('{"messages": []}', "line 1 has no 'id'; .*conversations.py"),
        ('{"id": "a", "messages": [{"role": "user"}]}', "without role and content"),
        ('{"id": "a", "messages": [{"role": "assistant", "content": "x"}]}', "has no user message"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n' * 2, "line 2: the id 'a' occurs twice"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(world, tmp_path, lines, message):
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(UserError, match=message):
        entry.main(flags(world, tmp_path / "out", f"--prompts={tmp_path / 'bad.jsonl'}"))


def test_models_are_called_by_their_own_names(tmp_path):
    """A link, a cache's hash and the folder "model" of a training run say nothing to a reader."""
    (tmp_path / "smol-instruct-0123456789ab").mkdir()
    (tmp_path / "expert").symlink_to(tmp_path / "smol-instruct-0123456789ab")
    (tmp_path / "amateur" / "model").mkdir(parents=True)
    assert short_name(str(tmp_path / "expert")) == "smol-instruct"
    assert short_name(str(tmp_path / "amateur" / "model")) == "amateur"
    assert short_name("meta-llama/Llama-3.1-8B-Instruct") == "Llama-3.1-8B-Instruct"
    assert short_name("") == "none"


def test_another_head_in_the_same_place_is_noticed(world, tmp_path):
    """A stopped run must not be finished with retrained weights."""
    copied = tmp_path / "world"
    shutil.copytree(world, copied)
    before = inputs_key(str(copied / "prompts.jsonl"), str(copied / "head"))
    head = tiny_head("smol")
    with torch.no_grad():
        head.fc.weight.add_(1e-3)
    save_head(copied / "head", head)
    assert inputs_key(str(copied / "prompts.jsonl"), str(copied / "head")) != before
    assert inputs_key(str(world / "prompts.jsonl"), str(world / "head"))["prompts"] == before["prompts"]
