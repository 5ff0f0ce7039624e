"""A training that loses its processes at some step ends like an undisturbed one: bit for bit."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Version, version
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.wire.transport.channel import Channel, connect
from tests.launch_requests import launch_request, launch_variables

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
RUN = "session-test"
TIMEOUT_S = 60.0
WAIT_S = 600.0
SETTINGS = SnapshotConfig(every=1, commit_timeout_s=60)
"""No boundary is skipped because the machine is busy."""


class Node:
    """A reduced agent: an SMP, pages, arenas, and workers as plain processes.

    Args:
        first: words between the interpreter and the script.
    """

    def __init__(self, folder: Path, world_size: int, first: Sequence[str] = ()) -> None:
        self.folder = folder
        self.world_size = world_size
        self.first = first
        self.generation = -1
        self.command_fd = create_command_page()
        self.commands = SharedPage(self.command_fd)
        self.heartbeats: list[SharedPage] = []
        self.arenas: dict[int, int] = {}
        self.socket = folder / "smp.sock"
        self._store: TCPStore | None = None
        self._smp = subprocess.Popen(
            [
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(self.socket), "--orphan-s", "60"),
            ]
        )
        try:
            self.agent = self._connect()
        except BaseException:
            self._smp.kill()
            self._smp.wait()
            raise

    def _connect(self) -> Channel:
        give_up_s = clock.now_s() + TIMEOUT_S
        while not self.socket.exists():
            assert clock.now_s() < give_up_s, "the SMP does not listen"
            clock.sleep(0.005)
        hello = messages.Hello(role="agent", pid=os.getpid())
        return connect(self.socket, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S)

    def ask(self, body: messages.AnyMessage, *fds: int) -> messages.AnyMessage:
        """Ask the SMP, and keep the messages that it sends before the answer."""
        self.agent.send(body, fds=fds, deadline_s=TIMEOUT_S)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if isinstance(received.body, worker_messages.ArenaGranted):
                self.arenas[received.body.rank] = received.fds[0]
            elif not isinstance(
                received.body, smp_messages.MemoryNeeded | smp_messages.VersionCommitted
            ):
                return received.body

    def restore_point(self) -> Version | None:
        inventory = self.ask(smp_messages.InventoryRequest())
        assert isinstance(inventory, smp_messages.Inventory)
        held = [
            {version(o.generation, o.step) for o in inventory.offers if o.rank == rank}
            for rank in range(self.world_size)
        ]
        return max(set.intersection(*held), default=None)

    def run(self, script: str, *arguments: str) -> list[int]:
        """A generation from its start to the exit of all ranks; their exit codes."""
        self.generation += 1
        if self.world_size > 1:
            # Kept here, as by an agent: no other process can take the port before a rank does.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        restore = self.restore_point()
        if restore is not None:
            self.ask(smp_messages.VoidAfter(restore.generation, restore.step))
        ranks = list(range(self.world_size))
        self.ask(
            smp_messages.BeginGeneration(self.generation, self.world_size, ranks), self.command_fd
        )
        fds = [create_page(f"heartbeat-{rank}") for rank in ranks]
        self.heartbeats = [SharedPage(fd) for fd in fds]
        workers = [
            subprocess.Popen(
                [sys.executable, *self.first, SCRIPTS / script, self.folder, *arguments],
                env=self._environment(rank, fds[rank], restore),
                pass_fds=[fds[rank], self.command_fd, *self.arenas.values()],
            )
            for rank in ranks
        ]
        try:
            return self._wait(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    def _wait(self, workers: list[subprocess.Popen[bytes]]) -> list[int]:
        """As an agent does: the first failure ends all."""
        codes = []
        for worker in workers:
            if any(codes):
                worker.kill()
            codes.append(worker.wait(WAIT_S))
        return codes

    def _environment(self, rank: int, heartbeat_fd: int, restore: Version | None) -> dict[str, str]:
        made = {
            **os.environ,
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port if self._store is not None else 0),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self.generation),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        request = launch_request(
            generation=self.generation,
            rank=rank,
            world_size=self.world_size,
            smp_socket=str(self.socket),
            restore=restore,
            snapshot=SETTINGS,
            descriptors={"heartbeat": heartbeat_fd, "command": self.command_fd},
        )
        if rank in self.arenas:
            request.descriptors["arena"] = self.arenas[rank]
        return {**made, **launch_variables(RUN, request)}

    def losses(self, rank: int = 0) -> dict[int, str]:
        """Loss by step, the later generation's if a step was repeated; all must agree."""
        found: dict[int, str] = {}
        for generation in range(self.generation + 1):
            path = self.folder / f"loss.{rank}.{generation}"
            for line in path.read_text().splitlines() if path.exists() else ():
                step, loss = line.split()
                assert found.setdefault(int(step), loss) == loss, f"step {step} differs"
        return found

    def end(self, rank: int = 0) -> tuple[int, list[torch.Tensor]]:
        step, tensors = torch.load(self.folder / f"end.{rank}.pt", weights_only=True)
        return step, tensors

    def close(self) -> None:
        self.agent.close()
        self._smp.terminate()
        self._smp.wait(TIMEOUT_S)
        for fd in (self.command_fd, *self.arenas.values()):
            os.close(fd)


