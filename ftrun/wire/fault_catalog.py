"""Catalogue of the faults that `ftrun inject-fault` can inject.

Runs in:  cli (shows it and validates the command line), agent and worker (look up a kind). Pure.

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
    "part": "A part of ftrun on one node (--node N)",
    "node": "A node and what it lives on (--node N)",
    "network": "What a node sends and hears (--node N)",
    "data": "Snapshots and checkpoints (--rank R or --node N)",
}
"""Shown in this order."""

_HANG_WITHIN_S = 10.0
_LINK = (
    "a run over several nodes, root, tc with its bpf classifier, and a link that may be cut: a "
    "veth in a network namespace other than that of process 1, or --allow-network-faults"
)
_REDONE = "the steps since the last committed snapshot, which are done again"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault.

    Args:
        name: as typed on the command line.
        target: what the fault acts on; a "rank" or "data" kind with `by_rank` takes --rank.
        does: the action.
        seen: the reaction that is expected.
        within_s: maximum seconds from the fault to the expected reaction; 0: no reaction is
            expected.
        lost: state or work that may be lost.
        needs: requirements; empty: none.
        by_rank: the kind takes --rank; otherwise --node.
        is_inside: the rank injects the fault into itself, exactly at the end of the named step.
        for_s: default duration in seconds, without --for; 0: no duration, or until the target ends.
        amount: default without --amount.
        unit: meaning of --amount; empty: the kind takes no --amount.
    """

    name: str
    target: Target
    does: str
    seen: str
    within_s: float
    lost: str = "nothing"
    needs: str = ""
    by_rank: bool = False
    is_inside: bool = False
    for_s: float = 0.0
    amount: float = 0.0
    unit: str = ""


def _rank(name: str, does: str, seen: str, within_s: float, lost: str = _REDONE) -> FaultKind:
    return FaultKind(name, "rank", does, seen, within_s, lost, by_rank=True, is_inside=True)


def _lasting(
    name: str, does: str, seen: str, for_s: float, within_s: float = _HANG_WITHIN_S
) -> FaultKind:
    return FaultKind(
        name, "rank", does, seen, within_s, _REDONE, by_rank=True, is_inside=True, for_s=for_s
    )


_OF_RANKS = (
    _rank("rank-kill", "SIGKILL", "killed by SIGKILL; all ranks start again", 1.0),
    _rank("segv", "reads address 0", "killed by SIGSEGV; all ranks start again", 1.0),
    _rank("abort", "calls abort()", "killed by SIGABRT; all ranks start again", 1.0),
    _rank(
        "exception",
        "raises RuntimeError out of optimizer.step()",
        "its text and line; all ranks start again",
        1.0,
    ),
    _rank("exit0-early", "ends with 0 in the middle", "the others are not left waiting", 10.0),
    _lasting(
        "stop",
        "SIGSTOP; with --for, SIGCONT after it",
        "frozen; killed and replaced after monitor.stopped_kill_s",
        0.0,
        5.0,
    ),
    _lasting("hang", "the main thread sleeps", "a hang in computation, with its line", 0.0),
    _lasting("gil", "sleeps in C with the interpreter's lock held", "a stuck GIL", 0.0),
    _lasting("spin", "the main thread runs in circles", "a busy loop, with its line", 0.0),
    _rank(
        "collective-skip",
        "takes no part in one gradient all-reduce (DDP: the next step's; else the next "
        "torch.distributed.all_reduce)",
        "a skipped collective, or replicas that differ",
        _HANG_WITHIN_S,
    ),
    FaultKind(
        "slow",
        "rank",
        "gets part of one core: by a cpu cgroup, or else by SIGSTOP and SIGCONT in turn",
        "slow computation, this rank named, within 20 steps",
        30.0,
        by_rank=True,
        amount=0.5,
        unit="part of a core",
    ),
    FaultKind(
        "slow-input",
        "rank",
        "every batch of torch's DataLoader comes late",
        "input-bound, this rank named",
        30.0,
        by_rank=True,
        is_inside=True,
        amount=0.5,
        unit="seconds more for each batch",
    ),
    _rank("nan", "a NaN in a parameter after the step", "bad numbers", 10.0),
    FaultKind(
        "spike",
        "rank",
        "parameters are multiplied after the step, so that the loss jumps",
        "bad numbers (a spike), where the script reports its loss; before it, that replicas differ",
        10.0,
        _REDONE,
        by_rank=True,
        is_inside=True,
        amount=100.0,
        unit="factor",
    ),
    _rank(
        "poison-batch",
        "raises at that step, and again each time that step comes",
        "the same failure without progress: the run ends with 93",
        60.0,
    ),
    FaultKind(
        "oom",
        "rank",
        "allocates until the kernel kills it, in a memory cgroup that it enters just before",
        "out of memory; all ranks start again",
        5.0,
        _REDONE,
        "root, and a memory cgroup that can be divided",
        by_rank=True,
        is_inside=True,
        amount=256.0,
        unit="MiB that it may allocate",
    ),
    _rank(
        "weight-bitflip",
        "one bit of the mantissa of one parameter flips after the step",
        "replicas differ at the next digest that is compared",
        60.0,
    ),
)

