"""One survey of paths: the leader requests probes in rounds, one round after the other.

Runs in:  the agent that leads. Pure.
Takes in: rounds of paths, the nodes' answers, lost nodes, time.
Gives:    probe requests; measurements.
Survives: nodes that die, pause or answer late: each costs one round's limit, once. The leader: the
          next one has no survey, and begins one if it needs one.

Rule 1: the end of a survey depends on no node: it ends after its limit, with the results so far.
Rule 2: an answer counts only for the survey that requested it, and only from the requested node.
Rule 3: an interface that two nodes have failed to reach is not probed again, which keeps a dead
        interface cheap. A path that failed for another reason is probed a second time.
Rule 4: a path far below the others of its rail is probed again too, and the better rate counts:
        other load on the machines makes a short transfer slower, and nothing makes it faster.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nsmallest
from statistics import median

import msgspec

from ftrun.network.detect.probe_schedule import NetworkPath, pack
from ftrun.network.detect.rails import RunRails
from ftrun.recovery.commands import Send
from ftrun.wire.cluster.generation import PathMeasurement
from ftrun.wire.cluster.messages import ProbePathRequest, ProbePathResult

ROUND_S, SHORT_ROUND_S = 1.2, 0.9
"""Time limit of a round of full and of short probes. It is longer than a node probes a path before
it gives up, connection and transfer included."""

MAX_PATHS = 8_192
"""Approximate number of paths that one survey probes, and that are retained. They are judged in the
leader's loop, where nothing may take as long as the failure timeout of an agent. 4,096 nodes
with 2 rails have two thirds more even with the fewest pairings, because an interface's fault
shows only from two other nodes."""
_LEAST_PAIRINGS = 2
_GIVEN_UP_AFTER = 2
"""Nodes that have failed to reach an interface."""

Round = Sequence[NetworkPath]
_LOW = 0.7
"""Fraction of the median rate over a rail."""

End = tuple[str, str]
"""A node and a rail: one interface."""


def most_rounds(num_nodes: int, num_rails: int, most: int) -> int:
    """The number of rounds that probe about `MAX_PATHS` paths, with half of the nodes in each.

    There are at least two pairings for each rail, in both directions. An interface that two others
    find bad is the culprit; with a single other node the two cannot be distinguished.
    """
    return min(most, max(2 * MAX_PATHS // max(1, num_nodes), 2 * _LEAST_PAIRINGS * num_rails))


def most_kept(num_nodes: int, num_rails: int) -> int:
    return max(MAX_PATHS, _LEAST_PAIRINGS * num_nodes * num_rails)


def worst(most: int, paths: Iterable[PathMeasurement]) -> list[PathMeasurement]:
    """The slowest paths first; of those without a rate the longest round trip first."""
    return nsmallest(most, paths, key=lambda one: (one.bytes_per_s, -one.rtt_s))


def newer(
    found: Mapping[NetworkPath, PathMeasurement], old: Mapping[NetworkPath, PathMeasurement]
) -> dict[NetworkPath, PathMeasurement]:
    """The new measurements; a path that answers without a rate keeps its measured rate."""
    return {
        path: msgspec.structs.replace(one, bytes_per_s=old[path].bytes_per_s)
        if path in old and one.rtt_s > 0 and not (one.bytes_per_s or one.problem)
        else one
        for path, one in found.items()
    }


def paths_to(ends: Collection[End], rails: RunRails) -> list[NetworkPath]:
    """A path to each of these interfaces from two others, preferably ones that are not among them.

    The sources rotate, so that many interfaces do not wait for the same two.
    """
    found: list[NetworkPath] = []
    for rail, on in rails.items():
        sound = [node for node in on if (node, rail) not in ends]
        ask = sound if len(sound) >= _GIVEN_UP_AFTER else [*on]
        for at, node in enumerate(on):
            if (node, rail) in ends:
                turn = (ask[(at + step) % len(ask)] for step in range(1, _GIVEN_UP_AFTER + 2))
                others = [one for one in dict.fromkeys(turn) if one != node]
                found += [NetworkPath(one, node, rail) for one in others[:_GIVEN_UP_AFTER]]
    return found


class ProbeSurvey:
    """A survey of some paths."""

    def __init__(
        self,
        number: int,
        rounds: Sequence[Round],
        rails: RunRails,
        *,
        limit_s: float,
        now_s: float,
        pause_s: float = 0.0,
        is_short: bool = False,
    ) -> None:
        """Prepares the survey; `poll` begins it.

        Args:
            number: unique among the surveys of this leader.
            rounds: no round contains a node twice.
            rails: the interfaces of all nodes.
            pause_s: minimum time from the start of one round to the start of the next.
            is_short: probe only whether paths answer, and their round trips.
        """
        self.found: dict[NetworkPath, PathMeasurement] = {}
        self.started_s = now_s
        self.ended_s: float | None = None
        self._number = number
        self._rounds: list[Round] = [*rounds]
        self._rails = rails
        self._end_s = now_s + limit_s
        self._pause_s = pause_s
        self.is_short = is_short
        self._limit_s = SHORT_ROUND_S if is_short else ROUND_S
        self._waits: set[NetworkPath] = set()
        self._round_s = now_s - pause_s
        self._gone: set[str] = set()
        """Lost nodes."""
        self._unresponsive: set[str] = set()
        """Nodes that have not answered; a node that answers late is asked again."""
        self._failed: dict[End, set[str]] = {}
        """The nodes that did not reach an interface, or that it did not reach."""
        self.reached: set[End] = set()
        self._is_second_try = False

    @property
    def given_up(self) -> set[End]:
        """Interfaces that answered no probe of two other nodes, or of the only other node."""
        return {
            (node, rail)
            for (node, rail), by in self._failed.items()
            if (node, rail) not in self.reached
            and len(by) >= min(_GIVEN_UP_AFTER, len(self._rails[rail]) - 1)
        }

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    def tried(self, sender: str, body: ProbePathResult, *, now_s: float) -> list[Send]:
        found = body.found
        path = NetworkPath.of(found)
        is_ours = body.survey == self._number and found.source == sender
        if not is_ours or self.is_over or path.rail not in self._rails:
            return []
        self._waits.discard(path)
        self._unresponsive.discard(sender)
        if body.is_untried:
            return self.poll(now_s=now_s)
        before = self.found.get(path)
        if before is None or found.bytes_per_s >= before.bytes_per_s:
            self.found[path] = found
        ends = {(path.source, path.rail): path.destination, (path.destination, path.rail): sender}
        if found.rtt_s > 0:
            self.reached.update(ends)
        else:
            for end, other in ends.items():
                self._failed.setdefault(end, set()).add(other)
        return self.poll(now_s=now_s)

    def lost(self, node_id: str) -> None:
        self._gone.add(node_id)
        self._waits = {one for one in self._waits if node_id not in (one.source, one.destination)}

    def poll(self, *, now_s: float) -> list[Send]:
        """Starts the next round when one is over; ends without rounds or time left."""
        if self.is_over:
            return []
        if self._waits and now_s - self._round_s >= self._limit_s:
            self._unresponsive.update(path.source for path in self._waits)
            self._waits.clear()
        if now_s >= self._end_s:
            self.ended_s = now_s
            return []
        if self._waits or now_s - self._round_s < self._pause_s:
            return []
        return self._next_round(now_s)

    def _next_round(self, now_s: float) -> list[Send]:
        while True:
            if not self._rounds and not (self._is_second_try or self.is_short):
                self._is_second_try = True
                self._rounds = [*pack(self._to_try_again())]
            if not self._rounds:
                self.ended_s = now_s
                return []
            paths = [path for path in self._rounds.pop(0) if self._is_worth_it(path)]
            if paths:
                self._round_s = now_s
                self._waits = set(paths)
                return [Send(path.source, self._ask(path)) for path in paths]

    def _to_try_again(self) -> list[NetworkPath]:
        rates: dict[str, list[float]] = {}
        for path, one in self.found.items():
            if one.bytes_per_s > 0:
                rates.setdefault(path.rail, []).append(one.bytes_per_s)
        low = {rail: _LOW * median(of) for rail, of in rates.items()}
        failed = [
            path
            for path, one in self.found.items()
            if one.bytes_per_s < low.get(path.rail, 0.0) or (one.problem and one.rtt_s <= 0)
        ]
        return [path for path in failed if self._is_worth_it(path)]

    def _is_worth_it(self, path: NetworkPath) -> bool:
        ends = (path.source, path.destination)
        if not (self._gone | self._unresponsive).isdisjoint(ends):
            return False
        return not any(self._is_given_up((node, path.rail)) for node in ends)

    def _is_given_up(self, end: End) -> bool:
        failed = self._failed.get(end, set())
        return end not in self.reached and len(failed) >= _GIVEN_UP_AFTER

    def _ask(self, path: NetworkPath) -> ProbePathRequest:
        mine = self._rails[path.rail][path.source]
        there = self._rails[path.rail][path.destination]
        return ProbePathRequest(
            survey=self._number,
            destination=path.destination,
            rail=path.rail,
            name=mine.name,
            from_host=mine.host,
            host=there.host,
            port=there.port,
            is_short=self.is_short,
        )
