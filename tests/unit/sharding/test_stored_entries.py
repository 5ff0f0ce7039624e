"""What ranks store is told with what it is state of; what should be alike is compared."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import xxhash

from ftrun.errors import RulesMismatch
from ftrun.sharding.replica_check import differing
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.stored_entries import plain_bytes, stored_entries
from ftrun.sharding.world_layout import StoredEntry, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import PLAIN_NAME, SMALL_BYTES, CopyTiming, LayoutEntry, make_layout
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.shard_header import ShardHeader
from tests.unit.sharding.worlds import Array


class Made:
    """Shards in memory."""

    def __init__(
        self,
        ranks: Sequence[Mapping[str, Array]],
        state: object = None,
        part: TensorPart | None = None,
    ) -> None:
        saved = {"opt": {"state": state or {}}}
        self.plain = plain.encode({"optimizer_state": plain.encode(saved)})
        made = [self._made(held, part) for held in ranks]
        self.heads = [head for head, _ in made]
        self.data = [data for _, data in made]
        self.num_reads = 0

    def _made(
        self, held: Mapping[str, Array], part: TensorPart | None
    ) -> tuple[ShardHeader, bytes]:
        entries = [
            LayoutEntry(n, "F32", a.shape, CopyTiming.LAZY, part=part) for n, a in held.items()
        ]
        layout = make_layout(entries, plain_bytes=len(self.plain) + 8)
        data = bytearray(layout.data_bytes)
        for entry in layout.entries:
            raw = held[entry.name].tobytes() if entry.name in held else b""
            if entry.name == PLAIN_NAME:
                raw = len(self.plain).to_bytes(8, "little") + self.plain
            data[entry.offset : entry.offset + len(raw)] = raw
        digests = [
            xxhash.xxh3_64_intdigest(data[p.offset : p.offset + p.num_bytes]) for p in layout.pieces
        ]
        table = memoryview(np.array(digests, np.uint64).tobytes()).cast("Q")
        return ShardHeader(layout, 0, table), bytes(data)

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        self.num_reads += 1
        at = self.heads[rank].entries[name].offset + first_byte
        return memoryview(self.data[rank])[at : at + num_bytes]

    def parts(self) -> list[dict[str, bytes]]:
        return [
            plain_bytes(head, lambda at, size, data=data: memoryview(data)[at : at + size])
            for head, data in zip(self.heads, self.data, strict=True)
        ]


def array(*items: float) -> Array:
    return np.array(items, np.float32)


def test_state_is_told_with_its_parameter() -> None:
    state = {
        "w": {
            "n": 7,
            "mean": TensorRef("s.mean"),
            "more": [TensorRef("s.one"), (TensorRef("s.two"),)],
        },
        3: {"x": TensorRef("s.global")},
    }
    names = ("w", "s.mean", "s.one", "s.two", "s.global")
    made = Made([dict.fromkeys(names, array(1, 2))], state)
    (found,) = stored_entries(made.heads, made.parts(), source="x")
    owners = {one.name: one.of for one in found}
    assert owners == {"w": None, "s.mean": "w", "s.one": "w", "s.two": "w", "s.global": None}
    assert found[0] == StoredEntry("w", "F32", (2,))


def test_dtensors_need_no_rules() -> None:
    made = Made([{"w": array(1, 2)}], part=TensorPart((4,), (2,)))
    with pytest.raises(RulesMismatch, match="w is a DTensor"):
        stored_entries(made.heads, made.parts(), source="x")


def test_what_no_session_has_saved_is_refused_in_words() -> None:
    made = Made([{"w": array(1, 2)}])
    with pytest.raises(RulesMismatch, match=r"saved by ftrun\.dcp"):
        stored_entries(made.heads, [{"objects": b""}], source="x")


RULES = read_rules(
    "mesh: {dp: 2, tp: 1}\nreplicate: [small, large, beside]\nown: [own]\n"
    "shard: [{name: padded, axis: tp, dim: 0, size: 2, pad_to: 3}]",
    source="x",
)
LARGE = np.zeros(SMALL_BYTES, np.float32)


def problems(*ranks: Mapping[str, Array]) -> list[str]:
    whole = {"small": array(1), "large": LARGE, "beside": array(2), "own": array(3)}
    made = Made([{**whole, "padded": array(1, 2, 9), **held} for held in ranks])
    stored = stored_entries(made.heads, made.parts(), source="x")
    return differing(made, read_world(RULES, stored))


def test_what_is_alike_is_alike_whatever_lies_beside_it() -> None:
    assert problems({}, {}) == []
    assert problems({}, {"own": array(7)}) == []
    assert problems({}, {"padded": array(1, 2, 8)}) == []


@pytest.mark.parametrize(
    ("name", "other"),
    [("small", array(5)), ("large", LARGE + 1), ("padded", array(1, 3, 9))],
)
def test_what_differs_is_named_with_both_ranks(name: str, other: Array) -> None:
    (problem,) = problems({}, {name: other})
    assert problem.startswith(f"{name} is F32")
    assert "ranks 0 and 1" in problem


def test_what_not_every_rank_has_is_compared_where_it_is() -> None:
    rules = read_rules("mesh: {pp: 2, dp: 2}\nunique: [{name: w, axis: pp, at: last}]", source="x")
    made = Made([{"w": array(rank)} if rank > 1 else {} for rank in range(4)])
    stored = stored_entries(made.heads, made.parts(), source="x")
    (problem,) = differing(made, read_world(rules, stored))
    assert "ranks 2 and 3" in problem
