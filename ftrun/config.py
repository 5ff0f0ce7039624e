"""What a run is told: the profile, and the spec that the stub hands to the agent.

Runs in:  cli (which loads and checks), stub and agent (which read the finished spec).
Takes in: YAML profiles, checked key by key.
Gives:    a `Profile`, a `RunSpec`; every number with its unit in its name.

The SMP and the workers do not import this (pydantic costs 60 ms); they are handed what they
need: the SMP by arguments, a worker as `SnapshotSettings` in its environment.
"""

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class CheckpointConfig(_Section):
    """Committed snapshots on disk, written by the SMP."""

    directory: str | None = Field(default=None, description="where; none: no checkpoints")
    every_s: float = Field(default=600.0, gt=0, description="seconds between two")
    keep: int = Field(default=2, ge=1, description="how many of them stay")


class SmpConfig(_Section):
    """The snapshot manager."""

    orphan_s: float = Field(
        default=600.0, gt=0, description="how long it keeps the memory when its agent is gone"
    )


class Profile(_Section):
    """All that a profile may set."""

    snapshot: SnapshotConfig = SnapshotConfig()
    start: StartConfig = StartConfig()
    restart: RestartConfig = RestartConfig()
    stop: StopConfig = StopConfig()
    monitor: MonitorConfig = MonitorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    smp: SmpConfig = SmpConfig()


class RunSpec(BaseModel):
    """One run as the stub and the agent see it; `spec.json` in the run folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    script: str = Field(description="absolute path, module name or command; with it a run id")
    torchrun_argv: list[str] = Field(
        description="for torch.distributed.run's parser: its flags, script, script's arguments"
    )
    max_restarts: int | None = Field(default=None, description="as given; none: the budget")
    log_folder: str = Field(description="ftrun-logs/RUN_ID, absolute: journal and worker logs")
    quiet: bool = False
    debug: bool = False
    cwd: str
    profile: Profile = Profile()

    @property
    def checkpoint_directory(self) -> str | None:
        """Absolute: the SMP does not share our working directory."""
        directory = self.profile.checkpoint.directory
        return os.path.join(self.cwd, directory) if directory else None
