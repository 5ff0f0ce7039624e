"""Values of modules of several ranks, put together by the names that each rank holds."""

from ftrun.sharding.module_values import merged, modules_with


def test_a_module_contains_the_tensors_below_it() -> None:
    names = ["blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight", "scale"]
    assert modules_with(names) == {"blocks", "blocks.0", "blocks.0.linear", "head"}


def test_the_first_rank_that_holds_a_name_decides() -> None:
    first = ({"a": 1}, {"a", "b"})
    second = ({"a": 2, "b": 3, "c": 4}, {"a", "b", "c"})
    assert merged([first, second]) == {"a": 1, "c": 4}
