"""The sections of a profile: the one definition of every setting that an operator may change.

The unit of a number is in its name. `Meta` holds limits and the meaning. Errors, the table of
docs/operations.md, `ftrun profiles show` and the FTRUN_ variables are made from these fields.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

_NOTICE_SOURCE = (
    r"^((aws|aws-rebalance|google|azure)(:https?://.+)?|kubernetes|slurm(:.+)?|(file|command):.+)$"
)
FORWARDED_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def _meta(description: str, *, wanted: str = "", **limits: Any) -> Meta:
    """`wanted` describes the allowed values, see `ftrun.config.checks`."""
    return Meta(description=description, extra={"wanted": wanted} if wanted else None, **limits)


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable section; an unknown key is an error."""


_FunctionName = Annotated[
    str, _meta("", wanted="a function of a module, as MODULE:FUNCTION", pattern=r"^[\w.]+:[\w.]+$")
]


# fmt: off
MEMORY_LIMIT = "snapshot.max_memory_gb of the profile"
"""Names the limit in a `MemoryTooSmall`."""


class SnapshotConfig(_Section, frozen=True, kw_only=True):
    """Snapshots in memory."""

    enabled: Annotated[bool, _meta("snapshots in scripts that call ftrun.attach")] = True
    required: Annotated[bool, _meta(
        "stop the run if there is no memory for snapshots, not train without")] = False
    every: Annotated[Literal["auto"] | Annotated[int, Meta(ge=1)], _meta(
        "steps between two snapshots; auto: from their cost and overhead_budget",
        wanted="auto or a whole number of at least 1")] = "auto"
    overhead_budget: Annotated[float, _meta(
        "part of the step time that auto may spend", gt=0, le=1)] = 0.02
    commit_timeout_s: Annotated[float, _meta(
        "longest wait at a boundary for slower ranks to seal the last snapshot", ge=0, le=60)] = 2.0
    verify_first: Annotated[int, _meta(
        "snapshots at the start that are verified: copied at the boundary and compared by digest",
        ge=0)] = 3
    verify_every: Annotated[int, _meta(
        "one in this number of later snapshots is verified", ge=1)] = 100
    share_replicas: Annotated[bool, _meta(
        "ranks of a node with equal parameters and optimizer state store it once")] = True
    stage: Annotated[Literal["off", "device"], _meta(
        "device: clone GPU state on the GPU at the boundary, if there is room")] = "off"
    d2h_gb_s: Annotated[float, _meta(
        "limit in GB/s for copies of snapshots from each GPU; 0: none", ge=0)] = 0.0
    max_memory_gb: Annotated[float, _meta(
        "limit in GB for the snapshots of a node's own ranks in memory; 0: none", ge=0)] = 0.0

    @property
    def limit_bytes(self) -> int:
        return int(self.max_memory_gb * 1e9)


class StartConfig(_Section, frozen=True, kw_only=True):
    """How workers are started."""

    mode: Annotated[Literal["warm", "fresh"], _meta(
        "warm: fork ranks from a process that has torch; fresh: new processes")] = "warm"
    preload: Annotated[list[str], _meta(
        "modules that the warm process imports after torch; none may use a GPU"
    )] = field(default_factory=list)
    prepare: Annotated[list[_FunctionName], _meta(
        "functions MODULE:FUNCTION that are called before a restart needs their results; the "
        "script gets them by ftrun.prepared")] = field(default_factory=list)
    device: Annotated[Literal["off", "context"], _meta(
        "context: standbys initialise the GPUs for the next start of the ranks")] = "off"
    device_wait_s: Annotated[float, _meta(
        "how long a restart waits until the GPU memory of ranks is free", ge=0)] = 10.0


