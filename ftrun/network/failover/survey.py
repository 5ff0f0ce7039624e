"""One survey of roads: probes in rounds, asked for by the lead, one round after the other.

Runs in:  the agent that leads. Pure.
Takes in: rounds of roads, the nodes' answers, who is lost, time.
Gives:    what to ask of whom; what was found.
Survives: nodes that die, stand still or answer late: each costs one round's limit, once. The lead:
          the next one knows no survey, and begins one where it needs one.

Rule 1: a survey has an end that does not depend on anybody: it is over after its limit, with what
        is known by then.
Rule 2: an answer counts for the survey that asked for it, and from the node that was asked.
Rule 3: an interface that two nodes in a row have not reached is not waited for again: that is what
        keeps a dead one cheap. A road that failed otherwise is tried a second time.
Rule 4: so is one that is far below the others of its rail, and the better figure counts: what else
        the machines do makes a short transfer slower, and nothing makes it quicker.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nsmallest
from statistics import median

import msgspec

from ftrun.network.detect.probe_schedule import NetworkPath, pack
from ftrun.network.detect.rails import RunRails
from ftrun.recovery.commands import Send
from ftrun.wire.cluster.messages import ProbePathRequest, ProbePathResult
from ftrun.wire.cluster.rails import PathMeasurement

ROUND_S, SHORT_ROUND_S = 1.2, 0.9
"""Longer than a node tries a road before it gives up, the connection and all that follows it."""

MOST_ROADS = 8_192
"""About so many are probed in one survey, and kept: they are judged in the lead's loop, where
nothing may take as long as an agent that is silent is waited for. 4,096 nodes with 2 rails have
two thirds more at their fewest: each interface's fault shows from two others only."""
_LEAST_PAIRINGS = 2
_GIVEN_UP_AFTER = 2
"""Nodes that have not reached an interface."""

Round = Sequence[NetworkPath]
_LOW = 0.7
"""Of the median rate over a rail."""

End = tuple[str, str]
"""A node and a rail: one interface."""


