"""The command line: `ftrun train.py`, `ftrun status` and the rest.

Runs in: cli. Loads neither torch nor pydantic nor rich before a command needs them.

`ftrun [options] train.py` is `ftrun run [options] train.py`: a first word that is a command is
one, and `ftrun run status` runs a script called status. What follows `run` is not typer's to
read: `command_line.py` takes it apart as torchrun does. typer knows the flags for completion.
"""

import inspect
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ftrun import __version__
from ftrun.cli import manifests
from ftrun.cli.command_line import OWN_FLAGS, parse
from ftrun.cli.estimate_flags import EstimateCommand, estimate_command
from ftrun.cli.torchrun_flags import TORCHRUN_FLAGS, Flag
from ftrun.errors import ExitCode, FtrunError, InternalError, UsageError

_GENERAL_FLAGS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


class _Commands(TyperGroup):
    """The commands, with `run` as the one that need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        is_named = not args or args[0] in self.commands or args[0].startswith(_GENERAL_FLAGS)
        return super().parse_args(ctx, args if is_named else ["run", *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        found = super().shell_complete(ctx, incomplete)
        known = {item.value for item in found}
        run_command = self.commands["run"]
        extra = run_command.shell_complete(ctx, incomplete)
        return [*found, *(item for item in extra if item.value not in known)]

    def get_help(self, ctx: Any) -> str:
        return _help_of(self)


class _RunCommand(TyperCommand):
    """`run`: every word goes to the function as it was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.args = list(args)
        return ctx.args  # type: ignore[no-any-return]

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
    """Run a PyTorch training script so that it outlives its failures."""


def _run(ctx: typer.Context, **_: object) -> None:
    """Start a run; the word may be left out."""
    line = parse(ctx.args)
    if line.wants_help or not ctx.args:
        typer.echo(ctx.get_help())
        return
    from ftrun.cli.run import run

    run(line, variables=os.environ)


def _with_flags(function: Any) -> Any:
    """Give a function the parameters that typer needs to complete the flags of a run."""
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    for flag in (*OWN_FLAGS, *TORCHRUN_FLAGS):
        option = typer.Option(*flag.spellings, help=flag.help, autocompletion=_completion(flag))
        kind: Any = str if flag.takes_value else bool
        parameters.append(
            inspect.Parameter(
                flag.dest,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if flag.takes_value else False,
                annotation=Annotated[kind, option],
            )
        )
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _completion(flag: Flag) -> Any:
    if flag.name == "profile":
        return _profile_names
    return (lambda: list(flag.choices)) if flag.choices else None


def _profile_names() -> list[str]:
    from ftrun.cli.profile_files import profile_names

    return profile_names()


def _run_ids() -> list[str]:
    from ftrun.wire.run_folder import all_run_folders

    return [folder.run_id for folder in all_run_folders()]


app.command("run", cls=_RunCommand)(_with_flags(_run))

_RunIdArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN_ID]", help="needed among several", autocompletion=_run_ids),
]


@app.command("status")
def _status(
    run_id: _RunIdArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
    watches: Annotated[bool, typer.Option("--watch", help="again and again, until ^C")] = False,
    every_s: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="between two looks")
    ] = 1.0,
) -> None:
    """Show how a run is doing."""
    if watches and as_json:
        raise UsageError("--json prints one document; --watch is for people. Give one of the two")
    if watches:
        from ftrun.cli.live_status import watch

        raise typer.Exit(watch(run_id, every_s=every_s))
    from ftrun.cli.status import status

    raise typer.Exit(status(run_id, as_json=as_json))


@app.command("logs")
def _logs(
    run_id: _RunIdArgument = None,
    ranks: Annotated[
        str | None, typer.Option("-r", "--rank", metavar="RANKS", help="such as 3 or 0-7,12")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="ranks of this node only")] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", metavar="G", help="not given: all")
    ] = None,
    incident: Annotated[
        str | None,
        typer.Option("--incident", metavar="I", help="last words of its culprit; or last"),
    ] = None,
    follows: Annotated[bool, typer.Option("-f", "--follow", help="go on as they write")] = False,
    last: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="N", help="so many of each at the end")
    ] = None,
) -> None:
    """Show what the ranks have written, where it went to files."""
    from ftrun.cli.logs import Wanted, logs

    wanted = Wanted(ranks, node, generation, incident, last)
    raise typer.Exit(logs(run_id, wanted, follows=follows))


