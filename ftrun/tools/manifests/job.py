"""Derives from a command line the facts that every scheduler needs.

It does not read the environment or the script, because both are on another machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from ftrun.cli.completion import option
from ftrun.cli.launch.command_line import CommandLine, parse
from ftrun.cli.launch.nodes import OUR_BACKENDS, num_nodes
from ftrun.cli.run import check_num_ranks, resolve_options
from ftrun.cli.screen.text import count, seconds_of, size_of
from ftrun.config.profile import Profile
from ftrun.erasure.groups import default_parity, make_groups
from ftrun.errors import UsageError
from ftrun.urls import is_url

MIB, GIB = 1 << 20, 1 << 30

OWN_BYTES = GIB
"""For the zygote with torch, the agent and the SMP; forked processes share this memory."""

_WRITE_BYTES_PER_S = 200e6
_SPARE_S = 10
_OF_ONE_NODE = ("node-rank", "node-id", "bind", "local-addr")
_WHERE_THEY_MEET = ("rdzv-endpoint", "master-addr", "master-port")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of the job for any scheduler."""

    name: Annotated[str | None, option("--name", "of the job (default: the script's)")] = None
    time: Annotated[str | None, option("--time", "at most: 90m, 24h, 7d", "T")] = None
    last_checkpoint: Annotated[
        str | None, option("--last-checkpoint", "to write a node's part (default: by --state)", "T")
    ] = None


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """Options for the resources of a node."""

    cpus: Annotated[int | None, option("--cpus", "processors on each node", "N", min=1)] = None
    gpus: Annotated[int | None, option("--gpus", "GPUs on each node", "N", min=1)] = None
    memory: Annotated[
        str | None, option("--memory", "of the training on each node; the rest is added", "SIZE")
    ] = None
    state: Annotated[
        str | None, option("--state", "of one rank: parameters and optimizer state", "SIZE")
    ] = None


