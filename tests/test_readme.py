"""Commands in the README are commands: scripts, flags, settings files and targets are there."""

import importlib
import importlib.util
import re
import shlex

import pytest
from test_configs import settings

from data_prep.pipeline import ROOT
from dcd_core.config import parse_config

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(line[4:] for line in TEXT.splitlines() if line.startswith("    ")).replace("\\\n", " ")
COMMANDS = [line for line in BLOCKS.splitlines() if line.startswith(".venv/bin/")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_its_script_and_flags(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if "-m" in words:
        place = words.index("-m") + 1
        module = words[place]
    else:
        place = next(index for index, word in enumerate(words) if word.endswith(".py"))
        module = words[place].removesuffix(".py").replace("/", ".")
    assert importlib.util.find_spec(module), f"{module} is not there"
    assert parse_config(settings(module), words[place + 1 :])


def test_every_target_that_is_named_is_one():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^    )make ([a-z0-9-]+)", TEXT, re.MULTILINE))
    assert {"demo", "cross-alpha"} <= named <= targets
    assert len(COMMANDS) > 10
