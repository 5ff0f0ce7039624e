"""Formats an estimate as text.

Runs in: cli. Pure.
"""

import math
from collections.abc import Sequence

from ftrun.cli.screen.text import count, duration, percent
from ftrun.tools.estimate.assumptions import Assumptions
from ftrun.tools.estimate.failure_rates import CROWDED_FROM, DAY_S
from ftrun.tools.estimate.outlook import CodeOption, Outlook

WAYS = ("checkpoints", "checkpoints, noticed by ftrun", "snapshots under ftrun")
CODE_HEAD = ("code", "memory for it", "nodes of a group in a domain", "domains spread",
             "neighbours in one group")  # fmt: skip
_SMALL = 16


def chance(p: float) -> str:
    """Formats as `98.1 %`, `0.23 %`, `1 in 20,000,000`, `below 1 in 10^12`."""
    if p >= 0.0995:
        return percent(p)
    if p >= 0.000995:
        return f"{100 * p:.2g} %"
    if p < 1e-12:
        return "none" if p <= 0.0 else "below 1 in 10^12"
    odds = 1.0 / p
    digits = 10 ** (math.floor(math.log10(odds)) - 1)
    return f"1 in {round(odds / digits) * digits:,}"


def part(p: float) -> str:
    """Formats a share of time as `87.9 %`, `0.02 %`, `below 0.001 %`."""
    if p >= 0.000995:
        return percent(p)
    return f"{100 * p:.1g} %" if p >= 1e-5 else "below 0.001 %" if p > 0 else "0 %"


def head(given: Assumptions) -> tuple[str, ...]:
    return (
        "nodes",
        "a failure each",
        f"in {given.days:g} d",
        "checkpoint each",
        "goodput",
        "noticed by ftrun",
        "snapshot each",
        "ftrun",
        "code",
        "spares",
    )


def row(it: Outlook, given: Assumptions) -> tuple[str, ...]:
    steps = count(it.every, "step")
    return (
        f"{it.nodes:,}",
        "never" if math.isinf(it.mtbf_s) else duration(it.mtbf_s),
        f"{it.failures:,.0f}" if it.failures >= 9.95 else f"{it.failures:.1f}",
        duration(it.periodic.interval_s),
        percent(it.periodic.goodput),
        percent(it.noticed.goodput),
        f"{steps}, {duration(it.every * given.step_s)}",
        percent(it.ftrun.goodput),
        it.code.name,
        f"{it.spares:,}",
    )


def code_row(code: CodeOption) -> tuple[str, ...]:
    return (
        code.name,
        f"{100 * code.memory:.0f} % of the state" if code.parity else "-",
        str(code.taken),
        chance(code.loss),
        chance(code.loss_side_by_side),
    )


def code_title(it: Outlook, given: Assumptions) -> str:
    return (
        f"How probable it is that lost nodes cost all snapshots, once in {_days(given)} on "
        f"{count(it.nodes, 'node')}"
    )


def advice(it: Outlook, given: Assumptions) -> list[tuple[str, str]]:
    return [
        ("goodput", _goodput(it, given)),
        ("code", _code(it, given)),
        ("interval", _interval(it, given)),
        ("spares", _spares(it, given)),
    ]


def caveats(outlooks: Sequence[Outlook], given: Assumptions) -> list[str]:
    found = [
        "a model, not a measurement: failures come independently of one another, of the time and "
        "of what the run does"
    ]
    if outlooks[-1].nodes > CROWDED_FROM and not given.crowding:
        found.append(
            f"above {CROWDED_FROM:,} nodes that is optimistic: faults come together there "
            "(--crowding 0.9 fits what Meta saw)"
        )
    if outlooks[0].nodes < _SMALL:
        found.append(
            f"below {_SMALL} nodes it is optimistic: small jobs fail more often than their nodes "
            "alone tell, by other causes"
        )
    if given.restart_more_s == Assumptions().restart_more_s:
        found.append(
            f"{duration(given.restart_more_s)} of each restart is a guess (--restart-more); the "
            f"other {duration(given.restart_s)} were measured, on two cores without a GPU"
        )
    found.append(
        "spares are not in goodput, which counts time; each way needs them alike, and a run "
        "without a node for its ranks is taken to wait"
    )
    return found