@dataclass(frozen=True, slots=True)
class ManifestJob:
    """A run as a scheduler sees it."""

    line: CommandLine
    flags: tuple[str, ...]
    """ftrun's flags as typed, and a longer --grace if the last checkpoint needs it."""
    script: tuple[str, ...]
    """The script and its arguments as typed; includes a `--` before the script."""
    profile: Profile
    name: str | None
    least: int
    most: int
    """Nodes that train; `least` is smaller only with --nnodes MIN:MAX."""
    spares: int
    ranks: int
    """Per node."""
    machine: MachineSpec
    grace_s: float
    """From the stop signal until ranks are killed; the last checkpoint may take as long again."""
    time_s: int | None

    @property
    def nodes(self) -> int:
        return self.most + self.spares

    @property
    def as_text(self) -> str:
        trains = f"{self.least} to {self.most}" if self.least < self.most else str(self.most)
        nodes = "1 node trains" if self.most == 1 else f"{trains} nodes train"
        spares = f", {count(self.spares, 'spare')}" if self.spares else ""
        each = count(self.ranks, "rank")
        return f"{nodes}{spares}; {each if self.most == 1 else f'{each} on each'}"

    @property
    def has_run_id(self) -> bool:
        line = self.line
        return line.own_value("run-id") is not None or line.torchrun_value("rdzv-id") is not None

    @property
    def ending_s(self) -> int:
        """Seconds from the stop signal until the run has ended, including the last checkpoint."""
        return math.ceil(2 * self.grace_s) + _SPARE_S

    @property
    def checkpoint_directory(self) -> str | None:
        return self.line.own_value("checkpoint-dir") or self.profile.checkpoint.directory

    @property
    def shared_directory(self) -> str | None:
        """The checkpoint directory; None if there are no checkpoints or if they go to a URL."""
        directory = self.checkpoint_directory
        return None if directory is None or is_url(directory) else directory

    @property
    def stem(self) -> str:
        return PurePath(self.line.script or "").stem

    @property
    def snapshot_bytes(self) -> int | None:
        """Memory of a node for snapshots; None if the size of the state was not given."""
        if self.machine.state is None:
            return None
        state = size_of(self.machine.state, "--state")
        if not self.profile.snapshot.enabled:
            return 0
        # Two slots for each rank, and parity as in docs/many-nodes.md.
        return math.ceil(2 * state * self.ranks * (1 + self._parity_part()))

    def memory_bytes(self, shm_bytes: int = 0) -> int | None:
        """Total memory of a node; None if the memory of the training was not given."""
        if self.machine.memory is None:
            return None
        own = size_of(self.machine.memory, "--memory")
        return own + (self.snapshot_bytes or 0) + shm_bytes + OWN_BYTES

    def memory_text(self, shm_bytes: int = 0) -> str:
        parts = [f"{(self.machine.memory or '').strip()} of the training"]
        if self.snapshot_bytes is None:
            parts.append("nothing for snapshots, as --state was not given")
        elif self.snapshot_bytes:
            parts.append(f"{quantity(self.snapshot_bytes)} of snapshots")
        parts += [f"{quantity(shm_bytes)} of /dev/shm"] if shm_bytes else []
        return ", ".join([*parts, f"{quantity(OWN_BYTES)} of ftrun"])

    def refuse(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            is_own = self.line.own_value(name) is not None
            if is_own or self.line.torchrun_value(name) is not None:
                raise UsageError(f"--{name} is {reason}. Leave it out")

    def _parity_part(self) -> float:
        """Parity memory of a node relative to its state: the largest M/K of all groups."""
        data, parity = self.profile.erasure.data_and_parity
        chosen = default_parity(self.most) if parity is None else parity
        names, is_ring = [str(node) for node in range(self.most)], self.profile.erasure.is_mirror
        groups = make_groups(names, data=data, parity=chosen, is_ring=is_ring)
        return max(one.parity / one.data if one.is_protected else 0.0 for one in groups)


def job_of(
    words: Sequence[str], machine: MachineSpec, options: JobOptions, *, needs_script: bool = True
) -> ManifestJob:
    """Derives the job; raises a UsageError for input that `ftrun` or a scheduler would refuse."""
    line = parse(words)
    if needs_script and line.script is None:
        raise UsageError(
            "no script is given. Write the words for ftrun after --, such as: "
            "ftrun manifest slurm -- --nnodes 4 --nproc-per-node 8 train.py"
        )
    for word in words:
        if any(0xD800 <= ord(letter) < 0xE000 or letter == "\0" for letter in word):
            raise UsageError(f"{word!r} is not UTF-8, and a text file cannot contain it")
    profile = resolve_options(line, variables={}).profile
    least, most, spares = num_nodes(line, {})
    ranks = _num_ranks(line, machine)
    grace_s = _grace_s(line, profile, _writing_s(options.last_checkpoint, machine, ranks))
    flags = tuple(words[: len(words) - len(line.tail)])
    if grace_s > profile.stop.grace_s:
        flags = ("--grace", str(math.ceil(grace_s)), *flags)
    time_s = None if options.time is None else seconds_of(options.time, "--time")
    job = ManifestJob(
        line, flags, tuple(line.tail), profile, options.name, least, most, spares, ranks, machine,
        grace_s=grace_s, time_s=time_s,
    )  # fmt: skip
    job.refuse(_OF_ONE_NODE, "for one node, and the same line is run on all nodes")
    if (line.torchrun_value("rdzv-backend") or "") in OUR_BACKENDS:
        job.refuse(_WHERE_THEY_MEET, "set by the scheduler that starts the nodes")
    return job


def quantity(num_bytes: int) -> str:
    """Formats a size as Kubernetes does, rounded up: `12Gi`, `1500Mi`."""
    mib = -(-num_bytes // MIB)
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"


def _num_ranks(line: CommandLine, machine: MachineSpec) -> int:
    check_num_ranks(line, {})
    text = line.torchrun_value("nproc-per-node") or "1"
    if text.isdecimal():
        return int(text)
    known = {"gpu": ("--gpus", machine.gpus), "cpu": ("--cpus", machine.cpus)}
    known["auto"] = known["xpu"] = known["gpu"]
    flag, count = known[text]
    if not count:
        raise UsageError(
            f"--nproc-per-node {text} is known only on the node. Give the number of its devices "
            f"with {flag} N before --, or give --nproc-per-node a number"
        )
    return count


def _writing_s(given: str | None, machine: MachineSpec, ranks: int) -> float:
    """Seconds in which a node writes its part of a checkpoint; 0 if unknown."""
    if given is not None:
        return float(seconds_of(given, "--last-checkpoint"))
    state = size_of(machine.state, "--state") if machine.state is not None else 0
    return state * ranks / _WRITE_BYTES_PER_S


def _grace_s(line: CommandLine, profile: Profile, writing_s: float) -> float:
    """Returns the run's grace, lengthened for a slow checkpoint unless --grace is given."""
    given = line.own_value("grace")
    if given is not None and profile.stop.grace_s < writing_s:
        raise UsageError(
            f"--grace {given} gives the last checkpoint {given} s, and it takes "
            f"{math.ceil(writing_s)} s. Give a longer --grace, or say how long it takes, with "
            "--last-checkpoint"
        )
    return max(profile.stop.grace_s, float(math.ceil(writing_s)))
