"""Implements `ftrun status --watch`: polls the state of a run and shows it.

Runs in:  cli.
Takes in: the status replies of the agent.
Gives:    a live page on a terminal; otherwise one plain block per poll.
Survives: an agent that restarts or does not respond for a while; the page shows this.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from ftrun import clock
from ftrun.cli.commands.status import document_of
from ftrun.cli.runs import FoundRun, RunLiveness, choose, look_at
from ftrun.cli.screen.status_page import StyledLine, page
from ftrun.cli.screen.terminal import LiveTerminal, write_plain
from ftrun.errors import ExitCode, FtrunError, UsageError

MIN_EVERY_S, MAX_EVERY_S = 0.1, 3600.0
_NO_LIMIT = sys.maxsize
"""Width and height if stdout is not a terminal."""


def watch(run_id: str | None, *, every_s: float) -> int:
    if not MIN_EVERY_S <= every_s <= MAX_EVERY_S:
        raise UsageError(
            f"--every takes {MIN_EVERY_S} to {MAX_EVERY_S:.0f} seconds, and is {every_s:g}"
        )
    run = choose(run_id, command="status --watch")
    signal.signal(signal.SIGTERM, _leave)
    last = "the run is over"
    with suppress(KeyboardInterrupt):
        last = _on_terminal(run, every_s) if sys.stdout.isatty() else _plain(run, every_s)
        write_plain(f"run {run.name}: {last}")
    return ExitCode.DONE


class _Looks:
    """Polls the status of one run."""

    def __init__(self, run: FoundRun) -> None:
        self.verdict = "nothing was seen of it"
        self._run = run
        self._before: tuple[float, int] | None = None

    def next(self, width: int, height: int) -> list[StyledLine] | None:
        """Returns the current page, or None if the run has ended."""
        run = look_at(self._run.folder)
        if run.life is RunLiveness.GONE:
            return None
        try:
            document = document_of(run)
        except (FtrunError, OSError) as error:
            if look_at(self._run.folder).life is RunLiveness.GONE:
                return None
            document = {"run_id": run.run_id, "verdict": f"no answer: {error}", "state": "starting"}
        if "uptime_s" in document:  # the document comes from an agent
            self.verdict = str(document.get("verdict"))
        rate = self._rate(document)
        return page(document, width=width, height=height, steps_per_s=rate)

    def _rate(self, document: dict[str, Any]) -> float | None:
        nodes = (document.get("cluster") or {}).get("nodes") or [document]
        ranks = [rank for node in nodes for rank in node.get("ranks") or ()]
        steps: list[int] = [rank["step"] for rank in ranks if rank.get("step") is not None]
        uptime_s = document.get("uptime_s")
        if not steps or uptime_s is None:
            self._before = None
            return None
        before, self._before = self._before, (float(uptime_s), max(steps))
        if before is None or uptime_s <= before[0] or max(steps) < before[1]:
            return None
        return (max(steps) - before[1]) / (float(uptime_s) - before[0])


def _on_terminal(run: FoundRun, every_s: float) -> str:
    looks = _Looks(run)
    with LiveTerminal() as screen:
        signal.signal(signal.SIGTSTP, lambda _number, _frame: _step_aside(screen))
        while (lines := looks.next(*screen.size)) is not None:
            screen.show(lines)
            clock.sleep(every_s)
    return f"it is over. Last seen: {looks.verdict}"


def _plain(run: FoundRun, every_s: float) -> str:
    looks = _Looks(run)
    while (lines := looks.next(_NO_LIMIT, _NO_LIMIT)) is not None:
        try:
            write_plain("\n".join([*(line.text for line in lines), ""]))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise KeyboardInterrupt from None
        clock.sleep(every_s)
    return f"it is over. Last seen: {looks.verdict}"


def _step_aside(screen: LiveTerminal) -> None:
    """Handles SIGTSTP (^Z): restores the terminal, stops, and takes the terminal again."""
    screen.pause()
    os.kill(os.getpid(), signal.SIGSTOP)
    screen.resume()


def _leave(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM as ^C, so that every `finally` runs and the terminal is restored."""
    raise KeyboardInterrupt
