"""A run of ftrun over the nodes of a virtual cluster, observed from outside.

    with VirtualCluster(3) as cluster:
        run = NodesRun(cluster, folder, ["train.py"], Deadline(120), members=2, spares=1)
        run.start_all()
        run.wait_for_step(20)
        run.fault("kill", 1)
        run.wait_for_generation(1)
        run.finish()

Takes in: a cluster, a folder of its own, the script and its arguments, the time that it may take.
          The script records what its ranks do as drill_job.py does: begun, step, end.
Gives:    steps and generations from the records of the ranks, journals of all nodes, exit codes.

All nodes are on one machine, so that their records have the time of one clock. All processes
started here die with their node.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_common import POLL_S, ROOT, BenchError, Deadline, RankFiles
from virtual_cluster import VirtualCluster
from virtual_node import Process, processes_of

RUN_ID = "nodes"
PORT = 29400
LAST_LINES = 15

Line = dict[str, Any]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a node: this checkout, one thread, no variables of a run around this process.

    A collective check costs each node about half a second of processor time. Tests of it ask for
    one with a flag.
    """
    own = ("FTRUN_", "PET_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    fixed["FTRUN_PREFLIGHT_COLLECTIVE_MB"] = "0"
    return {**kept, **fixed, **(extra or {})}


class NodesRun(RankFiles):
    """One run. Every wait is bounded, and fails with the output of the nodes."""

    def __init__(
        self,
        cluster: VirtualCluster,
        folder: Path,
        words: Sequence[object],
        deadline: Deadline,
        *,
        members: int,
        spares: int = 0,
        flags: Sequence[object] = (),
    ) -> None:
        super().__init__(folder, members)
        self.cluster = cluster
        self.members = members
        self.spares = spares
        self.deadline = deadline
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """The started ftrun of each node, the newest if there were several."""
        self._words = [str(word) for word in words]
        self.lost: set[int] = set()
        """Nodes that were powered off or reset, and not started again."""
        self._flags = [str(flag) for flag in flags]
        self._may_end: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    # --- starting and ending ------------------------------------------------------------------

    def start_all(self, env_of: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """On every node at once; `env_of` adds variables on single nodes."""
        for node in range(self.members + self.spares):
            self.start(node, (env_of or {}).get(node))

    def start(
        self, node: int, env: Mapping[str, str] | None = None, flags: Sequence[object] = ()
    ) -> None:
        """On one node, with additional flags (the later of two wins). Outputs are appended."""
        with self._output(node).open("ab") as output:
            self.processes[node] = self.cluster.run(
                node,
                [*self.command(flags), *self._words],
                env=environment(env),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._may_end.discard(node)
        self.lost.discard(node)

    def command(self, flags: Sequence[object] = ()) -> list[str]:
        """`ftrun` and its flags, up to the script."""
        endpoint = f"{self.cluster.address(0)}:{PORT}"
        found = [sys.executable, "-m", "ftrun", "--nnodes", self.members]
        found += ["--spares", self.spares] if self.spares else []
        found += ["--nproc-per-node", 1, "--rdzv-endpoint", endpoint, "--rdzv-id", RUN_ID]
        return [str(word) for word in (*found, "--snapshot-every", 1, *self._flags, *flags)]

    def finish(self) -> None:
        """Let the job finish; every node that is alive must exit with 0.

        Raises:
            BenchError: a node exits with another code, or does not end.
        """
        (self.folder / "go").touch()
        self.wait_for("the end", lambda: all(map(self.has_ended, self.processes)))

    def codes(self) -> dict[int, int | None]:
        """Exit codes by node; None for a running one."""
        return {node: process.poll() for node, process in self.processes.items()}

    def has_ended(self, node: int) -> bool:
        return self.processes[node].poll() is not None or node in self._may_end

    def wait_for_code(self, node: int) -> int:
        """Wait until one of them ends by itself; its exit code."""
        self.may_end(node)
        process = self.processes[node]
        self.wait_for(f"the end of node{node}", lambda: process.poll() is not None)
        return int(process.returncode)

    def bring_back(self, node: int) -> None:
        """Start a lost node again, and wait until a leader has accepted it."""
        if not self.cluster.nodes()[node].is_alive:
            self.cluster.revive(node)
        before = self.times_joined(node)
        self.start(node)
        self.wait_for(f"node{node} to join again", lambda: self.times_joined(node) > before)

    def times_joined(self, node: int) -> int:
        """How often it has joined a run that had begun, counted by the leaders."""
        return sum(line["node_id"] == f"node{node}" for line in self.journals("node_joined"))

    def may_end(self, *nodes: int) -> None:
        """These nodes may end from now on, with any code, or not at all."""
        self._may_end.update(nodes)

    # --- breaking -----------------------------------------------------------------------------

    def fault(self, what: str, node: int, *words: Any, **more: Any) -> int:
        """Inject a fault (`kill`, `reset`, `freeze` ...) into a node; the time before, in ns."""
        if what in ("kill", "reset"):
            self.may_end(node)
            self.lost.add(node)
        at_ns = time.monotonic_ns()
        getattr(self.cluster, what)(node, *words, **more)
        return at_ns

    def signal(self, node: int, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a part of ftrun on a node; the time just before, in ns."""
        pid = self.pid_of(node, part)
        at_ns = time.monotonic_ns()
        os.kill(pid, number)
        return at_ns

    def pid_of(self, node: int, part: str) -> int:
        """Of its `rank`, `agent`, `smp` or `zygote`, in this machine's pid namespace.

        Raises:
            BenchError: there is none.
        """
        for process in self.processes_of(node):
            with contextlib.suppress(OSError):
                if self._is_part(node, part, process.pid):
                    return process.pid
        raise BenchError(f"node{node} has no {part}:\n{self.last_output()}")

    def processes_of(self, node: int) -> list[Process]:
        init = self.cluster.nodes()[node].init
        return processes_of(init) if init is not None else []

    # --- the records of the ranks ----------------------------------------------------------------

    def steps(self, rank: int, generation: int | None = None) -> list[Line]:
        return self.readers[rank].of("step", generation)

    @property
    def generation(self) -> int:
        """The newest in which every rank has completed a step; -1: none."""
        return self.newest("step")

    def next_step_ns(self, after_ns: int) -> int | None:
        """When the last rank completed the first step of a later generation; None: not all have."""
        found = [_first_step_ns(reader.read(), after_ns) for reader in self.readers]
        return max(filter(None, found)) if all(found) else None

    def node_of(self, rank: int) -> int:
        """The node where this rank runs now."""
        return int(self.readers[rank].of("begun")[-1]["node"].removeprefix("node"))

    def wait_for_step(self, step: int, *, generation: int = 0) -> None:
        """Wait until every rank has completed it in this generation or a later one."""

        def all_there() -> bool:
            return self.generation >= generation and all(
                reader.of("step")[-1]["step"] >= step for reader in self.readers
            )

        self.wait_for(f"step {step} of generation {generation}", all_there)

    def wait_for_more_steps(self, count: int) -> None:
        self.wait_for_step(self.last_step() + count)

    def last_step(self) -> int:
        return min(reader.of("step")[-1]["step"] for reader in self.readers)

    def wait_for_generation(self, number: int) -> int:
        """Wait until every rank has completed a step of it or of a later one; return which one."""
        self.wait_for(f"a step of generation {number}", lambda: self.generation >= number)
        return self.generation

    # --- the records of the nodes ----------------------------------------------------------------

    def leader(self) -> int:
        """The node that started the newest generation."""
        newest = self.journals("generation_chosen")[-1]
        return next(
            node for node in self.processes if newest in self.journal(node, "generation_chosen")
        )

    def journal(self, node: int, kind: str = "") -> list[Line]:
        """The journal of this node."""
        path = self.folder / "ftrun-logs" / RUN_ID / f"node{node}" / "journal.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if not kind or line["kind"] == kind]

    def journals(self, kind: str = "") -> list[Line]:
        """Of all nodes, in the order of time."""
        found = [line for node in self.processes for line in self.journal(node, kind)]
        return sorted(found, key=lambda line: float(line["monotonic_s"]))

    def ask(self, node: int, *words: object) -> str:
        """The output of a command of ftrun about this run, such as `status`, on one node."""
        command = [sys.executable, "-m", "ftrun", *map(str, words)]
        asked = self.cluster.run(
            node, command, env=environment(), cwd=self.folder, stdout=subprocess.PIPE
        )
        output, _ = asked.communicate(timeout=60)
        if asked.returncode:
            raise BenchError(f"{' '.join(command)} on node{node} ended with {asked.returncode}")
        return output.decode()

    def status(self, node: int) -> Line:
        found: Line = json.loads(self.ask(node, "status", RUN_ID, "--json", "--versions"))
        return found

    def text(self, node: int) -> str:
        path = self._output(node)
        return path.read_text(errors="replace") if path.exists() else ""

    def last_output(self) -> str:
        """The end of the output of every node."""
        found = []
        for node in self.processes:
            lines = self.text(node).splitlines()[-LAST_LINES:]
            found += [f"  node{node}:", *(f"    {line}" for line in lines)]
        return "\n".join(found)

    # --- waiting ------------------------------------------------------------------------------

    def wait_for(self, what: str, is_so: Callable[[], object]) -> None:
        """Poll until the condition holds.

        Raises:
            BenchError: a node has failed, or the time is over.
        """
        while not is_so():
            self._check(what)
            time.sleep(POLL_S)

    def _check(self, what: str) -> None:
        for node, code in self.codes().items():
            if code and node not in self._may_end:
                raise BenchError(f"node{node} ended with {code}, no {what}:\n{self.last_output()}")
        try:
            self.deadline.check(what)
        except BenchError as error:
            raise BenchError(f"{error}:\n{self.last_output()}") from None

    # --- inside -------------------------------------------------------------------------------

    def _output(self, node: int) -> Path:
        return self.folder / f"node{node}.output"

    def _is_part(self, node: int, part: str, pid: int) -> bool:
        if part == "rank":
            return _pid_inside(pid) in self._ranks_on(node)
        if part in ("agent", "zygote"):  # these, reserve and ranks have one command line
            return Path(f"/proc/{pid}/comm").read_text() == f"ftrun-{part}\n"
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"ftrun.{part}".encode() in words

    def _ranks_on(self, node: int) -> set[int]:
        """Pids of the newest workers there, in the node's pid namespace."""
        newest = [reader.of("begun")[-1] for reader in self.readers if reader.of("begun")]
        return {line["pid"] for line in newest if line["node"] == f"node{node}"}


def _first_step_ns(lines: Sequence[Line], after_ns: int) -> int | None:
    has_started = False
    for line in lines:
        has_started |= line["kind"] == "begun" and line["ns"] > after_ns
        if has_started and line["kind"] == "step":
            return int(line["ns"])
    return None


def _pid_inside(pid: int) -> int:
    """Its pid in its own namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return 0
