"""Builds the status document of `ftrun status`.

Runs in:  agent: `look` and `publish` in the main thread, which owns the data of the node's status;
          `document` and `of_node` in any other thread, which reads the published value.
Takes in: the components of a `RunView`; the published `BrainStatus`.
Gives:    one JSON document; docs/operations.md describes it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from ftrun import clock
from ftrun.agent.cluster.brain_status import BrainStatus, brain_status
from ftrun.agent.publish.incident_status import last_collectives
from ftrun.agent.publish.published import Published
from ftrun.agent.publish.pulse import blocked_s, committed_in, most
from ftrun.agent.publish.run_view import RunView
from ftrun.journal import FILE_NAME
from ftrun.monitor.numerics import finite
from ftrun.monitor.page_values import quantile_s
from ftrun.recovery.supervisor import STOPPING, SupervisorState
from ftrun.urls import without_password
from ftrun.wire.shared_memory.arena import SlotState, read_shape, read_slot_headers
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage

STALE_S = 2.0
"""If the status is at least this old, the summary line shows its age."""


class StatusDesk:
    """Status of one node, readable in all threads."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._own = Published(self._build, wake=run.wake)

    # --- main thread --------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        self._own.look(now_s)

    def publish(self) -> None:
        """Publish the status now; called before the loop blocks for long."""
        self._own.publish()

    def _build(self) -> bytes:
        run = self._run
        if run.desk is None:
            brain = brain_status(run.brain, is_alone=True)
        else:
            brain = run.desk.brain.last().value
        return json.dumps(_own_status(run, brain)).encode()

    # --- any other thread ---------------------------------------------------------------------

    def document(self) -> bytes:
        """Status of this node; in a run over several nodes, merged with the leader's status.

        Raises:
            PeerError: no status was published yet.
        """
        nodes, desk = self._run.spec.nodes, self._run.desk
        # Read the control loop's status first, because the node's status is built from it.
        cluster = desk.whole() if desk is not None else None
        document = self._read()
        if cluster is not None and nodes is not None:
            _add_cluster(document, cluster, has_secret=nodes.secret_file is not None)
        name_age(document)
        return json.dumps(document).encode()

    def of_node(self) -> dict[str, Any]:
        """Status of this node without requests to others; with `cluster` on a leader of several.

        Raises:
            PeerError: no status was published yet.
        """
        desk = self._run.desk
        brain = desk.brain.read().value if desk is not None else None
        document = self._read()
        if brain is not None and brain.leads:
            cluster = document["cluster"] = json.loads(brain.cluster)
            is_safe = bool(cluster.get("survives")) and not cluster.get("unprotected")
            document["snapshots"]["protected"] = is_safe
        return document

    def _read(self) -> dict[str, Any]:
        reading = self._own.read()
        return {**json.loads(reading.value), "age_s": reading.age_s}


def name_age(document: dict[str, Any]) -> None:
    """Add the age of the node's own status to the summary line if it is stale."""
    if document["age_s"] >= STALE_S:
        document["verdict"] += (
            f"; node's own figures are {document['age_s']:.0f} s old, its agent is busy"
        )


def _own_status(run: RunView, brain: BrainStatus) -> dict[str, Any]:
    now_s = clock.now_s()
    snapshots = _snapshots(run, now_s)
    ranks = _ranks(run, brain.lateness_s, now_s)
    return {
        "run_id": run.spec.run_id,
        "verdict": _verdict(run, brain, ranks, snapshots),
        "state": _state(run, brain),
        "generation": run.generations.number,
        "uptime_s": now_s - run.started_s,
        "script": run.spec.script,
        "restarts": [
            {
                "generation": restart.generation,
                "cause": restart.cause,
                "at_s_ago": now_s - restart.noticed_s,
                "restored": restart.restored,
                "phases_s": restart.phases_s,
                "repeated": _repeated(run, restart.generation),
            }
            for restart in run.generations.restarts
        ],
        **json.loads(brain.document),
        "warnings": [warning] if (warning := run.generations.repeats.warning) else [],
        "ranks": ranks,
        "snapshots": snapshots,
        "checkpoint": _checkpoint(run, now_s),
        "processes": {
            "agent": os.getpid(),
            "zygote": run.zygote.child.pid if run.zygote and run.zygote.child else None,
            "smp": run.smp.child.pid if run.smp.child else None,
        },
        "metrics": run.onlookers.metrics_address if run.onlookers is not None else None,
        "journal": f"{run.spec.log_folder}/{FILE_NAME}",
    }


