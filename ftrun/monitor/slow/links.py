"""Finds slow links, or nodes with a slow link: slow communication.

Source:   C4's delay matrix (arXiv 2406.04594): a hot cell is a slow link, a hot row is what a node
          sends, and a hot column is what it receives; both indicate the node's link.

A cell is judged against the fastest quarter of the others and against its own past, whichever is
slower. With two nodes only its past is used. A cell that is much slower in several samples is
named. A cell that is somewhat slower is only suspected, because a rank that reads late also slows
its senders. A probe decides such a case. A probe between agents waits for no rank.

Rule 1: A cell that uses less than a twentieth of the time is ignored, however slow it is.
Rule 2: After a repair, the cells of a link recover one by one, because values cover several
        samples. The remaining hot cells of a named location are not reported as another location.
Rule 3: From the first slow sample on, until a link can be named, no rank is named.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ftrun.monitor.slow.delay_matrix import DelayMatrix, NodeTraffic, Pair, PairDelay
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

SUSPECT = 2.5
"""Ratio from which a probe is requested."""
HOT = 8.0
"""Ratio from which a cell is named without a probe."""
COLD = 2.0
"""A cell below this ratio exonerates its sender and its receiver. Between this and hot it is no
evidence."""
CONFIRMS = 2.0
"""Ratio to the probes of other pairs from which a probe confirms a slow link."""
RTT_FLOOR_S = 0.003
"""Shorter round trips are dominated by the scheduler."""
RATE_FLOOR_S_PER_MB = 1e-5
"""100 GB/s."""
COST_SHARE = 0.05
MAX_RATIOS = 3
"""Number of the last ratios of a cell that are kept."""
SUSTAINED = 2
"""Minimum number among the last `MAX_RATIOS` ratios."""
ONE_WAY = 2.0
"""If one direction of a node or a pair is slower by this factor, the other one is slow because its
acknowledgements wait behind the data of the slow direction."""
COVER = 0.8
"""Share of a row's or column's cells that must be hot."""
SAMPLES_TO_NAME = 5
"""Number of slow samples after which a slow link is named, if it is one."""
GOOD_SAMPLES = 16
"""Samples after a named location was last found completely slow. Until then its cells are reported
under no other name."""
PROBE_EVERY_S = 10.0
"""Minimum interval for one pair."""
PROBE_LASTS_S = 12.0
"""Age limit of a result. A new probe is requested before it, and an older result may date from
before a repair."""


@dataclass(frozen=True, slots=True)
class LinkProbeReading:
    """Result of a probe of one agent to another, over its own connection."""

    sender: str
    receiver: str
    at_s: float
    rtt_s: float
    """Shortest of several round trips."""
    bytes_per_s: float
    """Rate to the receiver; 0: the transfer did not complete."""


@dataclass(frozen=True, slots=True)
class DelayTableCell:
    """One cell of the displayed table."""

    sender: str
    receiver: str
    s_per_mb: float | None
    rtt_s: float
    busy_share: float
    times_slower: float
    """Ratio to the reference value; 1 if there is none."""
    is_hot: bool


class SlowLinkDetector:
    """Links between the nodes of one generation."""

    def __init__(self) -> None:
        self.matrix = DelayMatrix()
        self._ratios: dict[Pair, deque[float]] = {}
        """Values of the last samples."""
        self._cells: dict[Pair, PairDelay] = {}
        self._probes: dict[Pair, LinkProbeReading] = {}
        self._asked_s: dict[Pair, float] = {}
        self._all_slow = 0
        """Number of consecutive samples in which all cells were slower than in their past."""
        self._suspicious = 0
        """Number of consecutive samples with a slow cell, up to now."""
        self._found: Verdict | None = None
        """Diagnosis of the last sample; it counts if the next sample gives the same one."""
        self._verdict: Verdict | None = None
        self._named = ""
        """The last reported location, for as long as Rule 2 requires."""
        self._named_cells: set[Pair] = set()
        self._named_samples = 0
        """Number of samples since it was last found completely slow."""

    def poll(
        self, samples: Iterable[NodeTraffic], hosts: Mapping[str, str], *, now_s: float
    ) -> Verdict | None:
        """Add one sample of all nodes, and judge; see `DelayMatrix.poll` for the arguments."""
        self.matrix.poll(samples, hosts)
        cells = self.matrix.cells()
        self._cells = {cell.pair: cell for cell in cells}
        for cell in cells:
            others = [one for one in cells if one.pair != cell.pair]
            kept = self._ratios.setdefault(cell.pair, deque(maxlen=MAX_RATIOS))
            kept.append(times_slower(cell, others) if cell.busy_share >= COST_SHARE else 1.0)
        self._suspicious = self._suspicious + 1 if any(map(_is_slow_now, cells)) else 0
        self._all_slow = self._all_slow + 1 if self._are_all_slower() else 0
        self._probes = {
            pair: one for pair, one in self._probes.items() if now_s - one.at_s <= PROBE_LASTS_S
        }
        hot = self._hot()
        found = self._report(hot) if hot else None
        if not hot and self._all_slow >= SUSTAINED:
            found = self._report_all()
        if self._is_recovering(found, hot) or self._is_spreading(hot):
            return self._verdict
        before, self._found = self._found, found
        if _place(before) == _place(found) or found is None:
            self._send(found, hot)
        return self._verdict

    @property
    def is_suspicious(self) -> bool:
        """A link has become slow, and there were too few samples to name it: rule 3."""
        return 0 < self._suspicious <= SAMPLES_TO_NAME

    def table(self) -> list[DelayTableCell]:
        hot = self._hot()
        return [
            DelayTableCell(
                cell.sender,
                cell.receiver,
                cell.s_per_mb,
                cell.rtt_s,
                cell.busy_share,
                self._ratios[pair][-1],
                pair in hot,
            )
            for pair, cell in sorted(self._cells.items())
        ]

    # --- probes -------------------------------------------------------------------------------

    def suspect_pairs(self, *, now_s: float) -> list[Pair]:
        """Pairs to probe now: at most one suspect, then one other pair for comparison.

        The suspect is the slowest one. The other pair is one of other nodes, if there is any.
        """
        suspects = [pair for pair in self._cells if self._sustained(pair, SUSPECT)]
        suspects.sort(key=lambda pair: -self._ratios[pair][-1])
        wanted = [pair for pair in suspects if self._may_probe(pair, now_s)][:1]
        for suspect in tuple(wanted):
            quiet = [pair for pair in self._cells if not self._sustained(pair, SUSPECT)]
            quiet.sort(key=lambda pair: len(set(pair) & set(suspect)))
            wanted += [pair for pair in quiet if self._may_probe(pair, now_s)][:1]
        for pair in wanted:
            self._asked_s[pair] = now_s
        return wanted

    def probed(self, probe: LinkProbeReading) -> None:
        """Store the result of a probe. A probe without a round trip is ignored."""
        if probe.rtt_s <= 0:
            return
        self._probes[(probe.sender, probe.receiver)] = probe

    def _may_probe(self, pair: Pair, now_s: float) -> bool:
        return now_s - self._asked_s.get(pair, float("-inf")) >= PROBE_EVERY_S

    def _agrees(self, pair: Pair) -> bool | None:
        """Whether a probe has found this pair slow; None: there is nothing to compare."""
        mine = self._probes.get(pair)
        quiet = (at for at in self._probes if at != pair and not self._sustained(at, SUSPECT))
        others = [self._probes[at] for at in quiet]
        if mine is None or not others:
            return None
        if mine.bytes_per_s == 0:
            return True
        rtt_s = max(RTT_FLOOR_S, median(one.rtt_s for one in others))
        rate = median(one.bytes_per_s for one in others)
        return mine.rtt_s > CONFIRMS * rtt_s or mine.bytes_per_s * CONFIRMS < rate

    # --- judging ------------------------------------------------------------------------------

    def _send(self, found: Verdict | None, hot: Iterable[Pair]) -> None:
        self._verdict = found
        if found is not None:
            is_same = self._named == found.fingerprint
            self._named_cells = (self._named_cells if is_same else set()) | set(hot)
            self._named = found.fingerprint

    def _is_recovering(self, found: Verdict | None, hot: Mapping[Pair, PairDelay]) -> bool:
        """Whether the diagnosis only reflects the rest of the named location; see Rule 2."""
        self._named_samples = 0 if _place(found) == self._named else self._named_samples + 1
        if self._named_samples > GOOD_SAMPLES:
            self._named, self._named_cells = "", set()
        is_other = found is not None and found.fingerprint != self._named
        return is_other and bool(hot) and set(hot) <= self._named_cells

    def _is_spreading(self, hot: Mapping[Pair, PairDelay]) -> bool:
        """Whether another cell of the same nodes has just become as slow: the next sample decides.

        A slow node does not show in all of its cells in the same sample.
        """
        nodes = {node for pair in hot for node in pair}
        return any(
            ratios[-1] >= HOT and pair not in hot and nodes.intersection(pair)
            for pair, ratios in self._ratios.items()
        )

    def _sustained(self, pair: Pair, factor: float) -> bool:
        return sum(one >= factor for one in self._ratios[pair]) >= SUSTAINED

    def _hot(self) -> dict[Pair, PairDelay]:
        found = {}
        for pair, cell in self._cells.items():
            agrees = self._agrees(pair)
            factor = SUSPECT if agrees else HOT
            # After a repair, the cells of a link become fast one after the other.
            if self._sustained(pair, factor) and self._ratios[pair][-1] >= COLD:
                found[pair] = cell
        return found

    def _are_all_slower(self) -> bool:
        """Whether all cells are slower than their own past, so that there is no other reference."""
        slower = [
            cell.busy_share >= COST_SHARE and _against_past(cell) >= HOT
            for cell in self._cells.values()
        ]
        return len({node for pair in self._cells for node in pair}) > 2 and all(slower)

    # --- reporting ----------------------------------------------------------------------------

    def _report(self, hot: Mapping[Pair, PairDelay]) -> Verdict:
        cold = {
            pair
            for pair, cell in self._cells.items()
            if cell.busy_share >= COST_SHARE and max(self._ratios[pair]) < COLD
        }
        worst = max(hot.values(), key=lambda cell: self._ratios[cell.pair][-1])
        causes = _causes(hot)
        where, nodes = place_of(causes, cold | causes)
        found = [self._agrees(pair) for pair in hot]
        confidence = Confidence.CERTAIN if True in found else Confidence.LIKELY
        counter_evidence: tuple[str, ...] = ()
        ratio = self._ratios[worst.pair][-1]
        if False in found and True not in found:
            confidence = Confidence.POSSIBLE
            counter_evidence = ("a probe between the agents found this link as fast as others",)
        elif _against_past(worst) < SUSPECT:
            confidence = Confidence.LIKELY if True in found else Confidence.POSSIBLE
            counter_evidence = (
                "it has been slow since the first steps: the network may be built this way",
            )
        return Verdict(
            kind=VerdictKind.SLOW_COMMUNICATION,
            culprits=(),
            nodes=nodes,
            text=(
                f"{where} is slow: {_figures(worst)}, {ratio:.0f} times the value of others"
                + (" and at first" if _against_past(worst) >= SUSPECT else "")
            ),
            evidence=tuple(self._evidence(cell) for _, cell in sorted(hot.items())),
            counter_evidence=counter_evidence,
            confidence=confidence,
            fingerprint=f"slow communication {where}",
        )

    def _report_all(self) -> Verdict:
        nodes = tuple(sorted({node for pair in self._cells for node in pair}))
        worst = max(self._cells.values(), key=_against_past)
        return Verdict(
            kind=VerdictKind.SLOW_COMMUNICATION,
            culprits=(),
            nodes=nodes,
            text=(
                "the network between all nodes is slow: "
                f"{_figures(worst)}, {_against_past(worst):.0f} times the value at first"
            ),
            evidence=tuple(self._evidence(cell) for _, cell in sorted(self._cells.items())),
            counter_evidence=("all links are equally slow: it may be a switch, or other traffic",),
            confidence=Confidence.POSSIBLE,
            fingerprint="slow communication everywhere",
        )

    def _evidence(self, cell: PairDelay) -> str:
        before = _figures_of(cell.past_s_per_mb, cell.past_rtt_s or 0.0)
        text = f"{cell.sender} to {cell.receiver}: {_figures(cell)}; at first {before}"
        if cell.retransmits:
            text += f"; {cell.retransmits} segments retransmitted"
        probe = self._probes.get(cell.pair)
        if probe is not None:
            rate = f"{probe.bytes_per_s / 1e6:.1f} MB/s" if probe.bytes_per_s else "not completed"
            text += f"; a probe: {rate}, round trip {_ms(probe.rtt_s)}"
        return text


def times_slower(cell: PairDelay, others: Sequence[PairDelay]) -> float:
    """How much slower a cell is than the fastest quarter of the others, and than its own past.

    Returns the smaller ratio; 1 if its past is not known yet.
    """
    if cell.past_rtt_s is None:
        return 1.0
    if cell.s_per_mb is not None and cell.past_s_per_mb is not None:
        now = [one.s_per_mb for one in others if one.s_per_mb is not None]
        before = [one.past_s_per_mb for one in others if one.past_s_per_mb is not None]
        usual = _usual(cell.past_s_per_mb, now, before)
        return cell.s_per_mb / max(RATE_FLOOR_S_PER_MB, usual)
    now = [one.rtt_s for one in others]
    before = [one.past_rtt_s for one in others if one.past_rtt_s is not None]
    return cell.rtt_s / max(RTT_FLOOR_S, _usual(cell.past_rtt_s, now, before))


def _is_slow_now(cell: PairDelay) -> bool:
    now, past = cell.newest_s_per_mb, cell.past_s_per_mb
    if now is None or past is None or cell.busy_share < COST_SHARE:
        return False
    return now >= SUSPECT * max(RATE_FLOOR_S_PER_MB, past)


def _usual(past: float, now: Sequence[float], before: Sequence[float]) -> float:
    if len(now) < 2:
        return past
    # A cell that was slow from the start has no past that could excuse it. If one of three nodes is
    # slow, four of the six cells are slow; the fast cells show the usual value.
    own = min(past, 2 * _low(before)) if before else past
    return max(own, _low(now))


def _low(figures: Sequence[float]) -> float:
    return sorted(figures)[len(figures) // 4]


def _causes(hot: Mapping[Pair, PairDelay]) -> set[Pair]:
    """The hot cells, without the direction that only carries late acknowledgements."""
    node = Counter(node for pair in sorted(hot) for node in pair).most_common(1)[0][0]
    sent = [_slowness(cell) for pair, cell in hot.items() if pair[0] == node]
    received = [_slowness(cell) for pair, cell in hot.items() if pair[1] == node]
    found = set(hot)
    if sent and received and median(sent) >= ONE_WAY * median(received):
        found = {pair for pair in hot if pair[1] != node}
    elif sent and received and median(received) >= ONE_WAY * median(sent):
        found = {pair for pair in hot if pair[0] != node}
    return found


def _slowness(cell: PairDelay) -> float:
    """Comparable between cells that are hot at the same time."""
    return cell.rtt_s if cell.s_per_mb is None else cell.s_per_mb


def _against_past(cell: PairDelay) -> float:
    return times_slower(cell, ())


def _place(verdict: Verdict | None) -> str:
    return "" if verdict is None else verdict.fingerprint


def place_of(hot: set[Pair], known: set[Pair]) -> tuple[str, tuple[str, ...]]:
    """Describe what the hot cells have in common, and name the nodes concerned.

    `known` are the hot cells, and the cells that are fast.
    """
    if len(hot) == 1:
        sender, receiver = next(iter(hot))
        return f"the link from node {sender} to node {receiver}", (sender, receiver)
    if len({frozenset(pair) for pair in hot}) == 1:
        one, other = sorted(next(iter(hot)))
        return f"the link between nodes {one} and {other}", (one, other)
    best: tuple[tuple[float, int], str, str] | None = None
    for node in sorted({node for pair in hot for node in pair}):
        row = {pair for pair in known if pair[0] == node}
        column = {pair for pair in known if pair[1] == node}
        what = ((row, "what node {} sends"), (column, "what node {} receives"))
        for cells, text in (*what, (row | column, "the link of node {}")):
            part = len(hot & cells) / len(cells) if cells else 0.0
            if part >= COVER and len(hot & cells) >= COVER * len(hot):
                rank = (part * len(hot & cells) / len(hot), -len(cells))
                if best is None or rank > best[0]:
                    best = (rank, text.format(node), node)
    if best is not None:
        return best[1], (best[2],)
    nodes = tuple(sorted({node for pair in hot for node in pair}))
    return f"the network between nodes {', '.join(nodes)}", nodes


def _figures(cell: PairDelay) -> str:
    return _figures_of(cell.s_per_mb, cell.rtt_s)


def _figures_of(s_per_mb: float | None, rtt_s: float) -> str:
    rate = "" if s_per_mb is None else f"{_ms(s_per_mb)} per megabyte, "
    return f"{rate}round trip {_ms(rtt_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
