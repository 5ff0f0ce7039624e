"""`ftrun drain`: has nodes leave a run, each after a spare has taken its ranks."""

import signal
from types import FrameType
from typing import Annotated

import typer

from ftrun import clock
from ftrun.cli import runs
from ftrun.cli.completion import RunIdArgument
from ftrun.cli.screen.terminal import write_plain
from ftrun.errors import FtrunError, PeerError, PeerTimeout, UsageError
from ftrun.wire.messages.envelope import (
    Done,
    DrainRequest,
    Refused,
    StatusReply,
    StatusRequest,
)
from ftrun.wire.messages.status import ClusterStatus, StatusView, decode_status, drain_refusal

_ANSWER_S = 10.0
_POLL_S = 0.1
LIMIT_S = 120.0
"""Until a node has left and its ranks have made a step on another one."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def drain(
    node_id: Annotated[
        str | None, typer.Argument(metavar="NODE", help="as `ftrun status` names it")
    ] = None,
    run_id: RunIdArgument = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="each node that runs ranks now, one after the other")
    ] = False,
    pause: Annotated[
        float,
        typer.Option(metavar="S", min=0.0, help="with --all: seconds between two nodes"),
    ] = 0.0,
    wait: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0.0,
            help="with --all: longest wait for the next free spare, such as the repaired node",
        ),
    ] = 600.0,
) -> None:
    """Replace a node by a free spare at a step boundary; ftrun then ends on the node.

    With --all each node is replaced once, for example to update all of them: start ftrun again on
    a node when it is ready, and it becomes the next spare. ^C ends the command between two nodes.
    """
    if is_all:
        run_id, node_id = run_id or node_id, None
    elif node_id is None:
        raise UsageError("name a node, or give --all")
    run = runs.choose(run_id, command="drain --all" if is_all else f"drain {node_id}")
    if run.life is not runs.RunLiveness.RUNNING:
        raise FtrunError(f"run {run.name} is {run.life.value}: no agent answers")
    if node_id is not None:
        write_plain(_replace(run, node_id))
        return
    _replace_all(run, pause_s=pause, wait_s=wait)


class _Interrupt:
    """^C is noted, and ends the command after the node in progress; a second one at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(signal.SIGINT, self._before)
        write_plain("the node in progress is completed first; ^C again ends at once")


def _replace_all(run: runs.FoundRun, *, pause_s: float, wait_s: float) -> None:
    cluster = _cluster(run)
    members = [node.node_id for node in cluster.nodes if node.role == "member"]
    # The agent that answers is the last one, and the leader the one before it: another leader
    # follows, and the orders of one leader are the surest.
    members.sort(key=lambda one: (one == cluster.answered_by, one == cluster.leader))
    interrupt = _Interrupt()
    for done, node_id in enumerate(members):
        if done:
            _pause(interrupt, pause_s)
        if not interrupt.is_requested:
            _await_spare(run, node_id, wait_s, interrupt)
        if interrupt.is_requested:
            left = ", ".join(members[done:])
            raise FtrunError(f"{done} of {len(members)} nodes are replaced; not replaced: {left}")
        text = _replace(run, node_id)
        write_plain(f"{_bar(done + 1, len(members))} {text}")


def _bar(done: int, total: int) -> str:
    return f"[{'#' * done}{'.' * (total - done)}] {done}/{total}"


def _pause(interrupt: _Interrupt, pause_s: float) -> None:
    until_s = clock.now_s() + pause_s
    while clock.now_s() < until_s and not interrupt.is_requested:
        clock.sleep(_POLL_S)


def _await_spare(run: runs.FoundRun, node_id: str, wait_s: float, interrupt: _Interrupt) -> None:
    """Wait for a free spare. Raises FtrunError: there is none within `wait_s`."""
    give_up_s = clock.now_s() + wait_s
    is_announced = False
    while refused := drain_refusal(_cluster(run), node_id):
        if clock.now_s() > give_up_s:
            raise FtrunError(f"{refused} (waited {wait_s:g} s)")
        if not is_announced:
            write_plain(f"waiting for a spare: {refused}")
            is_announced = True
        if interrupt.is_requested:
            return
        clock.sleep(_POLL_S)


def _replace(run: runs.FoundRun, node_id: str) -> str:
    """Drain one node; return what has happened, in words."""
    before = _cluster(run)
    had_ranks = any(one.node_id == node_id and one.role == "member" for one in before.nodes)
    started_s = clock.now_s()
    body = runs.ask(run.to_agent(), DrainRequest(node_id), Done, deadline_s=_ANSWER_S)
    if isinstance(body, Refused):
        raise FtrunError(body.reason)
    while True:
        if clock.now_s() > started_s + LIMIT_S:
            raise PeerTimeout(peer=f"node {node_id}", waited_s=LIMIT_S)
        clock.sleep(_POLL_S)
        try:
            now = _cluster(run)
        except PeerError:
            if runs.inspect_run(run.folder).life is runs.RunLiveness.GONE:
                return f"node {node_id}, this one, has left after {clock.now_s() - started_s:.1f} s"
            continue
        if _has_left(now, node_id) and (not had_ranks or _has_continued(before, now)):
            break
    taken = sorted(_members(now) - _members(before))
    where = f"; its ranks run on {', '.join(taken)}" if had_ranks and taken else ""
    return f"node {node_id} has left after {clock.now_s() - started_s:.1f} s{where}"


def _members(cluster: ClusterStatus) -> set[str]:
    return {one.node_id for one in cluster.nodes if one.role == "member"}


def _has_left(cluster: ClusterStatus, node_id: str) -> bool:
    roles = {one.node_id: one.role for one in cluster.nodes}
    return bool(roles) and roles.get(node_id, "left") in ("left", "lost")


def _has_continued(before: ClusterStatus, now: ClusterStatus) -> bool:
    """Whether all ranks run in a later generation."""
    is_later = (now.generation or 0) > (before.generation or 0)
    ranks = [rank for node in now.nodes if node.role == "member" for rank in node.ranks]
    return is_later and bool(ranks) and all(rank.state == "running" for rank in ranks)


def _cluster(run: runs.FoundRun) -> ClusterStatus:
    body = runs.ask(run.to_agent(), StatusRequest(), StatusReply, deadline_s=_ANSWER_S)
    if isinstance(body, Refused):
        raise FtrunError(body.reason)
    view = decode_status(body.document, StatusView, source=f"run {run.name}")
    if view.cluster is None:
        raise FtrunError(f"run {run.name} has one node. End it with: ftrun stop {run.name}")
    return view.cluster
