"""Does recombining two light drafters pay? A drafter e aligned with the expert against e and f, one for each model.

    python diagnostics/dual_drafter.py --expert EXPERT --amateur AMATEUR --family runs/dual_drafter \\
        --prompts held_out.jsonl --alphas 0.1 0.5 --output runs/dual_study

`--family` is a run of train/dual_drafter.py (all its seeds); or give `--heads e ...` and `--amateur_heads f ...`. For
every alpha, vanilla contrastive decoding answers each prompt once, greedily. Over these texts every quantity of
`diagnostics.records.POSITIONS` is taken (divergence from the target, top-1 matches, where the reconstruction is closer,
and the variances that decide it), and accepted length is replayed for e, for the dual draft, and for its oracle
variants: e with the true amateur, and the true expert with f. Two drafters take twice the time, so e is also measured
at twice the draft length.

Writes positions.parquet, dual_replays.parquet and metrics.json; prints [DCD, Tab. 6] for this pair. A stopped run goes
on where it was; under the deepspeed launcher the ranks share the prompts.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import asdict, dataclass, field, replace

from tabulate import tabulate

from dcd_core.config import finish_run, git_sha, parse_config, refuse_below, refuse_taken, run_entry, versions
from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.heads.checkpoint import load_head_config
from dcd_core.heads.family import Family
from dcd_core.loading import head_for
from dcd_core.processes import Ranks, join
from diagnostics.dual_replay import replay_all
from diagnostics.dual_summary import COLUMNS, summarise_dual, table6
from diagnostics.histories import History, Study, load_tapped, merged, refuse_roles
from diagnostics.loading import inputs_key, short_name
from diagnostics.parts import Parts, at_every_alpha, begin
from diagnostics.records import read_records, write_records
from diagnostics.rollouts import Rollouts
from diagnostics.study_flags import StudyFlags
from diagnostics.wording import percent, plain


@dataclass(kw_only=True)
class Config(StudyFlags):
    """Settings of the dual-drafter study."""

    family: str = field(default="", metadata={"help": "run of train/dual_drafter.py: its heads, by seed"})
    heads: list[str] = field(default_factory=list, metadata={"help": "heads aligned with the expert, one a seed"})
    amateur_heads: list[str] = field(
        default_factory=list, metadata={"help": "heads aligned with the amateur, in the order of --heads"}
    )
    alphas: list[float] = field(default_factory=lambda: [0.1, 0.5], metadata={"help": "contrast strengths"})
    gamma: int = field(default=5, metadata={"help": "drafts per round"})

    def __post_init__(self):
        super().__post_init__()
        refuse_below(self, gamma=1)
        if bool(self.family) == bool(self.heads or self.amateur_heads):
            raise ValueError("give either --family, or --heads and --amateur_heads")
        if len(self.heads) != len(self.amateur_heads):
            raise ValueError("--amateur_heads must name one head for each of --heads")
        if len(set(self.heads)) < len(self.heads) or len(set(self.amateur_heads)) < len(self.amateur_heads):
            raise ValueError("--heads and --amateur_heads must not name a head twice")


def main(argv: list[str] | None = None) -> int:
    """Roll out, measure and replay, write the records, print the table."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    prompts, stops = config.read_prompts()
    members = find_members(config)
    prompts = config.unread_sets(prompts, [path for _, *paths in members for path in paths])
    ranks = join(config.device, config.timeout_minutes)
    studies = load_studies(config, members, str(ranks.device))
    parts, folder = begin(config, argv, result_settings(config, members), ranks)
    pieces = measure(studies, prompts, stops, config, parts, ranks)
    if not ranks.first:
        return 0
    provenance = {"settings": asdict(config), "versions": versions(), "git_sha": git_sha()}
    tables = {}
    for kind in ("positions", "dual_replays"):
        columns = merged([piece[kind] for piece in pieces])
        write_records(folder / f"{kind}.parquet", kind, columns, provenance)
        tables[kind] = read_records(folder / f"{kind}.parquet", kind).rows
    found = summarise_dual(tables["positions"], tables["dual_replays"], config.gamma)
    names = {"pair": f"{short_name(config.expert)} / {short_name(config.amateur)}", "seeds": len(members)}
    finish_run(folder, names | {"dataset": ", ".join(config.dataset), "gamma": config.gamma, "dual_drafter": found})
    parts.remove()
    print_table(found)
    return 0


