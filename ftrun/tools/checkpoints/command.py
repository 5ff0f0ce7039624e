"""`ftrun checkpoints`: lists, verifies, prunes, exports and converts checkpoints.

Separate processes read and write the files. Only the process of an export may load torch.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec
import typer

from ftrun import clock
from ftrun.cli.completion import AsJson, option, with_groups
from ftrun.cli.launch.checkpoint_check import ask_catalog, report_of
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import count, duration, seconds_of, shares_to_write, size, size_of
from ftrun.errors import ExitCode, FtrunError, UsageError
from ftrun.wire.messages.checkpoint import (
    DTYPE_WORDS,
    FORMATS,
    CatalogReport,
    CheckpointInfo,
    ConvertReport,
    ExportJob,
    ExportReport,
)

_HEAD = ("checkpoint", "step", "ranks", "size", "written", "run", "state")
_MAX_WRITERS = 4
_FILE_SIZE = "5GB"
_Word = TypeVar("_Word", bound=str)

app = typer.Typer(
    help="List, verify and prune checkpoints in a directory or at a URL. Export and convert "
    "checkpoints in a directory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

_Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="or URL, as given to --checkpoint-dir")
]


@app.command("list")
def _list(directory: _Directory, as_json: AsJson = False) -> None:
    """Show the checkpoints, the newest first."""
    found = ask_catalog("list", directory)
    if as_json:
        _finish_as_json(found)
    if found.checkpoints:
        render.write_plain(found.directory)
        render.show_table(_HEAD, [_row(one) for one in found.checkpoints])
    else:
        render.write_plain(f"there are no checkpoints in {found.directory}")
    if found.unfinished:
        render.write_plain(
            f"\n{found.unfinished} incomplete; the next checkpoint that is written removes it"
        )
    raise typer.Exit(_code(found))


@app.command("verify")
def _verify(
    directory: _Directory,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="or latest; not given: all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte, and compare it with its digests."""
    found = ask_catalog("verify", directory, *(names or []))
    if as_json:
        _finish_as_json(found)
    for one in found.checkpoints:
        state = "; ".join(one.problems) or f"whole, {size(one.num_bytes)}"
        render.write_plain(f"{'DAMAGED' if one.problems else 'ok     '}  {one.name}: {state}")
    if not found.checkpoints:
        render.write_plain(f"there are no checkpoints in {found.directory}")
    took = _took(found.checked_bytes, found.seconds)
    render.write_plain(f"{size(found.checked_bytes)} read in {took}")
    raise typer.Exit(_code(found))


