"""Defines the expected outcome of each fault, and the proof that the fault took place.

`ftrun.wire.fault_catalog` describes faults for people; a drill judges by this table. A plan may
override it for each of its faults.
"""

from dataclasses import dataclass, replace

from ftrun.errors import UsageError
from ftrun.wire.fault_catalog import FAULTS

CLUSTER = "cluster:"
"""Prefix of a fault of scripts/drill_faults.py, which acts on a virtual node from outside."""

_SLACK_S = 2.0
"""Seconds; a machine with few cores detects everything late."""


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """What a drill expects after a fault.

    Args:
        verdicts: accepted kinds of verdict; empty: no incident may be opened.
        culprits: exactly these ranks must be named; empty: not checked.
        nodes: exactly these nodes must be named; empty: not checked.
        action: accepted last actions of the incident; empty: any.
        within_s: limit from the fault to the verdict; 0: not checked.
        within_steps: limit in steps from the fault to the verdict; 0: not checked.
        steps_lost: maximum; None: not checked.
        equal: the result must equal an undisturbed run byte for byte.
        exit_code: exit code of the run.
        ends: the fault ends the run before the job is complete.
        alone: the fault needs a run of its own.
        incidents: maximum number of incidents.
        proof: regular expression for the kind of a journal line that proves the fault's effect.
        proof_text: regular expression that must match the JSON of that line.
    """

    verdicts: tuple[str, ...] = ()
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    within_s: float = 0.0
    within_steps: int = 0
    steps_lost: int | None = 2
    equal: bool = True
    exit_code: int = 0
    ends: bool = False
    alone: bool = False
    incidents: int = 1
    proof: str = ""
    proof_text: str = ""


_AGAIN = ("respawn",)
_LOST = ("respawn", "evict")
_EXITED = "workers_exited"


def _exit(signal_or_text: str, *verdicts: str) -> ExpectedOutcome:
    return ExpectedOutcome(
        verdicts=verdicts or ("crash",), action=_AGAIN, proof=_EXITED, proof_text=signal_or_text
    )


def _hang(verdict: str) -> ExpectedOutcome:
    return ExpectedOutcome(verdicts=(verdict,), action=_AGAIN, proof="verdict")


def _unharmed(proof: str = "", proof_text: str = "", *, alone: bool = False) -> ExpectedOutcome:
    return ExpectedOutcome(steps_lost=0, proof=proof, proof_text=proof_text, alone=alone)


_NUMERICAL_ANOMALY = ExpectedOutcome(  # the rank's replicas differ until the values have spread
    verdicts=("numerical anomaly", "replicas differ"),
    incidents=2,
    steps_lost=None,
    equal=False,
    alone=True,
    proof="verdict",
    proof_text="numerical anomaly",
)
_LOST_NODE = ExpectedOutcome(
    verdicts=("node lost",), action=_LOST, alone=True, proof="node_lost|leader_lost"
)

