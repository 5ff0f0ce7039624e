"""Growth and eviction: at a step boundary, so that no step is lost."""

from ftrun.config.cluster import ClusterSize, MembershipSettings
from ftrun.membership.leader.changes import BoundaryReconfiguration
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.heartbeats import Heartbeat
from tests.unit.recovery.made import card, meet, plan, settings

SETTINGS = settings(wishes=ClusterSize(2, 4, 0), heartbeat_s=0.5, settle_s=5.0, answer_s=30.0)
PLAN = plan(1, "ab")


class Run:
    """Two members that run steadily, and whoever else has come."""

    def __init__(self, wishes: MembershipSettings = SETTINGS, *, attached: bool = True) -> None:
        self.peers = FailureDetector(card("a"), wishes)
        self.oversight = GenerationMonitor(wishes, pairs=PairCheck())
        self.changes = BoundaryReconfiguration(wishes)
        self.oversight.begin(PLAN, now_s=0.0)
        for one in "ab":
            meet(self.peers, card(one), now_s=0.0, linked=True)
            self.beat(one, step=7, attached=attached)

    def come(self, node_id: str, *, now_s: float = 0.0, incarnation: int = 1) -> None:
        meet(self.peers, card(node_id, incarnation), now_s=now_s, linked=True)

    def beat(self, node_id: str, *, step: int = 7, attached: bool = True, **more: object) -> None:
        found = Heartbeat(generation=1, step=step, steps_here=step, attached=attached, **more)  # type: ignore[arg-type]
        self.oversight.beat(node_id, found, now_s=0.0)

    def look(self, now_s: float, *, aside: str = "", of: GenerationPlan = PLAN) -> str:
        return self.changes.look(of, self.peers, set(aside), self.oversight, now_s=now_s)

    @property
    def boundary(self) -> int:
        return self.oversight.orders.stop_after_step


def test_it_asks_for_a_boundary_and_grows_once_its_snapshot_is_committed() -> None:
    run = Run()
    run.come("c")
    assert run.look(10.0) == ""
    assert run.boundary == 8
    assert run.oversight.orders.why == "grows from 2 to 3 nodes"
    for one in "ab":
        run.beat(one, step=8, at_boundary=True)
    assert run.look(20.0) == "", "it is not committed"
    for one in "ab":
        run.beat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.look(21.0) == "grows from 2 to 3 nodes"


def test_ranks_that_have_not_come_to_the_boundary_are_waited_for() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    for one in "ab":
        run.beat(one, step=8, ready=(1, 8))
    assert run.look(20.0) == ""


def test_where_the_snapshot_does_not_come_in_time_it_grows_without() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    assert run.look(39.7) == ""
    assert run.look(40.0) == "grows from 2 to 3 nodes, without a snapshot at step 8"


def test_a_script_that_takes_no_snapshots_grows_at_once() -> None:
    run = Run(attached=False)
    run.come("c")
    assert run.look(10.0) == "grows from 2 to 3 nodes"
    assert run.boundary == -1


def test_only_a_run_that_goes_on_undisturbed_grows() -> None:
    run = Run()
    run.come("c")
    run.oversight.note_failure("b", now_s=1.0)
    assert run.look(10.0) == ""
    assert run.boundary == -1
    run.beat("b")
    run.look(11.0)
    assert run.boundary >= 0


def test_a_run_that_is_asked_to_stop_does_not_grow_any_more() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    run.beat("a", stops=1)
    assert run.look(60.0) == ""


def test_only_nodes_that_have_stayed_a_while_are_taken_in() -> None:
    run = Run()
    assert run.look(100.0) == ""
    run.come("c", now_s=100.0)
    run.come("d", now_s=102.0)
    run.look(106.7)
    assert run.boundary == -1, "d has just come"
    run.look(107.0)
    assert run.oversight.orders.why == "grows from 2 to 4 nodes"


def test_who_is_lost_or_set_aside_or_not_connected_is_no_newcomer() -> None:
    run = Run()
    for one in "cde":
        run.come(one)
    lost, unlinked = run.peers.get("c"), run.peers.get("d")
    assert lost is not None
    assert unlinked is not None
    lost.lost, unlinked.linked = "silent", False
    assert run.look(100.0, aside="e") == ""
    assert run.boundary == -1


def test_a_member_that_was_started_again_is_a_newcomer() -> None:
    run = Run()
    run.come("b", incarnation=2)
    run.look(100.0)
    assert run.oversight.orders.why == "grows from 2 to 3 nodes"


def test_no_run_grows_beyond_what_was_wished_for() -> None:
    run = Run()
    for one in "cde":
        run.come(one)
    run.look(100.0)
    assert run.oversight.orders.why == "grows from 2 to 4 nodes"
    full = Run(settings(wishes=ClusterSize(2, 2, 1), settle_s=5.0), attached=False)
    full.come("c")
    assert full.look(100.0) == ""


def test_it_looks_twice_a_heartbeat() -> None:
    run = Run(attached=False)
    assert run.look(100.0) == ""
    run.come("c")
    assert run.look(100.2) == ""
    assert run.look(100.25)


def test_a_commit_of_before_the_boundary_is_not_the_one_that_is_waited_for() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    for one in "ab":
        run.beat(one, step=8, at_boundary=True, ready=(1, 7))
    assert run.look(20.0) == ""
    # A node alone stops at a boundary of its own, which may be a later one.
    for one in "ab":
        run.beat(one, step=9, at_boundary=True, ready=(1, 9))
    assert run.look(21.0) == "grows from 2 to 3 nodes"


def test_who_leaves_again_does_not_leave_the_ranks_at_the_boundary() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    c = run.peers.get("c")
    assert c is not None
    c.lost = "silent"
    for one in "ab":
        run.beat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.look(20.0) == "grows from 2 to 2 nodes"


def test_another_generation_forgets_the_boundary() -> None:
    run = Run()
    run.come("c")
    run.look(10.0)
    run.changes.reset()
    run.oversight.begin(PLAN, now_s=20.0)
    for one in "ab":
        run.beat(one, step=30)
    assert run.look(100.0) == ""
    assert run.boundary == 31


def test_the_same_nodes_go_on_otherwise_from_a_boundary_on_wish() -> None:
    run = Run()
    run.changes.wish = "the run leaves rail eth0"
    assert run.look(10.0) == ""
    assert run.boundary == 8
    for one in "ab":
        run.beat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.look(11.0) == "the run leaves rail eth0"
    run.changes.reset()
    assert run.look(12.0) == ""


def test_without_snapshots_a_wish_is_met_at_once() -> None:
    run = Run(attached=False)
    run.changes.wish = "the run leaves rail eth0"
    assert run.look(10.0) == "the run leaves rail eth0"
