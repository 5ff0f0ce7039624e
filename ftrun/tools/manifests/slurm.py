"""Implements `ftrun render slurm`: a batch script that survives lost nodes, with explanations.

Runs in:  cli. Pure.
Takes in: a `ManifestJob`, and Slurm options: partition, account, maximum number of requeues.
Gives:    the text of a file for `sbatch`.
Source:   the behaviour of Slurm 22.05 when a node dies, with and without --no-kill, --kill-on-bad-
          exit, --signal and --requeue; docs/many-nodes.md has the table.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftrun.errors import ExitCode, UsageError
from ftrun.tools.manifests.job import MIB, ManifestJob
from ftrun.tools.manifests.yaml_text import WIDTH, comment

_LEAST_WARNING_S = 120
_MOST_WARNING_S = 65_535
_SLURM_LOOKS_EVERY_S = 60
_STOPPED_BY_USR1 = 138
_KILLED_BY_SRUN = 137
_AGAIN = (ExitCode.TRY_AGAIN, ExitCode.NOT_ENOUGH_NODES, _STOPPED_BY_USR1)
_GOOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OURS = {
    "--nodes",
    "-N",
    "--ntasks-per-node",
    "--ntasks",
    "-n",
    "--no-kill",
    "-k",
    "--requeue",
    "--no-requeue",
    "--open-mode",
    "--signal",
}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options that only Slurm has."""

    partition: str | None = None
    account: str | None = None
    max_requeues: int = 100
    directives: Sequence[str] = ()
    """More options for sbatch, such as --constraint=ib."""


def batch_script(job: ManifestJob, place: SlurmOptions) -> str:
    name = job.name or re.sub(r"[^A-Za-z0-9._-]+", "-", job.stem).strip("-._") or "ftrun"
    if not _GOOD_NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not usable: 1 to 64 letters, digits, '.', '_' or '-', the first "
            "a letter or a digit"
        )
    if not 0 <= place.max_requeues <= 10_000:
        raise UsageError(f"--max-requeues is 0 to 10000, not {place.max_requeues}")
    lines = ["#!/bin/bash", *comment(_head(job))]
    for why, directives in (*_size(job, name), *_survival(job), *_where(place)):
        lines += ["", *comment(why), *(f"#SBATCH {word}" for word in directives)]
    lines += ["", *_step(job, name), "", *_end(job, place)]
    return "\n".join(lines) + "\n"


def _head(job: ManifestJob) -> str:
    return (
        f"Written by ftrun render slurm: {job.in_words}.\n"
        "Submit it with sbatch. Above each line stands what happens without it."
    )


_Directives = tuple[str, list[str]]


def _size(job: ManifestJob, name: str) -> Iterator[_Directives]:
    yield (
        "In squeue, in the names of files, in the run id. Without it: this file's name.",
        [f"--job-name={name}"],
    )
    yield (
        "One ftrun on each node starts the node's ranks. With more tasks on a node, each would be "
        "a run of its own.",
        [f"--nodes={job.nodes}", "--ntasks-per-node=1"],
    )
    machine = job.machine
    if machine.cpus is not None:
        yield (
            "Without it the one task of a node has one processor, and so have all its ranks.",
            [f"--cpus-per-task={machine.cpus}"],
        )
    else:
        yield (
            "Whole nodes. Without it the one task of a node has one processor, and so have all "
            "its ranks. --cpus N asks for a part of a node instead.",
            ["--exclusive"],
        )
    if machine.gpus:
        yield "Without it the ranks see no GPU.", [f"--gpus-per-node={machine.gpus}"]
    yield from _memory(job)
    if job.time_s is not None:
        yield "Without it the partition's own limit counts.", [f"--time={_clock(job.time_s)}"]


def _memory(job: ManifestJob) -> Iterator[_Directives]:
    needed = job.memory_bytes()
    if needed is not None:
        words = f"{job.memory_in_words()}: snapshots are memory of the job. "
        yield (
            f"{words}Without it the site's default counts, and what goes beyond it is killed.",
            [f"--mem={-(-needed // MIB)}M"],
        )
    elif job.machine.cpus is None:
        yield (
            "All memory of the nodes. Without it the site's default counts, which may be less, and "
            "snapshots are memory of the job: twice the state of all ranks of a node, and parity.",
            ["--mem=0"],
        )


def _survival(job: ManifestJob) -> Iterator[_Directives]:
    """Yields the directives that let the job survive lost nodes and its time limit."""
    if job.nodes > 1:
        yield (
            "Without it Slurm ends the whole job as soon as it finds one node down, although "
            "training has gone on long before.",
            ["--no-kill"],
        )
    warning_s = _warning_s(job)
    yield (
        f"{warning_s} s before the end of its time the run takes a last snapshot at a common step "
        f"and writes a checkpoint: at most {job.grace_s:g} s until ranks are killed, as long again "
        f"to write, and Slurm may be {_SLURM_LOOKS_EVERY_S} s late. Without it the job gets "
        "SIGTERM and, after KillWait (30 s), SIGKILL. No B: before USR1: every process of the step "
        "is to get it, and ranks ignore it.",
        [f"--signal=USR1@{warning_s}"],
    )
    yield (
        "The outer net: a job that Slurm itself has ended is queued again, with the same job id "
        "and so the same run id, and goes on from the checkpoint. Without it, it is over. "
        "Without append, its second life overwrites the output of its first.",
        ["--requeue", "--open-mode=append"],
    )
    yield "Of the batch shell and srun alone.", ["--output=%x-%j.out"]


