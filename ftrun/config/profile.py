"""The sections of a profile: the one definition of every setting that an operator may change.

Runs in:  every process. Pure.
Takes in: nothing.
Gives:    a frozen struct for each section. A process passes a section on as it is.

The unit of a number is in its name. `Meta` holds limits and the meaning. Errors, the table of
docs/operations.md, `ftrun profiles show` and the FTRUN_ variables are made from these fields.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

FORWARDED_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable section; an unknown key is an error."""


class SnapshotConfig(_Section, frozen=True, kw_only=True):
    """Snapshots in memory."""

    enabled: Annotated[bool, Meta(description="snapshots in scripts that call ftrun.attach")] = True
    required: Annotated[
        bool,
        Meta(description="stop the run if there is no memory for snapshots, not train without"),
    ] = False
    every: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1)],
        Meta(
            description="steps between two snapshots; auto: from their cost and overhead_budget",
            extra={"wanted": "auto or a whole number of at least 1"},
        ),
    ] = "auto"
    overhead_budget: Annotated[
        float, Meta(gt=0, le=1, description="part of the step time that auto may spend")
    ] = 0.02
    commit_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="longest wait at a boundary for slower ranks to seal the last snapshot",
        ),
    ] = 2.0
    verify_first: Annotated[
        int,
        Meta(
            ge=0,
            description="snapshots at the start that are verified: copied at the boundary and "
            "compared by digest",
        ),
    ] = 3
    verify_every: Annotated[
        int, Meta(ge=1, description="one in this number of later snapshots is verified")
    ] = 100
    share_replicas: Annotated[
        bool,
        Meta(description="ranks of a node with equal parameters and optimizer state store it once"),
    ] = True
    stage: Annotated[
        Literal["off", "device"],
        Meta(description="device: clone GPU state on the GPU at the boundary, if there is room"),
    ] = "off"


class StartConfig(_Section, frozen=True, kw_only=True):
    """How workers are started."""

    mode: Annotated[
        Literal["warm", "fresh"],
        Meta(description="warm: fork ranks from a process that has torch; fresh: new processes"),
    ] = "warm"
    preload: Annotated[
        list[str],
        Meta(description="modules that the warm process imports after torch; none may use a GPU"),
    ] = field(default_factory=list)
    device: Annotated[
        Literal["off", "context"],
        Meta(description="context: standbys initialise the GPUs for the next start of the ranks"),
    ] = "off"
    device_wait_s: Annotated[
        float,
        Meta(ge=0, description="how long a restart waits until the GPU memory of ranks is free"),
    ] = 10.0


class RestartConfig(_Section, frozen=True, kw_only=True):
    """How often a run may restart, and when it must not."""

    budget: Annotated[int, Meta(ge=0, description="restarts allowed within window_s")] = 20
    window_s: Annotated[float, Meta(gt=0, description="length of the sliding window")] = 3600.0
    backoff_initial_s: Annotated[
        float,
        Meta(
            ge=0,
            description="pause before the second restart in a row without progress; it doubles",
        ),
    ] = 1.0
    backoff_max_s: Annotated[float, Meta(ge=0, description="longest pause")] = 60.0
    same_cause_limit: Annotated[
        int,
        Meta(
            ge=1,
            description="after this many failures of the same cause without progress, the run "
            "ends with 93",
        ),
    ] = 3


class StopConfig(_Section, frozen=True, kw_only=True):
    """Handling of SIGTERM, SIGINT and SIGUSR1."""

    grace_s: Annotated[
        float,
        Meta(gt=0, description="time from the first signal to SIGKILL of the remaining processes"),
    ] = 30.0
    final_snapshot_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="part of grace_s in which ranks may reach a step boundary for a final "
            "snapshot; 0: no final snapshot",
        ),
    ] = 10.0
    forward_signals: Annotated[
        list[str],
        Meta(
            description="signals that are passed to the ranks instead, such as [SIGUSR1]; possible "
            "are SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2"
        ),
    ] = field(default_factory=list)


class MonitorConfig(_Section, frozen=True, kw_only=True):
    """Detection of failures and their culprits."""

    enabled: Annotated[
        bool,
        Meta(
            description="observe the collectives, stacks and links of ranks; without it no culprit "
            "is named, and a hang is not detected"
        ),
    ] = True
    frozen_kill_after_s: Annotated[
        float,
        Meta(gt=0, description="a rank stopped (SIGSTOP) for this time is killed and replaced"),
    ] = 5.0
    no_progress_report_after_s: Annotated[
        float,
        Meta(gt=0, description="a rank without a step for this time is reported in the journal"),
    ] = 60.0


