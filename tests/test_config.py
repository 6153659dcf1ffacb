"""Flags and YAML are one set of settings: the typed flag wins, and whatever is wrong is refused in one line."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Literal

import pytest
import yaml

from dcd_core import config
from dcd_core.config import ROOT, finish_run, parse_config, refuse_taken, run_entry, save_run
from dcd_core.errors import UserError
from dcd_core.files import TEMPORARY, file_hash


@dataclass
class Config:
    """Settings of every kind that entry scripts use."""

    alpha: float = field(default=0.1, metadata={"help": "contrast strength; 50% is 0.5"})
    alphas: list[float] = field(default_factory=lambda: [0.1], metadata={"help": "several"})
    names: list[str] = field(default_factory=list, metadata={"help": "several names"})
    steps: int = field(default=10, metadata={"help": "a whole number", "own": "not for argparse"})
    layers: list[int] | None = field(default=None, metadata={"help": "layers, none for the default"})
    limit: int | None = field(default=None, metadata={"help": "a whole number or nothing"})
    expert: str = field(default="", metadata={"help": "a folder"})
    bf16: bool = field(default=True, metadata={"help": "on by default"})
    overwrite: bool = field(default=False, metadata={"help": "off by default"})
    schedule: Literal["cosine", "linear"] = field(default="cosine", metadata={"help": "one of two"})

    def __post_init__(self):
        if self.alpha < 0:
            raise ValueError("--alpha must be 0 or more")


@dataclass
class Needed:
    """A setting without a default."""

    expert: str = field(metadata={"help": "a folder"})


@pytest.fixture
def file(tmp_path):
    """Write YAML text, get the flags that read it."""

    def write(text: str, name: str = "given.yaml") -> list[str]:
        (tmp_path / name).write_text(text)
        return ["--config", str(tmp_path / name)]

    return write


def test_defaults():
    assert parse_config(Config, []) == Config()


def test_flags_of_every_kind():
    given = "--alpha -0 --alphas -1e-3 2 -.5 --names a b --steps 3 --layers 1 2 --limit 4 --no_bf16 --overwrite"
    parsed = parse_config(Config, [*given.split(), "--schedule=linear", "--expert", "some folder"])
    assert parsed == Config(0.0, [-1e-3, 2.0, -0.5], ["a", "b"], 3, [1, 2], 4, "some folder", False, True, "linear")


def test_yaml_of_every_kind(file):
    given = "alpha: 1e-3\nalphas: [-1e-3, 2]\nnames: x\nlayers: [1, 2]\nlimit: null\nbf16: false\nexpert: '-a b'\n"
    assert parse_config(Config, file(given)) == Config(1e-3, [-1e-3, 2.0], ["x"], 10, [1, 2], None, "-a b", False)
    assert parse_config(Config, file("")) == Config()
    assert parse_config(Config, file("alphas: []")).alphas == []
    assert parse_config(Config, file("expert: null\nnames: null")) == Config(), (
        "null is the default, not the text 'null'"
    )


def test_reading_flags_leaves_the_settings_class_as_it_was():
    """Also the types of fields that it has from a class which others inherit too."""

    @dataclass(kw_only=True)
    class Inherits(Config):
        more: float | None = field(default=None, metadata={"help": "a number or nothing"})

    before = {item.name: item.type for item in fields(Inherits)}
    assert parse_config(Inherits, ["--more=1", "--limit=2"]).limit == 2
    assert {item.name: item.type for item in fields(Inherits)} == before
    assert before["limit"] == (int | None) == {item.name: item.type for item in fields(Config)}["limit"]


def test_the_typed_flag_wins_wherever_it_stands(file):
    settings = file("alpha: 0.5\nalphas: [1, 2]\nbf16: false")
    assert parse_config(Config, [*settings, "--alpha", "0.2"]).alpha == 0.2
    parsed = parse_config(Config, ["--alpha", "0.2", "--alphas", "3", "--bf16", *settings])
    assert (parsed.alpha, parsed.alphas, parsed.bf16) == (0.2, [3.0], True)


def test_later_files_win_and_equals_signs_work(file):
    first, second = file("steps: 1\nalpha: 0.3", "a.yaml"), file("steps: 2", "b.yaml")
    parsed = parse_config(Config, [f"--config={first[1]}", *second])
    assert (parsed.steps, parsed.alpha) == (2, 0.3)


def test_a_required_setting_may_come_from_the_file(file):
    assert parse_config(Needed, file("expert: x")).expert == "x"
    with pytest.raises(UserError, match="required: --expert"):
        parse_config(Needed, file(""))


def test_the_launchers_flag_is_dropped():
    assert parse_config(Config, ["--local_rank=1", "--steps", "2"]) == Config(steps=2)


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--alpha nan", "--alpha must be a finite number, got nan"),
        ("--alpha -inf", "--alpha must be a finite number, got -inf"),
        ("--alphas 1 inf", "--alphas must be a finite number, got inf"),
        ("--alpha -1", "--alpha must be 0 or more"),
        ("--alpha x", "argument --alpha: invalid float value: 'x'"),
        ("--steps 1.5", "argument --steps: invalid int value: '1.5'"),
        ("--alph 1", "unrecognized arguments: --alph 1"),
        ("--schedule constant", "invalid choice: 'constant' (choose from"),
        ("--bf16 perhaps", "Truthy value expected: got perhaps"),
        ("--config", "argument --config: expected one argument"),
        ("--config /no/such/file.yaml", "cannot read /no/such/file.yaml: No such file or directory"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_wrong_flags_are_refused(flags, complaint):
    with pytest.raises(UserError) as refusal:
        parse_config(Config, flags.split())
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("alhpa: 1", "unknown setting 'alhpa' in {file}; did you mean 'alpha'?"),
        ("zzz: 1", "unknown setting 'zzz' in {file}; --help lists the settings"),
        ("alpha: .nan", "--alpha must be a finite number"),
        ("alpha: -2", "--alpha must be 0 or more"),
        ("alpha: much", "{file}: argument --alpha: invalid float value: 'much'"),
        ("alpha: [1, 2]", "{file}: 'alpha' takes one value, not a list"),
        ("alpha: {a: 1}", "{file}: 'alpha' must be a plain value or a list of them"),
        ("names: [a, null]", "{file}: 'names' must be a plain value or a list of them"),
        ("steps: true", "{file}: argument --steps: invalid int value: 'True'"),
        ("expert: no", "{file}: 'expert' is text, but YAML reads its value as False; put it in quotes"),
        ("alpha: 1\nalpha: 2", "{file} is not valid YAML: 'alpha' is given twice"),
        ("alpha: [", "{file} is not valid YAML"),
        ("- alpha", "{file} must hold `name: value` lines, got a list"),
        ("config: other.yaml", "unknown setting 'config' in {file}"),
    ],
)
def test_wrong_files_are_refused(file, text, complaint):
    flags = file(text)
    with pytest.raises(UserError) as refusal:
        parse_config(Config, flags)
    assert complaint.format(file=flags[1]) in str(refusal.value)


def test_help_shows_text_defaults_and_percent_signs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # argparse wraps to it
    with pytest.raises(SystemExit) as stop:
        parse_config(Config, ["--help"], description="What it does.\n\n    an example")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "50% is 0.5 (default: 0.1)" in shown and "\n    an example" in shown and "local_rank" not in shown


def test_help_says_what_is_required_and_shows_no_empty_default(capsys):
    shown = ""
    for settings in (Needed, Config):
        with pytest.raises(SystemExit):
            parse_config(settings, ["--help"])
        shown += capsys.readouterr().out
    assert "a folder (required)" in shown
    assert not any(f"(default: {nothing})" in shown for nothing in ("", "None", "[]"))
    assert "(default: False)" in shown


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    def refuse():
        raise UserError("a is wrong,\n  in b;\tdo c")

    assert run_entry(refuse) == 2
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("", "error: a is wrong, in b; do c\n")
    assert run_entry(lambda: 3) == 3 and run_entry(lambda: None) == 0


def test_a_bug_keeps_its_traceback():
    def broken():
        raise ValueError("not the user's doing")

    with pytest.raises(ValueError, match="not the user's doing"):
        run_entry(broken)


def test_a_run_records_what_made_it(tmp_path):
    folder = save_run(tmp_path / "run", Config(alpha=0.5), ["--alpha", "0.5", "--expert", "a b"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["alpha"] == 0.5
    assert parse_config(Config, ["--config", str(folder / "config.yaml"), "--names", "x"]).alpha == 0.5
    assert (folder / "command.txt").read_text().endswith("--alpha 0.5 --expert 'a b'\n")
    assert json.loads((folder / "versions.json").read_text())["torch"].startswith("2.")
    assert (folder / "git_sha.txt").read_text().strip()
    finish_run(folder, {"loss": 1.5})
    assert json.loads((folder / "metrics.json").read_text()) == {"loss": 1.5}
    (folder / "rows.parquet").write_bytes(b"rows")
    finish_run(folder, {"loss": 1.5})
    found = json.loads((folder / "metrics.json").read_text())
    assert found == {"loss": 1.5, "records": {"rows.parquet": file_hash(folder / "rows.parquet")}}


def test_a_finished_run_is_not_redone(tmp_path):
    folder = save_run(tmp_path, Config(), [])
    save_run(tmp_path, Config(), [])  # not finished: it may go on
    finish_run(folder, {"loss": 1.5})
    with pytest.raises(UserError, match="finished run; choose another folder or give --overwrite"):
        save_run(tmp_path, Config(alpha=0.7), [])
    assert yaml.safe_load((folder / "config.yaml").read_text())["alpha"] == 0.1, "a refusal changes nothing"
    save_run(tmp_path, Config(), [], overwrite=True)
    assert not (folder / "metrics.json").exists(), "half redone is not finished"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "model.safetensors").write_text("weights")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="other files and no run"):
            save_run(tmp_path, Config(), [], overwrite)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    folder = save_run(tmp_path / "run", Config(), [])
    finish_run(folder, {"loss": 1.5})
    (folder / "command.txt").write_text("train/other.py --seed 1\n")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="a run of train/other.py"):
            save_run(folder, Config(), [], overwrite)
    assert (folder / "metrics.json").exists()


def test_scripts_of_one_name_in_two_rooms_are_two_scripts(tmp_path, monkeypatch):
    """train/cross_alpha.py must not write over what diagnostics/cross_alpha.py made, finished or not; the same script
    is known again however it was started."""

    def started(path):
        monkeypatch.setattr("sys.argv", [str(path)])

    started(ROOT / "train" / "cross_alpha.py")
    folder = save_run(tmp_path, Config(), [])
    assert (folder / "command.txt").read_text() == "train/cross_alpha.py\n"
    for again in ("cross_alpha.py", "train/cross_alpha.py"):
        monkeypatch.chdir(ROOT / "train" if again == "cross_alpha.py" else ROOT)
        started(again)
        refuse_taken(folder)
    started(ROOT / "diagnostics" / "cross_alpha.py")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds a run of train/cross_alpha.py"):
            save_run(folder, Config(), [], overwrite)
    (folder / "command.txt").write_text("cross_alpha.py --seed 1\n")  # of an earlier version
    refuse_taken(folder)


def test_a_run_begins_in_an_empty_folder_and_goes_on_however_early_it_was_killed(tmp_path):
    (tmp_path / f"{TEMPORARY}-host-1-half").touch()
    refuse_taken(tmp_path)
    folder = save_run(tmp_path, Config(), [])
    for name in ("config.yaml", "versions.json", "git_sha.txt"):
        (folder / name).unlink()
    save_run(tmp_path, Config(), [])
    refuse_taken(tmp_path / "deep" / "new")
    assert not (tmp_path / "deep").exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="file is (a file|not a folder)"):
            save_run(path, Config(), [])
    with pytest.raises(UserError, match="name of the output folder is empty"):
        save_run("", Config(), [])
    with pytest.raises(UserError, match="/proc/nowhere/run cannot be written"):
        refuse_taken("/proc/nowhere/run")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="cannot make the folder"):
        save_run(tmp_path / "link", Config(), [])


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics.json: steps\[1\].loss is not a finite number"):
        finish_run(tmp_path, {"steps": [{"loss": 1.0}, {"loss": float("nan")}]})
    assert not os.listdir(tmp_path)


def test_versions_of_what_is_missing(monkeypatch):
    monkeypatch.setattr(config, "RECORDED_PACKAGES", ("no-such-package-here",))
    assert config.versions()["no-such-package-here"] == "not installed"


def test_the_first_number_below_its_least_is_named():
    settings = SimpleNamespace(gamma=5, limit=0, seed=-1)
    config.refuse_below(settings, gamma=5, limit=0)
    with pytest.raises(ValueError, match="^--seed must be at least 0, got -1$"):
        config.refuse_below(settings, gamma=1, limit=0, seed=0)


def test_output_that_nobody_reads_any_more_ends_quietly():
    """`script | head`: no traceback, also not of the interpreter's own last flush."""
    code = (
        "from dcd_core.config import run_entry\n"
        "def main():\n    for _ in range(100000):\n        print('x' * 100)\n"
        "raise SystemExit(run_entry(main))"
    )
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    made.stdout.readline()
    made.stdout.close()
    assert made.stderr.read() == b"" and made.wait() == 141
