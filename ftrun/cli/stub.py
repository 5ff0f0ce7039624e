"""Runs as the started process until the run ends: starts agents and forwards signals.

Runs in:  the stub, which replaces the cli. Standard library only, single-threaded.
Takes in: a run folder whose lock it holds; signals; exits of its children.
Gives:    the run's exit code.
Survives: every agent. If an agent crashes, the stub starts another, which finds the run's memory
          in the SMP.

Rule 1: A signal handler does nothing. The wakeup descriptor delivers the signal number to the
loop, which handles it. No signal is lost or handled twice.
Rule 2: The stub reaps every child, known or unknown. It is the subreaper of orphans, and as PID 1
it is their only parent. Only the stub reaps the agent, so that the agent's pid is not reused while
the stub sends signals to it.
Rule 3: When the run ends, the SMP, all descendants and the run folder are removed.
Rule 4: The stub holds duplicates of the descriptors of the run's memory and does not read them,
because agent and SMP may be killed together.
Rule 5: While snapshots may be in memory, a signal that ends the run waits until an agent listens,
because only an agent can have a last checkpoint written. If no agent runs, the stub starts one for
this purpose.
Rule 6: Before a new agent starts, all ranks of the last agent and their descendants must have
ended, because ranks behind a wrapper process do not die with their agent.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from collections import deque
from pathlib import Path

from ftrun import clock, process_tree
from ftrun.errors import ExitCode
from ftrun.linux import become_subreaper
from ftrun.wire.messages import agent_start
from ftrun.wire.run_environment import RunFolder, short_socket_path

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NEEDS_HANDLER = (signal.SIGUSR1, signal.SIGUSR2)  # they kill an agent that does not listen yet
FORWARDED = (*ENDING, *NEEDS_HANDLER, signal.SIGCONT)

MAX_AGENT_STARTS = 5
AGENT_WINDOW_S = 600.0
TRUSTED_AFTER_S = 60.0  # a forked agent that crashes sooner ends its reserve, except after SIGKILL
_PAUSES_S = (0.0, 0.1, 0.5, 2.0, 5.0)
_READY_CHECK_S = 0.05
_RESERVE_ANSWER_S = 5.0  # a fork takes 20 ms, so that a slower reserve is stopped or starved
_PREVIOUS_RANKS_WAIT_S = 30.0  # the kernel frees hundreds of GB, or a GPU, in seconds


class ReserveLink:
    """Link to the process with torch that forks agents; the first agent leaves it behind."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pidfd = -1

    def offer(self) -> socket.socket:
        """Returns the socket that the next program inherits; the caller closes its own copy."""
        self.end()
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return there

    def fork_agent(self, folder: str, variables: dict[str, str], fds: list[int]) -> int | None:
        """Returns the pid of a new agent, or None if it must be started as a program.

        `variables` are those that differ from the variables of the program. `fds` are the agent's
        end of the stub's socket, then the descriptors of the run's memory.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, contextlib.suppress(OSError, ValueError):
            with there:
                if self._socket is None or not self._is_ready() or len(fds) >= agent_start.MAX_FDS:
                    return None
                order = agent_start.encode_order(folder, variables)
                socket.send_fds(self._socket, [order], [there.fileno(), *fds])
            here.settimeout(_RESERVE_ANSWER_S)
            pid = int(here.recv(32))
            here.send(b"\0")
            return pid
        self.end()
        return None

    def end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1

    def _is_ready(self) -> bool:
        """Reads the pid that a ready reserve sends; False if none came or the reserve has ended."""
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            while pid := self._socket.recv(32):
                self._pidfd = os.pidfd_open(int(pid))
        except BlockingIOError:
            return self._pidfd >= 0
        return False


class Stub:
    """Supervises one run, from its first agent to the removal of its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._agent: int | None = None
        self._status = 0
        self._incarnation = 0
        self._lost_s = 0.0  # monotonic time at which the last agent ended; 0 if there was none
        self._starts_s: deque[float] = deque()
        self._stuck_pids: list[int] = []
        self._asked: signal.Signals | None = None
        self._held: list[signal.Signals] = []
        self._found_memory = False  # an SMP existed before this stub started an agent
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._keep_here, self._keep_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._retained_fds: list[int] = []
        self._reserve = ReserveLink()
        self._is_forked = False  # the current agent is a fork of the reserve

    @property
    def _may_hold_memory(self) -> bool:
        return bool(self._retained_fds) or self._found_memory

    def run(self) -> int:
        self._prepare()
        self._found_memory = self._folder.smp_socket.exists()
        self._start_agent()
        while True:
            self._turn(timeout_s=_READY_CHECK_S if self._held else None)
            if self._agent is not None:
                continue
            code = self._decide()
            if code is not None:
                self._free()
                return code

    def _prepare(self) -> None:
        become_subreaper()
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _start_agent(self) -> None:
        self._folder.agent_socket.unlink(missing_ok=True)
        self._folder.crash_mark.unlink(missing_ok=True)
        self._starts_s.append(clock.now_s())
        self._take_state_to_retain()
        variables = {
            process_tree.MARK: process_tree.mark_of(self._folder.path),
            agent_start.INCARNATION: str(self._incarnation),
            agent_start.STUB_PID: str(os.getpid()),
            agent_start.AGENT_LOST_S: str(self._lost_s),
            agent_start.STUCK_PIDS: agent_start.encode_numbers(self._stuck_pids),
        }
        fds = [self._keep_there.fileno(), *self._retained_fds]
        forked = self._reserve.fork_agent(str(self._folder.path), variables, fds)
        self._is_forked = forked is not None
        self._agent = self._spawn_agent(variables) if forked is None else forked

    def _spawn_agent(self, variables: dict[str, str]) -> int:
        command = python_command("ftrun.agent", str(self._folder.path))
        command.insert(1, "-u")  # as torchrun starts ranks; ranks are forks of this program
        with self._reserve.offer() as for_reserve:
            variables = {
                **os.environ,
                **variables,
                agent_start.STUB_SOCKET: str(self._keep_there.fileno()),
                agent_start.RETAINED_FDS: agent_start.encode_numbers(self._retained_fds),
                agent_start.RESERVE_SOCKET: str(for_reserve.fileno()),
            }
            inherited = [*self._retained_fds, self._keep_there.fileno(), for_reserve.fileno()]
            for fd in inherited:
                os.set_inheritable(fd, True)
            # SIGINT is blocked until the agent can handle it; an earlier one would print a
            # traceback.
            pid = os.posix_spawn(
                command[0], command, variables, setsid=True, setsigmask=[signal.SIGINT]
            )
            for fd in inherited:
                os.set_inheritable(fd, False)
        return pid

    def _take_state_to_retain(self) -> None:
        """Keeps only the newest descriptors from the agent, its own state first (Rule 4)."""
        self._keep_here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                _, fds, _, _ = socket.recv_fds(self._keep_here, 1, agent_start.MAX_FDS)
                for fd in self._retained_fds:
                    os.close(fd)
                self._retained_fds = list(fds)

    def _turn(self, *, timeout_s: float | None) -> None:
        watched: list[int] = [self._read_fd, self._keep_here.fileno()]
        select.select(watched, [], [], timeout_s)
        self._take_state_to_retain()
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read_fd, 4096)
        for number in numbers:
            if number != signal.SIGCHLD:
                self._take(signal.Signals(number))
        for pid, status in process_tree.reap_all():
            if pid == self._agent:
                self._agent, self._status = None, status
        if self._agent is not None and self._folder.agent_socket.exists():
            for number in self._held:
                os.kill(self._agent, number)
            self._held.clear()

    def _take(self, number: signal.Signals) -> None:
        is_for_ranks = number in ENDING and self._is_for_ranks(number)
        if number in ENDING and self._asked is None and not is_for_ranks:
            self._asked = number
        is_last = number in ENDING and self._may_hold_memory
        if number in NEEDS_HANDLER or is_for_ranks or is_last:
            self._held.append(number)  # sent in the same turn if an agent listens
        elif self._agent is not None:
            os.kill(self._agent, number)

    def _is_for_ranks(self, number: signal.Signals) -> bool:
        """Whether the agent forwards it to the ranks."""
        names = self._folder.spec_value("profile", "stop", "forward_signals") or []
        return number.name in names or number.name.removeprefix("SIG") in names

    def _decide(self) -> int | None:
        """Handles the end of the agent: returns the exit code, or None if another agent starts."""
        code = os.waitstatus_to_exitcode(self._status)
        has_crashed = code < 0 or (code == ExitCode.BUG and self._folder.crash_mark.exists())
        if not has_crashed:
            return code
        if self._asked is not None and not self._may_hold_memory:
            return 128 + self._asked
        now_s = clock.now_s()
        while self._starts_s and now_s - self._starts_s[0] > AGENT_WINDOW_S:
            self._starts_s.popleft()
        how = f"was killed by {_signal_name(-code)}" if code < 0 else "ended with a bug in ftrun"
        if len(self._starts_s) > MAX_AGENT_STARTS:
            return self._give_up(how)
        self._incarnation += 1
        self._lost_s = now_s
        is_its_fault = self._is_forked and code != -signal.SIGKILL
        if is_its_fault and self._starts_s and now_s - self._starts_s[-1] < TRUSTED_AFTER_S:
            self._reserve.end()
        _report(f"ftrun: the agent {how}; starting another, {self._what_for()}")
        self._stuck_pids = process_tree.end_children(  # Rule 6
            term_first=False, spare=process_tree.PERSISTENT, kill_s=_PREVIOUS_RANKS_WAIT_S
        )
        for pid in self._stuck_pids:
            _report(f"ftrun: {process_tree.explain_stuck(pid)}")
        self._pause(pause_s(len(self._starts_s)))
        if self._asked is not None:
            if not self._may_hold_memory:
                return 128 + self._asked
            if self._asked not in self._held:
                self._held.append(self._asked)
        self._start_agent()
        return None

    def _give_up(self, how: str) -> int:
        _report(
            f"Error: ftrun's agent {how}, for the {len(self._starts_s)}th time within "
            f"{AGENT_WINDOW_S / 60:.0f} minutes; the run ends. If this machine kills it for lack "
            "of memory (see dmesg), give it more; else please report this"
        )
        if self._may_hold_memory and self._folder.smp_socket.exists():
            self._folder.keep_mark.touch()
            _report(
                "ftrun: the SMP keeps the snapshots for a while: start the same command again with "
                f"--run-id {self._folder.run_id}, or free them with ftrun stop {self._folder.name}"
            )
        return ExitCode.BUG

    def _what_for(self) -> str:
        if self._asked is None:
            return "which continues from the last snapshot"
        return f"which ends the run by {self._asked.name} and keeps its last snapshot if it can"

    def _pause(self, seconds: float) -> None:
        until_s = clock.now_s() + seconds
        while self._asked is None and (left_s := until_s - clock.now_s()) > 0:
            self._turn(timeout_s=left_s)

    def _free(self) -> None:
        self._reserve.end()
        if self._folder.keep_mark.exists():
            process_tree.end_children(term_first=True, spare={"ftrun-smp"})
            return
        if self._folder.smp_socket.exists():
            from ftrun.cli.runs import shut_down_smp  # only here, because the stub is small

            shut_down_smp(self._folder)
        process_tree.end_children(term_first=True)
        self._folder.remove()


def pause_s(recent_starts: int) -> float:
    return _PAUSES_S[min(max(recent_starts, 1), len(_PAUSES_S)) - 1]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            with short_socket_path(path) as short:
                sock.connect(short)
        except BlockingIOError:  # its queue is full, so a process listens
            return True
        except OSError:
            return False
    return True


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns `python -m module`, which imports no module from the current folder.

    A file such as types.py in that folder would shadow the standard library. Exception: a checkout
    that is not installed is found through the current folder only.
    """
    root = Path(__file__).parents[2]
    elsewhere = [Path(entry) for entry in sys.path if entry and Path(entry) != Path.cwd()]
    needs_folder = root == Path.cwd() and root not in elsewhere
    return [sys.executable, *([] if needs_folder else ["-P"]), "-m", module, *arguments]


def main(arguments: list[str]) -> int:
    folder = RunFolder(Path(arguments[0]))
    # Only this process holds the lock: a run is alive exactly while its stub is.
    os.set_inheritable(int(arguments[1]), False)
    return Stub(folder).run()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _nothing(_number: int, _frame: object) -> None:
    """The wakeup descriptor delivers the signal."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
