"""The whole page and its TensorBoard run come from records of every kind, in an interpreter that has no torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import diagnostics.report as entry
from dcd_core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
RUN = "import diagnostics.report as entry; sys.exit(entry.run_entry(entry.main))"
TITLES = (
    "Contrast-aware training in 2 runs",
    "Should the drafter know",
    "Dual drafter",
    "Signal and drafter error",
    "Speed",
    "Is it lossless",
    "Training",
)


def without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT_TORCH + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    synthetic_runs.runs_of_every_kind(folder / "runs")
    done = without_torch(RUN, f"--records={folder / 'runs'}", f"--output={folder / 'page'}")
    assert done.returncode == 0, done.stderr
    assert f"tensorboard --logdir {folder / 'page' / 'tensorboard'}" in done.stdout
    return folder


@pytest.fixture(scope="module")
def board(folder):
    board = EventAccumulator(str(folder / "page" / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    board.Reload()
    return board


def test_an_import_of_torch_would_have_been_seen():
    done = without_torch("import torch.nn")
    assert done.returncode == 1 and "torch" in done.stderr


def test_every_table_with_an_interval_says_how_many_prompts_there_were(folder):
    runs, _ = entry.find_runs([str(folder / "runs")])
    sections = entry.build_sections(runs, entry.Config(records=["runs"], output=str(folder / "page")))
    interval = re.compile(r"\d \[|% \[")
    tables = [table for section in sections for table in section.tables]
    with_intervals = [table for table in tables if interval.search(str(table.rows))]
    assert len(with_intervals) > 10
    for table in with_intervals:
        said = [table.caption, *table.headers, *(row[0] for row in table.rows)]
        assert any("prompt" in words.replace("over prompts", "") for words in said), table.caption


def test_the_page_holds_every_section(folder):
    page = (folder / "page" / "index.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert all(any(title.startswith(words) for title in titles) for words in TITLES)
    assert len(titles) == len(TITLES) + 3, "two matrices, three trainings"
    assert page.count("data:image/png") == len(list((folder / "page").glob("*.png"))) > 25
    assert page.index("contrast-aware training at alpha") < page.index("<h2>"), "it opens with the verdict"


def test_tensorboard_shows_every_figure(folder, board):
    tags = set(board.Tags()["images"])
    pictures = {path.stem: path for path in (folder / "page").glob("*.png")}
    assert {tag.replace("/", "-", 1) for tag in tags} == set(pictures)
    assert {"matrix/changes", "dual/variances", "signal/headroom", "benchmark/speedup", "head/loss"} <= tags
    (shown,) = board.Images("matrix/changes")
    assert shown.encoded_image_string == pictures["matrix-changes"].read_bytes()
    assert shown.width > shown.height > 300


def test_tensorboard_knows_the_headline_numbers(folder, board):
    page = re.sub(r"<[^>]+>", "", (folder / "page" / "index.html").read_text(encoding="utf-8"))
    value = {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]}
    assert f"below 1 nat at {100 * value['signal/share_signal_below_1/pooled']:.1f}%" in page
    assert f"at alpha 0.3: L changes by {100 * value['matrix/change/infer_0.3']:+.1f}%" in page
    assert f"dcd_eagle3@12x8:40+lazy {value['benchmark/speedup/dcd_eagle3@12x8:40+lazy/alpha_0.1']:.2f}" in page
    assert value["identity/equal"] == 99 and value["head/accepted_length"] == pytest.approx(1.2)
    assert value["dual/length_dual/held-out/alpha_0.5"] < value["dual/length_target/held-out/alpha_0.5"]


def report(folder, *more):
    return entry.main([f"--records={folder / 'runs'}", f"--output={folder / 'page'}", *more])


def test_a_redrawn_report_replaces_its_own_board_alone(tmp_path):
    synthetic_runs.identity_run(tmp_path / "runs" / "identity")
    board = tmp_path / "board"
    board.mkdir()
    (board / "events.out.tfevents.1.training").write_bytes(b"of another")
    for _ in range(2):
        report(tmp_path, f"--tensorboard={board}")
    assert (board / "events.out.tfevents.1.training").read_bytes() == b"of another"
    assert len(list(board.iterdir())) == 2 and not (tmp_path / "page" / "tensorboard").exists()


def test_a_board_that_cannot_be_is_refused_first(tmp_path):
    synthetic_runs.identity_run(tmp_path / "runs" / "identity")
    (tmp_path / "taken").touch()
    with pytest.raises(UserError, match="taken is a file"):
        report(tmp_path, f"--tensorboard={tmp_path / 'taken'}")
    assert not (tmp_path / "page").exists()


def test_runs_of_one_name_keep_their_own_pictures(tmp_path):
    """Two pairs are trained and measured into folders of the same names; the page tells them apart."""
    for tokens, pair in enumerate(("toy", "demo")):
        synthetic_runs.head_run(tmp_path / "runs" / pair / "head", tokens=tokens)
    synthetic_runs.amateur_run(tmp_path / "runs" / "demo" / "amateur")
    report(tmp_path)
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "<h2>Training: toy-head</h2>" in page and "<h2>Training: demo-head</h2>" in page
    assert "<h2>Training: amateur</h2>" in page, "a name of its own stays short"
    assert {"toy-head-loss.png", "demo-head-loss.png"} <= {path.name for path in (tmp_path / "page").glob("*.png")}


def make(*arguments: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", "report", *arguments], cwd=ROOT, env=kept, capture_output=True, text=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> str:
    """This interpreter as the environment that make would have set up."""
    folder = tmp_path_factory.mktemp("environment")
    planned = make("-n", f"VENV={folder}").stdout
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    Path(re.search(rf"touch ({folder}/\S+)", planned)[1]).touch()
    return f"VENV={folder}"


def test_make_report_redraws_and_runs_nothing_else(environment, tmp_path):
    synthetic_runs.identity_run(tmp_path / "runs" / "identity")
    arguments = [environment, f"RECORDS={tmp_path / 'runs'}", f"REPORT={tmp_path / 'page'}"]
    assert "pipeline.py" not in make("-n", *arguments).stdout
    done = make(*arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page" / "index.html").is_file()


def test_make_report_without_records_says_so(environment, tmp_path):
    done = make(environment, f"RECORDS={tmp_path}", f"REPORT={tmp_path / 'page'}")
    assert done.returncode == 2 and not (tmp_path / "page").exists()
    told = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert told == [f"error: no finished run in {tmp_path}: nothing to report"]
