"""Where a script sets a variable."""

import ast
import functools
from pathlib import Path


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
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and function_line in _first_lines(node):  # type: ignore[arg-type]
            scope = node
            break
    attribute = variable.rpartition(".")[2] if "." in variable else None
    found = {
        node.lineno
        for node in ast.walk(scope if attribute is None else tree)
        if _sets(node, variable, attribute)
    }
    return sorted(found)


def _sets(node: ast.AST, variable: str, attribute: str | None) -> bool:
    if attribute is not None:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == attribute
            and isinstance(node.ctx, ast.Store)
        )
    return isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Store)


def _first_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
