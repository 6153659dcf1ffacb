"""One process at a time in a run folder: the second is refused, and a lock ends with the process that holds it."""

import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from test_configs import required
from test_layout import ENTRIES, name
from tiny import save_tiny

from dcd_core.errors import UserError
from dcd_core.locks import held, hold, let_go, lock_path, refuse_held

HAS_FOLDER = [
    name(path)
    for path in ENTRIES
    if "output" in {item.name for item in dataclasses.fields(importlib.import_module(name(path)).Config)}
]


def hold_for_ever(folder: str, ready) -> None:
    hold(folder)
    ready.set()
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_for_ever, args=(str(tmp_path / "run"), ready), daemon=True)
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize("ask", [refuse_held, hold])
def test_the_second_process_is_told_who_is_there_and_a_dead_holder_never_blocks(tmp_path, holder, ask):
    with pytest.raises(UserError, match=f"process {holder.pid} .*since"):
        ask(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert lock_path(tmp_path / "run").exists()  # left behind, and no matter
    refuse_held(tmp_path / "run")
    hold(tmp_path / "run")
    let_go(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []


def test_a_process_may_hold_again_what_it_holds(tmp_path):
    for _ in range(2):
        hold(tmp_path / "run")
        refuse_held(tmp_path / "run")
    let_go(tmp_path / "run")
    let_go(tmp_path / "run")  # nothing is held any more
    with held(tmp_path / "run"), pytest.raises(UserError):
        hold(tmp_path / "run")


def test_an_output_file_is_held_before_it_is_there(tmp_path):
    with held(tmp_path / "out.jsonl"):
        with pytest.raises(UserError, match="out.jsonl is in use"), held(tmp_path / "out.jsonl"):
            pass
        with held(tmp_path / "other.jsonl"):
            pass
    assert os.listdir(tmp_path) == []


def count_up(path: Path, times: int) -> None:
    for _ in range(times):
        while True:
            try:
                with held(path):
                    path.write_text(str(int(path.read_text()) + 1))
                break
            except UserError:
                pass


def test_processes_that_take_turns_never_meet(tmp_path):
    """The file of the lock is made and removed at every turn."""
    path = tmp_path / "count"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=count_up, args=(path, 50)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert path.read_text() == "200"


@pytest.mark.parametrize("module", HAS_FOLDER)
def test_every_script_leaves_a_folder_alone_that_another_process_works_in(tmp_path, module):
    """Before anything is loaded: nothing that the flags name is there."""
    folder = tmp_path / "run"
    folder.mkdir()
    with held(folder), pytest.raises(UserError, match="is in use by process"):
        importlib.import_module(module).main([*required(module), f"--output={folder}"])
    assert os.listdir(folder) == []


@pytest.mark.parametrize("module", ["data_prep.conversations", "data_prep.tokenise", "data_prep.regenerate"])
def test_a_data_script_leaves_an_output_alone_that_another_process_writes(tmp_path, module):
    save_tiny(tmp_path / "expert")
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "a", "messages": turns, "source": "s"}) + "\n")
    flags = [f"--out={tmp_path / 'out'}"]
    if module == "data_prep.conversations":
        flags += [f"--source={tmp_path / 'chats.jsonl'}"]
    else:
        flags += [f"--conversations={tmp_path / 'chats.jsonl'}", f"--expert={tmp_path / 'expert'}"]
    before = sorted(os.listdir(tmp_path))
    main = importlib.import_module(module).main
    with held(tmp_path / "out"), pytest.raises(UserError, match="is in use by process"):
        main(flags)
    assert sorted(os.listdir(tmp_path)) == before
    assert main(flags) == 0
    assert not list(tmp_path.glob(".*"))
