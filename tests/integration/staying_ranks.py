"""An agent's part for ranks that stay when another rank fails: one node, with a real SMP."""

import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ftrun import clock
from ftrun.agent.launch.rendezvous import make_store
from ftrun.agent.launch.zygote_client import send_request
from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Generation, Rank, RunId, Version
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.worker import LaunchRequest, Parked, Revoke, encode_launch
from ftrun.wire.run_environment import GENERATION, LAUNCH, RUN_ID
from ftrun.wire.shared_memory.arena import SlotState, read_slot_headers
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
    create_stack_file,
)
from ftrun.wire.transport.channel import ReceivedMessage, connect

RUN = RunId("staying")
TIMEOUT_S = 60.0
SCRIPT = Path(__file__).parent / "scripts" / "small_training.py"


@dataclass
class RankProcess:
    """A process of a rank, in one generation after another."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    page: SharedPage
    generations: list[int] = field(default_factory=list)


class StayingNode:
    """Starts ranks, kills none by itself, and joins new processes to those that stay."""

    def __init__(self, folder: Path, world_size: int, *arguments: str, **variables: str) -> None:
        self.folder, self.world_size, self.arguments = folder, world_size, arguments
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.generation = -1
        self.ranks: dict[int, RankProcess] = {}
        self.parked: dict[int, Parked] = {}
        self.restored: list[Version] = []
        self._fds: list[int] = []
        self._streams: list[Any] = []
        socket_path = folder / "smp.sock"
        self._socket_path = socket_path
        self._smp = subprocess.Popen(
            [
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(socket_path), "--orphan-s", "60"),
            ]
        )
        self._await(socket_path.exists)
        hello = messages.Hello(role="agent", pid=os.getpid())
        self._agent = connect(
            socket_path, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S
        )

    def run(self, *, stays: bool = True) -> None:
        """Run to the end; after a death, the other ranks stay, or all are started again."""
        self._begin(None, staying=[])
        give_up_s = clock.now_s() + TIMEOUT_S
        while any(one.process.poll() is None for one in self.ranks.values()):
            assert clock.now_s() < give_up_s, self.output()
            clock.sleep(0.002)
            dead = [r for r, one in self.ranks.items() if one.process.poll() not in (None, 0)]
            if dead:
                codes = {self.ranks[rank].process.returncode for rank in dead}
                assert codes == {-signal.SIGKILL}, self.output()
                self.recover(dead, stays=stays)
                give_up_s = clock.now_s() + TIMEOUT_S

    def recover(self, dead: list[int], *, stays: bool) -> None:
        """Start the next generation, in which only the dead ranks have new processes."""
        living = [rank for rank in self.ranks if rank not in dead]
        staying = self.park(living) if stays else []
        for rank in living:
            if rank not in staying:
                self.kill(rank)
        assert not stays or len(staying) == len(living), f"{self.parked}\n{self.output()}"
        self._begin(self.newest(), staying=staying)

    def park(self, ranks: list[int]) -> list[int]:
        """Revoke the generation; return the ranks that are parked."""
        revoke = msgspec.json.encode(Revoke(self.generation))
        for rank in ranks:
            self.ranks[rank].line.send(revoke)
        for rank in ranks:
            line = self.ranks[rank].line
            if select.select([line], [], [], TIMEOUT_S)[0] and (data := line.recv(1 << 16)):
                self.parked[rank] = msgspec.json.decode(data, type=Parked)
        return [r for r in ranks if r in self.parked and not self.parked[r].problem]

    def kill(self, rank: int) -> None:
        self.ranks[rank].process.kill()
        self.ranks[rank].process.wait(TIMEOUT_S)

    def newest(self) -> Version:
        """The newest version that all ranks have sealed."""
        answer = self._ask(smp_messages.HandOverMemory(), kind=smp_messages.MemoryHandedOver)
        by_rank: dict[int, set[Version]] = {}
        for rank, fd in zip(answer.body.ranks, answer.fds, strict=True):
            headers = read_slot_headers(fd)
            found = {one.version for one in headers if one.state is SlotState.SEALED}
            by_rank.setdefault(rank, set()).update(found)
        answer.close()
        assert len(by_rank) == self.world_size
        return max(set.intersection(*by_rank.values()))

    def output(self) -> str:
        logs = sorted(self.folder.glob("output.*"))
        return "\n".join(f"{one.name}:\n{one.read_text()}" for one in logs)

    def losses(self) -> dict[tuple[int, int], str]:
        """By rank and step; a step that was made again had the same loss."""
        found: dict[tuple[int, int], str] = {}
        for file in sorted(self.folder.glob("loss.*")):
            rank = int(file.name.split(".")[1])
            for line in file.read_text().splitlines():
                step, loss = line.split()
                known = found.setdefault((rank, int(step)), loss)
                assert known == loss, f"rank {rank}, step {step}: {known} and then {loss}"
        return found

    def close(self) -> None:
        for one in self.ranks.values():
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait(TIMEOUT_S)
            one.line.close()
        self._agent.close()
        self._smp.kill()
        self._smp.wait(TIMEOUT_S)
        for fd in self._fds:
            os.close(fd)
        for stream in self._streams:
            stream.close()

    # --- details -----------------------------------------------------------------------------

    def _begin(self, restore: Version | None, *, staying: list[int]) -> None:
        self.generation += 1
        self._store = make_store("127.0.0.1")
        command_fd = self._kept(create_command_page())
        self.commands = SharedPage(command_fd)
        if restore is not None:
            self.restored.append(restore)
            self._ask(smp_messages.VoidAfter(restore.generation, restore.step))
        self._agent.generation = Generation(self.generation)
        ranks = list(range(self.world_size))
        pair = None if restore is None else (restore.generation, restore.step)
        self._ask(
            smp_messages.BeginGeneration(self.generation, self.world_size, ranks, restored=pair),
            command_fd,
        )
        arenas = self._arenas() if restore is not None else {}
        for rank in ranks:
            self._launch(rank, restore, command_fd, arenas.get(rank), staying)

    def _launch(
        self,
        rank: int,
        restore: Version | None,
        command_fd: int,
        arena_fd: int | None,
        staying: list[int],
    ) -> None:
        page_fd = self._kept(create_page(f"rank-{rank}"))
        descriptors = {
            "heartbeat": page_fd,
            "command": command_fd,
            "stack": self._kept(create_stack_file(str(rank))),
        }
        if arena_fd is not None:
            descriptors["arena"] = arena_fd
        request = LaunchRequest(
            Generation(self.generation),
            Rank(rank),
            self.world_size,
            agent_pid=os.getpid(),
            smp_socket=str(self._socket_path),
            restore=restore,
            snapshot=SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S),
            descriptors=descriptors,
            joins=bool(staying) and rank not in staying,
        )
        output = open(self.folder / f"output.{rank}.{self.generation}", "wb")  # noqa: SIM115
        self._streams.append(output)
        if rank in staying:
            streams = {"stdout": output.fileno(), "stderr": output.fileno()}
            request = msgspec.structs.replace(
                request,
                descriptors={**descriptors, **streams},
                variables=self._variables(rank),
            )
            found = self.ranks[rank]
            found.page = SharedPage(page_fd)
            fds = list(request.descriptors.values())
            send_request(found.line, encode_launch(request), fds)
        else:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            descriptors["line"] = theirs.fileno()
            found = self._started(rank, request, output, ours)
            theirs.close()
        found.generations.append(self.generation)

    def _started(
        self, rank: int, request: LaunchRequest, output: Any, line: socket.socket
    ) -> RankProcess:
        command = ["-u", "-m", "ftrun.worker.process.startup", "script", str(SCRIPT)]
        process = subprocess.Popen(
            [sys.executable, *command, str(self.folder), *self.arguments],
            env={**self._variables(rank), LAUNCH: encode_launch(request).decode()},
            pass_fds=list(request.descriptors.values()),
            stdout=output,
            stderr=output,
        )
        page = SharedPage(request.descriptors["heartbeat"])
        if rank in self.ranks:
            self.ranks[rank].line.close()
        self.ranks[rank] = RankProcess(process, line, page)
        return self.ranks[rank]

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            **self.variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            RUN_ID: RUN,
            GENERATION: str(self.generation),
        }

    def _arenas(self) -> dict[int, int]:
        answer = self._ask(smp_messages.HandOverMemory(), kind=smp_messages.MemoryHandedOver)
        found: dict[int, int] = {}
        for rank, fd in zip(answer.body.ranks, answer.fds, strict=True):
            found[rank] = self._kept(os.dup(fd))
        answer.close()
        return found

    def _kept(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _ask(
        self, body: messages.AnyMessage, *fds: int, kind: Any = messages.Done
    ) -> ReceivedMessage:
        """The first message of this kind; the SMP also sends others without a request."""
        self._agent.send(body, fds=fds)
        while True:
            received = self._agent.receive(deadline_s=TIMEOUT_S)
            if isinstance(received.body, kind):
                return received
            received.close()

    @staticmethod
    def _await(condition: Any) -> None:
        give_up_s = clock.now_s() + TIMEOUT_S
        while not condition():
            assert clock.now_s() < give_up_s
            clock.sleep(0.002)


def field_of(node: StayingNode, rank: int, at: HeartbeatField) -> int:
    return node.ranks[rank].page.get(at)
