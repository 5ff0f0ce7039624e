"""The status of a node: its age, and its merge with the status of the run."""

import os

import msgspec
import pytest

from ftrun.agent.publish.cluster_status import WARNINGS_SHOWN, _warnings, standing_by
from ftrun.agent.publish.status import has_commit, needed_bytes, with_age, with_cluster
from ftrun.ids import version
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.wire.cluster.membership import Heartbeat
from ftrun.wire.messages.smp import MemoryNeeded
from ftrun.wire.messages.status import (
    ClusterStatus,
    NodeStatus,
    RankStatus,
    RestartStatus,
    SnapshotStatus,
    StatusView,
)
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page
from tests.launch_requests import launch_request
from tests.unit.recovery.made import SETTINGS, card, meet, plan

OWN = StatusView(
    run_id="r",
    state="running",
    summary="running at step 5",
    age_s=0.1,
    warnings=("own",),
    restarts=(RestartStatus(2, cause="own", phases_s={"stop": 0.1}),),
    ranks=(RankStatus(0, lateness_s=None), RankStatus(1, lateness_s=0.1)),
    snapshots=SnapshotStatus(protected=True, note="own"),
)


@pytest.mark.parametrize(
    ("age_s", "summary"),
    [
        (1.9, "running at step 5"),
        (
            12.3,
            "running at step 5; the values of this node are 12 s old, because its agent is busy",
        ),
    ],
)
def test_an_old_status_names_its_age(age_s: float, summary: str) -> None:
    assert with_age(msgspec.structs.replace(OWN, age_s=age_s)).summary == summary


def cluster(**changes: object) -> ClusterStatus:
    ranks = (RankStatus(0, lateness_s=0.2), RankStatus(1), RankStatus(2, lateness_s=0.3))
    whole = ClusterStatus(
        state="paused",
        summary="PAUSED: x",
        lifecycle="run",
        nodes=(NodeStatus("a", ranks=ranks),),
        tolerated_losses=1,
        restarts=(RestartStatus(1, cause="earlier"), RestartStatus(2, downtime_s=1.5)),
    )
    return msgspec.structs.replace(whole, **changes)


def test_the_values_of_the_leader_take_precedence() -> None:
    found = with_cluster(OWN, cluster(), has_secret=True)
    assert (found.state, found.summary, found.lifecycle) == ("paused", "PAUSED: x", "run")
    assert [rank.lateness_s for rank in found.ranks] == [0.2, 0.1]
    assert found.warnings == ("own",)
    assert found.snapshots == SnapshotStatus(protected=True, note="own")
    assert found.authenticated


def test_a_node_measures_its_own_restarts_and_the_leader_their_downtime() -> None:
    first, second = with_cluster(OWN, cluster(), has_secret=True).restarts
    assert first == RestartStatus(1, cause="earlier")
    assert second == RestartStatus(2, cause="own", phases_s={"stop": 0.1}, downtime_s=1.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"tolerated_losses": 0}, ""), ({"unprotected_reason": "no memory"}, "no memory")],
)
def test_a_run_that_tolerates_no_loss_is_not_protected(
    changes: dict[str, object], reason: str
) -> None:
    found = with_cluster(OWN, cluster(**changes), has_secret=True)
    assert found.snapshots == SnapshotStatus(
        protected=False, unprotected_reason=reason, note=reason or "own"
    )


@pytest.mark.parametrize(
    ("redundancy_bytes", "has_commit", "found_bytes"),
    [(0, False, 140), (30, False, 110), (50, False, 100), (0, True, 100)],
)
def test_parity_is_needed_until_it_is_there_or_a_commit_shows_its_size(
    redundancy_bytes: int, has_commit: bool, found_bytes: int
) -> None:
    needed = MemoryNeeded(arena_bytes=100, parity_bytes=40)
    found = needed_bytes(needed, redundancy_bytes=redundancy_bytes, has_commit=has_commit)
    assert found == found_bytes


