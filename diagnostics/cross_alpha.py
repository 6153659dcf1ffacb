"""Does a drafter that was trained on the contrast draft better? The matrix of accepted length over train-alpha and
infer-alpha of a matched family of heads, with a verdict per infer-alpha.

    python diagnostics/cross_alpha.py --expert EXPERT --amateur AMATEUR --family runs/cross_alpha \\
        --controls runs/expert_only runs/head/head --prompts held_out.jsonl --decode 50 --output runs/cross_alpha_matrix

For every infer-alpha, vanilla contrastive decoding answers each prompt once, greedily. Every lossless method would emit
the same tokens, so each head's rounds follow from those texts alone (dcd_core/replay.py): no further pass of expert or
amateur. Beside that, the acceptance of sampled first drafts, of all heads at all infer-alphas, over one history that
all share (--history_alpha). A family whose manifest does not match is refused. --decode N decodes the first N prompts
for real, each at every infer-alpha with one head after the other, and in float32 requires texts and rounds equal to the
replay's, up to near-ties.

Writes replays.parquet and metrics.json; prints the matrix, the summary row of [DCD, Tab. 1] and the verdicts. A stopped
run goes on where it was; under the deepspeed launcher the ranks share the prompts.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

import sys
from dataclasses import asdict, dataclass, field

from tabulate import tabulate

from dcd_core.chat import template_arguments
from dcd_core.config import finish_run, git_sha, parse_config, refuse_below, refuse_taken, run_entry, versions
from dcd_core.contrast import Target
from dcd_core.decode import Prompt, Settings
from dcd_core.errors import UserError
from dcd_core.files import write_json_atomic
from dcd_core.processes import WaitFlags, join
from dcd_core.prompts import read_prompts
from dcd_core.replay import replay
from diagnostics.cross_alpha_summary import FAMILY, summarise_replays
from diagnostics.loading import inputs_key, short_name
from diagnostics.members import Member, Place, find_places, load_members, read_amateur
from diagnostics.parts import at_every_alpha, begin
from diagnostics.records import read_records, write_records
from diagnostics.replay_check import check_decoding
from diagnostics.rollouts import RolloutFlags, Rollouts
from diagnostics.shared_history import measure_text
from diagnostics.texts import Text
from diagnostics.wording import percent, points


@dataclass(kw_only=True)
class Config(WaitFlags, RolloutFlags):
    """Settings of the matrix."""

    family: list[str] = field(metadata={"help": "run of train/cross_alpha.py, or several that are one family"})
    prompts: str = field(metadata={"help": "held-out prompts, JSONL {id, messages}"})
    controls: list[str] = field(
        default_factory=list, metadata={"help": "beside it: runs with another --input, or EAGLE3 heads"}
    )
    infer_alphas: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.3, 0.5], metadata={"help": "contrast strengths decoded with"}
    )
    history_alpha: float | None = field(
        default=None, metadata={"help": "whose texts are the shared history (default: the first of --infer_alphas)"}
    )
    gamma: int = field(default=5, metadata={"help": "drafts per round"})
    decode: int = field(default=0, metadata={"help": "so many prompts are also decoded for real"})
    batch: int = field(default=16, metadata={"help": "prompts at a time; finished batches are kept in a stopped run"})
    dataset: str = field(default="", metadata={"help": "name of the prompt set (default: the file's name)"})
    margin: float = field(default=0.01, metadata={"help": "share of L that counts as a gain"})

    def __post_init__(self):
        super().__post_init__()
        if not self.family or not all(self.family):
            raise ValueError("--family needs a run of train/cross_alpha.py, or several")
        for name in ("family", "controls", "infer_alphas"):
            items = getattr(self, name)
            if len(set(items)) < len(items):
                raise ValueError(f"--{name} names one twice: {items}")
        if not self.infer_alphas or min(self.infer_alphas) < 0:
            raise ValueError(f"--infer_alphas must be numbers of 0 or more, got {self.infer_alphas}")
        if self.history_alpha is None:
            self.history_alpha = self.infer_alphas[0]
        if self.history_alpha not in self.infer_alphas:
            raise ValueError(f"--history_alpha {self.history_alpha:g} is none of --infer_alphas {self.infer_alphas}")
        if not self.margin > 0:
            raise ValueError(f"--margin must be above 0, got {self.margin}")
        self.dataset = self.dataset or short_name(self.prompts).removesuffix(".jsonl")
        refuse_below(self, gamma=1, batch=1, max_new_tokens=2, decode=0)


def main(argv: list[str] | None = None) -> int:
    """Roll out, replay every drafter, write the records, print matrix and verdicts; 1 if a replay is not decoding."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    arguments = template_arguments(config.template_args)
    prompts, stops = read_prompts(config.prompts, config.expert, config.read_limit, **arguments)
    places = find_places(config.family, config.controls)
    prompts = config.unread(prompts, [place.path for place in places], config.prompts)
    if config.decode > len(prompts):
        raise UserError(f"--decode {config.decode} asks for more prompts than the {len(prompts)} there are; lower it")
    ranks = join(config.device, config.timeout_minutes)
    pair, members = load_members(config.expert, config.amateur, places, config.dtype, str(ranks.device))
    decoded = {prompt.id: place for place, prompt in enumerate(prompts[: config.decode])}
    parts, folder = begin(config, argv, result_settings(config, places) | {"decoded": list(decoded)}, ranks)
    texts = config.texts(pair, stops)

    def measure(batch: list[Prompt], alpha: float) -> dict:
        return measure_batch(texts, members, batch, alpha, decoded, config)

    pieces = at_every_alpha(prompts, config.infer_alphas, config.batch, parts, "rollouts and replay", measure, ranks)
    if not ranks.first:
        return 0
    checks = [row for piece in pieces for row in piece["decoded"]]
    different = [row for row in checks if row["status"] == "different"]
    if different and config.dtype == "float32":  # rounding explains it in bfloat16 only
        write_json_atomic(folder / "differences.json", {"decoded": different})
        print_checks(checks, config.dtype)
        print(
            f"error: {len(different)} of {len(checks)} answers decoded for real differ from their replay, which no "
            f"rounding explains: a defect of dcd, please report it with {folder / 'differences.json'}",
            file=sys.stderr,
        )
        return 1
    provenance = {"settings": asdict(config), "versions": versions(), "git_sha": git_sha()}
    write_records(folder / "replays.parquet", "replays", columns(pieces, places, config), provenance)
    rows = read_records(folder / "replays.parquet", "replays").rows
    found = summarise_replays(rows, config.gamma, config.margin)
    family = next(place.family for place in places if place.group == FAMILY)
    named = {"pair": pair_name(config), "dataset": config.dataset, "decoded": count_checks(checks)}
    named["trained"] = {name: family.held_fixed[name] for name in ("trained parameters", "head shape", "token budget")}
    finish_run(folder, named | found)
    parts.remove()
    print_matrix(found)
    print_checks(checks, config.dtype)
    return 0