def _add_cluster(document: dict[str, Any], cluster: dict[str, Any], *, has_secret: bool) -> None:
    """Merge the leader's status into this node's document; the leader's values take precedence."""
    document["cluster"] = cluster
    document["authenticated"] = has_secret
    warning = "" if has_secret else "; UNAUTHENTICATED"
    document["verdict"] = f"{cluster['verdict']}{warning}"
    document["state"] = cluster["state"]
    document["life"] = cluster.get("life")
    document["incidents"] = cluster.get("incidents") or []
    # The leader also has restarts under earlier agents. This node may have measured its own phases
    # of each restart, which take precedence.
    own = {restart["generation"]: restart for restart in document["restarts"]}
    whole = {restart["generation"]: restart for restart in cluster.get("restarts") or ()}
    document["restarts"] = [
        {**whole.get(number, {}), **own.get(number, {})} for number in sorted({*whole, *own})
    ]
    document["warnings"] = cluster.get("warnings") or document["warnings"]
    # The values of this node's ranks cover only a part of the run, and a spare has no ranks.
    snapshots = document["snapshots"]
    snapshots["protected"] = bool(cluster.get("survives")) and not cluster.get("unprotected")
    snapshots["note"] = cluster.get("unprotected") or snapshots["note"]
    nodes = cluster.get("nodes") or []
    everywhere = {rank["rank"]: rank for node in nodes for rank in node["ranks"]}
    for rank in document["ranks"]:
        late_s = everywhere.get(rank["rank"], {}).get("lateness_s")
        rank["lateness_s"] = rank["lateness_s"] if late_s is None else late_s


def _repeated(run: RunView, generation: int) -> dict[str, Any] | None:
    """Result of comparing the steps that this generation repeated; None: no result."""
    found = run.generations.repeats.results.get(generation)
    return found.as_json() if found is not None else None


def _state(run: RunView, brain: BrainStatus) -> str:
    state = brain.state
    if state in STOPPING:
        return "stopping"
    if state is SupervisorState.RUNNING:
        return "running"
    if state is SupervisorState.ENDED:
        return "ending"
    return "restarting" if run.generations.restarts or run.smp.was_adopted else "starting"


def _verdict(
    run: RunView, brain: BrainStatus, ranks: list[dict[str, Any]], snapshots: dict[str, Any]
) -> str:
    if snapshots["unprotected"]:
        protection = f"UNPROTECTED: {snapshots['unprotected']}"
    elif snapshots["step"] is not None:
        protection = (
            f"a killed rank costs the steps since {snapshots['step']} "
            f"({snapshots['age_s']:.1f} s ago)"
        )
    elif (held := _held_step(run)) is not None:
        protection = f"snapshots up to step {held} are in memory"
    else:
        protection = "no snapshot yet"
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    at = f"at step {max(steps)}" if steps else "before the first step"
    if brain.suspicion is not None:
        silent_s, text = brain.suspicion
        return f"NO STEP for {silent_s:.0f} s {at}: {text}; {protection}"
    number = run.generations.number
    generation = f", generation {number}" if number >= 0 else ""
    return f"{_state(run, brain)} {at}{generation}; {protection}"


def _held_step(run: RunView) -> int | None:
    """Newest step in the memory kept from an earlier agent; None: there is none."""
    return max((offer.step for offer in run.smp.memory.offers()), default=None)


