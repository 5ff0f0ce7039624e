"""The faults of drill_nodes.py: what breaks on the nodes of a run, when, and the required outcome.

A fault starts the run and breaks something at a step or at a named point of ftrun's own code. It
waits until training resumes, and checks what only this fault must show: which node came back, and
in which role. Unless noted otherwise, node 0 is the endpoint, the leader and the host of rank 0 and
of the store. Members come first, spares last.
"""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from bench_common import BenchError
from nodes_run import NodesRun

from ftrun.membership.leader.draining import NOTICE_S

BREAK_AT = 30
HOLD_AT = 150
STEPS_AFTER = 15
FLAP_S = 1.2
SLOW_RATE = "100mbit"
NAMED_S = 10.0
"""A cut link between two members is named within this time."""
DRAINED_S = 2.0
"""The longest pause between two steps when a node is drained."""
DELAY_MS, LOSS_PERCENT = 2.0, 1.0
UNPROTECTED = ("--erasure", "none")


@dataclass
class Breaking:
    """One run with the faults injected so far."""

    run: NodesRun
    kind: str
    """ddp or fsdp2."""
    hits: list[tuple[int, int]] = field(default_factory=list)
    """Of each fault: the generation that was hit, the time in nanoseconds."""
    end_ns: int = 0
    """The end of the observation of a run that must not restart."""

    def begin(self, env_of: Mapping[int, Mapping[str, str]] | None = None) -> None:
        self.run.start_all(env_of)
        self.run.wait_for_step(BREAK_AT)

    def hit(self, what: str, node: int, *words: object, **more: object) -> None:
        generation = self.run.generation
        self.hits.append((generation, self.run.fault(what, node, *words, **more)))

    def signal(self, node: int, part: str, number: signal.Signals = signal.SIGKILL) -> None:
        generation = self.run.generation
        self.hits.append((generation, self.run.signal(node, part, number)))

    def recovered(self) -> None:
        """Wait until training resumes in a new generation, for some steps."""
        self.run.wait_for_generation(self.hits[-1][0] + 1)
        self._some_steps()

    def unharmed(self) -> None:
        """Wait until the run has completed some steps in the same generation.

        Raises:
            BenchError: it was restarted.
        """
        self._some_steps()
        self.end_ns = time.monotonic_ns()
        if self.run.generation != self.hits[0][0]:
            reasons = [line["reason"] for line in self.run.journals("generation_chosen")]
            raise BenchError(f"the run was restarted without a reason: {reasons}")

    def _some_steps(self) -> None:
        """Not beyond the step where the job waits for its `go`."""
        self.run.wait_for_step(min(self.run.last_step() + STEPS_AFTER, HOLD_AT))

    def crash_env(self, point: str) -> dict[str, str]:
        """For a node: the first process there that reaches this crash point kills itself."""
        return {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(self.run.folder / "crashed")}

    def wait_for_crash(self) -> None:
        once = self.run.folder / "crashed"
        self.run.wait_for("a process to reach its crash point", once.exists)

    def joined_again(self, node: int) -> None:
        self.run.wait_for(f"node{node} to join again", lambda: self.run.times_joined(node))

    def seconds(self) -> float:
        if self.end_ns:
            return self._longest_pause_s()
        return max((self._next_step_ns(at) - ns) / 1e9 for at, ns in self.hits)

    def _next_step_ns(self, generation: int) -> int:
        for later in range(generation + 1, self.run.generation + 1):
            if firsts := self.run.first_steps(later):
                return max(int(line["ns"]) for line in firsts)
        raise BenchError(f"no step was made after generation {generation}")

    def _longest_pause_s(self) -> float:
        pauses_ns = []
        for rank in range(self.run.members):
            times = [int(line["ns"]) for line in self.run.steps(rank) if line["ns"] <= self.end_ns]
            pauses_ns += [b - a for a, b in pairwise(times) if b > self.hits[0][1]]
        return max(pauses_ns) / 1e9


