"""Supervisor: retried failures, the number of retries, and the end of a run.

RestartBudget: a burst uses it up, and it refills over time.

OwnParts: a dead SMP or zygote is restarted, unless it has died too often.
"""

from dataclasses import replace
from signal import SIGINT, SIGTERM
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.config.profile import Profile, RestartConfig
from ftrun.errors import ExitCode
from ftrun.events import (
    AllAtBoundary,
    Event,
    ExitKind,
    GenerationStarted,
    PartEvent,
    Progress,
    SmpExited,
    StopRequested,
    Tick,
    WorkerExit,
    WorkersExited,
    ZygoteExited,
)
from ftrun.ids import Generation, Rank, Step, version
from ftrun.recovery.commands import (
    DisableComponent,
    EndRun,
    ExcludeNode,
    KillWorkers,
    RequestFinalSnapshot,
    RespawnSmp,
    RespawnZygote,
    SignalWorkers,
    StartGeneration,
)
from ftrun.recovery.repeated_causes import MAX_EXCLUDED_PER_HOUR, Placement
from ftrun.recovery.supervisor import (
    ComponentRestarts,
    RestartBudget,
    Supervisor,
    SupervisorState,
    first_cause,
)
from ftrun.wire.cluster.generation import FailureHistory

RESTART = RestartConfig(budget=5, backoff_max_s=4.0)


def started(generation: int = 0) -> GenerationStarted:
    return GenerationStarted(Generation(generation), None)


def progress(step: int, *, here: int | None = None, attached: bool = True) -> Progress:
    return Progress(Step(step), step if here is None else here, attached)


def killed(rank: int = 0, fingerprint: str = "SIGKILL") -> WorkerExit:
    return WorkerExit(Rank(rank), ExitKind.SIGNAL, -9, f"rank {rank} was killed", "", fingerprint)


def raised(rank: int = 0, code: int = 1, at_ns: int = 0) -> WorkerExit:
    return WorkerExit(
        Rank(rank), ExitKind.EXCEPTION, code, f"rank {rank} raised", "", "exception", at_ns
    )


def finished(rank: int) -> WorkerExit:
    return WorkerExit(Rank(rank), ExitKind.FINISHED, 0, f"rank {rank} has finished")


def ends(*exits: WorkerExit, at: Progress) -> WorkersExited:
    return WorkersExited(exits, at)


def new(max_restarts: int | None = None, **changes: Any) -> Supervisor:
    profile = Profile(restart=msgspec.structs.replace(RESTART, **changes))
    return Supervisor(profile, max_restarts=max_restarts, world_size=2)


def supervisor(max_restarts: int | None = None, **changes: Any) -> Supervisor:
    made = new(max_restarts, **changes)
    assert made.handle(started(), now_s=0.0) == []
    return made


def test_killed_worker_restarts_all_at_once() -> None:
    commands = supervisor().handle(ends(killed(1), at=progress(5)), now_s=1.0)
    assert commands == [
        KillWorkers("rank 1 was killed"),
        StartGeneration("rank 1 was killed", stay=True),
    ]


@pytest.mark.parametrize(
    ("kind", "stay", "failed"),
    [
        (ExitKind.HUNG, True, (1,)),
        (ExitKind.SKIPPED, True, (1,)),
        (ExitKind.NODE_LOST, True, ()),
        (ExitKind.NUMERICAL_ANOMALY, False, ()),
    ],
)
def test_a_rank_that_hangs_does_not_stay_and_after_an_anomaly_none_does(
    kind: ExitKind, stay: bool, failed: tuple[int, ...]
) -> None:
    made = supervisor()
    (_, command) = made.handle(ends(replace(killed(1), kind=kind), at=progress(5)), now_s=1.0)
    assert command == StartGeneration("rank 1 was killed", stay, failed)


def refused(rank: int = 1) -> WorkerExit:
    return WorkerExit(
        Rank(rank), ExitKind.JOIN_REFUSED, 1, "the set-up of rank 1 differs", "", "exception x"
    )


