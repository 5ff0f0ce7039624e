"""The loops of a session over steps, epochs and batches, from the restored step on.

Runs in:  worker, training thread; also under plain python.
Gives:    turns that end in a step boundary each; at the end of a loop, the last snapshot.

The step counter counts boundaries. Each turn of `steps()` or `batches()` ends in a boundary, also
a turn that ends in `continue`. A turn that is left by an exception is not counted as a step. A turn
that is left by `break` or `return` is counted if an optimizer has stepped in it. A loop left in
this way has no further turn after a restart, because only the script has the reason for leaving.
"""

import gc
import inspect
import logging
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dis import opname
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ftrun.errors import UsageError
from ftrun.worker.snapshot_wait import Level, SnapshotHandle, check_level
from ftrun.worker.state.data_position import DataPosition
from ftrun.worker.survivors.guard import Guard, GuardedBlocks, Stay

_log = logging.getLogger(__name__)


def left_pass(loader: str) -> str:
    """Name in a snapshot for a loop over this loader's batches that was left early."""
    return f"batches({loader})"


class _Loop(Iterator[Any]):
    """An iterable whose generator is held only by its `for` statement, so that `break` closes it.

    A progress bar or a variable keeps a reference to this object, not to the generator.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._started: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._begin() if self._started is None else self._started

    def __next__(self) -> Any:
        if self._started is None:
            self._started = self._begin()
        return next(self._started)


class SessionPhase:
    """Context manager of `Session.phase`; its exit sets the previous phase."""

    def __init__(self, session: "Loops", before: str, *, was_plain: bool) -> None:
        self._session = session
        self._before = before
        self._was_plain = was_plain

    def __enter__(self) -> "SessionPhase":
        self._session._is_plain_phase = False
        return self

    def __exit__(self, *_: object) -> None:
        self._session._set_phase(self._before)
        self._session._is_plain_phase = self._was_plain


class Loops(ABC):
    """Loops with step boundaries; the subclass implements the boundary."""

    def __init__(self) -> None:
        self._is_plain_phase = False
        """A phase other than "train" was set, and not by a `with` block."""
        self._step = 0
        self._epoch = 0
        self._in_epoch = False
        self._in_last_epoch = False
        self._ends_epochs = False
        self._driver: str | None = None
        self._left = ""
        """Loop that was left by `break`, until another loop begins; part of a snapshot."""
        self._left_before = ""
        """Value of `_left` in the restored snapshot."""
        self._steps_loops = 0
        """Number of `steps()` loops begun; inside `epochs()`, without those of earlier epochs."""
        self._steps_left: set[int] = set()
        """Indices of the `steps()` loops that were left by `break`; part of a snapshot."""
        self._force = False
        self._requested: SnapshotHandle | None = None
        """Of a snapshot that the script has requested for the next boundary."""
        self._has_stepped = False
        """An optimizer has stepped since the last boundary."""
        self._in_hand: DataPosition | None = None
        self._turns = 0
        """Turns handed out, repeated ones included."""
        self._blocks = GuardedBlocks()
        self._num_entered = 0
        """Loops that were entered in this epoch."""
        hook = register_optimizer_step_post_hook(after_optimizer_step(weakref.ref(self)))
        self._end_hook = weakref.finalize(self, hook.remove)

    @property
    def step(self) -> int:
        """Number of completed steps, over all restarts."""
        return self._step

    @property
    def batch_index(self) -> int:
        """Index of the current batch in its pass, over all restarts; use it, not enumerate."""
        if self._in_hand is None:
            raise UsageError("batch_index has a value inside a loop over session.batches()")
        return self._in_hand.index

    def snapshot(self) -> SnapshotHandle:
        """Take a snapshot at the next boundary and wait for its seal. Call it on every rank."""
        self._force = True
        if self._requested is None:
            self._requested = SnapshotHandle(self._wait)
        return self._requested

    def wait(self, level: Level, timeout_s: float = 600.0) -> bool:
        """Wait until the newest snapshot of this rank, or a newer one, has reached a level.

        Args:
            level: "sealed": this rank's copy is complete. "committed": all ranks have sealed it, so
                that it survives their death. "protected": other nodes hold what is needed to
                rebuild it, so that it survives the loss of any node. "persisted": a checkpoint of
                it is complete; if none is, the wait requests one.
            timeout_s: longest wait.

        Returns:
            True. False at once outside of ftrun and in a rehearsal, where there are no snapshots.

        Raises:
            SnapshotError: it cannot reach the level, for example "protected" on one node.
            SnapshotWaitTimeout: it has not reached the level within `timeout_s`.
        """
        check_level(level)
        return self._wait(level, timeout_s, None)

    def guard(self) -> Guard:
        """Enclose the body of a loop over `steps` or `batches`, so that this process can stay.

        With `--survivors on`, a process stays if another rank fails while it is inside such a loop.
        The block then ends without an exception, the attached state goes back to the newest
        version that all ranks have, and the loop hands out the same steps and batches again.
        Otherwise the block has no effect.

        Statements behind the block also run in a turn that is repeated:

            with session.guard() as turn:
                ...
            if not turn.is_repeated:
                print(loss.item())

        Raises UsageError outside of a loop, inside of another block, and twice in one turn.
        """
        return self._guard(looks=True)

    def run(self, turn: Callable[[int], Any], *, steps: int) -> Iterator[Any]:
        """Call `turn(step)` under `guard` for each step, and yield what it returns.

        What a broken turn holds, such as its activations, is released before it is repeated.

        Args:
            turn: makes one step.
            steps: number of steps of the whole run, including those before a restart.
        """
        for step in self.steps(steps):
            result = None
            with self._guard(looks=False) as made:
                result = turn(step)
            if not made.is_repeated:
                yield result

    def _guard(self, *, looks: bool) -> Guard:
        at = None if self._driver is None else self._turns
        return Guard(self._blocks, self._stay, at, looks=looks)

    @property
    def is_rehearsal(self) -> bool:
        """As `ftrun.is_rehearsal()`, which can be called before `attach` too."""
        return self._stay is not None and self._stay.is_rehearsal

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the steps from the restored step on; each turn ends in a boundary.

        Args:
            total: number of steps of the whole run, including those before a restart.
        """
        return _Loop(lambda: self._steps(total))

    def _steps(self, total: int) -> Iterator[int]:
        self._enter("steps()", total)
        frames: tuple[int, ...] = ()
        place = self._steps_loops
        self._steps_loops += 1
        try:
            self._begin()
            if place in self._steps_left:
                self._warn_of_left("steps()")
                return
            while not self._is_at_end(total):
                frames = frames_of_loop()
                self._begin_turn()
                yield self._step
                # Force a snapshot at the end of the run, so that the last checkpoint holds it.
                self._force |= self._step + 1 == total
                self._boundary(allowed=True)
        except GeneratorExit:
            if is_left_by_break(frames):
                self._steps_left.add(place)
                self._leave_early("steps()")
            else:
                self._warn_of_closed("steps()")
            raise
        finally:
            self._leave()

    def epochs(self, total: int | None = None) -> Iterator[int]:
        """Iterate over the epochs from the restored epoch on; ends when `batches(until=...)` ends.

        Args:
            total: number of epochs of the whole run; None: only `batches(until=...)` ends the loop.
        """
        return _Loop(lambda: self._epochs(total))

    def _epochs(self, total: int | None) -> Iterator[int]:
        self._ends_epochs = False
        self._left = ""
        first = self._steps_loops
        while (total is None or self._epoch < total) and not self._was_left("epochs()"):
            frames = frames_of_loop()
            self._in_epoch = True
            self._num_entered = 0
            self._in_last_epoch = self._epoch + 1 == total
            try:
                yield self._epoch
            except GeneratorExit:
                if is_left_by_break(frames):
                    self._leave_early("epochs()")
                raise
            finally:
                self._in_epoch = self._in_last_epoch = False
            if self._ends_epochs:
                return
            self._epoch += 1
            self._steps_loops = first
            self._steps_left = {place for place in self._steps_left if place < first}

    def batches(self, loader: Any, *, until: int | None = None) -> Iterator[Any]:
        """Iterate over the batches of one pass, from the restored batch on.

        Each turn of the loop ends in a boundary. Inside `steps()`, the boundary is that of
        `steps()`, and this loop only tracks the position in the data. If it is left there, for
        example by `break`, the next call begins a new pass.

        Args:
            loader: the loader of the batches.
            until: number of steps of the whole run. When it is reached, this loop and an enclosing
                `epochs()` loop end. Another call continues the same pass.
        """
        return _Loop(lambda: self._batches(loader, until))

    def _batches(self, loader: Any, until: int | None) -> Iterator[Any]:
        feed = self._feed_of(loader)
        if self._driver is not None:
            if until is not None:
                raise UsageError("batches(until=...) inside steps(): steps(total) counts the steps")
            yield from self._from(feed, ends_if_left=True)
            return
        last_step = self._step + feed.num_left
        self._enter("batches()", last_step if until is None else min(last_step, until))
        frames: tuple[int, ...] = ()
        try:
            if self._has_no_turn(feed, until):
                self._begin()
                return
            for batch in self._from(feed):
                if not self._rejoin():
                    frames = frames_of_loop()
                    self._begin_turn()
                    yield batch
                    is_last = self._in_last_epoch and feed.is_at_end
                    self._force |= is_last or self._step + 1 == until
                    self._boundary(allowed=True)
                    self._rejoin()
                # Also a process that joins can be at the end, by the version that it restores.
                self._ends_epochs = until is not None and self._step >= until
                if self._ends_epochs:
                    feed.pause()
                    return
        except GeneratorExit:
            if is_left_by_break(frames):
                self._leave_early(left_pass(feed.name))
            else:
                self._warn_of_closed(left_pass(feed.name))
            raise
        finally:
            self._leave()

    def _has_no_turn(self, feed: DataPosition, until: int | None) -> bool:
        if self._was_left(left_pass(feed.name)):
            feed.end_pass()
            return True
        if until is not None and self._step >= until:
            self._ends_epochs = True
            return True
        return False

    # --- implemented by the session ------------------------------------------------------------

    @abstractmethod
    def _set_phase(self, name: str) -> str:
        """Set the phase; return the previous one."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the first turn; it may restore random states."""

    @abstractmethod
    def _boundary(self, *, allowed: bool) -> None: ...

    @property
    @abstractmethod
    def _stay(self) -> Stay | None:
        """None: this process cannot stay when another rank fails."""

    @abstractmethod
    def _rejoin(self) -> bool:
        """If the generation is over, join the next one; `_step` is then an earlier one."""

    @abstractmethod
    def _wait(self, level: Level, timeout_s: float, handle: SnapshotHandle | None) -> bool:
        """Wait for the snapshot of a handle; None: for the newest."""

    @abstractmethod
    def _keep(self) -> None:
        """Ensure, in the middle of a turn, that a snapshot holds the completed steps."""

    @abstractmethod
    def _newest_kept(self) -> int | None:
        """Step of this rank's newest snapshot; -1: no snapshot yet; None: snapshots are off."""

    @abstractmethod
    def _feed_of(self, loader: Any) -> DataPosition: ...

    def _enter(self, driver: str, last_step: int) -> None:
        """`last_step`: at the end of this loop; a smaller one if that is unknown."""
        if self._driver is not None:
            raise UsageError(f"a loop over {driver} inside one over {self._driver}")
        self._driver = driver
        self._left = ""
        self._num_entered += 1
        if self._stay is not None:
            self._stay.show_loop(self._epoch, self._num_entered)

    def _leave(self) -> None:
        self._driver = None

    # --- inside --------------------------------------------------------------------------------

    def _is_at_end(self, total: int) -> bool:
        self._rejoin()
        return self._step >= total

    def _begin_turn(self) -> None:
        self._turns += 1
        if self._stay is not None:
            self._stay.begin_turn()

    def _from(self, feed: DataPosition, *, ends_if_left: bool = False) -> Iterator[Any]:
        epoch = self._epoch if self._in_epoch else None
        try:
            for batch in feed.batches(epoch, self._begin, ends_if_left=ends_if_left):
                self._in_hand = feed
                yield batch
        finally:
            self._in_hand = None

    def _leave_early(self, driver: str) -> None:
        if self._stay is not None:
            self._stay.leave_early()
        self._left = "" if driver == "steps()" else driver
        if self._has_stepped and driver != "epochs()":
            self._force = True
            self._boundary(allowed=True)
        elif self._step:
            self._keep()

    def _warn_of_closed(self, driver: str) -> None:
        newest = None if sys.is_finalizing() else self._newest_kept()
        reached = self._step + self._has_stepped
        if newest is not None and newest < reached:
            _log.warning(
                "no snapshot at step %d: the loop over session.%s ended by an exception, or "
                "another reference closed its generator later. The newest snapshot is of %s",
                reached,
                driver,
                f"step {newest}" if newest >= 0 else "no step",
            )

    def _was_left(self, driver: str) -> bool:
        """Whether this loop was left by `break` before the restart; true only at the first call."""
        if self._left_before != driver:
            return False
        self._left_before = ""
        self._warn_of_left(driver)
        return True

    def _warn_of_left(self, driver: str) -> None:
        _log.warning(
            "the loop over session.%s was left by break or return at step %d before this restart, "
            "so it is skipped now. A larger total has no effect on it. To train further, end the "
            "loop by steps(total) or batches(loader, until=total) and raise the total",
            driver,
            self._step,
        )