# --- a node is lost -----------------------------------------------------------------------------


def lost(what: str, node: int, it: Breaking) -> None:
    it.begin()
    it.hit(what, node)
    it.recovered()


def store_host(it: Breaking) -> None:
    """The store is on the node of rank 0; here that is node 1, and node 0 leads."""
    for node, place in enumerate((1, 0, 2)):
        it.run.start(node, flags=("--node-rank", place))
    it.run.wait_for_step(BREAK_AT)
    if it.run.node_of(0) != 1:
        raise BenchError(f"rank 0 is on node{it.run.node_of(0)}, and should be on node1")
    it.hit("kill", 1)
    it.recovered()


def spare_lost(it: Breaking) -> None:
    it.begin()
    it.hit("kill", 2)
    it.run.wait_for("the loss to be seen", lambda: it.run.journals("node_lost"))
    it.unharmed()


def two_at_once(it: Breaking) -> None:
    it.begin()
    it.hit("kill", 1)
    it.run.fault("kill", 2)
    it.recovered()


# --- a node is alive, and its heartbeats do not arrive --------------------------------------------


def freeze(it: Breaking) -> None:
    it.begin()
    it.hit("freeze", 1)
    it.run.wait_for_generation(1)
    it.run.cluster.thaw(1)
    it.joined_again(1)
    it.recovered()


def cut(it: Breaking) -> None:
    it.begin()
    it.hit("cut", 1)
    it.run.may_end(1)
    it.recovered()


def pair_cut(it: Breaking) -> None:
    """Node 0 leads and is the spare; it reaches both members, but they do not reach each other."""
    for node, place in enumerate((2, 0, 1)):
        it.run.start(node, flags=("--node-rank", place))
    it.run.wait_for_step(BREAK_AT)
    it.hit("cut", 1, peer=2)
    it.recovered()
    first = it.run.journals("verdict")[0]
    named, named_s = first["verdict"], first["monotonic_s"] - it.hits[0][1] / 1e9
    if named["kind"] != "hang in communication" or named["nodes"] != ["node1", "node2"]:
        raise BenchError(f"the link between node1 and node2 is cut, and the verdict is {named}")
    if named_s > NAMED_S:
        raise BenchError(f"the cut link was named after {named_s:.1f} s, more than {NAMED_S:g} s")
    if it.run.generation != 1 or it.run.node_of(1) != 0:
        raise BenchError(f"rank 1 is on node{it.run.node_of(1)}, generation {it.run.generation}")


def one_way_cut(it: Breaking) -> None:
    """Ranks train over eth1, where node 1 reaches node 2 no more. Agents and SMPs use eth0."""
    it.begin({node: {"GLOO_SOCKET_IFNAME": "eth1"} for node in range(4)})
    it.hit("cut", 1, peer=2, rail=1, is_one_way=True)
    it.recovered()
    named = it.run.journals("verdict")[0]["verdict"]
    wanted = "nothing that rank 1 on node1 sends to rank 2 on node2 arrives"
    if wanted not in named["text"] or named["culprits"] or named["nodes"] != ["node1", "node2"]:
        raise BenchError(f"what node1 sends to node2 is dropped, and the verdict is {named}")
    if it.run.generation != 1 or it.run.node_of(2) != 3:
        raise BenchError(f"rank 2 is on node{it.run.node_of(2)}, generation {it.run.generation}")


def leader_cut(it: Breaking) -> None:
    """The others continue; the old leader suspends its ranks, and returns as a spare."""
    it.begin()
    it.hit("cut", 0)
    it.run.wait_for_generation(1)
    if not it.run.journal(0, "ranks_suspended"):
        raise BenchError("the isolated leader did not stop its ranks")
    it.run.cluster.heal(0)
    it.joined_again(0)
    it.recovered()


