"""Typed tables on disk: one parquet file per table, with units, provenance and a content hash.

`ROUNDS` holds one row per speculative round (counts and seconds), `POSITIONS` one row per teacher-forced position (nats
and probabilities), `REPLAYS` one row per prompt and drafter of a cross-alpha matrix (counts and sums), `DUAL_REPLAYS`
one per prompt and kind of draft of a dual-drafter study (counts). Every reader checks names, types, missing values and
finiteness, so whatever draws or sums afterwards need not. No torch here: the report is built on machines without it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dcd_core.errors import UserError
from dcd_core.files import atomic_path

PROVENANCE_KEY = b"provenance"


@dataclass(frozen=True)
class Column:
    """One column: its arrow type, unit, meaning, and the closed range its values must lie in.

    `optional` columns are null where the quantity does not exist (no second drafter, say); all others may not be.
    """

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    optional: bool = False


def _text(name: str, meaning: str) -> Column:
    return Column(name, pa.string(), "", meaning)


def _count(name: str, meaning: str, low: int = 0) -> Column:
    return Column(name, pa.int64(), "count", meaning, low=low)


def _seconds(name: str, meaning: str) -> Column:
    return Column(name, pa.float64(), "s", meaning, low=0.0)


def _nats(name: str, meaning: str, low: float | None = -1e-4, optional: bool = False) -> Column:
    return Column(name, pa.float64(), "nats", meaning, low=low, optional=optional)


def _mass(name: str, meaning: str, low: float = -1e-4, optional: bool = False) -> Column:
    return Column(name, pa.float64(), "probability", meaning, low=low, high=1 + 1e-4, optional=optional)


def _flag(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, pa.bool_(), "", meaning, optional=optional)


def _sum(name: str, meaning: str) -> Column:
    return Column(name, pa.float64(), "positions", f"sum over positions {meaning}", low=-1e-3)


def _moment(name: str, meaning: str, low: float | None = None) -> Column:
    return Column(name, pa.float64(), "nats²", meaning, low=low, optional=True)


def _against_target(name: str, draft: str, optional: bool = True) -> tuple[Column, ...]:
    """How near one kind of draft is to the target: divergence, distance, and whether both choose the same token."""
    return (
        _nats(f"{name}_kl", f"KL({draft}||pi)", optional=optional),
        _mass(f"{name}_tv", f"TV({draft}, pi)", optional=optional),
        _flag(f"{name}_top1", f"argmax {draft} == argmax pi", optional=optional),
    )


ROUNDS = (
    _text("run", "which run of the method: contrast strength and repeat, e.g. 'alpha=0.1 repeat=0'"),
    _text("method", "name in dcd_core.methods.METHODS"),
    _text("prompt_id", "id of the prompt"),
    _count("sample", "which sampled answer to the prompt"),
    _count("round", "round within the answer, 0 first; the token that prefill gives is no round"),
    _count("drafted", "draft tokens proposed"),
    _count("accepted", "draft tokens accepted"),
    _count("emitted", "tokens emitted: the accepted drafts and the verifier's own token"),
    _seconds("draft_s", "time drafting"),
    _seconds("expert_s", "time in the expert's pass"),
    _seconds("amateur_s", "time in the amateur's pass"),
    _seconds("rest_s", "everything else in the round"),
    _count("expert_passes", "passes of the expert: more than one where the amateur judges whole blocks", low=1),
    _count("amateur_passes", "passes of the amateur: 0 where it was not asked, more than one where it drafts"),
)

# Symbols: p expert, q amateur, pi the contrastive target, e first-step draft of the expert-aligned head, f that of a
# head aligned with the amateur, c that of a head trained on the contrast, r a full model in place of e. [a, b] is the
# contrast of two rows, ~ a^(1+alpha) b^(-alpha): o = [e, q] is the oracle draft, [e, f] the dual one.
# s = log p/q, u = log e/p, v = log f/q; Var and Cov are taken under pi on the draft vocabulary.
POSITIONS = (
    _text("pair", "expert / amateur / drafter"),
    _text("dataset", "name of the prompt set"),
    _text("prompt_id", "id of the prompt"),
    _count("position", "answer tokens before this one"),
    Column("rollout_alpha", pa.float64(), "", "contrast strength that wrote the history", low=0.0),
    Column("alpha", pa.float64(), "", "contrast strength of the target measured here", low=0.0),
    _nats("signal", "|log p(x*) - log q(x*)|, x* = argmax pi [DCD, sec. 4]", low=0.0),
    _nats("signal_applied", "alpha * signal", low=0.0),
    _nats("signal_max", "largest |log p/q| among {p >= .1 max p}", low=0.0),
    _nats("signal_std", "standard deviation of log p/q under p", low=0.0),
    _nats("signal_kl", "KL(p||pi)"),
    _mass("headroom_tv", "TV(p, pi)"),
    _mass("headroom_greedy", "max pi - pi(argmax p)"),
    _flag("headroom_flip", "argmax p != argmax pi"),
    _nats("error_reverse", "KL(e||p) [DCD, sec. 4]"),
    _nats("error_forward", "KL(p||e), p renormalised on the draft vocabulary"),
    _mass("lost_mass", "mass of p outside the draft vocabulary"),
    _mass("error_tv", "TV(e, p)"),
    _nats("target_kl", "KL(e||pi) [DCD, Tab. 6]"),
    _mass("target_tv", "TV(e, pi)"),
    _flag("target_top1", "argmax e == argmax pi [DCD, Tab. 6]"),
    _nats("amateur_error", "KL(f||q), f a drafter aligned with the amateur [DCD, Fig. 6]", optional=True),
    _nats("alignment_gap", "sum (e - q) log p/q [DCD, Def. B.2]", low=None),
    _mass("tail_mass", "pi's mass minus p's mass outside {p >= .1 max p}", low=-1.0),
    *_against_target("oracle", "o", optional=False),
    *_against_target("dual", "[e, f]"),
    _flag("dual_closer", "KL([e, f]||pi) < KL(e||pi) [DCD, sec. 4.3]", optional=True),
    *_against_target("exact_expert", "[p, f]"),
    *_against_target("direct", "c"),
    _nats("stronger_error", "KL(r||p)", optional=True),
    *_against_target("stronger_plain", "r"),
    *_against_target("stronger", "[r, q]"),
    _moment("var_signal", "Var(s)", low=0.0),
    _moment("var_error", "Var(u)", low=0.0),
    _moment("var_amateur_error", "Var(v)", low=0.0),
    _moment("cov_signal_error", "Cov(s, u)"),
    _moment("cov_errors", "Cov(u, v)"),
    _moment(
        "rule_left", "Var(s) - 2/alpha Cov(s, u): the dual draft is nearer to pi than e where it is the larger side"
    ),
    _moment("rule_right", "(1 + 2/alpha) Var(u) + Var(v) - 2 (1 + 1/alpha) Cov(u, v)"),
)

# One row per prompt, infer-alpha and drafter. Rounds are replayed on infer-alpha's own rollout at T = 0; the sums over
# positions are teacher-forced over one history that all drafters and infer-alphas share.
REPLAYS = (
    _text("pair", "expert / amateur"),
    _text("dataset", "name of the prompt set"),
    _text("prompt_id", "id of the prompt"),
    Column("infer_alpha", pa.float64(), "", "contrast strength of the target drafted for", low=0.0),
    _text("group", "'family' for the matched family, else the name of a control"),
    _text("drafter", "name of the drafter within its group"),
    _text("kind", "what drafts: 'eagle3' or 'dual_input'"),
    _text("input", "what it reads beside the expert's features, see dcd_core.heads.family.INPUTS"),
    Column("train_alpha", pa.float64(), "", "contrast strength of its training target", low=0.0),
    _count("seed", "training seed"),
    _count("rounds", "rounds of the replay"),
    _count("accepted", "drafts accepted in them"),
    _count("emitted", "tokens emitted in them"),
    Column("history_alpha", pa.float64(), "", "contrast strength that wrote the shared history", low=0.0),
    _count("positions", "positions of the shared history that a drafter would draft"),
    _sum("acceptance", "of 1 - TV(e, pi), e the drafter's first-step draft"),
    _sum("top1", "of [argmax e == argmax pi]"),
    _sum("headroom_tv", "of TV(p, pi): the same for every drafter"),
    _sum("headroom_flip", "of [argmax p != argmax pi]: the same for every drafter"),
)

# One row per prompt, contrast strength and kind of draft, replayed on the strength's own rollout at T = 0. Kinds as in
# POSITIONS: the expert-aligned draft e is 'target', then 'dual', 'oracle' and 'exact_expert'.
DUAL_REPLAYS = (
    _text("pair", "expert / amateur / drafter, as in the positions of the same run"),
    _text("dataset", "name of the prompt set"),
    _text("prompt_id", "id of the prompt"),
    Column("alpha", pa.float64(), "", "contrast strength of rollout and target", low=0.0),
    _text("draft", "'target' (e), 'dual' ([e, f]), 'oracle' ([e, q]) or 'exact_expert' ([p, f])"),
    _count("gamma", "drafts per round", low=1),
    _count("rounds", "rounds of the replay"),
    _count("accepted", "drafts accepted in them"),
    _count("emitted", "tokens emitted in them"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "rounds": ROUNDS,
    "positions": POSITIONS,
    "replays": REPLAYS,
    "dual_replays": DUAL_REPLAYS,
}


@dataclass(frozen=True)
class Records:
    """One table as read: the rows, and where they come from (settings, versions, git sha, content hash)."""

    kind: str
    rows: pd.DataFrame
    provenance: dict


def schema(kind: str) -> pa.Schema:
    """The arrow schema of a table (a key of TABLES), units and meanings as field metadata."""
    fields = [
        pa.field(c.name, c.type, nullable=c.optional, metadata={"unit": c.unit, "meaning": c.meaning})
        for c in _columns(kind)
    ]
    return pa.schema(fields)


def write_records(path: Path | str, kind: str, columns: Mapping, provenance: Mapping) -> str:
    """Write one table atomically and return its content hash.

    `columns` maps every column name to its values; optional columns may be left out (written as nulls).
    `provenance` is any JSON-able mapping (settings, versions, git sha); kind and content hash are added.
    Raises UserError naming file and column for a missing or unknown column, a null, a non-finite or impossible
    value, or an empty table: a bad table is never written.
    """
    path = Path(path)
    expected = schema(kind)
    unknown = sorted(set(columns) - set(expected.names))
    if unknown:
        raise UserError(f"{path}: a {kind} table has no column '{unknown[0]}'; it has {', '.join(expected.names)}")
    rows = max((len(values) for values in columns.values()), default=0)
    arrays = []
    for column in _columns(kind):
        if column.name not in columns and not column.optional:
            raise UserError(f"{path}: column '{column.name}' of a {kind} table is missing")
        values = columns.get(column.name, [None] * rows)
        if len(values) != rows:
            raise UserError(f"{path}: column '{column.name}' has {len(values)} values, another has {rows}")
        arrays.append(_array(values, column, path))
    table = pa.Table.from_arrays(arrays, schema=expected)
    _check(table, kind, path)
    full = dict(provenance) | {"kind": kind, "content_hash": content_hash(table)}
    text = json.dumps(full, sort_keys=True, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(table.replace_schema_metadata({PROVENANCE_KEY: text.encode()}), temporary)
    return full["content_hash"]


def read_records(path: Path | str, kind: str) -> Records:
    """Read one table and check it whole: names, types, nulls, finiteness, ranges and the content hash.

    Optional columns that an older table does not have are there as nulls.
    Raises UserError naming file and column.
    """
    path, expected = Path(path), schema(kind)
    if not path.is_file():
        raise UserError(f"{path}: no such file; records of kind '{kind}' were expected there")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as problem:
        raise UserError(f"{path}: not a readable parquet file ({str(problem).splitlines()[0]})") from problem
    raw = (table.schema.metadata or {}).get(PROVENANCE_KEY)
    if raw is None:
        raise UserError(f"{path}: no provenance in the file, so it was not written by this project's diagnostics")
    provenance = json.loads(raw)
    if provenance.get("kind") != kind:
        raise UserError(f"{path}: holds {provenance.get('kind')!r} records, not {kind!r}")
    there = [field for field in expected if field.name in table.column_names]
    for field in expected:
        if field.nullable or field in there:
            continue
        raise UserError(f"{path}: column '{field.name}' is missing; write the records again with this version")
    for field in there:
        found = table.schema.field(field.name).type
        if found != field.type:
            raise UserError(f"{path}: column '{field.name}' holds {found}, not {field.type}")
    written = table.select([field.name for field in there])
    table = _completed(written, expected)
    _check(table, kind, path)
    if content_hash(written) != provenance.get("content_hash"):
        raise UserError(f"{path}: the rows do not match the content hash in the file: it was changed after writing")
    return Records(kind, table.to_pandas(), provenance)


def content_hash(table: pa.Table) -> str:
    """SHA-256 over the values, column by column: the same rows give the same hash, however they are chunked."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table[name].combine_chunks()
        digest.update(f"{name}:{column.type}:{len(column)};".encode())
        missing = column.is_null().to_numpy(zero_copy_only=False)
        digest.update(missing.tobytes())
        if pa.types.is_string(column.type):
            for value in column.to_pylist():
                data = (value or "").encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        else:
            filled = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
            digest.update(np.ascontiguousarray(filled.to_numpy(zero_copy_only=False)).tobytes())
    return digest.hexdigest()


