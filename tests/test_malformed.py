"""No broken input ends in a traceback: one line, exit code 2, nothing half-written. tests/malformed.py is the list."""

import importlib
import inspect
import shutil
from pathlib import Path

import pytest
from malformed import FLAGS, KINDS
from tiny_world import make_world
from toy_training import toy_samples

from data_prep.token_files import write_tokens
from dcd_core.errors import UserError

MODELS = ["--expert={world}/expert", "--amateur={world}/amateur"]
PAIR = [*MODELS, "--prompts={world}/prompts.jsonl", "--max_new_tokens=4", "--device=cpu"]
ONE = [*PAIR, "--head={world}/head"]
TEXTS = ["--train_tokens={world}/train.parquet", "--max_steps=1", "--warmup_steps=0", "--batch_size=2"]
TRAINED = [*MODELS, *TEXTS, "--draft_vocab_size=40", "--unroll_steps=2"]

ENTRIES = {
    "dcd_core.generate": (ONE, "model head prompts"),
    "diagnostics.benchmark": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.accepted_length": ([*PAIR, "--heads={world}/head", "--output={out}"], "model head prompts"),
    "diagnostics.signal_error": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.dual_drafter": (
        [*PAIR, "--heads={world}/head", "--amateur_heads={world}/amateur_head", "--output={out}"],
        "model head prompts",
    ),
    "diagnostics.calibrate": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.throughput": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.overhead": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.identity": ([*ONE, "--output={out}"], "model head prompts"),
    "diagnostics.cross_alpha": ([*PAIR, "--family={world}/head", "--output={out}"], "model prompts"),
    "diagnostics.lossless": (["--output={out}", "--quick"], ""),
    "data_prep.toy_pair": (["--output={out}"], ""),
    "data_prep.pipeline": (["--pipeline={world}/pipeline.yaml", "--run_dir={out}"], "pipeline"),
    "diagnostics.report": (["--records={world}/head", "--output={out}"], ""),
    "data_prep.conversations": (["--source={world}/chats.jsonl", "--out={out}.jsonl"], "conversations"),
    "data_prep.regenerate": (
        [
            "--conversations={world}/chats.jsonl",
            "--expert={world}/expert",
            "--out={out}.jsonl",
            "--max_new_tokens=4",
            "--device=cpu",
        ],
        "model conversations",
    ),
    "data_prep.tokenise": (
        ["--conversations={world}/chats.jsonl", "--expert={world}/expert", "--out={out}.parquet"],
        "conversations",
    ),
    "train.eagle3": ([MODELS[0], *TEXTS, "--draft_vocab_size=40", "--output={out}"], "model tokens"),
    "train.amateur": ([MODELS[0], *TEXTS, "--keep_layers=0-3", "--output={out}"], "model tokens"),
    "train.cross_alpha": ([*TRAINED, "--amateur_feature_layers", "1", "2", "3", "--output={out}"], "model tokens"),
    "train.dual_drafter": ([*TRAINED, "--output={out}"], "model tokens"),
}
HARMLESS = {
    "an unknown tokenizer class": "transformers reads the tokenizer all the same",
    "half a line of conversations": "what was cut off is counted",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Everything that the entry points read, in order."""
    world = make_world(tmp_path_factory.mktemp("sound"), prompts=2)
    write_tokens(world / "train.parquet", toy_samples(30), {})
    shutil.copy(world / "prompts.jsonl", world / "chats.jsonl")
    (world / "chats.jsonl").write_text(
        '{"id": "a", "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}\n'
    )
    (world / "config.yaml").write_text("seed: 1\n")
    (world / "pipeline.yaml").write_text("run_dir: x\nstages: []\n")
    return world


def cases() -> list[tuple[str, str, str]]:
    """Each broken input with two entry points that read its kind, in turn."""
    found, turn = [], 0
    for kind, listed in KINDS.items():
        readers = [name for name, (_, reads) in ENTRIES.items() if kind == "config" or kind in reads.split()]
        for label in listed:
            chosen = {readers[turn % len(readers)], readers[(turn + len(readers) // 2) % len(readers)]}
            found += [(kind, label, entry) for entry in sorted(chosen)]
            turn += 1
    return found


def refused(entry: str, argv: list[str], world: Path, out: Path, harmless: bool = False) -> None:
    """The entry point's main raises the one error that becomes a line and exit code 2, and leaves no result; unless it
    can do what was asked all the same."""
    main = importlib.import_module(entry).main
    if harmless:
        main([word.replace("{world}", str(world)).replace("{out}", str(out)) for word in argv])
        return
    with pytest.raises(UserError) as error:
        main([word.replace("{world}", str(world)).replace("{out}", str(out)) for word in argv])
    assert 10 < len(str(error.value)) < 1500
    results = {"metrics.json", "model.safetensors", "index.html"}
    written = [path for path in out.parent.rglob("*") if path.is_file() and world not in path.parents]
    assert not [path for path in written if path.name in results or path.suffix in (".jsonl", ".parquet")]


@pytest.mark.parametrize(("kind", "label", "entry"), cases())
def test_a_broken_file_is_one_line(sound, tmp_path, kind, label, entry):
    world = tmp_path / "world"
    shutil.copytree(sound, world)
    KINDS[kind][label](world)
    argv = [*ENTRIES[entry][0], *(["--config={world}/config.yaml"] if kind == "config" else [])]
    if "chat template" in label and entry.startswith("train") or "end of turn" in label and entry == "train.amateur":
        pytest.skip("this trainer does not read it")
    harmless = label in HARMLESS and (kind != "conversations" or entry == "data_prep.conversations")
    refused(entry, argv, world, tmp_path / "new" / "out", harmless)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_broken_flag_is_one_line(sound, tmp_path, entry):
    module = importlib.import_module(entry)
    known = inspect.signature(module.Config).parameters
    tried = 0
    for label, flags in FLAGS.items():
        unknown = label in ("an unknown flag", "a word without a flag")
        for flag in flags:
            name = flag.removeprefix("--").split("=")[0]
            if entry == "diagnostics.lossless" and name == "expert":
                continue  # without a pair it looks at tiny models only
            if unknown or name in known:
                refused(entry, [*ENTRIES[entry][0], flag], sound, tmp_path / str(tried) / "out")
                tried += 1
    assert tried >= 2


def test_there_are_enough_of_them():
    assert sum(map(len, KINDS.values())) + len(FLAGS) >= 100
