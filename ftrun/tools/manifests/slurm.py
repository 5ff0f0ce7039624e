"""Renders `ftrun manifest slurm`: a batch script that survives lost nodes, with explanations.

Source: the behaviour of Slurm 22.05 when a node dies, with and without --no-kill,
--kill-on-bad-exit, --signal and --requeue; docs/many-nodes.md has the table.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from ftrun.cli.completion import option
from ftrun.errors import UsageError
from ftrun.tools.manifests.job import MIB, ManifestJob
from ftrun.tools.manifests.yaml_text import WIDTH, rendered

_MIN_WARNING_S = 120
_MAX_WARNING_S = 65_535
_SLURM_CHECK_INTERVAL_S = 60
_GOOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OURS = {
    *("--nodes", "-N", "--ntasks-per-node", "--ntasks", "-n", "--no-kill", "-k"),
    *("--requeue", "--no-requeue", "--open-mode", "--signal"),
}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options that only Slurm has."""

    partition: Annotated[str | None, option("--partition", "of the cluster")] = None
    account: Annotated[str | None, option("--account", "that pays")] = None
    max_requeues: Annotated[int, option("--max-requeues", "limit of requeues", "N")] = 100
    directives: Annotated[
        list[str] | None,
        option("--sbatch", "one more, such as --constraint=ib; repeatable", "OPTION"),
    ] = None


def batch_script(job: ManifestJob, place: SlurmOptions) -> str:
    name = job.name or re.sub(r"[^A-Za-z0-9._-]+", "-", job.stem).strip("-._") or "ftrun"
    if not _GOOD_NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not usable: 1 to 64 letters, digits, '.', '_' or '-', the first "
            "a letter or a digit"
        )
    _check(place)
    needed = job.memory_bytes()
    lines = rendered(
        "slurm.sh",
        job=job,
        place=place,
        name=name,
        warning_s=_warning_s(job),
        memory_mib=None if needed is None else -(-needed // MIB),
        time=None if job.time_s is None else _clock(job.time_s),
        has_run_id=job.has_run_id,
    )
    at = lines.index("@COMMAND@")  # inserted here, because its lines must not be wrapped
    return "\n".join([*lines[:at], *_command(job, name), *lines[at + 1 :]]) + "\n"


def _check(place: SlurmOptions) -> None:
    if not 0 <= place.max_requeues <= 10_000:
        raise UsageError(f"--max-requeues is 0 to 10000, not {place.max_requeues}")
    for name, value in (("partition", place.partition), ("account", place.account)):
        if value is not None and not re.fullmatch(r"[\w.,@+-]+", value):
            raise UsageError(f"--{name} is a name, not {value!r}")
    for word in place.directives or ():
        flag = word.partition("=")[0].partition(" ")[0]
        if not re.fullmatch(r"--?[A-Za-z][\w-]*([= ].*)?", word) or "\n" in word:
            raise UsageError(
                f"--sbatch is an option of sbatch, such as --constraint=ib, not {word!r}"
            )
        if flag in _OURS:
            raise UsageError(f"--sbatch {word}: {flag} is set by ftrun manifest already")


def _warning_s(job: ManifestJob) -> int:
    found = max(_MIN_WARNING_S, job.ending_s + _SLURM_CHECK_INTERVAL_S)
    if found > _MAX_WARNING_S or (job.time_s is not None and found >= job.time_s):
        limit_s = min(_MAX_WARNING_S, job.time_s or _MAX_WARNING_S)
        raise UsageError(
            f"the end of the job takes {found} s, in which --grace {job.grace_s:g} counts twice "
            f"(until ranks are killed, and to write a checkpoint), but only {limit_s} s are "
            "available. Give more --time, or say how long a checkpoint takes, with "
            "--last-checkpoint"
        )
    return found


def _command(job: ManifestJob, name: str) -> Iterator[str]:
    srun = ["--no-kill", "--kill-on-bad-exit=0"] if job.nodes > 1 else []
    srun.append("--cpu-bind=none")
    if job.machine.cpus is not None:
        srun.append(f"--cpus-per-task={job.machine.cpus}")
    files = "%x-%j.out" if job.nodes == 1 else "%x-%j-%t.out"
    srun += ["--open-mode=append", f"--output={files}"]
    *folded, last = _folded(["srun"], [[word] for word in srun], indent=0)
    yield from (*folded, f"{last} \\")
    run_id = [] if job.has_run_id else ["--run-id", f'"{name}-$SLURM_JOB_ID"']
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


def _clock(seconds: int) -> str:
    minutes, left = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{left:02}"
