"""Executes one run of a drill: starts it, injects faults, and observes journals and notes.

All processes that it started have ended when its block ends.

Rule 1: A fault is ordered only if every rank makes steps and no incident is open.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ftrun import clock
from ftrun.cli.screen.text import clean
from ftrun.errors import FtrunError
from ftrun.monitor.verdicts import VerdictKind
from ftrun.records.decode import decode, of_kinds
from ftrun.records.incidents import LifecycleChanged, VerdictRecord
from ftrun.tools.drill.environments import JobHost, end
from ftrun.tools.drill.jobs import DrillJob, Outcome, outcome_of
from ftrun.tools.drill.judge import FaultResult, Line, is_over, judge
from ftrun.tools.drill.plan import FaultTrial, RunSection

FIRST_STEP = 12
"""First fault after this step: by then a p99 is known and snapshots are committed."""

PORT = 29400
_POLL_S = 0.05
_START_S = 120.0
_END_S = 180.0
_ASK_S = 60.0
_SPARE_S = 45.0
"""Seconds added to the known times of a fault."""

_NO_NOTES_S = 3.0
"""Seconds between two faults of a script whose steps are unknown."""

_LAST_STEPS = 15
"""Steps before the end at which a trial gives up.

ftrun's own jobs wait before their last ten steps for the file `go`, which looks like a hang.
"""


class DrillRunFailed(FtrunError):
    """The run accepts no more faults, because it has ended or makes no progress."""


class DrillRun:
    """One run of a drill, used as a context manager."""

    def __init__(self, host: JobHost, folder: Path, part: RunSection, job: DrillJob) -> None:
        self.host = host
        self.folder = folder
        self.part = part
        self.job = job
        self.run_id = f"drill-{os.getpid()}-{secrets.token_hex(3)}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._may_end: set[int] = set()
        self._journals: dict[Path, _JournalFile] = {}
        folder.mkdir(parents=True)

    def __enter__(self) -> "DrillRun":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        secret = self.folder / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        secret.chmod(0o600)
        for node in range(self.host.nodes):
            words = [*self._command(secret), *self.job.words(self.folder)]
            output = self._output(node)
            started = self.host.start(node, words, folder=self.folder, output=output)
            self._processes.append(started)

    def _command(self, secret: Path) -> list[str]:
        part = self.part
        words: list[object] = [sys.executable, "-m", "ftrun", "run", "--allow-faults"]
        words += ["--run-id", self.run_id, "--nproc-per-node", part.ranks]
        words += ["--snapshot-every", 1, "--set", "restart.budget=100000"]
        words += ["--set", "smp.orphan_timeout_s=30"]
        if self.host.nodes > 1:
            # The flag is needed because process 1 of a virtual node has the same network namespace.
            words += ["--nnodes", part.nodes, "--allow-network-faults"]
            words += ["--spares", part.spares] if part.spares else []
            words += ["--rdzv-endpoint", f"{self.host.address(0)}:{PORT}"]
            words += ["--secret-file", secret, "--set", "nodes.max_failures_per_hour=100000"]
        for key, value in part.settings.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        return [str(word) for word in (*words, *part.flags)]

    def ready(self) -> None:
        """Waits until every rank makes steps and the usual step time is known."""
        if self.job.notes:
            first = max(FIRST_STEP, self.part.steps_between)
            self._wait(f"step {first}", lambda: self.last_step() >= first, _START_S)
        else:
            self._wait("the first step of every rank", self._runs, _START_S)

    def perform(self, trial: FaultTrial, row: FaultResult) -> None:
        """Orders one fault, waits for its end, and fills the row, also if the run fails."""
        since = len(self.journal())
        if trial.rank < 0 and trial.node >= 0:
            self._may_end.add(trial.node)
        try:
            order_id = self._order(trial)
        except FtrunError as error:
            row.problem = f"refused: {error}"
            return
        try:
            if trial.expected.ends:
                code, timeout_s = trial.expected.exit_code, self._timeout_s(trial)
                self._wait("the end of the run", self.has_ended, timeout_s, exit_code=code)
            else:
                is_ended = self._watch(trial, order_id, since)
                self._wait(f"the end of {trial.kind}", is_ended, self._timeout_s(trial))
        except DrillRunFailed as error:
            row.problem = str(error)
            raise
        finally:
            lines = self.journal()[since:]
            self._may_end |= _lost_nodes(lines)
            judge(trial, row, lines, order_id=order_id)

    def finish(self, *, exit_code: int = 0) -> None:
        """Lets the job complete; DrillRunFailed at another exit code or a timeout."""
        self.job.let_go(self.folder)
        self._wait(
            "the end of the job", self.has_ended, _END_S + self.job.steps * 0.3, exit_code=exit_code
        )
        for node, process in enumerate(self._processes):
            if process.poll() not in (None, exit_code) and node not in self._may_end:
                raise DrillRunFailed(
                    f"it ended with {process.returncode}, not {exit_code}. {self._last_words(node)}"
                )

    def close(self) -> None:
        for process in self._processes:
            end(process)
        if any(process.returncode for process in self._processes) and self.host.nodes == 1:
            words = [sys.executable, "-m", "ftrun", "stop", self.run_id]
            try:  # frees the leftovers of a lost run; usually there are none
                self.host.ask(0, words, folder=self.folder, within_s=_ASK_S)
            except FtrunError:
                return

    def journal(self) -> list[Line]:
        """Returns the lines of all nodes in order of time; the nodes share a clock."""
        logs = self.folder / "ftrun-logs" / self.run_id
        of_nodes = list(logs.glob("*/journal.jsonl"))  # logs/journal.jsonl merges them
        for path in of_nodes if self.host.nodes > 1 else [logs / "journal.jsonl"]:
            self._journals.setdefault(path, _JournalFile(path))
        found = [line for journal in self._journals.values() for line in journal.read()]
        return sorted(found, key=lambda line: line.monotonic_s)

    def outcomes(self) -> list[Outcome]:
        return [outcome_of(path) for path in self.job.note_files(self.folder)]

    def last_step(self) -> int:
        """Returns the newest step that every rank has recorded; -1 if there is none."""
        return min((self.job.last_step(path) for path in self.job.note_files(self.folder)),
                   default=-1)  # fmt: skip

    def is_near_end(self, spare: int = 60) -> bool:
        return self.job.steps > 0 and self.last_step() > self.job.steps - spare

    def _order(self, trial: FaultTrial) -> str:
        words = [sys.executable, "-m", "ftrun", "inject-fault", trial.kind, self.run_id, "--json"]
        words += ["--rank", str(trial.rank)] if trial.rank >= 0 else []
        words += ["--node", str(trial.node)] if trial.node >= 0 and self.host.nodes > 1 else []
        words += ["--at-step", str(trial.step)] if trial.step else []
        words += ["--for", f"{trial.for_s:g}s"] if trial.for_s is not None else []
        words += ["--amount", str(trial.amount)] if trial.amount is not None else []
        alive = [at for at, one in enumerate(self._processes) if one.poll() is None]
        # Use the target node itself if it is alive, because the path to it may be broken.
        node = trial.node if trial.node in alive else (alive or [0])[0]
        printed = self.host.ask(node, words, folder=self.folder, within_s=_ASK_S)
        return str(json.loads(printed)["id"])

    def _watch(self, trial: FaultTrial, order_id: str, since: int) -> Callable[[], bool]:
        """Whether the expected effects of a fault have occurred, and steps are made again."""
        mark: tuple[int, float] | None = None

        def is_ended() -> bool:
            nonlocal mark
            if not is_over(trial, self.journal()[since:], order_id):
                mark = None
                if self.is_near_end(_LAST_STEPS):
                    raise DrillRunFailed(
                        f"its {self.job.steps} steps are over, and nothing was seen"
                    )
                return False
            mark = mark or (self.last_step(), clock.now_s())
            step, at_s = mark
            if not self.job.notes:
                return clock.now_s() - at_s >= _NO_NOTES_S or self.has_ended()
            return self.last_step() >= step + self.part.steps_between

        return is_ended

    def _timeout_s(self, trial: FaultTrial) -> float:
        kill_after_s = 0.0
        if trial.expected.within_s >= 10:
            kill_after_s = float(self.part.settings.get("hang.kill_after_s", 120.0))
        return trial.expected.within_s + min(trial.lasts_s, 3600.0) + kill_after_s + _SPARE_S

    def _runs(self) -> bool:
        states = of_kinds(self.journal(), LifecycleChanged)
        return bool(states) and states[-1].record.new == "run"

    def has_ended(self) -> bool:
        return all(
            process.poll() is not None
            for node, process in enumerate(self._processes)
            if node not in self._may_end
        )

    def _wait(
        self, what: str, is_so: Callable[[], bool], within_s: float, *, exit_code: int = 0
    ) -> None:
        """Polls until the condition is true; DrillRunFailed if the run has ended or timed out."""
        give_up_s = clock.now_s() + within_s
        while not is_so():
            codes = [process.poll() for process in self._processes]
            for node, code in enumerate(codes):
                is_wrong = code is not None and code != exit_code and node not in self._may_end
                if is_wrong or all(one is not None for one in codes):
                    if is_so():
                        return
                    raise DrillRunFailed(
                        f"it ended with {code} before {what}. {self._last_words(node)}"
                    )
            if clock.now_s() > give_up_s:
                raise DrillRunFailed(
                    f"waited {within_s:.0f} s in vain for {what}. {self._last_words(0)}"
                )
            clock.sleep(_POLL_S)

    def _output(self, node: int) -> Path:
        return self.folder / f"node{node}.output"

    def _last_words(self, node: int) -> str:
        path = self._output(node)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        own = [line for line in lines if line.startswith("ftrun")] or lines
        return f"Its last word: {clean(own[-1], 400)}" if own else "It has said nothing"


def _lost_nodes(lines: Sequence[Line]) -> set[int]:
    """Returns nodes that may rejoin after the end of the job and then wait for the others."""
    verdicts = [line.record.verdict for line in of_kinds(lines, VerdictRecord)]
    lost = [name for one in verdicts if one.kind is VerdictKind.NODE_LOST for name in one.nodes]
    return {int(name.removeprefix("node")) for name in lost if name[4:].isdigit()}


class _JournalFile:
    """Follows one node's journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._lines: list[Line] = []

    def read(self) -> Sequence[Line]:
        if not self._path.exists():
            return self._lines
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._lines += filter(None, map(decode, whole.split(b"\n")))
        return self._lines
