"""A made-up language of 88 words, for models so small that a whole experiment on them takes a minute.

After each word one of four may follow; which four depends on that word and on the one before it, and how likely each of
them is on the subject, which the first word of a conversation names. So a model that has learnt less of it than another
still says much the same, as an amateur does beside its expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{index}" for index in range(88)]
SPECIALS = ["<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "\n"]
IDS = {token: index for index, token in enumerate(SPECIALS + WORDS)}
STOP, FIRST_WORD = IDS["<|im_end|>"], IDS["w0"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|> ' + message['role'] + ' \n ' + message['content'] + ' <|im_end|> \n ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant \n ' }}{% endif %}"
)
SUBJECTS, CHOICES = 8, 4


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One id per word, 96 ids, a ChatML-like template; '<|im_end|>' (id 3) ends a turn."""
    core = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class ToyLanguage:
    """Words are numbers 0..87.

    Attributes:
        followers: int [2, word, choice], what may follow a word; the first index is the parity of the word before it.
        likely: float [subject, word], how much each subject likes a word (a logit).
    """

    followers: np.ndarray
    likely: np.ndarray

    @classmethod
    def drawn(cls, seed: int) -> ToyLanguage:
        """One of many languages of this kind."""
        generator = np.random.default_rng(seed)
        followers = np.argsort(generator.random((2, len(WORDS), len(WORDS))), axis=-1)[..., :CHOICES]
        return cls(followers, 1.5 * generator.standard_normal((SUBJECTS, len(WORDS))))

    def conversations(self, count: int, question: int, answer: int, generator: np.random.Generator) -> np.ndarray:
        """Word numbers [count, question + answer]: the subject, a question and the answer that goes on from it."""
        subjects = generator.integers(SUBJECTS, size=count)
        words = [subjects, generator.integers(len(WORDS), size=count)]
        while len(words) < question + answer:
            choices = self.followers[words[-2] % 2, words[-1]]
            liked = np.take_along_axis(self.likely[subjects], choices, axis=1)
            # the largest of logits with Gumbel noise is a draw from their softmax
            best = np.argmax(liked + generator.gumbel(size=liked.shape), axis=1)
            words.append(choices[np.arange(count), best])
        return np.stack(words, axis=1)

    def written(self, words: np.ndarray, question: int) -> np.ndarray:
        """Ids [conversation, position] of conversations as the chat template writes them, up to the answer's end."""
        before = [IDS[token] for token in ("<|im_start|>", "user", "\n")]
        between = [IDS[token] for token in ("<|im_end|>", "\n", "<|im_start|>", "assistant", "\n")]
        parts = [before, words[:, :question] + FIRST_WORD, between, words[:, question:] + FIRST_WORD, [STOP]]
        wide = [np.broadcast_to(np.asarray(part), (len(words), np.shape(part)[-1])) for part in parts]
        return np.concatenate(wide, axis=1)


def text_of(words: np.ndarray) -> str:
    """Words as a message holds them."""
    return " ".join(WORDS[word] for word in words)
