"""The final block on stderr.

Runs in:  agent.
Takes in: the command that ended the run.
Gives:    one block of fewer than 25 lines: first cause, the user's own line, what to do.
"""

from dataclasses import dataclass

from ftrun.agent.launch.generation import GenerationRunner
from ftrun.config.run_spec import RunSpec
from ftrun.errors import ExitCode
from ftrun.recovery.commands import EndRun

MAX_TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class Kept:
    """What remains of the training after the run."""

    step: int
    """The last step that any rank completed."""
    directory: str | None
    """Where checkpoints are written; None: nowhere."""
    checkpoint_step: int | None
    """Step of the last checkpoint that was written."""
    not_written: str
    """Why the checkpoint after it was not written."""
    part_step: int | None = None
    """Step of the newest checkpoint of which this node has written its part, but not all other
    nodes."""

    def lines(self) -> list[str]:
        found = [f"  stopped at   step {self.step}"]
        if self.directory is None:
            return [
                *found,
                "  kept         nothing: snapshots were in memory only, and are freed",
                "  to resume    start it with --checkpoint-dir DIR: its last step is then written "
                "at the end",
            ]
        if self.part_step is not None and self.part_step > (self.checkpoint_step or -1):
            return [
                *found,
                f"  kept         this node's part of step {self.part_step} in {self.directory}: a "
                "checkpoint as soon as all nodes have written theirs",
                "  to resume    start the same command again",
            ]
        if self.checkpoint_step is None:
            why = self.not_written or "no snapshot was committed yet"
            return [*found, f"  kept         nothing in {self.directory}: {why}"]
        found.append(f"  kept         step {self.checkpoint_step} in {self.directory}")
        if self.checkpoint_step < self.step:
            why = self.not_written or "no later snapshot was committed"
            found.append(f"               steps {self.checkpoint_step + 1} to {self.step} are not "
                         f"kept: {why}")  # fmt: skip
        return [*found, "  to resume    start the same command again"]


def final_block(
    command: EndRun, spec: RunSpec, generations: GenerationRunner, kept: Kept | None = None
) -> str:
    """The text that the operator reads first, and often the only one.

    Args:
        command: how the run ends.
        spec: of the run.
        generations: of this agent.
        kept: of a run that was stopped; None: the script does not attach, or the run failed.
    """
    restarts = len(generations.restarts)
    noun = "restart" if restarts == 1 else "restarts"
    code = int(command.exit_code)
    lines = [
        f"ftrun: run {spec.run_id} ended with exit code {code} after {restarts} {noun}: "
        f"{command.why}"
    ]
    if command.goes_on:
        lines = [
            f"ftrun: this node has left run {spec.run_id} with exit code {code}: {command.why}"
        ]
    if command.cause is not None:
        lines.append(f"  first cause  {command.cause.text}")
        lines += _trace(command.cause.detail)
    if kept is not None:
        lines += kept.lines()
    if command.advice:
        lines.append(f"  what to do   {command.advice}")
    if command.exit_code == ExitCode.DO_NOT_RESTART:
        lines.append("               A scheduler should not start this again (exit code 93).")
    lines.append(f"  journal      {spec.log_folder}/journal.jsonl")
    return "\n".join(lines) + "\n"


def _trace(detail: str) -> list[str]:
    if not detail:
        return []
    lines = [line for line in detail.rstrip().splitlines() if line.strip()]
    left_out = len(lines) - MAX_TRACE_LINES
    shown = lines[-MAX_TRACE_LINES:]
    head = [f"  where        (the last {len(shown)} of {len(lines)} lines)"] if left_out > 0 else []
    return head + [f"    {line}" for line in shown]
