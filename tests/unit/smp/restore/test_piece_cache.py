"""Ranks of a node get the pieces of other nodes from one fetch, with bounded memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from ftrun.errors import FetchFailed
from ftrun.smp.restore.piece_cache import PieceCache, PieceKey

SIZE = 1000
WAIT_S = 20.0


def content(key: PieceKey) -> bytes:
    digest, size = key
    return bytes([digest % 251]) * size


class Reader:
    """One rank: its memory, and what it has fetched itself."""

    def __init__(self, cache: PieceCache, before: Callable[[], object] = lambda: None) -> None:
        self.fetched: list[PieceKey] = []
        self.rooms: dict[PieceKey, memoryview] = {}
        self.missing: set[PieceKey] = set()
        self._cache = cache
        self._before = before

    def read(self, digests: Sequence[int], missing: Sequence[int] = ()) -> "Reader":
        self.rooms = {(at, SIZE): memoryview(bytearray(SIZE)) for at in digests}

        def fetch(keys: Sequence[PieceKey]) -> list[PieceKey]:
            self.fetched += keys
            self._before()
            for key in keys:
                if key[0] not in missing:
                    self.rooms[key][:] = content(key)
            return [key for key in keys if key[0] in missing]

        self.missing = self._cache.fill(self.rooms, fetch)
        for key, room in self.rooms.items():
            assert key in self.missing or bytes(room) == content(key)
        return self


def test_a_piece_is_fetched_once_for_two_ranks_also_at_the_same_time() -> None:
    cache = PieceCache(lambda: 10 * SIZE)
    first_fetches, second_fetches = Event(), Event()

    def slow() -> None:
        first_fetches.set()
        assert second_fetches.wait(WAIT_S), "the second rank waits, and has not fetched its own"

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Reader(cache, slow).read, range(4))
        assert first_fetches.wait(WAIT_S)
        second = threads.submit(Reader(cache, second_fetches.set).read, range(2, 6))
        assert [at for at, _ in first.result(WAIT_S).fetched] == [0, 1, 2, 3]
        assert [at for at, _ in second.result(WAIT_S).fetched] == [4, 5]
    assert Reader(cache).read(range(6)).fetched == []
    assert cache.num_bytes == 6 * SIZE


@pytest.mark.parametrize("failure", ["missing", "error"])
def test_a_rank_whose_partner_fails_fetches_by_itself(failure: str) -> None:
    cache = PieceCache(lambda: 10 * SIZE)
    begun, may_fail = Event(), Event()

    def fails() -> None:
        begun.set()
        assert may_fail.wait(WAIT_S)
        if failure == "error":
            raise FetchFailed("cancelled")

    def joined() -> "Reader":
        may_fail.set()
        return Reader(cache).read([1, 2])

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Reader(cache, fails).read, [1, 2], missing=[2])
        assert begun.wait(WAIT_S)
        second = threads.submit(joined).result(WAIT_S)
        if failure == "error":
            with pytest.raises(FetchFailed):
                first.result(WAIT_S)
        else:
            assert first.result(WAIT_S).missing == {(2, SIZE)}
    assert not second.missing
    assert (2, SIZE) in second.fetched


def test_memory_is_bounded_and_the_oldest_pieces_are_fetched_again() -> None:
    cache = PieceCache(lambda: 10 * SIZE)
    for at in range(0, 100, 3):
        Reader(cache).read(range(at, at + 3))
        assert cache.num_bytes <= 10 * SIZE
    assert Reader(cache).read(range(96, 99)).fetched == []
    assert len(Reader(cache).read(range(3)).fetched) == 3
    Reader(cache).read(range(200, 211))
    assert cache.num_bytes <= 10 * SIZE, "a request above the limit is not kept"


def test_after_forget_nothing_is_kept() -> None:
    cache = PieceCache(lambda: 10 * SIZE)
    assert not cache.forget()
    cache = PieceCache(lambda: 10 * SIZE)
    Reader(cache).read([1])
    assert cache.forget()
    assert len(Reader(cache).read([1]).fetched) == 1
    assert cache.num_bytes == 0


def test_memory_that_the_kernel_refuses_costs_a_second_fetch() -> None:
    cache = PieceCache(lambda: 1 << 62)
    wanted = {(1, 1 << 60): memoryview(b"")}
    assert not cache.fill(wanted, lambda keys: ())
    assert cache.num_bytes == 0


def test_a_share_of_the_free_memory_is_used_by_default() -> None:
    cache = PieceCache()
    Reader(cache).read([1])
    assert cache.num_bytes == SIZE
