"""After the loss of any m nodes of a group, the others restore their state, byte for byte.

Several real SMP processes run on loopback addresses, each `python -m ftrun.smp`. The test acts as
their agents and workers over real channels, with real arenas. A lost node is an SMP that was killed
and whose memory no process kept.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import pytest
import xxhash

from ftrun.errors import PeerError
from ftrun.ids import Version, version
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import (
    Arena,
    SlotHeader,
    SlotState,
    read_slot_headers,
    table_digest,
    verify,
)
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page
from ftrun.wire.shared_memory.parity_region import ParityRegion, ParityRegionState
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from ftrun.wire.transport.secret import SECRET_BYTES
from tests.integration.conftest import in_full
from tests.stopping import stop

RUN_ID = "test-run"
TIMEOUT_S = 60.0
LINK_TIMEOUT_S = 10.0
M = TypeVar("M")


def wait_until(claim: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Bounded wait on a condition that another process makes true."""
    end = time.monotonic() + TIMEOUT_S
    while not claim():
        if time.monotonic() > end:
            pytest.fail(f"not within {TIMEOUT_S} s: {what if isinstance(what, str) else what()}")
        select.select([], [], [], 0.002)


@dataclass(frozen=True)
class Model:
    """The size of a rank's state: equal on all ranks, and its own."""

    shared: int = 0
    own: int = 300_000
    more: int = 1000
    """By which `own` grows with each rank."""
    fixed: int = 4

    def layout(self, rank: int) -> Layout:
        entries = [
            LayoutEntry("bias", "F32", (9,), CopyTiming.LAZY),
            LayoutEntry("mean", "F64", (self.fixed,), CopyTiming.BOUNDARY),
        ]
        if self.shared:
            entries.append(LayoutEntry("shared", "F32", (self.shared,), CopyTiming.LAZY))
        if self.own:
            entries.append(
                LayoutEntry("own", "F32", (self.own + self.more * rank,), CopyTiming.LAZY)
            )
        return make_layout(entries, plain_bytes=100, metadata={"ftrun.rank": str(rank)})

    def image(self, rank: int, at: Version) -> bytes:
        """Different bytes for each rank and version; `shared` is equal on all ranks."""
        layout = self.layout(rank)
        parts = [layout.header]
        for entry in layout.entries:
            name = f"{entry.name} {at}" + ("" if entry.name == "shared" else f" {rank}")
            parts.append(noise(name, entry.num_bytes))
        return b"".join(parts)