def _goodput(it: Outlook, given: Assumptions) -> str:
    if math.isinf(it.mtbf_s):
        return (
            f"{percent(it.ftrun.goodput)} of the time is progress, as nothing fails; the rest is "
            "what snapshots cost"
        )
    more_days = (it.ftrun.goodput - it.periodic.goodput) * given.days
    than = "more" if more_days >= 0 else "less"
    return (
        f"{percent(it.ftrun.goodput)} of the time is progress, with checkpoints each "
        f"{duration(it.periodic.interval_s)} {percent(it.periodic.goodput)}, and "
        f"{percent(it.noticed.goodput)} where ftrun notices failures and the script goes on from "
        f"its own checkpoints. Of {_days(given)} that is {duration(abs(more_days) * DAY_S)} {than}."
        f" A failure comes each {duration(it.mtbf_s)} and costs {duration(it.ftrun.dead_s)} to "
        f"the next step and {duration(it.ftrun.redone_s)} done again, instead of "
        f"{duration(it.periodic.dead_s)} and {duration(it.periodic.redone_s)}"
    )


def _code(it: Outlook, given: Assumptions) -> str:
    code = it.code
    risk = f"lost nodes cost all snapshots in {_days(given)} with a probability of "
    risk += chance(code.loss)
    if it.nodes == 1:
        return f"none: one node has no other to keep its parity. {_first(risk)}"
    if len(it.codes) == 1:
        return f"{code.name}, as given: {risk}. {_domain(it, given)}"
    if not code.parity:
        return f"none is needed: {risk}"
    is_auto = code.name == it.auto_code
    flag = "as --erasure auto takes" if is_auto else f"--erasure {code.name}; auto: {it.auto_code}"
    below = it.codes[it.codes.index(code) - 1]
    if code.loss <= given.risk:
        why = (
            f"with {below.name} of {chance(below.loss)}. It is the least parity that keeps it at "
            f"{chance(given.risk)} or below (--risk)"
        )
    else:
        why = f"above {chance(given.risk)} (--risk), and more parity hardly lowers it"
    memory = f"It needs {100 * code.memory:.0f} % of the state in memory"
    return f"{code.name} ({flag}): {risk}, {why}. {memory}. {_domain(it, given)}"


def _domain(it: Outlook, given: Assumptions) -> str:
    code = it.code
    taken = f"{count(code.taken, 'node')} of a group in a domain of {given.domain_nodes}"
    if not code.bears_a_domain:
        return (
            f"At best there are {taken}, and {code.parity} may go: losing it costs the snapshots. "
            "More domains mend that, and a checkpoint on disk outlives it; more parity does not"
        )
    return (
        f"With --fault-domain on each node there is no more than {taken}; with neighbours in one "
        f"group the probability is {chance(code.loss_side_by_side)}"
    )


def _interval(it: Outlook, given: Assumptions) -> str:
    every_s = it.every * given.step_s
    cost = given.one_snapshot_s / (every_s + given.one_snapshot_s)
    redone = 0.0 if math.isinf(it.mtbf_s) else it.ftrun.redone_s / it.mtbf_s
    why = f"snapshots take {percent(cost)} of the time, and steps done again {percent(redone)}"
    least = given.transfer_s > every_s - given.step_s and it.every > 1
    bound = (
        f". No sooner: the one before has to be protected first, {duration(given.transfer_s)}"
        if least
        else ""
    )
    auto_cost = given.one_snapshot_s / (it.every_auto * given.step_s + given.one_snapshot_s)
    auto = (
        f". auto takes one each {count(it.every_auto, 'step')}, for {percent(auto_cost)} of the "
        "time: it does not know how often nodes fail"
        if it.every_auto != it.every
        else ", as auto does"
    )
    return f"each {count(it.every, 'step')} (--snapshot-every {it.every}): {why}{bound}{auto}"


def _spares(it: Outlook, given: Assumptions) -> str:
    repair = f"{it.in_repair:.2g} nodes are in repair on average, {duration(given.repair_s)} each"
    without = f"{part(it.too_few_without)} of the time"
    if not it.spares:
        one = percent(1 / (it.nodes + 1))
        return (
            f"none: {repair}. Without one the run waits for a node, or goes on with fewer "
            f"(--nnodes MIN:MAX), for {without}; one more node would be {one} of all of them"
        )
    domain = (
        f". A lost domain takes {given.domain_nodes} at once"
        if given.domain_share > 0 and given.domain_nodes > it.spares
        else ""
    )
    return (
        f"{it.spares} (--spares {it.spares}): {repair}. Nodes are too few for "
        f"{part(it.too_few)} of the time, without spares for {without}{domain}"
    )


def _days(given: Assumptions) -> str:
    return f"{given.days:g} days" if given.days != 1 else "one day"


def _first(words: str) -> str:
    return words[:1].upper() + words[1:]