def find_members(config: Config) -> list[tuple[str, str, str]]:
    """(name, e, f) of every seed.

    Raises:
        UserError: a family whose manifest does not match, or a head in the wrong place.
    """
    if config.family:
        family = Family.read(config.family, kind="dual_drafter")
        return [
            (f"seed {seed}", str(family.member(0.0, seed).path), str(family.member(None, seed).path))
            for seed in family.seeds
        ]
    pairs = list(zip(config.heads, config.amateur_heads, strict=True))
    names = [f"{short_name(one)} + {short_name(two)}" for one, two in pairs]
    if len(set(names)) < len(names):  # the records tell the pairs apart by name
        raise UserError(f"two pairs of heads have the same name: {', '.join(names)}; rename a folder")
    return [(name, *pair) for name, pair in zip(names, pairs, strict=True)]


def load_studies(config: Config, members: list[tuple[str, str, str]], device: str) -> dict[str, Study]:
    """The two heads of every seed over one loaded pair, by name."""
    shapes = {path: load_head_config(path) for _, *paths in members for path in paths}
    for _, head, amateur_head in members:
        refuse_roles(shapes, head, amateur_head, ())
    pair = load_tapped(config.expert, config.amateur, shapes, config.dtype, device)
    if config.family:
        family = Family.read(config.family, kind="dual_drafter")
        family.refuse_other_models(pair.expert.model, pair.amateur.model)
    return {name: Study(pair, head_for(pair, one), head_for(pair, two)) for name, one, two in members}


def result_settings(config: Config, members: list[tuple[str, str, str]]) -> dict:
    """What decides a batch's rows: settings and inputs, not where results go or how they are summed."""
    left_out = ("output", "overwrite", "rollouts", "alphas", "limit", "skip_trained", "device", "timeout_minutes")
    kept = {name: value for name, value in asdict(config).items() if name not in left_out}
    heads = [path for _, *paths in members for path in paths]
    return kept | {"inputs": inputs_key(config.prompts, config.expert, config.amateur, *heads)}


def measure(
    studies: dict[str, Study],
    prompts: dict[str, list[Prompt]],
    stops: tuple[int, ...],
    config: Config,
    parts: Parts,
    ranks: Ranks,
) -> list[dict]:
    """Both tables' columns of every batch of prompts of every data set at every alpha."""
    found, texts = [], config.texts(next(iter(studies.values())).pair, stops)
    for dataset, some in prompts.items():
        label = "dual drafter" if len(prompts) == 1 else f"dual drafter, {dataset}"

        def one(batch: list[Prompt], alpha: float) -> dict:
            return measure_batch(studies, batch, texts, alpha, config)

        pieces = at_every_alpha(some, config.alphas, config.batch, parts, label, one, ranks, dataset)
        for piece in pieces:
            for columns in piece.values():
                columns["dataset"] = [dataset] * len(columns["prompt_id"])
        found += pieces
    return found


def measure_batch(
    studies: dict[str, Study], prompts: list[Prompt], texts: Rollouts, alpha: float, config: Config
) -> dict:
    """Positions and replays of every pair of heads on the same rollouts; the models run once."""
    positions, replays = [], []
    first = next(iter(studies.values()))
    for prompt, answer in zip(prompts, texts.answers(prompts, alpha), strict=True):
        history = History.read(first, prompt, answer)
        for name, study in studies.items():
            own = replace(history, study=study)
            names = f"{short_name(config.expert)} / {short_name(config.amateur)} / {name}"
            columns = own.quantities(alpha)
            count = len(columns["position"])
            fixed = {"pair": names, "prompt_id": prompt.id, "rollout_alpha": alpha, "alpha": alpha}
            positions.append(columns | {key: [value] * count for key, value in fixed.items()})
            del fixed["rollout_alpha"]
            replays += [fixed | row for row in replay_all(own, alpha, config.gamma)]
    table = {name: [row[name] for row in replays] for name in replays[0]}
    return {"positions": merged(positions), "dual_replays": table}


def print_table(found: list[dict]) -> None:
    """Table 6 of this pair, and the variance rule."""
    table = [cells for entry in found for cells in table6(entry).values()]
    print(tabulate(table, headers=COLUMNS, disable_numparse=True))
    for entry in found:
        rule = entry.get("rule")
        words = f"alpha {entry['alpha']:g}, {entry['dataset']}: the reconstruction is closer than e at "
        words += f"{percent(entry['share_closer'])} of positions"
        if rule:
            words += f"; the variance rule holds at {percent(rule['share'])}, e's and f's errors as they are"
        print(words)
        time = entry["equal_time"]
        print(f"  at equal drafting time: L {plain(time['length'], 3)} for e, dual minus e {plain(time['change'], 3)}")
        if "relative_change" in entry:
            change = percent(entry["relative_change"], 1, sign=True)
            print(f"  at equal draft length the dual drafter changes L by {change}: {entry['verdict']}")


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
