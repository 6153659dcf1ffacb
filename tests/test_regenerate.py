"""Regeneration: the ids that were really used, for every turn, and the same file whatever interrupts the work."""

import json
from collections import Counter

import pytest
import torch
from chat_templates import TEMPLATES, with_template
from tiny import save_tiny, tiny_causal_lm

from data_prep import regenerate, tokenise
from data_prep.answers import plan, sequences
from data_prep.resumable import PartialFile
from data_prep.token_files import read_tokens
from data_prep.toy_language import TEMPLATE
from dcd_core.chat import Chat, encode
from dcd_core.decode import Generation
from dcd_core.errors import UserError

END = 3  # <|im_end|>


def question(name, *texts):
    return {"id": name, "messages": [{"role": "user", "content": text} for text in texts], "source": "test"}


QUESTIONS = [question(f"q{n}", " ".join(f"w{(7 * n + i) % 80}" for i in range(1 + n % 5))) for n in range(13)]


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("expert"), "llama3")


@pytest.fixture(scope="module")
def amateur(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("amateur"), "llama3", seed=100, layers=3)


def run(tmp_path, expert, records, *flags, out="answers.jsonl"):
    source = tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["--conversations", str(source), "--expert", str(expert), "--out", str(tmp_path / out)]
    command += ["--dtype", "float32", "--device", "cpu", "--max_new_tokens", "12", "--batch_size", "4", *flags]
    assert regenerate.main(command) == 0
    answers = [json.loads(line) for line in (tmp_path / out).read_text().splitlines()]
    return answers, json.loads((tmp_path / f"{out}.report.json").read_text())


def test_greedy_answers_are_those_of_stock_generate(tmp_path, expert):
    answers, report = run(tmp_path, expert, QUESTIONS)
    assert [answer["id"] for answer in answers] == [record["id"] for record in QUESTIONS]
    chat, model = Chat(str(expert)), tiny_causal_lm("llama3")
    for answer, record in zip(answers, QUESTIONS, strict=True):
        prompt = chat.ids(record["messages"], generation_prompt=True)
        stock = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=1)[0].tolist()
        assert answer["input_ids"] == stock
        assert answer["answer_spans"] == [[len(prompt), len(stock)]]
        assert (answer["finish"] == "stop") == (stock[-1] == END)
        text = chat.tokenizer.decode(stock[len(prompt) :], skip_special_tokens=True)
        assert answer["messages"][-1] == {"role": "assistant", "content": text}
    assert report["answer_tokens"] == sum(len(a["input_ids"]) - a["answer_spans"][0][0] for a in answers)
    assert report["conversations"] == 13 and report["tokens_per_s"] > 0
    assert not list(tmp_path.glob("*.partial-*"))


class Scripted:
    """Takes the place of `decode` with answers of the test's own; keeps the prompts it was given."""

    def __init__(self, monkeypatch, answers):
        self.prompts, self.answers, self.ends = [], answers, (END,)
        monkeypatch.setattr(regenerate, "decode", self)

    def __call__(self, method, prompts, settings, max_batch):
        self.prompts += prompts
        found = []
        for prompt in prompts:
            ids = self.answers(prompt)
            found.append(Generation(prompt.id, prompt.sample, ids, finish="stop" if ids[-1] in self.ends else "length"))
        return found


def test_later_prompts_are_the_ids_so_far_and_what_the_template_adds(tmp_path, expert, monkeypatch):
    # id 0 (<unk>) stands for ids that do not survive decoding and encoding
    decode = Scripted(monkeypatch, lambda prompt: [40, 0, 41, END])
    record = question("a", "w1", "w2 w3", "w4")
    record["messages"].insert(0, {"role": "system", "content": "w9"})
    record["messages"].insert(2, {"role": "assistant", "content": "w70 this is ignored"})
    record["messages"] = [m for m in record["messages"] if m["role"] != "assistant"]
    (answer,), _ = run(tmp_path, expert, [record])
    tokenizer = Chat(str(expert)).tokenizer
    prompts = [prompt.ids for prompt in decode.prompts]
    between = "<|im_end|> \n <|im_start|> user \n {} <|im_end|> \n <|im_start|> assistant \n"
    for before, after, text in zip(prompts, prompts[1:], ("w2 w3", "w4"), strict=False):
        assert after[: len(before) + 4] == [*before, 40, 0, 41, END]
        assert tokenizer.decode(after[len(before) + 3 :]) == between.format(text)
    assert answer["input_ids"] == [*prompts[2], 40, 0, 41, END]
    assert answer["answer_spans"] == [[len(prompt), len(prompt) + 4] for prompt in prompts]
    assert [message["role"] for message in answer["messages"]] == ["system", *["user", "assistant"] * 3]
    assert len({prompt.id for prompt in decode.prompts}) == 3, "each turn has its own randomness"


