"""How a generation is started, and how long each part of it took.

Runs in:  agent, main thread.
Takes in: the order to start one, and why.
Gives:    running workers, a journal line, a `Restart` with measured phases.
"""

import json
import logging
from collections import deque
from dataclasses import asdict, dataclass

from ftrun import clock
from ftrun.agent.elastic import FtrunElasticAgent
from ftrun.agent.rendezvous import StorePool
from ftrun.agent.smp_link import SmpLink
from ftrun.agent.stub_link import StubLink
from ftrun.agent.worker_group import WorkerGroup
from ftrun.config import RunSpec
from ftrun.errors import PeerError, SnapshotError
from ftrun.ids import Rank, Version, version
from ftrun.journal import Journal
from ftrun.snapshot.restore_point import Offer, restore_point
from ftrun.wire import messages as msg
from ftrun.wire.crash_points import crash_point
from ftrun.wire.pages import Beat

_log = logging.getLogger(__name__)

NOTHING = version(-9, -1)
"""Older than every version, those from a checkpoint included."""


@dataclass
class Restart:
    """One restart, as it was measured; times in seconds on the monotonic clock."""

    generation: int
    cause: str
    noticed_s: float
    decided_s: float
    stopped_s: float
    launched_s: float
    restored: str | None
    phases_s: dict[str, float] | None = None
    """Filled in when every rank has completed a step."""


class Generations:
    """Starts one generation after the other."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        first: int,
        journal: Journal,
        smp: SmpLink,
        stub: StubLink,
        stores: StorePool,
        workers: WorkerGroup,
    ) -> None:
        self.number = first - 1
        self.restarts: deque[Restart] = deque(maxlen=100)
        self.world_size = 0
        self._spec = spec
        self._journal = journal
        self._smp = smp
        self._stub = stub
        self._stores = stores
        self._workers = workers

    def start(
        self, agent: FtrunElasticAgent, why: str, *, noticed_s: float, stopped_s: float
    ) -> Version | None:
        """Start all workers from the newest restore point; which one that was."""
        decided_s = clock.now_s()
        self.number += 1
        crash_point("agent.restart.decided")
        restored = self._restore_point()
        crash_point("agent.restart.voided")
        agent.close_generation()
        self._workers.prepare(self.number, self.world_size, restored)
        self.tell_smp()
        crash_point("agent.restart.smp_told")
        agent.start_generation(self.number)
        self._workers.launched(agent)
        crash_point("agent.restart.launched")
        text = str(restored) if restored is not None else None
        if self.number > 0:
            _log.info("%s; generation %d starts from %s", why, self.number, text or "the beginning")
            times = (noticed_s, decided_s, stopped_s or decided_s, clock.now_s())
            self.restarts.append(Restart(self.number, why, *times, text))
        pids = self._workers.pids()
        self._journal.write(
            "StartGeneration", why=why, generation=self.number, restored=text, pids=pids
        )
        self._keep_run_state(pids)
        crash_point("agent.restart.state_kept")
        return restored

    def tell_smp(self) -> None:
        """Say who takes part from now on; an SMP that is gone is told when the next one is up."""
        try:
            self._smp.begin_generation(
                self.number, list(range(self.world_size)), self._workers.command_fd
            )
        except PeerError as error:
            self._journal.write("smp_not_told", why=str(error))

    def measure(self) -> None:
        """Note the phases of the last restart once every rank has made a step."""
        restart = self.restarts[-1] if self.restarts else None
        if restart is None or restart.phases_s is not None or restart.generation != self.number:
            return
        pages = [place.page for place in self._workers.places]
        if not pages or not all(page.get(Beat.FIRST_STEP_NS) for page in pages):
            return

        def last_s(at: Beat) -> float:
            return max(page.get(at) for page in pages) / 1e9

        script_s = last_s(Beat.STARTED_NS)
        group_s = max(last_s(Beat.INIT_GROUP_NS), script_s)
        restored_s = max(last_s(Beat.RESTORE_END_NS), group_s)
        restoring_s = max(
            (page.get(Beat.RESTORE_END_NS) - page.get(Beat.RESTORE_BEGIN_NS)) / 1e9
            for page in pages
        )
        first_step_s = last_s(Beat.FIRST_STEP_NS)
        restart.phases_s = {
            "decide": restart.decided_s - restart.stopped_s,
            "stop": restart.stopped_s - restart.noticed_s,
            "fork": script_s - restart.decided_s,
            "rendezvous": group_s - script_s,
            "build": restored_s - group_s - restoring_s,
            "restore": restoring_s,
            "first_step": first_step_s - restored_s,
            "total": first_step_s - restart.noticed_s,
        }
        self._journal.write("Recovered", **asdict(restart))
        _log.info("training again after %.2f s", restart.phases_s["total"])

    def _restore_point(self) -> Version | None:
        point = restore_point(self._offers(), self.world_size)
        directory = self._spec.checkpoint_directory
        why = point.why
        found = point.version
        if found is None and directory:
            found, why = self._load_checkpoint(directory)
        if found is None:
            self._refuse_to_forget(point.why)
        elif found.generation >= 0:
            self._smp.committed = found
        voided = self._smp.void_after(found if found is not None else NOTHING)
        self._journal.write("restore_point", version=str(found), why=why, voided_slots=voided)
        return found

    def _refuse_to_forget(self, why: str) -> None:
        """Never begin anew in silence where there was something to go on from.

        Raises:
            SnapshotError: the state is of another world size, or none of it can be restored.
        """
        sizes = {held.world_size for held in self._smp.offers()} - {self.world_size}
        if sizes:
            raise SnapshotError(
                f"this run's snapshots are of {max(sizes)} ranks, and {self.world_size} were asked "
                f"for. Start with --nproc-per-node {max(sizes)}, or free them with `ftrun stop "
                f"{self._spec.run_id}` and begin anew"
            )
        if self._smp.committed is not None:
            raise SnapshotError(
                f"the run cannot go on from {self._smp.committed}, which was its newest committed "
                f"version: {why}. Start it again with a --checkpoint-dir to go on from disk"
            )

    def _load_checkpoint(self, directory: str) -> tuple[Version | None, str]:
        answer = self._smp.load_checkpoint(directory, list(range(self.world_size)))
        if isinstance(answer, msg.CheckpointLoaded):
            why = "; ".join([f"checkpoint {answer.path}", *answer.notes])
            return version(answer.generation, answer.step), why
        if answer is None:
            return None, f"no checkpoint in {directory} yet"
        raise SnapshotError(
            f"{answer}. Give another --checkpoint-dir to start anew; nothing there was changed"
        )

    def _offers(self) -> list[Offer]:
        return [
            Offer(Rank(held.rank), version(held.generation, held.step), held.world_size)
            for held in self._smp.offers()
        ]

    def keep_arenas(self) -> None:
        """Give the stub whatever memory has come or gone; cheap when nothing has."""
        pids = self._workers.pids()
        state: dict[str, object] = {"generation": self.number, "pids": pids}
        self._stub.keep([fd for _, fd in self._smp.held], state)

    def _keep_run_state(self, pids: list[int]) -> None:
        self.keep_arenas()
        state = {"generation": self.number, "pids": pids}
        try:
            self._smp.keep_run_state(json.dumps(state).encode())
        except PeerError as error:
            self._journal.write("smp_not_told", why=str(error))
