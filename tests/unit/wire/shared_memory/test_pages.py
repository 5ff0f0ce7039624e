"""The newest boundary records of a heartbeat page are kept, and a torn one is not read."""

import mmap

from ftrun.monitor.repeat_check import BoundaryRecord
from ftrun.wire.shared_memory.pages import (
    MAX_SAMPLES,
    NUM_RECORDS,
    PAGE_BYTES,
    HeartbeatField,
    SharedPage,
    create_page,
)

DIGESTS = bytes(range(4 * MAX_SAMPLES))


def test_a_record_comes_back() -> None:
    page = SharedPage(create_page("test"))
    page.write_record(7, -5, 0b101, DIGESTS[:12])
    page.write_record(8, None, 0, b"")
    assert page.records() == {
        7: BoundaryRecord(-5, 0b101, DIGESTS[:12].ljust(4 * MAX_SAMPLES, b"\0")),
        8: BoundaryRecord(None, 0, bytes(4 * MAX_SAMPLES)),
    }
    page.write_record(8, 3, 0, b"")
    assert page.records()[8].loss == 3


def test_the_newest_records_are_kept_and_no_other_field_is_touched() -> None:
    page = SharedPage(create_page("test"))
    page.note, page.groups, page.samples = "a note", "g" * 4094, ["n" * 500] * MAX_SAMPLES
    page.set(HeartbeatField.STEP, 41)
    for step in range(1, NUM_RECORDS + 5):
        page.write_record(step, step, (1 << MAX_SAMPLES) - 1, DIGESTS)
    assert sorted(page.records()) == list(range(5, NUM_RECORDS + 5))
    assert (page.note, page.groups, page.get(HeartbeatField.STEP)) == ("a note", "g" * 4094, 41)
    assert page.samples == ("n" * 120,) * MAX_SAMPLES


def test_another_choice_of_parameters_removes_the_records() -> None:
    page = SharedPage(create_page("test"))
    assert page.samples == ()
    page.samples = ["model.ä.weight", "b"]
    page.write_record(1, 2, 1, DIGESTS)
    assert page.samples == ("model.ä.weight", "b")
    page.samples = ["b"]
    assert (page.samples, page.records()) == (("b",), {})


def test_a_torn_record_is_left_out() -> None:
    fd = create_page("test")
    page = SharedPage(fd)
    page.write_record(1, 2, (1 << MAX_SAMPLES) - 1, DIGESTS)
    page.write_record(2, 2, (1 << MAX_SAMPLES) - 1, DIGESTS)
    whole = mmap.mmap(fd, PAGE_BYTES)
    at = whole.find(DIGESTS)
    whole[at + 100] ^= 1  # as after a kill in the middle of a write
    assert sorted(page.records()) == [2]
