"""Reports new names of map.txt that exist already in the same scope, class or module. Usage: clashes.py ROOT (before rename)."""

import ast
import collections
import contextlib
import io
import sys
from pathlib import Path

sys.argv.append("--list")
source = (Path(__file__).parent / "rename.py").read_text().rsplit("\nmain()", 1)[0]
with contextlib.redirect_stderr(io.StringIO()):
    exec(compile(source, "rename.py", "exec"))
scan_classes()


def local_names(node):
    """Names that a scope binds, without those of inner scopes."""
    found = set()
    args = getattr(node, "args", None)
    if args:
        found |= {a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]}
    used = set()
    todo = list(node.body) if isinstance(node.body, list) else [node.body]
    while todo:
        n = todo.pop()
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(n.name)
            todo += n.decorator_list
            if not isinstance(n, ast.ClassDef):
                todo += [*n.args.defaults, *filter(None, n.args.kw_defaults)]
            for inner in ast.walk(n):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                    used.add(inner.id)
            continue
        if isinstance(n, ast.Lambda):
            found |= {a.arg for a in n.args.args}
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            found |= {a.asname or a.name.split(".")[0] for a in n.names}
        if isinstance(n, ast.Name):
            (found if isinstance(n.ctx, ast.Store) else used).add(n.id)
        if isinstance(n, ast.ExceptHandler) and n.name:
            found.add(n.name)
        if isinstance(n, (ast.MatchAs, ast.MatchStar)) and n.name:
            found.add(n.name)
        todo += list(ast.iter_child_nodes(n))
    return found, used


total = 0
for f in FILES:
    if not f.endswith(".py"):
        continue
    names = Names(f, table(f))
    src = (ROOT / f).read_text()
    tree = ast.parse(src)
    modules = module_names(src)
    top, _ = local_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound, used = local_names(node)
            scope = bound | used
            for name in sorted(bound):
                new = names.of(name) if name not in modules else name
                if new != name and (new in scope) and names.of(new) == new and not name.startswith("test_"):
                    print(f"{f}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}: {name} -> {new}")
                    total += 1
                elif name.startswith("test_") and new != name and new in bound:
                    print(f"{f}: {name} -> {new}")
            news = collections.Counter(names.of(n) for n in bound if n not in modules)
            for n, c in news.items():
                if c > 1:
                    print(f"{f}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}: {c} names -> {n}: {[b for b in bound if names.of(b) == n]}")
                    total += 1
        if isinstance(node, ast.ClassDef):
            members = set()
            for n in ast.walk(node):
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self":
                    members.add(n.attr)
            for n in node.body:
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    members.add(n.name)
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
                    members.add(n.target.id)
                if isinstance(n, ast.Assign):
                    members |= {t.id for t in n.targets if isinstance(t, ast.Name)}
            news = collections.defaultdict(list)
            for m in members:
                news[names.of(m, cls=node.name)].append(m)
            for n, olds in news.items():
                if len(olds) > 1:
                    print(f"{f}:{node.lineno} class {node.name}: {sorted(olds)} -> {n}")
                    total += 1
print(total, "clashes")
