"""What a run is told: the profile, and the spec that the stub hands to the agent.

Runs in:  cli (which loads and checks), stub and agent (which read the finished spec).
Takes in: YAML profiles, checked key by key.
Gives:    a `Profile`, a `RunSpec`; every number with its unit in its name.

The SMP and the workers do not import this (pydantic costs 60 ms); they are handed what they
need: the SMP by arguments, a worker as `SnapshotSettings` in its environment.
"""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ftrun.urls import located

MAX_DATA, MAX_PARITY = 32, 16
"""The largest K+M; what the codec in `ftrun.erasure` can do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SnapshotConfig(_Section):
    """Snapshots in memory."""

    enabled: bool = Field(default=True, description="snapshots in scripts that call ftrun.attach")
    required: bool = Field(
        default=False,
        description="stop the run where snapshots are impossible, not go on",
    )
    every: Literal["auto"] | int = Field(
        default="auto",
        description="steps between two snapshots; auto: from cost and budget",
    )
    overhead_budget: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="part of the step time that auto may spend",
    )
    commit_wait_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="longest wait of a step boundary for slower ranks to seal the last snapshot",
    )
    proof_first: int = Field(
        default=3, ge=0, description="snapshots at the start whose lazy copies are proven by digest"
    )
    proof_every: int = Field(
        default=100, ge=1, description="after those, every so many snapshots one is proven again"
    )


class StartConfig(_Section):
    """How workers are started."""

    mode: Literal["warm", "fresh"] = Field(
        default="warm", description="warm: forked from a process that has torch imported"
    )
    preload: list[str] = Field(
        default_factory=list, description="modules that the warm process imports besides torch"
    )


class RestartConfig(_Section):
    """How often, and when not."""

    budget: int = Field(default=20, ge=0, description="restarts allowed within window_s")
    window_s: float = Field(default=3600.0, gt=0, description="length of the sliding window")
    backoff_first_s: float = Field(
        default=1.0,
        ge=0,
        description="pause before the second restart without progress; doubles",
    )
    backoff_limit_s: float = Field(default=60.0, ge=0, description="longest pause")
    same_cause_limit: int = Field(
        default=3,
        ge=1,
        description="the same cause this often without a step of progress: 93",
    )


class StopConfig(_Section):
    """SIGTERM, SIGINT, SIGUSR1."""

    grace_s: float = Field(
        default=30.0, gt=0, description="from the first signal to SIGKILL of what is left"
    )
    boundary_wait_s: float = Field(
        default=10.0, ge=0, description="part of it to reach a step boundary for a last snapshot"
    )
    forward: list[str] = Field(
        default_factory=list, description="signals that are passed to the workers instead"
    )


class MonitorConfig(_Section):
    """When something is wrong."""

    enabled: bool = Field(
        default=True,
        description="look at the ranks: collectives, stacks, links; needed to name a culprit",
    )
    stopped_kill_s: float = Field(
        default=5.0,
        gt=0,
        description="a worker stopped (SIGSTOP) for so long is killed",
    )
    silence_report_s: float = Field(
        default=60.0,
        gt=0,
        description="a worker without a step for so long is reported",
    )


class HangConfig(_Section):
    """A run that makes no steps any more. Both limits follow the run's own steps."""

    suspect_s: float = Field(
        default=10.0,
        gt=0,
        description="a rank without a step for so long is suspected, and the culprit named",
    )
    suspect_factor: float = Field(
        default=3.0, ge=1, description="and not before so many times the p99 of a step"
    )
    kill_after_s: float = Field(
        default=120.0,
        gt=0,
        description="without proof (it computes, loads data, evaluates) it is killed after so long",
    )
    kill_factor: float = Field(
        default=10.0, ge=1, description="and not before so many times the p99 of a step"
    )
    phase_limit_s: float = Field(
        default=1800.0,
        gt=0,
        description="the same for what may take long: session.phase(), saving, compiling, data",
    )
    still_s: float = Field(
        default=3.0, gt=0, description="proof: a rank that others wait for has not moved so long"
    )
    action: Literal["restart", "report", "evict"] = Field(
        default="restart",
        description="report: name the culprit, leave the run as it is; evict: restart, and on "
        "another node where one stands by",
    )


