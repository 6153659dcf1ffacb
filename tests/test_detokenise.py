"""Pieces of text are final, never end inside a character, and together are the text of all ids."""

import random

import pytest
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dcd_core.decode import Generation
from dcd_core.detokenise import REPLACEMENT, TextPieces, answer_ids, text_of

SPOKEN = "Grüße: 5 €, 漢字 👩‍🚀!\n  ok "


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, decoded as GPT-2, Llama 3 and Qwen do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with a leading space, and bytes for the rest, decoded as Llama 2 does (the first space is dropped)."""
    words = ["<s>", "\u2581", "\u2581one", "\u2581two", "three"]
    vocabulary = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def in_groups(ids: list[int], chance: random.Random) -> list[list[int]]:
    """The ids in groups of 0 to 4, as rounds emit them."""
    groups = []
    while ids:
        count = chance.randint(0, 4)
        groups.append(ids[:count])
        ids = ids[count:]
    return groups


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_characters_are_held_back_until_the_character_is_whole(seed):
    tokenizer = byte_level()
    ids = tokenizer(SPOKEN)["input_ids"]
    assert len(ids) == len(SPOKEN.encode()), "one id per byte"
    known = TextPieces(tokenizer)
    so_far = ""
    for group in in_groups(ids, random.Random(seed)):
        piece = known.add(group)
        assert REPLACEMENT not in piece
        so_far += piece
        assert SPOKEN.startswith(so_far)
    assert so_far == SPOKEN and known.end() == ""


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tokenizer", [byte_level(), tiny_tokenizer()], ids=["bytes", "words"])
def test_any_ids_in_any_groups_give_the_text_of_all(tokenizer, seed):
    """Also where bytes make no characters."""
    chance = random.Random(seed)
    ids = [chance.randrange(len(tokenizer)) for _ in range(30)]
    known = TextPieces(tokenizer)
    assert "".join(map(known.add, in_groups(ids, chance))) + known.end() == text_of(tokenizer, ids)


@pytest.mark.parametrize("seed", range(40))
def test_words_that_look_different_at_the_beginning(seed):
    """A decoder that drops the first space, and that shows a run of bytes as broken until the last is there."""
    tokenizer, chance = byte_fallback(), random.Random(seed)
    parts = [["<s>"], ["\u2581"], ["\u2581one"], ["\u2581two"], ["three"]]
    parts += [[f"<0x{byte:02X}>" for byte in letter.encode()] for letter in "a€漢🚀"]
    tokens = [token for _ in range(15) for token in chance.choice(parts)]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    known = TextPieces(tokenizer)
    pieces = [known.add(group) for group in in_groups(ids, chance)]
    assert "".join(pieces) == text_of(tokenizer, ids) and not any(REPLACEMENT in piece for piece in pieces)


def test_what_ends_inside_a_character_is_shown_at_the_end():
    tokenizer = byte_level()
    first, second, _ = tokenizer("€")["input_ids"]
    known = TextPieces(tokenizer)
    assert known.add(tokenizer("a")["input_ids"]) == "a"
    assert known.add([first]) == known.add([second]) == ""
    assert known.end() == text_of(tokenizer, [first, second]) == REPLACEMENT
    assert known.end() == ""


def test_only_the_newest_ids_are_decoded(monkeypatch):
    """Long answers do not get slower: the window holds the last two groups."""
    tokenizer = tiny_tokenizer()
    known, longest = TextPieces(tokenizer), 0
    real = tokenizer.decode

    def counted(ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return real(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for index in range(50):
        known.add([8 + index, 9 + index])
    assert longest == 4


def test_special_tokens_are_no_text_and_the_stop_token_is_no_answer():
    tokenizer = tiny_tokenizer()
    assert text_of(tokenizer, [8, 3, 9, 1]) == text_of(tokenizer, [8, 9]) == "w0 w1"
    assert answer_ids(Generation("a", 0, ids=[8, 9], finish="stop")) == [8]
    assert answer_ids(Generation("a", 0, ids=[8, 9], finish="length")) == [8, 9]
