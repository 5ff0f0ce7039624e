"""`ftrun snapshots export`: a checkpoint in a format that others read.

Runs in:  cli. The files are found by a process of the SMP's folder, read and written by one of the
          worker's, which is the one that may load torch.
Takes in: a checkpoint or a directory of them, where to, the format.
Gives:    what was written and what was left out, as text or JSON; exit code 0, or 1 with a reason.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ftrun.cli.launch.shelf_process import ask
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import duration, size
from ftrun.errors import FtrunError, UsageError
from ftrun.wire.messages.checkpoint import DTYPE_WORDS, FORMATS, ExportJob, ExportReport

_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MOST_WRITERS = 4
_Word = TypeVar("_Word", bound=str)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is wanted, as it was typed.

    Args:
        kind: the format.
        only: patterns.
        num_writers: None: as many as do some good.
        may_replace: an export that is there.
    """

    kind: str
    dtype: str | None
    only: Sequence[str]
    file_size: str
    num_writers: int | None
    may_replace: bool


def export(checkpoint: str, out: str, wish: ExportOptions, *, as_json: bool) -> int:
    """Write one checkpoint in another format.

    Raises:
        UsageError: a format, dtype or size that is none, or `out` is there already.
        FtrunError: why it was not written.
    """
    target = Path(out).absolute()
    if os.path.lexists(target) and not wish.may_replace:
        raise UsageError(f"{target} is there already. Name another place, or add --force")
    kind = _one_of("--format", wish.kind, FORMATS)
    dtype = wish.dtype and DTYPE_WORDS[_one_of("--dtype", wish.dtype, tuple(DTYPE_WORDS))]
    file_bytes, num_writers = _bytes_of(wish.file_size), _writers(wish.num_writers)
    source = ask("find", checkpoint).found
    assert source is not None
    order = ExportJob(
        source=source,
        format=kind,
        out=str(target),
        dtype=dtype or "",
        only=tuple(wish.only),
        file_bytes=file_bytes,
        num_writers=num_writers,
        may_replace=wish.may_replace,
    )
    facts = _write(order)
    if facts.problem:
        raise FtrunError(facts.problem)
    if as_json:
        render.write_plain(msgspec.json.format(msgspec.json.encode(facts), indent=1).decode())
    else:
        _show(facts)
    return 0


def _write(order: ExportJob) -> ExportReport:
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "ftrun.tools.export.__main__"]
    done = subprocess.run(
        command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, check=False
    )
    try:
        return msgspec.json.decode(done.stdout, type=ExportReport)
    except msgspec.MsgspecError as error:
        left = f"{order.out} is as it was"
        raise FtrunError(f"the export ended with {done.returncode}; {left}") from error


def _show(facts: ExportReport) -> None:
    rate = facts.num_bytes / max(facts.seconds, 1e-9)
    files = "1 file" if len(facts.files) == 1 else f"{len(facts.files)} files"
    render.write_plain(
        f"{facts.out}: step {facts.step:,} as {facts.format}, {facts.num_tensors:,} tensors, "
        f"{size(facts.num_bytes)} in {files}, {duration(facts.seconds)}, "
        f"{size(rate)}/s"
    )
    for text in facts.left_out:
        render.write_plain(f"left out  {text}")
    for text in facts.notes:
        render.write_plain(f"note      {text}")


def _one_of(flag: str, given: str, known: Sequence[_Word]) -> _Word:
    for one in known:
        if one == given:
            return one
    raise UsageError(f"{flag} is one of {', '.join(known)}, not {given!r}")


def _bytes_of(text: str) -> int:
    number = text.upper().removesuffix("B")
    unit = _UNITS.get(number[-1:], 1.0)
    try:
        found = int(float(number.rstrip("KMGT")) * unit)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise UsageError(f"--file-size is a number of bytes such as 500MB or 5GB, not {text!r}")
    return found


def _writers(given: int | None) -> int:
    if given is None:
        return min(_MOST_WRITERS, os.cpu_count() or 1)
    if given < 1:
        raise UsageError(f"--writers {given}: at least 1 is needed")
    return given
