"""`ftrun stop`: ends a run as SIGTERM does, or frees the memory of a lost run."""

import fcntl
import os

import typer

from ftrun import clock, process_tree
from ftrun.cli import runs
from ftrun.cli.completion import RunIdArgument
from ftrun.cli.screen import terminal as render
from ftrun.cli.stub import answers
from ftrun.errors import FtrunError, PeerTimeout, ProtocolError
from ftrun.wire.messages.envelope import Done, Refused, StopRequest

_ANSWER_S = 10.0
_SPARE_S = 20.0  # seconds beyond the run's grace, to finish a last checkpoint and remove the folder
_POLL_S = 0.05
_DEFAULT_GRACE_S = 30.0

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def stop(run_id: RunIdArgument = None) -> None:
    """Stop a run, or free the memory that a lost run still holds."""
    runs.sweep()
    run = runs.choose(run_id, command="stop")
    if run.life is runs.RunLiveness.ORPHANED:
        _free_orphan(run)
        render.write_plain(
            f"run {run.name}: the processes of the lost run have ended, and its memory is free"
        )
        return
    given = run.folder.spec_value("profile", "stop", "grace_s")
    limit_s = (given if isinstance(given, int | float) else _DEFAULT_GRACE_S) + _SPARE_S
    give_up_s = clock.now_s() + limit_s
    # A run between two agents is STARTING.
    while (life := runs.inspect_run(run.folder).life) is runs.RunLiveness.STARTING:
        _wait(run, give_up_s, limit_s)
    if life is runs.RunLiveness.RUNNING:
        body = runs.ask(run.to_agent(), StopRequest(), Done, deadline_s=_ANSWER_S)
        if isinstance(body, Refused):
            raise FtrunError(f"run {run.name} is not stopped: {body.reason}")
    while run.folder.path.exists():
        _wait(run, give_up_s, limit_s)
    render.write_plain(f"run {run.name} is stopped")


def _wait(run: runs.FoundRun, give_up_s: float, limit_s: float) -> None:
    if clock.now_s() > give_up_s:
        raise PeerTimeout(peer=f"run {run.name}", waited_s=limit_s)
    clock.sleep(_POLL_S)


def _free_orphan(run: runs.FoundRun) -> None:
    """Holds the run's lock, so that no new launcher takes over memory that is about to be freed."""
    lock_fd = os.open(run.folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ProtocolError(f"run {run.name} has just been resumed; try again") from None
    else:
        if stuck := process_tree.end_left_behind(run.folder.path):
            found = "; ".join(map(process_tree.explain_stuck, stuck))
            raise FtrunError(
                f"run {run.name}: {found}. Its snapshots are kept; try again when the process has "
                "ended"
            )
        if answers(run.folder.smp_socket) and not runs.shut_down_smp(run.folder):
            raise PeerTimeout(peer="the SMP", waited_s=_ANSWER_S)
        run.folder.remove()
    finally:
        os.close(lock_fd)
