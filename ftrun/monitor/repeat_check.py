"""Checks that steps repeated after a restart are bitwise equal to their first execution.

Rule 1: Executions are compared only if they start from the same state: the same world size, no
        skipped batches in between, and no resize or difference between them.
Rule 2: If two repeats from the same version differ, the script is not deterministic. If state was
        lost, every repeat differs from the first execution in the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from ftrun.ids import Version

KEPT = 4
"""Number of retained earlier executions: the first and the newest executions."""

LATE_STEPS = 16
"""Number of steps after which a missing value of a device is no longer expected."""

KEPT_STEPS = 1024
"""Number of retained records of one rank in one execution: the newest records."""


class RepeatOutcome(Enum):
    """Outcome of the comparison for one generation."""

    EQUAL = "equal"
    DIFFERS = "differs"
    STATE_LOST = "state lost"
    NOT_DETERMINISTIC = "not deterministic"
    NOT_COMPARED = "not compared"


_DIFFER = "repeated steps differ from the first execution"
WARNINGS = (RepeatOutcome.DIFFERS, RepeatOutcome.STATE_LOST, RepeatOutcome.NOT_DETERMINISTIC)


class BoundaryRecord(NamedTuple):
    """Record of one rank at one step boundary."""

    loss: int | None
    """Bits of the reported loss; None: no loss was reported for this step, or it came too late."""
    has_digest: int = 0
    """Bit i is set if the digest of sampled parameter i is valid."""
    digests: bytes = b""
    """4 bytes for each sampled parameter."""


@dataclass
class RankRecords:
    """Boundary records of one rank in one execution, by step."""

    names: tuple[str, ...] = ()
    """Names of the sampled parameters."""
    steps: dict[int, BoundaryRecord] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], records: Mapping[int, BoundaryRecord]) -> None:
        """Add newer records. If the sampled parameters changed, older records are dropped."""
        if names != self.names:
            self.names = names
            self.steps.clear()
        self.steps.update(records)
        for step in sorted(self.steps)[:-KEPT_STEPS]:
            del self.steps[step]

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


@dataclass
class Execution:
    """The steps of one generation on this node's ranks."""

    generation: int
    restored: Version | None
    """None: the generation started at the beginning of the script."""
    world_size: int
    skipped: int = 0
    """Number of batches skipped after the restored version."""
    is_resized: bool = False
    """The restored version has another world size."""
    ranks: dict[int, RankRecords] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        return self.restored.step + 1 if self.restored is not None else 1

    @property
    def start(self) -> tuple[object, ...]:
        """Executions with equal starts should be equal."""
        return self.world_size, self.restored, self.skipped

    def last_step(self) -> int:
        return max((one.last_step for one in self.ranks.values()), default=0)


class Repeat(msgspec.Struct, frozen=True):
    """Result for one generation."""

    outcome: RepeatOutcome
    text: str
    repeated: int = 0
    compared: int = 0
    """Number of steps in which at least one value of one rank was compared."""
    step: int | None = None
    rank: int | None = None
    what: str = ""
    """`loss`, or the name of the first sampled parameter that differs."""

    @property
    def is_warning(self) -> bool:
        return self.outcome in WARNINGS


class _Compared(NamedTuple):
    """Comparison of one step of one rank with an earlier execution; ordered by step."""

    step: int
    is_loss_equal: bool
    rank: int
    what: str
    """Name of the first value that differs; empty: no value differs."""
    is_repeat: bool
    """Both executions started at the same version."""
    are_parameters_equal: bool | None = None
    """None: no sampled parameter was compared."""
    has_loss: bool = False
    """A loss was compared."""

    def __str__(self) -> str:
        return f"first at step {self.step:,} in {self.what} on rank {self.rank}"


