"""Run settings and inherited descriptors of this worker, read from its environment.

Runs in:  worker.
Takes in: FTRUN_* variables and inherited descriptors (wire/environment.py).
Gives:    one `WorkerContext` per process, or None if no agent started this process: under
          plain python, plain torchrun, in a notebook, on macOS and Windows.
"""

import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Generation, Incarnation, Rank, RunId, Version, version
from ftrun.wire import environment as env
from ftrun.wire.shared_memory.pages import SharedPage
from ftrun.wire.verify_records import VerifyPlan
from ftrun.worker.state.unprotected import UnprotectedReasons

if TYPE_CHECKING:
    from ftrun.worker.verify.recording import Recording


@dataclass(frozen=True)
class WorkerContext:
    """Identity, shared pages and settings of this worker in its run."""

    run_id: RunId
    rank: Rank
    world_size: int
    generation: Generation
    incarnation: Incarnation
    page: SharedPage
    commands: SharedPage
    arena_fd: int | None
    restore: Version | None
    smp_socket: Path
    settings: SnapshotConfig
    restore_world_size: int | None = None
    """World size of the version to restore; None: equal to `world_size`."""
    skip_batches: int = 0
    """Number of batches that are left out after the restored version."""

    @cached_property
    def unprotected(self) -> UnprotectedReasons:
        return UnprotectedReasons(self.page)

    @cached_property
    def recording(self) -> "Recording | None":
        """Recorder of this rank in a run of `ftrun verify`; None in other runs."""
        plan = os.environ.get(env.VERIFY)
        if plan is None:
            return None
        from ftrun.worker.verify.recording import Recording

        return Recording(self, msgspec.json.decode(plan, type=VerifyPlan))

    @property
    def is_resized(self) -> bool:
        size = self.restore_world_size
        return self.restore is not None and size is not None and size != self.world_size


@cache
def worker_context() -> WorkerContext | None:
    """Context of this process; cached, so that a DataLoader worker shares that of its rank."""
    get = os.environ.get
    run_id = get(env.RUN_ID)
    if run_id is None or env.HEARTBEAT_FD not in os.environ or "RANK" not in os.environ:
        return None
    restore = get(env.RESTORE)
    arena_fd = get(env.ARENA_FD)
    return WorkerContext(
        run_id=RunId(run_id),
        rank=Rank(int(os.environ["RANK"])),
        world_size=int(os.environ["WORLD_SIZE"]),
        generation=Generation(int(os.environ[env.GENERATION])),
        incarnation=Incarnation(int(os.environ[env.INCARNATION])),
        page=SharedPage(int(os.environ[env.HEARTBEAT_FD])),
        commands=SharedPage(int(os.environ[env.COMMAND_FD])),
        arena_fd=int(arena_fd) if arena_fd else None,
        restore=version(*(int(part) for part in restore.split(":"))) if restore else None,
        smp_socket=Path(os.environ[env.SMP_SOCKET]),
        restore_world_size=int(get(env.RESTORE_WORLD_SIZE) or 0) or None,
        skip_batches=int(get(env.SKIP_BATCHES) or 0),
        settings=msgspec.json.decode(get(env.SNAPSHOT, "{}"), type=SnapshotConfig),
    )