class RestartConfig(_Section, frozen=True, kw_only=True):
    """How often a run may restart, and when it must not."""

    budget: Annotated[int, _meta("restarts allowed within window_s", ge=0)] = 20
    window_s: Annotated[float, _meta("length of the sliding window", gt=0)] = 3600.0
    backoff_initial_s: Annotated[float, _meta(
        "pause before the second restart in a row without progress; it doubles", ge=0)] = 1.0
    backoff_max_s: Annotated[float, _meta("longest pause", ge=0)] = 60.0
    same_cause_limit: Annotated[int, _meta(
        "after this many failures of the same cause without progress, the run ends with 93",
        ge=1)] = 3
    survivors: Annotated[Literal["off", "on"], _meta(
        "on: if a rank or a node fails, ranks inside session.guard() keep their processes, and "
        "only the others start again; off: all ranks do")] = "off"
    rehearse: Annotated[Literal["all"] | Annotated[int, Meta(ge=0)], _meta(
        "standbys of each node that set up as one of its ranks and make a step that is discarded, "
        "so that the rank continues at once if it fails; needs survivors: on",
        wanted="all or a whole number of at least 0")] = 0
    max_renewals: Annotated[int, _meta(
        "restarts through which one process may stay; then all ranks start again", ge=1)] = 16
    park_s: Annotated[float, _meta(
        "a rank that may stay and does not stop its turn within this time is replaced too",
        gt=0, le=8)] = 5.0


class StopConfig(_Section, frozen=True, kw_only=True):
    """Handling of SIGTERM, SIGINT and SIGUSR1."""

    grace_s: Annotated[float, _meta(
        "time from the first signal to SIGKILL of the remaining processes", gt=0)] = 30.0
    final_snapshot_timeout_s: Annotated[float, _meta(
        "part of grace_s in which ranks may reach a step boundary for a final snapshot; 0: no "
        "final snapshot", ge=0)] = 10.0
    forward_signals: Annotated[list[str], _meta(
        "signals that are passed to the ranks instead, such as [SIGUSR1]; possible are SIGTERM, "
        "SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2")] = field(default_factory=list)


class MonitorConfig(_Section, frozen=True, kw_only=True):
    """Detection of failures and their culprits."""

    enabled: Annotated[bool, _meta(
        "observe the collectives, stacks and links of ranks; without it no culprit is named, and a "
        "hang is not detected")] = True
    frozen_kill_after_s: Annotated[float, _meta(
        "a rank stopped (SIGSTOP) for this time is killed and replaced", gt=0)] = 5.0
    no_progress_report_after_s: Annotated[float, _meta(
        "a rank without a step for this time is reported in the journal", gt=0)] = 60.0
    error_patterns: Annotated[dict[str, Annotated[str, Meta(min_length=1)]], _meta(
        "more error classes, such as {quota: 'quota*exceeded'}, searched in the lines that a "
        "failed rank wrote, with * and ? as in file names; they are evidence and decide nothing",
        wanted="names with patterns that are not empty")] = field(default_factory=dict)


class HangConfig(_Section, frozen=True, kw_only=True):
    """Detection of a run that makes no steps. Both limits grow with the run's own step time."""

    suspect_after_s: Annotated[float, _meta(
        "a rank without a step for this time is suspected; the culprit is named before it is over",
        gt=0)] = 10.0
    suspect_p99_factor: Annotated[float, _meta(
        "not before this multiple of the p99 of the run's step time", ge=1)] = 3.0
    kill_after_s: Annotated[float, _meta(
        "a culprit without proof of a hang, such as a busy loop, is killed after this time",
        gt=0)] = 120.0
    kill_p99_factor: Annotated[float, _meta(
        "not before this multiple of the p99 of the run's step time", ge=1)] = 10.0
    phase_timeout_s: Annotated[float, _meta(
        "the same limit for work that may take long: session.phase(), between loops, evaluating, "
        "saving, compiling, waiting for data or other processes", gt=0)] = 1800.0
    no_activity_s: Annotated[float, _meta(
        "proof of a hang: other ranks wait for a rank that has not moved for this time; it is "
        "killed when suspect_after_s is over", gt=0)] = 3.0
    action: Annotated[Literal["restart", "report", "evict"], _meta(
        "report: name the culprit, leave the run as it is; evict: restart, and a spare takes the "
        "culprit's place if there is one")] = "restart"


class SlowConfig(_Section, frozen=True, kw_only=True):
    """Ranks and links that are alive and delay all others."""

    action: Annotated[Literal["auto", "report", "evict"], _meta(
        "auto: if the evidence names one node, a free spare takes its place at a step boundary; "
        "evict: also for one end of a slow link; report: never")] = "auto"
    evict_after_s: Annotated[float, _meta(
        "auto, evict: after the node was slow for this time without a pause", ge=0)] = 30.0


