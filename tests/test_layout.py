"""Imports point down, entry scripts are imported by nobody, and no file hides a module of the standard library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "dcd_core": {"dcd_core"},
    "data_prep": {"dcd_core", "data_prep"},
    "train": {"dcd_core", "data_prep", "train"},
    "diagnostics": {"dcd_core", "data_prep", "diagnostics"},
}
SOURCES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))
# a script's folder comes first on sys.path, so there these names would stand for our file everywhere
HIDDEN_BY_A_FILE = {"datasets", "signal", "statistics", "profile", "inspect", "tokenize", "types", "random", "numbers"}
NOT_IN_CORE = {"datasets", "deepspeed", "matplotlib", "pandas"}


def name(path: Path) -> str:
    """`dcd_core/cache.py` -> `dcd_core.cache`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, and every `module.name` of a from-import, which may be a module too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import does not work in a script"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_entry(path: Path) -> bool:
    """Whether a file is a script: it ends in a call of its main."""
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


ENTRIES = [path for path in SOURCES if is_entry(path)]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_down(path):
    room = path.relative_to(ROOT).parts[0]
    modules = imported(path)
    roots = {module.split(".")[0] for module in modules}
    assert not (roots & set(MAY_IMPORT)) - MAY_IMPORT[room], f"{path} may import {MAY_IMPORT[room]} only"
    assert not modules & {name(entry) for entry in ENTRIES}, f"{path} imports an entry script"
    if room == "dcd_core":
        assert not roots & NOT_IN_CORE


@pytest.mark.parametrize("path", ENTRIES, ids=name)
def test_an_entry_script_sets_the_environment_first(path):
    first = next(
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    assert ast.unparse(first) == "import dcd_core.environment"


def test_no_file_hides_a_module():
    for path in [*SOURCES, *(ROOT / "tests").glob("*.py")]:
        assert path.stem not in HIDDEN_BY_A_FILE, f"{path} hides the module '{path.stem}' from every script beside it"
        assert path.stem not in sys.stdlib_module_names, f"{path} hides a module of the standard library"


def test_rooms_are_as_planned():
    assert not [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not list((ROOT / "configs").rglob("*.py"))
    assert not [path for path in (ROOT / "train", ROOT / "diagnostics") if not path.is_dir()]


def test_the_environment_module_is_light():
    code = "import sys, dcd_core.environment, dcd_core.config; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("path", ENTRIES, ids=name)
def test_an_entry_script_runs_from_any_folder(path, tmp_path):
    """Each script explains itself when it is started by its path, with its own folder first on sys.path."""
    done = subprocess.run([sys.executable, str(path), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout and done.stdout.count("\n") > 10


def test_the_report_needs_no_torch():
    """It is drawn from files, also on machines without torch."""
    code = "import sys; sys.modules['torch'] = None; import diagnostics.report"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # negative control: the same block stops what does need torch
    blocked = subprocess.run([sys.executable, "-c", code.replace("report", "latency")], cwd=ROOT, capture_output=True)
    assert blocked.returncode != 0
