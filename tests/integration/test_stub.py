"""The started process survives its agents, leaves nothing behind, and works as PID 1."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 150.0
MAX_STUB_BYTES = 20_000_000

WAITING_SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path

here = Path(sys.argv[1])
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if "daemon" in sys.argv:
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (here / "daemon").write_text(str(daemon.pid))
if "renamed" in sys.argv:
    Path("/proc/self/comm").write_text("other")
if "overwrites" in sys.argv:
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
part = here / f"part-{rank}-{generation}"
part.write_text(str(os.getpid()))
part.rename(here / f"alive-{rank}-{generation}")
give_up_s = time.monotonic() + 120
while not (here / "go").exists() and time.monotonic() < give_up_s:
    time.sleep(0.02)
print(f"rank {rank} generation {generation} ends", flush=True)
if "daemon" in sys.argv:
    os._exit(0)
"""


A_BUG_IN_THE_CLUSTER_THREAD = """
import importlib.util, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "ftrun.agent.cluster.connections":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), plant(module))
        return spec

def plant(module):
    takes = module.ClusterConnections._take_inbox
    def take_inbox(self):
        if os.path.exists("break"):
            os.unlink("break")
            raise AttributeError("a bug")
        takes(self)
    module.ClusterConnections._take_inbox = take_inbox

sys.meta_path.insert(0, Finder())
"""


