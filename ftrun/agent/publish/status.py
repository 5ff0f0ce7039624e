"""Builds the status of `ftrun status`.

`poll` and `publish` run in the main thread, which owns the data of the node's status; `document`
and `of_node` in any other thread, which reads one immutable `StatusView`. docs/operations.md
describes it.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ftrun import clock
from ftrun.agent.publish.cluster_status import ControlLoopStatus, control_loop_status, rank_statuses
from ftrun.agent.publish.published import Published
from ftrun.agent.publish.summary_line import retained_text
from ftrun.agent.publish.versions import held_versions, run_versions
from ftrun.ids import version
from ftrun.journal import FILE_NAME
from ftrun.membership.discovery import MemberRole
from ftrun.recovery.supervisor import STOPPING, SupervisorState
from ftrun.urls import without_password
from ftrun.wire.messages.smp import MemoryNeeded
from ftrun.wire.messages.status import (
    STALE_S,
    CheckpointStatus,
    ClusterStatus,
    ProcessIds,
    RankStatus,
    RestartStatus,
    SnapshotStatus,
    StatusView,
    VersionStatus,
)
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.shared_memory.arena import SlotState, read_shape, read_slot_headers
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    blocked_s,
    most,
)

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run


class StatusBuilder(Published[StatusView]):
    """Status of one node, readable in all threads."""

    def __init__(self, run: "Run") -> None:
        super().__init__(self._build_view, wake=run.signals.wake)
        self.metrics_address: str | None = None
        self._run = run

    def _build_view(self) -> StatusView:
        run = self._run
        if run.rpc is None:
            decided = control_loop_status(run.control_loop, is_alone=True)
        else:
            decided = run.rpc.control_loop.last().value
        return msgspec.structs.replace(_own_status(run, decided), metrics=self.metrics_address)

    # --- any other thread ---------------------------------------------------------------------

    def document(self) -> bytes:
        """Status of this node as JSON, merged with the leader's; PeerError if there is none yet."""
        nodes, rpc = self._run.spec.nodes, self._run.rpc
        # Read the control loop's status first, because the node's status is built from it.
        cluster = rpc.whole() if rpc is not None else None
        view = self._read_view()
        if cluster is not None and nodes is not None:
            view = with_cluster(view, cluster, has_secret=nodes.secret_file is not None)
        return msgspec.json.encode(with_age(view))

    def of_node(self) -> StatusView:
        """Status of this node without requests to others; PeerError if there is none yet."""
        rpc = self._run.rpc
        published = rpc.control_loop.read().value if rpc is not None else None
        view = self._read_view()
        if published is None or not published.leads or published.cluster is None:
            return view
        return msgspec.structs.replace(
            view,
            cluster=published.cluster,
            snapshots=_protected_as(view.snapshots, published.cluster),
        )

    def _read_view(self) -> StatusView:
        reading = self.read()
        return msgspec.structs.replace(reading.value, age_s=reading.age_s)


def with_age(view: StatusView) -> StatusView:
    if view.age_s is None or view.age_s < STALE_S:
        return view
    note = f"; the values of this node are {view.age_s:.0f} s old, because its agent is busy"
    return msgspec.structs.replace(view, summary=view.summary + note)


def with_cluster(view: StatusView, cluster: ClusterStatus, *, has_secret: bool) -> StatusView:
    """Merge the status of the run into this node's; the leader's values take precedence."""
    summary = cluster.summary
    if not cluster.nodes:  # the leader did not answer
        is_following = cluster.role == MemberRole.FOLLOWING.value
        parts = [view.summary, summary] if is_following else [summary, view.summary]
        summary = "; ".join(parts)
    late_s = {rank.rank: rank.lateness_s for node in cluster.nodes for rank in node.ranks}
    return msgspec.structs.replace(
        view,
        cluster=cluster,
        authenticated=has_secret,
        summary=summary if has_secret else f"{summary}; UNAUTHENTICATED",
        state=cluster.state,
        lifecycle=cluster.lifecycle,
        incidents=cluster.incidents,
        restarts=_merged_restarts(view.restarts, cluster.restarts),
        warnings=cluster.warnings or view.warnings,
        ranks=tuple(_with_lateness(rank, late_s.get(rank.rank)) for rank in view.ranks),
        snapshots=_protected_as(view.snapshots, cluster),
        versions=cluster.versions,
        survivors=_survivors_of(view, cluster),
    )


def _survivors_of(view: StatusView, cluster: ClusterStatus) -> str:
    """The first reason on any node; empty if the option is off."""
    reasons = [one.stay_problem for one in cluster.nodes if one.stay_problem]
    return f"no, {reasons[0]}" if view.survivors and reasons else view.survivors