def test_a_rank_that_cannot_join_costs_no_budget_and_is_known_to_the_next_leader() -> None:
    made = supervisor(budget=1)
    fails(made, killed(), at=9)
    without = made.history(now_s=1.0)
    assert made.handle(ends(refused(), raised(), at=progress(9, here=0)), now_s=1.0) == [
        KillWorkers("the set-up of rank 1 differs"),
        StartGeneration("the set-up of rank 1 differs"),
    ]
    known = made.history(now_s=1.0)
    assert known == msgspec.structs.replace(
        without, restarts=2, join_problem="the set-up of rank 1 differs"
    )
    later = supervisor()
    later.succeed(known, now_s=1.0)
    later.succeed(without, now_s=1.0)
    assert later.join_problem == "the set-up of rank 1 differs"


def test_a_second_refusal_is_a_failure_like_any_other() -> None:
    made = supervisor(budget=0)
    made.join_problem = "the set-up of rank 0 differs"
    (_, end) = made.handle(ends(refused(), at=progress(9)), now_s=1.0)
    assert isinstance(end, EndRun)


def test_restart_of_a_script_without_attach_reports_where_it_begins() -> None:
    commands = supervisor().handle(ends(killed(), at=progress(5, attached=False)), now_s=1.0)
    assert isinstance(commands[1], StartGeneration)
    assert "restarts from its beginning" in commands[1].reason


def test_a_rank_that_is_killed_before_it_attaches_again_is_no_script_without_attach() -> None:
    commands = supervisor().handle(
        ends(killed(), at=progress(5, here=0, attached=False)), now_s=1.0
    )
    assert isinstance(commands[1], StartGeneration)
    assert "attach" not in commands[1].reason


def test_run_ends_when_every_rank_has_finished() -> None:
    made = supervisor()
    assert made.handle(ends(finished(0), at=progress(5)), now_s=1.0) == []
    assert made.handle(ends(finished(1), at=progress(5)), now_s=2.0) == [
        EndRun(ExitCode.DONE, "every rank has finished")
    ]
    assert made.state is SupervisorState.ENDED


def test_ranks_that_finished_before_a_restart_are_counted_again() -> None:
    made = supervisor()
    made.handle(ends(finished(0), at=progress(5)), now_s=1.0)
    made.handle(ends(killed(1), at=progress(5)), now_s=1.0)
    made.handle(started(1), now_s=1.0)
    assert made.handle(ends(finished(1), at=progress(9)), now_s=2.0) == []


def test_program_that_ends_before_its_first_step_is_not_retried() -> None:
    commands = supervisor().handle(ends(raised(0, code=2), at=progress(0)), now_s=1.0)
    assert isinstance(commands[1], EndRun)
    assert commands[1].exit_code == 2
    assert "before its first step" in commands[1].advice


def test_a_rank_that_ends_well_too_early_before_the_first_step_is_not_retried() -> None:
    left = WorkerExit(Rank(0), ExitKind.LEFT_EARLY, 1, "rank 0 has ended", fingerprint="left early")
    kill, end = supervisor().handle(ends(left, at=progress(0)), now_s=1.0)
    assert isinstance(kill, KillWorkers)
    assert isinstance(end, EndRun)
    assert (end.exit_code, end.cause) == (1, left)
    assert "before its first step" in end.advice


def test_kill_before_the_first_step_is_retried() -> None:
    commands = supervisor().handle(ends(killed(), at=progress(0)), now_s=1.0)
    assert isinstance(commands[1], StartGeneration)


