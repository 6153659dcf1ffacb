"""The certificate passes on the shipped code, fails when any line does, and its page holds every line."""

import contextlib
import dataclasses
import functools
import html
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_world import make_world, model_flags

import diagnostics.lossless as entry
from dcd_core.contrast import Target
from dcd_core.decode import Scorer
from dcd_core.draft import Draft
from dcd_core.drafters.protocol import Drafter
from dcd_core.errors import UserError
from dcd_core.methods import METHODS, Method
from diagnostics.certificate import controls, laws
from diagnostics.certificate.controls import CONTROLS, EXACT_CONTROLS, Control, controlled, enumerated_with_fault
from diagnostics.certificate.faults import no_fault
from diagnostics.certificate.laws import TARGETS, Laws, law_cases, offers, toy_method, toy_settings
from diagnostics.certificate.page import Line, render, summary, table_of
from diagnostics.certificate.pair import DRAFTED, PROMPT, VOCAB, counted, exact_law, texts, toy_pair
from diagnostics.certificate.proposals import EXACT, VISIBLE


@pytest.fixture(scope="module")
def toy():
    return toy_pair(0)


def read(folder) -> list[dict]:
    return json.loads((folder / "certificate.json").read_text())["lines"]


# ---- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quick certificate as a user runs it, in two processes (and without the type checks of tests, which would
    double its time)."""
    folder = tmp_path_factory.mktemp("certificate")
    command = [sys.executable, entry.__file__, "--quick", "--jobs=2", f"--output={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Certified lossless" in done.stdout and "no pair given" in done.stdout
    return folder


def test_the_shipped_code_is_certified(quick):
    lines = read(quick)
    assert all(line["passed"] is not False for line in lines)
    done = [line for line in lines if line["passed"]]
    assert {line["part"] for line in done} == {"exact", "laws", "controls"}
    assert {line["name"] for line in done if line["part"] == "laws"} == set(METHODS)
    for line in done:
        if line["part"] == "controls" and line["name"] in {control.name for control in EXACT_CONTROLS}:
            assert line["figures"]["error with the fault"] > VISIBLE > EXACT > line["figures"]["error without"]
        elif line["part"] == "controls":
            assert line["figures"]["p with the fault"] < 1e-6 <= line["figures"]["p without"]
        if line["part"] == "exact":
            assert line["figures"]["error"] < 1e-10 and line["figures"]["branches"] > 0
    metrics = json.loads((quick / "metrics.json").read_text())
    assert metrics == {"certified": True, "passed": len(done), "lines": len(lines)}
    assert not (quick / "parts").exists()


def test_every_rule_of_every_method_is_there_with_and_without_a_cutoff(quick, toy):
    found = {
        (line["name"], line["figures"]["rule"], line["figures"]["target"])
        for line in read(quick)
        if line["part"] == "laws"
    }
    for name in METHODS:
        for rule in laws.rules_of(toy_method(name, toy).drafter):
            for target in TARGETS:
                assert (name, rule, target) in found
    assert {bool(aim.target.cutoff) for aim in TARGETS.values()} == {True, False}


def test_every_control_is_caught_or_said_to_be_left_out(quick):
    lines = {line["name"]: line for line in read(quick) if line["part"] == "controls"}
    assert set(lines) == {control.name for control in (*CONTROLS, *EXACT_CONTROLS)}
    assert len(EXACT_CONTROLS) == 5 and all(lines[control.name]["passed"] for control in EXACT_CONTROLS)
    for control in CONTROLS:
        line = lines[control.name]
        assert line["passed"] or (line["passed"] is None and "needs" in line["note"])
        if control.method in METHODS:
            assert line["passed"]


def test_the_page_holds_every_line(quick):
    page = html.unescape((quick / "index.html").read_text(encoding="utf-8"))
    assert "<script" not in page and "@import" not in page and "src=" not in page
    for line in read(quick):
        cells = [line["name"], *table_of([Line(**line)])[1][0]]
        assert all(f"<td>{cell}</td>" in page for cell in cells), line
    assert json.loads((quick / "certificate.json").read_text())["summary"] in page
    assert "versions.json" in page and "--quick" in page


def test_the_enumeration_draws_in_two_steps(quick):
    """As over a real vocabulary, in every line but those of the shared-noise rule, which draws nothing."""
    lines = [line for line in read(quick) if line["part"] == "exact" and "two-step draws" in line["figures"]]
    assert len(lines) == len(entry.CASES)
    for line in lines:
        assert (line["figures"]["two-step draws"] > 0) == (not line["name"].endswith("shared_noise")), line


def test_a_line_that_is_not_drawn_in_two_steps_fails(monkeypatch):
    """What went unseen: the block size was patched, and the vocabulary was too short for blocks."""
    monkeypatch.setattr("dcd_core.verify.inverse_cdf", one_step)
    line = entry.enumerated(entry.CASES[0], True)
    assert line.passed is False and "two steps" in line.note


def one_step(weights, uniform):
    running = weights.cumsum(-1)
    return torch.searchsorted(running, uniform[:, None] * running[:, -1:])[:, 0].clamp_max(weights.shape[1] - 1)


def test_a_control_of_the_enumeration_that_is_not_caught_fails():
    line = enumerated_with_fault(dataclasses.replace(EXACT_CONTROLS[0], fault=contextlib.nullcontext))
    assert line.passed is False and "not caught" in line.note


def small(monkeypatch):
    """A certificate of a few lines."""
    monkeypatch.setattr(entry, "EXACT_CONTROLS", ())
    monkeypatch.setattr(entry, "CASES", entry.CASES[:1])
    monkeypatch.setattr(entry, "CONTROLS", entry.CONTROLS[:1])
    monkeypatch.setattr(entry, "law_cases", lambda toy, seed, quick: [])


def test_a_failing_line_makes_the_exit_code_1(tmp_path, monkeypatch, capsys):
    small(monkeypatch)
    monkeypatch.setattr(entry, "formula", lambda quick: Line("exact", "made up", {"error": 0.5}, False, "as it should"))
    assert entry.main(["--quick", f"--output={tmp_path / 'out'}"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "NOT certified: 1 of 3 lines failed" in printed
    page = (tmp_path / "out" / "index.html").read_text()
    assert '<tr class="failed"><td>made up</td>' in page and "NOT certified" in page
    assert not (tmp_path / "out" / "metrics.json").exists(), "a certificate that failed is no finished run"
    monkeypatch.setattr(entry, "enumerated", lambda case, quick: pytest.fail("it passed, and is not made again"))
    monkeypatch.setattr(entry, "formula", lambda quick: Line("exact", "made up", {"error": 0.0}, True))
    assert entry.main(["--quick", f"--output={tmp_path / 'out'}"]) == 0
    with pytest.raises(UserError, match="finished run"):
        entry.main(["--quick", f"--output={tmp_path / 'out'}"])


def test_a_fault_in_the_verifier_fails_the_enumeration(tmp_path, monkeypatch):
    """Negative control of the whole: the last draw comes from the target itself, not from the residual."""
    small(monkeypatch)
    monkeypatch.setattr("dcd_core.verify._residual", lambda row, law, ids: row)
    assert entry.main(["--quick", f"--output={tmp_path / 'out'}"]) == 1
    failed = {line["name"] for line in read(tmp_path / "out") if line["passed"] is False}
    assert failed == {entry.CASES[0].title, entry.CONTROLS[0].name}


def test_a_stopped_certificate_goes_on(tmp_path, monkeypatch):
    small(monkeypatch)
    calls = []

    def stops(control, laws, samples):
        calls.append("control")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Line("controls", control.name, passed=True)

    def counts(case, quick):
        calls.append("case")
        return Line("exact", case.title, passed=True)

    monkeypatch.setattr(entry, "CONTROLS", CONTROLS[:2])
    monkeypatch.setattr(entry, "controlled", stops)
    monkeypatch.setattr(entry, "enumerated", counts)
    flags = ["--quick", f"--output={tmp_path / 'out'}"]
    with pytest.raises(KeyboardInterrupt):
        entry.main(flags)
    with pytest.raises(UserError, match="other settings"):
        entry.main([*flags, "--seed=1"])
    assert entry.main(flags) == 0
    assert calls == ["case", "control", "control", "control"]


def test_further_processes_make_lines_from_the_back(tmp_path, monkeypatch):
    small(monkeypatch)
    monkeypatch.setattr(entry, "formula", lambda quick: Line("exact", "made up", {"error": 0.5}, False))
    monkeypatch.setattr(entry, "share_cores", lambda jobs: None)
    output, calls = tmp_path / "out", []
    config = entry.Config(output=str(output), quick=True, jobs=3)
    for place in (1, 2):
        entry.help_out(config, place)
    parts = entry.Parts(output, entry.result_settings(config))
    tasks = entry.planned_tasks(config, None, parts)
    assert [name for name, _ in tasks if parts.get(name) is None] == ["exact-formula"], "a failing line is left"
    lines = entry.made([(name, functools.partial(calls.append, name)) for name, _ in tasks[1:]], parts)
    assert len(lines) == len(tasks) - 1 and not calls, "what another process made is taken as it is"


# ---- the real pair ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), "smol", prompts=3)


def real_flags(world, output):
    fast = ["--max_new_tokens=6", "--batch=2", "--device=cpu", "--limit=2", "--alphas", "0.5"]
    second = f"--amateur_head={world / 'amateur_head'}"
    return [*model_flags(world), second, f"--output={output}", "--quick", *fast]


def test_a_real_pair_is_held_against_vanilla_contrastive_decoding(world, tmp_path, monkeypatch):
    small(monkeypatch)
    assert entry.main(real_flags(world, tmp_path / "out")) == 0
    lines = [line for line in read(tmp_path / "out") if line["part"] == "identity"]
    names = {(line["name"], line["figures"]["decoding"]) for line in lines if line["passed"] is not None}
    assert ("cd = the cache-free loop", "greedy") in names
    left_out = [line for line in lines if line["passed"] is None]
    assert [line["name"] for line in left_out] == ["cross_alpha"] and "no such head given" in left_out[0]["note"]
    for name, method in METHODS.items():
        if name not in ("ar", "cd", "cross_alpha"):
            for decoding in ("greedy", "T = 1, shared noise"):
                assert (f"{name} = {'cd' if method.contrast else 'ar'}", decoding) in names
    assert {("cd (lazy) = cd", "greedy"), ("dcd_eagle3 (deferred) = cd", "T = 1, shared noise")} <= names
    for line in [line for line in lines if line not in left_out]:
        assert line["passed"] and line["figures"]["tokens"] > 0 and line["figures"]["first divergence"] == "none"


def test_a_real_pair_s_dual_input_head_certifies_cross_alpha(world, tmp_path, monkeypatch):
    small(monkeypatch)
    planned = entry.planned_checks

    def own(toy, alphas, prompts, able):
        return planned(toy, alphas, prompts, [name for name in able if name == "cross_alpha"])

    monkeypatch.setattr(entry, "planned_checks", own)
    flags = [*real_flags(world, tmp_path / "out"), f"--head={world / 'dual_input'}"]
    assert entry.main(flags) == 0
    lines = [line for line in read(tmp_path / "out") if line["part"] == "identity" and line["passed"] is not None]
    variants = {line["name"] for line in lines if "cross_alpha" in line["name"]}
    assert variants == {"cross_alpha = cd", "cross_alpha (tree) = cd"} and all(line["passed"] for line in lines)


def test_a_difference_on_a_real_pair_is_shown(world, tmp_path, monkeypatch):
    small(monkeypatch)
    real, planned = entry.Writer.texts, entry.planned_checks

    def few(*arguments):
        return [check for check in planned(*arguments) if check.found in ("cd", "dcd_ngram")]

    def altered(self, name, check, prompts):
        made = real(self, name, check, prompts)
        return [[*text[:-1], (text[-1] + 1) % 90] for text in made] if name == "dcd_ngram" else made

    monkeypatch.setattr(entry, "planned_checks", few)
    monkeypatch.setattr(entry.Writer, "texts", altered)
    assert entry.main(real_flags(world, tmp_path / "out")) == 1
    wrong = [line for line in read(tmp_path / "out") if line["passed"] is False]
    assert {line["name"].split()[0] for line in wrong} == {"dcd_ngram"}
    assert all("gap" in line["figures"]["first divergence"] for line in wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--expert=e"], "give --amateur and --prompts too"),
        (["--head=h"], "give --expert and --amateur and --prompts too"),
        (["--alphas", "-1"], "0 or more"),
        (["--seed=-1"], "--seed must be at least 0"),
        (["--gamma=0"], "--gamma must be at least 1"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        entry.main([f"--output={tmp_path / 'out'}", *change])
    assert not (tmp_path / "out").exists()


# ---- laws and controls -----------------------------------------------------------------------------------------------


def test_the_toy_pair_is_worth_testing_on(toy):
    """Expert, amateur and head differ, nothing is nearly certain, and the cutoff leaves some ids out."""
    models = [Scorer(toy.pair.expert), Scorer(toy.pair.amateur)]
    alone, target = exact_law(models[:1], Target(), 2), exact_law(models, Target(alpha=1.0), 2)
    for law in (alone, target):
        assert law.sum() == pytest.approx(1) and law.shape == (VOCAB, VOCAB)
    first, rest = target.sum(1), target / target.sum(1, keepdims=True)
    assert first.max() < 0.9 and (rest.max(1) < 0.97).all()
    assert abs(alone - target).sum() / 2 > 0.15
    cut = exact_law(models, TARGETS["alpha 1, T .8, cutoff .3"].target, 2)
    assert 0.1 < (cut == 0).mean() < 0.9
    assert sorted(DRAFTED) != list(range(VOCAB)) and toy.head.target_ids.tolist() == list(DRAFTED)
    assert set(PROMPT) == set(range(VOCAB))


def test_the_exact_law_is_the_loop_s(toy):
    """A few texts of vanilla contrastive decoding: every one is possible, and none of the impossible ones is seen."""
    target = TARGETS["alpha 1, T .8, cutoff .3"].target
    law = exact_law([Scorer(toy.pair.expert), Scorer(toy.pair.amateur)], target, 3)
    settings = dataclasses.replace(toy_settings(target, "deterministic", 1), max_new_tokens=3)
    found = counted(texts(toy_method("cd", toy), settings, 512))
    assert found.shape == law.shape and found.sum() == 512
    assert (found[law == 0] == 0).all()


def test_counting_texts():
    found = counted(np.array([[0, 1], [0, 1], [2, 0]]), vocab=3)
    assert found[0, 1] == 2 and found[2, 0] == 1 and found.sum() == 3


def test_what_a_method_offers_is_found_out(toy):
    assert offers("dcd_eagle3", toy, toy_settings(Target(), "sampled", 0, gamma=2))
    assert not offers("cd", toy, toy_settings(Target(), "deterministic", 0, gamma=2, branch=2))
    assert not offers("dcd_ngram", toy, toy_settings(Target(), "sampled", 0, gamma=2)), "a rule that it has not"
    assert not offers("dcd_ngram", toy, toy_settings(Target(), "deterministic", 0, gamma=2, stop_below=0.3))
    for cutoff in (0.0, 0.3):
        lazy = toy_settings(Target(alpha=0.5, cutoff=cutoff), "deterministic", 0, gamma=2, saving="lazy")
        assert offers("cd", toy, lazy) == (cutoff > 0), "without a cutoff there is nothing to save"
        assert not offers("ar", toy, lazy) and not offers("scd", toy, lazy)
    deferred = toy_settings(Target(alpha=0.5), "sampled", 0, gamma=2, saving="deferred")
    assert offers("dcd_eagle3", toy, deferred)
    assert not offers("dcd_deferred", toy, deferred), "what it does anyway is no variant"


def test_methods_join_by_being_in_the_table(toy, monkeypatch):
    monkeypatch.setitem(METHODS, "another", METHODS["dcd_ngram"])
    assert {case.rule for case in law_cases(toy, 0, True) if case.method == "another"} == {
        "deterministic",
        "shared_noise",
    }


def test_a_control_that_is_not_caught_fails(toy):
    line = controlled(Control("nothing is wrong", no_fault), Laws(toy, 0), 1024)
    assert line.passed is False and "not caught" in line.note


def test_rows_that_depend_on_their_neighbours_fail(toy, monkeypatch):
    """Negative control: texts of small batches that are those of another seed."""
    real = laws.texts

    def other(method, settings, samples, batch=256, *prompt):
        return real(method, dataclasses.replace(settings, seed=9) if batch == 3 else settings, samples, batch, *prompt)

    monkeypatch.setattr(laws, "texts", other)
    case = laws.LawCase("cd", "deterministic", "chain", "alpha .5")
    line = Laws(toy, 0).line(case, 512, 6)
    assert line.passed is False and line.figures["p"] > 1e-6 and "of 6 the same" in line.figures["rows alone"]


class SampledSiblings(Drafter):
    """Children of the root drawn without replacement from the expert's own kind of law: a fixed one."""

    default_rule = "sampled"
    rules = ("sampled",)

    def propose(self, root, noise, shape):
        law = torch.linspace(1, 3, VOCAB, dtype=torch.float64).expand(len(root), -1)
        law = law / law.sum(1, keepdim=True)
        noisy = law.log() + noise.gumbel(VOCAB)[:, 0]
        tokens, laws = noisy.topk(shape.branch).indices, []
        for child in range(shape.branch):
            laws.append(law)
            law = law.scatter(1, tokens[:, child, None], 0.0)
            law = law / law.sum(1, keepdim=True)
        parents = torch.full_like(tokens, -1)
        return Draft(tokens, parents, torch.ones_like(tokens, dtype=torch.bool), "sampled", torch.stack(laws, 1))


