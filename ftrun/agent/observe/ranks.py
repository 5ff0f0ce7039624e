"""Observes this node's ranks: the duration of their steps, and the state of unresponsive ranks.

Runs in:  agent, a thread of its own, so that a slow poll delays nothing.
Takes in: heartbeat pages, flight recorders, the kernel's counters of connections; on suspicion
          stacks and /proc.
Gives:    `p99_s`, `views` and `sample`, each replaced as a whole. A `NodeSample` is taken about
          once a second while the ranks train, less often if it would cost too much.
Survives: a rank that hangs in any way: every read is bounded.

Rule 1: while ranks complete steps, only their pages are read, and samples are taken. The rest is
        for unresponsive ranks.
Rule 2: if this thread itself was paused (a suspended laptop, a frozen node), all times without a
        heartbeat are counted from its wake-up.
Rule 3: sampling uses at most `COST` of a processor per rank. A node with many ranks or long flight
        recorders is therefore sampled less often.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from ftrun import clock
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.agent.observe.devices import DeviceCounters
from ftrun.agent.observe.evidence import BoundedReads
from ftrun.agent.observe.introspection import RankStack, take_stack
from ftrun.agent.observe.preflight import free_memory
from ftrun.agent.observe.proc import ProcessState, SocketStats, process_facts, resident_bytes
from ftrun.agent.observe.recorder import (
    GroupMemory,
    Recorded,
    RecorderReader,
    read_trace,
    with_messages,
)
from ftrun.agent.observe.recorder_dumps import DumpWriter, RankAnswer
from ftrun.agent.observe.recorder_memory import newest_call
from ftrun.config.profile import HangConfig
from ftrun.events import ErrorLine
from ftrun.monitor.device_faults import DeviceReport
from ftrun.monitor.flight_recorder import (
    RecorderSource,
    call_text,
    parse_trace,
    recorded_groups,
)
from ftrun.monitor.order.messages import waits_before
from ftrun.monitor.page_values import decode_backends, quantile_s
from ftrun.monitor.slow.samples import Entered, NodeSample, RankSample, thinned
from ftrun.monitor.verdicts import (
    Frame,
    ProcessGroupView,
    RankConnection,
    RankView,
    own_functions,
)
from ftrun.monitor.wait_graph import HangDeadlines
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, left_calls

_log = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
LOGS_S = 1.0
"""Deadline for the logs of all ranks here; the views of a poll are published before."""

_STUCK_S = 2.0
"""A rank without a step for this time is dumped when it is killed."""

QUICK_S = 0.2
"""Deadline for a rank's answer while the run is blocked."""

GAP_S = 2.0
"""A longer absence of this thread means that the machine was paused or starved."""

IDLE_CORES = 0.05
"""A rank that uses less is idle; background threads of a script use about as much."""

IDLE_BYTES = 4096
"""Between two polls: threads wake each other by writing a few bytes."""

IDLE_WORK = 64
"""Idle workers of a DataLoader wake every few seconds; a process that computes or communicates does
far more."""

BUSY_CORES = 0.1
"""More than background threads use; on a starved machine a busy loop gets only part of a core."""


@dataclass(slots=True)
class _Memory:
    """What the last poll of a rank has shown."""

    pid: int
    facts: ProcessState
    frames: tuple[Frame, ...]
    functions: tuple[str, ...]
    at_s: float
    still_since_s: float
    spins_since_s: float
    unmoved_since_s: float


