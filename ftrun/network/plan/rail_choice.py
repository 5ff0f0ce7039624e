"""Chooses the rails that training uses, and the rail of snapshots.

Rule 1: training uses a rail only if every node has an interface on it and none of its paths is
        dead: gloo connects all nodes with all, and alternates between the rails.
Rule 2: a rail is dropped for its rate only if short probes prove it slow: below a third of the best
        one, by the medians of many paths. Alternation waits for the slowest rail, but a smaller
        difference may be due to the processor.
Rule 3: if no rail is left, the least bad one is used and reported.
Rule 4: snapshots use a rail that training does not use, if it is fast enough. Otherwise they are
        limited to a fraction of the usual rate of a training rail, never of one path's or one
        node's rate.
Rule 5: round trips do not affect the choice.
Rule 6: if no rate is known, because a new leader has only its own probes, the rails of the plan
        stay without the dead ones. No rail is chosen or dropped for a missing rate.
Rule 7: if no rail of that plan is left, another one that all nodes are on is used. If there is
        none, the plan stays: the libraries would do no better.
Rule 8: NCCL sends over one queue pair or one TCP connection between two ranks, unless it is set
        otherwise. Several are chosen where one cannot use the network: queue pairs of RDMA between
        leaf switches, whose paths are chosen by flow (C4P, arXiv 2406.04594), and sockets on
        interfaces of 100 Gbit/s, for which NCCL's guide names 4 and 4. All nodes get the same.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ftrun.network.detect.findings import (
    NetworkFinding,
    NetworkFindingKind,
    NetworkFindings,
    rate_text,
)
from ftrun.network.detect.localization import SLOW_RAIL
from ftrun.network.detect.rails import (
    QUEUE_PAIRS,
    SOCKET_THREADS,
    SOCKETS_PER_THREAD,
    RunRails,
)
from ftrun.wire.cluster.generation import NetworkPlan

SNAPSHOT_LEAST = 0.1
"""A rail below this fraction of the training rails' rate is too slow for snapshots."""
SNAPSHOT_SHARE = 0.2
"""Fraction of a training rail that snapshots may use."""


FLOWS = 4
"""Queue pairs of a connection; threads of a connection, and sockets of each thread."""
FAST_MBIT = 100_000
"""Sockets of one connection are several from this speed of the interfaces."""


@dataclass(frozen=True, slots=True)
class RailChoice:
    """Rails for training."""

    rails: tuple[str, ...]
    """In the order in which nodes name them; empty: the libraries choose by themselves."""
    dropped: Mapping[str, str]
    """All other rails, each with the reason."""
    rates: Mapping[str, float]
    """Rate of each rail at its slowest node, in bytes per second, if it is known."""
    words: tuple[str, ...]


def choose_rails(
    nodes: Sequence[str], findings: NetworkFindings, suspects: Mapping[str, str]
) -> RailChoice:
    """The rails for training; `suspects` were found slow in the run, each with the reason."""
    wrong = {rail: _wrong(rail, nodes, findings, suspects) for rail in findings.rails}
    whole = [rail for rail, reason in wrong.items() if not reason]
    if not findings.rates and not findings.dead:
        return _unprobed(whole, wrong)
    rates = {rail: _rate(rail, findings) for rail in findings.rails if rail in findings.usual}
    if not any(rail in rates for rail in whole):
        return _least_bad(nodes, findings, wrong, rates)
    dropped = {rail: reason for rail, reason in wrong.items() if reason}
    dropped |= {rail: "none of its paths was probed" for rail in whole if rail not in rates}
    whole = [rail for rail in whole if rail in rates]
    best = max(whole, key=lambda rail: rates[rail])
    used = [rail for rail in whole if not _is_behind(rail, rates[rail] / rates[best], findings)]
    for rail in whole:
        if rail not in used:
            dropped[rail] = (
                f"{_slowest(rail, findings)}{rate_text(rates[rail])} at its slowest node, where "
                f"{best} has {rate_text(rates[best])}: training would wait for it"
            )
    reported = " and ".join(f"{rail} ({rate_text(rates[rail])})" for rail in used)
    words = [f"Training uses {reported}; the rate is that of the slowest node."]
    words += _dropped_words(dropped)
    return RailChoice(tuple(used), dropped, rates, tuple(words))


