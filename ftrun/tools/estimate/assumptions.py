"""Lists every assumption of an estimate with its unit, default and source.

Failure rates are published rates per 1000 node-days. Llama 3, arXiv 2407.21783: 419 unplanned
interruptions of 2,048 nodes in 54 days. docs/estimate.md names the sources of the others.

Rule 1: Every unknown quantity is a named assumption that can be set. No other module of this folder
contains a number of its own.
Rule 2: Every default names its source or says that it is a guess.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

DAY_S = 86_400.0
LLAMA3, RSC1, RSC2, FT_HSDP = 3.79, 6.50, 2.34, 2.3
"""Failures per 1000 node-days."""
CROWDED_FROM = 4000
"""Number of nodes above which failures coincide and exceed the rate of single nodes."""

SNAPSHOT_S_PER_GB = 0.157
"""bench_snapshot: a snapshot of 2 x 512 MB adds 160.7 ms on two cores, docs/benchmarks.md."""
CRASH_DETECT_S, CRASH_RESTART_S = 0.04, 0.35
"""bench_recovery: 38 ms to detect, 0.386 s in all, docs/benchmarks.md."""
TRANSFER_GB_PER_S = 0.226
"""bench_erasure: 256 MB of each of six nodes in 1.13 s, 4+2, unlimited links, two cores."""
AUTO_BUDGET = 0.02
"""snapshot.overhead_budget of the profile: share of time that `auto` spends on snapshots."""


@dataclass(frozen=True, slots=True)
class AssumptionInfo:
    """Description of one assumption; `source` is that of its default, or how it is derived.

    `group` is a heading of the help text. With `is_above` the minimum itself is excluded.
    """

    group: str
    unit: str
    meaning: str
    source: str
    low: float = 0.0
    high: float = 1e9
    is_above: bool = False


_GROUPS = "The run", "Failures", "Checkpoints and a restart", "ftrun", "The choice"
_RUN, _FAILURES, _PERIODIC, _FTRUN, _CHOICE = _GROUPS


def _assumed(default: float | None, *about: Any, **limits: Any) -> Any:
    return field(default=default, metadata={"about": AssumptionInfo(*about, **limits)})


# fmt: off
@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions; None: derived from others, as their sources describe."""

    days: float = _assumed(54.0, _RUN, "days", "duration of the training",
        "Llama 3's pre-training, arXiv 2407.21783", high=1e6, is_above=True)
    rate: float = _assumed(LLAMA3, _FAILURES, "N",
        "failures in 1000 node-days, whatever their cause",
        "Llama 3: 419 on 2,048 nodes in 54 days; "
        f"others: {RSC1:g} and {RSC2:g} (Meta's RSC-1 and RSC-2), {FT_HSDP:g} (FT-HSDP)")
    crowding: float = _assumed(0.0, _FAILURES, "X",
        "above 4,000 nodes N the time between failures is multiplied by (4000/N)^X",
        "failures are independent; 0.9 fits FT-HSDP's 18 min on 12,500 nodes", high=3.0)
    hang_share: float = _assumed(0.10, _FAILURES, "part", "share of failures in which a rank hangs",
        "ByteRobust: 9.9 %", high=1.0)
    node_share: float = _assumed(0.27, _FAILURES, "part", "share after which a node cannot be used",
        "Unicron: 73 % need only a restart", high=1.0)
    domain_share: float = _assumed(0.004, _FAILURES, "part",
        "share that takes a whole fault domain",
        "a guess: 5 % of the failures of switches and cables, which are 8 % (Llama 3)", high=1.0)
    disk_share: float = _assumed(0.01, _FAILURES, "part",
        "share after which only a checkpoint on disk helps", "a guess", high=1.0)
    domain_nodes: int = _assumed(16, _FAILURES, "N",
        "nodes of one fault domain, such as a switch or a rack", "a guess", low=1.0, high=1e6)
    repair_s: float = _assumed(21_300.0, _FAILURES, "seconds",
        "until a lost node can be used again (mean)",
        "LANL: mean 355 min, median 54; elsewhere 38 % take above a day")
    step_s: float = _assumed(15.0, _RUN, "seconds", "one step", "a guess, for a large model",
        low=1e-6)
    state_gb: float = _assumed(10.0, _RUN, "GB",
        "state of one node: parameters and moments of all its ranks",
        "a guess; 405e9 parameters of 14 bytes over 2,048 nodes are 2.8", low=1e-6)
    periodic_cost_s: float = _assumed(60.0, _PERIODIC, "seconds",
        "training is blocked for one checkpoint", "a guess")
    periodic_detect_s: float = _assumed(600.0, _PERIODIC, "seconds", "until a failure is detected",
        "NCCL's timeout, 10 min")
    periodic_restart_s: float = _assumed(600.0, _PERIODIC, "seconds",
        "from there to the next step: scheduler, processes, imports, loading; with ftrun too if "
        "only a checkpoint on disk is left",
        "a guess; FT-HSDP: 200 s on 2,048 nodes, 900 on 12,250")
    snapshot_cost_s: float | None = _assumed(None, _FTRUN, "seconds",
        "time that one snapshot adds to the run",
        f"{SNAPSHOT_S_PER_GB:g} for each GB of --state-gb: scripts/bench_snapshot.py")
    crash_detect_s: float = _assumed(CRASH_DETECT_S, _FTRUN, "seconds",
        "until it detects a rank that ended", "scripts/bench_recovery.py")
    hang_detect_s: float | None = _assumed(None, _FTRUN, "seconds",
        "until it identifies a rank that hangs",
        "3 steps, at least 10 s: hang.suspect_after_s and suspect_p99_factor of the profile")
    node_detect_s: float = _assumed(3.0, _FTRUN, "seconds",
        "until an unresponsive node counts as lost", "nodes.failure_timeout_s of the profile")
    restart_s: float = _assumed(CRASH_RESTART_S, _FTRUN, "seconds",
        "from there to the next step, of a small model on two cores", "scripts/bench_recovery.py")
    restart_more_s: float = _assumed(75.0, _FTRUN, "seconds",
        "additional restart time on your machines: process group, model, first step",
        "a guess, and the largest cost of ftrun; measure it")
    transfer_gb_per_s: float = _assumed(TRANSFER_GB_PER_S, _FTRUN, "GB/s",
        "a node's state to or from other nodes, including its code",
        "scripts/bench_erasure.py: six nodes on two cores", low=1e-6)
    disk_every_s: float = _assumed(600.0, _FTRUN, "seconds",
        "between two checkpoints that the SMPs write", "checkpoint.every_s of the profile",
        low=1e-3)
    disk_blocks_s: float = _assumed(0.0, _FTRUN, "seconds", "time that one of them adds to the run",
        "written in the background")
    risk: float = _assumed(0.001, _CHOICE, "part",
        "accepted probability that lost nodes destroy all snapshots during the run",
        "a guess: one run in a thousand", high=1.0, is_above=True)
    # fmt: on

    @property
    def crash_share(self) -> float:
        return 1.0 - self.hang_share - self.node_share - self.domain_share - self.disk_share

    @property
    def one_snapshot_s(self) -> float:
        if self.snapshot_cost_s is not None:
            return self.snapshot_cost_s
        return SNAPSHOT_S_PER_GB * self.state_gb

    @property
    def hang_noticed_s(self) -> float:
        return self.hang_detect_s if self.hang_detect_s is not None else max(10.0, 3 * self.step_s)

    @property
    def transfer_s(self) -> float:
        """Time to send or fetch a node's state, including encoding or decoding."""
        return self.state_gb / self.transfer_gb_per_s


