"""Two ranks in this process share their replicas, against a real SMP; the test is their agent."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import MemoryTooSmall, RanksDiffer, SnapshotCorrupt
from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.snapshot.layout import parse_header
from ftrun.snapshot.replica_shares import members_of
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.wire.transport.channel import connect
from ftrun.worker.context import WorkerContext
from ftrun.worker.replicas.shares import CheckedReplicas
from ftrun.worker.restore import early_restore
from ftrun.worker.session import Session
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.attached import AttachedState, by_name
from tests.launch_requests import launch_request

RUN = RunId("sharing")
TIMEOUT_S = 120.0
WIDTH = 300
WORLD = 2
WEIGHT_BYTES = 4 * WIDTH * WIDTH
MOST_STEPS = 20
"""Steps in which the SMP must have compared enough versions."""


class TrainedRank:
    """One rank: a model whose weights are equal on all ranks, and whose BatchNorm is not."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.rank = rank
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=1e-3)
        self.drift = 0.0
        """Added to a weight after the next step."""
        self.page = SharedPage(create_page("beat"))

    def state(self) -> list[torch.Tensor]:
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        return [tensor.clone() for tensor in [*self.model.state_dict().values(), *moments]]

    def train(self, step: int) -> None:
        """The gradients are those of all ranks, as with DDP; the statistics are its own."""
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        self.model[:2](torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model[0].weight += self.drift
            self.model[2].running_mean += self.rank + 1
        self.drift = 0.0


class Node:
    """The agent of a node with two ranks."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "smp.sock"
        command = [sys.executable, "-m", "ftrun.smp", "--run-id", RUN, "--socket", self.socket]
        self.smp = subprocess.Popen([*map(str, command), "--orphan-s", "60"])
        give_up_s = clock.now_s() + TIMEOUT_S
        while not self.socket.exists():
            assert clock.now_s() < give_up_s
            clock.sleep(0.01)
        hello = messages.Hello(role="agent", pid=os.getpid())
        self.agent = connect(
            self.socket, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S
        )
        self.settings = [SnapshotConfig(every=1, commit_timeout_s=60)] * WORLD
        self.notices: list[smp_messages.SmpNotice] = []
        self.sessions: list[Session] = []
        self.ranks: list[TrainedRank] = []
        self.generation = -1
        self.step = 0

    def ask(self, body: messages.AnyMessage, *fds: int) -> tuple[messages.AnyMessage, list[int]]:
        self.agent.send(body, fds=fds)
        kinds = (messages.Done, smp_messages.MemoryHandedOver, messages.StatusReply)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if isinstance(received.body, smp_messages.SmpNotice):
                self.notices.append(received.body)
            if isinstance(received.body, kinds):
                return received.body, list(received.fds)

    def begin(self, restored: Version | None = None) -> list[TrainedRank]:
        """Begin the next generation with new ranks."""
        self.end_generation()
        self.generation += 1
        fd = create_command_page()
        self.commands = SharedPage(fd)
        at = (restored.generation, restored.step) if restored else None
        self.agent.generation = Generation(self.generation)
        body = smp_messages.BeginGeneration(self.generation, WORLD, list(range(WORLD)), restored=at)
        self.ask(body, fd)
        arenas = self.arenas() if restored else {}
        ranks = self.ranks = [TrainedRank(rank) for rank in range(WORLD)]
        for one in ranks:
            fds = [f for f in arenas.get(one.rank, []) if restored and _holds(f, restored)]
            request = launch_request(
                generation=Generation(self.generation),
                rank=Rank(one.rank),
                world_size=WORLD,
                smp_socket=str(self.socket),
                restore=restored,
                snapshot=self.settings[one.rank],
                descriptors={"arena": fds[0]} if fds else {},
            )
            attached = AttachedState()
            for argument, thing in (("model", one.model), ("optimizer", one.optimizer)):
                for name, found in by_name(argument, thing).items():
                    attached.add(name, found)
            context = WorkerContext(RUN, request, page=one.page, commands=self.commands)
            self.sessions.append(Session(attached, {}, context, None))
        return ranks

    def arenas(self) -> dict[int, list[int]]:
        body, fds = self.ask(smp_messages.HandOverMemory())
        assert isinstance(body, smp_messages.MemoryHandedOver)
        found: dict[int, list[int]] = {}
        for rank, fd in zip(body.ranks, fds, strict=True):
            found.setdefault(rank, []).append(fd)
        return found

    def train(self, ranks: list[TrainedRank]) -> Version:
        """One step with a snapshot, which is committed."""
        self.step += 1
        for one in ranks:
            one.train(self.step)
        for session in self.sessions:
            session.step_done()
        at = version(Generation(self.generation), self.step)
        give_up_s = clock.now_s() + TIMEOUT_S
        while self.commands.get(CommandField.COMMITTED_STEP) != self.step:
            is_over = self.commands.get(CommandField.ABANDONED_STEP) >= self.step
            assert clock.now_s() < give_up_s or is_over
            if is_over:
                break
            clock.sleep(0.002)
        return at

    def image_bytes(self, ranks: list[TrainedRank]) -> list[int]:
        return [one.page.get(HeartbeatField.IMAGE_BYTES) for one in ranks]

    def train_until(self, ranks: list[TrainedRank], claim: Callable[[], bool]) -> Version:
        """Train until the claim is true after a committed snapshot."""
        for _ in range(MOST_STEPS):
            at = self.train(ranks)
            clock.sleep(0.2)  # the SMP compares the version in a job
            if claim():
                return at
        raise AssertionError(f"not within {MOST_STEPS} steps: {self.image_bytes(ranks)}")

    def share(self, ranks: list[TrainedRank]) -> Version:
        """Train until all ranks have stored shares; the last version."""
        # Of four large tensors the optimizer has three, and each rank stores half of them.
        return self.train_until(ranks, lambda: max(self.image_bytes(ranks)) < 3 * WEIGHT_BYTES)

    def end_generation(self) -> None:
        for one in self.sessions:
            one.close()
        self.sessions.clear()

    def close(self) -> None:
        try:
            self.end_generation()
            self.agent.close()
        finally:
            self.smp.kill()
            self.smp.wait(TIMEOUT_S)
            early_restore.release()


def _holds(fd: int, wanted: Version) -> bool:
    arena = Arena(fd, writable=False)
    try:
        return arena.find(wanted) is not None
    finally:
        arena.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with contextlib.closing(Node(tmp_path)) as made:
        yield made


def assert_same(ranks: list[TrainedRank], states: list[list[torch.Tensor]]) -> None:
    for one, saved in zip(ranks, states, strict=True):
        assert all(map(torch.equal, one.state(), saved))


def test_each_rank_restores_its_own_state_from_the_shares_of_both(node: Node) -> None:
    ranks = node.begin()
    at = node.share(ranks)
    states = [one.state() for one in ranks]
    again = node.begin(at)
    assert_same(again, states)
    node.train(again)
    assert max(node.image_bytes(again)) < 3 * WEIGHT_BYTES, "they share from the start"
    assert not torch.equal(again[0].model[2].running_mean, again[1].model[2].running_mean)
    assert not node.notices


def test_a_version_of_shares_and_whole_tensors_is_complete(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_shares_of(1, monkeypatch)
    ranks = node.begin()
    at = node.train_until(
        ranks, lambda: node.image_bytes(ranks)[0] < node.image_bytes(ranks)[1] - WEIGHT_BYTES
    )
    states = [one.state() for one in ranks]
    monkeypatch.undo()
    again = node.begin(at)
    assert_same(again, states)
    node.share(again)
    assert not node.notices


def refuse_shares_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an SMP that has compared other tensors of this rank."""
    request = WorkerSmpClient.request_shares

    def refused(link: WorkerSmpClient, key: int, members: tuple[Rank, ...]) -> tuple[Rank, ...]:
        return () if link._context.rank == rank else request(link, key, members)

    monkeypatch.setattr(WorkerSmpClient, "request_shares", refused)


def test_shares_that_do_not_fit_together_are_rejected_like_a_damaged_slot(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = node.begin()
    at = node.share(ranks)

    def differ(*_: object) -> None:
        raise RanksDiffer(key="weight", ranks=(0, 1), values=("this", "that"))

    monkeypatch.setattr("ftrun.worker.replicas.shared_state.check_replicas", differ)
    with pytest.raises(RanksDiffer):
        node.begin(at)
    page = node.ranks[0].page
    fields = (HeartbeatField.CORRUPT_SLOT, HeartbeatField.CORRUPT_RANK)
    assert [page.get(one) for one in fields] == [1, 1]
    assert page.note.startswith(f"the shares of {at} do not belong to one state: weight is this")


def test_ranks_without_checks_end_the_sharing(node: Node) -> None:
    node.settings = [
        SnapshotConfig(every=1, commit_timeout_s=60, share_replicas=rank == 0) for rank in (0, 1)
    ]
    ranks = node.begin()
    at = node.train_until(ranks, lambda: node.commands.get(CommandField.REPLICA_SHARES) < 0)
    assert node.commands.get(CommandField.COMMITTED_STEP) == at.step - 2
    at = node.train(ranks)
    assert node.commands.get(CommandField.COMMITTED_STEP) == at.step
    assert min(node.image_bytes(ranks)) > 4 * WEIGHT_BYTES
    assert_same(node.begin(at), [one.state() for one in ranks])


def test_a_rank_without_memory_for_its_share_stores_whole_tensors(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = WorkerSmpClient.request_arena

    def refused(link: WorkerSmpClient, *, image_bytes: int, **words: int) -> int:
        if link._context.rank == 1 and image_bytes < 4 * WEIGHT_BYTES:
            raise MemoryTooSmall(
                needed_bytes=1, available_bytes=0, limit="", state_bytes=1, num_ranks=2
            )
        return request(link, image_bytes=image_bytes, **words)

    monkeypatch.setattr(WorkerSmpClient, "request_arena", refused)
    ranks = node.begin()
    at = node.train_until(ranks, lambda: node.image_bytes(ranks)[0] < 3 * WEIGHT_BYTES)
    for _ in range(3):
        assert node.commands.get(CommandField.COMMITTED_STEP) == at.step
        assert node.image_bytes(ranks)[1] > 4 * WEIGHT_BYTES
        at = node.train(ranks)
    assert_same(node.begin(at), [one.state() for one in ranks])


def test_an_error_of_the_check_costs_no_more_than_two_snapshots(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = node.begin()
    at = node.share(ranks)
    monkeypatch.setattr(CheckedReplicas, "_digest", lambda *_: 1 // 0)
    for _ in range(2):
        node.train(ranks)
        assert node.commands.get(CommandField.COMMITTED_STEP) == at.step
    at = node.train(ranks)
    assert node.commands.get(CommandField.COMMITTED_STEP) == at.step
    assert min(node.image_bytes(ranks)) > 4 * WEIGHT_BYTES


def test_a_damaged_share_is_named_by_every_rank(node: Node) -> None:
    ranks = node.begin()
    at = node.share(ranks)
    arena = Arena(node.arenas()[1][-1], writable=True)
    slot = arena.find(at)
    assert slot is not None
    image = arena.image(slot)
    layout, start = parse_header(image)
    assert members_of(layout.metadata) == (0, 1)
    (entry, *_) = [one for one in layout.entries if one.part is not None]
    image[start + entry.offset + 100] ^= 1
    del image
    with pytest.raises(SnapshotCorrupt) as caught:
        node.begin(at)
    assert caught.value.rank == 1


@pytest.mark.parametrize("num_before", range(3))
def test_a_tensor_that_differs_everywhere_is_found_in_its_first_version(
    node: Node, num_before: int
) -> None:
    ranks = node.begin()
    before = node.share(ranks)
    for _ in range(num_before):
        before = node.train(ranks)
    ranks[1].drift = 1e-3
    node.train(ranks)
    assert node.commands.get(CommandField.REPLICA_SHARES) < 0
    assert node.commands.get(CommandField.COMMITTED_STEP) == before.step
    node.train(ranks)
    assert min(node.image_bytes(ranks)) > 4 * WEIGHT_BYTES
    node.ask(messages.StatusRequest())
    assert ("replicas_differ", [0, 1]) in [(one.kind, one.ranks) for one in node.notices]


def test_other_tensors_end_the_shares_until_they_were_compared(node: Node) -> None:
    ranks = node.begin()
    node.share(ranks)
    for one in ranks:
        one.optimizer.add_param_group({"params": [*one.model[1].parameters()]})
    node.train(ranks)
    assert min(node.image_bytes(ranks)) > 6 * WEIGHT_BYTES
    node.train_until(ranks, lambda: max(node.image_bytes(ranks)) < 4 * WEIGHT_BYTES)


def test_members_that_are_not_all_on_the_node_are_refused(node: Node) -> None:
    node.begin()
    hello = messages.Hello(role="worker", pid=os.getpid(), rank=0)
    channel = connect(node.socket, run_id=RUN, peer="it", hello=hello, deadline_s=TIMEOUT_S)
    try:
        for members in ([0, 2], [1, 0, 5], [1]):
            body = worker_messages.RequestShares(0, 7, members)
            assert isinstance(channel.ask(body, deadline_s=TIMEOUT_S).body, messages.Refused)
        body = worker_messages.RequestShares(0, 7, [0, 1])
        answer = channel.ask(body, deadline_s=TIMEOUT_S).body
        assert isinstance(answer, worker_messages.SharesGranted)
        assert answer.members == [0, 1]
        other = worker_messages.RequestShares(0, 8)
        assert isinstance(channel.ask(other, deadline_s=TIMEOUT_S).body, messages.Refused)
    finally:
        channel.close()