def stale_rejoin(it: Breaking) -> None:
    """State from an old generation is discarded when its node returns; the node itself is used."""
    it.begin()
    it.hit("cut", 1)
    it.run.wait_for_generation(1)
    it.run.wait_for_more_steps(STEPS_AFTER)
    it.run.cluster.heal(1)
    it.joined_again(1)
    it.hit("reset", 2)
    it.recovered()
    if it.run.node_of(1) != 1:
        raise BenchError(f"rank 1 is on node{it.run.node_of(1)}, and should be back on node1")


def one_after_the_other(it: Breaking) -> None:
    """A node that comes back counts at once, so the next node may then be lost."""
    it.begin()
    it.hit("kill", 1)
    it.run.wait_for_generation(1)
    it.run.bring_back(1)
    it.run.wait_for("a vote of node1", lambda: it.run.journals("voters_changed"))
    it.hit("kill", 2)
    it.recovered()
    if it.run.node_of(1) != 1:
        raise BenchError(f"rank 1 is on node{it.run.node_of(1)}, and should be back on node1")


def flap(it: Breaking) -> None:
    it.begin()
    it.hit("cut", 1)
    _let_pass(it, FLAP_S)
    it.run.cluster.heal(1)
    it.unharmed()


def slow_link(it: Breaking) -> None:
    it.begin()
    it.hit("slow", 1, SLOW_RATE)
    it.unharmed()
    it.run.cluster.slow(1, "off")


def lossy_link(it: Breaking) -> None:
    it.begin()
    it.hit("delay", 1, DELAY_MS, loss_percent=LOSS_PERCENT)
    it.unharmed()
    it.run.cluster.delay(1, 0)


# --- at a point of time -------------------------------------------------------------------------


def capture(it: Breaking) -> None:
    it.run.start_all({1: it.crash_env(f"worker.capture.copied:{BREAK_AT}")})
    it.wait_for_crash()
    it.hit("kill", 1)
    it.recovered()


def encoding(it: Breaking) -> None:
    is_encoded = it.kind == "fsdp2"  # the state of DDP, which other nodes have as well
    point = "smp.protect.block_added:60" if is_encoded else "smp.protect.mirror_stored:30"
    it.run.start_all({1: it.crash_env(point)})
    it.wait_for_crash()
    it.hit("kill", 1)
    it.recovered()


def recovery(it: Breaking) -> None:
    """The leader's agent dies while it restarts its ranks after the loss of a node."""
    it.begin({0: it.crash_env("agent.restart.launched:2")})
    it.hit("reset", 1)
    it.wait_for_crash()
    it.joined_again(0)
    it.recovered()


def two_nodes(it: Breaking) -> None:
    """The node that replaced the lost one is lost while it restores."""
    it.begin({2: it.crash_env("worker.restore.tensors_loaded")})
    it.hit("reset", 1)
    it.wait_for_crash()
    it.run.fault("kill", 2)
    it.recovered()


# --- a part of a node ---------------------------------------------------------------------------


def rank_kill(it: Breaking) -> None:
    it.begin()
    it.signal(1, "rank")
    it.recovered()


def smp_kill(it: Breaking) -> None:
    it.begin()
    it.signal(1, "smp")
    it.unharmed()


def agent_kill(it: Breaking) -> None:
    it.begin()
    it.signal(1, "agent")
    it.joined_again(1)
    it.recovered()


def agent_stopped(it: Breaking) -> None:
    """The agent continues after its node was replaced."""
    it.begin()
    it.signal(1, "agent", signal.SIGSTOP)
    it.run.wait_for_generation(1)
    it.run.signal(1, "agent", signal.SIGCONT)
    it.joined_again(1)
    it.recovered()


# --- a node is drained ---------------------------------------------------------------------------


def leader_drained(it: Breaking) -> None:
    """Another node leads from then on, and restarts the ranks."""
    drained(0, it)
    it.run.wait_for("another leader", lambda: it.run.leader() != 0)
    it.run.wait_for_more_steps(STEPS_AFTER)