def noise(name: str, size: int) -> bytes:
    seed = b"".join(xxhash.xxh3_128_digest(f"{name} {at}".encode()) for at in range(257))
    return (seed * (size // len(seed) + 1))[:size]


@dataclass
class Worker:
    """Acts over channel and arena like a rank."""

    channel: Channel
    rank: int
    model: Model
    world_size: int
    fd: int = -1

    def request(self) -> None:
        layout = self.model.layout(self.rank)
        answer = self.channel.ask(
            worker_messages.RequestArena(
                rank=self.rank,
                world_size=self.world_size,
                image_bytes=layout.image_bytes,
                num_pieces=len(layout.pieces),
                layout_id=xxhash.xxh3_64_intdigest(layout.header),
            ),
            deadline_s=TIMEOUT_S,
        )
        assert isinstance(answer.body, worker_messages.ArenaGranted), answer.body
        (self.fd,) = answer.fds

    def capture(self, at: Version, *, kept: Version | None) -> None:
        """Fill the slot that does not hold the committed version, and seal it."""
        layout = self.model.layout(self.rank)
        arena = Arena(self.fd, writable=True)
        try:
            held = arena.find(kept) if kept is not None else None
            slot = 0 if held is None else 1 - held
            arena.write_header(slot, SlotHeader(SlotState.COPYING, at.generation, at.step, 0, 0, 0))
            image = self.model.image(self.rank, at)
            start = len(layout.header)
            arena.image(slot)[:] = image
            table = arena.table(slot)
            for index, piece in enumerate(layout.pieces):
                begin = start + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[begin : begin + piece.num_bytes])
            digest = table_digest(table)
            header = SlotHeader(
                SlotState.SEALED, at.generation, at.step, len(image), digest, time.monotonic_ns()
            )
            arena.write_header(slot, header)
            del table
        finally:
            arena.close()

    def report_sealed(self, at: Version) -> None:
        layout_id = xxhash.xxh3_64_intdigest(self.model.layout(self.rank).header)
        self.channel.send(worker_messages.ShardSealed(self.rank, at.generation, at.step, layout_id))


@dataclass
class Node:
    """One SMP process, and the agent and workers that talk to it."""

    node_id: str
    host: str
    ranks: list[int]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    agent: Channel | None = None
    port: int = 0
    page_fd: int = -1
    arenas: dict[int, int] = field(default_factory=dict)
    parity_regions: dict[int, int] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    reported: list[messages.AnyMessage] = field(default_factory=list)
    starts: int = 0
    generation: int = -1

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def position(self) -> smp_messages.NodeAddress:
        return smp_messages.NodeAddress(
            self.node_id, 1, self.host, self.port if self.is_up else 0, self.ranks
        )

    def start(self, *, secret: bytes | None, adopt: bool = False, crash_at: str = "") -> None:
        self.starts += 1
        if self.agent is not None:
            self.receive()
            self.agent.close()
        path = self.folder / f"{self.node_id}-{self.starts}.sock"
        command = [
            *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN_ID),
            *("--socket", str(path), "--orphan-s", "600"),
        ]
        with (self.folder / f"{self.node_id}-{self.starts}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--adopt"] if adopt else command,
                env={**os.environ, "FTRUN_CRASH_AT": crash_at},
                stderr=log,
            )
        wait_until(lambda: path.exists() or not self.is_up, f"{self.node_id} listens")
        self.agent = self.connect("agent")
        if adopt:
            fds = [self.arenas[rank] for rank in sorted(self.arenas)]
            fds += [self.parity_regions[slot] for slot in sorted(self.parity_regions)]
            body = smp_messages.AdoptMemory(sorted(self.arenas), sorted(self.parity_regions))
            assert self.ask(body, messages.Done, *fds) == messages.Done()
        self.listen(secret)

    def connect(self, role: str, rank: int = -1) -> Channel:
        return connect(
            self.folder / f"{self.node_id}-{self.starts}.sock",
            run_id=RUN_ID,
            peer=f"the SMP of {self.node_id}",
            hello=messages.Hello(role=role, pid=os.getpid(), rank=rank),
            deadline_s=TIMEOUT_S,
        )

    def listen(self, secret: bytes | None) -> None:
        if secret is None:
            self.port = self.ask(
                smp_messages.ListenForPeers(self.host), smp_messages.ListeningForPeers
            ).port
            return
        fd = os.memfd_create("secret")
        os.write(fd, secret)
        try:
            self.port = self.ask(
                smp_messages.ListenForPeers(self.host), smp_messages.ListeningForPeers, fd
            ).port
        finally:
            os.close(fd)

    def ask(self, body: messages.AnyMessage, kind: type[M], *fds: int) -> M:
        assert self.agent is not None
        self.agent.send(body, fds=fds, deadline_s=TIMEOUT_S)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if isinstance(received.body, kind):
                return received.body
            assert self._take(received), received.body

    def _take(self, received: ReceivedMessage) -> bool:
        """Keep the messages that the SMP sends without a request, as an agent does."""
        body = received.body
        match body:
            case worker_messages.ArenaGranted():
                self._keep(self.arenas, body.rank, *received.fds)
            case smp_messages.ParityRegionCreated():
                self._keep(self.parity_regions, body.slot, *received.fds)
            case smp_messages.ParityRegionFreed():
                if body.slot in self.parity_regions:
                    os.close(self.parity_regions.pop(body.slot))
            case (
                smp_messages.VersionReady()
                | smp_messages.VersionCommitted()
                | smp_messages.AbandonVersion()
                | smp_messages.RestoreReady()
                | smp_messages.RestoreFailed()
                | smp_messages.PeersUnreachable()
                | smp_messages.MemoryNeeded()
                | smp_messages.SmpNotice()
            ):
                self.reported.append(body)
            case _:
                return False
        return True

    @staticmethod
    def _keep(where: dict[int, int], at: int, fd: int) -> None:
        if at in where:
            os.close(where[at])
        where[at] = fd

    def receive(self) -> None:
        """Receive the messages that were sent without a request."""
        if self.agent is not None:
            with contextlib.suppress(PeerError):
                for received in self.agent.receive_ready():
                    assert self._take(received), received.body

    def has_reported(self, kind: type[messages.AnyMessage]) -> list[messages.AnyMessage]:
        self.receive()
        return [body for body in self.reported if isinstance(body, kind)]

    def status(self) -> dict[str, object]:
        answer = self.ask(messages.StatusRequest(), messages.StatusReply)
        found = json.loads(answer.document)
        assert isinstance(found, dict)
        return found

    def work(self) -> dict[str, object]:
        found = self.status()["group_work"]
        assert isinstance(found, dict)
        return found

    def log(self) -> str:
        return (self.folder / f"{self.node_id}-{self.starts}.log").read_text()

    def lose(self) -> None:
        """Lose the node: its SMP, and every copy of its memory."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        self.forget()

    def forget_channels(self) -> None:
        for worker in self.workers:
            worker.channel.close()
            if worker.fd >= 0:
                os.close(worker.fd)
        if self.agent is not None:
            self.agent.close()
        self.agent, self.workers, self.reported = None, [], []

    def forget(self) -> None:
        self.forget_channels()
        for fd in (*self.arenas.values(), *self.parity_regions.values()):
            os.close(fd)
        self.arenas, self.parity_regions = {}, {}
        if self.page_fd >= 0:
            os.close(self.page_fd)
            self.page_fd = -1


@dataclass
class Cluster:
    """The nodes of one protection group; the test is their leader."""

    folder: Path
    parity: int = 1
    is_ring: bool = False
    model: Model = field(default_factory=Model)
    small_state_bytes: int = 1 << 14
    secret: bytes | None = bytes(range(SECRET_BYTES))
    pace_bytes_s: float = 0.0
    nodes: list[Node] = field(default_factory=list)
    generation: int = -1
    committed: Version | None = None
    previous_group: smp_messages.PreviousGroup | None = None

    def start(self, count: int, *, ranks_per_node: int = 1, crash_at: str = "") -> None:
        for at in range(count):
            ranks = list(range(at * ranks_per_node, (at + 1) * ranks_per_node))
            self.nodes.append(Node(f"n{at}", f"127.0.0.{10 + at}", ranks, self.folder))
            self.nodes[-1].start(secret=self.secret, crash_at=crash_at if at == 0 else "")

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def places(self) -> list[smp_messages.NodeAddress]:
        return [node.position for node in self.nodes]

    def begin(self, *, restored: Version | None = None, protected_in: int = -1) -> None:
        """Begin the next generation on every node that is up."""
        self.generation += 1
        self.renew(restored=restored, protected_in=protected_in)

    def renew(
        self,
        *,
        restored: Version | None = None,
        protected_in: int = -1,
        only: Sequence[Node] | None = None,
    ) -> None:
        """Send the members to all nodes; a page is made once in a generation."""
        for node in only if only is not None else self.nodes:
            held = self.held(node, restored)
            missing = [rank for rank in node.ranks if rank not in held]
            page = SharedPage(node.page_fd) if node.page_fd >= 0 else None
            if page is None or node.generation != self.generation:
                if node.page_fd >= 0:
                    os.close(node.page_fd)
                node.page_fd = create_command_page()
                page = SharedPage(node.page_fd)
                if restored is not None:
                    page.set(CommandField.COMMITTED_GENERATION, restored.generation)
                    page.set(CommandField.COMMITTED_STEP, restored.step)
                node.generation = self.generation
            body = smp_messages.BeginGeneration(
                generation=self.generation,
                world_size=self.world_size,
                local_ranks=node.ranks,
                group=self.places,
                node_id=node.node_id,
                parity=self.parity,
                is_ring=self.is_ring,
                small_state_bytes=self.small_state_bytes,
                restored=(restored.generation, restored.step) if restored else None,
                protected_in=protected_in,
                restore_from=[self.previous_group] if missing and self.previous_group else [],
                timeout_s=LINK_TIMEOUT_S,
                pace_bytes_s=self.pace_bytes_s,
            )
            assert node.agent is not None
            node.agent.generation = self.generation
            node.ask(body, messages.Done, node.page_fd)

    @staticmethod
    def held(node: Node, wanted: Version | None) -> set[int]:
        return {
            rank
            for rank, fd in node.arenas.items()
            for header in read_slot_headers(fd)
            if header.state is SlotState.SEALED and header.version == wanted
        }

    def employ(self) -> None:
        """Start a worker for every rank, with its arena."""
        for node in self.nodes:
            for worker in node.workers:
                worker.channel.close()
                os.close(worker.fd)
            node.workers = []
            for rank in node.ranks:
                channel = node.connect("worker", rank)
                channel.generation = self.generation
                worker = Worker(channel, rank, self.model, self.world_size)
                worker.request()
                node.workers.append(worker)

    def seal(self, step: int) -> Version:
        at = version(self.generation, step)
        for node in self.nodes:
            for worker in node.workers:
                worker.capture(at, kept=self.committed)
                worker.report_sealed(at)
        return at

    def wait_ready(self, at: Version, *, survives: int | None = None) -> None:
        wanted = self.parity if survives is None else survives
        for node in self.nodes:
            wait_until(
                lambda node=node: bool(self.readiness(node, at)) or not node.is_up,  # type: ignore[misc]
                lambda: f"{at} is ready everywhere: {self.under_way()}",
            )
            assert [ready.survives for ready in self.readiness(node, at)][-1:] == [wanted], (
                self.readiness(node, at),
                node.process and node.process.poll(),
                node.log(),
            )

    def under_way(self) -> dict[str, object]:
        return {node.node_id: node.work()["under_way"] for node in self.nodes if node.is_up}

    @staticmethod
    def readiness(node: Node, at: Version) -> list[smp_messages.VersionReady]:
        return [
            body
            for body in node.has_reported(smp_messages.VersionReady)
            if isinstance(body, smp_messages.VersionReady)
            and (body.generation, body.step) == (at.generation, at.step)
        ]

    def commit(self, at: Version) -> None:
        for node in self.nodes:
            assert node.agent is not None
            node.agent.send(smp_messages.CommitVersion(at.generation, at.step))
        for node in self.nodes:
            wait_until(
                lambda node=node: self.shown(node) == (at, self.generation),  # type: ignore[misc]
                f"{at} is shown on {node.node_id}",
            )
        self.committed = at

    def shown(self, node: Node) -> tuple[Version, int]:
        page = SharedPage(node.page_fd)
        found = version(
            page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
        )
        return found, page.get(CommandField.COMMITTED_IN)

    def protect(self, *steps: int) -> Version:
        at = version(-1, -1)
        for step in steps:
            at = self.seal(step)
            self.wait_ready(at)
            self.commit(at)
        return at

    def lose(self, *indexes: int) -> None:
        """These nodes are lost, and others take their places."""
        for index in indexes:
            self.nodes[index].lose()

    def restore(
        self, wanted: Version, *, protected_in: int | None = None, fails: Sequence[int] = ()
    ) -> None:
        """Put a new SMP in the place of each lost node, and begin from a version."""
        made_in = self.protected_in(wanted) if protected_in is None else protected_in
        self.previous_group = smp_messages.PreviousGroup(
            self.places, self.parity, made_in, self.is_ring
        )
        for node in self.nodes:
            for worker in node.workers:
                worker.channel.close()
                os.close(worker.fd)
            node.workers = []
            if not node.is_up:
                node.start(secret=self.secret)
                node.generation = -1
            node.reported = []
            node.ask(smp_messages.VoidAfter(wanted.generation, wanted.step), messages.Done)
        self.begin(restored=wanted, protected_in=made_in)
        for at, node in enumerate(self.nodes):
            kind = smp_messages.RestoreFailed if at in fails else smp_messages.RestoreReady
            wait_until(
                lambda node=node: bool(
                    node.has_reported(smp_messages.RestoreReady)
                    + node.has_reported(smp_messages.RestoreFailed)
                ),  # type: ignore[misc]
                f"{node.node_id} is restored",
            )
            assert node.has_reported(kind), (node.node_id, node.reported, node.log())

    def protected_in(self, wanted: Version) -> int:
        """The generation in which the group has protected the last committed version."""
        parts = [part for node in self.nodes if node.is_up for part in committed_parts(node)]
        at = (wanted.generation, wanted.step)
        return max(part.protected_in for part in parts if (part.generation, part.step) == at)

    def check(self, wanted: Version) -> None:
        """Every rank holds exactly what it sealed."""
        for node in self.nodes:
            node.receive()
            assert sorted(node.arenas) == node.ranks, node.node_id
            for rank, fd in node.arenas.items():
                self.check_bytes(rank, fd, wanted)

    def check_bytes(self, rank: int, fd: int, wanted: Version) -> None:
        arena = Arena(fd, writable=False)
        try:
            slot = arena.find(wanted)
            assert slot is not None, f"rank {rank}"
            _, data = verify(arena, slot, what="test")
            del data
            assert bytes(arena.image(slot)) == self.model.image(rank, wanted), f"rank {rank}"
        finally:
            arena.close()

    def end(self) -> None:
        for node in self.nodes:
            if node.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    node.process.send_signal(signal.SIGCONT)
                    node.process.kill()
                node.process.wait(TIMEOUT_S)
            node.forget()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    before = set(os.listdir("/proc/self/fd"))
    made = Cluster(tmp_path)
    yield made
    made.end()
    left = set(os.listdir("/proc/self/fd")) - before
    assert len(left) <= 1, {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in left}


SHAPES = [(2, 1), (4, 2), *in_full((1, 1), (3, 1), (2, 2))]


@pytest.mark.parametrize(("k", "parity"), SHAPES)
def test_any_m_nodes_may_go(cluster: Cluster, k: int, parity: int) -> None:
    cluster.parity = parity
    cluster.start(k + parity)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1, 2)
    cluster.lose(*range(parity))
    cluster.restore(at)
    cluster.check(at)
    cluster.wait_ready(at)
    cluster.commit(at)
    cluster.employ()
    again = cluster.protect(3)
    cluster.lose(*range(1, 1 + parity))
    cluster.restore(again)
    cluster.check(again)


def sent_bytes(cluster: Cluster) -> int:
    """Bytes over all links of this generation so far."""
    found = 0
    for node in cluster.nodes:
        count = node.work()["sent_bytes"]
        assert isinstance(count, int)
        found += count
    return found


@pytest.mark.full
def test_each_set_of_m_nodes_may_go(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    for lost in combinations(range(4), 2):
        cluster.lose(*lost)
        cluster.restore(at)
        cluster.check(at)
        cluster.wait_ready(at)
        cluster.commit(at)


def test_one_node_too_many_is_refused_in_words(cluster: Cluster) -> None:
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(1, 2)
    cluster.restore(at, fails=(1, 2))
    (failed,) = cluster.nodes[2].has_reported(smp_messages.RestoreFailed)
    assert isinstance(failed, smp_messages.RestoreFailed)
    for word in ("rank 2", "node n2", str(at), "n1", "2 of the 4", "3 are needed"):
        assert word in failed.reason, failed.reason
    assert failed.generation == cluster.generation


def test_in_a_ring_nodes_that_are_no_neighbours_may_go(cluster: Cluster) -> None:
    cluster.is_ring = True
    cluster.model = Model(more=400_000)
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1, 2)
    for rank, node in enumerate(cluster.nodes):
        bytes_now = node.work()["parity_bytes"]
        assert isinstance(bytes_now, int)
        neighbour = cluster.model.layout((rank - 1) % 4).image_bytes
        assert neighbour < bytes_now / 2 < neighbour + 1_300_000, "of two versions"
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)
    cluster.wait_ready(at)
    cluster.commit(at)
    cluster.employ()
    again = cluster.protect(3)
    cluster.lose(0, 2)
    cluster.restore(again)
    cluster.check(again)


def test_in_a_ring_a_node_that_is_lost_with_its_copy_is_refused_in_words(cluster: Cluster) -> None:
    cluster.is_ring = True
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(1, 2)
    cluster.restore(at, fails=(1,))
    (failed,) = cluster.nodes[1].has_reported(smp_messages.RestoreFailed)
    assert isinstance(failed, smp_messages.RestoreFailed)
    for word in ("rank 1", "node n1", str(at), "a copy is on n2"):
        assert word in failed.reason, failed.reason


@pytest.mark.full
def test_a_ring_takes_the_memory_of_one_more_copy(cluster: Cluster) -> None:
    cluster.is_ring = True
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    cluster.protect(1, 2)
    image_bytes = cluster.model.layout(0).image_bytes
    for node in cluster.nodes:
        parity_bytes = node.work()["parity_bytes"]
        assert isinstance(parity_bytes, int)
        assert image_bytes < parity_bytes / 2 < 1.3 * image_bytes


def test_replicas_cross_no_byte(cluster: Cluster) -> None:
    cluster.model = Model(shared=4_000_000, own=0)
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1, 2)
    assert sent_bytes(cluster) < 3 * 2 * 150_000
    for node in cluster.nodes:
        assert isinstance(node.work()["parity_bytes"], int)
        assert node.work()["parity_bytes"] < 400_000  # type: ignore[operator]
    cluster.lose(2)
    cluster.restore(at)
    cluster.check(at)
    image_bytes = cluster.model.layout(2).image_bytes
    # The sender counts the bytes a moment after they have arrived.
    wait_until(lambda: sent_bytes(cluster) >= image_bytes, "all of it is counted")
    assert sent_bytes(cluster) < 1.1 * image_bytes


def test_replicas_of_a_node_are_fetched_once(cluster: Cluster) -> None:
    cluster.model = Model(shared=1_000_000, own=20_000)
    cluster.start(3, ranks_per_node=2)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)
    assert sent_bytes(cluster) < 1.5 * cluster.model.layout(0).image_bytes


def test_what_is_no_replica_any_more_is_encoded_and_reported(cluster: Cluster) -> None:
    cluster.model = Model(shared=500_000, own=50_000)
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    cluster.protect(1)
    before = sent_bytes(cluster)
    cluster.model = Drifting(shared=500_000, own=50_000)
    for node in cluster.nodes:
        for worker in node.workers:
            worker.model = cluster.model
    at = cluster.protect(2)
    wait_until(lambda: sent_bytes(cluster) - before > 3 * 2_000_000, "all of it is counted")
    for node in cluster.nodes:
        notices = [
            n
            for n in node.has_reported(smp_messages.SmpNotice)
            if isinstance(n, smp_messages.SmpNotice)
        ]
        assert [(n.kind, n.nodes, n.ranks) for n in notices] == [
            ("replicas_differ", ["n1"], [1])
        ], notices
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)


class Drifting(Model):
    """Rank 1 differs where the others are equal."""

    def image(self, rank: int, at: Version) -> bytes:
        image = super().image(rank, at)
        if rank != 1:
            return image
        shared = next(e for e in self.layout(rank).entries if e.name == "shared")
        position = len(self.layout(rank).header) + shared.offset + 1_000_000
        return image[:position] + bytes([image[position] ^ 1]) + image[position + 1 :]


def test_parity_takes_its_share_of_memory_and_no_more(cluster: Cluster) -> None:
    cluster.model = Model(own=16_000_000)
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    cluster.protect(1, 2, 3)
    coded = max(cluster.model.layout(rank).image_bytes for rank in range(4))
    for node in cluster.nodes:
        bytes_now = node.work()["parity_bytes"]
        assert isinstance(bytes_now, int)
        assert bytes_now <= 2 * (coded / 3 * 1.05 + 200_000)


def test_a_crash_that_loses_no_node_sends_nothing(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.restore(at)
    cluster.wait_ready(at)
    assert sent_bytes(cluster) < 20_000
    cluster.commit(at)
    cluster.employ()
    at = cluster.protect(5)
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)


def test_a_generation_that_fails_before_its_commit_restores_from_the_one_before(
    cluster: Cluster,
) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)
    assert {one.protected_in for node in cluster.nodes for one in committed_parts(node)} == {0}
    cluster.wait_ready(at)
    parts = [part for node in cluster.nodes for part in inventory(node).protected]
    assert {part.protected_in for part in parts if part.is_complete} == {0, 1}
    # Only the parity of generation 1 can serve now: two of the first group's nodes are new.
    cluster.lose(1)
    cluster.restore(at, protected_in=1)
    cluster.check(at)


def inventory(node: Node) -> smp_messages.Inventory:
    return node.ask(smp_messages.InventoryRequest(), smp_messages.Inventory)


def committed_parts(node: Node) -> list[smp_messages.ProtectionPart]:
    return [part for part in inventory(node).protected if part.is_committed]


def test_the_inventory_reports_protection_of_each_node(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4, ranks_per_node=2)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    names = [node.node_id for node in cluster.nodes]
    for position, node in enumerate(cluster.nodes):
        (part,) = inventory(node).protected
        assert (part.generation, part.step, part.protected_in) == (0, 1, 0)
        assert [(one.node_id, one.ranks) for one in part.members] == [
            (one.node_id, one.ranks) for one in cluster.nodes
        ]
        assert (part.parity, part.world_size, part.node_id) == (2, 8, node.node_id)
        assert sorted(part.mirrors) == sorted(
            {names[(position - 1) % 4], names[(position - 2) % 4]}
        )
        assert part.is_complete
        assert part.is_committed
    cluster.nodes[0].ask(smp_messages.VoidAfter(-1, -1), messages.Done)
    assert inventory(cluster.nodes[0]) == smp_messages.Inventory([])
    assert at == version(0, 1)


def flip(fd: int, at: int) -> None:
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 16]), at)


def flip_in_slot(node: Node, rank: int, wanted: Version, entry_name: str) -> None:
    """Change one bit of an entry in a sealed slot."""
    fd = node.arenas[rank]
    arena = Arena(fd, writable=True)
    try:
        slot = arena.find(wanted)
        assert slot is not None
        layout, data = verify(arena, slot, what="test")
        entry = next(one for one in layout.entries if one.name == entry_name)
        data[entry.offset + entry.num_bytes // 2] ^= 16
        del data
    finally:
        arena.close()


def parity_region_of(node: Node, wanted: Version) -> ParityRegion:
    """The node's parity region with this version, through the descriptor that its agent keeps."""
    node.receive()
    for fd in node.parity_regions.values():
        region = ParityRegion(os.dup(fd))
        is_whole = region.state in (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)
        if is_whole and region.record is not None and region.record.version == wanted:
            return region
        region.close()
    raise AssertionError(f"{node.node_id} has no parity region with {wanted}")


