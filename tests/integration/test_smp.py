"""The real SMP process keeps sealed snapshots when any process around it dies.

The test acts as the worker and the agent over real channels, with real arenas; the process is
`python -m ftrun.smp`.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import pytest
import xxhash

from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.generation import GenerationRunner
from ftrun.agent.launch.warm_start import WorkerStarter
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.snapshots.retained_memory import PersistedAgentState, StubClient
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.profile import CheckpointConfig, Profile
from ftrun.config.run_spec import RunSpec
from ftrun.errors import PeerError, PeerLost, PeerTimeout, SnapshotError
from ftrun.ids import Version, version
from ftrun.journal import Journal
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, PlanMember
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.shared_memory.arena import (
    Arena,
    SlotHeader,
    SlotState,
    read_shape,
    table_digest,
    verify,
)
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from tests.stopping import stop

RUN_ID = "test-run"
TIMEOUT_S = 60.0
WORLD = 2
M = TypeVar("M")
Hits = Callable[[list[str]], list[str]]
"""Which of the crash points, as `name:N`, a test uses."""


def wait_until(claim: Callable[[], bool], what: str) -> None:
    """Bounded wait on a condition that another process makes true."""
    end = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < end, f"not within {TIMEOUT_S} s: {what}"
        select.select([], [], [], 0.002)


def layout_of(size: int) -> Layout:
    return make_layout(
        [
            LayoutEntry("weight", "F32", (size,), CopyTiming.LAZY),
            LayoutEntry("bias", "F32", (8,), CopyTiming.LAZY),
            LayoutEntry("mean", "F64", (4,), CopyTiming.BOUNDARY),
        ],
        plain_bytes=100,
    )


def image_of(layout: Layout, *, rank: int, at: Version) -> bytes:
    """Bytes that differ for each rank and version."""
    seed = xxhash.xxh3_128_digest(f"{rank} {at}".encode())
    data = (seed * (layout.data_bytes // len(seed) + 1))[: layout.data_bytes]
    return layout.header + data


@dataclass
class Worker:
    """Acts over channel and arena like a rank."""

    channel: Channel
    rank: int
    layout: Layout
    fd: int = -1
    slot: int = 0
    like: int | None = None
    """A rank that has the same in its memory; None: there is none."""

    def request(self) -> messages.AnyMessage:
        answer = self.channel.ask(
            worker_messages.RequestArena(
                rank=self.rank,
                world_size=WORLD,
                image_bytes=self.layout.image_bytes,
                num_pieces=len(self.layout.pieces),
                layout_id=xxhash.xxh3_64_intdigest(self.layout.header),
            ),
            deadline_s=TIMEOUT_S,
        )
        if answer.fds:
            self.drop()
            (self.fd,) = answer.fds
        return answer.body

    def capture(self, at: Version) -> None:
        """Fill the next slot and seal it."""
        arena = Arena(self.fd, writable=True)
        try:
            empty = SlotHeader(SlotState.COPYING, at.generation, at.step, 0, 0, 0)
            arena.write_header(self.slot, empty)
            owner = self.rank if self.like is None else self.like
            image = image_of(self.layout, rank=owner, at=at)
            start = len(self.layout.header)
            arena.image(self.slot)[:] = image
            table = arena.table(self.slot)
            for index, piece in enumerate(self.layout.pieces):
                at_byte = start + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[at_byte : at_byte + piece.num_bytes])
            header = SlotHeader(
                SlotState.SEALED,
                at.generation,
                at.step,
                len(image),
                table_digest(table),
                time.monotonic_ns(),
            )
            arena.write_header(self.slot, header)
            del table
        finally:
            arena.close()
        self.slot = 1 - self.slot

    def report_sealed(self, at: Version) -> None:
        self.channel.send(
            worker_messages.ShardSealed(
                rank=self.rank,
                generation=at.generation,
                step=at.step,
                layout_id=read_shape(self.fd).layout_id,
            )
        )

    def seal(self, at: Version) -> None:
        self.capture(at)
        self.report_sealed(at)

    def drop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class World:
    """The SMPs at one socket, one after the other, and all their clients."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    unsolicited: list[ReceivedMessage] = field(default_factory=list)
    page_fd: int = -1

    @property
    def socket(self) -> Path:
        return self.folder / "smp.sock"

    @property
    def smp(self) -> subprocess.Popen[bytes]:
        return self.processes[-1]

    def start(
        self,
        *,
        orphan_s: float = 600.0,
        adopt: bool = False,
        crash_at: str = "",
        count: str = "",
        waits: bool = True,
    ) -> None:
        if self.processes:
            self.smp.wait(TIMEOUT_S)
        self.socket.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN_ID),
            *("--socket", str(self.socket), "--orphan-s", str(orphan_s)),
        ]
        with (self.folder / f"smp-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--adopt"] if adopt else command,
                env={**os.environ, "FTRUN_CRASH_AT": crash_at, "FTRUN_CRASH_COUNT": count},
                stderr=log,
            )
        self.processes.append(process)
        if waits:
            wait_until(self.answers, "the SMP listens")

    def answers(self) -> bool:
        assert self.smp.poll() is None, self.log()
        return self.socket.exists()

    def log(self) -> str:
        return (self.folder / f"smp-{len(self.processes) - 1}.log").read_text()

    def connect(self, role: str, rank: int = -1) -> Channel:
        channel = connect(
            self.socket,
            run_id=RUN_ID,
            peer="the SMP",
            hello=messages.Hello(role=role, pid=os.getpid(), rank=rank),
            deadline_s=TIMEOUT_S,
        )
        self.channels.append(channel)
        return channel

    def worker(self, rank: int, *, generation: int = 0, size: int = 200_000) -> Worker:
        channel = self.connect("worker", rank)
        channel.generation = generation
        found = Worker(channel, rank, layout_of(size))
        self.workers.append(found)
        return found

    def ask(self, agent: Channel, body: messages.AnyMessage, kind: type[M], *fds: int) -> M:
        """The answer; messages that arrive before it are kept."""
        agent.send(body, fds=fds)
        return self.wait_for(agent, kind)

    def wait_for(self, agent: Channel, kind: type[M]) -> M:
        while True:
            received = agent.receive(deadline_s=TIMEOUT_S)
            self.fds.extend(received.fds)
            if isinstance(received.body, kind):
                return received.body
            if isinstance(received.body, smp_messages.MemoryNeeded):
                continue
            assert isinstance(
                received.body,
                worker_messages.ArenaGranted
                | smp_messages.VersionCommitted
                | smp_messages.SmpNotice,
            ), received.body
            self.unsolicited.append(received)

    def begin(self, agent: Channel, generation: int = 0) -> None:
        if self.page_fd < 0:
            self.page_fd = create_command_page()
        body = smp_messages.BeginGeneration(
            generation=generation, world_size=WORLD, local_ranks=list(range(WORLD))
        )
        self.ask(agent, body, messages.Done, self.page_fd)

    def shown(self) -> Version:
        page = SharedPage(self.page_fd)
        return version(
            page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
        )

    def granted_fds(self, agent: Channel, count: int) -> dict[int, int]:
        """The duplicates that the agent gets without a request: by rank, the newest."""
        while (
            sum(isinstance(one.body, worker_messages.ArenaGranted) for one in self.unsolicited)
            < count
        ):
            received = agent.receive(deadline_s=TIMEOUT_S)
            self.fds.extend(received.fds)
            self.unsolicited.append(received)
        return {
            one.body.rank: one.fds[0]
            for one in self.unsolicited
            if isinstance(one.body, worker_messages.ArenaGranted)
        }

    def all_granted(self) -> list[tuple[int, int]]:
        return [
            (one.body.rank, one.fds[0])
            for one in self.unsolicited
            if isinstance(one.body, worker_messages.ArenaGranted)
        ]

    def forget(self) -> None:
        """All processes but the SMPs have ended: close their descriptors."""
        for channel in self.channels:
            channel.close()
        for worker in self.workers:
            worker.drop()
        for fd in {*self.fds, self.page_fd} - {-1}:
            os.close(fd)
        self.channels, self.workers, self.fds, self.unsolicited = [], [], [], []
        self.page_fd = -1

    def train(self, *steps: int, generation: int = 0) -> tuple[Channel, list[Worker]]:
        """An agent, two workers with arenas, and these steps committed."""
        agent = self.connect("agent")
        self.begin(agent, generation)
        workers = [self.worker(rank, generation=generation) for rank in range(WORLD)]
        for worker in workers:
            assert isinstance(worker.request(), worker_messages.ArenaGranted)
        for step in steps:
            self.commit(workers, version(generation, step))
        return agent, workers

    def commit(self, workers: list[Worker], at: Version) -> None:
        for worker in workers:
            worker.seal(at)
        wait_until(lambda: self.shown() == at or self.is_dead(), f"{at} is committed")
        if self.is_dead():
            raise PeerLost(peer="the SMP")

    def is_dead(self) -> bool:
        return self.smp.poll() is not None

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(TIMEOUT_S)
        self.forget()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    before = set(os.listdir("/proc/self/fd"))
    world = World(tmp_path)
    yield world
    world.end()
    left = set(os.listdir("/proc/self/fd")) - before
    assert len(left) <= 1, {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in left}


