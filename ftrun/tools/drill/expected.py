"""What has to follow each fault of the catalogue, and how it is seen that it was really made.

Runs in:  cli. Pure.

The words in `ftrun.wire.fault_catalog` are for people; this table is what a drill judges by. A plan
may say otherwise for a fault of its own.
"""

from dataclasses import dataclass, replace

from ftrun.errors import UsageError
from ftrun.wire.fault_catalog import FAULTS

CLUSTER = "cluster:"
"""Before the name of a fault of scripts/drill_faults.py, which is done to a virtual node from
outside."""

_SLACK_S = 2.0
"""A machine of few cores is late with everything."""


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """What a drill looks for after a fault.

    Args:
        verdicts: kinds of verdict, any of them; empty: nothing may be taken for an incident.
        culprits: ranks that have to be named, and no other.
        nodes: the same of nodes; empty: not looked at.
        action: the last action of the incident is one of these; empty: any.
        within_s: from the fault to the verdict; 0: not looked at.
        within_steps: the same in steps that were made; 0: not looked at.
        steps_lost: at most; None: not looked at.
        equal: the result is, byte for byte, that of an undisturbed run; False: need not be.
        exit_code: of the run.
        ends: the run ends by it, before its job has.
        incidents: so many at most.
        alone: it gets a run of its own.
        proof: kind of a journal line, after which the fault is known to have been in effect; a
            regular expression, as the next.
        proof_text: what such a line holds, as a regular expression over its JSON.
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
_EXITED = "WorkersExited"


def _exit(signal_or_text: str, *verdicts: str) -> ExpectedOutcome:
    return ExpectedOutcome(
        verdicts=verdicts or ("crash",), action=_AGAIN, proof=_EXITED, proof_text=signal_or_text
    )


def _hang(*verdicts: str, proof_text: str = "") -> ExpectedOutcome:
    return ExpectedOutcome(verdicts=verdicts, action=_AGAIN, proof="Verdict", proof_text=proof_text)


def _unharmed(proof: str = "", proof_text: str = "", *, alone: bool = False) -> ExpectedOutcome:
    return ExpectedOutcome(steps_lost=0, proof=proof, proof_text=proof_text, alone=alone)


_BAD_NUMBERS = ExpectedOutcome(  # of one rank: until they have spread, its replicas differ from it
    verdicts=("bad numbers", "replicas differ"),
    incidents=2,
    steps_lost=None,
    equal=False,
    alone=True,
    proof="Verdict",
    proof_text="bad numbers",
)
_LOST_NODE = ExpectedOutcome(
    verdicts=("node lost",), action=_LOST, alone=True, proof="NodeLost|LeadLost"
)

_TABLE: dict[str, ExpectedOutcome] = {
    "rank-kill": _exit("SIGKILL"),
    "segv": _exit("SIGSEGV"),
    "abort": _exit("SIGABRT"),
    "exception": _exit("RuntimeError"),
    "exit0-early": _exit('"finished"', "crash", "hang in computation"),
    "stop": _hang("frozen"),
    "hang": _hang("hang in computation"),
    "gil": _hang("GIL stuck"),
    "spin": _hang("busy loop"),
    "collective-skip": ExpectedOutcome(  # gloo aborts a rank that is sent more than it has room for
        verdicts=("skipped collective", "replicas differ", "crash"),
        action=("respawn", "report"),
        proof="Verdict",
        steps_lost=None,
    ),
    "slow": ExpectedOutcome(verdicts=("slow computation",), action=("report",), steps_lost=0),
    "slow-input": ExpectedOutcome(verdicts=("input-bound",), steps_lost=None),
    "nan": _BAD_NUMBERS,
    "spike": _BAD_NUMBERS,
    "poison-batch": ExpectedOutcome(
        verdicts=("crash",), action=("stop",), steps_lost=None, equal=False, exit_code=93,
        ends=True, alone=True, proof=_EXITED, proof_text="RuntimeError",
    ),
    "oom": _exit("SIGKILL|memory", "out of memory"),
    "weight-bitflip": ExpectedOutcome(
        verdicts=("replicas differ",), steps_lost=None, equal=False, alone=True
    ),
    "smp-kill": _unharmed("SmpExited", "SIGKILL"),
    "smp-stop": _unharmed(),
    "agent-kill": ExpectedOutcome(steps_lost=None, alone=True, proof="StartGeneration"),
    "agent-zombie": ExpectedOutcome(steps_lost=None, alone=True),
    "zygote-kill": _unharmed("ZygoteExited"),
    "lead-kill": ExpectedOutcome(steps_lost=None, alone=True, proof="StartGeneration"),
    "node-loss": _LOST_NODE,
    "freeze": _LOST_NODE,
    "shm-full": _unharmed(),
    "disk-full": _unharmed(),
    "fd-limit": _unharmed(),
    "pid-limit": _unharmed(),
    "cpu-starve": _unharmed(),
    "clock-jump": _unharmed(),
    "partition": _LOST_NODE,
    "one-way": _LOST_NODE,
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
"""Of each kind of `ftrun inject-fault`; culprits and times are added by `expected_of`."""

_SPREADS = ("nan", "spike")
"""Gradients are averaged: one step later all ranks have it, and nobody has to be named."""

_NODE_LOST = ExpectedOutcome(verdicts=("node lost",), alone=True, steps_lost=None)
_NODE0, _NODE1 = (replace(_NODE_LOST, nodes=(name,)) for name in ("node0", "node1"))

_OF_CLUSTER: dict[str, ExpectedOutcome] = {
    **dict.fromkeys(("power-off", "reset", "freeze", "cut", "store-host"), _NODE1),
    **dict.fromkeys(("capture", "encoding", "agent-kill", "agent-stopped"), _NODE1),
    **dict.fromkeys(("lead-power-off", "lead-cut"), _NODE0),
    **dict.fromkeys(
        ("stale-rejoin", "one-by-one", "recovery", "two-nodes", "two-at-once"),
        replace(_NODE_LOST, incidents=2),
    ),
    "spare-lost": replace(_unharmed("NodeLost"), alone=True),
    "drained": _unharmed("Leaving", alone=True),
    "lead-drained": replace(_unharmed("Leaving", alone=True), steps_lost=None),
    **dict.fromkeys(("flap", "slow-link", "lossy-link", "smp-kill"), _unharmed(alone=True)),
    "rank-kill": ExpectedOutcome(verdicts=("crash",), culprits=(1,), alone=True),
}
"""Of each of scripts/drill_faults.py, which says who is node 0 and node 1 there."""


def expected_of(kind: str, *, rank: int = -1, node: str = "", nodes: int = 1) -> ExpectedOutcome:
    """What follows this fault, done to this rank or node.

    Args:
        kind: as in a plan.
        rank: to whom; -1: a node.
        node: its name, where the run has several.
        nodes: of the run.

    Raises:
        UsageError: there is no such kind.
    """
    if kind.startswith(CLUSTER):
        return _OF_CLUSTER.get(kind.removeprefix(CLUSTER), _NODE_LOST)
    if kind not in _TABLE or kind not in FAULTS:
        raise UsageError(f"there is no fault {kind!r}: ftrun inject-fault --list shows them all")
    found, fault = _TABLE[kind], FAULTS[kind]
    within_s = fault.within_s + _SLACK_S if found.verdicts and fault.within_s else 0.0
    culprits = (rank,) if fault.by_rank and rank >= 0 and kind not in _SPREADS else ()
    of_node = (node,) if node and found.verdicts and not fault.by_rank else ()
    if nodes > 1 and kind in ("agent-kill", "lead-kill", "agent-zombie"):
        found = replace(_LOST_NODE, steps_lost=None)
        within_s = fault.within_s + _SLACK_S
    return replace(found, within_s=within_s, culprits=culprits, nodes=of_node)