def notices(node: Node, kind: str) -> list[str]:
    return [
        n.reason
        for n in node.has_reported(smp_messages.SmpNotice)
        if isinstance(n, smp_messages.SmpNotice) and n.kind == kind
    ]


def test_a_flipped_bit_in_parity_is_excluded_and_the_next_parity_used(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    region = parity_region_of(cluster.nodes[1], at)
    assert region.record is not None
    for row in range(region.record.num_rows):
        if region.row_digest(row):
            region.row(row)[1000] ^= 4
    region.close()
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)
    wait_until(  # another thread sends it than the one that has found it
        lambda: any("parity" in reason for reason in notices(cluster.nodes[1], "source_set_aside")),
        "it is reported",
    )
    assert inventory(cluster.nodes[1]).excluded


def test_flipped_bits_in_all_parity_of_a_stripe_are_a_refusal_that_names_it(
    cluster: Cluster,
) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    for node in cluster.nodes[1:]:
        region = parity_region_of(node, at)
        assert region.record is not None
        for row in range(region.record.num_rows):
            if region.row_digest(row):
                region.row(row)[77] ^= 1
        region.close()
    cluster.lose(0)
    cluster.restore(at, fails=(0,))
    (failed,) = cluster.nodes[0].has_reported(smp_messages.RestoreFailed)
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "stripe" in failed.reason
    assert "parity" in failed.reason
    assert not cluster.nodes[0].arenas
    # If their parts still counted, the leader would choose the same restore for ever.
    offered = [part for node in cluster.nodes[1:] for part in inventory(node).protected]
    assert not all(part.is_complete for part in offered)


