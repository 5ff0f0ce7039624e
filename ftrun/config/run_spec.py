"""The spec of one run, which the command line hands to the stub and the agent."""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from ftrun.config.cluster import NodesSpec
from ftrun.config.profile import Profile
from ftrun.urls import located


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        bool, Meta(description="it may cut this node's network, also in the host's namespace")
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
    def persist_every(self) -> int:
        """Steps between two checkpoints; 0: they are due by time, or there are none."""
        settings = self.profile.checkpoint
        return settings.every_steps if settings.directory else 0

    @property
    def resume_path(self) -> str | None:
        """Absolute path or URL that `checkpoint.resume` names; None for `auto` and `never`."""
        requested = self.profile.checkpoint.resume
        return None if requested in ("auto", "never") else located(requested, cwd=self.cwd)