@app.command("prune")
def _prune(
    directory: _Directory,
    keep: Annotated[int, option("--keep", "number of newest ones to keep", "N")],
    older_than: Annotated[
        str | None, option("--older-than", "remove those older than 7d, 12h too", "T")
    ] = None,
    keep_size: Annotated[
        str | None,
        option("--keep-size", "remove the oldest while all have more, such as 500GB", "S"),
    ] = None,
    is_dry: Annotated[bool, option("--dry-run", "only show what would be removed")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints.

    The latest, the newest whole one, and one that a process reads are not removed.
    """
    if keep < 1:
        raise UsageError(f"--keep is at least 1, not {keep}; remove the directory to keep none")
    words = [f"--keep={keep}", *(["--dry-run"] if is_dry else [])]
    if older_than is not None:
        age_s = seconds_of(older_than, "--older-than", such_as="30m, 12h or 7d")
        words.append(f"--keep-s={age_s}")
    if keep_size is not None:
        num_bytes = size_of(keep_size, "--keep-size", such_as="500MB or 2TB")
        words.append(f"--keep-bytes={num_bytes}")
    found = ask_catalog("prune", directory, *words)
    if as_json:
        _finish_as_json(found)
    _show_pruned(found, is_dry=is_dry)
    raise typer.Exit(_code(found))


def _show_pruned(found: CatalogReport, *, is_dry: bool) -> None:
    would = "would be " if is_dry else ""
    for name in found.removed:
        render.write_plain(f"{would}removed  {name}")
    for name in found.being_read:
        render.write_plain(f"kept  {name}: a process reads it; prune again later")
    left = [one for one in found.checkpoints if one.name not in found.removed]
    damaged = [one for one in left if one.problems]
    for one in damaged:
        render.write_plain(f"not whole  {one.name}: {'; '.join(one.problems)}")
    whole = next((one.name for one in left if not one.problems), "")
    if damaged and whole:
        render.write_plain(f"kept  {whole}: the newest whole one")
    render.write_plain(
        f"{len(found.removed)} {would}removed, {len(left)} left in {found.directory}"
    )


def _row(one: CheckpointInfo) -> tuple[str, ...]:
    if not one.world_size:
        return (one.name, "-", "-", "-", "-", "-", "; ".join(one.problems))
    state = "; ".join(one.problems) or ("latest" if one.is_latest else "whole")
    age = f"{duration(max(0.0, clock.wall_s() - one.written_s))} ago"
    ranks = str(one.world_size)
    return (one.name, f"{one.step:,}", ranks, size(one.num_bytes), age, one.run_id, state)


def _finish_as_json(found: CatalogReport) -> None:
    render.write_json(found)
    raise typer.Exit(_code(found))


def _code(found: CatalogReport) -> int:
    return ExitCode.FAILED if any(one.problems for one in found.checkpoints) else ExitCode.DONE


def _took(num_bytes: int, seconds: float) -> str:
    return f"{duration(seconds)}, {size(num_bytes / max(seconds, 1e-9))}/s"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of an export."""

    kind: Annotated[str, option("--format", "safetensors, dcp, state_dict or atoms", "F")]
    dtype: Annotated[
        str | None, option("--dtype", "of the model: bf16, fp16, fp32 or fp64", "D")
    ] = None
    only: Annotated[
        list[str] | None, option("--only", "such as 'model.*'; may be repeated", "PATTERN")
    ] = None
    file_size: Annotated[
        str | None, option("--file-size", "limit of a safetensors file (default: 5GB)", "SIZE")
    ] = None
    num_writers: Annotated[
        int | None,
        option("--workers", "threads (default: up to 4)", "W"),
    ] = None
    may_replace: Annotated[bool, option("--force", "replace an existing export")] = False
    rules: Annotated[
        str | None, option("--rules", "atoms: layout rules, if it declares none", "FILE")
    ] = None
    share: Annotated[str, option("--share", "atoms: write a part, as worker 2 of 4", "I/N")] = "1/1"


@app.command("export")
@with_groups
def _export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="DIR[/NAME]", help="its latest one, or the named one")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory; a file for state_dict")],
    options: ExportOptions,
    as_json: AsJson = False,
) -> None:
    """Write one in another format, or as atoms for any layout (docs/checkpoints.md)."""
    if options.kind == "atoms":
        given = {"only": options.only, "dtype": options.dtype, "file-size": options.file_size}
        if flags := [name for name, value in given.items() if value]:
            raise UsageError(
                f"--{flags[0]} is not for atoms, which are whole, with 16-bit floats as fp32"
            )
        words = ["--force"] if options.may_replace else []
        words += [f"--workers={options.num_writers or 0}", f"--share={options.share}"]
        words += [f"--rules={options.rules}"] if options.rules is not None else []
        _make_atoms("export", *words, "--", checkpoint, out, as_json=as_json)
    if options.rules is not None or options.share != "1/1":
        raise UsageError("--rules and --share are for --format atoms")
    job = _export_job(checkpoint, Path(out).absolute(), options)
    facts = report_of(
        "ftrun.tools.export.__main__", kind=ExportReport, stdin=msgspec.json.encode(job),
        failure=f"the export ended without a result; {job.out} is unchanged",
    )  # fmt: skip
    if facts.problem:
        raise FtrunError(facts.problem)
    _show_exported(facts, as_json=as_json)


