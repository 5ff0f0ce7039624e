"""The culprit of a run without progress: every kind of hang, over one group and many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unit.monitor.ranks import World, play, view, views_of

from ftrun.config.profile import HangConfig
from ftrun.events import ErrorLine
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.verdicts import (
    CollectiveCall,
    Confidence,
    DumpedRankView,
    ProcessGroupView,
    RankView,
    Verdict,
    VerdictKind,
    own_functions,
)

SETTINGS = HangConfig()
LIMIT_S = 8.5


def judge(views: dict[int, RankView], nodes: dict[int, str] | None = None) -> Verdict | None:
    node_of = nodes if nodes is not None else {rank: f"node{rank // 2}" for rank in views}
    return find_hang(views, node_of, SETTINGS, limit_s=LIMIT_S)


def judged(views: dict[int, RankView], nodes: dict[int, str] | None = None) -> Verdict:
    found = judge(views, nodes)
    assert found is not None
    return found


def group(rank: int, *, entered: int, waits: bool, size: int = 4, op: str = "all_reduce",
          sizes: str = "[8]") -> ProcessGroupView:  # fmt: skip
    calls = tuple(CollectiveCall(n, "all_reduce", "[8]") for n in range(1, entered)) + (
        (CollectiveCall(entered, op, sizes),) if entered else ()
    )
    return ProcessGroupView(
        "0", "default_pg", tuple(range(size)), calls, entered if waits else 0, 3.0
    )


def waiting(rank: int, seq: int = 5, **changes: object) -> RankView:
    return view(rank, groups=(group(rank, entered=seq, waits=True),), **changes)


def behind(rank: int, **changes: object) -> RankView:
    """Rank that has entered one collective less than the others."""
    return view(rank, groups=(group(rank, entered=4, waits=False),), **changes)


def test_none_is_named_while_all_make_steps() -> None:
    assert judge({rank: view(rank, unresponsive_s=3.0) for rank in range(4)}) is None


def test_none_is_named_before_the_first_step() -> None:
    assert (
        judge({rank: view(rank, has_stepped=False, unresponsive_s=900.0) for rank in range(4)})
        is None
    )


@pytest.mark.parametrize("culprit", range(4))
def test_a_node_that_has_not_entered_is_the_culprit(culprit: int) -> None:
    views = {r: behind(r) if r == culprit else waiting(r) for r in range(4)}
    found = judged(views)
    assert found.kind is VerdictKind.HANG_IN_COMPUTATION
    assert found.culprits == (culprit,)
    assert found.victims == tuple(r for r in range(4) if r != culprit)
    assert found.nodes == (f"node{culprit // 2}",)
    assert found.act_immediately
    assert found.confidence is Confidence.CERTAIN
    assert f"rank {culprit} on node{culprit // 2}" in found.text
    assert "train.py:42 in step" in found.text
    assert "all_reduce #5 of the default group" in found.text
    assert any("#4" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("state", "kind", "at_once"),
    [
        ({"process": "T"}, VerdictKind.FROZEN, True),
        ({"process": "D", "blocked_in": "nfs_wait"}, VerdictKind.FROZEN, False),
        ({"holds_gil": True}, VerdictKind.GIL_STUCK, True),
        ({"holds_gil": True, "still_s": 1.0}, VerdictKind.GIL_STUCK, False),
        ({"holds_gil": True, "still_s": 0.0}, VerdictKind.HANG_IN_COMPUTATION, False),
        ({"spins_s": 5.0, "still_s": 0.0, "cpu": 1.0}, VerdictKind.BUSY_LOOP, False),
        ({"still_s": 0.5, "cpu": 0.9}, VerdictKind.HANG_IN_COMPUTATION, False),
        ({"phase": "eval"}, VerdictKind.HANG_IN_COMPUTATION, False),
        ({"phase": "eval", "spins_s": 9.0, "still_s": 0.0}, VerdictKind.HANG_IN_COMPUTATION, False),
        ({"is_finished": True, "process": ""}, VerdictKind.HANG_IN_COMPUTATION, True),
        (
            {"stack": ("/x/site-packages/torch/serialization.py:1 in save", "/me/t.py:3 in f")},
            VerdictKind.HANG_IN_COMPUTATION,
            False,
        ),
        (
            {"stack": ("/x/site-packages/torch/_inductor/graph.py:1 in run", "/me/t.py:3 in f")},
            VerdictKind.HANG_IN_COMPUTATION,
            False,
        ),
        (
            {"stack": ("/x/site-packages/torch/utils/data/dataloader.py:1 in _get", "/me/t.py:3")},
            VerdictKind.INPUT_BOUND,
            False,
        ),
        (
            {
                "stack": ("/x/site-packages/torch/utils/data/dataloader.py:1 in _get",),
                "child": "its child process 7 is stopped (state T)",
            },
            VerdictKind.INPUT_BOUND,
            True,
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_culprit(
    state: dict[str, object], kind: VerdictKind, at_once: bool
) -> None:
    found = judged({0: waiting(0), 1: behind(1, **state), 2: waiting(2), 3: waiting(3)})
    assert (found.kind, found.culprits, found.act_immediately) == (kind, (1,), at_once)
    assert found.text.endswith("wait in all_reduce #5 of the default group")
    assert found.evidence


def test_patience_is_asked_for_where_a_rank_evaluates_or_computes() -> None:
    busy = behind(1, phase="eval", cpu=0.8, still_s=0.0)
    found = judged({0: waiting(0), 1: busy, 2: waiting(2), 3: waiting(3)})
    assert len(found.counter_evidence) == 2
    assert found.confidence is Confidence.LIKELY


def test_a_sleeper_of_which_the_lock_is_not_known_may_hold_it() -> None:
    unseen = behind(1, is_gil_known=False)
    found = judged({0: waiting(0), 1: unseen, 2: waiting(2), 3: waiting(3)})
    assert found.kind is VerdictKind.HANG_IN_COMPUTATION
    assert any("py-spy is missing" in one for one in found.counter_evidence)


def test_a_rank_that_makes_steps_will_come() -> None:
    """Uneven work: one rank has finished its epoch and waits, and the others continue."""
    going = behind(1, unresponsive_s=0.2, still_s=0.0)
    assert judge({0: waiting(0), 1: going, 2: waiting(2), 3: waiting(3)}) is None


@pytest.mark.parametrize(
    ("state", "kind"),
    [({}, VerdictKind.HANG_IN_COMPUTATION), ({"holds_gil": True}, VerdictKind.GIL_STUCK)],
)
def test_a_rank_that_no_process_waits_for_may_be_at_something_of_its_own(
    state: dict[str, object], kind: VerdictKind
) -> None:
    found = judged({0: view(0, unresponsive_s=1.0), 1: view(1, **state)})
    assert (found.kind, found.culprits) == (kind, (1,))
    assert (found.act_immediately, found.confidence) == (False, Confidence.LIKELY)
    assert found.text.endswith("no other rank waits")


@pytest.mark.parametrize(
    "frame",
    [
        "/lib/python3.11/subprocess.py:9 in wait",
        "/lib/ssl.py:9 in read",
        "/lib/python3.11/pdb.py:9 in interaction",
        "/lib/python3.11/queue.py:9 in get",
    ],
)
def test_a_rank_that_waits_for_the_outside_has_leave(frame: str) -> None:
    outside = behind(1, stack=(frame, "/me/t.py:4 in upload"))
    found = judged({0: waiting(0), 1: outside, 2: waiting(2), 3: waiting(3)})
    assert (found.may_take_long, found.act_immediately) == (True, False)


def test_several_ranks_are_named_by_what_they_do() -> None:
    def words(**changes: object) -> str:
        return judged({rank: view(rank, **changes) for rank in range(4)}).text

    assert words(phase="eval") == "ranks 0 to 3 are in phase eval; no other rank waits"
    assert words(cpu=1.0, still_s=0.0) == "ranks 0 to 3 are still computing; no other rank waits"
    assert words() == "ranks 0 to 3 have stopped making progress; no other rank waits"


def test_a_node_that_computes_during_a_collective_does_not_wait_for_it() -> None:
    """An asynchronous operation is pending and rank 1 computes; the others are in the next one."""
    busy = view(1, groups=(group(1, entered=4, waits=True),), cpu=1.0, still_s=0.0)
    found = judged({0: waiting(0), 1: busy, 2: waiting(2), 3: waiting(3)})
    assert (found.culprits, found.act_immediately) == ((1,), False)
    held_up = (f"{AUTOGRAD}:1 in _engine_run_backward", "/me/t.py:4 in step")
    spins = view(1, groups=(group(1, entered=4, waits=True),), cpu=1.0, stack=held_up)
    assert spins.is_held_up


AUTOGRAD = "/v/site-packages/torch/autograd/graph.py"


def test_several_nodes_that_have_not_come() -> None:
    found = judged({r: behind(r) if r in (1, 2) else waiting(r) for r in range(4)})
    assert found.culprits == (1, 2)
    assert found.text.startswith("ranks 1 and 2 have stopped making progress, and ranks 0 and 3")


def test_all_have_entered_and_none_has_left() -> None:
    found = judged({r: waiting(r) for r in range(4)})
    assert found.kind is VerdictKind.HANG_IN_COMMUNICATION
    assert found.culprits == ()
    assert found.nodes == ("node0", "node1")
    assert not found.act_immediately
    assert "between nodes node0, node1" in found.text


def test_some_have_left_and_some_cannot() -> None:
    views = {r: waiting(r) for r in range(3)}
    views[3] = view(3, groups=(group(3, entered=5, waits=False),))
    found = judged(views, dict.fromkeys(range(4), "here"))
    assert found.kind is VerdictKind.HANG_IN_COMMUNICATION
    assert any("rank 3 has left it" in line for line in found.evidence)
    assert "on node here" in found.text


def test_a_rank_that_calls_something_else_has_skipped_one() -> None:
    views = {r: waiting(r) for r in range(4)}
    odd = group(2, entered=5, waits=True, op="broadcast", sizes="[10]")
    views[2] = view(2, groups=(odd,))
    found = judged(views)
    assert (found.kind, found.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, (2,))
    assert found.act_immediately
    assert "broadcast on rank 2" in found.text


def test_of_two_ranks_that_differ_the_one_that_is_ahead_has_skipped() -> None:
    odd = group(1, entered=5, waits=True, sizes="[10]")
    views = {0: waiting(0, step=7), 1: view(1, groups=(odd,), step=8)}
    assert judged(views).culprits == (1,)


def test_of_two_ranks_that_differ_in_nothing_else_neither_is_named() -> None:
    odd = group(1, entered=5, waits=True, sizes="[10]")
    found = judged({0: waiting(0), 1: view(1, groups=(odd,))})
    assert found.culprits == (0, 1)
    assert found.confidence is Confidence.POSSIBLE
    assert found.counter_evidence


def test_sizes_of_a_gather_may_differ() -> None:
    views = {}
    for rank in range(3):
        own = group(rank, entered=5, waits=True, size=4, op="all_gather", sizes=f"[{rank}]")
        views[rank] = view(rank, groups=(own,))
    views[3] = behind(3)
    assert judged(views).culprits == (3,)


def test_ranks_of_a_node_that_has_not_reported_yet_are_not_judged() -> None:
    assert judge({0: waiting(0), 1: waiting(1)}, {0: "a", 1: "a", 2: "b", 3: "b"}) is None


def one_behind(desc: str, ranks: tuple[int, ...], **changes: object) -> dict[int, RankView]:
    """Rank 0 waits in the third collective of group 7, and rank 1 has entered two."""
    calls = tuple(CollectiveCall(n, "all_reduce") for n in range(1, 4))
    waits = ProcessGroupView("7", desc, ranks, calls, 3, 4.0)
    entered = ProcessGroupView("7", desc, ranks, calls[:2], 0, 4.0)
    return {0: view(0, groups=(waits,)), 1: view(1, groups=(entered,), **changes)}


def test_groups_whose_ranks_are_not_known() -> None:
    found = judged(one_behind("tp", ()), {})
    assert (found.culprits, found.nodes) == ((1,), ())
    assert found.text.startswith("rank 1 has")


def test_two_ranks_that_wait_for_one_another_in_two_groups() -> None:
    def of(name: str, *, waits: bool) -> ProcessGroupView:
        calls = (CollectiveCall(1, "all_reduce", "[8]"),) if waits else ()
        return ProcessGroupView(name, name, (0, 1), calls, int(waits), 4.0)

    views = {
        0: view(0, groups=(of("a", waits=True), of("b", waits=False))),
        1: view(1, groups=(of("a", waits=False), of("b", waits=True))),
    }
    found = judged(views)
    assert (found.kind, found.culprits) == (VerdictKind.DEADLOCK, (0, 1))
    assert (found.act_immediately, found.confidence) == (True, Confidence.CERTAIN)
    moving = {rank: replace(one, still_s=0.0) for rank, one in views.items()}
    assert (judged(moving).act_immediately, judged(moving).confidence) == (
        False,
        Confidence.POSSIBLE,
    )


RECEIVES = ("/x/site-packages/torch/distributed/distributed_c10d.py:99 in recv", "/me/t.py:5 in f")


def test_a_node_that_waits_for_a_message_is_a_victim() -> None:
    """Messages from rank to rank are not recorded for gloo; the stack shows them."""
    found = judged({0: view(0), 1: view(1, stack=RECEIVES)})
    assert (found.culprits, found.victims) == ((0,), (1,))


def test_all_wait_for_messages() -> None:
    found = judged({0: view(0, stack=RECEIVES), 1: view(1, stack=RECEIVES)})
    assert (found.kind, found.confidence) == (
        VerdictKind.HANG_IN_COMMUNICATION,
        Confidence.POSSIBLE,
    )


def test_a_rank_that_waits_for_a_message_is_not_the_end_of_the_chain() -> None:
    """Rank 1 has not entered the collective: it receives from rank 2, which makes no progress."""
    views = {
        0: view(0, groups=(group(0, entered=5, waits=True, size=3),)),
        1: view(1, groups=(group(1, entered=4, waits=False, size=3),), stack=RECEIVES),
        2: view(2, groups=(group(2, entered=4, waits=False, size=3),)),
    }
    assert judged(views).culprits == (2,)


grids = st.builds(World, data=st.integers(1, 4), tensor=st.integers(1, 4), stages=st.integers(1, 3))


@settings(max_examples=200, deadline=None)
@given(grids, st.data())
def test_over_many_groups_one_culprit_is_named_and_all_others_are_victims(
    world: World, data: st.DataObject
) -> None:
    if world.size < 2:
        return
    culprit = data.draw(st.integers(0, world.size - 1))
    calls = data.draw(st.integers(1, 4 * len(world.own(culprit))))
    players = play(world, 6, {culprit: calls})
    found = judged(views_of(world, players))
    assert found.culprits == (culprit,)
    assert set(found.victims) == set(range(world.size)) - {culprit}
    assert found.act_immediately


@settings(max_examples=100, deadline=None)
@given(grids)
def test_a_node_that_has_done_all_there_is_to_do_is_no_culprit(world: World) -> None:
    players = play(world, 3, {})
    views = views_of(world, players, unresponsive_s=1.0)
    assert judge(views) is None


def test_evidence_names_a_child_that_hangs_and_a_group_without_a_name() -> None:
    child = "its child process 9 is stopped (state T)"
    found = judged(one_behind("undefined", (0, 1), stack=(), child=child))
    assert f"rank 1: {child}" in found.evidence
    assert "all_reduce #3 of group 7" in found.text
    assert not [line for line in found.evidence if " is at " in line]


LIBRARY = "/v/site-packages/torch/nn/functional.py:5 in linear"


@pytest.mark.parametrize(
    ("stack", "own"),
    [
        ((), ()),
        ((LIBRARY, "/me/t.py:3 in f"), ()),
        (("/usr/lib/python3.11/random.py:1 in choice",), ()),
        (
            (
                "/usr/lib/python3.11/random.py:1 in choice",
                "/me/t.py:3 in f",
                "/me/t.py:9 in <module>",
            ),
            ("/me/t.py f", "/me/t.py <module>"),
        ),
    ],
)
def test_a_busy_loop_is_in_the_users_own_code(stack: tuple[str, ...], own: tuple[str, ...]) -> None:
    assert own_functions(stack) == own


FULL = ErrorLine("disk full", "OSError: No space left on device", "stderr.log")
LOST = ErrorLine("collective timeout", "Watchdog caught collective operation timeout", "stderr.log")


def test_what_the_culprit_has_written_is_evidence_and_changes_no_verdict() -> None:
    views = {0: waiting(0, errors=(LOST,)), 1: behind(1), 2: waiting(2), 3: waiting(3)}
    plain = judged(views)
    assert (plain.error_class, plain.culprits) == ("", (1,))
    views[1] = behind(1, errors=(FULL, LOST))
    found = judged(views)
    assert found.error_class == "disk full"
    line = "rank 1: stderr.log (disk full): OSError: No space left on device"
    assert found == replace(plain, error_class="disk full", evidence=(*plain.evidence, line))


def test_without_a_culprit_the_ranks_that_wait_have_written_the_evidence() -> None:
    found = judged({rank: waiting(rank, errors=(LOST,)) for rank in range(4)})
    assert found.error_class == "collective timeout"
    assert [line.partition(":")[0] for line in found.evidence[-3:]] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]


def test_the_last_collective_of_a_stopped_rank_is_evidence() -> None:
    note = "its last collective is all_reduce #4 of the default group"
    frozen = behind(1, process="T", recorder_notes=(note,))
    found = judged({0: waiting(0), 1: frozen, 2: waiting(2), 3: waiting(3)})
    assert (found.kind, found.culprits) == (VerdictKind.FROZEN, (1,))
    assert found.evidence[-1] == f"rank 1: {note}"


# --- only dumps are known ---------------------------------------------------------------------


def dumped(rank: int, state: str, *, waits: bool = False) -> DumpedRankView:
    group = ProcessGroupView("0", "dp", (0, 1, 2), (CollectiveCall(4, "all_reduce"),), 4, 9.0)
    return DumpedRankView(
        rank, 0, "", 0, 0.0, groups=(group,) if waits else (), recorder_notes=("a note",),
        state=state,
    )  # fmt: skip


def test_of_a_dump_no_steps_and_no_stacks_are_stated() -> None:
    views: dict[int, RankView] = {
        0: dumped(0, "has made no further call", waits=True),
        1: dumped(1, "has made no further call"),
        2: dumped(2, "has no dump"),
    }
    found = find_hang(views, {}, SETTINGS, limit_s=0.0)
    assert found is not None
    assert (found.culprits, found.confidence) == ((1, 2), Confidence.LIKELY)
    assert found.text == (
        "ranks 1 and 2 have made no further call or have no dump, and rank 0 waits in "
        "all_reduce #4 of group dp"
    )
    assert found.evidence[-2:] == ("rank 1: a note", "rank 2: a note")
    assert not any("step" in one for one in found.evidence)
    del views[2]
    views[1] = replace(views[1], groups=views[0].groups)
    views[2] = dumped(2, "has made no further call", waits=True)
    found = find_hang(views, {}, SETTINGS, limit_s=0.0)
    assert found is not None
    assert found.text.endswith("cannot leave it: a connection carries no data"), "no node is known"
