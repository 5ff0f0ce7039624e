"""Plans, starts, observes and ends the runs of a verification, one after the other.

All processes of a run have ended when its `with` block ends, also after ^C.
"""

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.cli.runs import sweep
from ftrun.cli.stub import python_command
from ftrun.errors import FtrunError
from ftrun.linux import end_with_parent
from ftrun.tools.verify.compare import Life, Trace, life_of
from ftrun.wire import run_environment as env
from ftrun.wire.verify_records import Kill, VerifyPlan, read_records

_POLL_S = 0.05
_DISK_EVERY_S = 1.0
_END_S = 20.0
_STOP_S = 60.0
_GRACE_S = 2
_LAST_LINES = 12
_MEBIBYTE = 1 << 20
_LIMITS_OF_RESTARTS = ("FTRUN_MAX_RESTARTS", "PET_MAX_RESTARTS")
_SETTINGS = {
    "checkpoint.directory": "null",
    "checkpoint.resume": "never",
    "hooks.on_incident": "null",
    "hooks.webhook": "null",
    "otel.endpoint": "null",
}
_RECORD_FILE = re.compile(r"rank(\d+)\.(\d+)\.jsonl")


class LimitReached(FtrunError):
    """A run was ended because its time or its disk space was used up."""


def plan_kills(steps: int, count: int) -> tuple[Kill, ...]:
    """Spreads kills over the steps, every second one in the middle of a step.

    The others, or a single one, follow steps without a snapshot, so that steps are repeated.
    """
    spread = (at * steps // (count + 1) for at in range(1, count + 1))
    return kills_at(sorted({max(1, step) for step in spread if step < steps}))


def kills_at(steps: Sequence[int]) -> tuple[Kill, ...]:
    kills = []
    before = 0
    for at, step in enumerate(steps):
        is_in_step = at % 2 == 0
        lost = (1 if len(steps) == 1 else 0) if is_in_step else 2
        kills.append(Kill(step, is_in_step, min(lost, step - before - 1)))
        before = step
    return tuple(kills)


@dataclass
class Finished:
    """One run that has ended."""

    exit_code: int
    took_s: float
    output: str
    trace: Trace = field(default_factory=dict)

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-_LAST_LINES:]) or "(nothing was written)"


def variables_of_run(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without a limit of restarts, which kills could exhaust."""
    return {name: value for name, value in variables.items() if name not in _LIMITS_OF_RESTARTS}


def words_of_run(run_id: str, words: Sequence[str]) -> list[str]:
    """Adds the flags of a verification: no checkpoints, no hooks, a snapshot after each step."""
    own = ["--run-id", run_id, "--grace", str(_GRACE_S), "--snapshot-every", "1"]
    for key, value in _SETTINGS.items():
        own += ["--set", f"{key}={value}"]
    return [*own, *words]


class VerifyRun:
    """One run of the script. Use it in a `with` block."""

    def __init__(
        self, folder: Path, words: Sequence[str], plan: VerifyPlan, *, is_kept: bool = True
    ) -> None:
        """Plans a run; if the folder is not kept, no line that is shown names it."""
        self._folder = folder
        self._is_kept = is_kept
        self._run_id = f"verify-{secrets.token_hex(4)}"
        self._output = folder / "output.txt"
        self._plan = plan
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VerifyRun":
        Path(self._plan.folder).mkdir(parents=True)
        variables = variables_of_run(os.environ) | {
            env.VERIFY: msgspec.json.encode(self._plan).decode(),
            env.LOG_FOLDER: str(self._folder / "logs"),
        }
        command = python_command("ftrun", "run", *words_of_run(self._run_id, self._words))
        try:
            with self._output.open("wb") as output:
                # A session of its own: ^C comes to this process only, which then ends the run.
                self._process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent,
                )  # fmt: skip
        except BaseException:  # a signal; a `with` block that is not entered has no exit
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            process.send_signal(signal.SIGTERM)
            process.wait(_END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
            # The SMP outlives a stub that was killed.
            subprocess.run(
                python_command("ftrun", "stop", self._run_id),
                capture_output=True, timeout=_STOP_S, check=False,
            )  # fmt: skip
        if process.returncode < 0:  # killed before it was the stub, or by SIGKILL
            sweep()

    def wait(self, *, timeout_s: float, disk_bytes: int) -> Finished:
        """Waits for the end; LimitReached: the time, or the disk space of all runs, is used up."""
        assert self._process is not None
        started_s = polled_s = clock.now_s()
        while (code := self._process.poll()) is None:
            now_s = clock.now_s()
            if now_s > started_s + timeout_s:
                lives = [life for lives in self._trace().values() for life in lives]
                steps = max((life.last_step for life in lives), default=0)
                raise LimitReached(
                    f"the time of this run is over (--timeout): after {now_s - started_s:.0f} s "
                    f"it has made {steps} steps. Raise --timeout or lower --steps. Its last "
                    "lines:\n"
                    f"{self._finished(0, started_s).last_lines}"
                )
            if now_s - polled_s > _DISK_EVERY_S:
                polled_s = now_s
                self._check_disk(disk_bytes)
            clock.sleep(_POLL_S)
        finished = self._finished(code, started_s)
        finished.trace = self._trace()
        return finished

    def _finished(self, code: int, started_s: float) -> Finished:
        output = self._output.read_text(encoding="utf-8", errors="replace")
        if not self._is_kept:
            lines = output.splitlines()
            output = "\n".join(line for line in lines if str(self._folder) not in line)
        return Finished(code, clock.now_s() - started_s, output)

    def _check_disk(self, disk_bytes: int) -> None:
        used = _size(self._folder.parent)
        if used > disk_bytes:
            raise LimitReached(
                f"records and logs take {used // _MEBIBYTE} MiB, and --max-disk allows "
                f"{disk_bytes // _MEBIBYTE}. Raise it or lower --steps"
            )

    def _trace(self) -> Trace:
        lives: dict[int, dict[int, Life]] = {}
        for path in Path(self._plan.folder).iterdir():
            if match := _RECORD_FILE.fullmatch(path.name):
                rank, generation = int(match[1]), int(match[2])
                life = life_of(generation, read_records(path))
                lives.setdefault(rank, {})[generation] = life
        return {
            rank: [of_rank[generation] for generation in sorted(of_rank)]
            for rank, of_rank in sorted(lives.items())
        }


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:  # just removed
                continue
    return total