class RepeatCheck:
    """Retains the executions of one node, and compares the current execution with earlier ones."""

    def __init__(self) -> None:
        self.current: Execution | None = None
        self._earlier: list[Execution] = []
        self._has_earlier = False
        self._diverged: list[int] = []
        """Generations whose steps differ, or may differ, from steps of earlier generations."""

    def begin(self, execution: Execution) -> None:
        if self.current is not None:
            self._has_earlier = True
            self._keep(self.current)
        restored = execution.restored
        if restored is not None:
            # A version of an unknown generation (-1) may be newer than any of them.
            newest = restored.generation
            oldest = max((g for g in self._diverged if g <= newest or newest < 0), default=-1)
            self._earlier = [one for one in self._earlier if one.generation >= oldest]
        self.current = execution

    def is_over(self) -> bool:
        now = self.current
        assert now is not None
        return all(self._is_past(now, rank, records) for rank, records in now.ranks.items())

    def result(self, *, attached: bool) -> Repeat:
        """Judge the records collected so far; `attached`: the script has called `ftrun.attach`."""
        now = self.current
        assert now is not None
        if not attached:
            return _not_compared("nothing attached")
        runs = self._comparable(now)
        again = _repeated(now, runs)
        if again == 0:
            return self._nothing_repeated(now)
        compared = [one for run in runs for one in _compared(now, run)]
        steps = {one.step for one in compared}
        if not steps:
            return _not_compared(f"no value of the {_steps(again)} was recorded twice", again)
        without = sorted(now.ranks.keys() - {rank for run in runs for rank in run.ranks})
        return _judge(now, compared, again, len(steps), without)

    # --- details ------------------------------------------------------------------------------

    def _keep(self, now: Execution) -> None:
        if not now.last_step():
            return
        by_design = now.is_resized or now.skipped > 0
        if by_design or self.result(attached=True).is_warning:
            self._diverged.append(now.generation)
        self._earlier.append(now)
        if len(self._earlier) > KEPT:
            del self._earlier[1]

    def _is_past(self, now: Execution, rank: int, records: RankRecords) -> bool:
        before = [run.ranks[rank] for run in self._comparable(now) if rank in run.ranks]
        last = max((one.last_step for one in before), default=0)
        if last < now.first_step or records.last_step >= last + LATE_STEPS:
            return True
        here = records.steps.get(last)
        there = [one.steps[last] for one in before if last in one.steps]
        return here is not None and not any(_has_more(one, here) for one in there)

    def _comparable(self, now: Execution) -> list[Execution]:
        """Executions that `now` should equal; the reference is first.

        The reference is the execution that took the restored version, or else the newest execution
        without skipped batches.
        """
        same = [run for run in self._earlier if run.start == now.start]
        if now.skipped:
            return same
        others = [
            run
            for run in self._earlier
            if run.world_size == now.world_size
            and run.restored != now.restored
            and run.last_step() >= now.first_step
        ]
        wanted = now.restored.generation if now.restored is not None else -1
        made_it = [run for run in others if run.generation == wanted]
        first = (made_it or [run for run in others if not run.skipped])[-1:]
        return [*first, *same]

    def _nothing_repeated(self, now: Execution) -> Repeat:
        ahead = [run for run in self._earlier if run.last_step() >= now.first_step]
        if now.generation > 0 and not self._has_earlier:
            return _not_compared("this node has no record of earlier steps")
        if not ahead:
            return _not_compared("no step was repeated")
        newest = ahead[-1]
        if newest.world_size != now.world_size:
            ranks = "rank" if now.world_size == 1 else "ranks"
            return _not_compared(f"{now.world_size} {ranks} instead of {newest.world_size}")
        left_out = now.skipped or newest.skipped
        if left_out and not self._comparable(now):
            batches = "batch was" if left_out == 1 else "batches were"
            return _not_compared(f"{left_out:,} {batches} left out")
        return _not_compared("no step was repeated")


def _repeated(now: Execution, runs: Sequence[Execution]) -> int:
    before = max((run.last_step() for run in runs), default=0)
    return max(0, min(before, now.last_step()) - now.first_step + 1)


