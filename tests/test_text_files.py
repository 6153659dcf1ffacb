"""Files of text in every form that people have them in: the same chats come out, or one line says what is wrong."""

import gzip
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_chats import message, run, share

from data_prep.messages import read_conversations
from dcd_core import text_files
from dcd_core.errors import UserError

CHATS = [share("a", ("human", "\u00e4 \U0001f600"), ("gpt", "hi")), share("b", ("human", "x\u2028y"), ("gpt", "z"))]


def encodings(folder):
    """The same two chats as people have them."""
    lines = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in CHATS)
    array = json.dumps(CHATS, ensure_ascii=False)
    for name in ("utf-8-sig", "utf-16", "utf-32"):
        yield f"{name}.jsonl", lines.encode(name)
        yield f"{name}.json", array.encode(name)
    yield "big.jsonl", b"\xfe\xff" + lines.encode("utf-16-be")
    yield "lines.jsonl.gz", gzip.compress(lines.encode())
    yield "gzip_by_another_name.json", gzip.compress(array.encode("utf-16"))
    pq.write_table(pa.Table.from_pylist(CHATS), folder / "made")
    yield "rows.parquet", (folder / "made").read_bytes()


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_the_same_chats_in_every_form_of_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_files, "CHUNK", chunk)
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    expected, _ = run(tmp_path, tmp_path / "plain.jsonl", "--name", "x")
    assert len(expected) == 2
    for name, content in encodings(tmp_path):
        (tmp_path / name).write_bytes(content)
        found, report = run(tmp_path, tmp_path / name, "--name", "x")
        assert found == expected and report["reading"]["records"] == 2, name
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.write(tmp_path / "lines.jsonl.gz", "chats/lines.jsonl.gz")
    assert run(tmp_path, tmp_path / "in.zip", "--name", "x")[0] == expected


def test_our_own_files_are_read_in_every_form_too(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in ({"id": "\u00e4", "messages": [message("x")]},))
    for name, content in (("a", lines.encode("utf-16")), ("b", gzip.compress(lines.encode())), ("c", lines.encode())):
        (tmp_path / name).write_bytes(content)
        assert [record["id"] for record in read_conversations(tmp_path / name)] == ["\u00e4"]
    (tmp_path / "d").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="is a Git LFS pointer"):
        list(read_conversations(tmp_path / "d"))