class SlowConfig(_Section):
    """Ranks and links that hold all others up, though they go on."""

    action: Literal["report", "evict"] = Field(
        default="report",
        description="evict: put a node that stands by in the place of the slow one",
    )
    evict_after_s: float = Field(
        default=30.0, ge=0, description="it has been slow for so long; what passes is left alone"
    )


class NumbersConfig(_Section):
    """A loss or parameters that are no numbers any more."""

    policy: Literal["report", "stop", "rollback", "skip-data"] = Field(
        default="report",
        description="stop: end the run with 93; rollback: go on from a version before it; "
        "skip-data: the same, without the batches that led to it",
    )


class CheckpointConfig(_Section):
    """Committed snapshots on disk, written by the SMP."""

    directory: str | None = Field(
        default=None, description="directory or URL; none: no checkpoints"
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto: from the newest there; never: from the beginning; else the path of a "
        "checkpoint, or of a directory of them",
    )
    every_s: float = Field(default=600.0, gt=0, description="seconds between two")
    keep: int = Field(default=2, ge=1, description="how many of them stay")
    keep_s: float = Field(
        default=0.0, ge=0, description="those written longer ago go as well; 0: none goes by age"
    )
    bytes_per_s: float = Field(
        default=0.0, ge=0, description="written at the most, by each node; 0: as fast as it goes"
    )
    stream_wait_s: float = Field(
        default=1.0,
        ge=0,
        description="on one node a snapshot that begins within this time is written while it is "
        "captured; 0: the newest committed one is",
    )


class SmpConfig(_Section):
    """The snapshot manager."""

    orphan_s: float = Field(
        default=600.0, gt=0, description="how long it keeps the memory when its agent is gone"
    )


class NodesConfig(_Section):
    """A run over several nodes: how they watch one another, and how long they wait."""

    heartbeat_s: float = Field(
        default=0.5, gt=0, le=60, description="between two heartbeats of a node"
    )
    deadline_s: float = Field(
        default=3.0, gt=0, description="a node that is silent for so long counts as lost"
    )
    stop_cut_off_s: float = Field(
        default=2.0,
        gt=0,
        description="a node without its lead for so long stops its ranks; below deadline_s",
    )
    pause_limit_s: float = Field(
        default=900.0, gt=0, description="too few nodes for so long end the run with 76"
    )
    join_wait_s: float = Field(
        default=600.0, gt=0, description="how long a start waits for all nodes, as torchrun's"
    )
    settle_s: float = Field(
        default=5.0, ge=0, description="with MIN:MAX, wait so long for more nodes than MIN"
    )
    failures_per_hour: int = Field(
        default=3, ge=1, description="a node that fails so often within an hour is put aside"
    )


class NetworkConfig(_Section):
    """The ways between nodes: which there are, and who uses which."""

    plan: Literal["off", "report", "on"] = Field(
        default="report",
        description="on: train over the best rails, in the best order of nodes; report: only say "
        "so; off: no probes",
    )
    rails: list[str] = Field(
        default_factory=list,
        description="interfaces that the nodes use among each other; none: those that ftrun finds",
    )
    topology: str | None = Field(
        default=None,
        description="file that says which nodes share a switch: YAML, or Slurm's topology.conf",
    )


