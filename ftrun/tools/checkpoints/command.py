"""`ftrun snapshots`: the checkpoints in a directory or at a URL, and what can be done with them.

Runs in:  cli. Reading and removing is done by a process of the SMP's folder, started for it.
Takes in: what `--checkpoint-dir` was given.
Gives:    a table, or JSON; exit code 0, or 1 where a checkpoint cannot be used.
"""

import math
from collections.abc import Sequence

import msgspec

from ftrun import clock
from ftrun.cli.launch.shelf_process import ask
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import duration, size
from ftrun.errors import ExitCode, UsageError
from ftrun.wire.messages.checkpoint import CatalogReport, CheckpointInfo

_HEAD = ("checkpoint", "step", "ranks", "size", "written", "run", "state")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def list_checkpoints(directory: str, *, as_json: bool) -> int:
    """Show what is there, by its indexes and the sizes of its files."""
    found = ask("list", directory)
    if as_json:
        return _as_json(found)
    _show(found)
    if found.unfinished:
        render.write_plain(
            f"\n{found.unfinished} begun and not finished; the next one that is written removes it"
        )
    return _code(found)


def verify(directory: str, names: Sequence[str], *, as_json: bool) -> int:
    """Read every byte, and compare it with its digests."""
    found = ask("verify", directory, *names)
    if as_json:
        return _as_json(found)
    for one in found.checkpoints:
        told = "; ".join(one.problems) or f"whole, {size(one.num_bytes)}"
        render.write_plain(f"{'DAMAGED' if one.problems else 'ok     '}  {one.name}: {told}")
    if not found.checkpoints:
        render.write_plain(f"there are no checkpoints in {found.directory}")
    rate = found.checked_bytes / max(found.seconds, 1e-9)
    read = f"{size(found.checked_bytes)} read in {duration(found.seconds)}"
    render.write_plain(f"{read}, {size(rate)}/s")
    return _code(found)


def prune(
    directory: str, *, keep: int, older_than: str | None, is_real: bool, as_json: bool
) -> int:
    """Remove all but the newest ones; never the one that `latest` names.

    Raises:
        UsageError: a number or a time that makes no sense.
    """
    if keep < 1:
        raise UsageError(f"--keep {keep}: at least 1 stays; remove the directory for none")
    words = [f"--keep={keep}"]
    if older_than is not None:
        words.append(f"--keep-s={_age_s(older_than)}")
    found = ask("prune", directory, *words, *([] if is_real else ["--dry-run"]))
    if as_json:
        return _as_json(found)
    would = "" if is_real else "would be "
    for name in found.removed:
        render.write_plain(f"{would}removed  {name}")
    left = len(found.checkpoints) - (0 if is_real else len(found.removed))
    render.write_plain(f"{len(found.removed)} {would}removed, {left} left in {found.directory}")
    return 0


def _age_s(text: str) -> float:
    try:
        found = float(text[:-1]) * _UNITS_S[text[-1:]]
    except (KeyError, ValueError):
        found = math.nan
    if not 0 < found < math.inf:
        raise UsageError(f"--older-than is a time such as 30m, 12h or 7d, not {text!r}")
    return found


# --- showing ----------------------------------------------------------------------------------


def _show(found: CatalogReport) -> None:
    if not found.checkpoints:
        render.write_plain(f"there are no checkpoints in {found.directory}")
        return
    render.write_plain(found.directory)
    render.show_table(_HEAD, [_row(one) for one in found.checkpoints])


def _row(one: CheckpointInfo) -> tuple[str, ...]:
    if not one.world_size:
        return (one.name, "-", "-", "-", "-", "-", "; ".join(one.problems))
    state = "; ".join(one.problems) or ("latest" if one.is_latest else "whole")
    age = f"{duration(max(0.0, clock.wall_s() - one.written_s))} ago"
    return (
        one.name,
        f"{one.step:,}",
        str(one.world_size),
        size(one.num_bytes),
        age,
        one.run_id,
        state,
    )


def _as_json(found: CatalogReport) -> int:
    render.write_plain(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    return _code(found)


def _code(found: CatalogReport) -> int:
    return ExitCode.FAILED if any(one.problems for one in found.checkpoints) else ExitCode.DONE
