"""A run killed at any moment and started again ends with the weights of a run that was left alone, bit by bit."""

import random
import signal
from pathlib import Path

import pytest
import torch
from toy_training import flags, head_weights, in_child, make_toy

from train.stopping import STOPPED


def test_kills_at_five_moments_leave_no_trace(tmp_path):
    toy, log = make_toy(tmp_path / "toy"), tmp_path / "log.txt"
    options = ["--epochs=8", "--save_every=5", f"--eval_tokens={toy / 'held_out.parquet'}", "--eval_every=20"]

    def run(output: Path, at=None, inside: str = "", **more) -> int:
        return in_child(flags(toy, output, *options), str(log), at, inside, **more)

    assert run(tmp_path / "alone") == 0, log.read_text()
    killed = tmp_path / "killed"
    # two kills inside a save: while it is being written, and when it is whole but not yet renamed
    assert run(killed, inside="write") == -signal.SIGKILL
    left = [path.name for path in (killed / "checkpoints").iterdir()]
    assert "step-00000005" in left and ".unfinished-step-00000010" in left
    assert run(killed, inside="rename") == -signal.SIGKILL
    # and three at random moments of the 64 steps, saves and evaluations among them
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    for _ in range(3):
        at = (moments.randint(1, 12), moments.uniform(0, 0.05))
        assert run(killed, at) == -signal.SIGKILL, (seed, log.read_text())
    # and a stop that writes a checkpoint of its own
    assert run(killed, (3, 0.0), by=signal.SIGTERM) == STOPPED == 143
    assert "SIGTERM" in log.read_text().splitlines()[-1]
    assert run(killed) == 0, (seed, log.read_text())
    whole, other = head_weights(tmp_path / "alone"), head_weights(killed)
    assert whole.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in whole.items()), seed
    assert not list((killed / "checkpoints").glob(".unfinished*"))
    assert log.read_text().count("resuming after step") >= 4


@pytest.mark.parametrize("inside", ["write", "rename"])
def test_the_kill_itself_works(tmp_path, inside):
    """Negative control: without a resumption the killed run has no result."""
    toy = make_toy(tmp_path / "toy", texts=8)
    code = in_child(
        flags(toy, tmp_path / "run", "--save_every=1", "--warmup_steps=1"), str(tmp_path / "log.txt"), None, inside
    )
    assert code == -signal.SIGKILL and not (tmp_path / "run" / "metrics.json").exists()
