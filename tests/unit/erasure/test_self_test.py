"""A codec that is wrong in one place is found before it is used."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

import pytest

from ftrun.erasure.codec import Buffer, Codec
from ftrun.erasure.isal import IsalCodec
from ftrun.erasure.pyeclib_codec import PyeclibCodec
from ftrun.erasure.self_test import MAX_SURVIVOR_SETS, _nth_set, self_test, survivor_sets
from ftrun.errors import InternalError


@pytest.mark.parametrize("kind", [IsalCodec, PyeclibCodec])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (2, 1), (3, 1), (4, 2), (6, 2), (8, 4)])
def test_all_survivor_sets_are_tried(kind: type[Codec], k: int, m: int) -> None:
    assert self_test(kind(k, m)) == comb(k + m, k)


def test_of_very_many_sets_a_sample_is_tried() -> None:
    sets = list(survivor_sets(12, 6))
    assert len(sets) == len({*sets}) == MAX_SURVIVOR_SETS < comb(18, 6)
    assert sets[0] == tuple(range(12))
    assert sets[-1] == tuple(range(6, 18))
    assert sets == list(survivor_sets(12, 6))


@pytest.mark.parametrize(("n", "k"), [(5, 1), (7, 3), (9, 8), (6, 6)])
def test_a_set_is_found_by_its_number(n: int, k: int) -> None:
    found = [_nth_set(rank, n, k) for rank in range(comb(n, k))]
    assert found == list(combinations(range(n), k))


class Faulty(IsalCodec):
    """Wrong in one bit, in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__(3, 2)
        self._where = where

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        super().encode(data, parity)
        self._break("encode", parity[1])

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        super().update(position, data, parity_index, parity, first=first)
        self._break("update", parity)

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        super().rebuild(have, want)
        if set(have) == {0, 3, 4}:
            self._break("rebuild", want[2])

    def _break(self, where: str, block: Buffer) -> None:
        if where == self._where:
            memoryview(block)[-1] ^= 64


def test_a_wrong_parity_is_found() -> None:
    with pytest.raises(InternalError, match="parity block 1"):
        self_test(Faulty("encode"))


def test_a_wrong_update_is_found() -> None:
    with pytest.raises(InternalError, match="parity block 0"):
        self_test(Faulty("update"))


def test_a_wrong_rebuild_is_found_and_its_set_is_named() -> None:
    with pytest.raises(InternalError, match=r"block 2, rebuilt from blocks \[0, 3, 4\]"):
        self_test(Faulty("rebuild"))