_OF_PARTS = (
    FaultKind("smp-kill", "part", "SIGKILL to the SMP", "another SMP, ranks untouched", 1.0),
    FaultKind(
        "smp-stop",
        "part",
        "SIGSTOP to the SMP, SIGCONT after --for",
        "no commits meanwhile; ranks untouched",
        10.0,
        for_s=5.0,
    ),
    FaultKind(
        "agent-kill",
        "part",
        "SIGKILL to the agent; its ranks die with it",
        "the stub starts another, which continues",
        5.0,
        _REDONE,
    ),
    FaultKind(
        "agent-zombie",
        "part",
        "SIGSTOP to the agent, SIGCONT after --for",
        "several nodes: lost, and taken in again later; one node: nothing is decided meanwhile",
        5.0,
        _REDONE,
        for_s=30.0,
    ),
    FaultKind("zygote-kill", "part", "SIGKILL to the zygote", "another zygote", 1.0),
    FaultKind(
        "lead-kill",
        "part",
        "SIGKILL to the agent that leads, wherever it is",
        "another lead; where it runs ranks, a new generation",
        5.0,
        _REDONE,
    ),
)

_OF_NODES = (
    FaultKind(
        "node-loss",
        "node",
        "SIGKILL to all of this run on the node, memory and stub included; its connections close",
        "the node is lost; a spare takes its place, or fewer nodes go on",
        5.0,
        "as rank-kill, while at most m nodes of a group are lost; on one node everything",
        "a stub that is not process 1",
    ),
    FaultKind(
        "freeze",
        "node",
        "SIGSTOP to all of this run on the node, SIGCONT after --for",
        "the node is silent and lost; refused as outdated when it wakes",
        5.0,
        _REDONE,
        for_s=20.0,
    ),
    FaultKind(
        "shm-full",
        "node",
        "fills /dev/shm",
        "nothing: snapshots do not lie there. A DataLoader's workers may fail, as they would",
        0.0,
        needs="a /dev/shm of at most 4 GiB, and at most a quarter of the free memory",
        for_s=10.0,
    ),
    FaultKind(
        "disk-full",
        "node",
        "fills the file system of the logs",
        "journal lines are lost, checkpoints are refused, training continues",
        10.0,
        "journal lines",
        "logs on a file system of their own of at most 4 GiB",
        for_s=10.0,
    ),
    FaultKind(
        "fd-limit",
        "node",
        "the agent can open nothing more",
        "status is not answered during the fault; training continues",
        0.0,
        for_s=10.0,
    ),
    FaultKind(
        "pid-limit",
        "node",
        "agent, zygote and ranks can start nothing more",
        "new processes fail; training continues",
        0.0,
        needs="root, and a pids cgroup",
        for_s=10.0,
    ),
    FaultKind(
        "cpu-starve",
        "node",
        "busy processes compete with everything on the machine",
        "nothing: slower steps are no failure",
        0.0,
        for_s=20.0,
        amount=4.0,
        unit="busy processes per core",
    ),
    FaultKind(
        "clock-jump",
        "node",
        "the time of day jumps, for the processes of this run alone",
        "nothing: ftrun counts on the monotonic clock",
        0.0,
        needs="a run started under libfaketime: LD_PRELOAD, FAKETIME_TIMESTAMP_FILE and "
        "FAKETIME_NO_CACHE=1 set; a machine's own clock is never touched",
        for_s=60.0,
        amount=3600.0,
        unit="seconds forward; negative: back",
    ),
)