class NumericsConfig(_Section, frozen=True, kw_only=True):
    """Handling of a loss or of parameters that are NaN or infinite."""

    policy: Annotated[Literal["report", "stop", "rollback", "skip-data"], _meta(
        "if a parameter or the reported loss is NaN or infinite: report; stop: end the run with "
        "93; rollback: continue from a version before it; skip-data: the same, and leave out the "
        "batches that led to it (needs session.batches())")] = "report"


class CheckpointConfig(_Section, frozen=True, kw_only=True):
    """Committed snapshots on disk, written by the SMP."""

    directory: Annotated[str | None, _meta(
        "directory or URL; null: no checkpoints. A relative path starts at the folder in which "
        "ftrun was started")] = None
    resume: Annotated[str, _meta(
        "auto: from the newest in the directory; never: from the beginning; else the path or URL "
        "of a checkpoint, or of a directory of them", min_length=1)] = "auto"
    every_s: Annotated[float, _meta("time between two checkpoints", gt=0)] = 600.0
    every_steps: Annotated[int, _meta(
        "steps between two checkpoints, in place of every_s. These steps get a snapshot as well; "
        "0: every_s applies", ge=0)] = 0
    keep: Annotated[int, _meta("number of checkpoints that stay, the newest included", ge=1)] = 2
    max_age_s: Annotated[float, _meta(
        "checkpoints older than this go as well, never the newest; 0: no age limit", ge=0)] = 0.0
    keep_bytes: Annotated[int, _meta(
        "the oldest checkpoints go while all of this run have more bytes than this, never the "
        "newest; 0: no limit", ge=0)] = 0
    writers: Annotated[int, _meta(
        "files of equal size that a node writes at once; 0: one for each rank, one after the other",
        ge=0, le=64)] = 0
    max_bytes_per_s: Annotated[float, _meta(
        "highest write rate of each node; 0: no limit. The last checkpoint of a run is written "
        "without a limit", ge=0)] = 0.0
    live_capture_timeout_s: Annotated[float, _meta(
        "a checkpoint requests a snapshot and is written while that is captured. If it does not "
        "begin within two steps and this time, the newest committed one is written; 0: that one "
        "at once", ge=0)] = 10.0


class SmpConfig(_Section, frozen=True, kw_only=True):
    """The snapshot management process."""

    orphan_timeout_s: Annotated[float, _meta(
        "how long memory is retained after the agent ended", gt=0)] = 600.0


class NodesConfig(_Section, frozen=True, kw_only=True):
    """A run over several nodes: failure detection, and how long nodes wait for each other."""

    heartbeat_interval_s: Annotated[float, _meta(
        "time between two heartbeats of a node", gt=0, le=60)] = 0.5
    failure_timeout_s: Annotated[float, _meta(
        "a node without a heartbeat for this time counts as lost", gt=0)] = 3.0
    self_fencing_timeout_s: Annotated[float, _meta(
        "a node without its leader for this time stops its ranks; above heartbeat_interval_s, "
        "below failure_timeout_s", gt=0)] = 2.0
    pause_timeout_s: Annotated[float, _meta(
        "too few nodes for this time end the run with 76", gt=0)] = 900.0
    join_timeout_s: Annotated[float, _meta(
        "how long a start waits for all nodes (torchrun's join_timeout)", gt=0)] = 600.0
    last_call_timeout_s: Annotated[float, _meta(
        "with --nnodes MIN:MAX: wait this time for more nodes when MIN are there", ge=0)] = 5.0
    max_failures_per_hour: Annotated[int, _meta(
        "a node with this many failures within an hour is excluded", ge=1)] = 3


class NetworkConfig(_Section, frozen=True, kw_only=True):
    """Network paths between nodes: measuring and choosing them."""

    plan: Annotated[Literal["off", "report", "on"], _meta(
        "on: train over the best rails, in the best order of nodes; report: only report them; off: "
        "no probes")] = "report"
    rails: Annotated[list[str], _meta(
        "interfaces that the nodes use among each other; none: those that ftrun finds, without "
        "--bind and with a secret or network.plan: on")] = field(default_factory=list)
    topology: Annotated[str | None, _meta(
        "file with the switch of each node: YAML or Slurm's topology.conf")] = None