def result_settings(config: Config, places: list[Place]) -> dict:
    """What decides a batch's rows: settings and inputs, not where results go or how they are summed."""
    left_out = (
        "output",
        "timeout_minutes",
        "overwrite",
        "rollouts",
        "limit",
        "skip_trained",
        "margin",
        "device",
        "dataset",
    )
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    paths = [place.path for place in places]
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, *paths)}


def measure_batch(
    texts: Rollouts,
    members: list[Member],
    prompts: list[Prompt],
    alpha: float,
    decoded: dict[str, int],
    config: Config,
) -> dict:
    """Rollouts of some prompts at one infer-alpha, and on each text the rounds of every drafter.

    Returns:
        `replays`: {"prompt_id", "infer_alpha", "drafts": (rounds, accepted, emitted) of each drafter}; `history`: the
        sums of the shared history per infer-alpha and drafter, where this is its alpha; `decoded`: checks against
        decoding of the prompts in `decoded` (id -> which drafter is its turn).
    """
    found = {"replays": [], "history": [], "decoded": []}
    tried = [member for member in members if member.method]
    pair, stops = texts.pair, texts.stops
    features, shared = read_amateur(members), alpha == config.history_alpha
    for prompt, answer in zip(prompts, texts.answers(prompts, alpha), strict=True):
        text = Text.read(pair, prompt, answer, features, amateur=shared)
        rounds = [
            replay(member.head, pair.expert.embedding, member.rollout(text), config.gamma, vocab=pair.expert.vocab)
            for member in members
        ]
        sums = [[len(some), sum(r[1] for r in some), sum(r[2] for r in some)] for some in rounds]
        found["replays"].append({"prompt_id": prompt.id, "infer_alpha": alpha, "drafts": sums})
        if shared:
            measured = measure_text(pair, members, text, config.infer_alphas)
            found["history"].append({"prompt_id": prompt.id, "sums": measured})
        if prompt.id in decoded and tried:
            member = tried[(decoded[prompt.id] + config.infer_alphas.index(alpha)) % len(tried)]
            settings = Settings(Target(alpha=alpha, temperature=0.0), config.max_new_tokens, stops, gamma=config.gamma)
            check = check_decoding(pair, member, prompt, text, rounds[members.index(member)], settings)
            found["decoded"].append({"infer_alpha": alpha} | check)
    return found


