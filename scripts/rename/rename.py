"""Renames identifiers of a tree by map.txt, keep.txt and test_words.txt. Usage: rename.py ROOT [--list]

Python: NAME tokens (names, attributes, keyword arguments), expressions of f-strings, names in strings of getattr,
monkeypatch, parametrize and dotted paths, backquoted names in docstrings and comments, annotations in quotes, and
code in long strings. Other files (md, yaml, sh): backquoted names and names of tests.
Keys of map.txt: `name`, `def name` (functions), `*.name` (any attribute), `*(name` (any keyword argument), `receiver.name` (attribute of that receiver), `Call(name` (keyword argument), `Class:name`
(field of that class); a third column limits a line to files (globs, comma separated; later lines win).
A field of a msgspec struct under ftrun/ that is renamed keeps its encoded name by msgspec.field(name=...).
Idempotent if no new name is an old one (checked).
"""

import ast
import fnmatch
import io
import keyword
import re
import subprocess
import sys
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(sys.argv[1]).resolve()
LIST = "--list" in sys.argv
IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STRING_CALLS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "object", "usefixtures", "getfixturevalue"}
# Calls whose keyword arguments are data (keys of the journal or of JSON), not names.
DATA_CALLS = re.compile(
    r"(notes?|Notes\(.*\))\.write$|(^|\.)note$"
    if (ROOT / "ftrun/records").is_dir()
    else r"(journal|_journal|notes?|Notes\(.*\))\.(write|append)$|(^|\.)(_note|note|put|_first|line)$"
)
DATA_KEEP = {"say", "node", "is_whole", "number"}  # parameters of those calls that are names
NO_PIN_FILES = ("tests/", "scripts/", "ftrun/config/profile.py", "ftrun/tools/drill/plan.py")