def _merged_restarts(
    own: Sequence[RestartStatus], whole: Sequence[RestartStatus]
) -> tuple[RestartStatus, ...]:
    """The leader also has restarts under earlier agents, and the downtime.

    This node measures the rest itself.
    """
    known = {restart.generation: restart for restart in whole}
    for restart in own:
        of_run = known.get(restart.generation)
        downtime_s = of_run.downtime_s if of_run is not None else None
        known[restart.generation] = msgspec.structs.replace(restart, downtime_s=downtime_s)
    return tuple(restart for _, restart in sorted(known.items()))


def _protected_as(
    snapshots: SnapshotStatus | None, cluster: ClusterStatus
) -> SnapshotStatus | None:
    """The values of this node's ranks cover only a part of the run, and a spare has no ranks."""
    if snapshots is None:
        return None
    reason = cluster.unprotected_reason or snapshots.unprotected_reason
    if snapshots.step is None and cluster.committed_version is not None:
        generation, step = cluster.committed_version
        snapshots = msgspec.structs.replace(snapshots, generation=generation, step=step)
    return msgspec.structs.replace(
        snapshots,
        protected=cluster.is_protected,
        unprotected_reason=reason,
        note=reason or snapshots.note,
    )


def _with_lateness(rank: RankStatus, late_s: float | None) -> RankStatus:
    return rank if late_s is None else msgspec.structs.replace(rank, lateness_s=late_s)


def _own_status(run: "Run", decided: ControlLoopStatus) -> StatusView:
    now_s, zygote = clock.now_s(), run.workers.starter.zygote
    snapshots = _snapshots(run, now_s)
    reports, views = run.workers.reports(now_s), run.rank_observer.views
    ranks = tuple(
        msgspec.structs.replace(rank, start=handle.start)
        for rank, handle in zip(
            rank_statuses(reports, views, decided.lateness_s), run.workers.handles, strict=True
        )
    )
    warnings = (
        run.generations.repeats.warning,
        run.smp.files.warning,
        run.workers.slow_capture(),
    )
    return StatusView(
        run_id=run.spec.run_id,
        state=_state(run, decided),
        summary=_summary(run, decided, ranks, snapshots),
        generation=run.generations.number,
        uptime_s=now_s - run.started_s,
        script=run.spec.script,
        lifecycle=decided.lifecycle,
        restart_budget=decided.restart_budget,
        incidents=decided.incidents,
        restarts=_restarts(run, now_s),
        warnings=tuple(text for text in warnings if text),
        ranks=ranks,
        snapshots=snapshots,
        checkpoint=_checkpoint(run, now_s),
        processes=ProcessIds(
            agent=os.getpid(),
            zygote=zygote.child.pid if zygote and zygote.child else None,
            smp=run.smp.child.pid if run.smp.child else None,
        ),
        journal=f"{run.spec.log_folder}/{FILE_NAME}",
        versions=_versions(run) if run.rpc is None else (),
        survivors=_survivors(run),
    )


def _survivors(run: "Run") -> str:
    if run.spec.profile.restart.survivors == "off":
        return ""
    problem = run.workers.stay_problem()
    return f"no, {problem}" if problem else "; ".join(filter(None, ["yes", run.rehearsals.text]))


def _versions(run: "Run") -> tuple[VersionStatus, ...]:
    """Of a run on one node; on several nodes the leader knows all."""
    held = held_versions(run.smp.memory, run.generations.number)
    committed, written = run.workers.committed(), run.smp.last_checkpoint
    if committed is None and run.smp.committed is not None:
        committed = (run.smp.committed.generation, run.smp.committed.step)
    persisted = [(written.generation, written.step)] if written is not None else []
    return run_versions({"": held}, committed=committed, persisted=persisted)


def _restarts(run: "Run", now_s: float) -> tuple[RestartStatus, ...]:
    repeats = run.generations.repeats.results
    return tuple(
        RestartStatus(
            generation=one.generation,
            cause=one.cause,
            age_s=now_s - one.noticed_s,
            restored=str(one.restored) if one.restored is not None else None,
            phases_s=dict(one.phases_s) if one.phases_s is not None else None,
            repeated=repeats.get(one.generation),
        )
        for one in run.generations.restarts
    )


def _state(run: "Run", decided: ControlLoopStatus) -> str:
    state = decided.state
    if state in STOPPING:
        return "stopping"
    if state is SupervisorState.RUNNING:
        return "running"
    if state is SupervisorState.ENDED:
        return "ending"
    return "restarting" if run.generations.restarts or run.smp.was_adopted else "starting"


