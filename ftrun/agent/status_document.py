"""The state of a run as `ftrun status` shows it.

Runs in:  agent, control thread: only reads, and only what is replaced whole or written by the
          word.
Takes in: the parts of a `RunLoop`.
Gives:    one JSON document; docs/operations.md describes it.
"""

import json
import os
from contextlib import suppress
from typing import Any

from ftrun import clock
from ftrun.agent.incident_status import incidents_of, last_collectives, lateness_of, life_of
from ftrun.agent.pulse import blocked_s, committed_in, most
from ftrun.agent.run_loop import RunLoop
from ftrun.journal import FILE_NAME
from ftrun.monitor.numbers import finite
from ftrun.monitor.step_times import quantile_s
from ftrun.recovery.supervisor import STOPPING, State
from ftrun.urls import without_password
from ftrun.wire.arena import SlotState, read_shape, read_slot_headers
from ftrun.wire.pages import Beat, Command, Page


def status_document(run: RunLoop) -> bytes:
    """What this node knows, and on several nodes what the lead knows of all of them."""
    document = own_status(run)
    if run.desk is not None and run.spec.nodes is not None:
        _add_cluster(document, run.desk.whole(), has_secret=run.spec.nodes.secret_file is not None)
    return json.dumps(document).encode()


def own_status(run: RunLoop) -> dict[str, Any]:
    """What is known on this node; asks no other."""
    now_s = clock.now_s()
    snapshots = _snapshots(run, now_s)
    ranks = _ranks(run, now_s)
    leads = run.brain.leads
    return {
        "run_id": run.spec.run_id,
        "verdict": _verdict(run, ranks, snapshots),
        "state": _state(run),
        "life": life_of(run.brain) if leads else None,
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
            for restart in list(run.generations.restarts)
        ],
        "restart_budget": {
            "used": run.brain.oversight.supervisor.budget.used(now_s=now_s),
            "limit": run.brain.oversight.supervisor.budget.limit,
            "window_s": run.brain.oversight.supervisor.budget.window_s,
        },
        "incidents": incidents_of(run.brain, now_s=now_s) if leads else [],
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
    """Let what the lead knows stand over what this node knows by itself."""
    document["cluster"] = cluster
    document["authenticated"] = has_secret
    warning = "" if has_secret else "; UNAUTHENTICATED"
    document["verdict"] = f"{cluster['verdict']}{warning}"
    document["state"] = cluster["state"]
    document["life"] = cluster.get("life")
    document["incidents"] = cluster.get("incidents") or []
    document["warnings"] = cluster.get("warnings") or document["warnings"]
    # What a node's own ranks say is a part of it; a spare's have nothing to say.
    snapshots = document["snapshots"]
    snapshots["protected"] = bool(cluster.get("survives")) and not cluster.get("unprotected")
    snapshots["note"] = cluster.get("unprotected") or snapshots["note"]
    nodes = cluster.get("nodes") or []
    whole = {rank["rank"]: rank for node in nodes for rank in node["ranks"]}
    for rank in document["ranks"]:
        late_s = whole.get(rank["rank"], {}).get("lateness_s")
        rank["lateness_s"] = rank["lateness_s"] if late_s is None else late_s


def _repeated(run: RunLoop, generation: int) -> dict[str, Any] | None:
    """What the comparison of the steps that this generation repeated has shown."""
    found = run.generations.repeats.results.get(generation)
    return found.as_json() if found is not None else None


def _state(run: RunLoop) -> str:
    state = run.brain.oversight.supervisor.state
    if state in STOPPING:
        return "stopping"
    if state is State.RUNNING:
        return "running"
    if state is State.ENDED:
        return "ending"
    return "restarting" if run.generations.restarts or run.smp.was_adopted else "starting"


def _verdict(run: RunLoop, ranks: list[dict[str, Any]], snapshots: dict[str, Any]) -> str:
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
    incidents = run.brain.oversight.incidents
    if run.brain.leads and incidents.is_suspected and incidents.open is not None:
        silent_s = max(0.0, clock.now_s() - incidents.open.began_s)
        return f"NO STEP for {silent_s:.0f} s {at}: {incidents.open.text}; {protection}"
    number = run.generations.number
    generation = f", generation {number}" if number >= 0 else ""
    return f"{_state(run)} {at}{generation}; {protection}"


