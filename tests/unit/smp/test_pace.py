"""A checkpoint is written no faster than is allowed, and in a hurry as fast as it goes."""

import threading
import time

import pytest

from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.storage.pace import Throttle

MIB = 1 << 20


def took_s(throttle: Throttle, pieces: int) -> float:
    began_s = time.monotonic()
    for _ in range(pieces):
        throttle(MIB)
    return time.monotonic() - began_s


def test_without_a_limit_nobody_waits() -> None:
    assert took_s(Throttle(threading.Event()), 1000) < 20.0


def test_the_rate_is_kept_over_many_pieces_and_nothing_is_saved_up() -> None:
    throttle = Throttle(threading.Event())
    throttle.bytes_per_s = 20 * MIB
    assert took_s(throttle, 11) >= 0.45
    time.sleep(0.3)
    assert took_s(throttle, 11) >= 0.45


def test_in_a_hurry_a_waiting_writer_goes_on() -> None:
    throttle = Throttle(threading.Event())
    throttle.bytes_per_s = MIB / 600
    throttle(MIB)
    timer = threading.Timer(0.1, setattr, (throttle, "bytes_per_s", 0.0))
    timer.start()
    assert took_s(throttle, 5) < 60
    timer.join()


def test_a_waiting_writer_is_told_that_all_is_given_up() -> None:
    stop = threading.Event()
    throttle = Throttle(stop)
    throttle.bytes_per_s = MIB / 600
    throttle(MIB)
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(CheckpointError, match="given up"):
        throttle(MIB)
    timer.join()