_INFOS = {one.name: one.metadata["about"] for one in fields(Assumptions)}
ABOUT: Mapping[str, AssumptionInfo] = dict(
    sorted(_INFOS.items(), key=lambda one: _GROUPS.index(one[1].group))
)
"""By name, in the order of the groups."""


def mtbf_s(nodes: int, given: Assumptions) -> float:
    """Returns the mean time between failures of the whole run; infinite if nothing fails."""
    per_s = nodes * (given.rate / 1000.0 / DAY_S)
    return math.inf if per_s == 0.0 else min(1.0, CROWDED_FROM / nodes) ** given.crowding / per_s


def flag_of(name: str) -> str:
    """Returns `--periodic-cost` for `periodic_cost_s`; a suffix `_per_s` stays."""
    plain = name if name.endswith("_per_s") else name.removesuffix("_s")
    return "--" + plain.replace("_", "-")


def problems(assumptions: Assumptions) -> list[str]:
    found = []
    for name, about in _INFOS.items():
        value = getattr(assumptions, name)
        if value is None:
            continue
        is_low = value <= about.low if about.is_above else value < about.low
        if is_low or value > about.high or not math.isfinite(value):
            found.append(f"{flag_of(name)} {value:g} {_limits(about)}")
    shares = ("hang_share", "node_share", "domain_share", "disk_share")
    total = math.fsum(getattr(assumptions, name) for name in shares)
    if not found and total > 1.0 + 1e-9:
        named = ", ".join(flag_of(name) for name in shares)
        found.append(f"{named} are {total:g} together, and shares of all failures are at most 1")
    return found


def _limits(about: AssumptionInfo) -> str:
    least = f"{'above' if about.is_above else 'at least'} {about.low:g}"
    most = f" and at most {about.high:,.10g}"
    unit = f", in {about.unit.lower()}" if about.unit in ("days", "seconds", "GB", "GB/s") else ""
    return f"is not {least}{most}: {about.meaning}{unit}"
