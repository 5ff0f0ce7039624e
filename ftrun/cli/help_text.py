"""Builds the text of `ftrun --help` from the tables of flags.

Runs in: cli. The text is plain: it needs no import of rich and fits any terminal width.
"""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ftrun.cli.launch.command_line import OWN_FLAGS
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS, CliFlag

_INTRO = """\
Usage: ftrun [OPTIONS] SCRIPT [ARGS...]
       ftrun COMMAND ...

Run a PyTorch training script so that it outlives its failures. Used in place of torchrun, with
torchrun's flags and environment. A rank that dies is replaced in a fraction of a second; a script
that calls ftrun.attach resumes from the last step, any other from its own checkpoint.

Examples:
  ftrun --nproc-per-node 2 train.py --lr 0.1         two ranks; --lr 0.1 is the script's
  ftrun --nproc-per-node gpu -m my.training          one rank per GPU, a module
  ftrun --checkpoint-dir /data/run1 train.py         on disk too, and resume from there
  ftrun --nnodes 4 --spares 1 --rdzv-endpoint n1 train.py   on each of five nodes
  ftrun verify --nproc-per-node 2 train.py           once: does a restart change the result
  ftrun --run-id big1 train.py                       after a lost launcher: the same line again
  ftrun status --watch                               how the run is doing, live
  ftrun logs -r 3 -f                                 what rank 3 writes, over restarts
"""

_OUTRO = """\
Each key of a profile is a variable too: snapshot.every is FTRUN_SNAPSHOT_EVERY. torchrun's flags
are PET_ variables, as with torchrun. What counts: flag, FTRUN_ variable, PET_ variable, profile,
default, in this order.

Exit codes: the script's own where it is the cause; 2 usage, 70 a bug in ftrun, 75 try again,
76 not enough nodes, 77 no state to resume from, 93 the same failure again and again, 130 and 143
stopped by a signal.
"""

_MIN_WIDTH = 60
_MAX_WIDTH = 100
_COLUMN = 34


def help_text(commands: Mapping[str, str]) -> str:
    width = help_width()
    general = {
        "--version": "show ftrun's version",
        "--install-completion": "let the shell complete flags and commands",
        "--show-completion": "show what that would install",
        "-h, --help": "show this",
    }
    parts = [
        _INTRO,
        "Commands (each has its own --help):",
        *rows(commands, width),
        "",
        "ftrun's own options",
        *_groups(OWN_FLAGS, width),
        "",
        "torchrun's options (also with _ for -, and shortened)",
        *_groups(TORCHRUN_FLAGS, width),
        "",
        "General",
        *rows(general, width),
        "",
        _OUTRO.rstrip(),
    ]
    return "\n".join(parts)


def help_width() -> int:
    """Returns the terminal width within bounds; the upper bound if stdout is not a terminal."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    return max(_MIN_WIDTH, min(_MAX_WIDTH, columns))


def _groups(flags: Sequence[CliFlag], width: int) -> Iterator[str]:
    for group in dict.fromkeys(flag.group for flag in flags):
        yield f" {group}:"
        yield from rows({_left(f): _right(f) for f in flags if f.group == group}, width)


def _left(flag: CliFlag) -> str:
    value = flag.metavar or "|".join(flag.choices)
    short = f"-{flag.short}, " if flag.short else ""
    return f"{short}--{flag.name} {value}".rstrip()


def _right(flag: CliFlag) -> str:
    notes = []
    if flag.is_repeatable:
        notes.append("may be repeated")
    if flag.since > (2, 8):
        notes.append(f"torch {flag.since[0]}.{flag.since[1]} and newer")
    return f"{flag.help} ({'; '.join(notes)})" if notes else flag.help


def rows(told: Mapping[str, str], width: int) -> Iterator[str]:
    for left, right in told.items():
        lines = textwrap.wrap(right, width - _COLUMN)
        if len(left) > _COLUMN - 4:
            yield f"  {left}"
        else:
            yield f"  {left:<{_COLUMN - 2}}{lines.pop(0)}"
        for line in lines:
            yield " " * _COLUMN + line