@pytest.mark.parametrize(
    ("shown", "within", "old_size", "found"),
    [
        ((-1, -1), -1, 0, False),  # nothing is restored
        ((1, 5), -1, 0, False),  # the restored version, which its earlier group protects
        ((1, 5), 2, 0, True),  # this generation has protected and committed it again
        ((1, 5), 2, 3, False),  # of another world size: its earlier groups keep its protection
        ((2, 8), 2, 3, True),
    ],
)
def test_a_restored_version_is_a_commit_once_its_generation_has_protected_it(
    shown: tuple[int, int], within: int, old_size: int, found: bool
) -> None:
    fd = create_command_page()
    page = SharedPage(fd)
    page.set(CommandField.COMMITTED_GENERATION, shown[0])
    page.set(CommandField.COMMITTED_STEP, shown[1])
    page.set(CommandField.COMMITTED_IN, within)
    request = launch_request(
        generation=2, world_size=2, restore=version(1, 5), restore_world_size=old_size
    )
    assert has_commit(page, request) is found
    os.close(fd)


def test_a_spare_shows_the_version_of_the_run() -> None:
    spare = msgspec.structs.replace(OWN, snapshots=SnapshotStatus())
    found = with_cluster(spare, cluster(committed_version=(2, 40)), has_secret=True)
    assert found.snapshots == SnapshotStatus(protected=True, generation=2, step=40)


def test_a_run_without_a_secret_is_reported() -> None:
    assert with_cluster(OWN, cluster(), has_secret=False).summary == "PAUSED: x; UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("role", "summary"),
    [
        ("following", "running at step 5; following a"),
        ("electing", "electing a new leader; running at step 5"),
    ],
)
def test_without_the_leader_a_node_shows_its_own_state(role: str, summary: str) -> None:
    words = "following a" if role == "following" else "electing a new leader"
    alone = ClusterStatus(state=role, role=role, summary=words, note="no answer")
    assert with_cluster(OWN, alone, has_secret=True).summary == summary


@pytest.mark.parametrize(("count", "last"), [(2, "node n1: w"), (64, "61 more nodes with such")])
def test_warnings_of_some_nodes_are_shown(count: int, last: str) -> None:
    heartbeats = {
        f"n{number}": Heartbeat(generation=1, repeat_warning="w") for number in range(count)
    }
    found = _warnings({**heartbeats, "quiet": Heartbeat(generation=1)})
    assert found[0] == "node n0: w"
    assert found[-1].startswith(last)
    assert len(found) == min(count, WARNINGS_SHOWN + 1)


def test_no_warning_of_slow_copies_hides_one_of_a_wrong_result() -> None:
    heartbeats = {f"n{at}": Heartbeat(generation=1, capture_warning="slow") for at in range(64)}
    heartbeats["n9"] = Heartbeat(generation=1, capture_warning="slow", repeat_warning="differs")
    found = _warnings(heartbeats)
    assert found[:2] == ("node n9: differs", "node n0: slow")
    assert found[-1].startswith("61 more nodes")


def test_all_warnings_of_a_node_are_shown() -> None:
    own = Heartbeat(
        generation=1, repeat_warning="differs", capture_warning="pageable", file_warning="full"
    )
    words = ("differs", "full", "pageable")
    assert _warnings({"n0": own}) == tuple(f"node n0: {one}" for one in words)


def test_a_node_that_has_come_is_standby_also_without_a_vote() -> None:
    peers = FailureDetector(card("a"), SETTINGS)
    for name in "abcdefg":
        meet(peers, name)
    peers.by_id["c"].lost = peers.by_id["d"].lost = "no heartbeat"
    peers.by_id["e"].is_leaving = peers.by_id["f"].is_unresponsive = True
    assert standing_by(peers, plan(1, "ab", "c")) == {"g"}
    peers.by_id["c"].lost = ""
    assert standing_by(peers, plan(1, "ab", "c")) == {"c", "g"}
    peers.by_id["g"].linked = False
    assert standing_by(peers, plan(1, "ab", "c")) == {"c"}


@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        ("", "", ""),
        ("yes", "", "yes"),
        ("yes", "rank 3: x", "no, rank 3: x"),
        ("no, y", "", "no, y"),
    ],
)
def test_the_first_reason_of_any_node_says_whether_ranks_could_stay(
    own: str, other: str, text: str
) -> None:
    view = msgspec.structs.replace(OWN, survivors=own)
    nodes = (NodeStatus("a"), NodeStatus("b", stay_problem=other))
    assert with_cluster(view, cluster(nodes=nodes), has_secret=True).survivors == text