def check_bytes(fd: int, at: Version) -> None:
    """The arena of a descriptor holds exactly what its rank has sealed."""
    arena = Arena(fd, writable=False)
    try:
        slot = arena.find(at)
        assert slot is not None
        layout, data = verify(arena, slot, what="test")
        del data
        wanted = image_of(layout, rank=arena.shape.rank, at=at)
        assert bytes(arena.image(slot))[len(layout.header) :] == wanted[len(layout.header) :]
    finally:
        arena.close()


def offered(inventory: smp_messages.Inventory) -> set[tuple[int, int, int]]:
    return {(offer.rank, offer.generation, offer.step) for offer in inventory.offers}


def drain(channel: Channel, fds: list[int] | None = None) -> None:
    """Receive until the other end closes, which is an error."""
    while True:
        received = channel.receive(deadline_s=TIMEOUT_S)
        assert fds is not None or not received.fds
        (fds if fds is not None else []).extend(received.fds)


def test_a_version_that_all_ranks_have_sealed_is_committed(world: World) -> None:
    world.start()
    agent, workers = world.train()
    workers[0].seal(version(0, 1))
    inventory = world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert offered(inventory) == {(0, 0, 1)}
    assert world.shown() == version(-1, -1)
    workers[1].seal(version(0, 1))
    assert world.wait_for(agent, smp_messages.VersionCommitted) == smp_messages.VersionCommitted(
        0, 1
    )
    assert world.shown() == version(0, 1)
    assert SharedPage(world.page_fd).get(CommandField.COMMIT_COUNT) == 1