def test_a_flipped_bit_in_a_mirror_is_excluded_and_the_next_mirror_used(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    region = parity_region_of(cluster.nodes[1], at)
    region.mirror_space(0)[300] ^= 1
    region.close()
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)
    offered = {part.protected_in: part for part in inventory(cluster.nodes[1]).protected}
    assert offered[0].mirrors == [cluster.nodes[3].node_id], "the damaged one is offered no more"
    assert offered[0].is_complete, "its parity still counts"


def test_a_flipped_bit_in_a_survivors_slot_counts_as_one_more_loss(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    flip_in_slot(cluster.nodes[2], 2, at, "own")
    cluster.lose(0)
    cluster.restore(at)
    cluster.check_bytes(0, cluster.nodes[0].arenas[0], at)


def test_a_damaged_slot_is_missing_until_it_is_restored_and_its_protection_counts(
    cluster: Cluster,
) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    node = cluster.nodes[1]
    flip_in_slot(node, 1, at, "own")
    cluster.lose(0)
    cluster.restore(at, fails=(0,))
    wait_until(lambda: not inventory(node).offers, "the damaged slot is not offered")
    (part,) = [one for one in inventory(node).protected if one.protected_in == 0]
    assert part.is_complete
    assert notices(node, "source_set_aside")


@pytest.mark.full
def test_a_slot_that_was_excluded_is_fetched_like_a_lost_one(cluster: Cluster) -> None:
    cluster.start(3, ranks_per_node=2)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    node = cluster.nodes[1]
    flip_in_slot(node, 3, at, "own")
    arena = Arena(node.arenas[3], writable=True)
    slot = arena.find(at)
    assert slot is not None
    arena.write_header(slot, SlotHeader(SlotState.VOID, 0, 1, 0, 0, 0))
    arena.close()
    cluster.restore(at)
    cluster.check(at)


def test_a_slot_that_is_damaged_before_it_is_protected_is_abandoned(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    bad = version(0, 2)
    for node in cluster.nodes:
        for worker in node.workers:
            worker.capture(bad, kept=at)
    node = cluster.nodes[1]
    node.receive()
    flip_in_slot(node, 1, bad, "own")
    for node in cluster.nodes:
        for worker in node.workers:
            worker.report_sealed(bad)
    node = cluster.nodes[1]
    wait_until(lambda: bool(node.has_reported(smp_messages.AbandonVersion)), "it is abandoned")
    assert node.has_reported(smp_messages.AbandonVersion) == [smp_messages.AbandonVersion(0, 2)]
    assert SharedPage(node.page_fd).get(CommandField.ABANDONED_STEP) == 2
    for other in cluster.nodes:
        assert other.agent is not None
        other.agent.send(smp_messages.AbandonVersion(0, 2))
    again = cluster.protect(3)
    cluster.lose(1)
    cluster.restore(again)
    cluster.check(again)


PROTECT_POINTS = [
    *("smp.protect.mirror_stored", "smp.protect.stored"),
    *in_full("smp.protect.described", "smp.protect.region_created", "smp.protect.opened"),
    *in_full("smp.protect.block_added", "smp.protect.ready"),
]


@pytest.mark.parametrize("point", PROTECT_POINTS)
def test_an_smp_killed_while_it_protects_loses_nothing(cluster: Cluster, point: str) -> None:
    # The second pass is in the second version, except for blocks, of which there are many.
    cluster.start(3, crash_at=f"{point}:2")
    cluster.begin()
    cluster.employ()
    victim = cluster.nodes[0]
    at = cluster.seal(1)
    if not point.endswith("block_added"):
        cluster.wait_ready(at)
        cluster.commit(at)
        at = cluster.seal(2)
    wait_until(lambda: not victim.is_up, f"it dies at {point}")
    # Its agent starts another, which adopts the memory; all continue in the same generation.
    for node in cluster.nodes:
        node.receive()
        node.reported = []
    victim.start(secret=cluster.secret, adopt=True)
    cluster.renew(restored=cluster.committed)
    cluster.wait_ready(at)
    cluster.commit(at)
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)


def test_the_next_smp_serves_from_the_parity_regions_of_the_one_before(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    for node in cluster.nodes[1:]:
        node.receive()
        assert node.process is not None
        node.process.kill()
        node.process.wait(TIMEOUT_S)
        node.start(secret=cluster.secret, adopt=True)
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)


FETCH_POINTS = ["smp.fetch.sealed", *in_full("smp.fetch.mirror_taken", "smp.fetch.agent_notified")]


@pytest.mark.parametrize("point", FETCH_POINTS)
def test_a_replacement_killed_while_it_fetches_is_replaced(cluster: Cluster, point: str) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    node = cluster.nodes[0]
    cluster.previous_group = smp_messages.PreviousGroup(cluster.places, cluster.parity, 0)
    node.start(secret=cluster.secret, crash_at=point)
    node.generation = -1
    cluster.begin(restored=at, protected_in=0)
    wait_until(lambda: not node.is_up, f"it dies at {point}")
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)


