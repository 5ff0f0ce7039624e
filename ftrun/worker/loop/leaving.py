"""How a loop of a session is left: by `break` or `return`, or otherwise.

Runs in:  worker; also under plain python.
Takes in: the frames of the loop, when Python closes the generator that drives it.
Gives:    yes only where it is certain, because a snapshot is then taken in the middle of a turn.

Python closes a generator in all cases alike, and at once where the loop alone holds it. What the
frame of the loop executes at that moment tells the cases apart.

Rule 1: `break` and `return` drop the iterator of the loop by an instruction for that alone. An
        exception drops it while the frame is at the instruction that has raised.
Rule 2: a loop that ends because something around the generator does, such as `islice`, drops it
        at the instruction that asks for the next item. That instruction may raise too, so the
        answer is no if a traceback refers to the frame.
Rule 3: a progress bar is a generator around this one. Python closes it at its `yield`, and the
        frame that has asked it for its items decides.
Rule 4: a generator that something else holds is closed by another frame, or by another
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
    """Identifies the frames that ask the calling generator for its next item, the nearest first.

    They are generators but for the last one.
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
        frames: of `frames_of_loop`, at the last item.
    """
    try:
        frame: FrameType | None = sys._getframe(2)
    except ValueError:  # the interpreter ends
        return False
    while frame is not None and id(frame) in frames:
        instruction = opname[frame.f_code.co_code[frame.f_lasti]]
        if instruction == "FOR_ITER":
            return not any(isinstance(one, TracebackType) for one in gc.get_referrers(frame))
        if instruction not in _YIELDS:
            return instruction in _DROPS
        frame = frame.f_back
    return False
