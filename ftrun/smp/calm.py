"""Work that lets the training go first.

Runs in:  the SMP: in the thread that is to be calm, or in one made for one piece of work.
Takes in: work that has time. Not a restore, which all wait for.
Gives:    its result.

A process may make its threads less important, but without a right of the system's none that was
may become important again: so what is calm only at times gets a thread for that time.
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
    """Let the training go first: this thread has time, and so have those that it starts."""
    with contextlib.suppress(OSError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def calmly(work: Callable[[], Result]) -> Result:
    """Do it in a calm thread, and wait for it.

    Raises:
        BaseException: what the work raises.
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
    except RuntimeError:  # no more threads
        return work()
    return done.result()
