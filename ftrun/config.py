"""Settings of a run: the profile, and the spec that the stub passes to the agent.

Runs in:  cli (which loads and checks), agent (which reads the finished spec), worker (which gets
          its section in the launch request).
Takes in: YAML profiles, checked key by key.
Gives:    a `Profile` and a `RunSpec`; every number has its unit in its name.
"""

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ftrun.urls import located

MAX_DATA, MAX_PARITY = 32, 16
"""Largest K and M that the codec in `ftrun.erasure` supports."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable section; an unknown key is an error."""


class SnapshotConfig(_Section, frozen=True, kw_only=True):
    """Snapshots in memory."""

    enabled: Annotated[bool, Meta(description="snapshots in scripts that call ftrun.attach")] = True
    required: Annotated[
        bool, Meta(description="stop the run where snapshots are impossible, not go on")
    ] = False
    every: Annotated[
        Literal["auto"] | int,
        Meta(description="steps between two snapshots; auto: from cost and budget"),
    ] = "auto"
    overhead_budget: Annotated[
        float, Meta(gt=0, le=1, description="part of the step time that auto may spend")
    ] = 0.02
    commit_wait_s: Annotated[
        float, Meta(ge=0, le=60, description="longest wait of a boundary for slower ranks' seals")
    ] = 2.0
    proof_first: Annotated[
        int, Meta(ge=0, description="snapshots at the start whose lazy copies are proven by digest")
    ] = 3
    proof_every: Annotated[
        int, Meta(ge=1, description="number of snapshots between two later proofs")
    ] = 100


class StartConfig(_Section, frozen=True, kw_only=True):
    """How workers are started."""

    mode: Annotated[
        Literal["warm", "fresh"],
        Meta(description="warm: forked from a process that has torch imported"),
    ] = "warm"
    preload: Annotated[
        list[str], Meta(description="modules that the warm process imports besides torch")
    ] = msgspec.field(default_factory=list)


class RestartConfig(_Section, frozen=True, kw_only=True):
    """How often a run may restart, and when it must not."""

    budget: Annotated[int, Meta(ge=0, description="restarts allowed within window_s")] = 20
    window_s: Annotated[float, Meta(gt=0, description="length of the sliding window")] = 3600.0
    backoff_first_s: Annotated[
        float, Meta(ge=0, description="pause before the second restart without progress; doubles")
    ] = 1.0
    backoff_limit_s: Annotated[float, Meta(ge=0, description="longest pause")] = 60.0
    same_cause_limit: Annotated[
        int, Meta(ge=1, description="the same cause this often without a step of progress: 93")
    ] = 3


class StopConfig(_Section, frozen=True, kw_only=True):
    """Handling of SIGTERM, SIGINT and SIGUSR1."""

    grace_s: Annotated[
        float, Meta(gt=0, description="from the first signal to SIGKILL of what is left")
    ] = 30.0
    boundary_wait_s: Annotated[
        float, Meta(ge=0, description="part of it to reach a step boundary for a last snapshot")
    ] = 10.0
    forward: Annotated[
        list[str], Meta(description="signals that are passed to the workers instead")
    ] = msgspec.field(default_factory=list)


class MonitorConfig(_Section, frozen=True, kw_only=True):
    """Detection of failures and their culprits."""

    enabled: Annotated[
        bool,
        Meta(description="look at the ranks: collectives, stacks, links; needed to name a culprit"),
    ] = True
    stopped_kill_s: Annotated[
        float, Meta(gt=0, description="a worker stopped (SIGSTOP) for so long is killed")
    ] = 5.0
    silence_report_s: Annotated[
        float, Meta(gt=0, description="a worker without a step for so long is reported")
    ] = 60.0


class HangConfig(_Section, frozen=True, kw_only=True):
    """Detection of a run that makes no steps. Both limits grow with the run's own step time."""

    suspect_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a rank without a step for so long is suspected, and the culprit named",
        ),
    ] = 10.0
    suspect_factor: Annotated[
        float, Meta(ge=1, description="and not before so many times the p99 of a step")
    ] = 3.0
    kill_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="without proof (it computes, loads data, evaluates) it is killed then",
        ),
    ] = 120.0
    kill_factor: Annotated[
        float, Meta(ge=1, description="and not before so many times the p99 of a step")
    ] = 10.0
    phase_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            description="the same for what may take long: session.phase(), saving, compiling, data",
        ),
    ] = 1800.0
    still_s: Annotated[
        float, Meta(gt=0, description="proof: a rank that others wait for has not moved so long")
    ] = 3.0
    action: Annotated[
        Literal["restart", "report", "evict"],
        Meta(
            description="report: name the culprit, leave the run as it is; evict: restart, and on "
            "another node where one stands by"
        ),
    ] = "restart"


