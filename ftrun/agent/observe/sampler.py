"""Samples this node's ranks while they train: when each enters a collective, and its links.

Runs in:  agent, the thread of the rank observer.
Takes in: flight recorders, the kernel's counters of connections, heartbeat pages.
Gives:    a `NodeSample` about once a second, less often if it would cost too much.

Rule 1: sampling uses at most `COST` of a processor per rank. A node with many ranks or long flight
        recorders is therefore sampled less often.
"""

from collections.abc import Sequence

from ftrun import clock
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.agent.observe.flight_recorder import read_entries
from ftrun.agent.observe.proc import SocketStats
from ftrun.agent.observe.process_facts import resident_bytes, room_bytes
from ftrun.monitor.slow.samples import Entered, NodeSample, RankSample, thinned
from ftrun.wire.shared_memory.pages import HeartbeatField

EVERY_S = 1.0
DEVICE_EVERY_S = 15.0
"""Interval if collectives run on a device, because the cost of a sample there is not measured
yet."""

COST = 0.004
"""Of a processor, for each rank."""

_BOTH_ENDS = 2.0
"""The answering threads in the ranks use as much processor time as the requests do (measured)."""


class Sampler:
    """The samples of one generation on this node."""

    def __init__(self) -> None:
        self._due_s = clock.now_s() + EVERY_S
        self._number = 0
        self._last_s = 0.0
        self._sockets = SocketStats()
        self.on_device = False
        """Collectives run on a device, so a read of the recorder queries the device for its
        events."""
        self._told: dict[tuple[int, str], int] = {}
        """The newest collective that a sample has reported, by rank and group."""

    def take(self, handles: Sequence[WorkerHandle]) -> NodeSample | None:
        at_s, cpu_s = clock.now_s(), clock.thread_cpu_s()
        if at_s < self._due_s or not handles:
            return None
        ahead_s = clock.wall_s() - clock.now_s()
        ranks = tuple(self._rank(handle, ahead_s) for handle in handles)
        pids = [handle.pid for handle in handles if handle.child.status is None]
        links = tuple(self._sockets.look(pids, at_s))
        span_s = at_s - self._last_s if self._last_s else 0.0
        self._last_s = at_s
        self._number += 1
        # Only CPU time counts. A starved rank answers late, and that is when it must be sampled.
        took_s = _BOTH_ENDS * (clock.thread_cpu_s() - cpu_s)
        every_s = DEVICE_EVERY_S if self.on_device else EVERY_S
        self._due_s = at_s + max(every_s, took_s / (COST * len(handles)))
        return NodeSample(self._number, at_s, span_s, ranks, links, room_bytes())

    def _rank(self, handle: WorkerHandle, ahead_s: float) -> RankSample:
        """Sample one rank; `ahead_s` is the wall clock minus the monotonic clock."""
        page, rank = handle.place.page, handle.place.rank
        entered: list[Entered] = []
        if page.get(HeartbeatField.HAS_SERVER) and handle.child.status is None:
            for entry in read_entries(handle.place.request.rank_socket) or ():
                seq = entry.collective_seq_id
                self.on_device |= not entry.profiling_name.startswith("gloo:")
                if not entry.is_p2p and seq > self._told.get((rank, entry.group), 0):
                    entered.append((entry.group, seq, entry.time_created_ns / 1e9 - ahead_s))
        for group, seq, _ in entered:
            self._told[rank, group] = max(seq, self._told.get((rank, group), 0))
        return RankSample(
            rank=rank,
            step=page.get(HeartbeatField.STEP),
            entered=thinned(entered),
            groups=page.groups,
            is_training=page.phase in ("", "train"),
            calls=tuple(page.calls_at_steps),
            resident_bytes=resident_bytes(handle.pid) if handle.child.status is None else 0,
        )
