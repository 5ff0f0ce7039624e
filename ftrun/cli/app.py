"""Defines the command line: `ftrun train.py`, `ftrun status` and the other commands.

`ftrun [options] train.py` means `ftrun run [options] train.py`. A first word that names a command
selects this command; `ftrun run status` runs a script called status. typer does not parse the
words after `run`: `command_line.py` parses them as torchrun does. typer receives the flags
for completion only.

Rule 1: A command is imported only when it is typed, so that `ftrun --help` loads neither torch nor
msgspec nor rich.
"""

import difflib
import importlib
import io
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ftrun import __version__
from ftrun.cli.completion import AsTyped, with_flags
from ftrun.cli.launch.command_line import OWN_FLAGS, parse
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS, CliFlag
from ftrun.errors import ExitCode, FtrunError, InternalError, UsageError

# fmt: off
COMMANDS: Mapping[str, tuple[str, str]] = {
    "verify": ("tools.verify.command",
               "Kill ranks of a script, and compare its results bit for bit."),
    "status": ("cli.commands.status", "Show the state of a run."),
    "logs": ("tools.logs.command", "Show the output of the ranks, if it goes to files."),
    "stop": ("cli.commands.stop", "Stop a run, or free the memory that a lost run still holds."),
    "drain": ("cli.commands.drain", "Replace a node by a spare, or all nodes in turn."),
    "readmit": ("cli.commands.readmit", "Let an excluded node of a run run ranks again."),
    "preflight": ("cli.commands.preflight", "Check whether this machine is fit to run ranks."),
    "report": ("tools.report.command", "Write a run, or one incident of it, as one HTML file."),
    "explain": ("tools.explain.command",
                "Find the rank at fault in a hang, from flight recorder dumps of any launcher."),
    "network": ("tools.network_view.command",
                "Show the paths between a run's nodes, and the network plan."),
    "inject-fault": ("cli.commands.inject_fault",
                     "Inject a fault into a run that was started with --allow-faults."),
    "drill": ("tools.drill.command",
              "Inject every fault of a plan into a job, and judge the results."),
    "estimate": ("tools.estimate.command", "Estimate what failures will cost, and what to choose."),
    "profiles": ("cli.commands.profiles", "List profiles, and show where each value comes from."),
    "checkpoints": (
        "tools.checkpoints.command",
        "List, verify, prune, export and convert checkpoints."),
    "manifest": ("tools.manifests.command",
                 "Write a batch script for Slurm or a manifest for Kubernetes."),
}
# fmt: on
"""The module of each command, and the line that `ftrun --help` shows."""
_RENAMED = {"check": "preflight", "snapshots": "checkpoints", "render": "manifest"}  # of 0.2
_GENERAL_FLAGS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


class _Commands(TyperGroup):
    """Group of all commands; `run` is the default command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, (_, line) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=line)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _ = COMMANDS[cmd_name]
        return typer.main.get_command(importlib.import_module(f"ftrun.{module}").app)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        is_named = not args or args[0] in self.commands or args[0].startswith(_GENERAL_FLAGS)
        if not is_named:
            _refuse_misspelled_command(args[0], self.commands)
        return super().parse_args(ctx, args if is_named else ["run", *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        found = super().shell_complete(ctx, incomplete)
        known = {item.value for item in found}
        extra = self.commands["run"].shell_complete(ctx, incomplete)
        return [*found, *(item for item in extra if item.value not in known)]

    def get_help(self, ctx: Any) -> str:
        return _help(self)


def _refuse_misspelled_command(word: str, commands: Iterable[str]) -> None:
    if os.environ.keys() & {"PET_MODULE", "PET_NO_PYTHON"}:
        return
    if word in _RENAMED and not _is_script(Path(word)):
        raise UsageError(f"ftrun {word} is now ftrun {_RENAMED[word]}")
    if word.startswith("-") or Path(word).suffix or Path(word).exists():
        return
    for near in difflib.get_close_matches(word, commands, n=1):
        raise UsageError(
            f"{word} is neither a command of ftrun nor a script in {Path.cwd()}. "
            f"Did you mean ftrun {near}? ftrun --help lists the commands"
        )


def _is_script(path: Path) -> bool:
    return path.is_file() or (path / "__main__.py").is_file()


class _RunCommand(AsTyped):
    def get_help(self, ctx: Any) -> str:
        return _help(ctx.parent.command)


app = typer.Typer(
    name="ftrun",
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"ftrun {__version__}")
        raise typer.Exit


@app.callback()
def _general(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run a PyTorch training script that continues after failures."""


def _run(ctx: typer.Context, **_: object) -> None:
    """Start a run; the word `run` may be omitted."""
    line = parse(ctx.args)
    if line.wants_help or not ctx.args:
        typer.echo(ctx.get_help())
        return
    from ftrun.cli.run import run

    run(line, variables=os.environ)