@pytest.mark.parametrize("name", ["siblings re-sorted after sampling", "siblings pruned after sampling"])
def test_controls_of_siblings_are_caught(toy, monkeypatch, name):
    """By a drafter of this test, whatever METHODS holds."""
    method = Method("siblings", True, lambda parts: SampledSiblings())
    monkeypatch.setattr(controls, "METHODS", {"siblings": method} | METHODS)
    monkeypatch.setitem(METHODS, "siblings", method)
    control = next(control for control in CONTROLS if control.name == name)
    line = controlled(control, Laws(toy, 0), 2048)
    assert line.figures["method"] == "siblings" and line.passed


def test_swapped_roles_are_caught(toy, monkeypatch):
    """In any method with two models, so in CoS too."""
    control = next(control for control in CONTROLS if control.method == "cos")
    line = controlled(dataclasses.replace(control, method="scd"), Laws(toy, 0), 2048)
    assert line.passed


def test_the_page_says_what_was_skipped(tmp_path):
    lines = [Line("exact", "one", {"error": 1e-17}, True), Line("identity", "real pair", note="no pair given")]
    assert summary(lines) == "Certified lossless: all 1 lines passed (1 skipped)"
    page = render(lines, tmp_path, "settings", "abc")
    assert "<td>skipped</td><td>no pair given</td>" in page