def test_old_answers_are_ignored(tmp_path, expert):
    record = question("a", "w1")
    old = {**record, "messages": [*record["messages"], {"role": "assistant", "content": "w5"}]}
    assert run(tmp_path, expert, [record])[0] == run(tmp_path, expert, [old], out="old.jsonl")[0]


def test_a_cut_answer_ends_its_conversation(tmp_path, expert, monkeypatch):
    Scripted(monkeypatch, lambda prompt: [40, 41])
    (answer,), report = run(tmp_path, expert, [question("a", "w1", "w2")])
    assert answer["finish"] == "length" and len(answer["answer_spans"]) == 1 and answer["input_ids"][-2:] == [40, 41]
    assert report["skipped"] == {"later turns left out: the answer before has no end": 1}


ANSWERS = {
    "plain": ["w2", "w4 w5", "w6"],
    "thinking": ["w80 w10 w81 w2", "w80 w11 w81 w4", "w80 w12 w81 w6"],
    "thinking at first": ["w80 w10 w81 w2", "w4", "w5"],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("flags", [[], ["--template_args", '{"enable_thinking": false}']], ids=["", "not thinking"])
def test_every_prompt_is_the_one_that_the_template_gives(tmp_path, expert, monkeypatch, name, kind, flags):
    if flags and "enable_thinking" not in TEMPLATES[name]:
        pytest.skip("the template does not read it")
    chat = Chat(str(with_template(tmp_path, expert, TEMPLATES[name])), {"enable_thinking": False} if flags else {})
    written = {record: [encode(chat.tokenizer, text + " <|im_end|>") for text in ANSWERS[kind]] for record in "ab"}
    decode = Scripted(monkeypatch, lambda prompt: written[prompt.id[0]].pop(0))
    records = [question(record, "w1", "w3", "w7") for record in "ab"]
    answers, report = run(tmp_path, tmp_path, records, *flags)
    assert report["skipped"] == {} and report["answers"] == 6
    asked = {prompt.id: prompt.ids for prompt in decode.prompts}
    for answer in answers:
        assert [m["content"] for m in answer["messages"] if m["role"] == "assistant"] == ANSWERS[kind]
        assert len(answer["answer_spans"]) == 3
        for turn, text in enumerate(ANSWERS[kind]):
            prompt = chat.ids(answer["messages"][: 2 * turn + 1], generation_prompt=True)
            assert asked[f"{answer['id']}/turn-{turn}" if turn else answer["id"]] == prompt
            (span,) = [  # each answer is written in one sequence, after the prompt that was read
                part["input_ids"][: part["answer_spans"][turn][1]]
                for part in sequences(answer)
                if turn < len(part["answer_spans"]) and part["answer_spans"][turn] != [0, 0]
            ]
            assert span == prompt + encode(chat.tokenizer, text + " <|im_end|>")
    assert report["sequences"] == sum(len(sequences(answer)) for answer in answers)
    rewriting = {"marks the last turn", "empties earlier answers"}
    rewriting |= {"drops earlier thinking", "Qwen3"} if kind != "plain" else {"Qwen3"} if flags else set()
    assert report["rewritten"] == (2 if name in rewriting else 0)
    # what is trained on is what was written
    out = tmp_path / "t.parquet"
    tokenise.main(
        ["--conversations", str(tmp_path / "answers.jsonl"), "--expert", str(tmp_path), "--out", str(out), *flags]
    )
    samples = read_tokens(out)
    assert [s.input_ids.tolist() for s in samples] == [p["input_ids"] for answer in answers for p in sequences(answer)]
    trained = [chat.tokenizer.decode(sample.input_ids[a:b]) for sample in samples for a, b in sample.answer_spans]
    assert trained == [text + " <|im_end|>" for text in ANSWERS[kind]] * 2
    assert len({sample.id for sample in samples}) == len(samples) == report["sequences"]


def test_an_end_of_turn_that_is_not_the_templates_is_not_kept(tmp_path, expert, monkeypatch):
    """The model may end its turn with another token than the template writes (and the generation config names)."""
    folder = with_template(tmp_path, expert, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 1]}))
    monkeypatch.setattr(regenerate, "decode", decode := Scripted(monkeypatch, lambda prompt: [40, 1]))
    decode.ends = (END, 1)
    (answer,), report = run(tmp_path, folder, [question("a", "w1", "w2")])
    assert report["rewritten"] == 1 and answer["earlier_sequences"][0]["input_ids"][-2:] == [40, 1]
    assert decode.prompts[1].ids == Chat(str(folder)).ids(answer["messages"][:3], generation_prompt=True)