def test_the_agent_has_a_duplicate_of_each_arena_unasked(world: World) -> None:
    world.start()
    agent, workers = world.train(1)
    granted = world.granted_fds(agent, WORLD)
    assert sorted(granted) == [0, 1]
    for fd in granted.values():
        check_bytes(fd, version(0, 1))
    assert len(workers) == WORLD


def test_memory_outlives_a_killed_smp_and_the_next_snapshot_continues(world: World) -> None:
    world.start()
    agent, workers = world.train(1, 2)
    granted = world.granted_fds(agent, WORLD)
    world.smp.kill()
    with pytest.raises(PeerLost):
        drain(agent)
    # Both have sealed, and no SMP was there to receive it.
    for worker in workers:
        worker.capture(version(0, 3))

    world.start(adopt=True)
    agent = world.connect("agent")
    again = world.worker(0)
    answer = world.ask(
        agent, smp_messages.AdoptMemory(ranks=list(granted)), messages.Done, *granted.values()
    )
    assert answer == messages.Done()
    world.begin(agent)
    assert world.shown() == version(0, 3)
    inventory = world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert offered(inventory) == {(rank, 0, step) for rank in (0, 1) for step in (2, 3)}
    for fd in granted.values():
        check_bytes(fd, version(0, 3))
    world.ask(
        agent, smp_messages.AdoptMemory(ranks=list(granted)), messages.Done, *granted.values()
    )
    assert world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory) == inventory, (
        "nothing is kept twice"
    )

    assert isinstance(again.request(), worker_messages.ArenaGranted)
    again.slot = workers[0].slot
    other = world.worker(1)
    assert isinstance(other.request(), worker_messages.ArenaGranted)
    other.slot = workers[1].slot
    world.commit([again, other], version(0, 4))


def test_a_seal_that_died_with_the_smp_arrives_at_the_workers_return(world: World) -> None:
    world.start()
    agent, workers = world.train(1)
    workers[0].seal(version(0, 2))
    workers[1].capture(version(0, 2))
    world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert world.shown() == version(0, 1)
    world.worker(1)
    wait_until(lambda: world.shown() == version(0, 2), "the seal is found in the slot")


def test_an_orphan_hands_its_memory_to_the_next_agent(world: World) -> None:
    world.start()
    agent, _ = world.train(1, 2)
    world.ask(agent, smp_messages.PersistRunState(b"what the next agent must know"), messages.Done)
    agent.close()
    cli = world.connect("cli")
    wait_until(lambda: orphaned_for_s(cli) is not None, "the SMP knows that it is an orphan")

    agent = world.connect("agent")
    agent.send(smp_messages.HandOverMemory())
    received = agent.receive(deadline_s=TIMEOUT_S)
    world.fds.extend(received.fds)
    assert received.body == smp_messages.MemoryHandedOver([0, 1], b"what the next agent must know")
    for fd in received.fds:
        check_bytes(fd, version(0, 2))
    assert orphaned_for_s(cli) is None


def orphaned_for_s(cli: Channel) -> float | None:
    answer = cli.ask(messages.StatusRequest(), deadline_s=TIMEOUT_S).body
    assert isinstance(answer, messages.StatusReply)
    document = json.loads(answer.document)
    found = document["orphaned_for_s"]
    assert found is None or isinstance(found, float)
    return found


def test_an_orphan_frees_everything_when_no_node_comes(world: World) -> None:
    world.start(orphan_s=3.0)  # the first agent comes within that, also on a busy machine
    agent, _ = world.train(1)
    agent.close()
    assert world.smp.wait(TIMEOUT_S) == 0
    assert not world.socket.exists()
    assert "keeping the snapshots" in world.log()