def most_rounds(num_nodes: int, num_rails: int, most: int) -> int:
    """So many rounds that about `MOST_ROADS` are probed, each with half of the nodes in it.

    At least two pairings for each rail, in both directions: an interface that two others find bad
    is to blame, one that a single other finds bad is not told from it.
    """
    return min(most, max(2 * MOST_ROADS // max(1, num_nodes), 2 * _LEAST_PAIRINGS * num_rails))


def most_kept(num_nodes: int, num_rails: int) -> int:
    """So many roads are kept: those of one survey of all nodes."""
    return max(MOST_ROADS, _LEAST_PAIRINGS * num_nodes * num_rails)


def worst(most: int, roads: Iterable[PathMeasurement]) -> list[PathMeasurement]:
    """The slowest first; of those without a rate the one with the longest way."""
    return nsmallest(most, roads, key=lambda one: (one.bytes_per_s, -one.rtt_s))


def newer(
    found: Mapping[NetworkPath, PathMeasurement], old: Mapping[NetworkPath, PathMeasurement]
) -> dict[NetworkPath, PathMeasurement]:
    """What was found now; a road that only answers keeps the rate that was measured before."""
    return {
        road: msgspec.structs.replace(one, bytes_per_s=old[road].bytes_per_s)
        if road in old and one.rtt_s > 0 and not (one.bytes_per_s or one.problem)
        else one
        for road, one in found.items()
    }


def roads_to(ends: Collection[End], rails: RunRails) -> list[NetworkPath]:
    """A road to each of these interfaces from two others, which are to be sound if there are such.

    They take turns, so that many ends do not wait for the same two.
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
    """Of some roads."""

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
        """Prepare; `look` begins it.

        Args:
            number: of this survey; no other of this lead has it.
            rounds: in no round a node twice.
            rails: the interfaces of all nodes.
            limit_s: for all of it.
            now_s: the time.
            pause_s: from the beginning of a round to that of the next, at least.
            is_short: only whether roads are there, and their round trips.
        """
        self.found: dict[NetworkPath, PathMeasurement] = {}
        self.begun_s = now_s
        self.ended_s: float | None = None
        self._number = number
        self._rounds: list[Round] = [*rounds]
        self._rails = rails
        self._end_s = now_s + limit_s
        self._pause_s = pause_s
        self._is_short = is_short
        self._limit_s = SHORT_ROUND_S if is_short else ROUND_S
        self._waits: set[NetworkPath] = set()
        self._round_s = now_s - pause_s
        self._gone: set[str] = set()
        """Nodes that are lost."""
        self._mute: set[str] = set()
        """Nodes that have not answered; one that answers late is asked again."""
        self._failed: dict[End, set[str]] = {}
        """Whom each interface was not reached by, or did not reach."""
        self._reached: set[End] = set()
        self._is_second_try = False

    @property
    def given_up(self) -> set[End]:
        """Interfaces that answered nobody: two others, or the one other where there is one."""
        return {
            (node, rail)
            for (node, rail), by in self._failed.items()
            if (node, rail) not in self._reached
            and len(by) >= min(_GIVEN_UP_AFTER, len(self._rails[rail]) - 1)
        }

    @property
    def reached(self) -> set[End]:
        """Interfaces that somebody has reached."""
        return set(self._reached)

    @property
    def is_short(self) -> bool:
        return self._is_short

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    def tried(self, sender: str, body: ProbePathResult, *, now_s: float) -> list[Send]:
        """A node has tried a road."""
        found = body.found
        road = NetworkPath.of(found)
        is_ours = body.survey == self._number and found.source == sender
        if not is_ours or self.is_over or road.rail not in self._rails:
            return []
        self._waits.discard(road)
        self._mute.discard(sender)
        if body.is_untried:
            return self.look(now_s=now_s)
        before = self.found.get(road)
        if before is None or found.bytes_per_s >= before.bytes_per_s:
            self.found[road] = found
        ends = {(road.source, road.rail): road.destination, (road.destination, road.rail): sender}
        if found.rtt_s > 0:
            self._reached.update(ends)
        else:
            for end, other in ends.items():
                self._failed.setdefault(end, set()).add(other)
        return self.look(now_s=now_s)

    def lost(self, node_id: str) -> None:
        """Nothing is to be expected of this node, nor of roads to it."""
        self._gone.add(node_id)
        self._waits = {one for one in self._waits if node_id not in (one.source, one.destination)}

    def look(self, *, now_s: float) -> list[Send]:
        """Go on, where a round is over; end, where there is none left or no time."""
        if self.is_over:
            return []
        if self._waits and now_s - self._round_s >= self._limit_s:
            self._mute.update(road.source for road in self._waits)
            self._waits.clear()
        if now_s >= self._end_s:
            self.ended_s = now_s
            return []
        if self._waits or now_s - self._round_s < self._pause_s:
            return []
        return self._next_round(now_s)

    def _next_round(self, now_s: float) -> list[Send]:
        while True:
            if not self._rounds and not (self._is_second_try or self._is_short):
                self._is_second_try = True
                self._rounds = [*pack(self._to_try_again())]
            if not self._rounds:
                self.ended_s = now_s
                return []
            roads = [road for road in self._rounds.pop(0) if self._is_worth_it(road)]
            if roads:
                self._round_s = now_s
                self._waits = set(roads)
                return [Send(road.source, self._ask(road)) for road in roads]

    def _to_try_again(self) -> list[NetworkPath]:
        rates: dict[str, list[float]] = {}
        for road, one in self.found.items():
            if one.bytes_per_s > 0:
                rates.setdefault(road.rail, []).append(one.bytes_per_s)
        low = {rail: _LOW * median(of) for rail, of in rates.items()}
        failed = [
            road
            for road, one in self.found.items()
            if one.bytes_per_s < low.get(road.rail, 0.0) or (one.problem and one.rtt_s <= 0)
        ]
        return [road for road in failed if self._is_worth_it(road)]

    def _is_worth_it(self, road: NetworkPath) -> bool:
        if {road.source, road.destination} & (self._gone | self._mute):
            return False
        return not any(
            self._is_given_up((node, road.rail)) for node in (road.source, road.destination)
        )

    def _is_given_up(self, end: End) -> bool:
        failed = self._failed.get(end, set())
        return end not in self._reached and len(failed) >= _GIVEN_UP_AFTER

    def _ask(self, road: NetworkPath) -> ProbePathRequest:
        mine = self._rails[road.rail][road.source]
        there = self._rails[road.rail][road.destination]
        return ProbePathRequest(
            survey=self._number,
            destination=road.destination,
            rail=road.rail,
            name=mine.name,
            from_host=mine.host,
            host=there.host,
            port=there.port,
            is_short=self._is_short,
        )
