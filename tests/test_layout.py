"""Imports point down, entry scripts are imported by nobody, and no file hides a module of the standard library."""

import ast
import importlib.util
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
    for library in ("torch", "transformers", "deepspeed", "datasets", "scipy", "matplotlib", "pandas", "jinja2"):
        assert importlib.util.find_spec(library) and library not in {path.stem for path in SOURCES}


def test_rooms_are_as_planned():
    assert not [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not list((ROOT / "configs").rglob("*.py"))
    assert not [path for path in (ROOT / "train", ROOT / "diagnostics") if not path.is_dir()]


def test_the_environment_module_is_light():
    code = "import sys, dcd_core.environment, dcd_core.config; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


HELP = """
import contextlib, os, pkgutil, runpy, sys
for name in sys.argv[1].split():
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
for number, script in enumerate(sys.argv[2:]):
    if not (child := os.fork()):
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
        out = os.open(f"{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        runpy.run_path(script, run_name="__main__")
    os.rename(f"{number}", f"{number}-{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""
"""Runs scripts in forks of a process that has read all libraries, which takes most of a start, and none of our own."""


def test_every_entry_script_runs_from_any_folder(tmp_path):
    """Each script explains itself when it is started by its path, with its own folder first on sys.path."""
    paths = [str(path) for path in ENTRIES]
    names = {name for path in SOURCES for name in imported(path) if name.split(".")[0] not in MAY_IMPORT}
    subprocess.run([sys.executable, "-c", HELP, " ".join(sorted(names)), *paths], cwd=tmp_path, check=True)
    assert len(ENTRIES) > 20
    for number, path in enumerate(paths):
        assert (tmp_path / f"{number}-0").exists(), f"{path} --help fails"
        text = (tmp_path / f"{number}-0").read_text()
        assert "--config" in text and text.count("\n") > 10, text


def test_the_report_needs_no_torch():
    """It is drawn from files, also on machines without torch."""
    code = "import sys; sys.modules['torch'] = None; import diagnostics.report"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # negative control: the same block stops what does need torch
    blocked = subprocess.run([sys.executable, "-c", code.replace("report", "latency")], cwd=ROOT, capture_output=True)
    assert blocked.returncode != 0