@pytest.mark.parametrize("point", ["smp.fetch.rebuilt", *in_full("smp.fetch.asked:4")])
def test_a_survivor_killed_while_it_gives_is_done_without(cluster: Cluster, point: str) -> None:
    cluster.parity = 2
    cluster.start(4, crash_at=point)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(3)
    victim = cluster.nodes[3]
    cluster.previous_group = smp_messages.PreviousGroup(cluster.places, cluster.parity, 0)
    victim.start(secret=cluster.secret)
    victim.generation = -1
    for node in cluster.nodes:
        node.reported = []
    cluster.begin(restored=at, protected_in=0)
    wait_until(
        lambda: bool(victim.has_reported(smp_messages.RestoreReady)),
        lambda: (
            f"the rest is enough: {victim.reported} {[node.reported for node in cluster.nodes]}"
        ),
    )
    wait_until(lambda: not cluster.nodes[0].is_up, "it has ended; its links end before")
    cluster.check_bytes(3, victim.arenas[3], at)


@pytest.mark.full
def test_a_frozen_survivor_is_done_without(cluster: Cluster) -> None:
    cluster.parity = 2
    cluster.start(4)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    fresh = cluster.nodes[0]
    cluster.previous_group = smp_messages.PreviousGroup(cluster.places, cluster.parity, 0)
    fresh.start(secret=cluster.secret)
    fresh.generation = -1
    cluster.generation += 1
    cluster.renew(restored=at, protected_in=0, only=cluster.nodes[1:])
    frozen = cluster.nodes[1].process
    assert frozen is not None
    stop(frozen.pid)
    cluster.renew(restored=at, protected_in=0, only=[fresh])
    wait_until(lambda: bool(fresh.has_reported(smp_messages.RestoreReady)), "the rest is enough")
    cluster.check_bytes(0, fresh.arenas[0], at)
    frozen.send_signal(signal.SIGCONT)


