"""Processes of one run must see one folder: machines that do not are named, and a refused start leaves nothing."""

import multiprocessing
import os
import socket

import pytest
import torch

from dcd_core.errors import UserError
from dcd_core.processes import Ranks, free_port, join, refuse_unshared


def one_rank(rank: int, port: int, folder: str, answers) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        refuse_unshared(folder, join("cpu"), patience=0.5)
        answers.put((rank, ""))
    except UserError as error:
        answers.put((rank, str(error)))
    except BaseException as error:  # or the test would wait for an answer
        answers.put((rank, f"a traceback: {error!r}"))


def both(*folders) -> list[str]:
    """What two processes say, each with a folder of its own."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), free_port()
    started = [
        context.Process(target=one_rank, args=(i, port, str(path), answers), daemon=True)
        for i, path in enumerate(folders)
    ]
    try:
        for process in started:
            process.start()
        found = dict(answers.get(timeout=600) for _ in started)
        for process in started:
            process.join()
    finally:
        for process in started:  # one that waits for a partner which never came
            if process.pid:
                process.kill()
    return [found[0], found[1]]


@pytest.mark.parametrize("there", [False, True])
def test_one_folder_for_all_is_needed(tmp_path, there):
    shared, other = tmp_path / "runs" / "shared", tmp_path / "elsewhere"
    if there:
        shared.mkdir(parents=True)
    assert both(shared, shared) == ["", ""]
    assert shared.exists() == there and not (there and os.listdir(shared)), "nothing is left"
    for message in both(shared, other):
        assert "is not one folder for all processes" in message
        assert f"is not seen on {socket.gethostname()};" in message
    assert os.listdir(tmp_path) == (["runs"] if there else []), "a refused start leaves nothing"


def test_what_keeps_the_first_from_writing_is_said_by_all(tmp_path):
    (tmp_path / "file").touch()
    for message in both(tmp_path / "file" / "run", tmp_path / "file" / "run"):
        assert "cannot be written" in message and "file" in message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_lone_process_is_not_asked(tmp_path, trained_before, rank):
    """Nor one that is a group by itself, as it is after training, whatever rank it plays: nobody else can tell it."""
    mine = trained_before and not torch.distributed.is_initialized()
    if mine:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        refuse_unshared(tmp_path / "new", Ranks(rank, rank + 1, torch.device("cpu")), patience=0.5)
    finally:
        if mine:
            torch.distributed.destroy_process_group()
    assert not (tmp_path / "new").exists()