def load_map():
    rules = []
    for number, line in enumerate((HERE / "map.txt").read_text().split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [p for p in line.split("\t") if p]
        assert len(parts) in (2, 3), f"map.txt {number}: {line!r}"
        rules.append((parts[0], parts[1], parts[2].split(",") if len(parts) == 3 else []))
    return rules


def load_keep():
    keep = []
    for line in (HERE / "keep.txt").read_text().split("\n"):
        if line.strip() and not line.startswith("#"):
            glob, _, token = line.partition("\t")
            keep.append((glob, token))
    return keep


RULES, KEEP = load_map(), load_keep()
STRINGS = {}
for _line in (HERE / "strings.txt").read_text().split("\n"):
    if _line.strip() and not _line.startswith("#"):
        _glob, _old, _new = _line.split("\t")
        STRINGS.setdefault(_old, []).append((_glob, _new))
TEST_RULES = []
for _line in (HERE / "test_words.txt").read_text().split("\n"):
    if _line.strip() and not _line.startswith("#"):
        _old, _, _new = _line.partition("\t")
        TEST_RULES.append((re.compile(rf"(?<=_){_old}(?=_|$)"), _new))
_TESTS = {}


def test_name(name):
    """The new name of a test function: an explicit line of map.txt, or the phrase rules."""
    if name not in _TESTS:
        new = GENERAL.get(name)
        if new is None:
            new = name
            if name not in FINAL:
                for pattern, by in TEST_RULES:
                    new = re.sub(r"_+", "_", pattern.sub(by, new)).rstrip("_")
        _TESTS[name] = new
    return _TESTS[name]


GENERAL = {k: v for k, v, globs in RULES if not globs}
FINAL = {v for k, v, _ in RULES if k.startswith("test_")}
for _k in list(GENERAL):
    if GENERAL[_k] in GENERAL and GENERAL[GENERAL[_k]] != GENERAL[_k]:
        print(f"map.txt: {_k} -> {GENERAL[_k]} -> {GENERAL[GENERAL[_k]]} is a chain", file=sys.stderr)


def table(path):
    found = {}
    for key, new, globs in RULES:
        if not globs or any(fnmatch.fnmatch(path, g) for g in globs):
            found[key] = new
    for glob, token in KEEP:
        if fnmatch.fnmatch(path, glob):
            found.pop(token, None)
    return {k: v for k, v in found.items() if k != v}


FILES = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
FILES = [f for f in FILES if f and (ROOT / f).is_file() and f != "CHANGELOG.md"]
MODULES = {Path(f).stem for f in FILES if f.endswith(".py")}

BASES = {}
CLASS_FILE = {}


def scan_classes():
    for f in FILES:
        if f.endswith(".py"):
            for n in ast.walk(ast.parse((ROOT / f).read_text())):
                if isinstance(n, ast.ClassDef):
                    BASES.setdefault(n.name, set()).update(ast.unparse(b).split("[")[0].split(".")[-1] for b in n.bases)


def is_struct(name, seen=()):
    return name == "Struct" or any(is_struct(b, (*seen, name)) for b in BASES.get(name, ()) if b not in seen and b != name)


class Names:
    def __init__(self, path, mapping):
        self.path, self.map = path, mapping
        self.plain = {k: v for k, v in mapping.items() if IDENT.fullmatch(k)}

    def of(self, name, receiver="", call="", cls="", is_def=False):
        if name.startswith("test_") and name not in MODULES:
            return test_name(name)
        for key in (
            f"{cls}:{name}" if cls else "",
            f"{call}({name}" if call else "",
            f"*({name}" if call else "",
            f"{receiver}.{name}" if receiver else "",
            f"*.{name}" if receiver else "",
            f"def {name}" if is_def else "",
        ):
            if key and key in self.map:
                return self.map[key]
        return self.plain.get(name, name)

    def expression(self, text):
        """Renames the names in a piece of an expression (of an f-string or a quoted annotation)."""
        out, last = [], 0
        for m in re.finditer(r"""(?P<s>'[^']*'|"[^"]*")|(?P<i>[A-Za-z_][A-Za-z0-9_]*)""", text):
            if m["i"] and not keyword.iskeyword(m["i"]):
                before = text[: m.start()]
                receiver = (re.search(r"([A-Za-z_]\w*)\.$", before) or [None, ""])[1]
                out += [text[last : m.start()], self.of(m["i"], receiver)]
                last = m.end()
        return "".join(out) + text[last:]

    def fstring(self, text):
        out, i, n = [], 0, len(text)
        while i < n:
            c = text[i]
            if c == "{" and text[i : i + 2] == "{{" or c == "}" and text[i : i + 2] == "}}":
                out.append(text[i : i + 2])
                i += 2
                continue
            if c != "{":
                out.append(c)
                i += 1
                continue
            depth, j, quote = 1, i + 1, ""
            colon = None
            while j < n and depth:
                d = text[j]
                if quote:
                    quote = "" if d == quote else quote
                elif d in "'\"":
                    quote = d
                elif d in "([{":
                    depth += 1
                elif d in ")]}":
                    depth -= 1
                elif d == ":" and depth == 1 and colon is None and "lambda" not in text[i:j]:
                    colon = j
                elif d == "!" and depth == 1 and text[j + 1 : j + 2] != "=" and colon is None:
                    colon = j
                j += 1
            end = j - 1
            expr = text[i + 1 : colon if colon is not None else end]
            spec = text[colon:end] if colon is not None else ""
            out += ["{", self.expression(expr), self.fstring(spec) if "{" in spec else spec, "}"]
            i = j
        return "".join(out)

    def backquoted(self, text, code_only=False):
        """Names in backquotes: with an underscore, or a dotted one, or a call; tests anywhere."""

        def one(m):
            inner = m[1]
            if not re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", inner):
                return m[0]
            if "/" in inner or inner.startswith("FTRUN") or inner in MODULES:
                return m[0]
            head = IDENT.match(inner)[0]
            if code_only and not ("_" in inner or "(" in inner):
                return m[0]
            return "`" + self.expression(inner) + "`" if head else m[0]

        text = re.sub(r"`([^`\n]+)`", one, text)
        return re.sub(r"\btest_\w+\b(?!\.py|/)", lambda m: m[0] if m[0] in MODULES else test_name(m[0]), text)


def quoted(ann):
    """Parts of an annotation that are types: not the text in Meta(...), not the values of Literal[...]."""
    todo = [ann] if ann is not None else []
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Call) or isinstance(one, ast.Subscript) and ast.unparse(one.value).endswith("Literal"):
            continue
        yield one
        todo += list(ast.iter_child_nodes(one))


