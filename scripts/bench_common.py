"""Code that the benchmarks share: launchers as child processes, step files, tables, conditions.

A benchmark starts launchers, injects failures, and reads from files what the workers recorded. It
ends only the processes it started, and removes all processes and files after success, failure and
^C.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from virtual_node import ClusterError

ROOT = Path(__file__).resolve().parents[1]
TMPFS = Path("/dev/shm")
"""Folder where files of the peers cost least."""

LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""When the benchmark began."""
POLL_S = 0.01
_STOP_S = 20.0


class BenchError(Exception):
    """A benchmark cannot continue; the message contains the reason."""


class Deadline:
    """The total time that a benchmark may take."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def check(self, waiting_for: str) -> None:
        """Raises: BenchError: the time is over."""
        if time.monotonic() > self._end_s:
            raise BenchError(
                f"--timeout of {self._timeout_s:.0f} s is over, waiting for {waiting_for}"
            )


# --- launchers ------------------------------------------------------------------------------


@dataclass
class Launcher:
    """A running launcher and the file of its output."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    deadline: Deadline
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def wait_for(self, what: str, is_so: Callable[[], object]) -> None:
        """Poll until the condition holds. Raises: BenchError: it has ended, or the time is over."""
        while not is_so():
            self.check()
            self.deadline.check(what)
            time.sleep(POLL_S)

    def pause(self, seconds: float) -> None:
        """Let time pass as part of the measurement. Raises: as `wait_for`."""
        end_s = time.monotonic() + seconds
        self.wait_for("a pause", lambda: time.monotonic() >= end_s)

    def wait_for_end(self) -> None:
        """Raises: BenchError: it does not end with 0, or the time is over."""
        while (code := self.process.poll()) is None:
            self.deadline.check("the end")
            time.sleep(POLL_S)
        if code:
            raise BenchError(f"{self.name} ended with {code}:\n{self.last_output()}")

    def check(self) -> None:
        """Raises: BenchError: it has ended."""
        self.note_family()
        code = self.process.poll()
        if code is not None:
            raise BenchError(f"{self.name} ended with {code}:\n{self.last_output()}")

    def note_family(self) -> None:
        """Record its processes, so that none remains after it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.family[child.pid] = child

    def last_output(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-25:])

    def stop(self) -> None:
        """Request its end, then kill the processes that remain."""
        self.note_family()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        self.note_family()
        for one in [*self.family.values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.is_running():  # the same process, not another with its number
                    one.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def launched(
    name: str, command: Sequence[object], folder: Path, deadline: Deadline, **variables: str
) -> Iterator[Launcher]:
    """A launcher that runs until the block ends.

    Args:
        name: for messages.
        command: its words.
        folder: its working folder, which also gets the output.
        deadline: for its waits.
        variables: added to the environment.
    """
    output = folder / f"{name}.output"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **variables}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ^C is for the benchmark, which then ends this in order
        )
    launcher = Launcher(name, process, output, deadline)
    try:
        yield launcher
    finally:
        launcher.stop()


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def ftrun_command(*flags: object) -> list[object]:
    return [sys.executable, "-m", "ftrun", "--quiet", "--set", "restart.budget=100000", *flags]


def torchrun_command(*flags: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags]


def ftrun_status(run_id: str) -> dict[str, Any]:
    """The document of `ftrun status --json`; empty while the run does not answer."""
    command = [sys.executable, "-m", "ftrun", "status", run_id, "--json"]
    variables = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    with contextlib.suppress(ValueError):
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    return {}


def read_journal(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """Read the events of a run that was started in `folder`."""
    path = folder / "ftrun-logs" / run_id / "journal.jsonl"
    return read_lines(path) if path.exists() else []


@contextlib.contextmanager
def scratch(base: Path | None = TMPFS) -> Iterator[Path]:
    """An empty folder in `base` if that exists, removed at the end; tmpfs costs least.

    SIGTERM and SIGHUP end the benchmark like ^C, so that the folder is removed.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    if base is not None and not (base.is_dir() and os.access(base, os.W_OK)):
        base = None
    folder = Path(tempfile.mkdtemp(prefix="ftrun-bench-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- files of the workers ---------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class NotesReader:
    """Reads one worker's file incrementally."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    def read(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines

    def of(self, kind: str, generation: int | None = None) -> list[dict[str, Any]]:
        """Lines of a kind, of one generation or of all."""
        return [
            line
            for line in self.read()
            if line["kind"] == kind and generation in (None, line["generation"])
        ]


@dataclass(eq=False)
class RankFiles:
    """The files of all ranks of a run."""

    folder: Path
    ranks: int
    readers: list[NotesReader] = field(init=False)

    def __post_init__(self) -> None:
        paths = [self.folder / f"rank{rank}.jsonl" for rank in range(self.ranks)]
        self.readers = [NotesReader(path) for path in paths]

    def newest(self, kind: str) -> int:
        """The newest generation of which every rank has a line of this kind; -1: none."""
        return min(
            max((line["generation"] for line in reader.of(kind)), default=-1)
            for reader in self.readers
        )

    def begun(self) -> int:
        """The newest generation in which every rank has begun; -1: none."""
        return self.newest("begun")

    def pid(self, rank: int, generation: int) -> int:
        return int(self.readers[rank].of("begun", generation)[-1]["pid"])

    def first_steps(self, generation: int) -> list[dict[str, Any]]:
        """The first step that each rank completed in it; empty until all have."""
        found = [reader.of("step", generation) for reader in self.readers]
        return [lines[0] for lines in found] if all(found) else []

    def have(self, kind: str) -> bool:
        return all(reader.of(kind) for reader in self.readers)


def check_memory(needed_bytes: float) -> None:
    """Raises: BenchError: it does not fit."""
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise BenchError(
            f"about {needed_bytes / 1e9:.1f} GB of memory are needed, and "
            f"{available_bytes / 1e9:.1f} GB are available; give a smaller --mb"
        )


# --- results ---------------------------------------------------------------------------------


def conditions() -> dict[str, Any]:
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join([shown_path(word) for word in sys.argv]),
        "load_before": LOAD_BEFORE,
    }


def commit() -> str:
    """The commit of this checkout, with suffix -dirty if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def shown_path(word: str) -> str:
    """A word of a command; a path in this checkout relative to its root."""
    path = Path(word).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and path.exists() else word


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def show_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns; the first is aligned left, the others right."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    print(f"\n{title}\n")
    for number, row in enumerate(texts):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def show_conditions() -> dict[str, Any]:
    found = conditions()
    gpu = found["gpu"] or "no GPU"
    print(
        f"\n  {found['cores']} cores of {found['cpu']}, {found['memory_gib']} GiB, {gpu}; "
        f"torch {found['torch']}, Python {found['python']}; {found['date']}, "
        f"load before the run {found['load_before']}"
    )
    return found


def finish(path: Path | None, figures: Mapping[str, Any]) -> None:
    write_json(path, {**figures, "conditions": show_conditions()})


def cells(one: Mapping[str, float], form: str) -> list[str]:
    """The median and the range of a spread, for a table."""
    return [format(one[key], form) for key in ("median", "min", "max")]


class Parser(argparse.ArgumentParser):
    """A parser with the flags that each benchmark has."""

    def __init__(self, doc: str | None, *, timeout_s: float | None = None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        if timeout_s is not None:
            self.add_argument(
                "--json", type=Path, metavar="FILE", help="also write the figures to this file"
            )
            self.option("--timeout", float, int(timeout_s), "time limit in seconds")

    def option(self, flag: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
        """An option whose help ends with its default."""
        help_text = f"{text} (default %(default)s)"
        self.add_argument(flag, type=kind, default=default, help=help_text)

    def parsed(self, *positive: str) -> argparse.Namespace:
        """The arguments, and `deadline`; those that are named must be positive."""
        args = self.parse_args()
        args.deadline = Deadline(args.timeout)
        if min((getattr(args, name) for name in positive), default=1) <= 0:
            *first, last = (f"--{name.replace('_', '-')}" for name in positive)
            self.error(f"{', '.join(first)} and {last} are positive")
        if sys.platform != "linux":
            self.error("ftrun launches on Linux only")
        return args


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"\n  {path} has these figures")


def run_bench(main: Callable[[], int]) -> None:
    """Run a benchmark's main function and end the process with its code."""
    try:
        code = main()
    except (BenchError, ClusterError) as error:
        print(f"Error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
