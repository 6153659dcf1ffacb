"""Signal and drafter error at every position of the pair's own text: records, and the headline shares.

    python diagnostics/signal_error.py --expert EXPERT --amateur AMATEUR --head HEAD \\
        --prompts held_out.jsonl --alphas 0.1 0.5 --output runs/signal

For every alpha, vanilla contrastive decoding writes one greedy answer to each prompt. Over that fixed history
expert, amateur and head are run once more, teacher-forced, and every quantity of `diagnostics.records.POSITIONS` is
taken at every position that a drafter would draft (all but the answer's first token, which the prefill gives).

Beside the oracle draft (the head corrected by the true amateur) stand, where they are given, `--direct_head`,
trained on the contrast; `--amateur_head`, which with the head makes the dual draft; and `--stronger`, a full model in
the head's place. Several prompt files are several data sets; several pairs are several runs, which the report pools.

Under a launcher (`deepspeed diagnostics/signal_error.py ...`) the ranks share the prompts out, and the records are
those of one rank. Writes positions.parquet and metrics.json. A stopped run goes on where it was.
"""

import dcd_core.environment  # isort: skip  # noqa: F401  (before torch)

from dataclasses import asdict, dataclass, field

from tabulate import tabulate

from dcd_core.config import finish_run, git_sha, parse_config, refuse_taken, run_entry, versions
from dcd_core.decode import Prompt
from dcd_core.errors import UserError
from dcd_core.processes import Ranks, join
from diagnostics.histories import History, Study, load_study, merged
from diagnostics.loading import inputs_key, short_name
from diagnostics.parts import Parts, at_every_alpha, begin
from diagnostics.position_summary import KINDS, summarise_by_alpha
from diagnostics.records import read_records, write_records
from diagnostics.rollouts import Rollouts
from diagnostics.study_flags import StudyFlags
from diagnostics.wording import points


@dataclass(kw_only=True)
class Config(StudyFlags):
    """Settings of the signal-versus-error study."""

    head: str = field(metadata={"help": "expert-aligned head: EAGLE3, or train-alpha 0 of a family"})
    amateur_head: str = field(default="", metadata={"help": "head aligned with the amateur: adds the dual draft"})
    direct_head: list[str] = field(
        default_factory=list,
        metadata={"help": "head trained on the contrast, one for all alphas or one of each in their order"},
    )
    stronger: str = field(default="", metadata={"help": "full model in the head's place, beside the true amateur"})

    def __post_init__(self):
        super().__post_init__()
        if len(self.direct_head) not in (0, 1, len(self.alphas)):
            raise ValueError(
                f"--direct_head takes one head for all alphas or one of each; got {len(self.direct_head)} heads for "
                f"{len(self.alphas)} alphas"
            )


def main(argv: list[str] | None = None) -> int:
    """Roll out, measure, write the records, print the shares."""
    config = parse_config(Config, argv, description=__doc__)
    refuse_taken(config.output, config.overwrite)
    prompts, stops = config.read_prompts()
    prompts = config.unread_sets(prompts, [config.head, config.amateur_head, *config.direct_head])
    ranks = join(config.device, config.timeout_minutes)
    study = load_study(
        config.expert,
        config.amateur,
        config.head,
        config.dtype,
        str(ranks.device),
        config.amateur_head,
        config.direct_head,
        config.stronger,
    )
    refuse_other_alphas(config, study)
    parts, folder = begin(config, argv, result_settings(config), ranks)
    pieces = measure(study, prompts, stops, config, parts, ranks)
    if not ranks.first:
        return 0
    pair = " / ".join(short_name(name) for name in (config.expert, config.amateur, config.head))
    columns = merged(pieces)
    columns["pair"] = [pair] * len(columns["position"])
    provenance = {"settings": asdict(config), "versions": versions(), "git_sha": git_sha()}
    write_records(folder / "positions.parquet", "positions", columns, provenance)
    rows = read_records(folder / "positions.parquet", "positions").rows
    by_alpha = summarise_by_alpha(rows)
    finish_run(folder, {"pair": pair, "dataset": ", ".join(config.dataset), "by_alpha": by_alpha})
    parts.remove()
    print_summary(by_alpha)
    return 0