_TABLE: dict[str, ExpectedOutcome] = {
    "rank-kill": _exit("SIGKILL"),
    "segv": _exit("SIGSEGV"),
    "abort": _exit("SIGABRT"),
    "exception": _exit("RuntimeError"),
    "exit0-early": _exit('"finished"', "crash", "hang in computation"),
    "stop": _hang("frozen"),
    "hang": _hang("hang in computation"),
    "gil-hold": _hang("GIL stuck"),
    "busy-loop": _hang("busy loop"),
    "collective-skip": ExpectedOutcome(  # gloo aborts a rank that receives more data than expected
        verdicts=("skipped collective", "replicas differ", "crash"),
        action=("respawn", "report"),
        proof="verdict",
        steps_lost=None,
    ),
    "slow": ExpectedOutcome(verdicts=("slow computation",), action=("report",), steps_lost=0),
    "slow-input": ExpectedOutcome(verdicts=("input-bound",), steps_lost=None),
    "nan": _NUMERICAL_ANOMALY,
    "spike": _NUMERICAL_ANOMALY,
    "poison-batch": ExpectedOutcome(
        verdicts=("crash",), action=("stop",), steps_lost=None, equal=False, exit_code=93,
        ends=True, alone=True, proof=_EXITED, proof_text="RuntimeError",
    ),
    "oom": _exit("SIGKILL|memory", "out of memory"),
    "weight-bitflip": ExpectedOutcome(
        verdicts=("replicas differ",), steps_lost=None, equal=False, alone=True
    ),
    "smp-kill": _unharmed("smp_exited", "SIGKILL"),
    "smp-stop": _unharmed(),
    "agent-kill": ExpectedOutcome(steps_lost=None, alone=True, proof="generation_started"),
    "agent-stop": ExpectedOutcome(steps_lost=None, alone=True),
    "zygote-kill": _unharmed("zygote_exited"),
    "leader-kill": ExpectedOutcome(steps_lost=None, alone=True, proof="generation_started"),
    "node-loss": _LOST_NODE,
    "freeze": _LOST_NODE,
    "shm-full": _unharmed(),
    "disk-full": _unharmed(),
    "fd-limit": _unharmed(),
    "pid-limit": _unharmed(),
    "cpu-starve": _unharmed(),
    "clock-jump": _unharmed(),
    "partition": _LOST_NODE,
    "one-way-partition": _LOST_NODE,
    "slow-link": ExpectedOutcome(
        verdicts=("slow communication",), action=("report",), steps_lost=0, alone=True
    ),
    "lossy-link": _unharmed(alone=True),
    "bitflip-wire": ExpectedOutcome(steps_lost=None, alone=True),
    "bitflip-shm": replace(_exit("SIGKILL"), steps_lost=None),
    "torn-snapshot": _exit("SIGKILL"),
    "fragment-truncate": _unharmed(alone=True),
    "fragment-stale": _unharmed(alone=True),
    "corrupt-checkpoint": _unharmed(),
}  # fmt: skip
"""By kind of `ftrun inject-fault`; `expected_of` adds culprits and times."""

_SPREADS = ("nan", "spike")
"""One step later all ranks have the values, because gradients are averaged: no culprit needed."""

_NODE_LOST = ExpectedOutcome(verdicts=("node lost",), alone=True, steps_lost=None)
_NODE0, _NODE1 = (replace(_NODE_LOST, nodes=(name,)) for name in ("node0", "node1"))

_OF_CLUSTER: dict[str, ExpectedOutcome] = {
    **dict.fromkeys(("power-off", "reset", "freeze", "cut", "store-host"), _NODE1),
    **dict.fromkeys(("capture", "encoding", "agent-kill", "agent-stopped"), _NODE1),
    **dict.fromkeys(("lead-power-off", "lead-cut"), _NODE0),
    **dict.fromkeys(
        ("pair-cut", "pair-cut-unprotected", "one-way-cut"),
        replace(_NODE_LOST, verdicts=("hang in communication",), nodes=("node1", "node2")),
    ),
    **dict.fromkeys(
        ("stale-rejoin", "one-by-one", "recovery", "two-nodes", "two-at-once"),
        replace(_NODE_LOST, incidents=2),
    ),
    "spare-lost": replace(_unharmed("node_lost"), alone=True),
    "drained": _unharmed("nodes_draining", alone=True),
    "lead-drained": replace(_unharmed("nodes_draining", alone=True), steps_lost=None),
    **dict.fromkeys(("flap", "slow-link", "lossy-link", "smp-kill"), _unharmed(alone=True)),
    "rank-kill": ExpectedOutcome(verdicts=("crash",), culprits=(1,), alone=True),
}
"""By fault of scripts/drill_faults.py, which defines node 0 and node 1."""


def expected_of(kind: str, *, rank: int = -1, node: str = "", nodes: int = 1) -> ExpectedOutcome:
    """The expected outcome; `rank` is -1 for a node, `node` is empty in a run on one node."""
    if kind.startswith(CLUSTER):
        return _OF_CLUSTER.get(kind.removeprefix(CLUSTER), _NODE_LOST)
    if kind not in _TABLE or kind not in FAULTS:
        raise UsageError(f"there is no fault {kind!r}: ftrun inject-fault --list shows them all")
    found, fault = _TABLE[kind], FAULTS[kind]
    within_s = fault.within_s + _SLACK_S if found.verdicts and fault.within_s else 0.0
    culprits = (rank,) if fault.by_rank and rank >= 0 and kind not in _SPREADS else ()
    of_node = (node,) if node and found.verdicts and not fault.by_rank else ()
    if nodes > 1 and kind in ("agent-kill", "leader-kill", "agent-stop"):
        found = replace(_LOST_NODE, steps_lost=None)
        within_s = fault.within_s + _SLACK_S
    return replace(found, within_s=within_s, culprits=culprits, nodes=of_node)
