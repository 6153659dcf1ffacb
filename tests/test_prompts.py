"""Prompts become ids by the chat template or as they are, from every form in which they are given."""

import gzip
import json
from pathlib import Path

import pytest
from chat_templates import TEMPLATES, with_template
from tiny import save_tiny, tiny_tokenizer

from dcd_core.chat import Chat, encode
from dcd_core.errors import UserError
from dcd_core.prompts import prompt_ids, read_prompts

TOKENIZER = tiny_tokenizer()
QUESTION = [{"role": "user", "content": "w1 w2"}]
RENDERED = "<|im_start|> user \n w1 w2 <|im_end|> \n <|im_start|> assistant \n "


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("expert"), layers=1))


def written(folder, *records):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_text_is_what_a_user_says():
    expected = TOKENIZER(RENDERED, add_special_tokens=False)["input_ids"]
    assert prompt_ids(TOKENIZER, "w1 w2") == prompt_ids(TOKENIZER, QUESTION) == expected


def test_a_raw_text_is_what_the_tokenizer_makes_of_it():
    assert prompt_ids(TOKENIZER, "w1 w2", raw=True) == TOKENIZER("w1 w2")["input_ids"]


def test_values_for_the_template_reach_it():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ word }} {% for m in messages %}{{ ' ' + m['content'] }}{% endfor %}"
    assert prompt_ids(tokenizer, "w1", word="w5") == tokenizer("w5 w1")["input_ids"]


@pytest.mark.parametrize(
    ("content", "raw", "message"),
    [
        ("", False, "the prompt is empty"),
        (" \n", False, "the prompt is empty"),
        ("", True, "the prompt is empty"),
        ([], False, "the prompt is empty"),
        ([{"role": "user", "content": " "}], False, "the prompt is empty"),
        ([{"role": "user"}], False, "without role and content"),
        (QUESTION, True, "raw prompts are texts"),
        ("caf\udce9", False, "no valid text .surrogates not allowed at 3.; give UTF-8"),
        ("x \ud800", True, "no valid text"),
        ([{"role": "system", "content": "\ud800"}, *QUESTION], False, "no valid text"),
    ],
)
def test_refusals(content, raw, message):
    with pytest.raises(UserError, match=message):
        prompt_ids(TOKENIZER, content, raw)


def test_a_template_that_is_missing_or_refuses():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no jokes') }}"
    with pytest.raises(UserError, match="here: the chat template of .* refuses it: no jokes"):
        prompt_ids(tokenizer, "w1", where="here")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        prompt_ids(tokenizer, "w1")
    assert prompt_ids(tokenizer, "w1", raw=True)


def test_a_file_holds_conversations_and_texts(expert, tmp_path):
    answered = [*QUESTION, {"role": "assistant", "content": "w3"}]
    path = written(tmp_path, {"id": 7, "messages": answered}, {"prompt": "w1 w2"}, {"prompt": "w4", "id": "b"})
    prompts, stops = read_prompts(path, expert)
    assert [prompt.id for prompt in prompts] == ["7", "2", "b"] and stops == (3,)
    assert prompts[0].ids == prompts[1].ids == prompt_ids(TOKENIZER, "w1 w2"), "up to the last user message"
    assert [prompt.id for prompt in read_prompts(path, expert, limit=2)[0]] == ["7", "2"]
    with pytest.raises(UserError, match="line 1 is a conversation"):
        read_prompts(path, expert, raw=True)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (["w1"], "line 1 has no 'id'"),
        ([{"prompt": 5}], "line 1 has no 'id'"),
        ([{"prompt": "w1", "id": None}], "line 1 has no 'id'"),
        ([{"prompt": "w1"}, {"prompt": " "}], "line 2 is empty"),
        ([{"prompt": "w1"}, {"prompt": "w2", "id": 1}], "line 2: the id '1' occurs twice"),
        ([], "is empty"),
    ],
)
def test_files_that_are_refused(expert, tmp_path, records, message):
    with pytest.raises(UserError, match=message):
        read_prompts(written(tmp_path, *records), expert)


def test_a_file_that_is_not_there(expert, tmp_path):
    with pytest.raises(UserError, match="cannot read the prompts in .*nowhere.jsonl: No such file"):
        read_prompts(str(tmp_path / "nowhere.jsonl"), expert)


def test_a_byte_order_mark_is_no_part_of_the_first_line(expert, tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "w1"}).encode() + b"\n")
    (found,) = read_prompts(str(tmp_path / "bom.jsonl"), expert)[0]
    assert found.ids == prompt_ids(TOKENIZER, "w1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_later_prompts_are_what_the_template_gives(expert, tmp_path, name):
    with_template(tmp_path, Path(expert), TEMPLATES[name])
    talk = [
        *QUESTION,
        {"role": "assistant", "content": "w80 w4 w81 w3", "weight": 0},
        {"role": "user", "content": "w5"},
    ]
    (found,) = read_prompts(written(tmp_path, {"id": "a", "messages": talk}), str(tmp_path))[0]
    chat = Chat(str(tmp_path))
    assert found.ids == chat.ids(talk, generation_prompt=True)
    answered = chat.text([*talk, {"role": "assistant", "content": "w6"}])
    if name != "marks the last turn":
        assert encode(chat.tokenizer, answered)[: len(found.ids)] == found.ids
    if name in ("Qwen3", "drops earlier thinking"):
        assert "w80" not in chat.tokenizer.decode(found.ids)


def test_parts_of_text_are_one_text(expert, tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]}]
    lines = prompt_ids(TOKENIZER, [{"role": "user", "content": "w1\nw2"}])
    assert prompt_ids(TOKENIZER, parts) == lines
    assert read_prompts(written(tmp_path, {"id": "a", "messages": parts}), expert)[0][0].ids == lines
    parts[0]["content"].append({"type": "image_url"})
    with pytest.raises(UserError, match="content of type 'image_url'"):
        prompt_ids(TOKENIZER, parts)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "w1", "system": "w2"},
        {"id": "a", "messages": QUESTION, "system": "w2"},
        {"id": "a", "messages": QUESTION, "tools": [{"name": "f"}]},
        {"id": "a", "messages": [{**QUESTION[0], "images": ["x"]}]},
        {"id": "a", "messages": [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [{}]}, *QUESTION]},
    ],
)
def test_what_a_prompt_file_says_and_is_not_read_is_refused_by_its_name(expert, tmp_path, record):
    with pytest.raises(UserError, match="line 1 has the field '.*data_prep/conversations.py"):
        read_prompts(written(tmp_path, record), expert)


def test_questions_without_the_answers_between_are_no_prompt(expert, tmp_path):
    questions = [{"role": "user", "content": text} for text in ("w1", "w2")]
    with pytest.raises(UserError, match="messages 1 and 2 are both the user's.*regenerate.py"):
        read_prompts(written(tmp_path, {"id": "a", "messages": questions}), expert)


def test_a_file_in_another_form_holds_the_same_prompts(expert, tmp_path):
    line = json.dumps({"prompt": "w1"}) + "\n"
    for content in (line.encode("utf-16"), gzip.compress(line.encode())):
        (tmp_path / "p.jsonl").write_bytes(content)
        assert read_prompts(str(tmp_path / "p.jsonl"), expert)[0][0].ids == prompt_ids(TOKENIZER, "w1")
    (tmp_path / "p.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="is a Git LFS pointer"):
        read_prompts(str(tmp_path / "p.jsonl"), expert)
