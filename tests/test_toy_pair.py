"""The toy's language is what it says, its texts are those of the chat template, and a refused start leaves nothing."""

import numpy as np
import pytest
from tiny import save_tiny

from data_prep import toy_pair
from data_prep.token_files import read_tokens
from data_prep.toy_language import FIRST_WORD, STOP, SUBJECTS, ToyLanguage, text_of, toy_tokenizer
from dcd_core.chat import Chat
from dcd_core.errors import UserError
from dcd_core.prompts import read_prompts


def test_every_word_is_one_that_may_follow():
    language = ToyLanguage.drawn(3)
    words = language.conversations(300, 8, 30, np.random.default_rng(0))
    assert words.shape == (300, 38) and words[:, 0].max() < SUBJECTS
    before, last, after = words[:, :-2], words[:, 1:-1], words[:, 2:]
    allowed = language.followers[before % 2, last]
    assert (allowed == after[..., None]).any(-1).all()
    # the word before the last one matters: with the other parity few would be allowed
    assert (language.followers[1 - before % 2, last] == after[..., None]).any(-1).mean() < 0.2


def test_a_subject_shows_in_what_is_said():
    """The same first words, another subject: other words follow, more often than with other random numbers alone."""
    language = ToyLanguage.drawn(3)
    words = language.conversations(4000, 2, 20, np.random.default_rng(0))
    share = [np.bincount(words[words[:, 0] == subject][:, 2:].ravel(), minlength=88) for subject in range(SUBJECTS)]
    share = np.array([counts / counts.sum() for counts in share])
    assert np.abs(share[0] - share[1]).sum() > 0.3
    halves = [words[words[:, 0] == 0][start::2, 2:].ravel() for start in (0, 1)]
    first, second = (np.bincount(half, minlength=88) / len(half) for half in halves)
    assert np.abs(first - second).sum() < 0.15


def test_written_is_what_the_template_writes():
    language, tokenizer = ToyLanguage.drawn(0), toy_tokenizer()
    words = language.conversations(5, 6, 9, np.random.default_rng(1))
    for row, ids in zip(words, language.written(words, 6), strict=True):
        turns = [{"role": "user", "content": text_of(row[:6])}, {"role": "assistant", "content": text_of(row[6:])}]
        whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        assert whole[: len(ids)] == ids.tolist() and ids[-1] == STOP and ids[3] == row[0] + FIRST_WORD


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pair that has hardly learnt anything."""
    folder = tmp_path_factory.mktemp("toy") / "out"
    few = ["--steps=2", "--texts=6", "--held_out=3", "--prompts=5", "--max_new_tokens=9"]
    assert toy_pair.main([f"--output={folder}", *few]) == 0
    return folder


def test_texts_are_prompts_of_the_template_and_the_experts_answers(made, tmp_path):
    train, held_out = (read_tokens(made / f"{name}.parquet") for name in ("train", "held_out"))
    assert (len(train), len(held_out)) == (6, 3)
    opening = Chat(str(made / "expert")).ids([{"role": "user", "content": "w0"}], generation_prompt=True)
    place = opening.index(FIRST_WORD)
    for sample in [*train, *held_out]:
        ((start, end),) = sample.answer_spans
        ids = sample.input_ids.tolist()
        assert ids[:place] == opening[:place] and ids[start - len(opening) + place + 1 : start] == opening[place + 1 :]
        assert end == len(ids) and 1 <= end - start <= 9
        assert ids[-1] == STOP or end - start == 9
    prompts, stops = read_prompts(str(made / "prompts.jsonl"), str(made / "expert"))
    assert len(prompts) == 5 and stops == (STOP,)
    told = {tuple(sample.input_ids[: sample.answer_spans[0][0]].tolist()) for sample in train}
    assert not told & {tuple(prompt.ids) for prompt in prompts}, "held out"
    # more of them than chance keeps apart
    language, generator, asked = ToyLanguage.drawn(0), np.random.default_rng(0), set()
    found = [tuple(words) for _ in range(3) for words in toy_pair.questions(language, 2000, generator, asked)]
    assert len(set(found)) == 6000 == len(asked)
    # both have one vocabulary, which is that of the tests' tiny models
    save_tiny(tmp_path / "tiny")
    hashes = {Chat(str(folder)).hash for folder in (made / "expert", made / "amateur", tmp_path / "tiny")}
    assert len(hashes) == 1


def test_refusals(made, tmp_path):
    for more, message in ((["--steps=0"], "--steps must be at least 1"), (["--output="], "output")):
        with pytest.raises(UserError, match=message):
            toy_pair.main([f"--output={tmp_path / 'out'}", *more])
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="finished run"):
        toy_pair.main([f"--output={made}"])
