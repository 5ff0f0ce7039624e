"""What a journal tells of its run as a whole: ranks, nodes, steps, start-up, checkpoints.

Runs in:  cli. Pure.
Takes in: the lines of one run, launch by launch.
Gives:    a `RunBackground`, before which each incident is seen.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.cli.screen.text import numbers, whole
from ftrun.tools.report.journal import JournalLine, first_step_at

_RANKS = re.compile(r"(\d{1,7}) ranks")
_STEPS_HERE = re.compile(r"steps_here=(\d{1,15})")
_STEP = re.compile(r"\bstep=(\d{1,15})")
MAX_RANKS = 100_000
START = "StartGeneration"


@dataclass(slots=True)
class RunBackground:
    """What is known of the run that an incident happened to."""

    world: Sequence[int] = ()
    node_of: Mapping[int, str] = field(default_factory=dict)
    step_s: float | None = None
    """The median of a step's durations."""
    start_s: float | None = None
    """From the first line of the run to its first step, or to the start of its ranks."""
    has_first_step: bool = False
    checkpoints: Sequence[tuple[float, int]] = ()
    """(when, step) of each checkpoint written."""
    seats: Sequence[tuple[float, Sequence[int], str]] = ()
    """(when, ranks, node): a line of that node has named these ranks as its own."""
    commits: Sequence[tuple[float, int]] = ()
    """(when it was told, generation) of committed versions."""
    starts: Sequence[tuple[float, str, int]] = ()
    """(when, node, how many ranks it started)."""


def background_of(lines: Sequence[JournalLine]) -> RunBackground:
    seats = list(_seats(lines))
    node_of = {rank: node for _, ranks, node in seats for rank in ranks}
    size = _world_size(lines, node_of)
    start_s, has_first_step = start_of(lines)
    written = [(line.t_s, line.whole("step")) for line in lines if line.kind == "CheckpointWritten"]
    return RunBackground(
        world=range(min(size, MAX_RANKS)),
        node_of=node_of,
        step_s=_step_s(lines),
        start_s=start_s,
        has_first_step=has_first_step,
        checkpoints=[(t_s, step) for t_s, step in written if step is not None],
        seats=seats,
        commits=[
            (line.t_s, committed[0])
            for line in lines
            if line.kind == "Pulse" and (committed := numbers(line.fields.get("committed")))
        ],
        starts=[(line.t_s, line.node, _num_pids(line)) for line in lines if line.kind == START],
    )


def progress_in(line: JournalLine) -> tuple[int | None, int | None]:
    """(step, steps in this generation) of a `WorkersExited` line."""
    progress = line.fields.get("progress")
    if isinstance(progress, dict):
        return whole(progress.get("step")), whole(progress.get("steps_here"))
    text = progress if isinstance(progress, str) else ""
    step, here = _STEP.search(text), _STEPS_HERE.search(text)
    return int(step[1]) if step else None, int(here[1]) if here else None


def homes_of(
    begin_s: float, background: RunBackground, lost: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """Of each rank, the node it was on before its generation began at that time, and since.

    A lost node often has not named its ranks. Where those of which nobody knows are just as many
    as it had started, they were its own.
    """
    before: dict[int, str] = {}
    after: dict[int, str] = {}
    for t_s, ranks, node in background.seats:
        if t_s < begin_s:
            before.update((rank, node) for rank in ranks)
    for t_s, ranks, node in reversed(background.seats):
        if t_s >= begin_s:
            after.update((rank, node) for rank in ranks)
    unknown = [rank for rank in background.world if rank not in before]
    counts = {node: num for t_s, node, num in background.starts if t_s < begin_s}
    theirs = [node for node in lost for _ in range(counts.get(node, 0))]
    if unknown and len(theirs) == len(unknown):
        before.update(zip(unknown, theirs, strict=True))
    return {
        rank: (before.get(rank, after.get(rank, "")), after.get(rank, before.get(rank, "")))
        for rank in background.world
    }


def _seats(lines: Sequence[JournalLine]) -> Iterator[tuple[float, Sequence[int], str]]:
    """As far as a line of a node names the ranks on it; only what is new."""
    known: dict[int, str] = {}
    for line in lines:
        if not line.node:
            continue
        if line.kind == "Pulse":
            ranks: Sequence[int] = (line.fields.get("ranks") or ())[:MAX_RANKS]
        elif line.kind == START:
            ranks = numbers(line.fields.get("ranks"))
        elif line.kind == "WorkersExited":
            told = (whole(one.get("rank")) for one in line.parts("exits"))
            ranks = [rank for rank in told if rank is not None]
        else:
            continue
        if any(known.get(rank) != line.node for rank in ranks):
            known.update((rank, line.node) for rank in ranks)
            # What ends in a generation was there since it began.
            yield line.t_s, ranks, line.node


def _num_pids(line: JournalLine) -> int:
    pids = line.fields.get("pids")
    return len(pids) if isinstance(pids, list | dict) else 0


def _world_size(lines: Sequence[JournalLine], node_of: Mapping[int, str]) -> int:
    started: dict[int, dict[str, int]] = {}
    size = 0
    for line in lines:
        if line.kind == "Generation" and (seen := _RANKS.search(line.text("text"))):
            size = int(seen[1])
        elif line.kind == START:
            by_node = started.setdefault(line.whole("generation") or 0, {})
            by_node[line.node] = _num_pids(line)
        elif line.kind == "Verdict":
            size = max(size, len(line.parts("ranks")))
    largest = max((sum(by_node.values()) for by_node in started.values()), default=0)
    return size or max(largest, max(node_of, default=-1) + 1)


def _step_s(lines: Sequence[JournalLine]) -> float | None:
    """By the pulses; else by how many steps a generation made after its first one."""
    told = [line.number("p50_s") for line in lines if line.kind == "Pulse"]
    known = [one for one in told if one is not None and one > 0]
    if known:
        return statistics.median(known)
    found: list[float] = []
    first_step: float | None = None
    for line in lines:
        if line.kind == "Recovered":
            first_step = first_step_at(line)
        elif line.kind == "WorkersExited" and first_step is not None:
            _, here = progress_in(line)
            if here is not None and here > 1 and line.t_s > first_step:
                found.append((line.t_s - first_step) / (here - 1))
            first_step = None
    return statistics.median(found) if found else None


def start_of(launch: Sequence[JournalLine]) -> tuple[float | None, bool]:
    """How long a launch took until its first step; without a line that tells, until its ranks
    were started.
    """  # noqa: D205 - one sentence
    if not launch:
        return None, False
    begin = launch[0].t_s
    started = None
    for line in launch:
        if line.kind == START and started is None:
            started = line.t_s
        elif line.kind == "Transition" and line.text("new") == "run":
            return line.t_s - begin, True
        elif line.kind == "Pulse" and (here := line.whole("steps_here")):
            guess = line.t_s - here * (line.number("p50_s") or 0.0)
            return max(guess, started or begin) - begin, True
        elif line.kind in ("WorkersExited", "KillWorkers", "Recovered"):
            break
    return (None if started is None else started - begin), False
