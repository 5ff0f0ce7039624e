"""Predicts what a run with a given number of nodes loses to failures, and recommends settings.

Rule 1: The three strategies differ only as described. They have the same failures, and each uses
its own best interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftrun.erasure.groups import GROUP_NODES, default_parity
from ftrun.tools.estimate.assumptions import AUTO_BUDGET, DAY_S, Assumptions, mtbf_s
from ftrun.tools.estimate.goodput import FailureKind, best_interval_s, goodput, life_s, over_disk
from ftrun.tools.estimate.survival import (
    NodeLossModel,
    best_spares,
    loss_per_s,
    lost_within,
    side_by_side,
    spread,
    too_few,
)

MAX_NODES = 100_000
_MOST_PARITY = 3
"""Further losses are those of whole domains, against which more parity does not help."""

MIRROR = (0, 1)
"""In place of k and m: copies, see `erasure.scheme: mirror`."""

_HARDLY = 0.9
"""An additional parity block must reduce the risk below this factor to justify its memory."""


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """Settings that are fixed: (k, m), steps between snapshots, spares; None: choose the value."""

    code: tuple[int, int] | None = None
    """`MIRROR`: each node stores a copy of the state of another one."""
    every: int | None = None
    spares: int | None = None


@dataclass(frozen=True, slots=True)
class CodeOption:
    """A code k + m (`data` + `parity`) with a given number of nodes; m = 0: no parity.

    Args:
        loss: probability that lost nodes destroy all snapshots during the run, if domains are
            spread over the groups. ftrun spreads domains that are configured.
        loss_side_by_side: the same if each group consists of neighbours.
        taken: maximum number of nodes of one group in one domain, if domains are spread.
        share: share of failures that destroy all snapshots.
    """

    data: int
    parity: int
    loss: float
    loss_side_by_side: float
    taken: int
    share: float

    @property
    def name(self) -> str:
        if (self.data, self.parity) == MIRROR:
            return "mirror"
        return f"{self.data}+{self.parity}" if self.parity else "none"

    @property
    def memory(self) -> float:
        """Memory for parity relative to the protected state."""
        return self.parity / max(1, self.data)

    @property
    def tolerates_domain_loss(self) -> bool:
        return self.taken <= self.parity


@dataclass(frozen=True, slots=True)
class RecoveryStrategy:
    """The result of one strategy.

    Args:
        interval_s: useful time between two saves.
        dead_s: mean time from a failure to the next step.
        redone_s: mean time of repeated steps per failure: half an interval, and the lag.
    """

    interval_s: float
    goodput: float
    dead_s: float
    redone_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prediction for one number of nodes."""

    nodes: int
    mtbf_s: float
    failures: float
    """Expected number of failures in the whole run."""
    periodic: RecoveryStrategy
    """Checkpoints at their best interval; a restart by the operator or the scheduler."""
    noticed: RecoveryStrategy
    """The same, but ftrun detects the failures: a script without `attach`."""
    ftrun: RecoveryStrategy
    """Snapshots in memory; ranks are restarted in place."""
    every: int
    """Steps between two snapshots."""
    every_auto: int
    """The interval in steps that `snapshot.every: auto` would choose."""
    code: CodeOption
    codes: Sequence[CodeOption]
    """All codes that were evaluated, including the chosen one."""
    auto_code: str
    """The code that `erasure.scheme: auto` would choose."""
    window_s: float
    """From the loss of a node until the state is protected again."""
    in_repair: float
    """Mean number of nodes in repair, without losses of whole domains."""
    spares: int
    too_few: float
    """Share of time in which more nodes are in repair than there are spares."""
    too_few_without: float
    """The same without spares."""


def outlook(nodes: int, given: Assumptions, decided: FixedChoices) -> Outlook:
    m_s = mtbf_s(nodes, given)
    every = decided.every or best_every(given, m_s)
    interval_s = every * given.step_s
    window_s = _node_dead_s(given) + interval_s + given.one_snapshot_s + given.transfer_s
    codes = _codes(nodes, given, m_s, window_s, decided.code)
    code = _chosen(codes, given.risk)
    in_repair = given.node_share * given.repair_s / m_s
    periodic_s = given.periodic_detect_s + given.periodic_restart_s
    spares = decided.spares if decided.spares is not None else best_spares(nodes, in_repair)
    return Outlook(
        nodes=nodes,
        mtbf_s=m_s,
        failures=given.days * DAY_S / m_s,
        periodic=_saved_on_disk(given, m_s, [FailureKind(1.0, periodic_s)]),
        noticed=_noticed(given, m_s),
        ftrun=_ftrun(given, m_s, interval_s, code.share),
        every=every,
        every_auto=max(1, math.ceil(given.one_snapshot_s / (AUTO_BUDGET * given.step_s))),
        code=code,
        codes=codes,
        auto_code=_auto_name(nodes),
        window_s=window_s,
        in_repair=in_repair,
        spares=spares,
        too_few=too_few(in_repair, spares),
        too_few_without=too_few(in_repair, 0),
    )


def _noticed(given: Assumptions, m_s: float) -> RecoveryStrategy:
    restart_s = given.periodic_restart_s
    kinds = [
        FailureKind(given.crash_share, given.crash_detect_s + restart_s),
        FailureKind(given.hang_share, given.hang_noticed_s + restart_s),
        FailureKind(_lost_share(given) + given.disk_share, given.node_detect_s + restart_s),
    ]
    return _saved_on_disk(given, m_s, kinds)


