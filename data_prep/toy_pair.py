"""Make a toy pair in a minute, and all that an experiment on it needs; nothing is fetched.

    python data_prep/toy_pair.py --output runs/toy

Expert and amateur learn a made-up language (data_prep/toy_language.py); the amateur is half as wide and has read less.
OUTPUT/ then holds expert/ and amateur/ with their tokenizer, train.parquet and held_out.parquet (the expert's own
answers, as token files), prompts.jsonl (held out as well) and metrics.json, which says how well each has learnt it.

The toy shows that every step works and what its results look like. What comes out says nothing about models of real
text.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.token_files import Sample, write_tokens
from data_prep.toy_language import FIRST_WORD, IDS, STOP, ToyLanguage, text_of, toy_tokenizer
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry, save_run
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, write_text_atomic
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.progress import Bar

WIDTHS = {"expert": 64, "amateur": 32}
SHARE_READ = {"expert": 1.0, "amateur": 0.4}  # of the training steps
LAYERS = 4
BATCH, QUESTION, ANSWER = 32, (4, 10), (12, 33)  # conversations a step; words of each, the end left out


@dataclass
class Config:
    """Settings of the toy."""

    output: str = field(metadata={"help": "folder for the pair, its texts and prompts"})
    steps: int = field(default=400, metadata={"help": "training steps of the expert; the amateur has fewer"})
    texts: int = field(default=400, metadata={"help": "answers by the expert to train heads on"})
    held_out: int = field(default=40, metadata={"help": "answers by the expert to evaluate heads on"})
    prompts: int = field(default=200, metadata={"help": "prompts for the diagnostics"})
    max_new_tokens: int = field(default=40, metadata={"help": "longest answer of the expert"})
    seed: int = field(default=0, metadata={"help": "of language, weights and texts"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        refuse_below(self, steps=1, texts=1, held_out=1, prompts=1, max_new_tokens=2, seed=0)


def main(argv: list[str] | None = None) -> int:
    """Train both models, let the expert answer, write everything; print how well each has learnt the language."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    folder = save_run(config.output, config, argv, config.overwrite)
    language = ToyLanguage.drawn(config.seed)
    models, losses = {}, {}
    for place, (name, width) in enumerate(WIDTHS.items()):
        steps = max(1, round(config.steps * SHARE_READ[name]))
        models[name] = learn(language, width, steps, config.seed + place, name)
        losses[name] = answer_loss(models[name], language, config.seed)
        save_model(folder / name, models[name])
    generator, asked = np.random.default_rng([config.seed, 1]), set()
    for name, count in (("train", config.texts), ("held_out", config.held_out)):
        samples = own_answers(models["expert"], questions(language, count, generator, asked), name, config)
        write_tokens(folder / f"{name}.parquet", samples, {})
    lines = [
        json.dumps({"id": f"toy-{place}", "messages": [{"role": "user", "content": text_of(words)}], "source": "toy"})
        for place, words in enumerate(questions(language, config.prompts, generator, asked))
    ]
    write_text_atomic(folder / "prompts.jsonl", "\n".join(lines) + "\n")
    finish_run(folder, {"nats_per_answer_token": losses})
    words = ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
    print(f"nats per token of new answers: {words} -> {folder}")
    return 0


def learn(language: ToyLanguage, width: int, steps: int, seed: int, name: str) -> LlamaForCausalLM:
    """A small stock model that has read so many batches of the language."""
    config = LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=IDS["<pad>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    generator = np.random.default_rng([seed, 0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1, pct_start=0.1)
    with Bar(steps, f"training the {name}", "steps") as bar:
        for _ in range(steps):
            question, answer = generator.integers(*QUESTION), generator.integers(*ANSWER)
            words = language.conversations(BATCH, question, answer, generator)
            ids = torch.from_numpy(language.written(words, question))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update(1, f"loss {loss.item():.2f}")
    return model.eval()


@torch.no_grad()
def answer_loss(model: LlamaForCausalLM, language: ToyLanguage, seed: int) -> float:
    """Mean cross-entropy, in nats, of the words of new answers."""
    generator = np.random.default_rng([seed, 2])
    question, answer = QUESTION[1], ANSWER[0]
    words = language.conversations(200, question, answer, generator)
    ids = torch.from_numpy(language.written(words, question))
    labels = ids.clone()
    labels[:, : -answer - 1] = labels[:, -1] = -100
    return model(input_ids=ids, labels=labels).loss.item()


def questions(
    language: ToyLanguage, count: int, generator: np.random.Generator, asked: set[tuple[int, ...]]
) -> list[np.ndarray]:
    """Questions of several lengths, as words, and none of those `asked` before, to which they are added."""
    found, drawn, most = [], 0, 100 * count + 1000
    while len(found) < count:
        lengths = generator.integers(*QUESTION, size=count)
        words = language.conversations(count, QUESTION[1], 0, generator)
        for row, length in zip(words, lengths, strict=True):
            if len(found) < count and tuple(row[:length]) not in asked:
                asked.add(tuple(row[:length]))
                found.append(row[:length])
        drawn += count
        if drawn > most:
            raise UserError(f"the toy language has too few questions for {len(asked)} different ones; ask for fewer")
    return found


def own_answers(model: LlamaForCausalLM, asked: list[np.ndarray], name: str, config: Config) -> list[Sample]:
    """The expert's own answers, sampled: what a head is trained to draft."""
    pair = Pair(LanguageModel(model, len(IDS), None), None, toy_tokenizer())
    prompts = []
    for place, words in enumerate(asked):
        turn = [IDS["<|im_start|>"], IDS["user"], IDS["\n"], *(words + FIRST_WORD).tolist(), STOP, IDS["\n"]]
        prompts.append(Prompt(f"{name}-{place}", [*turn, IDS["<|im_start|>"], IDS["assistant"], IDS["\n"]]))
    settings = Settings(Target(), config.max_new_tokens, (STOP,), config.seed)
    samples = []
    for prompt, made in zip(prompts, decode(assemble("ar", pair), prompts, settings, max_batch=64), strict=True):
        ids = np.array([*prompt.ids, *made.ids], dtype=np.int32)
        samples.append(Sample(prompt.id, ids, ((len(prompt.ids), len(ids)),)))
    return samples


def save_model(folder: Path, model: LlamaForCausalLM) -> None:
    """A plain model folder with the tokenizer."""
    with atomic_path(folder) as temporary:
        model.save_pretrained(temporary)
        toy_tokenizer().save_pretrained(temporary)


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
