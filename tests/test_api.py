"""From Python: what is streamed, collected and decoded by hand is one and the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_world import make_world

from dcd_core import Decoder, Target, load
from dcd_core.api import DEFAULTS, OPTIONS, make_settings
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, assemble
from dcd_core.scorers import three_models

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["w1 w2 w3", "w9", [{"role": "user", "content": "w4 w5"}]]
FAST = {"max_new_tokens": 9, "gamma": 3, "alpha": 0.5}


@pytest.fixture(scope="module")
def cd(tmp_path_factory):
    world = make_world(tmp_path_factory.mktemp("world"))
    names = [str(world / name) for name in ("expert", "amateur", "head")]
    return load(*names, dtype="float32", device="cpu", lm=names[1], amateur_head=str(world / "amateur_head"))


@pytest.fixture(scope="module")
def dual_input(tmp_path_factory):
    """The same pair with the head that reads both models."""
    world = make_world(tmp_path_factory.mktemp("world"))
    return load(*(str(world / name) for name in ("expert", "amateur", "dual_input")), dtype="float32", device="cpu")


def by_hand(cd, prompts, method, target, **fields):
    given = [Prompt(str(number), cd.prompt(prompt).ids) for number, prompt in enumerate(prompts, start=1)]
    how = Settings(target=target, stop_ids=(3,), max_new_tokens=9, gamma=3, **fields)
    method = assemble(method, cd.pair, cd.head, lm=cd.lm, amateur_head=cd.amateur_head)
    return [generation.ids for generation in decode(method, given, how)]


@pytest.mark.parametrize("method", METHODS)
def test_streamed_and_collected_are_what_the_loop_decodes(cd, dual_input, method):
    cd = dual_input if METHODS[method].reads_amateur else cd
    expected = by_hand(cd, PROMPTS, method, Target(alpha=0.5, temperature=0.0))
    for max_batch in (1, 3):
        found = cd.generate(PROMPTS, method, max_batch=max_batch, **FAST)
        assert [answer.generation.ids for answer in found] == expected
        assert [answer.id for answer in found] == ["1", "2", "3"]
    for prompt, answer in zip(PROMPTS, found, strict=True):
        stream = cd.stream(prompt, method, **FAST)
        pieces = list(stream)
        assert "".join(pieces) == answer.text
        assert stream.generation.ids == answer.generation.ids and stream.generation.finish == answer.generation.finish
        assert stream.seconds > 0 and all(pieces)


def test_text_comes_in_pieces(cd):
    stream = cd.stream("w1 w2", "cd", **FAST)
    first = next(stream)
    assert len(stream.generation.ids) < 9 and not stream.generation.finish
    assert "".join([first, *stream]) == cd.generate(["w1 w2"], "cd", **FAST)[0].text
    with pytest.raises(StopIteration):
        next(stream)


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(cd):
    free = cd.generate(PROMPTS[:1], "cd", **FAST)[0]
    stop = free.generation.ids[4]
    other = Decoder(cd.pair, cd.head, (stop,))
    answer = other.generate(PROMPTS[:1], "dcd_eagle3", **FAST)[0]
    kept = free.generation.ids[: free.generation.ids.index(stop) + 1]
    assert answer.generation.ids == kept and answer.generation.finish == "stop"
    assert answer.text == cd.pair.tokenizer.decode(kept[:-1])
    assert "".join(other.stream(PROMPTS[0], "dcd_eagle3", **FAST)) == answer.text


@pytest.mark.parametrize("rule", ["auto", "shared_noise"])
def test_sampling_is_keyed_by_seed_and_prompt(cd, rule):
    options = {**FAST, "temperature": 1.0, "rule": rule, "seed": 4}
    found = [answer.generation.ids for answer in cd.generate(PROMPTS, "dcd_eagle3", max_batch=2, **options)]
    assert found == by_hand(cd, PROMPTS, "dcd_eagle3", Target(alpha=0.5), rule=rule, seed=4)
    assert "".join(cd.stream(PROMPTS[0], **options)) == cd.generate(PROMPTS[:1], **options)[0].text
    others = cd.generate(PROMPTS, "dcd_eagle3", **{**options, "seed": 5})
    assert found != [answer.generation.ids for answer in others]


def test_a_whole_target_and_ids_as_prompts(cd):
    target = Target(weights=(1.0, -0.3), temperature=0.0, cutoff=0.1)
    prompt = Prompt("mine", [9, 10, 11])
    (answer,) = cd.generate([prompt], "dcd_ngram", target=target, max_new_tokens=9, gamma=3)
    assert answer.id == "mine"
    how = Settings(target=target, stop_ids=(3,), max_new_tokens=9, gamma=3)
    assert [answer.generation.ids] == [g.ids for g in decode(assemble("cd", cd.pair), [prompt], how)]


def test_raw_text_leaves_the_template_out(cd):
    assert cd.prompt("w1", raw=True).ids == cd.pair.tokenizer("w1")["input_ids"] != cd.prompt("w1").ids
    raw = cd.generate(["w1"], "cd", raw=True, **FAST)[0].generation.ids
    assert raw == cd.generate([cd.prompt("w1", raw=True)], "cd", **FAST)[0].generation.ids
    assert "".join(cd.stream("w1", "cd", raw=True, **FAST)) == cd.generate(["w1"], "cd", raw=True, **FAST)[0].text


def test_finished_answers_are_handed_over_at_once(cd):
    seen = []
    found = cd.generate(PROMPTS, "cd", max_batch=2, on_finish=seen.append, **FAST)
    assert sorted(seen, key=lambda answer: answer.id) == found


def test_defaults_and_options():
    how = make_settings((3,))
    assert (how.target.alpha, how.target.temperature, how.max_new_tokens) == tuple(DEFAULTS.values())
    assert {"alpha", "cutoff", "temperature", "gamma", "branch", "nodes", "stop_below", "rule", "seed"} <= set(OPTIONS)
    how = make_settings(target=Target(alpha=0.7), seed=9)
    assert how.target == Target(alpha=0.7) and how.seed == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alhpa": 0.3}, "option 'alhpa' is unknown; the options are target, alpha,"),
        ({"stop_ids": (3,)}, "option 'stop_ids' is unknown"),
        ({"target": Target(), "alpha": 0.3}, "option 'alpha' is part of the target"),
        ({"alpha": -0.1}, "alpha must be a finite number >= 0"),
        ({"alpha": float("nan")}, "alpha must be a finite number >= 0"),
        ({"cutoff": 1.5}, "cutoff must lie in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 600}, "passes the context"),
        ({"method": "warp"}, "method 'warp' is unknown; choose one of ar, cd,"),
    ],
)
def test_refusals_come_with_the_call(cd, options, message):
    """Not with the first piece of text."""
    with pytest.raises(UserError, match=message):
        cd.stream("w1", **options)
    with pytest.raises(UserError, match=message):
        cd.generate(["w1"], **options)


def test_prompts_are_refused_by_name(cd):
    with pytest.raises(UserError, match="prompt '2' is empty"):
        cd.generate(["w1", ""])
    with pytest.raises(UserError, match="prompts is a list"):
        cd.generate("w1")


def test_what_is_not_loaded_is_named(cd):
    alone = Decoder(type(cd.pair)(cd.pair.expert, None, cd.pair.tokenizer), None, (3,))
    assert alone.generate(["w1"], "ar", **FAST)[0].text
    with pytest.raises(UserError, match="method cd contrasts with an amateur, and none is given"):
        alone.stream("w1", "cd")
    with pytest.raises(UserError, match="method expert_sd drafts with an EAGLE3 head, and none is given"):
        alone.stream("w1", "expert_sd")
    with pytest.raises(UserError, match="method dcd_lm drafts with a small language model, and none is given"):
        Decoder(cd.pair, cd.head).stream("w1", "dcd_lm")
    with pytest.raises(UserError, match="method dual drafts with a second head, and none is given: .*--amateur_head"):
        Decoder(cd.pair, cd.head).stream("w1", "dual")
    with pytest.raises(
        UserError, match="method cross_alpha drafts with a dual-input head, and --head is an EAGLE3 head"
    ):
        cd.stream("w1", "cross_alpha")


def test_savings_change_no_text(cd):
    plain = [answer.text for answer in cd.generate(PROMPTS, "dcd_eagle3", cutoff=0.3, **FAST)]
    for saving in ("lazy", "deferred"):
        found = cd.generate(PROMPTS, "dcd_eagle3", cutoff=0.3, saving=saving, max_batch=2, **FAST)
        assert [answer.text for answer in found] == plain
        assert "".join(cd.stream(PROMPTS[0], "dcd_eagle3", cutoff=0.3, saving=saving, **FAST)) == plain[0]


def test_other_models_than_the_pair_s(cd):
    scorers = three_models(cd.pair.amateur, cd.pair.expert)
    other = Decoder(type(cd.pair)(cd.pair.expert, None, cd.pair.tokenizer), cd.head, cd.stops, contrast=scorers)
    target = Target.proxy(0.5, temperature=0.0)
    prompt = Prompt("mine", [9, 10, 11])
    (answer,) = other.generate([prompt], "dcd_eagle3", target=target, max_new_tokens=9)
    how = Settings(target=target, stop_ids=(3,), max_new_tokens=9)
    (plain,) = decode(assemble("cd", cd.pair, contrast=scorers), [prompt], how)
    assert answer.generation.ids == plain.ids


def test_the_package_is_light_until_it_is_used():
    code = (
        "import sys, dcd_core.errors; assert 'torch' not in sys.modules; from dcd_core import load; import os; "
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'], list(sys.modules).index('dcd_core.environment') "
        "< list(sys.modules).index('torch'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True PASSIVE True\n", done.stderr
    with pytest.raises(ImportError):
        from dcd_core import nothing  # noqa: F401