class RankObserver:
    """Observes the ranks of one agent."""

    def __init__(
        self,
        unused_fds: "SimpleQueue[int]",
        settings: HangConfig,
        dumps: Path,
        written_errors: Callable[[WorkerHandle], tuple[ErrorLine, ...]],
    ) -> None:
        """`dumps` is the folder for dumps of the flight recorders, taken once in a hang.

        `written_errors` reads the error classes of a rank's logs, before each deadline of a hang.
        """
        self.p99_s = 0.0
        """Duration of the slowest rank's steps, 99th percentile; 0 before there are any. Of the
        first steps only an upper bound is known: the time up to the first one."""
        self.views: tuple[RankView, ...] = ()
        """Views of all ranks here, while one of them is unresponsive; empty while all complete
        steps."""
        self._settings = settings
        self._unused_fds = unused_fds
        self._handles: list[WorkerHandle] = []
        self._memories: dict[int, _Memory] = {}
        self._group_memory = GroupMemory()
        self._written_errors = written_errors
        self._reads = BoundedReads()
        self._dumps = DumpWriter(dumps, self._reads)
        self._errors: dict[int, tuple[ErrorLine, ...]] = {}
        """By rank; of this hang."""
        self._deadlines_read = 0
        """Number of deadlines of this hang before which the logs were read."""
        self._readers: dict[str, RecorderReader] = {}
        """By the rank's socket; replaced with each generation."""
        self.sample: NodeSample | None = None
        """The newest sample of ranks that complete steps."""
        self._sampler = Sampler()
        self._devices = DeviceCounters()
        self.troubles: SimpleQueue[DeviceReport] = SimpleQueue()
        self._awake_since_s = clock.now_s()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-eyes", daemon=True)

    # --- main thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def observe(self, handles: list[WorkerHandle]) -> None:
        self.views, self.sample = (), None
        self._sampler = Sampler()
        self._readers = {}
        self._dumps.reset()
        self._handles = handles

    def examine(self, handles: list[WorkerHandle]) -> None:
        """Read the last calls of all ranks quickly, because some of them have failed."""
        self._handles = []
        found = [_last_calls(handle, self._reader(handle)) for handle in handles]
        self.views = tuple(view for view, _ in found)
        if handles:
            self._dumps.keep(handles[0].slot.request.generation, [answer for _, answer in found])

    def keep_calls(self, handles: list[WorkerHandle]) -> None:
        """Keep the calls of ranks that make no steps and are killed, for their dumps.

        A stopped rank is killed before a hang is suspected, and it may be on another node.
        """
        now_s, answers = clock.now_s(), list[RankAnswer]()
        if self._dumps.is_written:
            return
        for handle in handles:
            facts = process_facts(handle.pid) if handle.child.is_alive else None
            is_stopped = facts is None or facts.state in ("T", "t")
            if is_stopped or self._unresponsive_s(handle, now_s) < _STUCK_S:
                continue
            if clock.now_s() - now_s > QUICK_S:
                break
            page = handle.slot.page
            data = self._reader(handle).calls(page, deadline_s=QUICK_S)
            answers.append(RankAnswer(handle.slot.rank, data, page.groups, clock.wall_s()))
        if answers:
            self._dumps.keep(handles[0].slot.request.generation, answers)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    # --- this thread --------------------------------------------------------------------------

    def _run(self) -> None:
        last_s = clock.now_s()
        while not self._ended.wait(POLL_EVERY_S):
            now_s = clock.now_s()
            if now_s - last_s > GAP_S:
                self._awake_since_s = now_s
            try:
                self._poll()
            except Exception:  # noqa: BLE001 - see below
                # Without observations a run is as well off as under torchrun, so it must not end
                # here.
                _log.exception("a look at the ranks failed: this is a bug in ftrun")
            # Only this thread writes to the stack files of ended ranks, so only it closes them.
            with suppress(Empty):
                while True:
                    os.close(self._unused_fds.get_nowait())
            last_s = clock.now_s()
        self._dumps.write_kept()

    def _poll(self) -> None:
        self._dumps.write_kept()
        handles = self._handles
        if not handles:
            return
        self._dumps.clean(handles[0].slot.request.generation)
        on_device = self._sampler.on_device
        for trouble in self._devices.poll(clock.now_s(), on_device=on_device):
            self.troubles.put(trouble)
        for handle in handles:
            if handle.stopped_since_s is not None and handle.last_call is None:
                handle.last_call = ""  # if this fails, it is not tried again
                handle.last_call = self._sampler.last_call(handle)
        pages = [handle.slot.page for handle in handles]
        known_s = max([quantile_s(page.step_times, 0.99) for page in pages], default=0.0)
        first_s = max(map(_first_step_s, pages), default=0.0)
        self.p99_s = max(known_s or self.p99_s, _OF_FIRST * first_s)
        deadlines = HangDeadlines.of(self.p99_s, self._settings)
        now_s = clock.now_s()
        unresponsive_s = max(
            [self._unresponsive_s(handle, now_s) for handle in handles], default=0.0
        )
        if unresponsive_s < deadlines.sample_s:
            self._memories.clear()
            self._group_memory.clear()
            self._errors, self._deadlines_read = {}, 0
            sample = self._sampler.take(handles)
            if handles is self._handles:
                self.views = ()
                self.sample = sample or self.sample
            self._dumps.reset()
            return
        connections = self._sampler.connections(handles)
        views = tuple(self._view(one, connections.get(one.pid, ())) for one in handles)
        if handles is self._handles:
            self.views = views
        self._read_errors(handles, deadlines.number(unresponsive_s + 2 * POLL_EVERY_S))
        if unresponsive_s >= deadlines.suspect_after_s:
            self._dumps.write([(handle, self._reader(handle)) for handle in handles])

    def _unresponsive_s(self, handle: WorkerHandle, now_s: float) -> float:
        page = handle.slot.page
        if not page.get(HeartbeatField.FIRST_STEP_NS) or handle.child.status == 0:
            return 0.0
        return now_s - max(page.get(HeartbeatField.HEARTBEAT_NS) / 1e9, self._awake_since_s)

    def _view(self, handle: WorkerHandle, connections: tuple[RankConnection, ...]) -> RankView:
        page, rank = handle.slot.page, handle.slot.rank
        facts = process_facts(handle.pid) if handle.child.is_alive else None
        unresponsive_s = self._unresponsive_s(handle, clock.now_s())
        view = RankView(
            rank=rank,
            pid=handle.pid,
            process=facts.state if facts is not None else "",
            step=page.get(HeartbeatField.STEP),
            unresponsive_s=round(unresponsive_s, 2),
            phase=page.phase,
            has_stepped=bool(page.get(HeartbeatField.FIRST_STEP_NS)),
            is_finished=handle.child.status == 0,
            connections=connections,
            errors=self._errors.get(rank, ()),
        )
        if facts is None:
            return view
        stack = take_stack(
            handle.pid, dumper=page.get(HeartbeatField.HAS_DUMPER), stack_fd=handle.slot.stack_fd
        ) or RankStack(())
        if facts.state in ("T", "t"):  # a stopped process does not answer
            recorded = Recorded(notes=(handle.last_call,) if handle.last_call else ())
        else:
            recorded = self._reader(handle).read(page)
        recorded = with_messages(recorded, page, is_stopped=facts.state in ("T", "t"))
        return msgspec.structs.replace(
            self._compared(view, facts, stack),
            holds_gil=stack.holds_gil,
            is_gil_known=stack.is_spied,
            groups=self._group_memory.with_times(rank, recorded.groups, clock.now_s()),
            message_counts=recorded.message_counts,
            left_order=recorded.left_order,
            is_recorder_complete=recorded.is_complete,
            recorder_notes=recorded.notes,
            stack=stack.frames,
            blocked_in=facts.blocked_in,
            child=facts.child,
        )

    def _read_errors(self, handles: Sequence[WorkerHandle], number: int) -> None:
        """Read the logs again if another deadline is near; the next views have the result."""
        if number <= self._deadlines_read:
            return
        self._deadlines_read = number
        found = self._reads.result(
            lambda: {one.slot.rank: self._written_errors(one) for one in handles}, LOGS_S
        )
        self._errors = self._errors if found is None else found

    def _reader(self, handle: WorkerHandle) -> RecorderReader:
        path = handle.slot.request.rank_socket
        reader = RecorderReader(path, stack_fd=handle.slot.stack_fd)
        return self._readers.setdefault(path, reader)

    def _compared(self, view: RankView, facts: ProcessState, stack: RankStack) -> RankView:
        """With the cores used, and the seconds without work, in a busy loop and with one stack."""
        rank, pid, now_s = view.rank, view.pid, clock.now_s()
        functions = own_functions(stack.frames)
        last = self._memories.get(rank)
        cpu, still_since_s, spins_since_s, unmoved_since_s = 0.0, now_s, now_s, now_s
        if last is not None and last.pid == pid:
            cpu = (facts.cpu_s - last.facts.cpu_s) / max(0.01, now_s - last.at_s)
            is_quiet = (
                cpu < IDLE_CORES
                and not facts.is_in_kernel
                and facts.io_bytes - last.facts.io_bytes < IDLE_BYTES
                and facts.children_work - last.facts.children_work < IDLE_WORK
            )
            if stack.frames == last.frames:
                still_since_s = last.still_since_s if is_quiet else now_s
                unmoved_since_s = last.unmoved_since_s if stack.frames else now_s
            if cpu >= BUSY_CORES and functions and functions == last.functions:
                spins_since_s = last.spins_since_s
        self._memories[rank] = _Memory(
            pid, facts, stack.frames, functions, now_s, still_since_s, spins_since_s,
            unmoved_since_s,
        )  # fmt: skip
        return msgspec.structs.replace(
            view,
            cpu=round(cpu, 2),
            still_s=round(now_s - still_since_s, 2),
            spins_s=round(now_s - spins_since_s, 2),
            unmoved_s=round(now_s - unmoved_since_s, 2),
        )


