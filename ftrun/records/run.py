"""Records of an agent and of its run: begin, end, signals, progress, observers."""

from ftrun.events import Record
from ftrun.records.note import Note, ReasonRecord, Seconds, Whole


class AgentStarted(Record, frozen=True, tag="agent_started"):
    """An agent begins."""

    is_forked: bool  # as a fork of the reserve, else as a program


class RunStarted(Record, frozen=True, tag="run_started"):
    """The run begins on this node."""

    run_id: str
    script: str
    torch: str  # its version
    logs: str  # folder of the output of ranks that is redirected
    rdzv_id: str = ""


class RunEndedRecord(Record, frozen=True, tag="run_ended"):
    """The run is over on this node."""

    exit_code: int
    reason: str = ""


class ErrorRecord(Note, frozen=True, tag="error"):
    """The agent ends by an error."""

    error: str  # name of its class


class InternalErrorRecord(Note, frozen=True, tag="internal_error"):
    """A bug of ftrun, with its traceback if it ends the agent."""


class NoticeSourceFailed(Record, frozen=True, tag="notice_source_failed"):
    """A source of notices does not answer; it is asked again."""

    source: str
    reason: str


class LeaveRequested(Record, frozen=True, tag="leave_requested"):
    """A signal, a notice or an operator asks this node to leave."""

    by: str


class SignalForwarded(Record, frozen=True, tag="signal_forwarded"):
    """A signal was passed to the ranks."""

    signal: str


class RanksStuckRecord(Note, frozen=True, tag="ranks_stuck"):
    """Ranks of this node do not die of SIGKILL, or they have ended since."""


class DeviceError(Note, frozen=True, tag="device_error"):
    """A network card or a GPU of this node has counted errors or is throttled."""


class RankWithoutProgress(Note, frozen=True, tag="rank_without_progress"):
    """A rank has made no step for `monitor.no_progress_report_after_s`."""

    rank: Whole


class ProgressRecord(Record, frozen=True, tag="progress"):
    """Every 10 s and at the end, of each node with ranks; the counts are of this generation."""

    step: Whole
    steps_here: Whole
    p50_s: Seconds | None = None
    p99_s: Seconds | None = None
    blocked_s: Seconds = 0.0
    taken: Whole = 0
    skipped: Whole = 0
    discarded: Whole = 0
    committed: tuple[int, int] | None = None  # generation and step
    loss: Seconds | None = None
    ranks: tuple[tuple[Whole, Whole, Seconds | None], ...] = ()  # rank, step, lateness in seconds


class MetricsDisabled(ReasonRecord, frozen=True, tag="metrics_disabled"):
    """No metrics are served."""


class HookFailed(Record, frozen=True, tag="hook_failed"):
    """A hook on an incident, or an export of OpenTelemetry, has failed."""

    hook: str
    incident: int | None
    event: str
    reason: str
