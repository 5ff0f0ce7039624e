"""Implements `ftrun status`: queries the agent, or the SMP if no agent runs.

Runs in: cli.
"""

import json
from typing import Any

from ftrun.cli.runs import FoundRun, RunLiveness, choose
from ftrun.cli.screen import terminal as render
from ftrun.errors import ExitCode, PeerError, ProtocolError
from ftrun.wire.messages.envelope import Refused, StatusReply, StatusRequest
from ftrun.wire.transport.channel import Channel

_ANSWER_S = 10.0


def status(run_id: str | None, *, as_json: bool) -> int:
    document = document_of(choose(run_id, command="status"))
    if as_json:
        render.write_plain(json.dumps(document, indent=1))
    else:
        render.show_status(document)
    return ExitCode.DONE


def document_of(run: FoundRun) -> dict[str, Any]:
    if run.life is RunLiveness.RUNNING:
        try:
            return _ask(run.to_agent())
        except PeerError:
            if run.folder.agent_socket.exists():
                raise
    if run.life is RunLiveness.ORPHANED:
        return _orphan(run)
    return _between_agents(run)


def _between_agents(run: FoundRun) -> dict[str, Any]:
    """Describes a run whose launcher is alive but whose agent does not respond.

    Either no agent has started yet, or the stub is about to start the next one.
    """
    try:
        said = _ask(run.to_smp())
    except PeerError:
        said = {}
    if not said.get("bytes"):
        return {
            "run_id": run.run_id,
            "state": "starting",
            "verdict": f"STARTING: the launcher (pid {run.stub_pid}) has no agent that answers yet",
        }
    committed = said.get("committed")
    newest = f"up to step {committed[1]} " if committed else ""
    verdict = (
        f"RESTARTING: no rank runs. ftrun's agent has ended, and the launcher (pid {run.stub_pid}) "
        f"starts another; {render.size(said['bytes'])} of snapshots {newest}are in memory"
    )
    return _held_by_smp(run, said, state="restarting", verdict=verdict)


def _orphan(run: FoundRun) -> dict[str, Any]:
    said = _ask(run.to_smp())
    age_s = said.get("orphaned_for_s")
    since = "" if age_s is None else f" for {render.duration(float(age_s))}"
    resume = f"ftrun --run-id {run.run_id} ..."
    verdict = (
        f"ORPHANED{since}: the launcher is gone and the snapshots are still in memory. "
        f"`{resume}` with the same script resumes, `ftrun stop {run.name}` frees them"
    )
    return _held_by_smp(run, said, state="orphaned", verdict=verdict)


def _held_by_smp(
    run: FoundRun, said: dict[str, Any], *, state: str, verdict: str
) -> dict[str, Any]:
    try:
        spec = json.loads(run.folder.spec.read_text())
    except (OSError, ValueError):
        spec = {}
    committed = said.get("committed") or [None, None]
    return {
        **said,
        "run_id": run.run_id,
        "state": state,
        "verdict": verdict,
        "script": spec.get("script", ""),
        "snapshots": {
            "generation": committed[0],
            "step": committed[1],
            "memory_bytes": said.get("bytes"),
        },
        "processes": {"smp": said.get("pid")},
    }


def _ask(channel: Channel) -> dict[str, Any]:
    try:
        body = channel.ask(StatusRequest(), deadline_s=_ANSWER_S).body
    finally:
        channel.close()
    match body:
        case StatusReply(document=document):
            found: dict[str, Any] = json.loads(document)
            return found
        case Refused(why=why):
            raise ProtocolError(f"{channel.peer} does not tell: {why}")
        case _:
            raise ProtocolError(f"{channel.peer} answered with a {type(body).__name__}")
