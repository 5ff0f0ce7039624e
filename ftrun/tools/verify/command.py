"""`ftrun verify train.py`: does a restart change what the script computes, and why."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import typer

from ftrun.cli.app import help_rows, help_width
from ftrun.cli.completion import AsTyped, with_flags
from ftrun.cli.launch.command_line import OWN_FLAGS, CommandLine, parse
from ftrun.cli.launch.torchrun_flags import CliFlag
from ftrun.errors import UsageError

DIFFERENT = 1
NOT_COMPARED = 3

FLAGS = (
    CliFlag("steps", "steps of each run (default 20)", "N"),
    CliFlag("kills", "kills in the disturbed run (default 2)", "N"),
    CliFlag("at", "kill after these steps instead, such as 7,14", "STEPS"),
    CliFlag("timeout", "seconds for all runs together (default 600)", "SECONDS"),
    CliFlag("max-disk", "MiB for records and logs (default 1024)", "MIB"),
    CliFlag("folder", "keep records, output and logs there (default: removed)", "DIR"),
    CliFlag("json", "the result as one JSON document"),
)

_REPLACED = (
    *("run-id", "checkpoint-dir", "resume", "checkpoint-every", "checkpoint-keep"),
    "checkpoint-keep-bytes",
    *("snapshot-every", "no-snapshots", "orphan-timeout", "metrics-port", "quiet", "grace"),
)
"""Flags of a run whose values a verification sets."""

_INTRO = """\
Usage: ftrun verify [OPTIONS] [OPTIONS OF ftrun run] SCRIPT [ARGS...]

Run a script undisturbed, then again with ranks killed by SIGKILL, and compare both bit for bit:
parameters, optimizer state, other attached state, losses, batches and inputs of the model. If
something differs, say what differs first and which line of the script is the reason. Do this once
before trusting a new script.

Example:
  ftrun verify --nproc-per-node 2 train.py --lr 0.1     20 steps, 2 kills
  ftrun verify --steps 50 --at 12,30 train.py           kills after steps 12 and 30

The script is executed as a whole 2 times, and a third time if the results differ: what it writes
to files and trackers is written each time. A run ends after --steps steps, without what the script
does after its loop. FTRUN_VERIFY is set in its environment. One node only.

Options:"""

_OUTRO = """\
Exit codes: 0 equal; 1 different, also if the script is not deterministic; 2 usage; 3 nothing could
be compared: the script failed, or a limit was reached; 130 and 143 stopped by a signal.
"""


@dataclass(frozen=True)
class Options:
    """The options as typed; `words` are flags, script and its arguments of each run."""

    line: CommandLine
    words: tuple[str, ...]
    steps: int
    kill_steps: tuple[int, ...] | None
    num_kills: int
    timeout_s: float
    disk_bytes: int
    folder: Path | None
    is_json: bool


app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _verify(ctx: typer.Context, **_: object) -> None:
    """Kill ranks of a script, and compare its results bit for bit."""
    raise typer.Exit(verify(ctx.args))


app.command(cls=AsTyped)(with_flags(_verify))


def verify(words: Sequence[str]) -> int:
    line = parse(words, more=FLAGS)
    if line.wants_help or not words:
        sys.stdout.write(_help())
        return 0
    options = options_of(line)
    # Imported here, so that --help loads none of it.
    from ftrun.cli.runs import end_on_signals
    from ftrun.tools.verify.verification import Verification

    end_on_signals()
    try:
        with _folder(options.folder) as folder:
            show = _writer(sys.stderr if options.is_json else sys.stdout)
            outcome = Verification(options, folder, show).carry_out()
    except KeyboardInterrupt:
        sys.stderr.write("ftrun verify: stopped, and its run is ended\n")
        return 128 + signal.SIGINT
    if options.is_json:
        sys.stdout.write(json.dumps(outcome, indent=1) + "\n")
    return int(outcome["exit_code"])


def options_of(line: CommandLine) -> Options:
    if line.script is None:
        raise UsageError(
            "no script is given. For example: ftrun verify --nproc-per-node 2 train.py"
        )
    at = line.own_value("at")
    kill_steps = None if at is None else tuple(_count("--at", word) for word in at.split(","))
    steps = _count("--steps", line.own_value("steps") or "20")
    if kill_steps is not None and (
        list(kill_steps) != sorted(set(kill_steps)) or kill_steps[-1] >= steps
    ):
        raise UsageError(f"--at takes increasing steps below --steps {steps}, not {at}")
    folder = line.own_value("folder")
    options = Options(
        line=line,
        words=_words_of_run(line),
        steps=steps,
        kill_steps=kill_steps,
        num_kills=_count("--kills", line.own_value("kills") or "2"),
        timeout_s=_count("--timeout", line.own_value("timeout") or "600"),
        disk_bytes=_count("--max-disk", line.own_value("max-disk") or "1024") << 20,
        folder=None if folder is None else Path(folder),
        is_json=line.own_value("json") is not None,
    )
    if kill_steps is None and options.num_kills >= steps:
        raise UsageError(f"--kills {options.num_kills} needs more than --steps {steps}")
    return options


def _words_of_run(line: CommandLine) -> tuple[str, ...]:
    """Returns the flags that each run gets, and the script; checks that a run would start."""
    from ftrun.cli.run import build_spec

    takes_value = {flag.name: flag.takes_value for flag in OWN_FLAGS}
    flags = [
        f"--{name}={value}" if takes_value[name] else f"--{name}"
        for name, values in line.own.items()
        if name in takes_value and name not in _REPLACED
        for value in values
    ]
    passed = CommandLine(
        torchrun=[(flag, value) for flag, value in line.torchrun if flag.name != "max-restarts"],
        tail=line.tail,
    )
    words = (*flags, *passed.torchrun_argv())
    if build_spec(parse(words), variables=os.environ).nodes is not None:
        raise UsageError(
            "ftrun verify runs on one node, and these flags or variables request several: leave "
            "out --nnodes, --spares and --rdzv-endpoint; inside Slurm use a step of one task"
        )
    return words


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} is a whole number, 1 or more, not {text!r}")
    return int(text)


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """Yields the folder of a verification; a temporary one is removed."""
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise UsageError(f"--folder {wanted} is not an empty folder: name another one")
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--folder {wanted} cannot be created: {error.strerror}") from error
        yield wanted.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="ftrun-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _writer(stream: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream.write(f"{text}\n")
        stream.flush()

    return write


def _help() -> str:
    flags = {f"--{f.name} {f.metavar or ''}".rstrip(): f.help for f in FLAGS}
    shown = "\n".join(help_rows(flags, help_width()))
    others = "and those of ftrun run, such as --nproc-per-node N: ftrun --help lists them"
    return f"{_INTRO}\n{shown}\n  {others}\n\n{_OUTRO}"
