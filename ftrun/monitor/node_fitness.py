"""Judges whether a node is fit to run ranks, by its own measurements and against other nodes.

Source:   the warm-up stage of TRANSOM's task life cycle (arXiv 2310.10046): a node tests itself
          before it may join, and a spare replaces a node that fails.

Rule 1: A missing measurement is no evidence, for or against.
Rule 2: A node fails if ranks cannot run on it. A problem that only makes ranks slow, or loses a
        log, is a warning, because a slow node is better than none.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from ftrun.config.profile import PreflightConfig
from ftrun.monitor.slow.collective_check import CollectiveResult

MIN_OTHERS = 2
"""With fewer other nodes, the comparison cannot show which node is the slow one."""


class CheckOutcome(Enum):
    """Outcome of a check."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class NodeMeasurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one check. A rate of 0 and a count of -1 are not known."""

    memory_bytes_per_s: float = 0.0
    """Copy rate within memory by one thread, the best of several."""
    processor_share: float = 1.0
    """Share of that measurement's time in which it ran on a CPU; other processes had the rest."""
    loopback_rtt_s: float = 0.0
    loopback_bytes_per_s: float = 0.0
    free_memory_bytes: int = -1
    """The smallest of the machine's free memory and every limit on this process."""
    free_disk_bytes: int = -1
    """On the disk of the logs."""
    open_files: int = -1
    """Limit of one process."""
    processes: int = -1
    """Number of processes that may still be started."""
    clock: str = ""
    """Problem of the monotonic clock, in words."""
    link_to: str = ""
    """Node at the other end; empty: no link was measured."""
    link_rtt_s: float = 0.0
    link_bytes_per_s: float = 0.0
    """The slower of both directions."""
    gpus: int = 0
    gpu_faults: tuple[str, ...] = ()
    gpu_remarks: tuple[str, ...] = ()
    collective: CollectiveResult | None = None
    """Of the newest collective check; None: this agent has taken part in none."""
    not_done: str = ""
    """What could not be measured, and why."""
    took_s: float = 0.0


MIN_SHARE = 0.7
"""A smaller `processor_share` means that other work kept the machine busy. Its rates are then not
used."""


class NodeFitness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one check of one node."""

    outcome: CheckOutcome
    figures: NodeMeasurements = NodeMeasurements()
    problems: tuple[str, ...] = ()
    """Reasons why the node fails."""
    warnings: tuple[str, ...] = ()
    number: int = 1
    """Number of this check, counted by its agent."""
    is_whole: bool = True
    """The check included the measurements; otherwise only values that can be read at once."""

    @property
    def is_fit(self) -> bool:
        return self.outcome is not CheckOutcome.FAIL

    def __str__(self) -> str:
        return "; ".join((*self.problems, *self.warnings)) or "fit"


def judge(
    figures: NodeMeasurements, floors: PreflightConfig, *, number: int = 1, is_whole: bool = True
) -> NodeFitness:
    """Judge one node by its own values; `is_whole`: the check included the measurements."""
    problems = [
        *_slow("memory is copied at", figures.memory_bytes_per_s, floors.min_memory_gb_s * 1e9),
        *_slow(
            "the loopback carries", figures.loopback_bytes_per_s, floors.min_loopback_mb_s * 1e6
        ),
        *_slow(
            f"the link to {figures.link_to} carries",
            figures.link_bytes_per_s,
            floors.min_link_mb_s * 1e6,
        ),
        *_room("memory", figures.free_memory_bytes, floors.min_free_memory_mb * 1e6),
        *_few(figures.open_files, floors.min_open_files, "open files are allowed (ulimit -n"),
        *_few(figures.processes, floors.min_processes, "more processes can be started (ulimit -u"),
        *([figures.clock] if figures.clock else []),
        *figures.gpu_faults,
    ]
    warnings = [
        *figures.gpu_remarks,
        *_room("disk for the logs", figures.free_disk_bytes, floors.min_free_disk_mb * 1e6),
        *([figures.not_done] if figures.not_done else []),
    ]
    outcome = (
        CheckOutcome.FAIL if problems else CheckOutcome.WARN if warnings else CheckOutcome.PASS
    )
    return NodeFitness(outcome, figures, tuple(problems), tuple(warnings), number, is_whole)


def far_below(found: Mapping[str, NodeMeasurements], part: float) -> dict[str, str]:
    """Find nodes with less than a fraction of the others' median rates; texts by node id."""
    words: dict[str, list[str]] = {}
    rates = {
        "memory is copied at": {one: has.memory_bytes_per_s for one, has in found.items()},
        "the link carries": {one: has.link_bytes_per_s for one, has in found.items()},
    }
    for what, rate_of in rates.items():
        known = {
            one: rate
            for one, rate in rate_of.items()
            if rate > 0 and found[one].processor_share >= MIN_SHARE
        }
        for node_id, rate in known.items():
            others = [other for one, other in known.items() if one != node_id]
            if len(others) >= MIN_OTHERS and rate < part * (theirs := _median(others)):
                text = f"{what} {rate_per_s_text(rate)} (other nodes {rate_per_s_text(theirs)})"
                words.setdefault(node_id, []).append(text)
    return {node_id: "; ".join(texts) for node_id, texts in words.items()}


def _median(rates: list[float]) -> float:
    """Replaces `statistics`, because its import would cost every process 10 ms."""
    ordered, half = sorted(rates), len(rates) // 2
    return (ordered[half] + ordered[-1 - half]) / 2


def rate_per_s_text(bytes_per_s: float) -> str:
    return f"{size_text(bytes_per_s)}/s"


def size_text(num_bytes: float) -> str:
    """`6.1 GB`, `120 MB`, `0.4 MB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    millions = num_bytes / 1e6
    return f"{millions:.0f} MB" if millions >= 10 else f"{millions:.1f} MB"


def _slow(what: str, rate: float, floor: float) -> list[str]:
    if not 0 < rate < floor:
        return []
    return [f"{what} {rate_per_s_text(rate)} (minimum {rate_per_s_text(floor)})"]


def _few(count: int, floor: int, what: str) -> list[str]:
    return [f"{count:,} {what}; minimum {floor:,})"] if 0 <= count < floor else []


def _room(what: str, count: int, floor: float) -> list[str]:
    if not 0 <= count < floor:
        return []
    return [f"{size_text(count)} of {what} are free (minimum {size_text(floor)})"]