class PreflightConfig(_Section, frozen=True, kw_only=True):
    """The check of a node before it may run ranks."""

    enabled: Annotated[bool, _meta(
        "a node of a run over several checks itself before it runs ranks")] = True
    timeout_s: Annotated[float, _meta(
        "for all checks, without the import of torch; a check that is not done by then is a "
        "warning", gt=0, le=60)] = 3.0
    min_memory_gb_s: Annotated[float, _meta(
        "rate at which one thread copies memory; below it, the node is unfit", ge=0)] = 0.2
    min_loopback_mb_s: Annotated[float, _meta("rate of TCP within the machine", ge=0)] = 20.0
    min_link_mb_s: Annotated[float, _meta(
        "rate of TCP to the node by which it joins, in the slower direction", ge=0)] = 0.1
    min_free_memory_mb: Annotated[float, _meta(
        "free memory of the machine and within the cgroup", ge=0)] = 128.0
    min_free_disk_mb: Annotated[float, _meta(
        "free disk for the logs; less is only a warning", ge=0)] = 64.0
    min_open_files: Annotated[int, _meta("files that a process may open", ge=0)] = 256
    min_processes: Annotated[int, _meta("processes that may still be started", ge=0)] = 64
    warn_below_median: Annotated[float, _meta(
        "a node with less than this part of the other nodes' median rate is reported",
        ge=0, le=1)] = 0.5
    retry_max_s: Annotated[float, _meta(
        "longest time until an unfit node checks itself again", gt=0)] = 60.0
    collective_mb: Annotated[int, _meta(
        "MB of the all-reduce among nodes that are new in a run, while their ranks start; on one "
        "node among two processes; 0: none", ge=0, le=4096)] = 64


class ErasureConfig(_Section, frozen=True, kw_only=True):
    """Protection of snapshots against the loss of nodes."""

    scheme: Annotated[str, _meta(
        "K+M, up to 32+16: any M of K+M nodes may be lost; auto: by the number of nodes; mirror: "
        "a copy of each node's state on the next node",
        pattern=r"^(auto|none|mirror|[1-9][0-9]?\+[1-9][0-9]?)$",
        wanted="auto, none, mirror or K+M, such as 4+2")] = "auto"
    mirror_max_bytes: Annotated[int, _meta(
        "state of a rank up to this size is mirrored to M nodes, not encoded", ge=0)] = 1 << 20

    @property
    def is_mirror(self) -> bool:
        return self.scheme == "mirror"

    @property
    def data_and_parity(self) -> tuple[int | None, int | None]:
        """K and M; (None, None) leaves both to ftrun, (None, 0) is no parity, (None, 1) a copy."""
        if self.scheme == "auto":
            return None, None
        if self.scheme in ("none", "mirror"):
            return None, int(self.is_mirror)
        data, _, parity = self.scheme.partition("+")
        return int(data), int(parity)


class SecurityConfig(_Section, frozen=True, kw_only=True):
    """Authentication of the nodes of a run."""

    require_secret: Annotated[bool, _meta(
        "refuse to start over several nodes without a secret")] = False
    secret_file: Annotated[str | None, _meta(
        "file with the secret that all nodes share; null: none, except in a Slurm step")] = None


class MetricsConfig(_Section, frozen=True, kw_only=True):
    """Metrics of a run for Prometheus, at /metrics."""

    port: Annotated[int, _meta("port of /metrics; 0: it is not served", ge=0, le=65535)] = 0
    host: Annotated[str, _meta("address to listen at")] = "127.0.0.1"
    token_file: Annotated[str | None, _meta(
        "file with the token that a scraper must show; null: anyone may read")] = None


class HooksConfig(_Section, frozen=True, kw_only=True):
    """Notifications of an incident: at its verdict, and when it is closed."""

    on_incident: Annotated[str | None, _meta(
        "shell command; it gets each incident as JSON on stdin")] = None
    webhook: Annotated[Annotated[str, Meta(pattern=r"^https?://[^\s/]+")] | None, _meta(
        "address to which the same JSON is sent by POST",
        wanted="an address that begins with http:// or https://")] = None