def pair_name(config: Config) -> str:
    """Expert / amateur, as the report calls them."""
    return f"{short_name(config.expert)} / {short_name(config.amateur)}"


def columns(pieces: list[dict], places: list[Place], config: Config) -> dict[str, list]:
    """The replays table: rounds and the sums of the shared history, side by side."""
    shared = {row["prompt_id"]: row["sums"] for piece in pieces for row in piece["history"]}
    fixed = {"pair": pair_name(config), "dataset": config.dataset, "history_alpha": config.history_alpha}
    table: dict[str, list] = {}
    for row in (row for piece in pieces for row in piece["replays"]):
        sums = shared[row["prompt_id"]][config.infer_alphas.index(row["infer_alpha"])]
        for place, drafts, history in zip(places, row["drafts"], sums, strict=True):
            who = {"group": place.group, "drafter": place.name, "input": place.input, "seed": place.seed}
            who |= {"kind": "eagle3" if place.input == "expert_only" else "dual_input"}
            who |= {"prompt_id": row["prompt_id"], "infer_alpha": row["infer_alpha"], "train_alpha": place.train_alpha}
            counts = dict(zip(("rounds", "accepted", "emitted"), drafts, strict=True))
            for name, value in (fixed | who | counts | history).items():
                table.setdefault(name, []).append(value)
    return table


def count_checks(checks: list[dict]) -> dict[str, int]:
    """How many prompts were decoded for real, and how many of them were equal to the replay."""
    statuses = [row["status"] for row in checks]
    return {"checked": len(checks)} | {name: statuses.count(name) for name in ("equal", "near-tie", "different")}


def print_matrix(found: dict) -> None:
    """Matrix, summary row, controls and verdicts."""
    headers = ["train-alpha", *(f"infer {infer:g}" for infer in found["infer_alphas"]), "mean, against train 0"]
    gains = {entry["train_alpha"]: entry["gain"] for entry in found["train_rows"]}
    table = []
    for train, lengths in zip(found["train_alphas"], found["lengths"], strict=True):
        gain = gains.get(train)
        table.append([f"{train:g}", *(f"{length:.3f}" for length in lengths), percent(gain, sign=True) if gain else ""])
    for name in dict.fromkeys((entry["group"], entry["train_alpha"]) for entry in found["controls"]):
        own = {e["infer_alpha"]: e for e in found["controls"] if (e["group"], e["train_alpha"]) == name}
        lengths = [f"{own[infer]['length']:.3f}" if infer in own else "" for infer in found["infer_alphas"]]
        note = "" if next(iter(own.values()))["matched"] else ", not matched"
        table.append([f"{name[0]} ({name[1]:g}){note}", *lengths, ""])
    print(f"accepted length L over {found['prompts']} prompts and {len(found['seeds'])} training seeds")
    print(tabulate(table, headers=headers, disable_numparse=True))
    summary = found["summary"]
    print(
        f"best train-alpha (of several, so flattered by chance) {summary['best_train_alpha']:g}: L "
        f"{summary['difference']:+.3f} ({100 * summary['gain']:+.2f}%) against train-alpha 0, which is best at "
        f"{summary['control_best']} of {summary['columns']} infer-alphas"
    )
    cells = [
        [
            f"{cell['train_alpha']:g}",
            f"{cell['infer_alpha']:g}",
            percent(cell["change"], 2, sign=True) if "change" in cell else "",
            percent(cell["change_over_prompts"], 2, sign=True) if "change" in cell else "",
            f"{cell['p_gain']:.4f}" if "change" in cell else "",
            points(cell["acceptance_change"], 2, sign=True),
            cell["verdict"],
            cell["verdict_over_prompts"],
        ]
        for cell in found["cells"]
    ]
    headers = ["train", "infer", "change of L", "over prompts alone", "p of a gain (Holm)", "acceptance, points"]
    headers += ["verdict", "over prompts alone"]
    print(tabulate(cells, headers=headers, disable_numparse=True))
    for entry in found["verdicts"]:
        print(" ".join(entry[name] for name in ("sentence", "sentence_over_prompts") if name in entry))


def print_checks(checks: list[dict], dtype: str) -> None:
    """How decoding compares with the replay."""
    if not checks:
        return
    counts = count_checks(checks)
    required = "" if dtype == "float32" else f" ({dtype}: equality is only required in float32)"
    print(
        f"decoded for real: {counts['checked']} answers, {counts['equal']} equal to the replay round by round, "
        f"{counts['near-tie']} part at a near-tie, {counts['different']} differ{required}"
    )
    for row in checks:
        if row["status"] == "different":
            print(f"  {row['drafter']} at alpha {row['infer_alpha']:g}, {row['prompt']}: gap {row['gap']:.1e}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