def _completed(table: pa.Table, expected: pa.Schema) -> pa.Table:
    """The table with the optional columns that an earlier version did not write yet, as nulls."""
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in expected
    ]
    return pa.table(dict(zip(expected.names, columns, strict=True)))


def _columns(kind: str) -> tuple[Column, ...]:
    if kind not in TABLES:
        raise UserError(f"no record table is called '{kind}'; there are {', '.join(TABLES)}")
    return TABLES[kind]


def _array(values, column: Column, path: Path) -> pa.Array:
    try:
        return pa.array(values, type=column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, TypeError) as problem:
        raise UserError(f"{path}: column '{column.name}' is not {column.type}: {problem}") from problem


def _check(table: pa.Table, kind: str, path: Path) -> None:
    """Refuse an empty table, a null in a required column, a non-finite or an out-of-range value."""
    if table.num_rows == 0:
        raise UserError(f"{path}: the {kind} table has no rows, so there is nothing to measure")
    for column in _columns(kind):
        data = table[column.name]
        if data.null_count and not column.optional:
            raise UserError(f"{path}: column '{column.name}' has {data.null_count} missing values")
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            continue
        values = data.drop_null().to_numpy()
        bad = ~np.isfinite(values)
        if column.low is not None:
            bad |= values < column.low
        if column.high is not None:
            bad |= values > column.high
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise UserError(
                f"{path}: column '{column.name}' has {int(bad.sum())} impossible values, the first is "
                f"{values[row]} in row {row}"
            )
    if kind == "rounds":
        _check_rounds(table, path)
    if kind == "replays":
        _check_replays(table, path)


def _check_rounds(table: pa.Table, path: Path) -> None:
    drafted, accepted, emitted = (table[name].to_numpy() for name in ("drafted", "accepted", "emitted"))
    if (accepted > drafted).any():
        raise UserError(f"{path}: column 'accepted' exceeds 'drafted' in row {int(np.argmax(accepted > drafted))}")
    if (accepted > emitted).any():
        raise UserError(f"{path}: column 'accepted' exceeds 'emitted' in row {int(np.argmax(accepted > emitted))}")


def _check_replays(table: pa.Table, path: Path) -> None:
    positions = table["positions"].to_numpy() + 1e-3
    for part, whole in (("accepted", table["emitted"].to_numpy()), *((name, positions) for name in SUMS)):
        above = table[part].to_numpy() > whole
        if above.any():
            raise UserError(f"{path}: column '{part}' is impossibly large in row {int(np.argmax(above))}")


SUMS = ("acceptance", "top1", "headroom_tv", "headroom_flip")
