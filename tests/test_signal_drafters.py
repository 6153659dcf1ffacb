"""The signal study with every kind of draft, several data sets and several processes, on tiny models."""

import json

import pytest
import torch
from launched import launch
from tiny_world import add_drafters, make_world, model_flags

import diagnostics.signal_error as entry
from dcd_core.contrast import Target, target_log_probs
from dcd_core.divergence import kl
from dcd_core.errors import UserError
from dcd_core.prompts import read_prompts
from diagnostics.histories import History, load_study
from diagnostics.records import read_records
from diagnostics.rollouts import roll_out

DRAFTERS = ("amateur_head", "direct_head", "stronger")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny pair with every drafter, and two prompt files with equal ids."""
    folder = add_drafters(make_world(tmp_path_factory.mktemp("world")))
    lines = (folder / "prompts.jsonl").read_text().replace("w1", "w2").splitlines()
    (folder / "other.jsonl").write_text("\n".join(lines[:3]) + "\n")
    return folder


def flags(world, output, *more):
    files = {"amateur_head": "other_amateur_head", "direct_head": "direct", "stronger": "stronger"}
    given = [f"--{name}={world / files[name]}" for name in DRAFTERS]
    sets = ["--prompts", str(world / "prompts.jsonl"), str(world / "other.jsonl")]
    fast = ["--alphas", "0.1", "0.5", "--max_new_tokens=6", "--batch=2", "--device=cpu"]
    return [*model_flags(world)[:3], *sets, *given, f"--output={output}", *fast, *more]


def rows_of(folder):
    return read_records(folder / "positions.parquet", "positions")


@pytest.fixture(scope="module")
def one_rank(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "one"
    assert entry.main(flags(world, folder)) == 0
    return folder


def test_every_kind_of_draft_is_measured(one_rank, capsys):
    rows = rows_of(one_rank).rows
    assert not rows.isna().any().any(), "all drafters are there"
    assert set(rows["dataset"]) == {"prompts", "other"}
    assert rows.groupby("dataset")["prompt_id"].nunique().to_dict() == {"prompts": 5, "other": 3}
    found = json.loads((one_rank / "metrics.json").read_text())["by_alpha"]
    for kind in ("direct", "dual", "oracle", "stronger"):
        base = "stronger_plain" if kind == "stronger" else "target"
        part = rows[rows["alpha"] == 0.5]
        wanted = (part[f"{base}_tv"] - part[f"{kind}_tv"]).mean()
        assert found["0.5"][f"gain_acceptance_{kind}"]["estimate"] == pytest.approx(wanted)
    assert found["pooled"]["prompts"] == 8, "equal ids of two data sets are two prompts"


def test_the_rows_are_those_of_plain_passes(world):
    """Direct and dual drafts at one place by hand: the heads on all text before it, the amateur's features beside."""
    paths = [str(world / name) for name in ("expert", "amateur", "head")]
    extra = [str(world / name) for name in ("other_amateur_head", "direct", "stronger")]
    study = load_study(*paths, "float64", "cpu", extra[0], [extra[1]], extra[2])
    (prompt, *_), stops = read_prompts(str(world / "prompts.jsonl"), paths[0])
    (made,) = roll_out(study.pair, [prompt], stops, 0.5, 6)
    found = History.read(study, prompt, made).quantities(0.5)
    for index, position in enumerate(found["position"]):
        text = torch.tensor([prompt.ids + made[:position]])
        expert, amateur = (model.forward_full(text, features=True) for model in (study.pair.expert, study.pair.amateur))
        log_p, log_q = (out.logits[0, -1].log_softmax(-1) for out in (expert, amateur))
        log_pi = target_log_probs([log_p, log_q], Target(alpha=0.5))

        def drafted(head, features, text=text):
            embeds = study.pair.expert.embedding(text[:, 1:])
            state = head.step(embeds, head.fuse(features[:, :-1]), head.new_cache(1, text.shape[1]))[0, -1]
            return head.logits(state).log_softmax(-1)

        (head,) = study.direct
        log_c = drafted(head, torch.cat([expert.features, amateur.features], -1))
        wanted = kl(log_c, log_pi[head.target_ids]).item()
        assert found["direct_kl"][index] == pytest.approx(wanted, abs=1e-9)
        wide = {}
        for name, other in (("e", study.head), ("f", study.amateur_head)):
            wide[name] = torch.full_like(log_p, -torch.inf)
            wide[name][other.target_ids] = drafted(other, expert.features)
        both = (wide["e"] > -torch.inf) & (wide["f"] > -torch.inf)
        assert 20 <= both.sum() < len(study.head.target_ids), "the two draft vocabularies differ"
        log_dual = target_log_probs([wide["e"][both], wide["f"][both]], Target(alpha=0.5))
        assert found["dual_kl"][index] == pytest.approx(kl(log_dual, log_pi[both]).item(), abs=1e-9)
        log_r = study.stronger.forward_full(text).logits[0, -1].log_softmax(-1)
        assert found["stronger_plain_kl"][index] == pytest.approx(kl(log_r, log_pi).item(), abs=1e-9)