def test_long_prompts_and_control_tokens_are_counted_skips(tmp_path, expert):
    records = [question("long", "w1 " * 60), question("ok", "w1"), question("bad", "w1 <|im_end|>")]
    answers, report = run(tmp_path, expert, records, "--max_context", "60")
    assert [answer["id"] for answer in answers] == ["ok"]
    assert report["skipped"] == {"prompt longer than 48 tokens": 1, "<|im_end|> spelled out in a message": 1}
    with pytest.raises(UserError, match="none of the 1 conversations"):
        run(tmp_path, expert, records[2:], out="none.jsonl")
    assert not (tmp_path / "none.jsonl").exists() and not list(tmp_path.glob("*.partial-*"))


SAMPLED = ("--samples", "2", "--temperature", "1.0", "--seed", "3")


def test_a_kill_and_the_same_command_give_the_file_of_an_uninterrupted_run(tmp_path, expert, monkeypatch):
    settings = [*SAMPLED, "--batch_size", "2"]
    run(tmp_path, expert, QUESTIONS, *settings)
    whole = (tmp_path / "answers.jsonl").read_bytes()
    real, calls = regenerate.decode, []

    def killed_at(number):
        def decode(*arguments, **keywords):
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
            return real(*arguments, **keywords)

        monkeypatch.setattr(regenerate, "decode", decode)

    for number, lost in ((3, 0), (2, 11), (3, 2000)):
        calls.clear()
        killed_at(number)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, expert, QUESTIONS, *settings, out="again.jsonl")
        assert not (tmp_path / "again.jsonl").exists()
        # a kill inside a write leaves part of it
        (partial,) = tmp_path.glob("again.jsonl.partial-*")
        partial.write_bytes(partial.read_bytes()[: partial.stat().st_size - lost])
    calls.clear()
    killed_at(-1)
    _, report = run(tmp_path, expert, QUESTIONS, *settings, out="again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == whole
    assert 0 < len(calls) < 5 and report["conversations"] == 26, "finished batches are not done again"


def test_samples_differ_and_belong_to_prompt_and_seed(tmp_path, expert):
    answers, _ = run(tmp_path, expert, QUESTIONS, *SAMPLED)
    assert [(a["id"], a["sample"]) for a in answers[:4]] == [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1)]
    ids = {(a["id"], a["sample"]): a["input_ids"] for a in answers}
    assert sum(ids[f"q{n}", 0] != ids[f"q{n}", 1] for n in range(13)) > 10
    fewer, _ = run(tmp_path, expert, QUESTIONS[3:6][::-1], *SAMPLED, "--batch_size", "1", out="fewer.jsonl")
    assert all(ids[a["id"], a["sample"]] == a["input_ids"] for a in fewer)
    other, _ = run(tmp_path, expert, QUESTIONS, *SAMPLED[:-1], "4", out="other.jsonl")
    assert sum(ids[a["id"], a["sample"]] != a["input_ids"] for a in other) > 20


def test_limit_tokens_gives_some_of_the_same_answers(tmp_path, expert):
    every, _ = run(tmp_path, expert, QUESTIONS)
    some, report = run(tmp_path, expert, QUESTIONS, "--limit_tokens", "50", "--batch_size", "2", out="some.jsonl")
    assert 50 <= report["answer_tokens"] < 50 + 3 * 2 * 12 and len(some) < len(every)
    assert some == [answer for answer in every if answer["id"] in {a["id"] for a in some}]


def test_a_finished_file_is_left_alone_and_another_one_is_not_replaced(tmp_path, expert, monkeypatch, capsys):
    run(tmp_path, expert, QUESTIONS[:3])
    decode = Scripted(monkeypatch, lambda prompt: [40, END])
    run(tmp_path, expert, QUESTIONS[:3])
    assert not decode.prompts and "nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="--overwrite"):
        run(tmp_path, expert, QUESTIONS[:2])
    assert len(run(tmp_path, expert, QUESTIONS[:2], "--overwrite")[0]) == 2