def test_an_smp_that_no_agent_ever_calls_ends(world: World) -> None:
    world.start(orphan_s=0.3, waits=False)
    assert world.smp.wait(TIMEOUT_S) == 0
    assert not world.socket.exists()


@pytest.mark.parametrize("role", ["agent", "cli"])
def test_shutdown_frees_everything(world: World, role: str) -> None:
    world.start()
    caller = world.connect(role)
    assert caller.ask(smp_messages.Shutdown(), deadline_s=TIMEOUT_S).body == messages.Done()
    assert not world.socket.exists()
    assert world.smp.wait(TIMEOUT_S) == 0


def test_no_signal_ends_it_while_it_has_an_agent_and_sigterm_does_without(world: World) -> None:
    world.start()
    agent, _ = world.train(1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        world.smp.send_signal(number)
    assert offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 1),
        (1, 0, 1),
    }
    agent.close()
    for _ in range(int(TIMEOUT_S / 0.1)):
        world.smp.send_signal(signal.SIGTERM)
        try:
            assert world.smp.wait(0.1) == 0
            break
        except subprocess.TimeoutExpired:
            continue  # it has not seen yet that its agent has ended
    assert world.smp.poll() == 0
    assert not world.socket.exists()


def test_a_signal_that_comes_while_python_ends_does_not_make_a_good_end_a_kill(
    tmp_path: Path,
) -> None:
    # Objects of a module are released after Python has restored the default signal handlers.
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ftrun.smp.__main__ import _signals\n"
        "from ftrun.smp.server import SmpServer\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        "        kill(pid, 15)\n"
        "late = Late()\n"
        "server = SmpServer('test-run', Path(sys.argv[1]), orphan_s=1.0, adopt=False)\n"
        "with _signals(server):\n"
        "    server._is_ending = True\n"
        "    server.serve()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "smp"], check=False, timeout=60)
    assert done.returncode == 0


def test_memory_that_does_not_exist_is_refused_with_numbers(world: World) -> None:
    world.start()
    agent, workers = world.train()
    for request in (
        worker_messages.ReserveMemory(rank=0, image_bytes=10**13),
        worker_messages.RequestArena(
            rank=0, world_size=WORLD, image_bytes=10**13, num_pieces=10**6, layout_id=7
        ),
    ):
        answer = workers[0].channel.ask(request, deadline_s=TIMEOUT_S).body
        assert isinstance(answer, worker_messages.MemoryRefused)
        assert answer.needed_bytes >= 2 * 10**13
        assert 0 < answer.available_bytes < 10**13
        assert answer.limit
    small = worker_messages.ReserveMemory(rank=0, image_bytes=10**6)
    assert workers[0].channel.ask(small, deadline_s=TIMEOUT_S).body == messages.Done()
    assert (
        offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == set()
    )


def test_voided_versions_never_come_back(world: World) -> None:
    world.start()
    agent, workers = world.train(1, 2)
    world.ask(agent, smp_messages.VoidAfter(generation=0, step=1), messages.Done)
    assert offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 1),
        (1, 0, 1),
    }
    world.begin(agent, generation=1)
    assert world.shown() == version(0, 1)
    # A worker of the previous generation that has not been killed yet.
    workers[0].seal(version(0, 3))
    workers[1].seal(version(0, 3))
    workers[0].channel.ask(
        worker_messages.ReserveMemory(rank=0, image_bytes=1), deadline_s=TIMEOUT_S
    )
    assert world.shown() == version(0, 1)


def test_ranks_of_one_node_that_were_alike_and_are_so_no_more_are_reported(world: World) -> None:
    """With two ranks it is unknown whose memory is wrong; for more, see test_node_replicas.py."""
    world.start()
    agent, workers = world.train()
    reported: list[smp_messages.SmpNotice] = []
    end = time.monotonic() + TIMEOUT_S
    step = 0
    while not reported:
        assert time.monotonic() < end, "no rank is reported"
        step += 1
        for worker in workers:
            worker.like = 0 if step == 1 else None
            worker.seal(version(0, step))
        world.wait_for(agent, smp_messages.VersionCommitted)
        select.select([], [], [], 0.02)  # a slot that is sealed again in between is not compared
        unsolicited = [one.body for one in world.unsolicited]
        reported = [one for one in unsolicited if isinstance(one, smp_messages.SmpNotice)]
    assert [(one.kind, one.ranks) for one in reported] == [("replicas_differ", [0, 1])]