def _held_step(run: RunLoop) -> int | None:
    """The newest that the memory of an earlier agent holds; None: it holds nothing."""
    with suppress(OSError, RuntimeError):  # the main thread closes what is replaced
        return max((offer.step for offer in run.smp.memory.offers()), default=None)
    return None


def _ranks(run: RunLoop, now_s: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lateness_s = lateness_of(run.brain)
    calls = last_collectives(run.eyes.views)
    for handle in run.workers.handles:
        page = handle.place.page
        beat_ns = page.get(Beat.BEAT_NS)
        times = page.step_times
        found.append(
            {
                "rank": handle.place.rank,
                "pid": handle.pid,
                "state": handle.state,
                "step": page.get(Beat.STEP) if beat_ns else None,
                "beat_age_s": now_s - beat_ns / 1e9 if beat_ns else None,
                "phase": page.phase,
                "loss": finite(page.loss) if page.get(Beat.LOSS) else None,
                "start": handle.start,
                "step_p50_s": quantile_s(times, 0.5) or None,
                "step_p99_s": quantile_s(times, 0.99) or None,
                "lateness_s": lateness_s.get(handle.place.rank),
                "last_collective": calls.get(handle.place.rank),
            }
        )
    return found


def _snapshots(run: RunLoop, now_s: float) -> dict[str, Any]:
    pages = [place.page for place in run.workers.places]
    commands = run.workers.commands
    committed = committed_in(commands)
    lost = [page.note for page in pages if page.get(Beat.UNPROTECTED)]
    notes = [*lost, *(page.note for page in pages if page.note)]
    attached = any(page.get(Beat.ATTACHED) for page in pages)
    why = run.caretaker.smp_given_up or (lost[0] if lost else "")
    # ftrun.dcp takes snapshots without it.
    is_bare = not attached and committed is None
    if is_bare and not why and any(page.get(Beat.BEAT_NS) for page in pages):
        why = "the script does not call ftrun.attach"
    return {
        "protected": committed is not None and not why,
        "unprotected": why,
        "note": notes[0] if notes else "",
        "step": committed[1] if committed else None,
        "generation": committed[0] if committed else None,
        "age_s": _age_s(run, committed, now_s) if committed else None,
        "bytes_per_rank": most(pages, Beat.IMAGE_BYTES),
        "memory_bytes": _memory_bytes(run) + _for_others_bytes(run),
        "for_others_bytes": _for_others_bytes(run),
        "taken": most(pages, Beat.SEALED_COUNT),
        "skipped": most(pages, Beat.SKIPPED_COUNT),
        "discarded": most(pages, Beat.DISCARDED_COUNT),
        "blocked_s": blocked_s(pages),
        "every": _every(run, commands, furthest=most(pages, Beat.STEP)),
    }


def _every(run: RunLoop, commands: Page | None, *, furthest: int) -> int:
    """Steps between two snapshots now; 0: another interval is announced, and not yet begun."""
    every = run.spec.profile.snapshot.every
    if isinstance(every, int):
        return every
    announced = commands.get(Command.SNAPSHOT_EVERY) if commands else 0
    if commands and announced > 0 and furthest <= commands.get(Command.EVERY_FROM_STEP):
        return 0
    return max(1, announced)


def _age_s(run: RunLoop, committed: tuple[int, int], now_s: float) -> float:
    """Since the last rank sealed the committed version."""
    sealed_ns = 0
    for fds in list(run.smp.memory.arenas.values()):
        for fd in list(fds):
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


def _memory_bytes(run: RunLoop) -> int:
    return sum(
        read_shape(fd).total_bytes
        for fds in list(run.smp.memory.arenas.values())
        for fd in list(fds)
    )


def _for_others_bytes(run: RunLoop) -> int:
    """Mirrors and parity that this node keeps for its group."""
    return sum(os.fstat(fd).st_size for fd in list(run.smp.memory.vaults.values()))


def _checkpoint(run: RunLoop, now_s: float) -> dict[str, Any] | None:
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
