"""`ftrun status`: queries the agent, or the SMP if no agent runs.

With --watch it shows a live page on a terminal, and otherwise prints one block per poll. The page
survives an agent that restarts or does not respond for a while.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Annotated

import msgspec
import typer

from ftrun import clock, process_tree
from ftrun.cli.completion import AsJson, RunIdArgument, option
from ftrun.cli.launch.checkpoint_check import LIMIT_S, ask_catalog
from ftrun.cli.runs import FoundRun, RunLiveness, ask, choose, inspect_run
from ftrun.cli.screen.status_page import StyledLine, page
from ftrun.cli.screen.terminal import (
    LiveTerminal,
    show_status,
    show_versions,
    write_json,
    write_plain,
)
from ftrun.cli.screen.text import duration, listed, size
from ftrun.cli.stub import answers
from ftrun.errors import FtrunError, PeerError, UsageError
from ftrun.urls import located
from ftrun.wire.messages.checkpoint import CheckpointInfo
from ftrun.wire.messages.envelope import Refused, StatusReply, StatusRequest
from ftrun.wire.messages.status import (
    ProcessIds,
    SmpStatus,
    SnapshotStatus,
    StatusView,
    VersionState,
    VersionStatus,
    decode_status,
)
from ftrun.wire.transport.channel import Channel

MIN_EVERY_S, MAX_EVERY_S = 0.1, 3600.0
_ANSWER_S = 10.0
_MAX_NAMED = 5
_NO_LIMIT = sys.maxsize  # width and height if stdout is not a terminal

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def _status(
    run_id: RunIdArgument = None,
    as_json: AsJson = False,
    watches: Annotated[bool, option("--watch", "refresh until ^C")] = False,
    every_s: Annotated[float, option("--every", "between two polls", "SECONDS")] = 1.0,
    has_versions: Annotated[
        bool, option("--versions", "each version in memory and on disk, with its state")
    ] = False,
) -> None:
    """Show the state of a run."""
    if watches and as_json:
        raise UsageError("--json and --watch exclude each other: --json prints one document")
    if watches and has_versions:
        raise UsageError("--versions and --watch exclude each other: --versions reads the disk")
    if watches:
        _watch(run_id, every_s=every_s)
        return
    run = choose(run_id, command="status")
    view = status_of(run)
    if has_versions:
        view = with_disk(view, run)
    if as_json:
        write_json(view)
    elif has_versions:
        show_versions(view)
    else:
        show_status(view)


def with_disk(view: StatusView, run: FoundRun) -> StatusView:
    """Adds the checkpoints of this run in its directory to the versions of a status."""
    directory = run.folder.spec_value("profile", "checkpoint", "directory")
    if not directory:
        return view
    where = located(str(directory), cwd=str(run.folder.spec_value("cwd")))
    found = {(one.generation, one.step): one for one in view.versions}
    try:
        checkpoints = ask_catalog("list", where, limit_s=LIMIT_S).checkpoints
    except FtrunError as error:
        typer.echo(f"versions on disk are not shown: {error}", err=True)
        checkpoints = []
    for one in checkpoints:
        if one.run_id not in ("", view.run_id):
            continue
        at = _version_of(one)
        age_s = max(0.0, clock.wall_s() - one.written_s) if one.written_s else None
        known = found.get(at, VersionStatus(*at, (), age_s, one.num_bytes))
        note = f"{one.name}: {'; '.join(one.problems)}" if one.problems else known.note
        new = () if one.problems else (VersionState.PERSISTED,)
        states = tuple(dict.fromkeys((*known.states, *new))) or (VersionState.VOID,)
        found[at] = msgspec.structs.replace(known, states=states, note=note)
    newest_first = tuple(found[at] for at in sorted(found, reverse=True))
    return msgspec.structs.replace(view, versions=newest_first)


def _version_of(one: CheckpointInfo) -> tuple[int, int]:
    """Generation and step; if the index cannot be read, those of the name."""
    named = re.fullmatch(r"step-(\d+)-g(-?\d+)", one.name)
    if one.step < 0 and named is not None:
        return int(named[2]), int(named[1])
    return one.generation, one.step


def status_of(run: FoundRun) -> StatusView:
    """Queries the status of a run; raises a PeerError if the agent does not answer."""
    if run.life is RunLiveness.RUNNING:
        try:
            document = _ask(run.to_agent())
        except PeerError:
            if run.folder.agent_socket.exists():
                raise
        else:
            return decode_status(document, StatusView, source=f"run {run.name}")
    if run.life is RunLiveness.ORPHANED:
        return _orphan(run)
    return _between_agents(run)


def _between_agents(run: FoundRun) -> StatusView:
    """Describes a run whose stub is alive and has not started the first or the next agent yet."""
    try:
        document = _ask(run.to_smp())
    except PeerError:
        document = b"{}"
    smp = decode_status(document, SmpStatus, source=f"the SMP of run {run.name}")
    if not smp.bytes:
        summary = f"STARTING: the launcher (pid {run.stub_pid}) runs, and no agent answers yet"
        return StatusView(run_id=run.run_id, state="starting", summary=summary)
    newest = f"up to step {smp.committed[1]:,} " if smp.committed else ""
    summary = (
        f"RESTARTING: no rank runs. The agent has ended, and the launcher (pid {run.stub_pid}) "
        f"starts another one; {size(smp.bytes)} of snapshots {newest}are in memory"
    )
    return _held_by_smp(run, smp, document, state="restarting", summary=summary)


def _orphan(run: FoundRun) -> StatusView:
    try:
        document = _ask(run.to_smp())
    except PeerError:
        pids = process_tree.left_behind(run.folder.path)
        if not pids or answers(run.folder.smp_socket):
            raise
        return _without_smp(run, pids)
    smp = decode_status(document, SmpStatus, source=f"the SMP of run {run.name}")
    since = "" if smp.orphaned_for_s is None else f" for {duration(smp.orphaned_for_s)}"
    summary = (
        f"ORPHANED{since}: the launcher has ended and the snapshots are still in memory. "
        f"`ftrun --run-id {run.run_id} ...` with the same script resumes, `ftrun stop {run.name}` "
        "frees them"
    )
    return _held_by_smp(run, smp, document, state="orphaned", summary=summary)


def _without_smp(run: FoundRun, pids: Sequence[int]) -> StatusView:
    names = [f"{pid} ({process_tree.name_of(pid)})" for pid in pids]
    summary = (
        "ORPHANED: the launcher and the SMP have ended, so no snapshots are in memory. Processes "
        f"of the run that have not ended: {listed(names, _MAX_NAMED)}. `ftrun stop {run.name}` "
        f"ends them, and so does a start with `--run-id {run.run_id}`"
    )
    return StatusView(run_id=run.run_id, state="orphaned", summary=summary, script=_script_of(run))


def _script_of(run: FoundRun) -> str:
    return str(run.folder.spec_value("script") or "")


def _held_by_smp(
    run: FoundRun, smp: SmpStatus, document: bytes, *, state: str, summary: str
) -> StatusView:
    generation, step = smp.committed or (None, None)
    states = (VersionState.COMMITTED,)
    versions = (VersionStatus(*smp.committed, states),) if smp.committed else ()
    return StatusView(
        run_id=run.run_id,
        state=state,
        summary=summary,
        script=_script_of(run),
        snapshots=SnapshotStatus(
            protected=step is not None, generation=generation, step=step, memory_bytes=smp.bytes
        ),
        processes=ProcessIds(smp=smp.pid),
        smp=msgspec.json.decode(document),
        versions=versions,
    )


def _ask(channel: Channel) -> bytes:
    body = ask(channel, StatusRequest(), StatusReply, deadline_s=_ANSWER_S)
    if isinstance(body, Refused):
        raise PeerError(f"{channel.peer} gave no status: {body.reason}")
    return body.document


# --- ftrun status --watch ---------------------------------------------------------------------


def _watch(run_id: str | None, *, every_s: float) -> None:
    if not MIN_EVERY_S <= every_s <= MAX_EVERY_S:
        raise UsageError(
            f"--every takes {MIN_EVERY_S} to {MAX_EVERY_S:.0f} seconds, and is {every_s:g}"
        )
    run = choose(run_id, command="status --watch")
    signal.signal(signal.SIGTERM, _leave)
    poller = StatusPoller(run)
    with suppress(KeyboardInterrupt):
        (_on_terminal if sys.stdout.isatty() else _plain)(poller, every_s)
        write_plain(f"run {run.name}: the run has ended. Last status: {poller.summary}")


class StatusPoller:
    """Polls the status of one run."""

    def __init__(self, run: FoundRun) -> None:
        self.summary = "no status was received"
        self._run = run
        self._before: tuple[float, int] | None = None

    def next(self, width: int, height: int) -> list[StyledLine] | None:
        """Returns the current page, or None if the run has ended."""
        run = inspect_run(self._run.folder)
        if run.life is RunLiveness.GONE:
            return None
        try:
            view = status_of(run)
        except (FtrunError, OSError) as error:
            if inspect_run(self._run.folder).life is RunLiveness.GONE:
                return None
            view = StatusView(run_id=run.run_id, state="starting", summary=f"no answer: {error}")
        if view.uptime_s is not None:  # an agent answered
            self.summary = view.summary
        return page(view, width=width, height=height, steps_per_s=self._rate(view))

    def _rate(self, view: StatusView) -> float | None:
        steps = [rank.step for rank in view.all_ranks if rank.step is not None]
        if not steps or view.uptime_s is None:
            self._before = None
            return None
        before, self._before = self._before, (view.uptime_s, max(steps))
        if before is None or view.uptime_s <= before[0] or max(steps) < before[1]:
            return None
        return (max(steps) - before[1]) / (view.uptime_s - before[0])


def _on_terminal(poller: StatusPoller, every_s: float) -> None:
    with LiveTerminal() as screen:
        signal.signal(signal.SIGTSTP, lambda _number, _frame: _suspend_screen(screen))
        while (lines := poller.next(*screen.size)) is not None:
            screen.show(lines)
            clock.sleep(every_s)


def _plain(poller: StatusPoller, every_s: float) -> None:
    while (lines := poller.next(_NO_LIMIT, _NO_LIMIT)) is not None:
        try:
            write_plain("\n".join([*(line.text for line in lines), ""]))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise KeyboardInterrupt from None
        clock.sleep(every_s)


def _suspend_screen(screen: LiveTerminal) -> None:
    """Handles SIGTSTP (^Z): restores the terminal, stops, and takes the terminal again."""
    screen.pause()
    os.kill(os.getpid(), signal.SIGSTOP)
    screen.resume()


def _leave(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM as ^C, so that every `finally` runs and the terminal is restored."""
    raise KeyboardInterrupt
