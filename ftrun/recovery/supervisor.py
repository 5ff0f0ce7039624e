"""The decisions about a run: events in, commands out.

Runs in:  the agent that leads. Pure: the agent supplies the events and the time, and executes the
          commands.
Takes in: `Event`s.
Gives:    `Command`s, each with its reason.

Rule 1: every change of a run's state happens in `handle`.
Rule 2: a failure is retried unless a retry cannot cure it. A program that ends by itself before the
        first step contains an error. The same failure that repeats without a step of progress
        would repeat again.
Rule 3: before a repeated failure ends the run, the node on which it repeats is replaced, see
        repeated_causes.py. A node with a hardware fault is replaced at once, and that restart is
        not counted.
Rule 4: a lost connection does not count as a repeated cause: only the budget bounds its retries.
Rule 5: a command is given once; its result comes back as an event.
Rule 6: if a rank cannot join ranks that stay, the restart is not counted, and no rank stays in this
        run any more: the script would differ again.

Source: the restart intensity of Erlang/OTP supervisors (a number of restarts in a time window),
        which a burst of failures exhausts and a quiet week does not.
"""

from dataclasses import dataclass
from enum import Enum, auto
from signal import SIGTERM, Signals
from typing import assert_never

from ftrun.config.profile import Profile
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
)
from ftrun.ids import Rank
from ftrun.monitor.worker_exits import first_cause, is_link_failure
from ftrun.recovery.commands import (
    DisableComponent,
    EndRun,
    ExcludeNode,
    KillWorkers,
    PartCommand,
    RequestFinalSnapshot,
    RespawnSmp,
    RespawnZygote,
    SignalWorkers,
    StartGeneration,
    SupervisorCommand,
)
from ftrun.recovery.repeated_causes import Placement, RepeatedCauses, Repetition
from ftrun.wire.cluster.generation import FailureHistory


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts in any `window_s`; without a window, `limit` in total.

    Any thread may read it. Only `spend` and `forget` modify it, and they replace the tuple as a
    whole.
    """

    limit: int
    window_s: float | None
    _spent_s: tuple[float, ...] = ()

    def used(self, *, now_s: float) -> int:
        return len(self._counted_s(now_s))

    def is_spent(self, *, now_s: float) -> bool:
        return self.used(now_s=now_s) >= self.limit

    def spend(self, *, now_s: float) -> None:
        self._spent_s = (*self._counted_s(now_s), now_s)

    def forget(self) -> None:
        self._spent_s = ()

    def ages_s(self, *, now_s: float) -> list[float]:
        """Seconds since each counted restart; `spend` at those times makes an equal budget."""
        return [now_s - spent_s for spent_s in self._counted_s(now_s)]

    def _counted_s(self, now_s: float) -> tuple[float, ...]:
        if self.window_s is None:
            return self._spent_s
        return tuple(spent_s for spent_s in self._spent_s if now_s - spent_s <= self.window_s)

    def __str__(self) -> str:
        if self.window_s is None:
            return f"{self.limit} restarts"
        return f"{self.limit} restarts in {self.window_s:.0f} s"


_ENDS_ITSELF = (ExitKind.EXCEPTION, ExitKind.EXIT_CODE, ExitKind.LEFT_EARLY)


class SupervisorState(Enum):
    """The state of a run."""

    STARTING = auto()
    RUNNING = auto()
    BACKING_OFF = auto()
    LAST_SNAPSHOT = auto()
    SIGNALLED = auto()
    KILLED = auto()
    ENDED = auto()


STOPPING = (SupervisorState.LAST_SNAPSHOT, SupervisorState.SIGNALLED, SupervisorState.KILLED)


class Supervisor:
    """State of one run, from the first generation to the last step."""

    def __init__(
        self, profile: Profile, *, max_restarts: int | None = None, world_size: int
    ) -> None:
        self.state = SupervisorState.STARTING
        self.world_size = world_size
        self.bad_checkpoints: dict[str, str] = {}
        """See `FailureHistory.bad_checkpoints`."""
        self.restarts = 0
        self.join_problem = ""
        """See `FailureHistory.join_problem`."""
        self._restart, self._stop = profile.restart, profile.stop
        self._numerics_policy = profile.numerics.policy
        self._is_explicit = max_restarts is not None
        if max_restarts is None:
            self.budget = RestartBudget(profile.restart.budget, profile.restart.window_s)
        else:
            self.budget = RestartBudget(max_restarts, None)
        self._finished: set[Rank] = set()
        self._best_step = -1
        self._steps_seen = False
        self.placement = Placement()
        self._causes = RepeatedCauses(profile.restart.same_cause_limit)
        self.suspects: set[str] = set()
        """Nodes that were excluded only because a failure repeated on them."""
        self._faulty: set[str] = set()
        """Nodes with a hardware fault whose ranks were restarted in place."""
        self._without_progress = 0
        self._stop_signal = SIGTERM
        self._deadline_s = 0.0
        self._grace_ends_s = 0.0
        self._resume_reason = ""

    def history(self, *, now_s: float) -> FailureHistory:
        return FailureHistory(
            restarts=self.restarts,
            spent_ages_s=self.budget.ages_s(now_s=now_s),
            causes=self._causes.counts(now_s=now_s),
            suspects=sorted(self.suspects),
            faulty=sorted(self._faulty),
            without_progress=self._without_progress,
            best_step=self._best_step,
            steps_seen=self._steps_seen,
            bad_checkpoints=dict(self.bad_checkpoints),
            join_problem=self.join_problem,
        )

    def succeed(self, history: FailureHistory, *, now_s: float) -> None:
        self.state = SupervisorState.RUNNING
        self.restarts = history.restarts
        self.budget.forget()
        for age_s in history.spent_ages_s:
            self.budget.spend(now_s=now_s - age_s)
        self._causes.succeed(history.causes, now_s=now_s)
        self.suspects = set(history.suspects)
        self._faulty = set(history.faulty)
        self._without_progress = history.without_progress
        self._best_step = history.best_step
        self._steps_seen = history.steps_seen
        self.bad_checkpoints |= history.bad_checkpoints
        self.join_problem = self.join_problem or history.join_problem

    def handle(self, event: Event, *, now_s: float) -> list[SupervisorCommand]:
        match event:
            case GenerationStarted():
                self._finished.clear()
                # The last leader may have ended before it reported the steps of its generation.
                self._steps_seen |= event.restored is not None
                # A stop may have been requested while the workers started. A back-off ends early
                # if a generation was needed for another reason.
                if self.state in (SupervisorState.STARTING, SupervisorState.BACKING_OFF):
                    self.state = SupervisorState.RUNNING
                return []
            case WorkersExited():
                return self._workers_exited(event, now_s)
            case StopRequested():
                return self._stop_asked(event, now_s)
            case AllAtBoundary():
                if self.state is SupervisorState.LAST_SNAPSHOT:
                    return self._signal_workers("the last snapshot is sealed on every rank")
                return []
            case Tick():
                return self._tick(now_s)
            case _:
                assert_never(event)

    def _workers_exited(self, event: WorkersExited, now_s: float) -> list[SupervisorCommand]:
        is_stopping = self.state in STOPPING
        failed = [found for found in event.exits if found.kind is not ExitKind.FINISHED]
        if self.state is not SupervisorState.RUNNING and not is_stopping:
            return []
        if failed and not is_stopping:
            return self._failed(first_cause(failed), event.progress, now_s)
        self._finished.update(found.rank for found in event.exits)
        if len(self._finished) < self.world_size:
            return []
        done = EndRun(ExitCode.DONE, "every rank has finished")
        return self._end(self._stopped() if is_stopping else done)

    def _failed(
        self, cause: WorkerExit, progress: Progress, now_s: float
    ) -> list[SupervisorCommand]:
        if cause.kind is ExitKind.JOIN_REFUSED and not self.join_problem:
            return self._join_refused(cause)
        key = self._note_progress(cause, progress)
        place = self.placement
        node_id, fault = place.fault_behind(cause)
        is_final = self._is_final(cause, is_reported=node_id in place.faults)
        can_move = place.can_replace and (place.is_protected or node_id in self._faulty)
        if is_final is None and fault and can_move and self.budget.limit > 0:
            return self._exclude(cause, ExcludeNode(node_id, fault, is_fault=True))
        found = Repetition(0)
        if fault:
            self._causes.note_uncounted(key, now_s=now_s)
        elif not is_link_failure(cause):  # only the budget bounds lost links
            found = self._causes.note(key, cause, place, now_s=now_s)
        refusal = is_final or self._refusal(cause, node_id, fault, found, now_s)
        if refusal is not None:
            return [KillWorkers(cause.text), *self._end(refusal)]
        self.budget.spend(now_s=now_s)
        if found.exclude:
            self.suspects.add(found.exclude)
            text = f"the same failure occurred on it {found.count} times without progress"
            return self._exclude(cause, ExcludeNode(found.exclude, text))
        self.restarts += 1
        reason = cause.text
        if fault:
            self._faulty.add(node_id)
            reason += self._restart_in_place(cause, node_id, fault)
        # Before the first step of this generation, the script may not have reached `attach` yet.
        if not progress.attached and progress.steps_here > 0:
            reason += (
                "; the script does not call ftrun.attach, so it restarts from its beginning or "
                "from its own checkpoint"
            )
        pause_s = self._pause_s()
        if pause_s <= 0:
            self.state = SupervisorState.STARTING
            return [KillWorkers(cause.text), _start(reason, cause)]
        self.state = SupervisorState.BACKING_OFF
        self._deadline_s = now_s + pause_s
        self._resume_reason = (
            f"{reason}; waited {pause_s:.0f} s, because the last restart made no progress"
        )
        return [KillWorkers(cause.text)]

    def _join_refused(self, cause: WorkerExit) -> list[SupervisorCommand]:
        self.restarts += 1
        self.join_problem = cause.text
        self.state = SupervisorState.STARTING
        return [KillWorkers(cause.text), StartGeneration(cause.text)]

    def _exclude(self, cause: WorkerExit, command: ExcludeNode) -> list[SupervisorCommand]:
        self.restarts += 1
        self._without_progress = 0
        self.state = SupervisorState.STARTING
        return [KillWorkers(cause.text), command, _start(command.text, cause)]

    def _restart_in_place(self, cause: WorkerExit, node_id: str, fault: str) -> str:
        missing = "the state is not protected" if self.placement.can_replace else "no spare is free"
        named = "" if fault == cause.text else f" ({fault})"
        return f"; node {node_id} has a hardware fault{named} and keeps its ranks: {missing}"

    def _is_final(self, cause: WorkerExit, *, is_reported: bool) -> EndRun | None:
        """The end after a failure that no restart can cure; a reported fault may explain it."""
        is_start = not self._steps_seen and not self._is_explicit and not is_reported
        if cause.kind in _ENDS_ITSELF and is_start:
            advice = "Not retried: the program ended by itself before its first step."
            return EndRun(_own_code(cause), cause.text, cause, advice)
        if cause.kind is ExitKind.NUMERICAL_ANOMALY and self._numerics_policy == "stop":
            advice = (
                "numerics.policy is stop. The last snapshots and checkpoints are from before it."
            )
            return EndRun(ExitCode.DO_NOT_RESTART, cause.text, cause, advice)
        return None

    def _refusal(
        self, cause: WorkerExit, node_id: str, fault: str, found: Repetition, now_s: float
    ) -> EndRun | None:
        """Why this failure is not retried; None if it is."""
        if fault and node_id in self._faulty:
            reason = f"node {node_id} has a hardware fault, and no spare is free: {fault}"
            advice = (
                "Reset or replace the device, then start ftrun on that node again. A run over "
                "several nodes with --spares continues on another node."
            )
            return EndRun(ExitCode.NOT_ENOUGH_NODES, reason, cause, advice)
        if found.follows:
            advice = (
                f"The failure follows its rank: {found.follows}. The cause is in the data of this "
                "rank or in its part of the program. Correct it, then start again."
            )
            return EndRun(ExitCode.DO_NOT_RESTART, cause.text, cause, advice)
        if found.count >= self._restart.same_cause_limit and not found.exclude:
            advice = (
                f"The same failure occurred {found.count} times without a step of "
                "progress, so another restart would not help. Correct the cause, then start again."
            )
            return EndRun(ExitCode.DO_NOT_RESTART, cause.text, cause, advice)
        if self.budget.is_spent(now_s=now_s):
            advice = f"The restart budget is used up: {self.budget}."
            if not self._is_explicit:
                advice += " Raise restart.budget in the profile, or use --max-restarts."
            return EndRun(_own_code(cause), cause.text, cause, advice)
        return None

    def _note_progress(self, cause: WorkerExit, progress: Progress) -> str:
        """Restarts the counts if the run has made progress since the last failure.

        Returns:
            The key of this cause.
        """
        self._steps_seen |= progress.steps_here > 0
        # Without attach, each start counts steps from 0. Only the same failure after the same
        # number of steps is known to be no progress.
        key = cause.fingerprint
        if progress.attached:
            advanced = progress.step > self._best_step
        else:
            key += f" after {progress.steps_here} steps"
            advanced = progress.steps_here > 0 and key != self._causes.newest
        self._best_step = max(self._best_step, progress.step)
        self._without_progress = 0 if advanced else self._without_progress + 1
        if advanced:
            self._faulty.clear()
            # The steps of a script without attach may be those that it had made before. Other
            # failures show where it failed then; a lost link shows nothing.
            if progress.attached or not is_link_failure(cause):
                self._causes.forget()
        return key

    def _pause_s(self) -> float:
        """Seconds to wait before a restart: 0 after progress, then doubling."""
        if self._without_progress <= 1:
            return 0.0
        pause_s = self._restart.backoff_initial_s * 2.0 ** (self._without_progress - 2)
        return min(pause_s, self._restart.backoff_max_s)

    def _stop_asked(self, event: StopRequested, now_s: float) -> list[SupervisorCommand]:
        if self.state is SupervisorState.ENDED:
            return []
        if self.state in STOPPING:
            self.state = SupervisorState.KILLED
            return [KillWorkers(f"{event.by} (second request)")]
        self._stop_signal = Signals(event.signal)
        self._grace_ends_s = now_s + self._stop.grace_s
        if self.state is SupervisorState.BACKING_OFF:
            return self._end(self._stopped())
        if event.attached and self._stop.final_snapshot_timeout_s > 0:
            self.state = SupervisorState.LAST_SNAPSHOT
            self._deadline_s = now_s + min(self._stop.final_snapshot_timeout_s, self._stop.grace_s)
            return [RequestFinalSnapshot(event.by)]
        return self._signal_workers(event.by)

    def _stopped(self) -> EndRun:
        return EndRun(128 + self._stop_signal, f"stopped by {self._stop_signal.name}")

    def _signal_workers(self, reason: str) -> list[SupervisorCommand]:
        self.state = SupervisorState.SIGNALLED
        self._deadline_s = self._grace_ends_s
        return [SignalWorkers(self._stop_signal, reason)]

    def _tick(self, now_s: float) -> list[SupervisorCommand]:
        if now_s < self._deadline_s:
            return []
        if self.state is SupervisorState.BACKING_OFF:
            self.state = SupervisorState.STARTING
            return [StartGeneration(self._resume_reason)]
        if self.state is SupervisorState.LAST_SNAPSHOT:
            wait_s = self._stop.final_snapshot_timeout_s
            return self._signal_workers(f"not every rank reached a boundary in {wait_s:.0f} s")
        if self.state is SupervisorState.SIGNALLED:
            self.state = SupervisorState.KILLED
            return [KillWorkers(f"the grace period of {self._stop.grace_s:.0f} s is over")]
        return []

    def _end(self, command: EndRun) -> list[SupervisorCommand]:
        self.state = SupervisorState.ENDED
        return [command]


def _start(reason: str, cause: WorkerExit) -> StartGeneration:
    """After a numerical anomaly, the processes hold wrong values, and none of them stays."""
    may_live = cause.kind in (ExitKind.HUNG, ExitKind.SKIPPED)
    stay = cause.kind is not ExitKind.NUMERICAL_ANOMALY
    return StartGeneration(reason, stay, (cause.rank,) if may_live else ())


def _own_code(cause: WorkerExit) -> int:
    return cause.code if cause.code > 0 else 128 - cause.code


OWN_DEATHS, OWN_DEATHS_WINDOW_S = 5, 600.0


class ComponentRestarts:
    """Restarts the SMP and the zygote of one node when they die, each within its budget."""

    def __init__(self) -> None:
        self._smp = RestartBudget(OWN_DEATHS, OWN_DEATHS_WINDOW_S)
        self._zygote = RestartBudget(OWN_DEATHS, OWN_DEATHS_WINDOW_S)

    def handle(self, event: PartEvent, *, now_s: float) -> PartCommand:
        is_smp = isinstance(event, SmpExited)
        budget = self._smp if is_smp else self._zygote
        if budget.is_spent(now_s=now_s):
            part = "smp" if is_smp else "zygote"
            return DisableComponent(part, f"{event.text}; it died too often ({budget})")
        budget.spend(now_s=now_s)
        return RespawnSmp(event.text) if is_smp else RespawnZygote(event.text)
