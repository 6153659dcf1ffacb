"""Every file in configs/ is read by the script it is for, so that none of them rots."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import yaml
from test_layout import ENTRIES, name

from data_prep.pipeline import ROOT, Stage, fill, load_pipeline
from dcd_core.config import FROM_PAIR, parse_config
from dcd_core.errors import UserError
from diagnostics.paper import CROSS_ALPHAS

CONFIGS = ROOT / "configs"


def settings(module: str) -> type:
    """The settings class of an entry script."""
    return importlib.import_module(module).Config


# settings that a file leaves to the command line
GIVEN = {
    module: [f"--{flag}=x" for flag in flags.split()]
    for module, flags in {
        "data_prep.features": "expert tokens out",
        "data_prep.regenerate": "amateur",
        "diagnostics.lossless": "expert amateur prompts",
        "diagnostics.benchmark": "expert prompts output",
        "diagnostics.signal_error": "expert amateur head prompts output",
        "diagnostics.cross_alpha": "expert amateur family prompts output",
        "diagnostics.dual_drafter": "expert amateur family prompts output",
        "train.eagle3": "expert train_tokens output",
        "train.amateur": "expert train_tokens output",
        "train.cross_alpha": "expert amateur train_tokens output",
        "train.dual_drafter": "expert amateur train_tokens output",
    }.items()
}
# every script that is given models
TAKES_A_PAIR = [
    name(path) for path in ENTRIES if "expert" in {item.name for item in dataclasses.fields(settings(name(path)))}
]
# folder, or folder and the beginning of the file's name -> the scripts that read it
READERS = {
    "pairs/": TAKES_A_PAIR,
    "benchmark/": ["diagnostics.benchmark"],
    "signal_error/": ["diagnostics.signal_error"],
    "cross_alpha/": ["diagnostics.cross_alpha"],
    "dual_drafter/": ["diagnostics.dual_drafter"],
    "train/eagle3_": ["train.eagle3"],
    "train/amateur_": ["train.amateur"],
    "train/cross_alpha_": ["train.cross_alpha"],
    "train/dual_drafter_": ["train.dual_drafter"],
}
# what flags set: in a DeepSpeed file it would win over them in silence
SET_BY_FLAGS = {
    "optimizer",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
}


def readers(path: Path) -> list[str]:
    """The scripts that a YAML file is for."""
    place = path.relative_to(CONFIGS).as_posix()
    found = [modules for beginning, modules in READERS.items() if place.startswith(beginning)]
    assert len(found) == 1, f"say in READERS which script reads configs/{place}"
    return found[0]


FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "pipelines"]
CASES = [(path, module) for path in FILES for module in readers(path)]


@pytest.mark.parametrize("path, module", CASES, ids=[f"{path.stem}-{module}" for path, module in CASES])
def test_a_settings_file_is_read_by_its_script(path, module):
    assert parse_config(settings(module), ["--config", str(path), *required(module)])


@pytest.mark.parametrize("module", TAKES_A_PAIR)
@pytest.mark.parametrize("path", sorted((CONFIGS / "pairs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_pair_serves_every_script_that_is_given_models(path, module):
    """What the script has no setting for is left out; a trainer's own dtype is not the pair's."""
    pair = yaml.safe_load(path.read_text())["pair"]
    taken = {item.name: item.metadata.get(FROM_PAIR, item.name) for item in dataclasses.fields(settings(module))}
    given = [flag for flag in required(module) if taken[flag.split("=")[0].strip("-")] not in pair]
    found = parse_config(settings(module), ["--config", str(path), *given])
    for item, source in taken.items():
        if source in pair:
            assert getattr(found, item) in (pair[source], [pair[source]]), item
    assert found.expert == pair["expert"] and (module.startswith("train") or "dtype" not in taken or found.dtype)
    assert not module.startswith("train") or (found.dtype, found.expert_dtype) == ("float32", pair["dtype"])


@pytest.mark.parametrize("text", ["pair: {expert: e, haed: h}", "pair: e", "pair: {alphas: [0.1]}"])
def test_a_pair_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "pair.yaml").write_text(text)
    with pytest.raises(UserError, match="pair"):
        parse_config(settings("diagnostics.benchmark"), ["--config", str(tmp_path / "pair.yaml"), "--prompts=p"])


def test_what_stands_beside_a_pair_and_flags_win(tmp_path):
    (tmp_path / "pair.yaml").write_text("pair: {expert: e, amateur: a, head: h}\nhead: mine")
    flags = ["--config", str(tmp_path / "pair.yaml"), "--amateur=b", "--prompts=p", "--output=o"]
    found = parse_config(settings("diagnostics.benchmark"), flags)
    assert (found.expert, found.amateur, found.head) == ("e", "b", "mine")


def test_the_papers_matrix_trains_and_decodes_with_the_same_alphas():
    matrix = parse_config(
        settings("diagnostics.cross_alpha"),
        ["--config", str(CONFIGS / "cross_alpha/paper.yaml"), *GIVEN["diagnostics.cross_alpha"]],
    )
    for pair in ("qwen3", "llama3", "llama3_70b", "llama_eft"):
        trained = parse_config(
            settings("train.cross_alpha"), ["--config", str(CONFIGS / f"train/cross_alpha_{pair}.yaml")]
        )
        assert tuple(trained.train_alphas) == tuple(matrix.infer_alphas) == CROSS_ALPHAS


def test_pair_and_protocol_combine():
    files = ["--config", str(CONFIGS / "pairs/llama3.yaml"), "--config", str(CONFIGS / "benchmark/paper.yaml")]
    both = parse_config(settings("diagnostics.benchmark"), [*files, "--prompts", "p", "--output", "o"])
    assert (both.expert, both.max_new_tokens) == ("meta-llama/Llama-3.1-8B-Instruct", 256)


@pytest.mark.parametrize("path", sorted((CONFIGS / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_hold_memory_and_precision_only(path):
    assert not set(json.loads(path.read_text())) & SET_BY_FLAGS


PIPELINES = {path.stem: load_pipeline(str(path)) for path in sorted((CONFIGS / "pipelines").glob("*.yaml"))}
STAGES = [(name, stage) for name, pipeline in PIPELINES.items() for stage in pipeline.stages]


@pytest.mark.parametrize("pipeline, stage", STAGES, ids=[f"{pipeline}-{stage.name}" for pipeline, stage in STAGES])
def test_a_stage_calls_its_script_with_flags_that_exist(pipeline: str, stage: Stage):
    command = [fill(part, PIPELINES[pipeline].variables) for part in stage.command]
    script = next(part for part in command if part.endswith(".py"))
    assert (ROOT / script).is_file()
    watched = {path for text in stage.inputs if "{" not in text for path in ROOT.glob(text)}
    assert ROOT / script in watched, "a changed script must redo its stage"
    flags = command[command.index(script) + 1 :]
    parse_config(settings(name(ROOT / script)), [part.replace("configs/", f"{CONFIGS}/") for part in flags])


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_stage_reads_what_is_there_or_made_before(pipeline):
    """Made by an earlier stage, or, in a pipeline that goes on from the demo, by the demo."""
    made = {output.replace("{run}", "{demo}") for stage in PIPELINES["demo"].stages for output in stage.outputs}
    for stage in PIPELINES[pipeline].stages:
        for text in stage.inputs:
            variables = PIPELINES[pipeline].variables
            there = not text.startswith(("{run}", "{demo}")) and any(ROOT.glob(fill(text, variables)))
            earlier = any(text == output or text.startswith((f"{output}/", output.rstrip("*"))) for output in made)
            assert there or earlier, f"stage {stage.name}: nothing makes {text}"
        made |= set(stage.outputs)


def test_the_demo_keeps_its_budget():
    install_s = 120
    assert sum(stage.budget_s for stage in PIPELINES["demo"].stages) + install_s <= 30 * 60


def test_the_toy_experiment_keeps_its_budget():
    assert sum(stage.budget_s for stage in PIPELINES["cross_alpha_toy"].stages) <= 5 * 60


@pytest.mark.parametrize("path", ENTRIES, ids=name)
def test_every_setting_is_explained(path):
    for field in dataclasses.fields(settings(name(path))):
        assert field.metadata.get("help"), f"--{field.name} of {path} has no help text"


def required(module: str) -> list[str]:
    """Flags for the settings that have no default, or that a script asks for all the same."""
    more = {"diagnostics.dual_drafter": ["--family=x"], "train.amateur": ["--keep_layers=0-1"]}
    more["data_prep.regenerate"] = ["--method=cd"]
    more["dcd_core.generate"] = ["--amateur=x", "--head=x", "--prompt=x"]
    missing = [
        item.name
        for item in dataclasses.fields(settings(module))
        if item.default is item.default_factory is dataclasses.MISSING
    ]
    return [*(f"--{item}=x" for item in missing), *GIVEN.get(module, []), *more.get(module, [])]


NUMBERS = [
    (name(path), item.name)
    for path in ENTRIES
    for item in dataclasses.fields(settings(name(path)))
    if item.type in (int, float, "int", "float")
]


@pytest.mark.parametrize("module, setting", NUMBERS)
def test_a_number_below_all_sense_is_refused(module, setting):
    """No setting is a count, a share or a rate of -5."""
    assert parse_config(settings(module), required(module))
    with pytest.raises(UserError, match=setting):
        parse_config(settings(module), [*required(module), f"--{setting}=-5"])


SENSELESS = {
    "--beta1=1": "--beta1 must be below 1",
    "--beta2=1.5": "--beta2 must be below 1",
    "--final_lr_ratio=3": "--final_lr_ratio must be at most 1",
    "--step_decay=1.5": "--step_decay must be at most 1",  # heads are unrolled, amateurs are not
    "--eval_tokens=./t": "--eval_tokens ./t is among --train_tokens",
}
TRAINERS = ("train.eagle3", "train.cross_alpha", "train.dual_drafter", "train.amateur")


@pytest.mark.parametrize(
    "module, flag, message",
    [
        (module, flag, message)
        for module in TRAINERS
        for flag, message in SENSELESS.items()
        if (module, flag) != ("train.amateur", "--step_decay=1.5")
    ],
)
def test_a_training_that_means_nothing_is_refused(module, flag, message):
    with pytest.raises(UserError, match=message):
        parse_config(settings(module), [*required(module), "--train_tokens=t", flag])
