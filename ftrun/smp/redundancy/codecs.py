"""The codecs of this SMP, each of which is tested before it is relied on.

Runs in:  the SMP; called from any of its threads.
Takes in: k and m.
Gives:    a `Codec`, and the problem that its self-test found, if any.
"""

import logging
import threading
from functools import partial

from ftrun.erasure.codec import Codec, choose_codec, self_test
from ftrun.errors import InternalError
from ftrun.smp.jobs import Finish, JobLanes

_log = logging.getLogger(__name__)


class CodecCache:
    """One codec for each k and m. Several threads may use a codec at once.

    Args:
        jobs: its lane "protect" runs the self-test before any work submitted to that lane later.
    """

    def __init__(self, jobs: JobLanes) -> None:
        self._jobs = jobs
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._problems: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()

    def get(self, k: int, m: int) -> Codec:
        """Return the codec for k data and m parity blocks; the first call submits its test."""
        with self._lock:
            if (k, m) not in self._codecs:
                self._codecs[k, m] = choose_codec(k, m)
                tell = partial(self._problems.__setitem__, (k, m))
                work = partial(_test, self._codecs[k, m], tell)
                bug = "a bug in ftrun; the SMP's log has it"
                self._jobs.submit("protect", work, failed=partial(tell, bug))
            return self._codecs[k, m]

    def problem(self, codec: Codec) -> str:
        return self._problems.get((codec.k, codec.m), "")


def _test(codec: Codec, tell: "partial[None]") -> Finish:
    try:
        count = self_test(codec)
    except InternalError as error:
        return partial(tell, str(error))
    _log.debug("%s: %d sets of survivors tried", codec.name, count)
    return partial(tell, "")
