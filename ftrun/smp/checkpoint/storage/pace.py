"""Limits the write rate of checkpoints, so that training does not wait for the shared disk.

Runs in:  the SMP, in the threads that write.
Takes in: bytes per second; an event that cancels all writes.
Gives:    a `Pace` for `ftrun.smp.checkpoint.storage.direct_file.DirectFile`.
"""

import threading

from ftrun import clock
from ftrun.errors import CheckpointError

_NAP_S = 0.1
"""Seconds within which a waiting writer sees a changed rate."""


class Throttle:
    """Limits the bytes per second, counted over all files of a node.

    Unused bytes are not accumulated: after a pause, writing continues at the same rate.

    Args:
        stop: when set, writers are cancelled.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.bytes_per_s = 0.0
        """0: no limit. It may change during a write."""
        self.stop = stop
        self._paid_s = 0.0
        """The time from which the bytes admitted so far are within the rate."""

    def __call__(self, num_bytes: int) -> None:
        """Wait until this number of bytes may be written.

        Raises:
            CheckpointError: the write is cancelled.
        """
        while True:
            wait_s = self._paid_s - clock.now_s() if self.bytes_per_s else 0.0
            if self.stop.wait(min(max(wait_s, 0.0), _NAP_S)):
                raise CheckpointError("the checkpoint is given up: the run is being stopped")
            if wait_s <= _NAP_S:
                break
        if self.bytes_per_s:
            self._paid_s = max(clock.now_s(), self._paid_s) + num_bytes / self.bytes_per_s