def test_a_new_layout_replaces_the_old_at_its_first_commit(world: World) -> None:
    world.start()
    agent, workers = world.train(1)
    for worker in workers:
        worker.layout = layout_of(300_000)
        worker.request()
        worker.slot = 0
    agent.send(smp_messages.HandOverMemory())
    received = world.wait_for(agent, smp_messages.MemoryHandedOver)
    assert received.ranks == [0, 0, 1, 1]
    world.commit(workers, version(0, 2))
    received = world.ask(agent, smp_messages.HandOverMemory(), smp_messages.MemoryHandedOver)
    assert received.ranks == [0, 1]
    assert offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 2),
        (1, 0, 2),
    }


def test_an_agent_drops_a_new_layout_that_the_next_generation_does_not_use(world: World) -> None:
    world.start(adopt=True)
    folder = world.folder / RUN_ID
    folder.symlink_to(world.folder)
    link = AgentSmpClient(RunFolder(folder), orphan_timeout_s=60.0)
    assert link.find() is not None
    link.complete([])
    world.page_fd = create_command_page()

    def begin(generation: int) -> list[Worker]:
        body = smp_messages.BeginGeneration(generation, WORLD, list(range(WORLD)))
        link.begin_generation(body, world.page_fd)
        return [world.worker(rank, generation=generation) for rank in range(WORLD)]

    def num_arenas() -> int:
        link.collect()
        return len(link.memory.held)

    try:
        workers = begin(0)
        for worker in workers:
            worker.request()
        world.commit(workers, version(0, 1))
        changed = world.worker(0)
        changed.layout = layout_of(300_000)
        changed.request()
        wait_until(lambda: num_arenas() == WORLD + 1, "the agent holds the new layout")
        again = begin(1)  # each worker inherits its arena, without a request
        for worker, before in zip(again, workers, strict=True):
            worker.fd, before.fd, worker.slot = before.fd, -1, before.slot
        world.commit(again, version(1, 2))
        wait_until(lambda: num_arenas() == WORLD, "the agent has dropped it")
        assert link.whole_versions == [version(1, 2), version(0, 1)]
    finally:
        link.shutdown()


@pytest.mark.parametrize(
    "corrupt",
    [
        b"\xff\xff\xff\xff",
        b"\x04\x00\x00\x00junk",
    ],
    ids=["a frame of 4 GB", "no message"],
)
def test_a_client_that_breaks_the_protocol_loses_only_its_connection(
    world: World, corrupt: bytes
) -> None:
    world.start()
    agent, _ = world.train(1)
    bad = world.connect("cli")
    os.write(bad.fileno(), corrupt)
    with pytest.raises(PeerError):
        bad.receive(deadline_s=TIMEOUT_S)
    unknown_peer = world.connect("worker", 0)
    unknown_peer.send(smp_messages.InventoryRequest())
    with pytest.raises(PeerLost):
        unknown_peer.receive(deadline_s=TIMEOUT_S)
    assert offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 1),
        (1, 0, 1),
    }


@pytest.mark.parametrize("steps", [(1, 2), ()], ids=["memory", "nothing"])
def test_an_agent_brings_the_smp_it_finds_what_the_last_agent_did_not(
    world: World, steps: tuple[int, ...]
) -> None:
    """It was started for memory, and its agent died first; its workers wait for the next one."""
    fds: list[int] = []
    if steps:
        world.start()
        agent, _ = world.train(*steps)
        fds = [os.dup(fd) for fd in world.granted_fds(agent, WORLD).values()]
        world.smp.kill()
    world.start(adopt=True)
    folder = world.folder / RUN_ID
    folder.symlink_to(world.folder)
    link = AgentSmpClient(RunFolder(folder), orphan_timeout_s=60.0)
    try:
        assert link.find() is not None
        link.complete(fds)
        page_fd = create_command_page()
        world.fds.append(page_fd)
        body = smp_messages.BeginGeneration(1, WORLD, list(range(WORLD)))
        link.begin_generation(body, page_fd)
        for rank in range(WORLD):
            worker = world.worker(rank, generation=1)
            assert isinstance(worker.request(), worker_messages.ArenaGranted)
        wanted = {(rank, 0, step) for rank in range(WORLD) for step in steps}
        assert offered(link.inventory()) == wanted
    finally:
        link.shutdown()


def test_an_agent_does_not_take_a_late_answer_for_that_to_its_next_question(world: World) -> None:
    world.start(adopt=True)
    folder = world.folder / RUN_ID
    folder.symlink_to(world.folder)
    link = AgentSmpClient(RunFolder(folder), orphan_timeout_s=60.0)
    try:
        assert link.find() is not None
        link.complete([])
        link.answer_wait_s = 0.2
        stop(world.smp.pid)
        assert offered(link.inventory()) == set(), "what the agent holds itself"
        with pytest.raises(PeerTimeout):
            link.persist_run_state(b"late")
        world.smp.send_signal(signal.SIGCONT)
        link.answer_wait_s = TIMEOUT_S
        assert link.listen_for_peers("127.0.0.1", None) > 0
        stop(world.smp.pid)
        link.answer_wait_s = 0.2
        with pytest.raises(PeerTimeout):
            link.persist_run_state(b"late again")
        world.smp.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(select.select([link.channel], [], [], 0.0)[0]), "the late answer")
        link.collect()
        link.answer_wait_s = TIMEOUT_S
        assert offered(link.inventory()) == set()
    finally:
        world.smp.send_signal(signal.SIGCONT)
        link.shutdown()