_FEW_STEPS = 5
"""Before this number of steps, the time up to the first one limits what is known of a step."""

_OF_FIRST = 0.5
_MOST_FIRST_S = 300.0
"""The time before the first step may be that of a data set, which is loaded once."""


def _first_step_s(page: SharedPage) -> float:
    """The duration of the first step with the set-up before it; 0 if there were more steps."""
    first_ns = page.get(HeartbeatField.FIRST_STEP_NS)
    if not first_ns or sum(page.step_times) >= _FEW_STEPS:
        return 0.0
    began = (
        HeartbeatField.STARTED_NS, HeartbeatField.INIT_GROUP_NS, HeartbeatField.ATTACH_NS,
        HeartbeatField.RESTORE_END_NS,
    )  # fmt: skip
    began_ns = max(map(page.get, began))
    return min(_MOST_FIRST_S, max(0.0, (first_ns - began_ns) / 1e9)) if began_ns else 0.0


def _last_calls(handle: WorkerHandle, reader: RecorderReader) -> tuple[RankView, RankAnswer]:
    """The last calls: of a running rank from its server, of a failed one from its stack file."""
    page, slot = handle.slot.page, handle.slot
    groups: tuple[ProcessGroupView, ...] = ()
    data = b""
    if handle.child.is_alive:
        recorded = reader.read(page, deadline_s=QUICK_S)
        groups, data = recorded.groups, recorded.answer
    if not groups and (trace := parse_trace(data := left_calls(slot.stack_fd))):
        source, now_ns = RecorderSource(page.groups), clock.wall_s() * 1e9
        groups = recorded_groups(trace, source, now_ns=now_ns).views
    view = RankView(
        rank=slot.rank,
        pid=handle.pid,
        process="S" if handle.child.is_alive else "",
        step=page.get(HeartbeatField.STEP),
        unresponsive_s=0.0,
        is_finished=handle.child.status == 0,
        groups=groups,
    )
    return view, RankAnswer(slot.rank, data, page.groups, clock.wall_s())


