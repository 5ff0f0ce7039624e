"""The workers of this node: their processes, their pages, what they are told all at once.

Runs in:  agent, main thread.
Takes in: a generation to prepare for.
Gives:    places for the starter, ends with their reasons, progress.
Survives: each worker: pages and error files of the dead are read here.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL

from ftrun import clock, events
from ftrun.agent.elastic import FtrunElasticAgent
from ftrun.agent.processes import process_state
from ftrun.agent.smp_link import SmpLink
from ftrun.agent.worker_starter import Place, WorkerHandle, WorkerStarter
from ftrun.config import RunSpec
from ftrun.errors import WorkerNotKillable
from ftrun.ids import Rank, Step, Version
from ftrun.monitor.exits import ExitFacts, explain
from ftrun.wire import environment as env
from ftrun.wire.pages import Beat, Command, Page, create_command_page, create_page

KILL_WAIT_S = 60.0
EVERY_LEAD_STEPS = 64
"""A new snapshot interval takes effect so many steps ahead, further than ranks drift apart."""


class WorkerGroup:
    """All ranks of one node in one generation."""

    def __init__(self, spec: RunSpec, *, smp: SmpLink, starter: WorkerStarter) -> None:
        self.starter = starter
        self.generation = -1
        self.restored: Version | None = None
        self.commands: Page | None = None
        self.command_fd = -1
        self._spec = spec
        self._smp = smp
        self._error_files: dict[int, str] = {}
        self._launched_wall_s = 0.0

    # --- a generation's life ------------------------------------------------------------------

    def prepare(self, generation: int, world_size: int, restored: Version | None) -> None:
        """Make pages and variables for the workers to come."""
        self.generation, self.restored = generation, restored
        self._close_places()
        self.command_fd = create_command_page()
        self.commands = Page(self.command_fd)
        if restored is not None:
            self.commands.set(Command.COMMITTED_GENERATION, restored.generation)
            self.commands.set(Command.COMMITTED_STEP, restored.step)
        self.starter.command_fd = self.command_fd
        self.starter.places = {
            rank: self._place(Rank(rank), restored) for rank in range(world_size)
        }
        self.starter.handles = {}

    def launched(self, agent: FtrunElasticAgent) -> None:
        self._error_files = dict(agent.error_files)

    def kill(self) -> None:
        """End every worker, and whatever it has started, now.

        Raises:
            WorkerNotKillable: one does not die; it hangs in the kernel.
        """
        for handle in self.handles:
            handle.child.signal_group(SIGKILL)
            handle.child.signal(SIGKILL)
        for handle in self.handles:
            if not handle.child.wait(KILL_WAIT_S):
                raise WorkerNotKillable(
                    f"rank {handle.local_rank_id} (pid {handle.pid}) has not died within "
                    f"{KILL_WAIT_S:.0f} s of SIGKILL (state {process_state(handle.pid)}): a device "
                    "or a file system hangs in the kernel. This node needs attention"
                )

    def signal(self, number: int) -> None:
        for handle in self.alive():
            handle.child.signal_group(number)
            # A stopped process cannot obey until it goes on.
            handle.child.signal_group(SIGCONT)

    def ask_last_snapshot(self) -> None:
        """Have every rank stop at the first boundary that none of them has passed yet."""
        if self.commands is not None:
            furthest = max((place.page.get(Beat.STEP) for place in self.places), default=0)
            self.commands.set(Command.STOP_AFTER_STEP, furthest + 1)

    # --- what is seen -------------------------------------------------------------------------

    @property
    def handles(self) -> list[WorkerHandle]:
        return [handle for _, handle in sorted(self.starter.handles.items())]

    @property
    def places(self) -> list[Place]:
        return [place for _, place in sorted(self.starter.places.items())]

    def alive(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.child.status is None]

    def pids(self) -> list[int]:
        return [handle.pid for handle in self.handles]

    def ended(self) -> list[WorkerHandle]:
        """Workers whose end has not been told yet."""
        found = [h for h in self.handles if not h.exit_seen and h.child.reap()]
        for handle in found:
            handle.exit_seen = True
            # What the dead one has left behind (DataLoader workers) dies with it.
            handle.child.signal_group(SIGKILL)
        return found

    def explain(self, handle: WorkerHandle, *, oom_kills: int | None) -> events.WorkerExit:
        """Why it has ended."""
        page = handle.place.page
        message, traceback, failed_at_ns = self._error(handle)
        corrupt = page.get(Beat.CORRUPT_SLOT)
        if corrupt:
            self._smp.void_slot(Rank(handle.place.rank), self.restored)
        facts = ExitFacts(
            rank=Rank(handle.place.rank),
            pid=handle.pid,
            status=handle.child.ended_with,
            message=message,
            traceback=traceback,
            failed_at_ns=page.get(Beat.FAILED_NS) or failed_at_ns,
            oom_kills=oom_kills,
            stopped_s=handle.killed_for_s,
            corrupt=page.note if corrupt else "",
        )
        return explain(facts)

    def error_file(self, rank: int) -> str:
        """Where a rank of this generation writes the exception it ends by."""
        return self._error_files.get(rank, "")

    def progress(self) -> events.Progress:
        first = self.restored.step if self.restored is not None else 0
        step = max((place.page.get(Beat.STEP) for place in self.places), default=0)
        here = max(
            (
                step - first if place.page.get(Beat.ATTACHED) else place.page.get(Beat.STEP)
                for place in self.places
                if place.page.get(Beat.FIRST_STEP_NS)
            ),
            default=0,
        )
        attached = any(place.page.get(Beat.ATTACHED) for place in self.places)
        return events.Progress(Step(step), here, attached)

    def all_at_boundary(self) -> bool:
        alive = self.alive()
        return bool(alive) and all(h.place.page.get(Beat.STOPPED_AT_BOUNDARY) for h in alive)

    def kill_long_stopped(self, now_s: float, limit_s: float) -> None:
        """Act on workers that somebody has stopped: a stopped rank holds up all the others."""
        for handle in self.alive():
            if not handle.child.is_stopped():
                handle.stopped_since_s = None
            elif handle.stopped_since_s is None:
                handle.stopped_since_s = now_s
            elif now_s - handle.stopped_since_s > limit_s and handle.killed_for_s is None:
                handle.killed_for_s = now_s - handle.stopped_since_s
                handle.child.signal_group(SIGKILL)

    def agree_interval(self) -> None:
        """Where the profile says auto: the longest interval that any rank wishes for.

        Announced ahead of time, because ranks are not at the same step when they read it, and a
        version that only some of them take is never committed.
        """
        if self.commands is None or self._spec.profile.snapshot.every != "auto":
            return
        wished = max((place.page.get(Beat.WISHED_EVERY) for place in self.places), default=0)
        step = max((place.page.get(Beat.STEP) for place in self.places), default=0)
        settled = step > self.commands.get(Command.EVERY_FROM_STEP)
        if wished and settled and wished != self.commands.get(Command.SNAPSHOT_EVERY):
            self.commands.set(Command.EVERY_FROM_STEP, step + EVERY_LEAD_STEPS)
            self.commands.set(Command.SNAPSHOT_EVERY, wished)

    # --- details ------------------------------------------------------------------------------

    def _place(self, rank: Rank, restored: Version | None) -> Place:
        page_fd = create_page(f"rank-{rank}")
        snapshot = self._spec.profile.snapshot
        variables = {
            env.RUN_ID: self._spec.run_id,
            env.GENERATION: str(self.generation),
            env.INCARNATION: str(self.generation),
            env.SMP_SOCKET: str(self._smp.folder.smp_socket),
            env.SNAPSHOT: snapshot.model_dump_json(),
            env.START: "fresh",
            env.AGENT_PID: str(os.getpid()),
        }
        if restored is not None:
            variables[env.RESTORE] = f"{restored.generation}:{restored.step}"
        arena = self._smp.arena_for(rank, restored)
        return Place(rank, page_fd, Page(page_fd), arena, variables)

    def _close_places(self) -> None:
        for place in self.places:
            os.close(place.page_fd)
        if self.command_fd >= 0:
            os.close(self.command_fd)

    def _error(self, handle: WorkerHandle) -> tuple[str, str, int]:
        """Message, traceback and time from the worker's error file, if it wrote one."""
        path = self._error_files.get(handle.local_rank_id, "")
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
            extra = document["extraInfo"]
            age_s = clock.wall_s() - float(extra["timestamp"])
            failed_ns = clock.now_ns() - int(age_s * 1e9)
            return document["message"], extra["py_callstack"], failed_ns
        return "", "", 0
