"""Two equal trees have no difference; otherwise the path to the first one is returned."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ftrun.errors import RanksDiffer
from ftrun.ids import Rank
from ftrun.sharding.replica_check import (
    TensorContent,
    check_replicas,
    difference,
    differing,
    have_equal_content,
    padding_notes,
    unequal_holder,
)
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.source_index import ByteRange, SourceIndex
from ftrun.sharding.world_layout import lay_out, read_world, stored_entries
from ftrun.snapshot.boxes import Box, TensorPart, whole
from ftrun.snapshot.layout import SMALL_BYTES
from tests.unit.sharding.worlds import Array, MadeShards, array

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
def test_the_first_difference_is_reported_with_its_path(
    one: object, other: object, path: str
) -> None:
    for pair in ((one, other), (other, one)):
        found = difference(*pair, "it")
        assert found is not None
        assert found.path == path
        assert found.one != found.other


# --- by rules ---


RULES = read_rules(
    "mesh: {dp: 2, tp: 1}\nreplicate: [small, large, extra]\nown: [own]\n"
    "shard: [{name: padded, axis: tp, dim: 0, size: 2, pad_to: 3}]",
    source="x",
)
LARGE = np.zeros(SMALL_BYTES, np.float32)


def problems(*ranks: Mapping[str, Array]) -> list[str]:
    whole = {"small": array(1), "large": LARGE, "extra": array(2), "own": array(3)}
    made = MadeShards([{**whole, "padded": array(1, 2, 9), **held} for held in ranks])
    stored = stored_entries(made.headers, made.parts(), source="x")
    return differing(made, read_world(RULES, stored))


def test_what_is_alike_is_alike_whatever_is_next_to_it() -> None:
    assert problems({}, {}) == []
    assert problems({}, {"own": array(7)}) == []
    assert problems({}, {"padded": array(1, 2, 8)}) == []


@pytest.mark.parametrize(
    ("name", "other"), [("small", array(5)), ("large", LARGE + 1), ("padded", array(1, 3, 9))]
)
def test_what_differs_is_named_with_both_ranks(name: str, other: Array) -> None:
    (problem,) = problems({}, {name: other})
    assert problem.startswith(f"{name} is F32")
    assert "ranks 0 and 1" in problem


@pytest.mark.parametrize(
    ("padding", "pad_to", "reported"),
    [(9, 4, "padding of a, b, c, d, e and 1 more that is not zero"), (0, 4, ""), (9, 3, "")],
)
def test_padding_that_is_lost_is_named_if_it_is_not_zero(
    padding: float, pad_to: int, reported: str
) -> None:
    text = "mesh: {{dp: 2, tp: 1}}\nshard: [{{name: '*', axis: tp, dim: 0, size: 2, pad_to: {}}}]"
    made = MadeShards([dict.fromkeys("abcdef", array(1, 2, padding))] * 2)
    before = read_world(
        read_rules(text.format(3), source="x"),
        stored_entries(made.headers, made.parts(), source="x"),
    )
    after = lay_out(read_rules(text.format(pad_to), source="y"), before)
    notes = padding_notes(made, before, after)
    assert len(notes) == bool(reported)
    assert all(reported in note for note in notes)


def test_what_not_every_rank_has_is_compared_where_it_is() -> None:
    rules = read_rules("mesh: {pp: 2, dp: 2}\nunique: [{name: w, axis: pp, at: last}]", source="x")
    made = MadeShards([{"w": array(rank)} if rank > 1 else {} for rank in range(4)])
    stored = stored_entries(made.headers, made.parts(), source="x")
    (problem,) = differing(made, read_world(rules, stored))
    assert "ranks 2 and 3" in problem


# --- by part metadata ---


class ReadShards:
    """Shards that are read by offsets; records the announced reads."""

    def __init__(self, *ranks: Mapping[str, Array], part: TensorPart | None = None) -> None:
        self._made = MadeShards(ranks, part=part)
        self.headers = {Rank(at): head for at, head in enumerate(self._made.headers)}
        self.index = SourceIndex(self.headers, prefer=Rank(0))
        self.expected: list[ByteRange] = []

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        self.expected += ranges

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._made.data[rank])[offset : offset + num_bytes]

    def check(self, **boxes: Box) -> None:
        saved = {name: tensor for name in boxes if (tensor := self.index.tensor(name)) is not None}
        check_replicas(saved, boxes, self)


def test_equal_digests_prove_equality_without_a_read() -> None:
    shards = ReadShards(*[{"small": array(1, 2), "large": LARGE}] * 3)
    shards.check(small=Box((0,), (2,)), large=whole(LARGE.shape))
    assert shards.expected == []


def test_a_small_tensor_is_compared_by_content_if_its_neighbour_differs() -> None:
    shards = ReadShards(*({"small": array(1), "extra": array(rank)} for rank in (2, 3)))
    shards.check(small=Box((0,), (1,)))
    assert [one.rank for one in shards.expected] == [0, 1]
    with pytest.raises(RanksDiffer) as caught:
        shards.check(small=Box((0,), (1,)), extra=Box((0,), (1,)))
    assert (caught.value.key, caught.value.ranks) == ("extra", (0, 1))


def test_a_large_tensor_that_differs_is_named_without_a_read() -> None:
    shards = ReadShards({"large": LARGE}, {"large": LARGE}, {"large": LARGE + 1})
    with pytest.raises(RanksDiffer) as caught:
        shards.check(large=whole(LARGE.shape))
    assert (caught.value.key, caught.value.ranks) == ("large", (0, 2))
    assert shards.expected == []


def have_equal(shards: ReadShards, one: str, other: str) -> bool:
    tensors = [shards.index.tensor(name) for name in (one, other)]
    assert tensors[0] is not None
    assert tensors[1] is not None
    return have_equal_content(tensors[0], tensors[1], shards)


def test_tensors_of_two_stages_are_compared_by_content() -> None:
    shards = ReadShards({"a": array(1, 2), "b": LARGE}, {"c": array(1, 2), "d": LARGE})
    assert have_equal(shards, "a", "c")
    assert have_equal(shards, "b", "d")
    shards = ReadShards({"a": array(1, 2), "b": LARGE}, {"c": array(1, 3), "d": LARGE + 1})
    assert not have_equal(shards, "a", "c")
    assert not have_equal(shards, "b", "d")


def test_chunks_that_are_not_read_are_not_compared() -> None:
    part = TensorPart((4,), (2,))
    shards = ReadShards({"w": array(1, 2)}, {"w": array(3, 4)}, part=part)
    shards.check(w=Box((0,), (2,)))
    with pytest.raises(RanksDiffer, match="w"):
        shards.check(w=Box((0,), (3,)))


def test_a_chunk_with_one_holder_has_no_replica() -> None:
    shards = ReadShards({"w": array(1)}, {})
    tensor = shards.index.tensor("w")
    assert tensor is not None
    assert unequal_holder(tensor.chunks[0], shards.headers) is None