SAMPLE_EVERY_S = 1.0
MEMORY_EVERY_S = 5.0
"""The kernel adds up the memory of a cgroup for each reader, which takes 0.7 ms."""

_CLOCK_STEP_S = 0.02
"""A larger change of the wall clock between two samples is no slew."""

COST = 0.004
"""Fraction of one processor that sampling may use for each rank."""

_BOTH_ENDS = 2.0
"""The answering threads in the ranks use as much processor time as the requests do (measured)."""


class Sampler:
    """The samples of one generation on this node."""

    def __init__(self) -> None:
        self._due_s = clock.now_s() + SAMPLE_EVERY_S
        self._number = 0
        self._last_s = 0.0
        self._sockets = SocketStats()
        self._ahead_s = 0.0
        self._memory_due_s = 0.0
        self.on_device = False
        """A rank has used a device."""
        self._reported: dict[tuple[int, str], int] = {}
        """The newest collective that a sample has reported, by rank and group."""

    def take(self, handles: Sequence[WorkerHandle]) -> NodeSample | None:
        at_s, cpu_s = clock.now_s(), clock.thread_cpu_s()
        if at_s < self._due_s or not handles:
            return None
        before_s, self._ahead_s = self._ahead_s, clock.wall_s() - clock.now_s()
        ahead_s = self._ahead_s
        if before_s and abs(ahead_s - before_s) > _CLOCK_STEP_S:
            return None  # the wall clock was set: times of calls from before it are not comparable
        ranks = tuple(self._rank(handle, ahead_s) for handle in handles)
        pids = [handle.pid for handle in handles if handle.child.is_alive]
        links = tuple(self._sockets.poll(pids, at_s))
        available_bytes = 0
        if at_s >= self._memory_due_s:
            self._memory_due_s = at_s + MEMORY_EVERY_S
            available_bytes = max(0, free_memory())
        span_s = at_s - self._last_s if self._last_s else 0.0
        self._last_s = at_s
        self._number += 1
        # Only CPU time counts. A starved rank answers late, and that is when it must be sampled.
        took_s = _BOTH_ENDS * (clock.thread_cpu_s() - cpu_s)
        self._due_s = at_s + max(SAMPLE_EVERY_S, took_s / (COST * len(handles)))
        return NodeSample(self._number, at_s, span_s, ranks, links, available_bytes)

    def connections(self, handles: Sequence[WorkerHandle]) -> dict[int, tuple[RankConnection, ...]]:
        """Of each living rank, by its pid."""
        pids = [handle.pid for handle in handles if handle.child.is_alive]
        return self._sockets.connections(pids, clock.now_s())

    def last_call(self, handle: WorkerHandle) -> str:
        """Of a stopped rank: from its memory, else from the newest sample; empty: neither."""
        if (newest := newest_call(handle.pid)) is not None:
            return f"its last collective is {call_text(newest, now_ns=clock.wall_s() * 1e9)}"
        rank = handle.slot.rank
        known = [f"#{seq:,} of group {group}" for (one, group), seq in self._reported.items()
                 if one == rank]  # fmt: skip
        return f"its last sample has collective {', '.join(known)}" if known else ""

    def _rank(self, handle: WorkerHandle, ahead_s: float) -> RankSample:
        """Sample one rank; `ahead_s` is the wall clock minus the monotonic clock."""
        page, rank = handle.slot.page, handle.slot.rank
        entered: list[Entered] = []
        backends = decode_backends(page.backends)
        self.on_device |= bool(backends.device_backend or page.get(HeartbeatField.DEVICE_NS))
        is_on_cpu = not backends.device_backend or "gloo" in backends.by_device.values()
        is_read = page.get(HeartbeatField.HAS_SERVER) and is_on_cpu
        if is_read and handle.child.is_alive:
            trace = read_trace(handle.slot.request.rank_socket)
            for entry in trace.entries if trace is not None else ():
                seq = entry.collective_seq_id
                if not entry.is_p2p and seq > self._reported.get((rank, entry.group), 0):
                    entered.append((entry.group, seq, entry.time_created_ns / 1e9 - ahead_s))
        for group, seq, _ in entered:
            self._reported[rank, group] = max(seq, self._reported.get((rank, group), 0))
        shown, step = thinned(entered), page.get(HeartbeatField.STEP)
        waited_s: tuple[float, ...] = ()
        boundary: tuple[float, float] | None = None
        if page.get(HeartbeatField.MESSAGES):
            shown, waited_s = waits_before(shown, page.messages())
            times = HeartbeatField.STEP_NS, HeartbeatField.WAITED_AT_STEP_NS
            at_s, total_s = (page.get(one) / 1e9 for one in times)
            boundary = (at_s, total_s) if page.get(HeartbeatField.STEP) == step else None
        return RankSample(
            rank=rank,
            step=step,
            entered=shown,
            waited_s=waited_s,
            boundary=boundary,
            groups=page.groups,
            is_training=page.phase in ("", "train"),
            calls=tuple(page.calls_at_steps),
            resident_bytes=resident_bytes(handle.pid) if handle.child.is_alive else 0,
        )