@app.command("stop")
def _stop(run_id: _RunIdArgument = None) -> None:
    """Stop a run, or free the memory that a lost one still holds."""
    from ftrun.cli.stop import stop

    raise typer.Exit(stop(run_id))


@app.command("check")
def _check(
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="whose floors count", autocompletion=_profile_names),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """Check whether this machine is fit to run ranks."""
    from ftrun.cli.check import check

    raise typer.Exit(check(profile, as_json=as_json))


@app.command("report")
def _report(
    incident: Annotated[
        str | None, typer.Argument(help="its number, or last; not given: the whole run")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="run id, or folder of its logs")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="write it there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the facts, as JSON")] = False,
    opens: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Write a run, or one incident of it, as one HTML file."""
    from ftrun.cli.report import report

    raise typer.Exit(report(incident, run=run, out=out, as_json=as_json, opens=opens))


@app.command("inject-fault")
def _inject_fault(  # noqa: PLR0913 - its flags
    kind: Annotated[
        str | None, typer.Argument(help="see --list", autocompletion=lambda: _fault_names())
    ] = None,
    run_id: _RunIdArgument = None,
    rank: Annotated[int | None, typer.Option("--rank", help="which rank")] = None,
    node: Annotated[str | None, typer.Option("--node", help="which node")] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", help="at the end of this step, from 1")
    ] = None,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="T", help="so long: 500ms, 5s, 2m")
    ] = None,
    amount: Annotated[float | None, typer.Option("--amount", help="how much; see --list")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="each time the step comes, after restarts too")
    ] = False,
    wants_list: Annotated[bool, typer.Option("--list", help="show all faults")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """Break something of a run that was started with --allow-faults."""
    from ftrun.cli import inject_fault as faults

    if wants_list:
        raise typer.Exit(faults.list_faults(as_json=as_json))
    order = faults.order_of(
        kind, rank=rank, node=node, at_step=at_step, lasts=lasts, amount=amount, again=again
    )
    raise typer.Exit(faults.inject_fault(order, run_id, as_json=as_json))


def _fault_names() -> list[str]:
    from ftrun.wire.fault_kinds import FAULTS

    return list(FAULTS)


@app.command("drill")
def _drill(
    plan: Annotated[
        str | None,
        typer.Argument(help="name or file; see --list", autocompletion=lambda: _drill_names()),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="results and logs go there")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="KIND", help="only this kind of fault")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="the table as Markdown, one line for each kind")
    ] = False,
    again: Annotated[
        str | None, typer.Option("--show", metavar="JSON", help="only print an earlier drill.json")
    ] = None,
    wants_list: Annotated[bool, typer.Option("--list", help="show the plans")] = False,
) -> None:
    """Break a job in every way of a plan, and judge what it does."""
    from ftrun.cli import drill as drills

    if wants_list:
        raise typer.Exit(drills.list_drills())
    if again is not None:
        raise typer.Exit(drills.show_again(again))
    raise typer.Exit(drills.drill(plan, out=out, only=only or [], as_markdown=as_markdown))


def _drill_names() -> list[str]:
    from ftrun.cli.drill_plan_files import drill_plan_names

    return drill_plan_names()


app.command("estimate", cls=EstimateCommand)(estimate_command)

_profiles_app = typer.Typer(
    help="List profiles, and show where each value comes from.", rich_markup_mode=None
)
app.add_typer(_profiles_app, name="profiles", invoke_without_command=True)


@_profiles_app.callback()
def _profiles(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        from ftrun.cli.profiles import list_profiles

        list_profiles()


@_profiles_app.command("show")
def _show_profile(
    name: Annotated[str, typer.Argument(help="name or file", autocompletion=_profile_names)],
    origin: Annotated[
        bool, typer.Option("--origin", help="say where each value comes from")
    ] = False,
) -> None:
    """Show every value of a profile."""
    from ftrun.cli.profiles import show_profile

    show_profile(name, with_origin=origin)


_snapshots_app = typer.Typer(
    help="List, verify, prune, export and convert checkpoints, in a directory or at a URL.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(_snapshots_app, name="snapshots")
app.add_typer(manifests.app, name="render")

_DirectoryArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="or URL, as --checkpoint-dir had it")
]
_AsJson = Annotated[bool, typer.Option("--json", help="as one JSON document")]


@_snapshots_app.command("list")
def _list_snapshots(directory: _DirectoryArgument, as_json: _AsJson = False) -> None:
    """Show what is there, the one written last first."""
    from ftrun.cli.snapshots import list_checkpoints

    raise typer.Exit(list_checkpoints(directory, as_json=as_json))


@_snapshots_app.command("verify")
def _verify_snapshots(
    directory: _DirectoryArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="or latest; not given: all")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Read every byte, and compare it with what was written."""
    from ftrun.cli.snapshots import verify

    raise typer.Exit(verify(directory, names or [], as_json=as_json))