@pytest.mark.parametrize("directory", ["saved", None])
def test_only_a_run_without_a_checkpoint_directory_is_advised_to_give_one(
    world: World, directory: str | None
) -> None:
    """The directory is empty, and the newest committed version is lost."""
    world.start(adopt=True)
    folder = world.folder / RUN_ID
    folder.symlink_to(world.folder)
    link = AgentSmpClient(RunFolder(folder), orphan_timeout_s=60.0)
    where = str(world.folder)
    profile = Profile(checkpoint=CheckpointConfig(directory=directory))
    spec = RunSpec(
        run_id=RUN_ID,
        script="train.py",
        torchrun_argv=[],
        log_folder=where,
        cwd=where,
        profile=profile,
    )
    journal = Journal(world.folder)
    workers = WorkerGroup(spec, smp=link, starter=WorkerStarter(None, journal))
    stub, kept = StubClient(), PersistedAgentState()
    generations = GenerationRunner(
        spec, "a", journal=journal, smp=link, stub=stub, workers=workers, kept=kept
    )
    members = [PlanMember(NodeCard("a", 1, "", 0, WORLD), 0)]
    plan = GenerationPlan(1, "a", "a loss", members, [], None, "its node is lost", "", 0, life="1")
    try:
        assert link.find() is not None
        link.complete([])
        link.committed = version(0, 7)
        with pytest.raises(SnapshotError, match="cannot be restored") as raised:
            generations.adopt(cast("FtrunElasticAgent", None), plan)
        assert ("--checkpoint-dir" in str(raised.value)) == (directory is None)
    finally:
        link.shutdown()


def test_what_is_no_arena_is_not_adopted(world: World) -> None:
    world.start(adopt=True)
    agent = world.connect("agent")
    fd = create_command_page()
    world.fds.append(fd)
    refused = world.ask(agent, smp_messages.AdoptMemory(ranks=[1]), messages.Refused, fd)
    assert "rank 1" in refused.reason
    assert (
        offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == set()
    )


def test_a_newer_agent_replaces_the_older(world: World) -> None:
    world.start()
    old, _ = world.train(1)
    new = world.connect("agent")
    assert offered(world.ask(new, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 1),
        (1, 0, 1),
    }
    with pytest.raises(PeerLost):
        drain(old, world.fds)


def test_the_process_is_small_and_secluded(world: World) -> None:
    world.start()
    proc = Path(f"/proc/{world.smp.pid}")
    assert (proc / "comm").read_text().strip() == "ftrun-smp"
    assert os.getsid(world.smp.pid) == world.smp.pid
    status = dict(
        line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line
    )
    # Pages of files are shared with other processes, and their number depends on the kernel.
    assert int(status["RssAnon"].split()[0]) < 35_000
    assert "libtorch" not in (proc / "maps").read_text()
    assert "Max core file size        0 " in (proc / "limits").read_text()


