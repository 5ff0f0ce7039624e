"""Module names describe the content; the folder gives the context."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ftrun"
VAGUE = {"utils", "common", "helpers", "base", "api", "types", "manager"}


def test_no_module_has_a_name_that_reports_nothing() -> None:
    assert not VAGUE & {path.stem for path in PACKAGE.rglob("*.py")}


def test_a_subpackage_has_only_a_docstring() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        assert path.read_text().count('"""') == 2, path
        assert path.read_text().strip().endswith('"""'), path


def test_public_classes_have_one_name_each() -> None:
    """A class name appears alone in tracebacks and searches."""
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path)
    double = {name for name, paths in found.items() if len(paths) > 1}
    assert double == {"FtrunCallback"}, "of Lightning and of transformers"