def _show_exported(facts: ExportReport, *, as_json: bool) -> None:
    if as_json:
        render.write_json(facts)
        return
    render.write_plain(
        f"{facts.out}: step {facts.step:,} as {facts.format}, {facts.num_tensors:,} tensors, "
        f"{size(facts.num_bytes)} in {count(len(facts.files), 'file')}, "
        f"{_took(facts.num_bytes, facts.seconds)}"
    )
    for text in facts.left_out:
        render.write_plain(f"left out  {text}")
    for text in facts.notes:
        render.write_plain(f"note      {text}")


def _export_job(checkpoint: str, target: Path, options: ExportOptions) -> ExportJob:
    if os.path.lexists(target) and not options.may_replace:
        raise UsageError(f"{target} exists already. Name another path, or add --force")
    kind = _one_of("--format", options.kind, FORMATS)
    dtype = options.dtype and DTYPE_WORDS[_one_of("--dtype", options.dtype, tuple(DTYPE_WORDS))]
    file_size = (options.file_size or _FILE_SIZE).upper().replace("I", "i")
    file_bytes = size_of(file_size, "--file-size", such_as="500MB or 5GB")
    num_writers = options.num_writers
    if num_writers is None:
        num_writers = min(_MAX_WRITERS, os.cpu_count() or 1)
    if num_writers < 1:
        raise UsageError(f"--workers is at least 1, not {num_writers}")
    source = ask_catalog("find", checkpoint).found
    assert source is not None
    return ExportJob(
        source=source,
        format=kind,
        out=str(target),
        dtype=dtype or "",
        only=tuple(options.only or ()),
        file_bytes=file_bytes,
        num_writers=num_writers,
        may_replace=options.may_replace,
    )


def _one_of(flag: str, given: str, known: Sequence[_Word]) -> _Word:
    for one in known:
        if one == given:
            return one
    raise UsageError(f"{flag} is one of {', '.join(known)}, not {given!r}")


_Store = Annotated[str, typer.Argument(metavar="OUT", help="a directory that does not exist")]
_Share = Annotated[str, option("--share", "write a part, as worker 2 of 4", "I/N")]
_Workers = Annotated[int, option("--workers", "threads (default: up to 4)", "W")]


