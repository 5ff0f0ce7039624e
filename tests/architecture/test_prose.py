"""Docstrings, comments, messages and pages use standard terms (house style).

A pattern matches whole words, in the sense that the standard term replaces.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = {"'anew': restarts, repeatedly", "'hang on': is attached to", "'tell': reported, sent"}
"""Words of rule files, of a verdict and of a title in docs that tests quote."""
DIALECT = {
    r"told|tells?|telling": "reported, sent",
    r"who|whom|whoever|nobody|somebody|anybody|everybody": "the node that, no node",
    r"so (many|long|much)\b(?! as)": "a number with its unit",
    r"(go|goes|going|went|gone) on": "continues, resumes",
    r"anew|again and again|once more|begins? again": "restarts, repeatedly",
    r"(let|lets|letting) go": "releases, resumes",
    r"(un)?hear(s|d|ing)?": "receives",
    r"silen(t|tly|ce)": "no heartbeat, unresponsive",
    r"lies|lying|stood|stands?(?! (for|out)\b)": "is stored, is",
    r"(is|are|what is) not so": "the condition that failed",
    r"by way of|at last|meanwhile|besides?": "through, finally, while, next to",
    r"wish(es|ed)?": "request, requested",
    r"(the|its|this|no|each|every|last|old|new|another|other|a) lead": "leader",
    r"beats?": "heartbeat",
    r"brain|eyes|keeper|caretaker|healer|desk": "control loop, observer, maintenance, rpc",
    r"allegiance|faithful(ly)?|farewell": "leader discovery, acknowledged",
    r"doubt(s|ed|ful)?": "the lease has expired",
    r"ranks? (is|are|was|were) held|held up": "suspended",
    r"enrol\w*|rosters?|editions?": "reconfigure voters, voter revision, configuration id",
    r"(take|takes|took|taking|in) effect|effective": "is chosen",
    r"(set|sets|setting) aside": "exclude, reject",
    r"asked to leave": "drain, draining",
    r"(is|are|be|was|were) (gone|away)": "is unreachable, has ended",
    r"roads?": "path",
    r"hangs? on": "is attached to",
    r"shelf|shelves|vaults?": "catalog, parity store",
    r"lastingly|laziness": "persistent, lazy copy",
    r"old world": "previous world",
    r"(stand|stands|stood|standing) (still|by)": "paused, spare",
    r"bears?|borne": "tolerates",
    r"aloud|thereof|whither|whence": "-",
}


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, comments, and strings of several words, without code in them."""
    parts: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(id(one) for one in ast.walk(node))
            words = [one.value for one in node.values if isinstance(one, ast.Constant)]
            yield node.lineno, "{}".join(map(str, words))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in parts:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`]*`|^ *\w+: ", "", node.value, flags=re.MULTILINE)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", "", token.string)


ANY = re.compile(rf"\b({'|'.join(DIALECT)})\b", re.IGNORECASE)


def dialect_in(text: str) -> list[str]:
    plain = " ".join(text.split())
    if not ANY.search(plain):
        return []
    return [
        f"{found[0]!r}: {standard}"
        for pattern, standard in DIALECT.items()
        if (found := re.search(rf"\b({pattern})\b", plain, re.IGNORECASE))
    ]


@pytest.mark.parametrize("folder", ["ftrun", "scripts", "tests"])
def test_prose_uses_standard_terms(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {one}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for line, text in prose_of(path.read_text())
        for one in dialect_in(text)
        if folder != "tests" or one not in QUOTED
    ]
    assert not found, "\n".join(found)


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*.json", "profiles/*", "ftrun/**/*.html")
    for path in ROOT.glob(pattern)
)


def lines_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page without its code."""
    text = re.sub(r"^```.*?^```|`[^`]*`", lambda one: "\n" * one[0].count("\n"), text,
                  flags=re.MULTILINE | re.DOTALL)  # fmt: skip
    yield from enumerate(text.splitlines(), 1)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_standard_terms(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {one}: {text.strip()}"
        for line, text in lines_of_page(path.read_text())
        for one in dialect_in(text)
    ]
    assert not found, "\n".join(found)


def test_a_word_of_the_dialect_is_found_in_each_kind_of_prose() -> None:
    source = '"""Docs: whoever hears."""\nx = f"node {1} is silent"  # the lead\ny = "wish"\n'
    found = [one for _, text in prose_of(source) for one in dialect_in(text)]
    assert [one.partition(":")[0] for one in found] == [
        "'silent'", "'whoever'", "'hears'", "'the lead'",
    ]  # fmt: skip