def _dropped_words(dropped: Mapping[str, str]) -> list[str]:
    return [f"Rail {rail} is dropped: {reason.rstrip('.')}." for rail, reason in dropped.items()]


def choose_snapshot_way(
    choice: RailChoice, findings: NetworkFindings, nodes: Sequence[str], busy: Collection[str]
) -> tuple[str, int, str]:
    """The rail for snapshots; the limit of each node in bytes per second; both in words.

    An empty rail is the one that agents use, and 0 is no limit. `busy` are rails that the user's
    own variables give to training.
    """
    used = {*choice.rails, *busy}
    needed = SNAPSHOT_LEAST * max((choice.rates.get(rail, 0.0) for rail in used), default=0.0)
    free = [
        rail
        for rail, on in findings.rails.items()
        if rail not in used
        and on.keys() >= {*nodes}
        and not any(one.kind is NetworkFindingKind.DEAD for one in findings.of_rail(rail))
        and choice.rates.get(rail, 0.0) >= max(needed, 1.0)
    ]
    if free:
        best = max(free, key=lambda rail: choice.rates[rail])
        rate = rate_text(choice.rates[best])
        text = f"Snapshots use {best} ({rate}), which training does not use."
        return best, 0, text
    if not choice.rails:
        return "", 0, "Snapshots use the rail of the agents, without a limit."
    rail = choice.rails[-1]
    text = f"Snapshots share {rail} with training"
    usual = findings.usual.get(rail, 0.0)
    between = findings.usual_between.get(rail, usual)
    allowed = int(SNAPSHOT_SHARE * min(usual, between))
    if not allowed:
        return rail, 0, f"{text}, without a limit, because its rate is not known."
    narrow = " between leaf switches" if between < usual else ""
    text += f", limited to {rate_text(allowed)} for each node"
    return rail, allowed, f"{text}: {SNAPSHOT_SHARE:.0%} of its rate{narrow}."


def choose_flows(
    used: Sequence[str], nodes: Sequence[str], rails: RunRails, leaves: Mapping[str, str]
) -> tuple[dict[str, int], list[str]]:
    """Variables for the flows of each connection over these rails, and the reason: rule 8."""
    cards = [rails[name][node] for name in used for node in nodes if node in rails.get(name, {})]
    switches = {leaves[node] for node in nodes if node in leaves}
    if cards and all(card.hca for card in cards):
        if len(switches) < 2:
            return {}, []
        text = (
            f"NCCL uses {FLOWS} queue pairs for each connection, so that its flows spread over the "
            f"paths between {len(switches)} leaf switches."
        )
        return {QUEUE_PAIRS: FLOWS}, [text]
    slowest_mbit = min((card.speed_mbit for card in cards), default=0)
    if slowest_mbit < FAST_MBIT or any(card.hca for card in cards):
        return {}, []
    text = (
        f"NCCL uses {FLOWS} threads with {FLOWS} sockets each for a connection, because the "
        f"interfaces have {slowest_mbit / 1000:.0f} Gbit/s and no RDMA."
    )
    return {SOCKET_THREADS: FLOWS, SOCKETS_PER_THREAD: FLOWS}, [text]


def _wrong(
    rail: str, nodes: Sequence[str], findings: NetworkFindings, suspects: Mapping[str, str]
) -> str:
    """Why training cannot use a rail, whatever its rate; empty: it can."""
    on = findings.rails[rail]
    away = [node for node in nodes if node not in on]
    if away:
        if len(away) == 1:
            return f"{away[0]} has no interface on it"
        return f"{away[0]} and {len(away) - 1} more of {len(nodes)} nodes have no interface on it"
    dead = [one for one in findings.of_rail(rail) if one.kind is NetworkFindingKind.DEAD]
    if dead:
        more = f"{len(dead) - 1} more locations are" if len(dead) > 2 else "1 more location is"
        return dead[0].sentence.rstrip(".") + (f" ({more} dead)" if len(dead) > 1 else "")
    return suspects.get(rail, "")


