"""What decoding must give, in the plainest way: stock models, no cache, one row, one token at a time."""

from __future__ import annotations

import copy

import torch
from tiny import VOCAB, tiny_model, tiny_pair

from dcd_core.contrast import Target, target_log_probs
from dcd_core.decode import Assembled, Prompt
from dcd_core.drafters.protocol import Accepted
from dcd_core.heads.dual_input import DualInputHead
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel, Pair
from dcd_core.sampling import gumbel


@torch.no_grad()
def greedy(
    experts: list,
    weights: list[float],
    prompts: list[list[int]],
    count: int,
    cutoff: float = 0.0,
    penalty: float = 1.0,
) -> list[int]:
    """``count`` tokens of argmax sum_m weight_m z_m, each model on its own prompt; scores of ids that the first model
    has read are divided by the penalty, or multiplied where negative."""
    answer = []
    for _ in range(count):
        combined, first = 0.0, None
        for model, weight, prompt in zip(experts, weights, prompts, strict=True):
            logits = model.model(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1, :VOCAB]
            first = logits if first is None else first
            combined = combined + weight * logits if weight else combined
        for token in set(prompts[0] + answer):
            combined[token] = combined[token] * penalty if combined[token] < 0 else combined[token] / penalty
        allowed = first.softmax(-1) >= cutoff * first.softmax(-1).max()
        answer.append(combined.masked_fill(~allowed, -torch.inf).argmax().item())
    return answer


def greedy_cd(
    pair: Pair, prompt: list[int], alpha: float, count: int, cutoff: float = 0.0, penalty: float = 1.0
) -> list[int]:
    """Vanilla greedy contrastive decoding [DCD, Eq. 1] of one prompt."""
    return greedy([pair.expert, pair.amateur], [1 + alpha, -alpha], [prompt] * 2, count, cutoff, penalty)


def some_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of different lengths; every second one repeats itself, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(count):
        ids = torch.randint(8, VOCAB, (2 + 3 * index,), generator=generator).tolist()
        prompts.append(Prompt(f"p{index}", ids * 2 if index % 2 else ids))
    return prompts


def tiny_head(pair: Pair, seed: int = 1, vocabulary=None) -> Eagle3Head:
    """An untrained head whose output layer is the expert's."""
    rows = pair.expert.output.rows()
    return Eagle3Head.from_expert(pair.expert.config, vocabulary, seed=seed, output_rows=rows).to(pair.expert.dtype)


def dual_input_head(pair: Pair, seed: int = 1, vocabulary=None) -> DualInputHead:
    """The same with the amateur beside the expert, and weights that make it count."""
    rows, taps = pair.expert.output.rows(), pair.amateur.feature_layers
    head = DualInputHead.from_pair(
        pair.expert.config,
        pair.amateur.config,
        vocabulary,
        amateur_feature_layers=taps,
        seed=seed,
        output_rows=rows,
    )
    generator, own = torch.Generator().manual_seed(seed), head.config.feature_widths[0]
    with torch.no_grad():
        head.fc.weight[:, own:].normal_(0.0, 0.02, generator=generator)
    return head.to(pair.expert.dtype)


def amateur_head(pair: Pair, seed: int = 5, vocabulary=None) -> Eagle3Head:
    """A head that says it imitates the amateur."""
    head = tiny_head(pair, seed, vocabulary)
    head.config = head.config.replace(aligned_with="amateur")
    return head


def fitting_heads(name: str, pair: Pair, head: Eagle3Head | None = None) -> dict:
    """The heads that a method needs, by the names of their arguments; ``head`` where a plain one will do."""
    method = METHODS[name]
    if method.reads_amateur:
        return {"head": dual_input_head(pair)}
    if not (method.needs_head or method.takes_head):
        return {}
    plain = {"head": tiny_head(pair) if head is None else head}
    return plain | ({"amateur_head": amateur_head(pair)} if method.needs_amateur_head else {})


def near_pair(kind: str, noise: float, dtype: torch.dtype = torch.float64, seed: int = 0) -> Pair:
    """An amateur that is the expert with noise on its weights: its drafts often pass, and with no noise always."""
    pair = tiny_pair(kind, seed, dtype)
    stock = copy.deepcopy(tiny_model(kind, seed, dtype=dtype).model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in stock.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=dtype), alpha=noise)
    return Pair(pair.expert, LanguageModel(stock, VOCAB), pair.tokenizer)


@torch.no_grad()
def by_noise(models: list, target: Target, prompts: list[list[int]], count: int, key: int) -> list[int]:
    """``count`` tokens of argmax(log pi + g), each model on its own prompt, g the noise of the output position; at
    temperature 0 without noise. The first model's prompt and the answer are what a repetition penalty counts."""
    answer = []
    for position in range(count):
        rows = [
            model.model(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1, :VOCAB]
            for model, prompt in zip(models, prompts, strict=True)
        ]
        seen = torch.tensor([token in prompts[0] + answer for token in range(VOCAB)])
        row = target_log_probs(rows, target, seen)
        if target.temperature:
            row = row + gumbel(torch.tensor([key]), torch.tensor([[position]]), VOCAB)[0, 0]
        answer.append(row.argmax().item())
    return answer


def assembled(name: str, pair: Pair, head: Eagle3Head | None = None) -> Assembled:
    """A method with all that it may need, made up where it is not given; ``dcd_lm`` drafts with the pair's amateur."""
    return assemble(name, pair, lm=pair.amateur, **fitting_heads(name, pair, head))


def told(expert: LanguageModel, texts: list[list[int]], starts: list[int], ends: list[int]) -> Accepted:
    """What a drafter is told of ``texts[row][start:end]``: the tokens, and the expert's features before each."""
    new = [text[start:end] for text, start, end in zip(texts, starts, ends, strict=True)]
    width = max(map(len, new))
    rows = []
    for text, start, tokens in zip(texts, starts, new, strict=True):
        features = expert.forward_full(torch.tensor([text]), features=True, logits=False).features[0]
        features = features[start - 1 : start - 1 + len(tokens)]
        rows.append(torch.nn.functional.pad(features, (0, 0, 0, width - len(tokens))))
    padded = torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in new])
    return Accepted(padded, [len(tokens) for tokens in new], new, torch.stack(rows))


def fitted_head(pair: Pair, texts: list[list[int]], vocabulary=None, steps: int = 20, depth: int = 3) -> Eagle3Head:
    """A head that knows these texts well enough for long paths of its drafts to pass, and not all of them."""
    head = tiny_head(pair, vocabulary=vocabulary)
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    length = torch.tensor([len(text) for text in texts])[:, None]
    features = pair.expert.forward_full(ids, features=True, logits=False).features
    shifted = torch.nn.functional.pad(ids, (0, depth + 2))
    rows = torch.arange(width - 1).expand(len(texts), -1)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        states = head.unroll(
            features,
            pair.expert.embedding(shifted[:, 1 : width + 1]),
            rows,
            depth,
            lambda step, state: pair.expert.embedding(shifted.gather(1, rows + 1 + step)),
        )
        loss = 0.0
        for step, state in enumerate(states):
            wanted = shifted.gather(1, rows + 2 + step)
            known = (rows + 2 + step < length) & head.t2d[wanted]
            wanted = torch.searchsorted(head.target_ids, wanted[known])
            loss = loss + torch.nn.functional.cross_entropy(head.logits(state)[known], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.requires_grad_(False)
