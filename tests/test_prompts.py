"""Prompts become ids by the chat template or as they are, from every form in which they are given."""

import json

import pytest
from tiny import save_tiny, tiny_tokenizer

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
    tokenizer.chat_template = "{{ word }} {{ messages[0]['content'] }}"
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
