"""The page is whole, says what the records say (the unwelcome too), and refuses what it cannot trust."""

import json
import re
import shutil

import numpy as np
import pytest
import synthetic_records
from synthetic_runs import (
    LATENCY,
    amateur_run,
    benchmark_run,
    head_run,
    identity_run,
    matrix_run,
    signal_run,
    write_metrics,
)

import diagnostics.report as entry
from dcd_core.config import finish_run
from dcd_core.errors import UserError
from diagnostics.wording import listed, percent, plain, points


def make(tmp_path, *more):
    assert entry.main([f"--records={tmp_path / 'runs'}", f"--output={tmp_path / 'page'}", *more]) == 0
    return (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def text_of(page):
    """What a reader sees, roughly."""
    return " ".join(
        re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>|data:image[^\"]*", "", page, flags=re.S)).split()
    )


def test_an_amateur_is_described_by_how_near_it_is(tmp_path):
    amateur_run(tmp_path / "runs" / "amateur")
    text = text_of(make(tmp_path))
    assert "agrees with the expert on 58.7% of held-out tokens, KL(expert||amateur) 1.06 nats" in text
    assert "One pass takes 0.60 of the expert's time" in text.replace("&#39;", "'")
    assert "amateur_perplexity 9.5" in text


@pytest.fixture
def everything(tmp_path):
    signal_run(tmp_path / "runs" / "signal")
    benchmark_run(tmp_path / "runs" / "benchmark")
    head_run(tmp_path / "runs" / "head")
    identity_run(tmp_path / "runs" / "identity")
    return tmp_path


def test_the_page_holds_everything_and_needs_no_other_file(everything):
    page = make(everything)
    text = text_of(page)
    assert page.count("data:image/png;base64,") == 7 + 3 + 3
    assert len(list((everything / "page").glob("*.png"))) == 13
    sources = re.findall(r"""(?:src|href)="([^"]{1,200})""", page)
    assert all(source.startswith(("data:", "../runs/")) for source in sources), sources
    assert "@import" not in page and "<script" not in page
    for words in ("the signal is below 1 nat at", "can gain at most", "As a multiple of vanilla contrastive decoding"):
        assert words in text
    assert "Lossless: 99 of 100 texts equal" in text and "near-tie" in text
    assert "head: 1.20 accepted drafts a round on held-out texts, trained on 50,000 answer tokens" in text
    assert "Paper: 81.1% and 48.7%" in text and "Liu et al., arXiv 2608.12913" in text
    assert "settings-of-signal" in text and "made benchmark &lt;with&gt; &amp; without" in page
    for folder in ("signal/positions.parquet", "benchmark/rounds.parquet"):
        assert f'href="../runs/{folder}"' in page
        assert (everything / "page" / f"../runs/{folder}").is_file()


def test_the_same_records_give_the_same_page(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "git_sha", lambda: "0123abc")
    head_run(tmp_path / "runs" / "head")
    benchmark_run(tmp_path / "runs" / "b")
    first = make(tmp_path)
    assert make(tmp_path) == first


def test_the_shares_on_the_page_are_those_of_the_records(tmp_path):
    columns = synthetic_records.positions(prompts=12, length=30)
    columns["signal"] = np.where(np.arange(720) % 4 == 0, 3.0, 0.1)
    signal_run(tmp_path / "runs" / "s", columns)
    text = text_of(make(tmp_path))
    assert "The contrast is mostly weak" in text and "below 1 nat at 75.0%" in text


def test_a_strong_contrast_is_called_strong(tmp_path):
    columns = synthetic_records.positions(prompts=12, length=30)
    columns["signal"] = columns["signal"] + 2
    signal_run(tmp_path / "runs" / "s", columns)
    assert "The contrast is often strong: the signal is below 1 nat at 0.0%" in text_of(make(tmp_path))


def test_a_shortfall_against_prediction_is_said(tmp_path):
    benchmark_run(tmp_path / "runs" / "b", latency=LATENCY | {"amateur": {"1": 60.0, "6": 1.0}})
    text = text_of(make(tmp_path))
    assert "More than 10% short of the speed-up that the cost model predicts" in text


def test_texts_that_differ_are_said_loudly(tmp_path):
    counts = {"method": "scd", "alpha": 0.1, "equal": 5, "near_ties": 1, "different": 2}
    benchmark_run(tmp_path / "runs" / "b", agreement=[counts])
    assert "NOT lossless: 2 of 8 texts differ" in text_of(make(tmp_path))


def test_an_unfinished_run_is_left_out_and_said(everything, capsys):
    (everything / "runs" / "signal" / "metrics.json").unlink()
    text = text_of(make(everything))
    assert "the signal is below" not in text
    assert "the run is not finished" in text and "the run is not finished" in capsys.readouterr().out


