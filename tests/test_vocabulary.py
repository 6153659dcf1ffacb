"""Draft vocabulary: the most frequent answer ids, and a d2t / t2d pair that can only be one map."""

import numpy as np
import pytest
import torch

from data_prep.token_files import Sample, write_tokens
from data_prep.vocabulary import DraftVocabulary, build_vocabulary, check_map, load_vocabulary
from dcd_core.errors import UserError


def token_file(path, answers, prompt=(9, 9, 9)):
    """One sample per answer, after a prompt that must not count."""
    samples = [
        Sample(f"s{number}", np.array([*prompt, *answer], dtype=np.int32), ((len(prompt), len(prompt) + len(answer)),))
        for number, answer in enumerate(answers)
    ]
    write_tokens(path, samples, {})
    return path


def test_the_most_frequent_answer_ids_and_ties_to_the_lower_id(tmp_path):
    path = token_file(tmp_path / "t.parquet", [[7, 7, 7, 2, 2], [5, 5, 3, 3, 8]])
    vocabulary = build_vocabulary(path, vocab_size=12, draft_vocab_size=3)
    # 7 three times; 2, 3 and 5 twice each, of which the two lowest; the prompt's 9s not at all
    assert vocabulary.target_ids.tolist() == [2, 3, 7]
    assert vocabulary.d2t.tolist() == [2, 2, 5] and vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 3, 7] and vocabulary.t2d.dtype == torch.bool
    assert vocabulary.coverage == 7 / 10


def test_several_files_count_together_and_coverage_of_others(tmp_path):
    one = token_file(tmp_path / "a.parquet", [[1, 1, 2]])
    two = token_file(tmp_path / "b.parquet", [[2, 2, 4]])
    vocabulary = build_vocabulary([one, two], 12, 2)
    assert vocabulary.target_ids.tolist() == [1, 2]
    assert vocabulary.coverage == 5 / 6
    assert vocabulary.coverage_of(two) == 2 / 3


def test_too_few_distinct_ids_are_padded_with_the_lowest_unused(tmp_path):
    vocabulary = build_vocabulary(token_file(tmp_path / "t.parquet", [[7, 3, 7]]), 12, 5)
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 3, 7]
    assert vocabulary.coverage == 1.0


def test_equal_sizes_are_the_identity(tmp_path):
    vocabulary = build_vocabulary(token_file(tmp_path / "t.parquet", [[7, 3]]), 12, 12)
    assert vocabulary.d2t.tolist() == [0] * 12 and vocabulary.t2d.all()


@pytest.mark.parametrize("size", [0, 13])
def test_a_size_that_does_not_fit_is_refused(tmp_path, size):
    with pytest.raises(UserError, match="choose between 1 and 12"):
        build_vocabulary(token_file(tmp_path / "t.parquet", [[7, 3]]), 12, size)


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="another tokenizer"):
        build_vocabulary(token_file(tmp_path / "t.parquet", [[7, 12]]), 12, 3)


def test_maps_that_do_not_line_up_are_refused():
    d2t, t2d = torch.tensor([2, 2, 5]), torch.zeros(12, dtype=torch.bool)
    t2d[[2, 3, 7]] = True
    check_map(d2t, t2d)
    absolute = torch.arange(3) + d2t
    doubled = 2 * d2t
    for wrong in (absolute, doubled, d2t.flip(0), torch.zeros(3, dtype=torch.int64), d2t[:2], d2t.int()):
        with pytest.raises(UserError, match="inconsistent"):
            check_map(wrong, t2d)
    with pytest.raises(UserError, match="inconsistent"):
        DraftVocabulary(d2t, t2d.roll(1), 1.0)


def test_it_comes_back_as_saved_and_a_changed_map_is_noticed(tmp_path):
    path = token_file(tmp_path / "t.parquet", [[7, 7, 3, 5]])
    vocabulary = build_vocabulary(path, 12, 3)
    other = build_vocabulary(path, 12, 2)
    assert vocabulary.content_hash != other.content_hash
    vocabulary.save(tmp_path / "v.safetensors")
    again = load_vocabulary(tmp_path / "v.safetensors")
    assert torch.equal(again.d2t, vocabulary.d2t) and torch.equal(again.t2d, vocabulary.t2d)
    assert again.coverage == vocabulary.coverage and again.content_hash == vocabulary.content_hash
    other.save(tmp_path / "other.safetensors")
    mixed = (tmp_path / "v.safetensors").read_bytes().replace(vocabulary.content_hash.encode(), b"0" * 64)
    (tmp_path / "mixed.safetensors").write_bytes(mixed)
    with pytest.raises(UserError, match="content hash"):
        load_vocabulary(tmp_path / "mixed.safetensors")
    (tmp_path / "short.safetensors").write_bytes(mixed[:40])
    with pytest.raises(UserError, match="cannot be read"):
        load_vocabulary(tmp_path / "short.safetensors")
