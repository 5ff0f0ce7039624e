"""Starts the process of a rank: from a standby of the zygote, or fresh if no standby can serve.

Runs in the main thread, because PDEATHSIG fires when the forking thread ends, under torch's
SubprocessContext. A `WorkerHandle` replaces torch's own SubprocessHandler.
"""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import IO, Any

import msgspec

from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.agent.launch.zygote_client import ZygoteClient, ZygoteUnavailable, send_request
from ftrun.errors import UsageError
from ftrun.journal import Journal
from ftrun.records.snapshots import FreshStartUsed
from ftrun.wire.messages.worker import LaunchRequest, Parked, encode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full disk costs the log files, and not the run."""


@dataclass(frozen=True, slots=True)
class LaunchSlot:
    """The resources of one rank, prepared before its process exists."""

    request: LaunchRequest
    page: SharedPage
    line: socket.socket | None = None
    """The agent's end of the rank's line; None: no rank may stay."""

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def stack_fd(self) -> int:
        """Descriptor of the file to which the rank writes its stacks on a signal."""
        return self.request.descriptors["stack"]


@dataclass(slots=True)
class WorkerHandle:
    """One worker, with the methods that torch's SubprocessContext calls."""

    local_rank_id: int
    child: ChildProcess
    slot: LaunchSlot
    start: str
    """`warm`, `fresh`, `stayed`: the process is that of the last generation, or `rehearsed`."""
    streams: list[IO[str]] = field(default_factory=list)
    stopped_since_s: float | None = None
    last_call: str | None = None
    """The newest collective of a stopped rank, in words; None: the observer has not read it."""
    killed_for_s: float | None = None
    exit_seen: bool = False
    parked: Parked | None = None
    """Its process is parked, and waits for another launch request."""

    @property
    def proc(self) -> "WorkerHandle":
        return self

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def state(self) -> str:
        if not self.child.is_alive:
            return "finished" if self.child.ended_with == 0 else "ended"
        if self.parked is not None:
            return "parked"
        if self.stopped_since_s is not None:
            return "stopped"
        return "running" if self.slot.page.get(HeartbeatField.FIRST_STEP_NS) else "starting"

    def poll(self) -> int | None:
        """The exit status; 0 for a parked process, which torch must neither end nor await."""
        self.child.reap()
        return 0 if self.parked is not None else self.child.status

    def wait(self, timeout: float | None = None) -> int | None:
        """As Popen.wait."""
        if self.parked is not None:
            return 0
        if not self.child.wait(3600.0 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.child.status

    def close(self, death_sig: signal.Signals | None = None) -> None:
        if self.parked is None:
            self.child.signal_group(death_sig or signal.SIGTERM)
        for stream in self.streams:
            stream.close()
        self.streams.clear()


RehearsedRanks = Callable[[LaunchRequest, range, Collection[int]], dict[int, WorkerHandle]]
"""Gives the rehearsed processes of a generation, see `Rehearsals.begin_generation`."""


def bound_to_cpus(command: list[str], local_rank: int, numa_options: object) -> list[str]:
    """The command behind `numactl`, as torch's own SubprocessHandler starts it.

    Before torch 2.9 the command of torch has it already, and torch gives no options.
    """
    if numa_options is None:
        return command
    try:
        from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as wrapped
    except ImportError:  # torch 2.9
        _log.warning("--numa-binding has no effect: this torch has no command for it")
        return command
    # Torch 2.14 has renamed it.
    index = "gpu_index" if "gpu_index" in signature(wrapped).parameters else "device_index"
    try:
        options: dict[str, Any] = {index: local_rank, "numa_options": numa_options}
        return list(wrapped(tuple(command), **options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"--numa-binding cannot bind local rank {local_rank}: {text}") from error


def _log_file(path: str) -> IO[str]:
    try:
        return open(path, "w")
    except OSError as error:
        if error.errno not in FULL:
            raise
        _log.warning("no log file %s: %s", path, error)
        return open(os.devnull, "w")


@dataclass
class WorkerStarter:
    """Starts the workers of one generation; replaces torch's `get_subprocess_handler`."""

    zygote: ZygoteClient | None
    journal: Journal
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks, in addition to torch's."""
    slots: dict[int, LaunchSlot] = field(default_factory=dict)
    handles: dict[int, WorkerHandle] = field(default_factory=dict)
    parked: dict[int, WorkerHandle] = field(default_factory=dict)
    """Parked processes that run the same local rank in this generation."""
    requests: dict[int, LaunchRequest] = field(default_factory=dict)
    """The last launch request of each local rank, with variables and arguments."""

    def __call__(
        self,
        entrypoint: str,
        args: Sequence[object],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: object = None,
        **_: Any,
    ) -> WorkerHandle:
        slot, argv = self.slots[local_rank_id], [str(arg) for arg in args]
        streams = [_log_file(path) if path else None for path in (stdout, stderr)]
        variables = {**os.environ, **env, **self.variables}
        is_python = entrypoint == sys.executable and argv[:1] == ["-u"]
        request = _launch_request(slot.request, argv[1:] if is_python else [], variables, streams)
        self.requests[local_rank_id] = request
        parked = self.parked.pop(local_rank_id, None)
        if parked is not None:
            start = "rehearsed" if parked.start == "rehearsed" else "stayed"
            request = msgspec.structs.replace(request, start=start)
            handle = WorkerHandle(local_rank_id, _woken(parked, request), slot, start)
            return self._started(handle, streams)
        child, reason = None, self._fresh_reason(entrypoint, is_python, numa_options)
        if not reason and self.zygote is not None:
            try:
                child = self.zygote.launch(request, local_rank_id)
            except ZygoteUnavailable as error:
                reason = str(error)
        start = "warm"
        if child is None:
            start = "fresh"
            self.journal.write(FreshStartUsed(reason, slot.rank))
            command = _fresh_command(entrypoint, argv, is_python=is_python)
            child = spawn(
                bound_to_cpus(command, local_rank_id, numa_options),
                name=f"rank {slot.rank}",
                variables={**variables, LAUNCH: encode_launch(slot.request).decode()},
                pass_fds=list(slot.request.descriptors.values()),
                streams=streams,
                new_session=True,
            )
        return self._started(WorkerHandle(local_rank_id, child, slot, start), streams)

    def _started(self, handle: WorkerHandle, streams: Sequence[IO[str] | None]) -> WorkerHandle:
        handle.streams = [stream for stream in streams if stream is not None]
        self.handles[handle.local_rank_id] = handle
        return handle

    def _fresh_reason(self, entrypoint: str, is_python: bool, numa_options: object) -> str:
        if self.zygote is None:
            return "--start fresh, or the zygote was disabled"
        if numa_options is not None:
            return "--numa-binding wraps the command"
        return "" if is_python else f"{entrypoint} is not this interpreter"


def _launch_request(
    request: LaunchRequest,
    argv: list[str],
    variables: dict[str, str],
    streams: Sequence[IO[str] | None],
) -> LaunchRequest:
    stdout, stderr = (
        stream.fileno() if stream is not None else number
        for stream, number in zip(streams, (1, 2), strict=True)
    )
    is_module = argv[:1] == ["-m"]
    return msgspec.structs.replace(
        request,
        start="warm",
        descriptors={**request.descriptors, "stdout": stdout, "stderr": stderr},
        argv=argv[1:] if is_module else argv,
        is_module=is_module,
        variables=variables,
        cwd=os.getcwd(),
    )


def _woken(parked: WorkerHandle, request: LaunchRequest) -> ChildProcess:
    """The parked process, with its launch request.

    If it cannot get the request it is killed, and the generation fails as by any death of a rank.
    """
    child, line = parked.child, parked.slot.line
    assert line is not None
    child.renew_watch()
    child.signal_group(signal.SIGCONT)  # it may have been stopped while it was parking
    try:
        send_request(line, encode_launch(request), list(request.descriptors.values()))
    except (OSError, UnicodeEncodeError) as error:
        _log.warning("rank %d cannot stay: %s", request.rank, error)
        child.signal_group(signal.SIGKILL)
    return child


def _fresh_command(entrypoint: str, argv: list[str], *, is_python: bool) -> list[str]:
    if not is_python:
        kind = ["command", entrypoint, *argv]
    elif argv[1] == "-m":
        kind = ["module", *argv[2:]]
    else:
        kind = ["script", *argv[1:]]
    return python_command("ftrun.worker.process.startup", *kind)
