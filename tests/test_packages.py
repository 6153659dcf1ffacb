"""Packages that a model's files need and that are not installed: the right ones are named, in one line."""

import base64

import pytest
from tiny import save_tiny

import dcd_core.packages as packages
from dcd_core.config import run_entry
from dcd_core.errors import UserError
from dcd_core.generate import main
from dcd_core.models import load_tokenizer
from dcd_core.packages import installed

SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"
TIKTOKEN = b"".join(base64.b64encode(bytes([index])) + b" %d\n" % index for index in range(256))


@pytest.fixture
def folder(tmp_path):
    """A model without tokenizer files."""
    made = save_tiny(tmp_path / "model")
    for path in [*made.glob("tokenizer*"), *made.glob("*.jinja")]:
        path.unlink()
    return made


@pytest.fixture
def without(monkeypatch):
    """Some packages are not installed, and whatever else is."""
    return lambda *names: monkeypatch.setattr(packages, "installed", lambda package: package not in names)


@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model"])
@pytest.mark.parametrize(
    "content, missing",
    [
        (SENTENCEPIECE, ("sentencepiece", "protobuf")),
        (SENTENCEPIECE, ("sentencepiece",)),
        (SENTENCEPIECE, ("protobuf",)),
        (TIKTOKEN, ("tiktoken",)),
    ],
)
def test_the_packages_of_a_folder_s_only_tokenizer_are_named(folder, capfd, without, file, content, missing):
    (folder / file).write_bytes(content)
    without(*missing)
    assert run_entry(lambda: main([f"--expert={folder}", "--method=ar", "--prompt=w1"])) == 2
    said = capfd.readouterr().err.strip()
    assert said.count("\n") == 0 and f"pip install {' '.join(missing)})" in said and file in said


def test_nothing_is_asked_for_where_there_is_a_tokenizer_json(tmp_path, without):
    folder = save_tiny(tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(SENTENCEPIECE)
    without("sentencepiece", "protobuf", "tiktoken")
    assert len(load_tokenizer(str(folder))) == 96


def test_a_hub_id_is_looked_up_in_the_cache_after_it_failed(folder, tmp_path, monkeypatch, without):
    place = tmp_path / "cache" / "models--some--model"
    commit = "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots" / commit).mkdir(parents=True)

    def fetch_and_fail(*args, **kwargs):
        (place / "snapshots" / commit / "tokenizer.model").write_bytes(SENTENCEPIECE)
        raise ValueError("`tiktoken` is required to read a `tiktoken` file")

    monkeypatch.setattr("dcd_core.packages.try_to_load_from_cache", cached_in(tmp_path / "cache"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fetch_and_fail)
    monkeypatch.setattr("dcd_core.models.load_whole_config", lambda name: None)  # which the hub has
    without("sentencepiece", "tiktoken")
    with pytest.raises(UserError, match="pip install sentencepiece"):
        load_tokenizer("some/model")


def cached_in(folder):
    """The hub's own look-up in a cache elsewhere."""
    real = packages.try_to_load_from_cache
    return lambda name, file: real(name, file, cache_dir=folder)


def test_a_broken_file_is_one_line_too(folder):
    (folder / "tokenizer.model").write_bytes(b"\x00\x01 no tokenizer")
    with pytest.raises(UserError) as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)


def test_packages_are_found_by_the_name_that_pip_has():
    assert installed("protobuf") and installed("huggingface-hub") and installed("torch[extra]")
    assert not installed("no-such-package") and not installed("optimum-no.such")


def test_a_sentencepiece_model_works_where_the_package_is(folder, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the quick brown fox {index} jumps over lazy dogs" for index in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=70, model_type="bpe", minloglevel=2
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer("the quick fox")["input_ids"]) == "the quick fox"
