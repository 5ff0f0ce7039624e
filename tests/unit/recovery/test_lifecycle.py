"""Every second of a run is in one class, and goodput is the productive share."""

import pytest

from ftrun.recovery.lifecycle import (
    AGAIN,
    DETECTION,
    PAUSED,
    PRODUCTIVE,
    RECOVERY,
    SAVING,
    START,
    TimeAccounting,
)


class Clock:
    """The accounts and their time."""

    def __init__(self) -> None:
        self.book = TimeAccounting(100.0)
        self.now_s = 100.0

    def go(self, life: str, seconds: float, *, blocked_s: float = 0.0, **flags: bool) -> None:
        """The run is in this state from now on, and this time passes."""
        states = {"is_paused": False, "has_stepped": False, **flags}
        self.book.turn(life, blocked_s=blocked_s, now_s=self.now_s, **states)
        self.now_s += seconds
        self.book.turn(life, blocked_s=blocked_s, now_s=self.now_s, **states)


def test_a_failure_and_what_it_cost() -> None:
    clock = Clock()
    clock.go("launch", 2.0)
    clock.go("check", 8.0)
    clock.go("run", 80.0)
    clock.go("suspect", 1.0)
    clock.book.move(PRODUCTIVE, DETECTION, 10.0)
    clock.go("recover", 2.0)
    clock.go("verify", 3.0)
    clock.go("verify", 4.0, has_stepped=True)
    clock.go("run", 100.0)
    seconds = clock.book.seconds
    assert seconds[START] == pytest.approx(10.0)
    assert seconds[PRODUCTIVE] == pytest.approx(170.0)
    assert seconds[DETECTION] == pytest.approx(11.0)
    assert seconds[RECOVERY] == pytest.approx(5.0)
    assert seconds[AGAIN] == pytest.approx(4.0)
    assert sum(seconds.values()) == pytest.approx(clock.now_s - 100.0)
    assert clock.book.goodput(clock.now_s) == pytest.approx(0.85)


def test_time_for_snapshots_is_taken_off_what_was_productive() -> None:
    clock = Clock()
    clock.go("run", 10.0)
    clock.go("run", 10.0, blocked_s=0.5)
    clock.go("run", 10.0, blocked_s=1.5)
    clock.go("run", 10.0, blocked_s=0.25)  # another generation restarts the count
    assert clock.book.seconds[SAVING] == pytest.approx(1.75)
    assert sum(clock.book.seconds.values()) == pytest.approx(40.0)


def test_waiting_for_nodes_and_growing_are_no_start() -> None:
    clock = Clock()
    clock.go("run", 10.0)
    clock.go("recover", 20.0, is_paused=True)
    clock.go("check", 5.0)
    assert clock.book.seconds[PAUSED] == pytest.approx(20.0)
    assert clock.book.seconds[RECOVERY] == pytest.approx(5.0)
    assert clock.book.seconds[START] == 0.0


def test_no_more_is_moved_than_is_there_and_no_time_has_no_goodput() -> None:
    book = TimeAccounting(0.0)
    book.move(PRODUCTIVE, DETECTION, 5.0)
    assert sum(book.seconds.values()) == 0.0
    assert book.goodput(0.0) is None


def test_counters_never_go_back_and_count_what_continues() -> None:
    book = TimeAccounting(0.0)
    book.turn("run", is_paused=False, has_stepped=False, blocked_s=0.0, now_s=0.0)
    assert book.counters(50.0)[PRODUCTIVE] == pytest.approx(50.0)
    book.turn("suspect", is_paused=False, has_stepped=False, blocked_s=0.0, now_s=60.0)
    assert book.counters(60.0)[PRODUCTIVE] == pytest.approx(60.0)
    book.move(PRODUCTIVE, DETECTION, 12.0)
    assert book.counters(61.0)[PRODUCTIVE] == pytest.approx(60.0)
    assert book.counters(61.0)[DETECTION] == pytest.approx(13.0)
    assert book.goodput(60.0) == pytest.approx(0.8)
