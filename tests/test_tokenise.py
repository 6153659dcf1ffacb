"""Token files: spans cover exactly the answers with their end-of-turn token, and what cannot be sure is left out."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import NO_HEADER_TO_FIND, TEMPLATES, with_template
from tiny import save_tiny

from data_prep.token_files import Sample, read_metadata, read_tokens, write_tokens
from data_prep.tokenise import main
from data_prep.toy_language import TEMPLATE
from dcd_core.chat import Chat, encode, stop_ids
from dcd_core.errors import UserError

END = 3  # <|im_end|>


def talk(name, *texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"id": name, "messages": messages, "source": "test"}


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("expert"), layers=1)


def tokenise(source, expert, out, *flags):
    return main(["--conversations", str(source), "--expert", str(expert), "--out", str(out), *flags])


def run(tmp_path, expert, records, *flags):
    source, out = tmp_path / "c.jsonl", tmp_path / "t.parquet"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    out.unlink(missing_ok=True)
    assert tokenise(source, expert, out, *flags) == 0
    return read_tokens(out), read_metadata(out)


def test_spans_are_the_answers_with_their_end_of_turn(tmp_path, expert):
    records = [talk("a", "w1 w2", "w3 w4 w5", "w6", "w7"), talk("b", "w1", "w2", "w3", system="w9")]
    (long, short), metadata = run(tmp_path, expert, records)
    tokenizer = Chat(str(expert)).tokenizer
    word = tokenizer.convert_tokens_to_ids
    answers = [long.input_ids[start:end].tolist() for start, end in long.answer_spans]
    assert answers == [[word("w3"), word("w4"), word("w5"), END], [word("w7"), END]]
    assert tokenizer.decode(long.input_ids[: long.answer_spans[0][0]]).endswith("<|im_start|> assistant \n")
    assert long.answer_spans[-1][1] == len(long.input_ids)
    # a question without an answer is not part of the sample
    assert [short.input_ids[a:b].tolist() for a, b in short.answer_spans] == [[word("w2"), END]]
    assert word("w3") not in short.input_ids
    assert long.mask().sum() == 6 and not long.mask()[: long.answer_spans[0][0]].any()
    assert metadata["answers"] == 3 and metadata["answer_tokens"] == 8 and metadata["stop_ids"] == [END]
    assert metadata["tokenizer_hash"] == Chat(str(expert)).hash


def test_regenerated_ids_are_taken_verbatim(tmp_path, expert):
    chat = Chat(str(expert))
    record = talk("a", "w1", "this text is not what the ids say")
    record |= {"input_ids": [20, 21, 22, 50, 51], "answer_spans": [[2, 5]], "sample": 0, "tokenizer": chat.hash}
    samples, _ = run(tmp_path, expert, [record, record | {"sample": 1, "input_ids": [20, 21, 22, 60, END]}])
    assert [sample.id for sample in samples] == ["a", "a#1"]
    assert samples[0].input_ids.tolist() == [20, 21, 22, 50, 51]
    assert samples[0].answer_spans == ((2, 5),)
    with pytest.raises(UserError, match="another tokenizer"):
        run(tmp_path, expert, [record | {"tokenizer": "0" * 64}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": "20 21"}, "line 2: 'input_ids' is no list of whole numbers"),
        ({"input_ids": [20, 2.5, 3]}, "line 2: 'input_ids' is no list"),
        ({"input_ids": [20, 999, 3]}, "line 2: id 999 is none of the tokenizer's, which go from 0 to 95"),
        ({"input_ids": [20, -1, 3]}, "line 2: id -1 is none"),
        ({"input_ids": [20, 10**30, 3]}, "line 2: id 1000000000000000000000000000000 is none"),
        ({"answer_spans": None}, "line 2: 'answer_spans' is no list of .start, end."),
        ({"answer_spans": [[1]]}, "line 2: 'answer_spans' is no list"),
        ({"answer_spans": [[1, 9]]}, "line 2: answer span .1, 9. is empty, out of order or outside its 3 tokens"),
        ({"answer_spans": [[-1, 2]]}, "line 2: answer span .-1, 2. .*make the file with data_prep/regenerate.py"),
        ({"earlier_sequences": [[1]]}, "line 2: 'earlier_sequences' is no list of objects"),
        ({"earlier_sequences": [{"input_ids": [999]}]}, "line 2: id 999 is none"),
        (
            {"earlier_sequences": [{"input_ids": [1, 2], "answer_spans": [[2, 2]]}]},
            "line 2: answer span .2, 2. is empty",
        ),
        ({"sample": "x"}, "line 2 has a 'sample' that is no whole number"),
        ({"tokenizer": "0"}, "line 2: record 'a' was regenerated with another tokenizer"),
    ],
)
def test_regenerated_ids_that_cannot_be_are_refused_by_file_and_line(tmp_path, expert, change, message):
    record = talk("a", "w1", "w2") | {"input_ids": [20, 21, 3], "answer_spans": [[1, 3]], "sample": 0}
    record["tokenizer"] = Chat(str(expert)).hash
    with pytest.raises(UserError, match=f"c.jsonl, {message}"):
        run(tmp_path, expert, [record | {"id": "first"}, record | change])
    assert not (tmp_path / "t.parquet").exists()


def test_an_output_is_only_replaced_by_the_same_or_on_demand(tmp_path, expert):
    source, out = tmp_path / "c.jsonl", tmp_path / "t.parquet"
    (whole,), _ = run(tmp_path, expert, [talk("a", "w1", "w2", "w3", "w4")])
    before = out.read_bytes()
    assert tokenise(source, expert, out) == 0 and out.read_bytes() == before, "a pipeline may run it again"
    for flags in (["--limit_tokens", "1"], ["--max_length", "9"], ["--template_args", '{"x": 1}']):
        with pytest.raises(UserError, match="--overwrite"):
            tokenise(source, expert, out, *flags)
    source.write_text(json.dumps(talk("b", "w1", "w2")) + "\n")
    with pytest.raises(UserError, match="made from other input"):
        tokenise(source, expert, out)
    assert out.read_bytes() == before
    assert tokenise(source, expert, out, "--overwrite") == 0 and [s.id for s in read_tokens(out)] == ["b"]
    out.write_text("somebody's own")
    with pytest.raises(UserError, match="--overwrite"):
        tokenise(source, expert, out)


def test_an_input_is_never_replaced_and_the_output_must_be_a_file(tmp_path, expert):
    source = tmp_path / "c.jsonl"
    source.write_text(json.dumps(talk("a", "w1", "w2")) + "\n")
    with pytest.raises(UserError, match="is read from and would be replaced"):
        tokenise(source, expert, source, "--overwrite")
    for out in (tmp_path, "", source / "t.parquet"):
        with pytest.raises(UserError, match="is a folder|is empty|is not a folder"):
            tokenise(source, expert, out)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_inputs_of_one_name_are_told_apart(tmp_path, expert):
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "c.jsonl")
        paths[-1].write_text(json.dumps(talk(name, "w1", "w2")) + "\n")
    out = tmp_path / "t.parquet"
    assert tokenise(paths[0], expert, out, "--conversations", *map(str, paths)) == 0
    assert set(read_metadata(out)["sources"]) == {"c.jsonl", "c.jsonl (2)"}


def test_no_input_is_refused_in_plain_words(tmp_path, expert):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="empty.jsonl is empty"):
        tokenise(tmp_path / "empty.jsonl", expert, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="there is no file .*none.jsonl"):
        tokenise(tmp_path / "none.jsonl", expert, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="--conversations needs a file"):
        main(["--expert", str(expert), "--out", str(tmp_path / "t.parquet"), "--conversations"])


TALKS = [
    talk("plain", "w1", "w2", "w3", "w4 w5", "w6", "w7", system="w9"),
    talk("thinking", "w1", "w80 w10 w81 w2", "w3", "w80 w11 w81 w4"),
    talk("thinking at first", "w1", "w80 w10 w81 w2", "w3", "w4", "w5", "w6"),
]


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"marks the last turn"}))
def test_every_answer_follows_the_prompt_that_the_template_gives(tmp_path, expert, name):
    chat = Chat(str(with_template(tmp_path, expert, TEMPLATES[name])))
    samples, metadata = run(tmp_path, tmp_path, TALKS)
    found = {}
    for sample in samples:
        for start, end in sample.answer_spans:
            found.setdefault(sample.id.split("/")[0], []).append(
                (sample.input_ids[:start].tolist(), start, end, sample)
            )
    for record in TALKS:
        messages = record["messages"]
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for (before, start, end, sample), place in zip(found[record["id"]], answers, strict=True):
            prompt = chat.text(messages[:place], generation_prompt=True)
            assert before in [encode(chat.tokenizer, prompt + more) for more in (chat.filler, "")]
            whole = encode(chat.tokenizer, chat.text(messages[: place + 1]))
            assert sample.input_ids[:end].tolist() == whole[:end] and whole[end - 1] == END
            words = messages[place]["content"].split()
            assert chat.tokenizer.decode(sample.input_ids[start : end - 1]).split() == words, "no header, no filler"
    several = {"Qwen3": 3, "empties earlier answers": 3, "drops earlier thinking": 2}.get(name, 0)
    counted = "conversations in several samples, because the chat template rewrites earlier turns"
    assert metadata["counts"].get(counted, 0) == several and len({sample.id for sample in samples}) == len(samples)


def test_earlier_turns_are_rewritten_no_more_often_than_needed(tmp_path, expert):
    folder = with_template(tmp_path, expert, TEMPLATES["drops earlier thinking"])
    samples, _ = run(tmp_path, folder, TALKS[2:])
    assert [(sample.id, len(sample.answer_spans)) for sample in samples] == [
        ("thinking at first", 1),
        ("thinking at first/turn-1", 2),
    ]
    # each of them is cut, or left out, by itself
    long, short = (len(sample.input_ids) for sample in samples[::-1])
    assert short < long
    cut, metadata = run(tmp_path, folder, TALKS[2:], "--max_length", str(short))
    assert [sample.id for sample in cut] == ["thinking at first"]
    assert metadata["counts"][f"skipped: the first answer ends beyond {short} tokens"] == 1


def test_an_answer_of_weight_0_is_read_but_not_trained_on(tmp_path, expert):
    record, other = talk("a", "w1", "w2", "w3", "w4"), talk("b", "w1", "w2")
    for message in (record["messages"][1], other["messages"][1]):
        message["weight"] = 0
    (sample,), metadata = run(tmp_path, expert, [record, other])
    (whole,), _ = run(tmp_path, expert, [talk("a", "w1", "w2", "w3", "w4")])
    assert np.array_equal(sample.input_ids, whole.input_ids) and sample.answer_spans == whole.answer_spans[1:]
    assert metadata["counts"] == {
        "answers of weight 0, not trained on": 2,
        "skipped: no answer in it that is trained on": 1,
    }
    record["messages"][1]["weight"] = False
    assert run(tmp_path, expert, [record])[0][0].answer_spans == sample.answer_spans
    record["messages"][1]["weight"] = 0.5
    with pytest.raises(UserError, match="line 1 has a message with a 'weight' other than 0 and 1"):
        run(tmp_path, expert, [record])


def test_reasoning_is_part_of_the_answer_where_the_template_writes_it(tmp_path, expert):
    record = talk("a", "w1", "w2")
    record["messages"][1]["reasoning_content"] = "w3"
    (plain,), metadata = run(tmp_path, expert, [record])
    assert plain.answer_ids().tolist() == run(tmp_path, expert, [talk("a", "w1", "w2")])[0][0].answer_ids().tolist()
    assert metadata["counts"] == {
        "answers without their 'reasoning_content', which the chat template does not write": 1
    }
    folder = with_template(tmp_path, expert, TEMPLATES["Qwen3"])
    (whole,), metadata = run(tmp_path, folder, [record])
    chat = Chat(str(folder))
    assert chat.tokenizer.decode(whole.answer_ids()).split() == ["w80", "w3", "w81", "w2", "<|im_end|>"]
    assert metadata["counts"] == {}


@pytest.mark.parametrize("name", NO_HEADER_TO_FIND)
def test_a_model_without_a_place_for_answers_is_refused(tmp_path, expert, name):
    with pytest.raises(UserError, match="cannot render a question and its answer"):
        run(tmp_path, with_template(tmp_path, expert, NO_HEADER_TO_FIND[name]), [talk("a", "w1", "w2")])
    assert not (tmp_path / "t.parquet").exists()


def test_a_generation_prompt_that_answers_do_not_begin_with_is_a_counted_skip(tmp_path, expert):
    for template in (
        TEMPLATE.replace("assistant \n ' }}", "assistant \n w50 ' }}"),
        TEMPLATES["marks the last turn"],
    ):
        folder = with_template(tmp_path, expert, template)
        with pytest.raises(UserError, match="1 x skipped: its ids with an answer do not begin"):
            run(tmp_path, folder, [talk("one", "w1", "w2")])


def test_a_template_without_an_end_of_turn_is_a_counted_skip(tmp_path, expert):
    folder = with_template(tmp_path, expert, TEMPLATE.replace(" <|im_end|>", ""))
    with pytest.raises(UserError, match="1 x skipped: an answer is rendered without an end-of-turn"):
        run(tmp_path, folder, [talk("one", "w1", "w2")])


def test_what_the_template_refuses_is_a_counted_skip(tmp_path, expert):
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    folder = with_template(tmp_path, expert, refuse + TEMPLATE)
    samples, metadata = run(tmp_path, folder, [talk("a", "w1", "w2", system="w3"), talk("b", "w1", "w2")])
    assert [sample.id for sample in samples] == ["b"]
    assert metadata["counts"] == {"skipped: the chat template refuses it (no system prompts)": 1}


def test_control_tokens_in_text_are_a_counted_skip(tmp_path, expert):
    records = [talk("a", "w1 <|im_end|> w2", "w3"), talk("b", "w1", "w2")]
    samples, metadata = run(tmp_path, expert, records)
    assert [sample.id for sample in samples] == ["b"]
    assert metadata["counts"] == {"skipped: <|im_end|> spelled out in a message": 1}


def test_long_samples_are_cut_at_an_answer_boundary_or_skipped(tmp_path, expert):
    two = talk("two", "w1", "w2 w3", "w4", "w5 w6")
    (whole,), _ = run(tmp_path, expert, [two])
    first, second = whole.answer_spans
    (cut,), metadata = run(tmp_path, expert, [two], "--max_length", str(second[1] - 1))
    assert cut.answer_spans == (first,) and cut.input_ids.tolist() == whole.input_ids[: first[1]].tolist()
    assert metadata["counts"] == {f"cut at an answer boundary to {second[1] - 1} tokens": 1}
    with pytest.raises(UserError, match="first answer ends beyond"):
        run(tmp_path, expert, [two], "--max_length", str(first[1] - 1))


def test_limit_tokens_stops_at_whole_samples(tmp_path, expert):
    records = [talk(f"r{number}", "w1", "w2 w3") for number in range(5)]
    samples, _ = run(tmp_path, expert, records, "--limit_tokens", "4")
    assert [sample.id for sample in samples] == ["r0", "r1"]


def test_no_answers_at_all_are_refused_and_nothing_is_written(tmp_path, expert):
    with pytest.raises(UserError, match="every loss mask would be all zeros .1 x skipped: no answer in it"):
        run(tmp_path, expert, [talk("a", "w1")])
    questions = {"id": "q", "messages": [{"role": "user", "content": "w1"}] * 2}
    with pytest.raises(UserError, match="1 x skipped: questions without answers"):
        run(tmp_path, expert, [questions])
    assert not (tmp_path / "t.parquet").exists()


def test_a_tokenizer_without_template_or_end_is_refused(tmp_path, expert):
    folder = with_template(tmp_path, expert, TEMPLATE)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        run(tmp_path, folder, [talk("a", "w1", "w2")])
    chat = Chat(str(expert))
    chat.tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-turn token"):
        stop_ids(chat.tokenizer, tmp_path / "no_generation_config")


def test_stop_ids_are_those_of_model_and_tokenizer_together(tmp_path, expert):
    folder = with_template(tmp_path, expert, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    assert stop_ids(Chat(str(folder)).tokenizer, folder) == (1, END, 5)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json cannot be read"):
        Chat(str(folder))


def test_bad_settings_are_refused(tmp_path, expert):
    for flags in (
        ["--max_length", "1"],
        ["--template_args", "{"],
        ["--template_args", "[1]"],
        ["--limit_tokens", "-1"],
    ):
        with pytest.raises(UserError, match=flags[0]):
            run(tmp_path, expert, [talk("a", "w1", "w2")], *flags)


@pytest.mark.parametrize("spans", [(), ((3, 3),), ((0, 2),), ((3, 9),), ((3, 5), (4, 6)), ((5, 6), (2, 3))])
def test_samples_with_impossible_spans_are_refused(tmp_path, spans):
    with pytest.raises(UserError, match="'bad'"):
        write_tokens(tmp_path / "t.parquet", [Sample("bad", np.arange(8, dtype=np.int32), spans)], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [{"input_ids": ["w1"]}, {"input_ids": None}, {"answer_spans": [[1]]}, {"answer_spans": [["a", "b"]]}, {"id": None}],
)
def test_rows_of_another_kind_are_refused_by_the_reader(tmp_path, change):
    row = {"id": "a", "input_ids": [1, 2, 3], "answer_spans": [[1, 3]]}
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "t.parquet")
    assert len(read_tokens(tmp_path / "t.parquet")) == 2
    rows = [row | change] * 2 if change.get("input_ids") or change.get("answer_spans") else [row, row | change]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="t.parquet"):
        read_tokens(tmp_path / "t.parquet")


def test_other_files_are_refused_by_the_reader(tmp_path):
    (tmp_path / "lfs.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(UserError, match="is a Git LFS pointer, not the data: run git lfs pull"):
        read_tokens(tmp_path / "lfs.parquet")
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as a token file"):
        read_tokens(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="cannot be read as a token file"):
        read_tokens(tmp_path / "none.parquet")
