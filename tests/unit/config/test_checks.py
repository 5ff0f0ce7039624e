"""The check of plain values reports every problem with its place, the allowed values, the value."""

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from ftrun.config.checks import Problem, allowed, check, description_of, fields_of, is_text
from ftrun.config.profile import Profile


class Color(Enum):
    """Choices as an enum."""

    RED = "red"
    BLUE = "blue"


def doubled(value: object) -> object:
    if value == "no":
        raise ValueError("no is refused")
    return value * 2 if isinstance(value, int) else value


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """One of each kind of field."""

    need: int
    color: Color = Color.RED
    mode: Literal["warm", "fresh"] = "warm"
    twice: Annotated[int, Meta(le=10, extra={"read": doubled})] = 1
    names: list[str] = []
    word: Annotated[
        str, Meta(extra={"problems": lambda found: ["one too many"] if found[1:] else []})
    ] = ""
    lasts: float | None = msgspec.field(default=None, name="for")


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A struct of sections."""

    leaf: Leaf | None = None
    leaves: list[Leaf] = []


def problems(value: object, wanted: Any = Tree) -> list[str]:
    found: list[Problem] = []
    check(value, wanted, found)
    return [str(one) for one in found]


def test_every_problem_is_found_with_its_place() -> None:
    value = {
        "leaf": {"need": 1, "color": "blu", "mode": 3, "lasts": 1.0, "for": "x", 5: 5},
        "leaves": [{"names": ["a", "b"], "need": True}, 7, {"twice": "no", "names": [1]}],
        "lea": 1,
    }
    assert problems(value) == [
        "leaf.color: should be one of red, blue, and is 'blu'; did you mean blue?",
        "leaf.mode: should be one of warm, fresh, and is 3",
        "leaf.lasts: there is no such key; there are need, color, mode, twice, names, word, for",
        "leaf.for: should be a number, and is 'x'",
        "leaf.5: there is no such key; there are need, color, mode, twice, names, word, for",
        "leaves[0].need: should be a whole number, and is True",
        "leaves[1]: should be keys with values, and is 7",
        "leaves[2].twice: no is refused",
        "leaves[2].names[0]: should be text, and is 1",
        "leaves[2]: need is missing",
        "lea: there is no such key; did you mean leaf?",
    ]


def test_a_rule_beyond_the_type_is_asked_for_a_value_of_that_type_only() -> None:
    assert problems({"need": 1, "word": "ab"}, Leaf) == ["word: one too many"]
    assert problems({"need": 1, "word": 3}, Leaf) == ["word: should be text, and is 3"]
    assert problems([], Leaf) == ["should be keys with values, and is []"]


def test_a_value_is_read_before_it_is_checked_and_shown_as_given() -> None:
    found: list[Problem] = []
    assert check({"need": 1, "twice": 5}, Leaf, found) == {"need": 1, "twice": 10}
    assert found == []
    said = "twice: should be a whole number of at most 10, and is 6"
    assert problems({"need": 1, "twice": 6}, Leaf) == [said]
    assert problems({"leaf": None}) == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (bool, "true or false"),
        (str | None, "text"),
        (Annotated[str, Meta(min_length=1)], "text that is not empty"),
        (Annotated[float, Meta(gt=0)], "a number above 0"),
        (Annotated[float, Meta(gt=0, le=1)], "a number above 0 and at most 1"),
        (Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="x")],
         "a whole number of at least 1"),
        (Annotated[int, Meta(ge=0, le=65535)], "a whole number from 0 to 65535"),
        (Annotated[int | str, Meta(extra={"wanted": "auto or 3"})], "auto or 3"),
        (list[str], "a list"),
        (dict[str, int], "keys with values"),
    ],
)  # fmt: skip
def test_what_is_allowed_is_reported_in_words(wanted: Any, words: str) -> None:
    assert allowed(wanted) == words


def test_only_text_is_not_read_as_yaml() -> None:
    assert is_text(str | None)
    assert is_text(Literal["a", "b"])
    assert not is_text(Literal["auto"] | int)
    assert not is_text(float)


def test_every_setting_has_a_meaning() -> None:
    for name, section in fields_of(Profile).items():
        for key, one in fields_of(section.type).items():
            assert description_of(one.type), f"{name}.{key}"