@contextmanager
def node(folder: Path, world_size: int = 1, first: Sequence[str] = ()) -> Iterator[Node]:
    folder.mkdir()
    made = Node(folder, world_size, first)
    try:
        yield made
    finally:
        made.close()


def assert_same_as_undisturbed(
    tmp_path: Path,
    *switches: str,
    world_size: int = 1,
    die_at: tuple[int, ...] = (7,),
    first: Sequence[str] = (),
) -> None:
    with (
        node(tmp_path / "calm", world_size, first) as undisturbed,
        node(tmp_path / "hit", world_size, first) as hit,
    ):
        assert undisturbed.run("small_training.py", "3", *switches) == [0] * world_size
        for step in die_at:
            assert any(hit.run("small_training.py", "3", *switches, f"die={step}"))
        assert hit.run("small_training.py", "3", *switches) == [0] * world_size
        lost = 4 if "accumulate" in switches else 2  # at most two snapshots
        restored = hit.heartbeats[0].get(HeartbeatField.RESTORED_STEP)
        assert restored >= sum(die_at) - lost * len(die_at)
        for rank in range(world_size):
            assert hit.losses(rank) == undisturbed.losses(rank)
            step, tensors = hit.end(rank)
            undisturbed_step, undisturbed_tensors = undisturbed.end(rank)
            assert step == undisturbed_step
            assert all(torch.equal(a, b) for a, b in zip(tensors, undisturbed_tensors, strict=True))


def test_one_process_with_shuffled_data_resumes_bitwise(tmp_path: Path) -> None:
    assert_same_as_undisturbed(tmp_path, "batchnorm", die_at=(1, 13))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("workers", marks=pytest.mark.full),
        pytest.param("persistent", marks=pytest.mark.full),
        pytest.param("stateful", marks=pytest.mark.full),
    ],
)
def test_each_kind_of_loader_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    switches = ("workers", "persistent") if kind == "persistent" else (kind,)
    assert_same_as_undisturbed(tmp_path, *switches, die_at=(14,))


@pytest.mark.full  # tests/chaos/test_crash_points.py kills ranks of such a training at any point
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_resumes_bitwise(tmp_path: Path, world_size: int) -> None:
    assert_same_as_undisturbed(tmp_path, "ddp", world_size=world_size, die_at=(2, 2))


@pytest.mark.full
def test_ddp_wrapped_after_attach_resumes_bitwise(tmp_path: Path) -> None:
    assert_same_as_undisturbed(tmp_path, "ddp", "late-ddp", "batchnorm", world_size=3)


@pytest.mark.full
def test_fsdp_resumes_bitwise(tmp_path: Path) -> None:
    assert_same_as_undisturbed(tmp_path, "fsdp", world_size=2)
