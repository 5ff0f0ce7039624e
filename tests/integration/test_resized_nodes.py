"""A version is restored bit by bit on another number of nodes, with and without lost nodes.

Real ranks with gloo, forked by one warm process, and a real SMP for each node; the test acts as
their agents and their leader. A lost node is an SMP that was killed and whose memory no process
kept.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import PeerError
from ftrun.ids import RunId, Version, version
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.pages import (
    CommandField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from tests.integration.test_resized_world import assert_same
from tests.launch_requests import launch_request, launch_variables

RUN = RunId("resized-nodes")
SCRIPT = Path(__file__).parent / "scripts" / "resizable_training.py"
MOST_NODES = 4
MOST_GENERATIONS = 4
TIMEOUT_S = 90.0
LINK_TIMEOUT_S = 20.0
SMALL_STATE_BYTES = 1 << 16
M = Any


class Node:
    """One SMP, and the agent's connection to it."""

    def __init__(self, at: int, folder: Path, ends: contextlib.ExitStack) -> None:
        self.node_id = f"n{at}"
        self.host = f"127.0.0.{30 + at}"
        self.socket = folder / f"{self.node_id}.sock"
        self.process = ends.enter_context(
            process(
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(self.socket), "--orphan-s", "60"),
                stderr=ends.enter_context((folder / f"{self.node_id}.log").open("wb")),
            )
        )
        wait_until(self.socket.exists, f"the SMP of {self.node_id} listens")
        hello = messages.Hello(role="agent", pid=os.getpid())
        self.agent: Channel = connect(
            self.socket, run_id=RUN, peer=self.node_id, hello=hello, deadline_s=TIMEOUT_S
        )
        ends.callback(self.agent.close)
        self.ready: set[Version] = set()
        self.failed: list[str] = []
        answer = self.ask(smp_messages.ListenForPeers(self.host))
        assert isinstance(answer, smp_messages.ListeningForPeers)
        self.port = answer.port

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    def place(self, ranks: list[int]) -> smp_messages.NodeAddress:
        return smp_messages.NodeAddress(
            self.node_id, 1, self.host, self.port if self.is_up else 0, ranks
        )

    def ask(self, body: messages.AnyMessage, *fds: int) -> messages.AnyMessage:
        self.agent.send(body, fds=fds, deadline_s=TIMEOUT_S)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if not self.took(received):
                return received.body

    def receive(self) -> None:
        with contextlib.suppress(PeerError):
            for received in self.agent.receive_ready():
                assert self.took(received), received.body

    def took(self, received: ReceivedMessage) -> bool:
        """Whether this message arrived without a request."""
        for fd in received.fds:
            os.close(fd)  # only the SMP keeps a node's memory
        match received.body:
            case smp_messages.VersionReady() as body:
                self.ready.add(version(body.generation, body.step))
            case smp_messages.RestoreFailed() as body:
                self.failed.append(body.reason)
            case (
                worker_messages.ArenaGranted()
                | smp_messages.ParityRegionCreated()
                | smp_messages.ParityRegionFreed()
                | smp_messages.VersionCommitted()
                | smp_messages.AbandonVersion()
                | smp_messages.RestoreReady()
                | smp_messages.PeersUnreachable()
                | smp_messages.MemoryNeeded()
                | smp_messages.SmpNotice()
            ):
                pass
            case _:
                return False
        return True

    def lose(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def num_sent_bytes(self) -> int:
        """To other nodes."""
        answer = self.ask(messages.StatusRequest())
        assert isinstance(answer, messages.StatusReply)
        return int(json.loads(answer.document)["group_work"]["sent_bytes"])

    def num_image_bytes(self) -> int:
        """Of the newest version here."""
        answer = self.ask(smp_messages.InventoryRequest())
        assert isinstance(answer, smp_messages.Inventory)
        return max(answer.offers, key=lambda one: one.step).image_bytes

    def num_arena_bytes(self) -> int:
        answer = self.ask(messages.StatusRequest())
        assert isinstance(answer, messages.StatusReply)
        return int(json.loads(answer.document)["bytes"])


class Cluster:
    """Nodes with equally many ranks, and their leader."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self.folder = folder
        self.ends = ends
        pages = [create_command_page() for _ in range(MOST_GENERATIONS * MOST_NODES)]
        heartbeats = [create_page("beat") for _ in range(MOST_GENERATIONS * MOST_NODES)]
        for fd in (*pages, *heartbeats):
            ends.callback(os.close, fd)
        self.pages, self.heartbeats = iter(pages), iter(heartbeats)
        self.warm = ends.enter_context(
            process(
                *(sys.executable, "-u", str(SCRIPT), str(folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=ends.enter_context((folder / "ranks.err").open("wb")),
                pass_fds=[*pages, *heartbeats],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
        )
        self.nodes: list[Node] = []
        self.members: list[Node] = []
        self.shown: list[SharedPage] = []
        self.generation = -1
        self.newest: Version | None = None
        self.places: list[list[int]] = []
        """Ranks of each member."""
        self.holders: list[tuple[Node, list[int]]] = []
        """Nodes of the generation `held_in`, which has the newest version, with their ranks."""
        self.held_in = -1
        self.narrow = False
        wait_until(self.warm_has_reported, self.log)
        assert json.loads(self.warm.stdout.readline()) == "ready"

    def add(self) -> Node:
        self.nodes.append(Node(len(self.nodes), self.folder, self.ends))
        return self.nodes[-1]

    def log(self) -> str:
        texts = [path.read_text() for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([(self.folder / "ranks.err").read_text(), *texts])

    def warm_has_reported(self) -> bool:
        return bool(select.select([self.warm.stdout], [], [], 0)[0])

    def run(
        self, members: list[Node], kind: str, steps: int, *, ranks: int = 1, dies: str = ""
    ) -> list[int]:
        """One generation of these nodes to this step; exit statuses by rank.

        `ranks` is the number of each node, and `dies` where the last rank ends.
        """
        self.generation += 1
        previous_size = sum(len(of) for _, of in self.holders)
        old = [node.place(of) for node, of in self.holders]
        previous_generation = self.held_in
        protection = smp_messages.PreviousGroup(old, min(1, len(old) - 1), previous_generation)
        self.places = [[*range(at * ranks, (at + 1) * ranks)] for at in range(len(members))]
        size = ranks * len(members)
        group = [node.place(of) for node, of in zip(members, self.places, strict=True)]
        restored = self.newest
        self.shown, variables = [], []
        for node, local_ranks in zip(members, self.places, strict=True):
            page_fd = next(self.pages)
            self.shown.append(SharedPage(page_fd))
            if restored is not None:
                assert (
                    node.ask(smp_messages.VoidAfter(restored.generation, restored.step))
                    == messages.Done()
                )
            body = smp_messages.BeginGeneration(
                generation=self.generation,
                world_size=size,
                local_ranks=local_ranks,
                group=group if len(members) > 1 else [],
                node_id=node.node_id,
                parity=1,
                small_state_bytes=SMALL_STATE_BYTES,
                restored=(restored.generation, restored.step) if restored else None,
                protected_in=previous_generation if restored else -1,
                restore_from=[protection] if restored else [],
                restored_world_size=previous_size,
                timeout_s=LINK_TIMEOUT_S,
            )
            node.agent.generation = self.generation
            assert node.ask(body, page_fd) == messages.Done()
            variables += [
                self.variables(rank, size, node, page_fd, previous_size) for rank in local_ranks
            ]
        order = {
            "generation": self.generation,
            "kind": kind,
            "steps": steps,
            "narrow": self.narrow,
            "dies": dies,
            "variables": variables,
        }
        self.members = members
        self.warm.stdin.write(json.dumps(order) + "\n")
        self.warm.stdin.flush()
        wait_until(lambda: self.leader() or self.warm_has_reported(), self.log)
        statuses: list[int] = json.loads(self.warm.stdout.readline())
        if not any(statuses):
            wanted = version(self.generation, steps)
            wait_until(lambda: self.leader() or self.is_committed(wanted), self.log)
            self.newest, self.held_in = wanted, self.generation
            self.holders = list(zip(members, self.places, strict=True))
        return statuses

    def variables(
        self, rank: int, size: int, node: Node, page_fd: int, previous_size: int
    ) -> dict[str, str]:
        request = launch_request(
            generation=self.generation,
            rank=rank,
            world_size=size,
            smp_socket=str(node.socket),
            restore=self.newest,
            restore_world_size=previous_size if self.newest is not None else 0,
            snapshot=SnapshotConfig(every=1, commit_timeout_s=60),
            descriptors={"heartbeat": next(self.heartbeats), "command": page_fd},
        )
        return launch_variables(RUN, request)

    def leader(self) -> bool:
        """Commit what all nodes are ready with; always False, for use with `or`."""
        for node in self.members:
            node.receive()
        if len(self.members) > 1:
            for ready in set.intersection(*(node.ready for node in self.members)):
                for node in self.members:
                    node.agent.send(smp_messages.CommitVersion(ready.generation, ready.step))
                    node.ready.discard(ready)
        return False

    def is_committed(self, wanted: Version) -> bool:
        return all(
            (page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP))
            == (wanted.generation, wanted.step)
            for page in self.shown
        )

    def saved(self, what: str, rank: int) -> Any:
        path = self.folder / f"{what}.{self.generation}.{rank}.pt"
        return torch.load(path, weights_only=False)


def wait_until(claim: Callable[[], bool], what: str | Callable[[], str]) -> None:
    end_s = clock.now_s() + TIMEOUT_S
    while not claim():
        if clock.now_s() > end_s:
            text = what if isinstance(what, str) else what()
            pytest.fail(f"not within {TIMEOUT_S} s: {text}")
        select.select([], [], [], 0.002)


@contextlib.contextmanager
def process(*argv: str, **options: Any) -> Iterator[Any]:
    """A process that ends with the block."""
    with subprocess.Popen(argv, **options) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as ends:
        yield Cluster(tmp_path, ends)


def assert_restored(cluster: Cluster, ends: list[Any]) -> None:
    """Every rank has the state of the previous ranks at the restore point."""
    for rank in range(sum(map(len, cluster.places))):
        found = cluster.saved("restored", rank)
        old = ends[rank % len(ends)]
        for what in ("step", "parameters", "optimizer", "groups", "scheduler"):
            assert_same(found[what], ends[0][what], f"rank {rank}: {what}")
        assert_same(found["buffers"], old["buffers"], f"rank {rank}: buffers")


def ends_of(cluster: Cluster) -> list[Any]:
    return [cluster.saved("end", rank) for rank in range(len(cluster.members))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_a_lost_node_is_done_without_and_another_one_comes(cluster: Cluster, kind: str) -> None:
    cluster.narrow = kind == "fsdp"  # many small reads, one window after the other
    first, second, third = cluster.add(), cluster.add(), cluster.add()
    assert cluster.run([first, second, third], kind, 2) == [0] * 3, cluster.log()
    ends = ends_of(cluster)
    second.lose()
    assert cluster.run([first, third], kind, 4) == [0] * 2, cluster.log()
    assert_restored(cluster, ends)
    ends = ends_of(cluster)
    fourth = cluster.add()
    assert cluster.run([first, fourth, third], kind, 5) == [0] * 3, cluster.log()
    assert_restored(cluster, ends)
    assert not [node.failed for node in cluster.nodes if node.failed]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_last_node_of_two_continues_alone(cluster: Cluster) -> None:
    first, second = cluster.add(), cluster.add()
    assert cluster.run([first, second], "fsdp", 2) == [0] * 2, cluster.log()
    ends = ends_of(cluster)
    held = first.num_arena_bytes()
    first.lose()
    assert cluster.run([second], "plain", 3) == [0], cluster.log()
    assert_restored(cluster, ends)
    assert second.num_arena_bytes() < 2.2 * held  # the whole state, no part of the previous world


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_two_lost_nodes_held_is_named(cluster: Cluster) -> None:
    nodes = [cluster.add() for _ in range(3)]
    assert cluster.run(nodes, "fsdp", 2) == [0] * 3, cluster.log()
    nodes[0].lose()
    nodes[1].lose()
    assert all(cluster.run([nodes[2]], "plain", 3))
    text = (cluster.folder / f"error.{cluster.generation}.0").read_text()
    assert text.startswith("LayoutUnknown: ")
    assert "rank 0" in text
    assert "n1" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_of_a_node_fetch_each_byte_once_also_if_one_of_them_dies(cluster: Cluster) -> None:
    cluster.narrow = True
    first, second = cluster.add(), cluster.add()
    assert cluster.run([first], "plain", 2) == [0], cluster.log()
    ends = ends_of(cluster)
    num_image_bytes, sent_before = first.num_image_bytes(), first.num_sent_bytes()
    assert cluster.run([first, second], "ddp", 3, ranks=2, dies="reading")[-1], cluster.log()
    sent = first.num_sent_bytes() - sent_before
    assert 0.5 * num_image_bytes < sent < 1.05 * num_image_bytes
    third = cluster.saved("restored", 2)
    assert_same(third["parameters"], ends[0]["parameters"], "the rank that has not died")
    assert_same(third["optimizer"], ends[0]["optimizer"], "the rank that has not died")
    assert cluster.run([first, second], "ddp", 3, ranks=2) == [0] * 4, cluster.log()
    assert_restored(cluster, ends)
