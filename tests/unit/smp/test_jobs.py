"""Work at low priority returns its result and its errors; a lane without a thread fails once."""

import os
import select
import threading

import pytest

from ftrun.linux import at_low_priority, lower_thread_priority
from ftrun.smp.jobs import JobLanes
from tests.exhausted import no_threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_gives_way_and_one_that_waits_for_it_does_not() -> None:
    before = niceness()
    assert at_low_priority(niceness) > before
    assert niceness() == before


def test_threads_that_it_starts_give_way_too() -> None:
    found: list[int] = []

    def work() -> None:
        inner = threading.Thread(target=lambda: found.append(niceness()))
        inner.start()
        inner.join()

    at_low_priority(work)
    assert found == [at_low_priority(niceness)]


def test_an_error_is_the_callers() -> None:
    def fails() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        at_low_priority(fails)


def test_a_thread_may_be_calm_for_good() -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        lower_thread_priority()
        found.append((niceness(), os.sched_getscheduler(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(at_low_priority(niceness), os.SCHED_BATCH)]


def test_a_job_without_a_thread_fails_and_the_next_one_runs() -> None:
    jobs, ended = JobLanes(), list[str]()
    with no_threads():
        jobs.submit("disk", lambda: lambda: ended.append("run"), failed=lambda: ended.append("no"))
    jobs.finish()
    jobs.submit("disk", lambda: lambda: ended.append("run"), failed=lambda: ended.append("no"))
    assert select.select([jobs], [], [], 30.0)[0]
    jobs.finish()
    assert ended == ["no", "run"]
