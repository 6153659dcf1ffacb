"""What the terminal refuses, in one line each."""

import io
import json
import re
import shutil
import sys

import pytest
from terminal import flags
from tiny_world import make_world

import dcd_core.generate as entry
from dcd_core.config import run_entry
from dcd_core.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), prompts=3)


@pytest.fixture
def typed(monkeypatch):
    """What stands on the standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method=warp"], "method 'warp' is unknown; choose one of ar, cd,"),
        (["--compare=warp"], "method 'warp' is unknown; choose one of ar, cd,"),
        (["--amateur="], "method dcd_eagle3 contrasts with an amateur, and none is given: name one (--amateur)"),
        (["--head="], "method dcd_eagle3 drafts with an EAGLE3 head, and none is given: name one (--head)"),
        (["--method=ar", "--compare=dcd_eagle3", "--head="], "method dcd_eagle3 drafts with an EAGLE3 head"),
        (["--method=dcd_lm"], "method dcd_lm drafts with a small language model, and none is given: name one (--lm)"),
        (["--lm=/nowhere"], "there is no folder /nowhere"),
        (["--saving=some"], "saving 'some' is unknown"),
        (["--method=ar", "--saving=lazy"], "--saving is about the amateur's passes, and ar makes none"),
        (
            ["--method=expert_sd", "--saving=deferred"],
            "--saving is about the amateur's passes, and expert_sd makes none",
        ),
        (["--draft_alpha=0.1"], "--draft_alpha recombines the two heads of dual; dcd_eagle3 does not use it"),
        (["--defer_theta=-1"], "defer_theta must be a finite number of 0 or more"),
        (["--top_p=0"], "top_p must lie in (0, 1]"),
        (["--target=warp"], "--target warp is unknown; choose dcd, obrien,"),
        (["--target=li"], "--alpha is for --target dcd; li does not use it"),
        (["--strength=1"], "--strength is for --target obrien or li or cos or proxy or guidance; dcd does not use it"),
        (["--head=nowhere"], "no head at nowhere"),
        (["--expert=/nowhere"], "there is no folder /nowhere"),
        (["--amateur=/nowhere"], "there is no folder /nowhere"),
        (["--prompt="], "the prompt is empty"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt", "w1 " * 600], "with 8 new ones it passes the context of"),
        (["--max_new_tokens=600"], "with 600 new ones it passes the context of"),
        (["--max_new_tokens=0"], "max_new_tokens must be at least 1, got 0"),
        (["--alpha=-0.1"], "alpha must be a finite number >= 0, got -0.1"),
        (["--alpha=nan"], "--alpha must be a finite number, got nan"),
        (["--cutoff=1.5"], "cutoff must lie in [0, 1], got 1.5"),
        (["--cutoff=-0.1"], "cutoff must lie in [0, 1], got -0.1"),
        (["--temperature=-1"], "temperature must be a finite number >= 0"),
        (["--gamma=0"], "gamma must be at least 1, got 0"),
        (["--rule=guess"], "rule 'guess' is unknown"),
        (["--batch=0"], "--batch must be at least 1, got 0"),
        (["--dtype=int8"], "dtype 'int8' is unknown"),
        (["--template_args={"], "--template_args is not JSON"),
        (["--prompts=nowhere.jsonl"], "--prompt and --prompts both say what to answer"),
        (["--whole"], "--whole is about the standard input"),
        (["--compare=dcd_eagle3"], "--compare sets --method beside another; both say dcd_eagle3"),
        (["--compare=cd", "--batch=2"], "leave --batch out"),
        (["--tokens=5"], "unrecognized arguments: --tokens=5"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(world, capsys, more, message):
    given = flags(world, "--prompt=w1", *more)
    assert run_entry(lambda: entry.main(given)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("error: ")
    assert message in shown.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--target=li"], "--target li needs --strength"),
        (["--target=cos", "--strength=1"], "mu must lie in [0, 1)"),
        (["--target=obrien", "--amateur_temperature=2"], "--amateur_temperature is for --target li"),
        (["--target=proxy", "--tuned=t", "--base=b"], "--amateur is for --target dcd or obrien or li or cos"),
        (["--target=proxy", "--amateur=", "--tuned=t"], "--target proxy needs --base"),
        (["--target=guidance", "--amateur=", "--strength=1"], "--target guidance needs --negative_prompt"),
    ],
)
def test_flags_of_a_target_belong_together(given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        entry.main(["--expert=e", "--amateur=a", "--method=cd", "--prompt=w1", *given])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 48}, "target_hidden_size 48 (expert: 32)"),
        ({"vocab_size": 512}, "vocab_size 512 (expert: 96)"),
        ({"rope_theta": 5.0, "rope_parameters": None}, "rope_theta 5.0 (expert: 100000.0)"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 40]}}, "layers (2, 4, 41)"),
    ],
)
def test_the_head_of_another_expert_is_refused(world, tmp_path, capsys, change, message):
    shutil.copytree(world / "head", tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    given = flags(world, "--prompt=w1", f"--head={tmp_path / 'head'}")
    assert run_entry(lambda: entry.main(given)) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "is the head of another expert than" in shown.err and message in shown.err


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_standard_input_is_refused(world, capsys, typed, text):
    for more in ([], ["--whole"]):
        typed(text)
        assert run_entry(lambda more=more: entry.main(flags(world, *more))) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and ("there is no prompt" in shown or "the prompt is empty" in shown)


def test_nothing_is_loaded_for_prompts_that_are_refused(world, monkeypatch, typed, capsys):
    monkeypatch.setattr(entry, "load", lambda *_: pytest.fail("no model is loaded"))
    typed("w1\n")
    assert run_entry(lambda: entry.main(flags(world, "--prompts=nowhere.jsonl"))) == 2
    assert run_entry(lambda: entry.main(flags(world, "--prompt= "))) == 2
    assert capsys.readouterr().err.count("error: ") == 2
