"""A worker in this process against a real SMP, for tests of capture and restore."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.ids import RunId, Version, version
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena, verify
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.wire.transport.channel import ReceivedMessage, connect
from ftrun.worker.capture.copying import entry_view
from ftrun.worker.context import WorkerContext
from ftrun.worker.restore import early_restore
from ftrun.worker.session import Session
from ftrun.worker.state.attached import AttachedState, Skip, by_name
from ftrun.worker.state.data_position import DataPosition
from tests.launch_requests import launch_request

RUN = RunId("laziness")
TIMEOUT_S = 60.0
WIDTH = 600  # 600 x 600 floats are large enough to be copied in pieces


_UNSOLICITED = (
    worker_messages.ArenaGranted
    | smp_messages.MemoryNeeded
    | smp_messages.VersionCommitted
    | smp_messages.VersionReady
    | smp_messages.AbandonVersion
    | smp_messages.RestoreReady
    | smp_messages.SmpNotice
    | checkpoint_messages.CheckpointWritten
    | checkpoint_messages.CheckpointFailed
)


class Run:
    """One worker's context, and the SMP behind it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "smp.sock"
        self._start_smp()
        self.sessions: list[Session] = []
        self._fds: list[int] = []
        """Of the pages, which a rank's process holds until it ends."""
        try:
            self._meet()
        except BaseException:
            self._end_smp()
            raise

    def _start_smp(self, crash_at: str = "") -> None:
        self.smp = subprocess.Popen(
            [
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(self.socket), "--orphan-s", "60"),
            ],
            env={**os.environ, "FTRUN_CRASH_AT": crash_at},
        )

    def next_smp(self, crash_at: str = "") -> None:
        """Another SMP in the place of this one; it has no memory, and the run continues with it."""
        self.agent.close()
        self.smp.kill()
        self.smp.wait(TIMEOUT_S)
        self.socket.unlink(missing_ok=True)
        self._start_smp(crash_at)
        self._connect()
        self.ask(smp_messages.BeginGeneration(0, 1, [0]), self.command_fd)

    def _connect(self) -> None:
        give_up_s = clock.now_s() + TIMEOUT_S
        while not self.socket.exists():
            assert clock.now_s() < give_up_s
            clock.sleep(0.001)
        hello = messages.Hello(role="agent", pid=os.getpid())
        self.agent = connect(
            self.socket, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S
        )

    def _meet(self) -> None:
        self._connect()
        self.command_fd = self._held(create_command_page())
        self.commands, self.page = SharedPage(self.command_fd), self._heartbeat_page()
        self.ask(smp_messages.BeginGeneration(0, 1, [0]), self.command_fd)
        # A boundary waits for the SMP, however busy the machine is: none is skipped by chance.
        self.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S)
        self.group: list[smp_messages.NodeAddress] = []

    def attach(self, **given: object) -> Session:
        """The next generation's session; it restores the committed version, if there is one."""
        return self.session_of(self.next_context(), **given)

    def next_context(self, world_size: int = 1) -> WorkerContext:
        """Begin the next generation; this is rank 0 of it."""
        for one in self.sessions:
            one.close()
        generation = len(self.sessions)
        if generation:
            done = self.committed_version()
            self.page = self._heartbeat_page()
            self.ask(smp_messages.VoidAfter(done.generation, done.step))
            self.begin(generation, done, world_size)
        is_same = generation and world_size == 1
        request = launch_request(
            generation=generation,
            world_size=world_size,
            smp_socket=str(self.socket),
            restore=done if generation else None,
            restore_world_size=1,
            snapshot=self.settings,
            descriptors={"arena": self.arena_fd()} if is_same else {},
        )
        return WorkerContext(RUN, request, page=self.page, commands=self.commands)

    def session_of(
        self, context: WorkerContext, feeds: dict[str, DataPosition] | None = None, **given: object
    ) -> Session:
        if early_restore._started is None:  # as the process of a rank does when it starts
            early_restore.begin(context)
        attached = AttachedState(skip=Skip(given.pop("skip", ())))  # type: ignore[arg-type]
        attached.layout = given.pop("layout", None)  # type: ignore[assignment]
        for argument, thing in given.items():
            models = ("model", "optimizer", "scheduler")
            found = by_name(argument, thing) if argument in models else {argument: thing}
            for name, one in found.items():
                attached.add(name, one)
        made = Session(attached, feeds or {}, context, None)
        self.sessions.append(made)
        return made

    def begin(self, generation: int, restored: Version | None = None, world_size: int = 1) -> None:
        if self.group:
            self.command_fd = self._held(create_command_page())
            self.commands = SharedPage(self.command_fd)
        body = smp_messages.BeginGeneration(
            generation,
            world_size,
            list(range(world_size)),
            group=self.group,
            node_id="n0",
            parity=1,
            restored=(restored.generation, restored.step) if restored else None,
            restored_world_size=1,
        )
        self.agent.generation = generation
        self.ask(body, self.command_fd)

    def be_led(self) -> None:
        """From now on the SMP waits for a leader's decision, as on several nodes."""
        self.group = [smp_messages.NodeAddress("n0", 1, "127.0.0.1", 0, [0])]
        self.begin(0)

    def commit(self, step: int, *, take_from: int, generation: int = 0) -> None:
        """The leader's decision, once this node is ready, and the step at which to continue."""
        self.commands.set(CommandField.TAKE_FROM, take_from)
        self.agent.send(smp_messages.CommitVersion(generation, step))
        give_up_s = clock.now_s() + TIMEOUT_S
        while self.commands.get(CommandField.COMMITTED_STEP) != step:
            assert clock.now_s() < give_up_s
            clock.sleep(0.001)

    def ask(self, body: messages.AnyMessage, *fds: int) -> ReceivedMessage:
        """Ask the SMP; other messages are ignored."""
        self.agent.send(body, fds=fds)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if not isinstance(received.body, _UNSOLICITED):
                return received

    def committed_version(self) -> Version:
        """The newest seal, once it is committed."""
        newest = version(
            self.page.get(HeartbeatField.SEALED_GENERATION),
            self.page.get(HeartbeatField.SEALED_STEP),
        )
        give_up_s = clock.now_s() + TIMEOUT_S
        while self.commands.get(CommandField.COMMITTED_STEP) != newest.step:
            assert clock.now_s() < give_up_s
            clock.sleep(0.001)
        return newest

    def _heartbeat_page(self) -> SharedPage:
        return SharedPage(self._held(create_page("beat")))

    def _held(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def arena_fd(self) -> int:
        return self.ask(smp_messages.HandOverMemory()).fds[-1]

    def saved(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The newest committed step and its tensors, from the SMP's memory."""
        newest = self.committed_version()
        arena = Arena(self.arena_fd(), writable=True)
        slot = arena.find(newest)
        assert slot is not None
        layout, data = verify(arena, slot, what="test")
        whole = torch.frombuffer(data, dtype=torch.uint8)
        return newest.step, {e.name: entry_view(whole, e).clone() for e in layout.entries}

    def close(self) -> None:
        try:
            for one in self.sessions:
                one.close()
            self.agent.close()
        finally:
            self._end_smp()
            for fd in self._fds:
                os.close(fd)

    def _end_smp(self) -> None:
        self.smp.kill()
        self.smp.wait(TIMEOUT_S)
        early_restore._started = None  # what a failed test did not receive
        early_restore.release()


def states(parts: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor.clone()
        for name, part in parts.items()
        for key, tensor in part.state_dict().items()
    }


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def wide() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """With tensors large enough to get memory of their own when they are restored."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def assert_same(
    model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, its: torch.optim.Optimizer
) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, its.state[two][key]), key
