"""Ranks are points of a mesh; patterns match whole names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.sharding.rules import Mesh, NamePattern, ranks_alone

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def mesh(*given_sizes: int) -> Mesh:
    names = ("pp", "dp", "tp")[-len(given_sizes) :]
    return Mesh(tuple(zip(names, given_sizes, strict=True)), tuple(n for n in names if n == "dp"))


@given(sizes)
def test_coordinates_and_back(some: list[int]) -> None:
    made = mesh(*some)
    found = [made.coordinates(rank) for rank in range(made.size)]
    assert [made.rank_at(where) for where in found] == list(range(made.size))
    assert len({tuple(where.items()) for where in found}) == made.size


def test_the_last_axis_is_the_quickest() -> None:
    assert mesh(2, 2, 3).coordinates(7) == {"tp": 1, "dp": 0, "pp": 1}
    assert str(mesh(2, 3)) == "dp 2, tp 3"
    assert mesh(2, 3).names == ("dp", "tp")


@given(sizes, sizes)
def test_a_counterpart_is_there_and_is_itself_where_nothing_changes(
    old: list[int], new: list[int]
) -> None:
    before, after = mesh(*old), mesh(*new)
    found = [before.counterpart(after, rank) for rank in range(after.size)]
    assert all(0 <= rank < before.size for rank in found)
    assert old != new or found == list(range(before.size))


def test_shares_of_the_data_go_by_the_axes_of_batches() -> None:
    made = mesh(2, 2, 2)
    assert [made.batch_index(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert made.num_batches == 2
    assert mesh(3).batch_index(2) == 0  # tp alone


def test_another_number_of_ranks_changes_the_axis_of_batches() -> None:
    made = mesh(2, 3)
    assert made.resized(9) == mesh(3, 3)
    assert made.resized(3) == mesh(1, 3)
    assert made.resized(4) is None
    assert made.resized(0) is None
    assert Mesh((("tp", 2),)).resized(4) is None
    for experts, wanted in ((1, 3), (2, None)):
        two = Mesh((("dp", 2), ("ep", experts), ("tp", 2)), ("dp", "ep")).resized(6)
        assert (two and two.size_of("dp")) == wanted


@pytest.mark.parametrize(("axis", "size"), [("dp", 2), ("tp", 3)])
def test_sizes_go_by_name(axis: str, size: int) -> None:
    assert mesh(2, 3).size_of(axis) == size
    assert mesh(2, 3).with_sizes({axis: 5}).size_of(axis) == 5


def test_ranks_next_to_one_see_other_data_and_have_the_same_part() -> None:
    mesh = Mesh((("dp", 3), ("tp", 2)), ("dp",))
    assert mesh.beside(3) == [1, 3, 5]
    assert ranks_alone(3).beside(1) == [0, 1, 2]
    assert Mesh((("tp", 2),)).beside(1) == [1]
    assert not mesh.has_stages
    assert Mesh((("pp", 2),)).has_stages


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


def test_a_pattern_reports_its_words_and_itself() -> None:
    assert NamePattern("a.{n}.*.{m}").words == ("n", "m")
    assert str(NamePattern("a.*")) == "a.*"


def test_a_number_is_all_of_its_digits() -> None:
    assert NamePattern("model.*{n}.w").match("model.layer12.w") == {"n": 12}
    assert NamePattern("*{n}*").match("layers.104.w") == {"n": 104}


def test_another_number_at_the_same_place() -> None:
    pattern = NamePattern("m{turn}.*.{n}.*")
    assert pattern.with_numbers("m1.layers.12.w3", {"turn": 0, "n": 7}) == "m0.layers.7.w3"
