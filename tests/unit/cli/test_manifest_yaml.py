"""What is written is what a reader of YAML gets, whatever the words are."""

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.tools.manifests.yaml_text import WIDTH, Commented, Tree, plain, scalar, to_yaml

_letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
_texts = st.text(_letters, max_size=30)
_values = st.booleans() | st.integers(-(10**9), 10**9) | _texts
_keys = st.from_regex(r"[a-z][a-z./-]{0,8}", fullmatch=True)
_reasons = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=200)


def _grown(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    said = st.builds(Commented, _reasons, inner)
    branch = inner | said
    return st.lists(branch, max_size=4) | st.dictionaries(_keys, branch, max_size=4)


_trees = st.recursive(_values, _grown, max_leaves=12)
_documents = st.dictionaries(_keys, _trees | st.builds(Commented, _reasons, _trees), min_size=1)


@settings(max_examples=40)
@given(st.lists(_documents, min_size=1, max_size=2))
def test_a_reader_gets_the_tree(documents: list[dict[str, Tree]]) -> None:
    text = to_yaml(documents, head="what this is\nand more")
    assert list(yaml.safe_load_all(text)) == [plain(one) for one in documents]


NUMBER_OR_WORD = re.compile(
    r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|nan)|0[xob][\da-fA-F_]+"
    r"|[-+\d][\d_]*(:[0-5]?\d)+(\.\d*)?|y|n|yes|no|on|off|true|false|null|~|",
    re.IGNORECASE,
)
"""What readers of YAML 1.1 or 1.2 take for something else than text."""


@pytest.mark.parametrize("text", ["1e-4", "1_0", "0o7", "12:30:45", ".5", "Yes", "off", "~", ""])
def test_text_that_looks_like_another_kind_is_quoted(text: str) -> None:
    assert scalar(text) == f'"{text}"'


@given(_texts)
def test_what_is_plain_can_be_nothing_but_text(text: str) -> None:
    if not scalar(text).startswith('"'):
        assert not NUMBER_OR_WORD.fullmatch(text)
        assert not re.search(r"[\s#,\[\]{}&*!|>'\"%@`]|: |:$|^[-?]", text)


def test_what_is_said_stands_above_and_is_folded() -> None:
    tree: dict[str, Tree] = {
        "a": Commented("word " * 40, {"b": [Commented("of the first", {"c": 1, "d": {}}), "x"]}),
    }
    lines = to_yaml([tree]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line for line in lines if not line.startswith("# word")] == [
        "a:",
        "  b:",
        "  # of the first",
        "  - c: 1",
        "    d: {}",
        "  - x",
    ]