def test_it_may_open_as_many_files_as_the_hard_limit_allows(world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        world.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(world.smp.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_client_that_it_cannot_accept_waits_and_costs_no_time(world: World) -> None:
    world.start()
    pid = world.smp.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(fd for fd in range(len(taken) + 1) if fd not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    agent = world.connect("agent")
    wait_until(lambda: "Too many open files" in world.log(), "it has no descriptor")
    time.sleep(0.3)
    assert world.log().count("Too many open files") < 3
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)


def test_a_seal_that_is_withdrawn_is_never_committed(world: World) -> None:
    world.start()
    agent, workers = world.train(1)
    for number, worker in enumerate(workers):
        worker.capture(version(0, 2))
        if number == 0:
            worker.report_sealed(version(0, 2))
    withdrawal = worker_messages.WithdrawShard(rank=0, generation=0, step=2)
    assert workers[0].channel.ask(withdrawal, deadline_s=TIMEOUT_S).body == messages.Done()
    workers[1].report_sealed(version(0, 2))
    inventory = world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert offered(inventory) == {(0, 0, 1), (1, 0, 1), (1, 0, 2)}
    for worker in workers:
        worker.slot = 1
    world.commit(workers, version(0, 3))
    too_late = worker_messages.WithdrawShard(rank=0, generation=0, step=3)
    answer = workers[0].channel.ask(too_late, deadline_s=TIMEOUT_S).body
    assert isinstance(answer, messages.Refused)


def test_a_request_of_a_generation_that_is_over_is_refused(world: World) -> None:
    world.start()
    agent, workers = world.train(1)
    world.begin(agent, generation=1)
    assert isinstance(workers[0].request(), messages.Refused)
    again = world.worker(0, generation=1)
    assert isinstance(again.request(), worker_messages.ArenaGranted)
    check_bytes(again.fd, version(0, 1))
    world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert len(world.all_granted()) == WORLD, "what the agent has is not sent again"


def change_layout(world: World, workers: list[Worker]) -> None:
    for worker in workers:
        worker.layout = layout_of(100_000)
        assert isinstance(worker.request(), worker_messages.ArenaGranted)
        worker.slot = 0


def passed(count: Path) -> list[str]:
    """Crash points with their hit, in the order passed: `name:N`."""
    names = count.read_text().split()
    return [f"{name}:{names[: at + 1].count(name)}" for at, name in enumerate(names)]


def once(points: list[str]) -> list[str]:
    """The first hit of each crash point."""
    return list({point.partition(":")[0]: point for point in reversed(points)}.values())


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "hits", [pytest.param(once, id="once"), pytest.param(list, id="all", marks=pytest.mark.full)]
)
def test_an_smp_killed_at_any_point_of_a_run_loses_no_sealed_version(
    world: World, tmp_path: Path, hits: Hits
) -> None:
    count = tmp_path / "points"
    world.start(count=str(count))
    run_that_may_die(world)
    world.smp.kill()
    points = hits(passed(count))
    assert len({point.partition(":")[0] for point in points}) >= 8
    for point in points:
        world.forget()
        world.start(crash_at=point)
        shown, captured = run_that_may_die(world)
        assert world.smp.wait(TIMEOUT_S) == -signal.SIGKILL, point
        granted = world.all_granted()

        world.start(adopt=True)
        agent = world.connect("agent")
        ranks, fds = [rank for rank, _ in granted], [fd for _, fd in granted]
        world.ask(agent, smp_messages.AdoptMemory(ranks=ranks), messages.Done, *fds)
        world.begin(agent)
        assert world.shown() == captured >= shown, point
        world.smp.kill()


def run_that_may_die(world: World) -> tuple[Version, Version]:
    """Three commits and a new layout; what was committed and what all ranks have sealed."""
    captured = shown = version(-1, -1)
    agent = world.connect("agent")
    with contextlib.suppress(PeerError):
        world.begin(agent)
        workers = [world.worker(rank) for rank in range(WORLD)]
        for worker in workers:
            assert isinstance(worker.request(), worker_messages.ArenaGranted)
        for step in (1, 2, 3):
            if step == 3:
                change_layout(world, workers)
            at = version(0, step)
            for worker in workers:
                worker.capture(at)
            captured = at
            for worker in workers:
                worker.report_sealed(at)
            wait_until(lambda at=at: world.shown() == at or world.is_dead(), "commit")  # type: ignore[misc]
            shown = world.shown()
    with contextlib.suppress(PeerError):
        while world.is_dead() or select.select([agent], [], [], 0)[0]:
            received = agent.receive(deadline_s=TIMEOUT_S)
            world.fds.extend(received.fds)
            world.unsolicited.append(received)
    return shown, captured


def test_a_checkpoint_survives_the_death_of_everything(world: World, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    world.start()
    agent, _ = world.train(1, 2)
    written = world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(str(directory), keep=2),
        checkpoint_messages.CheckpointWritten,
    )
    assert (written.generation, written.step) == (0, 2)
    assert written.path == str(directory / "step-00000002-g0")
    assert (directory / "latest").resolve() == Path(written.path)
    again = world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(str(directory), keep=2),
        checkpoint_messages.CheckpointWritten,
    )
    assert (again.path, again.total_bytes) == (written.path, 0)

    world.smp.kill()
    world.forget()
    world.start()
    agent = world.connect("agent")
    loaded = world.ask(agent, load(directory), checkpoint_messages.CheckpointLoaded)
    assert loaded == checkpoint_messages.CheckpointLoaded(-1, 2, written.path)
    inventory = world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)
    assert offered(inventory) == {(0, -1, 2), (1, -1, 2)}
    for fd in world.granted_fds(agent, WORLD).values():
        check_loaded(fd, version(0, 2))
    world.begin(agent)
    assert world.shown() == version(-1, 2)
    workers = [world.worker(rank) for rank in range(WORLD)]
    for worker in workers:
        assert isinstance(worker.request(), worker_messages.ArenaGranted)
        worker.slot = 1
    world.commit(workers, version(0, 3))
    third = world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(str(directory), keep=1),
        checkpoint_messages.CheckpointWritten,
    )
    assert sorted(path.name for path in directory.iterdir()) == ["latest", Path(third.path).name]


def load(directory: Path | str) -> checkpoint_messages.LoadCheckpoint:
    return checkpoint_messages.LoadCheckpoint(str(directory), WORLD, list(range(WORLD)))


