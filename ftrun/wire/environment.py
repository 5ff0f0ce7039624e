"""The variables a newborn worker is given, besides torchrun's own.

Runs in: agent (writes), worker (reads).
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
"""`GENERATION:STEP` of the version to restore; absent when there is none."""

SKIP_BATCHES = "FTRUN_SKIP_BATCHES"
"""So many batches after the restored version are left out; absent where all come again."""

RESTORE_WORLD_SIZE = "FTRUN_RESTORE_WORLD_SIZE"
"""How many ranks took that version; absent where it is as many as there are now."""

SNAPSHOT = "FTRUN_SNAPSHOT"
"""The snapshot section of the profile, as JSON."""

START = "FTRUN_START"
"""`warm` or `fresh`: how this worker was started."""

AGENT_PID = "FTRUN_AGENT_PID"
"""The process a worker dies with."""

RANK_SOCKET = "FTRUN_RANK_SOCKET"
"""Path at which this rank's flight recorder is to be read."""

STACK_FD = "FTRUN_STACK_FD"
"""Descriptor of the file that takes this rank's stacks on a signal."""

FAULT_FD = "FTRUN_FAULT_FD"
"""Descriptor of this rank's fault page; only in a run with --allow-faults."""

VERIFY = "FTRUN_VERIFY"
"""A `VerifyPlan` as JSON; only in the runs of `ftrun verify`."""

LOG_FOLDER = "FTRUN_LOG_FOLDER"
"""Read by `ftrun run`: the folder in which the run's log folder is made; absent: ./ftrun-logs."""
