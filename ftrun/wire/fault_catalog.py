"""Catalogue of the faults that `ftrun inject-fault` can inject.

Every fault is real: it acts on real processes, memory, files or links. If a fault cannot be
injected, such as a cut link on a machine with one network, it is refused. The refusal names what is
missing.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from ftrun.errors import UsageError

Target = Literal["rank", "part", "node", "network", "data"]

TARGETS: dict[Target, str] = {
    "rank": "One rank (--rank R)",
    "part": "A process of ftrun on one node (--node N)",
    "node": "A node and its resources (--node N)",
    "network": "The traffic of a node (--node N)",
    "data": "Snapshots and checkpoints (--rank R or --node N)",
}
"""Shown in this order."""

_HANG_WITHIN_S = 10.0
_LINK = (
    "a run over several nodes, root, tc with its bpf classifier, and a link that may be cut: a "
    "veth in a network namespace other than that of process 1, or --allow-network-faults"
)
_REDONE = "the steps since the last committed snapshot, which are repeated"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault: what it does (`does`), and the expected reaction (`seen`)."""

    name: str
    target: Target  # a "rank" or "data" kind with `by_rank` takes --rank, others --node
    does: str
    seen: str
    within_s: float  # longest time from the fault to the reaction; 0: no reaction is expected
    lost: str = "nothing"  # state or work that may be lost
    needs: str = ""
    by_rank: bool = False
    is_inside: bool = False  # the rank injects it into itself, exactly at the end of the step
    for_s: float = 0.0  # default duration; 0: none, or until the target ends
    amount: float = 0.0  # default without --amount
    unit: str = ""  # meaning of --amount; empty: the kind takes no --amount


def _rank(name: str, does: str, seen: str, within_s: float) -> FaultKind:
    return FaultKind(name, "rank", does, seen, within_s, _REDONE, by_rank=True, is_inside=True)


# fmt: off
_OF_RANKS = (
    _rank("rank-kill", "SIGKILL", "killed by SIGKILL; all ranks restart", 1.0),
    _rank("segv", "reads address 0", "killed by SIGSEGV; all ranks restart", 1.0),
    _rank("abort", "calls abort()", "killed by SIGABRT; all ranks restart", 1.0),
    _rank("exception", "raises RuntimeError from optimizer.step()",
        "its text and line; all ranks restart", 1.0),
    _rank("exit0-early", "exits with code 0 in the middle",
        "the other ranks do not wait for it", 10.0),
    _rank("stop", "SIGSTOP; with --for, SIGCONT after it",
        "frozen; killed and replaced after monitor.frozen_kill_after_s", 5.0),
    _rank("hang", "the main thread sleeps", "a hang in computation, with its line",
        _HANG_WITHIN_S),
    _rank("gil-hold", "sleeps in C while it holds the GIL", "a stuck GIL",
        _HANG_WITHIN_S),
    _rank("busy-loop", "the main thread loops forever", "a busy loop, with its line",
        _HANG_WITHIN_S),
    _rank("collective-skip",
        "takes no part in one gradient all-reduce (DDP: the next step's; else the next "
        "torch.distributed.all_reduce)",
        "a skipped collective, or replicas that differ", _HANG_WITHIN_S),
    FaultKind("slow", "rank",
        "gets part of one core: by a cpu cgroup, or by alternating SIGSTOP and SIGCONT",
        "slow computation, this rank named, within 20 steps", 30.0, by_rank=True, amount=0.5,
        unit="part of a core"),
    FaultKind("slow-input", "rank", "every batch of torch's DataLoader is delayed",
        "input-bound, this rank named", 30.0, by_rank=True, is_inside=True, amount=0.5,
        unit="additional seconds for each batch"),
    _rank("nan", "a NaN in a parameter after the step", "numerical anomaly", 10.0),
    FaultKind("spike", "rank", "parameters are multiplied after the step, so that the loss jumps",
        "numerical anomaly (a spike), if the script reports its loss; otherwise replicas differ",
        10.0, _REDONE, by_rank=True, is_inside=True, amount=100.0, unit="factor"),
    _rank("poison-batch", "raises at that step, each time that the step is reached",
        "the same failure without progress: the run ends with exit code 93", 60.0),
    FaultKind("oom", "rank",
        "allocates until the kernel kills it, in a memory cgroup that it enters just before",
        "out of memory; all ranks restart", 5.0, _REDONE,
        "root, and a memory cgroup that can be divided", by_rank=True, is_inside=True,
        amount=256.0, unit="MiB that the rank may allocate"),
    _rank("weight-bitflip", "one bit of the mantissa of one parameter flips after the step",
        "replicas differ at the next digest that is compared", 60.0),
)

_OF_PARTS = (
    FaultKind("smp-kill", "part", "SIGKILL to the SMP", "a new SMP; ranks continue", 1.0),
    FaultKind("smp-stop", "part", "SIGSTOP to the SMP, SIGCONT after --for",
        "no commits while it is stopped; ranks continue", 10.0, for_s=5.0),
    FaultKind("agent-kill", "part", "SIGKILL to the agent; its ranks end too",
        "the stub starts a new agent, which resumes the run", 5.0, _REDONE),
    FaultKind("agent-stop", "part", "SIGSTOP to the agent, SIGCONT after --for",
        "several nodes: lost, and admitted again later; one node: no decisions while it is stopped",
        5.0, _REDONE, for_s=30.0),
    FaultKind("zygote-kill", "part", "SIGKILL to the zygote", "a new zygote", 1.0),
    FaultKind("leader-kill", "part", "SIGKILL to the agent that leads, wherever it is",
        "another leader; a new generation if it ran ranks", 5.0, _REDONE),
)

