"""A reader of YAML gets the written values, whatever their text is."""

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.tools.manifests.yaml_text import WIDTH, listing, scalar, wrapped

_letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
_texts = st.text(_letters, max_size=30)


@settings(max_examples=40)
@given(st.lists(_texts, max_size=12))
def test_a_reader_gets_the_words(words: list[str]) -> None:
    text = f"a:\n  command:{listing(words, 2, nested=20)}\n"
    assert yaml.safe_load(text) == {"a": {"command": words}}
    on_one_line = [line for line in text.splitlines() if line.startswith("  command: [")]
    assert all(len(line) <= WIDTH - 20 for line in on_one_line)


NUMBER_OR_WORD = re.compile(
    r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|nan)|0[xob][\da-fA-F_]+"
    r"|[-+\d][\d_]*(:[0-5]?\d)+(\.\d*)?|y|n|yes|no|on|off|true|false|null|~|",
    re.IGNORECASE,
)
"""Text that readers of YAML 1.1 or 1.2 take for another type."""


@pytest.mark.parametrize("text", ["1e-4", "1_0", "0o7", "12:30:45", ".5", "Yes", "off", "~", ""])
def test_text_that_looks_like_another_kind_is_quoted(text: str) -> None:
    assert scalar(text) == f'"{text}"'


@given(_texts)
def test_what_is_plain_can_be_nothing_but_text(text: str) -> None:
    if not scalar(text).startswith('"'):
        assert not NUMBER_OR_WORD.fullmatch(text)
        assert not re.search(r"[\s#,\[\]{}&*!|>'\"%@`]|: |:$|^[-?]", text)


def test_only_comments_are_wrapped() -> None:
    lines = wrapped("  # " + "word " * 40)
    assert max(map(len, lines)) <= WIDTH
    assert all(line.startswith("  # word") for line in lines)
    assert " ".join(line.removeprefix("  # ") for line in lines).split() == ["word"] * 40
    for line in ("x: " + "word " * 40, "#SBATCH " + "w " * 90, "#   kubectl " + "w " * 90, "#", ""):
        assert wrapped(line) == [line]
