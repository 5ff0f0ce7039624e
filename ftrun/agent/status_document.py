"""The state of a run as `ftrun status` shows it.

Runs in:  agent, control thread: only reads, and only what is replaced whole or written by the
          word.
Takes in: the parts of a `RunLoop`.
Gives:    one JSON document; docs/operations.md describes it.
"""

import json
import os
from typing import Any

from ftrun import clock
from ftrun.agent.run_loop import RunLoop
from ftrun.journal import FILE_NAME
from ftrun.recovery.supervisor import STOPPING, State
from ftrun.wire.arena import SlotState, read_shape, read_slot_headers
from ftrun.wire.pages import Beat, Command, Page


def status_document(run: RunLoop) -> bytes:
    now_s = clock.now_s()
    snapshots = _snapshots(run, now_s)
    ranks = _ranks(run, now_s)
    document: dict[str, Any] = {
        "run_id": run.spec.run_id,
        "verdict": _verdict(run, ranks, snapshots),
        "state": _state(run),
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
            }
            for restart in list(run.generations.restarts)
        ],
        "restart_budget": {
            "used": run.brain.oversight.supervisor.budget.used(now_s=now_s),
            "limit": run.brain.oversight.supervisor.budget.limit,
            "window_s": run.brain.oversight.supervisor.budget.window_s,
        },
        "ranks": ranks,
        "snapshots": snapshots,
        "checkpoint": _checkpoint(run, now_s),
        "processes": {
            "agent": os.getpid(),
            "zygote": run.zygote.child.pid if run.zygote and run.zygote.child else None,
            "smp": run.smp.child.pid if run.smp.child else None,
        },
        "journal": f"{run.spec.log_folder}/{FILE_NAME}",
    }
    if run.desk is not None and run.spec.nodes is not None:
        cluster = document["cluster"] = run.desk.whole()
        document["authenticated"] = run.spec.nodes.secret_file is not None
        warning = "" if document["authenticated"] else "; UNAUTHENTICATED"
        document["verdict"] = f"{cluster['verdict']}{warning}"
        document["state"] = cluster["state"]
        # What a node's own ranks say is a part of it; a spare's have nothing to say.
        snapshots["protected"] = bool(cluster.get("survives")) and not cluster.get("unprotected")
        snapshots["note"] = cluster.get("unprotected") or snapshots["note"]
    return json.dumps(document).encode()


def _state(run: RunLoop) -> str:
    state = run.brain.oversight.supervisor.state
    if state in STOPPING:
        return "stopping"
    if state is State.RUNNING:
        return "running"
    if state is State.ENDED:
        return "ending"
    return "restarting" if run.generations.restarts else "starting"


def _verdict(run: RunLoop, ranks: list[dict[str, Any]], snapshots: dict[str, Any]) -> str:
    if snapshots["unprotected"]:
        protection = f"UNPROTECTED: {snapshots['unprotected']}"
    elif snapshots["step"] is not None:
        protection = (
            f"a killed rank costs the steps since {snapshots['step']} "
            f"({snapshots['age_s']:.1f} s ago)"
        )
    else:
        protection = "no snapshot yet"
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    at = f"at step {max(steps)}" if steps else "before the first step"
    return f"{_state(run)} {at}, generation {run.generations.number}; {protection}"


def _ranks(run: RunLoop, now_s: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for handle in run.workers.handles:
        page = handle.place.page
        beat_ns = page.get(Beat.BEAT_NS)
        found.append(
            {
                "rank": handle.place.rank,
                "pid": handle.pid,
                "state": handle.state,
                "step": page.get(Beat.STEP) if beat_ns else None,
                "beat_age_s": now_s - beat_ns / 1e9 if beat_ns else None,
                "phase": page.phase,
                "loss": page.loss if page.get(Beat.LOSS) else None,
                "start": handle.start,
            }
        )
    return found


def _snapshots(run: RunLoop, now_s: float) -> dict[str, Any]:
    pages = [place.page for place in run.workers.places]
    commands = run.workers.commands
    committed = _committed(commands)
    notes = [page.note for page in pages if page.note]
    attached = any(page.get(Beat.ATTACHED) for page in pages)
    unprotected = any(page.get(Beat.UNPROTECTED) for page in pages)
    note = notes[0] if notes else ""
    why = run.caretaker.smp_given_up or (note if unprotected else "")
    if not attached and not why and any(page.get(Beat.BEAT_NS) for page in pages):
        why = "the script does not call ftrun.attach"
    return {
        "protected": committed is not None and not why,
        "unprotected": why,
        "note": note,
        "step": committed[1] if committed else None,
        "generation": committed[0] if committed else None,
        "age_s": _age_s(run, committed, now_s) if committed else None,
        "bytes_per_rank": max((page.get(Beat.IMAGE_BYTES) for page in pages), default=0),
        "memory_bytes": _memory_bytes(run) + _for_others_bytes(run),
        "for_others_bytes": _for_others_bytes(run),
        "taken": max((page.get(Beat.SEALED_COUNT) for page in pages), default=0),
        "skipped": max((page.get(Beat.SKIPPED_COUNT) for page in pages), default=0),
        "discarded": max((page.get(Beat.DISCARDED_COUNT) for page in pages), default=0),
        "blocked_s": max((page.get(Beat.BLOCKED_NS) for page in pages), default=0) / 1e9,
        "every": _every(run, commands),
    }


def _every(run: RunLoop, commands: Page | None) -> int:
    every = run.spec.profile.snapshot.every
    if isinstance(every, int):
        return every
    return max(1, commands.get(Command.SNAPSHOT_EVERY)) if commands else 1


def _committed(commands: Page | None) -> tuple[int, int] | None:
    if commands is None or commands.get(Command.COMMITTED_GENERATION) < -1:
        return None
    step = commands.get(Command.COMMITTED_STEP)
    return (commands.get(Command.COMMITTED_GENERATION), step) if step >= 0 else None


def _age_s(run: RunLoop, committed: tuple[int, int], now_s: float) -> float:
    """Since the last rank sealed the committed version."""
    sealed_ns = 0
    for fds in list(run.smp.arenas.values()):
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
        read_shape(fd).total_bytes for fds in list(run.smp.arenas.values()) for fd in list(fds)
    )


def _for_others_bytes(run: RunLoop) -> int:
    """Mirrors and parity that this node keeps for its group."""
    return sum(os.fstat(fd).st_size for fd in list(run.smp.vaults.values()))


def _checkpoint(run: RunLoop, now_s: float) -> dict[str, Any] | None:
    settings = run.spec.profile.checkpoint
    if not settings.directory:
        return None
    written = run.smp.last_checkpoint
    return {
        "directory": settings.directory,
        "step": written.step if written else None,
        "age_s": now_s - run.smp.last_checkpoint_s if written else None,
    }
