"""Files around a journal: where a run's logs are, its journals, and the last words of a rank.

Runs in: cli.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ftrun.cli.screen.text import clean, ranges
from ftrun.errors import FtrunError, UsageError
from ftrun.journal import FILE_NAME

LOGS = "ftrun-logs"
LAST_LINES = 30
_TAIL_BYTES = 32_768
_MAX_LINE_CHARS = 400
_MAX_READ_BYTES = 8_000_000


def folder_of(run: str | None, *, below: Path) -> Path:
    """The folder with the journal of a run.

    Args:
        run: a run id, or the folder itself; None: the run that was written to last.
        below: where `ftrun-logs` is looked for.

    Raises:
        UsageError: there is no such run.
    """
    if run is None:
        return _newest(below)
    for folder in (below / LOGS / run, Path(run)):
        if _journals(folder):
            return folder.resolve()
    from_spec = _of_a_live_run(run)
    if from_spec is not None and _journals(from_spec):
        return from_spec
    known = ", ".join(sorted(found.name for found in _runs(below))[:20])
    raise UsageError(
        f"no journal of run {clean(run, 200)}: neither {LOGS}/ here nor a folder of that name has "
        f"one. {f'Here are: {known}' if known else f'There is no {LOGS}/ with journals here'}"
    )


def _newest(below: Path) -> Path:
    runs = _runs(below)
    if not runs:
        raise UsageError(
            f"there is no {LOGS}/ with a journal below {below}. Name the run or the folder of its "
            "logs: ftrun report --run FOLDER"
        )
    return max(runs, key=lambda one: max(_changed(path) for path in _journals(one)))


def _runs(below: Path) -> list[Path]:
    folder = below / LOGS
    found = folder.iterdir() if folder.is_dir() else ()
    return [one.resolve() for one in found if _journals(one)]


def _journals(folder: Path) -> list[Path]:
    """The merged journal first, then those of the nodes, which hold a few lines more."""
    try:
        merged = folder / FILE_NAME
        found = [merged] if merged.is_file() else []
        return found + [one for one in sorted(folder.glob(f"*/{FILE_NAME}")) if _is_of_a_node(one)]
    except (OSError, ValueError):
        return []


def _is_of_a_node(path: Path) -> bool:
    """Else it is a run's own, and the folder above it holds several runs."""
    with path.open("rb") as lines:
        try:
            first = json.loads(lines.readline(_MAX_READ_BYTES))
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and first.get("node") == path.parent.name


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_a_live_run(run_id: str) -> Path | None:
    from ftrun.wire.run_environment import all_run_folders

    for folder in all_run_folders():
        if folder.run_id == run_id:
            try:
                spec = json.loads(folder.spec.read_text())
                logs = Path(str(spec["log_folder"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            return logs.parent if spec.get("nodes") and _journals(logs.parent) else logs
    return None


def is_alive(run_id: str) -> bool:
    """A launcher of that run is alive on this machine."""
    from ftrun.cli.runs import RunLiveness, look_at
    from ftrun.wire.run_environment import all_run_folders

    folders = [folder for folder in all_run_folders() if folder.run_id == run_id]
    return any(
        look_at(folder).life in (RunLiveness.RUNNING, RunLiveness.STARTING) for folder in folders
    )


def raw_lines(folder: Path) -> Iterator[bytes]:
    """Every line of the run's journals; one that is far too long is cut.

    Raises:
        FtrunError: there is none, or it cannot be read.
    """
    paths = _journals(folder)
    if not paths:
        raise FtrunError(f"{folder} has no {FILE_NAME}")
    for path in paths:
        try:
            with path.open("rb") as lines:
                while line := lines.readline(_MAX_READ_BYTES):
                    yield line
        except OSError as error:
            raise FtrunError(f"{path} cannot be read: {error.strerror}") from error


def last_words(
    folder: Path,
    *,
    rank: int,
    node: str,
    ranks_here: tuple[int, ...],
    generation: int,
    logs: str = "",
) -> tuple[str, tuple[str, ...]]:
    """The end of what a rank has written, where its streams were redirected into files.

    Args:
        folder: of the run's logs.
        rank: whose.
        node: its node, empty on a run of one node.
        ranks_here: all ranks of that node, so that its local number is known.
        generation: in which it failed.
        logs: where its node wrote logs, as the journal says it (`--log-dir`).

    Returns:
        What the lines are, and the lines.
    """
    local = sorted(ranks_here).index(rank) if rank in ranks_here else rank
    places = [folder / node / "workers" if node else folder / "workers", folder / "workers"]
    places += [Path(logs)] if logs else []
    empty: Path | None = None
    found: list[Path] = []
    for place in places:
        pattern = f"*/attempt_{generation}/{local}"
        streams = [sorted(one.glob("std*.log")) for one in _sorted(place, pattern)]
        found = next((paths for paths in streams if any(_size(p) for p in paths)), [])
        empty = empty or next((paths[0].parent for paths in streams if paths), None)
        if found:
            break
    if not found and empty is not None:
        return f"Rank {rank} had written nothing to {clean(str(empty), 250)}", ()
    if not found:
        return (
            f"No file holds the output of rank {ranges([rank])}: its streams went to the terminal. "
            "Start with --redirects 3 to have it here",
            (),
        )
    lines: list[str] = []
    for path in found:
        if tail := _tail(path):
            lines += [f"[{path.name}]", *tail] if len(found) > 1 else tail
    shown = found[0].parent
    return f"Rank {rank}, generation {generation}: {clean(str(shown), 250)}", tuple(lines)


def _sorted(place: Path, pattern: str) -> list[Path]:
    """The newest first: each launch of a run has a folder of its own."""
    if not place.is_dir():
        return []
    return sorted(place.glob(pattern), key=_changed, reverse=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    # Of a progress bar only what would be seen of it in the end.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [clean(line, _MAX_LINE_CHARS) for line in lines if line.strip()][-LAST_LINES:]