class SlowConfig(_Section, frozen=True, kw_only=True):
    """Ranks and links that are alive and delay all others."""

    action: Annotated[
        Literal["report", "evict"],
        Meta(description="evict: put a node that stands by in the place of the slow one"),
    ] = "report"
    evict_after_s: Annotated[
        float, Meta(ge=0, description="it has been slow for so long; what passes is left alone")
    ] = 30.0


class NumericsConfig(_Section, frozen=True, kw_only=True):
    """Handling of a loss or of parameters that are NaN or infinite."""

    policy: Annotated[
        Literal["report", "stop", "rollback", "skip-data"],
        Meta(
            description="stop: end the run with 93; rollback: go on from a version before it; "
            "skip-data: the same, without the batches that led to it"
        ),
    ] = "report"


class CheckpointConfig(_Section, frozen=True, kw_only=True):
    """Committed snapshots on disk, written by the SMP."""

    directory: Annotated[str | None, Meta(description="directory or URL; none: no checkpoints")] = (
        None
    )
    resume: Annotated[
        str,
        Meta(
            min_length=1,
            description="auto: from the newest there; never: from the beginning; else the path of "
            "a checkpoint, or of a directory of them",
        ),
    ] = "auto"
    every_s: Annotated[float, Meta(gt=0, description="seconds between two")] = 600.0
    keep: Annotated[int, Meta(ge=1, description="how many of them stay")] = 2
    keep_s: Annotated[
        float, Meta(ge=0, description="those written longer ago go as well; 0: none goes by age")
    ] = 0.0
    bytes_per_s: Annotated[
        float, Meta(ge=0, description="written at the most, by each node; 0: as fast as it goes")
    ] = 0.0
    stream_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            description="on one node a snapshot that begins within this time is written while it "
            "is captured; 0: the newest committed one is",
        ),
    ] = 1.0


class SmpConfig(_Section, frozen=True, kw_only=True):
    """The snapshot management process."""

    orphan_s: Annotated[
        float, Meta(gt=0, description="how long it keeps the memory when its agent is gone")
    ] = 600.0


class NodesConfig(_Section, frozen=True, kw_only=True):
    """A run over several nodes: failure detection, and how long nodes wait for each other."""

    heartbeat_s: Annotated[
        float, Meta(gt=0, le=60, description="between two heartbeats of a node")
    ] = 0.5
    deadline_s: Annotated[
        float, Meta(gt=0, description="a node that is silent for so long counts as lost")
    ] = 3.0
    stop_cut_off_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a node without its lead for so long stops its ranks; below deadline_s",
        ),
    ] = 2.0
    pause_limit_s: Annotated[
        float, Meta(gt=0, description="too few nodes for so long end the run with 76")
    ] = 900.0
    join_wait_s: Annotated[
        float, Meta(gt=0, description="how long a start waits for all nodes, as torchrun's")
    ] = 600.0
    settle_s: Annotated[
        float, Meta(ge=0, description="with MIN:MAX, wait so long for more nodes than MIN")
    ] = 5.0
    failures_per_hour: Annotated[
        int, Meta(ge=1, description="a node that fails so often within an hour is put aside")
    ] = 3


class NetworkConfig(_Section, frozen=True, kw_only=True):
    """Network paths between nodes: measuring and choosing them."""

    plan: Annotated[
        Literal["off", "report", "on"],
        Meta(
            description="on: train over the best rails, in the best order of nodes; report: only "
            "say so; off: no probes"
        ),
    ] = "report"
    rails: Annotated[
        list[str],
        Meta(
            description="interfaces that the nodes use among each other; none: those that ftrun "
            "finds"
        ),
    ] = msgspec.field(default_factory=list)
    topology: Annotated[
        str | None,
        Meta(
            description="file that says which nodes share a switch: YAML, or Slurm's topology.conf"
        ),
    ] = None


