"""The texts that a trainer evaluates on: none that it trains on."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt64

from dcd_core.decode_types import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.training_prompts import trained_on
from train.batches import Texts
from train.processes import Ranks

SKIP_TRAINED = "leave out held-out texts whose prompt is trained on; without it they are refused"


def held_out_texts(config, vocab: int, trained: UInt64[np.ndarray, " prompt"], ranks: Ranks) -> Texts | None:
    """The first ``--eval_texts`` texts of ``--eval_tokens``; None if there are no such files.

    Args:
        config: has `eval_tokens`, `eval_texts`, `max_length` and `skip_trained`.
        vocab: ids of the expert.
        trained: hashes of the prompts that are trained on, and of those that were before.
    Raises:
        UserError: see :meth:`Texts.load`; texts that begin as training texts do, up to the first answer, and are not to
            be left out; or none is left.
    """
    if not config.eval_tokens:
        return None
    first = 0 if config.skip_trained else config.eval_texts
    texts = Texts.load(config.eval_tokens, config.max_length, vocab, first=first)
    # by how they begin: a conversation may be several texts, the later ones with other answers in their prompts
    starts = [Prompt(text.id, text.input_ids[: text.answer_spans[0][0]].tolist()) for text in texts.samples]
    known = set(trained_on(starts, trained)[0])
    read = np.array([start.id in known for start in starts])
    kept = ~read & (np.cumsum(~read) <= (config.eval_texts or len(texts)))
    if kept.all():
        return texts
    words = f"{int(read.sum())} of the {len(texts)} texts in {', '.join(config.eval_tokens)}"
    if not config.skip_trained:
        named = texts.samples[int(read.argmax())].id
        raise UserError(
            f"{words} answer prompts that are trained on (the first: '{named}'), so they are not held out; give "
            "others, or leave these out with --skip_trained"
        )
    if read.all():
        raise UserError(f"{words} answer prompts that are trained on: none is left to evaluate on; give others")
    if ranks.first and read.any():
        print(f"{words} left out: their prompts are trained on", flush=True)
    return texts.only(kept)