class Run:
    """One started ftrun, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        words: tuple[str, ...] = (),
        script: str = "train.py",
    ) -> None:
        self.folder = folder
        # Not the folder itself: a folder named ftrun there could hide an editable installation.
        self.runtime = folder / "runtime"
        self.runtime.mkdir()
        self.variables = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        (folder / "train.py").write_text(WAITING_SCRIPT)
        self.command = [sys.executable, "-m", "ftrun", "--run-id", "mine", *flags]
        self.words = [script, str(folder), *words]
        self.out, self.err = folder / "out", folder / "err"
        self.start()

    def start(self, *before: str) -> None:
        # Files, not pipes: an SMP that survives its run would hold a pipe open.
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*before, *self.command, *self.words],
                cwd=self.folder,
                env=self.variables,
                stdout=out,
                stderr=err,
            )

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ftrun", *words]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def status(self) -> dict[str, Any]:
        asked = self.ask("status", "mine", "--json")
        assert asked.returncode == 0, asked.stderr
        found: dict[str, Any] = json.loads(asked.stdout)
        return found

    def processes(self) -> dict[str, int]:
        """The pids of ftrun's own processes, once all exist."""
        found: dict[str, Any] = {}

        def are_there() -> bool:
            found.update(self.status()["processes"])
            return all(found.values())

        wait_for(are_there)
        return found

    def wait_alive(self, generation: int, rank: int = 0) -> int:
        """Wait until a rank runs; its pid."""
        path = self.folder / f"alive-{rank}-{generation}"
        wait_for(lambda: path.exists() or self.process.poll() is not None)
        assert path.exists(), self.err.read_text()
        return int(path.read_text())

    def finish(self) -> tuple[int, str, str]:
        code = self.process.wait(timeout=DEADLINE_S)
        return code, self.out.read_text(), self.err.read_text()

    def nothing_is_left(self) -> bool:
        return not (self.runtime / "ftrun" / "mine").exists() and not self.pids()

    def pids(self) -> dict[str, int]:
        """The pids of all processes of ftrun that use the run's folder, by their names."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.runtime) in (entry / "cmdline").read_text():
                    found[(entry / "comm").read_text().strip()] = int(entry.name)
        return found

    def journal(self, kind: str, node: str = "") -> list[dict[str, Any]]:
        path = self.folder / "ftrun-logs" / "mine" / node / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in found if line["kind"] == kind]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        if not self.nothing_is_left():
            self.ask("stop", "mine")


def wait_for(is_so: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def make(*flags: str, words: tuple[str, ...] = (), script: str = "train.py") -> Run:
        started.append(Run(tmp_path, *flags, words=words, script=script))
        return started[-1]

    yield make
    for run in started:
        run.close()


def test_killed_agent_is_followed_by_another(start: Callable[..., Run]) -> None:
    run = start()
    rank = run.wait_alive(0)
    agent = run.processes()["agent"]
    os.kill(agent, signal.SIGKILL)
    run.wait_alive(1)
    assert not is_alive(rank)
    assert run.status()["processes"]["agent"] != agent
    (run.folder / "go").touch()
    code, out, err = run.finish()
    assert (code, out) == (0, "rank 0 generation 1 ends\n")
    assert "the agent was killed by SIGKILL; starting another" in err
    assert run.nothing_is_left()


@pytest.mark.full
def test_a_bug_in_the_cluster_thread_ends_the_agent_and_another_one_follows(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planted := tmp_path / "planted").mkdir()
    (planted / "sitecustomize.py").write_text(A_BUG_IN_THE_CLUSTER_THREAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(planted), os.environ["PYTHONPATH"]])
                       if os.environ.get("PYTHONPATH") else str(planted))  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    run = start("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--node-id", "n0",
                "--set", "nodes.last_call_timeout_s=0.1")  # fmt: skip
    rank = run.wait_alive(0)
    broken_s = time.monotonic()
    (tmp_path / "break").touch()
    run.wait_alive(1)
    assert not is_alive(rank)
    (bug,) = run.journal("internal_error", "n0")
    # Torch would wait 30 s for the suspended rank.
    assert bug["monotonic_s"] - broken_s < 25.0
    (tmp_path / "go").touch()
    code, out, err = run.finish()
    assert (code, out) == (0, "rank 0 generation 1 ends\n")
    assert "the cluster thread has ended" in err
    # The stub prints this for exit code 70 only.
    assert "the agent ended with a bug in ftrun; starting another" in err


def kinds_of_descriptors(pid: int) -> list[str]:
    """The open descriptors of a process, without the numbers of sockets and pipes."""
    folder = Path(f"/proc/{pid}/fd")
    return sorted(os.readlink(fd).partition("[")[0] for fd in folder.iterdir())


@pytest.mark.full
def test_agents_are_forked_from_the_reserve_and_need_none(start: Callable[..., Run]) -> None:
    run = start()

    def starts() -> list[bool]:
        return [line["is_forked"] for line in run.journal("agent_started")]

    rank = run.wait_alive(0)
    wait_for(lambda: "ftrun-reserve" in run.pids())
    first = run.pids()
    descriptors = kinds_of_descriptors(rank)
    # The reserve's death costs the run nothing, and the next agent is started as a program.
    os.kill(first["ftrun-reserve"], signal.SIGKILL)
    wait_for(lambda: not is_alive(first["ftrun-reserve"]))
    assert is_alive(rank)
    os.kill(first["ftrun-agent"], signal.SIGKILL)
    run.wait_alive(1)
    assert starts() == [False, False]
    # Another reserve exists; an agent is forked from it, and its ranks are as usual.
    wait_for(lambda: "ftrun-reserve" in run.pids())
    second = run.pids()
    os.kill(second["ftrun-agent"], signal.SIGKILL)
    rank = run.wait_alive(2)
    assert starts() == [False, False, True]
    third = run.pids()
    assert third["ftrun-reserve"] == second["ftrun-reserve"]
    assert kinds_of_descriptors(rank) == descriptors
    # SIGKILL comes from outside: the next agent is a fork as well.
    os.kill(third["ftrun-agent"], signal.SIGKILL)
    run.wait_alive(3)
    assert starts() == [False, False, True, True]
    # A fork that crashes soon is not followed by another fork of the same reserve.
    os.kill(run.pids()["ftrun-agent"], signal.SIGSEGV)
    run.wait_alive(4)
    assert starts() == [False, False, True, True, False]
    assert not is_alive(third["ftrun-reserve"])
    (run.folder / "go").touch()
    assert run.finish()[:2] == (0, "rank 0 generation 4 ends\n")
    assert run.nothing_is_left()


def test_stub_is_small_and_keeps_its_pid(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_alive(0)
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) * 1024 <= MAX_STUB_BYTES
    assert "Threads:\t1" in status
    assert b"ftrun.cli.stub" in Path(f"/proc/{run.process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)],
    ids=lambda v: str(v),
)
def test_signal_ends_the_run(start: Callable[..., Run], number: signal.Signals, code: int) -> None:
    run = start()
    rank = run.wait_alive(0)
    run.process.send_signal(number)
    assert run.finish()[0] == code
    assert not is_alive(rank)
    assert run.nothing_is_left()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)],
    ids=lambda v: str(v),
)
def test_signal_before_the_agent_can_take_it_ends_the_run(
    start: Callable[..., Run], number: signal.Signals, code: int
) -> None:
    run = start()
    wait_for(
        lambda: (
            b"ftrun.cli.stub" in Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
            and Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
        )
    )
    run.process.send_signal(number)
    found, _, said = run.finish()
    assert found == code
    assert "Traceback" not in said
    assert run.nothing_is_left()


@pytest.mark.full
def test_orphan_of_a_rank_ends_with_the_run(start: Callable[..., Run]) -> None:
    run = start(words=("daemon",))
    run.wait_alive(0)
    daemon = int((run.folder / "daemon").read_text())
    assert is_alive(daemon)
    (run.folder / "go").touch()
    assert run.finish()[0] == 0
    assert not is_alive(daemon)


def test_killed_stub_leaves_only_memory_for_the_same_script_until_stop(
    start: Callable[..., Run],
) -> None:
    run = start()
    rank = run.wait_alive(0)
    processes = run.processes()
    run.process.kill()
    run.finish()
    wait_for(lambda: not is_alive(processes["agent"]) and not is_alive(rank))
    assert is_alive(processes["smp"])
    # The agent's descriptors may be closed a moment after its main thread has ended.
    wait_for(lambda: run.ask("status").stdout.startswith("ORPHANED"))
    (other := run.folder / "other.py").touch()
    refused = run.ask("--run-id", "mine", str(other))
    assert refused.returncode == 2
    assert "train.py" in refused.stderr
    assert is_alive(processes["smp"])
    assert run.ask("stop").returncode == 0
    wait_for(lambda: not is_alive(processes["smp"]))
    assert run.nothing_is_left()


@pytest.mark.full
def test_killed_stub_is_followed_by_the_same_command(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_alive(0)
    smp = run.processes()["smp"]
    run.process.kill()
    run.finish()
    run.start()
    run.wait_alive(1)
    assert is_alive(smp)
    (run.folder / "go").touch()
    assert run.finish()[:2] == (0, "rank 0 generation 1 ends\n")
    assert not is_alive(smp)
    assert run.nothing_is_left()


def test_stop_ends_a_run(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_alive(0)
    stopped = run.ask("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert run.finish()[0] == 143
    assert run.nothing_is_left()


def test_every_descendant_ends() -> None:
    code = """
