"""What a raw record says is honoured, or counted by its name; a benchmark's record is no conversation."""

import json

import pytest
from raw_chats import message, run, share

from dcd_core.errors import UserError


def test_parts_of_text_are_one_text_and_other_parts_are_counted(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    rows = [
        {"messages": [message(parts), message([{"text": "c"}, "d"], "assistant")]},
        {"messages": [message([*parts, image])]},
        {"messages": [message([{"type": "text", "text": 3}])]},
        {"messages": [message(None)]},
    ]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    (record,), report = run(tmp_path, tmp_path / "p.json")
    assert [m["content"] for m in record["messages"]] == ["a\nb", "c\nd"]
    assert report["skipped"] == {
        "content of type 'image_url'": 1,
        "content that is not text": 1,
        "a turn without a role or text": 1,
    }


def test_a_system_prompt_is_honoured_wherever_it_is_said(tmp_path):
    answer = message("n", "assistant")
    rows = [
        share("a", ("human", "m"), ("gpt", "n")) | {"system": "s"},
        {"id": "b", "messages": [message("m"), answer], "system_prompt": [{"type": "text", "text": "s"}]},
        {"id": "c", "messages": [message("s ", "system"), message("m"), answer], "system": "s"},
        {"id": "d", "messages": [message("s", "developer"), message("m"), answer], "system": None},
        {"id": "e", "question": "m", "system_prompt": "s"},
        {"id": "f", "messages": [message("m")], "system": ""},
        {"id": "g", "messages": [message("other", "system"), message("m")], "system": "s"},
    ]
    (tmp_path / "s.json").write_text(json.dumps(rows))
    records, report = run(tmp_path, tmp_path / "s.json")
    systems = [[m["content"].strip() for m in record["messages"] if m["role"] == "system"] for record in records]
    assert systems == [["s"]] * 5 + [[]]
    assert report["fields"]["read"] == {"system": 2, "system_prompt": 2}
    assert report["skipped"] == {"field 'system' and another system message": 1}
    records, _ = run(tmp_path, tmp_path / "s.json", "--drop_system")
    assert all(record["messages"][0]["role"] == "user" for record in records)


@pytest.mark.parametrize("name", ["weight", "loss", "train"])
def test_what_is_not_to_be_trained_on_stays_so(tmp_path, name):
    def chat(*weights):
        return {"messages": [part for w in weights for part in (message("q"), message("a", "assistant", **{name: w}))]}

    rows = [chat(0, 1), chat(False, True), chat(0.0, None), chat(1, 1.0), chat(0.5, 1), chat("0", 1)]
    (tmp_path / "w.json").write_text(json.dumps(rows))
    records, report = run(tmp_path, tmp_path / "w.json")
    assert [[m.get("weight") for m in record["messages"][1::2]] for record in records] == [[0, None]] * 3 + [[None] * 2]
    assert all(name not in m or name == "weight" for record in records for m in record["messages"])
    assert report["fields"] == {"read": {f"message.{name} 0": 3}, "ignored": {}}
    assert report["skipped"] == {f"field 'message.{name}' is neither 0 nor 1": 2}


def test_reasoning_is_kept_with_its_answer(tmp_path):
    rows = [
        {"messages": [message("q"), message("a", "assistant", **{name: "why"})]}
        for name in ("reasoning_content", "reasoning", "thinking")
    ]
    rows.append({"messages": [message("q"), message("a", "assistant", thinking={"no": "text"})]})
    (tmp_path / "r.json").write_text(json.dumps(rows))
    records, report = run(tmp_path, tmp_path / "r.json")
    assert [record["messages"][1]["reasoning_content"] for record in records] == ["why"] * 3
    assert set(report["fields"]["read"].values()) == {1} and len(report["fields"]["read"]) == 3
    assert report["skipped"] == {"a turn whose reasoning is not text": 1}


def test_whatever_else_a_record_says_is_counted_by_its_name(tmp_path, capsys):
    answer = message("a", "assistant", name="Bob", toxic=True, weight=None, refusal="")
    calls = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"id": 1, "messages": [message("q"), answer], "tools": [{"name": "f"}], "model": "m", "functions": []},
        {"id": 2, "messages": [message("q", name="Eve"), message("a", "assistant")], "tools": '[{"name": "f"}]'},
        {"id": 3, "messages": [message("q"), message(None, "assistant", tool_calls=calls)], "tools": "x"},
        {"id": 4, "messages": [message("q"), message("", "assistant", function_call={"name": "f"})]},
        {"id": 5, "messages": [message("q")], "images": ["x.png"]},
        {"id": 6, "messages": [message("q", images=["x.png"])]},
        {"id": 7, "messages": [message("q"), message("{}", "tool", tool_call_id="1")]},
        {"id": 8, "instruction": "i", "context": "c", "output": "o", "image": None},
    ]
    (tmp_path / "f.json").write_text(json.dumps(rows))
    records, report = run(tmp_path, tmp_path / "f.json")
    assert [record["id"] for record in records] == ["1", "2", "8"]
    assert records[2]["messages"] == [message("i\n\nc")]
    assert report["fields"]["ignored"] == {"tools": 2, "message.name": 2, "model": 1, "message.toxic": 1, "output": 1}
    assert report["skipped"] == {
        "field 'message.tool_calls'": 1,
        "field 'message.function_call'": 1,
        "field 'images'": 1,
        "field 'message.images'": 1,
        "unknown role 'tool'": 1,
    }
    assert "field 'tools' ignored in 2" in capsys.readouterr().out


BENCHMARKS = {
    "MMLU": {"question": "q", "subject": "s", "choices": ["a", "b"], "answer": 1},
    "ARC": {"id": "1", "question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"},
    "MMLU-Pro": {"question_id": 1, "question": "q", "options": ["a", "b"], "answer": "A"},
    "CNN/DailyMail": {"question_id": 1, "article": "t", "highlights": "h"},
    "Spec-Bench": {"question_id": 82, "category": "writing", "turns": ["one", "two"]},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "x", "test": "y"},
    "MBPP": {"task_id": 1, "text": "t", "code": "c", "test_list": ["x"]},
    "HellaSwag": {"ctx": "c", "endings": ["a"], "label": "1"},
    "SQuAD": {"id": "1", "title": "t", "context": "c", "question": "q", "answers": {"text": ["a"]}},
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmarks_record_is_no_conversation(tmp_path, name):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(BENCHMARKS[name]) + "\n")
    with pytest.raises(UserError, match="b.jsonl: record 2 is an? .* record") as refusal:
        run(tmp_path, path)
    assert "messages" in str(refusal.value) and "\n" not in str(refusal.value)
    assert [file.name for file in tmp_path.iterdir()] == ["b.jsonl"]
    # what its maker turned into messages is one, and so is a column that is said to be the whole prompt
    path.write_text(json.dumps({"messages": [message("q")], **BENCHMARKS[name]}) + "\n")
    assert run(tmp_path, path)[0][0]["messages"] == [message("q")]
    column = next(name for name, value in BENCHMARKS[name].items() if isinstance(value, str))
    assert run(tmp_path, path, "--text_column", column, "--overwrite")[1]["kept"] == 1


def test_a_question_with_its_answer_is_a_prompt(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))
    (record,), report = run(tmp_path, tmp_path / "gsm8k.jsonl")
    assert record["messages"] == [message("1+1?")] and report["fields"]["ignored"] == {"answer": 1}
