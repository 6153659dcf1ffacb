"""Is it lossless? Every method must write the very text of vanilla contrastive decoding.

    python diagnostics/identity.py --expert EXPERT --amateur AMATEUR --head HEAD \\
        --prompts held_out.jsonl --output runs/identity

Greedy, fp32, in batches:
  * `ar` equals the generate method of stock transformers;
  * `cd` equals a cache-free loop over the two stock models (the first --loop_prompts prompts, at every alpha);
  * every other method equals `cd` at every alpha, `expert_sd` equals `ar`.
Then, at temperature 1 under shared noise, every method equals `cd` again (the first --noise_prompts prompts).

Texts may part only where the two best scores lie closer than 1e-3 nats, which is rounding; each such place is printed
and counted. Any other difference makes the exit code 1. Writes metrics.json, or differences.json if some text differs.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import dataclass, field

from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, parse_config, refuse_below, refuse_taken, run_entry
from dcd_core.files import write_json_atomic
from dcd_core.loading import head_for, load_models
from dcd_core.methods import METHODS, assemble
from dcd_core.models import load_scorer
from dcd_core.prompts import read_prompts
from diagnostics.identity_checks import REFERENCES, Check, Writer, held_against
from diagnostics.loading import inputs_key
from diagnostics.parts import begin


@dataclass
class Config:
    """Settings of the identity check."""

    expert: str = field(metadata={"help": "expert: model folder or hub id"})
    amateur: str = field(metadata={"help": "amateur: model folder or hub id"})
    head: str = field(metadata={"help": "EAGLE3 or dual-input head: folder or hub id"})
    prompts: str = field(metadata={"help": "held-out prompts, JSONL {id, messages}"})
    output: str = field(metadata={"help": "folder for the result"})
    amateur_head: str = field(default="", metadata={"help": "second EAGLE3 head, which imitates the amateur (dual)"})
    lm: str = field(default="", metadata={"help": "small language model that dcd_lm drafts with: folder or hub id"})
    methods: list[str] = field(
        default_factory=lambda: [name for name in METHODS if name not in REFERENCES and METHODS[name].usual],
        metadata={
            "help": "methods to hold against cd (expert_sd against ar); "
            "default: all that need no more than an EAGLE3 head"
        },
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


def main(argv: list[str] | None = None) -> int:
    """Write every text both ways, compare, print the table; 1 if any text differs beyond rounding."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.limit, **arguments)
    pair, head = load_models(config.expert, config.amateur, config.head, "float32", config.device)
    lm, second = load_scorer(config.lm, pair) if config.lm else None, head_for(pair, config.amateur_head)
    for name in config.methods:
        assemble(name, pair, head, lm=lm, amateur_head=second)  # refused here if something is missing
    parts, folder = begin(config, argv, result_settings(config))
    writer = Writer(pair, head, stops, config, parts, lm, second)
    plan = checks(config, len(prompts))
    results = [held_against(check, prompts[: check.prompts], writer) for check in plan]
    different = sum(result["different"] for result in results)
    found = {"checks": results, "passed": different == 0, "prompts": len(prompts)}
    if different:  # a failed check must never look like a finished run
        write_json_atomic(folder / "differences.json", found)
    else:
        finish_run(folder, found)
        parts.remove()
    print_results(results)
    return 0 if different == 0 else 1


def checks(config: Config, prompts: int) -> list[Check]:
    """Everything that has to be equal, in the order in which it is checked."""
    free = [method for method in config.methods if not METHODS[method].contrast]
    contrastive = [method for method in config.methods if METHODS[method].contrast]
    noisy, looped = min(config.noise_prompts, prompts), min(config.loop_prompts, prompts)
    tree = ({"branch": config.branch, "nodes": config.nodes}, "tree") if config.branch > 1 else ()
    plan = [Check("ar", "generate", 0.0, 0.0, prompts)]
    plan += [Check(method, "ar", 0.0, 0.0, prompts, *tree) for method in free]
    plan += [Check("cd", "loop", alpha, 0.0, looped) for alpha in config.alphas]
    plan += [Check(method, "cd", alpha, 0.0, prompts, *tree) for alpha in config.alphas for method in contrastive]
    plan += [Check(method, "ar", 0.0, 1.0, noisy, *tree) for method in free]
    plan += [Check(method, "cd", alpha, 1.0, noisy, *tree) for alpha in config.alphas for method in contrastive]
    return [check for check in plan if check.prompts > 0]


def result_settings(config: Config) -> dict:
    """What decides a text; a stopped check goes on only under the same."""
    names = ("max_new_tokens", "batch", "gamma", "branch", "nodes", "seed", "template_args")
    kept = {name: getattr(config, name) for name in names}
    models = (config.expert, config.amateur, config.head, config.lm, config.amateur_head)
    return kept | {"inputs": inputs_key(config.prompts, *models)}


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
