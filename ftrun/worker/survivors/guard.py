"""`Session.guard`: the part of a turn that is repeated if another rank fails in it.

Runs in:  worker, training thread; also under plain python, where it has no effect.
Takes in: the exceptions of the block; whether the generation is over.
Gives:    a block that ends as if it had succeeded, and a turn marked as repeated. The loop then
          joins the next generation and hands out the turn again.

Rule 1: an exception that names no broken connection is raised at once, unless the generation is
        over: then the turn may have computed with values of an aborted collective.
Rule 2: an exception that names a broken connection is raised if the agent does not confirm in time
        (`LaunchRequest.confirm_s`) that the generation is over.
Rule 3: a block that ends without an exception in an ended generation is repeated too, because the
        script may have caught the exception.
"""

import ast
import linecache
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Protocol

import torch

from ftrun.errors import UsageError
from ftrun.monitor.worker_exits import names_broken_connection

_MAX_CAUSES = 16
_CONNECTION_ERRORS = (
    (ConnectionError, torch.distributed.DistError)
    if (torch.distributed.is_available())
    else (ConnectionError,)
)

_log = logging.getLogger(__name__)


class Turn:
    """One turn of a loop; the value of `with session.guard() as turn`."""

    def __init__(self) -> None:
        self.is_repeated = False
        """Set at the end of the block: the generation is over, and this turn comes again."""


class Stay(Protocol):
    """What a guard needs of a process that can stay."""

    @property
    def is_over(self) -> bool:
        """The generation of this process is over."""
        ...

    def await_end(self, error: Exception) -> bool:
        """Whether the generation is over because of this error; may wait for that."""
        ...

    @property
    def is_rehearsal(self) -> bool: ...

    def show_loop(self, epoch: int, number: int) -> None:
        """A loop is entered; `number`: of the loops in this epoch."""

    def begin_turn(self) -> None:
        """The loop hands out a turn."""

    def leave_early(self) -> None:
        """The script leaves the loop by `break` or `return`."""

    def enter_turn(self) -> None:
        """The script enters the guarded block of a turn."""


class Guard(AbstractContextManager[Turn]):
    """One guarded block."""

    def __init__(
        self, blocks: "GuardedBlocks", stay: Stay | None, turn: object, *, looks: bool
    ) -> None:
        self._blocks = blocks
        self._stay = stay
        self._at = turn
        self._looks = looks
        self._turn = Turn()
        self._has_gradients = True

    def __enter__(self) -> Turn:
        self._blocks.enter(self._at)
        if self._stay is not None:
            self._has_gradients = torch.is_grad_enabled()
            if self._looks:
                self._blocks.look_once(sys._getframe(1))
            self._stay.enter_turn()
        return self._turn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._blocks.leave()
        stay = self._stay
        if stay is None or (error is not None and not isinstance(error, Exception)):
            return False
        if not (stay.is_over if error is None else stay.await_end(error)):
            return False
        self._turn.is_repeated = True
        torch.set_grad_enabled(self._has_gradients)
        # What the broken turn holds, such as its activations, is released before the repetition.
        traceback.clear_frames(trace)
        return True


def is_of_broken_connection(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised for, names the loss of a connection."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            return False
        if isinstance(found, _CONNECTION_ERRORS) or names_broken_connection(str(found)):
            return True
        found = found.__cause__ or found.__context__
    return False


class GuardedBlocks:
    """The guarded blocks of one session, and checks of where they are."""

    def __init__(self) -> None:
        self._entered_in: object = None
        self._is_inside = False
        self._has_looked = False

    def enter(self, turn: object) -> None:
        """`turn`: identifies the turn of the loop; None: outside of a loop. Raises UsageError."""
        if self._is_inside:
            raise UsageError("guard() inside of another guard(): one block encloses the whole turn")
        if turn is None:
            raise UsageError(
                "guard() outside of a loop: it encloses the body of a loop over session.steps() or "
                "session.batches()"
            )
        if self._entered_in == turn:
            raise UsageError(
                "guard() twice in one turn of the loop, which is repeated as a whole: enclose the "
                "body of the loop in one block"
            )
        self._entered_in, self._is_inside = turn, True

    def leave(self) -> None:
        self._is_inside = False

    def look_once(self, frame: FrameType) -> None:
        if not self._has_looked:
            self._has_looked = True
            try:
                _report_following(frame)
            except Exception:  # noqa: BLE001 - a bug in ftrun must not end the script
                _log.warning("a bug in ftrun: statements are not checked", exc_info=True)


def _report_following(frame: FrameType) -> None:
    lines = following_lines(frame)
    if lines:
        _log.warning(
            "%s:%d: statements follow the block of session.guard() in the loop, at line %s. If "
            "another rank fails, they run in the broken turn too. Move them into the block, or use "
            "`with session.guard() as turn` and check turn.is_repeated",
            frame.f_code.co_filename,
            frame.f_lineno,
            ", ".join(map(str, lines[:3])),
        )


def following_lines(frame: FrameType) -> list[int]:
    """Lines of statements between the `with` block that this frame enters and the loop's end.

    Empty if the source is not available, or if the script uses the turn that the block gives.
    """
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        path = list(_path_to(ast.parse(source), frame.f_lineno))
    except (SyntaxError, ValueError, RecursionError):
        return []
    at = next((i for i in range(len(path) - 1, -1, -1) if isinstance(path[i], ast.With)), None)
    if at is None:
        return []
    names = {
        one.id
        for item in path[at].items  # type: ignore[attr-defined]
        if item.optional_vars is not None
        for one in ast.walk(item.optional_vars)
        if isinstance(one, ast.Name)
    }
    following: list[ast.stmt] = []
    for node, parent in zip(path[at:0:-1], path[at - 1 :: -1], strict=False):
        following += _after(node, parent)
        if isinstance(parent, ast.For | ast.While):
            break
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            return []
    used = {one.id for stmt in following for one in ast.walk(stmt) if isinstance(one, ast.Name)}
    if names & used:
        return []
    return [one.lineno for one in following if not isinstance(one, ast.Pass)]


def _path_to(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes that enclose a line, the outermost first."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and (
            _first_line(child) <= line <= (_last_line(child))
        ):
            yield from _path_to(child, line)
            return


def _first_line(node: ast.AST) -> int:
    line: int = getattr(node, "pattern", node).lineno  # type: ignore[union-attr]
    return line


def _last_line(node: ast.AST) -> int:
    end: int | None = getattr(node, "end_lineno", None)
    return end if end is not None else node.body[-1].end_lineno  # type: ignore[attr-defined]


def _after(node: ast.AST, parent: ast.AST) -> list[ast.stmt]:
    """Statements behind `node` in the block of `parent` that holds it."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(parent, block, [])
        if node in statements:
            return list(statements[statements.index(node) + 1 :])
    return []
