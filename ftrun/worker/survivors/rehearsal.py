"""Reads the state of a rank that runs: a rehearsal sets up from it, next to that rank.

Runs in:  worker, training thread, before the first turn.
Takes in: the committed version on the command page of the generation that runs; the rank's arena.
Gives:    a read of one version as a whole.

The rank overwrites older versions. It makes a slot's header invalid before it writes to
the slot. So if the header is still valid after a read, the read was of that version.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ftrun import clock
from ftrun.errors import SnapshotError
from ftrun.ids import Version, version
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from ftrun.worker.context import WorkerContext

GIVE_UP_S = 30.0
_PAUSE_S = 0.02

_Found = TypeVar("_Found")


def read_newest(context: WorkerContext, read: Callable[[], _Found]) -> _Found:
    """In a rehearsal, read from the newest committed version until a read is not disturbed.

    Otherwise `read` is called once, and reads from the version to restore.
    """
    if not context.launch.rehearses:
        return read()
    give_up_s = clock.now_s() + GIVE_UP_S
    while True:
        wanted = _newest(context.commands)
        context.launch = msgspec.structs.replace(context.launch, restore=wanted)
        problem: Exception | None = None
        try:
            found = read()
            if _is_there(context, wanted):
                return found
        except Exception as error:  # bytes that change may be anything
            if _is_there(context, wanted):
                raise
            problem = error
        if clock.now_s() > give_up_s:
            raise SnapshotError(
                f"no version of rank {context.rank} could be read within {GIVE_UP_S:.0f} s before "
                "it was overwritten: snapshots are taken too often for a rehearsal"
            ) from problem
        clock.sleep(_PAUSE_S)


def _newest(commands: SharedPage) -> Version | None:
    get = commands.get
    step = get(CommandField.COMMITTED_STEP)
    return version(get(CommandField.COMMITTED_GENERATION), step) if step >= 0 else None


def _is_there(context: WorkerContext, wanted: Version | None) -> bool:
    if wanted is None or context.arena_fd is None:
        return False
    arena = Arena(context.arena_fd, writable=False)
    try:
        return arena.find(wanted) is not None
    finally:
        arena.close()
