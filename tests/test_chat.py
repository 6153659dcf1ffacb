"""Where an answer begins: after everything that the template writes before it, whether or not the template says so."""

import pytest
from chat_templates import NO_HEADER_TO_FIND, TEMPLATES, with_template
from tiny import save_tiny, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dcd_core.chat import Chat, encode, render
from dcd_core.errors import UserError
from dcd_core.prompts import prompt_ids, read_prompts

QUESTION = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}]
HEADER = "<|im_start|> assistant \n "


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("expert"), layers=1)


def chat_with(folder, expert, template, **arguments):
    """The expert's Chat with another template."""
    return Chat(str(with_template(folder, expert, template)), arguments)


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_answer_follows_the_prompt_and_the_filler(tmp_path, expert, name):
    chat = chat_with(tmp_path, expert, TEMPLATES[name])
    for question in (QUESTION, QUESTION[1:]):
        prompt = chat.text(question, generation_prompt=True) + chat.filler
        for answer in ("w3 w4", "no", "w3"):
            rendered = chat.text([*question, {"role": "assistant", "content": answer}])
            assert rendered.replace("w50", "").split() == (prompt.replace("w50", "") + rendered[len(prompt) :]).split()
            assert rendered[len(prompt) :].split()[: len(answer.split())] == answer.split() or name.startswith("marks")
        assert prompt_ids(chat.tokenizer, question) == chat.ids(question, generation_prompt=True)


def test_the_header_is_found_where_the_template_does_not_give_it(tmp_path, expert):
    whole = chat_with(tmp_path, expert, TEMPLATES["ChatML"]).text(QUESTION, generation_prompt=True)
    assert whole.endswith(HEADER)
    for name in ("no generation prompt", "no generation prompt, an end of text", "a header after every question"):
        chat = chat_with(tmp_path, expert, TEMPLATES[name])
        assert chat.text(QUESTION, generation_prompt=True) == whole and chat.filler == ""
        assert chat.ids(QUESTION, True) == encode(chat.tokenizer, whole)


def test_only_what_a_template_writes_by_itself_is_filler(tmp_path, expert):
    chat = chat_with(tmp_path, expert, TEMPLATES["Qwen3"])
    assert chat.text(QUESTION, True).endswith(HEADER) and chat.filler == "w80 w81 "
    chat = chat_with(tmp_path, expert, TEMPLATES["Qwen3"], enable_thinking=False)
    assert chat.text(QUESTION, True).endswith(HEADER + "w80 w81 ") and chat.filler == ""


@pytest.mark.parametrize("name", NO_HEADER_TO_FIND)
def test_a_model_whose_answers_begin_nowhere_is_refused_in_one_line(tmp_path, expert, name):
    with pytest.raises(UserError, match="cannot render a question and its answer") as refusal:
        chat_with(tmp_path, expert, NO_HEADER_TO_FIND[name])
    assert "\n" not in str(refusal.value)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1"}\n')
    with pytest.raises(UserError, match="line 1: the chat template"):
        read_prompts(str(tmp_path / "p.jsonl"), str(tmp_path))


def test_a_space_that_belongs_to_the_first_word_is_no_part_of_the_prompt():
    """As with sentencepiece: a space and the word after it are one token."""
    words = [
        "<unk>",
        "[",
        "]",
        *(f"\u2581{word}" for word in ("", "w1", "w2", "Yes,", "it", "is.", "no", "42", "[", "]")),
    ]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ '[ ' + m['content'] + ' ]' if m['role'] == 'user' else ' ' + m['content'] }}{% endfor %}"
    )
    question = [{"role": "user", "content": "w1"}]
    assert render(tokenizer, question, True) == "[ w1 ]"
    answered = encode(tokenizer, render(tokenizer, [*question, {"role": "assistant", "content": "w2"}]))
    assert answered == [*prompt_ids(tokenizer, question), words.index("\u2581w2")]


def test_whether_reasoning_is_written_is_known(tmp_path, expert):
    message = {"role": "assistant", "content": "w1", "reasoning_content": "w2 <|im_end|>"}
    for name, written in (("ChatML", False), ("Qwen3", True)):
        chat = chat_with(tmp_path, expert, TEMPLATES[name])
        assert chat.writes_reasoning == written and chat.spelled_out([message]) == "<|im_end|>"


def test_a_template_with_a_generation_prompt_is_taken_at_its_word():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["ChatML"].replace("assistant \n '", "assistant \n w80 '")
    assert render(tokenizer, QUESTION, True).endswith("assistant \n w80 ")