def drained(node: int, it: Breaking) -> None:
    it.begin()
    it.run.may_end(node)
    it.signal(node, "cli.stub", signal.SIGTERM)
    it.recovered()
    it.end_ns = time.monotonic_ns()
    (reported, *_), (stopped, *_) = (
        it.run.journals("leave_requested"),
        it.run.journals("final_snapshot_requested"),
    )
    if stopped["monotonic_s"] - reported["monotonic_s"] < NOTICE_S / 2:
        raise BenchError("the ranks were stopped before it was certain that the run continues")
    if (code := it.run.wait_for_code(node)) != 128 + signal.SIGTERM:
        raise BenchError(f"node{node} has left with {code}:\n{it.run.text(node)}")


def _let_pass(it: Breaking, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    it.run.wait_for("a pause", lambda: time.monotonic() >= end_s)


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue."""

    name: str
    what: str
    act: Callable[[Breaking], None]
    members: int = 2
    spares: int = 1
    rails: int = 1
    flags: tuple[str, ...] = ()
    pace: float = 1.0
    """Factor on the step time of the job, for faults that need much time before its end."""
    most_s: float = 0.0
    """The longest time that it may cost; 0: no limit."""


_ALL = (
    Fault("power-off", "a node loses power", partial(lost, "kill", 1)),
    Fault("reset", "a node; its kernel closes connections", partial(lost, "reset", 1)),
    Fault("freeze", "a node is frozen; thawed when replaced", freeze),
    Fault("cut", "a node's cable, for good", cut),
    Fault("pair-cut", "the link between the two members, for good", pair_cut),
    Fault("pair-cut-unprotected", "the same, without erasure coding", pair_cut, flags=UNPROTECTED),
    Fault("one-way-cut", "one direction between two of three members", one_way_cut, 3, rails=2),
    Fault("stale-rejoin", "cut, replaced, healed; then its successor is reset", stale_rejoin),
    Fault(
        "one-by-one",
        "a node; once it is back, its successor",
        one_after_the_other,
        flags=("--set", "nodes.last_call_timeout_s=1"),
        pace=5.0,
    ),
    Fault("lead-power-off", "the leader's node", partial(lost, "kill", 0)),
    Fault("lead-cut", "the leader's cable; healed when replaced", leader_cut),
    Fault("store-host", "the node of rank 0, which does not lead", store_host),
    Fault("capture", "a node, in the middle of a capture", capture),
    Fault("encoding", "a node, in the middle of the protection of a version", encoding),
    Fault("recovery", "a node; then the leader's agent, in the recovery", recovery),
    Fault("two-nodes", "a node; then its successor, while it restores", two_nodes, spares=2),
    Fault(
        "two-at-once",
        "two members of three",
        two_at_once,
        members=3,
        spares=2,
        flags=("--erasure", "1+2"),
    ),
    Fault("spare-lost", "the spare", spare_lost),
    Fault("flap", f"a cable, for {FLAP_S:g} s", flap),
    Fault("slow-link", f"a cable of {SLOW_RATE}", slow_link),
    Fault("lossy-link", f"{DELAY_MS:g} ms more, {LOSS_PERCENT:g} % of the frames lost", lossy_link),
    Fault("rank-kill", "a rank, by SIGKILL", rank_kill),
    Fault("smp-kill", "a node's SMP, by SIGKILL", smp_kill),
    Fault("agent-kill", "a node's agent, by SIGKILL", agent_kill),
    Fault("drained", "a node gets SIGTERM", partial(drained, 1), most_s=DRAINED_S),
    Fault(
        "lead-drained", "the leader's node gets SIGTERM", leader_drained, pace=2.0, most_s=DRAINED_S
    ),
    Fault("agent-stopped", "a node's agent, by SIGSTOP; SIGCONT when replaced", agent_stopped),
)

FAULTS = {fault.name: fault for fault in _ALL}