def test_contrastive_answers(tmp_path, expert, amateur):
    plain, _ = run(tmp_path, expert, QUESTIONS[:5])
    contrast = ["--method", "cd", "--amateur", str(amateur), "--alpha"]
    none, _ = run(tmp_path, expert, QUESTIONS[:5], *contrast, "0", out="none.jsonl")
    strong, _ = run(tmp_path, expert, QUESTIONS[:5], *contrast, "1.0", out="strong.jsonl")
    assert none == plain and strong != plain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", "2"], "needs --temperature above 0"),
        (["--method", "cd"], "go together"),
        (["--amateur", "x"], "go together"),
        (["--method", "beam"], "not ar or cd"),
        (["--batch_size", "0"], "at least 1"),
        (["--temperature", "-1"], "must not be negative"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--alpha", "0.5"], "--alpha is for --method cd"),
        (["--cutoff", "0"], "--cutoff is for --method cd"),
        (["--temperature", "nan"], "finite"),
        (["--max_new_tokens", "600"], "leaves no room"),
        (["--dtype", "int3"], "dtype"),
        (["--max_context", "3"], "leaves no room"),
        (["--method", "cd", "--amateur", "AMATEUR", "--cutoff", "1.5"], "cutoff"),
        (["--method", "cd", "--amateur", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing_behind(tmp_path, expert, amateur, flags, message):
    flags = [str(amateur) if flag == "AMATEUR" else flag for flag in flags]
    with pytest.raises(UserError, match=message):
        run(tmp_path, expert, QUESTIONS[:1], *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_an_input_is_never_replaced_and_the_output_must_be_a_file(tmp_path, expert):
    with pytest.raises(UserError, match="is read from and would be replaced"):
        run(tmp_path, expert, QUESTIONS[:1], "--overwrite", out="questions.jsonl")
    for out in (".", "questions.jsonl/x"):
        with pytest.raises(UserError, match="is a folder|is not a folder"):
            run(tmp_path, expert, QUESTIONS[:1], out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_an_empty_file_is_called_empty(tmp_path, expert):
    with pytest.raises(UserError, match="questions.jsonl is empty"):
        run(tmp_path, expert, [])
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_a_run_stopped_in_its_first_batch_leaves_nothing(tmp_path, expert, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(regenerate, "decode", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, expert, QUESTIONS[:2])
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_the_report_is_there_before_the_output(tmp_path, expert, monkeypatch):
    """A kill between the two leaves finished batches, not an output that the same command refuses."""
    written = []
    real = regenerate.write_json_atomic
    monkeypatch.setattr(
        regenerate, "write_json_atomic", lambda *a: (written.append((tmp_path / "answers.jsonl").exists()), real(*a))
    )
    run(tmp_path, expert, QUESTIONS[:1])
    assert written == [False]


def test_missing_files_are_refused(tmp_path, expert):
    with pytest.raises(UserError, match="there is no file"):
        regenerate.main(["--conversations", "none.jsonl", "--expert", str(expert), "--out", str(tmp_path / "o")])


def test_batches_depend_on_the_seed_and_hold_similar_lengths(expert):
    chat = Chat(str(expert))
    batches = plan(QUESTIONS, 2, chat, 100, 4, 0, Counter())
    assert [len(batch) for batch in batches] == [4] * 6 + [2]
    lengths = [len(work.ids) for batch in batches for work in batch]
    assert lengths == sorted(lengths), "one window of eight batches here"
    named = [
        [(w.record["id"], w.sample) for batch in plan(QUESTIONS, 2, chat, 100, 1, s, Counter()) for w in batch]
        for s in (0, 1)
    ]
    assert named[0] != named[1] and sorted(named[0]) == sorted(named[1])


def test_a_partial_file_keeps_whole_batches_only(tmp_path):
    path = tmp_path / "p"
    partial = PartialFile(path)
    partial.append([{"id": "a"}, {"id": "b"}], tokens=2)
    partial.append([{"id": "c"}], tokens=1)
    partial.close()
    whole = path.read_bytes()
    first = whole.index(b'{"id": "c"}')
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        again = PartialFile(path)
        batches = 2 if size == len(whole) else 1 if size >= first else 0
        assert len(again.summaries) == batches
        assert [record["id"] for _, record in again.lines()] == ["a", "b", "c"][: (0, 2, 3)[batches]]
        again.close()
        assert path.stat().st_size == (0, first, len(whole))[batches]
