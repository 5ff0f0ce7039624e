"""One request to one node, for an answer whose length only that node knows.

Runs in:  the SMP, in the requesting thread; the answer arrives in a link's thread.
Takes in: a request.
Gives:    the bytes, or the reason why they do not arrive.
"""

import contextlib
import queue
from collections.abc import Callable, Sequence

from ftrun import clock
from ftrun.errors import LayoutUnknown
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.wire.cluster import transfer as t

MAX_ANSWER_BYTES = 1 << 30
_TICK_S = 0.1


class WholeResponse:
    """The `ResponseSink` of such a request."""

    def __init__(self) -> None:
        self._raw: bytearray | None = None
        self._is_here = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        if index or self._is_here or not 0 < num_bytes <= MAX_ANSWER_BYTES:
            return None
        self._raw = bytearray(num_bytes)
        return [memoryview(self._raw)]

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        self._is_here = True
        self._answers.put("" if digest is not None else "it has sent no digest")

    def refused(self, index: int, why: str) -> None:
        self._answers.put(why or "it was refused")

    def take(self, *, timeout_s: float) -> bytearray:
        """Return the bytes.

        Raises:
            queue.Empty: nothing has arrived yet.
            LayoutUnknown: nothing will arrive.
        """
        why = self._answers.get(timeout=timeout_s)
        if why or self._raw is None:
            raise LayoutUnknown(why)
        return self._raw


def ask_whole(
    desk: FetchRpc,
    node_id: str,
    question: Callable[[int], t.GetShardHeader | t.GetMirror],
    *,
    patience_s: float,
    is_over: Callable[[], str],
) -> bytearray:
    """Send a request, and wait for the answer.

    Args:
        desk: sends the request.
        node_id: the node that is asked.
        question: builds the request for the given number.
        patience_s: seconds to wait.
        is_over: returns a reason to stop waiting, or "".

    Raises:
        LayoutUnknown: the request is refused, or no answer arrives.
    """
    sink = WholeResponse()
    number = desk.requests.open(sink)
    give_up_s = clock.now_s() + patience_s
    try:
        if not desk.tell(node_id, OutgoingFrame(question(number))):
            raise LayoutUnknown("it cannot be asked")
        while True:
            with contextlib.suppress(queue.Empty):
                return sink.take(timeout_s=_TICK_S)
            why = is_over()
            if why or clock.now_s() > give_up_s:
                raise LayoutUnknown(why or f"silent for {patience_s:.0f} s")
    finally:
        desk.requests.close(number)
