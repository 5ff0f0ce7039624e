"""`ftrun snapshots ...`, as typer reads it.

Runs in: cli. What a command does is loaded when it is typed.
"""

from typing import Annotated

import typer

app = typer.Typer(
    help="List, verify, prune, export and convert checkpoints, in a directory or at a URL.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

_DirectoryArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="or URL, as --checkpoint-dir had it")
]
_AsJson = Annotated[bool, typer.Option("--json", help="as one JSON document")]


@app.command("list")
def _list_snapshots(directory: _DirectoryArgument, as_json: _AsJson = False) -> None:
    """Show what is there, the one written last first."""
    from ftrun.tools.checkpoints.command import list_checkpoints

    raise typer.Exit(list_checkpoints(directory, as_json=as_json))


@app.command("verify")
def _verify_snapshots(
    directory: _DirectoryArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="or latest; not given: all")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Read every byte, and compare it with what was written."""
    from ftrun.tools.checkpoints.command import verify

    raise typer.Exit(verify(directory, names or [], as_json=as_json))


@app.command("prune")
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
    from ftrun.tools.checkpoints.command import prune

    found = prune(directory, keep=keep, older_than=older_than, is_real=not is_dry, as_json=as_json)
    raise typer.Exit(found)


@app.command("export")
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
    from ftrun.tools.checkpoints.snapshots_export import ExportOptions, export

    wish = ExportOptions(kind, dtype, only or [], file_size, num_writers, may_replace)
    raise typer.Exit(export(checkpoint, out, wish, as_json=as_json))


@app.command("convert")
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
    from ftrun.tools.checkpoints.convert_snapshot import convert

    words = [f"--rules={rules}", f"--workers={workers}"]
    words += [f"--dtype={one}" for one in dtype or []]
    given = {"to": to, "ranks": ranks, "mesh": mesh}
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    raise typer.Exit(convert([*words, "--", source, out], as_json=as_json))