def _summary(
    run: "Run", decided: ControlLoopStatus, ranks: Sequence[RankStatus], snapshots: SnapshotStatus
) -> str:
    if snapshots.unprotected_reason:
        protection = f"UNPROTECTED: {snapshots.unprotected_reason}"
    elif snapshots.step is not None:
        protection = f"{retained_text(snapshots.step)} ({snapshots.age_s or 0.0:.1f} s ago)"
    elif (kept := max((one.step for one in run.smp.memory.offers()), default=None)) is not None:
        protection = f"snapshots up to step {kept:,} are in memory"
    else:
        protection = "no snapshot yet"
    steps = [rank.step for rank in ranks if rank.step is not None]
    at = f"at step {max(steps):,}" if steps else "before the first step"
    if decided.suspicion is not None:
        unresponsive_s, text = decided.suspicion
        return f"NO STEP for {unresponsive_s:.0f} s {at}: {text}; {protection}"
    number = run.generations.number
    generation = f", generation {number}" if number >= 0 else ""
    return f"{_state(run, decided)} {at}{generation}; {protection}"


def _snapshots(run: "Run", now_s: float) -> SnapshotStatus:
    pages = run.workers.pages
    commands = run.workers.commands
    committed = run.workers.committed()
    reason = run.maintenance.smp_given_up or run.workers.unprotected_reason()
    memory = run.smp.memory
    arena_bytes = sum(read_shape(fd).total_bytes for _, fd in memory.held)
    # mirrors and parity that this node stores for its protection group
    redundancy_bytes = sum(os.fstat(fd).st_size for fd in memory.parity_regions.values())
    return SnapshotStatus(
        protected=committed is not None and not reason,
        unprotected_reason=reason,
        note=reason or next((page.note for page in pages if page.note), ""),
        step=committed[1] if committed else None,
        generation=committed[0] if committed else None,
        age_s=_age_s(run, committed, now_s) if committed else None,
        bytes_per_rank=most(pages, HeartbeatField.IMAGE_BYTES),
        memory_bytes=arena_bytes + redundancy_bytes + run.smp.needed.pool_bytes,
        redundancy_bytes=redundancy_bytes,
        needed_bytes=needed_bytes(
            run.smp.needed,
            redundancy_bytes=redundancy_bytes,
            has_commit=any(has_commit(commands, slot.request) for slot in run.workers.slots),
        ),
        taken=most(pages, HeartbeatField.SEALED_COUNT),
        skipped=most(pages, HeartbeatField.SKIPPED_COUNT),
        discarded=most(pages, HeartbeatField.DISCARDED_COUNT),
        blocked_s=blocked_s(pages),
        every=_every(run, commands, furthest=most(pages, HeartbeatField.STEP)),
    )


def has_commit(commands: SharedPage | None, request: LaunchRequest) -> bool:
    """Whether this generation has protected and committed a version, also the restored one.

    A restored version of another world size stays protected where it is.
    """
    if commands is None or commands.get(CommandField.COMMITTED_STEP) < 0:
        return False
    newest = version(
        commands.get(CommandField.COMMITTED_GENERATION), commands.get(CommandField.COMMITTED_STEP)
    )
    is_resized = request.restore_world_size not in (0, request.world_size)
    is_elsewhere = is_resized and newest == request.restore
    return commands.get(CommandField.COMMITTED_IN) >= request.generation and not is_elsewhere


def needed_bytes(needed: MemoryNeeded, *, redundancy_bytes: int, has_commit: bool) -> int:
    """Bytes that snapshots need on this node in addition to those that they have.

    Before the first commit of a generation, also of the version that it has restored, this includes
    the upper bound of parity. After it, what other nodes need here is allocated, and may be less.
    """
    parity_bytes = 0 if has_commit else max(0, needed.parity_bytes - redundancy_bytes)
    return needed.arena_bytes + parity_bytes


def _every(run: "Run", commands: SharedPage | None, *, furthest: int) -> int:
    """Present snapshot interval in steps; 0: a new interval is set and not used yet."""
    every = run.spec.profile.snapshot.every
    if isinstance(every, int):
        return every
    announced = commands.get(CommandField.SNAPSHOT_EVERY) if commands else 0
    if commands and announced > 0 and furthest <= commands.get(CommandField.EVERY_FROM_STEP):
        return 0
    return max(1, announced)


def _age_s(run: "Run", committed: tuple[int, int], now_s: float) -> float:
    """Seconds since the last local rank sealed the committed version."""
    headers = [header for _, fd in run.smp.memory.held for header in read_slot_headers(fd)]
    sealed = [
        header.sealed_ns
        for header in headers
        if header.state is SlotState.SEALED and (header.generation, header.step) == committed
    ]
    sealed_ns = max(sealed, default=0)
    return max(0.0, now_s - sealed_ns / 1e9) if sealed_ns else 0.0


def _checkpoint(run: "Run", now_s: float) -> CheckpointStatus | None:
    settings = run.spec.profile.checkpoint
    if not settings.directory:
        return None
    written = run.smp.last_checkpoint
    return CheckpointStatus(
        directory=without_password(settings.directory),
        step=written.step if written else None,
        age_s=now_s - run.smp.last_checkpoint_s if written else None,
        last_error=run.maintenance.checkpoints.not_written,
        num_writes=run.smp.num_writes,
        skipped=run.maintenance.checkpoints.num_skipped,
    )
