"""Is it lossless? Every method must write the very text of vanilla contrastive decoding.

    python diagnostics/identity.py --expert EXPERT --amateur AMATEUR --head HEAD \\
        --prompts held_out.jsonl --output runs/identity

Greedy, fp32, in batches:
  * `ar` equals the generate method of stock transformers;
  * `cd` equals a cache-free loop over the two stock models (the first --loop_prompts prompts, at every alpha);
  * every other method equals `cd` at every alpha, `expert_sd` equals `ar`.
Then, at temperature 1 under shared noise, every method equals `cd` again (the first --noise_prompts prompts).

Texts may part only where the two best scores lie closer than 1e-3 nats, which is rounding; each such place is printed
and counted. Any other difference makes the exit code 1. Writes metrics.json.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from tabulate import tabulate
from transformers import GenerationConfig

from data_prep.chat_template import template_arguments
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry, save_run
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings, decode
from dcd_core.methods import METHODS, assemble
from dcd_core.models import LanguageModel, Pair, load_proposer
from dcd_core.progress import Bar
from diagnostics.agreement import compare
from diagnostics.loading import inputs_key, load_models, read_prompts
from diagnostics.parts import Parts

REFERENCES = ("ar", "cd")
PORTION = 4
"""Batches whose prompts are answered, and kept, together: in one, waiting prompts take the places of finished ones."""


@dataclass
class Config:
    """Settings of the identity check."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    head: str = field(metadata={"help": "EAGLE3 head: folder or hub id"})
    prompts: str = field(metadata={"help": "held-out prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the result"})
    lm: str = field(default="", metadata={"help": "small language model that dcd_lm drafts with: folder or hub id"})
    methods: list[str] = field(
        default_factory=lambda: [name for name in METHODS if name not in REFERENCES and not METHODS[name].needs_lm],
        metadata={"help": "methods to hold against cd (expert_sd against ar); default: all but dcd_lm"},
    )
    alphas: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.5], metadata={"help": "contrast strengths"})
    limit: int = field(default=100, metadata={"help": "use the first so many prompts (0: all)"})
    loop_prompts: int = field(default=10, metadata={"help": "prompts of the cache-free loop"})
    noise_prompts: int = field(default=20, metadata={"help": "prompts at temperature 1 under shared noise"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens of each answer"})
    batch: int = field(default=8, metadata={"help": "prompts at a time"})
    gamma: int = field(default=5, metadata={"help": "drafts per round; of a tree, its depth"})
    branch: int = field(default=1, metadata={"help": "children of a drafted token; 1 drafts chains"})
    nodes: int = field(default=0, metadata={"help": "drafted tokens of a tree (0: gamma times branch)"})
    seed: int = field(default=0, metadata={"help": "seed of the shared noise"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    template_args: str = field(default="", metadata={"help": "JSON given to the chat template"})
    overwrite: bool = field(default=False, metadata={"help": "redo a finished run"})

    def __post_init__(self):
        template_arguments(self.template_args)  # refused here if it is not JSON
        unknown = [method for method in self.methods if method not in METHODS or method in REFERENCES]
        if unknown or not self.methods:
            choices = ", ".join(name for name in METHODS if name not in REFERENCES)
            raise ValueError(f"--methods {' '.join(self.methods)}: choose from {choices}")
        if not self.alphas or min(self.alphas) < 0:
            raise ValueError(f"--alphas must be numbers of 0 or more, got {self.alphas}")
        least = {"batch": 1, "gamma": 1, "branch": 1, "nodes": 0, "max_new_tokens": 1}
        refuse_below(self, **least, limit=0, loop_prompts=0, noise_prompts=0, seed=0)


@dataclass(frozen=True)
class Check:
    """Two ways to write the same texts: `found` is held against `expected` for the first `prompts` prompts."""

    found: str
    expected: str
    alpha: float
    temperature: float
    prompts: int

    @property
    def target(self) -> Target:
        return Target(alpha=self.alpha, temperature=self.temperature)

    @property
    def title(self) -> str:
        noise = ", T = 1, shared noise" if self.temperature else ""
        alpha = "" if self.expected in ("generate", "ar") else f", alpha {self.alpha:g}"
        return f"{self.found} = {NAMES.get(self.expected, self.expected)}{alpha}{noise}"


NAMES = {"generate": "stock generate", "loop": "cache-free loop"}


def main(argv: list[str] | None = None) -> int:
    """Write every text both ways, compare, print the table; 1 if any text differs beyond rounding."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.limit, **arguments)
    pair, head = load_models(config.expert, config.amateur, config.head, "float32", config.device)
    lm = load_proposer(config.lm, pair, "float32", config.device) if config.lm else None
    for name in config.methods:
        assemble(name, pair, head, lm=lm)  # refused here if something is missing
    parts = Parts(config.output, result_settings(config), config.overwrite)
    folder = save_run(config.output, config, argv, config.overwrite)
    writer = Writer(pair, head, lm, stops, config, parts)
    plan = checks(config, len(prompts))
    results = [held_against(check, prompts[: check.prompts], writer, config) for check in plan]
    different = sum(result["different"] for result in results)
    finish_run(folder, {"checks": results, "passed": different == 0, "prompts": len(prompts)})
    parts.remove()
    print_results(results)
    return 0 if different == 0 else 1


def checks(config: Config, prompts: int) -> list[Check]:
    """Everything that has to be equal, in the order in which it is checked."""
    free = [method for method in config.methods if not METHODS[method].contrast]
    contrastive = [method for method in config.methods if METHODS[method].contrast]
    noisy, looped = min(config.noise_prompts, prompts), min(config.loop_prompts, prompts)
    plan = [Check("ar", "generate", 0.0, 0.0, prompts)]
    plan += [Check(method, "ar", 0.0, 0.0, prompts) for method in free]
    plan += [Check("cd", "loop", alpha, 0.0, looped) for alpha in config.alphas]
    plan += [Check(method, "cd", alpha, 0.0, prompts) for alpha in config.alphas for method in contrastive]
    plan += [Check(method, "ar", 0.0, 1.0, noisy) for method in free]
    plan += [Check(method, "cd", alpha, 1.0, noisy) for alpha in config.alphas for method in contrastive]
    return [check for check in plan if check.prompts > 0]


def result_settings(config: Config) -> dict:
    """What decides a text; a stopped check goes on only under the same."""
    names = ("max_new_tokens", "batch", "gamma", "branch", "nodes", "seed", "template_args")
    kept = {name: getattr(config, name) for name in names}
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, config.head, config.lm)}


class Writer:
    """Texts by any method or reference, some batches at a time; each is written once and kept for every check that
    needs it."""

    def __init__(
        self, pair: Pair, head, lm: LanguageModel | None, stops: tuple[int, ...], config: Config, parts: Parts
    ):
        self.pair, self.head, self.lm = pair, head, lm
        self.stops, self.config, self.parts = stops, config, parts

    def texts(self, name: str, check: Check, prompts: list[Prompt]) -> list[list[int]]:
        """Answers to some prompts, by a method or by "generate" or "loop"."""
        if name == "generate":
            expert, longest = self.pair.expert, self.config.max_new_tokens
            pieces = batches(prompts, self.config.batch)
            return [text for _, some in pieces for text in stock_generate(expert, some, self.stops, longest)]
        if name == "loop":
            models = [self.pair.expert, self.pair.amateur]
            return [cache_free(models, check.target, p.ids, self.stops, self.config.max_new_tokens) for p in prompts]
        settings = Settings(
            target=check.target,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=self.stops,
            seed=self.config.seed,
            gamma=self.config.gamma,
            branch=self.config.branch,
            nodes=self.config.nodes,
            rule="shared_noise" if check.temperature else "auto",
        )
        made = decode(assemble(name, self.pair, self.head, lm=self.lm), prompts, settings, max_batch=self.config.batch)
        return [generation.ids for generation in made]

    def kept_texts(self, name: str, check: Check, prompts: list[Prompt], index: int) -> list[list[int]]:
        """`texts` of one batch, from what a stopped run or an earlier check has left where it is there."""
        key = f"{name}-{check.alpha:g}-{check.temperature:g}-{index}-{len(prompts)}"
        found = self.parts.get(key)
        if found is None:
            found = self.texts(name, check, prompts)
            self.parts.put(key, found)
        return found

    def models(self, check: Check) -> list[LanguageModel]:
        """The models whose score decides a check."""
        free = check.expected in ("generate", "ar")
        return [self.pair.expert] if free else [self.pair.expert, self.pair.amateur]


def held_against(check: Check, prompts: list[Prompt], writer: Writer, config: Config) -> dict:
    """Counts of equal texts, near-ties and differences of one check, as a JSON-able dict."""
    result = asdict(check) | {"title": check.title, "equal": 0, "near_ties": 0, "different": 0, "divergences": []}
    with Bar(len(prompts), check.title, unit="prompts") as bar:
        for index, batch in batches(prompts, PORTION * config.batch):
            expected, found = (writer.kept_texts(name, check, batch, index) for name in (check.expected, check.found))
            for prompt, left, right in zip(batch, expected, found, strict=True):
                seed = config.seed if check.temperature else None
                difference = compare(writer.models(check), check.target, prompt, left, right, seed)
                if difference is None:
                    result["equal"] += 1
                else:
                    result["near_ties" if difference.is_tie else "different"] += 1
                    result["divergences"].append(asdict(difference))
            bar.update(len(batch))
    return result


def batches(prompts: list[Prompt], size: int) -> Iterator[tuple[int, list[Prompt]]]:
    """(index, prompts) of every batch."""
    for start in range(0, len(prompts), size):
        yield start // size, prompts[start : start + size]


@torch.no_grad()
def cache_free(
    models: list[LanguageModel], target: Target, prompt: list[int], stops: tuple[int, ...], max_new_tokens: int
) -> list[int]:
    """Greedy contrastive decoding as plainly as it can be written: whole passes of the stock models, no cache."""
    ids, alpha = list(prompt), target.alpha
    while len(ids) < len(prompt) + max_new_tokens:
        rows = []
        for one in models:
            inputs = torch.tensor([ids], device=one.device)
            logits = one.model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits
            rows.append(logits[0, -1, : one.vocab].float().log_softmax(-1))
        score = (1 + alpha) * rows[0] - alpha * rows[1]
        ids.append(int(score.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@torch.no_grad()
def stock_generate(
    model: LanguageModel, prompts: list[Prompt], stops: tuple[int, ...], max_new_tokens: int
) -> list[list[int]]:
    """Greedy answers by transformers' own generate, left-padded."""
    width = max(len(prompt.ids) for prompt in prompts)
    padding = stops[0]
    ids = torch.tensor([[padding] * (width - len(p.ids)) + p.ids for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=model.device)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stops), pad_token_id=padding
    )
    padded_ids = list(range(model.vocab, model.config.vocab_size))  # ids without a token are never decoded
    if padded_ids:
        greedy.suppress_tokens = padded_ids
    rows = model.model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)[:, width:].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stops), len(row))] for row in rows]


def print_results(results: list[dict]) -> None:
    """The table, then each place where texts part."""
    rows = [[r["title"], r["prompts"], r["equal"], r["near_ties"], r["different"]] for r in results]
    print(tabulate(rows, headers=["check", "texts", "equal", "part at a near-tie", "differ"]))
    for result in results:
        for one in result["divergences"]:
            print(
                f"{result['title']}: {one['prompt_id']} parts at token {one['position']} "
                f"({one['expected']} against {one['found']}), gap of the two best scores {one['gap']:.1e}"
            )
    different = sum(result["different"] for result in results)
    print("every text is the same" if different == 0 else f"{different} texts differ by more than rounding")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
