"""Shortens docstring, comment and markdown lines that the rename made too long: moves words to the next line or adds one."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()


def reflow(lines, at, limit):
    """Splits a prose line at the last space that fits, and carries the rest into the next line of the same indent."""
    line = lines[at]
    indent = re.match(r"( *(?:# )?)", line)[1]
    hang = indent
    if m := re.match(r"( *)((?:[\w. ]+: +)|(?:[-*] +)|(?:\d+\. +))", line):
        follow = lines[at + 1] if at + 1 < len(lines) else ""
        hang = re.match(r" *", follow)[0] if follow.startswith(m[1] + " ") and follow.strip() else " " * len(m[0])
        if len(hang) > 14:
            hang = m[1] + "    "
    cut = line.rfind(" ", len(hang) + 10, limit + 1)
    if cut < 0:
        return False
    rest = line[cut + 1 :]
    lines[at] = line[:cut].rstrip()
    follow = lines[at + 1] if at + 1 < len(lines) else ""
    body = follow.strip()
    joins = body and follow.startswith(hang) and not follow[len(hang) : len(hang) + 1].isspace() and not re.match(r'([\w.]+: )|([-*|] )|(\d+\. )|"""|(#? ?Rule )|```', body.removeprefix("# "))
    if joins:
        lines[at + 1] = hang + rest + " " + follow[len(hang) :]
    else:
        lines.insert(at + 1, hang + rest)
    return True


def split_string(lines, at, limit):
    """Splits a line that is one string literal inside brackets into two adjacent ones, outside of fields."""
    m = re.match(r"""( +)([fr]?)(["'])(.*)\3(,?)$""", lines[at])
    if not m or m[3] in m[4].replace("\\" + m[3], "") or lines[at - 1].rstrip().endswith(("=", "return")):
        return False
    indent, prefix, quote, body, comma = m.groups()
    before = lines[at - 1].strip()
    if not before.endswith(("(", "[", ",", quote)) or before.endswith('"""'):
        return False
    room = limit - len(indent) - len(prefix) - 2 - len(comma)
    depth, cut = 0, -1
    for i, c in enumerate(body[:room]):
        if "f" in prefix and c in "{}":
            depth += 1 if c == "{" else -1
        elif c == " " and depth <= 0:
            cut = i + 1
    if cut < 20:
        return False
    first, second = body[:cut], body[cut:]
    follow = lines[at + 1]
    after = re.match(r"""( +)([fr]?)(["'])(.*)\3(,?)$""", follow)
    if not comma and after and after[1] == indent and after[3] == quote and len(follow) + len(second) <= limit and after[2] == prefix:
        lines[at + 1] = f"{indent}{prefix}{quote}{second}{after[4]}{quote}{after[5]}"
        lines[at] = f"{indent}{prefix}{quote}{first}{quote}"
        return True
    p1 = prefix if "f" not in prefix or "{" in first else ""
    p2 = prefix if "f" not in prefix or "{" in second else ""
    lines[at : at + 1] = [f"{indent}{p1}{quote}{first}{quote}", f"{indent}{p2}{quote}{second}{quote}{comma}"]
    return True


def prose_lines(text):
    """Numbers of lines inside docstrings, and of comment lines."""
    import ast
    import io
    import tokenize

    found = set()
    for node in ast.walk(ast.parse(text)):
        for one in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                found |= set(range(one.lineno, one.end_lineno + 1))
    lines = text.split("\n")
    for tok in tokenize.generate_tokens(io.StringIO(text).readline):
        if tok.type == tokenize.COMMENT and lines[tok.start[0] - 1].lstrip().startswith("#"):
            found.add(tok.start[0])
    return found


files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
for f in files:
    path = ROOT / f
    if f == "CHANGELOG.md" or not path.is_file() or not f.endswith((".py", ".md")):
        continue
    limit = 100 if f.endswith(".py") else 120
    text = path.read_text()
    if all(len(line) <= limit for line in text.split("\n")):
        continue
    before = text
    old = set(subprocess.run(["git", "show", f"HEAD:{f}"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n"))
    for _ in range(60):
        lines = text.split("\n")
        prose = prose_lines(text) if f.endswith(".py") else None
        code, done = False, True
        for at, line in enumerate(lines):
            code ^= f.endswith(".md") and line.startswith("```")
            if len(line) <= limit or code or line in old or f.endswith(".md") and line.startswith("    ") or line.startswith("|") or False:
                continue
            if prose is not None and at + 1 not in prose:
                if split_string(lines, at, limit):
                    done = False
                    break
                continue
            if (line.lstrip().startswith('"""') or line.rstrip().endswith('"""')) and prose is not None:
                m = re.match(r'( *)"""(.*)"""$', line)
                if m and ". " in m[2][:-1]:
                    head, _, tail = m[2].partition(". ")
                    lines[at : at + 1] = [f'{m[1]}"""{head}.', "", m[1] + tail, m[1] + '"""']
                    done = False
                    break
                if m:
                    continue
            if reflow(lines, at, limit):
                done = False
                break
        text = "\n".join(lines)
        if done:
            break
    if text != before:
        path.write_text(text)
        print("wrapped", f)