@_snapshots_app.command("prune")
def _prune_snapshots(
    directory: _DirectoryArgument,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="so many newest ones stay")],
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="T", help="and of them none older: 7d, 12h"),
    ] = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    as_json: _AsJson = False,
) -> None:
    """Remove old ones; the latest always stays."""
    from ftrun.cli.snapshots import prune

    found = prune(directory, keep=keep, older_than=older_than, is_real=not is_dry, as_json=as_json)
    raise typer.Exit(found)


@_snapshots_app.command("export")
def _export_snapshot(  # noqa: PLR0913 - its flags
    checkpoint: Annotated[
        str, typer.Argument(metavar="DIR[/NAME]", help="its latest one, or the one that is named")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory; a file for state_dict")],
    kind: Annotated[
        str, typer.Option("--format", metavar="F", help="safetensors, dcp or state_dict")
    ],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="D", help="of the model: bf16, fp16, fp32 or fp64"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="such as 'model.*'; may be given again"),
    ] = None,
    file_size: Annotated[
        str, typer.Option("--file-size", metavar="SIZE", help="of a safetensors file, at most")
    ] = "5GB",
    num_writers: Annotated[
        int | None, typer.Option("--writers", metavar="N", help="threads; given none: up to 4")
    ] = None,
    may_replace: Annotated[
        bool, typer.Option("--force", help="replace an export that is there")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Write one in a format that others read."""
    from ftrun.cli.snapshots_export import Wish, export

    wish = Wish(kind, dtype, only or [], file_size, num_writers, may_replace)
    raise typer.Exit(export(checkpoint, out, wish, as_json=as_json))


@_snapshots_app.command("convert")
def _convert_snapshot(  # noqa: PLR0913 - one for each flag
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="a checkpoint, or a directory: its latest")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory for the new one")],
    rules: Annotated[str, typer.Option("--rules", metavar="FILE", help="layout rules of SOURCE")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="FILE", help="layout rules of the new one")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="M", help="or: the same, so many ranks")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="AXES", help="or: the same on tp=4,dp=1")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="W", help="threads (default: as many as fit)")
    ] = 0,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="T", help="bf16, or PATTERN=bf16; several times"),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Make a checkpoint of another layout, by layout rules (docs/layouts.md)."""
    from ftrun.cli.convert_snapshot import convert

    words = [f"--rules={rules}", f"--workers={workers}"]
    words += [f"--dtype={one}" for one in dtype or []]
    given = {"to": to, "ranks": ranks, "mesh": mesh}
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    raise typer.Exit(convert([*words, "--", source, out], as_json=as_json))


def main() -> NoReturn:
    """Console script. The one place where an error becomes a message and an exit code."""
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