def test_exception_before_the_first_step_is_retried_when_max_restarts_is_given() -> None:
    made = supervisor(max_restarts=1)
    commands = made.handle(ends(raised(), at=progress(0)), now_s=1.0)
    assert isinstance(commands[1], StartGeneration)
    made.handle(started(1), now_s=1.0)
    last = made.handle(ends(raised(1), at=progress(0)), now_s=2.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == 1
    assert last.advice == "The restart budget is used up: 1 restarts."


def test_max_restarts_of_zero_is_obeyed() -> None:
    made = supervisor(max_restarts=0)
    last = made.handle(ends(killed(), at=progress(50)), now_s=1.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == 137


def test_same_cause_three_times_without_progress_ends_with_93() -> None:
    made = supervisor()
    now_s = 0.0
    for generation in (1, 2):
        commands = made.handle(ends(killed(), at=progress(7)), now_s=now_s)
        while not any(isinstance(found, StartGeneration) for found in commands):
            now_s += 1.0
            commands = made.handle(Tick(), now_s=now_s)
        made.handle(started(generation), now_s=now_s)
    last = made.handle(ends(killed(), at=progress(7)), now_s=now_s)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART


def test_same_cause_with_progress_each_time_uses_the_budget_only() -> None:
    made = supervisor()
    for generation in range(1, 6):
        commands = made.handle(ends(killed(), at=progress(7 * generation)), now_s=0.0)
        assert isinstance(commands[1], StartGeneration)
        made.handle(started(generation), now_s=0.0)
    last = made.handle(ends(killed(), at=progress(99)), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    assert "budget" in last.advice
    assert "--max-restarts" in last.advice


def test_without_attach_the_same_step_count_is_no_progress() -> None:
    made = supervisor(backoff_initial_s=0.0)
    at = progress(5, attached=False)
    for generation in (1, 2):
        made.handle(ends(killed(), at=at), now_s=0.0)
        made.handle(started(generation), now_s=0.0)
    last = made.handle(ends(killed(), at=at), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART


def test_without_attach_another_step_count_counts_as_progress() -> None:
    made = supervisor(backoff_initial_s=0.0)
    for generation in range(1, 5):
        at = progress(generation, attached=False)
        commands = made.handle(ends(killed(), at=at), now_s=0.0)
        assert isinstance(commands[1], StartGeneration)
        made.handle(started(generation), now_s=0.0)


def test_pause_doubles_up_to_its_limit_while_there_is_no_progress() -> None:
    made = supervisor(same_cause_limit=99, budget=99)
    pauses: list[float] = []
    made.handle(ends(killed(), at=progress(7)), now_s=0.0)
    made.handle(started(), now_s=0.0)
    now_s = 0.0
    for generation in range(1, 7):
        commands = made.handle(ends(killed(), at=progress(7)), now_s=now_s)
        started_s = now_s
        while not any(isinstance(found, StartGeneration) for found in commands):
            now_s += 0.5
            commands = made.handle(Tick(), now_s=now_s)
        pauses.append(now_s - started_s)
        made.handle(started(generation), now_s=now_s)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_ends_of_workers_between_two_generations_are_not_news() -> None:
    made = supervisor(same_cause_limit=99)
    for generation in range(1, 3):
        made.handle(ends(killed(), at=progress(7)), now_s=0.0)
        if made.state is SupervisorState.STARTING:
            made.handle(started(generation), now_s=0.0)
    made.handle(ends(killed(), at=progress(7)), now_s=0.0)
    assert made.state is SupervisorState.BACKING_OFF
    assert made.handle(ends(killed(1), at=progress(7)), now_s=0.0) == []


def test_nothing_follows_the_end() -> None:
    made = supervisor()
    made.handle(ends(finished(0), finished(1), at=progress(1)), now_s=0.0)
    assert made.handle(StopRequested(SIGTERM, "late", attached=True), now_s=1.0) == []


def test_a_successor_is_as_strict() -> None:
    made = supervisor()
    made.handle(ends(killed(), at=progress(3)), now_s=10.0)
    successor = new()
    successor.succeed(made.history(now_s=30.0), now_s=100.0)
    assert successor.state is SupervisorState.RUNNING
    assert successor.history(now_s=100.0) == made.history(now_s=30.0)


def test_stop_takes_a_last_snapshot_then_signals_then_ends() -> None:
    made = supervisor()
    assert made.handle(StopRequested(SIGTERM, "SIGTERM", attached=True), now_s=0.0) == [
        RequestFinalSnapshot("SIGTERM")
    ]
    assert made.handle(Tick(), now_s=1.0) == []
    assert made.handle(AllAtBoundary(), now_s=2.0) == [
        SignalWorkers(SIGTERM, "the last snapshot is sealed on every rank")
    ]
    assert made.handle(AllAtBoundary(), now_s=2.0) == []
    assert made.handle(ends(killed(0), at=progress(5)), now_s=3.0) == []
    assert made.handle(ends(finished(1), at=progress(5)), now_s=3.0) == [
        EndRun(143, "stopped by SIGTERM")
    ]


def test_stop_without_attach_signals_at_once() -> None:
    commands = supervisor().handle(StopRequested(SIGINT, "SIGINT", attached=False), now_s=0.0)
    assert commands == [SignalWorkers(SIGINT, "SIGINT")]


def test_stop_continues_when_no_boundary_comes_and_kills_after_the_grace() -> None:
    made = supervisor()
    made.handle(StopRequested(SIGTERM, "SIGTERM", attached=True), now_s=0.0)
    assert isinstance(made.handle(Tick(), now_s=10.0)[0], SignalWorkers)
    assert made.handle(Tick(), now_s=29.0) == []
    assert isinstance(made.handle(Tick(), now_s=30.0)[0], KillWorkers)
    assert made.handle(Tick(), now_s=99.0) == []


def test_stop_asked_for_during_a_start_is_not_forgotten() -> None:
    made = new()
    made.handle(StopRequested(SIGTERM, "SIGTERM", attached=False), now_s=0.0)
    made.handle(started(), now_s=0.0)
    assert made.state is SupervisorState.SIGNALLED


def test_an_unrequested_boundary_causes_no_command() -> None:
    assert supervisor().handle(AllAtBoundary(), now_s=0.0) == []


def test_second_signal_kills_at_once() -> None:
    made = supervisor()
    made.handle(StopRequested(SIGINT, "SIGINT", attached=True), now_s=0.0)
    assert isinstance(
        made.handle(StopRequested(SIGINT, "SIGINT", attached=True), now_s=0.1)[0], KillWorkers
    )


def test_stop_during_a_pause_ends_the_run() -> None:
    made = supervisor(same_cause_limit=99)
    made.handle(ends(killed(), at=progress(7)), now_s=0.0)
    made.handle(started(1), now_s=0.0)
    made.handle(ends(killed(), at=progress(7)), now_s=0.0)
    made.handle(started(2), now_s=0.0)
    made.handle(ends(killed(), at=progress(7)), now_s=0.0)
    assert made.handle(StopRequested(SIGTERM, "SIGTERM", attached=True), now_s=0.1) == [
        EndRun(143, "stopped by SIGTERM")
    ]


def test_first_cause_is_a_kill_before_the_exceptions_it_leads_to() -> None:
    assert first_cause([raised(0, at_ns=5), killed(1)]).rank == 1


def test_first_cause_among_exceptions_is_the_earliest() -> None:
    assert first_cause([raised(0, at_ns=9), raised(1, at_ns=5), raised(2)]).rank == 1


EVENTS = st.one_of(
    st.just(Tick()),
    st.just(AllAtBoundary()),
    st.builds(
        lambda rank, kind, step: ends(
            killed(rank) if kind == 0 else raised(rank) if kind == 1 else finished(rank),
            at=progress(step),
        ),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    st.builds(lambda attached: StopRequested(SIGTERM, "SIGTERM", attached), st.booleans()),
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_budget_holds_and_nothing_follows_the_end(events: list[Event]) -> None:
    made = supervisor()
    starts, generation, has_ended = 0, 0, False
    for now_s, event in enumerate(events):
        for command in made.handle(event, now_s=float(now_s)):
            assert not has_ended
            if isinstance(command, StartGeneration):
                starts += 1
                generation += 1
                made.handle(started(generation), now_s=float(now_s))
            has_ended |= isinstance(command, EndRun)
    assert starts <= RESTART.budget


@pytest.mark.parametrize(
    "blip",
    [
        WorkerExit(Rank(0), ExitKind.LINK_LOST, 75, "a fetch failed", "", "restore a"),
        WorkerExit(Rank(0), ExitKind.EXCEPTION, 1, "rank 0: Connection reset by peer", "", "reset"),
    ],
    ids=["fetch", "gloo"],
)
def test_a_lost_connection_is_not_the_same_cause_and_the_budget_bounds_it(blip: WorkerExit) -> None:
    made, now_s = supervisor(), 0.0
    # Steps were made before: a failure before the first step is an error of the program.
    made.handle(ends(killed(), at=progress(7)), now_s=now_s)
    for generation in range(1, RESTART.budget):
        made.handle(started(generation), now_s=now_s)
        commands = made.handle(ends(blip, at=progress(7, here=0)), now_s=now_s)
        while not any(isinstance(found, StartGeneration) for found in commands):
            now_s += 1.0
            commands = made.handle(Tick(), now_s=now_s)
    made.handle(started(RESTART.budget), now_s=now_s)
    last = made.handle(ends(blip, at=progress(7, here=0)), now_s=now_s)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == blip.code
    assert "budget" in last.advice


def test_a_lost_connection_between_two_equal_failures_does_not_hide_the_second() -> None:
    made = supervisor(backoff_initial_s=0.0)
    blip = WorkerExit(Rank(0), ExitKind.LINK_LOST, 75, "a fetch failed", "", "restore a")
    for cause in (killed(), blip, killed(), blip):
        made.handle(ends(cause, at=progress(7)), now_s=0.0)
        made.handle(started(), now_s=0.0)
    last = made.handle(ends(killed(), at=progress(7)), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART


def test_budget_is_spent_after_its_limit() -> None:
    budget = RestartBudget(2, 60.0)
    assert not budget.is_spent(now_s=0.0)
    budget.spend(now_s=0.0)
    budget.spend(now_s=1.0)
    assert budget.is_spent(now_s=2.0)


def test_restarts_older_than_the_window_do_not_count() -> None:
    budget = RestartBudget(1, 60.0)
    budget.spend(now_s=0.0)
    assert budget.is_spent(now_s=60.0)
    assert not budget.is_spent(now_s=60.1)
    assert budget.used(now_s=60.1) == 0


def test_a_reader_in_another_thread_changes_nothing() -> None:
    budget = RestartBudget(1, 60.0)
    budget.spend(now_s=0.0)
    assert budget.used(now_s=61.0) == 0
    assert budget.used(now_s=60.0) == 1, "a query at a later time drops nothing"
    assert budget.ages_s(now_s=60.0) == [60.0]
    budget.spend(now_s=61.0)
    assert budget.used(now_s=60.0) == 1


def test_budget_without_a_window_never_comes_back() -> None:
    budget = RestartBudget(1, None)
    budget.spend(now_s=0.0)
    assert budget.is_spent(now_s=1e9)


def test_budget_of_zero_is_spent_from_the_start() -> None:
    assert RestartBudget(0, None).is_spent(now_s=0.0)


def test_budget_reads_as_words() -> None:
    assert str(RestartBudget(3, None)) == "3 restarts"
    assert str(RestartBudget(3, 60.0)) == "3 restarts in 60 s"


@pytest.mark.parametrize(
    ("event", "respawn", "part"),
    [(SmpExited("gone"), RespawnSmp, "smp"), (ZygoteExited("gone"), RespawnZygote, "zygote")],
)
def test_own_parts_are_respawned_until_they_die_too_often(
    event: PartEvent, respawn: type[RespawnSmp | RespawnZygote], part: str
) -> None:
    parts = ComponentRestarts()
    for _ in range(5):
        assert isinstance(parts.handle(event, now_s=1.0), respawn)
    last = parts.handle(event, now_s=1.0)
    assert isinstance(last, DisableComponent)
    assert last.part == part
    assert isinstance(parts.handle(event, now_s=1000.0), respawn)


def test_a_program_that_has_made_a_snapshot_has_made_steps() -> None:
    """A new leader knows only what the plan of the last generation states."""
    made = new()
    made.succeed(FailureHistory(), now_s=0.0)
    made.handle(GenerationStarted(Generation(1), version(0, 46)), now_s=0.0)
    found = made.handle(ends(raised(1), at=progress(46, here=0)), now_s=0.0)
    assert isinstance(found[-1], StartGeneration)


# --- nodes ------------------------------------------------------------------------------------

PLACED = Placement(node_of={0: "a", 1: "b"}, can_replace=True, is_protected=True)
XID = "GPU 2 has reported XID 79"


def fails(made: Supervisor, cause: WorkerExit, *, at: int = 7, now_s: float = 0.0) -> list[Any]:
    """A failure; the next generation has started, if there is one."""
    commands = made.handle(ends(cause, at=progress(at)), now_s=now_s)
    if made.state is SupervisorState.STARTING:
        made.handle(started(1), now_s=now_s)
    return commands


def test_before_a_repeated_failure_ends_the_run_its_node_is_replaced() -> None:
    made = supervisor(backoff_initial_s=0.0)
    made.placement = PLACED
    assert fails(made, raised(1))[1:] == [StartGeneration("rank 1 raised", stay=True)]
    reason = "the same failure occurred on it 2 times without progress"
    assert fails(made, raised(1))[1:] == [
        ExcludeNode("b", reason), StartGeneration(f"node b is excluded: {reason}", stay=True)
    ]  # fmt: skip
    assert made.budget.used(now_s=0.0) == 2
    made.placement = replace(PLACED, node_of={0: "a", 1: "c"})
    last = fails(made, raised(1))[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART
    assert "on node b, and on c too" in last.advice


def test_progress_on_the_other_node_shows_that_the_node_was_the_cause() -> None:
    made = supervisor(backoff_initial_s=0.0)
    made.placement = PLACED
    fails(made, raised(1))
    fails(made, raised(1))
    made.placement = replace(PLACED, node_of={0: "a", 1: "c"})
    assert isinstance(fails(made, raised(1), at=8)[-1], StartGeneration)


def test_a_node_with_a_hardware_fault_is_replaced_without_a_charge() -> None:
    made = supervisor(budget=1)
    made.placement = replace(PLACED, faults={"b": XID})
    for _ in range(3):
        assert fails(made, raised(0))[1:] == [
            ExcludeNode("b", XID, is_fault=True),
            StartGeneration(f"node b is excluded: {XID}", stay=True),
        ]
    assert made.budget.used(now_s=0.0) == 0
    assert made.restarts == 3


def test_a_driver_s_error_is_a_hardware_fault_although_none_was_reported() -> None:
    made = supervisor()
    made.placement = PLACED
    text = "rank 1 raised RuntimeError: CUDA error: uncorrectable ECC error encountered"
    found = fails(made, replace(raised(1), text=text))
    assert found[1] == ExcludeNode("b", text, is_fault=True)


def test_without_restarts_a_hardware_fault_ends_the_run() -> None:
    made = supervisor(max_restarts=0)
    made.placement = replace(PLACED, faults={"b": XID})
    assert isinstance(fails(made, raised(1))[-1], EndRun)


def test_a_driver_s_error_is_named_once_if_no_spare_is_free() -> None:
    made = supervisor()
    made.placement = replace(PLACED, can_replace=False)
    text = "rank 1 raised: the GPU is lost"
    assert fails(made, replace(raised(1), text=text))[-1].reason == (
        f"{text}; node b has a hardware fault and keeps its ranks: no spare is free"
    )


def test_an_error_text_on_every_node_does_not_use_up_the_nodes() -> None:
    made = supervisor()
    made.placement = replace(PLACED, num_excluded=MAX_EXCLUDED_PER_HOUR)
    cause = replace(raised(1), text="rank 1 raised: no CUDA-capable device is detected")
    assert fails(made, cause)[1:] == [StartGeneration(cause.text, stay=True)]


@pytest.mark.parametrize("is_protected", [True, False])
def test_without_another_node_the_ranks_restart_once_in_place(is_protected: bool) -> None:
    made = supervisor(backoff_initial_s=0.0)
    made.placement = replace(
        PLACED, faults={"b": XID}, can_replace=False, is_protected=is_protected
    )
    assert fails(made, raised(1))[1:] == [
        StartGeneration(
            f"rank 1 raised; node b has a hardware fault ({XID}) and keeps its ranks: "
            "no spare is free",
            stay=True,
        )
    ]
    later = supervisor(backoff_initial_s=0.0)
    later.succeed(made.history(now_s=0.0), now_s=0.0)
    later.placement = made.placement
    last = fails(later, raised(1))[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.NOT_ENOUGH_NODES
    assert last.reason == f"node b has a hardware fault, and no spare is free: {XID}"
    assert "--spares" in last.advice
    # With progress in between, the ranks run on the node again.
    assert isinstance(fails(made, raised(1), at=8)[-1], StartGeneration)


def test_a_node_without_protection_is_replaced_when_its_ranks_fail_again() -> None:
    made = supervisor(backoff_initial_s=0.0)
    made.placement = replace(PLACED, faults={"b": XID}, is_protected=False)
    assert fails(made, raised(1))[-1].reason.endswith("its ranks: the state is not protected")
    assert ExcludeNode("b", XID, is_fault=True) in fails(made, raised(1))


@pytest.mark.parametrize("kind", ["attached", "not attached"])
def test_a_fault_without_a_spare_ends_the_run_after_one_restart(kind: str) -> None:
    made = supervisor(backoff_initial_s=0.0)
    made.placement = replace(PLACED, faults={"b": XID}, can_replace=False)
    at = progress(7, attached=kind == "attached")
    assert isinstance(made.handle(ends(raised(1), at=at), now_s=0.0)[-1], StartGeneration)
    made.handle(started(1), now_s=0.0)
    last = made.handle(ends(raised(1), at=at), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.NOT_ENOUGH_NODES


@pytest.mark.parametrize("can_replace", [True, False], ids=["a spare", "no spare"])
def test_two_causes_that_alternate_on_one_node_reach_the_limits(can_replace: bool) -> None:
    made = supervisor(backoff_initial_s=0.0, budget=99)
    both = {1: "b", 3: "b"}
    made.placement = replace(PLACED, node_of=both, can_replace=can_replace)
    segv = replace(killed(1, "SIGSEGV"), code=-11)
    access = replace(raised(3), text="rank 3 raised: an illegal memory access")
    first, second = (fails(made, one) for one in (segv, access))
    assert isinstance(first[-1], StartGeneration)
    assert isinstance(second[-1], StartGeneration)
    later = supervisor(backoff_initial_s=0.0, budget=99)
    later.succeed(made.history(now_s=0.0), now_s=0.0)
    later.placement = made.placement
    third = fails(later, segv)
    assert isinstance(third[1], ExcludeNode) is can_replace
    later.placement = replace(made.placement, node_of=dict.fromkeys(both, "c"))
    last = [*fails(later, access), *fails(later, segv)][-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART
    expected = "on node b, and on c too" if can_replace else "occurred 3 times"
    assert expected in last.advice


def test_progress_before_a_lost_connection_restarts_the_counts() -> None:
    made = supervisor(backoff_initial_s=0.0)
    blip = WorkerExit(Rank(0), ExitKind.LINK_LOST, 75, "a fetch failed", "", "restore a")
    made.placement = PLACED
    fails(made, raised(1), at=7)
    fails(made, blip, at=20)
    assert fails(made, raised(1), at=20)[1:] == [StartGeneration("rank 1 raised", stay=True)]


def test_a_lost_connection_does_not_hide_equal_failures_of_a_script_without_attach() -> None:
    made = supervisor(backoff_initial_s=0.0)
    blip = WorkerExit(Rank(0), ExitKind.LINK_LOST, 75, "a fetch failed", "", "restore a")
    for cause, step in ((killed(), 3), (blip, 5), (killed(), 3), (blip, 5)):
        made.handle(ends(cause, at=progress(step, attached=False)), now_s=0.0)
        made.handle(started(), now_s=0.0)
    last = made.handle(ends(killed(), at=progress(3, attached=False)), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    assert last.exit_code == ExitCode.DO_NOT_RESTART


def test_a_program_that_finds_no_device_at_its_start_is_not_retried() -> None:
    made = new()
    made.placement = PLACED
    made.handle(started(), now_s=0.0)
    cause = replace(raised(1), text="rank 1 raised: no CUDA-capable device is detected")
    last = made.handle(ends(cause, at=progress(0, here=0)), now_s=0.0)[-1]
    assert isinstance(last, EndRun)
    other = new()
    other.placement = replace(PLACED, faults={"b": XID})
    other.handle(started(), now_s=0.0)
    found = other.handle(ends(cause, at=progress(0, here=0)), now_s=0.0)
    assert isinstance(found[-1], StartGeneration), "the node has reported a fault"
