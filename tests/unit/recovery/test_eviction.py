"""A node that holds the others up is replaced on wish: at a boundary, or at once if it hangs."""

import msgspec
from made_settings import changed
from unit.recovery.test_hang_watch import hang
from unit.recovery.test_watching import beat, sample, slow_link, told

from ftrun.config.cluster import ClusterSize, MembershipSettings
from ftrun.config.profile import HangConfig, SlowConfig
from ftrun.membership.leader.changes import BoundaryReconfiguration
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.monitor.slow.clock_offsets import ClockOffset
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import Send
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.heartbeats import Heartbeat, RestartTimes
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from tests.unit.recovery.made import card, meet, plan, settings

PLAN = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)], spares="s")
EVICT = settings(
    wishes=ClusterSize(2, 2, 1),
    heartbeat_s=0.5,
    answer_s=30.0,
    slow=SlowConfig(action="evict", evict_after_s=20.0),
)


class Run:
    """Two nodes of two ranks, and one that stands by; rank 2 on b is late from step 30 on."""

    def __init__(self, wishes: MembershipSettings = EVICT, *, spare: bool = True) -> None:
        self.peers = FailureDetector(card("a"), wishes)
        self.oversight = GenerationMonitor(wishes, "a", pairs=PairCheck())
        self.changes = BoundaryReconfiguration(wishes)
        self.oversight.begin(PLAN, now_s=0.0)
        clock = ClockOffset()
        clock.add(10**9, 10**9, 10**9, 10**9)
        self.oversight.watching.slow.clocks = {"b": clock}
        for one in [node.card for node in PLAN.members] + ([card("s")] if spare else []):
            meet(self.peers, one, now_s=0.0, linked=True)
        self.reasons: list[str] = []

    def go(self, first: int, last: int, late_s: float, **more: object) -> None:
        for number in range(first, last):
            for node in "ab":
                one = sample(node, number, late_s)
                self.beat(node, number, sample=one, **more)
            self.look(float(number))
            if self.boundary >= 0 or self.reasons:
                return

    def beat(self, node: str, number: int, **more: object) -> None:
        self.oversight.beat(node, beat(node, number, **more), now_s=float(number))

    def look(self, now_s: float, *, aside: str = "") -> str:
        self.oversight.passing(now_s=now_s)
        found = self.changes.look(PLAN, self.peers, set(aside), self.oversight, now_s=now_s)
        self.reasons += [found] if found else []
        return found

    @property
    def boundary(self) -> int:
        return self.oversight.orders.stop_after_step

    def is_aside(self, now_s: float) -> set[str]:
        return self.oversight.set_aside(now_s=now_s)


def slow_run(wishes: MembershipSettings = EVICT, *, spare: bool = True) -> Run:
    run = Run(wishes, spare=spare)
    run.go(1, 30, 0.0)
    run.go(30, 90, 0.08)
    return run


def at_the_boundary(run: Run, **more: object) -> None:
    for node in "ab":
        run.beat(node, run.boundary, at_boundary=True, **more)


def test_the_node_of_a_rank_that_stays_slow_is_evicted_at_a_boundary() -> None:
    run = slow_run()
    assert run.boundary > 50
    assert run.oversight.orders.why.startswith("node b is evicted: ")
    assert run.reasons == []
    assert run.is_aside(90.0) == set()
    at_the_boundary(run, ready=(1, run.boundary))
    assert run.look(70.0).startswith("node b is evicted: ")
    assert run.is_aside(70.0) == {"b"}
    assert run.oversight.history(now_s=91.0).barred == {"b": 21.0}, "the next lead knows it too"
    run.oversight.begin(plan(2, [card("a", num_ranks=2), card("s", num_ranks=2)]), now_s=92.0)
    for node in "as":
        ranks = beat("a" if node == "a" else "b", 200).ranks
        body = Heartbeat(generation=2, attached=True, step=200, steps_here=9, ranks=ranks,
                    restart=RestartTimes(0.1, 0.5, 0.1, 0.1))  # fmt: skip
        run.oversight.beat(node, body, now_s=93.0)
    run.oversight.passing(now_s=94.0)
    assert [one["actions"] for one in told(run.oversight, "IncidentClosed")] == [
        ["report"],
        ["evict"],
    ]


def test_by_default_it_is_only_told() -> None:
    run = slow_run(changed(EVICT, slow=SlowConfig()))
    assert run.boundary == -1
    assert len(told(run.oversight, "Verdict")) == 1


def test_where_nobody_stands_by_it_is_only_told() -> None:
    assert slow_run(spare=False).boundary == -1


def test_what_passes_is_left_alone() -> None:
    run = Run(changed(EVICT, slow=SlowConfig(action="evict", evict_after_s=60.0)))
    run.go(1, 30, 0.0)
    run.go(30, 60, 0.08)
    run.go(60, 150, 0.0)
    assert run.boundary == -1


def test_who_stood_by_may_be_gone_at_the_boundary() -> None:
    run = slow_run()
    spare = run.peers.get("s")
    assert spare is not None
    spare.lost = "silent"
    at_the_boundary(run, ready=(1, run.boundary))
    assert run.look(70.0).startswith("nobody stands by any more")
    assert run.is_aside(91.0) == set()


def test_a_script_without_snapshots_is_begun_anew_at_once() -> None:
    run = Run()
    run.go(1, 30, 0.0, attached=False)
    run.go(30, 90, 0.08, attached=False)
    assert run.reasons
    assert run.boundary == -1
    assert run.is_aside(90.0) == {"b"}


def test_of_a_slow_link_one_end_is_evicted() -> None:
    run = Run()
    for number in range(1, 100):
        one = slow_link(number, is_slow=number > 30)
        run.beat("a", number, sample=one)
        run.beat("b", number, sample=sample("b", number, 0.0))
        run.look(float(number))
        for send in run.oversight.probes(now_s=float(number)):
            assert isinstance(send, Send)
            assert isinstance(send.message, ProbeLinkRequest)
            found = ProbeLinkResult(send.message.number, "a", 0.001, 1e9, 1e5)
            run.oversight.watching.slow.probed(found, now_s=float(number))
    assert run.oversight.orders.why.startswith("node b is evicted: ")


def test_a_node_whose_rank_hangs_is_evicted_where_that_is_wished_and_possible() -> None:
    for action, spare, aside in (
        ("evict", True, {"a"}),
        ("evict", False, set()),
        ("restart", True, set()),
    ):
        run = Run(changed(EVICT, hang=HangConfig(action=action)), spare=spare)
        run.go(1, 5, 0.0)
        for number in range(3):
            views = hang(12.0 + number)
            for node in PLAN.members:
                own = tuple(views[rank] for rank in node.ranks)
                body = msgspec.structs.replace(beat(node.node_id, 5), views=own)
                run.oversight.beat(node.node_id, body, now_s=20.0 + number)
            run.look(20.5 + number)
        assert run.is_aside(23.0) == aside, action
