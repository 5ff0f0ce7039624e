"""How fast checkpoints may be written, so that training does not wait for the disk it shares.

Runs in:  the SMP, in the threads that write.
Takes in: bytes per second; an event that says that all is given up.
Gives:    a `Pace` for `ftrun.smp.checkpoint.storage.direct_file.DirectFile`.
"""

import threading

from ftrun import clock
from ftrun.errors import CheckpointError

_NAP_S = 0.1
"""So soon a waiting writer hears that there is no hurry any more, or that there is."""


class Throttle:
    """No more than so many bytes a second, counted over all files of a node.

    What was not used is not saved up: after a pause it goes on at the same rate.

    Args:
        stop: when set, whoever writes is told so.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.bytes_per_s = 0.0
        """0: as fast as it goes. May be changed while somebody writes."""
        self.stop = stop
        self._paid_s = 0.0
        """When what was let through so far is paid for."""

    def __call__(self, num_bytes: int) -> None:
        """Wait until so many bytes may be written.

        Raises:
            CheckpointError: the writing is given up.
        """
        while True:
            wait_s = self._paid_s - clock.now_s() if self.bytes_per_s else 0.0
            if self.stop.wait(min(max(wait_s, 0.0), _NAP_S)):
                raise CheckpointError("the checkpoint is given up: the run is being stopped")
            if wait_s <= _NAP_S:
                break
        if self.bytes_per_s:
            self._paid_s = max(clock.now_s(), self._paid_s) + num_bytes / self.bytes_per_s
