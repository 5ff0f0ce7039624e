"""Real runs of ftrun for tests: started, observed through their journal, cleaned up."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftrun.cli.commands.status import status_of
from ftrun.cli.runs import choose
from ftrun.errors import FtrunError
from ftrun.wire.run_environment import RunId, run_folder

WAIT_S = 600.0
NAMES = ("ftrun-agent", "ftrun-smp")
PORTS = range(20_000, 32_000)
"""Below the ports that the kernel gives to connecting processes."""


def free_port() -> int:
    """A free port; another process is unlikely to take it before it is used."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Run:
    """One `ftrun` under test. Every wait is bounded and fails with the run's own output."""

    def __init__(self, folder: Path, *words: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.output = folder / f"{self.run_id}.out"
        argv = [sys.executable, "-m", "ftrun", "--run-id", self.run_id, *words]
        self.variables = {
            key: value for key, value in os.environ.items() if not key.startswith("FTRUN_")
        }
        few = {"PYTHONUNBUFFERED": "1", "FTRUN_PREFLIGHT_COLLECTIVE_MB": "0"}
        self.variables |= {**few, **(env or {})}
        self.argv = argv
        self.start()

    def start(self) -> None:
        """Start it; again with the same run id, after everything but the SMP is dead."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def journal(self, kind: str = "") -> list[dict[str, object]]:
        path = self.folder / "ftrun-logs" / self.run_id / "journal.jsonl"
        if not path.exists():
            return []
        # The last line may be half written.
        whole, _, _ = path.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines() if line.endswith("}")]
        return [line for line in lines if not kind or line["kind"] == kind]

    def status(self) -> dict[str, object]:
        """The document of `ftrun status --json`, without a process; empty without an answer."""
        try:
            view = status_of(choose(self.run_id, command="status"))
            return json.loads(msgspec.json.encode(view))  # type: ignore[no-any-return]
        except (FtrunError, OSError):
            return {}

    def pids(self) -> list[int]:
        """Pids of the workers of the newest generation, by rank."""
        return list(self.journal("generation_started")[-1]["pids"])  # type: ignore[call-overload]

    def pid_of(self, module: str) -> int:
        """Pid of this run's agent, SMP or zygote, found by its command line."""
        agent = self._find(f"-m ftrun.agent {run_folder(RunId(self.run_id)).path}")
        if module == "agent":
            return agent
        if module == "smp":
            return self._find(f"ftrun.smp --run-id {self.run_id} ")
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return next(int(pid) for pid in children if _comm(int(pid)) == "ftrun-zygote")

    def wait_until(self, what: str, condition: Callable[[], object]) -> None:
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, f"not {what} within {WAIT_S} s:\n{self.text}"
            ended = self.process.poll()
            assert ended is None or condition(), f"ended with {ended}, not {what}:\n{self.text}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, generation: int = 0) -> None:
        """Wait until every rank of this generation has passed this step."""

        def reached() -> bool:
            time.sleep(0.03)  # an agent that serves requests has less time for its ranks
            now = self.status()
            ranks = now.get("ranks") or []
            return (
                bool(ranks)
                and now["generation"] >= generation  # type: ignore[operator]
                and all((rank["step"] or 0) >= step for rank in ranks)  # type: ignore[attr-defined]
            )

        self.wait_until(f"at step {step} of generation {generation}", reached)

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {WAIT_S} s:\n{self.text}")

    def end(self) -> None:
        """Leave nothing behind, whatever the test did, also if its time ends in here."""
        folder = run_folder(RunId(self.run_id))
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(20)
            if folder.path.exists():  # most runs have ended by now, and have left nothing
                subprocess.run(
                    [sys.executable, "-m", "ftrun", "stop", self.run_id],
                    capture_output=True,
                    timeout=WAIT_S,
                    check=False,
                )
        assert not folder.path.exists()

    def _find(self, words: str) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                # Zygote, reserve and ranks are forks of the agent, and have its command line.
                if words in line and _comm(int(entry.name)) in NAMES:
                    return int(entry.name)
        raise AssertionError(f"no process with {words!r}:\n{self.text}")


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    """Whether a process is dead, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


Start = Callable[..., Run]


def in_full(*values: Any) -> list[Any]:
    """Values of a parametrized test that run only in `scripts/test --full`."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else [one]), marks=pytest.mark.full)
        for one in values
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs of ftrun in the test's own folder."""
    with contextlib.ExitStack() as ends:  # all of them, also if one does not end as it should

        def begin(*words: str, env: dict[str, str] | None = None) -> Run:
            run = Run(tmp_path, *words, env=env)
            ends.callback(run.end)
            return run

        yield begin


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a script into the test's folder; its name."""

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write