def _saved_on_disk(
    given: Assumptions, m_s: float, kinds: Sequence[FailureKind]
) -> RecoveryStrategy:
    cost_s = given.periodic_cost_s
    interval_s = best_interval_s(save_s=cost_s, mtbf_s=m_s, longest_s=given.days * DAY_S)
    interval_s = max(interval_s, given.step_s)
    found = goodput(interval_s=interval_s, save_s=cost_s, mtbf_s=m_s, kinds=kinds)
    return RecoveryStrategy(interval_s, found, _mean_dead_s(kinds), interval_s / 2)


def _ftrun(given: Assumptions, m_s: float, interval_s: float, lost: float) -> RecoveryStrategy:
    """Includes the failures that destroy the snapshots and need the disk."""
    on_disk = min(1.0, given.disk_share + lost)
    kinds = ftrun_kinds(given, on_disk)
    # A checkpoint on disk is a written snapshot, so it cannot be more frequent.
    disk_every_s = max(given.disk_every_s, interval_s)
    memory = goodput(interval_s=interval_s, save_s=given.one_snapshot_s, mtbf_s=m_s, kinds=kinds)
    recovery_s, blocks_s = life_s(mtbf_s=m_s, kinds=kinds), given.disk_blocks_s
    found = over_disk(
        memory, every_s=disk_every_s, blocks_s=blocks_s, share=on_disk, recovery_s=recovery_s
    )
    redone_s = interval_s / 2 + sum(kind.share * kind.lag_s for kind in kinds)
    redone_s += on_disk * disk_every_s / 2
    return RecoveryStrategy(interval_s, found, _mean_dead_s(kinds), redone_s)


def ftrun_kinds(given: Assumptions, on_disk: float) -> list[FailureKind]:
    """Returns the cost of each kind of failure under ftrun.

    `on_disk` is the share of failures that need the disk, at least `disk_share`. The excess over
    `disk_share` consists of lost nodes.
    """
    again_s = given.restart_s + given.restart_more_s
    more = on_disk - given.disk_share
    return [
        # A rank's snapshot is in its node's memory when it is sealed. The snapshot of a lost node
        # is available only when other nodes have its parity.
        FailureKind(given.crash_share, given.crash_detect_s + again_s),
        FailureKind(given.hang_share, given.hang_noticed_s + again_s),
        FailureKind(
            max(0.0, _lost_share(given) - more), _node_dead_s(given), lag_s=given.transfer_s
        ),
        FailureKind(on_disk, given.node_detect_s + given.periodic_restart_s),
    ]


def best_every(given: Assumptions, m_s: float) -> int:
    """Returns the number of steps between two snapshots with the highest goodput.

    The interval is at least the time to protect a snapshot, because an earlier one is skipped.
    """
    cost_s = given.one_snapshot_s
    kinds = ftrun_kinds(given, given.disk_share)
    least = max(1, math.ceil(given.transfer_s / given.step_s - 1e-9))
    best_s = best_interval_s(save_s=cost_s, mtbf_s=m_s, longest_s=given.days * DAY_S)
    steps = best_s / given.step_s
    around = {max(least, math.floor(steps)), max(least, math.ceil(steps))}
    return max(
        sorted(around),
        key=lambda n: goodput(interval_s=n * given.step_s, save_s=cost_s, mtbf_s=m_s, kinds=kinds),
    )


def _node_dead_s(given: Assumptions) -> float:
    return given.node_detect_s + given.restart_s + given.restart_more_s + given.transfer_s


def _lost_share(given: Assumptions) -> float:
    return given.node_share + given.domain_share


def _mean_dead_s(kinds: Sequence[FailureKind]) -> float:
    return math.fsum(kind.share * kind.dead_s for kind in kinds)


def _codes(
    nodes: int, given: Assumptions, m_s: float, window_s: float, code: tuple[int, int] | None
) -> list[CodeOption]:
    per_s = 0.0 if math.isinf(m_s) else 1.0 / m_s
    losses = NodeLossModel(
        node_per_s=given.node_share * per_s / nodes,
        domains_per_s=given.domain_share * per_s,
        window_s=window_s,
    )
    if code is not None:
        return [_code(nodes, given, losses, m_s, code)]
    found = [_code(nodes, given, losses, m_s, (1, 0))]
    for parity in range(1, _MOST_PARITY + 1):
        data = min(nodes, max(GROUP_NODES, 4 * parity)) - parity
        if data >= 1:
            found.append(_code(nodes, given, losses, m_s, (data, parity)))
    return found


def _code(
    nodes: int, given: Assumptions, losses: NodeLossModel, m_s: float, code: tuple[int, int]
) -> CodeOption:
    data, parity = code
    over_s, is_ring = given.days * DAY_S, code == MIRROR
    k, domain_nodes = data or None, given.domain_nodes
    placed = spread(nodes, data=k, parity=parity, domain_nodes=domain_nodes, is_ring=is_ring)
    neighbours = side_by_side(
        nodes, data=k, parity=parity, domain_nodes=domain_nodes, is_ring=is_ring
    )
    per_s = loss_per_s(placed, losses)
    return CodeOption(
        data=data,
        parity=parity,
        loss=lost_within(per_s, over_s=over_s),
        loss_side_by_side=lost_within(loss_per_s(neighbours, losses), over_s=over_s),
        taken=placed.worst,
        share=per_s * m_s if per_s > 0.0 else 0.0,
    )


def _chosen(codes: Sequence[CodeOption], risk: float) -> CodeOption:
    """Returns the code with the least parity within the risk; else the last that reduced it."""
    chosen = codes[0]
    for code in codes[1:]:
        if chosen.loss <= risk or code.loss > _HARDLY * chosen.loss:
            break
        chosen = code
    return chosen


def _auto_name(nodes: int) -> str:
    parity = default_parity(nodes)
    data = min(nodes, GROUP_NODES) - parity
    return f"{data}+{parity}" if data >= 1 else "none"
