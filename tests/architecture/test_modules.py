"""What every module of the package has in common: size, names, docstring, imports, layers."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftrun"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 500
MAX_FOLDER_MODULES = 12
BUDGETS = {
    "agent": 17_650, "cli": 4_650, "config": 900, "erasure": 1_200, "integrations": 1_500,
    "membership": 5_200, "monitor": 5_150, "network": 3_250, "records": 800, "recovery": 3_900,
    "sharding": 3_600, "smp": 14_500, "snapshot": 2_250, "tools": 14_350, "wire": 6_300,
    "worker": 18_450, "ftrun": 1_800,
}  # fmt: skip
"""Lines of each folder and its subfolders; `ftrun`: of the modules that are in no folder. A commit
that adds a feature raises the budget of its folder, and its message says what for."""
MAX_FUNCTION_LINES = 60
VAGUE = {"utils", "common", "helpers", "base", "api", "types", "manager"}
NAMES_CUDA = {"process/graph_captures.py"}
"""Wraps the methods of CUDA's graphs, which torch has no name for."""

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))


@each_module
def test_module_fits(path: Path) -> None:
    source = path.read_text()
    lines = source.count("\n")
    assert lines <= MAX_MODULE_LINES, f"{lines} lines: split by reason to change, not by length"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


@each_module
def test_module_reports_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_a_folder_has_few_modules() -> None:
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    many = {str(folder): count for folder, count in counts.items() if count > MAX_FOLDER_MODULES}
    assert not many


def test_no_folder_is_larger_than_its_budget() -> None:
    lines = Counter[str]()
    for path in MODULES:
        words = path.relative_to(PACKAGE).parts
        lines[words[0] if len(words) > 1 else PACKAGE.name] += path.read_text().count("\n")
    assert lines.keys() == BUDGETS.keys()
    assert {name: count for name, count in lines.items() if count > BUDGETS[name]} == {}
    # A budget that is much too large limits nothing.
    assert {name: count for name, count in lines.items() if count < 0.9 * BUDGETS[name]} == {}


def test_no_module_has_a_name_that_reports_nothing() -> None:
    assert not VAGUE & {path.stem for path in MODULES}


def test_a_subpackage_has_only_a_docstring() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        assert path.read_text().count('"""') == 2, path
        assert path.read_text().strip().endswith('"""'), path


def test_public_classes_have_one_name_each() -> None:
    """A class name appears alone in tracebacks and searches."""
    found: dict[str, list[Path]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path)
    double = {name for name, paths in found.items() if len(paths) > 1}
    assert double == {"FtrunCallback"}, "of Lightning and of transformers"


def test_cuda_is_named_only_where_torch_has_no_common_name() -> None:
    """The worker uses any accelerator in one way."""
    worker = PACKAGE / "worker"
    found = {
        str(path.relative_to(worker))
        for path in worker.rglob("*.py")
        if re.search(r"\btorch\.cuda\b|\bis_cuda\b", path.read_text())
    }
    assert found == NAMES_CUDA


def test_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
