"""The walks of docs/architecture.md: each function exists, and no walk gets longer."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = {1: (15, 4), 2: (23, 10), 3: (16, 0), 4: (13, 4)}
"""For each walk: the number of modules, and of returns to a module. Goals: (8, 0) for the first;
12, 10 and 8 modules for the others.
"""

each_walk = pytest.mark.parametrize("number", MOST)


def steps(number: int) -> list[str]:
    """The functions of a walk, in order: the names with which its items begin."""
    _, found, rest = PAGE.partition(f"\n### Walk {number}: ")
    assert found, number
    section = re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    items = re.findall(r"^(\d+)\. `([\w.]+)`", section, re.MULTILINE)
    assert len(items) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)), "an item without name"
    assert [int(at) for at, _ in items] == list(range(1, len(items) + 1))
    return [name for _, name in items]


def parts(name: str) -> tuple[Path, list[str]]:
    """The module of a dotted name below ftrun, and the rest of the name."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        path = ROOT.joinpath("ftrun", *words[:count]).with_suffix(".py")
        if path.is_file():
            return path, words[count:]
    raise AssertionError(f"no module of {name}")


def is_defined(path: Path, names: list[str]) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@each_walk
def test_every_function_of_a_walk_is_there(number: int) -> None:
    assert [name for name in steps(number) if not is_defined(*parts(name))] == []


@each_walk
def test_a_walk_does_not_get_longer(number: int) -> None:
    modules = [parts(name)[0] for name in steps(number)]
    returns = sum(
        here != before and here in modules[: at - 1]
        for at, (before, here) in enumerate(pairwise(modules), 1)
    )
    counts = (len(set(modules)), returns)
    assert counts[0] <= MOST[number][0], counts
    assert returns <= MOST[number][1], counts
    assert f"| {number} | {counts[0]} | {counts[1]} |" in PAGE, counts
