"""SIGTERM stops all ranks after one step, with a checkpoint; ranks whose launcher is gone end; who hangs is named."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_training import end_of, flags, make_toy, start_child

from dcd_core.errors import UserError
from dcd_core.processes import WaitFlags, barrier, free_port, join
from dcd_core.progress import Bar
from dcd_core.watch import LEFT_BEHIND, TIMED_OUT
from train.stopping import STOPPED

ROOT = Path(__file__).resolve().parent.parent


def groups(port: int) -> list[dict[str, str]]:
    """The variables of two ranks, as a launcher sets them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def test_a_signal_to_one_rank_stops_both_after_the_same_step(tmp_path):
    toy, log = make_toy(tmp_path / "toy"), tmp_path / "log.txt"
    run = flags(toy, tmp_path / "run", "--epochs=1000", "--save_every=100000")
    started = []
    for rank, group in enumerate(groups(free_port())):
        at = (3, 0.0) if rank == 1 else None
        started.append(start_child(train_as, run, str(log), at, group))
    assert [end_of(process) for process in started] == [STOPPED, STOPPED] == [143, 143], log.read_text()
    assert len(steps(tmp_path / "run")) == 1
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{steps(tmp_path / 'run')[0]:08d}"
    assert {"random-0.pt", "random-1.pt", "trainer.json"} <= {path.name for path in checkpoint.iterdir()}


def train_as(run: list[str], log: str, at, group: dict[str, str]) -> None:
    from toy_training import child_main

    child_main(run, log, at, by=signal.SIGTERM, group=group)


def launcher(run: list[str], log: str, port: int, children) -> None:
    """What starts two ranks and is then gone."""
    for group in groups(port):
        child = os.fork()
        if not child:
            try:
                train_as(run, log, None, group)
            finally:
                os._exit(1)
        children.put(child)
    signal.pause()


def test_ranks_whose_launcher_was_killed_write_nothing_more_and_end(tmp_path):
    toy, log = make_toy(tmp_path / "toy"), tmp_path / "log.txt"
    log.touch()
    run = flags(toy, tmp_path / "run", "--epochs=1000", "--save_every=50", "--keep=100000")
    children = multiprocessing.get_context("forkserver").SimpleQueue()
    process = start_child(launcher, run, str(log), free_port(), children)
    ranks = [children.get(), children.get()]
    assert until(lambda: (tmp_path / "run" / "checkpoints" / "step-00000050").exists(), 90), log.read_text()
    process.kill()
    process.join()
    assert until(lambda: not any(map(running, ranks)), 20)
    assert "launcher of this process is gone" in log.read_text()
    before = steps(tmp_path / "run")
    time.sleep(0.5)
    assert steps(tmp_path / "run") == before


def test_deepspeeds_launcher_does_not_leave_its_ranks_behind(tmp_path):
    """SIGTERM to the command that the user started reaches neither DeepSpeed's inner launcher nor a rank."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time; from dcd_core.watch import Watch; Watch().start()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators=1", str(script)]
    command.insert(4, f"--master_port={free_port()}")
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 90)
        process.terminate()
        process.wait()
        assert until(lambda: not running(int((tmp_path / "pid").read_text())), 20)
    finally:
        process.kill()
        process.wait()


def until(happened, limit: float) -> bool:
    end = time.monotonic() + limit
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(happened())


def running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_for_other(group: dict[str, str], log: str, pause: float, work: bool) -> None:
    """A rank that comes to the barrier late: after sleep, or after work that moves on."""
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115
    os.environ |= group
    try:
        join("cpu", timeout_minutes=1 / 60)
    except UserError as error:
        print(f"error: {error}")
        raise SystemExit(2) from None
    if group["RANK"] == "1":
        with Bar(None, "work") as bar:
            for _ in range(int(pause / 0.5)):
                time.sleep(0.5)
                if work:
                    bar.update()
    barrier()


def ends(log: Path, pause: float, work: bool = False, ranks: int = 2) -> list[int]:
    started = [start_child(wait_for_other, group, str(log), pause, work) for group in groups(free_port())[:ranks]]
    codes = [end_of(started[0], 60)]
    for process in started[1:]:
        if codes[0]:
            process.kill()
        codes.append(end_of(process, 60))
    return codes


def test_the_rank_that_does_not_answer_is_named(tmp_path):
    assert ends(tmp_path / "log", pause=600)[0] == TIMED_OUT
    assert "error: rank 1 of 2" in (tmp_path / "log").read_text()


def test_a_rank_that_is_slow_but_at_work_is_waited_for(tmp_path):
    assert ends(tmp_path / "log", pause=3, work=True) == [0, 0], (tmp_path / "log").read_text()


def test_a_rank_that_never_comes_is_named(tmp_path):
    assert ends(tmp_path / "log", pause=0, ranks=1) == [2]
    assert "error: rank 1 of 2 did not come" in (tmp_path / "log").read_text()


def test_the_timeout_is_minutes_not_days():
    assert WaitFlags().timeout_minutes == 30
    assert len({TIMED_OUT, LEFT_BEHIND, STOPPED, 0, 2}) == 5
    with pytest.raises(ValueError, match="timeout_minutes"):
        WaitFlags(timeout_minutes=0)