@pytest.mark.full
def test_a_frozen_peer_holds_a_version_up_and_the_thaw_lets_it_continue(cluster: Cluster) -> None:
    cluster.model = Model(own=8_000_000)
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    cluster.protect(1)
    frozen = cluster.nodes[2].process
    assert frozen is not None
    stop(frozen.pid)
    at = version(0, 2)
    for node in cluster.nodes:
        for worker in node.workers:
            worker.capture(at, kept=cluster.committed)
            worker.report_sealed(at)
    assert cluster.nodes[0].status()["committed"] == [0, 1]
    frozen.send_signal(signal.SIGCONT)
    cluster.wait_ready(at)
    cluster.commit(at)
    cluster.lose(0)
    cluster.restore(at)
    cluster.check(at)


@pytest.mark.full
def test_a_new_generation_ends_what_is_under_way(cluster: Cluster) -> None:
    cluster.model = Model(own=8_000_000)
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    threads = [
        len(os.listdir(f"/proc/{node.process.pid}/task")) for node in cluster.nodes if node.process
    ]
    for step in range(2, 6):
        cluster.seal(step)
        cluster.restore(at)
        cluster.wait_ready(at)
        cluster.commit(at)
        cluster.employ()
    again = cluster.protect(9)
    cluster.lose(2)
    cluster.restore(again)
    cluster.check(again)
    for node, before in zip(cluster.nodes[:2], threads, strict=False):
        assert node.process is not None
        task = Path(f"/proc/{node.process.pid}/task")
        wait_until(
            lambda task=task, before=before: len(os.listdir(task)) <= before + 6, "threads end"
        )  # type: ignore[misc]


