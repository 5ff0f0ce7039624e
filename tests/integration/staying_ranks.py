"""Ranks that stay when another rank fails; run by test_staying_ranks.py.

This process plays the agent of one node: it starts ranks from a zygote, with a real SMP, parks
those that live, and joins new processes to them.

    python -m tests.integration.staying_ranks FOLDER CASE... -> one line of JSON per case
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.rendezvous import make_store
from ftrun.agent.launch.zygote_client import ZygoteClient, send_request
from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Generation, Rank, RunId, Version
from ftrun.journal import Journal
from ftrun.linux import become_subreaper
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.wire.messages.worker import LaunchRequest, Parked, Revoke, encode_launch
from ftrun.wire.run_environment import GENERATION, RUN_ID
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


@dataclass(frozen=True)
class Job:
    """One training, and how it is disturbed."""

    world_size: int
    arguments: tuple[str, ...]
    kills: tuple[str, ...]
    """RANK:STEP:PLACE, as the script takes them."""
    rehearses: tuple[int, ...] = ()
    """Ranks that are rehearsed after three steps, and killed when that is done."""


JOBS = {
    "ddp": Job(2, ("1", "ddp", "batchnorm", "workers", "long"), ("1:5:backward", "0:9:optimizer")),
    "fsdp": Job(2, ("1", "fsdp", "long"), ("1:4:forward",)),
    "rehearsed": Job(2, ("1", "ddp", "long", "pace=0.1"), (), (1,)),
    "accumulate": Job(
        3, ("1", "ddp", "amp", "accumulate", "long"), ("2:3:backward", "0:8:forward", "1:8:forward")
    ),
    "fsdp-again": Job(2, ("1", "fsdp", "long"), tuple(f"1:{n}:backward" for n in range(3, 19, 3))),
    "late-ddp": Job(3, ("1", "ddp", "late-ddp", "batchnorm", "long"), ("1:3:optimizer",)),
    "stateful": Job(2, ("1", "ddp", "stateful", "workers", "long"), ("1:7:end",)),
    "persistent": Job(2, ("3", "ddp", "persistent", "workers"), ("1:7:end", "1:13:forward")),
}


@dataclass
class RankProcess:
    """A process of a rank, in one generation after another."""

    child: ChildProcess
    line: socket.socket
    page: SharedPage
    generations: list[int] = field(default_factory=list)


class StayingNode:
    """Starts ranks, kills none by itself, and joins new processes to those that stay."""

    def __init__(self, folder: Path, job: Job, zygote: ZygoteClient) -> None:
        folder.mkdir()
        self._folder, self._job, self._zygote = folder, job, zygote
        self._generation = -1
        self._ranks: dict[int, RankProcess] = {}
        self._rehearsed: dict[int, RankProcess] = {}
        self._parked: list[tuple[int, Parked]] = []
        self._restored: list[Version] = []
        self._fds: list[int] = []
        self._streams: list[Any] = []
        self._socket_path = folder / "smp.sock"
        command = [sys.executable, "-m", "ftrun.smp", "--run-id", RUN, "--orphan-s", "60"]
        self._smp = subprocess.Popen([*command, "--socket", str(self._socket_path)])
        _await(self._socket_path.exists)
        hello = messages.Hello(role="agent", pid=os.getpid())
        self._agent = connect(
            self._socket_path, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S
        )

    def run(self, *, is_disturbed: bool) -> dict[str, Any]:
        """Run to the end; after a death the other ranks stay."""
        self._arguments = [*self._job.arguments]
        self._arguments += [f"kill={one}" for one in self._job.kills] if is_disturbed else []
        self._begin(None, staying=[])
        give_up_s = clock.now_s() + TIMEOUT_S
        left = list(self._job.rehearses) if is_disturbed else []
        while not all(one.child.reap() for one in self._ranks.values()):
            assert clock.now_s() < give_up_s, self.output()
            clock.sleep(0.002)
            steps = [one.page.get(HeartbeatField.STEP) for one in self._ranks.values()]
            if left and min(steps) >= 3:
                rank = left.pop()
                self._rehearse(rank)
                self._kill(rank)
            dead = [r for r, one in self._ranks.items() if one.child.reap() and one.child.status]
            if dead:
                codes = {self._ranks[rank].child.status for rank in dead}
                assert codes == {-signal.SIGKILL}, self.output()
                self._recover(dead)
                give_up_s = clock.now_s() + TIMEOUT_S
        return self._outcome()

    def output(self) -> str:
        logs = sorted(self._folder.glob("output.*"))
        return "\n".join(f"{one.name}:\n{one.read_text()}" for one in logs)

    def close(self) -> None:
        for one in (*self._ranks.values(), *self._rehearsed.values()):
            one.child.signal(signal.SIGKILL)
            one.child.wait(TIMEOUT_S)
            one.line.close()
        self._agent.close()
        self._smp.kill()
        self._smp.wait(TIMEOUT_S)
        for fd in self._fds:
            os.close(fd)
        for stream in self._streams:
            stream.close()

    # --- details -----------------------------------------------------------------------------

    def _outcome(self) -> dict[str, Any]:
        digests = []
        for rank in range(self._job.world_size):
            step, tensors = torch.load(self._folder / f"end.{rank}.pt")
            parts = [one.contiguous().reshape(-1).view(torch.uint8).numpy() for one in tensors]
            digests.append([step, hashlib.sha256(b"".join(map(bytes, parts))).hexdigest()])
        return {
            "losses": self._losses(),
            "digests": digests,
            "parked": [[rank, msgspec.to_builtins(one)] for rank, one in self._parked],
            "restored": [str(one) for one in self._restored],
            "generations": {r: one.generations for r, one in self._ranks.items()},
        }

    def _losses(self) -> dict[str, str]:
        """By rank and step; a step that was made again had the same loss."""
        found: dict[str, str] = {}
        for file in sorted(self._folder.glob("loss.*")):
            for line in file.read_text().splitlines():
                step, loss = line.split()
                key = f"rank {file.name.split('.')[1]} step {step}"
                known = found.setdefault(key, loss)
                assert known == loss, f"{key}: {known} and then {loss}"
        return found

    def _recover(self, dead: list[int]) -> None:
        """Start the next generation, in which only the dead ranks have new processes."""
        staying = self._park([rank for rank in self._ranks if rank not in dead])
        restore = self._newest()
        for rank in self._rehearsed.keys() & set(dead):
            self._ranks[rank].line.close()
            self._ranks[rank] = self._rehearsed.pop(rank)
            staying.append(rank)
        for rank, parked in self._parked:
            if parked.generation == self._generation:
                assert parked.first_step <= restore.step <= parked.last_step, (rank, parked)
        self._begin(restore, staying=staying)

    def _park(self, ranks: list[int]) -> list[int]:
        """Revoke the generation; return the ranks that are parked and have not died."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._ranks[rank].line.send(msgspec.json.encode(Revoke(self._generation)))
        return [rank for rank in ranks if self._await_parked(rank, self._ranks[rank])]

    def _await_parked(self, rank: int, found: RankProcess) -> bool:
        assert select.select([found.line], [], [], TIMEOUT_S)[0], self.output()
        data = b""
        with contextlib.suppress(OSError):
            data = found.line.recv(1 << 16)
        if not data:
            assert found.child.wait(TIMEOUT_S)
            assert found.child.status == -signal.SIGKILL, (rank, self.output())
            return False
        parked = msgspec.json.decode(data, type=Parked)
        assert not parked.problem, (rank, parked, self.output())
        self._parked.append((rank, parked))
        return True

    def _kill(self, rank: int) -> None:
        self._ranks[rank].child.signal(signal.SIGKILL)
        assert self._ranks[rank].child.wait(TIMEOUT_S)

    def _newest(self) -> Version:
        """The newest version that all ranks have sealed."""
        by_rank: dict[int, set[Version]] = {}
        for rank, fd in self._arenas():
            headers = read_slot_headers(fd)
            found = {one.version for one in headers if one.state is SlotState.SEALED}
            by_rank.setdefault(rank, set()).update(found)
        assert len(by_rank) == self._job.world_size
        return max(set.intersection(*by_rank.values()))

    def _rehearse(self, rank: int) -> None:
        """Start a process that is ready to replace a rank, and wait until it is parked."""
        request = self._request(rank, self._newest(), rehearses=True)
        self._rehearsed[rank] = self._started(rank, request, f"rehearsed.{rank}")
        assert self._await_parked(rank, self._rehearsed[rank])

    def _begin(self, restore: Version | None, *, staying: list[int]) -> None:
        self._generation += 1
        self._store = make_store("127.0.0.1")
        self._command_fd = self._kept(create_command_page())
        if restore is not None:
            self._restored.append(restore)
            self._ask(smp_messages.VoidAfter(restore.generation, restore.step))
        self._agent.generation = Generation(self._generation)
        ranks = list(range(self._job.world_size))
        pair = None if restore is None else (restore.generation, restore.step)
        body = smp_messages.BeginGeneration(self._generation, len(ranks), ranks, restored=pair)
        self._ask(body, self._command_fd)
        self._zygote.want(len(ranks))
        for rank in ranks:
            self._launch(rank, restore, staying)

    def _launch(self, rank: int, restore: Version | None, staying: list[int]) -> None:
        request = self._request(rank, restore, joins=bool(staying) and rank not in staying)
        name = f"{rank}.{self._generation}"
        if rank in staying:
            found = self._ranks[rank]
            found.page = SharedPage(request.descriptors["heartbeat"])
            request = self._with_streams(request, name)
            send_request(found.line, encode_launch(request), list(request.descriptors.values()))
        else:
            if rank in self._ranks:
                self._ranks[rank].line.close()
            found = self._ranks[rank] = self._started(rank, request, name)
        found.generations.append(self._generation)

    def _request(self, rank: int, restore: Version | None, **changes: Any) -> LaunchRequest:
        descriptors = {
            "heartbeat": self._kept(create_page(f"rank-{rank}")),
            "command": self._command_fd,
            "stack": self._kept(create_stack_file(str(rank))),
        }
        if restore is not None:
            descriptors["arena"] = dict(self._arenas())[rank]
        made = LaunchRequest(
            Generation(self._generation),
            Rank(rank),
            self._job.world_size,
            agent_pid=os.getpid(),
            smp_socket=str(self._socket_path),
            restore=restore,
            snapshot=SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S),
            descriptors=descriptors,
            argv=[str(SCRIPT), str(self._folder), *self._arguments],
            variables=self._variables(rank),
            cwd=os.getcwd(),
        )
        return msgspec.structs.replace(made, **changes)

    def _with_streams(self, request: LaunchRequest, name: str) -> LaunchRequest:
        output = open(self._folder / f"output.{name}", "wb")  # noqa: SIM115
        self._streams.append(output)
        streams = {"stdout": output.fileno(), "stderr": output.fileno()}
        return msgspec.structs.replace(request, descriptors={**request.descriptors, **streams})

    def _started(self, rank: int, request: LaunchRequest, name: str) -> RankProcess:
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = {**request.descriptors, "line": theirs.fileno()}
            request = msgspec.structs.replace(request, descriptors=descriptors)
            child = self._zygote.launch(self._with_streams(request, name), rank)
        self._zygote.refill()
        return RankProcess(child, line, SharedPage(descriptors["heartbeat"]))

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._job.world_size),
            "LOCAL_WORLD_SIZE": str(self._job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            RUN_ID: RUN,
            GENERATION: str(self._generation),
        }

    def _arenas(self) -> list[tuple[int, int]]:
        answer = self._ask(smp_messages.HandOverMemory(), kind=smp_messages.MemoryHandedOver)
        found = [
            (rank, self._kept(os.dup(fd)))
            for rank, fd in zip(answer.body.ranks, answer.fds, strict=True)
        ]
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


def _await(condition: Callable[[], bool]) -> None:
    give_up_s = clock.now_s() + TIMEOUT_S
    while not condition():
        assert clock.now_s() < give_up_s
        clock.sleep(0.002)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    become_subreaper()
    zygote = ZygoteClient(ZygoteSettings(str(folder), [], [], []), Journal(folder / "journal"))
    zygote.start()
    try:
        for name in sys.argv[2:]:
            found = {}
            for kind in ("plain", "disturbed"):
                node = StayingNode(folder / f"{name}-{kind}", JOBS[name], zygote)
                try:
                    found[kind] = node.run(is_disturbed=kind == "disturbed")
                finally:
                    node.close()
            print(json.dumps({"job": name, **found}), flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
