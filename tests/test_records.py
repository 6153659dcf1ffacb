"""Tables survive the disk unchanged, and every kind of bad table is refused with its file and column."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_records

from dcd_core.errors import UserError
from diagnostics.records import POSITIONS, PROVENANCE_KEY, ROUNDS, content_hash, read_records, schema, write_records

PROVENANCE = {"settings": {"alphas": [0.1, 0.5]}, "versions": {"python": "3"}, "git_sha": "abc"}


@pytest.fixture
def columns():
    return synthetic_records.positions(prompts=3, length=5)


def test_what_was_written_is_read(tmp_path, columns):
    written = write_records(tmp_path / "positions.parquet", "positions", columns, PROVENANCE)
    found = read_records(tmp_path / "positions.parquet", "positions")
    for name, values in columns.items():
        assert (found.rows[name].to_numpy() == values).all(), name
    assert found.rows["amateur_error"].isna().all()  # an optional column that was not given
    assert found.provenance == PROVENANCE | {"kind": "positions", "content_hash": written}
    assert [path.name for path in tmp_path.iterdir()] == ["positions.parquet"]


def test_rounds_have_the_columns_of_the_on_disk_contract(tmp_path):
    names = "run method prompt_id sample round drafted accepted emitted draft_s expert_s amateur_s rest_s"
    names += " expert_passes amateur_passes"
    assert [c.name for c in ROUNDS] == names.split()
    table = synthetic_records.rounds(prompts=2, repeats=1)
    write_records(tmp_path / "rounds.parquet", "rounds", table, PROVENANCE)
    assert read_records(tmp_path / "rounds.parquet", "rounds").rows.shape == (len(table["run"]), 14)


def test_every_column_says_its_unit_and_meaning():
    for field in [*schema("rounds"), *schema("positions")]:
        assert field.metadata[b"meaning"]
    units = {c.name: c.unit for c in POSITIONS}
    assert (units["signal"], units["headroom_tv"]) == ("nats", "probability")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("signal"), "column 'signal' of a positions table is missing"),
        (lambda c: c.update(extra=c["signal"]), "has no column 'extra'"),
        (lambda c: c.update(signal=np.full(len(c["signal"]), np.nan)), "column 'signal' has 30 impossible"),
        (lambda c: c.update(error_reverse=c["error_reverse"] * np.inf), "column 'error_reverse'"),
        (lambda c: c.update(headroom_tv=c["headroom_tv"] + 1.5), "column 'headroom_tv'"),
        (lambda c: c.update(signal=[None, *c["signal"][1:]]), "column 'signal' has 1 missing"),
        (lambda c: c.update(signal=c["signal"][1:]), "values, another has"),
        (lambda c: c.update(position=["one"] * 30), "column 'position' is not int64"),
        (lambda c: c.update({name: values[:0] for name, values in c.items()}), "no rows"),
    ],
)
def test_a_bad_table_is_never_written(tmp_path, columns, change, message):
    change(columns)
    with pytest.raises(UserError, match=message):
        write_records(tmp_path / "positions.parquet", "positions", columns, PROVENANCE)
    assert list(tmp_path.iterdir()) == []


def test_more_accepted_than_drafted_is_refused(tmp_path):
    table = synthetic_records.rounds(prompts=1, repeats=1)
    table["accepted"][0] = 99
    with pytest.raises(UserError, match="'accepted' exceeds 'drafted' in row 0"):
        write_records(tmp_path / "rounds.parquet", "rounds", table, PROVENANCE)


def test_bad_files_are_refused_by_name(tmp_path, columns):
    path = tmp_path / "positions.parquet"
    with pytest.raises(UserError, match="positions.parquet: no such file"):
        read_records(path, "positions")
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="not a readable parquet file"):
        read_records(path, "positions")
    pq.write_table(pa.table({"signal": [1.0]}), path)
    with pytest.raises(UserError, match="no provenance"):
        read_records(path, "positions")
    write_records(path, "positions", columns, PROVENANCE)
    with pytest.raises(UserError, match="holds 'positions' records, not 'rounds'"):
        read_records(path, "rounds")
    with pytest.raises(UserError, match="no record table is called 'tables'"):
        read_records(path, "tables")


def test_a_missing_column_a_nan_and_an_edit_are_seen_when_reading(tmp_path, columns):
    path = tmp_path / "positions.parquet"
    write_records(path, "positions", columns, PROVENANCE)
    good = pq.read_table(path)

    def rewritten(table):
        pq.write_table(table.replace_schema_metadata(good.schema.metadata), path)
        return path

    with pytest.raises(UserError, match=r"positions\.parquet: column 'signal_kl' is missing"):
        read_records(rewritten(good.drop_columns(["signal_kl"])), "positions")
    spoilt = good["signal"].to_numpy().copy()
    index = good.schema.get_field_index("signal")
    spoilt[4] = np.nan
    with pytest.raises(UserError, match="column 'signal' has 1 impossible values, the first is nan in row 4"):
        read_records(rewritten(good.set_column(index, "signal", pa.array(spoilt))), "positions")
    spoilt[4] = 0.125
    with pytest.raises(UserError, match="changed after writing"):
        read_records(rewritten(good.set_column(index, "signal", pa.array(spoilt))), "positions")
    with pytest.raises(UserError, match="column 'signal' holds float, not double"):
        read_records(rewritten(good.set_column(index, "signal", good["signal"].cast(pa.float32()))), "positions")


def test_a_table_from_before_a_column_was_thought_of_is_read(tmp_path, columns):
    """Its own hash still holds; what it does not have is null."""
    path = tmp_path / "positions.parquet"
    write_records(path, "positions", columns, PROVENANCE)
    whole = pq.read_table(path)
    old = whole.select([c.name for c in POSITIONS if not c.optional or c.name == "amateur_error"])
    text = json.dumps(PROVENANCE | {"kind": "positions", "content_hash": content_hash(old)})
    pq.write_table(old.replace_schema_metadata({PROVENANCE_KEY: text.encode()}), path)
    found = read_records(path, "positions").rows
    assert list(found) == [c.name for c in POSITIONS]
    assert (found["signal"].to_numpy() == columns["signal"]).all() and found["dual_kl"].isna().all()
    spoilt = old.set_column(6, "signal", pa.array(columns["signal"] + 0.5))
    pq.write_table(spoilt.replace_schema_metadata({PROVENANCE_KEY: text.encode()}), path)
    with pytest.raises(UserError, match="changed after writing"):
        read_records(path, "positions")


def test_the_hash_sees_values_and_not_chunks(tmp_path, columns):
    write_records(tmp_path / "a.parquet", "positions", columns, PROVENANCE)
    table = pq.read_table(tmp_path / "a.parquet")
    chunked = pa.concat_tables([table.slice(0, 7), table.slice(7)])
    assert content_hash(chunked) == content_hash(table)
    assert content_hash(table.slice(1)) != content_hash(table)
    assert json.loads(table.schema.metadata[PROVENANCE_KEY])["content_hash"] == content_hash(table)
