"""Defines the command line: `ftrun train.py`, `ftrun status` and the other commands.

Runs in: cli. Loads torch, msgspec and rich only when a command needs them.

`ftrun [options] train.py` means `ftrun run [options] train.py`. A first word that names a command
selects this command; `ftrun run status` runs a script called status. typer does not parse the
words after `run`: `command_line.py` parses them as torchrun does. typer receives the flags
for completion only.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ftrun import __version__
from ftrun.cli.commands.fault_flags import inject_fault_command
from ftrun.cli.completion import AsTyped, RunIdArgument, profile_names, with_flags
from ftrun.cli.launch.command_line import parse
from ftrun.errors import ExitCode, FtrunError, InternalError, UsageError

_TOOLS: Mapping[str, tuple[str, str]] = {
    "verify": (
        "ftrun.tools.verify.flags",
        "Kill ranks of a script, and compare its results bit for bit.",
    ),
    "logs": (
        "ftrun.tools.logs.flags",
        "Show what the ranks have written, where it went to files.",
    ),
    "report": ("ftrun.tools.report.flags", "Write a run, or one incident of it, as one HTML file."),
    "network": (
        "ftrun.tools.network_view.flags",
        "Show the roads between a run's nodes, and what is planned on them.",
    ),
    "drill": (
        "ftrun.tools.drill.flags",
        "Break a job in every way of a plan, and judge what it does.",
    ),
    "estimate": (
        "ftrun.tools.estimate.estimate_flags",
        "Say on paper what failures will cost, and what to choose.",
    ),
    "snapshots": (
        "ftrun.tools.checkpoints.snapshot_flags",
        "List, verify, prune, export and convert checkpoints, in a directory or at a URL.",
    ),
    "render": (
        "ftrun.tools.manifests.command",
        "Write a batch script for Slurm or a manifest for Kubernetes.",
    ),
}
"""Commands loaded by name: the module, and the line that `ftrun --help` shows."""
_ORDER = (
    *("run", "verify", "status", "logs", "stop", "check", "report", "network"),
    *("inject-fault", "drill", "estimate", "profiles", "snapshots", "render"),
)
_GENERAL_FLAGS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


class _Commands(TyperGroup):
    """Group of all commands; `run` is the default command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        tools = {name: TyperCommand(name, help=line) for name, (_, line) in _TOOLS.items()}
        known = {**self.commands, **tools}
        self.commands = {name: known[name] for name in _ORDER}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _TOOLS:
            return super().get_command(ctx, cmd_name)
        module, _ = _TOOLS[cmd_name]
        return typer.main.get_command(importlib.import_module(module).app)

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
        run_command = self.commands["run"]
        extra = run_command.shell_complete(ctx, incomplete)
        return [*found, *(item for item in extra if item.value not in known)]

    def get_help(self, ctx: Any) -> str:
        return _help_of(self)


def _refuse_misspelled_command(word: str, commands: Iterable[str]) -> None:
    """Raises a UsageError with the closest command if `word` is no script, such as `verfy`."""
    may_be_script = word.startswith("-") or Path(word).suffix or Path(word).exists()
    if may_be_script or os.environ.keys() & {"PET_MODULE", "PET_NO_PYTHON"}:
        return
    for near in difflib.get_close_matches(word, commands, n=1):
        raise UsageError(
            f"{word} is neither a command of ftrun nor a script in {Path.cwd()}. "
            f"Did you mean ftrun {near}? ftrun --help lists the commands"
        )


class _RunCommand(AsTyped):
    def get_help(self, ctx: Any) -> str:
        return _help_of(ctx.parent.command)


app = typer.Typer(
    name="ftrun",
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
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


@app.command("status")
def _status(
    run_id: RunIdArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
    watches: Annotated[bool, typer.Option("--watch", help="refresh until ^C")] = False,
    every_s: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="between two polls")
    ] = 1.0,
) -> None:
    """Show the state of a run."""
    if watches and as_json:
        raise UsageError("--json and --watch exclude each other: --json prints one document")
    from ftrun.cli.commands.status import status, watch

    if watches:
        raise typer.Exit(watch(run_id, every_s=every_s))
    raise typer.Exit(status(run_id, as_json=as_json))


@app.command("stop")
def _stop(run_id: RunIdArgument = None) -> None:
    """Stop a run, or free the memory that a lost run still holds."""
    from ftrun.cli.commands.stop import stop

    raise typer.Exit(stop(run_id))


@app.command("check")
def _check(
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="whose floors count", autocompletion=profile_names),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """Check whether this machine is fit to run ranks."""
    from ftrun.cli.commands.preflight import check

    raise typer.Exit(check(profile, as_json=as_json))


app.command("inject-fault")(inject_fault_command)

_profiles_app = typer.Typer(
    help="List profiles, and show where each value comes from.", rich_markup_mode=None
)
app.add_typer(_profiles_app, name="profiles", invoke_without_command=True)


@_profiles_app.callback()
def _profiles(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        from ftrun.cli.commands.profiles import list_profiles

        list_profiles()


@_profiles_app.command("show")
def _show_profile(
    name: Annotated[str, typer.Argument(help="name or file", autocompletion=profile_names)],
    origin: Annotated[
        bool, typer.Option("--origin", help="say where each value comes from")
    ] = False,
) -> None:
    """Show every value of a profile."""
    from ftrun.cli.commands.profiles import show_profile

    show_profile(name, with_origin=origin)


def main() -> NoReturn:
    """Console script entry point; turns an error into a message and an exit code."""
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


def _help_of(group: Any) -> str:
    from ftrun.cli.help_text import help_text

    return help_text({name: c.get_short_help_str(80) for name, c in group.commands.items()})


def _wants_traceback(words: list[str]) -> bool:
    if os.environ.get("FTRUN_DEBUG", "0") not in ("", "0"):
        return True
    try:
        return parse(words[1:] if words[:1] == ["run"] else words).own_value("debug") is not None
    except FtrunError:
        return False