class OtelConfig(_Section, frozen=True, kw_only=True):
    """OpenTelemetry: a trace for each incident, and the metrics, by OTLP over HTTP."""

    endpoint: Annotated[Annotated[str, Meta(pattern=r"^https?://[^\s/@]+[^\s@]*$")] | None, _meta(
        "address of a collector, such as http://127.0.0.1:4318; null: that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, and if that is not set, nothing is sent",
        wanted="an address that begins with http:// or https://, without a password, which "
        "OTEL_EXPORTER_OTLP_HEADERS may hold")] = None


class NoticesConfig(_Section, frozen=True, kw_only=True):
    """Notices that this node will be taken away; its place is taken before."""

    sources: Annotated[list[Annotated[str, _meta(
        "a source", pattern=_NOTICE_SOURCE,
        wanted="aws, aws-rebalance, google or azure (also with :URL of the metadata server), "
        "kubernetes, slurm, file:PATH or command:COMMAND")]], _meta(
        "what is asked: aws, aws-rebalance, google, azure, kubernetes, slurm, file:PATH (it "
        "exists), command:COMMAND (it prints a line)")] = field(default_factory=list)
    every_s: Annotated[float, _meta(
        "time between two questions to a source", ge=0.1, le=3600)] = 5.0


# fmt: on
class Profile(_Section, frozen=True, kw_only=True):
    """All settings that a profile may contain."""

    snapshot: SnapshotConfig = SnapshotConfig()
    start: StartConfig = StartConfig()
    restart: RestartConfig = RestartConfig()
    stop: StopConfig = StopConfig()
    monitor: MonitorConfig = MonitorConfig()
    hang: HangConfig = HangConfig()
    slow: SlowConfig = SlowConfig()
    numerics: NumericsConfig = NumericsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    smp: SmpConfig = SmpConfig()
    nodes: NodesConfig = NodesConfig()
    network: NetworkConfig = NetworkConfig()
    preflight: PreflightConfig = PreflightConfig()
    erasure: ErasureConfig = ErasureConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()
    otel: OtelConfig = OtelConfig()
    notices: NoticesConfig = NoticesConfig()


RENAMED_KEYS = {
    "snapshot.commit_wait_s": "snapshot.commit_timeout_s",
    "snapshot.proof_first": "snapshot.verify_first",
    "snapshot.proof_every": "snapshot.verify_every",
    "restart.backoff_first_s": "restart.backoff_initial_s",
    "restart.backoff_limit_s": "restart.backoff_max_s",
    "stop.boundary_wait_s": "stop.final_snapshot_timeout_s",
    "stop.forward": "stop.forward_signals",
    "monitor.stopped_kill_s": "monitor.frozen_kill_after_s",
    "monitor.silence_report_s": "monitor.no_progress_report_after_s",
    "hang.suspect_s": "hang.suspect_after_s",
    "hang.suspect_factor": "hang.suspect_p99_factor",
    "hang.kill_factor": "hang.kill_p99_factor",
    "hang.phase_limit_s": "hang.phase_timeout_s",
    "hang.still_s": "hang.no_activity_s",
    "numbers.policy": "numerics.policy",
    "checkpoint.keep_s": "checkpoint.max_age_s",
    "checkpoint.bytes_per_s": "checkpoint.max_bytes_per_s",
    "checkpoint.stream_wait_s": "checkpoint.live_capture_timeout_s",
    "smp.orphan_s": "smp.orphan_timeout_s",
    "nodes.heartbeat_s": "nodes.heartbeat_interval_s",
    "nodes.deadline_s": "nodes.failure_timeout_s",
    "nodes.stop_cut_off_s": "nodes.self_fencing_timeout_s",
    "nodes.pause_limit_s": "nodes.pause_timeout_s",
    "nodes.join_wait_s": "nodes.join_timeout_s",
    "nodes.settle_s": "nodes.last_call_timeout_s",
    "nodes.failures_per_hour": "nodes.max_failures_per_hour",
    "preflight.limit_s": "preflight.timeout_s",
    "preflight.again_s": "preflight.retry_max_s",
    "preflight.warn_below": "preflight.warn_below_median",
    "erasure.small_state_bytes": "erasure.mirror_max_bytes",
}
"""Keys of profiles of version 0.2 that have another name now; each is refused with the new one."""
