"""How a loop of a session is left: by `break` or `return`, or by an exception.

Runs in:  worker; also under plain python.
Takes in: the frames of the loop, when Python closes the generator that drives it.
Gives:    yes only where it is certain, because a snapshot is then taken in the middle of a turn.

Python closes a generator in both cases alike, and at once where the loop alone holds it.

Rule 1: an exception that leaves a frame has a traceback that refers to the frame, before the
        frame's iterators are dropped. So a loop whose frame no traceback refers to was left by
        `break` or `return`. A traceback of an earlier exception that the script still holds makes
        the answer no.
Rule 2: a generator that something else holds, such as a progress bar, is closed later and by
        another frame than the one that took its items. The answer is then no.
"""

import gc
import sys
from types import TracebackType


def frame_of_loop() -> int:
    """Identifies the frame that asks the calling generator for its next item."""
    return id(sys._getframe(2))


def is_left_by_break(frame: int) -> bool:
    """Whether the calling generator is closed because its loop was left by `break` or `return`.

    Args:
        frame: of `frame_of_loop`, at the last item.
    """
    try:
        closing = sys._getframe(2)
    except ValueError:  # the interpreter ends
        return False
    if id(closing) != frame:
        return False
    referrers = gc.get_referrers(closing)
    return not any(isinstance(one, TracebackType) for one in referrers)