def _ranks(run: RunView, lateness_s: Mapping[int, float], now_s: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    calls = last_collectives(run.eyes.views)
    for handle in run.workers.handles:
        page = handle.place.page
        beat_ns = page.get(HeartbeatField.BEAT_NS)
        times = page.step_times
        found.append(
            {
                "rank": handle.place.rank,
                "pid": handle.pid,
                "state": handle.state,
                "step": page.get(HeartbeatField.STEP) if beat_ns else None,
                "beat_age_s": now_s - beat_ns / 1e9 if beat_ns else None,
                "phase": page.phase,
                "loss": finite(page.loss) if page.get(HeartbeatField.LOSS) else None,
                "start": handle.start,
                "step_p50_s": quantile_s(times, 0.5) or None,
                "step_p99_s": quantile_s(times, 0.99) or None,
                "lateness_s": lateness_s.get(handle.place.rank),
                "last_collective": calls.get(handle.place.rank),
            }
        )
    return found


def _snapshots(run: RunView, now_s: float) -> dict[str, Any]:
    pages = [place.page for place in run.workers.places]
    commands = run.workers.commands
    committed = committed_in(commands)
    lost = [page.note for page in pages if page.get(HeartbeatField.UNPROTECTED)]
    notes = [*lost, *(page.note for page in pages if page.note)]
    attached = any(page.get(HeartbeatField.ATTACHED) for page in pages)
    why = run.caretaker.smp_given_up or (lost[0] if lost else "")
    # ftrun.dcp takes snapshots without `attach`.
    is_bare = not attached and committed is None
    if is_bare and not why and any(page.get(HeartbeatField.BEAT_NS) for page in pages):
        why = "the script does not call ftrun.attach"
    return {
        "protected": committed is not None and not why,
        "unprotected": why,
        "note": notes[0] if notes else "",
        "step": committed[1] if committed else None,
        "generation": committed[0] if committed else None,
        "age_s": _age_s(run, committed, now_s) if committed else None,
        "bytes_per_rank": most(pages, HeartbeatField.IMAGE_BYTES),
        "memory_bytes": _memory_bytes(run) + _for_others_bytes(run),
        "for_others_bytes": _for_others_bytes(run),
        "taken": most(pages, HeartbeatField.SEALED_COUNT),
        "skipped": most(pages, HeartbeatField.SKIPPED_COUNT),
        "discarded": most(pages, HeartbeatField.DISCARDED_COUNT),
        "blocked_s": blocked_s(pages),
        "every": _every(run, commands, furthest=most(pages, HeartbeatField.STEP)),
    }


def _every(run: RunView, commands: SharedPage | None, *, furthest: int) -> int:
    """Present snapshot interval in steps; 0: a new interval is set but not yet in effect."""
    every = run.spec.profile.snapshot.every
    if isinstance(every, int):
        return every
    announced = commands.get(CommandField.SNAPSHOT_EVERY) if commands else 0
    if commands and announced > 0 and furthest <= commands.get(CommandField.EVERY_FROM_STEP):
        return 0
    return max(1, announced)


def _age_s(run: RunView, committed: tuple[int, int], now_s: float) -> float:
    """Seconds since the last local rank sealed the committed version."""
    sealed_ns = 0
    for fds in run.smp.memory.arenas.values():
        for fd in fds:
            sealed_ns = max(
                [sealed_ns]
                + [
                    header.sealed_ns
                    for header in read_slot_headers(fd)
                    if header.state is SlotState.SEALED
                    and (header.generation, header.step) == committed
                ]
            )
    return max(0.0, now_s - sealed_ns / 1e9) if sealed_ns else 0.0


def _memory_bytes(run: RunView) -> int:
    return sum(read_shape(fd).total_bytes for fds in run.smp.memory.arenas.values() for fd in fds)


def _for_others_bytes(run: RunView) -> int:
    """Bytes of mirrors and parity that this node stores for its protection group."""
    return sum(os.fstat(fd).st_size for fd in run.smp.memory.vaults.values())


def _checkpoint(run: RunView, now_s: float) -> dict[str, Any] | None:
    settings = run.spec.profile.checkpoint
    if not settings.directory:
        return None
    written = run.smp.last_checkpoint
    return {
        "directory": without_password(settings.directory),
        "step": written.step if written else None,
        "age_s": now_s - run.smp.last_checkpoint_s if written else None,
        "not_written": run.caretaker.not_written,
    }
