"""What a journal says about its run as a whole: ranks, nodes, steps, start-up, checkpoints."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.events import WorkersExited
from ftrun.records.decode import JournalLine, of_kinds
from ftrun.records.incidents import LifecycleChanged, VerdictRecord
from ftrun.records.membership import GenerationChosen
from ftrun.records.recovery import GenerationStartedRecord, KillWorkers, Recovered
from ftrun.records.run import ProgressRecord
from ftrun.records.snapshots import CheckpointWrittenRecord
from ftrun.tools.report.journal import Line, first_step_at

MAX_RANKS = 100_000


@dataclass(slots=True)
class RunBackground:
    """What is known of the run that an incident happened to."""

    world: Sequence[int] = ()
    node_of: Mapping[int, str] = field(default_factory=dict)
    step_s: float | None = None
    """The median duration of a step."""
    start_s: float | None = None
    """From the first line of the run to its first step, or to the start of its ranks."""
    has_first_step: bool = False
    checkpoints: Sequence[tuple[float, int]] = ()
    """(time, step) of each checkpoint written."""
    seats: Sequence[tuple[float, Sequence[int], str]] = ()
    """(time, ranks, node): a line of that node has named these ranks as its own."""
    commits: Sequence[tuple[float, int]] = ()
    """(time at which it was reported, generation) of committed versions."""
    starts: Sequence[JournalLine[GenerationStartedRecord]] = ()


def background_of(lines: Sequence[Line]) -> RunBackground:
    seats = list(_placements(lines))
    node_of = {rank: node for _, ranks, node in seats for rank in ranks}
    start_s, has_first_step = start_of(lines)
    return RunBackground(
        world=range(min(_world_size(lines, node_of), MAX_RANKS)),
        node_of=node_of,
        step_s=_step_s(lines),
        start_s=start_s,
        has_first_step=has_first_step,
        checkpoints=[
            (line.t_s, line.record.step) for line in of_kinds(lines, CheckpointWrittenRecord)
        ],
        seats=seats,
        commits=[
            (line.t_s, committed[0])
            for line in of_kinds(lines, ProgressRecord)
            if (committed := line.record.committed) is not None
        ],
        starts=of_kinds(lines, GenerationStartedRecord),
    )


def placements_of(
    begin_s: float, background: RunBackground, lost: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """For each rank: its node before its generation began at that time, and since.

    A lost node may not have named its ranks. They are the ranks without a node, if their number
    equals the number that it started.
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
    counts = {one.node: len(one.record.pids) for one in background.starts if one.t_s < begin_s}
    theirs = [node for node in lost for _ in range(counts.get(node, 0))]
    if unknown and len(theirs) == len(unknown):
        before.update(zip(unknown, theirs, strict=True))
    return {
        rank: (before.get(rank, after.get(rank, "")), after.get(rank, before.get(rank, "")))
        for rank in background.world
    }


def _placements(lines: Sequence[Line]) -> Iterator[tuple[float, Sequence[int], str]]:
    """Yields what a line of a node newly says about the ranks on it."""
    known: dict[int, str] = {}
    for line in lines:
        match line.record:
            case ProgressRecord(ranks=rows):
                ranks: Sequence[int] = [row[0] for row in rows[:MAX_RANKS]]
            case GenerationStartedRecord():
                ranks = line.record.ranks
            case WorkersExited(exits=exits):
                ranks = [one.rank for one in exits]
            case _:
                continue
        if line.node and any(known.get(rank) != line.node for rank in ranks):
            known.update((rank, line.node) for rank in ranks)
            # A rank that ends in a generation was there since it began.
            yield line.t_s, ranks, line.node


def _world_size(lines: Sequence[Line], node_of: Mapping[int, str]) -> int:
    started: dict[int, dict[str, int]] = {}
    size = 0
    for line in lines:
        match line.record:
            case GenerationChosen():
                size = line.record.world_size
            case GenerationStartedRecord(generation=generation, pids=pids):
                started.setdefault(generation, {})[line.node] = len(pids)
            case VerdictRecord():
                size = max(size, len(line.record.ranks))
            case _:
                pass
    largest = max((sum(by_node.values()) for by_node in started.values()), default=0)
    return size or max(largest, max(node_of, default=-1) + 1)


def _step_s(lines: Sequence[Line]) -> float | None:
    """By the progress lines; else by the steps that a generation made after its first one."""
    known = [one.record.p50_s for one in of_kinds(lines, ProgressRecord)]
    if medians := [one for one in known if one is not None and one > 0]:
        return statistics.median(medians)
    found: list[float] = []
    first_step: float | None = None
    for line in of_kinds(lines, Recovered, WorkersExited):
        if isinstance(line.record, Recovered):
            first_step = first_step_at(line)
        elif isinstance(line.record, WorkersExited) and first_step is not None:
            here = line.record.progress.steps_here
            if here > 1 and line.t_s > first_step:
                found.append((line.t_s - first_step) / (here - 1))
            first_step = None
    return statistics.median(found) if found else None


def start_of(launch: Sequence[Line]) -> tuple[float | None, bool]:
    """Seconds until the first step, and True; if not known, until the start of ranks, and False."""
    if not launch:
        return None, False
    begin = launch[0].t_s
    started = None
    for line in launch:
        match line.record:
            case GenerationStartedRecord() if started is None:
                started = line.t_s
            case LifecycleChanged(new="run"):
                return line.t_s - begin, True
            case ProgressRecord(steps_here=here, p50_s=p50_s) if here:
                guess = line.t_s - here * (p50_s or 0.0)
                return max(guess, started or begin) - begin, True
            case WorkersExited() | KillWorkers() | Recovered():
                break
            case _:
                pass
    return (None if started is None else started - begin), False