class PreflightConfig(_Section):
    """The check of a node before it may run ranks."""

    enabled: bool = Field(default=True, description="a node checks itself before it joins")
    limit_s: float = Field(
        default=3.0, gt=0, le=60, description="for it all; what is not done by then is told"
    )
    min_memory_gb_s: float = Field(
        default=0.2, ge=0, description="memory is copied at least so fast, else the node stays out"
    )
    min_loopback_mb_s: float = Field(default=20.0, ge=0, description="TCP within the machine")
    min_link_mb_s: float = Field(
        default=0.1, ge=0, description="TCP to the node by which it joins, the slower direction"
    )
    min_free_memory_mb: float = Field(default=128.0, ge=0, description="memory that is free")
    min_free_disk_mb: float = Field(
        default=64.0, ge=0, description="disk that is free for the logs; less is only a warning"
    )
    min_open_files: int = Field(default=256, ge=0, description="open files of a process")
    min_processes: int = Field(default=64, ge=0, description="processes that may still be started")
    warn_below: float = Field(
        default=0.5, ge=0, le=1, description="part of the other nodes' median rate that is reported"
    )
    again_s: float = Field(
        default=60.0,
        gt=0,
        description="the longest until a node that is not fit checks itself again",
    )


class ErasureConfig(_Section):
    """How snapshots survive the loss of nodes."""

    scheme: str = Field(
        default="auto",
        pattern=r"^(auto|none|[1-9][0-9]?\+[1-9][0-9]?)$",
        description="K+M: any M of K+M nodes may go; auto: by their number; none",
    )
    small_state_bytes: int = Field(
        default=1 << 20,
        ge=0,
        description="state of a rank up to this size is copied whole instead of encoded",
    )

    @property
    def data_and_parity(self) -> tuple[int | None, int | None]:
        """K and M; (None, None) leaves both to ftrun, (None, 0) is no parity at all."""
        if self.scheme == "auto":
            return None, None
        if self.scheme == "none":
            return None, 0
        data, _, parity = self.scheme.partition("+")
        return int(data), int(parity)


class SecurityConfig(_Section):
    """Who may take part in a run over several nodes."""

    require_secret: bool = Field(
        default=False, description="refuse to start over several nodes without a secret"
    )
    secret_file: str | None = Field(
        default=None, description="file with the secret that all nodes of a run share"
    )


class MetricsConfig(_Section):
    """Figures of a run for Prometheus, at /metrics."""

    port: int = Field(default=0, ge=0, le=65535, description="where they are served; 0: nowhere")
    host: str = Field(default="127.0.0.1", description="address that is listened at")
    token_file: str | None = Field(
        default=None, description="file with what a scraper must show; none: anyone may read"
    )


class HooksConfig(_Section):
    """Who is told of an incident: when it has its verdict, and when it is closed."""

    on_incident: str | None = Field(
        default=None, description="command for the shell; it gets the incident as JSON on stdin"
    )
    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+",
        description="address to which the same JSON is sent by POST",
    )


class Profile(_Section):
    """All that a profile may set."""

    snapshot: SnapshotConfig = SnapshotConfig()
    start: StartConfig = StartConfig()
    restart: RestartConfig = RestartConfig()
    stop: StopConfig = StopConfig()
    monitor: MonitorConfig = MonitorConfig()
    hang: HangConfig = HangConfig()
    slow: SlowConfig = SlowConfig()
    numbers: NumbersConfig = NumbersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    smp: SmpConfig = SmpConfig()
    nodes: NodesConfig = NodesConfig()
    network: NetworkConfig = NetworkConfig()
    preflight: PreflightConfig = PreflightConfig()
    erasure: ErasureConfig = ErasureConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()