class PreflightConfig(_Section, frozen=True, kw_only=True):
    """The check of a node before it may run ranks."""

    enabled: Annotated[bool, Meta(description="a node checks itself before it joins")] = True
    limit_s: Annotated[
        float, Meta(gt=0, le=60, description="for all checks; the rest is reported as not done")
    ] = 3.0
    min_memory_gb_s: Annotated[
        float, Meta(ge=0, description="memory is copied at least so fast, else the node stays out")
    ] = 0.2
    min_loopback_mb_s: Annotated[float, Meta(ge=0, description="TCP within the machine")] = 20.0
    min_link_mb_s: Annotated[
        float, Meta(ge=0, description="TCP to the node by which it joins, the slower direction")
    ] = 0.1
    min_free_memory_mb: Annotated[float, Meta(ge=0, description="memory that is free")] = 128.0
    min_free_disk_mb: Annotated[
        float, Meta(ge=0, description="disk that is free for the logs; less is only a warning")
    ] = 64.0
    min_open_files: Annotated[int, Meta(ge=0, description="open files of a process")] = 256
    min_processes: Annotated[int, Meta(ge=0, description="processes that may still be started")] = (
        64
    )
    warn_below: Annotated[
        float, Meta(ge=0, le=1, description="part of the other nodes' median rate that is reported")
    ] = 0.5
    again_s: Annotated[
        float,
        Meta(gt=0, description="the longest until a node that is not fit checks itself again"),
    ] = 60.0


class ErasureConfig(_Section, frozen=True, kw_only=True):
    """Protection of snapshots against the loss of nodes."""

    scheme: Annotated[
        str,
        Meta(
            pattern=r"^(auto|none|[1-9][0-9]?\+[1-9][0-9]?)$",
            description="K+M: any M of K+M nodes may go; auto: by their number; none",
        ),
    ] = "auto"
    small_state_bytes: Annotated[
        int,
        Meta(
            ge=0, description="state of a rank up to this size is copied whole instead of encoded"
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
        str | None, Meta(description="file with the secret that all nodes of a run share")
    ] = None


class MetricsConfig(_Section, frozen=True, kw_only=True):
    """Metrics of a run for Prometheus, at /metrics."""

    port: Annotated[int, Meta(ge=0, le=65535, description="where they are served; 0: nowhere")] = 0
    host: Annotated[str, Meta(description="address that is listened at")] = "127.0.0.1"
    token_file: Annotated[
        str | None, Meta(description="file with what a scraper must show; none: anyone may read")
    ] = None


class HooksConfig(_Section, frozen=True, kw_only=True):
    """Notifications of an incident: at its verdict, and when it is closed."""

    on_incident: Annotated[
        str | None, Meta(description="command for the shell; it gets the incident as JSON on stdin")
    ] = None
    webhook: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^\s/]+")] | None,
        Meta(description="address to which the same JSON is sent by POST"),
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
    numbers: NumericsConfig = NumericsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    smp: SmpConfig = SmpConfig()
    nodes: NodesConfig = NodesConfig()
    network: NetworkConfig = NetworkConfig()
    preflight: PreflightConfig = PreflightConfig()
    erasure: ErasureConfig = ErasureConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()


class EtcdTls(_Section, frozen=True, kw_only=True):
    """Files for TLS between a node and an etcd cluster; absolute paths."""

    ca: Annotated[str | None, Meta(description="signs the cluster's; none: the system's CAs")] = (
        None
    )
    cert: Annotated[str | None, Meta(description="of this node; none: it shows none")] = None
    key: Annotated[str | None, Meta(description="of that")] = None


