"""Builds the report of this node for its heartbeats.

Runs in:  agent, main thread.
Takes in: ended workers, notices of the SMP, the state of all components of a run.
Gives:    a `Heartbeat` for the control loop, marked as urgent if it needs a reaction.
"""

from typing import TYPE_CHECKING

from ftrun import events
from ftrun.agent.journal_words import fields_of
from ftrun.agent.launch.process import oom_kills
from ftrun.agent.observe.devices import RecentDeviceErrors
from ftrun.membership.events import NodeReported
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.cluster.membership import Heartbeat

if TYPE_CHECKING:
    from ftrun.agent.loop import RunLoop


class NodeReporter:
    """Reports the state of one node to the leader."""

    def __init__(self, run: "RunLoop") -> None:
        self.troubles = RecentDeviceErrors()
        self._run = run
        self._told = Heartbeat(generation=-1)
        self._exits: list[events.WorkerExit] = []
        self._differs: tuple[str, tuple[int, ...]] = ("", ())
        self._oom_kills = oom_kills()

    def begin(self) -> None:
        """Drop the reports of the last generation; another one is being prepared."""
        self._exits.clear()
        self._differs = ("", ())

    def take_ends(self) -> None:
        run = self._run
        ended = run.workers.ended()
        if not ended:
            return
        kills = oom_kills()
        before = self._oom_kills
        new = None if kills is None or before is None else max(0, kills - before)
        self._oom_kills = kills
        exits = [run.workers.explain(handle, oom_kills=new) for handle in ended]
        self._exits += exits
        seen = events.WorkersExited(tuple(exits), run.workers.progress())
        run.journal.write(seen.journal_kind, **fields_of(seen))

    def take_notices(self, *, now_s: float) -> None:
        run = self._run
        for text in self.troubles.take(run.eyes.troubles, now_s=now_s):
            run.journal.write("DeviceTrouble", text=text)
        for notice in run.smp.take_notices():
            run.journal.write("smp_" + notice.kind, why=notice.why, nodes=notice.nodes,
                              ranks=notice.ranks)  # fmt: skip
            if notice.kind == "replicas_differ":
                self._differs = (notice.why, tuple(notice.ranks))

    def tell(self, *, now_s: float, is_urgent: bool) -> None:
        """Report the state of this node; at once if it needs a reaction."""
        beat = self._here(now_s)
        is_urgent |= _what_matters(beat) != _what_matters(self._told)
        self._told = beat
        self._run.brain.tell(NodeReported(beat, is_urgent))

    def _here(self, now_s: float) -> Heartbeat:
        run = self._run
        workers, smp = run.workers, run.smp
        progress = workers.progress()
        # Read before `committed()`, because a rank seals a version only after the page shows the
        # commit before it. In the other order an old commit could be paired with a new seal.
        sealed = workers.sealed()
        runs = bool(workers.handles) and run.generations.is_member
        return Heartbeat(
            generation=run.generations.number if runs else -1,
            state="held" if workers.is_held else "running" if workers.alive() else "idle",
            step=progress.step,
            steps_here=progress.steps_here,
            attached=progress.attached,
            exits=tuple(self._exits),
            ready=self._ready(),
            abandoned_step=smp.abandoned_step,
            sealed=sealed,
            committed=workers.committed(),
            at_boundary=run.orders.awaits_boundary and workers.all_at_boundary(),
            wished_every=workers.wished_every(),
            stops=run.signals.stops,
            stop_signal=run.signals.stop_signal,
            leaves=run.signals.leaves,
            smp_port=smp.port,
            survives=0 if run.generations.is_alone else smp.survives,
            problem=smp.restore_failed,
            problem_is_link=smp.restore_lost_links,
            unreachable=smp.unreachable,
            unprotected=run.caretaker.smp_given_up or smp.survives_why,
            ranks=workers.reports(now_s),
            p99_s=run.eyes.p99_s,
            views=run.eyes.views,
            sample=run.eyes.sample,
            troubles=self.troubles.recent,
            differs=self._differs[0],
            differing_ranks=self._differs[1],
            repeat_warning=run.generations.repeats.warning,
            restart=run.generations.restart_times(now_s) if runs else None,
        )

    def _ready(self) -> VersionPair | None:
        """The newest version that this node holds and protects in this generation."""
        run = self._run
        ready = run.smp.ready_version
        if run.desk is not None and run.generations.is_alone:
            ready = run.smp.committed  # its SMP waits for no other node, and commits by itself
        return (ready.generation, ready.step) if ready is not None else None


def _what_matters(beat: Heartbeat) -> tuple[object, ...]:
    """Fields that the leader needs at once when they change; the rest waits for a heartbeat."""
    return (
        beat.generation,
        beat.state,
        len(beat.exits),
        beat.ready,
        beat.abandoned_step,
        beat.at_boundary,
        beat.stops,
        beat.leaves,
        beat.problem,
        beat.smp_port,
        beat.restart is None,
    )
