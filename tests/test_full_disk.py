"""A full disk: one line with the path and the free space, exit code 2, and what was there before is whole."""

import errno
import json
import os

import numpy as np
import pytest
import torch
from full_disk import small
from safetensors.torch import save_file
from tiny import save_tiny, tiny_causal_lm
from toy_training import flags, head_weights, in_child, make_toy

from data_prep import conversations, tokenise
from data_prep.resumable import PartialFile
from data_prep.token_files import Sample, write_tokens
from dcd_core.config import run_entry
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, not_written, write_json_atomic, write_text_atomic, writing
from diagnostics.parts import Parts

MUCH = 2**20


def torch_save(path) -> None:
    with atomic_path(path) as temporary:
        torch.save({"weights": torch.zeros(MUCH)}, temporary)


def safetensors_save(path) -> None:
    with atomic_path(path) as temporary:
        save_file({"weights": torch.zeros(MUCH)}, temporary)


def model_save(path) -> None:
    with atomic_path(path) as temporary:
        tiny_causal_lm(layers=40).save_pretrained(temporary)


def partial(path) -> None:
    with PartialFile(path) as file:
        file.append([{"id": "x" * MUCH}])


def token_file(path) -> None:
    ids = np.random.default_rng(0).integers(0, 2**31 - 1, MUCH).astype(np.int32)
    write_tokens(path, [Sample("a", ids, ((1, MUCH),))], {})


WRITERS = {
    "text": lambda path: write_text_atomic(path, "x" * MUCH),
    "json": lambda path: write_json_atomic(path, {"x": "x" * MUCH}),
    "torch": torch_save,
    "safetensors": safetensors_save,
    "model": model_save,
    "parquet": token_file,
    "partial": partial,
    "pieces": lambda path: Parts(path.parent, "settings").put("piece", "x" * MUCH),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_writer_names_the_place_and_its_room_and_leaves_nothing(tmp_path, kind):
    with small(tmp_path / "disk") as disk:
        path = disk.folder / "a.pt"
        if kind not in ("partial", "model"):
            path.write_text("old")
        disk.fill(2**18)
        with pytest.raises(UserError, match=r"(?s)disk/.*cannot be written .*MiB free there|GiB free there"):
            WRITERS[kind](path)
        left = [item for item in disk.folder.rglob("*") if item.is_file()]
        assert left == ([path] if kind not in ("partial", "model") else [])
        assert not left or path.read_text() == "old"
        disk.free()
        WRITERS[kind](path)  # negative control: with room it works


def test_a_trainer_keeps_its_last_checkpoint_and_resumes_once_there_is_room(tmp_path):
    toy, log = make_toy(tmp_path / "toy"), tmp_path / "log.txt"
    options = ["--epochs=2", "--save_every=4"]
    assert in_child(flags(toy, tmp_path / "alone", *options), str(log)) == 0, log.read_text()
    with small(tmp_path / "disk") as disk:
        run = flags(toy, disk.folder / "run", *options)
        assert in_child(run, str(log), kill_in="write") < 0
        disk.fill(50_000)
        log.write_text("")
        assert in_child(run, str(log), largest=disk.largest) == 2
        last = log.read_text().strip().splitlines()[-1]
        assert last.startswith("error: ") and "run/checkpoints" in last and "free there" in last
        assert "Traceback" not in log.read_text()
        kept = sorted(path.name for path in (disk.folder / "run" / "checkpoints").iterdir())
        assert kept[0] == "latest" and all(name.startswith("step-") for name in kept[1:])
        disk.free()
        assert in_child(run, str(log)) == 0, log.read_text()
        assert f"resuming after step {int(kept[-1][5:])} of" in log.read_text()
        one, two = head_weights(tmp_path / "alone"), head_weights(disk.folder / "run")
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize("script", [conversations, tokenise])
def test_a_data_script_says_it_in_one_line(tmp_path, script, capsys):
    drawn, lines = np.random.default_rng(0), []
    for index in range(8):  # nothing that could be packed
        words = " ".join(f"w{number}" for number in drawn.integers(0, 80, 3000))
        turns = [{"role": "user", "content": f"w{index}"}, {"role": "assistant", "content": words}]
        lines.append(json.dumps({"id": str(index), "messages": turns, "source": "s"}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    with small(tmp_path / "disk") as disk:
        if script is conversations:
            given = [f"--source={tmp_path / 'chats.jsonl'}"]
        else:
            expert = save_tiny(tmp_path / "expert")
            given = [f"--conversations={tmp_path / 'chats.jsonl'}", f"--expert={expert}", "--max_length=100000"]
        disk.fill(8192)
        code = run_entry(lambda: script.main([*given, f"--out={disk.folder / 'out'}"]))
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(said) == 1 and "disk/out" in said[0] and "free there" in said[0]
        assert os.listdir(disk.folder) == []


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES"])
def test_what_a_library_cannot_write_is_one_line_too(number, capsys, tmp_path):
    def main():
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), str(tmp_path / "there"))

    assert run_entry(main) == 2
    assert str(tmp_path / "there") in capsys.readouterr().err


def test_other_failures_keep_their_traceback(tmp_path):
    """Negative control: a defect of ours is not taken for a full disk."""
    for error in (OSError(errno.EBADF, "bad file"), RuntimeError("sizes differ")):
        with pytest.raises(type(error)) as found, writing(tmp_path / "a"):
            raise error
        assert found.value is error


def test_the_room_is_that_of_the_folder_to_be_made(tmp_path):
    assert "free there" in str(not_written(tmp_path / "not" / "yet", "why"))
