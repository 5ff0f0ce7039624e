"""Rebuilds blocks of a lost node from this node's parity and the data of other survivors.

Runs in:  the SMP, in two threads of its own; requests come from the threads of links.
Takes in: RebuildBlock.
Gives:    the rebuilt block to the requester, or the reason why it cannot be rebuilt.

Every survivor with parity of a stripe rebuilds the blocks that are requested from it. The node that
replaces the lost one therefore receives the lost bytes once and not k times.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from ftrun.erasure.codec import Codec
from ftrun.erasure.fragments import Fragment, StripeId
from ftrun.erasure.rebuild import StripeFacts, StripeWork
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation
from ftrun.smp.jobs import Steps, Wait, drive
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.redundancy.group import group_of, num_stripes_of, stripes_of
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.smp.restore.rpc import FetchRpc, WholeResponse
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.parity_region import ParityRecord
from ftrun.wire.transport.bulk_socket import digest_of

NUM_THREADS = 2
_TICK_S = 0.1


class _BlockResponse(WholeResponse):
    """The answer of one node: a block, whose digest is in its header."""

    def __init__(
        self,
        position: int,
        node_id: str,
        asked_s: float,
        answers: "queue.SimpleQueue[_BlockResponse]",
        max_bytes: int,
    ) -> None:
        super().__init__(answers, max_bytes)
        self.position = position
        self.node_id = node_id
        self.asked_s = asked_s
        self.given_up = ""
        """The reason why the answer is not waited for. A late answer does not change it."""


class Rebuilder:
    """Rebuilds blocks in up to `NUM_THREADS` threads.

    A node may take `timeout_s` for one block, which is below the requester's own timeout.
    """

    def __init__(
        self,
        rpc: FetchRpc,
        served: RestoreServer,
        *,
        run: int,
        codec_for: Callable[[int, int], Codec],
        timeout_s: float,
    ) -> None:
        self._rpc = rpc
        self._served = served
        self._run = run
        self._codec_for = codec_for
        self._timeout_s = timeout_s
        self._asks: queue.SimpleQueue[tuple[str, t.RebuildBlock] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._unresponsive: set[str] = set()
        self._is_stopped = False
        self._lock = threading.Lock()

    def ask(self, requester: str, ask: t.RebuildBlock) -> None:
        with self._lock:
            is_new = self._num_threads < NUM_THREADS and not self._is_stopped
            self._num_threads += is_new
        if is_new:
            try:
                self._rpc.runner.start("ftrun-rebuild", self._work())
            except RuntimeError as error:  # the limit of threads is reached
                with self._lock:
                    self._num_threads -= 1
                    has_none = not self._num_threads
                if has_none:
                    with suppress(OSError):
                        self._rpc.refuse(requester, ask, 0, error)
                    return
        self._asks.put((requester, ask))

    def stop(self) -> None:
        """End the threads soon; pending requests get no answer."""
        self._is_stopped = True
        for _ in range(NUM_THREADS):
            self._asks.put(None)

    def _work(self) -> Steps[None]:
        while not self._is_stopped and (one := (yield Wait(self._asks))) is not None:
            requester, ask = one
            try:
                yield from self._serve(requester, ask)
            except OSError as error:  # for example no descriptor for a link to another node
                with suppress(OSError):
                    self._rpc.refuse(requester, ask, 0, error)

    def _serve(self, requester: str, ask: t.RebuildBlock) -> Steps[None]:
        try:
            raw = yield from self._rebuild(ask)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            self._rpc.refuse(requester, ask, 0, error)
        else:
            crash_point("smp.fetch.rebuilt")
            self._rpc.send(
                requester, OutgoingFrame(t.FetchData(ask.request, 0), [raw], digest_of([raw]))
            )

    def rebuild(self, ask: t.RebuildBlock) -> memoryview:
        """Return the block of a lost node for a worker of this node; raises LayoutUnknown."""
        try:
            return drive(self._rebuild(ask))
        except SnapshotCorrupt as error:
            self._rpc.exclude(error, ask)
            raise LayoutUnknown(str(error)) from error

    def _rebuild(self, ask: t.RebuildBlock) -> Steps[memoryview]:
        """Raises LayoutUnknown (too little is left), SnapshotCorrupt (own parity is damaged)."""
        region, record = self._served.region(ask)
        stripes = stripes_of(record)
        places = range(len(record.members))
        if ask.position not in places or not 0 <= ask.stripe < num_stripes_of(record):
            raise LayoutUnknown(f"there is no stripe {ask.stripe} of place {ask.position}")
        senders = stripes.senders(ask.stripe, record.coded_bytes)
        block = stripes.block_of(ask.position, ask.stripe)
        if block is None or ask.position not in senders:
            raise LayoutUnknown(f"place {ask.position} has no block in stripe {ask.stripe}")
        header, (row,) = self._served.row(region, record, ask.stripe)
        own_index = stripes.index(ask.stripe, record.position)
        own = Fragment(record.members[record.position].node_id, own_index, header, row)
        facts = self._facts(record, ask.stripe, senders)
        candidates = [
            node
            for node in (*senders, *stripes.parity_nodes(ask.stripe))
            if node in ask.alive and node not in (ask.position, record.position)
        ]
        candidates.sort(key=lambda node: self._is_lease_expired(record.members[node].node_id))
        out = bytearray(record.block_bytes)
        codec = self._codec_for(stripes.k, stripes.m)
        work = StripeWork(codec, facts, {stripes.index(ask.stripe, ask.position): out})
        if not work.take(own):
            needed = stripes.k - 1 - len(facts.empty)
            yield from self._gather(ask, record, work, (candidates, needed))
        _, size = stripes.span(block, record.coded_bytes[ask.position])
        return memoryview(out)[:size]

    def _is_lease_expired(self, node_id: str) -> bool:
        """True if the node did not answer earlier; such nodes come last."""
        return node_id in self._unresponsive or bool(self._rpc.loss_reason(node_id))

    def _facts(self, record: ParityRecord, stripe: int, senders: tuple[int, ...]) -> StripeFacts:
        stripes = stripes_of(record)
        in_order = [stripes.node_at(stripe, index) for index in range(stripes.k + stripes.m)]
        empty = set(stripes.data_nodes(stripe)) - set(senders)
        return StripeFacts(
            of=StripeId(self._run, record.version, group_of(record).id, stripe),
            nodes=tuple(record.members[node].node_id for node in in_order),
            empty=frozenset(stripes.index(stripe, node) for node in empty),
            generation=Generation(record.protected_in),
        )

    def _gather(
        self,
        ask: t.RebuildBlock,
        record: ParityRecord,
        work: StripeWork,
        others: tuple[list[int], int],
    ) -> Steps[None]:
        """Rebuild it, or raise LayoutUnknown; `others`: positions to ask, number of answers."""
        answers: queue.SimpleQueue[_BlockResponse] = queue.SimpleQueue()
        stripes = stripes_of(record)
        left, needed = others
        waiting: dict[int, _BlockResponse] = {}
        numbers: list[int] = []
        problems: list[str] = []
        try:
            while True:
                while left and len(waiting) < max(needed, 1):
                    position = left.pop(0)
                    name = record.members[position].node_id
                    sink = _BlockResponse(
                        position, name, self._now_s(), answers, record.block_bytes
                    )
                    waiting[position] = sink
                    numbers.append(self._ask(ask, sink))
                if not waiting:
                    raise LayoutUnknown("; ".join([str(work.refusal()), *problems]))
                answer = yield Wait(answers, _TICK_S)
                for found in self._resolved(waiting, answer):
                    if reason := found.given_up or found.problem:
                        problems.append(f"{found.node_id}: {reason}")
                        continue
                    needed -= 1
                    index, raw = stripes.index(ask.stripe, found.position), memoryview(found.raw)
                    if work.take(Fragment(found.node_id, index, found.header, raw)):
                        return
        finally:
            for number in numbers:
                self._rpc.requests.close(number)

    def _resolved(
        self, waiting: dict[int, _BlockResponse], answer: _BlockResponse | None
    ) -> list[_BlockResponse]:
        """Remove from `waiting` and return this answer, or if None, the requests that failed."""
        if answer is None:
            found = [one for one in waiting.values() if self._has_failed(one)]
        else:
            if not answer.problem:
                self._unresponsive.discard(answer.node_id)
            found = [answer] if answer.position in waiting else []
        for one in found:
            del waiting[one.position]
        return found

    def _has_failed(self, one: _BlockResponse) -> bool:
        one.given_up = self._rpc.loss_reason(one.node_id)
        if not one.given_up and self._now_s() - one.asked_s > self._timeout_s:
            self._unresponsive.add(one.node_id)
            one.given_up = f"no answer for {self._timeout_s:.0f} s"
        return bool(one.given_up)

    def _now_s(self) -> float:
        return self._rpc.runner.now_s()

    def _ask(self, ask: t.RebuildBlock, sink: _BlockResponse) -> int:
        number = self._rpc.requests.open(sink)
        body = t.GetBlock(
            number, ask.generation, ask.step, ask.group, ask.protected_in, stripe=ask.stripe
        )
        if not self._rpc.send(sink.node_id, OutgoingFrame(body)):
            sink.refused(0, "the node is unknown")
        return number