class HangConfig(_Section, frozen=True, kw_only=True):
    """Detection of a run that makes no steps. Both limits grow with the run's own step time."""

    suspect_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a rank without a step for this time is suspected; the culprit is named "
            "before it is over",
        ),
    ] = 10.0
    suspect_p99_factor: Annotated[
        float,
        Meta(ge=1, description="not before this multiple of the p99 of the run's step time"),
    ] = 3.0
    kill_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a culprit without proof of a hang, such as a busy loop, is killed after "
            "this time",
        ),
    ] = 120.0
    kill_p99_factor: Annotated[
        float,
        Meta(ge=1, description="not before this multiple of the p99 of the run's step time"),
    ] = 10.0
    phase_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="the same limit for work that may take long: session.phase(), between "
            "loops, evaluating, saving, compiling, waiting for data or other processes",
        ),
    ] = 1800.0
    no_activity_s: Annotated[
        float,
        Meta(
            gt=0,
            description="proof of a hang: other ranks wait for a rank that has not moved for this "
            "time; it is killed when suspect_after_s is over",
        ),
    ] = 3.0
    action: Annotated[
        Literal["restart", "report", "evict"],
        Meta(
            description="report: name the culprit, leave the run as it is; evict: restart, and a "
            "spare takes the culprit's place if there is one"
        ),
    ] = "restart"


class SlowConfig(_Section, frozen=True, kw_only=True):
    """Ranks and links that are alive and delay all others."""

    action: Annotated[
        Literal["report", "evict"],
        Meta(description="evict: at a step boundary, a spare takes the place of the slow node"),
    ] = "report"
    evict_after_s: Annotated[
        float,
        Meta(ge=0, description="evict after the node was slow for this time without a pause"),
    ] = 30.0


class NumericsConfig(_Section, frozen=True, kw_only=True):
    """Handling of a loss or of parameters that are NaN or infinite."""

    policy: Annotated[
        Literal["report", "stop", "rollback", "skip-data"],
        Meta(
            description="if a parameter or the reported loss is NaN or infinite: report; stop: end "
            "the run with 93; rollback: continue from a version before it; skip-data: the same, "
            "and leave out the batches that led to it (needs session.batches())"
        ),
    ] = "report"


class CheckpointConfig(_Section, frozen=True, kw_only=True):
    """Committed snapshots on disk, written by the SMP."""

    directory: Annotated[
        str | None,
        Meta(
            description="directory or URL; null: no checkpoints. A relative path starts at the "
            "folder in which ftrun was started"
        ),
    ] = None
    resume: Annotated[
        str,
        Meta(
            min_length=1,
            description="auto: from the newest in the directory; never: from the beginning; else "
            "the path or URL of a checkpoint, or of a directory of them",
        ),
    ] = "auto"
    every_s: Annotated[float, Meta(gt=0, description="time between two checkpoints")] = 600.0
    keep: Annotated[
        int, Meta(ge=1, description="number of checkpoints that stay, the newest included")
    ] = 2
    max_age_s: Annotated[
        float,
        Meta(
            ge=0,
            description="checkpoints older than this go as well, never the newest; 0: no age limit",
        ),
    ] = 0.0
    max_bytes_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="highest write rate of each node; 0: no limit. The last checkpoint of a "
            "run is written without a limit",
        ),
    ] = 0.0
    live_capture_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="on one node, a snapshot that begins within this time is written while it "
            "is captured, instead of the newest committed one; 0: the committed one",
        ),
    ] = 1.0


class SmpConfig(_Section, frozen=True, kw_only=True):
    """The snapshot management process."""

    orphan_timeout_s: Annotated[
        float, Meta(gt=0, description="how long memory is retained after the agent ended")
    ] = 600.0


class NodesConfig(_Section, frozen=True, kw_only=True):
    """A run over several nodes: failure detection, and how long nodes wait for each other."""

    heartbeat_interval_s: Annotated[
        float, Meta(gt=0, le=60, description="time between two heartbeats of a node")
    ] = 0.5
    failure_timeout_s: Annotated[
        float, Meta(gt=0, description="a node without a heartbeat for this time counts as lost")
    ] = 3.0
    self_fencing_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a node without its leader for this time stops its ranks; above "
            "heartbeat_interval_s, below failure_timeout_s",
        ),
    ] = 2.0
    pause_timeout_s: Annotated[
        float, Meta(gt=0, description="too few nodes for this time end the run with 76")
    ] = 900.0
    join_timeout_s: Annotated[
        float,
        Meta(gt=0, description="how long a start waits for all nodes (torchrun's join_timeout)"),
    ] = 600.0
    last_call_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="with --nnodes MIN:MAX: wait this time for more nodes when MIN are there",
        ),
    ] = 5.0
    max_failures_per_hour: Annotated[
        int,
        Meta(ge=1, description="a node with this many failures within an hour is excluded"),
    ] = 3


