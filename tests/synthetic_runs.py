"""Folders of finished runs of every kind that the report knows, with made-up records: no model is involved."""

import json

import numpy as np
import synthetic_records

from diagnostics.records import write_records

LATENCY = {"expert": {"1": 38.0, "6": 38.0}, "amateur": {"1": 22.0, "6": 22.0}, "head": {"1": 3.0, "6": 3.0}}
HISTORY = [
    {"step": 10, "loss": 4.0, "accuracy/0": 0.3, "accuracy/1": 0.2, "lr": 1e-4},
    {
        "step": 20,
        "loss": 3.0,
        "accuracy/0": 0.4,
        "accuracy/1": 0.3,
        "lr": 1e-4,
        "eval_loss": 3.1,
        "eval_accepted_length": 1.2,
    },
]


def provenance(**settings):
    return {"settings": settings, "versions": {"python": "3"}, "git_sha": "0123abc"}


def write_metrics(folder, metrics):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "config.yaml").write_text(f"marker: settings-of-{folder.name}\n")
    (folder / "command.txt").write_text(f"made {folder.name} <with> & without\n")


def signal_run(folder, columns=None):
    columns = columns or synthetic_records.positions(prompts=12, length=30)
    write_records(folder / "positions.parquet", "positions", columns, provenance(dtype="float32"))
    write_metrics(folder, {"pair": "big / small / head", "dataset": "held-out"})


def benchmark_run(folder, latency=LATENCY, agreement=(), names=None):
    """`names`: what to call some of the methods instead."""
    columns = synthetic_records.rounds(prompts=8, repeats=1)
    columns["method"] = [(names or {}).get(method, method) for method in columns["method"]]
    settings = provenance(gamma=5, temperature=0.0, max_new_tokens=64, repeats=1, dtype="bfloat16")
    write_records(folder / "rounds.parquet", "rounds", columns, settings)
    write_metrics(
        folder,
        {"pair": "big / small / head", "dataset": "d", "latency_ms": latency, "agreement": list(agreement)},
    )


def head_run(folder, tokens=60000):
    last = {"loss": 3.1, "accuracy/0": 0.41, "accuracy/1": 0.33, "accepted_length": 1.2}
    write_metrics(
        folder, {"steps": 20, "texts": 5, "tokens": tokens, "answer_tokens": 50000, "history": HISTORY, "eval": last}
    )


def family_run(folder, alphas=(0, 0.3), seeds=(0, 1), evaluated=True):
    members = {}
    for alpha in alphas:
        for seed in seeds:
            history = [
                {"step": step, "loss": 5 - alpha - step / 10 + seed, "accuracy/0": step / 100} for step in (10, 20)
            ]
            last = {"loss": 3.1, "accuracy/0": 0.2 + alpha + seed / 100, "accepted_length": 0.5 + seed / 8}
            found = {"steps": 20, "history": history, "train": history[-1], "eval": last if evaluated else {}}
            members[f"alpha_{alpha:g}_seed_{seed}"] = found
    write_metrics(folder, {"texts": 5, "answer_tokens": 50000, "members": members})


def amateur_run(folder):
    held_out = {"kl": 1.064, "top1_agreement": 0.587, "amateur_perplexity": 9.5}
    times = {"expert_ms": 40.0, "amateur_ms": 24.0, "latency_ratio": 0.6}
    history = [{"step": 10, "loss": 2.0, "accuracy/0": 0.5}]
    metrics = {"steps": 10, "history": history, "held_out": held_out, "latency": times, "layers": [0, 1]}
    write_metrics(folder, metrics)


def identity_run(folder):
    check = {"title": "scd = cd, alpha 0.1", "prompts": 100, "equal": 99, "near_ties": 1, "different": 0}
    write_metrics(folder, {"checks": [check], "passed": True})


def trained(blocks=1, intermediate=1536, tokens=100_059):
    """What a matrix says of its family's heads."""
    shape = {"layers": blocks, "intermediate": intermediate}
    return {"head shape": shape, "trained parameters": 10_800_000 * blocks, "token budget": {"answer tokens": tokens}}


def matrix_run(folder, decoded=None, heads=None, **options):
    columns = synthetic_records.replays(**({"prompts": 60} | options))
    write_records(folder / "replays.parquet", "replays", columns, provenance(gamma=5, margin=0.01, max_new_tokens=64))
    write_metrics(
        folder, {"pair": "big / small", "decoded": decoded or {"checked": 0}} | ({"trained": heads} if heads else {})
    )


def dual_tables(dual: float, prompts: int = 120, seeds: int = 1) -> tuple[dict, dict]:
    """Positions and replays of so many pairs of heads."""
    found = []
    for seed in range(seeds):
        columns = synthetic_records.with_drafts(synthetic_records.positions(prompts=prompts, length=6), seed=seed)
        columns["pair"] = np.full(len(columns["signal"]), f"big / small / seed {seed}")
        found.append((columns, synthetic_records.dual_replays(columns, dual=dual, seed=seed + 5)))
    positions, replays = zip(*found, strict=True)
    return (
        {name: np.concatenate([part[name] for part in positions]) for name in positions[0]},
        {name: [value for part in replays for value in part[name]] for name in replays[0]},
    )


def dual_run(folder, dual: float = -0.08, **more):
    positions, replays = dual_tables(dual, **more)
    write_records(folder / "positions.parquet", "positions", positions, provenance(gamma=5))
    write_records(folder / "dual_replays.parquet", "dual_replays", replays, provenance(gamma=5))
    write_metrics(folder, {"pair": "big / small"})


def runs_of_every_kind(folder):
    """One of each, two matrices, as wide as they come: every kind of draft, two data sets, long names of methods."""
    matrix_run(folder / "matrix", {"checked": 40, "equal": 39, "near-tie": 1, "different": 0}, trained(), prompts=40)
    deep = {"heads": trained(2, 3072), "prompts": 8, "seeds": (0,), "infer_alphas": (0.0, 0.3), "official": False}
    matrix_run(folder / "matrix_of_deep_heads", **deep)
    dual_run(folder / "dual", prompts=40)
    columns = synthetic_records.with_drafts(synthetic_records.positions(prompts=12, length=30))
    columns["dataset"] = np.where(np.arange(len(columns["signal"])) % 60 < 30, "held-out", "facts")
    signal_run(folder / "signal", columns)
    forms = {"dcd_ngram": "dcd_hybrid@5x4:20+deferred", "dcd_eagle3": "dcd_eagle3@12x8:40+lazy"}
    benchmark_run(folder / "benchmark", names=forms)
    identity_run(folder / "identity")
    family_run(folder / "family")
    head_run(folder / "head")
    amateur_run(folder / "amateur")
