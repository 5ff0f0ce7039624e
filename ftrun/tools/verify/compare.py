"""Compares the records of two runs step by step, event by event. Pure.

A result is a tensor or value of the state, a loss, a batch, or the input of a module. Everything
else that is recorded (random states, variables, flags) serves to explain a difference in a result.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ftrun.wire.verify_records import ATTACHED, BATCH, BOUNDARY, KILLED, STARTED, VerifyRecord

_RESULTS = ("tensor", "value", "loss", "batch", "input")


def word_of(key: str) -> str:
    """Returns the first word of a key of `VerifyRecord.digests`, which says what it is about."""
    return key.split(" ", 1)[0].split("[", 1)[0].split(".", 1)[0]


def name_of(key: str) -> str:
    """Returns the key without its first word; for a batch or an input the key itself."""
    head, _, name = key.partition(" ")
    return name or head


def is_result(key: str) -> bool:
    return word_of(key) in _RESULTS


@dataclass
class Life:
    """One rank in one generation: steps done at its start, and the restored version, if any."""

    generation: int
    start: int = 0
    restored: str = ""
    attached: VerifyRecord | None = None
    started: VerifyRecord | None = None
    killed: VerifyRecord | None = None
    turns: dict[int, list[VerifyRecord]] = field(default_factory=dict)
    """The events of each step, in order; the boundary is the last one of a complete step."""

    @property
    def last_step(self) -> int:
        done = [step for step, events in self.turns.items() if events[-1].event == BOUNDARY]
        return max(done, default=self.start)


Trace = Mapping[int, Sequence[Life]]
"""The generations of each rank, by rank."""


def life_of(generation: int, records: Sequence[VerifyRecord]) -> Life:
    life = Life(generation)
    has_session = any(record.event == ATTACHED for record in records)
    for record in records:
        if record.event == ATTACHED:
            life.attached, life.start, life.restored = record, record.step, record.what
            life.turns.clear()  # events before attach belong to no step
        elif record.event == STARTED:
            life.started = record
        elif record.event == KILLED:
            life.killed = record
        elif life.attached is not None or not has_session:
            life.turns.setdefault(record.step, []).append(record)
    return life


@dataclass(frozen=True)
class Difference:
    """The first event of a rank in which a result differs; `keys`: all that differ in it."""

    rank: int
    generation: int
    step: int
    event: str
    keys: tuple[str, ...]
    record: VerifyRecord
    reference: VerifyRecord


@dataclass(frozen=True)
class ObservedRestart:
    """A kill after `step` complete steps, and the restart in the state of step `resumed_from`."""

    rank: int
    step: int
    resumed_from: int
    is_restored: bool

    @property
    def repeated(self) -> int:
        return max(0, self.step - self.resumed_from)


def has_session(trace: Trace) -> bool:
    return any(life.attached is not None for lives in trace.values() for life in lives)


def steps_of(trace: Trace) -> int:
    """Returns the number of steps that every rank has completed."""
    return min((max(life.last_step for life in lives) for lives in trace.values()), default=0)


def is_complete(reference: Trace, trace: Trace) -> bool:
    """Whether a run ends at the same step as the reference."""
    if has_session(trace):
        return steps_of(trace) == steps_of(reference)
    # Without a session a restart counts steps from 0 again, or continues by its own checkpoint.
    for rank, lives in trace.items():
        turns, last = reference_turns(reference.get(rank, ())), lives[-1]
        if last.last_step + _shift(turns, last) != max(turns, default=0):
            return False
    return True


def own_failures(trace: Trace) -> int:
    """Returns the number of restarts that no kill has caused."""
    lives = [life for _, life in compared_lives(trace)]
    killed = {life.generation for life in lives if life.killed is not None}
    return max(0, len({life.generation for life in lives}) - 1 - len(killed))


def reference_turns(lives: Sequence[Life]) -> dict[int, list[VerifyRecord]]:
    """Returns the events of each step, of the last generation that made it."""
    found: dict[int, list[VerifyRecord]] = {}
    for life in lives:
        found.update(life.turns)
    return found


def restarts(trace: Trace) -> list[ObservedRestart]:
    """Returns the kills that were followed by another generation, in order."""
    found = []
    for rank, lives in trace.items():
        for life, after in itertools.pairwise(lives):
            if life.killed is not None:
                start = after.start if after.restored else 0
                restart = ObservedRestart(rank, life.killed.step, start, bool(after.restored))
                found.append((life.generation, restart))
    return [restart for _, restart in sorted(found, key=itemgetter(0))]


def differing(reference: VerifyRecord, record: VerifyRecord) -> list[str]:
    """Returns the keys whose digests differ, results first; variables only if both have them."""
    before, now = reference.digests, record.digests
    found = [
        key
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        and (word_of(key) != "local" or key in before.keys() & now.keys())
    ]
    return sorted(found, key=lambda key: not is_result(key))


def pairs(
    reference: Sequence[VerifyRecord], events: Sequence[VerifyRecord], *, is_first: bool
) -> Iterator[tuple[VerifyRecord, VerifyRecord]]:
    """Yields each event of a step with the one of the reference that it repeats.

    In the first step after a restart a loader may load batches again that it does not return, so
    that only its last batches count.
    """
    waiting = {
        event: [r for r in reference if r.event == event] for event in {r.event for r in reference}
    }
    surplus = 0
    if is_first:
        surplus = sum(r.event == BATCH for r in events) - len(waiting.get(BATCH, []))
    for record in events:
        if record.event == BATCH and surplus > 0:
            surplus -= 1
            continue
        if waiting.get(record.event):
            yield waiting[record.event].pop(0), record


def compared_lives(trace: Trace) -> Iterator[tuple[int, Life]]:
    for rank, lives in trace.items():
        for life in lives:
            yield rank, life


def event_pairs(
    reference: Trace, rank: int, life: Life
) -> Iterator[tuple[int, VerifyRecord, VerifyRecord]]:
    """Yields step by step the events of a life with those of the reference."""
    turns = reference_turns(reference.get(rank, ()))
    shift = 0 if life.attached is not None else _shift(turns, life)
    for step, events in sorted(life.turns.items()):
        is_first = step == life.start + 1
        for before, now in pairs(turns.get(step + shift, []), events, is_first=is_first):
            yield step + shift, before, now


def _shift(turns: Mapping[int, Sequence[VerifyRecord]], life: Life) -> int:
    """Returns the number of steps that a script without a session skipped by its own checkpoint."""
    if not life.turns:
        return 0
    step, events = min(life.turns.items())
    first = events[-1].digests
    found = (
        at for at, each in turns.items() if each[-1].event == BOUNDARY and each[-1].digests == first
    )
    return next(found, step) - step


def first_difference(reference: Trace, trace: Trace, *, generations: range) -> Difference | None:
    """Returns the earliest event, over all ranks, in which a result differs."""
    found = [
        difference
        for rank, life in compared_lives(trace)
        if life.generation in generations
        and (difference := _first_of(reference, rank, life)) is not None
    ]
    order = {
        event: at for at, event in enumerate((BATCH, "forward", "loss", "optimizer", BOUNDARY))
    }
    return min(
        found, key=lambda d: (d.generation, d.step, order.get(d.event, 0), d.rank), default=None
    )


def _first_of(reference: Trace, rank: int, life: Life) -> Difference | None:
    for step, before, now in event_pairs(reference, rank, life):
        keys = differing(before, now)
        if keys and is_result(keys[0]):
            return Difference(rank, life.generation, step, now.event, tuple(keys), now, before)
    return None


def noise(reference: Trace, trace: Trace, *, generations: range) -> set[str]:
    """Returns keys that differ between two runs without a failure, and so explain nothing."""
    found: set[str] = set()
    for rank, life in compared_lives(trace):
        if life.generation not in generations:
            continue
        for _, before, now in event_pairs(reference, rank, life):
            found.update(differing(before, now))
        first = next((x.attached for x in reference.get(rank, ()) if x.attached), None)
        if first is not None and life.attached is not None:
            found.update(differing(first, life.attached))
    return found


def counts(trace: Trace) -> dict[str, int]:
    """Returns the number of different results of each kind that were recorded, over all ranks."""
    seen: dict[str, set[tuple[int, str]]] = {word: set() for word in _RESULTS}
    losses = batches = 0
    for rank, life in compared_lives(trace):
        for events in life.turns.values():
            for record in events:
                losses += "loss" in record.digests
                batches += any(word_of(k) in ("batch", "input") for k in record.digests)
                for key in record.digests:
                    if is_result(key):
                        seen[word_of(key)].add((rank, key))
    found = {"tensors": len(seen["tensor"]), "values": len(seen["value"])}
    return {**found, "losses": losses, "inputs": batches}