import subprocess
from ftrun.process_tree import children, end_children, reap_all
from ftrun.linux import become_subreaper
become_subreaper()
tree = "trap '' TERM; (sleep 9 & sleep 9 & echo up; exec setsid sh -c 'sleep 9 & wait') & wait"
shell = subprocess.Popen(["sh", "-c", tree], stdout=subprocess.PIPE)
shell.stdout.readline()
shell.kill()
shell.wait()
assert children(), "the orphans have come here"
end_children(term_first=True)
assert not children() and not reap_all()
print("clean")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "clean\n", done.stderr


WRAPPER = """#!/bin/sh
case "$TORCHELASTIC_RESTART_COUNT" in
1) {python} train.py "$@" overwrites ;;
*) setsid {python} train.py "$@" ;;
esac
exit $?
"""


@pytest.mark.full
def test_ranks_behind_a_wrapper_never_run_next_to_their_successors(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(WRAPPER.format(python=shlex.quote(sys.executable)))
    wrapper.chmod(0o755)
    run = start("--no-python", words=("renamed",), script="./wrapper.sh")
    first = run.wait_alive(0)
    os.kill(run.processes()["agent"], signal.SIGKILL)
    second = run.wait_alive(1)
    assert not is_alive(first), "it ran at the same time as its successor"
    run.process.kill()
    run.finish()
    assert is_alive(second), "nothing has ended it yet"
    run.start()
    third = run.wait_alive(2)
    assert not is_alive(second), "it ran at the same time as its successor"
    run.process.kill()
    run.finish()
    stopped = run.ask("stop", "mine")
    assert (stopped.returncode, is_alive(third)) == (0, False), stopped.stderr
    assert run.nothing_is_left()


def test_as_pid_1_of_a_container(start: Callable[..., Run], tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("needs an own pid namespace")
    run = start()
    run.close()
    run.words.append("daemon")
    (tmp_path / "alive-0-0").unlink(missing_ok=True)
    run.start(*unshare, "--kill-child")
    run.wait_alive(0)
    (tmp_path / "go").touch()
    assert run.finish()[:2] == (0, "rank 0 generation 0 ends\n")
    assert run.nothing_is_left()