def _warning_s(job: ManifestJob) -> int:
    found = max(_LEAST_WARNING_S, job.ending_s + _SLURM_LOOKS_EVERY_S)
    if found > _MOST_WARNING_S or (job.time_s is not None and found >= job.time_s):
        limit_s = min(_MOST_WARNING_S, job.time_s or _MOST_WARNING_S)
        raise UsageError(
            f"the end of the job takes {found} s, of which --grace {job.grace_s:g} counts twice "
            f"(until ranks are killed, and to write a checkpoint), and {limit_s} s are there. Give "
            "more --time, or say how long a checkpoint takes, with --last-checkpoint"
        )
    return found


def _where(place: SlurmOptions) -> Iterator[_Directives]:
    for name, value in (("partition", place.partition), ("account", place.account)):
        if value is not None:
            if not re.fullmatch(r"[\w.,@+-]+", value):
                raise UsageError(f"--{name} is a name, not {value!r}")
            yield f"As given. Without it: your default {name}.", [f"--{name}={value}"]
    for word in place.directives:
        flag = word.partition("=")[0].partition(" ")[0]
        if not re.fullmatch(r"--?[A-Za-z][\w-]*([= ].*)?", word) or "\n" in word:
            raise UsageError(
                f"--sbatch is an option of sbatch, such as --constraint=ib, not {word!r}"
            )
        if flag in _OURS:
            raise UsageError(f"--sbatch {word}: {flag} is set by ftrun render already")
    if place.directives:
        yield "As given.", list(place.directives)


def _step(job: ManifestJob, name: str) -> Iterator[str]:
    """Yields the srun command with its comments."""
    said = []
    if job.nodes > 1:
        said += [
            "--no-kill, once more: a step has its own, and without it srun ends the other nodes.",
            "--kill-on-bad-exit=0: without it, where the site has set it so, one task that ends "
            "badly takes the others with it. All tasks of a run end with the same code anyway.",
        ]
    said.append("--cpu-bind=none: without it Slurm may tie a node's task, all ranks, to one core.")
    if job.machine.cpus is not None:
        said.append("--cpus-per-task: since Slurm 22.05 a step does not take it from the job.")
    said.append(
        "--output: a file for each node. Without it all output goes through srun on the first "
        "node; if that one is lost, ranks elsewhere block in print once a pipe is full."
    )
    if not _has_run_id(job):
        said.append("--run-id: the same in each life of the job, as logs and reports go by it.")
    if job.checkpoint_directory is None:
        said.append(
            "No --checkpoint-dir: what a later life of the job begins from is the script's own."
        )
    elif job.shared_directory is None:
        said.append(
            "--checkpoint-dir: every node sends its own part to the URL, and needs what its "
            "library takes to get in."
        )
    elif job.nodes > 1:
        said.append(
            "--checkpoint-dir: on a file system that all nodes share; each writes its own part."
        )
    yield from (line for text in said for line in comment(text))
    srun = ["srun"]
    if job.nodes > 1:
        srun += ["--no-kill", "--kill-on-bad-exit=0"]
    srun.append("--cpu-bind=none")
    if job.machine.cpus is not None:
        srun.append(f"--cpus-per-task={job.machine.cpus}")
    files = "%x-%j.out" if job.nodes == 1 else "%x-%j-%t.out"
    srun += ["--open-mode=append", f"--output={files}"]
    run_id = [] if _has_run_id(job) else ["--run-id", f'"{name}-$SLURM_JOB_ID"']
    started = [[word] for word in srun[1:]]
    *folded, last = _folded(srun[:1], started, indent=0)
    yield from (*folded, f"{last} \\")
    words = [*_by_flag(job.flags), list(job.script)]
    yield from _folded(["ftrun", *run_id], words, indent=4)


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append([])
        found[-1].append(word)
    return found


def _folded(first: list[str], rest: Sequence[Sequence[str]], *, indent: int) -> Iterator[str]:
    """Wraps a long command with backslashes; `first` must already be quoted."""
    line = " " * indent + " ".join(first)
    for words in rest:
        piece = shlex.join(words)
        if len(line) + len(piece) + 3 > WIDTH:
            yield f"{line} \\"
            line = " " * (indent + 4) + piece
        else:
            line += f" {piece}"
    yield line


def _end(job: ManifestJob, place: SlurmOptions) -> Iterator[str]:
    codes: tuple[int, ...] = _AGAIN
    of_several = ""
    if job.nodes > 1:
        codes = (*_AGAIN[:2], _KILLED_BY_SRUN, *_AGAIN[2:])
        of_several = (
            f"{_KILLED_BY_SRUN}: srun has killed all tasks, as it does in spite of --no-kill where "
            "a lost node is back before Slurm has missed it; or memory was short. "
        )
    yield "code=$?"
    yield from comment(
        f"{int(ExitCode.TRY_AGAIN)}: a process or a node that was needed is gone. "
        f"{int(ExitCode.NOT_ENOUGH_NODES)}: too few nodes are left. {of_several}"
        f"{_STOPPED_BY_USR1}: the time is over. In all of these the job is queued again, and goes "
        "on from its checkpoint; without this it is over. "
        f"Not for {int(ExitCode.DO_NOT_RESTART)} and {int(ExitCode.STATE_LOST)}, "
        "which another start does not mend, nor for the script's own codes. The count keeps a job "
        "that never gets far from coming back for ever."
    )
    again = " | ".join(str(int(code)) for code in codes)
    yield "case $code in"
    yield f"{again})"
    yield f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {place.max_requeues} ]; then'
    yield '        scontrol requeue "$SLURM_JOB_ID"'
    yield "    fi"
    yield "    ;;"
    yield "esac"
    yield "# Without it the job counts as done whatever has happened."
    yield "exit $code"


def _has_run_id(job: ManifestJob) -> bool:
    return (
        job.line.own_value("run-id") is not None or job.line.torchrun_value("rdzv-id") is not None
    )


def _clock(seconds: int) -> str:
    minutes, left = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{left:02}"
