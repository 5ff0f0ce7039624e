"""The launch request and the shared pages of this worker.

Runs in:  worker.
Gives:    one `WorkerContext` per process, or None if no agent started this process: under
          plain python, plain torchrun, in a notebook, on macOS and Windows.
"""

import os
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import msgspec

from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Generation, Rank, RunId, Version
from ftrun.wire import run_environment as env
from ftrun.wire.messages.worker import LaunchRequest, decode_launch
from ftrun.wire.shared_memory.pages import SharedPage
from ftrun.wire.verify_records import VerifyPlan
from ftrun.worker.state.unprotected import UnprotectedReasons

if TYPE_CHECKING:
    from ftrun.worker.capture.recording import Recording
    from ftrun.worker.survivors.rejoin import StayingProcess


@dataclass(eq=False)
class WorkerContext:
    """Launch request and shared pages of this worker in its run."""

    run_id: RunId
    launch: LaunchRequest
    """Replaced if this process stays and joins another generation."""
    page: SharedPage
    commands: SharedPage
    staying: "StayingProcess | None" = None
    """None: this process cannot stay when another rank fails."""

    @property
    def is_revoked(self) -> bool:
        """This generation is over, and this process stays: it neither waits nor seals."""
        return self.staying is not None and self.staying.line.is_revoked

    @property
    def rank(self) -> Rank:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def generation(self) -> Generation:
        return self.launch.generation

    @property
    def settings(self) -> SnapshotConfig:
        return self.launch.snapshot

    @property
    def restore(self) -> Version | None:
        return self.launch.restore

    @property
    def restore_world_size(self) -> int:
        """World size of the version to restore."""
        return self.launch.restore_world_size or self.launch.world_size

    @property
    def is_resized(self) -> bool:
        return self.restore is not None and self.restore_world_size != self.world_size

    @property
    def arena_fd(self) -> int | None:
        return self.launch.descriptors.get("arena")

    def close_arena(self) -> None:
        """Close the inherited descriptor, which would keep memory that the SMP frees."""
        fd = self.launch.descriptors.pop("arena", None)
        if fd is not None:
            os.close(fd)

    @cached_property
    def unprotected(self) -> UnprotectedReasons:
        return UnprotectedReasons(self.page)

    @cached_property
    def recording(self) -> "Recording | None":
        """Recorder of this rank in a run of `ftrun verify`; None in other runs."""
        plan = os.environ.get(env.VERIFY)
        if plan is None:
            return None
        from ftrun.worker.capture.recording import Recording

        return Recording(self, msgspec.json.decode(plan, type=VerifyPlan))


def is_rehearsal() -> bool:
    """Whether this process only makes a step that is discarded, to be ready for a failure.

    It then runs next to the rank that it may replace, so the script writes to no place that the
    rank writes to. True until it becomes the rank; False in any other process, and outside of
    ftrun. A worker of a DataLoader keeps the value that it has at its start.
    """
    context = worker_context()
    return context is not None and context.launch.rehearses


@cache
def worker_context() -> WorkerContext | None:
    """The context of this process; a DataLoader worker uses the cached context of its rank."""
    run_id, launch = os.environ.get(env.RUN_ID), os.environ.get(env.LAUNCH)
    if run_id is None or launch is None or "RANK" not in os.environ:
        return None
    request = decode_launch(launch)
    return WorkerContext(
        RunId(run_id),
        request,
        page=SharedPage(request.descriptors["heartbeat"]),
        commands=SharedPage(request.descriptors["command"]),
    )
