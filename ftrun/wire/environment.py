"""Environment variables that a new worker gets in addition to those of torchrun.

Runs in:  agent (writes), worker (reads).
"""

RUN_ID = "FTRUN_RUN_ID"
GENERATION = "FTRUN_GENERATION"
INCARNATION = "FTRUN_INCARNATION"
HEARTBEAT_FD = "FTRUN_HEARTBEAT_FD"
"""Descriptor of this rank's heartbeat page."""

COMMAND_FD = "FTRUN_COMMAND_FD"
"""Descriptor of the node's command page."""

ARENA_FD = "FTRUN_ARENA_FD"
"""Descriptor of this rank's arena; absent until a first layout is known."""

SMP_SOCKET = "FTRUN_SMP_SOCKET"
"""Path of the SMP's socket."""

RESTORE = "FTRUN_RESTORE"
"""`GENERATION:STEP` of the version to restore; absent if there is none."""

SKIP_BATCHES = "FTRUN_SKIP_BATCHES"
"""Number of batches to skip after the restored version; absent if no batch is skipped."""

RESTORE_WORLD_SIZE = "FTRUN_RESTORE_WORLD_SIZE"
"""World size of the restored version; absent if it equals the current world size."""

SNAPSHOT = "FTRUN_SNAPSHOT"
"""The snapshot section of the profile, as JSON."""

START = "FTRUN_START"
"""How this worker was started: `warm` or `fresh`."""

AGENT_PID = "FTRUN_AGENT_PID"
"""Pid of the agent. The worker ends when that process ends."""

RANK_SOCKET = "FTRUN_RANK_SOCKET"
"""Path of the socket on which this rank's flight recorder can be read."""

STACK_FD = "FTRUN_STACK_FD"
"""Descriptor of the file into which a signal writes this rank's stacks."""

FAULT_FD = "FTRUN_FAULT_FD"
"""Descriptor of this rank's fault page; set only in a run with --allow-faults."""

VERIFY = "FTRUN_VERIFY"
"""A `VerifyPlan` as JSON; set only in the runs of `ftrun verify`."""

LOG_FOLDER = "FTRUN_LOG_FOLDER"
"""Read by `ftrun run`: the parent folder of the run's log folder; default: ./ftrun-logs."""
