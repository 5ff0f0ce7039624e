"""The codecs of this SMP, each tried before anything relies on it.

Runs in:  the SMP; asked from any of its threads.
Takes in: k and m.
Gives:    a `Codec`, and what is wrong with it, if the test has found something.
"""

import logging
import threading
from functools import partial

from ftrun.erasure.codec import Codec, choose_codec
from ftrun.erasure.self_test import self_test
from ftrun.errors import InternalError
from ftrun.smp.jobs import Finish, JobLanes

_log = logging.getLogger(__name__)


class CodecCache:
    """One codec for each k and m; they may be used by several threads at once.

    Args:
        jobs: the test is done in the lane "protect", before what is put there after it.
    """

    def __init__(self, jobs: JobLanes) -> None:
        self._jobs = jobs
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._problems: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()

    def get(self, k: int, m: int) -> Codec:
        """The codec for k data and m parity blocks; the first call has it tested."""
        with self._lock:
            if (k, m) not in self._codecs:
                self._codecs[k, m] = choose_codec(k, m)
                tell = partial(self._problems.__setitem__, (k, m))
                work = partial(_test, self._codecs[k, m], tell)
                bug = "a bug in ftrun; the SMP's log has it"
                self._jobs.submit("protect", work, failed=partial(tell, bug))
            return self._codecs[k, m]

    def problem(self, codec: Codec) -> str:
        """Why it must not be used; empty where nothing has been found."""
        return self._problems.get((codec.k, codec.m), "")


def _test(codec: Codec, tell: "partial[None]") -> Finish:
    try:
        count = self_test(codec)
    except InternalError as error:
        return partial(tell, str(error))
    _log.debug("%s: %d sets of survivors tried", codec.name, count)
    return partial(tell, "")
