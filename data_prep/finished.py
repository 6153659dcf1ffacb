"""Outputs that know what made them: <out>.report.json holds a key of the settings and inputs, and the output's hash."""

import json
from collections.abc import Iterable
from pathlib import Path

from dcd_core.errors import UserError
from dcd_core.files import check_output_file, file_hash
from dcd_core.locks import refuse_held


def report_path(out: Path) -> Path:
    """Where the report of an output stands."""
    return out.with_name(out.name + ".report.json")


def check_outputs(out: str, inputs: Iterable[str]) -> Path:
    """`out`, once it is sure that it and its report can be written, replace no input and are not being written.

    Raises UserError if not.
    """
    path = check_output_file(out, inputs)
    refuse_held(path)
    check_output_file(report_path(path), inputs)
    return path


def is_finished(out: Path, made: dict, overwrite: bool) -> bool:
    """Whether `out` is there, unaltered, and made in this very way (`made`: part of its report).

    Raises UserError if something else is there and must not be replaced.
    """
    if not out.exists():
        return False
    try:
        report = json.loads(report_path(out).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        report = {}  # without a report it may be anything
    expected = made | {"sha256": file_hash(out)}
    if isinstance(report, dict) and {name: report.get(name) for name in expected} == expected:
        return True
    if not overwrite:
        raise UserError(
            f"{out} exists and was made from other input or with other settings, or altered since: "
            "give --overwrite or another --out"
        )
    return False