def _rate(rail: str, findings: NetworkFindings) -> float:
    slowest = _slow_places(rail, findings)
    return findings.usual[rail] * min([1.0, *(one.pace for one in slowest)])


def _slow_places(rail: str, findings: NetworkFindings) -> list[NetworkFinding]:
    kinds = (NetworkFindingKind.SLOW, NetworkFindingKind.SPEED)
    by_rate = [one for one in findings.of_rail(rail) if not one.is_late]
    return [one for one in by_rate if one.kind in kinds and len(one.nodes) == 1]


def _slowest(rail: str, findings: NetworkFindings) -> str:
    slow = min(_slow_places(rail, findings), key=lambda one: one.pace, default=None)
    return f"{slow.culprit} is slow: " if slow else ""


def _is_behind(rail: str, share: float, findings: NetworkFindings) -> bool:
    """Whether probes prove a rail slow; `share` is its rate relative to the best rail."""
    slow = [one for one in findings.of_rail(rail) if one.kind is NetworkFindingKind.SLOW]
    whole = [one for one in slow if not one.nodes]
    paces = [one.pace for one in (*whole, *_slow_places(rail, findings))]
    return share < SLOW_RAIL and min(paces, default=1.0) < SLOW_RAIL


def _unprobed(whole: Sequence[str], wrong: Mapping[str, str]) -> RailChoice:
    """Without probes, all nodes use the first rail, which is known to connect agents."""
    used = tuple(whole[:1])
    dropped = {
        rail: reason or "no path was probed" for rail, reason in wrong.items() if rail not in used
    }
    text = f"No path was probed: training uses {used[0]}." if used else _NO_RAIL
    return RailChoice(used, dropped, {}, (text,))


def _least_bad(
    nodes: Sequence[str],
    findings: NetworkFindings,
    wrong: Mapping[str, str],
    rates: Mapping[str, float],
) -> RailChoice:
    dead = {rail: sum(path.rail == rail for path in findings.dead) for rail in wrong}
    there = [rail for rail in wrong if rail in rates and findings.rails[rail].keys() >= {*nodes}]
    if not there:
        return RailChoice((), dict(wrong), rates, (_NO_RAIL,))
    best = min(there, key=lambda rail: (dead[rail], -rates[rail]))
    dropped = {rail: reason for rail, reason in wrong.items() if rail != best}
    words = [f"No rail works between all nodes; {best} is the best one: {wrong[best].rstrip('.')}."]
    words += _dropped_words(dropped)
    return RailChoice((best,), dropped, rates, tuple(words))


_NO_RAIL = "No rail connects all nodes: the libraries choose the interfaces."


def keep_rails(
    before: NetworkPlan, nodes: Sequence[str], rails: RunRails, dead: Mapping[str, str]
) -> NetworkPlan:
    """The network plan for the next generation of these nodes, without its dead rails."""
    whole = [name for name, on in rails.items() if name not in dead and on.keys() >= {*nodes}]
    kept = [name for name in before.rails if name in whole] or whole[:1] or before.rails
    if kept == before.rails:
        return msgspec.structs.replace(before, order=list(nodes))
    left = [name for name in before.rails if name not in kept]
    reason = {name: dead.get(name, "not all nodes have an interface on it") for name in left}
    snapshots, pace = before.snapshot_rail, before.snapshot_bytes_per_s
    if snapshots in (*dead, *kept):
        snapshots, pace = kept[-1], 0  # the rate of a newly shared rail is unknown
    dropped = {name: text for name, text in before.dropped.items() if name not in kept} | reason
    flows, text = choose_flows(kept, nodes, rails, before.leaves)
    words = [f"Training continues over {' and '.join(kept)}; no rate was measured since.", *text]
    words += _dropped_words(reason)
    return msgspec.structs.replace(
        before,
        order=list(nodes),
        rails=kept,
        dropped=dropped,
        flows=flows,
        snapshot_rail=snapshots,
        snapshot_bytes_per_s=pace,
        words=words,
    )


def choices_of(plan: NetworkPlan) -> tuple[object, ...]:
    """The choices of a plan, without its sentences, whose rates change with each survey."""
    return plan.order, plan.rails, sorted(plan.dropped), plan.snapshot_rail, plan.leaves
