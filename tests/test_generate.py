"""Answers on the terminal: from every source, in every form."""

import io
import json
import re
import sys

import pytest
from terminal import flags
from tiny_world import make_world

import dcd_core.generate as entry
from dcd_core.api import Decoder, Stream, load, make_settings
from dcd_core.config import parse_config, run_entry
from dcd_core.contrast import Target
from dcd_core.flip_risk import Deferral
from dcd_core.prompts import read_prompts
from dcd_core.scorers import negative_prompt, three_models

OPTIONS = {"max_new_tokens": 8, "gamma": 3, "alpha": 0.5}
LINES = ["w1 w2", "w3 w4 w5", "w6"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), prompts=3)


@pytest.fixture(scope="module")
def cd(world):
    return load(*(str(world / name) for name in ("expert", "amateur", "head")), dtype="float32", device="cpu")


@pytest.fixture
def typed(monkeypatch):
    """What stands on the standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def texts(cd, prompts, method="dcd_eagle3", **options):
    return [answer.text for answer in cd.generate(prompts, method, **{**OPTIONS, **options})]


# ---- one answer ------------------------------------------------------------------------------------------------------


def test_the_answer_goes_out_and_the_figures_to_the_error_stream(world, cd, capsys):
    assert entry.main(flags(world, "--prompt", LINES[0])) == 0
    shown = capsys.readouterr()
    assert shown.out == texts(cd, LINES[:1])[0] + "\n"
    assert shown.err.startswith("dcd_eagle3: 1 answer, 8 tokens, ")
    for figure in ("s of prefill", "tokens/s", "accepted_length", "tokens_per_round"):
        assert figure in shown.err


def test_without_a_method_what_pays_is_drafted(world, cd, capsys):
    """The text is that of vanilla contrastive decoding, with a head and without."""
    expected = texts(cd, LINES[:1], "cd")[0] + "\n"
    for head in (world / "head", ""):
        given = [one for one in flags(world, "--prompt", LINES[0], f"--head={head}") if "--method" not in one]
        assert entry.main(given) == 0
        shown = capsys.readouterr()
        assert shown.out == expected and shown.err.startswith("auto: 1 answer, 8 tokens, ")


def test_text_is_shown_as_soon_as_it_is_known(world, cd, monkeypatch):
    class Terminal(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    seen = []
    monkeypatch.setattr(sys, "stdout", Terminal())
    entry.main(flags(world, "--prompt", LINES[0], "--method=cd"))
    whole = texts(cd, LINES[:1])[0] + "\n"
    assert len(seen) >= 8 and seen[-1] == whole and all(whole.startswith(part) for part in seen)


def test_a_raw_text_is_continued(world, cd, capsys):
    entry.main(flags(world, "--prompt", LINES[0], "--raw"))
    assert capsys.readouterr().out == texts(cd, LINES[:1], raw=True)[0] + "\n" != texts(cd, LINES[:1])[0] + "\n"


def test_every_flag_of_decoding_arrives(world, cd, capsys, monkeypatch):
    asked = []
    real = Decoder.stream
    monkeypatch.setattr(
        Decoder, "stream", lambda self, *a, **options: asked.append(options) or real(self, *a, **options)
    )
    given = {"alpha": 0.25, "cutoff": 0.1, "temperature": 0.5, "max_new_tokens": 5, "gamma": 2, "branch": 1, "nodes": 0}
    given |= {"stop_below": 0.0, "saving": "lazy", "rule": "shared_noise", "seed": 3, "top_k": 50, "top_p": 0.9}
    entry.main(flags(world, "--prompt=w1", *(f"--{name}={value}" for name, value in given.items())))
    assert given.items() <= asked[0].items()
    assert capsys.readouterr().out == texts(cd, ["w1"], **given)[0] + "\n"


def test_the_risk_of_deferred_judging_is_set_by_flags():
    given = {"theta": 0.2, "ceiling": 0.5, "scale": 2.0, "power": 1.0, "spread": 0.5, "most": 7}
    flags = [f"--defer_{name}={value}" for name, value in given.items()]
    config = parse_config(entry.Config, ["--expert=e", "--method=ar", *flags])
    assert make_settings(**config.options).deferral == Deferral(**given)
    assert make_settings(**parse_config(entry.Config, ["--expert=e", "--method=ar"]).options).deferral == Deferral()


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ([], Target(alpha=0.1, temperature=0.0)),
        (["--alpha=0.3", "--cutoff=0.2", "--top_k=5"], Target(0.3, 0.0, 0.2, top_k=5)),
        (["--target=obrien"], Target.obrien(temperature=0.0)),
        (["--target=obrien", "--strength=0.7", "--cutoff=0.3"], Target.obrien(0.7, 0.3, temperature=0.0)),
        (["--target=li", "--strength=1", "--amateur_temperature=0.5"], Target.li(1.0, 0.5, temperature=0.0)),
        (["--target=cos", "--strength=0.5", "--temperature=1"], Target(alpha=1.0, temperature=2.0)),
    ],
)
def test_published_targets_have_names(given, target):
    config = parse_config(entry.Config, ["--expert=e", "--amateur=a", "--method=cd", *given])
    assert make_settings(**config.options).target == target


def test_three_models_and_a_negative_prompt(world, cd, capsys):
    three = [f"--tuned={world / 'amateur'}", f"--base={world / 'expert'}", "--target=proxy", "--prompt=w1"]
    alone = [flag for flag in flags(world, "--method=dcd_ngram") if not flag.startswith(("--amateur", "--alpha"))]
    entry.main([*alone, *three])
    scorers = three_models(cd.pair.amateur, cd.pair.expert)
    other = Decoder(cd.pair, None, cd.stops, contrast=scorers)
    options = {"max_new_tokens": 8, "target": Target.proxy(temperature=0.0)}
    assert capsys.readouterr().out == other.generate(["w1"], "cd", **options)[0].text + "\n"
    entry.main(
        [*alone, "--target=guidance", "--strength=0.5", "--negative_prompt=w9 w8", "--prompt=w1", "--compare=cd"]
    )
    shown = capsys.readouterr()
    other.contrast = negative_prompt(cd.pair.expert, cd.prompt("w9 w8").ids)
    options["target"] = Target.guidance(0.5, temperature=0.0)
    assert shown.out == other.generate(["w1"], "cd", **options)[0].text + "\n"
    assert "texts: 1 of 1 equal" in shown.err


# ---- many answers ----------------------------------------------------------------------------------------------------


def test_prompts_come_from_the_standard_input(world, cd, capsys, typed):
    typed("\n".join([LINES[0], "", *LINES[1:]]) + "\n")
    entry.main(flags(world))
    expected = texts(cd, LINES)
    assert capsys.readouterr().out == "".join(f"== {n}\n{text}\n" for n, text in enumerate(expected, start=1))
    typed("\n".join(LINES) + "\n")
    entry.main(flags(world, "--whole"))
    assert capsys.readouterr().out == texts(cd, ["\n".join(LINES) + "\n"])[0] + "\n"
    typed("\n".join(LINES))
    entry.main(flags(world, "--limit=1"))
    assert capsys.readouterr().out == expected[0] + "\n"


def test_typed_prompts_are_answered_one_by_one(world, cd, capsys, monkeypatch):
    class Keyboard(io.StringIO):
        def isatty(self):
            return True

        def readline(self, *arguments):
            events.append("read")
            return super().readline(*arguments)

        def __next__(self):
            line = self.readline()
            if not line:
                raise StopIteration
            return line

    events = []
    real = Stream._run

    def noted(self):
        events.append("answer")
        return real(self)

    monkeypatch.setattr(Stream, "_run", noted)
    monkeypatch.setattr(sys, "stdin", Keyboard("\n".join(LINES)))
    assert entry.main(flags(world)) == 0
    assert events == ["read", "answer", "read", "answer", "read", "answer", "read"]
    shown = capsys.readouterr()
    assert "".join(f"{text}\n" for text in texts(cd, LINES)) == shown.out
    assert "ctrl-D" in shown.err and "3 answers" in shown.err


def test_prompts_come_from_a_file(world, cd, capsys, tmp_path):
    entry.main(flags(world, f"--prompts={world / 'prompts.jsonl'}", "--limit=2"))
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"), 2)
    expected = "".join(f"== {p.id}\n{text}\n" for p, text in zip(prompts, texts(cd, prompts), strict=True))
    assert capsys.readouterr().out == expected
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in LINES))
    entry.main(flags(world, f"--prompts={tmp_path / 'texts.jsonl'}"))
    assert capsys.readouterr().out == "".join(f"== {n}\n{t}\n" for n, t in enumerate(texts(cd, LINES), start=1))


@pytest.mark.parametrize("batch", ["--batch=1", "--batch=2", "--batch=8"])
def test_answers_as_json_lines(world, cd, capsys, batch):
    entry.main(flags(world, f"--prompts={world / 'prompts.jsonl'}", "--json", batch))
    shown = capsys.readouterr()
    found = {record["id"]: record for record in map(json.loads, shown.out.splitlines())}
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    for prompt, answer in zip(prompts, cd.generate(prompts, "dcd_eagle3", **OPTIONS), strict=True):
        record, made = found.pop(prompt.id), answer.generation
        assert (record["text"], record["ids"], record["finish"]) == (answer.text, made.ids, made.finish)
        assert record["tokens_per_round"] == pytest.approx((len(made.ids) - 1) / len(made.rounds))
        assert record["method"] == "dcd_eagle3"
    assert not found and "dcd_eagle3: 3 answers, " in shown.err


def test_batched_answers_are_shown_whole(world, cd, capsys):
    entry.main(flags(world, f"--prompts={world / 'prompts.jsonl'}", "--batch=2"))
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    expected = {f"{p.id}\n{text}\n" for p, text in zip(prompts, texts(cd, prompts), strict=True)}
    assert set(capsys.readouterr().out.split("== ")[1:]) == expected


def test_a_stopped_run_still_says_how_fast_it_was(world, capsys, typed, monkeypatch):
    real, calls = Stream._run, []

    def stops(self):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Stream, "_run", stops)
    typed("\n".join(LINES))
    assert entry.main(flags(world)) == 130
    assert "1 answer, 8 tokens" in capsys.readouterr().err


def test_an_interrupted_answer_counts_as_far_as_it_came(world, capsys, typed, monkeypatch):
    real = Stream._run

    def stops(self):
        yield next(real(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "_run", stops)
    typed(LINES[0])
    assert entry.main(flags(world)) == 130
    shown = capsys.readouterr().err
    assert "interrupted" in shown and "1 answer" in shown and " 0 tokens" not in shown


def test_a_closed_standard_input_holds_no_prompt(world, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert run_entry(lambda: entry.main(flags(world))) == 2
    assert "there is no prompt" in capsys.readouterr().err


# ---- two methods -----------------------------------------------------------------------------------------------------


def test_a_comparison_takes_turns_and_says_what_is_equal(world, cd, capsys, monkeypatch):
    order, real = [], Decoder.stream

    def noted(self, prompt, method, **options):
        order.append((prompt.id, method, options["max_new_tokens"]))
        return real(self, prompt, method, **options)

    monkeypatch.setattr(Decoder, "stream", noted)
    monkeypatch.setattr(entry, "WARM_UP", 4)
    entry.main(flags(world, f"--prompts={world / 'prompts.jsonl'}", "--compare=cd"))
    mine, other = "dcd_eagle3", "cd"
    assert order[:2] == [("p0", mine, 4), ("p0", other, 4)], "the warm-up"
    assert [(name, method) for name, method, _ in order[2:]] == [
        *(("p0", mine), ("p0", other)),
        *(("p1", other), ("p1", mine)),
        *(("p2", mine), ("p2", other)),
    ]
    shown = capsys.readouterr()
    prompts, _ = read_prompts(str(world / "prompts.jsonl"), str(world / "expert"))
    monkeypatch.undo()
    expected = zip(prompts, texts(cd, prompts), strict=True)
    assert shown.out == "".join(f"== {prompt.id}\n{text}\n" for prompt, text in expected)
    lines = shown.err.splitlines()
    assert lines[0] == "texts: 3 of 3 equal"
    assert lines[1].startswith("dcd_eagle3: 3 answers, ") and lines[2].startswith("cd: 3 answers, ")
    assert lines[1].split(", ")[1] == lines[2].split(", ")[1], "as many tokens"
    told = re.fullmatch(r"speed-up of dcd_eagle3 over cd: (.*) \(prompt by prompt (.*) to (.*)\)", lines[3]).groups()
    figure, low, high = map(float, told)
    assert 0 < low <= figure <= high


def test_the_speed_of_one_answer_is_said_to_be_little(world, capsys):
    entry.main(flags(world, "--prompt=w1 w2", "--compare=cd"))
    assert capsys.readouterr().err.splitlines()[-1].endswith("(one prompt says little)")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dtype=bfloat16"], "not compared, as rounding decides near-ties in bfloat16"),
        (["--temperature=1"], "not compared, as each method draws its own"),
        (["--compare=ar"], "not compared, as dcd_eagle3 and ar have different targets"),
        (["--temperature=1", "--rule=shared_noise"], "1 of 1 equal"),
        (["--method=expert_sd", "--compare=ar"], "1 of 1 equal"),
    ],
)
def test_equality_is_claimed_only_where_it_has_to_hold(world, capsys, more, message):
    entry.main(flags(world, "--prompt", LINES[0], "--compare=cd", *more))
    assert f"texts: {message}" in capsys.readouterr().err


def test_a_wrong_text_is_seen(world, capsys, monkeypatch):
    """Negative control: one method's third token is changed after the fact."""
    real = entry.answer_one

    def tampered(decoder, prompt, config, tally, method="", titled=False):
        answer = real(decoder, prompt, config, tally, method, titled)
        if method == "cd":
            answer.generation.ids[2] += 1
        return answer

    monkeypatch.setattr(entry, "answer_one", tampered)
    entry.main(flags(world, "--prompt", LINES[0], "--compare=cd"))
    assert "texts: 0 of 1 equal; 1 parts at token 3 (diagnostics/identity.py" in capsys.readouterr().err


def test_a_comparison_as_json_holds_both(world, capsys):
    entry.main(flags(world, "--prompt", LINES[0], "--compare=cd", "--json"))
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["method"] for record in records] == ["dcd_eagle3", "cd"]
    assert records[0]["ids"] == records[1]["ids"]
