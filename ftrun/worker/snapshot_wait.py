"""Waits until a snapshot of this rank is as safe as the script requires.

Runs in:  worker, in the thread of the script.
Takes in: the command page, which the SMP and the agent write; the seals of this rank.
Gives:    True, or an error with the reason; the request for a checkpoint.
Survives: the SMP. Its successor counts the seals that it finds in memory.

Rule 1: a newer version takes the place of an older one. A version is at a level if it, or a newer
        one, is there.
Rule 2: a wait ends at once if its level cannot be reached. A restart of the ranks ends it with the
        process: the script waits again after the restore.
Rule 3: this rank makes no step while it waits, so the agent sees its sign of life here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from ftrun import clock
from ftrun.errors import SnapshotError, SnapshotWaitTimeout, UsageError
from ftrun.ids import Version, version
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.context import WorkerContext

if TYPE_CHECKING:
    from ftrun.worker.commit_wait import CommitWait

Level = Literal["sealed", "committed", "protected", "persisted"]
LEVELS: tuple[Level, ...] = get_args(Level)
_POLL_S = 0.005

_ONE_NODE = (
    "all ranks are on one node, so no other node holds a copy. Wait for 'committed', which "
    "survives the death of processes, or for 'persisted', which survives the node"
)
_NO_STORAGE = "the run writes no checkpoints: start it with --checkpoint-dir"
_OF_OTHERS = "another rank has not sealed it, or other nodes take long to protect it"
_NOT_STORED = "a protection group does not hold all of it; `ftrun status` has the reason"
_NOT_WRITTEN = "no checkpoint of it, or of a newer version, is complete"


def check_level(level: str) -> None:
    if level not in LEVELS:
        raise UsageError(f"wait({level!r}): the levels are {', '.join(map(repr, LEVELS))}")


class SnapshotHandle:
    """The snapshot that `Session.snapshot` has requested; taken at the next step boundary."""

    def __init__(self, wait: Callable[[Level, float, "SnapshotHandle"], bool]) -> None:
        self.step: int | None = None
        """Step of the boundary; None before it."""
        self._version: Version | None = None
        self._problem = ""
        self._wait = wait

    def wait(self, level: Level, timeout_s: float = 600.0) -> bool:
        """Wait until this snapshot, or a newer one, has reached a level, as `Session.wait`.

        Raises:
            UsageError: the boundary that takes it is not reached yet.
            SnapshotError: it was not taken, or cannot reach the level.
        """
        check_level(level)
        return self._wait(level, timeout_s, self)

    def passed(self, newest: Version | None, reason: str) -> None:
        """Note the newest seal after the boundary; `reason`: why it is an older one, if known."""
        if newest is not None and newest.step == self.step:
            self._version = newest
        else:
            self._problem = reason or (
                "an optimizer has gradients that it has not stepped with, or the last snapshot was "
                "not committed in time"
            )

    def version(self, level: Level) -> Version:
        if self.step is None:
            raise UsageError(
                f"wait({level!r}): the snapshot is taken at the boundary that ends this step; wait "
                "in the next turn of the loop, or after step_done()"
            )
        if self._version is None:
            raise SnapshotError(f"no snapshot was taken at step {self.step}: {self._problem}")
        return self._version


class LevelWait:
    """Waits of one rank."""

    def __init__(
        self, context: WorkerContext, commit_wait: "CommitWait", send_again: Callable[[], None]
    ) -> None:
        self._context = context
        self._commands = context.commands
        self._commit_wait = commit_wait
        self._send_again = send_again

    def until(
        self,
        level: Level,
        wanted: Version | None,
        timeout_s: float,
        await_copy: Callable[[float], bool] = lambda _: True,
    ) -> bool:
        """Return True when a sealed version of this rank has reached a level.

        `wanted`: None: the newest one, after the copy in progress. `await_copy`: waits for this
        copy for some seconds, and returns whether it is complete.

        Raises:
            SnapshotError: it cannot reach the level.
            SnapshotWaitTimeout: it has not reached the level within `timeout_s`.
        """
        give_up_s = clock.now_s() + timeout_s
        while wanted is None and not await_copy(_POLL_S):
            if clock.now_s() >= give_up_s:
                raise SnapshotWaitTimeout(
                    f"the newest snapshot is not {level} after {timeout_s:g} s: it is still "
                    "copied, or a state provider writes. Raise wait(timeout_s=...)"
                )
            self._context.page.show_life(clock.now_ns())
        wanted = wanted or self._commit_wait.newest_sealed
        if wanted is None:
            raise SnapshotError(
                f"wait({level!r}): this rank has taken no snapshot yet{self._unprotected()}. Call "
                "session.snapshot(), and wait after the boundary that ends the step"
            )
        page = self._context.page
        before, page.phase = page.phase, f"wait until {level}"
        try:
            self._await(level, wanted, timeout_s, give_up_s)
        finally:
            page.phase = before
        return True

    def _await(self, level: Level, wanted: Version, timeout_s: float, give_up_s: float) -> None:
        failed_before = self._commands.not_persisted
        while not self._is_reached(level, wanted):
            failed = self._commands.not_persisted
            failed_before = failed_before if failed else ""
            reason = self._obstacle(level, wanted)
            if level == "persisted" and failed != failed_before:
                reason = reason or failed
            if reason:
                raise SnapshotError(f"the snapshot of {wanted} is not {level}: {reason}")
            if clock.now_s() >= give_up_s:
                raise SnapshotWaitTimeout(
                    f"the snapshot of {wanted} is not {level} after {timeout_s:g} s: "
                    f"{self._missing(level, wanted)}. Raise wait(timeout_s=...)"
                )
            self._context.page.show_life(clock.now_ns())
            self._send_again()
            clock.sleep(_POLL_S)

    def _is_reached(self, level: Level, wanted: Version) -> bool:
        if level == "sealed":
            return True  # only sealed versions are awaited
        if not self._commit_wait.is_committed(wanted):
            return False
        if level == "committed":
            return True
        if level == "protected":
            return self._shown(CommandField.PROTECTED_GENERATION) >= wanted
        if wanted.generation < 0:
            return True  # it was restored from a checkpoint
        # Set after the commit, because the agent writes only committed versions.
        self._context.page.set(HeartbeatField.PERSIST_STEP, wanted.step)
        return self._shown(CommandField.PERSISTED_GENERATION) >= wanted

    def _shown(self, at: CommandField) -> Version:
        return version(*self._commands.version_at(at))

    def _obstacle(self, level: Level, wanted: Version) -> str:
        """Why the level cannot be reached, in words; empty if it can."""
        launch = self._context.launch
        if level == "protected" and launch.num_nodes == 1:
            return _ONE_NODE
        if level == "persisted" and not launch.has_storage:
            return _NO_STORAGE
        if self._context.is_revoked:
            return "another rank has failed, and this process joins the next generation"
        is_committed = self._commit_wait.is_committed(wanted)
        if not is_committed and self._commit_wait.is_over(wanted):
            return "it is given up, because a rank has no snapshot of this step"
        if level == "protected" and is_committed:
            return self._commands.not_protected
        return ""

    def _missing(self, level: Level, wanted: Version) -> str:
        if not self._commit_wait.is_committed(wanted):
            return _OF_OTHERS + self._unprotected()
        if level == "protected":
            return _NOT_STORED
        return self._commands.not_persisted or _NOT_WRITTEN

    def _unprotected(self) -> str:
        reason = unprotected_reason(self._context)
        return f" (UNPROTECTED: {reason})" if reason else ""


def unprotected_reason(context: WorkerContext) -> str:
    return context.page.note if context.page.get(HeartbeatField.UNPROTECTED) else ""
