"""The pipeline repeats nothing that is finished, and everything whose command, inputs or outputs changed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_prep import pipeline
from dcd_core.errors import UserError

# appends a line to a log for each run, reads its input, writes its output
WORK = (
    "import pathlib, sys; log, source, target, word = sys.argv[1:]; "
    "open(log, 'a').write(pathlib.Path(target).name + '\\n'); "
    "pathlib.Path(target).write_text(pathlib.Path(source).read_text() + word)"
)
PYTHON = [sys.executable, str(Path(pipeline.__file__))]


class Bench:
    """A pipeline of two stages, first -> second, in a temporary folder."""

    def __init__(self, folder: Path):
        self.folder, self.run, self.file = folder, folder / "run", folder / "stages.yaml"
        (folder / "source.txt").write_text("a")
        self.content = {
            "run": str(self.run),
            "variables": {"word": "b"},
            "result": "{run}/second.txt",
            "stages": [self.stage("first", f"{folder}/source.txt"), self.stage("second", "{run}/first.txt")],
        }

    def stage(self, name: str, source: str) -> dict:
        target = f"{{run}}/{name}.txt"
        command = ["{python}", "-c", WORK, f"{self.folder}/log", source, target, "{word}"]
        return {"name": name, "budget_s": 5, "command": command, "inputs": [source], "outputs": [target]}

    def __call__(self, *flags: str) -> int:
        self.file.write_text(yaml.safe_dump(self.content))
        return pipeline.main(["--pipeline", str(self.file), "--cache_dir", str(self.folder / "cache"), *flags])

    def ran(self) -> list[str]:
        """The outputs written since the last call, in order."""
        log = self.folder / "log"
        lines = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.removesuffix(".txt") for line in lines]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("instructions", "dtype"), [({"avx2": True, "avx512_bf16": False}, "float32"), ({"avx512_bf16": True}, "bfloat16")]
)
def test_the_dtype_is_one_that_this_machine_is_fast_in(bench, monkeypatch, instructions, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: instructions, raising=False)
    bench.content["stages"][0]["command"][-1] = "{dtype}"
    assert bench() == 0 and (bench.run / "first.txt").read_text() == f"a{dtype}"
    # another one is another result
    bench.ran()
    bench.content["variables"]["dtype"] = "float64"
    assert bench() == 0 and bench.ran() == ["first", "second"]
    assert (bench.run / "first.txt").read_text() == "afloat64"


def test_each_stage_runs_once(bench, capfd):
    assert bench() == 0
    assert bench.ran() == ["first", "second"]
    assert (bench.run / "second.txt").read_text() == "abb"
    assert bench() == 0
    assert bench.ran() == []
    said = capfd.readouterr().out
    assert "first: not run yet; budget 5.0 s" in said and "finished before, nothing has changed" in said
    assert said.splitlines()[-1].startswith(f"{bench.run}/second.txt: done in ") and said.endswith("budget 10.0 s\n")


def test_a_changed_input_redoes_what_depends_on_it(bench):
    bench()
    bench.ran()
    (bench.folder / "source.txt").write_text("c")
    assert bench() == 0 and bench.ran() == ["first", "second"]
    (bench.folder / "source.txt").touch()
    assert bench() == 0 and bench.ran() == [], "a new time with the old content is no change"


def test_a_changed_command_or_variable_redoes_the_stage(bench):
    bench()
    bench.ran()
    bench.content["stages"][1]["command"][-1] = "z"
    assert bench() == 0 and bench.ran() == ["second"]
    bench.content["variables"]["word"] = "y"
    assert bench() == 0 and bench.ran() == ["first", "second"]


def test_a_missing_or_altered_output_is_made_again(bench):
    bench()
    bench.ran()
    (bench.run / "first.txt").unlink()
    assert bench() == 0 and bench.ran() == ["first"], "the same content again: the second stage need not follow"
    (bench.run / "second.txt").write_text("damaged")
    assert bench() == 0 and bench.ran() == ["second"]
    assert (bench.run / "second.txt").read_text() == "abb"


def test_flags_choose_stages(bench, capsys):
    bench("--list")
    assert bench.ran() == [] and "waits for its inputs" in capsys.readouterr().out
    bench("--only", "first")
    assert bench.ran() == ["first"]
    assert "second.txt: done" not in capsys.readouterr().out, "the result is named once it is there"
    bench("--from", "second")
    assert bench.ran() == ["second"]
    bench("--only", "second", "--overwrite")
    assert bench.ran() == ["second"]
    capsys.readouterr()
    bench("--list")
    assert capsys.readouterr().out.count("finished") == 2


def test_a_failing_stage_stops_the_run_with_its_exit_code(bench, capfd):
    bench.content["stages"][0]["command"] = ["{python}", "-c", "import sys; print('why'); sys.exit(3)"]
    assert bench() == 3
    seen = capfd.readouterr()
    assert "why" in seen.out, "what a stage prints reaches the terminal"
    assert "error: stage 'first' ended with exit code 3" in seen.err and not (bench.run / "second.txt").exists()


def test_a_stage_that_writes_nothing_is_not_finished(bench):
    bench.content["stages"][0]["command"] = ["{python}", "-c", "pass"]
    for _ in range(2):
        with pytest.raises(UserError, match="stage 'first' did not write .*first.txt"):
            bench()


HALF = (
    "import pathlib, sys, time; mark = pathlib.Path(sys.argv[1]); seen = mark.exists(); "
    "mark.parent.mkdir(exist_ok=True); mark.write_text('half'); seen or time.sleep(60); "
    "(mark.parent / 'whole').write_text('resumed')"
)


def half(bench: Bench) -> subprocess.Popen:
    """Start a run whose only stage works for a minute unless it finds half-done work; wait until it is at it."""
    command = ["{python}", "-c", HALF, "{run}/out/mark"]
    bench.content["stages"] = [{"name": "slow", "budget_s": 5, "command": command, "outputs": ["{run}/out"]}]
    bench.file.write_text(yaml.safe_dump(bench.content))
    flags = ["--pipeline", str(bench.file), "--cache_dir", str(bench.folder / "cache")]
    process = subprocess.Popen([*PYTHON, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    limit = time.time() + 60
    while not (bench.run / "out" / "mark").exists() and time.time() < limit:
        time.sleep(0.02)
    assert (bench.run / "out" / "mark").exists(), "the stage is not at work after a minute"
    return process


def test_a_stopped_stage_goes_on_over_its_own_work(bench):
    process = half(bench)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM, process.communicate()[0]
    assert bench() == 0
    assert (bench.run / "out" / "whole").read_text() == "resumed"


def test_a_kill_between_the_end_of_a_stage_and_its_record_repeats_nothing(bench, capfd):
    """The stage writes its metrics last and refuses to run again; its record is what it was while it ran."""
    write = "import sys, pathlib; f = pathlib.Path(sys.argv[1]); f.mkdir(); (f / 'metrics.json').write_text('1')"
    stage = {"name": "trained", "budget_s": 5, "command": ["{python}", "-c", write, "{run}/made"], "inputs": []}
    bench.content["stages"] = [stage | {"outputs": ["{run}/made"]}]
    bench()
    stamp, mark = bench.run / ".stages" / "trained.json", bench.run / "made" / "metrics.json"
    running = {"key": pipeline.json.loads(stamp.read_text())["key"], "finished": False}
    stamp.write_text(pipeline.json.dumps(running))
    mark.touch()
    assert bench() == 0 and "was finished when it was stopped" in capfd.readouterr().out
    assert bench() == 0 and "finished before" in capfd.readouterr().out
    # metrics of an earlier run, older than the start of this one, prove nothing
    os.utime(mark, (1, 1))
    stamp.write_text(pipeline.json.dumps(running))
    assert bench() != 0


def test_a_stopped_stage_whose_command_changed_starts_from_nothing(bench):
    process = half(bench)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)
    check = "import pathlib, sys; out = pathlib.Path(sys.argv[1]); out.mkdir(); (out / 'new').touch()"
    bench.content["stages"][0]["command"] = ["{python}", "-c", check, "{run}/out"]  # mkdir fails if it is still there
    assert bench() == 0


def test_a_stage_left_behind_by_a_kill_holds_the_run(bench):
    process = half(bench)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(timeout=30)
    with pytest.raises(UserError, match="is in use by"):
        bench()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    limit = time.time() + 30
    while any(map(alive, children)) and time.time() < limit:
        time.sleep(0.02)
    assert bench() == 0


def alive(child: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{child}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone since it was looked for
        return False


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda content: content["stages"][0].update(inputs=["{nowhere}/x"]),
            "'{nowhere}/x' has no variable 'nowhere'",
        ),
        (lambda content: content["stages"][0].update(input=[]), "stage first has an unknown key 'input'"),
        (lambda content: content["stages"][0].pop("budget_s"), "stage first lacks 'budget_s'"),
        (lambda content: content["stages"][1].update(name="first"), "two stages are named 'first'"),
        (lambda content: content.update(variables={"cache": "x"}), "the variable 'cache' is set by the pipeline"),
        (lambda content: content["stages"][0].update(inputs=["/no/such/file"]), "stage 'first' needs /no/such/file"),
        (lambda content: content["stages"][0].update(command="/no/such/program"), "cannot start /no/such/program"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(bench, change, complaint):
    change(bench.content)
    with pytest.raises(UserError) as refusal:
        bench()
    assert complaint in str(refusal.value)
    assert bench.ran() == []


def test_an_unknown_stage_is_refused(bench):
    with pytest.raises(UserError, match="no stage 'third'; the stages are first, second"):
        bench("--only", "third")
    with pytest.raises(UserError, match="give one of them"):
        bench("--only", "first", "--from", "second")


def test_the_cache_is_not_emptied(bench):
    """A stage whose command changed keeps what is in the cache: the command itself knows what it can use.

    A link into the cache goes, what it leads to stays.
    """
    kept = bench.folder / "cache" / "model"
    kept.mkdir(parents=True)
    (kept / "weights").write_text("w")
    link = "import os, sys; os.symlink(sys.argv[1], sys.argv[2])"  # fails if the link is still there
    command = ["{python}", "-c", link, "{cache}/model", "{run}/model"]
    stage = {"name": "get", "budget_s": 1, "command": command, "outputs": ["{cache}/model", "{run}/model"]}
    bench.content["stages"] = [stage]
    assert bench() == 0
    stage["command"] = [*command, "more"]
    assert bench() == 0
    assert (kept / "weights").read_text() == "w" and (bench.run / "model" / "weights").read_text() == "w"


def test_a_port_is_free_and_no_part_of_what_a_stage_is(bench):
    """The command is given a port that it can listen on; another one next time does not repeat the stage."""
    listen = (
        "import pathlib, socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))).close(); "
        "pathlib.Path(sys.argv[2]).write_text(sys.argv[1])"
    )
    command = ["{python}", "-c", listen, "{port}", "{run}/port"]
    bench.content["stages"] = [{"name": "listen", "budget_s": 5, "command": command, "outputs": ["{run}/port"]}]
    assert bench() == 0 and int((bench.run / "port").read_text()) > 1024
    made = (bench.run / "port").stat().st_mtime_ns
    assert bench() == 0 and (bench.run / "port").stat().st_mtime_ns == made


def test_every_deepspeed_of_ours_is_given_a_port():
    """Two of them on one machine would meet at the launcher's own port."""
    found = 0
    for path in sorted((pipeline.ROOT / "configs" / "pipelines").glob("*.yaml")):
        for stage in pipeline.load_pipeline(str(path)).stages:
            if stage.command[0] == "deepspeed":
                assert stage.command[1:3] == ("--master_port", "{port}"), f"{path}: stage {stage.name}"
                found += 1
    assert found >= 2


def test_the_source_trees_files_are_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert pipeline.main(["--list", "--run_dir", str(tmp_path / "run")]) == 0
    assert "pair" in capsys.readouterr().out and list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot read configs/none.yaml"):
        pipeline.main(["--list", "--pipeline", "configs/none.yaml"])


def test_a_run_folder_that_is_a_file_is_refused(bench):
    bench.run.write_text("mine")
    for flags in ([], ["--list"]):
        with pytest.raises(UserError, match="is a file"):
            bench(*flags)
    assert bench.run.read_text() == "mine"