def test_a_copy_and_a_run_without_its_records_are_left_out_and_said(tmp_path):
    benchmark_run(tmp_path / "runs" / "first")
    shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / "second")
    write_metrics(tmp_path / "runs" / "third", {"pair": "big / small"})
    (tmp_path / "runs" / "third" / "command.txt").write_text("diagnostics/cross_alpha.py --output runs/third\n")
    for name in ("one", "two"):  # two checks may end alike, and are two all the same
        identity_run(tmp_path / "runs" / name)
    page = make(tmp_path)
    assert page.count("<h2>") == 3
    text = text_of(page)
    assert "second: a copy of" in text and "third: replays.parquet is missing" in text
    (tmp_path / "runs" / "third" / "command.txt").write_text("train/cross_alpha.py --output runs/third\n")
    assert "third" not in text_of(make(tmp_path)), "a family's training writes none"


def test_metrics_of_other_records_are_refused(tmp_path):
    """Half of one run beside half of another would be shown as one."""
    folder, other = tmp_path / "runs" / "matrix", tmp_path / "other"
    matrix_run(folder)
    matrix_run(other, prompts=61)
    finish_run(folder, json.loads((folder / "metrics.json").read_text()))
    make(tmp_path)
    shutil.copy(other / "replays.parquet", folder)
    with pytest.raises(UserError, match="matrix: metrics.json was not made with the replays.parquet"):
        make(tmp_path)
    shutil.copy(other / "metrics.json", folder)  # made before metrics said of what
    make(tmp_path)
    finish_run(folder, json.loads((folder / "metrics.json").read_text()))
    benchmark_run(other)
    shutil.copy(other / "rounds.parquet", folder)  # a table that is none of its own
    with pytest.raises(UserError, match="matrix: metrics.json was not made with the rounds.parquet"):
        make(tmp_path)
    (folder / "rounds.parquet").unlink()
    (folder / "replays.parquet").unlink()
    head_run(tmp_path / "runs" / "head")
    assert "matrix: replays.parquet is missing" in text_of(make(tmp_path))
    benchmark_run(folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | {"records": ["rounds.parquet"]}))
    with pytest.raises(UserError, match="metrics.json must name its tables under 'records'"):
        make(tmp_path)


def test_refusals(tmp_path):
    def refused(message, *folders):
        with pytest.raises(UserError, match=message):
            entry.main(["--records", *map(str, folders), f"--output={tmp_path / 'page'}"])
        assert not (tmp_path / "page" / "index.html").exists()

    refused("nowhere is not a folder", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("no finished run", tmp_path / "empty")
    signal_run(tmp_path / "bad")
    (tmp_path / "bad" / "positions.parquet").write_bytes(b"PAR1")
    refused("positions.parquet: not a readable", tmp_path / "bad")
    write_metrics(tmp_path / "broken", {"history": []})
    (tmp_path / "broken" / "metrics.json").write_text("{")
    refused("metrics.json cannot be read", tmp_path / "broken")


def test_an_output_of_something_else_is_refused(tmp_path):
    head_run(tmp_path / "runs" / "head")
    page = tmp_path / "page"
    page.write_text("not a folder")
    with pytest.raises(UserError, match="page is a file"):
        make(tmp_path)
    page.unlink()
    page.mkdir()
    (page / "index.html").write_text("my own site")
    with pytest.raises(UserError, match="other files and no earlier report"):
        make(tmp_path)
    assert (page / "index.html").read_text() == "my own site" and len(list(page.iterdir())) == 1
    (page / "index.html").unlink()
    (page / "left-by-a-stopped-report.png").touch()
    make(tmp_path)
    (page / "notes.txt").touch()
    make(tmp_path, "--title=again")
    assert "again" in (page / "index.html").read_text()


def test_a_bad_record_leaves_no_folder_of_pictures(everything):
    (everything / "runs" / "benchmark" / "rounds.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="rounds.parquet: not a readable"):
        make(everything)
    assert not (everything / "page").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--records"], "--records needs a folder"),
        (["--output="], "output folder is empty"),
    ],
)
def test_bad_settings_are_refused(everything, flags, message):
    with pytest.raises(UserError, match=message):
        make(everything, *flags)
    assert not (everything / "page").exists()


def test_the_two_lossless_sentences_say_what_they_are_about(everything):
    counts = {"method": "scd", "alpha": 0.1, "equal": 8, "near_ties": 0, "different": 0}
    benchmark_run(everything / "runs" / "benchmark", agreement=[counts])
    text = text_of(make(everything))
    assert "Same text? Speed run Lossless: 8 of 8" in text and "The timed texts of" in text
    assert "Same text? Identity check Lossless: 99 of 100" in text


def test_words():
    found = {"estimate": 0.8369, "low": 0.8281, "high": 0.8449}
    assert percent(found) == "83.7% [82.8, 84.5]"
    assert points({"estimate": 0.002, "low": -0.0001, "high": 0.004}, sign=True) == "+0.2 [0.0, +0.4]"
    assert plain({"estimate": 1.5, "low": None, "high": None}) == "1.50"
    assert [listed([]), listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_the_title_names_each_pair_once(tmp_path):
    matrix_run(tmp_path / "runs" / "matrix", prompts=20, seeds=(0,))
    signal_run(tmp_path / "runs" / "signal")
    assert "<h1>big / small</h1>" in make(tmp_path), "not again with the signal study's drafter"