class EtcdTls(BaseModel):
    """The files by which a node and an etcd cluster know each other; absolute paths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: str | None = Field(default=None, description="signs the cluster's; none: the system's CAs")
    cert: str | None = Field(default=None, description="of this node; none: it shows none")
    key: str | None = Field(default=None, description="of that")


class NodesSpec(BaseModel):
    """What one node knows of a run over several, from its own command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_nodes: int = Field(ge=1, description="members of the smallest generation; spares apart")
    max_nodes: int = Field(ge=1, description="members of the largest one; equal: a fixed number")
    spares: int = Field(default=0, ge=0, description="nodes beside them that stand by")
    endpoint_host: str = Field(description="where they meet: a name or an address, as given")
    endpoint_port: int = Field(ge=1, le=65535)
    etcd: list[str] = Field(
        default=[], description="HOST:PORT of each; they meet there, and the endpoint is the first"
    )
    etcd_tls: EtcdTls | None = Field(default=None, description="none: plain HTTP")
    etcd_life: int = Field(
        default=0, ge=0, description="how often Slurm has queued the job again: a run of its own"
    )
    node_id: str = Field(description="name of this node, unique in the run")
    is_named: bool = Field(
        default=False, description="the name is not the machine's: two nodes may share a machine"
    )
    node_rank: int | None = Field(
        default=None, description="as given; none: the nodes are put in order by name"
    )
    secret_file: str | None = Field(
        default=None, description="absolute, and looked at already; none: UNAUTHENTICATED"
    )
    secret_is_ours: bool = Field(
        default=False, description="made by ftrun for this run: remove the file when it has ended"
    )
    no_secret: str = Field(default="", description="why there is none, for the operator")
    bind: str | None = Field(
        default=None, description="address of this node to listen at; none: by the route"
    )
    domain: str | None = Field(
        default=None, description="what fails together with this node, such as a rack"
    )
    switch: str = Field(default="", description="leaf switch of this node, as Slurm tells")
    topology: dict[str, Any] | None = Field(
        default=None, description="what network.topology holds, where it is YAML"
    )
    slurm_topology: str = Field(default="", description="where it is Slurm's topology.conf")
    erasure_data: int | None = Field(default=None, description="K; none: ftrun chooses")
    erasure_parity: int | None = Field(
        default=None, description="M; none: ftrun chooses; 0: no parity"
    )


class RunSpec(BaseModel):
    """One run as the stub and the agent see it; `spec.json` in the run folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    script: str = Field(description="absolute path, module name or command; with it a run id")
    torchrun_argv: list[str] = Field(
        description="for torch.distributed.run's parser: its flags, script, script's arguments"
    )
    max_restarts: int | None = Field(default=None, description="as given; none: the budget")
    log_folder: str = Field(
        description="ftrun-logs/RUN_ID, absolute: journal and worker logs; /NODE_ID below it where "
        "there are several nodes, which may share the folder"
    )
    quiet: bool = False
    debug: bool = False
    allow_faults: bool = Field(default=False, description="ftrun inject-fault may break this run")
    allow_network_faults: bool = Field(
        default=False, description="it may cut this node's network, whosever namespace that is"
    )
    cwd: str
    profile: Profile = Profile()
    nodes: NodesSpec | None = Field(default=None, description="none: a run on one node")

    @property
    def folder_name(self) -> str:
        """Of the run folder on this machine, which two nodes of a run may share."""
        if self.nodes is None or not self.nodes.is_named:
            return self.run_id
        return f"{self.run_id}@{self.nodes.node_id}"

    @property
    def command_digest(self) -> str:
        """Equal where script and arguments are; arguments may hold secrets."""
        at = self.torchrun_argv.index("--") + 1 if "--" in self.torchrun_argv else 0
        return hashlib.sha256("\0".join(self.torchrun_argv[at:]).encode()).hexdigest()[:16]

    @property
    def checkpoint_directory(self) -> str | None:
        """Absolute, as the SMP does not share our working directory; or a URL."""
        directory = self.profile.checkpoint.directory
        return located(directory, cwd=self.cwd) if directory else None

    @property
    def resume_path(self) -> str | None:
        """Absolute, or a URL: what `checkpoint.resume` names; None: nothing in particular."""
        wish = self.profile.checkpoint.resume
        return None if wish in ("auto", "never") else located(wish, cwd=self.cwd)