def after_optimizer_step(owner: "weakref.ref[Loops]") -> Callable[..., None]:
    # A strong reference from torch's hooks would keep a session alive that the script has dropped.
    def after_step(*_: Any) -> None:
        if not torch.compiler.is_compiling() and (loops := owner()) is not None:
            loops._has_stepped = True

    return after_step


_DROPS = frozenset({"POP_TOP", "POP_ITER", "END_FOR"})
_YIELDS = frozenset({"YIELD_VALUE", "RESUME"})


def frames_of_loop() -> tuple[int, ...]:
    """Ids of the frames that request items from the calling generator, nearest first.

    All frames except the last one are generators.
    """
    found = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append(id(frame))
        frame = frame.f_back if frame.f_code.co_flags & inspect.CO_GENERATOR else None
    return tuple(found)


def is_left_by_break(frames: tuple[int, ...]) -> bool:
    """Whether the calling generator is closed because its loop was left by `break` or `return`.

    `frames`: from `frames_of_loop` at the last item.
    """
    try:
        frame: FrameType | None = sys._getframe(2)
    except ValueError:  # the interpreter is exiting
        return False
    while frame is not None and id(frame) in frames:
        instruction = opname[frame.f_code.co_code[frame.f_lasti]]
        if instruction == "FOR_ITER":
            return not any(isinstance(one, TracebackType) for one in gc.get_referrers(frame))
        if instruction not in _YIELDS:
            return instruction in _DROPS
        frame = frame.f_back
    return False