_OF_NODES = (
    FaultKind("node-loss", "node",
        "SIGKILL to all processes of this run on the node, with their memory; connections close",
        "the node is lost; a spare replaces it, or the run continues with fewer nodes", 5.0,
        "as rank-kill, if at most m nodes of a group are lost; on a single node everything",
        "a stub that is not process 1"),
    FaultKind("freeze", "node",
        "SIGSTOP to all processes of this run on the node, SIGCONT after --for",
        "the node is lost after the failure timeout, and rejected as outdated when it continues",
        5.0, _REDONE, for_s=20.0),
    FaultKind("shm-full", "node", "fills /dev/shm",
        "nothing: snapshots do not use it. The workers of a DataLoader may fail", 0.0,
        needs="a /dev/shm of at most 4 GiB, and at most a quarter of the free memory", for_s=10.0),
    FaultKind("disk-full", "node", "fills the file system of the logs",
        "journal lines are lost, checkpoints are refused, training continues", 10.0,
        "journal lines", "logs on a file system of their own of at most 4 GiB", for_s=10.0),
    FaultKind("fd-limit", "node", "the agent cannot open further files",
        "status is not answered during the fault; training continues", 0.0, for_s=10.0),
    FaultKind("pid-limit", "node", "agent, zygote and ranks cannot start processes",
        "new processes fail; training continues", 0.0, needs="root, and a pids cgroup", for_s=10.0),
    FaultKind("cpu-starve", "node", "busy processes compete with everything on the machine",
        "nothing: slower steps are not a failure", 0.0, for_s=20.0, amount=4.0,
        unit="busy processes per core"),
    FaultKind("clock-jump", "node", "the wall clock jumps, only for the processes of this run",
        "nothing: ftrun uses the monotonic clock", 0.0,
        needs="a run started under libfaketime: LD_PRELOAD, FAKETIME_TIMESTAMP_FILE and "
        "FAKETIME_NO_CACHE=1 set; the clock of the machine is not changed", for_s=60.0,
        amount=3600.0, unit="seconds forward; negative: backward"),
)

_OF_NETWORK = (
    FaultKind("partition", "network", "all packets that the node sends or receives are dropped",
        "the others lose the node, and the node stops its own ranks", 5.0, _REDONE, _LINK,
        for_s=15.0),
    FaultKind("one-way-partition", "network",
        "all packets that the node sends are dropped; it still receives",
        "as partition: heartbeats are needed in both directions", 10.0, _REDONE, _LINK, for_s=15.0),
    FaultKind("slow-link", "network",
        "the send rate of the node is limited to this number of Mbit/s",
        "slow communication, this node named, within 20 steps", 60.0, needs=_LINK, for_s=30.0,
        amount=10.0, unit="Mbit/s"),
    FaultKind("lossy-link", "network",
        "this share of the packets that the node sends or receives is dropped",
        "nothing: no node is lost because of it", 0.0, needs=_LINK, for_s=30.0, amount=10.0,
        unit="percent of packets"),
    FaultKind("bitflip-wire", "network", "a bit flips in the next frame to each other agent",
        "the connections are closed and opened again; the frame is not used", 5.0,
        needs="a run over several nodes"),
)

_OF_DATA = (
    FaultKind("bitflip-shm", "data",
        "SIGKILL to the rank, and a bit of its newest complete snapshot flips",
        "the digest does not match: another copy, or an older version, is restored", 60.0,
        "as rank-kill; without another copy, as on one node, one interval more, or all steps "
        "since the newest checkpoint", "a script that calls ftrun.attach, and a snapshot",
        by_rank=True),
    FaultKind("torn-snapshot", "data", "SIGKILL to the rank in the middle of a snapshot's copy",
        "the torn snapshot is not used; the previous one is restored", 5.0, _REDONE,
        "a script that calls ftrun.attach", by_rank=True, is_inside=True),
    FaultKind("fragment-truncate", "data",
        "the second half of all data that the node stores for others becomes zeros, until the "
        "next snapshot overwrites it",
        "at the next rebuild from it: the digest does not match, and another source is used", 60.0,
        needs="a run over several nodes whose snapshots are protected"),
    FaultKind("fragment-stale", "data",
        "the data that the node stores for others of the newest version becomes that of the "
        "previous one",
        "as fragment-truncate", 60.0, needs="as fragment-truncate, and two versions"),
    FaultKind("corrupt-checkpoint", "data", "a bit flips in the newest checkpoint on disk",
        "it is rejected when it is read, and the previous one is used", 60.0,
        "one interval between checkpoints", "--checkpoint-dir, and a checkpoint there"),
)
# fmt: on

FAULTS: dict[str, FaultKind] = {
    kind.name: kind for kind in (*_OF_RANKS, *_OF_PARTS, *_OF_NODES, *_OF_NETWORK, *_OF_DATA)
}


_RENAMED = {
    "lead-kill": "leader-kill",
    "agent-zombie": "agent-stop",
    "one-way": "one-way-partition",
    "gil": "gil-hold",
    "spin": "busy-loop",
}
"""Names in version 0.2, and the current names."""


def fault_kind(name: str) -> FaultKind:
    """Raises UsageError with the nearest name if there is no such kind."""
    found = FAULTS.get(name)
    if found is not None:
        return found
    if name in _RENAMED:
        raise UsageError(f"the fault {name} is now {_RENAMED[name]}")
    near = difflib.get_close_matches(name, FAULTS, n=1)
    hint = f"Did you mean {near[0]}?" if near else "ftrun inject-fault --list shows all faults"
    raise UsageError(f"unknown fault {name!r}. {hint}")
