"""Two trees that are equal have no difference; else the path to the first one is told."""

import math

import pytest

from ftrun.sharding.replica_check import TensorContent, difference

TENSOR = TensorContent("F32[3]", 5)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        math.nan,
        {"a": [1, (2.5, "x")], 3: {"b": b"raw"}},
        [{"lr": 0.1, "betas": (0.9, 0.95)}, TENSOR],
    ],
)
def test_equal_trees_do_not_differ(tree: object) -> None:
    assert difference(tree, tree, "it") is None


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": {"lr": 0.1}}, {"a": {"lr": 0.2}}, "it.a.lr"),
        ({"a": 1}, {}, "it.a"),
        ({}, {3: 1}, "it[3]"),
        ([1, 2], [1, 3], "it[1]"),
        ([1], [1, 2], "it"),
        ([1], (1,), "it"),
        (1, 1.0, "it"),
        (True, 1, "it"),
        ([TENSOR], [TensorContent("F32[3]", 6)], "it[0]"),
        ({"a": math.nan}, {"a": 1.0}, "it.a"),
        ({"a": [1]}, {"a": {"b": 1}}, "it.a"),
    ],
)
def test_the_first_difference_is_told_with_its_path(one: object, other: object, path: str) -> None:
    for pair in ((one, other), (other, one)):
        found = difference(*pair, "it")
        assert found is not None
        assert found.path == path
        assert found.one != found.other