_OF_NETWORK = (
    FaultKind(
        "partition",
        "network",
        "all that the node sends and hears gets lost",
        "it is lost to the others, and stops its ranks on its own",
        5.0,
        _REDONE,
        _LINK,
        for_s=15.0,
    ),
    FaultKind(
        "one-way",
        "network",
        "all that the node sends gets lost; it still hears",
        "as partition: both sides must be heard",
        10.0,
        _REDONE,
        _LINK,
        for_s=15.0,
    ),
    FaultKind(
        "slow-link",
        "network",
        "what the node sends goes at so many Mbit/s",
        "slow communication, this node named, within 20 steps",
        60.0,
        needs=_LINK,
        for_s=30.0,
        amount=10.0,
        unit="Mbit/s",
    ),
    FaultKind(
        "lossy-link",
        "network",
        "one packet in so many that the node sends or hears gets lost",
        "nothing: no node is lost for it",
        0.0,
        needs=_LINK,
        for_s=30.0,
        amount=10.0,
        unit="percent of packets",
    ),
    FaultKind(
        "bitflip-wire",
        "network",
        "a bit flips in the next frame to each other agent",
        "the connections are closed and made anew; nothing of it is believed",
        5.0,
        needs="a run over several nodes",
    ),
)

_OF_DATA = (
    FaultKind(
        "bitflip-shm",
        "data",
        "SIGKILL to the rank, and a bit of its newest whole snapshot flips",
        "the digest does not match: another copy, or an older version, is restored",
        60.0,
        "as rank-kill; without another copy, as on one node, an interval more, or all up to "
        "the newest checkpoint",
        "a script that calls ftrun.attach, and a snapshot",
        by_rank=True,
    ),
    FaultKind(
        "torn-snapshot",
        "data",
        "SIGKILL to the rank in the middle of a snapshot's copy",
        "the torn one is never used; the one before is restored",
        5.0,
        _REDONE,
        "a script that calls ftrun.attach",
        by_rank=True,
        is_inside=True,
    ),
    FaultKind(
        "fragment-truncate",
        "data",
        "the second half of all that the node keeps for others becomes zeros, until the next "
        "snapshot writes over it",
        "at the next rebuild from it: the digest does not match, another source is taken",
        60.0,
        needs="a run over several nodes whose snapshots are protected",
    ),
    FaultKind(
        "fragment-stale",
        "data",
        "what the node keeps of the newest version for others becomes that of the one before",
        "as fragment-truncate",
        60.0,
        needs="as fragment-truncate, and two versions",
    ),
    FaultKind(
        "corrupt-checkpoint",
        "data",
        "a bit flips in the newest checkpoint on disk",
        "it is set aside when it is read, and the one before is taken",
        60.0,
        "one interval between checkpoints",
        "--checkpoint-dir, and a checkpoint there",
    ),
)

FAULTS: dict[str, FaultKind] = {
    kind.name: kind for kind in (*_OF_RANKS, *_OF_PARTS, *_OF_NODES, *_OF_NETWORK, *_OF_DATA)
}


def fault_kind(name: str) -> FaultKind:
    """Look up a kind by name.

    Raises:
        UsageError: there is no such kind.
    """
    found = FAULTS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, FAULTS, n=1)
    hint = f"Did you mean {near[0]}?" if near else "ftrun inject-fault --list shows them all"
    raise UsageError(f"there is no fault {name!r}. {hint}")
