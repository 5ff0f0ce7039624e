"""Detects whether a loop of a session was left by `break` or `return`.

Runs in:  worker; also under plain python.
Takes in: the frames of the loop, when Python closes the generator that drives it.
Gives:    yes only if it is certain, because a snapshot is then taken in the middle of a turn.

Python closes a generator in the same way in all cases, and at once if only the loop holds it. The
instruction that the frame of the loop executes at that moment distinguishes the cases.

Rule 1: `break` and `return` drop the iterator of the loop by a dedicated instruction. An
        exception drops it while the frame is at the instruction that has raised.
Rule 2: if a wrapper of the generator, such as `islice`, ends the loop, the iterator is dropped at
        the instruction that requests the next item. That instruction may also raise, so the answer
        is no if a traceback refers to the frame.
Rule 3: a progress bar is a generator around this one. Python closes it at its `yield`, and the
        frame that requests items from the progress bar decides.
Rule 4: a generator that another object holds is closed by another frame, or by another
        instruction such as an assignment. The answer is then no.
"""

import gc
import inspect
import sys
from dis import opname
from types import FrameType, TracebackType

_DROPS = frozenset({"POP_TOP", "POP_ITER", "END_FOR"})
_YIELDS = frozenset({"YIELD_VALUE", "RESUME"})


def frames_of_loop() -> tuple[int, ...]:
    """Return ids of the frames that request items from the calling generator, nearest first.

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

    Args:
        frames: result of `frames_of_loop` at the last item.
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
