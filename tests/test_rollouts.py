"""Rollouts are vanilla contrastive decoding's texts, made once for all studies that are given one folder."""

import json

import pytest
import torch
from naive import some_prompts
from tiny import tiny_pair

from dcd_core.contrast import Target
from dcd_core.decode import Settings, decode
from dcd_core.errors import UserError
from dcd_core.methods import assemble
from diagnostics import rollouts
from diagnostics.rollouts import Rollouts, roll_out

STOPS = (3,)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair("smol", dtype=torch.float64)


def texts(pair, folder="", models=("expert", "amateur"), dtype="float64", tokens=12):
    return Rollouts(pair, models, dtype, STOPS, tokens, str(folder))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_text_is_that_of_plain_contrastive_decoding(pair, alpha):
    """At alpha 0 too, where the amateur is not run."""
    settings = Settings(Target(alpha=alpha, temperature=0.0), 12, STOPS)
    plain = [decode(assemble("cd", pair), [prompt], settings, max_batch=1)[0].ids for prompt in some_prompts(4)]
    assert texts(pair).answers(some_prompts(4), alpha) == plain
    assert len({tuple(answer) for answer in plain}) > 1


def test_texts_are_made_once_and_only_for_the_same_question(pair, tmp_path, monkeypatch):
    asked = []

    def counted(pair, prompts, stops, alpha, tokens):
        asked.append([prompt.id for prompt in prompts])
        return roll_out(pair, prompts, stops, alpha, tokens)

    monkeypatch.setattr(rollouts, "roll_out", counted)
    three = some_prompts(3)
    first = texts(pair, tmp_path).answers(three, 0.5)
    assert texts(pair, tmp_path).answers(three, 0.5) == first and len(asked) == 1
    assert texts(pair, tmp_path).answers(three[::-1], 0.5) == first[::-1] and len(asked) == 1
    assert texts(pair).answers(three, 0.5) == first and len(asked) == 2, "no folder keeps nothing"
    more = texts(pair, tmp_path).answers(some_prompts(4), 0.5)
    assert more[:3] == first and asked[-1] == [some_prompts(4)[3].id], "only what is missing"
    for other, alpha in (
        (texts(pair, tmp_path), 0.1),
        (texts(pair, tmp_path, tokens=8), 0.5),
        (texts(pair, tmp_path, dtype="bfloat16"), 0.5),
        (texts(pair, tmp_path, models=("expert", "another")), 0.5),
        (texts(tiny_pair("smol", dtype=torch.float64, seed=5), tmp_path), 0.5),  # new weights under the old names
    ):
        before = len(asked)
        other.answers(three, alpha)
        assert len(asked) == before + 1 and len(asked[-1]) == 3
    assert len(list(tmp_path.glob("*.json"))) == 4 + 5 * 3


def test_a_damaged_file_is_named(pair, tmp_path):
    texts(pair, tmp_path).answers(some_prompts(1), 0.5)
    (path,) = tmp_path.glob("*.json")
    for damaged in ("{", json.dumps({"alpha": 0.5}), json.dumps({"answer": []}), json.dumps({"answer": ["a"]})):
        path.write_text(damaged)
        with pytest.raises(UserError, match=f"{path.name} is damaged; delete it"):
            texts(pair, tmp_path).answers(some_prompts(1), 0.5)


def test_a_folder_that_cannot_be_one_is_refused_before_the_work(pair, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, and the output is a folder"):
        texts(pair, tmp_path / "file")
