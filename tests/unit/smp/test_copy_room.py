"""Memory for copies is kept where it is soon needed again, and is nobody's loss."""

import pytest

from ftrun import clock
from ftrun.smp.checkpoint.storage.copy_room import KEEP_S, CopyBuffers


def room(free_bytes: int = 1 << 40) -> CopyBuffers:
    return CopyBuffers(lambda: free_bytes)


def fill(blocks: list[memoryview] | None, mark: bytes) -> None:
    assert blocks is not None
    for block in blocks:
        block[:1] = mark


def test_each_copy_has_its_size_and_memory_of_its_own() -> None:
    blocks = room().lend([10, 20, 10])
    assert blocks is not None
    assert [len(block) for block in blocks] == [10, 20, 10]
    for mark, block in zip((b"a", b"b", b"c"), blocks, strict=True):
        block[:1] = mark
    assert [bytes(block[:1]) for block in blocks] == [b"a", b"b", b"c"]


def test_memory_is_lent_again_and_what_does_not_fit_any_more_goes() -> None:
    made = room()
    fill(made.lend([10, 20]), b"x")
    made.begin()
    again = made.lend([20, 10, 30])
    assert again is not None
    assert [bytes(block[:1]) for block in again] == [b"x", b"x", b"\0"]
    assert made.num_bytes == 60
    made.begin()
    assert [bytes(block[:1]) for block in made.lend([10]) or []] == [b"x"]
    assert made.num_bytes == 60, "the others are copied again the next time"
    made.begin()
    assert made.lend([11]) is not None
    assert made.num_bytes == 11, "of another world"


def test_what_is_lent_is_nobody_elses_before_the_next_try() -> None:
    made = room()
    fill(made.lend([10, 10]), b"x")
    made.begin()
    first = made.lend([10])
    fill(first, b"1")
    fill(made.lend([10, 10]), b"2")
    made.tidy()
    fill(made.lend([10]), b"3")
    assert first is not None
    assert bytes(first[0][:1]) == b"1"
    assert made.num_bytes == 40


def test_what_is_there_already_asks_for_no_free_memory() -> None:
    free = [30]
    made = CopyBuffers(lambda: free[0])
    assert made.lend([30, 1]) is None
    assert made.num_bytes == 0
    assert made.lend([1, 2]) is not None
    made.begin()
    free[0] = 12
    made.begin()
    assert made.lend([2, 1]) is not None, "four times as much is free"
    made.begin()
    assert made.lend([2, 1, 13]) is None
    assert made.num_bytes == 0, "who has no room for all has nothing"


def test_memory_that_the_kernel_refuses_is_not_there() -> None:
    made = room(1 << 62)
    assert made.lend([1 << 60]) is None
    assert made.lend([10]) is not None
    made.drop()
    assert made.num_bytes == 0


@pytest.mark.parametrize(
    ("passed_s", "free_bytes", "kept"),
    [(0.0, 400, 100), (KEEP_S - 0.1, 400, 100), (KEEP_S, 400, 0), (0.0, 399, 0)],
)
def test_it_goes_back_after_a_while_or_where_it_is_missed(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, free_bytes: int, kept: int
) -> None:
    now_s = [50.0]
    monkeypatch.setattr(clock, "now_s", lambda: now_s[0])
    made = room(free_bytes)
    made.tidy()
    assert made.lend([60, 40]) is not None
    now_s[0] += passed_s
    made.begin()
    assert made.num_bytes == kept
