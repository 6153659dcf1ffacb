"""The demo's prompt files must be well formed, varied, and share nothing between training and measurement."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "data_prep" / "prompts"
TRAIN, HELD_OUT, COPY_HEAVY = "demo_train.jsonl", "demo_held_out.jsonl", "copy_heavy.jsonl"
SHARED = {"instruction", "word-problem", "rewriting", "code", "summary", "question", "creative"}
# kinds that only training has: what evaluation sets ask for
ADDED = {
    "arithmetic",
    "multiple-choice",
    "article",
    "translation",
    "retrieval",
    "extraction",
    "roleplay",
    "reasoning",
    "writing",
}
CATEGORIES = {TRAIN: SHARED | ADDED, HELD_OUT: SHARED}


def rows(name: str) -> list[dict]:
    text = (FOLDER / name).read_bytes().decode("utf-8")  # strict: a broken byte fails here
    assert text.endswith("\n") and "\r" not in text and "\ufffd" not in text
    return [json.loads(line) for line in text.splitlines()]


def content(row: dict) -> str:
    return row["messages"][0]["content"]


def word_runs(text: str, length: int) -> set[str]:
    """All runs of `length` consecutive lower-cased words in a text."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}


def holders(texts: list[str], length: int) -> dict[str, set[int]]:
    """For every word run, the indices of the texts that contain it."""
    found: dict[str, set[int]] = defaultdict(set)
    for index, text in enumerate(texts):
        for run in word_runs(text, length):
            found[run].add(index)
    return found


def overused(texts: list[str]) -> list[str]:
    """Six-word runs that occur in three or more texts."""
    return sorted(run for run, users in holders(texts, 6).items() if len(users) >= 3)


def leaked(train: list[str], held_out: list[str]) -> list[str]:
    """Eight-word runs that occur on both sides."""
    return sorted(set(holders(train, 8)) & set(holders(held_out, 8)))


def test_there_are_enough_prompts():
    assert len(rows(HELD_OUT)) == 100
    assert len(rows(TRAIN)) >= 670


@pytest.mark.parametrize(("name", "prefix"), [(TRAIN, "train-"), (HELD_OUT, "held-")])
def test_every_line_is_one_user_turn(name: str, prefix: str):
    for row in rows(name):
        assert set(row) == {"id", "messages", "source"}
        assert row["source"] in CATEGORIES[name]
        assert re.fullmatch(rf"{prefix}{row['source']}-\d{{3}}", row["id"])
        assert len(row["messages"]) == 1
        assert set(row["messages"][0]) == {"role", "content"}
        assert row["messages"][0]["role"] == "user"


def test_no_turn_is_empty_padded_or_overlong():
    for row in rows(TRAIN) + rows(HELD_OUT):
        text = content(row)
        assert text and text == text.strip(), row["id"]
        assert 3 <= len(text.split()) <= 140, row["id"]
        assert all(char.isprintable() or char == "\n" for char in text), row["id"]


def test_ids_and_contents_are_unique():
    everything = rows(TRAIN) + rows(HELD_OUT)
    assert len({row["id"] for row in everything}) == len(everything)
    normal = {" ".join(re.findall(r"\w+", content(row).lower())) for row in everything}
    assert len(normal) == len(everything)


def test_both_files_cover_the_shared_categories_in_like_shares():
    counts = {
        name: Counter(row["source"] for row in rows(name) if row["source"] in SHARED) for name in (TRAIN, HELD_OUT)
    }
    for category in SHARED:
        shares = [counts[name][category] / counts[name].total() for name in (TRAIN, HELD_OUT)]
        assert min(shares) > 0.03
        assert abs(shares[0] - shares[1]) < 0.04, category


def test_training_has_enough_of_each_added_kind():
    counts = Counter(row["source"] for row in rows(TRAIN))
    assert all(counts[kind] >= 10 for kind in ADDED), counts
    assert counts["arithmetic"] >= 100 and counts["multiple-choice"] >= 80 and counts["article"] >= 60


def test_the_head_of_each_file_is_a_fair_sample():
    for name in (TRAIN, HELD_OUT):  # a toy run that takes the first prompts must not see one category only
        assert {row["source"] for row in rows(name)[:20]} == CATEGORIES[name]


def test_every_stretch_of_training_has_the_mix_of_the_whole():
    sources = [row["source"] for row in rows(TRAIN)]
    whole = Counter(sources)
    for start in range(0, len(sources) - 100, 50):
        part = Counter(sources[start : start + 100])
        assert all(abs(part[kind] / 100 - whole[kind] / len(sources)) < 0.04 for kind in whole), (start, part)


def test_multiple_choice_has_four_options_in_order():
    for row in rows(TRAIN):
        if row["source"] == "multiple-choice":
            options = re.findall(r"^(?:([A-Z])\.|\(([A-Z])\)) \S", content(row), re.MULTILINE)
            assert [dotted or bracketed for dotted, bracketed in options] == ["A", "B", "C", "D"], row["id"]


def test_articles_are_long_enough_to_summarise():
    for row in rows(TRAIN):
        if row["source"] == "article":
            assert 75 <= len(content(row).split()) <= 140, row["id"]


def test_summary_passages_are_long_enough_to_summarise():
    for row in rows(TRAIN) + rows(HELD_OUT):
        if row["source"] == "summary":
            assert "\n\n" in content(row), row["id"]
            passage = content(row).split("\n\n", 1)[1]
            assert 60 <= len(passage.split()) <= 120, row["id"]


def test_no_six_word_run_is_in_three_prompts():
    assert overused([content(row) for row in rows(TRAIN) + rows(HELD_OUT)]) == []


@pytest.mark.parametrize("measured", [HELD_OUT, COPY_HEAVY])
def test_no_eight_word_run_is_in_training_and_in_measurement(measured: str):
    assert leaked([content(row) for row in rows(TRAIN)], [content(row) for row in rows(measured)]) == []


def test_openings_vary():
    texts = [content(row) for row in rows(TRAIN) + rows(HELD_OUT)]
    openings = Counter(" ".join(re.findall(r"\w+", text.lower())[:4]) for text in texts)
    opening, uses = openings.most_common(1)[0]
    assert uses <= 0.02 * len(texts), f"{uses} prompts open with {opening!r}"


def test_the_checks_notice_a_template_and_a_leak():
    shared = "Please write a function that adds"
    assert overused([f"{shared} apples", f"{shared} pears"]) == []
    assert overused([f"{shared} apples", f"{shared} pears", f"{shared} plums"]) == [shared.lower()]
    sentence = "one two three four five six seven eight"
    assert leaked([f"{sentence} nine"], [f"Zero, {sentence.upper()}!"]) == [sentence]
    assert leaked([sentence], ["one two three four five six seven"]) == []
