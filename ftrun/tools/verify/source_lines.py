"""Where a script sets a variable."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_that_set(file: str, variable: str, function_line: int) -> list[int]:
    """Lines that assign to a variable in a function, or at the top of a module.

    Args:
        file: of the script.
        variable: its name, or NAME.ATTRIBUTE.
        function_line: first line of the function's code; of a module's code 0 or 1.
    """
    tree = _parsed(file)
    if tree is None:
        return []
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and function_line in _first_lines(node):
            scope = node
            break
    attribute = variable.rpartition(".")[2] if "." in variable else None
    if attribute is not None:
        stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        return _lines(node for node in stored if node.attr == attribute)
    names = (node for node in _own_nodes(scope) if isinstance(node, ast.Name))
    return _lines(node for node in names if node.id == variable)


def _lines(nodes: Iterable[ast.Name | ast.Attribute]) -> list[int]:
    return sorted({node.lineno for node in nodes if isinstance(node.ctx, ast.Store)})


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module without those of functions and classes in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


def _first_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
