"""The newest records and messages of a heartbeat page are kept, and a torn one is not read."""

import mmap
from dataclasses import replace

from ftrun.monitor.order.messages import ANY, RecordedMessage
from ftrun.monitor.repeat_check import BoundaryRecord
from ftrun.wire.shared_memory.message_ring import (
    CAPACITY,
    read_messages,
    write_end,
    write_message,
    write_wait,
)
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


def message(number: int) -> RecordedMessage:
    return RecordedMessage(number, 3, 10, 0, 0, 0, 0xFFFFFFFF, 7, number, ANY, is_send=False)


def test_messages_come_back_in_order_with_their_waits() -> None:
    page = SharedPage(create_page("test"))
    assert page.messages() == []
    for number in range(1, CAPACITY + 3):
        write_message(page.message_memory, message(number))
        page.set(HeartbeatField.MESSAGES, number)
    newest = CAPACITY + 2
    write_wait(page.message_memory, newest, 20)
    write_end(page.message_memory, newest, 30, 40)
    write_wait(page.message_memory, 1, 99)  # it is not in the ring any more
    write_end(page.message_memory, 1, 99, 99)
    found = page.messages()
    # The oldest place may be in the middle of being written.
    assert [one.number for one in found] == list(range(4, newest + 1))
    assert found[-1] == replace(message(newest), waited_ns=20, ended_ns=30, total_ns=40)
    assert found[:-1] == [message(number) for number in range(4, newest)]


def test_messages_that_were_overwritten_during_a_read_are_left_out() -> None:
    page = SharedPage(create_page("test"))
    for number in range(1, 11):
        write_message(page.message_memory, message(number))
    raw = bytes(page.message_memory)
    found = read_messages(raw, newest=10, newest_after=CAPACITY + 3)
    assert [one.number for one in found] == [5, 6, 7, 8, 9, 10]
    found = read_messages(raw, newest=12, newest_after=12)
    assert [one.number for one in found] == list(range(1, 11)), "two are not written"