def test_what_was_reported_for_the_next_generation_stays_until_it_begins(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1, 2)
    node, *others = cluster.nodes
    reported = node.ask(smp_messages.InventoryRequest(freeze_versions=True), smp_messages.Inventory)
    cluster.seal(3)
    for other in others:
        wait_until(lambda other=other: "'step': 3" in str(other.work()["under_way"]), "step 3")  # type: ignore[misc]
    assert node.work()["under_way"] == []
    assert inventory(node).protected == reported.protected
    cluster.restore(at)
    cluster.wait_ready(at)
    cluster.check(at)


def test_a_worker_waits_for_the_arena_that_is_on_its_way(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    fresh = cluster.nodes[0]
    cluster.previous_group = smp_messages.PreviousGroup(cluster.places, cluster.parity, 0)
    fresh.start(secret=cluster.secret)
    fresh.generation = -1
    with contextlib.closing(fresh.connect("worker", 0)) as channel:
        channel.generation = 1
        channel.send(worker_messages.AwaitRestored(0, at.generation, at.step))
        cluster.begin(restored=at, protected_in=0)
        received = channel.receive(deadline_s=TIMEOUT_S)
        assert isinstance(received.body, worker_messages.ArenaGranted)
        cluster.check_bytes(0, received.fds[0], at)
        os.close(received.fds[0])
        answer = channel.ask(worker_messages.AwaitRestored(0, 0, 77), deadline_s=TIMEOUT_S).body
        assert isinstance(answer, messages.Refused)


def test_a_skipped_step_is_abandoned_once_nothing_older_is_pending(cluster: Cluster) -> None:
    cluster.start(2)
    cluster.begin()
    cluster.employ()
    cluster.protect(1)
    at = cluster.seal(2)
    node = cluster.nodes[0]
    node.workers[0].channel.send(worker_messages.ShardSkipped(0, 0, 3))
    cluster.wait_ready(at)
    assert not node.has_reported(smp_messages.AbandonVersion)
    assert SharedPage(node.page_fd).get(CommandField.ABANDONED_STEP) == -1
    assert SharedPage(node.page_fd).get(CommandField.PROTECTING_STEP) == 2
    refused = (
        node.workers[0]
        .channel.ask(worker_messages.WithdrawShard(0, 0, 2), deadline_s=TIMEOUT_S)
        .body
    )
    assert isinstance(refused, messages.Refused)
    cluster.commit(at)
    wait_until(lambda: bool(node.has_reported(smp_messages.AbandonVersion)), "the skip is reported")
    assert node.has_reported(smp_messages.AbandonVersion) == [smp_messages.AbandonVersion(0, 3)]
    # The other node has taken step 3; it receives the end of that step and continues.
    other = cluster.nodes[1]
    other.workers[0].capture(version(0, 3), kept=at)
    assert other.agent is not None
    other.agent.send(smp_messages.AbandonVersion(0, 3))
    other.workers[0].report_sealed(version(0, 3))
    wait_until(
        lambda: SharedPage(other.page_fd).get(CommandField.ABANDONED_STEP) == 3, "it receives it"
    )
    cluster.protect(4)


def test_nothing_new_is_committed_before_the_restored_version_is(cluster: Cluster) -> None:
    cluster.start(2)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    cluster.lose(0)
    cluster.restore(at)
    for node in cluster.nodes:
        page = SharedPage(node.page_fd)
        assert page.get(CommandField.COMMITTED_IN) == -1
        assert page.get(CommandField.COMMITTED_STEP) == 1
    cluster.wait_ready(at)
    cluster.commit(at)


def test_too_few_nodes_train_unprotected_and_report_it(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.begin()
    cluster.employ()
    at = cluster.seal(1)
    cluster.wait_ready(at, survives=0)
    cluster.commit(at)
    assert "cannot protect each other" in cluster.readiness(cluster.nodes[0], at)[0].reason


@pytest.mark.full
def test_a_rank_that_has_moved_is_fetched_from_where_it_was(cluster: Cluster) -> None:
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    # An additional node takes over rank 2; n2 is still there and has nothing to run.
    spare = Node("n9", "127.0.0.19", [2], cluster.folder)
    cluster.nodes.append(spare)
    spare.start(secret=cluster.secret)
    cluster.previous_group = smp_messages.PreviousGroup(cluster.places[:3], cluster.parity, 0)
    moved = cluster.nodes.pop(2)
    try:
        cluster.begin(restored=at, protected_in=0)
        body = smp_messages.BeginGeneration(
            1, 3, [], restored=(0, 1), protected_in=0, node_id="n2", timeout_s=LINK_TIMEOUT_S
        )
        assert body.group == []
        wait_until(lambda: bool(spare.has_reported(smp_messages.RestoreReady)), "it is fetched")
        cluster.check_bytes(2, spare.arenas[2], at)
    finally:
        moved.lose()


@pytest.mark.parametrize("is_relied_on", [True, False])
def test_a_node_that_runs_no_ranks_any_more_gives_what_it_holds(
    cluster: Cluster, is_relied_on: bool
) -> None:
    """It was replaced while it lived; the others cannot rebuild its state, as one more is lost.

    Without a reliable protection, its slot is fetched unchanged.
    """
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    made_in = cluster.protected_in(at) if is_relied_on else -1
    replaced = cluster.nodes[1]
    for worker in replaced.workers:
        worker.channel.close()
        os.close(worker.fd)
    replaced.workers = []
    cluster.lose(2)
    previous_places = [cluster.nodes[0].position, replaced.position, cluster.nodes[2].position]
    joining = Node("n3", "127.0.0.13", [1], cluster.folder)
    joining.start(secret=cluster.secret)
    cluster.nodes = [cluster.nodes[0], joining, cluster.nodes[2], replaced]
    page_fd = create_command_page()
    try:
        assert replaced.agent is not None
        replaced.agent.generation = cluster.generation + 1
        body = smp_messages.BeginGeneration(
            generation=cluster.generation + 1,
            world_size=3,
            local_ranks=[],
            node_id="n1",
            restored=(at.generation, at.step),
            protected_in=made_in,
            own=replaced.position,
        )
        replaced.ask(body, messages.Done, page_fd)
        cluster.previous_group = smp_messages.PreviousGroup(
            previous_places, cluster.parity, made_in
        )
        if not is_relied_on:
            cluster.previous_group = smp_messages.PreviousGroup([replaced.position], 0, -1)
        group = [cluster.nodes[0].position, joining.position]
        joining.page_fd = create_command_page()
        assert joining.agent is not None
        joining.agent.generation = cluster.generation + 1
        wanted = smp_messages.BeginGeneration(
            generation=cluster.generation + 1,
            world_size=3,
            local_ranks=[1],
            group=group,
            node_id="n3",
            parity=1,
            restored=(at.generation, at.step),
            protected_in=made_in,
            restore_from=[cluster.previous_group],
            timeout_s=LINK_TIMEOUT_S,
        )
        joining.ask(wanted, messages.Done, joining.page_fd)
        wait_until(
            lambda: bool(
                joining.has_reported(smp_messages.RestoreReady)
                + joining.has_reported(smp_messages.RestoreFailed)
            ),
            "the state has come",
        )
        assert joining.has_reported(smp_messages.RestoreReady), (joining.reported, joining.log())
        cluster.check_bytes(1, joining.arenas[1], at)
    finally:
        os.close(page_fd)


def test_without_a_secret_it_works_and_with_another_it_does_not(cluster: Cluster) -> None:
    cluster.secret = None
    cluster.start(2)
    cluster.begin()
    cluster.employ()
    cluster.protect(1)
    node = cluster.nodes[1]
    node.listen(bytes(SECRET_BYTES))
    cluster.generation += 1
    cluster.renew(restored=version(0, 1))
    wait_until(
        lambda: any("secret" in reason for reason in notices(cluster.nodes[0], "peer_lost")),
        lambda: (
            f"the handshake is refused: {[(n.reported, n.log()[-600:]) for n in cluster.nodes]}"
        ),
    )
    assert not cluster.readiness(cluster.nodes[0], version(0, 1))[1:]


def test_parity_that_does_not_fit_is_reported_and_training_continues(cluster: Cluster) -> None:
    cluster.model = Model(own=4_000_000)
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    node = cluster.nodes[1]
    assert node.process is not None
    _, hard = resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
    at = cluster.seal(1)
    cluster.wait_ready(at, survives=0)
    cluster.commit(at)
    for one in cluster.nodes:
        (reason,) = notices(one, "unprotected")
        assert "mirrors and parity need" in reason
        assert cluster.readiness(one, at)[-1].reason in reason
    resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    again = cluster.protect(2)
    cluster.lose(1)
    cluster.restore(again)
    cluster.check(again)


def test_a_pace_bounds_what_is_sent_and_nothing_else(cluster: Cluster) -> None:
    cluster.model = Model(own=1_000_000)
    cluster.pace_bytes_s = 8e6
    cluster.start(3)
    cluster.begin()
    cluster.employ()
    at = cluster.protect(1)
    for node in cluster.nodes:
        seconds = node.work()["last_protect_s"]
        assert isinstance(seconds, float)
        assert seconds > 0.3  # 4 MB over two links at 4 MB/s each, the last block unpaced
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)
