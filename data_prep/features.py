"""Write what training reads of the frozen models to disk, once: their features and final states at every token.

    python data_prep/features.py --tokens train.parquet --expert EXPERT --out runs/features
    python data_prep/features.py --tokens train.parquet --expert EXPERT --amateur AMATEUR --out runs/features
    python data_prep/features.py --tokens train.parquet --expert EXPERT --out runs/features --dry_run true

Every trainer of heads takes the folder as --features: then a second epoch, a further head or the closed-form start
costs no pass of the expert. What is stored is what the models give in --dtype, nothing is rounded. A killed run resumes
at its first missing shard; several processes may write one store, each with its --part.
"""

import dcd_core.environment  # noqa: F401  isort: skip  (before torch)

from dataclasses import dataclass, field
from pathlib import Path

import torch

from data_prep.feature_files import RECORD, ROLES, TEXTS, FeatureStore, plan_shards, shard_path, write_shard
from data_prep.token_files import Sample, read_tokens, write_tokens
from dcd_core.config import parse_config, refuse_below, run_entry
from dcd_core.errors import UserError
from dcd_core.files import check_output_folder, content_hash, file_hash, remove, write_json_atomic
from dcd_core.locks import held
from dcd_core.model_identity import model_identity
from dcd_core.models import LanguageModel, load_config, load_pair
from dcd_core.progress import Bar

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass
class Config:
    """Settings of a store."""

    tokens: list[str] = field(metadata={"help": "token files of data_prep/tokenise.py"})
    expert: str = field(metadata={"help": "expert: hub id or folder"})
    out: str = field(default="", metadata={"help": "folder to write"})
    amateur: str = field(default="", metadata={"help": "amateur, where heads read or imitate it: hub id or folder"})
    dtype: str = field(default="bfloat16", metadata={"help": "of the models and of what is stored"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "the expert's taps (default: 2, n//2, n-3)"}
    )
    amateur_feature_layers: list[int] = field(default_factory=list, metadata={"help": "the amateur's taps"})
    shard_tokens: int = field(default=32768, metadata={"help": "tokens of one file; what a kill can lose"})
    part: str = field(default="0/1", metadata={"help": "i/n: write every n-th shard from shard i on"})
    dry_run: bool = field(default=False, metadata={"help": "print the store's size; load no weights"})
    overwrite: bool = field(default=False, metadata={"help": "replace a store that was made otherwise"})

    def __post_init__(self):
        refuse_below(self, shard_tokens=1)
        if self.dtype not in BYTES:
            raise ValueError(f"--dtype {self.dtype} is not one of {', '.join(BYTES)}")
        if not self.tokens or not (self.out or self.dry_run):
            raise ValueError("--tokens (token files) and --out (a folder) are both needed")
        number, _, of = self.part.partition("/")
        if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise ValueError(f"--part takes i/n with i from 0 to n-1, such as 0/4, got {self.part}")


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    texts = read_tokens(config.tokens)
    if config.dry_run:
        print(describe(config, texts))
        return 0
    folder = check_output_folder(config.out)
    pair = load_pair(
        config.expert,
        config.amateur or None,
        config.dtype,
        config.device,
        tuple(config.feature_layers) or None,
        tuple(config.amateur_feature_layers) or None,
    )
    models = [pair.expert, *filter(None, [pair.amateur])]
    made = made_of(config, texts, models)
    with held(folder / f"part-{config.part.replace('/', '-of-')}"):
        open_store(folder, texts, made, config.overwrite)
        write_missing(folder, texts, models, config)
    store = FeatureStore(folder)
    size = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    tokens = sum(len(text.input_ids) for text in texts)
    left = f"; {len(store.missing)} shards are other parts' and still missing" if store.missing else ""
    print(f"{len(texts)} texts, {tokens} tokens, {size / 2**20:.1f} MiB -> {folder}{left}")
    return 0


def made_of(config: Config, texts: list[Sample], models: list[LanguageModel]) -> dict:
    """What decides a store's content."""
    names = zip(("expert", "amateur"), models, strict=False)
    return {
        "texts": content_hash([file_hash(path) for path in config.tokens]),
        "dtype": config.dtype,
        "shard_tokens": config.shard_tokens,
        **{
            role: {"weights": model_identity(model.model), "taps": list(model.feature_layers or ())}
            for role, model in names
        },
    }


def open_store(folder: Path, texts: list[Sample], made: dict, overwrite: bool) -> None:
    """Make the folder this store's. Raises UserError for one that was made otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RECORD).exists():
        there = FeatureStore(folder).record["made"] if not overwrite else None
        if there == made:
            return
        if not overwrite:
            different = ", ".join(name for name in {**there, **made} if there.get(name) != made.get(name))
            raise UserError(f"{folder} holds a store made otherwise ({different}): give --overwrite or another --out")
        remove(folder / RECORD)
        for path in folder.glob("shard-*.safetensors"):
            remove(path)
    write_tokens(folder / TEXTS, texts, {})
    write_json_atomic(folder / RECORD, {"made": made})


@torch.no_grad()
def write_missing(folder: Path, texts: list[Sample], models: list[LanguageModel], config: Config) -> None:
    """The shards of this part that are not there yet.

    Texts go through the models one at a time, so that what is stored does not depend on what lies beside a text.
    """
    first, of = map(int, config.part.split("/"))
    shards = list(enumerate(plan_shards([len(text.input_ids) for text in texts], config.shard_tokens)))[first::of]
    todo = [(number, chosen) for number, chosen in shards if not shard_path(folder, number).exists()]
    done = sum(len(chosen) for _, chosen in shards) - sum(len(chosen) for _, chosen in todo)
    with Bar(done + sum(len(chosen) for _, chosen in todo), "features", "texts", done) as bar:
        for number, chosen in todo:
            parts = []
            for text in chosen:
                parts.append(passes(texts[text], models))
                bar.update(1)
            write_shard(shard_path(folder, number), parts)


def passes(text: Sample, models: list[LanguageModel]) -> dict[str, torch.Tensor]:
    """What is stored of one text. Raises UserError for NaN or inf."""
    found = {}
    for role, model in zip(ROLES, models, strict=False):
        ids = torch.from_numpy(text.input_ids.astype("int64"))[None].to(model.device)
        output = model.forward_full(ids, features=model.feature_layers is not None, logits=False)
        found[f"{role}hidden"] = output.hidden[0]
        if output.features is not None:
            found[f"{role}features"] = output.features[0]
    for name, values in found.items():
        if not bool(torch.isfinite(values).all()):
            raise UserError(f"{name} of text '{text.id}' hold NaN or inf: take it out, or give --dtype float32")
    return found


def describe(config: Config, texts: list[Sample]) -> str:
    """Bytes a token, and in all."""
    widths = [load_config(name).hidden_size for name in (config.expert, config.amateur) if name]
    each, tokens = 4 * sum(widths) * BYTES[config.dtype], sum(len(text.input_ids) for text in texts)
    return f"{len(texts)} texts, {tokens} tokens of {each / 1024:.1f} KiB: {each * tokens / 2**30:.2f} GiB"


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