def contexts(src, path):
    """Positions of keyword arguments (with their call), of class fields, and of strings that are names."""
    call_of, cls_of, name_strings, annotations, docstrings = {}, {}, set(), set(), set()
    skip, pins = set(), []
    tree = ast.parse(src)
    for one in tree.body:
        if isinstance(one, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in one.targets):
            name_strings |= {(c.lineno, c.col_offset) for c in ast.walk(one.value) if isinstance(c, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or hasattr(node, "body"):
            for one in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
                if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                    docstrings.add((one.value.lineno, one.value.col_offset))
        if isinstance(node, ast.Call):
            func = ast.unparse(node.func)
            last = func.split(".")[-1]
            data = DATA_CALLS.search(func) is not None and not path.startswith("ftrun/agent/observe/node_check")
            for k in node.keywords:
                if k.arg:
                    call_of[k.lineno, k.col_offset] = last
                    if data and k.arg not in DATA_KEEP:
                        skip.add((k.lineno, k.col_offset))
            if last in STRING_CALLS or last == "setattr":
                for a in node.args:
                    if isinstance(a, ast.Constant) and isinstance(a.value, str):
                        name_strings.add((a.lineno, a.col_offset))
            if last == "parametrize" and node.args:
                for a in [node.args[0], *(getattr(node.args[0], "elts", []))]:
                    if isinstance(a, ast.Constant) and isinstance(a.value, str):
                        name_strings.add((a.lineno, a.col_offset))
            if last in ("cast", "TypeVar") and node.args and isinstance(node.args[0], ast.Constant):
                annotations.add((node.args[0].lineno, node.args[0].col_offset))
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    cls_of[one.target.lineno, one.target.col_offset] = node.name
                    if "ClassVar" not in ast.unparse(one.annotation) and is_struct(node.name) and not path.startswith(NO_PIN_FILES):
                        array = any(k.arg == "array_like" for k in node.keywords)
                        if not array:
                            pins.append((one, node.name))
                if isinstance(one, ast.Assign) and any(getattr(t, "id", "") in ("__slots__", "__match_args__", "__all__") for t in one.targets):
                    for c in ast.walk(one.value):
                        if isinstance(c, ast.Constant) and isinstance(c.value, str):
                            name_strings.add((c.lineno, c.col_offset))
        for ann in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for c in quoted(ann):
                if isinstance(c, ast.Constant) and isinstance(c.value, str):
                    annotations.add((c.lineno, c.col_offset))
    return call_of, cls_of, name_strings, annotations, docstrings, skip, pins


PREFIX = re.compile(r"^([A-Za-z]*)('''|\"\"\"|'|\")")


def string(names, tok, pos, sets, path):
    text = tok.string
    m = PREFIX.match(text)
    prefix, quote = m[1].lower(), m[2]
    body = text[m.end() : -len(quote)]
    _, _, name_strings, annotations, docstrings, _, _ = sets
    new = body
    if pos in docstrings:
        new = re.sub(r"(?m)^( {4,})([A-Za-z_]\w*)(?=(, \w+)*: )", lambda k: k[1] + names.of(k[2]), names.backquoted(body)) if "Args:" in body else names.backquoted(body)
    elif "f" in prefix:
        new = names.fstring(body)
    elif pos in annotations:
        new = names.expression(body)
    elif pos in name_strings:
        new = names.expression(body) if "/" not in body and " " not in body.replace(", ", ",") else body
    elif re.fullmatch(r"(ftrun|tests)(\.[A-Za-z_]\w*)+(:\w+)?", body):
        parts = body.split(".")
        known = 0
        for i in range(len(parts), 0, -1):
            base = ROOT.joinpath(*parts[:i])
            if base.is_dir() or base.with_suffix(".py").is_file():
                known = i
                break
        new = ".".join([*parts[:known], *(names.of(p) for p in parts[known:])])
    elif "\n" in body and re.search(r"(from|import) ftrun\.(?!integrations|dcp)", body):
        new = code(names, body, path)
    elif re.search(r"\btest_\w+", body):
        new = re.sub(r"\btest_\w+\b(?!\.py)", lambda k: k[0] if k[0] in MODULES else test_name(k[0]), body)
    for glob, by in STRINGS.get(body, ()):
        if fnmatch.fnmatch(path, glob):
            new = by
    if new == body and LIST and body in names.plain and pos not in docstrings:
        print(f"string {path}:{tok.start[0]}: {body!r} left")
    return text[: m.end()] + new + quote


def code(names, body, path):
    import textwrap

    try:
        ast.parse(textwrap.dedent(body))
    except SyntaxError:
        return body
    if textwrap.dedent(body) != body:
        return body
    return python(body, path, names)


def python(src, path, names):
    sets = contexts(src, path)
    call_of, cls_of, _, _, _, skip, pins = sets
    lines = src.split("\n")
    byte_cols = [len(l) != len(l.encode()) for l in lines]

    def pos_of(tok):
        line, col = tok.start
        return (line, len(lines[line - 1][:col].encode()) if byte_cols[line - 1] else col)

    tokens = list(tokenize.generate_tokens(io.StringIO(src).readline))
    edits = []
    imports = import_spans(src)
    for i, tok in enumerate(tokens):
        if tok.type == tokenize.NAME and not keyword.iskeyword(tok.string):
            at = pos_of(tok)
            if at in skip or imports.get(tok.start[0]) == "module" and not after_import(tokens, i):
                continue
            receiver = ""
            if i >= 2 and tokens[i - 1].string == ".":
                receiver = tokens[i - 2].string if tokens[i - 2].type == tokenize.NAME else "?"
            if tok.string in MODULES and in_import_names(tokens, i, imports) and is_module_import(tokens, i, src):
                continue
            new = names.of(tok.string, receiver, call_of.get(at, ""), cls_of.get(at, ""), i > 0 and tokens[i - 1].string == "def")
            if new != tok.string:
                edits.append((tok.start, tok.end, new))
        elif tok.type == tokenize.STRING:
            new = string(names, tok, pos_of(tok), sets, path)
            if new != tok.string:
                edits.append((tok.start, tok.end, new))
        elif tok.type == tokenize.COMMENT:
            new = names.backquoted(tok.string)
            if new != tok.string:
                edits.append((tok.start, tok.end, new))
    for one, cls in pins:
        pin = pinned(one, cls, names, lines)
        if pin:
            edits.append(pin)
    return apply(lines, edits)


def pinned(one, cls, names, lines):
    old = one.target.id
    new = names.of(old, cls=cls)
    if new == old:
        return None
    value = one.value
    if value is None:
        end = (one.annotation.end_lineno, one.annotation.end_col_offset)
        return (end, end, f' = msgspec.field(name="{old}")')
    text = ast.unparse(value)
    start, end = (value.lineno, value.col_offset), (value.end_lineno, value.end_col_offset)
    if text.startswith(("msgspec.field(", "field(")):
        if "name=" in text:
            return None
        open_at = (value.func.end_lineno, value.func.end_col_offset + 1)
        return (open_at, open_at, f'name="{old}", ')
    return ((start, start, f'msgspec.field(name="{old}", default='), (end, end, ")"))


def import_spans(src):
    found = {}
    for node in ast.walk(ast.parse(src)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for line in range(node.lineno, node.end_lineno + 1):
                found[line] = "import"
    return found


def statement_start(tokens, i):
    while i > 0 and tokens[i - 1].type not in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT) or (
        i > 0 and tokens[i - 1].type == tokenize.NL and any(t.string == "(" for t in tokens[max(0, i - 60) : i]) and False
    ):
        i -= 1
    return i


def after_import(tokens, i):
    return True


def in_import_names(tokens, i, imports):
    return tokens[i].start[0] in imports


IMPORTED_MODULES = {}


def module_names(src):
    """Names in a file that are modules by import: their uses are renamed only with the module."""
    found = set()
    for node in ast.walk(ast.parse(src)):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:
                for root in (base, ROOT / "tests" / node.module.replace(".", "/"), ROOT / "scripts" / node.module.replace(".", "/")):
                    if (root / f"{alias.name}.py").is_file() or (root / alias.name).is_dir():
                        found.add(alias.name)
            for part in node.module.split("."):
                found.add(part)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.update(alias.name.split("."))
    return found


def is_module_import(tokens, i, src):
    if src not in IMPORTED_MODULES:
        IMPORTED_MODULES[src] = module_names(src)
    return tokens[i].string in IMPORTED_MODULES[src]


def apply(lines, edits):
    flat = []
    for e in edits:
        flat += list(e) if isinstance(e[0][0], tuple) else [e]
    for (l1, c1), (l2, c2), new in sorted(flat, key=lambda e: (e[0], e[1]), reverse=True):
        a, b = lines[l1 - 1], lines[l2 - 1]
        lines[l1 - 1 : l2] = (a[:c1] + new + b[c2:]).split("\n")
    return "\n".join(lines)


def main():
    scan_classes()
    changed = 0
    for f in FILES:
        path = ROOT / f
        names = Names(f, table(f))
        if f.endswith(".py"):
            src = path.read_text()
            new = python(src, f, names)
            ast.parse(new)
        elif f.endswith((".md", ".yaml", ".yml", ".sh", ".toml")) or f in ("scripts/test", "scripts/demo", "scripts/vcluster"):
            src = path.read_text()
            if f in ("scripts/demo", "scripts/vcluster") or f.endswith(".toml"):
                continue
            new = names.backquoted(src, code_only=True)
        else:
            continue
        if new != src:
            changed += 1
            path.write_text(new)
    print(f"{changed} files changed")


main()