def check_loaded(fd: int, at: Version) -> None:
    """Generation -1 holds the bytes that were captured as `at`."""
    arena = Arena(fd, writable=False)
    try:
        slot = arena.find(version(-1, at.step))
        assert slot is not None
        layout = layout_of(200_000)
        assert bytes(arena.image(slot)) == image_of(layout, rank=arena.shape.rank, at=at)
    finally:
        arena.close()


CHECKPOINT_POINTS = [
    f"smp.checkpoint.{name}"
    for name in (
        *("started", "part_started", "shard_written", "part_shard_written", "part_written"),
        *("merged", "index_written", "synced", "renamed", "parts_renamed", "link_made", "latest"),
        "pruning",
    )
]
"""Crash points of each writer on each storage, if it finishes a checkpoint and prunes another."""


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scheme", "hits"),
    [
        pytest.param("", once, id="directory, once"),
        pytest.param("", list, id="directory, all", marks=pytest.mark.full),
        pytest.param("file://", list, id="url, all", marks=pytest.mark.full),
    ],
)
def test_an_smp_killed_at_any_point_of_a_checkpoint_leaves_one_that_loads(
    world: World, tmp_path: Path, scheme: str, hits: Hits
) -> None:
    count = tmp_path / "points"
    world.start(count=str(count))
    first = write_twice(world, f"{scheme}{tmp_path / 'whole'}", count)
    points = [point for point in passed(count)[first:] if point.startswith("smp.checkpoint.")]
    assert {point.partition(":")[0] for point in points} == set(CHECKPOINT_POINTS)
    world.smp.kill()
    for point in hits(points):
        directory = tmp_path / point
        where = f"{scheme}{directory}"
        world.forget()
        world.start(crash_at=point)
        with contextlib.suppress(PeerError):
            write_twice(world, where)
        assert world.smp.wait(TIMEOUT_S) == -signal.SIGKILL, point

        world.forget()
        world.start()
        agent = world.connect("agent")
        loaded = world.ask(agent, load(where), checkpoint_messages.CheckpointLoaded)
        assert loaded.step in (1, 2), point
        for fd in world.granted_fds(agent, WORLD).values():
            check_loaded(fd, version(0, loaded.step))
        world.begin(agent)
        world.ask(
            agent,
            checkpoint_messages.WriteCheckpoint(where, keep=1),
            checkpoint_messages.CheckpointWritten,
        )
        assert len(list(directory.iterdir())) == 2, point
        world.smp.kill()


def write_twice(world: World, where: str, count: Path | None = None) -> int:
    """Two checkpoints, the second prunes the first; crash points passed before the second."""
    agent, workers = world.train(1)
    world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(where, keep=1),
        checkpoint_messages.CheckpointWritten,
    )
    first = len(passed(count)) if count else 0
    world.commit(workers, version(0, 2))
    world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(where, keep=1),
        checkpoint_messages.CheckpointWritten,
    )
    return first


def test_a_directory_without_checkpoints_is_no_error(world: World, tmp_path: Path) -> None:
    world.start()
    agent = world.connect("agent")
    nothing = checkpoint_messages.CheckpointLoaded(-1, -1, "")
    assert (
        world.ask(agent, load(tmp_path / "none"), checkpoint_messages.CheckpointLoaded) == nothing
    )


def test_what_cannot_be_written_or_loaded_is_refused_in_words(world: World, tmp_path: Path) -> None:
    world.start()
    agent, workers = world.train()
    directory = tmp_path / "checkpoints"
    refused = world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(str(directory), keep=1),
        checkpoint_messages.CheckpointFailed,
    )
    assert "nothing to write" in refused.reason
    world.commit(workers, version(0, 1))
    (tmp_path / "file").touch()
    bad = checkpoint_messages.WriteCheckpoint(str(tmp_path / "file" / "below"), keep=1)
    assert "Not a directory" in world.ask(agent, bad, checkpoint_messages.CheckpointFailed).reason
    full = checkpoint_messages.WriteCheckpoint("/proc/sys/kernel", keep=1)
    assert "cannot write" in world.ask(agent, full, checkpoint_messages.CheckpointFailed).reason
    world.ask(
        agent,
        checkpoint_messages.WriteCheckpoint(str(directory), keep=1),
        checkpoint_messages.CheckpointWritten,
    )
    broken = tmp_path / "broken" / "step-00000001-g0"
    broken.mkdir(parents=True)
    (broken / "index.json").write_text("{}")
    none = world.ask(agent, load(broken.parent), checkpoint_messages.CheckpointLoaded)
    assert (none.path, list(none.rejected)) == ("", [broken.name])
    assert "can be used" in none.problem
    assert "its index is not valid" in none.problem
    assert offered(world.ask(agent, smp_messages.InventoryRequest(), smp_messages.Inventory)) == {
        (0, 0, 1),
        (1, 0, 1),
    }
