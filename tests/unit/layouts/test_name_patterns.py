"""A pattern matches whole names; only `*` and numbers in braces mean something."""

import pytest

from ftrun.sharding.name_patterns import NamePattern


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("model.w", "model.w", {}),
        ("model.w", "model.w2", None),
        ("model.w", "modelxw", None),
        ("model.*.w", "model.a.b.w", {}),
        ("model.*", "model.", {}),
        ("*", "", {}),
        ("layers.{n}.*", "layers.12.w", {"n": 12}),
        ("layers.{n}.*", "layers.x.w", None),
        ("{a}-{b}", "1-2", {"a": 1, "b": 2}),
        ("optimizer.params[0][{n}]", "optimizer.params[0][7]", {"n": 7}),
        ("{}", "{}", {}),
    ],
)
def test_what_matches(pattern: str, name: str, found: dict[str, int] | None) -> None:
    assert NamePattern(pattern).match(name) == found


def test_a_pattern_says_its_words_and_itself() -> None:
    assert NamePattern("a.{n}.*.{m}").words == ("n", "m")
    assert str(NamePattern("a.*")) == "a.*"


def test_a_number_is_all_of_its_digits() -> None:
    assert NamePattern("model.*{n}.w").match("model.layer12.w") == {"n": 12}
    assert NamePattern("*{n}*").match("layers.104.w") == {"n": 104}


def test_another_number_at_the_same_place() -> None:
    pattern = NamePattern("m{turn}.*.{n}.*")
    assert pattern.with_numbers("m1.layers.12.w3", {"turn": 0, "n": 7}) == "m0.layers.7.w3"
