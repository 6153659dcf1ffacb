"""`make cross-alpha` on fewer texts: the same file and stages, from nothing to a page that opens with the verdict."""

import html
import importlib
import json
import math
import subprocess

import pytest
import yaml

from data_prep import pipeline
from data_prep.pipeline_file import ROOT, fill
from dcd_core.heads.family import Family
from diagnostics.records import read_records

FILE = "configs/pipelines/cross_alpha_toy.yaml"
SMALL = {"pair_steps": 80, "texts": 64, "prompts": 6, "tokens": 12, "decoded": 2}
ALPHAS, SEEDS = (0.0, 0.1, 0.3, 0.5), (0, 1)


def in_this_process(chain: pipeline.Pipeline, stage: pipeline.Stage, _held: int) -> int:
    """A stage's command without a new interpreter: the main of its script, with its flags."""
    command = [fill(part, chain.variables) for part in stage.command]
    place = next(index for index, part in enumerate(command) if part.endswith(".py"))
    module = command[place].removesuffix(".py").replace("/", ".")
    return importlib.import_module(module).main(command[place + 1 :])


class Experiment:
    """The pipeline with small numbers, in a folder of its own."""

    def __init__(self, folder):
        content = yaml.safe_load((ROOT / FILE).read_text(encoding="utf-8"))
        assert content["variables"].keys() == SMALL.keys()
        self.folder, self.file = folder / "run", folder / "small.yaml"
        self.file.write_text(yaml.safe_dump(content | {"variables": SMALL}), encoding="utf-8")

    def __call__(self) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "run_command", in_this_process)
            patch.chdir(ROOT)
            return pipeline.main(["--pipeline", str(self.file), "--run_dir", str(self.folder)])

    def metrics(self, stage: str) -> dict:
        return json.loads((self.folder / stage / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    made = Experiment(tmp_path_factory.mktemp("toy"))
    assert made() == 0
    return made


def test_make_runs_this_file():
    said = subprocess.run(["make", "-n", "cross-alpha"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"data_prep/pipeline.py --pipeline {FILE}" in said


def test_every_stage_is_finished(experiment, capsys):
    stages = json.loads((experiment.folder / "stages.json").read_text(encoding="utf-8"))
    assert list(stages) == ["pair", "family", "control", "drafters", "matrix", "reconstruction", "report"]
    assert experiment() == 0
    assert capsys.readouterr().out.count("finished before, nothing has changed") == len(stages)


def test_the_two_models_have_learnt_something_and_not_the_same(experiment):
    losses = experiment.metrics("pair")["nats_per_answer_token"]
    assert losses["expert"] + 0.1 < losses["amateur"] < math.log(88)


def test_the_families_are_matched(experiment):
    family = Family.read(experiment.folder / "cross_alpha", kind="cross_alpha")
    assert (family.alphas, family.seeds) == (ALPHAS, SEEDS)
    assert {member.input for member in family.members} == {"dual"}
    control = Family.read(experiment.folder / "expert_only", kind="cross_alpha")
    assert (control.alphas, control.seeds) == ((0.0,), SEEDS)
    assert {member.input for member in control.members} == {"expert_only"}
    family.refuse_unmatched(control)
    drafters = Family.read(experiment.folder / "dual_drafter", kind="dual_drafter")
    assert (drafters.alphas, drafters.seeds) == ((0.0, None), SEEDS)


def test_the_matrix_has_a_row_for_every_drafter_alpha_and_prompt(experiment):
    rows = read_records(experiment.folder / "matrix" / "replays.parquet", "replays").rows
    names = ["group", "drafter", "infer_alpha", "prompt_id"]
    assert len(rows) == len(rows[names].drop_duplicates()) == (len(ALPHAS) + 1) * len(SEEDS) * len(ALPHAS) * 6
    drafters = set(rows[["group", "train_alpha", "seed"]].itertuples(index=False, name=None))
    family = {("family", alpha, seed) for alpha in ALPHAS for seed in SEEDS}
    assert drafters == family | {("expert_only", 0.0, seed) for seed in SEEDS}
    assert set(rows["infer_alpha"]) == set(ALPHAS) and rows["prompt_id"].nunique() == 6
    # all drafters write the same text at one alpha
    assert (rows.groupby(["infer_alpha", "prompt_id"])["emitted"].nunique() == 1).all()
    assert rows["accepted"].sum() > 0.1 * rows["rounds"].sum(), "heads that have learnt to draft"
    assert rows.groupby("drafter")["accepted"].sum().nunique() > 1, "and not all the same"


def test_decoding_is_what_was_replayed(experiment):
    found = experiment.metrics("matrix")
    checked = found["decoded"]
    assert checked["checked"] == SMALL["decoded"] * len(ALPHAS) and checked["different"] == 0
    assert checked["equal"] > checked["checked"] / 2
    assert [entry["infer_alpha"] for entry in found["verdicts"]] == list(ALPHAS[1:])


def test_the_reconstruction_is_measured_with_both_trained_heads_of_every_seed(experiment):
    folder = experiment.folder / "reconstruction"
    replays = read_records(folder / "dual_replays.parquet", "dual_replays").rows
    assert set(replays["pair"]) == {f"expert / amateur / seed {seed}" for seed in SEEDS}
    assert len(replays) == len(SEEDS) * 2 * 6 * 5, "alphas, prompts, and four drafts one of which at two lengths"
    positions = read_records(folder / "positions.parquet", "positions").rows
    assert set(positions["pair"]) == set(replays["pair"]) and set(positions["alpha"]) == {0.1, 0.5}
    assert not positions["dual_kl"].isna().any()
    verdicts = [entry["verdict"] for entry in experiment.metrics("reconstruction")["dual_drafter"]]
    assert len(verdicts) == 2 and set(verdicts) <= {"helps", "no gain", "hurts", "undecided"}


def test_the_page_opens_with_the_verdicts(experiment):
    page = html.unescape((experiment.folder / "report" / "index.html").read_text(encoding="utf-8"))
    opening = page[: page.index("<h2")]
    sentences = [entry["sentence"] for entry in experiment.metrics("matrix")["verdicts"]]
    assert len(sentences) == 3 and all(sentence in opening for sentence in sentences)
    assert "say nothing about real ones" in opening