@app.command("extract")
def _extract(
    checkpoint: Annotated[
        str, typer.Argument(metavar="DIR[/NAME]", help="its latest one, or the named one")
    ],
    out: _Store,
    rules: Annotated[
        str | None, option("--rules", "layout rules, if it declares none", "FILE")
    ] = None,
    share: _Share = "1/1",
    workers: _Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Atoms, step 1 of 3: write each rank's part of each tensor."""
    words = [f"--share={share}", f"--workers={workers}"]
    words += [f"--rules={rules}"] if rules is not None else []
    _make_atoms("extract", *words, "--", checkpoint, out, as_json=as_json)


@app.command("union")
def _union(
    fragments: Annotated[str, typer.Argument(metavar="FRAGMENTS", help="what extract wrote")],
    out: _Store,
    share: _Share = "1/1",
    workers: _Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Atoms, step 2 of 3: join the parts, with the padding of the ranks."""
    words = (f"--share={share}", f"--workers={workers}", "--", fragments, out)
    _make_atoms("union", *words, as_json=as_json)


@app.command("strip")
def _strip(
    padded: Annotated[str, typer.Argument(metavar="PADDED", help="what union wrote")],
    out: _Store,
    share: _Share = "1/1",
    workers: _Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Atoms, step 3 of 3: remove padding and split flat buffers."""
    words = (f"--share={share}", f"--workers={workers}", "--", padded, out)
    _make_atoms("strip", *words, as_json=as_json)


def _make_atoms(*words: str, as_json: bool) -> NoReturn:
    facts = report_of(
        "ftrun.tools.checkpoints.atoms", *words, kind=ExportReport,
        failure=f"{words[0]} ended without a result; {words[-1]} is not complete",
    )  # fmt: skip
    if facts.problem and not as_json:
        sys.stderr.write(f"Error: {facts.problem}\n")
    else:
        _show_exported(facts, as_json=as_json)
    raise typer.Exit(facts.exit_code if facts.problem else ExitCode.DONE)


@app.command("load")
def _load(  # noqa: PLR0913 - its flags
    atoms: Annotated[str, typer.Argument(metavar="ATOMS", help="what --format atoms wrote")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory for the checkpoint")],
    rules: Annotated[
        str | None, option("--rules", "layout rules of the run (default: any layout)", "FILE")
    ] = None,
    ranks: Annotated[int | None, option("--ranks", "number of ranks of the rules", "M")] = None,
    mesh: Annotated[
        str | None, option("--mesh", "or: sizes of the axes: tp=4,dp=1", "AXES")
    ] = None,
    share: _Share = "1/1",
    workers: _Workers = 0,
    dtype: Annotated[
        list[str] | None, option("--dtype", "bf16, or PATTERN=bf16; may be repeated", "T")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a checkpoint from atoms, for any layout.

    Without --rules it has one rank: runs with DDP, FSDP2 and DTensors, and scripts that declare
    their layout, resume from it in any layout. With --rules it has that layout.
    """
    words = ["--load", f"--workers={workers}", f"--share={share}"]
    words += [f"--dtype={one}" for one in dtype or []]
    given = {"rules": rules, "ranks": ranks, "mesh": mesh}
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    _run_conversion(*words, "--", atoms, out, as_json=as_json)


@app.command("convert")
def _convert(  # noqa: PLR0913 - its flags
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="a checkpoint, or a directory: its latest")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory for the new one")],
    rules: Annotated[
        str | None, option("--rules", "layout rules of SOURCE, if it declares none", "FILE")
    ] = None,
    to: Annotated[str | None, option("--to", "layout rules of the new one", "FILE")] = None,
    ranks: Annotated[int | None, option("--ranks", "or: the same with M ranks", "M")] = None,
    mesh: Annotated[str | None, option("--mesh", "or: the same on tp=4,dp=1", "AXES")] = None,
    share: _Share = "1/1",
    workers: _Workers = 0,
    dtype: Annotated[
        list[str] | None, option("--dtype", "bf16, or PATTERN=bf16; may be repeated", "T")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a checkpoint with another layout, by layout rules (docs/layouts.md)."""
    words = [f"--workers={workers}", f"--share={share}"]
    words += [f"--dtype={one}" for one in dtype or []]
    given = {"rules": rules, "to": to, "ranks": ranks, "mesh": mesh}
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    _run_conversion(*words, "--", source, out, as_json=as_json)


def _run_conversion(*words: str, as_json: bool) -> NoReturn:
    found = report_of(
        "ftrun.tools.checkpoints.convert", *words, kind=ConvertReport,
        failure="the checkpoint was not converted",
    )  # fmt: skip
    if as_json:
        render.write_json(found)
    elif found.problem:
        sys.stderr.write(f"Error: {found.problem}\n")
    else:
        _show_converted(found)
    raise typer.Exit(found.exit_code)


def _show_converted(found: ConvertReport) -> None:
    if found.is_linked:
        text = f"{found.source} already has this layout ({found.mesh_after}): its files are linked"
    else:
        text = (
            f"{found.source}: {found.num_tensors} tensors of step {found.step:,}, "
            f"{found.mesh_before} -> {found.mesh_after}, {size(found.num_bytes)} in "
            f"{_took(found.num_bytes, found.seconds)}"
        )
    render.write_plain(text)
    if found.missing_shares:
        left = shares_to_write(found.missing_shares)
        render.write_plain(f"{found.path}: a checkpoint when {left}")
    else:
        render.write_plain(f"{found.path}: a checkpoint of {count(found.world_size, 'rank')}")
    for note in found.notes:
        render.write_plain(f"  {note}")
