"""The attached state, with checks that are the same with and without an agent.

Runs in:  worker, training thread; also under plain python, on any system.
"""

import logging
from collections.abc import Callable
from typing import Any

from ftrun.errors import FtrunError, StructureChanged
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.optimizers import InnerOptimizers, OptimizerWatch
from ftrun.worker.state.state_tree import BoundaryState, StateTree
from ftrun.worker.state.unprotected import UnprotectedReasons

_log = logging.getLogger(__name__)

_CHECKED_BOUNDARIES = 2
"""Number checked without an agent: the first with the state of optimizers, and one more."""


class CheckedState:
    """The state of all attached objects, and the watch of optimizers, which the owner closes.

    `attached` receives the optimizers inside the attached ones, and `reasons` what a snapshot would
    lose. `before_first_step` is called once, before the first step of a known optimizer.
    """

    def __init__(
        self,
        attached: AttachedState,
        reasons: UnprotectedReasons,
        before_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner = InnerOptimizers(attached)
        self.tree = StateTree(attached)
        self._reasons = reasons
        self._has_collected = False
        names = self.tree.names
        self.watch = OptimizerWatch(self.inner.every(), names, reasons, before_first_step)

    def begin(self, extra: dict[str, Any]) -> BoundaryState:
        state = self.tree.collect(extra)
        self.tree.check_skip()
        return state

    def collect(self, extra: dict[str, Any]) -> BoundaryState:
        state = self.tree.collect(extra)
        if not self._has_collected and (unmatched := self.tree.attached.skip.unmatched):
            _log.warning(
                "attach(skip=...): %s has matched nothing up to the first snapshot",
                ", ".join(unmatched),
            )
        self._has_collected = True
        if self.tree.lost:
            raise StructureChanged(self.tree.lost)
        self._reasons.remove("structure")
        return state


class PlainCheck:
    """Without an agent, finds what a snapshot would lose: at `attach` and the first boundaries."""

    def __init__(self, attached: AttachedState, extra: dict[str, Any]) -> None:
        self._reasons = UnprotectedReasons(None)
        self._state = CheckedState(attached, self._reasons)
        self._left = _CHECKED_BOUNDARIES
        try:
            self._state.begin(extra)
        except FtrunError:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001 - no fault of ours ends a script
            self.close()
            self._reasons.add_bug("attach", error)

    def boundary(self, extra: Callable[[], dict[str, Any]]) -> None:
        """End a turn of the loop. Never raises."""
        if not self._left:
            return
        try:
            self._state.watch.boundary()
            self._state.collect(extra())
        except FtrunError as error:
            self._reasons.add("value", str(error))
        except Exception as error:  # noqa: BLE001 - no fault of ours ends a script
            self._reasons.add_bug("the step boundary", error)
        self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        self._left = 0
        self._state.watch.close()
