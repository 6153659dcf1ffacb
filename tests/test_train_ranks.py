"""Two CPU ranks behind the deepspeed launcher: the same head as one rank with twice the batch; sharded runs resume."""

import json
from pathlib import Path

import pytest
from launched import launch
from safetensors.torch import load_file
from toy_training import amateur_flags, family_flags, flags, head_weights, make_toy_pair

from dcd_core.heads.family import Family
from train import amateur, cross_alpha
from train.eagle3 import main

STEPS = ["--max_steps=10", "--epochs=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One rank with batches of 4, and the worker's runs: two ranks with batches of 2."""
    folder = tmp_path_factory.mktemp("ranks")
    toy = make_toy_pair(folder / "toy", texts=29)
    held_out = f"--eval_tokens={toy / 'held_out.parquet'}"
    main(flags(toy, folder / "one", "--batch_size=4", *STEPS, held_out, "--log_every=1"))
    family = ["--train_alphas", "0", "0.5", "--input=amateur_shuffled", "--log_every=1"]
    cross_alpha.main(family_flags(toy, folder / "family", "--batch_size=4", *STEPS, held_out, *family))
    amateur.main(amateur_flags(toy, folder / "amateur", "--batch_size=4", *STEPS, held_out, "--log_every=1"))
    launch("tests/two_ranks_worker.py", str(toy), str(folder))
    return folder


def difference(one: Path, two: Path, head: str = "head") -> float:
    weights, others = head_weights(one, head), head_weights(two, head)
    return max((tensor.double() - others[name].double()).abs().max().item() for name, tensor in weights.items())


def history(run: Path, name: str) -> list[float]:
    return [entry[name] for entry in json.loads((run / "metrics.json").read_text())["history"] if name in entry]


@pytest.mark.parametrize("run", ["two", "zero2", "zero3", "pieces"])
def test_two_ranks_equal_one_with_twice_the_batch(runs, run):
    """29 texts: the last step of an epoch leaves a rank without texts, and nobody waits."""
    assert difference(runs / "one", runs / run) < 1e-5
    for name in ("loss", "accuracy/1", "acceptance/2", "grad_norm", "eval_accepted_length", "eval_loss/0"):
        assert history(runs / run, name) == pytest.approx(history(runs / "one", name), rel=1e-4), name


def test_two_ranks_train_the_amateur_of_one(runs):
    """Sharded, and with logits in pieces."""
    one, two = (load_file(runs / run / "model" / "model.safetensors") for run in ("amateur", "amateur3"))
    assert max((one[name].double() - two[name].double()).abs().max().item() for name in one) < 1e-5
    assert history(runs / "amateur3", "loss") == pytest.approx(history(runs / "amateur", "loss"), rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_runs_resume_on_two_ranks(runs, stage):
    assert difference(runs / f"zero{stage}", runs / f"again{stage}") == 0.0


@pytest.mark.parametrize("run", ["family0", "family3"])
def test_two_ranks_train_the_family_of_one(runs, run):
    """Also with an input that is shuffled, and what was held fixed is the same."""
    for name in ("alpha_0_seed_0", "alpha_0.5_seed_0"):
        assert difference(runs / "family", runs / run, f"heads/{name}") < 1e-5
        one, two = (
            json.loads((runs / each / "metrics.json").read_text())["members"][name]["eval"] for each in ("family", run)
        )
        assert two == pytest.approx(one, rel=1e-4)
    assert Family.read(runs / "family").held_fixed == Family.read(runs / run).held_fixed
