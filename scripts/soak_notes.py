"""The records of the ranks of a soak: completed steps, restored steps, committed versions.

Takes in: the notes files of drill_job.py, one for each rank.
Gives:    per generation the step that all ranks restored and the last one that all completed.

Only new lines are read, because a training of 100 kills records thousands of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import NotesReader

Line = dict[str, Any]


@dataclass
class Life:
    """One rank in one generation."""

    restored: int | None = None
    """The step boundary at which it began."""
    done: int = 0
    """Steps completed since the start of the training; 0: none in this generation."""


@dataclass
class RankNotes:
    """What the records of one rank say so far."""

    file: NotesReader
    lives: dict[int, Life] = field(default_factory=dict)
    committed: int = 0
    """The newest committed step in its records."""
    sealed: int = 0
    intervals_ns: list[int] = field(default_factory=list)
    """Between two steps of one generation."""
    problems: list[str] = field(default_factory=list)
    _taken: int = 0
    """Number of lines."""
    _last: Line | None = None

    def read(self) -> None:
        lines = self.file.read()
        for line in lines[self._taken :]:
            self._take(line)
        self._taken = len(lines)

    def _take(self, line: Line) -> None:
        generation = int(line["generation"])
        if self.lives and generation < max(self.lives):
            what = f"{line['kind']} in generation {generation} on {line['node']}"
            newest = f"after generation {max(self.lives)} had begun"
            self.problems.append(f"{self.file.path.stem}: {what} {newest}")
            return
        life = self.lives.setdefault(generation, Life())
        if line["kind"] == "attached":
            life.restored = int(line["step"])
        if line["kind"] != "step":
            self._last = None
            return
        life.done = int(line["step"]) + 1
        self.committed = max(self.committed, int(line.get("committed", 0)))
        self.sealed = max(self.sealed, int(line.get("sealed", 0)))
        if self._last is not None:
            self.intervals_ns.append(int(line["ns"]) - int(self._last["ns"]))
        self._last = line


class TrainingNotes:
    """Of all ranks together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.ranks = [RankNotes(NotesReader(path)) for path in paths]

    def read(self) -> None:
        for rank in self.ranks:
            rank.read()

    @property
    def generations(self) -> list[int]:
        """Those in which every rank has begun, in order."""
        found = [{g for g, life in rank.lives.items() if life.restored is not None}
                 for rank in self.ranks]  # fmt: skip
        return sorted(set.intersection(*found))

    def restored(self, generation: int) -> list[int]:
        """The step boundary at which each rank began that generation; equal in a correct run."""
        return [rank.lives[generation].restored or 0 for rank in self.ranks]

    def done(self, *, before: int | None = None) -> int:
        """Steps that all ranks have completed, in any generation or in those before this one."""
        found = [g for g in self.generations if before is None or g < before]
        return max((min(rank.lives[g].done for rank in self.ranks) for g in found), default=0)

    @property
    def committed(self) -> int:
        """The newest step that any rank recorded as committed."""
        return max(rank.committed for rank in self.ranks)

    @property
    def sealed(self) -> int:
        """The newest step that all ranks have sealed."""
        return min(rank.sealed for rank in self.ranks)

    @property
    def problems(self) -> list[str]:
        return [problem for rank in self.ranks for problem in rank.problems]

    def step_s(self) -> float:
        """The usual time of a step: median of the first rank."""
        intervals = sorted(self.ranks[0].intervals_ns)
        return intervals[len(intervals) // 2] / 1e9 if intervals else 0.0