def refuse_other_alphas(config: Config, study: Study) -> None:
    """Direct heads stand in the order of the alphas; one for all of them was trained on one of these.

    Raises:
        UserError: a head that was trained for another alpha.
    """
    if len(study.direct) == 1 and study.direct[0].config.train_alpha not in (None, *config.alphas):
        raise UserError(
            f"{config.direct_head[0]} was trained on alpha {study.direct[0].config.train_alpha:g}, which is none of "
            "--alphas; add it, or give a head that was trained on one of them"
        )
    if len(study.direct) < 2:
        return
    for name, head, alpha in zip(config.direct_head, study.direct, config.alphas, strict=True):
        if head.config.train_alpha not in (None, alpha):
            raise UserError(
                f"{name} was trained on alpha {head.config.train_alpha:g}, and stands where --alphas has {alpha:g}; "
                "give the heads of --direct_head in the order of --alphas"
            )


def result_settings(config: Config) -> dict:
    """What decides a batch's rows: settings and inputs, not where results go or how they are summed."""
    kept = {name: value for name, value in asdict(config).items() if name not in KEY_LEAVES_OUT}
    models = (config.expert, config.amateur, config.head, config.amateur_head, *config.direct_head, config.stronger)
    # one direct head for all alphas does not depend on which they are
    return kept | {"inputs": inputs_key(config.prompts, *models)} | alphas_of_heads(config)


KEY_LEAVES_OUT = ("output", "rollouts", "overwrite", "alphas", "limit", "skip_trained", "device", "timeout_minutes")


def alphas_of_heads(config: Config) -> dict:
    """Which alpha each direct head is measured at, where that is a matter."""
    return {"alphas": config.alphas} if len(config.direct_head) > 1 else {}


def measure(
    study: Study,
    prompts: dict[str, list[Prompt]],
    stops: tuple[int, ...],
    config: Config,
    parts: Parts,
    ranks: Ranks,
) -> list[dict[str, list]]:
    """Columns of every batch of prompts of every data set at every alpha."""
    found, texts = [], config.texts(study.pair, stops)
    for dataset, some in prompts.items():

        def one(batch: list[Prompt], alpha: float, dataset=dataset) -> dict[str, list]:
            at = study.at(config.alphas.index(alpha))
            return measure_batch(at, batch, texts, alpha)

        label = "signal and error" if len(prompts) == 1 else f"signal and error, {dataset}"
        pieces = at_every_alpha(some, config.alphas, config.batch, parts, label, one, ranks, dataset)
        found += [piece | {"dataset": [dataset] * len(piece["position"])} for piece in pieces]
    return found


def measure_batch(study: Study, prompts: list[Prompt], texts: Rollouts, alpha: float) -> dict[str, list]:
    """Greedy contrastive rollouts of some prompts, and the quantities at each of their positions, as columns."""
    found = []
    for prompt, answer in zip(prompts, texts.answers(prompts, alpha), strict=True):
        columns = History.read(study, prompt, answer).quantities(alpha)
        count = len(columns["position"])
        columns |= {"prompt_id": [prompt.id] * count, "rollout_alpha": [alpha] * count, "alpha": [alpha] * count}
        found.append(columns)
    return merged(found)


def print_summary(by_alpha: dict[str, dict]) -> None:
    """The headline shares as a table."""
    shown = {
        "signal < 1 nat": "share_signal_below_1",
        "KL(e||p) >= 2 nats": "share_error_above_2",
        "headroom TV(p, pi)": "mean_headroom_tv",
        "flipped choices": "mean_headroom_flip",
        "acceptance of e": "acceptance_expert_aligned",
    }
    for kind, words in KINDS.items():
        shown |= {f"{words} gain, acceptance": f"gain_acceptance_{kind}", f"{words} gain, top-1": f"gain_top1_{kind}"}
    shown = {title: name for title, name in shown.items() if name in by_alpha["pooled"]}
    alphas = list(by_alpha)
    table = [[title, *(points(by_alpha[alpha][name]) for alpha in alphas)] for title, name in shown.items()]
    table.insert(0, ["prompts", *(str(by_alpha[alpha]["prompts"]) for alpha in alphas)])
    table.insert(1, ["positions", *(str(by_alpha[alpha]["positions"]) for alpha in alphas)])
    print("percent of positions, or points; [95% interval over prompts]")
    print(tabulate(table, headers=["alpha", *alphas], disable_numparse=True))


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
