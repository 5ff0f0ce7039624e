"""The last thing on the screen.

Runs in:  agent.
Takes in: what the run ended by.
Gives:    one block on stderr, in under 25 lines: the first cause, the user's own line, what to do.
"""

from ftrun.agent.generations import Generations
from ftrun.config import RunSpec
from ftrun.errors import ExitCode
from ftrun.recovery.commands import EndRun

MAX_TRACE_LINES = 12


def final_block(command: EndRun, spec: RunSpec, generations: Generations) -> str:
    """What the operator reads first, and often only."""
    restarts = len(generations.restarts)
    noun = "restart" if restarts == 1 else "restarts"
    code = int(command.exit_code)
    lines = [
        f"ftrun: run {spec.run_id} ended with exit code {code} after {restarts} {noun}: "
        f"{command.why}"
    ]
    if command.goes_on:
        lines = [f"ftrun: run {spec.run_id} is left with exit code {code}: {command.why}"]
    if command.cause is not None:
        lines.append(f"  first cause  {command.cause.text}")
        lines += _trace(command.cause.detail)
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
