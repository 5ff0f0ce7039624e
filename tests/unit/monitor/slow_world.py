"""Ranks that compute and meet in collectives, in virtual time, as the observer reads them.

    world = SlowWorld(4, program=ddp(buckets=4), seed=7, noise=0.05)
    world.slow[2] = 1.5
    for looks in world.run(steps=40): ...

A program lists the operations of each rank in a step, in order. All ranks have the same program;
groups, speeds and random values differ.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftrun.monitor.slow.stragglers import RankObservation

Groups = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Compute:
    """Computation of this many seconds on each rank, times its slowness and a random factor."""

    seconds: float


@dataclass(frozen=True)
class Meet:
    """A collective of the rank's group; with `waits` it continues when all have entered."""

    groups: Groups
    waits: bool = True
    transfer_s: float = 0.0005


@dataclass(frozen=True)
class Wait:
    """Waits for all collectives that were started without waiting."""


@dataclass(frozen=True)
class Pass:
    """A message from each of these ranks to another one; both wait until the other has called."""

    to: Mapping[int, int]


Operation = Compute | Meet | Wait | Pass
Program = Sequence[Operation]


def everyone(ranks: int) -> Groups:
    return {"0": tuple(range(ranks))}


def ddp(ranks: int, *, buckets: int = 4, step_s: float = 0.1) -> list[Compute | Meet | Wait]:
    """A forward, a backward that sends its buckets at the same time, an optimizer step."""
    part_s = step_s * 0.6 / buckets
    program: list[Compute | Meet | Wait] = [Compute(step_s * 0.3)]
    for _ in range(buckets):
        program += [Compute(part_s), Meet(everyone(ranks), waits=False)]
    return [*program, Wait(), Compute(step_s * 0.1)]


def grid(data: int, tensor: int) -> tuple[Groups, Groups]:
    """Groups of a mesh; tensor parallel ranks are adjacent."""
    rows = {f"t{row}": tuple(range(row * tensor, (row + 1) * tensor)) for row in range(data)}
    columns = {
        f"d{column}": tuple(range(column, data * tensor, tensor)) for column in range(tensor)
    }
    return columns, rows


def tensor_parallel(
    data: int, tensor: int, *, layers: int = 6, step_s: float = 0.1
) -> list[Compute | Meet | Wait]:
    """A collective of the tensor group in each layer, one of the data group at the end."""
    columns, rows = grid(data, tensor)
    program: list[Compute | Meet | Wait] = []
    for _ in range(layers):
        program += [Compute(step_s * 0.9 / layers), Meet(rows)]
    return [*program, Compute(step_s * 0.1), Meet(columns)]


def pipeline(*, batches: int = 2, work_s: float = 0.02) -> list[Operation]:
    """Two stages of two replicas each: activations up, gradients back, a collective of each stage.

    Rank = stage * 2 + replica.
    """
    up = {0: 2, 1: 3}
    down = {later: first for first, later in up.items()}
    program: list[Operation] = []
    for _ in range(batches):
        program += [Compute(work_s), Pass(up)]
    for _ in range(batches):
        program += [Compute(work_s), Pass(down)]
    return [*program, Meet({"s0": (0, 1), "s1": (2, 3)})]


@dataclass
class SlowWorld:
    """One run. `slow[rank]` may be changed between two observations."""

    ranks: int
    program: Program
    seed: int
    noise: float = 0.05
    """Standard deviation of each computation, as a share of it."""
    spike: float = 0.02
    """Probability that a step of a rank takes twice as long, without a cause."""
    ranks_per_node: int = 2
    sample_s: float = 0.5
    clock_error_s: float = 0.0
    """Maximum error of the clocks of all nodes but the first."""
    kept: int = 64
    """Number of entries that a rank keeps."""
    slow: dict[int, float] = field(default_factory=dict)
    uneven: dict[int, float] = field(default_factory=dict)
    """By design, from the beginning."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self.step = 0
        self._time = [0.0] * self.ranks
        self._open: list[list[float]] = [[] for _ in range(self.ranks)]
        self._entries: list[list[tuple[str, int, float]]] = [[] for _ in range(self.ranks)]
        self._entry_waits: list[list[float]] = [[] for _ in range(self.ranks)]
        self._seq: dict[str, int] = {}
        self._waited = [0.0] * self.ranks
        """In messages."""
        self._boundaries = [(0.0, 0.0)] * self.ranks
        self._has_messages = any(isinstance(one, Pass) for one in self.program)
        nodes = 1 + (self.ranks - 1) // self.ranks_per_node
        error_s = self.clock_error_s
        self._wrong_s = [0.0] + [self._chance.uniform(-error_s, error_s) for _ in range(1, nodes)]

    @property
    def groups(self) -> Groups:
        found: Groups = {}
        for one in self.program:
            if isinstance(one, Meet):
                found.update(one.groups)
        return found

    def run(self, steps: int) -> Iterator[list[RankObservation]]:
        """Runs this number of steps; yields the observations of all ranks at each sampling time."""
        due_s = max(self._time) + self.sample_s
        for _ in range(steps):
            for one in self.program:
                self._do(one)
            self.step += 1
            self._boundaries = list(zip(self._time, self._waited, strict=True))
            while max(self._time) >= due_s:
                yield [self.poll(rank, max(self._time)) for rank in range(self.ranks)]
                due_s += self.sample_s

    def poll(self, rank: int, at_s: float) -> RankObservation:
        node = rank // self.ranks_per_node
        wrong_s = self._wrong_s[node]
        entered = [(group, seq, t + wrong_s) for group, seq, t in self._entries[rank]]
        error_s = self.clock_error_s if node else 0.0
        found = RankObservation(rank, f"node{node}", at_s, self.step, entered, error_s)
        if self._has_messages:
            waits_s, boundary = tuple(self._entry_waits[rank]), self._boundaries[rank]
            found = replace(found, waited_s=waits_s, boundary=boundary)
        return found

    def _do(self, one: Operation) -> None:
        if isinstance(one, Compute):
            for rank in range(self.ranks):
                self._time[rank] += self._seconds(rank, one.seconds)
        elif isinstance(one, Pass):
            for sender, receiver in one.to.items():
                done_s = max(self._time[sender], self._time[receiver])
                for rank in (sender, receiver):
                    self._waited[rank] += done_s - self._time[rank]
                    self._time[rank] = done_s
        elif isinstance(one, Meet):
            for group, members in one.groups.items():
                self._meet(group, members, one)
        else:
            for rank in range(self.ranks):
                self._time[rank] = max([self._time[rank], *self._open[rank]])
                self._open[rank].clear()

    def _seconds(self, rank: int, seconds: float) -> float:
        factor = self.slow.get(rank, 1.0) * self.uneven.get(rank, 1.0)
        by_chance = max(0.2, self._chance.gauss(1.0, self.noise))
        spike = 1.0 if self._chance.random() < self.spike / len(self.program) else 0.0
        return seconds * (factor * by_chance + spike)

    def _meet(self, group: str, members: tuple[int, ...], one: Meet) -> None:
        seq = self._seq[group] = self._seq.get(group, 0) + 1
        for rank in members:
            self._entries[rank].append((group, seq, self._time[rank]))
            del self._entries[rank][: -self.kept]
            self._entry_waits[rank].append(self._waited[rank])
            del self._entry_waits[rank][: -self.kept]
        done_s = max(self._time[rank] for rank in members) + one.transfer_s
        for rank in members:
            if one.waits:
                self._time[rank] = done_s + self._chance.random() * 0.0002
            else:
                self._open[rank].append(done_s)