def _compared(now: Execution, run: Execution) -> Iterator[_Compared]:
    is_repeat = run.restored == now.restored
    for rank in now.ranks.keys() & run.ranks.keys():
        here, there = now.ranks[rank], run.ranks[rank]
        for step in here.steps.keys() & there.steps.keys():
            one, other = here.steps[step], there.steps[step]
            if one == other and here.names == there.names:  # fast path for the usual case
                if one.loss is not None or one.has_digest:
                    equal = True if one.has_digest else None
                    yield _Compared(step, True, rank, "", is_repeat, equal, one.loss is not None)
                continue
            values, before = _values(here.names, one), _values(there.names, other)
            names = [name for name in values if name in before]
            what = next((name for name in names if values[name] != before[name]), "")
            if names:
                others = [values[name] == before[name] for name in names if name != "loss"]
                equal = all(others) if others else None
                has_loss = "loss" in names
                yield _Compared(step, what != "loss", rank, what, is_repeat, equal, has_loss)


def _values(names: Sequence[str], record: BoundaryRecord) -> Mapping[str, int | bytes]:
    found: dict[str, int | bytes] = {} if record.loss is None else {"loss": record.loss}
    for at, name in enumerate(names):
        if record.has_digest >> at & 1:
            found[name] = record.digests[4 * at : 4 * at + 4]
    return found


def _judge(
    now: Execution, compared: Sequence[_Compared], again: int, count: int, without: Sequence[int]
) -> Repeat:
    different = sorted(one for one in compared if one.what)
    only_losses = {one.are_parameters_equal for one in compared} <= {True, None}
    only_losses &= any(one.are_parameters_equal for one in compared)
    between = next((one for one in different if one.is_repeat), None)
    found = between or next(iter(different), None)
    equal = {(one.step, one.rank) for one in compared if one.is_repeat and not one.what}
    if found is None:
        outcome = RepeatOutcome.EQUAL
        some = "" if count == again else f", {count:,} compared"
        text = f"repeated {_steps(again)}{some}: {_kinds(compared)} bitwise equal"
    elif between is not None:
        outcome = RepeatOutcome.NOT_DETERMINISTIC
        text = f"repeated steps differ in each repeat: {found}; the script is not deterministic"
        if now.restored is None:
            text += ", from its beginning: no snapshot was restored"
    elif (found.step, found.rank) in equal:
        outcome = RepeatOutcome.STATE_LOST
        text = (
            f"{_DIFFER}: {found}; two repeats are equal, so some state of the script is not "
            "restored: run `ftrun verify` to find it"
        )
    else:
        outcome = RepeatOutcome.DIFFERS
        text = (
            f"{_DIFFER}: {found}; either some state of the script is not restored, or the script "
            "is not deterministic: `ftrun verify` shows which"
        )
    if found is not None and only_losses:
        text += "; the sampled parameters are equal"
    if without:
        ranks = "rank" if len(without) == 1 else "ranks"
        text += f"; this node has no record of {ranks} {', '.join(map(str, without))}"
    if found is None:
        return Repeat(outcome, text, again, count)
    return Repeat(outcome, text, again, count, found.step, found.rank, found.what)


def _kinds(compared: Sequence[_Compared]) -> str:
    losses = ["losses"] if any(one.has_loss for one in compared) else []
    has_samples = any(one.are_parameters_equal is not None for one in compared)
    return " and ".join([*losses, *(["parameter samples"] if has_samples else [])])


def _has_more(before: BoundaryRecord, here: BoundaryRecord) -> bool:
    late_loss = before.loss is not None and here.loss is None
    return late_loss or before.has_digest & ~here.has_digest != 0


def _not_compared(reason: str, repeated: int = 0) -> Repeat:
    return Repeat(RepeatOutcome.NOT_COMPARED, f"not compared: {reason}", repeated)


def _steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"