app.command("run", cls=_RunCommand)(with_flags(_run))


def main() -> NoReturn:
    """Console script entry point; turns an error into a message and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        typer.main.get_command(app).main(prog_name="ftrun")
    except FtrunError as error:
        if isinstance(error, InternalError) or _wants_traceback(sys.argv[1:]):
            traceback.print_exc()
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - the process's last line of defence
        traceback.print_exc()
        typer.echo("Error: this is a bug in ftrun; please report the lines above", err=True)
        sys.exit(ExitCode.BUG)
    sys.exit(ExitCode.DONE)


def _wants_traceback(words: list[str]) -> bool:
    if os.environ.get("FTRUN_DEBUG", "0").lower() not in ("", "0", "false", "no"):
        return True
    try:
        return parse(words[1:] if words[:1] == ["run"] else words).own_value("debug") is not None
    except FtrunError:
        return False


# --- help -------------------------------------------------------------------------------------

_INTRO = """\
Usage: ftrun [OPTIONS] SCRIPT [ARGS...]
       ftrun COMMAND ...

Run a PyTorch training script that continues after failures. Used in place of torchrun, with
torchrun's flags and environment. A rank that dies is replaced in a fraction of a second; a script
that calls ftrun.attach resumes from the last step, any other from its own checkpoint.

Examples:
  ftrun --nproc-per-node 2 train.py --lr 0.1         two ranks; --lr 0.1 is the script's
  ftrun --nproc-per-node gpu -m my.training          one rank per GPU, a module
  ftrun --checkpoint-dir /data/run1 train.py         on disk too, and resume from there
  ftrun --nnodes 4 --spares 1 --rdzv-endpoint n1 train.py   on each of five nodes
  ftrun verify --nproc-per-node 2 train.py           once: does a restart change the result
  ftrun --run-id big1 train.py                       after a lost launcher: the same line again
  ftrun status --watch                               live status of the run
  ftrun logs -r 3 -f                                 output of rank 3, over restarts
"""

_OUTRO = """\
Each key of a profile is a variable too: snapshot.every is FTRUN_SNAPSHOT_EVERY. torchrun's flags
are PET_ variables, as with torchrun. Precedence: flag, FTRUN_ variable, PET_ variable, profile,
default.

Exit codes: the script's own if the script is the cause; 2 usage, 70 a bug in ftrun, 75 try again,
76 not enough nodes, 77 no state to resume from, 93 the same failure repeatedly, 130 and 143
stopped by a signal.
"""

_GENERAL = {
    "--version": "show ftrun's version",
    "--install-completion": "let the shell complete flags and commands",
    "--show-completion": "show what that would install",
    "-h, --help": "show this",
}
_MIN_WIDTH, _MAX_WIDTH, _COLUMN = 60, 100, 34


def _help(group: Any) -> str:
    """Returns plain text, which needs no import of rich and fits any terminal width."""
    width = help_width()
    commands = {name: one.get_short_help_str(80) for name, one in group.commands.items()}
    parts = [
        *(_INTRO, "Commands (each has its own --help):", *help_rows(commands, width)),
        *("", "ftrun's own options", *_groups(OWN_FLAGS, width)),
        *("", "torchrun's options (also with _ for -, and shortened)"),
        *_groups(TORCHRUN_FLAGS, width),
        *("", "General", *help_rows(_GENERAL, width), "", _OUTRO.rstrip()),
    ]
    return "\n".join(parts)


def help_width() -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    return max(_MIN_WIDTH, min(_MAX_WIDTH, columns))


def help_rows(rows: Mapping[str, str], width: int) -> Iterator[str]:
    for left, right in rows.items():
        lines = textwrap.wrap(right, width - _COLUMN)
        if len(left) > _COLUMN - 4:
            yield f"  {left}"
        else:
            yield f"  {left:<{_COLUMN - 2}}{lines.pop(0)}"
        for line in lines:
            yield " " * _COLUMN + line


def _groups(flags: Sequence[CliFlag], width: int) -> Iterator[str]:
    for group in dict.fromkeys(flag.group for flag in flags):
        yield f" {group}:"
        yield from help_rows({_left(f): _right(f) for f in flags if f.group == group}, width)


def _left(flag: CliFlag) -> str:
    value = flag.metavar or "|".join(flag.choices)
    short = f"-{flag.short}, " if flag.short else ""
    return f"{short}--{flag.name} {value}".rstrip()


def _right(flag: CliFlag) -> str:
    notes = ["may be repeated"] if flag.is_repeatable else []
    if flag.since > (2, 8):
        notes.append(f"torch {flag.since[0]}.{flag.since[1]} and newer")
    return f"{flag.help} ({'; '.join(notes)})" if notes else flag.help
