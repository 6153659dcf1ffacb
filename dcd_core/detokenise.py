"""From ids to text, once whole and once piece by piece as the ids become known."""

from __future__ import annotations

from dcd_core.decode_types import Generation

REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character (yet)."""


def answer_ids(generation: Generation) -> list[int]:
    """The ids of an answer without the token that stopped it."""
    return generation.ids[:-1] if generation.finish == "stop" else generation.ids


def text_of(tokenizer, ids: list[int]) -> str:
    """Text of ids, special tokens left out, nothing tidied up."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextPieces:
    """The text of a growing list of ids: pieces never end inside a character, and make up the text of all ids.

    Tokenizers with byte tokens spread one character over several ids; until the last of them is there, decoding gives
    replacement characters, which are held back. Only the ids since the last whole piece are decoded again, behind the
    piece before it: what a token looks like (its leading space, say) may depend on its left neighbour.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.whole = self.shown = 0

    def add(self, ids: list[int]) -> str:
        """The text that these ids make known."""
        self.ids.extend(ids)
        text = text_of(self.tokenizer, self.ids[self.start :])
        ready = text.rstrip(REPLACEMENT)
        piece = ready[self.shown :]
        self.shown += len(piece)
        # a piece without text (special tokens) would be no left neighbour
        if piece and ready == text:
            self.start, self.whole = self.whole, len(self.ids)
            self.shown = len(text_of(self.tokenizer, self.ids[self.start :]))
        return piece

    def end(self) -> str:
        """What was held back: the text ends inside a character."""
        rest = text_of(self.tokenizer, self.ids[self.start :])[self.shown :]
        self.shown += len(rest)
        return rest
