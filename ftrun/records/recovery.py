"""Records of a restart: decisions about ranks and components, and how long each phase took."""

from ftrun.events import Record, WorkerExit
from ftrun.ids import Version
from ftrun.monitor.repeat_check import Repeat
from ftrun.records.note import Note, ReasonRecord, Seconds, Whole


class KillWorkers(ReasonRecord, frozen=True, tag="workers_killed"):
    """Kill every worker of this generation at once."""


class RanksParked(Record, frozen=True, tag="ranks_parked"):
    """After a failure, these ranks of this node are parked; the others were killed."""

    generation: Whole  # that is over
    ranks: tuple[Whole, ...]
    notes: tuple[str, ...] = ()  # why ranks that were asked to park did not


class RequestFinalSnapshot(ReasonRecord, frozen=True, tag="final_snapshot_requested"):
    """Order every rank to take a snapshot at the same next boundary, and to wait there."""

    after_step: int = -1  # the boundary; -1: the next one that no rank of this node has passed


class WithdrawFinalSnapshot(ReasonRecord, frozen=True, tag="final_snapshot_withdrawn"):
    """Let ranks that wait at the ordered boundary train again."""


class SignalWorkers(Record, frozen=True, tag="workers_signalled"):
    """Send a signal to every worker's process group."""

    signal: int
    reason: str


class EndRun(Record, frozen=True, tag="run_end_decided"):
    """End the run."""

    exit_code: Whole
    reason: str
    cause: WorkerExit | None = None
    advice: str = ""
    run_continues: bool = False  # only this node ends: it has drained, or the others have finished


class RespawnSmp(ReasonRecord, frozen=True, tag="smp_respawned"):
    """Start another SMP and hand it the memory."""


class RespawnZygote(ReasonRecord, frozen=True, tag="zygote_respawned"):
    """Start another zygote."""


class DisableComponent(Record, frozen=True, tag="component_disabled"):
    """Continue without a component that keeps dying: `smp` or `zygote`."""

    part: str
    reason: str


class SuspendRanks(ReasonRecord, frozen=True, tag="ranks_suspended"):
    """Suspend this node's ranks (SIGSTOP), until it is clear which agent leads."""


class ResumeRanks(ReasonRecord, frozen=True, tag="ranks_resumed"):
    """Resume the suspended ranks."""


class UpdatePeerPorts(Record, frozen=True, tag="peer_ports_updated"):
    """Restarted SMPs listen on other ports: the new ones by node id."""

    ports: dict[str, int]


class RestorePointChosen(Record, frozen=True, tag="restore_point_chosen"):
    """The version from which this node's ranks start."""

    version: Version | None
    reason: str
    voided_slots: int


class GenerationStartedRecord(ReasonRecord, frozen=True, tag="generation_started"):
    """This node has started its ranks."""

    generation: Whole
    restored: Version | None
    pids: tuple[Whole, ...]
    ranks: tuple[Whole, ...] = ()
    staying: tuple[Whole, ...] = ()  # ranks whose processes are those of the last generation


class Recovered(Record, frozen=True, tag="recovered"):
    """A restart of this node, once every rank has completed a step."""

    generation: Whole
    cause: str
    noticed_s: Seconds
    decided_s: Seconds
    stopped_s: Seconds
    launched_s: Seconds
    restored: Version | None
    phases_s: dict[str, Seconds] | None = None  # in order; None until every rank has stepped


class DowntimeRecord(Note, frozen=True, tag="downtime"):
    """Every rank has completed a step after a fault, or after a reconfiguration."""

    incident: Whole | None
    total_s: Seconds
    detection_s: Seconds | None = None
    restart_s: Seconds | None = None
    restore_s: Seconds | None = None
    first_step_s: Seconds | None = None
    fault_s: Seconds | None = None
    stepped_s: Seconds | None = None


class RepeatedStepsRecord(Record, frozen=True, tag="repeated_steps"):
    """The steps that this node's ranks repeated, compared with the first execution."""

    generation: Whole
    result: Repeat