def test_two_processes_give_the_records_of_one(world, one_rank, tmp_path):
    """Behind the real launcher; the ranks share the batches out, the first merges what both have measured."""
    printed = launch("diagnostics/signal_error.py", *flags(world, tmp_path / "two"))
    one, two = rows_of(one_rank), rows_of(tmp_path / "two")
    assert one.provenance["content_hash"] == two.provenance["content_hash"]
    read = [json.loads((folder / "metrics.json").read_text()) for folder in (one_rank, tmp_path / "two")]
    assert all(found.pop("records") for found in read)  # of the files, whose provenance names the folder
    assert read[0] == read[1]
    assert printed.count("percent of positions") == 1, "one rank prints"


def test_each_rank_measures_its_share(world, tmp_path, monkeypatch):
    """The second of two ranks, played by one process: every other batch, and no records."""
    monkeypatch.setattr(entry, "join", lambda *_: entry.Ranks(1, 2, torch.device("cpu")))
    given = flags(world, tmp_path / "out")
    calls, real = [], entry.measure_batch
    monkeypatch.setattr(entry, "measure_batch", lambda *rest: calls.append(rest) or real(*rest))
    assert entry.main(given) == 0
    assert len(calls) == 5, "3 + 2 of the 6 + 4 batches"
    assert not (tmp_path / "out" / "positions.parquet").exists()


def test_refusals(world, tmp_path):
    def refused(message, *more):
        with pytest.raises(UserError, match=message):
            entry.main(flags(world, tmp_path / "out", *more))
        assert not (tmp_path / "out").exists()

    refused("aligned with the expert; --amateur_head takes", f"--amateur_head={world / 'head'}")
    refused("aligned with the amateur; --head takes", f"--head={world / 'amateur_head'}")
    refused("aligned with the amateur; --direct_head takes", f"--direct_head={world / 'amateur_head'}")
    refused("a dual draft recombines two heads of one kind", f"--head={world / 'dual_input'}")
    refused("aligned with the expert; --direct_head takes", f"--direct_head={world / 'head'}")
    refused("trained on alpha 0.5, which is none of --alphas", "--alphas", "0.1", "0.3")
    refused("one head for all alphas or one of each", "--direct_head", *[str(world / "direct")] * 3)
    both = ["--direct_head", str(world / "direct"), str(world / "direct")]
    refused("trained on alpha 0.5, and stands where --alphas has 0.1", *both)
    refused("--dataset must name each file", "--dataset", "one")
    refused("--dataset must name each file", "--prompts", *[str(world / "other.jsonl")] * 2)
    refused("needs a file of prompts", "--prompts")
    refused("nowhere", f"--stronger={world / 'nowhere'}")