class NetworkConfig(_Section, frozen=True, kw_only=True):
    """Network paths between nodes: measuring and choosing them."""

    plan: Annotated[
        Literal["off", "report", "on"],
        Meta(
            description="on: train over the best rails, in the best order of nodes; report: only "
            "report them; off: no probes"
        ),
    ] = "report"
    rails: Annotated[
        list[str],
        Meta(
            description="interfaces that the nodes use among each other; none: those that ftrun "
            "finds, without --bind and with a secret or network.plan: on"
        ),
    ] = field(default_factory=list)
    topology: Annotated[
        str | None,
        Meta(description="file with the switch of each node: YAML or Slurm's topology.conf"),
    ] = None


class PreflightConfig(_Section, frozen=True, kw_only=True):
    """The check of a node before it may run ranks."""

    enabled: Annotated[
        bool, Meta(description="a node of a run over several checks itself before it runs ranks")
    ] = True
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="for all checks, without the import of torch; a check that is not done by "
            "then is a warning",
        ),
    ] = 3.0
    min_memory_gb_s: Annotated[
        float,
        Meta(
            ge=0, description="rate at which one thread copies memory; below it, the node is unfit"
        ),
    ] = 0.2
    min_loopback_mb_s: Annotated[
        float, Meta(ge=0, description="rate of TCP within the machine")
    ] = 20.0
    min_link_mb_s: Annotated[
        float,
        Meta(
            ge=0,
            description="rate of TCP to the node by which it joins, in the slower direction",
        ),
    ] = 0.1
    min_free_memory_mb: Annotated[
        float, Meta(ge=0, description="free memory of the machine and within the cgroup")
    ] = 128.0
    min_free_disk_mb: Annotated[
        float, Meta(ge=0, description="free disk for the logs; less is only a warning")
    ] = 64.0
    min_open_files: Annotated[int, Meta(ge=0, description="files that a process may open")] = 256
    min_processes: Annotated[int, Meta(ge=0, description="processes that may still be started")] = (
        64
    )
    warn_below_median: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="a node with less than this part of the other nodes' median rate is "
            "reported",
        ),
    ] = 0.5
    retry_max_s: Annotated[
        float,
        Meta(gt=0, description="longest time until an unfit node checks itself again"),
    ] = 60.0


class ErasureConfig(_Section, frozen=True, kw_only=True):
    """Protection of snapshots against the loss of nodes."""

    scheme: Annotated[
        str,
        Meta(
            pattern=r"^(auto|none|[1-9][0-9]?\+[1-9][0-9]?)$",
            description="K+M, up to 32+16: any M of K+M nodes may be lost; auto: by the number of "
            "nodes",
            extra={"wanted": "auto, none or K+M, such as 4+2"},
        ),
    ] = "auto"
    mirror_max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="state of a rank up to this size is mirrored to M nodes, not encoded",
        ),
    ] = 1 << 20

    @property
    def data_and_parity(self) -> tuple[int | None, int | None]:
        """K and M; (None, None) leaves both to ftrun, (None, 0) means no parity."""
        if self.scheme == "auto":
            return None, None
        if self.scheme == "none":
            return None, 0
        data, _, parity = self.scheme.partition("+")
        return int(data), int(parity)


class SecurityConfig(_Section, frozen=True, kw_only=True):
    """Authentication of the nodes of a run."""

    require_secret: Annotated[
        bool, Meta(description="refuse to start over several nodes without a secret")
    ] = False
    secret_file: Annotated[
        str | None,
        Meta(
            description="file with the secret that all nodes share; null: none, except in a Slurm "
            "step"
        ),
    ] = None


class MetricsConfig(_Section, frozen=True, kw_only=True):
    """Metrics of a run for Prometheus, at /metrics."""

    port: Annotated[
        int, Meta(ge=0, le=65535, description="port of /metrics; 0: it is not served")
    ] = 0
    host: Annotated[str, Meta(description="address to listen at")] = "127.0.0.1"
    token_file: Annotated[
        str | None,
        Meta(description="file with the token that a scraper must show; null: anyone may read"),
    ] = None


class HooksConfig(_Section, frozen=True, kw_only=True):
    """Notifications of an incident: at its verdict, and when it is closed."""

    on_incident: Annotated[
        str | None,
        Meta(description="shell command; it gets each incident as JSON on stdin"),
    ] = None
    webhook: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^\s/]+")] | None,
        Meta(
            description="address to which the same JSON is sent by POST",
            extra={"wanted": "an address that begins with http:// or https://"},
        ),
    ] = None


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
