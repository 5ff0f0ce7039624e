"""Formats an estimate as text, and draws goodput over the number of nodes."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from ftrun.cli.screen.text import count, duration, percent
from ftrun.tools.estimate.assumptions import CROWDED_FROM, DAY_S, Assumptions
from ftrun.tools.estimate.outlook import CodeOption, Outlook
from ftrun.tools.report.render.svg import Drawing, nice

_STRATEGIES = ("periodic", "noticed", "ftrun")
WAYS = ("checkpoints", "checkpoints, ftrun detects", "snapshots under ftrun")
CODE_HEAD = ("code", "memory for it", "nodes of a group in a domain", "domains spread",
             "neighbours in one group")  # fmt: skip
_SMALL = 16

_WIDTH, _HEIGHT = 980.0, 430.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 660.0, 40.0, 362.0
_LINE = 32.0
"""Pixels; twice the minimum distance between the labels of two curves."""
_TICK_PX = 78.0


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
        "failure every",
        f"in {given.days:g} d",
        "checkpoint every",
        "goodput",
        "ftrun detects",
        "snapshot every",
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
        f"Probability that lost nodes destroy all snapshots within {_days(given)} on "
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
        "this is a model, not a measurement: failures are independent of each other, of the time "
        "and of the work of the run"
    ]
    if outlooks[-1].nodes > CROWDED_FROM and not given.crowding:
        found.append(
            f"above {CROWDED_FROM:,} nodes it is optimistic, because failures coincide there "
            "(--crowding 0.9 fits the rates of Meta)"
        )
    if outlooks[0].nodes < _SMALL:
        found.append(
            f"below {_SMALL} nodes it is optimistic: small jobs fail more often than their nodes, "
            "because of other causes"
        )
    if given.restart_more_s == Assumptions().restart_more_s:
        found.append(
            f"{duration(given.restart_more_s)} of each restart is a guess (--restart-more); the "
            f"other {duration(given.restart_s)} was measured, on two cores without a GPU"
        )
    found.append(
        "goodput counts time and does not include spares; each strategy needs them equally, and a "
        "run without a node for its ranks waits"
    )
    return found


def _goodput(it: Outlook, given: Assumptions) -> str:
    if math.isinf(it.mtbf_s):
        return (
            f"{percent(it.ftrun.goodput)} of the time is progress, because nothing fails; the rest "
            "is the cost of snapshots"
        )
    more_days = (it.ftrun.goodput - it.periodic.goodput) * given.days
    than = "more" if more_days >= 0 else "less"
    return (
        f"{percent(it.ftrun.goodput)} of the time is progress. It is "
        f"{percent(it.periodic.goodput)} with checkpoints only (one every "
        f"{duration(it.periodic.interval_s)}), and {percent(it.noticed.goodput)} if ftrun detects "
        "failures and the script resumes from its own checkpoints. Of "
        f"{_days(given)} that is {duration(abs(more_days) * DAY_S)} {than}. A failure occurs every "
        f"{duration(it.mtbf_s)}. It costs {duration(it.ftrun.dead_s)} until the next step and "
        f"{duration(it.ftrun.redone_s)} of repeated steps, instead of "
        f"{duration(it.periodic.dead_s)} and {duration(it.periodic.redone_s)}"
    )


def _code(it: Outlook, given: Assumptions) -> str:
    code = it.code
    risk = f"lost nodes destroy all snapshots in {_days(given)} with a probability of "
    risk += chance(code.loss)
    if it.nodes == 1:
        return f"none: there is no other node to store parity. {risk[0].upper()}{risk[1:]}"
    if len(it.codes) == 1:
        return f"{code.name}, as given: {risk}. {_domain(it, given)}"
    if not code.parity:
        return f"none is needed: {risk}"
    is_auto = code.name == it.auto_code
    flag = (
        "as --erasure auto chooses" if is_auto else f"--erasure {code.name}; auto: {it.auto_code}"
    )
    below = it.codes[it.codes.index(code) - 1]
    if code.loss <= given.risk:
        reason = (
            f"with {below.name} of {chance(below.loss)}. It is the least parity with at most "
            f"{chance(given.risk)} (--risk)"
        )
    else:
        reason = f"above {chance(given.risk)} (--risk), and more parity hardly reduces it"
    memory = f"It needs {100 * code.memory:.0f} % of the state in memory"
    return f"{code.name} ({flag}): {risk}, {reason}. {memory}. {_domain(it, given)}"


def _domain(it: Outlook, given: Assumptions) -> str:
    code = it.code
    may_be_lost = f"{code.parity} may be lost" if code.data else "no two neighbours may be lost"
    taken = f"{count(code.taken, 'node')} of a group in a domain of {given.domain_nodes}"
    if not code.tolerates_domain_loss:
        return (
            f"At best there are {taken}, and {may_be_lost}: losing the domain destroys "
            "the snapshots. More domains or a checkpoint on disk help; more parity does not"
        )
    return (
        f"With --fault-domain on each node there is at most {taken}; with neighbours in one "
        f"group the probability is {chance(code.loss_side_by_side)}"
    )


def _interval(it: Outlook, given: Assumptions) -> str:
    every_s = it.every * given.step_s
    cost = given.one_snapshot_s / (every_s + given.one_snapshot_s)
    redone = 0.0 if math.isinf(it.mtbf_s) else it.ftrun.redone_s / it.mtbf_s
    reason = f"snapshots take {percent(cost)} of the time, and repeated steps {percent(redone)}"
    least = given.transfer_s > every_s - given.step_s and it.every > 1
    bound = (
        f". Not more often, because the previous one is protected first, in "
        f"{duration(given.transfer_s)}"
        if least
        else ""
    )
    auto_cost = given.one_snapshot_s / (it.every_auto * given.step_s + given.one_snapshot_s)
    auto = (
        f". auto takes one every {count(it.every_auto, 'step')}, for {percent(auto_cost)} of the "
        "time, because the failure rate is unknown to it"
        if it.every_auto != it.every
        else ", as auto does"
    )
    return f"every {count(it.every, 'step')} (--snapshot-every {it.every}): {reason}{bound}{auto}"


def _spares(it: Outlook, given: Assumptions) -> str:
    repair = f"{it.in_repair:.2g} nodes are in repair on average, {duration(given.repair_s)} each"
    without = f"{part(it.too_few_without)} of the time"
    if not it.spares:
        one = percent(1 / (it.nodes + 1))
        return (
            f"none: {repair}. Without one the run waits for a node, or continues with fewer "
            f"(--nnodes MIN:MAX), for {without}; one more node would be {one} of all nodes"
        )
    domain = (
        f". A lost domain takes {given.domain_nodes} at once"
        if given.domain_share > 0 and given.domain_nodes > it.spares
        else ""
    )
    return (
        f"{it.spares} (--spares {it.spares}): {repair}. There are too few nodes for "
        f"{part(it.too_few)} of the time, without spares for {without}{domain}"
    )


def _days(given: Assumptions) -> str:
    return f"{given.days:g} days" if given.days != 1 else "one day"


# --- the picture ------------------------------------------------------------------------------


def picture(outlooks: Sequence[Outlook], style_sheet: str = "") -> Markup:
    ways = [[getattr(one, way).goodput for one in outlooks] for way in _STRATEGIES]
    last = outlooks[-1]
    about = f"with {last.nodes:,} nodes " + ", ".join(
        f"{name} {percent(way[-1])}" for name, way in zip(WAYS, ways, strict=True)
    )
    title = "Goodput over the number of nodes"
    drawing = Drawing(_WIDTH, _HEIGHT, name="estimate", title=title, about=about)
    drawing.rect(0, 0, _WIDTH, _HEIGHT, "paper")
    drawing.text(_LEFT, 20, "share of time that is progress (goodput)", "label strong")
    least = _floor(min(min(way) for way in ways))
    xs = _xs([one.nodes for one in outlooks])
    _grid(drawing, outlooks, xs, least)
    lines = [[(x, _y(value, least)) for x, value in zip(xs, way, strict=True)] for way in ways]
    for number, points in enumerate(lines):
        if len(points) > 1:
            drawing.path(points, f"way-{number}")
        for x, y in points:
            drawing.rect(x - 2.5, y - 2.5, 5, 5, f"at-{number}")
    ends = _apart([points[-1][1] for points in lines])
    for number, (name, y) in enumerate(zip(WAYS, ends, strict=True)):
        drawing.rect(_RIGHT + 16, y - 5, 10, 10, f"at-{number}")
        drawing.text(_RIGHT + 32, y + 4, f"{percent(ways[number][-1])}  {name}", "label")
    return drawing.markup(style_sheet)


def _floor(least: float) -> float:
    """Returns the lower end of the axis: 0, or close to the values if all are 0.7 or more."""
    if least < 0.7:
        return 0.0
    part = nice((1.0 - least) / 4)
    return max(0.0, 1.0 - part * math.ceil((1.0 - least) / part + 1e-9))


def _xs(nodes: Sequence[int]) -> list[float]:
    """Returns logarithmic positions: every doubling has the same width."""
    low, high = math.log2(nodes[0]), math.log2(nodes[-1])
    if high == low:
        return [(_LEFT + _RIGHT) / 2]
    return [_LEFT + 20 + (math.log2(one) - low) / (high - low) * (_RIGHT - _LEFT - 40)
            for one in nodes]  # fmt: skip


def _y(value: float, least: float) -> float:
    return _BOTTOM - (value - least) / (1.0 - least) * (_BOTTOM - _TOP)


def _grid(drawing: Drawing, outlooks: Sequence[Outlook], xs: Sequence[float], least: float) -> None:
    part = nice((1.0 - least) / 5)
    for index in range(round((1.0 - least) / part) + 1):
        value = 1.0 - index * part
        if value < least - 1e-9:
            break
        y = _y(value, least)
        drawing.line(_LEFT, y, _RIGHT, y, "grid")
        drawing.text(_LEFT - 8, y + 4, f"{100 * value:.4g} %", "tick", "end")
    after = math.inf
    # Begin at the largest number, which is always labelled.
    for one, x in zip(reversed(outlooks), reversed(xs), strict=True):
        drawing.line(x, _TOP, x, _BOTTOM, "grid")
        if after - x < _TICK_PX:
            continue
        after = x
        drawing.text(x, _BOTTOM + 18, f"{one.nodes:,}", "tick", "middle")
        shown = "never" if math.isinf(one.mtbf_s) else duration(one.mtbf_s)
        drawing.text(x, _BOTTOM + 36, shown, "tick", "middle")
    drawing.text(_RIGHT + 32, _BOTTOM + 18, "nodes", "tick")
    drawing.text(_RIGHT + 32, _BOTTOM + 36, "between two failures", "tick")


def _apart(ys: Sequence[float]) -> list[float]:
    order = sorted(range(len(ys)), key=lambda index: (ys[index], -index))
    placed: dict[int, float] = {}
    lowest = -math.inf
    for index in order:
        lowest = max(ys[index], lowest + _LINE / 2)
        placed[index] = lowest
    return [placed[index] for index in range(len(ys))]
