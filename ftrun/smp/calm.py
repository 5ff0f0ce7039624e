"""Runs work at low scheduling priority.

Runs in:  the SMP: in the calling thread, or in a thread created for one piece of work.
Takes in: work without urgency; not a restore, because all ranks wait for it.
Gives:    the result of the work.

Without CAP_SYS_NICE a thread cannot raise its priority again after it was lowered. Work that has
low priority only at times therefore gets a thread of its own.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_NICER = 10

Result = TypeVar("Result")


def calm_thread() -> None:
    """Lower the scheduling priority of this thread and of the threads that it starts."""
    with contextlib.suppress(OSError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def calmly(work: Callable[[], Result]) -> Result:
    """Run `work` in a new low-priority thread and wait for its result.

    If no thread can be started, run it in the calling thread.

    Raises:
        BaseException: any error that `work` raises.
    """
    done: Future[Result] = Future()

    def run() -> None:
        calm_thread()
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread's to handle
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="ftrun-calm", daemon=True).start()
    except RuntimeError:  # the limit of threads is reached
        return work()
    return done.result()