class NodesSpec(_Section, frozen=True, kw_only=True):
    """Settings of one node for a run over several nodes, from its own command line."""

    min_nodes: Annotated[
        int, Meta(ge=1, description="members of the smallest generation; spares apart")
    ]
    max_nodes: Annotated[
        int, Meta(ge=1, description="members of the largest one; equal: a fixed number")
    ]
    spares: Annotated[int, Meta(ge=0, description="nodes beside them that stand by")] = 0
    endpoint_host: Annotated[
        str, Meta(description="where they meet: a name or an address, as given")
    ]
    endpoint_port: Annotated[int, Meta(ge=1, le=65535)]
    more_endpoints: Annotated[list[tuple[str, int]], Meta(description="beside that one")] = []
    etcd: Annotated[
        list[str],
        Meta(description="HOST:PORT of each; they meet there, and the endpoint is the first"),
    ] = []
    etcd_tls: Annotated[EtcdTls | None, Meta(description="none: plain HTTP")] = None
    etcd_life: Annotated[
        int, Meta(ge=0, description="how often Slurm has queued the job again: a run of its own")
    ] = 0
    node_id: Annotated[str, Meta(description="name of this node, unique in the run")]
    is_named: Annotated[
        bool, Meta(description="the name is not the machine's: two nodes may share a machine")
    ] = False
    node_rank: Annotated[
        int | None, Meta(description="as given; none: the nodes are put in order by name")
    ] = None
    secret_file: Annotated[
        str | None, Meta(description="absolute, and looked at already; none: UNAUTHENTICATED")
    ] = None
    secret_is_ours: Annotated[
        bool, Meta(description="made by ftrun for this run: remove the file when it has ended")
    ] = False
    no_secret: Annotated[str, Meta(description="why there is none, for the operator")] = ""
    bind: Annotated[
        str | None, Meta(description="address of this node to listen at; none: by the route")
    ] = None
    domain: Annotated[
        str | None, Meta(description="what fails together with this node, such as a rack")
    ] = None
    switch: Annotated[str, Meta(description="leaf switch of this node, as Slurm tells")] = ""
    topology: Annotated[
        dict[str, Any] | None, Meta(description="what network.topology holds, where it is YAML")
    ] = None
    slurm_topology: Annotated[str, Meta(description="where it is Slurm's topology.conf")] = ""
    erasure_data: Annotated[int | None, Meta(description="K; none: ftrun chooses")] = None
    erasure_parity: Annotated[
        int | None, Meta(description="M; none: ftrun chooses; 0: no parity")
    ] = None


class RunSpec(_Section, frozen=True, kw_only=True):
    """One run as the stub and the agent see it; stored as `spec.json` in the run folder."""

    run_id: str
    script: Annotated[
        str, Meta(description="absolute path, module name or command; with it a run id")
    ]
    torchrun_argv: Annotated[
        list[str],
        Meta(
            description="for torch.distributed.run's parser: its flags, script, script's arguments"
        ),
    ]
    max_restarts: Annotated[int | None, Meta(description="as given; none: the budget")] = None
    log_folder: Annotated[
        str,
        Meta(
            description="ftrun-logs/RUN_ID, absolute: journal and worker logs; /NODE_ID below it "
            "where there are several nodes, which may share the folder"
        ),
    ]
    quiet: bool = False
    debug: bool = False
    allow_faults: Annotated[bool, Meta(description="ftrun inject-fault may break this run")] = False
    allow_network_faults: Annotated[
        bool, Meta(description="it may cut this node's network, whosever namespace that is")
    ] = False
    cwd: str
    profile: Profile = Profile()
    nodes: Annotated[NodesSpec | None, Meta(description="none: a run on one node")] = None

    @property
    def folder_name(self) -> str:
        """Name of the run folder on this machine, which two nodes of a run may share."""
        if self.nodes is None or not self.nodes.is_named:
            return self.run_id
        return f"{self.run_id}@{self.nodes.node_id}"

    @property
    def command_digest(self) -> str:
        """Equal for equal script and arguments; hashed, because arguments may be secret."""
        at = self.torchrun_argv.index("--") + 1 if "--" in self.torchrun_argv else 0
        return hashlib.sha256("\0".join(self.torchrun_argv[at:]).encode()).hexdigest()[:16]

    @property
    def checkpoint_directory(self) -> str | None:
        """A URL, or an absolute path, because the SMP has another working directory."""
        directory = self.profile.checkpoint.directory
        return located(directory, cwd=self.cwd) if directory else None

    @property
    def resume_path(self) -> str | None:
        """Absolute path or URL that `checkpoint.resume` names; None for `auto` and `never`."""
        wish = self.profile.checkpoint.resume
        return None if wish in ("auto", "never") else located(wish, cwd=self.cwd)
